"""A group's metrics of an hour in which the value of each metric is known."""

import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from pipeline.group_lines import gaps_in, group_records, samples_in
from pipeline.journal_lines import handover_line, iso_time, owners_line, plan_line, time_at
from pipeline.lake_folders import ingest, write_segment
from rota.cli import main
from rota.pipeline.history.measures import roll_up
from rota.pipeline.history.samples import Places
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


def rows_of(lines: list[Line]) -> dict[datetime, dict[str, Any]]:
    """Return the rows of one group by hour."""
    places = Places()
    samples = samples_in(lines, places)
    return {
        hour: measures.to_row() for hour, measures in roll_up(group_records(lines), gaps_in(lines), [samples], places)
    }


def test_rollup_of_an_hour_has_each_expected_metric() -> None:
    row = rows_of(HOUR)[time_at(0)]
    assert row.pop("imbalance") == pytest.approx((2 * 900 + 1 * 2700) / 3600)
    unknown = ("lag_p50", "lag_p99", "lag_max", "delay_p50", "delay_p99")
    assert {name: row.pop(name) for name in unknown} == dict.fromkeys(unknown)
    assert row == {
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


def test_rollup_counts_a_rebalance_once_though_two_leaders_recorded_its_end() -> None:
    lines = [rebalance_line(60, 1.0), rebalance_line(60, 3.0), rebalance_line(120, 2.0)]
    row = rows_of(lines)[time_at(0)]
    assert row["rebalances"] == {"MemberLost": 2}
    assert (row["rebalance_seconds_p50"], row["rebalance_seconds_p99"]) == (1.0, 2.0)


def test_rollup_marks_hours_with_missing_records_as_incomplete() -> None:
    assert {hour: row["complete"] for hour, row in rows_of(HOUR).items()} == {
        time_at(0): True,
        time_at(3600): False,
        time_at(7200): False,
    }


def test_rollup_marks_hours_that_a_gap_of_any_group_touches_as_incomplete() -> None:
    gap = {"schema": 1, "kind": "gap", "at": iso_time(3700), "writer": "rota-1", "since": iso_time(3500), "missing": 3}
    rows = rows_of([owners_line("g", 5, hour * 3600, m1="0") for hour in range(3)] + [gap])
    assert [row["complete"] for row in rows.values()] == [False, False, True]


def test_rollup_splits_a_period_without_an_owner_at_full_hours() -> None:
    lines = [owners_line("g", 5, 0, m1="", unowned="0-1"), owners_line("g", 5, 5400, m1="0-1")]
    assert [row["unowned_queue_seconds"] for row in rows_of(lines).values()] == [7200.0, 3600.0]


def offsets_line(seconds: float, lag: int, group: str = "g") -> Line:
    columns = {"ids": [0], "first": [0], "last": [1000 + lag], "committed": [1000]}
    return journal_record("offsets", group, iso_time(seconds), topics={"t": {"a": columns}}, verdicts={})


def test_rollup_percentiles_are_values_of_the_hour() -> None:
    lines = [owners_line("g", 5, 0, m1="0"), *(offsets_line(36 * number, number + 1) for number in range(100))]
    row = rows_of(lines)[time_at(0)]
    assert (row["lag_p50"], row["lag_p99"], row["lag_max"]) == (50, 99, 100)
    assert row["minutes_seen"] == pytest.approx(99 * 36 / 60)


def test_rollup_has_no_row_for_an_hour_without_records() -> None:
    assert list(rows_of([owners_line("g", 5, 0, m1="0"), owners_line("g", 5, 7200, m1="0")])) == [
        time_at(0),
        time_at(7200),
    ]


OPERATORS = re.compile(r"^[\s:|*+-]*(\w+) \(\d+\)$", re.MULTILINE)  # of the tree in a plan's description


def executed_operators(spark: SparkSession, *command: object) -> Counter[str]:
    """Return how often each operator is in the plans of all queries of a command.

    The plan of a frame that is kept in memory is part of the plan of each query that reads it.
    """
    store = spark._jsparkSession.sharedState().statusStore()
    earlier_count = store.executionsCount()
    result = CliRunner().invoke(main, ["pipeline", *map(str, command)])
    assert result.exit_code == 0, (result.stderr, result.exception)
    counts: Counter[str] = Counter()
    executions = store.executionsList()
    for index in range(earlier_count, executions.size()):
        tree, _, _ = executions.apply(index).physicalPlanDescription().partition("\n\n\n")
        counts.update(OPERATORS.findall(tree))
    return counts


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = tmp_path_factory.mktemp("budget") / "lake"
    content = b"".join(
        json.dumps(line).encode() + b"\n" for line in [*HOUR, *(offsets_line(60, 1), offsets_line(120, 1))]
    )
    write_segment(lake, "08-a.jsonl.gz", content)
    ingest(spark, lake)
    return lake


@pytest.mark.parametrize(
    ("command", "most_exchanges", "most_sorts"), [("rollup", 2, 2), ("timeline", 2, 4), ("run", 5, 6)]
)
def test_rollup_and_timeline_commands_shuffle_and_sort_rarely_and_use_no_window(
    spark: SparkSession, lake: Path, command: str, most_exchanges: int, most_sorts: int
) -> None:
    operators = executed_operators(spark, command, lake)
    assert operators["MapInArrow"] >= 1
    assert operators["Exchange"] <= most_exchanges
    assert operators["Sort"] <= most_sorts
    assert operators["Window"] == operators["Generate"] == 0
