"""Reader of a lake's history: a table for each kind of record, and the size and days of the history.

The lake has each line of the journal once. Two kinds of records are repeated in other lines, and count once in `Facts`:

- A *verdict* counts if its status or reason differs from the previous one of its group and condition; each leader
  records it again until the group's status has it.
- A *rebalance* counts once for its group and start: two operators may each record its end, at different times.

Both rules need a group's whole history, so they are applied when a snapshot is read.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from rota.pipeline.common.schemas import JOURNAL_SCHEMAS, QUARANTINE
from rota.pipeline.common.spark_session import fit_partitions
from rota.pipeline.lake.snapshots import LakeSnapshot
from rota.pipeline.lake.tables import FILES_TABLE, Lake

HISTORY_SCHEMAS = JOURNAL_SCHEMAS | {"quarantine": QUARANTINE}


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


def read_facts(spark: SparkSession, lake: Lake, snapshot: LakeSnapshot, since: date | None = None) -> Facts:
    """Return the facts of a snapshot, or only from the day `since` on; rows are read when requested."""
    fit_partitions(spark, journal_bytes(lake, snapshot, since))
    tables: dict[str, DataFrame] = {}
    for kind, schema in HISTORY_SCHEMAS.items():
        rows = lake.read(spark, snapshot, f"lake/{kind}", since)
        tables[kind] = rows.select(*schema.fieldNames())
    verdict = tables["verdict"].transform(_verdict_changes)
    return Facts(**tables | {"verdict": verdict, "rebalance": tables["rebalance"].transform(_first_endings)})


def journal_bytes(lake: Lake, snapshot: LakeSnapshot, since: date | None) -> int:
    """Return the compressed size of the segments whose records are in a history."""
    days = None if since is None else ds.field("date") >= since
    files = lake.table(FILES_TABLE.name).to_arrow(snapshot.version(FILES_TABLE.name), ["size_bytes"], days)
    return sum(files["size_bytes"].to_pylist())


def check_history(lake: Lake, snapshot: LakeSnapshot) -> None:
    """Raise ValueError if a snapshot has no records, since without records everything would look healthy."""
    if any(snapshot.version(f"lake/{kind}") is not None for kind in JOURNAL_SCHEMAS):
        return
    version = snapshot.version("lake/quarantine")
    reasons = lake.table("lake/quarantine").to_arrow(version, ["reason"])["reason"].to_pylist()
    example = f"; one line was rejected because: {reasons[0]}" if reasons else ""
    raise ValueError(f"{lake.uri} has no record that this version can read{example}")


def read_days(lake: Lake, snapshot: LakeSnapshot) -> set[date]:
    """Return the days of which a snapshot has records."""
    days: set[date] = set()
    for kind in JOURNAL_SCHEMAS:
        for fragment in lake.table(f"lake/{kind}").dataset(snapshot.version(f"lake/{kind}")).get_fragments():
            days.add(ds.get_partition_keys(fragment.partition_expression)["date"])
    return days


def first_day(lake: Lake, snapshot: LakeSnapshot, days: int) -> date:
    """Return the first of the last `days` days of a history; days in the future, of a wrong clock, are ignored."""
    today = datetime.now(UTC).date()
    newest = max((day for day in read_days(lake, snapshot) if day <= today), default=today)
    return newest - min(timedelta(days=days - 1), newest - date.min)  # a larger difference would overflow


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
