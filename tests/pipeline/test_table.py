"""Tables of a lake by Spark: append, merge and replace in one commit each, and read at a version."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    DateType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rota.cli.commands.pipeline.opened_lake import OpenedLake
from rota.object_store import open_store
from rota.pipeline.lake.data_files import TableSpec
from rota.pipeline.lake.table import Table
from rota.pipeline.lake.tables import TABLES, Lake

DAY = date(2026, 11, 21)
NEXT_DAY = date(2026, 11, 22)


def struct_of(**fields: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


MEMBER = struct_of(uid=StringType())
SCHEMA = struct_of(
    group=StringType(),
    at=TimestampType(),
    members=MapType(StringType(), MEMBER),
    digest=BinaryType(),
    date=DateType(),
)
SPEC = TableSpec("lake/membership", SCHEMA, order=("group", "at"))


def row(group: str, day: date | None = DAY) -> tuple[Any, ...]:
    moment = datetime(2026, 11, 21, 23, 59, 59, 999_999, tzinfo=UTC)
    return group, moment, {"orders-0": {"uid": group}}, bytearray(sha256(group.encode()).digest()[:16]), day


def frame(spark: SparkSession, groups: Iterable[str], day: date | None = DAY) -> DataFrame:
    return spark.createDataFrame([row(group, day) for group in groups], SCHEMA)


def groups(spark: SparkSession, table: Table, since: date | None = None) -> list[str]:
    """Return the groups of the newest version, which readers with and without Spark see alike."""
    version = table.version()
    rows = table.read(spark, version, since)
    assert rows.schema == table.schema
    names = sorted(str(stored["group"]) for stored in rows.select("group").collect())
    assert sorted(table.dataset(version, since).to_table(["group"])["group"].to_pylist()) == names
    assert table.count(version, since) == len(names)
    return names


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(open_store(str(tmp_path / "la[k]e {x} *?y+%")), SPEC)


def test_table_keeps_nested_columns_and_microseconds(spark: SparkSession, table: Table) -> None:
    assert table.append(frame(spark, "a"), run=1) == (0, 1)
    (stored,) = table.read(spark, 0).collect()
    assert tuple(stored["members"]["orders-0"]) == ("a",)
    assert stored["date"] == DAY
    (moment,) = table.read(spark, 0).select(F.unix_micros("at").alias("microseconds")).collect()
    assert moment["microseconds"] == int(datetime(2026, 11, 22, tzinfo=UTC).timestamp()) * 1_000_000 - 1
    (arrow_row,) = table.to_arrow(0).to_pylist()
    assert arrow_row["members"] == [("orders-0", {"uid": "a"})]
    assert arrow_row["at"] == row("a")[1]


def test_table_skips_a_run_that_it_has(spark: SparkSession, table: Table) -> None:
    table.append(frame(spark, "ab"), run=1)
    assert table.append(frame(spark, "ab"), run=1) == (0, 0)
    assert table.merge(frame(spark, "ab"), run=1) == (0, 0)
    assert table.append(frame(spark, "c"), run=2) == (1, 1)
    assert table.transaction() == 2
    assert groups(spark, table) == ["a", "b", "c"]


def test_table_without_new_rows_gets_no_version(spark: SparkSession, table: Table) -> None:
    assert table.append(frame(spark, ""), run=1) == (None, 0)
    assert table.replace(frame(spark, ""), None, base=None) == (None, 0)
    table.append(frame(spark, "a"), run=2)
    assert table.append(frame(spark, ""), run=3) == (0, 0)
    assert table.merge(frame(spark, "a"), run=3) == (0, 0)


def test_table_ignores_the_files_of_a_writer_that_was_killed_before_its_commit(
    spark: SparkSession, table: Table
) -> None:
    killed = table._files.write(frame(spark, "abc"), "run1")
    assert killed.rows == 3
    assert table.version() is None
    assert table.append(frame(spark, "abc"), run=1) == (0, 3)
    table._files.write(frame(spark, "abc"), "run1")
    assert groups(spark, table) == ["a", "b", "c"]


def test_table_run_that_another_process_commits_meanwhile_is_skipped(
    spark: SparkSession, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_commit(table, monkeypatch, lambda: table.append(frame(spark, "ab"), run=1))
    assert table.append(frame(spark, "ab"), run=1) == (0, 0)
    assert groups(spark, table) == ["a", "b"]


def test_table_merge_drops_rows_that_the_same_date_has(spark: SparkSession, table: Table) -> None:
    table.append(frame(spark, "abc"), run=1)
    assert table.merge(frame(spark, "bcd"), run=2) == (1, 1)
    assert table.merge(frame(spark, "ef"), run=3) == (2, 2)
    assert table.merge(frame(spark, "a", NEXT_DAY), run=4) == (3, 1)
    assert groups(spark, table) == ["a", "a", "b", "c", "d", "e", "f"]
    assert groups(spark, table, since=NEXT_DAY) == ["a"]


def test_table_merge_reads_only_files_of_the_same_dates(spark: SparkSession, table: Table) -> None:
    table.append(frame(spark, "a"), run=1)
    other_day = Path(table.uri) / "date=2026-11-21"
    table.append(frame(spark, "b", NEXT_DAY), run=2)
    other_day.rename(other_day.with_name("moved"))
    assert table.merge(frame(spark, "bc", NEXT_DAY), run=3) == (2, 1)


def test_table_merge_compares_again_if_another_run_was_committed_meanwhile(
    spark: SparkSession, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.append(frame(spark, "a"), run=1)
    before_commit(table, monkeypatch, lambda: table.append(frame(spark, "bc"), run=2))
    assert table.merge(frame(spark, "abcd"), run=3) == (2, 1)
    assert groups(spark, table) == ["a", "b", "c", "d"]


def before_commit(table: Table, monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """Let another writer commit after the next writer has planned its changes."""
    commit_next = table._log._write
    remaining = [write]

    def commit(*arguments: Any) -> None:
        if remaining:
            remaining.pop()()
        commit_next(*arguments)

    monkeypatch.setattr(table._log, "_write", commit)


def test_table_rows_without_a_date_are_merged_and_replaced(spark: SparkSession, table: Table) -> None:
    table.append(frame(spark, "a", None), run=1)
    assert table.merge(frame(spark, "ab", None), run=2) == (1, 1)
    assert groups(spark, table) == ["a", "b"]
    assert groups(spark, table, since=DAY) == []
    assert table.replace(frame(spark, "c"), None, base=None) == (2, 1)
    assert groups(spark, table) == ["c"]


def test_table_replaces_dates_in_one_version(spark: SparkSession, table: Table) -> None:
    table.append(frame(spark, "ab"), run=1)
    table.append(frame(spark, "cd", NEXT_DAY), run=2)
    assert table.replace(frame(spark, "x", NEXT_DAY), [NEXT_DAY], base=table.version()) == (2, 1)
    assert groups(spark, table) == ["a", "b", "x"]
    assert table.read(spark, 1).count() == 4
    assert table.replace(frame(spark, ""), [DAY, NEXT_DAY], base=table.version()) == (3, 0)
    assert groups(spark, table) == []
    assert table.transaction() == 2


def test_table_replaces_dates_of_the_version_that_was_read_without_what_was_never_published(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(str(tmp_path))
    rollup = lake.table("marts/rollup")

    def rows(group: str, day: date) -> DataFrame:
        empty = spark.createDataFrame([(None,) * len(rollup.schema)], rollup.schema)
        return empty.withColumns({"group": F.lit(group), "date": F.lit(day)})

    both_days = rows("old", DAY).unionByName(rows("old", NEXT_DAY))
    version = rollup.replace(both_days, None, base=None).version
    base = lake.snapshots.publish(lake.snapshots.latest(), {rollup.name: version})
    rollup.replace(rows("unpublished", DAY), [DAY], base=version)
    opened = OpenedLake(lake, base, is_newest=True)
    opened.write(rollup.name, rows("new", NEXT_DAY), [NEXT_DAY])
    published = opened.publish()
    stored = rollup.to_arrow(published.version(rollup.name), ["group", "date"]).to_pylist()
    assert sorted((str(row["date"]), row["group"]) for row in stored) == [(str(DAY), "old"), (str(NEXT_DAY), "new")]


def test_table_of_a_mart_whose_log_has_lost_commits_is_not_replaced(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    chosen = lake.table("marts/chosen")
    rows = spark.createDataFrame([(None,) * 9], chosen.schema)
    base = lake.snapshots.publish(lake.snapshots.latest(), {chosen.name: chosen.replace(rows, None, base=None).version})
    lake.store.delete(f"{chosen.name}/_delta_log/{0:020}.json")
    with pytest.raises(ValueError, match="marts/chosen lacks version 0 of snapshot 1: it has no log; restore "):
        OpenedLake(lake, base, is_newest=True).write(chosen.name, rows)


def test_table_refuses_rows_of_days_that_are_not_to_be_replaced(spark: SparkSession, table: Table) -> None:
    with pytest.raises(ValueError, match="lake/membership: rows of 2026-11-21 are not of the days"):
        table.replace(frame(spark, "a"), [NEXT_DAY], base=table.version())
    assert table.version() is None


def test_table_without_partitions_is_replaced_as_a_whole(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    chosen = lake.table("marts/chosen")
    for use in ("a", "b"):
        rows = spark.createDataFrame([(None,) * 9], chosen.schema).withColumn("use", F.lit(use))
        chosen.replace(rows, None, base=None)
    snapshot = lake.snapshots.publish(lake.snapshots.latest(), {"marts/chosen": chosen.version()})
    assert [stored["use"] for stored in lake.read(spark, snapshot, "marts/chosen").collect()] == ["b"]
    assert [stored["use"] for stored in chosen.read(spark, 0).collect()] == ["a"]


def test_table_tells_when_the_newest_rows_of_a_version_were_written(spark: SparkSession, table: Table) -> None:
    earliest = datetime.now(UTC) - timedelta(milliseconds=1)  # a log has milliseconds
    assert table.written_at(None) is None
    table.replace(frame(spark, "a"), None, base=None)
    between = datetime.now(UTC)
    table.append(frame(spark, "b"), run=1)
    table.replace(frame(spark, ""), None, base=None)
    first = table.written_at(0)
    second = table.written_at(1)
    assert first
    assert second
    assert earliest <= first <= between
    assert first <= second <= datetime.now(UTC)
    assert table.written_at(2) is None


def test_table_columns_that_were_added_later_are_null_in_older_files(spark: SparkSession, table: Table) -> None:
    table.append(frame(spark, "a"), run=1)
    member = struct_of(uid=StringType(), room=StringType())
    wide = struct_of(
        group=StringType(),
        at=TimestampType(),
        members=MapType(StringType(), member),
        digest=BinaryType(),
        date=DateType(),
        lag=LongType(),
    )
    newer = Table(open_store(table.uri.removesuffix(f"/{SPEC.name}")), TableSpec(SPEC.name, wide))
    rows = spark.createDataFrame([(*row("b")[:2], {"orders-0": ("b", "r1")}, *row("b")[3:], 7)], wide)
    with pytest.raises(ValueError, match=r"lacks lag, members.value.room; `rota pipeline ingest` adds missing columns"):
        newer.append(rows, run=2)
    newer.add_missing_columns()
    newer.append(rows, run=2)
    read = newer.read(spark, newer.version()).orderBy("group").collect()
    members = [tuple(stored["members"]["orders-0"]) for stored in read]
    assert [(*pair, stored["lag"]) for pair, stored in zip(members, read, strict=True)] == [
        ("a", None, None),
        ("b", "r1", 7),
    ]
    arrow = sorted(newer.to_arrow(newer.version()).to_pylist(), key=lambda stored: str(stored["group"]))
    assert [stored["members"][0][1] for stored in arrow] == [{"uid": "a", "room": None}, {"uid": "b", "room": "r1"}]
    with pytest.raises(ValueError, match=r"columns that this version of Rota does not know: lag, members.value.room"):
        table.append(frame(spark, "c"), run=3)
    assert groups(spark, table) == ["a", "b"]


def test_table_compacted_by_deltalake_is_read_together_with_newer_files(spark: SparkSession, table: Table) -> None:
    table.append(frame(spark, "ab"), run=1)
    table.append(frame(spark, "c"), run=2)
    rows_of_version_1 = table.read(spark, 1).orderBy("group").collect()
    assert DeltaTable(table.uri).optimize.compact()["numFilesAdded"] == 1
    assert table.read(spark, 2).orderBy("group").collect() == rows_of_version_1
    table.append(frame(spark, "d"), run=3)
    assert groups(spark, table) == ["a", "b", "c", "d"]


def test_table_names_a_data_file_that_is_missing(spark: SparkSession, table: Table) -> None:
    table.append(frame(spark, "a"), run=1)
    table.append(frame(spark, "b", NEXT_DAY), run=2)
    (missing,) = Path(table.uri).glob("date=2026-11-22/*.parquet")
    missing.unlink()
    with pytest.raises(ValueError, match=rf"{missing.name} is missing; restore it"):
        table.read(spark, 1)
    assert table.read(spark, 0).count() == 1


def test_lake_declares_every_table_with_its_partition_columns() -> None:
    for spec in TABLES.values():
        assert {*spec.partitions, *spec.order} <= {*spec.schema.fieldNames()}, spec.name
    assert TABLES["lake/offsets"].partitions == ("date", "bucket")


def test_lake_offsets_are_sorted_by_group_within_buckets(spark: SparkSession, tmp_path: Path) -> None:
    offsets = Lake(str(tmp_path)).table("lake/offsets")
    rows = spark.range(100).select(
        F.concat(F.lit("group-"), F.col("id") % 7).alias("group"),
        F.timestamp_seconds(F.lit(1_795_000_000) - F.col("id")).alias("at"),
        F.lit(None).cast(offsets.schema["topics"].dataType).alias("topics"),
        F.lit(None).cast(offsets.schema["verdicts"].dataType).alias("verdicts"),
        F.to_date(F.timestamp_seconds(F.lit(1_795_000_000) - F.col("id"))).alias("date"),
        F.lit(b"").alias("digest"),
        (F.col("id") % 7 % 3).cast("int").alias("bucket"),
    )
    assert offsets.append(rows.repartition(4), run=1).rows == 100
    fragments = list(offsets.dataset(0).get_fragments())
    assert len(fragments) == 3
    for fragment in fragments:
        stored = fragment.to_table(columns=["group", "at"]).to_pylist()
        assert stored == sorted(stored, key=lambda row: (row["group"], row["at"]))
