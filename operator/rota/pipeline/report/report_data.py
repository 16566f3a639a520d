"""Data of the report, collected from Spark: a row for each policy and a limited number of groups, never all groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from rota.pipeline.common.history_sources import GENERATED_PREFIX
from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.backtest import BacktestSummary
from rota.pipeline.recommend.cost_weights import MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.recommend.group_costs import COST_DECIMALS
from rota.pipeline.recommend.ranking import OWN_POLICIES, costs_with_measures, sum_over_groups
from rota.pipeline.report.earlier_advice import ObservedAdvice, drop_nulls
from rota.pipeline.report.links import ReportLinks
from rota.spec import PolicySpec

MAX_LISTED_GROUPS = 200  # groups in the table of recommendations
DEFAULT_PLOTS = 20  # groups with plots
MAX_PLOTS = 100
MAX_LINE_POINTS = 120  # points of a line in a plot, which is about 300 pixels wide
MAX_PROBLEMS = 20  # listed reasons for which a policy cannot be used, for each policy
DOMINANT_FRACTION = 0.5  # a group with more than this fraction of the gain of all groups is named

SeriesByGroup = dict[str, dict[str, list[Row]]]  # rows of schemas.SERIES by group and policy; `at`: seconds since 1970


@dataclass(frozen=True, kw_only=True)
class HistoryScope:
    """Extent of the simulated histories."""

    groups: int = 0
    longest: float = 0.0  # hours of the longest history
    changes: int = 0  # changes of members, queues and policies, recorded in all histories
    changing: int = 0  # groups for which another policy is recommended
    generated: int = 0  # groups whose history no operator has recorded
    unjudged: int = 0  # groups whose present policy has no known cost
    # Seconds since 1970, because Spark returns timestamps in this machine's time zone; None: nothing was simulated.
    since: int | None = None
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All data of the report."""

    scope: HistoryScope
    policy_sums: list[Row] = field(default_factory=list)  # sums by policy, the cheapest first
    groups: list[Row] = field(default_factory=list)  # rows of schemas.CHOSEN, in the order of `most_gaining`
    problems: list[Row] = field(default_factory=list)  # rows of `count_problems`
    measures: dict[tuple[str, str], Row] = field(default_factory=dict)  # by group and policy, for groups with plots
    series: SeriesByGroup = field(default_factory=dict)
    policies: Mapping[str, PolicySpec] = field(default_factory=dict)
    weights: CostWeights = field(default_factory=CostWeights)
    min_gain: float = MIN_GAIN_FRACTION
    max_plots: int = DEFAULT_PLOTS
    links: ReportLinks = field(default_factory=ReportLinks)
    observed: ObservedAdvice | None = None  # what an earlier recommendation came to; None: there is none
    backtest: BacktestSummary | None = None  # None: no backtest was requested

    @property
    def plotted_groups(self) -> list[Row]:
        """The groups that have plots."""
        return plotted_rows(self.groups, self.max_plots)


def plotted_rows(groups: list[Row], max_plots: int) -> list[Row]:
    """Return the first groups for which another policy is recommended; only these have plots."""
    return [row for row in groups if row["change"]][:max_plots]


def collect_findings(
    *,
    results: DataFrame,
    series: DataFrame,
    costs: DataFrame,
    chosen: DataFrame,
    policies: Mapping[str, PolicySpec],
    weights: CostWeights,
    min_gain: float = MIN_GAIN_FRACTION,
    max_plots: int = DEFAULT_PLOTS,
) -> Findings:
    """Collect the data of the report from Spark."""
    max_plots = min(max_plots, MAX_PLOTS)
    groups = most_gaining(chosen).collect()
    recommended_policies = {row["group"]: row["use"] for row in plotted_rows(groups, max_plots)}  # of groups with plots
    measures: list[Row] = []
    points: list[Row] = []
    if recommended_policies:
        is_plotted = F.col("group").isin(*recommended_policies) & _matches_now_or_recommended(recommended_policies)
        measures = costs_with_measures(costs, results).filter(is_plotted).collect()
        downsampled = downsample_series(series.filter(is_plotted)).withColumn("at", F.unix_timestamp("at"))
        points = downsampled.orderBy("group", "policy", "at").collect()
    return Findings(
        scope=_collect_scope(results, series, chosen),
        policy_sums=sum_over_groups(costs, results, chosen).collect(),
        groups=groups,
        problems=count_problems(results).collect(),
        measures={(row["group"], row["policy"]): row for row in measures},
        series=_series_by_group(points),
        policies=policies,
        weights=weights,
        min_gain=min_gain,
        max_plots=max_plots,
    )


def most_gaining(chosen: DataFrame, most: int = MAX_LISTED_GROUPS) -> DataFrame:
    """Return the first groups: those with another recommended policy, by saved cost; then the other groups.

    Savings are compared as absolute costs, since in percent a group with a tiny cost could come first.
    """
    saved = F.round(F.col("cost_now") - F.col("cost_then"), COST_DECIMALS)
    return chosen.orderBy(F.col("change").desc(), saved.desc_nulls_last(), "group").limit(most)


def count_problems(results: DataFrame) -> DataFrame:
    """Return the most frequent reasons for which each policy cannot be used, each with its number of groups.

    A problem of the group itself, which prevents a replay under any policy, counts only for RECORDED_POLICY.
    """
    group = Window.partitionBy("group").rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    is_recorded_policy = F.col("policy") == RECORDED_POLICY
    recorded_problem = F.max(F.when(is_recorded_policy, F.col("problem"))).over(group)
    # The column `recorded_problem` is added below.
    is_problem_of_group = F.col("recorded_problem").eqNullSafe(F.col("problem"))
    most_frequent_first = Window.partitionBy("policy").orderBy(F.col("groups").desc(), "problem")
    # Names are replaced; otherwise each group would have a reason of its own.
    named = F.concat(F.lit("Group "), F.col("group"))
    return (
        results.withColumn("recorded_problem", recorded_problem)
        .filter(F.col("problem").isNotNull() & (is_recorded_policy | ~is_problem_of_group))
        .withColumn("problem", F.replace("problem", named, F.lit("The group")))
        .withColumn("problem", F.regexp_replace("problem", r"\bQueue \S+/\S+/\d+", "A queue"))
        .groupBy("policy", "problem")
        .agg(F.count("*").alias("groups"), F.min("group").alias("example"))
        .withColumn("place", F.row_number().over(most_frequent_first))
        .filter(F.col("place") <= MAX_PROBLEMS)
        .drop("place")
        .orderBy(F.col("groups").desc(), "policy", "problem")
    )


def sum_by_policy(results: DataFrame) -> DataFrame:
    """Return the sums of each policy's simulated metrics, without costs, for `rota pipeline simulate`.

    The report itself does not use them. A group that cannot use a policy counts with its present one. So a policy that
    no group can use would have the sums of the present policies: its sums are null instead.
    """
    summed = ("moves", "forced", "pause_seconds", "duplicates", "idle_member_hours", "lag_mean")
    averaged = "imbalance"
    values = F.struct(*summed, averaged)
    usable = F.col("problem").isNull()
    now = results.where((F.col("policy") == RECORDED_POLICY) & usable).select("group", values.alias("now"))
    # The group's metrics under the policy or, if it cannot use that, under its present one. Null, and so in no sum, for
    # a group whose present policy has no results.
    used = F.when(usable & F.col("now").isNotNull(), values).otherwise(F.col("now"))
    sums = [F.sum(f"used.{name}").alias(name) for name in summed]
    mean = F.avg(f"used.{averaged}").alias(averaged)
    every = results.join(now, "group", how="left").withColumn("used", used)
    counts = [F.count("*").alias("groups"), F.count("problem").alias("problems"), F.max("hours").alias("hours")]
    summary = every.groupBy("policy").agg(*counts, *sums, mean).orderBy("policy")
    has_usable = F.col("problems") < F.col("groups")
    known_sums = {name: F.when(has_usable, F.col(name)) for name in (*summed, averaged)}
    return summary.withColumns(known_sums)


def downsample_series(series: DataFrame, max_points: int = MAX_LINE_POINTS) -> DataFrame:
    """Return rows of schemas.SERIES, at most `max_points` a group and policy; a merged row has the highest lag.

    `moves` counts all moves so far, so the highest number is that at the end of a merged row's time.
    """
    group = Window.partitionBy("group").rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    seconds = F.unix_timestamp("at")
    first, last = F.min(seconds).over(group), F.max(seconds).over(group)
    step = F.floor((seconds - first) * max_points / (last - first + 1))
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
    """Return the best single policy for all groups; None if its gain over the present ones is less than `min_gain`."""
    present = sums_of(data)
    best = next(filter(_is_alternative, data.policy_sums), None)  # `policy_sums` are sorted by cost
    if present is None or best is None or not present["cost"]:
        return None
    return best if round(1 - best["cost"] / present["cost"], COST_DECIMALS) >= data.min_gain else None


def _is_alternative(sums: Row) -> bool:
    """Whether the sums are of a single policy that some group can use instead of its present one."""
    return sums["policy"] not in {OWN_POLICIES, RECORDED_POLICY} and bool(sums["usable"])


class LeadingGroup(NamedTuple):
    """A group that gains more than all other groups together, and its fraction of the total gain."""

    group: str
    gain_fraction: float


def find_leading_group(data: Findings) -> LeadingGroup | None:
    """Return the group that dominates the total gain; None if no group does, or only one has a known cost."""
    present = sums_of(data)
    recommended = sums_of(data, OWN_POLICIES)  # each group with the policy recommended for it
    has_other_groups = data.scope.groups - data.scope.unjudged != 1
    first = data.groups[0] if data.groups else None  # the group that saves most
    if present is None or recommended is None or first is None or not first["change"] or not has_other_groups:
        return None
    gain = present["cost"] - recommended["cost"]
    share = (first["cost_now"] - first["cost_then"]) / gain if gain > 0 else 0.0
    return LeadingGroup(first["group"], min(share, 1.0)) if share > DOMINANT_FRACTION else None


def sums_of(data: Findings, policy: str = RECORDED_POLICY) -> Row | None:
    """Return the sums of a policy, by default of the present policies; None if they are missing."""
    for row in data.policy_sums:
        if row["policy"] == policy:
            return row
    return None


def _matches_now_or_recommended(recommended_policies: Mapping[str, str]) -> Column:
    """Match rows of the present policy, and of the policy that is recommended for the row's group."""
    policy_of_group = F.create_map(*map(F.lit, chain.from_iterable(recommended_policies.items())))
    return (F.col("policy") == RECORDED_POLICY) | (F.col("policy") == F.try_element_at(policy_of_group, F.col("group")))


def _collect_scope(results: DataFrame, series: DataFrame, chosen: DataFrame) -> HistoryScope:
    now = results.filter(F.col("policy") == RECORDED_POLICY)
    sums = now.agg(F.max("hours").alias("longest"), F.sum("changes").alias("changes"))
    by_group = chosen.agg(
        F.count("*").alias("groups"),
        F.count_if("change").alias("changing"),
        F.count_if(F.col("group").startswith(GENERATED_PREFIX)).alias("generated"),
        F.count_if(F.col("cost_now").isNull()).alias("unjudged"),
    )
    seconds = F.unix_timestamp("at")
    times = series.agg(F.min(seconds).alias("since"), F.max(seconds).alias("until"))
    row = sums.crossJoin(by_group).crossJoin(times).first()
    return HistoryScope(**drop_nulls(row))


def _series_by_group(points: list[Row]) -> SeriesByGroup:
    lines: SeriesByGroup = {}
    for row in points:
        lines.setdefault(row["group"], {}).setdefault(row["policy"], []).append(row)
    return lines
