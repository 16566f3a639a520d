"""Ownership of each queue, record by record: its owner from then on, and the previous owner that the record names.

Every step is a window over one queue's records, so a group of ten thousand queues has ten thousand small windows.
"""

from functools import reduce
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.history.ordering import handover_records, order_records, owners_records
from rota.pipeline.history.ranges import expand_by_queue
from rota.pipeline.ingest.facts import Facts

QUEUE_COLUMNS = ("group", "topic", "broker", "queue")
QUEUE_PARTITION = ("sum", *QUEUE_COLUMNS)  # a hash first: Spark sorts by it much faster than by names
NOBODY = "Nobody"
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
    "wholes",
    "whole",
    "heard",
    "epoch_ends",
    "ends_torn",
    "ends_whole",
    "next_whole",
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
    stateful: list[DataFrame] = [frame.select("group", "at", F.col("at").alias("told")) for frame in kinds]
    other_kinds = (facts.membership, facts.handover, facts.rebalance, facts.redelivered)
    stateless: list[DataFrame] = [frame.select("group", "at") for frame in other_kinds]
    rows = reduce(lambda union, frame: union.unionByName(frame, allowMissingColumns=True), [*stateful, *stateless])
    return rows.groupBy("group", F.date_trunc("hour", "at").alias("hour")).agg(F.max("told").alias("told"))


def last_record_times(hours: DataFrame) -> DataFrame:
    """Return the time of each group's last record that describes its state."""
    return hours.groupBy("group").agg(F.max("told").alias("horizon")).filter(F.col("horizon").isNotNull())


def compute_holdings(records: DataFrame) -> DataFrame:
    """Return a row for each queue and record about it: its owner from `at` until `until`; null: still.

    `phase` is Owned, Releasing (revoked, and not granted yet) or Nobody. `odds` is true if the record names a previous
    owner that contradicts the earlier records.
    """
    of_queue = Window.partitionBy(*QUEUE_PARTITION).orderBy(*RECORD_ORDER)
    earlier = (
        Window.partitionBy(*QUEUE_PARTITION, "stretch")
        .orderBy(*RECORD_ORDER)
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    revoked = F.when(F.col("act") == "Revoke", F.col("at"))
    next_one = F.lead(F.struct("at", "epoch", "stretch", "whole", "odds", "act", "member", "state")).over(of_queue)
    past = F.lag(F.struct("epoch", "stretch", "wholes", "whole", "uid", "member", "phase")).over(of_queue)
    return (
        _expand_handovers(records)
        .unionByName(_expand_owners(records))
        .withColumn("sum", F.xxhash64(*QUEUE_COLUMNS))
        .withColumns({"before": past, "revoked": F.last(revoked, ignorenulls=True).over(earlier)})
        .withColumn("odds", _contradicts_earlier())
        .withColumn("next", next_one)
        .withColumn("last", ~F.col("next.epoch").eqNullSafe(F.col("epoch")))  # in its epoch
        .withColumns(
            {"ends": F.when(F.col("last"), F.col("epoch_ends")).otherwise(F.col("next.at")), "cut": _certain_until()}
        )
        .withColumn("until", F.coalesce("cut", "ends"))
    )


def _expand_handovers(records: DataFrame) -> DataFrame:
    act = F.col("act")
    granted, dropped = act.isin(*_GRANT_ACTS), act == "Drop"
    stays = act == "Return"

    def holder(to: str, from_: str) -> Column:
        back = F.when(stays, F.coalesce(to, from_)).otherwise(F.col(from_))
        return F.when(dropped, None).when(granted, F.col(to)).otherwise(back)

    parts = handover_records(records).select(
        *_KEPT_COLUMNS,
        "act",
        "proof",
        "state",
        F.col("from").alias("said"),
        F.col("fromUid").alias("said_uid"),
        holder("to", "from").alias("member"),
        holder("toUid", "fromUid").alias("uid"),
        F.when(dropped, NOBODY).when(act == "Revoke", "Releasing").otherwise("Owned").alias("phase"),
        "ranges",
    )
    return expand_by_queue(parts, "ranges")


def _expand_owners(records: DataFrame) -> DataFrame:
    """Expand `owners` records to one row per queue; such a row names its owner as the previous owner, too."""
    lines = owners_records(records).select(*_KEPT_COLUMNS, F.explode("owned").alias("it"))
    parts = lines.select(
        *_KEPT_COLUMNS,
        F.lit(None).cast("string").alias("act"),
        F.lit(None).cast("string").alias("proof"),
        F.lit(None).cast("string").alias("state"),
        F.col("it.member").alias("said"),
        F.col("it.uid").alias("said_uid"),
        F.col("it.member").alias("member"),
        F.col("it.uid").alias("uid"),
        F.col("it.phase").alias("phase"),
        F.col("it.queues").alias("ranges"),
    )
    return expand_by_queue(parts, "ranges")


def _contradicts_earlier() -> Column:
    """Return whether a record contradicts earlier ones about a queue's previous owner; false if there were none."""
    continuous = F.col("before.stretch").eqNullSafe(F.col("stretch"))
    named = F.col("wholes") - F.col("whole").cast("int")  # earlier wholes; they list the queue if it had an owner
    left_out = ~(continuous & (F.col("before.wholes") >= named))
    holder = F.when(~left_out, F.col("before.uid"))
    return (continuous | F.col("heard")) & ~holder.eqNullSafe(F.col("said_uid"))


def _certain_until() -> Column:
    """Return when the owner becomes uncertain if the next record contradicts this one: at the next plan, if any."""
    named = (F.col("next.epoch") == F.col("epoch") + 1) & F.col("next.whole")
    missing = F.col("last") & F.col("ends_whole") & ~F.col("ends_torn") & ~F.coalesce(named, F.expr("false"))
    follows = (~F.col("last") | named) & (F.col("next.stretch") == F.col("stretch"))
    odd = follows & F.col("next.odds") & ~F.col("next.act").eqNullSafe("Grant")  # a grant counts as TwoOwners instead
    odd &= ~(F.col("next.whole") & ~F.col("last"))  # and so do two entries of one whole
    ends = F.when(missing & F.col("uid").isNotNull(), F.col("epoch_ends")).when(odd, F.col("next.at"))
    return F.when(ends.isNotNull(), F.least(ends, "next_plan"))
