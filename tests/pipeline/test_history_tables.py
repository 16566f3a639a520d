"""Tables of the history by Spark: the same rows as the fold of each group, by one shuffle."""

import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.frames import frames, history_of, sample_files
from pipeline.group_lines import gaps_in, group_records, samples_in
from pipeline.journal_lines import Line, handover_line, iso_time, owners_line, plan_line, time_at
from pipeline.test_ownership import GAP, RECORDS_AROUND_GAP, planted_histories
from pipeline.test_rollup import HOUR, offsets_line
from rota.pipeline.common.schemas import INTERVALS, ROLLUP, VIOLATIONS
from rota.pipeline.history.audit import Audit, audit_group
from rota.pipeline.history.measures import roll_up
from rota.pipeline.history.reading.buckets import History, read_task, shuffle_records
from rota.pipeline.history.result_rows import interval_row, violation_row
from rota.pipeline.history.samples import Places
from rota.pipeline.history.tables import (
    HistoryReport,
    compute_history,
    select_intervals,
    select_rollup,
    select_violations,
)
from rota.pipeline.lake.tables import OFFSET_BUCKETS
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.journaling_replay import JournalingReplay
from rota.records import OwnersRecord, journal_record

HOUR_SECONDS = 3600
MIDNIGHT = 16 * HOUR_SECONDS  # in seconds after 8:00
MAX_RECORDS_PER_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    """Return the lines of planted histories, of one with every measure, and of synthetic groups with samples."""
    lines: list[Any] = [*RECORDS_AROUND_GAP, GAP, *HOUR, *(offsets_line(60 * minute, minute) for minute in range(90))]
    for history in planted_histories():
        lines += history.lines
    for number in range(2):
        JournalingReplay(generate_history(number, 7, 1.0), lines.append).run()
    verdict = {"condition": "Ready", "status": "True", "reason": "Balanced", "message": ""}
    lines.append(journal_record("verdict", "silent", "2026-11-22T08:00:00Z", **verdict))
    return lines


@pytest.fixture(scope="module")
def history(spark: SparkSession, lines: list[Line], tmp_path_factory: pytest.TempPathFactory) -> History:
    return history_of(spark, lines, tmp_path_factory.mktemp("history"))


@pytest.fixture(params=["5", "10000"])
def small_batches(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[None]:
    """Bring a group's rows to Python in batches of so many."""
    default = str(spark.conf.get(MAX_RECORDS_PER_BATCH))
    spark.conf.set(MAX_RECORDS_PER_BATCH, request.param)
    yield
    spark.conf.set(MAX_RECORDS_PER_BATCH, default)


def lines_by_group(lines: list[Line]) -> dict[str, list[Line]]:
    grouped: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if "group" in line:
            grouped[line["group"]].append(line)
    return grouped


def audits(lines: list[Line]) -> dict[str, Audit]:
    records = {group: group_records(lines) for group, lines in lines_by_group(lines).items()}
    for group, of_group in lines_by_group(lines).items():
        records[group].add_state_times(samples_in(of_group, Places()).at)
    return {group: audit_group(of_group, gaps_in(lines)) for group, of_group in records.items()}


def collect(frame: DataFrame) -> list[dict[str, Any]]:
    """Return rows, with times in UTC."""
    return sorted((normalize(row) for row in frame.toArrow().to_pylist(maps_as_pydicts="strict")), key=str)


def normalize(value: Any) -> Any:
    match value:
        case dict():
            return {key: normalize(part) for key, part in sorted(value.items())}
        case list() | tuple():
            return [normalize(part) for part in value]
        case datetime():
            return value.astimezone(UTC)
        case str():
            return str(value)
        case _:
            return value


def expected_rollup(lines: list[Line]) -> list[dict[str, Any]]:
    expected: list[dict[str, Any]] = []
    for group, of_group in lines_by_group(lines).items():
        places = Places()
        samples = [samples_in(of_group, places)]
        hours = roll_up(group_records(of_group), gaps_in(lines), samples, places)
        expected += [{"group": group, "hour": hour} | measures.to_row() for hour, measures in hours]
    return sorted(map(normalize, expected), key=str)


def expected_audit(lines: list[Line]) -> list[list[dict[str, Any]]]:
    """Return the intervals and violations."""
    results = audits(lines)
    intervals = [interval_row(group, row) for group, result in results.items() for row in result.intervals]
    violations = [violation_row(group, row) for group, result in results.items() for row in result.violations]
    return [sorted(map(normalize, rows), key=str) for rows in (intervals, violations)]


@pytest.mark.parametrize("tasks", [None, 3 * OFFSET_BUCKETS])
@pytest.mark.usefixtures("small_batches")
def test_rollup_by_spark_has_the_rows_of_each_groups_fold(
    history: History, lines: list[Line], tasks: int | None
) -> None:
    rollup = select_rollup(compute_history(history, [HistoryReport.ROLLUP], tasks))
    assert rollup.schema == ROLLUP
    assert collect(rollup) == expected_rollup(lines)


@pytest.mark.usefixtures("small_batches")
def test_timeline_by_spark_has_the_rows_of_each_groups_fold(history: History, lines: list[Line]) -> None:
    rows = compute_history(history, [HistoryReport.AUDIT]).persist()
    assert select_intervals(rows).schema == INTERVALS
    assert select_violations(rows).schema == VIOLATIONS
    assert [collect(select_intervals(rows)), collect(select_violations(rows))] == expected_audit(lines)
    assert select_rollup(rows).isEmpty()
    rows.unpersist()


def test_pipeline_run_has_the_rows_of_rollup_and_timeline_by_one_pass(
    spark: SparkSession, lines: list[Line], tmp_path: Path
) -> None:
    since = datetime.fromisoformat(HOUR[0]["at"]).date()
    day_before = since - timedelta(days=1)
    earlier = [line | {"at": f"{day_before}T{line['at'].partition('T')[2]}"} for line in HOUR[:5]]
    history = history_of(spark, [*earlier, *lines], tmp_path)._replace(audited_since=since)
    rows = compute_history(history, list(HistoryReport)).persist()
    audited = [line for line in lines if line["at"] >= f"{since}"]
    assert len(audited) < len(lines)
    whole = expected_rollup([*earlier, *lines])
    assert collect(select_rollup(rows)) == [row for row in whole if row["hour"].date() >= since]
    assert [collect(select_intervals(rows)), collect(select_violations(rows))] == expected_audit(audited)
    rows.unpersist()


def state_at_midnight() -> dict[str, list[Line]]:
    """Return records, from 20 hours before midnight on, of groups whose state at midnight has an earlier cause."""
    began = MIDNIGHT - 20 * HOUR_SECONDS
    parties = {"from": "m1", "to": "m2"}
    releasing = {"releasing": [{"from": "m1", "fromUid": "uid-m1", "queues": {"t": {"a": "0"}}, "to": "m2"}]}
    obeyed = {"generation": 7, "member": "m2", "uid": "uid-m2", "queues": {"t": {"a": "0"}}}
    revoked = [
        handover_line("revoked", 6, began + 60, "Revoke", **parties, state="Owned", proof="None"),
        *(line | releasing for line in hourly_owners("revoked", 1, m1="1", m2="")),
        plan_line("revoked", 7, MIDNIGHT + 600),
        handover_line("revoked", 7, MIDNIGHT + 600, "Grant", **parties),
        journal_record("obeyed", "revoked", iso_time(MIDNIGHT + 601), **obeyed),
    ]
    members = {"m1": {"uid": "uid-m1", "standing": "Lost"}, "m2": {"uid": "uid-m2", "standing": "Ready"}}
    ended = members | {"m1": {"uid": "uid-m1", "standing": "Ended"}}
    contested = [
        journal_record("membership", "contested", iso_time(began + 60), generation=6, members=members),
        handover_line("contested", 6, began + 60, "Force", **parties, proof="Lost", state="Owned"),
        *hourly_owners("contested", 1, m1="1", m2="0"),
        journal_record("membership", "contested", iso_time(MIDNIGHT + 1200), generation=7, members=ended),
        plan_line("contested", 7, MIDNIGHT + 1200),
    ]
    unowned = [
        handover_line("unowned", 6, began + 60, "Drop", **{"from": "m1", "proof": "Ended", "state": "Owned"}),
        *hourly_owners("unowned", 1, unowned="0", m1="1"),
        plan_line("unowned", 7, MIDNIGHT + 1800),
        handover_line("unowned", 7, MIDNIGHT + 1800, "Grant", to="m2", state="Free"),
    ]
    # The operator was down from eight hours before midnight until an hour after it, and generation 7 is missing.
    down = [owners_line("down", 8, MIDNIGHT + hour * HOUR_SECONDS, m1="0-2", m2="") for hour in (-10, -9, -8, 1, 2)]
    groups = {"revoked": revoked, "contested": contested, "unowned": unowned, "down": down}
    for group, lines in groups.items():
        lines[:0] = [owners_line(group, 5, began, m1="0-1", m2=""), plan_line(group, 6, began + 60)]
        lines += [offsets_line(MIDNIGHT + 60 * minute, 500, group) for minute in range(-180, 90)]
    return groups


def hourly_owners(group: str, first_hour: int, **owned: str) -> list[Line]:
    """Return `owners` records from `first_hour` hours after the first record to midnight."""
    return [owners_line(group, 6, MIDNIGHT - hour * HOUR_SECONDS, **owned) for hour in range(20 - first_hour, -1, -1)]


def test_rollup_from_midnight_on_has_the_rows_of_the_whole_history(spark: SparkSession, tmp_path: Path) -> None:
    groups = state_at_midnight()
    lines = list(chain.from_iterable(groups.values()))
    midnight = time_at(MIDNIGHT)
    history = history_of(spark, lines, tmp_path)._replace(audited_since=midnight.date())
    rows = collect(select_rollup(compute_history(history, [HistoryReport.ROLLUP])))
    assert rows == [row for row in expected_rollup(lines) if row["hour"] >= midnight]
    first_hours = {row["group"]: row for row in rows if row["hour"] == midnight}
    assert first_hours["revoked"]["handover_seconds_p50"] == 20 * HOUR_SECONDS + 541
    assert first_hours["contested"]["contested_queue_seconds"] == 1200
    assert first_hours["unowned"]["unowned_queue_seconds"] == 1800
    assert first_hours["down"]["imbalance"] == 2
    assert first_hours["down"]["complete"]


def test_rollup_from_midnight_on_reads_two_owners_records_and_no_samples_of_each_group_before_the_last_hour(
    spark: SparkSession, tmp_path: Path
) -> None:
    history = history_of(spark, chain.from_iterable(state_at_midnight().values()), tmp_path)
    since = time_at(MIDNIGHT - HOUR_SECONDS)
    counts: dict[str, tuple[int, int]] = {}
    for task in range(OFFSET_BUCKETS):
        records = shuffle_records(history, ["owners"]).where(F.spark_partition_id() == task).toArrow().to_batches()
        for rows in read_task(iter(records), history.sample_files, since):
            times = [record.at for record in rows.records.of_kind(OwnersRecord)]
            samples = list(rows.samples(Places()))
            assert min(len(part.at) for part in samples) > 0
            counts[rows.group] = (sum(at <= since for at in times), sum(len(part.at) for part in samples))
    assert counts == dict.fromkeys(state_at_midnight(), (2, 150))


@pytest.mark.parametrize("reports", [[HistoryReport.ROLLUP], [HistoryReport.AUDIT], list(HistoryReport)], ids=",".join)
def test_rollup_and_timeline_take_one_shuffle_and_no_window(history: History, reports: list[HistoryReport]) -> None:
    plan = compute_history(history, reports)._jdf.queryExecution().executedPlan().toString()
    assert len(re.findall(r"\bExchange\b", plan)) == 1
    assert len(re.findall(r"\bSort\b", plan)) == 1
    assert re.findall(r"\b(?:Window|\w*Join|Generate|\w*Aggregate)\b", plan) == []
    assert "topics" not in plan, "samples are not read by Spark"


def test_rollup_of_each_bucket_is_a_task_of_its_own_also_by_adaptive_plans(
    spark: SparkSession, history: History, lines: list[Line]
) -> None:
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        assert collect(select_rollup(compute_history(history, [HistoryReport.ROLLUP]))) == expected_rollup(lines)
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")


def test_rollup_and_timeline_of_an_empty_journal_are_empty(spark: SparkSession, tmp_path: Path) -> None:
    history = History(frames(spark, []), sample_files(tmp_path))
    assert compute_history(history, list(HistoryReport)).collect() == []
