"""What the journal tells of each queue, record by record: whose it was then, and whose before by that.

Every step is a window over one queue's records, so that a group of ten thousand queues is ten thousand small windows.
"""

from functools import reduce
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.history.ordering import acts, ordered, wholes
from rota.pipeline.history.ranges import by_queue
from rota.pipeline.ingest.facts import Facts

QUEUE = ("group", "topic", "broker", "queue")
OF_QUEUE = ("sum", *QUEUE)  # a number first, by which rows are sorted much sooner than by names
NOBODY = "Nobody"
_GIVEN = ("Grant", "Force")
ORDER = ("life", "generation", "step", "at", "uid")
_KEPT = (
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


class Account(NamedTuple):
    """What the journal tells, in order, and what that says of each queue; and of which hours it tells."""

    told: DataFrame
    held: DataFrame
    seen: DataFrame


def account(facts: Facts) -> Account:
    """Put it together, and keep it: all that is asked of a history looks at it more than once."""
    told = ordered(facts).persist()
    return Account(told, holdings(told).persist(), _seen(facts).persist())


def _seen(facts: Facts) -> DataFrame:
    """Return each group's hours that have any record of it, and when they last told how it was."""
    kinds = (facts.plan, facts.obeyed, facts.owners, facts.offsets, facts.verdict)
    telling: list[DataFrame] = [it.select("group", "at", F.col("at").alias("told")) for it in kinds]
    rest = (facts.membership, facts.handover, facts.rebalance, facts.redelivered)
    others: list[DataFrame] = [it.select("group", "at") for it in rest]
    every = reduce(lambda some, more: some.unionByName(more, allowMissingColumns=True), [*telling, *others])
    return every.groupBy("group", F.date_trunc("hour", "at").alias("hour")).agg(F.max("told").alias("told"))


def horizon(seen: DataFrame) -> DataFrame:
    """Return when each group was last told of."""
    return seen.groupBy("group").agg(F.max("told").alias("horizon")).filter(F.col("horizon").isNotNull())


def holdings(told: DataFrame) -> DataFrame:
    """Return a row for each queue and record about it: who holds it from then on, `until` when.

    `phase`: Owned, Releasing (taken from its holder, granted to nobody yet) or Nobody. `odds`: the record says of the
    time before it what is not so by those before it. `until` null: it is so yet.
    """
    of_queue = Window.partitionBy(*OF_QUEUE).orderBy(*ORDER)
    earlier = Window.partitionBy(*OF_QUEUE, "stretch").orderBy(*ORDER).rowsBetween(Window.unboundedPreceding, -1)
    revoked = F.when(F.col("act") == "Revoke", F.col("at"))
    next_one = F.lead(F.struct("at", "epoch", "stretch", "whole", "odds", "act", "member", "state")).over(of_queue)
    past = F.lag(F.struct("epoch", "stretch", "wholes", "whole", "uid", "member", "phase")).over(of_queue)
    return (
        _of_acts(told)
        .unionByName(_of_wholes(told))
        .withColumn("sum", F.xxhash64(*QUEUE))
        .withColumns({"before": past, "revoked": F.last(revoked, ignorenulls=True).over(earlier)})
        .withColumn("odds", _odds())
        .withColumn("next", next_one)
        .withColumn("last", ~F.col("next.epoch").eqNullSafe(F.col("epoch")))  # of its epoch
        .withColumns({"ends": F.when(F.col("last"), F.col("epoch_ends")).otherwise(F.col("next.at")), "cut": _cut()})
        .withColumn("until", F.coalesce("cut", "ends"))
    )


def _of_acts(told: DataFrame) -> DataFrame:
    act = F.col("act")
    given, dropped = act.isin(*_GIVEN), act == "Drop"
    stays = act == "Return"

    def holder(to: str, from_: str) -> Column:
        back = F.when(stays, F.coalesce(to, from_)).otherwise(F.col(from_))
        return F.when(dropped, None).when(given, F.col(to)).otherwise(back)

    parts = acts(told).select(
        *_KEPT,
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
    return by_queue(parts, "ranges")


def _of_wholes(told: DataFrame) -> DataFrame:
    """Of a whole each line is an act of its own: what it says of the past is what it says of now."""
    lines = wholes(told).select(*_KEPT, F.explode("owned").alias("it"))
    parts = lines.select(
        *_KEPT,
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
    return by_queue(parts, "ranges")


def _odds() -> Column:
    """Whether a record says that a queue was another's before than was told; if nothing was, nothing is at odds."""
    known = F.col("before.stretch").eqNullSafe(F.col("stretch"))
    named = F.col("wholes") - F.col("whole").cast("int")  # wholes so far in which it could have been
    left_out = ~(known & (F.col("before.wholes") >= named))
    holder = F.when(~left_out, F.col("before.uid"))
    return (known | F.col("heard")) & ~holder.eqNullSafe(F.col("said_uid"))


def _cut() -> Column:
    """Return until when it was surely so, if the next record says otherwise: until a document could change it."""
    named = (F.col("next.epoch") == F.col("epoch") + 1) & F.col("next.whole")
    missing = F.col("last") & F.col("ends_whole") & ~F.col("ends_torn") & ~F.coalesce(named, F.expr("false"))
    follows = (~F.col("last") | named) & (F.col("next.stretch") == F.col("stretch"))
    odd = follows & F.col("next.odds") & ~F.col("next.act").eqNullSafe("Grant")  # that one is not unknown, but wrong
    odd &= ~(F.col("next.whole") & ~F.col("last"))  # nor is what one whole says twice
    ends = F.when(missing & F.col("uid").isNotNull(), F.col("epoch_ends")).when(odd, F.col("next.at"))
    return F.when(ends.isNotNull(), F.least(ends, "next_plan"))
