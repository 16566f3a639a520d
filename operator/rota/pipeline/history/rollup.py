"""A group's hours in figures: a row for each hour that has any record of it; docs/pipeline.md has every definition.

What lasts longer than an hour is split where hours begin; what lasts yet ends with the group's last record.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.lag import Judgement
from rota.pipeline.common.schemas import ROLLUP
from rota.pipeline.history.audit import intervals, unowned
from rota.pipeline.history.lag_states import looks
from rota.pipeline.history.ownership import Account, account, horizon
from rota.pipeline.history.ranges import by_queue, count, seconds
from rota.pipeline.ingest.facts import Facts

ACCURACY = 10_000  # of percentiles: their place is right to one in so many
_KEY = ["group", "hour"]
_HEARD = ("Ready", "Unready", "Ended")
_COUNTS = ("moved_queues", "forced_queues", "handovers", "returned", "taken_over")
_LASTING = ("unowned_queue_seconds", "contested_queue_seconds")


def rollup(facts: Facts) -> DataFrame:
    """Return the figures of each group's hours."""
    it = account(facts)
    parts = [
        _rebalances(facts.rebalance),
        _moves(facts.handover),
        _handovers(intervals(facts, it)),
        _lasting(unowned(it), "unowned_queue_seconds"),
        _lasting(contested(facts, it), "contested_queue_seconds"),
        _shares(it),
        _lags(looks(facts, it)),
        _redelivered(facts.redelivered),
        _broken(facts, it).withColumn("broken", F.expr("true")),
    ]
    whole = it.seen.select(*_KEY)
    for part in parts:
        whole = whole.join(part, _KEY, how="left")
    nothing = {name: F.coalesce(name, F.lit(0)) for name in (*_COUNTS, *_LASTING, "minutes_seen")}
    return (
        whole.withColumns(nothing)
        .withColumn("redelivered", F.col("returned") + F.col("taken_over"))
        .withColumn("rebalances", F.coalesce("rebalances", F.create_map().cast("map<string,bigint>")))
        .withColumn("verdict_minutes", F.coalesce("verdict_minutes", F.create_map().cast("map<string,double>")))
        .withColumn("complete", F.col("broken").isNull())
        .select(*(F.col(field.name).cast(field.dataType) for field in ROLLUP))
    )


def _hour(at: str = "at") -> Column:
    return F.date_trunc("hour", F.col(at)).alias("hour")


def _split(df: DataFrame) -> DataFrame:
    """Split what lasts from `since` until `until` where hours begin."""
    last = F.date_trunc("hour", F.col("until") - F.expr("interval 1 microsecond"))
    hours = F.sequence(F.date_trunc("hour", F.col("since")), last, F.expr("interval 1 hour"))
    lasting = df.filter(F.col("since") < F.col("until")).withColumn("hour", F.explode(hours))
    return lasting.withColumns(
        {
            "since": F.greatest("since", "hour"),
            "until": F.least("until", F.col("hour") + F.expr("interval 1 hour")),
        }
    )


def _percentiles(of: Column | str, name: str) -> list[Column]:
    both = F.percentile_approx(of, [0.5, 0.99], ACCURACY)  # Spark sees that it is the same, and counts once
    return [
        F.get(both, F.lit(place)).cast("double").alias(f"{name}_{title}") for place, title in enumerate(("p50", "p99"))
    ]


def _rebalances(rebalances: DataFrame) -> DataFrame:
    once = rebalances.groupBy("group", "began").agg(F.min(F.struct("at", "reason", "seconds")).alias("it"))
    ended = once.select("group", _hour("it.at"), "it.reason", "it.seconds")
    counts = ended.groupBy(*_KEY, "reason").agg(F.count("*").alias("times"))
    pairs = F.map_from_entries(F.collect_list(F.struct("reason", "times")))
    by_reason = counts.groupBy(*_KEY).agg(pairs.alias("rebalances"))
    return by_reason.join(ended.groupBy(*_KEY).agg(*_percentiles("seconds", "rebalance_seconds")), _KEY, how="inner")


def _moves(handovers: DataFrame) -> DataFrame:
    """Count queues as `rota_queues_moved_total` does: those that were given to another than had them."""
    given = handovers.filter(F.col("act").isin("Grant", "Force")).withColumn("many", count(F.col("queues")))
    another = F.col("from").isNotNull() & ~F.struct("from", "fromUid").eqNullSafe(F.struct("to", "toUid"))
    return given.groupBy("group", _hour()).agg(
        F.sum(F.when(another, F.col("many")).otherwise(0)).alias("moved_queues"),
        F.sum(F.when(F.col("act") == "Force", F.col("many")).otherwise(0)).alias("forced_queues"),
    )


def _handovers(held: DataFrame) -> DataFrame:
    over = held.filter(F.col("seconds").isNotNull())
    return over.groupBy("group", _hour("obeyed")).agg(
        F.count("*").alias("handovers"), *_percentiles("seconds", "handover_seconds")
    )


def _lasting(spans: DataFrame, name: str) -> DataFrame:
    return spans.transform(_split).groupBy(*_KEY).agg(F.sum(seconds("since", "until")).alias(name))


def contested(facts: Facts, it: Account) -> DataFrame:
    """Return how long each forced queue may have been worked by two.

    The operator counts until the document that it writes when the former holder is known to be past it. Which one that
    is no record says: it is taken to be the first later one by which that pod is gone, or is heard.
    """
    forced = by_queue(
        facts.handover.filter(F.col("act") == "Force").select("group", "at", "generation", "fromUid", "queues")
    )
    present = facts.membership.select(
        "group",
        F.col("at").alias("later"),
        F.col("generation").alias("seen"),
        F.map_values("members").alias("pods"),
    )
    # Of a queue that was nobody's it is not known whose word is missing.
    silent = F.exists("pods", lambda it: (it["uid"] == F.col("fromUid")) & ~it["standing"].isin(*_HEARD))
    past = F.col("fromUid").isNull() | ~silent
    after = (F.col("later") >= F.col("at")) & (F.col("seen") > F.col("generation")) & past
    queue = ["group", "topic", "broker", "queue", "at", "fromUid"]
    ends = forced.join(present, "group", how="inner").filter(after).groupBy(*queue).agg(F.min("later").alias("over"))
    over = ends.withColumn("fromUid", F.coalesce("fromUid", F.lit("")))
    return (
        forced.withColumn("fromUid", F.coalesce("fromUid", F.lit("")))
        .join(over, queue, how="left")
        .join(horizon(it.seen), "group", how="inner")
        .select("group", F.col("at").alias("since"), F.coalesce("over", "horizon").alias("until"))
    )


def _shares(it: Account) -> DataFrame:
    """Weigh by time how uneven the queues lay with the members that shared them, and how many of them had none."""
    order = Window.partitionBy("group").orderBy("life", "generation", "step", "at")
    known = F.when(F.col("ends_torn"), F.col("epoch_ends"))
    spans = (
        it.told.filter(F.col("sharing").isNotNull())
        .withColumn("next", F.lead("at").over(order))
        .filter(F.col("sure") & ~F.col("model").eqNullSafe("Broadcasting"))
        .join(horizon(it.seen), "group", how="inner")
        .withColumn("until", F.least(F.coalesce("next", "horizon"), known))
    )
    mine = it.held.filter(F.col("phase") == "Owned")
    begun = mine.select("group", "uid", "at", F.lit(1).alias("more"))
    ended = mine.filter(F.col("until").isNotNull())
    ended = ended.select("group", "uid", F.col("until").alias("at"), F.lit(-1).alias("more"))
    asked = spans.select("group", F.explode("sharing").alias("uid"), "at", F.lit(0).alias("more"), "until")
    steps = asked.unionByName(begun.unionByName(ended), allowMissingColumns=True)
    so_far = Window.partitionBy("group", "uid").orderBy("at").rangeBetween(Window.unboundedPreceding, Window.currentRow)
    owned = steps.withColumn("queues", F.sum("more").over(so_far)).filter(F.col("until") > F.col("at"))
    each = owned.groupBy("group", F.col("at").alias("since"), "until").agg(
        F.max("queues").alias("most"),
        F.sum("queues").alias("all"),
        F.count("*").alias("members"),
        F.sum((F.col("queues") == 0).cast("int")).alias("idle"),
    )
    ratio = F.when(F.col("all") > 0, F.col("most") * F.col("members") / F.col("all"))
    lasts = seconds("since", "until")
    weighed = F.sum(F.when(ratio.isNotNull(), lasts))
    idle = F.sum(F.col("idle") * lasts) / 3600
    return (
        each.transform(_split)
        .groupBy(*_KEY)
        .agg((F.sum(ratio * lasts) / weighed).alias("imbalance"), idle.alias("idle_member_hours"))
    )


def _lags(seen: DataFrame) -> DataFrame:
    minutes = [F.lit(str(it)) for it in Judgement], [F.sum(F.col(str(it)) * F.col("seconds")) / 60 for it in Judgement]
    pairs = [column for pair in zip(*minutes, strict=True) for column in pair]
    return seen.groupBy(*_KEY).agg(
        *_percentiles("lag", "lag"),
        F.max("lag").alias("lag_max"),
        *_percentiles("delay", "delay"),
        F.map_filter(F.create_map(*pairs), lambda _, it: it > 0).alias("verdict_minutes"),
        (F.sum("seconds") / 60).alias("minutes_seen"),
        F.sum(F.col("back") + F.col("retries")).alias("returned"),
    )


def _redelivered(taken_over: DataFrame) -> DataFrame:
    """Count what came again because another process read its queue."""
    return taken_over.groupBy("group", _hour()).agg(F.sum("messages").alias("taken_over"))


def _broken(facts: Facts, it: Account) -> DataFrame:
    """Return the hours of which something is missing: of a group, or of whom nobody knows."""
    torn = it.told.filter("torn").join(horizon(it.seen), "group", how="inner")
    spans = torn.select(
        "group", F.col("starts").alias("since"), F.coalesce("next_whole", F.greatest("horizon", "at")).alias("until")
    )
    of_groups = _touched(spans).select(*_KEY)
    of_all = _touched(facts.gap.select("since", F.col("at").alias("until"))).select("hour").distinct()
    missed = it.seen.join(F.broadcast(of_all), "hour", how="left_semi").select(*_KEY)
    return of_groups.unionByName(missed).distinct()


def _touched(spans: DataFrame) -> DataFrame:
    """Give each hour a row that something lasts into, if only for a moment."""
    first, last = (F.date_trunc("hour", F.col(name)) for name in ("since", "until"))
    hours = F.sequence(first, F.greatest(first, last), F.expr("interval 1 hour"))
    return spans.withColumn("hour", F.explode(hours))
