"""Tables of the history by Spark: the same rows as the fold of each group, by one shuffle."""

import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from pipeline.frames import frames, history_of, sample_files
from pipeline.group_lines import gaps_in, group_records, samples_in
from pipeline.journal_lines import Line
from pipeline.test_ownership import GAP, RECORDS_AROUND_GAP, planted_histories
from pipeline.test_rollup import HOUR, offsets_line
from rota.pipeline.common.schemas import INTERVALS, ROLLUP, VIOLATIONS
from rota.pipeline.history.audit import Audit, audit_group
from rota.pipeline.history.measures import roll_up
from rota.pipeline.history.reading.buckets import History
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
from rota.records import journal_record

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
    """The audit starts a day after the rollup."""
    since = datetime.fromisoformat(HOUR[0]["at"]).date()
    day_before = since - timedelta(days=1)
    earlier = [line | {"at": f"{day_before}T{line['at'].partition('T')[2]}"} for line in HOUR[:5]]
    history = history_of(spark, [*earlier, *lines], tmp_path)._replace(audited_since=since)
    rows = compute_history(history, list(HistoryReport)).persist()
    audited = [line for line in lines if line["at"] >= f"{since}"]
    assert len(audited) < len(lines)
    assert collect(select_rollup(rows)) == expected_rollup([*earlier, *lines])
    assert [collect(select_intervals(rows)), collect(select_violations(rows))] == expected_audit(audited)
    rows.unpersist()


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
