"""Ownership of each queue, record by record: its owner from then on, and the previous owner that the record names.

A *holding* is a row for one queue and one `handover` or `owners` record about it. `rota.pipeline.history.ordering`
defines life, chain and epoch, and the columns of records. A holding ends at the queue's next record in its epoch, and
the last one of an epoch where the epoch ends.

Every step is a window over one queue's records, so a group of ten thousand queues has ten thousand small windows.
"""

from functools import reduce
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.common.columns import false_if_null
from rota.pipeline.history.ordering import RECORD_ORDER, UNOWNED, order_records
from rota.pipeline.history.ranges import expand_by_queue
from rota.pipeline.ingest.facts import Facts

QUEUE_COLUMNS = ("group", "topic", "broker", "queue")
QUEUE_PARTITION = ("queue_hash", *QUEUE_COLUMNS)  # a hash first: Spark sorts by it much faster than by names
QUEUE_RECORD_ORDER = (*RECORD_ORDER, "uid")  # a faulty `owners` record may list a queue twice, for two pods
_GRANT_ACTS = ("Grant", "Force")
_STATE_KINDS = ("plan", "obeyed", "owners", "offsets", "verdict")  # records that describe the state of a group
_OTHER_KINDS = ("membership", "handover", "rebalance", "redelivered")
_EPOCH_COLUMNS = ("epoch", "epoch_end", "epoch_ends_with_break", "epoch_ends_with_owners")
_OWNERS_RECORD_COLUMNS = ("is_owners", "owners_record_count", "owners_known_before", "next_owners_at")
# The columns of a record that its holdings keep.
_KEPT_COLUMNS = ("group", *RECORD_ORDER, "chain", *_EPOCH_COLUMNS, *_OWNERS_RECORD_COLUMNS, "next_plan_at", "modes")


class OwnershipAccount(NamedTuple):
    """Tables that all reports about ownership read."""

    records: DataFrame  # in order, with the columns of `order_records`
    holdings: DataFrame
    hours: DataFrame  # with any record of a group; `state_at`: time of the hour's last record of a kind in _STATE_KINDS


def build_account(facts: Facts) -> OwnershipAccount:
    """Build the account of all groups, and persist its tables: every consumer reads them more than once."""
    records = order_records(facts).persist()
    return OwnershipAccount(records, compute_holdings(records).persist(), _recorded_hours(facts).persist())


def _recorded_hours(facts: Facts) -> DataFrame:
    never = F.lit(None).cast("timestamp")
    frames: list[DataFrame] = []
    for kinds, state_at in ((_STATE_KINDS, F.col("at")), (_OTHER_KINDS, never)):
        frames += [getattr(facts, kind).select("group", "at", state_at.alias("state_at")) for kind in kinds]
    rows = reduce(DataFrame.unionByName, frames)
    return rows.groupBy("group", F.date_trunc("hour", "at").alias("hour")).agg(F.max("state_at").alias("state_at"))


def last_record_times(hours: DataFrame) -> DataFrame:
    """Return in `recorded_until` the time of each group's last record that describes its state."""
    last = hours.groupBy("group").agg(F.max("state_at").alias("recorded_until"))
    return last.filter(F.col("recorded_until").isNotNull())


def compute_holdings(records: DataFrame) -> DataFrame:
    """Return the holdings: a queue's owner from `at` until `until`, which is null as long as that is the owner.

    `phase` is Owned, Releasing (revoked, and not granted yet) or Unowned. `contradicts` is true if the record
    names a previous owner that contradicts the earlier records; `certain_until` is when the owner becomes uncertain by
    such a record, null: never. `before` and `next` are the queue's previous and next holding.
    """
    of_queue = Window.partitionBy(*QUEUE_PARTITION).orderBy(*QUEUE_RECORD_ORDER)
    of_chain = Window.partitionBy(*QUEUE_PARTITION, "chain").orderBy(*QUEUE_RECORD_ORDER)
    earlier = of_chain.rowsBetween(Window.unboundedPreceding, -1)
    revoked_at = F.last(F.when(F.col("act") == "Revoke", F.col("at")), ignorenulls=True).over(earlier)
    previous = F.struct("epoch", "chain", "owners_record_count", "is_owners", "uid", "member", "phase")
    following = F.struct("at", "epoch", "chain", "is_owners", "contradicts", "act", "member", "state")
    end = F.when(F.col("is_last_in_epoch"), F.col("epoch_end")).otherwise(F.col("next.at"))
    return (
        _expand_handovers(records)
        .unionByName(_expand_owners(records))
        .withColumn("queue_hash", F.xxhash64(*QUEUE_COLUMNS))
        .withColumns({"before": F.lag(previous).over(of_queue), "revoked_at": revoked_at})
        .withColumn("contradicts", _contradicts_earlier())
        .withColumn("next", F.lead(following).over(of_queue))
        .withColumn("is_last_in_epoch", ~F.col("next.epoch").eqNullSafe(F.col("epoch")))
        .withColumns({"end": end, "certain_until": _certain_until()})
        .withColumn("until", F.coalesce("certain_until", "end"))
    )


def _expand_handovers(records: DataFrame) -> DataFrame:
    """Expand `handover` records to one row per queue."""
    act = F.col("act")
    is_dropped = act == "Drop"

    def owner_after_act(granted_to: str, previous: str) -> Column:
        # A revoked queue stays with its previous owner. A return gives it back to that owner; its record may lack `to`.
        kept = F.when(act == "Return", F.coalesce(granted_to, previous)).otherwise(F.col(previous))
        return F.when(is_dropped, None).when(act.isin(*_GRANT_ACTS), F.col(granted_to)).otherwise(kept)

    parts = records.filter(act.isNotNull()).select(
        *_KEPT_COLUMNS,
        "act",
        "proof",
        "state",
        F.col("from").alias("named_owner"),
        F.col("fromUid").alias("named_uid"),
        owner_after_act("to", "from").alias("member"),
        owner_after_act("toUid", "fromUid").alias("uid"),
        F.when(is_dropped, UNOWNED).when(act == "Revoke", "Releasing").otherwise("Owned").alias("phase"),
        "ranges",
    )
    return expand_by_queue(parts, "ranges")


def _expand_owners(records: DataFrame) -> DataFrame:
    """Expand `owners` records to one row per queue; such a row names its owner as the previous owner, too."""
    lines = records.filter("is_owners").select(*_KEPT_COLUMNS, F.explode("owned").alias("entry"))
    no_text = F.lit(None).cast("string")
    parts = lines.select(
        *_KEPT_COLUMNS,
        *map(no_text.alias, ("act", "proof", "state")),
        F.col("entry.member").alias("named_owner"),
        F.col("entry.uid").alias("named_uid"),
        F.col("entry.member").alias("member"),
        F.col("entry.uid").alias("uid"),
        F.col("entry.phase").alias("phase"),
        F.col("entry.queues").alias("ranges"),
    )
    return expand_by_queue(parts, "ranges")


def _contradicts_earlier() -> Column:
    """Return whether a record names another previous owner than the earlier records; false if those tell nothing.

    Example, about queue 0; it had no owner before generation 6, for the second record leaves it out:

        owners 5   m1: 0     owners_record_count 1
        owners 5   m1: -     owners_record_count 2
        grant 6    to m2     owners_record_count 2, before.owners_record_count 1; a grant from m1 would contradict
    """
    is_same_chain = F.col("before.chain").eqNullSafe(F.col("chain"))
    earlier_owners_records = F.col("owners_record_count") - F.col("is_owners").cast("int")
    is_left_out = F.col("before.owners_record_count") < earlier_owners_records
    known_uid = F.when(is_same_chain & ~is_left_out, F.col("before.uid"))
    return (is_same_chain | F.col("owners_known_before")) & ~known_uid.eqNullSafe(F.col("named_uid"))


def _certain_until() -> Column:
    """Return when the owner becomes uncertain, because the next record about all queues or this queue contradicts it.

    The missing change was part of the next assignment at the earliest, so the owner is certain up to its plan.
    """
    is_listed_next = false_if_null((F.col("next.epoch") == F.col("epoch") + 1) & F.col("next.is_owners"))
    contradicted_at = F.when(_is_left_out_next(is_listed_next), F.col("epoch_end")).when(
        _is_contradicted_next(is_listed_next), F.col("next.at")
    )
    return F.when(contradicted_at.isNotNull(), F.least(contradicted_at, "next_plan_at"))


def _is_left_out_next(is_listed_next: Column) -> Column:
    """Return whether the queue has an owner, and the `owners` record that ends the epoch leaves the queue out.

    Example: grant 7 to m2, then `owners` 8 without the queue: a record by which m2 lost it is missing.
    """
    ends_with_owners = F.col("is_last_in_epoch") & F.col("epoch_ends_with_owners") & ~F.col("epoch_ends_with_break")
    return ends_with_owners & ~is_listed_next & F.col("uid").isNotNull()


def _is_contradicted_next(is_listed_next: Column) -> Column:
    """Return whether the queue's next record, in this epoch or at its end, names another previous owner.

    Example: grant 7 to m2, then `owners` 8 with the queue at m1. The audit reports two other cases as TwoOwners: a
    grant from another owner, and an `owners` record that lists the queue twice.
    """
    is_listed_twice = F.col("next.is_owners") & ~F.col("is_last_in_epoch")
    is_grant = F.col("next.act").eqNullSafe("Grant")
    continues = (~F.col("is_last_in_epoch") | is_listed_next) & (F.col("next.chain") == F.col("chain"))
    return continues & F.col("next.contradicts") & ~is_grant & ~is_listed_twice
