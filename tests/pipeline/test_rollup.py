"""A group's metrics of an hour in which the value of each metric is known."""

from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from pipeline.frames import frames
from pipeline.journal_lines import handover_line, iso_time, local_time, owners_line, plan_line
from rota.pipeline.history.rollup import compute_rollup
from rota.records import journal_record

Line = dict[str, Any]


def membership_line(generation: int, seconds: float, **standings: str) -> Line:
    members = {name: {"uid": f"uid-{name}", "standing": standing} for name, standing in standings.items()}
    return journal_record("membership", "g", iso_time(seconds), generation=generation, members=members)


def rebalance_line(began: float, seconds: float) -> Line:
    fields = {"reason": "MemberLost", "outcome": "Forced", "moved": 1, "forced": 1, "seconds": seconds}
    return journal_record("rebalance", "g", iso_time(began + seconds), generation=6, began=iso_time(began), **fields)


def redelivered_line(seconds: float, messages: int) -> Line:
    members = {"from": "m1", "fromUid": "uid-m1", "to": "m2", "toUid": "uid-m2"}
    counts = {"cause": "crash", "messages": messages, "estimate": True, "queues": {"t": {"a": "0"}}}
    return journal_record("redelivered", "g", iso_time(seconds), **members, **counts)


HOUR = [
    owners_line("g", 5, 0, m1="0-1", m2=""),
    membership_line(6, 900, m1="Lost", m2="Ready"),
    plan_line("g", 6, 900),
    handover_line("g", 6, 900, "Force", **{"from": "m1", "to": "m2", "proof": "Lost", "state": "Owned"}),
    journal_record("obeyed", "g", iso_time(901), generation=6, member="m2", uid="uid-m2", queues={"t": {"a": "0"}}),
    rebalance_line(900, 1.0),
    rebalance_line(900, 1.0) | {"at": iso_time(902)},  # written by the next leader, too
    membership_line(7, 1800, m1="Ended", m2="Ready"),
    plan_line("g", 7, 1800),
    handover_line(
        "g", 7, 1800, "Drop", **{"from": "m1", "proof": "Ended", "state": "Owned", "queues": {"t": {"a": "1"}}}
    ),
    redelivered_line(1700, 5),
    redelivered_line(1800, 2),
    owners_line("g", 7, 3600, unowned="1", m2="0"),
    plan_line("g", 9, 7300),  # 8 is missing
]


@pytest.fixture(scope="module")
def rollup_rows(spark: SparkSession) -> list[Row]:
    return compute_rollup(frames(spark, HOUR)).orderBy("hour").collect()


def test_rollup_of_an_hour_has_each_expected_metric(rollup_rows: list[Row]) -> None:
    row = rollup_rows[0].asDict()
    assert row.pop("hour") == local_time(0)
    assert row.pop("imbalance") == pytest.approx((2 * 900 + 1 * 2700) / 3600)
    unknown = ("lag_p50", "lag_p99", "lag_max", "delay_p50", "delay_p99")
    assert {name: row.pop(name) for name in unknown} == dict.fromkeys(unknown)
    assert row == {
        "group": "g",
        "rebalances": {"MemberLost": 1},
        "rebalance_seconds_p50": 1.0,
        "rebalance_seconds_p99": 1.0,
        "moved_queues": 1,
        "forced_queues": 1,
        "handovers": 1,
        "handover_seconds_p50": 1.0,
        "handover_seconds_p99": 1.0,
        "unowned_queue_seconds": 1800.0,
        "contested_queue_seconds": 900.0,
        "redelivered": 7,
        "idle_member_hours": pytest.approx(900 / 3600),
        "verdict_minutes": {},
        "minutes_seen": 0.0,
        "complete": True,
    }


def test_rollup_marks_hours_with_missing_records_as_incomplete(rollup_rows: list[Row]) -> None:
    assert [(row["hour"], row["complete"]) for row in rollup_rows] == [
        (local_time(0), True),
        (local_time(3600), False),
        (local_time(7200), False),
    ]
