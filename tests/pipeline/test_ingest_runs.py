"""Runs of ingest: every line once, though runs are killed at any step or concurrent, and segments late or replaced."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pipeline.lake_folders import DAY, count_records, ingest, reasons, table_rows, verdict_line, write_segment
from rota.object_store import FolderStore, ObjectInfo, open_store
from rota.pipeline.ingest import batch
from rota.pipeline.lake.data_files import TableSpec
from rota.pipeline.lake.runs import PlannedSegment
from rota.pipeline.lake.table import Table
from rota.pipeline.lake.tables import TABLES, Lake

STEPS = [
    f"{when} {step}"
    for step in ("_rota/runs", "lake/verdict", "lake/quarantine", "lake/files", "_rota/snapshots")
    for when in ("before", "after")
]


NOTHING_INGESTED = pa.table({"key": pa.array([], pa.string()), "etag": pa.array([], pa.string())})


class KilledError(Exception):
    """Ends an ingest at a step, as the kernel would end its process."""


def end_at(killed_step: str) -> batch.AtStep:
    def at_step(step: str) -> None:
        if step == killed_step:
            raise KilledError

    return at_step


def test_ingest_takes_only_new_segments_and_does_not_repeat_lines_of_earlier_runs(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), verdict_line(2))
    first = ingest(spark, tmp_path)
    assert (first.runs, first.segments, first.rows["verdict"], first.snapshot.number) == (1, 1, 2, 1)
    unchanged = ingest(spark, tmp_path)
    assert (unchanged.runs, unchanged.segments, unchanged.snapshot) == (0, 0, first.snapshot)
    assert not any(unchanged.rows.values())
    write_segment(tmp_path, "09-a.jsonl.gz", verdict_line(3, 9))
    write_segment(tmp_path, "08-c.jsonl.gz", verdict_line(2))  # a copy
    second = ingest(spark, tmp_path)
    assert (second.segments, second.rows["verdict"]) == (2, 1)
    assert reasons(tmp_path) == ["R1", "R2", "R3"]
    assert count_records(tmp_path, "verdict", snapshot=1) == 2, "a snapshot never changes"


def test_ingest_takes_late_segments_of_any_age_once(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path, "12-a.jsonl.gz", verdict_line(1, 12))
    ingest(spark, tmp_path)
    old_line = verdict_line(2).replace(b"2026-11-21", b"2024-02-29")
    write_segment(tmp_path, "08-b.jsonl.gz", old_line, day="date=2024-02-29")
    write_segment(tmp_path, "08-b.jsonl.gz", verdict_line(3))
    assert ingest(spark, tmp_path).rows["verdict"] == 2
    write_segment(tmp_path, "09-copy.jsonl.gz", old_line, verdict_line(3), day="date=2024-02-29")
    assert ingest(spark, tmp_path).rows["verdict"] == 0
    assert reasons(tmp_path) == ["R1", "R2", "R3"]


def test_ingest_reads_a_replaced_segment_again_and_counts_its_lines_once(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), b"torn\n")
    ingest(spark, tmp_path)
    path = write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), b"torn\n", verdict_line(2))
    os.utime(path, (1, 1))
    assert {kind: rows for kind, rows in ingest(spark, tmp_path).rows.items() if rows} == {"verdict": 1}
    assert reasons(tmp_path) == ["R1", "R2"]
    assert len(table_rows(tmp_path, "files")) == 2


@pytest.mark.parametrize("step", STEPS)
def test_ingest_killed_at_any_step_leaves_readers_at_the_older_snapshot_and_its_next_run_repeats_nothing(
    spark: SparkSession, tmp_path: Path, step: str
) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    ingest(spark, tmp_path)
    write_segment(tmp_path, "08-b.jsonl.gz", verdict_line(1), verdict_line(2), b"torn\n")
    with pytest.raises(KilledError):
        ingest(spark, tmp_path, end_at(step))
    assert Lake(str(tmp_path)).snapshot().number == (2 if step == "after _rota/snapshots" else 1)
    assert reasons(tmp_path) == (["R1", "R2"] if step == "after _rota/snapshots" else ["R1"])
    # This segment is not in the plan of the killed run.
    write_segment(tmp_path, "08-c.jsonl.gz", verdict_line(2), verdict_line(3))
    ingest(spark, tmp_path)
    assert reasons(tmp_path) == ["R1", "R2", "R3"]
    assert [row["line"] for row in table_rows(tmp_path, "quarantine")] == ["torn"]
    assert sorted(str(row["key"]) for row in table_rows(tmp_path, "files")) == [
        f"{DAY}/08-{name}.jsonl.gz" for name in "abc"
    ]


def test_ingest_of_two_concurrent_processes_takes_each_line_once(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    ingest(spark, tmp_path)
    write_segment(tmp_path, "08-b.jsonl.gz", verdict_line(1), verdict_line(2), b"torn\n")
    both_planned = Barrier(2)

    def at_step(step: str) -> None:
        if step == "before lake/verdict":
            both_planned.wait(300)

    with ThreadPoolExecutor(2) as pool:
        summaries = list(pool.map(lambda _: ingest(spark, tmp_path, at_step), range(2)))
    assert [summary.snapshot.run for summary in summaries] == [2, 2]
    assert sum(summary.rows["verdict"] for summary in summaries) == 1
    assert reasons(tmp_path) == ["R1", "R2"]
    assert len(table_rows(tmp_path, "quarantine")) == 1
    assert len(table_rows(tmp_path, "files")) == 2


def test_ingest_that_gets_the_plan_of_another_process_publishes_the_rows_of_that_process(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    ingest(spark, tmp_path)
    write_segment(tmp_path, "08-b.jsonl.gz", verdict_line(2))

    def be_overtaken(step: str) -> None:
        if step == "before _rota/runs" and not (tmp_path / "_rota/runs/2.json").exists():
            with pytest.raises(KilledError):
                ingest(spark, tmp_path, end_at("after lake/files"))

    assert ingest(spark, tmp_path, be_overtaken).snapshot.run == 2
    assert reasons(tmp_path) == ["R1", "R2"]
    assert ingest(spark, tmp_path).segments == 0


def test_ingest_refuses_a_lake_whose_runs_and_snapshots_are_older_than_its_tables(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    with pytest.raises(KilledError):
        ingest(spark, tmp_path, end_at("after lake/verdict"))
    shutil.move(tmp_path / "_rota/runs", tmp_path / "runs")
    write_segment(tmp_path, "09-a.jsonl.gz", verdict_line(2, 9))
    refusal = "lake/verdict already have rows of run 1 or a later one, .*restore _rota, or recreate the lake"
    with pytest.raises(ValueError, match=refusal):
        ingest(spark, tmp_path)
    shutil.move(tmp_path / "runs", tmp_path / "_rota/runs")
    assert ingest(spark, tmp_path).runs == 2
    shutil.rmtree(tmp_path / "_rota")
    with pytest.raises(ValueError, match=r"lake/verdict, lake/files already have rows of run 1"):
        ingest(spark, tmp_path)


@pytest.mark.parametrize("lost_commits", [1, 2])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_ingest_refuses_a_table_whose_log_has_lost_commits_of_the_snapshot(
    spark: SparkSession, tmp_path: Path, *, lost_commits: int, is_repeated: bool
) -> None:
    for hour in (8, 9):
        write_segment(tmp_path, f"{hour:02}-a.jsonl.gz", verdict_line(hour, hour))
        ingest(spark, tmp_path)
    write_segment(tmp_path, "10-a.jsonl.gz", verdict_line(10, 10))
    if is_repeated:
        with pytest.raises(KilledError):
            ingest(spark, tmp_path, end_at("after _rota/runs"))
    for commit in sorted((tmp_path / "lake/verdict/_delta_log").glob("*.json"))[-lost_commits:]:
        commit.unlink()
    with pytest.raises(ValueError, match=r"lake/verdict lacks version 1 of snapshot 2: .*; restore lake/verdict/_del"):
        ingest(spark, tmp_path)
    assert Lake(str(tmp_path)).snapshot().number == 2


def test_ingest_of_another_journal_waits_for_the_unfinished_run_of_the_first(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name, number in (("x", 1), ("y", 2)):
        write_segment(tmp_path / name, "08-a.jsonl.gz", verdict_line(number))
    lake = Lake(str(tmp_path))
    first = open_store(str(tmp_path / "x/journal"))
    second = open_store(str(tmp_path / "y/journal"))
    with pytest.raises(KilledError):
        batch.ingest_journal(lambda: spark, lake, first, end_at("after lake/verdict"))
    with pytest.raises(ValueError, match=r"run 1 of the journal .*/x/journal is unfinished; ingest that one first"):
        batch.ingest_journal(lambda: spark, lake, second)
    assert lake.snapshots.numbers() == []
    for journal in (first, second, first):
        batch.ingest_journal(lambda: spark, lake, journal)
    assert reasons(tmp_path) == ["R1", "R2"]


class PhantomJournal(FolderStore):
    """A journal that lists a segment that cannot be read."""

    def list_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield ObjectInfo(f"{DAY}/07-a.jsonl.gz", 9, "e1", datetime.now(UTC))
        yield from super().list_objects(prefix)


def test_ingest_of_a_segment_that_is_listed_but_cannot_be_read_ends(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    journal = PhantomJournal(tmp_path / "journal")
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    assert batch.ingest_journal(lambda: spark, lake, journal).runs == 1
    with pytest.raises(ValueError, match=r"has none of the segments of run 2, such as date=.*/07-a.*restore them"):
        batch.ingest_journal(lambda: spark, lake, journal)
    write_segment(tmp_path, "09-a.jsonl.gz", verdict_line(2, 9))
    lake.store.delete("_rota/runs/2.json")
    assert batch.ingest_journal(lambda: spark, lake, journal).snapshot.run == 2
    assert reasons(tmp_path) == ["R1", "R2"]


def test_ingest_adds_missing_columns_to_the_tables_that_it_does_not_write(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    lake = Lake(str(tmp_path))
    rollup = TABLES["marts/rollup"]
    older = StructType([column for column in rollup.schema.fields if column.name != "minutes_seen"])
    row = spark.createDataFrame([(None,) * len(older)], older)
    Table(lake.store, TableSpec(rollup.name, older)).replace(row, None, base=None)
    rows = row.withColumn("minutes_seen", F.lit(1.0))
    with pytest.raises(ValueError, match="lacks minutes_seen; `rota pipeline ingest` adds missing columns"):
        lake.table(rollup.name).replace(rows, None, base=None)
    ingest(spark, tmp_path)
    assert lake.table(rollup.name).replace(rows, None, base=None).rows == 1


@pytest.mark.parametrize("step", ["after _rota/runs", "after lake/verdict"])
def test_ingest_of_a_segment_that_is_removed_before_it_is_read_takes_it_if_it_comes_back(
    spark: SparkSession, tmp_path: Path, step: str
) -> None:
    path = write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    write_segment(tmp_path, "09-a.jsonl.gz", verdict_line(2, 9))
    hidden = path.with_name(".08-a")
    with pytest.raises(KilledError):
        ingest(spark, tmp_path, end_at(step))
    path.rename(hidden)
    assert ingest(spark, tmp_path).rows["verdict"] == (0 if "verdict" in step else 1)
    [rejected] = table_rows(tmp_path, "quarantine")
    assert (rejected["file"], rejected["line"]) == (f"{DAY}/08-a.jsonl.gz", "")
    hidden.rename(path)
    ingest(spark, tmp_path)
    assert reasons(tmp_path) == ["R1", "R2"]


def test_ingest_divides_many_segments_into_runs_of_limited_size(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_RUN_SEGMENTS", 2)
    for hour in (8, 9, 10):
        write_segment(tmp_path, f"{hour:02}-a.jsonl.gz", verdict_line(hour, hour))
    summary = ingest(spark, tmp_path)
    assert (summary.runs, summary.segments, summary.snapshot.number) == (2, 3, 2)
    assert len(reasons(tmp_path)) == 3


def test_ingest_limits_the_bytes_of_a_run_but_takes_at_least_one_segment(tmp_path: Path) -> None:
    for name in "abc":
        write_segment(tmp_path, f"08-{name}.jsonl.gz")
    [first, *_] = segments = batch.find_new_segments(open_store(str(tmp_path / "journal")), NOTHING_INGESTED)
    huge = [PlannedSegment(segment.key, batch.MAX_RUN_BYTES, segment.etag) for segment in segments]
    assert batch.limit_run(huge) == huge[:1]
    assert batch.limit_run([first, *huge]) == [first]
    assert batch.limit_run(segments) == segments


def test_ingest_by_tasks_of_spark_takes_lines_that_several_tasks_have_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "SMALL_RUN_BYTES", 0)
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), verdict_line(2), b"torn\n")
    write_segment(tmp_path, "08-b.jsonl.gz", verdict_line(2), verdict_line(3), b"torn\n")
    summary = ingest(spark, tmp_path)
    assert (summary.rows["verdict"], summary.rows["quarantine"]) == (3, 1)
    assert reasons(tmp_path) == ["R1", "R2", "R3"]
    assert [row["lines"] for row in table_rows(tmp_path, "files")] == [3, 3]
    write_segment(tmp_path, "08-c.jsonl.gz", verdict_line(3), verdict_line(4), b"torn\n")
    write_segment(tmp_path, "08-d.jsonl.gz", verdict_line(4), verdict_line(5), b"torn\n")
    assert ingest(spark, tmp_path).rows["verdict"] == 2
    assert reasons(tmp_path) == ["R1", "R2", "R3", "R4", "R5"]
    assert len(table_rows(tmp_path, "quarantine")) == 1


def start_no_spark() -> SparkSession:
    raise AssertionError("a small run needs no Spark")


def test_ingest_of_few_segments_needs_no_spark_though_they_have_ingested_lines(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    journal = open_store(str(tmp_path / "journal"))
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), b"torn\n")
    write_segment(tmp_path, "08-b.jsonl.gz", verdict_line(1), verdict_line(2), b"torn\n")
    assert batch.ingest_journal(start_no_spark, lake, journal).rows["verdict"] == 2
    write_segment(tmp_path, "08-c.jsonl.gz", verdict_line(2), verdict_line(3, group="shop/carts"), b"torn\n")
    rows = batch.ingest_journal(start_no_spark, lake, journal).rows
    assert (rows["verdict"], rows["quarantine"]) == (1, 0)
    assert reasons(tmp_path) == ["R1", "R2", "R3"]
    assert len(table_rows(tmp_path, "quarantine")) == 1


@pytest.mark.parametrize("small_append_rows", [0, 10])
def test_ingest_compares_rows_with_those_of_the_table_by_spark_or_without(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_append_rows: int
) -> None:
    monkeypatch.setattr(batch, "SMALL_APPEND_ROWS", small_append_rows)
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), verdict_line(2), verdict_line(4))
    ingest(spark, tmp_path)
    write_segment(tmp_path, "08-b.jsonl.gz", verdict_line(2), verdict_line(3), verdict_line(4))
    assert ingest(spark, tmp_path).rows["verdict"] == 1
    assert reasons(tmp_path) == ["R1", "R2", "R3", "R4"]


def test_ingest_reads_a_segment_once_so_that_a_changing_one_has_consistent_rows_and_counts(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))

    def replace_segment(step: str) -> None:
        if step == "before lake/verdict":
            write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), verdict_line(2), verdict_line(3))
            os.utime(path, (1, 1))

    summary = ingest(spark, tmp_path, replace_segment)
    assert (summary.runs, summary.rows["verdict"]) == (2, 3)
    assert reasons(tmp_path) == ["R1", "R2", "R3"]
    assert sorted((row["run"], row["lines"]) for row in table_rows(tmp_path, "files")) == [(1, 1), (2, 3)]


def test_ingest_takes_records_of_another_day_once_if_their_segment_was_missing_after_a_killed_run(
    spark: SparkSession, tmp_path: Path
) -> None:
    by_wrong_clock = verdict_line(1).replace(b"2026-11-21", b"2027-11-21")
    path = write_segment(tmp_path, "08-a.jsonl.gz", by_wrong_clock)
    write_segment(tmp_path, "09-a.jsonl.gz", verdict_line(2, 9))
    with pytest.raises(KilledError):
        ingest(spark, tmp_path, end_at("after lake/verdict"))
    hidden = path.rename(path.with_name(".08-a"))
    ingest(spark, tmp_path)
    hidden.rename(path)
    ingest(spark, tmp_path)
    assert reasons(tmp_path) == ["R1", "R2"]


def test_ingest_of_a_missing_segment_of_the_last_day_of_all_is_no_error(spark: SparkSession, tmp_path: Path) -> None:
    path = write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), day="date=9999-12-31")
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(2))
    with pytest.raises(KilledError):
        ingest(spark, tmp_path, end_at("after _rota/runs"))
    path.unlink()
    assert ingest(spark, tmp_path).rows["verdict"] == 1
    assert ingest(spark, tmp_path).segments == 0
