"""Data of the report, collected from Spark: a row for each policy and a limited number of groups, never all groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.recommend.cost_weights import LEAST_GAIN, Weights
from rota.pipeline.recommend.ranking import DIGITS, EACH, costs_with_measures, sum_over_groups
from rota.spec import PolicySpec

LISTED = 200  # groups in the table
SHOWN = 20  # groups with plots
MOST_SHOWN = 100
STEPS = 120  # points of a line in a plot, which is about 300 pixels wide
MOST_PROBLEMS = 20  # for each policy
DOMINATES = 0.5  # fraction of the gain of all groups

Lines = dict[str, dict[str, list[Row]]]  # SERIES by group and policy, with times in seconds since 1970


@dataclass(frozen=True, kw_only=True)
class HistoryScope:
    """Extent of the simulated histories."""

    groups: int = 0
    hours: float = 0.0  # sum over all groups
    longest: float = 0.0  # hours of the longest history
    changes: int = 0
    changing: int = 0  # groups for which another policy is recommended
    unjudged: int = 0  # groups without a present cost
    since: int | None = None  # seconds since 1970, because Spark returns timestamps in this machine's time zone
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All data of the report."""

    looked: HistoryScope
    fleet: list[Row] = field(default_factory=list)  # sums by policy, the cheapest first
    groups: list[Row] = field(default_factory=list)  # rows of CHOSEN, the largest savings first
    problems: list[Row] = field(default_factory=list)
    figures: dict[tuple[str, str], Row] = field(default_factory=dict)  # by group and policy, for groups with plots
    lines: Lines = field(default_factory=dict)
    policies: Mapping[str, PolicySpec] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)
    least: float = LEAST_GAIN
    shown: int = SHOWN

    @property
    def gaining(self) -> list[Row]:
        """Return the groups that have plots."""
        return [row for row in self.groups if row["change"]][: self.shown]


def findings(
    *,
    results: DataFrame,
    series: DataFrame,
    costs: DataFrame,
    chosen: DataFrame,
    policies: Mapping[str, PolicySpec],
    weights: Weights,
    least: float = LEAST_GAIN,
    shown: int = SHOWN,
) -> Findings:
    """Collect the data of the report from Spark."""
    shown = min(shown, MOST_SHOWN)
    groups = most_gaining(chosen).collect()
    top = [(row["group"], row["use"]) for row in groups if row["change"]][:shown]
    is_top = F.col("group").isin(*(group for group, _ in top))
    figures = (
        costs_with_measures(costs, results).filter(is_top).filter(_matches_now_or_recommended(top)).collect()
        if top
        else []
    )
    thin = (
        thinned(series.filter(is_top).filter(_matches_now_or_recommended(top))).withColumn("at", F.unix_timestamp("at"))
        if top
        else None
    )
    points = thin.orderBy("group", "policy", "at").collect() if thin is not None else []
    return Findings(
        looked=_looked(results, series, chosen),
        fleet=sum_over_groups(costs, results, chosen).collect(),
        groups=groups,
        problems=problems(results).collect(),
        figures={(row["group"], row["policy"]): row for row in figures},
        lines=_lines(points),
        policies=policies,
        weights=weights,
        least=least,
        shown=shown,
    )


def most_gaining(chosen: DataFrame, most: int = LISTED) -> DataFrame:
    """Return the groups with the largest savings in points; in percent, a group with a tiny cost could come first."""
    saved = F.round(F.col("cost_now") - F.col("cost_then"), DIGITS)
    return chosen.orderBy(F.col("change").desc(), saved.desc_nulls_last(), "group").limit(most)


def problems(results: DataFrame) -> DataFrame:
    """Return the most frequent reasons for which each policy cannot be used, each with its number of groups.

    A problem of the group itself, which prevents a replay under any policy, counts only for RECORDED.
    """
    group = Window.partitionBy("group").rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    of_now = F.max(F.when(F.col("policy") == RECORDED, F.col("problem"))).over(group)
    elsewhere = F.col("of_now").eqNullSafe(F.col("problem"))
    of_policy = Window.partitionBy("policy").orderBy(F.col("groups").desc(), "problem")
    named = F.concat(F.lit("Group "), F.col("group"))  # with names, each group would have its own reason
    return (
        results.withColumn("of_now", of_now)
        .filter(F.col("problem").isNotNull() & ((F.col("policy") == RECORDED) | ~elsewhere))
        .withColumn("problem", F.replace("problem", named, F.lit("The group")))
        .withColumn("problem", F.regexp_replace("problem", r"\bQueue \S+/\S+/\d+", "A queue"))
        .groupBy("policy", "problem")
        .agg(F.count("*").alias("groups"), F.min("group").alias("example"))
        .withColumn("place", F.row_number().over(of_policy))
        .filter(F.col("place") <= MOST_PROBLEMS)
        .drop("place")
        .orderBy(F.col("groups").desc(), "policy", "problem")
    )


def by_policy(results: DataFrame) -> DataFrame:
    """Return the sums of each policy; a group that cannot use the policy counts with its present one.

    A policy that no group can use has null sums: they would be the sums of the present policies.
    """
    summed, averaged = ("moves", "forced", "pause_seconds", "duplicates", "idle_member_hours", "lag_mean"), "imbalance"
    values, usable = F.struct(*summed, averaged), F.col("problem").isNull()
    now = results.where((F.col("policy") == RECORDED) & usable).select("group", values.alias("now"))
    used = F.when(usable & F.col("now").isNotNull(), values).otherwise(F.col("now"))
    sums = [F.sum(f"used.{name}").alias(name) for name in summed] + [F.avg(f"used.{averaged}").alias(averaged)]
    every = results.join(now, "group", how="left").withColumn("used", used)
    counts = [F.count("*").alias("groups"), F.count("problem").alias("problems"), F.max("hours").alias("hours")]
    summary = every.groupBy("policy").agg(*counts, *sums).orderBy("policy")
    has_usable = F.col("problems") < F.col("groups")
    return summary.withColumns({name: F.when(has_usable, F.col(name)) for name in (*summed, averaged)})


def thinned(series: DataFrame, steps: int = STEPS) -> DataFrame:
    """Return SERIES with at most `steps` points a line; points that are merged keep the highest lag, to show peaks."""
    group = Window.partitionBy("group").rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    seconds = F.unix_timestamp("at")
    first, last = F.min(seconds).over(group), F.max(seconds).over(group)
    step = F.floor((seconds - first) * steps / (last - first + 1))
    return (
        series.withColumn("step", step)
        .groupBy("group", "policy", "step")
        .agg(
            F.min("at").alias("at"),
            F.max("lag").alias("lag"),
            F.avg("imbalance").alias("imbalance"),
            F.max("moves").alias("moves"),
        )
        .select("group", "policy", "at", "lag", "imbalance", "moves")
    )


def best_for_all(data: Findings) -> Row | None:
    """Return the best single policy for all groups; None if its gain over the present ones is less than `least`."""
    now = sums_of(data)
    alternatives = [row for row in data.fleet if row["policy"] not in {EACH, RECORDED} and row["usable"]]
    if now is None or not alternatives or not now["cost"]:
        return None
    best: Row = alternatives[0]  # they are sorted by cost
    return best if round(1 - best["cost"] / now["cost"], DIGITS) >= data.least else None


class Leading(NamedTuple):
    """A group that gains more than all other groups together, and its fraction of the total gain."""

    group: str
    share: float


def leading(data: Findings) -> Leading | None:
    """Return the group that dominates the total gain; None if no group does or it is the only judged group."""
    now, each, rivals = sums_of(data), sums_of(data, EACH), data.looked.groups - data.looked.unjudged - 1
    first = data.groups[0] if data.groups else None
    if now is None or each is None or first is None or not first["change"] or not rivals:
        return None
    gain = now["cost"] - each["cost"]
    share = (first["cost_now"] - first["cost_then"]) / gain if gain > 0 else 0.0
    return Leading(first["group"], min(share, 1.0)) if share > DOMINATES else None


def sums_of(data: Findings, policy: str = RECORDED) -> Row | None:
    """Return the sums of a policy, by default of the present policies; None if they are missing."""
    return next((row for row in data.fleet if row["policy"] == policy), None)


def _matches_now_or_recommended(top: list[tuple[str, str]]) -> Column:
    """Match rows of the present policy and of each top group's recommended policy."""
    policy_of_group = F.create_map(*(F.lit(text) for pair in top for text in pair))
    return (F.col("policy") == RECORDED) | (F.col("policy") == F.try_element_at(policy_of_group, F.col("group")))


def _looked(results: DataFrame, series: DataFrame, chosen: DataFrame) -> HistoryScope:
    now = results.filter(F.col("policy") == RECORDED)
    sums = now.agg(F.sum("hours").alias("hours"), F.max("hours").alias("longest"), F.sum("changes").alias("changes"))
    by_group = chosen.agg(
        F.count("*").alias("groups"),
        F.count_if("change").alias("changing"),
        F.count_if(F.col("cost_now").isNull()).alias("unjudged"),
    )
    seconds = F.unix_timestamp("at")
    times = series.agg(F.min(seconds).alias("since"), F.max(seconds).alias("until"))
    row = sums.crossJoin(by_group).crossJoin(times).first()
    values = {name: value for name, value in row.asDict().items() if value is not None} if row else {}
    return HistoryScope(**values)


def _lines(points: list[Row]) -> Lines:
    lines: Lines = {}
    for row in points:
        lines.setdefault(row["group"], {}).setdefault(row["policy"], []).append(row)
    return lines
