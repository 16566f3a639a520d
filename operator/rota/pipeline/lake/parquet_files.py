"""Parquet files of a table: Spark's tasks write and read them. Each attempt to write has a folder of its own."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from rota.object_store import ObjectStore
from rota.pipeline.common.columns import select_columns
from rota.pipeline.lake.delta_log import DataFile
from rota.pipeline.lake.parquet_tasks import WRITTEN_FILES, FileTarget, write_partitions
from rota.pipeline.lake.reading.arrow_rows import missing_file_sentence
from rota.pipeline.lake.storage import spark_pattern, spark_uri

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
        self._uri = f"{store.uri}/{spec.name}"
        self._schema = spec.schema
        self._partitions = list(spec.partitions)
        self._order = list(spec.order)

    def write(self, rows: DataFrame, label: str) -> FileBatch:
        """Write rows to a new folder `batch=<label>-<random>`; no version has the files of a task that fails."""
        arranged = rows.transform(select_columns, self._schema).transform(self._collect_partitions)
        if self._partitions or self._order:
            arranged = arranged.sortWithinPartitions(*self._partitions, *self._order)
        folder = f"batch={label}-{secrets.token_hex(_RANDOM_BYTES)}"
        write = partial(write_partitions, target=FileTarget(self._uri, folder, tuple(self._partitions)))
        files = arranged.mapInArrow(write, WRITTEN_FILES).collect()
        return FileBatch([DataFile(**file.asDict()) for file in sorted(files)])

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


def _folder_columns(file: DataFile) -> tuple[str, ...]:
    return tuple(part.partition("=")[0] for part in file.path.split("/")[:-1])
