"""Ownership of each queue, record by record: its owner from then on, and the previous owner that the record names.

Every step is a window over one queue's records, so a group of ten thousand queues has ten thousand small windows.
"""

from functools import reduce
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.history.ordering import UNOWNED, handover_records, order_records, owners_records
from rota.pipeline.history.ranges import expand_by_queue
from rota.pipeline.ingest.facts import Facts

QUEUE_COLUMNS = ("group", "topic", "broker", "queue")
QUEUE_PARTITION = ("sum", *QUEUE_COLUMNS)  # a hash first: Spark sorts by it much faster than by names
_GRANT_ACTS = ("Grant", "Force")
RECORD_ORDER = ("life", "generation", "step", "at", "uid")
_KEPT_COLUMNS = (
    "group",
    "at",
    "generation",
    "step",
    "life",
    "epoch",
    "stretch",
    "owners_count",
    "is_owners",
    "had_known_owners",
    "epoch_ends",
    "ends_with_break",
    "ends_with_owners",
    "next_owners",
    "next_plan",
    "modes",
)


class OwnershipAccount(NamedTuple):
    """The journal's records in order, the ownership of queues, and the hours with records."""

    records: DataFrame
    holdings: DataFrame
    hours: DataFrame


def build_account(facts: Facts) -> OwnershipAccount:
    """Build the account of all groups, and persist its tables: every consumer reads them more than once."""
    records = order_records(facts).persist()
    return OwnershipAccount(records, compute_holdings(records).persist(), _recorded_hours(facts).persist())


def _recorded_hours(facts: Facts) -> DataFrame:
    """Return the hours with records of each group, and the time of the last record in it that describes its state."""
    kinds = (facts.plan, facts.obeyed, facts.owners, facts.offsets, facts.verdict)
    stateful: list[DataFrame] = [frame.select("group", "at", F.col("at").alias("state_at")) for frame in kinds]
    other_kinds = (facts.membership, facts.handover, facts.rebalance, facts.redelivered)
    stateless: list[DataFrame] = [frame.select("group", "at") for frame in other_kinds]
    rows = reduce(lambda union, frame: union.unionByName(frame, allowMissingColumns=True), [*stateful, *stateless])
    return rows.groupBy("group", F.date_trunc("hour", "at").alias("hour")).agg(F.max("state_at").alias("state_at"))


def last_record_times(hours: DataFrame) -> DataFrame:
    """Return the time of each group's last record that describes its state."""
    return hours.groupBy("group").agg(F.max("state_at").alias("horizon")).filter(F.col("horizon").isNotNull())


def compute_holdings(records: DataFrame) -> DataFrame:
    """Return a row for each queue and record about it: its owner from `at` until `until`; null: still.

    `phase` is Owned, Releasing (revoked, and not granted yet) or Unowned. `contradicts` is true if the record
    names a previous owner that contradicts the earlier records.
    """
    of_queue = Window.partitionBy(*QUEUE_PARTITION).orderBy(*RECORD_ORDER)
    earlier = (
        Window.partitionBy(*QUEUE_PARTITION, "stretch")
        .orderBy(*RECORD_ORDER)
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    revoked = F.when(F.col("act") == "Revoke", F.col("at"))
    following = F.lead(F.struct("at", "epoch", "stretch", "is_owners", "contradicts", "act", "member", "state")).over(
        of_queue
    )
    previous = F.lag(F.struct("epoch", "stretch", "owners_count", "is_owners", "uid", "member", "phase")).over(of_queue)
    return (
        _expand_handovers(records)
        .unionByName(_expand_owners(records))
        .withColumn("sum", F.xxhash64(*QUEUE_COLUMNS))
        .withColumns({"before": previous, "revoked": F.last(revoked, ignorenulls=True).over(earlier)})
        .withColumn("contradicts", _contradicts_earlier())
        .withColumn("next", following)
        .withColumn("last", ~F.col("next.epoch").eqNullSafe(F.col("epoch")))  # in its epoch
        .withColumns(
            {
                "ends": F.when(F.col("last"), F.col("epoch_ends")).otherwise(F.col("next.at")),
                "certain_until": _certain_until(),
            }
        )
        .withColumn("until", F.coalesce("certain_until", "ends"))
    )


def _expand_handovers(records: DataFrame) -> DataFrame:
    act = F.col("act")
    granted = act.isin(*_GRANT_ACTS)
    dropped = act == "Drop"
    stays = act == "Return"

    def holder(to: str, from_: str) -> Column:
        back = F.when(stays, F.coalesce(to, from_)).otherwise(F.col(from_))
        return F.when(dropped, None).when(granted, F.col(to)).otherwise(back)

    parts = handover_records(records).select(
        *_KEPT_COLUMNS,
        "act",
        "proof",
        "state",
        F.col("from").alias("named_owner"),
        F.col("fromUid").alias("named_uid"),
        holder("to", "from").alias("member"),
        holder("toUid", "fromUid").alias("uid"),
        F.when(dropped, UNOWNED).when(act == "Revoke", "Releasing").otherwise("Owned").alias("phase"),
        "ranges",
    )
    return expand_by_queue(parts, "ranges")


def _expand_owners(records: DataFrame) -> DataFrame:
    """Expand `owners` records to one row per queue; such a row names its owner as the previous owner, too."""
    lines = owners_records(records).select(*_KEPT_COLUMNS, F.explode("owned").alias("entry"))
    parts = lines.select(
        *_KEPT_COLUMNS,
        F.lit(None).cast("string").alias("act"),
        F.lit(None).cast("string").alias("proof"),
        F.lit(None).cast("string").alias("state"),
        F.col("entry.member").alias("named_owner"),
        F.col("entry.uid").alias("named_uid"),
        F.col("entry.member").alias("member"),
        F.col("entry.uid").alias("uid"),
        F.col("entry.phase").alias("phase"),
        F.col("entry.queues").alias("ranges"),
    )
    return expand_by_queue(parts, "ranges")


def _contradicts_earlier() -> Column:
    """Return whether a record contradicts earlier ones about a queue's previous owner; false if there were none."""
    continuous = F.col("before.stretch").eqNullSafe(F.col("stretch"))
    # Earlier `owners` records list the queue if it had an owner.
    earlier_count = F.col("owners_count") - F.col("is_owners").cast("int")
    left_out = ~(continuous & (F.col("before.owners_count") >= earlier_count))
    holder = F.when(~left_out, F.col("before.uid"))
    return (continuous | F.col("had_known_owners")) & ~holder.eqNullSafe(F.col("named_uid"))


def _certain_until() -> Column:
    """Return when the owner becomes uncertain if the next record contradicts this one: at the next plan, if any."""
    named = (F.col("next.epoch") == F.col("epoch") + 1) & F.col("next.is_owners")
    missing = (
        F.col("last") & F.col("ends_with_owners") & ~F.col("ends_with_break") & ~F.coalesce(named, F.expr("false"))
    )
    follows = (~F.col("last") | named) & (F.col("next.stretch") == F.col("stretch"))
    # A grant, or two entries of one `owners` record, count as TwoOwners instead.
    contradicted = follows & F.col("next.contradicts") & ~F.col("next.act").eqNullSafe("Grant")
    contradicted &= ~(F.col("next.is_owners") & ~F.col("last"))
    ends = F.when(missing & F.col("uid").isNotNull(), F.col("epoch_ends")).when(contradicted, F.col("next.at"))
    return F.when(ends.isNotNull(), F.least(ends, "next_plan"))
