"""Data files of tables: Parquet files, one for each partition, written by pyarrow directly under their final names.

Spark's own writer renames files when tasks and jobs end. In a bucket each rename is a copy, and a file costs twenty
requests. Here a task that fails, or runs twice, leaves files with random names, which no version of a table has.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType

from rota.object_store import ObjectStore, open_store
from rota.object_store.interface import file_write_errors

WRITTEN_FILES = StructType(  # one row for each file that a Spark task has written
    [
        StructField("path", StringType()),
        StructField("size_bytes", LongType()),
        StructField("rows", LongType()),
        StructField("partition", MapType(StringType(), StringType())),
    ]
)
_ARROW_WRITTEN_FILES = pa.schema(
    {"path": pa.string(), "size_bytes": pa.int64(), "rows": pa.int64(), "partition": pa.map_(pa.string(), pa.string())}
)
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # as Spark names the folder
_ROW_GROUP_BYTES = 32 * 2**20  # size in memory
_COMPRESSION = "zstd"  # half of snappy's size at the same CPU time
_RANDOM_BYTES = 8

PartitionValues = Mapping[str, str | None]  # by partition column, as in the Delta log


@dataclass(frozen=True)
class TableSpec:
    """Declaration of a table: its path below the lake's root, columns, partitions, and the order of rows in files."""

    name: str  # such as lake/offsets
    schema: StructType
    partitions: tuple[str, ...] = ("date",)
    order: tuple[str, ...] = ()
    dictionaries: tuple[str, ...] = ()  # Parquet columns with a dictionary; empty: all columns


class DataFile(NamedTuple):
    """A Parquet file of a table."""

    path: str  # relative to the table
    size_bytes: int
    rows: int | None  # None: another program has added the file without statistics
    partition: PartitionValues
    added_at: datetime | None = None  # time of the commit; None: not committed yet

    @property
    def date(self) -> str | None:
        """Value of the partition column `date`."""
        return self.partition.get("date")


class FileTarget(NamedTuple):
    """The table that gets new files, and the first part of their names, such as `run12`."""

    store: ObjectStore  # of the lake
    table: TableSpec
    label: str


def write_partitions(
    batches: Iterable[pa.RecordBatch], *, lake_uri: str, table: TableSpec, label: str
) -> Iterator[pa.RecordBatch]:
    """Write the rows of a Spark task, which are sorted by partition; yield a row of WRITTEN_FILES for each file."""
    target = FileTarget(open_store(lake_uri), table, label)
    rows = [file._asdict() for file in _write_sorted(batches, target)]
    yield pa.RecordBatch.from_pylist(rows, schema=_ARROW_WRITTEN_FILES)


def write_rows(rows: pa.Table, target: FileTarget) -> list[DataFile]:
    """Write rows, in the table's order, to new files."""
    keys = [(name, "ascending") for name in (*target.table.partitions, *target.table.order)]
    batches = (rows.sort_by(keys) if keys else rows).combine_chunks().to_batches()
    return list(_write_sorted(batches, target))


def write_file(rows: pa.Table, values: PartitionValues, target: FileTarget) -> DataFile:
    """Write the rows of one partition, which lack the partition columns, to a new file."""
    writer = _FileWriter(target, values, rows.schema)
    for batch in rows.to_batches():
        writer.add(batch)
    return writer.close()


def read_file(store: ObjectStore, table: str, file: DataFile, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a file, without the partition columns.

    It uses no threads, since the threads of a read that fails may abort the process while Python ends.
    """
    return pq.ParquetFile(pa.BufferReader(store.read(f"{table}/{file.path}"))).read(columns, use_threads=False)


def count_rows(files: Iterable[DataFile]) -> int:
    """Return the number of rows in all files; files without statistics count as empty."""
    rows = 0
    for file in files:
        rows += file.rows or 0
    return rows


def split_by_partition(
    batch: pa.RecordBatch, partitions: Sequence[str]
) -> Iterator[tuple[PartitionValues, pa.RecordBatch]]:
    """Yield consecutive rows with the same values of the partition columns, without these columns."""
    columns = {name: batch.column(name) for name in partitions}
    rows = batch.drop_columns(list(partitions))
    ends = {batch.num_rows}  # where the value of any partition column ends
    for column in columns.values():
        ends.update(pc.run_end_encode(column).run_ends.to_pylist())
    start = 0
    for end in sorted(ends):
        if end > start:
            values: dict[str, str | None] = {}
            for name, column in columns.items():
                value = column[start].as_py()
                values[name] = None if value is None else str(value)
            yield values, rows.slice(start, end - start)
        start = end


def _write_sorted(batches: Iterable[pa.RecordBatch], target: FileTarget) -> Iterator[DataFile]:
    writer: _FileWriter | None = None
    for batch in batches:
        for values, rows in split_by_partition(batch, target.table.partitions):
            if writer and writer.values != values:
                yield writer.close()
                writer = None
            writer = writer or _FileWriter(target, values, rows.schema)
            writer.add(rows)
    if writer:
        yield writer.close()


class _FileWriter:
    """Writes one file."""

    def __init__(self, target: FileTarget, values: PartitionValues, schema: pa.Schema) -> None:
        self.values = values
        folders = ""
        for name, value in values.items():
            folders += f"{name}={_NULL_PARTITION if value is None else value}/"
        self._path = f"{folders}{target.label}-{secrets.token_hex(_RANDOM_BYTES)}.parquet"
        self._rows = 0
        self._pending: list[pa.RecordBatch] = []  # of the next row group
        self._pending_bytes = 0
        self._file = target.store.open_writer(f"{target.table.name}/{self._path}")
        self._uri = f"{target.store.uri}/{target.table.name}/{self._path}"
        dictionaries = list(target.table.dictionaries) or True
        self._writer = pq.ParquetWriter(self._file, schema, compression=_COMPRESSION, use_dictionary=dictionaries)

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows; write a row group if the pending rows are large enough."""
        self._rows += rows.num_rows
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes
        if self._pending_bytes >= _ROW_GROUP_BYTES:
            self._write_row_group()

    def close(self) -> DataFile:
        """Complete the file; raise StoreError if it cannot be written."""
        self._write_row_group()
        with file_write_errors(self._uri):
            self._writer.close()
            size_bytes = self._file.tell()
            self._file.close()
        return DataFile(self._path, size_bytes, self._rows, self.values)

    def _write_row_group(self) -> None:
        if self._pending:
            with file_write_errors(self._uri):
                self._writer.write_table(pa.Table.from_batches(self._pending))
        self._pending = []
        self._pending_bytes = 0
