"""A journal's lines as the frames that the pipeline reads, without files."""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType, TimestampType

from rota.pipeline.common.schemas import JOURNAL_SCHEMAS, QUARANTINE
from rota.pipeline.ingest.facts import Facts


def frames(spark: SparkSession, lines: Iterable[Mapping[str, Any]]) -> Facts:
    """Return the facts of journal lines."""
    rows: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in JOURNAL_SCHEMAS}
    for line in lines:
        rows[str(line["kind"])].append(_row(line, JOURNAL_SCHEMAS[str(line["kind"])]))
    tables = {kind: spark.createDataFrame(rows[kind], schema) for kind, schema in JOURNAL_SCHEMAS.items()}
    return Facts(**tables, quarantine=spark.createDataFrame([], QUARANTINE))


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
