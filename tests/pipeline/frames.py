"""A journal's lines as the frames that the pipeline reads, without segments."""

import json
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType, TimestampType

from rota.pipeline.common.schemas import JOURNAL_SCHEMAS
from rota.pipeline.history.reading.buckets import History
from rota.pipeline.history.reading.sample_files import SampleFiles, list_sample_files
from rota.pipeline.lake.snapshots import EMPTY_SNAPSHOT
from rota.pipeline.lake.tables import OFFSET_BUCKETS, Lake


def frames(spark: SparkSession, lines: Iterable[Mapping[str, Any]]) -> dict[str, DataFrame]:
    """Return the records of journal lines by kind."""
    rows: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in JOURNAL_SCHEMAS}
    for line in lines:
        rows[str(line["kind"])].append(_row(line, JOURNAL_SCHEMAS[str(line["kind"])]))
    return {kind: spark.createDataFrame(rows[kind], schema) for kind, schema in JOURNAL_SCHEMAS.items()}


def history_of(
    spark: SparkSession, lines: Iterable[Mapping[str, Any]], folder: Path, since: date | None = None
) -> History:
    """Return the records as frames, and the samples in two files of each bucket: those of odd and of even minutes."""
    records = frames(spark, lines)
    table = Lake(str(folder)).table("lake/offsets")
    bucket = F.pmod(F.crc32(F.col("group").cast("binary")), F.lit(OFFSET_BUCKETS)).cast("int")
    rows = records["offsets"].withColumn("bucket", bucket).withColumn("digest", F.lit(None).cast("binary"))
    for odd in range(2):
        table.append(rows.where(F.minute("at") % 2 == odd), odd + 1)
    return History(records, sample_files(folder, since), since)


def sample_files(folder: Path, since: date | None = None) -> SampleFiles:
    lake = Lake(str(folder))
    version = lake.table("lake/offsets").version()
    tables = {} if version is None else {"lake/offsets": version}
    return list_sample_files(lake, msgspec.structs.replace(EMPTY_SNAPSHOT, tables=tables), since)


def _row(line: Mapping[str, Any], schema: StructType) -> tuple[Any, ...]:
    values: list[Any] = []
    for field in schema.fields:
        value = line.get(field.name)
        if field.name == "date":
            value = datetime.fromisoformat(line["at"]).date()
        elif isinstance(field.dataType, TimestampType):
            value = datetime.fromisoformat(str(value))
        elif field.name == "rules":
            value = json.dumps(value)
        elif field.name == "seconds" and value is not None:
            value = float(value)
        values.append(value)
    return tuple(values)
