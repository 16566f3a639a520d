"""Cost and ranking of policies: the cost of each policy for a group, and the best policy for each group and for all.

The cost is the sum of each measure per day, times its weight. Values per day make histories of different lengths
comparable. A measure that is unknown for one policy of a group is ignored for all policies of that group: otherwise the
policy with the unknown value would look cheapest.
"""

from functools import reduce
from operator import add

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, DoubleType, StringType, StructField, StructType

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.cost_weights import LAG_UNIT_MESSAGES, MEASURES, MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.recommend.explanation import explain_recommendation

OWN_POLICIES = "each its own"  # each group with its recommended policy; the blanks prevent a clash with a policy's name
COST_DECIMALS = 9  # decimal places in comparisons of sums

COST_COLUMNS = [f"cost_{name}" for name in MEASURES]

# The recommendation for each group.
CHOSEN = StructType(
    [
        StructField("group", StringType()),
        StructField("strategy", StringType()),  # used now
        StructField("use", StringType()),  # policy to use; `recorded`: no change
        StructField("change", BooleanType()),
        StructField("best", StringType()),  # cheapest policy; its gain may be too small for a change
        StructField("cost_now", DoubleType()),
        StructField("cost_then", DoubleType()),
        StructField("gain", DoubleType()),  # 0.3: it would cost 30 % less
        StructField("evidence", StringType()),
    ]
)

_ALL_ROWS = (Window.unboundedPreceding, Window.unboundedFollowing)
_ROWS_SO_FAR = (Window.unboundedPreceding, Window.currentRow)


def measures_per_day(results: DataFrame) -> DataFrame:
    """Return each measure per day, for each group and policy; null: unknown."""
    measured = {
        "moves": _per_day("moves"),
        "pause": _per_day("pause_seconds"),
        "duplicates": _per_day("duplicates"),
        "imbalance": F.col("imbalance") - 1,
        "idle": _per_day("idle_member_hours"),
        "unowned": _per_day("unowned_queue_seconds"),
        "lag": (_doublings("lag_mean") + _doublings("lag_peak")) / 2,
    }
    return results.select(
        "group",
        "policy",
        "strategy",
        "problem",
        *(_finite_or_null(measure).alias(name) for name, measure in measured.items()),
        *(_finite_or_null(F.col(name)).alias(name) for name in ("lag_mean", "lag_peak")),
    )


def _per_day(name: str) -> Column:
    return F.try_divide(F.col(name) * 24, F.col("hours"))


def _doublings(name: str) -> Column:
    return F.log2(1 + F.col(name) / LAG_UNIT_MESSAGES)


def _finite_or_null(measure: Column) -> Column:
    """Return a measure with at least 0, null for NaN and infinity (Spark orders NaN above all numbers)."""
    number = measure.cast("double")
    return F.when(F.abs(number) < float("inf"), F.greatest(number, F.lit(0.0)))


def costs(results: DataFrame, weights: CostWeights) -> DataFrame:
    """Return COSTS: each policy's cost per day and its rank in each group; a policy with a problem has neither."""
    group = Window.partitionBy("group").rowsBetween(*_ALL_ROWS)
    usable = F.col("problem").isNull()
    is_unknown = {name: F.max(usable & F.col(name).isNull()).over(group) for name in MEASURES}
    parts = {
        f"cost_{name}": F.when(usable & ~is_unknown[name], F.col(name) * weights.weight_of(name)) for name in MEASURES
    }
    cost = F.when(usable, reduce(add, (F.coalesce(F.col(part), F.lit(0.0)) for part in COST_COLUMNS)))
    return (
        measures_per_day(results)
        .withColumns(parts)
        .withColumn("cost", cost)
        .withColumn("rank", _rank())
        .select("group", "policy", "rank", "cost", *COST_COLUMNS)
    )


def _rank() -> Column:
    """Rank a group's policies by cost. Ties go to the policy in use, then to fewer moves, then to the name."""
    best_first = Window.partitionBy("group").orderBy(
        F.col("cost").isNull(),
        F.round("cost", COST_DECIMALS),
        F.col("policy") != RECORDED_POLICY,
        F.col("moves").asc_nulls_last(),
        "policy",
    )
    place = F.row_number().over(best_first.rowsBetween(*_ROWS_SO_FAR))
    return F.when(F.col("cost").isNotNull(), place).cast("int")


def costs_with_measures(costs: DataFrame, results: DataFrame) -> DataFrame:
    """Return costs joined with the measures per day."""
    return costs.join(measures_per_day(results), on=["group", "policy"], how="inner")


def recommend_policies(costs: DataFrame, results: DataFrame, min_gain: float = MIN_GAIN_FRACTION) -> DataFrame:
    """Return CHOSEN: the recommendation for each group; a change needs a gain of at least `min_gain`."""
    row = F.struct("policy", "strategy", "problem", "cost", *COST_COLUMNS, *MEASURES, "lag_mean", "lag_peak")
    gain = F.try_divide(F.col("now.cost") - F.col("then.cost"), F.col("now.cost"))
    has_cost_now = F.col("now.cost").isNotNull()
    better = F.col("then.policy") != RECORDED_POLICY
    change = has_cost_now & better & (F.round("gain", COST_DECIMALS) >= min_gain)
    return (
        costs_with_measures(costs, results)
        .groupBy("group")
        .agg(
            F.max(F.when(F.col("policy") == RECORDED_POLICY, row)).alias("now"),
            F.max(F.when(F.col("rank") == 1, row)).alias("then"),
        )
        .withColumn("gain", F.coalesce(gain, F.when(has_cost_now, F.lit(0.0))))
        .withColumn("change", F.coalesce(change, F.lit(False)))  # noqa: FBT003 - F.lit takes no name
        .select(
            "group",
            F.col("now.strategy").alias("strategy"),
            F.when(F.col("change"), F.col("then.policy")).otherwise(RECORDED_POLICY).alias("use"),
            "change",
            F.col("then.policy").alias("best"),
            F.col("now.cost").alias("cost_now"),
            F.when(F.col("change"), F.col("then.cost")).otherwise(F.col("now.cost")).alias("cost_then"),
            F.when(F.col("change") | ~has_cost_now, F.col("gain")).otherwise(0.0).alias("gain"),
            explain_recommendation(min_gain).alias("evidence"),
        )
    )


def sum_over_groups(costs: DataFrame, results: DataFrame, chosen: DataFrame) -> DataFrame:
    """Return the sums over all groups for each policy and for OWN_POLICIES; the cheapest first.

    A group that cannot use a policy counts with its present one. Groups without a present cost are in no sum.
    """
    candidates = costs_with_measures(costs, results).select(
        "group", "policy", F.struct("strategy", "cost", *COST_COLUMNS, *MEASURES, "lag_mean").alias("values")
    )
    judged = candidates.filter((F.col("policy") == RECORDED_POLICY) & F.col("values.cost").isNotNull())
    now = judged.select("group", F.col("values").alias("now"))
    policies = F.broadcast(candidates.select("policy").distinct())
    of_all = now.crossJoin(policies).withColumn("source", F.col("policy"))
    own = now.join(
        chosen.select("group", F.lit(OWN_POLICIES).alias("policy"), F.col("use").alias("source")), "group", "inner"
    )
    pairs = of_all.unionByName(own)
    by_source = candidates.withColumnRenamed("policy", "source")
    usable = F.col("values.cost").isNotNull()
    return (
        pairs.join(by_source, on=["group", "source"], how="left")
        .withColumn("usable", F.coalesce(usable, F.lit(False)))  # noqa: FBT003 - F.lit takes no name
        .withColumn("values", F.when(F.col("usable"), F.col("values")).otherwise(F.col("now")))
        .groupBy("policy")
        .agg(*_sum_columns())
        .orderBy(F.round("cost", COST_DECIMALS), F.col("policy") != RECORDED_POLICY, "moves", "policy")
    )


def _sum_columns() -> list[Column]:
    added = ["cost", *COST_COLUMNS, "moves", "pause", "duplicates", "idle", "unowned", "lag_mean"]
    return [
        F.array_sort(F.collect_set(F.when(F.col("usable"), F.col("values.strategy")))).alias(
            "strategies"
        ),  # at most nine
        F.count_if(F.col("usable")).alias("usable"),
        F.count_if(~F.col("usable")).alias("unusable"),
        *(F.sum(F.col(f"values.{name}")).alias(name) for name in added),
        F.avg("values.imbalance").alias("imbalance"),
    ]
