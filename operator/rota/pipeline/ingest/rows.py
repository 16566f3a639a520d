"""Rows of the lake's tables, made of judged lines of the journal."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from rota.pipeline.common.schemas import JOURNAL_SCHEMAS
from rota.pipeline.ingest.lines import JSON_OPTIONS
from rota.pipeline.lake.tables import OFFSET_BUCKETS

QUARANTINE_KIND = "quarantine"


def records_of_kind(lines: DataFrame, kind: str) -> DataFrame:
    """Return the records of a kind among judged lines, with the columns of schemas.JOURNAL_SCHEMAS, and `digest`."""
    schema = JOURNAL_SCHEMAS[kind]
    fields = StructType([field for field in schema if field.name != "date"])
    parsed = lines.where(F.col("kind") == kind).withColumn("record", F.from_json("text", fields, JSON_OPTIONS))
    columns = {name: F.col(f"record.{name}") for name in fields.fieldNames()}
    if kind == "offsets":  # plain ones are parsed already
        columns = {name: F.coalesce(F.col(name), column) for name, column in columns.items()}
    renamed = parsed.select(*[column.alias(name) for name, column in columns.items()], "digest")
    return renamed.withColumn("date", F.to_date("at")).select(*schema.fieldNames(), "digest")


def rejected_lines(lines: DataFrame) -> DataFrame:
    """Return the rejected lines among judged lines, with the columns of schemas.QUARANTINE, and `digest`."""
    return lines.where(F.col("reason").isNotNull()).select(
        "file",
        F.make_valid_utf8(F.coalesce("line", F.lit(""))).alias("line"),  # readers may accept only valid UTF-8
        "reason",
        "date",
        "digest",
    )


def table_rows(lines: DataFrame, kind: str, *, has_repeated: bool) -> DataFrame:
    """Return the rows of a table among judged lines; if some are repeated, each line once."""
    rows = rejected_lines(lines) if kind == QUARANTINE_KIND else records_of_kind(lines, kind)
    if kind == "offsets":
        rows = rows.withColumn("bucket", F.pmod(F.xxhash64("group"), F.lit(OFFSET_BUCKETS)).cast("int"))
    return rows.dropDuplicates(["digest"]) if has_repeated else rows
