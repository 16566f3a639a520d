"""What each policy costs a group, which one is the best for it, and which one would be the best for all.

The cost is a sum: of each measure what there is of it on a day, times its weight. Days, so that histories of different
lengths compare. What is unknown of one policy counts for none in that group: else the unknown would be the cheapest.
"""

from functools import reduce
from operator import add

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, DoubleType, StringType, StructField, StructType

from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.recommend.cost_weights import LAG_UNIT, LEAST_GAIN, MEASURES, Weights
from rota.pipeline.recommend.explanation import evidence

EACH = "each its own"  # every group the policy that is recommended for it; has blanks, so that no policy is called so
DIGITS = 9  # sums that differ by less are the same

PARTS = [f"cost_{name}" for name in MEASURES]

# What a group shall do.
CHOSEN = StructType(
    [
        StructField("group", StringType()),
        StructField("strategy", StringType()),  # of what is used now
        StructField("use", StringType()),  # `recorded`: stay
        StructField("change", BooleanType()),
        StructField("best", StringType()),  # which may not be better enough for a change
        StructField("cost_now", DoubleType()),
        StructField("cost_then", DoubleType()),
        StructField("gain", DoubleType()),  # 0.3: it would cost 30 % less
        StructField("evidence", StringType()),
    ]
)

_EVERY = (Window.unboundedPreceding, Window.unboundedFollowing)
_SO_FAR = (Window.unboundedPreceding, Window.currentRow)


def per_day(results: DataFrame) -> DataFrame:
    """Return what a policy comes to on a day of each group, measure by measure; null: not known."""
    measured = {
        "moves": _a_day("moves"),
        "pause": _a_day("pause_seconds"),
        "duplicates": _a_day("duplicates"),
        "imbalance": F.col("imbalance") - 1,
        "idle": _a_day("idle_member_hours"),
        "unowned": _a_day("unowned_queue_seconds"),
        "lag": (_doublings("lag_mean") + _doublings("lag_peak")) / 2,
    }
    return results.select(
        "group",
        "policy",
        "strategy",
        "problem",
        *(_known(measure).alias(name) for name, measure in measured.items()),
        *(_known(F.col(name)).alias(name) for name in ("lag_mean", "lag_peak")),
    )


def _a_day(name: str) -> Column:
    return F.try_divide(F.col(name) * 24, F.col("hours"))


def _doublings(name: str) -> Column:
    return F.log2(1 + F.col(name) / LAG_UNIT)


def _known(measure: Column) -> Column:
    """Take what is no number for unknown (to Spark, NaN is more than everything)."""
    number = measure.cast("double")
    return F.when(F.abs(number) < float("inf"), F.greatest(number, F.lit(0.0)))


def costs(results: DataFrame, weights: Weights) -> DataFrame:
    """Return COSTS: what each policy costs each group on a day, the best first; one with a problem has no rank."""
    group = Window.partitionBy("group").rowsBetween(*_EVERY)
    usable = F.col("problem").isNull()
    blind = {name: F.max(usable & F.col(name).isNull()).over(group) for name in MEASURES}
    parts = {f"cost_{name}": F.when(usable & ~blind[name], F.col(name) * weights.of(name)) for name in MEASURES}
    cost = F.when(usable, reduce(add, (F.coalesce(F.col(part), F.lit(0.0)) for part in PARTS)))
    return (
        per_day(results)
        .withColumns(parts)
        .withColumn("cost", cost)
        .withColumn("rank", _rank())
        .select("group", "policy", "rank", "cost", *PARTS)
    )


def _rank() -> Column:
    """Order a group's policies. Among equals: no change, then few moves, then the name: always the same."""
    best_first = Window.partitionBy("group").orderBy(
        F.col("cost").isNull(),
        F.round("cost", DIGITS),
        F.col("policy") != RECORDED,
        F.col("moves").asc_nulls_last(),
        "policy",
    )
    place = F.row_number().over(best_first.rowsBetween(*_SO_FAR))
    return F.when(F.col("cost").isNotNull(), place).cast("int")


def told(costs: DataFrame, results: DataFrame) -> DataFrame:
    """Return costs beside what they are made of: what `chosen` and `fleet` look at."""
    return costs.join(per_day(results), on=["group", "policy"], how="inner")


def chosen(costs: DataFrame, results: DataFrame, least: float = LEAST_GAIN) -> DataFrame:
    """Return CHOSEN: for each group what to use. Only what is better by `least` is worth a change."""
    row = F.struct("policy", "strategy", "problem", "cost", *PARTS, *MEASURES, "lag_mean", "lag_peak")
    gain = F.try_divide(F.col("now.cost") - F.col("then.cost"), F.col("now.cost"))
    known = F.col("now.cost").isNotNull()
    better = F.col("then.policy") != RECORDED
    change = known & better & (F.round("gain", DIGITS) >= least)
    return (
        told(costs, results)
        .groupBy("group")
        .agg(
            F.max(F.when(F.col("policy") == RECORDED, row)).alias("now"),
            F.max(F.when(F.col("rank") == 1, row)).alias("then"),
        )
        .withColumn("gain", F.coalesce(gain, F.when(known, F.lit(0.0))))
        .withColumn("change", F.coalesce(change, F.lit(False)))  # noqa: FBT003 - F.lit takes no name
        .select(
            "group",
            F.col("now.strategy").alias("strategy"),
            F.when(F.col("change"), F.col("then.policy")).otherwise(RECORDED).alias("use"),
            "change",
            F.col("then.policy").alias("best"),
            F.col("now.cost").alias("cost_now"),
            F.when(F.col("change"), F.col("then.cost")).otherwise(F.col("now.cost")).alias("cost_then"),
            F.when(F.col("change") | ~known, F.col("gain")).otherwise(0.0).alias("gain"),
            evidence(least).alias("evidence"),
        )
    )


def fleet(costs: DataFrame, results: DataFrame, chosen: DataFrame) -> DataFrame:
    """Return the sum over all groups for each policy, and for the choice of EACH group; the cheapest first.

    Where a policy cannot be used, the group is thought to stay with what it has. Groups of which it is not known what
    they cost now are left out, of all sums.
    """
    every = told(costs, results).select(
        "group", "policy", F.struct("strategy", "cost", *PARTS, *MEASURES, "lag_mean").alias("it")
    )
    judged = every.filter((F.col("policy") == RECORDED) & F.col("it.cost").isNotNull())
    now = judged.select("group", F.col("it").alias("now"))
    policies = F.broadcast(every.select("policy").distinct())
    of_all = now.crossJoin(policies).withColumn("source", F.col("policy"))
    own = now.join(chosen.select("group", F.lit(EACH).alias("policy"), F.col("use").alias("source")), "group", "inner")
    pairs = of_all.unionByName(own)
    given = every.withColumnRenamed("policy", "source")
    usable = F.col("it.cost").isNotNull()
    return (
        pairs.join(given, on=["group", "source"], how="left")
        .withColumn("usable", F.coalesce(usable, F.lit(False)))  # noqa: FBT003 - F.lit takes no name
        .withColumn("it", F.when(F.col("usable"), F.col("it")).otherwise(F.col("now")))
        .groupBy("policy")
        .agg(*_sums())
        .orderBy(F.round("cost", DIGITS), F.col("policy") != RECORDED, "moves", "policy")
    )


def _sums() -> list[Column]:
    added = ["cost", *PARTS, "moves", "pause", "duplicates", "idle", "unowned", "lag_mean"]
    return [
        F.array_sort(F.collect_set(F.when(F.col("usable"), F.col("it.strategy")))).alias(
            "strategies"
        ),  # there are nine
        F.count_if(F.col("usable")).alias("usable"),
        F.count_if(~F.col("usable")).alias("unusable"),
        *(F.sum(F.col(f"it.{name}")).alias(name) for name in added),
        F.avg("it.imbalance").alias("imbalance"),
    ]
