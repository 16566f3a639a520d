"""Data files that a Spark task writes: one for each partition, by the rows' order."""

import json
import resource
from datetime import UTC, date, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.lake_files import GROUPS
from rota.object_store import StoreError, open_store
from rota.pipeline.lake import data_files
from rota.pipeline.lake.data_files import TableSpec, write_partitions

TABLE = "lake/groups"
PARTITIONS = ("date", "bucket")
SCHEMA = pa.schema({"group": pa.string(), "date": pa.date32(), "bucket": pa.int32()})
SATURDAY = date(2026, 11, 21)
SUNDAY = date(2026, 11, 22)


def batch(*rows: tuple[str, date | None, int | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], schema=SCHEMA)


def written_files(
    uri: str, *batches: pa.RecordBatch, partitions: tuple[str, ...] = PARTITIONS
) -> list[dict[str, object]]:
    """Write the batches of a task, and return what it says about each file."""
    table = TableSpec(TABLE, GROUPS, partitions)
    [written] = write_partitions(iter(batches), lake_uri=uri, table=table, label="run1")
    rows: list[dict[str, object]] = written.to_pylist()
    return rows


def groups_in(uri: str, path: object) -> list[str]:
    content = open_store(uri).read(f"{TABLE}/{path}")
    groups: list[str] = pq.read_table(pa.BufferReader(content), columns=["group"])["group"].to_pylist()
    return groups


def test_table_file_of_each_partition_has_its_rows_in_their_order(lake_uri: str) -> None:
    first = batch(("a", SATURDAY, 1), ("b", SATURDAY, 2))
    second = batch(("c", SATURDAY, 2), ("d", SUNDAY, 2), ("e", None, 2), ("f", None, None))
    files = written_files(lake_uri, first, second)
    folders = [str(file["path"]).rpartition("/")[0] for file in files]
    null = "__HIVE_DEFAULT_PARTITION__"
    assert folders == [
        "date=2026-11-21/bucket=1",
        "date=2026-11-21/bucket=2",
        "date=2026-11-22/bucket=2",
        f"date={null}/bucket=2",
        f"date={null}/bucket={null}",
    ]
    assert [groups_in(lake_uri, file["path"]) for file in files] == [["a"], ["b", "c"], ["d"], ["e"], ["f"]]
    assert [file["rows"] for file in files] == [1, 2, 1, 1, 1]
    assert [file["partition"] for file in files][2::2] == [
        [("date", "2026-11-22"), ("bucket", "2")],
        [("date", None), ("bucket", None)],
    ]
    sizes = {info.key.removeprefix(f"{TABLE}/"): info.size_bytes for info in open_store(lake_uri).list_objects()}
    assert {file["path"]: file["size_bytes"] for file in files} == sizes


def test_table_file_has_several_row_groups_if_its_rows_need_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_ROW_GROUP_BYTES", 1)
    [file] = written_files(str(tmp_path), batch(("a", SATURDAY, 1)), batch(("b", SATURDAY, 1)))
    assert pq.read_metadata(tmp_path / TABLE / str(file["path"])).num_row_groups == 2
    assert groups_in(str(tmp_path), file["path"]) == ["a", "b"]


def test_table_file_without_partitions_and_a_task_without_rows(tmp_path: Path) -> None:
    assert written_files(str(tmp_path)) == written_files(str(tmp_path), batch()) == []
    [file] = written_files(str(tmp_path), batch(("a", SATURDAY, 1)), partitions=())
    assert str(file["path"]).startswith("run1-")
    assert file["partition"] == []


def test_table_times_are_stored_so_that_all_readers_know_them(tmp_path: Path) -> None:
    time = datetime(2026, 11, 21, 8, tzinfo=UTC)
    rows = pa.RecordBatch.from_pydict({"at": pa.array([time], pa.timestamp("us", "UTC"))})
    [file] = written_files(str(tmp_path), rows, partitions=())
    column = json.loads(pq.read_metadata(tmp_path / TABLE / str(file["path"])).schema.column(0).logical_type.to_json())
    assert (column["isAdjustedToUTC"], column["timeUnit"]) == (True, "microseconds")


def test_table_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / TABLE).write_text("a file")
    with pytest.raises(StoreError, match=r"lake/groups/run1-.* cannot be written: Not a directory"):
        written_files(str(tmp_path), batch(("a", SATURDAY, 1)), partitions=())


def test_table_file_that_does_not_fit_on_the_disk_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(StoreError, match=rf"^{tmp_path}/lake/groups/run1-.* cannot be written: File too large"):
            written_files(str(tmp_path), batch(("a", SATURDAY, 1)), partitions=())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
