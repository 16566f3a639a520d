"""`rota pipeline maintain`: compaction, retention, expired snapshots and files, beside readers and ingests."""

import io
import json
import os
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline.lake_folders import ingest, reasons, table_rows, verdict_line, write_segment
from rota.cli import main
from rota.object_store import open_store
from rota.pipeline.lake.data_files import DataFile
from rota.pipeline.lake.delta_log import DeltaLog, FileChanges, list_files
from rota.pipeline.lake.snapshots import LakeSnapshot, SnapshotStore
from rota.pipeline.lake.table import Table
from rota.pipeline.lake.tables import TABLES, Lake
from rota.pipeline.lake.upkeep import compaction
from rota.pipeline.lake.upkeep.maintenance import Maintenance, MaintenanceSummary, check_clock

VERDICT = "lake/verdict"
SPEC = TABLES[VERDICT]
NOW = datetime.now(UTC)
TODAY = NOW.date()
END_OF_TODAY = datetime.combine(TODAY, time.max, UTC)  # these tests may run past midnight
YESTERDAY = TODAY - timedelta(days=1)
LONG_AGO = TODAY - timedelta(days=30)
SEGMENT_DAY = date(2026, 11, 21)  # of lake_folders


def log_of(lake: Lake) -> DeltaLog:
    return DeltaLog(lake.store, VERDICT, SPEC.schema, SPEC.partitions)


def append(lake: Lake, day: date, *reasons: str, run: int | None = None) -> int:
    """Append rows of a day to the table of verdicts, without Spark, and return its version."""
    rows = [
        {"group": "shop/orders", "at": datetime(day.year, day.month, day.day, tzinfo=UTC), "reason": r} for r in reasons
    ]
    schema = to_arrow_schema(SPEC.schema, timezone="UTC")
    table = pa.Table.from_pylist([dict.fromkeys(schema.names) | row for row in rows], schema=schema)
    content = io.BytesIO()
    pq.write_table(table.drop_columns(["date"]), content)
    path = f"date={day.isoformat()}/run-{secrets.token_hex(6)}.parquet"
    assert lake.store.create(f"{VERDICT}/{path}", content.getvalue())
    file = DataFile(path, len(content.getvalue()), len(rows), {"date": day.isoformat()})
    version = log_of(lake).commit(lambda _: FileChanges([file]), run).version
    assert version is not None
    return version


def publish(lake: Lake, version: int, run: int | None = None) -> int:
    return lake.snapshots.publish(lake.snapshots.latest(), {VERDICT: version}, run).number


def maintain(
    lake: Lake, *, after_days: int = 0, keep_days: int | None = None, snapshot_days: int = 7
) -> MaintenanceSummary:
    """Maintain a lake as if some days had passed."""
    journal = open_store(f"{lake.uri}/journal")
    now = min(datetime.now(UTC), END_OF_TODAY) + timedelta(days=after_days)
    return Maintenance(lake, journal, now, keep_days=keep_days, snapshot_days=snapshot_days).run()


def stored_reasons(lake: Lake, snapshot: int | None = None) -> list[str]:
    rows = lake.table(VERDICT).to_arrow(lake.snapshot(snapshot).version(VERDICT), ["reason"])
    return sorted(rows["reason"].to_pylist())


def files_by_day(lake: Lake) -> Mapping[str | None, int]:
    counts: dict[str | None, int] = {}
    for file in list_files(log_of(lake).load()):
        counts[file.date] = counts.get(file.date, 0) + 1
    return counts


class KilledError(Exception):
    """Ends a maintenance, as the kernel would end its process."""


def kill(*_: object) -> None:
    raise KilledError


@pytest.fixture
def lake(lake_uri: str) -> Lake:
    """Return a lake with three snapshots: small files of yesterday, of today, and of long ago."""
    lake = Lake(lake_uri)
    for day in (YESTERDAY, LONG_AGO):
        append(lake, day, f"{day} 1")
        append(lake, day, f"{day} 2")
    publish(lake, append(lake, TODAY, "today 1"))
    publish(lake, append(lake, TODAY, "today 2"))
    return lake


ALL = sorted([f"{YESTERDAY} 1", f"{YESTERDAY} 2", f"{LONG_AGO} 1", f"{LONG_AGO} 2", "today 1", "today 2"])


def test_lake_maintenance_joins_small_files_of_past_days_and_keeps_all_rows(lake: Lake) -> None:
    summary = maintain(lake)
    assert files_by_day(lake) == {str(YESTERDAY): 1, str(LONG_AGO): 1, str(TODAY): 2}
    assert stored_reasons(lake) == ALL
    assert (summary.snapshot, summary.tables[VERDICT].compacted, summary.skipped) == (3, True, [])
    assert not maintain(lake).tables[VERDICT].is_changed
    assert lake.snapshots.numbers() == [1, 2, 3]


def test_lake_maintenance_beside_another_one_has_every_row_once(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    load = DeltaLog.load

    def load_and_let_another_compact(log: DeltaLog, version: int | None = None) -> Any:
        table = load(log, version)
        monkeypatch.setattr(DeltaLog, "load", load)
        assert lake.table(VERDICT).compact(TODAY).is_changed
        return table

    monkeypatch.setattr(DeltaLog, "load", load_and_let_another_compact)
    assert not lake.table(VERDICT).compact(TODAY).is_changed
    rows = lake.table(VERDICT).to_arrow(lake.table(VERDICT).version(), ["reason"])
    assert sorted(rows["reason"].to_pylist()) == ALL


def test_lake_maintenance_joins_small_files_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [9, 3, 2, 4, 4, 1]
    files = [DataFile(f"{number}", size, 1, {"date": str(YESTERDAY)}) for number, size in enumerate(sizes)]
    files += [DataFile("today", 1, 1, {"date": str(TODAY)}), DataFile("alone", 1, 1, {"date": str(LONG_AGO)})]
    monkeypatch.setattr(compaction, "SMALL_FILE_BYTES", 9)
    monkeypatch.setattr(compaction, "MAX_JOINED_BYTES", 6)
    groups = compaction.select_files(files, TODAY)
    assert [[file.path for file in group] for group in groups] == [["1", "2"], ["4", "5"]]


def test_lake_maintenance_names_a_damaged_and_a_missing_file(lake: Lake) -> None:
    file = next(file for file in list_files(log_of(lake).load()) if file.date == str(YESTERDAY))
    key = f"{VERDICT}/{file.path}"
    whole = lake.store.read(key)
    for content in (whole[:100], whole[:4] + b"\xff" * 40 + whole[44:]):
        lake.store.delete(key)
        lake.store.create(key, content)
        with pytest.raises(ValueError, match=rf"{lake.uri}/{key} is damaged; restore it, "):
            maintain(lake)
    lake.store.delete(key)
    with pytest.raises(ValueError, match=rf"{lake.uri}/{key} is missing; restore it, "):
        maintain(lake)


def test_lake_maintenance_keeps_every_live_snapshot_readable(lake: Lake) -> None:
    maintain(lake)
    maintain(lake, keep_days=20)
    assert stored_reasons(lake, 1) == sorted(set(ALL) - {"today 2"})
    assert stored_reasons(lake, 2) == stored_reasons(lake, 3) == ALL
    assert stored_reasons(lake, 4) == sorted(reason for reason in ALL if not reason.startswith(str(LONG_AGO)))


def test_lake_maintenance_removes_expired_snapshots_and_what_only_they_needed(lake: Lake) -> None:
    maintain(lake)
    summary = maintain(lake, after_days=8)
    assert (summary.removed_snapshots, lake.snapshots.numbers()) == (3, [4])
    assert summary.tables[VERDICT].removed_files == len(ALL)
    assert summary.tables[VERDICT].freed_bytes > 0
    assert stored_reasons(lake) == ALL
    with pytest.raises(ValueError, match="has no snapshot 2; it has 4"):
        lake.snapshot(2)
    with pytest.raises(ValueError, match=r"has no snapshot as old as .*; the oldest is of "):
        lake.snapshot(as_of=NOW - timedelta(days=1))


def test_lake_maintenance_never_removes_the_newest_snapshot(lake: Lake) -> None:
    summary = maintain(lake, after_days=3650)
    assert lake.snapshots.numbers() == [summary.snapshot]
    assert stored_reasons(lake) == ALL


def test_lake_snapshot_lives_for_days_after_it_was_replaced(lake: Lake) -> None:
    snapshots = SnapshotStore(lake.store)
    second = next(info.modified for info in lake.store.list_objects("_rota/snapshots") if "/2.json" in info.key)
    assert snapshots.expire(second - timedelta(microseconds=1)).number == 1
    assert snapshots.numbers() == [1, 2]
    assert snapshots.expire(second).number == 2
    assert snapshots.numbers() == [2]


def test_lake_snapshot_of_a_writer_with_a_wrong_clock_expires(lake: Lake) -> None:
    future = LakeSnapshot(3, NOW + timedelta(days=3650), run=0, tables=lake.snapshot().tables)
    assert lake.store.create("_rota/snapshots/3.json", msgspec.json.encode(future))
    publish(lake, append(lake, TODAY, "today 3"))
    maintain(lake, after_days=8)
    assert lake.snapshots.numbers() == [5]
    assert stored_reasons(lake) == sorted([*ALL, "today 3"])


@pytest.mark.parametrize("hours", [-2, 2])
def test_lake_maintenance_refuses_a_clock_that_differs_from_the_store(lake: Lake, hours: int) -> None:
    check_clock(lake.store, datetime.now(UTC))
    with pytest.raises(ValueError, match=r"but an object stored in .* just now is of .*; correct the clock"):
        check_clock(lake.store, datetime.now(UTC) + timedelta(hours=hours))
    assert list(lake.store.list_objects("_rota/clock")) == []


def test_lake_maintenance_removes_the_probes_of_killed_ones_but_no_young_ones(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for name in ("old", "young"):
        store.create(f"_rota/clock/{name}", b"")
    os.utime(tmp_path / "_rota/clock/old", (1, 1))
    check_clock(store, datetime.now(UTC))
    assert [info.key for info in store.list_objects()] == ["_rota/clock/young"]


def test_lake_maintenance_refuses_a_table_whose_log_has_lost_commits_of_the_snapshot(lake: Lake) -> None:
    version = lake.snapshot().version(VERDICT)
    lake.store.delete(f"{VERDICT}/_delta_log/{version:020}.json")
    with pytest.raises(ValueError, match="lake/verdict lacks version 5 of snapshot 2: the newest in its log is 4; "):
        maintain(lake)
    assert lake.snapshots.latest().version(VERDICT) == version


def test_lake_maintenance_removes_files_of_killed_commands_but_no_young_ones(lake: Lake) -> None:
    lake.store.create(f"{VERDICT}/date=2026-01-01/run9-killed.parquet", b"orphan")
    assert maintain(lake).tables[VERDICT].removed_files == 0
    maintain(lake, after_days=8)
    assert [info.key for info in lake.store.list_objects(VERDICT) if "killed" in info.key] == []


def test_lake_maintenance_in_a_folder_leaves_no_empty_folders(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    publish(lake, append(lake, YESTERDAY, "a"))
    lake.store.create(f"{VERDICT}/date=2026-01-01/run9-killed.parquet", b"orphan")
    publish(lake, append(lake, YESTERDAY, "b"))
    maintain(lake)
    maintain(lake, after_days=8)
    assert sorted(path.name for path in (tmp_path / VERDICT).iterdir()) == ["_delta_log", f"date={YESTERDAY}"]


def test_lake_maintenance_deletes_days_and_reads_the_rest(lake: Lake) -> None:
    summary = maintain(lake, keep_days=20)
    assert summary.tables[VERDICT].deleted_days == 1
    assert stored_reasons(lake) == sorted(reason for reason in ALL if not reason.startswith(str(LONG_AGO)))


def test_lake_maintenance_trims_the_log_up_to_a_checkpoint(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    for number in range(104):
        append(lake, TODAY, f"{number}")
    publish(lake, append(lake, TODAY, "104"))
    publish(lake, append(lake, TODAY, "105"))
    table = log_of(lake).load()
    assert table is not None
    table.create_checkpoint()
    names = {path.name for path in (tmp_path / VERDICT / "_delta_log").iterdir()}
    first = min(name for name in names if "checkpoint.parquet" in name)  # deltalake makes one by itself
    assert f"{99:020}" <= first <= f"{104:020}"
    maintain(lake)
    trimmed = {path.name for path in (tmp_path / VERDICT / "_delta_log").iterdir()}
    assert names - trimmed == {name for name in names if name < first[:20]}
    assert len(stored_reasons(lake, 1)) == 105
    assert len(stored_reasons(lake)) == 106


def test_lake_maintenance_leaves_a_table_alone_that_another_command_is_writing(lake: Lake) -> None:
    append(lake, YESTERDAY, "unpublished", run=1)
    summary = maintain(lake)
    assert summary.skipped == [VERDICT]
    assert stored_reasons(lake) == ALL
    assert lake.snapshots.numbers() == [1, 2]


def test_lake_maintenance_that_was_killed_before_it_published_is_continued(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Maintenance, "_publish", kill)
        with pytest.raises(KilledError):
            maintain(lake, keep_days=20)
    assert stored_reasons(lake) == ALL
    summary = maintain(lake, keep_days=20)
    assert summary.skipped == []
    assert stored_reasons(lake) == sorted(reason for reason in ALL if not reason.startswith(str(LONG_AGO)))
    assert maintain(lake, keep_days=20).snapshot == summary.snapshot


@pytest.mark.parametrize("step", ["delete", "compact"])
def test_lake_maintenance_publishes_no_row_that_an_ingest_adds_meanwhile(lake: Lake, step: str) -> None:
    patch = pytest.MonkeyPatch()
    owner = DeltaLog if step == "delete" else Table
    name = "commit" if step == "delete" else "compact"
    original: Callable[..., Any] = getattr(owner, name)

    def racing(*arguments: Any) -> Any:
        patch.undo()
        append(lake, TODAY, "meanwhile")
        return original(*arguments)

    patch.setattr(owner, name, racing)
    summary = maintain(lake, keep_days=20)
    assert summary.skipped == [VERDICT]
    assert stored_reasons(lake) == ALL
    publish(lake, log_of(lake).load().version(), run=1)  # type: ignore[union-attr] # the table exists
    assert "meanwhile" in stored_reasons(lake)
    assert files_by_day(lake)[str(YESTERDAY)] == 1


# With the ingest.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a lake with two segments to ingest."""
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    write_segment(tmp_path, "08-b.jsonl.gz", verdict_line(2))
    return tmp_path


def days_after_segments(days: int) -> int:
    return (SEGMENT_DAY - TODAY).days + days


def test_ingest_after_maintenance_reads_compacted_files_with_spark(spark: SparkSession, folder: Path) -> None:
    ingest(spark, folder)
    write_segment(folder, "08-c.jsonl.gz", verdict_line(3))
    ingest(spark, folder)
    lake = Lake(str(folder))
    maintain(lake, after_days=days_after_segments(1))
    write_segment(folder, "08-d.jsonl.gz", verdict_line(3), verdict_line(4))
    ingest(spark, folder)
    table = lake.table(VERDICT)
    rows = table.read(spark, lake.snapshot().version(VERDICT)).collect()
    assert sorted(row["reason"] for row in rows) == reasons(folder) == ["R1", "R2", "R3", "R4"]


def test_lake_retention_deletes_ingested_segments_alone_and_ingests_none_again(
    spark: SparkSession, folder: Path
) -> None:
    ingest(spark, folder)
    replaced = write_segment(folder, "08-b.jsonl.gz", verdict_line(7))
    os.utime(replaced, (1, 1))
    new = write_segment(folder, "09-new.jsonl.gz", verdict_line(9, hour=9))
    lake = Lake(str(folder))
    summary = maintain(lake, after_days=days_after_segments(31), keep_days=30)
    assert summary.deleted_segments == 1
    assert sorted((folder / "journal").glob("date=*/*.gz")) == [replaced, new]
    assert reasons(folder) == []
    assert len(table_rows(folder, "files")) == 2, "segments of this day are left"
    ingest(spark, folder)
    assert reasons(folder) == ["R7", "R9"], "a late file of any age is taken"
    summary = maintain(lake, after_days=days_after_segments(31), keep_days=30)
    assert summary.deleted_segments == 2
    assert len(table_rows(folder, "files")) == 4, "without a segment, the journal may be elsewhere"
    write_segment(folder, "08-e.jsonl.gz", verdict_line(1), day=f"date={TODAY}")
    maintain(lake, after_days=days_after_segments(31), keep_days=30)
    assert table_rows(folder, "files") == []


@pytest.mark.parametrize("step", ["after lake/verdict", "after lake/files", "before _rota/snapshots"])
def test_ingest_that_is_maintained_at_any_step_has_every_line_once(
    spark: SparkSession, folder: Path, step: str
) -> None:
    ingest(spark, folder)
    write_segment(folder, "08-c.jsonl.gz", verdict_line(3))
    lake = Lake(str(folder))

    def at_step(name: str) -> None:
        if name == step:
            maintain(lake, after_days=days_after_segments(1))

    ingest(spark, folder, at_step)
    assert reasons(folder) == ["R1", "R2", "R3"]
    assert ingest(spark, folder).segments == 0


def test_ingest_before_its_first_table_is_published_over_the_compaction(spark: SparkSession, folder: Path) -> None:
    ingest(spark, folder)
    write_segment(folder, "08-c.jsonl.gz", verdict_line(3))
    ingest(spark, folder)
    write_segment(folder, "08-d.jsonl.gz", verdict_line(4))
    lake = Lake(str(folder))

    def at_step(name: str) -> None:
        if name == "before lake/verdict":
            assert maintain(lake, after_days=days_after_segments(1)).tables[VERDICT].compacted

    ingest(spark, folder, at_step)
    assert reasons(folder) == ["R1", "R2", "R3", "R4"]


def test_ingest_that_ends_while_a_maintenance_publishes_keeps_its_rows(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(spark, folder)
    write_segment(folder, "08-c.jsonl.gz", verdict_line(3))
    ingest(spark, folder)
    write_segment(folder, "08-d.jsonl.gz", verdict_line(4))
    original = Maintenance._publish

    def publish_later(*arguments: Any) -> None:
        ingest(spark, folder)
        original(*arguments)

    monkeypatch.setattr(Maintenance, "_publish", publish_later)
    summary = maintain(Lake(str(folder)), after_days=days_after_segments(1))
    assert VERDICT in summary.skipped
    assert reasons(folder) == ["R1", "R2", "R3", "R4"]


# The command.


def rota(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["pipeline", "maintain", *map(str, arguments)])


def test_lake_maintenance_command_starts_no_java_and_prints_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    lake = Lake(str(tmp_path / "lake"))
    append(lake, YESTERDAY, "1")
    publish(lake, append(lake, YESTERDAY, "2"))
    result = rota(lake.uri, "--keep-days", 30)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    header, row, *lines = result.stdout.splitlines()
    assert header.split() == ["TABLE", "COMPACTED", "DELETED", "DAYS", "REMOVED", "FILES", "FREED", "MIB"]
    assert row.split() == [VERDICT, "yes", "0", "0", "0.0"]
    assert lines == [
        "Deleted 0 segments of the journal, and 0 expired snapshots",
        f"The newest snapshot of {lake.uri} is 2",
    ]
    value = json.loads(rota(lake.uri, "-o", "json").stdout)
    assert (value["snapshot"], value["skipped"], value["tables"][VERDICT]["compacted"]) == (2, [], False)


def test_lake_maintenance_command_reports_mistakes_in_one_sentence(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    result = rota(lake)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"{lake} does not exist; `rota pipeline ingest {lake}` makes one from a journal" in result.stderr
    assert rota(lake, "--if-any").exit_code == 0
    result = rota(lake, "--keep-days", 7)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    remedy = "give --keep-days 8 or more, or a smaller --snapshot-days"
    problem = "--keep-days 7 is not more than --snapshot-days 7: snapshots need rows of those days"
    assert result.stderr == f"rota: {problem}; {remedy}\n"
