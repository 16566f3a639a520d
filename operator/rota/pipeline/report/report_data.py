"""What the report tells, taken out of Spark: as many rows as policies, and the first so many groups; never all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.recommend.cost_weights import LEAST_GAIN, Weights
from rota.pipeline.recommend.ranking import DIGITS, EACH, fleet, told
from rota.spec import PolicySpec

LISTED = 200  # groups in the table
SHOWN = 20  # groups with plots
MOST_SHOWN = 100
STEPS = 120  # of a line in a plot, which is some 300 pixels wide
MOST_PROBLEMS = 20  # of a policy
DOMINATES = 0.5  # of what all groups gain

Lines = dict[str, dict[str, list[Row]]]  # SERIES by group and policy, with times in seconds since 1970


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What was looked at."""

    groups: int = 0
    hours: float = 0.0  # of all groups together
    longest: float = 0.0
    changes: int = 0
    changing: int = 0  # groups for which another policy is recommended
    unjudged: int = 0  # groups of which nobody can say what they cost now
    since: int | None = None  # seconds since 1970: a time that Spark hands over is in this machine's zone
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that the report tells."""

    looked: Looked
    fleet: list[Row] = field(default_factory=list)  # the cheapest first
    groups: list[Row] = field(default_factory=list)  # CHOSEN, those that save most first
    problems: list[Row] = field(default_factory=list)
    figures: dict[tuple[str, str], Row] = field(default_factory=dict)  # by group and policy, of those with plots
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
    """Ask Spark for what the report tells."""
    shown = min(shown, MOST_SHOWN)
    groups = most_gaining(chosen).collect()
    top = [(row["group"], row["use"]) for row in groups if row["change"]][:shown]
    wanted = F.col("group").isin(*(group for group, _ in top))
    figures = told(costs, results).filter(wanted).filter(_of(top)).collect() if top else []
    of_them = thinned(series.filter(wanted).filter(_of(top))).withColumn("at", F.unix_timestamp("at")) if top else None
    points = of_them.orderBy("group", "policy", "at").collect() if of_them is not None else []
    return Findings(
        looked=_looked(results, series, chosen),
        fleet=fleet(costs, results, chosen).collect(),
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
    """Return the groups that save most, in points, not in percent: a tiny group may save all of nearly nothing."""
    saved = F.round(F.col("cost_now") - F.col("cost_then"), DIGITS)
    return chosen.orderBy(F.col("change").desc(), saved.desc_nulls_last(), "group").limit(most)


def problems(results: DataFrame) -> DataFrame:
    """Return why policies cannot be used, and in how many groups: the most frequent reasons of each policy.

    What is wrong with a group under any policy, for it cannot be played, is told once, of what was used.
    """
    group = Window.partitionBy("group").rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    of_now = F.max(F.when(F.col("policy") == RECORDED, F.col("problem"))).over(group)
    elsewhere = F.col("of_now").eqNullSafe(F.col("problem"))
    of_policy = Window.partitionBy("policy").orderBy(F.col("groups").desc(), "problem")
    named = F.concat(F.lit("Group "), F.col("group"))  # each group by its name would be a reason of its own
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
    """Return a row for each policy; where one cannot be used, the group is thought to stay with what it has.

    Of a policy that no group can use there are no figures: they would be those of what is used now.
    """
    summed, averaged = ("moves", "forced", "pause_seconds", "duplicates", "idle_member_hours", "lag_mean"), "imbalance"
    it, usable = F.struct(*summed, averaged), F.col("problem").isNull()
    now = results.where((F.col("policy") == RECORDED) & usable).select("group", it.alias("now"))
    used = F.when(usable & F.col("now").isNotNull(), it).otherwise(F.col("now"))
    sums = [F.sum(f"used.{name}").alias(name) for name in summed] + [F.avg(f"used.{averaged}").alias(averaged)]
    every = results.join(now, "group", how="left").withColumn("used", used)
    counts = [F.count("*").alias("groups"), F.count("problem").alias("problems"), F.max("hours").alias("hours")]
    told = every.groupBy("policy").agg(*counts, *sums).orderBy("policy")
    some = F.col("problems") < F.col("groups")
    return told.withColumns({name: F.when(some, F.col(name)) for name in (*summed, averaged)})


def thinned(series: DataFrame, steps: int = STEPS) -> DataFrame:
    """Return SERIES with at most so many steps a line; of those that fall together, the highest lag: peaks count."""
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


def best_for_all(found: Findings) -> Row | None:
    """Return the one policy that would be best for all groups, if it is better enough than what is used now."""
    now = now_of(found)
    others = [row for row in found.fleet if row["policy"] not in {EACH, RECORDED} and row["usable"]]
    if now is None or not others or not now["cost"]:
        return None
    best: Row = others[0]  # they come in this order
    return best if round(1 - best["cost"] / now["cost"], DIGITS) >= found.least else None


class Leading(NamedTuple):
    """A group that gains more than all others together, and its part of what all gain."""

    group: str
    share: float


def leading(found: Findings) -> Leading | None:
    """Return the group that dominates what is gained, if one does, and there are others to compare it with."""
    now, each, others = now_of(found), now_of(found, EACH), found.looked.groups - found.looked.unjudged - 1
    first = found.groups[0] if found.groups else None
    if now is None or each is None or first is None or not first["change"] or not others:
        return None
    gain = now["cost"] - each["cost"]
    share = (first["cost_now"] - first["cost_then"]) / gain if gain > 0 else 0.0
    return Leading(first["group"], min(share, 1.0)) if share > DOMINATES else None


def now_of(found: Findings, policy: str = RECORDED) -> Row | None:
    """Return the sum of what is used now, or of a policy."""
    return next((row for row in found.fleet if row["policy"] == policy), None)


def _of(top: list[tuple[str, str]]) -> Column:
    """Match what is used now, and what each group shall use."""
    wanted = F.create_map(*(F.lit(text) for pair in top for text in pair))
    return (F.col("policy") == RECORDED) | (F.col("policy") == F.try_element_at(wanted, F.col("group")))


def _looked(results: DataFrame, series: DataFrame, chosen: DataFrame) -> Looked:
    now = results.filter(F.col("policy") == RECORDED)
    seen = now.agg(F.sum("hours").alias("hours"), F.max("hours").alias("longest"), F.sum("changes").alias("changes"))
    of_them = chosen.agg(
        F.count("*").alias("groups"),
        F.count_if("change").alias("changing"),
        F.count_if(F.col("cost_now").isNull()).alias("unjudged"),
    )
    seconds = F.unix_timestamp("at")
    times = series.agg(F.min(seconds).alias("since"), F.max(seconds).alias("until"))
    row = seen.crossJoin(of_them).crossJoin(times).first()
    told = {name: value for name, value in row.asDict().items() if value is not None} if row else {}
    return Looked(**told)


def _lines(points: list[Row]) -> Lines:
    found: Lines = {}
    for row in points:
        found.setdefault(row["group"], {}).setdefault(row["policy"], []).append(row)
    return found
