"""Cost and ranking of policies: the cost of each policy for a group, and the best policy for each group and for all.

The cost is the sum of the measures, each times its weight. Counts and durations are measured per day, and imbalance and
lag as means over the history; so histories of different lengths are comparable. A measure that is unknown for one
policy of a group is ignored for all policies of that group: otherwise the policy with the unknown value would look
cheapest.
"""

from functools import reduce
from operator import add

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType

from rota.pipeline.common.columns import false_if_null
from rota.pipeline.common.schemas import NUMBER, RECORDED_POLICY, TEXT, table_schema
from rota.pipeline.recommend.cost_weights import LAG_UNIT_MESSAGES, MEASURES, MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.recommend.explanation import explain_recommendation

OWN_POLICIES = "each its own"  # each group with its recommended policy; the blanks prevent a clash with a policy's name
COST_DECIMALS = 9  # decimal places in comparisons of sums

COST_COLUMNS = [f"cost_{name}" for name in MEASURES]

# The recommendation for each group. Users read this table, so its names stay: `now` is the policy in use, `then` the
# recommended one. The rows from which it is computed are `current`, of the policy in use, and `cheapest`.
CHOSEN = table_schema(
    group=TEXT,
    strategy=TEXT,  # of the policy in use
    use=TEXT,  # policy to use; `recorded`: no change
    change=BooleanType(),
    best=TEXT,  # cheapest policy; its gain may be too small for a change
    cost_now=NUMBER,
    cost_then=NUMBER,
    gain=NUMBER,  # 0.3: it would cost 30 % less
    evidence=TEXT,  # the reason, as a sentence
)

_ALL_ROWS = (Window.unboundedPreceding, Window.unboundedFollowing)
_ROWS_SO_FAR = (Window.unboundedPreceding, Window.currentRow)


def _compute_measures(results: DataFrame) -> DataFrame:
    """Return the measures of the cost for each group and policy; null: unknown."""
    measures = {
        "moves": _per_day("moves"),
        "pause": _per_day("pause_seconds"),
        "duplicates": _per_day("duplicates"),
        "imbalance": F.col("imbalance") - 1,  # 1 is even
        "idle": _per_day("idle_member_hours"),
        "unowned": _per_day("unowned_queue_seconds"),
        "lag": (_doublings("lag_mean") + _doublings("lag_peak")) / 2,
        "lag_mean": F.col("lag_mean"),  # this and the next one are for reports, not for the cost
        "lag_peak": F.col("lag_peak"),
    }
    return results.select(
        "group",
        "policy",
        "strategy",
        "problem",
        *(_finite_or_null(measure).alias(name) for name, measure in measures.items()),
    )


def _per_day(name: str) -> Column:
    return F.try_divide(F.col(name) * 24, F.col("hours"))


def _doublings(name: str) -> Column:
    """Return how often the lag doubles, counted from LAG_UNIT_MESSAGES: 0 without lag, 1 at one unit, 2 at three."""
    return F.log2(1 + F.col(name) / LAG_UNIT_MESSAGES)


def _finite_or_null(measure: Column) -> Column:
    """Return a measure, 0 if it is negative, null if it is NaN or infinite."""
    number = measure.cast("double")
    is_finite = F.abs(number) < float("inf")  # false for NaN, too: Spark orders NaN above all numbers
    return F.when(is_finite, F.greatest(number, F.lit(0.0)))


def compute_costs(results: DataFrame, weights: CostWeights) -> DataFrame:
    """Return COSTS: each policy's cost and its rank in each group; a policy with a problem has neither."""
    group = Window.partitionBy("group").rowsBetween(*_ALL_ROWS)
    is_usable = F.col("problem").isNull()
    parts: dict[str, Column] = {}
    for name in MEASURES:
        is_unknown = F.max(is_usable & F.col(name).isNull()).over(group)
        parts[f"cost_{name}"] = F.when(is_usable & ~is_unknown, F.col(name) * weights.weight_of(name))
    known_parts = [F.coalesce(F.col(part), F.lit(0.0)) for part in COST_COLUMNS]
    cost = F.when(is_usable, reduce(add, known_parts))
    return (
        _compute_measures(results)
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
    row_number = F.row_number().over(best_first.rowsBetween(*_ROWS_SO_FAR))
    return F.when(F.col("cost").isNotNull(), row_number).cast("int")


def costs_with_measures(costs: DataFrame, results: DataFrame) -> DataFrame:
    """Return costs joined with the measures."""
    return costs.join(_compute_measures(results), on=["group", "policy"], how="inner")


def recommend_policies(costs: DataFrame, results: DataFrame, min_gain: float = MIN_GAIN_FRACTION) -> DataFrame:
    """Return CHOSEN: the recommendation for each group; a change needs a gain of at least `min_gain`.

    The gain is unknown without a current cost, and 0 without a change. The explanation reads the intermediate `gain`:
    what the cheapest policy would save, also if that is too little for a change.
    """
    row = F.struct("policy", "strategy", "problem", "cost", *COST_COLUMNS, *MEASURES, "lag_mean", "lag_peak")
    has_current_cost = F.col("current.cost").isNotNull()
    possible_gain = F.try_divide(F.col("current.cost") - F.col("cheapest.cost"), F.col("current.cost"))
    is_other = F.col("cheapest.policy") != RECORDED_POLICY
    is_worthwhile = has_current_cost & is_other & (F.round("gain", COST_DECIMALS) >= min_gain)
    recommended_cost = F.when(F.col("change"), F.col("cheapest.cost")).otherwise(F.col("current.cost"))
    return (
        costs_with_measures(costs, results)
        .groupBy("group")
        .agg(
            F.max(F.when(F.col("policy") == RECORDED_POLICY, row)).alias("current"),
            F.max(F.when(F.col("rank") == 1, row)).alias("cheapest"),
        )
        .withColumn("gain", F.coalesce(possible_gain, F.when(has_current_cost, F.lit(0.0))))
        .withColumn("change", false_if_null(is_worthwhile))
        .select(
            "group",
            F.col("current.strategy").alias("strategy"),
            F.when(F.col("change"), F.col("cheapest.policy")).otherwise(RECORDED_POLICY).alias("use"),
            "change",
            F.col("cheapest.policy").alias("best"),
            F.col("current.cost").alias("cost_now"),
            recommended_cost.alias("cost_then"),
            F.when(has_current_cost & ~F.col("change"), 0.0).otherwise(F.col("gain")).alias("gain"),
            explain_recommendation(min_gain).alias("evidence"),
        )
    )


def sum_over_groups(costs: DataFrame, results: DataFrame, chosen: DataFrame) -> DataFrame:
    """Return the sums over all groups for each policy and for OWN_POLICIES; the cheapest first.

    A group that cannot use a policy counts with its current one. Groups without a current cost are in no sum.
    """
    candidates = costs_with_measures(costs, results).select(
        "group", "policy", F.struct("strategy", "cost", *COST_COLUMNS, *MEASURES, "lag_mean").alias("values")
    )
    has_cost = F.col("values.cost").isNotNull()
    with_current_cost = candidates.filter((F.col("policy") == RECORDED_POLICY) & has_cost)
    current = with_current_cost.select("group", F.col("values").alias("current"))
    # A row for each sum and group: `policy` names the sum, `used` is the policy that the group would use.
    policies = F.broadcast(candidates.select("policy").distinct())
    same_for_all = current.crossJoin(policies).withColumn("used", F.col("policy"))
    recommended = chosen.select("group", F.lit(OWN_POLICIES).alias("policy"), F.col("use").alias("used"))
    each_its_own = current.join(recommended, "group", how="inner")
    return (
        same_for_all.unionByName(each_its_own)
        .join(candidates.withColumnRenamed("policy", "used"), on=["group", "used"], how="left")
        .withColumn("is_usable", false_if_null(has_cost))
        .withColumn("values", F.when(F.col("is_usable"), F.col("values")).otherwise(F.col("current")))
        .groupBy("policy")
        .agg(*_sum_columns())
        .orderBy(F.round("cost", COST_DECIMALS), F.col("policy") != RECORDED_POLICY, "moves", "policy")
    )


def _sum_columns() -> list[Column]:
    added = ["cost", *COST_COLUMNS, "moves", "pause", "duplicates", "idle", "unowned", "lag_mean"]
    used_strategies = F.collect_set(F.when(F.col("is_usable"), F.col("values.strategy")))  # a few: there are nine
    return [
        F.array_sort(used_strategies).alias("strategies"),
        F.count_if(F.col("is_usable")).alias("usable"),  # number of groups
        F.count_if(~F.col("is_usable")).alias("unusable"),
        *(F.sum(F.col(f"values.{name}")).alias(name) for name in added),
        F.avg("values.imbalance").alias("imbalance"),
    ]
