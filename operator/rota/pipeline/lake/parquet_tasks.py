"""Spark's tasks write Parquet files by pyarrow, directly under their final names, and return what they have written.

Spark's own writer renames files when tasks and jobs end. In a bucket each rename is a copy, and a file costs twenty
requests. Here a task that fails, or runs twice, leaves files that no version of a table names.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType

from rota.object_store import ObjectStore, open_store

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # as Spark names the folder
WRITTEN_FILES = StructType(
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
_ROW_GROUP_BYTES = 32 * 2**20  # in memory
_COMPRESSION = "zstd"  # half of snappy's size at the same CPU time
_RANDOM_BYTES = 8

PartitionValues = tuple[str | None, ...]


class FileTarget(NamedTuple):
    """The folder of a table's new files, and the columns that become folders below it."""

    table_uri: str
    folder: str
    partitions: tuple[str, ...]


def write_partitions(batches: Iterator[pa.RecordBatch], *, target: FileTarget) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task, which are sorted by partition, to a file for each partition; yield WRITTEN_FILES."""
    written: list[dict[str, Any]] = []
    writer: _FileWriter | None = None
    store = open_store(target.table_uri)
    for batch in batches:
        for values, rows in split_by_partition(batch, target.partitions):
            if writer and writer.values != values:
                written.append(writer.close())
                writer = None
            writer = writer or _FileWriter(store, target, values, rows.schema)
            writer.add(rows)
    if writer:
        written.append(writer.close())
    yield pa.RecordBatch.from_pylist(written, schema=_ARROW_WRITTEN_FILES)


def split_by_partition(
    batch: pa.RecordBatch, partitions: Sequence[str]
) -> Iterator[tuple[PartitionValues, pa.RecordBatch]]:
    """Yield consecutive rows with the same values of the partition columns, without these columns."""
    columns = [batch.column(name) for name in partitions]
    rows = batch.drop_columns(list(partitions))
    ends = {batch.num_rows}
    for column in columns:
        ends.update(pc.run_end_encode(column).run_ends.to_pylist())
    start = 0
    for end in sorted(ends):
        if end > start:
            yield tuple(_to_text(column[start].as_py()) for column in columns), rows.slice(start, end - start)
        start = end


class _FileWriter:
    """Writes one Parquet file."""

    def __init__(self, store: ObjectStore, target: FileTarget, values: PartitionValues, schema: pa.Schema) -> None:
        self.values = values
        self._partition = dict(zip(target.partitions, values, strict=True))
        folders = [f"{name}={NULL_PARTITION if value is None else value}" for name, value in self._partition.items()]
        self._path = "/".join([target.folder, *folders, f"part-{secrets.token_hex(_RANDOM_BYTES)}.parquet"])
        self._rows = 0
        self._pending: list[pa.RecordBatch] = []  # of the next row group
        self._pending_bytes = 0
        self._file = store.open_writer(self._path)
        self._writer = pq.ParquetWriter(self._file, schema, compression=_COMPRESSION)

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows; they are written when there are enough for a row group."""
        self._rows += rows.num_rows
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes
        if self._pending_bytes >= _ROW_GROUP_BYTES:
            self._write_row_group()

    def close(self) -> dict[str, Any]:
        """Complete the file, and return its row of WRITTEN_FILES."""
        self._write_row_group()
        self._writer.close()
        size_bytes = self._file.tell()
        self._file.close()
        return {"path": self._path, "size_bytes": size_bytes, "rows": self._rows, "partition": self._partition}

    def _write_row_group(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_batches(self._pending))
        self._pending = []
        self._pending_bytes = 0


def _to_text(value: object) -> str | None:
    return None if value is None else str(value)
