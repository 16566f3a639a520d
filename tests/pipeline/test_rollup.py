"""A group's hour in figures: one in which each figure is known."""

from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from pipeline.frames import frames
from pipeline.journal_lines import a_plan, a_whole, an_act, local, told
from rota.pipeline.history.rollup import compute_rollup
from rota.records import journal_record

Line = dict[str, Any]


def present(generation: int, seconds: float, **standings: str) -> Line:
    members = {name: {"uid": f"uid-{name}", "standing": standing} for name, standing in standings.items()}
    return journal_record("membership", "g", told(seconds), generation=generation, members=members)


def ended(began: float, seconds: float) -> Line:
    given = {"reason": "MemberLost", "outcome": "Forced", "moved": 1, "forced": 1, "seconds": seconds}
    return journal_record("rebalance", "g", told(began + seconds), generation=6, began=told(began), **given)


def came_again(seconds: float, messages: int) -> Line:
    members = {"from": "m1", "fromUid": "uid-m1", "to": "m2", "toUid": "uid-m2"}
    counted = {"cause": "crash", "messages": messages, "estimate": True, "queues": {"t": {"a": "0"}}}
    return journal_record("redelivered", "g", told(seconds), **members, **counted)


HOUR = [
    a_whole("g", 5, 0, m1="0-1", m2=""),
    present(6, 900, m1="Lost", m2="Ready"),
    a_plan("g", 6, 900),
    an_act("g", 6, 900, "Force", **{"from": "m1", "to": "m2", "proof": "Lost", "state": "Owned"}),
    journal_record("obeyed", "g", told(901), generation=6, member="m2", uid="uid-m2", queues={"t": {"a": "0"}}),
    ended(900, 1.0),
    ended(900, 1.0) | {"at": told(902)},  # told by the next leader, too
    present(7, 1800, m1="Ended", m2="Ready"),
    a_plan("g", 7, 1800),
    an_act("g", 7, 1800, "Drop", **{"from": "m1", "proof": "Ended", "state": "Owned", "queues": {"t": {"a": "1"}}}),
    came_again(1700, 5),
    came_again(1800, 2),
    a_whole("g", 7, 3600, unowned="1", m2="0"),
    a_plan("g", 9, 7300),  # 8 is missing
]


@pytest.fixture(scope="module")
def rolled(spark: SparkSession) -> list[Row]:
    return compute_rollup(frames(spark, HOUR)).orderBy("hour").collect()


def test_rollup_of_an_hour_has_each_expected_metric(rolled: list[Row]) -> None:
    row = rolled[0].asDict()
    assert row.pop("hour") == local(0)
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


def test_rollup_marks_hours_with_missing_records_as_incomplete(rolled: list[Row]) -> None:
    assert [(row["hour"], row["complete"]) for row in rolled] == [
        (local(0), True),
        (local(3600), False),
        (local(7200), False),
    ]
