"""Who held which queue when, and what should not be in that: the operator audited by its own journal.

Nothing is guessed: where a document is missing, nobody is known to hold a queue until it is told of again, and that is
told as `Unknown`. A queue that was taken from its holder is the holder's until it is granted: it may still work it.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.common.schemas import INTERVALS, VIOLATIONS
from rota.pipeline.history.ordering import periods
from rota.pipeline.history.ownership import NOBODY, OF_QUEUE, ORDER, QUEUE, Account, account, horizon
from rota.pipeline.history.ranges import by_queue, seconds
from rota.pipeline.ingest.facts import Facts

SERIOUS = ("TwoOwners", "Unproved")  # of the operator; the others are of the journal, or of the group


def intervals(facts: Facts, it: Account | None = None) -> DataFrame:
    """Return who held each queue from when until when."""
    return _intervals((it or account(facts)).held, facts.obeyed)


def violations(facts: Facts, it: Account | None = None) -> DataFrame:
    """Return what should not be: two owners, a grant without proof, queues that nobody works, and what nobody knows."""
    it = it or account(facts)
    wrong = F.filter(F.array(_two_owners(), _unproved(), _unknown()), lambda one: one.isNotNull())
    found = it.held.select(*QUEUE, F.explode(wrong).alias("it")).select(*QUEUE, "it.*")
    return found.unionByName(_neglected(unowned(it))).select(
        *(F.col(field.name).cast(field.dataType) for field in VIOLATIONS)
    )


def _intervals(held: DataFrame, obeyed: DataFrame) -> DataFrame:
    order = Window.partitionBy(*OF_QUEUE).orderBy(*ORDER)
    same = (
        F.col("before.uid").eqNullSafe(F.col("uid"))
        & F.col("before.stretch").eqNullSafe(F.col("stretch"))
        & F.lag("until").over(order).eqNullSafe(F.col("at"))
    )
    first = F.struct("life", "generation", "step", "at", "act", "began")
    last = F.struct("life", "generation", "step", F.col("at").alias("_at"), "until")
    spans = (
        held.withColumn("began", _began())
        .withColumn("new", (~same).cast("int"))
        .withColumn("number", F.sum("new").over(order.rowsBetween(Window.unboundedPreceding, Window.currentRow)))
        .filter(F.col("uid").isNotNull())
        .groupBy(*OF_QUEUE, "number", "member", "uid")
        .agg(F.min(first).alias("first"), F.max(last).alias("last"))
        .select(
            *QUEUE,
            "member",
            "uid",
            F.col("first.at").alias("since"),
            F.col("last.until").alias("until"),
            F.col("first.generation").alias("generation"),
            F.col("first.act").eqNullSafe("Force").alias("forced"),
            F.when(F.col("first.act").isNotNull(), F.col("first.began")).alias("began"),
        )
    )
    heard = by_queue(obeyed.select("group", "generation", "uid", "at", "queues"))
    heard = heard.groupBy(*QUEUE, "generation", "uid").agg(F.min("at").alias("obeyed"))
    return (
        spans.join(heard, [*QUEUE, "generation", "uid"], how="left")
        .withColumn("seconds", seconds("began", "obeyed"))
        .select(*(F.col(field.name).cast(field.dataType) for field in INTERVALS))
    )


def _began() -> Column:
    """Return when the handover that ends with a grant began; null: the queue was nobody's, or it is not known."""
    state = F.col("state")
    return F.when(state == "Releasing", F.col("revoked")).when(state == "Owned", F.col("at"))


def _found(kind: str, *, since: Column, until: Column, members: Column, why: Column) -> Column:
    return F.struct(
        F.lit(kind).alias("kind"),
        since.alias("since"),
        until.cast("timestamp").alias("until"),
        F.filter(members, lambda it: it.isNotNull()).alias("members"),
        why.alias("why"),
    )


def _two_owners() -> Column:
    """Find grants of what another held by all that was told, and wholes that name two holders."""
    granted = F.col("odds") & (F.col("act") == "Grant") & F.col("before.member").isNotNull()
    both = F.col("odds") & F.col("whole") & (F.col("before.epoch") == F.col("epoch"))
    said = F.coalesce("said", F.lit("nobody"))
    had = F.concat(F.lit("Granted as "), said, F.lit("'s; it was "), F.col("before.member"), F.lit("'s"))
    why = F.when(F.col("whole"), F.lit("One record names two holders")).otherwise(had)
    members = F.array("before.member", "member")
    found = _found("TwoOwners", since=F.col("at"), until=F.col("until"), members=members, why=why)
    return F.when(granted | both, found)


def _unproved() -> Column:
    """Find grants without a word of the holder, or that it has ended; Immediate groups do without."""
    cooperative = F.array_contains("modes", "Cooperative") & ~F.array_contains("modes", "Immediate")
    bare = (F.col("act") == "Grant") & (F.col("proof") == "None")
    why = F.concat(F.lit("Granted from "), F.col("state"), F.lit(" without proof"))
    members = F.array("said", "member")
    found = _found("Unproved", since=F.col("at"), until=F.lit(None), members=members, why=why)
    return F.when(bare & ((F.col("state") == "Free") | cooperative), found)


def _unknown() -> Column:
    """Find what nobody knows: after a break, and before a record that is at odds with what was told."""
    torn = F.col("last") & F.col("ends_torn") & F.col("uid").isNotNull()
    since = F.when(torn, F.col("epoch_ends")).otherwise(F.col("cut"))
    until = F.when(torn, F.least("next.at", "next_whole")).otherwise(F.col("ends"))
    why = F.when(torn, "Records are missing").otherwise("What was told next is at odds with it, and no record says why")
    members = F.array("member", F.when(~torn & F.col("next.odds"), F.col("next.member")))
    return F.when(
        torn | F.col("cut").isNotNull(), _found("Unknown", since=since, until=until, members=members, why=why)
    )


def nobodys(held: DataFrame) -> DataFrame:
    """Return when queues of the group were nobody's.

    A queue that was dropped may not be one any more: it was nobody's if a whole says so, or if it was granted again.
    """
    again = F.col("next.act").isNotNull() & (F.col("next.state") == "Free") & ~F.col("next.odds")
    order = Window.partitionBy(*OF_QUEUE).orderBy(*ORDER)
    new = ~(F.lag("phase").over(order).eqNullSafe(NOBODY) & F.lag("until").over(order).eqNullSafe(F.col("at")))
    last = F.struct("life", "generation", "step", "at", "until")
    return (
        held.withColumn("new", new.cast("int"))
        .withColumn("number", F.sum("new").over(order.rowsBetween(Window.unboundedPreceding, Window.currentRow)))
        .filter(F.col("phase") == NOBODY)
        .groupBy(*OF_QUEUE, "number")
        .agg(F.min("at").alias("since"), F.max(last).alias("last"), F.max(F.col("whole") | again).alias("sure"))
        .filter("sure")
        .select(*QUEUE, "since", F.col("last.until").alias("until"))
    )


def unowned(it: Account) -> DataFrame:
    """Return when queues that shall be worked were nobody's, a row for each document meanwhile, and who shared then.

    What lasts yet ends with the group's last record.
    """
    spans = nobodys(it.held).select(*QUEUE, F.col("since").alias("from"), F.col("until").alias("to"))
    during = periods(it.told).filter(F.col("queues") > 0)
    since = F.greatest("from", "since")
    until = F.least(F.coalesce("to", "horizon"), F.coalesce("until", "horizon"))
    return (
        spans.join(during, "group", how="inner")
        .join(horizon(it.seen), "group", how="inner")
        .select(*QUEUE, "from", "to", "members", since.alias("since"), until.alias("until"))
        .filter(F.col("since") < F.col("until"))
    )


def _neglected(free: DataFrame) -> DataFrame:
    """Find queues that nobody had while there was somebody."""
    spans = free.filter(F.col("members") > 0).groupBy(*QUEUE, "from", "to")
    held = spans.agg(F.min("since").alias("since"), F.max("until").alias("until"))
    until = F.when(F.col("to").isNull() | (F.col("until") < F.col("to")), F.col("until")).otherwise(F.col("to"))
    none, why = F.array().cast("array<string>"), F.lit("Nobody had it, and members were there")
    it = _found("Unowned", since=F.col("since"), until=until, members=none, why=why)
    return held.select(*QUEUE, it.alias("it")).select(*QUEUE, "it.*")
