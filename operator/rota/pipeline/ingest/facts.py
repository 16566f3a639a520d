"""Reader of a journal or a lake: one table for each kind of record. Later stages of the pipeline read only these.

Repeated records count once:

- *Identical lines* are one: a file was copied, or an operator recorded a fact again. The key is the whole line; a
  shorter key would not do, since a recreated group has the same generations as its predecessor.
- A *verdict* counts if its status or reason differs from the previous one of its group and condition; each leader
  records it again until the group's status has it.
- A *rebalance* counts once for its group and start: two operators may each record its end, at different times.

A lake holds each line once already (see rota.pipeline.ingest.streaming). The other two rules need a group's whole
history, and are applied when a journal or lake is read.
"""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from rota.pipeline.common import paths
from rota.pipeline.common.schemas import JOURNAL_SCHEMAS, QUARANTINE
from rota.pipeline.common.spark_session import fit_partitions
from rota.pipeline.ingest.lines import JSON_OPTIONS, judge_lines


@dataclass(frozen=True)
class Facts:
    """Tables of the journal's records by kind (schemas.JOURNAL_SCHEMAS), and of rejected lines (schemas.QUARANTINE)."""

    membership: DataFrame
    plan: DataFrame
    handover: DataFrame
    obeyed: DataFrame
    rebalance: DataFrame
    owners: DataFrame
    offsets: DataFrame
    verdict: DataFrame
    redelivered: DataFrame
    gap: DataFrame
    quarantine: DataFrame


def read_facts(spark: SparkSession, source: str, since: date | None = None) -> Facts:
    """Return the facts of a journal's folder or of a lake; nothing is read before rows are requested.

    A last line that is still being written counts as torn; a later read returns it as a record.
    """
    paths.check_source(source)
    folder = Path(source)
    fit_partitions(spark, folder)
    if paths.is_lake(folder):
        lake_tables = {kind: _read_table(spark, folder / kind, schema) for kind, schema in TABLE_SCHEMAS.items()}
        return _deduplicate({kind: table.transform(_keep_since, since) for kind, table in lake_tables.items()})
    lines = _read_lines(spark, folder, since)
    tables = {kind: _read_kind(lines, kind) for kind in JOURNAL_SCHEMAS}
    return _deduplicate(tables | {"quarantine": lines.transform(judge_lines).transform(rejected_lines)})


def load_source(spark: SparkSession, source: str, days: int | None = None) -> Facts:
    """Return the facts of a source, or of its last days; without records raise ValueError: no data looks healthy."""
    since = first_day(source, days) if days else None
    facts = read_facts(spark, source, since)
    folder = Path(source)
    if any((folder / kind).is_dir() for kind in JOURNAL_SCHEMAS):  # a lake's table is created by its first record
        return facts
    if paths.is_lake(folder):
        rejected = facts.quarantine
    else:
        lines = _read_lines(spark, folder, since).transform(judge_lines)
        if lines.where(F.col("kind").isNotNull()).limit(1).count():  # mostly reads only up to the first record
            return facts
        rejected = lines.transform(rejected_lines)
    first = rejected.select("reason").first()
    example = f"; one line was rejected because: {first.reason}" if first else ""
    raise ValueError(f"{source} has no record that this version can read{example}")


def first_day(source: str, days: int) -> date:
    """Return the first of the source's last days; days in the future come from a wrong clock and are ignored."""
    folder = Path(source)
    today = datetime.now(UTC).date()
    past_days: list[date] = []
    for parent in (folder, *map(folder.joinpath, paths.RECORD_KINDS)):
        for path in parent.glob(paths.DAY_GLOB):
            day = paths.parse_day(path.name)
            if day and day <= today:
                past_days.append(day)
    newest = max(past_days, default=today)
    return newest - min(timedelta(days=days - 1), newest - date.min)  # a larger difference would overflow


TABLE_SCHEMAS: dict[str, StructType] = JOURNAL_SCHEMAS | {"quarantine": QUARANTINE}


def _read_lines(spark: SparkSession, folder: Path, since: date | None) -> DataFrame:
    """Return the lines of a journal's files; files that are removed before they are read are skipped."""
    root = re.sub(r"[*?\[\]{}\\]", r"\\\g<0>", str(folder.absolute()))  # escape what is special in globs
    reader = spark.read.option("ignoreMissingFiles", "true").option("lineSep", "\n")  # a \r belongs to its line
    days = [paths.DAY_GLOB] if since is None else paths.day_folders_since(folder, since)
    patterns: list[str] = []
    for day in days:
        glob = f"{day}/{paths.HOUR_FILE_GLOB}"
        if any(folder.glob(glob)):  # Spark raises an error for a pattern without files
            patterns.append(f"{root}/{glob}")
    return reader.schema("value string").text(patterns).transform(_with_file)


def _keep_since(table: DataFrame, since: date | None) -> DataFrame:
    """Keep rows of the day `since` and later days; Spark does not read the files of earlier days."""
    return table if since is None else table.where(F.col("date") >= F.lit(since))


def _with_file(values: DataFrame) -> DataFrame:
    """Add to each line its file, by its path in the journal, and the day of that file."""
    path = F.try_url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
    file = F.regexp_extract(path, r"(date=[^/]*/[^/]*)$", 1)
    day = F.substring(file, 6, 10).try_cast("date")
    return values.select(F.col("value").alias("line"), file.alias("file"), day.alias("date"))


def _read_kind(lines: DataFrame, kind: str) -> DataFrame:
    line = F.col("line")
    # Parse only lines that may be of this kind: those with its name, or with an escape that may spell it.
    candidates = lines.where(line.contains(f'"{kind}"') | line.contains("\\"))
    return candidates.transform(drop_duplicate_lines).transform(parse_records, kind)


def drop_duplicate_lines(lines: DataFrame) -> DataFrame:
    """Keep one of identical lines, also from different files, with its earliest day."""
    # With only a key and a minimum, Spark aggregates by hash, without a sort, and shuffles text instead of parsed
    # columns. A lake needs no such shuffle: its lines are unique already.
    return lines.groupBy("line").agg(F.min("date").alias("date"))


def parse_records(lines: DataFrame, kind: str) -> DataFrame:
    """Return the records of a kind among lines."""
    return lines.transform(judge_lines).transform(records_of_kind, kind)


def records_of_kind(lines: DataFrame, kind: str) -> DataFrame:
    """Return the records of a kind among judged lines, with the columns of schemas.JOURNAL_SCHEMAS."""
    schema = JOURNAL_SCHEMAS[kind]
    fields = StructType([field for field in schema if field.name != "date"])
    parsed = lines.where(F.col("kind") == kind).withColumn("record", F.from_json("text", fields, JSON_OPTIONS))
    columns = {name: F.col(f"record.{name}") for name in fields.fieldNames()}
    if kind == "offsets":  # plain ones are parsed already
        columns = {name: F.coalesce(F.col(name), column) for name, column in columns.items()}
    renamed = parsed.select(*[column.alias(name) for name, column in columns.items()])
    return renamed.withColumn("date", F.to_date("at")).select(*schema.fieldNames())


def rejected_lines(lines: DataFrame) -> DataFrame:
    """Return the rejected lines among judged lines, with the columns of schemas.QUARANTINE."""
    return lines.where(F.col("reason").isNotNull()).select(
        "file",
        F.make_valid_utf8("line").alias("line"),  # readers of the lake may accept only valid UTF-8
        "reason",
        "date",
    )


def _read_table(spark: SparkSession, folder: Path, schema: StructType) -> DataFrame:
    """Return a table of a lake; it is empty if nothing was ever written to it."""
    if (folder / "_delta_log").is_dir():
        return spark.read.format("delta").load(str(folder)).select(*schema.fieldNames())
    if not any(folder.glob(paths.ANY_DATE_GLOB)):
        return spark.createDataFrame([], schema)
    _check_columns(folder, schema)
    return spark.read.schema(schema).parquet(str(folder)).select(*schema.fieldNames())


def _check_columns(folder: Path, schema: StructType) -> None:
    """Raise ValueError if a table lacks a column of its schema: Spark would read that column as nulls."""
    file = next(folder.glob(f"{paths.ANY_DATE_GLOB}/**/*.parquet"), None)
    if file is None:
        return
    try:
        names = pq.read_schema(file).names
    except (OSError, pa.ArrowInvalid):
        raise ValueError(f"{file} cannot be read: it is damaged, or not Parquet; recreate the lake") from None
    for name in schema.fieldNames():
        if name not in names and name != "date":
            raise ValueError(f"{file} has no column {name}, which this version needs; recreate the lake")


def _deduplicate(tables: dict[str, DataFrame]) -> Facts:
    verdict = tables["verdict"].transform(_verdict_changes)
    return Facts(**tables | {"verdict": verdict, "rebalance": tables["rebalance"].transform(_first_endings)})


def _verdict_changes(verdicts: DataFrame) -> DataFrame:
    """Keep the verdicts that differ from the previous one of their group and condition."""
    order = Window.partitionBy("group", "condition").orderBy("at", "status", "reason")
    state = F.struct("status", "reason")
    changes = verdicts.withColumn("new", ~state.eqNullSafe(F.lag(state).over(order))).where(F.col("new"))
    return changes.select(*JOURNAL_SCHEMAS["verdict"].fieldNames())


def _first_endings(rebalances: DataFrame) -> DataFrame:
    """Keep the first record of the end of each rebalance."""
    order = Window.partitionBy("group", "began").orderBy("at", "seconds", "generation")
    first = rebalances.withColumn("place", F.row_number().over(order)).where(F.col("place") == 1)
    return first.select(*JOURNAL_SCHEMAS["rebalance"].fieldNames())
