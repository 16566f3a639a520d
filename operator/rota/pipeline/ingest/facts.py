"""The journal, or a lake made of it, as a table for each kind of record: what the rest of the pipeline reads.

What is told twice counts once:

- *Identical lines* are one: somebody copied a file, or told a fact again. The whole line is the key; nothing less would
  do, since a group that was made anew has the generations of the one before.
- A *verdict* counts when its status or reason differs from the last one of its group and condition; it is told until
  the group's status has it, by one leader after another.
- A *rebalance* counts once for its group and beginning: two operators may each tell of its end, at times of their own.

A lake holds each line once already (rota.pipeline.ingest.streaming saw to that); the other two need all of a group's
history, and are taken out as it is read.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from rota.pipeline.common import paths
from rota.pipeline.common.schemas import JOURNAL, QUARANTINE
from rota.pipeline.common.spark_session import fit
from rota.pipeline.ingest.lines import STRICT, judged


@dataclass(frozen=True)
class Facts:
    """What was decided and seen, by kind (schemas.JOURNAL), and the lines that say nothing."""

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


def facts(spark: SparkSession, source: str, since: date | None = None) -> Facts:
    """Return the facts of a journal's folder or of a lake; nothing is read before rows are requested.

    A last line that is still being written counts as torn; a later read returns it as a record.
    """
    paths.check_source(source)
    folder = Path(source)
    fit(spark, folder)
    if paths.is_lake(folder):
        kept = {kind: _kept(spark, folder / kind, schema) for kind, schema in TABLES.items()}
        return _told_once({kind: table.transform(_later, since) for kind, table in kept.items()})
    lines = _lines(spark, folder, since)
    tables = {kind: lines.transform(_perhaps, kind).transform(once).transform(records, kind) for kind in JOURNAL}
    return _told_once(tables | {"quarantine": lines.transform(judged).transform(refused)})


def opened(spark: SparkSession, source: str, days: int | None = None) -> Facts:
    """Return the facts of a source or its last days; one without any would look like a fleet in which all is well."""
    since = last(source, days) if days else None
    found, folder = facts(spark, source, since), Path(source)
    if any((folder / kind).is_dir() for kind in JOURNAL):
        return found
    if paths.is_lake(folder):
        refusals = found.quarantine
    else:
        lines = _lines(spark, folder, since).transform(judged)
        if lines.where(F.col("kind").isNotNull()).limit(1).count():  # read as far as the first, mostly no farther
            return found
        refusals = lines.transform(refused)
    first = refusals.select("reason").first()
    why = f"; of one line it is said: {first.reason}" if first else ""
    raise ValueError(f"{source} has no record that this version can read{why}")


def last(source: str, days: int) -> date:
    """Return the first of the last days that a source tells of; one yet to come is of a clock that was wrong."""
    folder, today = Path(source), datetime.now(UTC).date()
    places = (folder, *(folder / kind for kind in paths.KINDS))
    found = [paths.day_of(path.name) for where in places for path in where.glob(paths.DAYS)]
    newest = max((day for day in found if day and day <= today), default=today)
    return newest - min(timedelta(days=days - 1), newest - date.min)


TABLES: dict[str, StructType] = JOURNAL | {"quarantine": QUARANTINE}


def _lines(spark: SparkSession, folder: Path, since: date | None) -> DataFrame:
    """Return the lines of a journal's files: of those that are there when they are read, for old ones are removed."""
    where = _literal(str(folder.absolute()))
    reader = spark.read.option("ignoreMissingFiles", "true").option("lineSep", "\n")  # a \r is a part of its line
    days = [paths.DAYS] if since is None else paths.days_since(folder, since)
    found = [f"{where}/{day}/{paths.HOURS}" for day in days if any(folder.glob(f"{day}/{paths.HOURS}"))]
    return reader.schema("value string").text(found).transform(_with_file)


def _later(table: DataFrame, since: date | None) -> DataFrame:
    """Leave out the days before, whose files are not even looked at."""
    return table if since is None else table.where(F.col("date") >= F.lit(since))


def _literal(path: str) -> str:
    """Return a path in which nothing stands for anything else."""
    return "".join(f"\\{it}" if it in "*?[]{}\\" else it for it in path)


def _with_file(values: DataFrame) -> DataFrame:
    """Name the file of each line, as it is called in the journal, and the day that it is filed under."""
    path = F.try_url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
    file = F.regexp_extract(path, r"(date=[^/]*/[^/]*)$", 1)
    day = F.substring(file, 6, 10).try_cast("date")
    return values.select(F.col("value").alias("line"), file.alias("file"), day.alias("date"))


def _perhaps(lines: DataFrame, kind: str) -> DataFrame:
    """Leave out lines that cannot be of a kind: they do not have its name, not even by an escape."""
    line = F.col("line")
    return lines.where(line.contains(f'"{kind}"') | line.contains("\\"))


def once(lines: DataFrame) -> DataFrame:
    """Keep one of identical lines, wherever it stands."""
    # By keys alone, without anything to keep besides, this is a hash and no sort; only text is sent around, nothing
    # that was parsed. Whoever cannot afford even that reads a lake.
    return lines.groupBy("line").agg(F.min("date").alias("date"))


def records(lines: DataFrame, kind: str) -> DataFrame:
    """Return the records of a kind among lines."""
    return lines.transform(judged).transform(of_kind, kind)


def of_kind(lines: DataFrame, kind: str) -> DataFrame:
    """Return the records of a kind among lines that were judged, as schemas.JOURNAL has them."""
    schema = JOURNAL[kind]
    told = StructType([field for field in schema if field.name != "date"])
    parsed = lines.where(F.col("kind") == kind).withColumn("told", F.from_json("text", told, STRICT))
    columns = {name: F.col(f"told.{name}") for name in told.fieldNames()}
    if kind == "offsets":  # plain ones are parsed already
        columns = {name: F.coalesce(F.col(name), column) for name, column in columns.items()}
    named = parsed.select(*[column.alias(name) for name, column in columns.items()])
    return named.withColumn("date", F.to_date("at")).select(*schema.fieldNames())


def refused(lines: DataFrame) -> DataFrame:
    """Return lines that were judged to be no records, as schemas.QUARANTINE has them."""
    return lines.where(F.col("reason").isNotNull()).select(
        "file",
        F.make_valid_utf8("line").alias("line"),  # who reads the lake may take nothing else
        "reason",
        "date",
    )


def _kept(spark: SparkSession, folder: Path, schema: StructType) -> DataFrame:
    """Return a table of a lake; one that nothing was ever written to is empty."""
    if (folder / "_delta_log").is_dir():
        return spark.read.format("delta").load(str(folder)).select(*schema.fieldNames())
    if not any(folder.glob(paths.ANY_DAY)):
        return spark.createDataFrame([], schema)
    _check(folder, schema)
    return spark.read.schema(schema).parquet(str(folder)).select(*schema.fieldNames())


def _check(folder: Path, schema: StructType) -> None:
    """Refuse a table without a column that it should have: to Spark it would be one in which nothing is known."""
    one = next(folder.glob(f"{paths.ANY_DAY}/**/*.parquet"), None)
    if one is None:
        return
    try:
        names = pq.read_schema(one).names
    except (OSError, pa.ArrowInvalid):
        raise ValueError(f"{one} cannot be read: it is damaged, or no Parquet; make the lake anew") from None
    for name in schema.fieldNames():
        if name not in names and name != "date":
            raise ValueError(f"{one} has no column {name}, which this version needs; make the lake anew")


def _told_once(tables: dict[str, DataFrame]) -> Facts:
    return Facts(
        **tables
        | {
            "verdict": tables["verdict"].transform(_turns),
            "rebalance": tables["rebalance"].transform(_ended_once),
        }
    )


def _turns(verdicts: DataFrame) -> DataFrame:
    """Keep the verdicts that say something else than the last one of their group and condition."""
    before = Window.partitionBy("group", "condition").orderBy("at", "status", "reason")
    said, last = F.struct("status", "reason"), F.lag(F.struct("status", "reason")).over(before)
    news = verdicts.withColumn("new", ~said.eqNullSafe(last)).where(F.col("new"))
    return news.select(*JOURNAL["verdict"].fieldNames())


def _ended_once(rebalances: DataFrame) -> DataFrame:
    """Keep the first word of the end of each rebalance."""
    told = Window.partitionBy("group", "began").orderBy("at", "seconds", "generation")
    first = rebalances.withColumn("place", F.row_number().over(told)).where(F.col("place") == 1)
    return first.select(*JOURNAL["rebalance"].fieldNames())
