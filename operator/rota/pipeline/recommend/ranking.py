"""Costs, recommendations and sums of all groups, as Spark tables; `group_costs` computes those of one group.

RESULTS are the metrics of simulations, COSTS the costs and ranks of policies, CHOSEN the recommendations. *Measures*
are the metrics that have a cost, per day.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from rota.pipeline.common.columns import arrow_schema, false_if_null, map_groups
from rota.pipeline.common.schemas import CHOSEN, COSTS, NUMBER, RECORDED_POLICY, TEXT, table_schema
from rota.pipeline.recommend.cost_weights import MEASURES, MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.recommend.group_costs import (
    COST_COLUMNS,
    COST_DECIMALS,
    choose_policy,
    compute_measures,
    cost_policies,
)

OWN_POLICIES = "each its own"  # each group with its recommended policy; the blanks prevent a clash with a policy's name

_MEASURED = table_schema(
    group=TEXT,
    policy=TEXT,
    strategy=TEXT,
    problem=TEXT,
    **dict.fromkeys(MEASURES, NUMBER),
    lag_mean=NUMBER,
    lag_peak=NUMBER,
)


def _measure_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = arrow_schema(_MEASURED)
    for batch in batches:
        yield pa.RecordBatch.from_pylist(list(map(compute_measures, batch.to_pylist())), schema=schema)


def compute_costs(results: DataFrame, weights: CostWeights) -> DataFrame:
    """Return COSTS: each policy's cost and its rank in each group; a policy with a problem has neither."""
    return map_groups(results, partial(_cost_group, weights=weights), COSTS)


def _cost_group(results: list[dict[str, Any]], *, weights: CostWeights) -> list[dict[str, Any]]:
    return cost_policies(map(compute_measures, results), weights)


def costs_with_measures(costs: DataFrame, results: DataFrame) -> DataFrame:
    """Return a row for each group and policy with its costs and its measures."""
    return costs.join(results.mapInArrow(_measure_batches, _MEASURED), on=["group", "policy"], how="inner")


def recommend_policies(costs: DataFrame, results: DataFrame, min_gain: float = MIN_GAIN_FRACTION) -> DataFrame:
    """Return CHOSEN: the recommendation for each group; a change needs a gain of at least `min_gain`."""
    choose = partial(_choose_for_group, min_gain=min_gain)
    return map_groups(costs_with_measures(costs, results), choose, CHOSEN)


def _choose_for_group(costs: list[dict[str, Any]], *, min_gain: float) -> list[dict[str, Any]]:
    return [choose_policy(costs, min_gain)]


def sum_over_groups(costs: DataFrame, results: DataFrame, chosen: DataFrame) -> DataFrame:
    """Return the sums over all groups, if all used one policy (for each) or their own (OWN_POLICIES); cheapest first.

    A group that cannot use a policy counts with its current one. Groups whose current cost is unknown are in no sum.
    """
    candidates = costs_with_measures(costs, results).select(
        "group", "policy", F.struct("strategy", "cost", *COST_COLUMNS, *MEASURES, "lag_mean").alias("values")
    )
    has_cost = F.col("values.cost").isNotNull()
    with_current_cost = candidates.filter((F.col("policy") == RECORDED_POLICY) & has_cost)
    current = with_current_cost.select("group", F.col("values").alias("current"))
    # A row for each sum and group: `policy` names the sum, `used` is the policy that the group would use for it.
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
    used_strategies = F.collect_set(F.when(F.col("is_usable"), F.col("values.strategy")))  # at most nine
    return [
        F.array_sort(used_strategies).alias("strategies"),
        F.count_if(F.col("is_usable")).alias("usable"),  # number of groups that can use it
        F.count_if(~F.col("is_usable")).alias("unusable"),
        *(F.sum(F.col(f"values.{name}")).alias(name) for name in added),
        F.avg("values.imbalance").alias("imbalance"),
    ]
