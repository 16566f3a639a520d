"""Writes rows to Parquet files below a table's folder: one for each partition, sorted in the table's order.

Files are new objects with random names: those of a task that fails, or runs twice, belong to no version of a table.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rota.object_store import ObjectStore, StoreError
from rota.pipeline.lake.delta_log import DataFile
from rota.pipeline.lake.parquet_files import TableSpec

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # as Spark names the folder
_COMPRESSION = "zstd"  # half the size of snappy at the same CPU time
_RANDOM_BYTES = 8
# Dictionaries of offsets, which are nearly all different, cost time and give larger files.
_DICTIONARY_COLUMNS = {
    "lake/offsets": ["group", "topics.key_value.key", "topics.key_value.value.key_value.key", "verdicts.key_value.key"]
}


class PartitionRows(NamedTuple):
    """The rows of one partition, without the partition columns; a value is None if it is null."""

    values: Mapping[str, str | None]
    rows: pa.Table


def attempt_folder(run: int) -> str:
    """Return the name of a new folder for the files of one attempt of a run."""
    return f"batch=run{run}-{secrets.token_hex(_RANDOM_BYTES)}"


def write_row_files(store: ObjectStore, table: TableSpec, folder: str, rows: pa.Table) -> list[DataFile]:
    """Write rows to new files below a folder of a table in the lake's store; return these files."""
    keys = [(name, "ascending") for name in (*table.partitions, *table.order)]
    files: list[DataFile] = []
    for partition in split_partitions(rows.sort_by(keys), table.partitions):
        files.append(write_file(store, table.name, folder, partition))  # noqa: PERF401 - a loop that writes
    return files


def write_file(store: ObjectStore, table: str, folder: str, partition: PartitionRows) -> DataFile:
    """Write the rows of one partition to a new file."""
    buffer = pa.BufferOutputStream()
    use_dictionary = _DICTIONARY_COLUMNS.get(table, True)
    pq.write_table(partition.rows, buffer, compression=_COMPRESSION, use_dictionary=use_dictionary)
    content = buffer.getvalue().to_pybytes()
    folders = [f"{name}={value or _NULL_PARTITION}" for name, value in partition.values.items()]
    path = "/".join([folder, *folders, f"part-{secrets.token_hex(_RANDOM_BYTES)}.parquet"])
    if not store.create(f"{table}/{path}", content):
        raise StoreError(f"{store.uri}/{table}/{path} exists already; run this command again")
    return DataFile(path, len(content), partition.rows.num_rows, partition.values)


def read_file(store: ObjectStore, table: str, file: DataFile, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a file, without the partition columns."""
    return pq.ParquetFile(pa.BufferReader(store.read(f"{table}/{file.path}"))).read(columns)


def split_partitions(rows: pa.Table, partitions: Sequence[str]) -> Iterator[PartitionRows]:
    """Divide rows, which are sorted by partition, into those of each partition."""
    columns = [rows[name].combine_chunks() for name in partitions]
    ends = {rows.num_rows}
    for column in columns:
        ends.update(pc.run_end_encode(column).run_ends.to_pylist())
    data = rows.drop_columns(list(partitions))
    start = 0
    for end in sorted(ends):
        if end > start:
            values: dict[str, str | None] = {}
            for name, column in zip(partitions, columns, strict=True):
                value = column[start].as_py()
                values[name] = None if value is None else str(value)
            yield PartitionRows(values, data.slice(start, end - start))
        start = end
