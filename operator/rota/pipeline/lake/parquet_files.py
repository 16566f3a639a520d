"""Writes and reads the data files of a table with Spark."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from rota.object_store import ObjectStore
from rota.pipeline.common.columns import select_columns
from rota.pipeline.lake.data_files import WRITTEN_FILES, DataFile, TableSpec, count_rows, write_partitions
from rota.pipeline.lake.reading.arrow_rows import missing_file_sentence
from rota.pipeline.lake.storage import spark_pattern, spark_uri


class FileBatch(NamedTuple):
    """Files of one attempt to write; no version of the table contains them yet."""

    files: Sequence[DataFile]

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return count_rows(self.files)

    @property
    def dates(self) -> set[str | None]:
        """Dates of the rows."""
        return {file.date for file in self.files}


class ParquetFiles:
    """Writes and reads Parquet files below a table's folder."""

    def __init__(self, store: ObjectStore, spec: TableSpec) -> None:
        self._lake_uri = store.uri
        self._spec = spec
        self._uri = f"{store.uri}/{spec.name}"
        self._schema = spec.schema
        self._partitions = list(spec.partitions)
        self._order = list(spec.order)

    def write(self, rows: DataFrame, label: str) -> FileBatch:
        """Write rows to new files with this label; no version has the files of a task that fails."""
        arranged = rows.transform(select_columns, self._schema).transform(self._collect_partitions)
        if self._partitions or self._order:
            arranged = arranged.sortWithinPartitions(*self._partitions, *self._order)
        write = partial(write_partitions, lake_uri=self._lake_uri, table=self._spec, label=label)
        files = arranged.mapInArrow(write, WRITTEN_FILES).collect()
        return FileBatch([DataFile(**file.asDict()) for file in sorted(files)])

    def _collect_partitions(self, rows: DataFrame) -> DataFrame:
        """Shuffle rows by partition, since otherwise each task would write a file for each partition of its rows."""
        if rows.sparkSession.conf.get("spark.sql.adaptive.enabled") == "true":
            return rows.hint("rebalance", *self._partitions)  # also splits large and joins small partitions
        return rows.repartition(*self._partitions) if self._partitions else rows

    def read(self, spark: SparkSession, files: Sequence[DataFile]) -> DataFrame:
        """Return the rows of files with the columns of the schema; columns that a file lacks are null."""
        if not files:
            return _empty_frame(spark, self._schema)
        reader = spark.read.schema(self._schema).option("basePath", spark_uri(self._uri))
        patterns = [spark_pattern(f"{self._uri}/{file.path}") for file in files]
        try:
            return reader.parquet(*patterns).select(*self._schema.fieldNames())
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            path = (error.getMessageParameters() or {}).get("path", self._uri)
            raise ValueError(missing_file_sentence(path)) from error


def _empty_frame(spark: SparkSession, schema: StructType) -> DataFrame:
    """Return a frame without rows, which Spark removes from plans; `createDataFrame` would start Python workers."""
    columns: list[Column] = []
    for field in schema:
        null = F.lit(None).cast(field.dataType)
        columns.append(null.alias(field.name))
    return spark.range(0).select(*columns)
