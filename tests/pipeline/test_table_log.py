"""The log of a table: conditional commits, runs that count once, damage, and columns that versions of Rota add."""

import io
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.types import ArrayType, DataType, IntegerType, LongType, MapType, StringType, StructField, StructType

from pipeline.lake_files import (
    DAY,
    GROUPS,
    append_file,
    append_files,
    append_runs,
    open_log,
    write_file,
)
from rota.object_store import open_store
from rota.pipeline.lake.columns import compare_columns
from rota.pipeline.lake.data_files import TableSpec
from rota.pipeline.lake.delta_log import FileChanges, last_run, list_files
from rota.pipeline.lake.storage import storage_options
from rota.pipeline.lake.table import Table


def wider(**columns: DataType) -> StructType:
    return StructType([*GROUPS.fields, *(StructField(name, kind) for name, kind in columns.items())])


def struct_of(**fields: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


def open_table(uri: str, schema: StructType = GROUPS) -> Table:
    return Table(open_store(uri), TableSpec("lake/groups", schema))


def groups(uri: str, version: int | None = None) -> list[str]:
    table = open_table(uri)
    rows = table.to_arrow(table.version() if version is None else version)
    return sorted(rows.column("group").to_pylist())


def commit_key(version: int) -> str:
    return f"lake/groups/_delta_log/{version:020}.json"


def overwrite(uri: str, key: str, content: bytes | None) -> None:
    """Replace an object's content; with None delete the object."""
    store = open_store(uri)
    store.delete(key)
    assert content is None or store.create(key, content)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def test_table_that_was_never_written_has_no_version_and_no_rows(lake_uri: str) -> None:
    table = open_table(lake_uri)
    assert [table.version(), table.transaction(), table.count(None)] == [None, -1, 0]
    assert table.to_arrow(None).num_rows == 0
    assert table.to_arrow(None).column_names == ["group", "date"]
    assert [*open_store(lake_uri).list_objects()] == []


def test_table_versions_stay_readable_and_need_no_feature_of_delta(lake_uri: str) -> None:
    assert append_file(lake_uri, "a", run=1) == 0
    assert append_file(lake_uri, "b", "c", run=2) == 1
    assert groups(lake_uri, version=0) == ["a"]
    assert groups(lake_uri) == ["a", "b", "c"]
    assert open_table(lake_uri).transaction() == 2
    protocol = DeltaTable(f"{lake_uri}/lake/groups", storage_options=storage_options(lake_uri)).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)
    assert not protocol.reader_features


def test_table_rows_are_selected_by_arrow_expressions_and_counted_by_the_log(lake_uri: str) -> None:
    append_file(lake_uri, "a", "b")
    table = open_table(lake_uri)
    rows = table.to_arrow(0, columns=["date", "group"], where=ds.field("group") == "b")
    assert rows.to_pylist() == [{"date": DAY, "group": "b"}]
    assert table.count(0) == 2
    assert table.count(0, since=DAY) == 2
    assert table.dataset(0, since=DAY.replace(day=22)).count_rows() == 0


def test_table_loses_no_file_of_processes_that_commit_at_once(lake_uri: str) -> None:
    number = 10 if lake_uri.startswith("s3://") else 40
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for appending in [pool.submit(append_files, lake_uri, name, number) for name in "ab"]:
            appending.result()
    assert groups(lake_uri) == sorted(f"{name}-{index}" for name in "ab" for index in range(number))
    assert open_table(lake_uri).version() == 2 * number - 1


def test_table_has_a_run_once_that_two_processes_append_at_once(lake_uri: str) -> None:
    number = 10 if lake_uri.startswith("s3://") else 40
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        committed = [appending.result() for appending in [pool.submit(append_runs, lake_uri, number) for _ in range(2)]]
    assert sum(committed) == number
    assert groups(lake_uri) == sorted(f"run-{run}" for run in range(1, number + 1))


def test_table_commit_is_planned_anew_if_another_writer_was_first(lake_uri: str) -> None:
    append_file(lake_uri, "a", run=1)
    file = write_file(open_store(lake_uri), "late")
    last_runs: list[int] = []

    def plan(table: DeltaTable | None) -> FileChanges | None:
        last_runs.append(last_run(table))
        if len(last_runs) == 1:
            append_file(lake_uri, "first", run=2)
        return None if last_run(table) >= 2 else FileChanges([file])

    result = open_log(lake_uri).commit(plan, 2)
    assert last_runs == [1, 2]
    assert (result.version, result.is_changed) == (1, False)
    assert groups(lake_uri) == ["a", "first"]


def test_table_is_created_once_by_two_writers(lake_uri: str) -> None:
    file = write_file(open_store(lake_uri), "late")
    last_runs: list[int] = []

    def plan(table: DeltaTable | None) -> FileChanges:
        last_runs.append(last_run(table))
        if table is None:
            append_file(lake_uri, "first", run=1)
        return FileChanges([file])

    assert open_log(lake_uri).commit(plan, 2).version == 1
    assert last_runs == [-1, 1]
    assert groups(lake_uri) == ["first", "late"]


def test_table_replaces_files_in_one_commit(lake_uri: str) -> None:
    append_file(lake_uri, "old", run=1)
    file = write_file(open_store(lake_uri), "new")
    result = open_log(lake_uri).commit(lambda table: FileChanges([file], list_files(table)))
    assert (result.version, result.is_changed) == (1, True)
    assert groups(lake_uri) == ["new"]
    assert groups(lake_uri, version=0) == ["old"]
    assert open_table(lake_uri).transaction() == 1


def test_table_commit_without_changes_makes_no_version(lake_uri: str) -> None:
    assert open_log(lake_uri).commit(lambda _: FileChanges([])).version is None
    append_file(lake_uri, "a")
    assert open_log(lake_uri).commit(lambda _: FileChanges([])).version == 0


def test_table_remembers_runs_and_versions_beyond_a_checkpoint(folder: str) -> None:
    for run in range(105):
        append_file(folder, str(run), run=run)
    (checkpoint,) = Path(folder, "lake/groups/_delta_log").glob("*.checkpoint.parquet")
    assert open_table(folder).transaction() == 104
    assert open_table(folder).count(3) == 4
    overwrite(folder, commit_key(5), b"")
    assert open_table(folder).count(104) == 105
    checkpoint.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=rf"{checkpoint.name} is damaged"):
        open_table(folder).version()
    assert open_table(folder).count(4) == 5


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is damaged"),
        (b"{}", "is damaged"),
        (b"", "is damaged"),
        (b"\n" * 30, "is damaged"),
        (b'{"commitInfo":{"operation":"WRITE"}}\n', "is damaged"),
        (None, "is missing"),
    ],
)
def test_table_names_the_damaged_file_of_its_log_and_older_versions_stay_readable(
    lake_uri: str, content: bytes | None, problem: str
) -> None:
    for name in "abc":
        append_file(lake_uri, name)
    overwrite(lake_uri, commit_key(1), content)
    for version in (None, 2):
        with pytest.raises(
            ValueError, match=rf"{lake_uri}/{commit_key(1)} {problem}; restore it, read an older snapshot"
        ):
            open_log(lake_uri).load(version)
    with pytest.raises(ValueError, match=problem):
        append_file(lake_uri, "d")
    assert groups(lake_uri, version=0) == ["a"]


def test_table_version_that_does_not_exist_is_named_with_the_newest(lake_uri: str) -> None:
    with pytest.raises(ValueError, match="has no version 3: its log is gone"):
        open_table(lake_uri).to_arrow(3)
    append_file(lake_uri, "a")
    with pytest.raises(ValueError, match="has no version 3: the newest is 0"):
        open_table(lake_uri).to_arrow(3)


def test_table_names_a_missing_and_a_damaged_data_file(lake_uri: str) -> None:
    append_file(lake_uri, "a")
    append_file(lake_uri, "b")
    damaged = list_files(open_log(lake_uri).load())[0].path
    whole = open_store(lake_uri).read(f"lake/groups/{damaged}")
    other_columns = io.BytesIO()
    pq.write_table(pa.table({"group": [[1]]}), other_columns)
    for content in (b"no Parquet" * 100, whole[:4] + b"\xff" * 20 + whole[24:], other_columns.getvalue()):
        overwrite(lake_uri, f"lake/groups/{damaged}", content)
        with pytest.raises(ValueError, match=rf"{lake_uri}/lake/groups/{damaged} is damaged; restore it, "):
            groups(lake_uri, version=1)
    overwrite(lake_uri, f"lake/groups/{damaged}", None)
    with pytest.raises(ValueError, match=rf"{damaged}.*is missing; restore it"):
        groups(lake_uri, version=1)
    assert groups(lake_uri, version=0) == ["a"]


def test_table_changed_by_a_program_with_other_features_is_refused(lake_uri: str) -> None:
    append_file(lake_uri, "a")
    features = '"minReaderVersion":3,"minWriterVersion":7,"readerFeatures":["deletionVectors"],'
    features += '"writerFeatures":["deletionVectors"]'
    commit = open_store(lake_uri).read(commit_key(0)).decode()
    overwrite(lake_uri, commit_key(0), commit.replace('"minReaderVersion":1,"minWriterVersion":2', features).encode())
    with pytest.raises(ValueError, match="uses deletionVectors: Rota cannot read that"):
        open_table(lake_uri).version()


def test_table_gets_missing_columns_and_older_files_read_as_null(lake_uri: str) -> None:
    append_file(lake_uri, "a")
    new = wider(lag=LongType(), members=MapType(StringType(), struct_of(uid=StringType())))
    newer = wider(lag=LongType(), members=MapType(StringType(), struct_of(uid=StringType(), room=StringType())))
    for schema in (new, newer):
        table = open_table(lake_uri, schema)
        assert table.to_arrow(table.version()).to_pylist() == [
            {"group": "a", "lag": None, "members": None, "date": DAY}
        ]
        table.add_missing_columns()
        version = table.version()
        table.add_missing_columns()
        assert table.version() == version
    assert open_table(lake_uri, newer).version() == 2
    stored = open_log(lake_uri, newer).load()
    assert stored is not None
    assert stored.schema().to_json() == open_log(lake_uri, newer).delta_schema.to_json()


def test_table_readers_of_an_older_rota_ignore_unknown_columns(lake_uri: str) -> None:
    append_file(lake_uri, "a")
    open_table(lake_uri, wider(lag=LongType())).add_missing_columns()
    assert open_table(lake_uri).to_arrow(1).to_pylist() == [{"group": "a", "date": DAY}]


def test_table_with_columns_of_another_type_is_refused(lake_uri: str) -> None:
    append_file(lake_uri, "a")
    schema_of_another_type = StructType([StructField("group", LongType()), GROUPS["date"]])
    with pytest.raises(ValueError, match="written by another version of Rota: group is string instead of bigint"):
        open_table(lake_uri, schema_of_another_type).to_arrow(0)


def test_table_columns_are_compared_by_name_at_every_level() -> None:
    declared = struct_of(
        a=ArrayType(struct_of(x=LongType(), y=LongType())), b=MapType(StringType(), IntegerType()), c=LongType()
    )
    stored = struct_of(
        c=ArrayType(LongType()),
        a=ArrayType(struct_of(z=LongType(), x=StringType())),
        b=MapType(StringType(), LongType()),
    )
    differences = compare_columns(declared, stored)
    assert differences.missing == ["a.element.y"]
    assert differences.unknown == ["a.element.z"]
    assert differences.conflicting == [
        "a.element.x is string instead of bigint",
        "b.value is bigint instead of int",
        "c is array<bigint> instead of bigint",
    ]
    compare_columns(declared, declared).check_writable("lake/a")
