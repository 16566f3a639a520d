"""Parquet files of a table: Spark writes and reads them. Each attempt to write has a folder of its own."""

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import pyarrow.parquet as pq
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from rota.object_store import ObjectStore
from rota.pipeline.common.columns import select_columns
from rota.pipeline.lake.delta_log import DataFile
from rota.pipeline.lake.reading.arrow_rows import missing_file_sentence
from rota.pipeline.lake.storage import open_filesystem, spark_pattern, spark_uri, storage_errors

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_WRITE_OPTIONS = {
    "compression": "zstd",  # half of the default's size at the same CPU time
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",  # a commit names the files; _SUCCESS would be litter
}
_FOOTER_READERS = 8
_RANDOM_BYTES = 6


@dataclass(frozen=True)
class TableSpec:
    """Declaration of a table: its path below the lake's root, columns, partitions, and the order of rows in files."""

    name: str  # such as lake/offsets
    schema: StructType
    partitions: tuple[str, ...] = ("date",)
    order: tuple[str, ...] = ()


class FileBatch(NamedTuple):
    """Files that one attempt has written, and which no version of the table contains yet."""

    files: Sequence[DataFile]

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(file.rows or 0 for file in self.files)

    @property
    def dates(self) -> set[str | None]:
        """Dates of the rows."""
        return {file.date for file in self.files}


class ParquetFiles:
    """Writes and reads Parquet files below a table's folder."""

    def __init__(self, store: ObjectStore, spec: TableSpec) -> None:
        self._store = store
        self._name = spec.name
        self._uri = f"{store.uri}/{spec.name}"
        self._schema = spec.schema
        self._partitions = list(spec.partitions)
        self._order = list(spec.order)

    def write(self, rows: DataFrame, label: str) -> FileBatch:
        """Write rows to a new folder `batch=<label>-<random>`; if Spark fails, what it wrote belongs to no version."""
        folder = f"batch={label}-{secrets.token_hex(_RANDOM_BYTES)}"
        # INT96, Spark's default, needs a feature of Delta that other readers lack.
        rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        arranged = rows.transform(select_columns, self._schema).transform(self._collect_partitions)
        if self._partitions or self._order:
            arranged = arranged.sortWithinPartitions(*self._partitions, *self._order)
        writer = arranged.write.options(**_WRITE_OPTIONS)
        writer.partitionBy(*self._partitions).parquet(spark_uri(f"{self._uri}/{folder}"))
        with storage_errors(self._uri):
            return FileBatch(self._describe(folder))

    def _collect_partitions(self, rows: DataFrame) -> DataFrame:
        """Shuffle rows by partition: otherwise each task would write a file for each of its partitions."""
        if rows.sparkSession.conf.get("spark.sql.adaptive.enabled") == "true":
            return rows.hint("rebalance", *self._partitions)  # also splits large and joins small partitions
        return rows.repartition(*self._partitions) if self._partitions else rows

    def read(self, spark: SparkSession, files: Sequence[DataFile]) -> DataFrame:
        """Return the rows of files with the columns of the schema; columns that a file lacks are null."""
        if not files:
            return spark.createDataFrame([], self._schema)
        reader = spark.read.schema(self._schema).option("basePath", spark_uri(self._uri))
        # Spark refuses to read files below batch=N/date=D together with those below date=D, where compaction puts them.
        frames: list[DataFrame] = []
        for _, alike in groupby(sorted(files, key=_folder_columns), key=_folder_columns):
            patterns = [spark_pattern(f"{self._uri}/{file.path}") for file in alike]
            try:
                frames.append(reader.parquet(*patterns).select(*self._schema.fieldNames()))
            except AnalysisException as error:
                if error.getCondition() != "PATH_NOT_FOUND":
                    raise
                path = (error.getMessageParameters() or {}).get("path", self._uri)
                raise ValueError(missing_file_sentence(path)) from error
        whole = frames[0]
        for frame in frames[1:]:
            whole = whole.unionByName(frame)
        return whole

    def _describe(self, folder: str) -> list[DataFile]:
        sizes = {
            info.key.removeprefix(f"{self._name}/"): info.size_bytes
            for info in self._store.list_objects(f"{self._name}/{folder}")
            if _is_data_file(info.key)
        }
        filesystem = open_filesystem(self._uri, sizes)

        def describe(path: str) -> DataFile:
            row_count = pq.read_metadata(path, filesystem=filesystem).num_rows
            return DataFile(path, sizes[path], row_count, self._partition_values(path))

        with ThreadPoolExecutor(_FOOTER_READERS) as pool:
            files = list(pool.map(describe, sorted(sizes)))
        return [file for file in files if file.rows]  # Spark writes a file without rows for a frame without rows

    def _partition_values(self, path: str) -> dict[str, str | None]:
        values = dict(part.split("=", 1) for part in path.split("/")[:-1])
        return {column: None if values[column] == _NULL_PARTITION else values[column] for column in self._partitions}


def _is_data_file(key: str) -> bool:
    name = key.rpartition("/")[2]
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def _folder_columns(file: DataFile) -> tuple[str, ...]:
    return tuple(part.partition("=")[0] for part in file.path.split("/")[:-1])
