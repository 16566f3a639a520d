"""Hourly metrics of groups: a row for each group and hour with any record; docs/pipeline.md defines every column.

A period is split at full hours; one that has not ended is cut at the group's last record.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.lag import LagState
from rota.pipeline.common.columns import select_columns
from rota.pipeline.common.schemas import ROLLUP
from rota.pipeline.history.audit import intervals, unowned_by_assignment
from rota.pipeline.history.lag_states import offset_samples
from rota.pipeline.history.ordering import RECORD_ORDER
from rota.pipeline.history.ownership import OwnershipAccount, build_account, last_record_times
from rota.pipeline.history.ranges import count_queues, expand_by_queue, seconds_between
from rota.pipeline.ingest.facts import Facts

PERCENTILE_ACCURACY = 10_000  # of approximate percentiles: the error of the rank is one in this number
_GROUP_HOUR = ["group", "hour"]
_SETTLED_STATES = ("Ready", "Unready", "Ended")  # the member reports, or has ended
_COUNT_COLUMNS = ("moved_queues", "forced_queues", "handovers", "returned", "taken_over")
_DURATION_COLUMNS = ("unowned_queue_seconds", "contested_queue_seconds")


def compute_rollup(facts: Facts) -> DataFrame:
    """Return the metrics of each group and hour (schemas.ROLLUP)."""
    history = build_account(facts)
    parts = [
        _rebalance_metrics(facts.rebalance),
        _move_counts(facts.handover),
        _handover_metrics(intervals(facts, history)),
        _sum_seconds(unowned_by_assignment(history), "unowned_queue_seconds"),
        _sum_seconds(contested_periods(facts, history), "contested_queue_seconds"),
        _balance_metrics(history),
        _lag_metrics(offset_samples(facts, history)),
        _takeover_counts(facts.redelivered),
        _incomplete_hours(facts, history).withColumn("broken", F.expr("true")),
    ]
    result = history.hours.select(*_GROUP_HOUR)
    for part in parts:
        result = result.join(part, _GROUP_HOUR, how="left")
    defaults = {name: F.coalesce(name, F.lit(0)) for name in (*_COUNT_COLUMNS, *_DURATION_COLUMNS, "minutes_seen")}
    return (
        result.withColumns(defaults)
        .withColumn("redelivered", F.col("returned") + F.col("taken_over"))
        .withColumn("rebalances", F.coalesce("rebalances", F.create_map().cast("map<string,bigint>")))
        .withColumn("verdict_minutes", F.coalesce("verdict_minutes", F.create_map().cast("map<string,double>")))
        .withColumn("complete", F.col("broken").isNull())
        .transform(select_columns, ROLLUP)
    )


def _hour(at: str = "at") -> Column:
    return F.date_trunc("hour", F.col(at)).alias("hour")


def _split_by_hour(df: DataFrame) -> DataFrame:
    """Split periods from `since` until `until` at full hours."""
    last = F.date_trunc("hour", F.col("until") - F.expr("interval 1 microsecond"))
    hours = F.sequence(F.date_trunc("hour", F.col("since")), last, F.expr("interval 1 hour"))
    lasting = df.filter(F.col("since") < F.col("until")).withColumn("hour", F.explode(hours))
    hour_end = F.col("hour") + F.expr("interval 1 hour")
    return lasting.withColumns({"since": F.greatest("since", "hour"), "until": F.least("until", hour_end)})


def _percentiles(values: Column | str, name: str) -> list[Column]:
    both = F.percentile_approx(values, [0.5, 0.99], PERCENTILE_ACCURACY)  # Spark computes the common expression once
    median = F.get(both, F.lit(0)).cast("double")
    high = F.get(both, F.lit(1)).cast("double")
    return [median.alias(f"{name}_p50"), high.alias(f"{name}_p99")]


def _rebalance_metrics(rebalances: DataFrame) -> DataFrame:
    """Count each rebalance once: a new leader may record one again; the first record counts."""
    once = rebalances.groupBy("group", "began").agg(F.min(F.struct("at", "reason", "seconds")).alias("first"))
    ended = once.select("group", _hour("first.at"), "first.reason", "first.seconds")
    counts = ended.groupBy(*_GROUP_HOUR, "reason").agg(F.count("*").alias("times"))
    pairs = F.map_from_entries(F.collect_list(F.struct("reason", "times")))
    by_reason = counts.groupBy(*_GROUP_HOUR).agg(pairs.alias("rebalances"))
    seconds = ended.groupBy(*_GROUP_HOUR).agg(*_percentiles("seconds", "rebalance_seconds"))
    return by_reason.join(seconds, _GROUP_HOUR, how="inner")


def _move_counts(handovers: DataFrame) -> DataFrame:
    """Count queues that were granted to another member than their previous owner, as `rota_queues_moved_total` does."""
    granted = handovers.filter(F.col("act").isin("Grant", "Force")).withColumn("many", count_queues(F.col("queues")))
    moved = F.col("from").isNotNull() & ~F.struct("from", "fromUid").eqNullSafe(F.struct("to", "toUid"))
    return granted.groupBy("group", _hour()).agg(
        F.sum(F.when(moved, F.col("many")).otherwise(0)).alias("moved_queues"),
        F.sum(F.when(F.col("act") == "Force", F.col("many")).otherwise(0)).alias("forced_queues"),
    )


def _handover_metrics(held: DataFrame) -> DataFrame:
    over = held.filter(F.col("seconds").isNotNull())
    columns = [F.count("*").alias("handovers"), *_percentiles("seconds", "handover_seconds")]
    return over.groupBy("group", _hour("obeyed")).agg(*columns)


def _sum_seconds(spans: DataFrame, name: str) -> DataFrame:
    seconds = F.sum(seconds_between("since", "until")).alias(name)
    return spans.transform(_split_by_hour).groupBy(*_GROUP_HOUR).agg(seconds)


def contested_periods(facts: Facts, account: OwnershipAccount) -> DataFrame:
    """Return the periods in which two members may have consumed a forced queue.

    The operator ends such a period with the assignment that it writes once the previous owner has certainly stopped. No
    record names that assignment: it is taken to be the first later one in which that pod is absent, ended or reporting.
    """
    grants = facts.handover.filter(F.col("act") == "Force")
    forced = expand_by_queue(grants.select("group", "at", "generation", "fromUid", "queues"))
    present = facts.membership.select(
        "group", F.col("at").alias("later"), F.col("generation").alias("seen"), F.map_values("members").alias("pods")
    )
    # Without a previous owner no record names the unreachable member: any later assignment ends the period.
    is_lost = F.exists("pods", lambda pod: (pod["uid"] == F.col("fromUid")) & ~pod["standing"].isin(*_SETTLED_STATES))
    has_stopped = F.col("fromUid").isNull() | ~is_lost
    is_end = (F.col("later") >= F.col("at")) & (F.col("seen") > F.col("generation")) & has_stopped
    queue = ["group", "topic", "broker", "queue", "at", "fromUid"]
    ends = forced.join(present, "group", how="inner").filter(is_end).groupBy(*queue).agg(F.min("later").alias("over"))
    over = ends.withColumn("fromUid", F.coalesce("fromUid", F.lit("")))  # a join never matches nulls
    return (
        forced.withColumn("fromUid", F.coalesce("fromUid", F.lit("")))
        .join(over, queue, how="left")
        .join(last_record_times(account.hours), "group", how="inner")
        .select("group", F.col("at").alias("since"), F.coalesce("over", "recorded_until").alias("until"))
    )


def _balance_metrics(account: OwnershipAccount) -> DataFrame:
    """Return the time-weighted imbalance of queues among sharing members, and the hours of members without a queue.

    Each member's number of queues changes by +1 and -1 where a holding starts and ends; it is read at each record.
    """
    order = Window.partitionBy("group").orderBy(*RECORD_ORDER)
    known_until = F.when(F.col("epoch_ends_with_break"), F.col("epoch_end"))
    spans = (
        account.records.filter(F.col("sharing").isNotNull())
        .withColumn("next", F.lead("at").over(order))
        .filter(F.col("owners_known_after") & ~F.col("model").eqNullSafe("Broadcasting"))
        .join(last_record_times(account.hours), "group", how="inner")
        .withColumn("until", F.least(F.coalesce("next", "recorded_until"), known_until))
    )
    owned_spans = account.holdings.filter(F.col("phase") == "Owned")
    starts = owned_spans.select("group", "uid", "at", F.lit(1).alias("added"))
    ended = owned_spans.filter(F.col("until").isNotNull())
    ends = ended.select("group", "uid", F.col("until").alias("at"), F.lit(-1).alias("added"))
    points = spans.select("group", F.explode("sharing").alias("uid"), "at", F.lit(0).alias("added"), "until")
    steps = points.unionByName(starts.unionByName(ends), allowMissingColumns=True)
    so_far = Window.partitionBy("group", "uid").orderBy("at").rangeBetween(Window.unboundedPreceding, Window.currentRow)
    # The filter keeps only points: starts and ends have no `until`.
    owned = steps.withColumn("queues", F.sum("added").over(so_far)).filter(F.col("until") > F.col("at"))
    per_period = owned.groupBy("group", F.col("at").alias("since"), "until").agg(
        F.max("queues").alias("highest"),
        F.sum("queues").alias("total"),
        F.count("*").alias("members"),
        F.sum((F.col("queues") == 0).cast("int")).alias("idle"),
    )
    ratio = F.when(F.col("total") > 0, F.col("highest") * F.col("members") / F.col("total"))
    duration = seconds_between("since", "until")
    weight = F.sum(F.when(ratio.isNotNull(), duration))
    idle = F.sum(F.col("idle") * duration) / 3600
    return (
        per_period.transform(_split_by_hour)
        .groupBy(*_GROUP_HOUR)
        .agg((F.sum(ratio * duration) / weight).alias("imbalance"), idle.alias("idle_member_hours"))
    )


def _lag_metrics(samples: DataFrame) -> DataFrame:
    names = F.array(*(F.lit(str(state)) for state in LagState))
    minutes = F.array(*(F.sum(F.col(str(state)) * F.col("seconds")) / 60 for state in LagState))
    return samples.groupBy(*_GROUP_HOUR).agg(
        *_percentiles("lag", "lag"),
        F.max("lag").alias("lag_max"),
        *_percentiles("delay", "delay"),
        F.map_filter(F.map_from_arrays(names, minutes), lambda _, minutes: minutes > 0).alias("verdict_minutes"),
        (F.sum("seconds") / 60).alias("minutes_seen"),
        F.sum(F.col("back") + F.col("retries")).alias("returned"),
    )


def _takeover_counts(taken_over: DataFrame) -> DataFrame:
    """Count messages that were redelivered because another process took over their queue."""
    return taken_over.groupBy("group", _hour()).agg(F.sum("messages").alias("taken_over"))


def _incomplete_hours(facts: Facts, account: OwnershipAccount) -> DataFrame:
    """Return the hours with missing records: breaks of a group, and gaps, which affect every group."""
    breaks = account.records.filter("is_break").join(last_record_times(account.hours), "group", how="inner")
    spans = breaks.select(
        "group",
        F.col("border_at").alias("since"),
        F.coalesce("next_owners_at", F.greatest("recorded_until", "at")).alias("until"),
    )
    of_groups = _hours_touched(spans).select(*_GROUP_HOUR)
    of_all = _hours_touched(facts.gap.select("since", F.col("at").alias("until"))).select("hour").distinct()
    missed = account.hours.join(F.broadcast(of_all), "hour", how="left_semi").select(*_GROUP_HOUR)
    return of_groups.unionByName(missed).distinct()


def _hours_touched(spans: DataFrame) -> DataFrame:
    """Expand periods to one row for each hour that they touch."""
    first = F.date_trunc("hour", F.col("since"))
    last = F.date_trunc("hour", F.col("until"))
    hours = F.sequence(first, F.greatest(first, last), F.expr("interval 1 hour"))
    return spans.withColumn("hour", F.explode(hours))
