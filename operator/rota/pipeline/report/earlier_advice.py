"""Compares the costs that an earlier recommendation predicted with the present ones, for a section of the report."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from rota.pipeline.common.columns import false_if_null
from rota.pipeline.recommend.group_costs import COST_DECIMALS
from rota.pipeline.report.elements import number_cell, render_table
from rota.pipeline.report.formatting import compare_cost, describe_change, format_count
from rota.pipeline.report.links import render_row_download
from rota.pipeline.report.plots import escape_text, format_number, format_utc
from rota.spec import PolicySpec

MAX_ROWS = 50  # groups in the table


class EarlierAdvice(NamedTuple):
    """An earlier table of recommendations (schemas.CHOSEN), and its time in seconds since 1970."""

    chosen: DataFrame
    at: float


@dataclass(frozen=True, kw_only=True)
class ObservedAdvice:
    """Predicted and present costs of the groups that were advised to change: sums over groups, and the first rows."""

    at: float = 0.0
    advised: int = 0  # groups that were advised to change, and have a known cost now
    followed: int = 0  # of the advised groups, those that now use the strategy of the advised policy
    before: float = 0.0  # cost of the groups that followed, when they were advised
    predicted: float = 0.0  # cost that was predicted for them
    observed: float = 0.0  # cost that they have now
    rows: list[Row] = field(default_factory=list)


def observe_advice(earlier: EarlierAdvice, chosen: DataFrame, policies: Mapping[str, PolicySpec]) -> ObservedAdvice:
    """Compare the earlier recommendations with the present costs of the same groups.

    Whether a group has followed is judged by its strategy, because CHOSEN lacks the name of the policy in force. Advice
    counts as not followed if the advised policy is not among `policies` any more.
    """
    # In the earlier table, `now` is the time of the advice: `cost_now` is the cost then, `cost_then` the prediction.
    compared = (
        earlier.chosen.filter("change")
        .select("group", "use", F.col("cost_now").alias("before"), F.col("cost_then").alias("predicted"))
        .join(chosen.select("group", "strategy", F.col("cost_now").alias("observed")), on="group", how="inner")
        .filter(F.col("observed").isNotNull())
        .withColumn("followed", false_if_null(F.col("strategy") == _strategy_of(policies)))
    )
    difference = F.round(F.abs(F.col("observed") - F.col("predicted")), COST_DECIMALS)
    rows = compared.orderBy(F.col("followed").desc(), difference.desc(), "group").limit(MAX_ROWS).collect()
    sums = compared.agg(
        F.count("*").alias("advised"),
        F.count_if("followed").alias("followed"),
        _sum_of_followed("before"),
        _sum_of_followed("predicted"),
        _sum_of_followed("observed"),
    )
    return ObservedAdvice(at=earlier.at, rows=rows, **drop_nulls(sums.first()))


def drop_nulls(row: Row | None) -> dict[str, Any]:
    """Return the values of a row by column, without nulls; empty if `row` is None."""
    if row is None:
        return {}
    return {name: value for name, value in row.asDict().items() if value is not None}


def _sum_of_followed(cost: str) -> Column:
    return F.sum(F.when(F.col("followed"), F.col(cost))).alias(cost)


def _strategy_of(policies: Mapping[str, PolicySpec]) -> Column:
    """Return the strategy of the policy in column `use`; null if it is unknown."""
    column = F.lit(None).cast("string")
    for name, policy in policies.items():
        column = F.when(F.col("use") == name, F.lit(policy.strategy)).otherwise(column)
    return column


def render_observed(advice: ObservedAdvice) -> Iterator[str]:
    """Yield the parts of the report's section."""
    groups = format_count(advice.advised, "group")
    yield (
        f"<p>On {format_utc(advice.at)} UTC, {groups} of those in this report "
        f"{'was' if advice.advised == 1 else 'were'} advised to change; {advice.followed:,} now "
        f"{'uses' if advice.followed == 1 else 'use'} the strategy of the advised policy.</p>"
    )
    if not advice.advised:
        return
    if advice.followed:
        yield (
            f"<p>Those cost {format_number(advice.before)} points a day then; predicted were "
            f"{format_number(advice.predicted)}, observed are <strong>{format_number(advice.observed)}</strong>: "
            f"{compare_cost(advice.before, advice.observed, 'then')}, and "
            f"{compare_cost(advice.predicted, advice.observed, 'predicted')}.</p>"
        )
    yield (
        "<p>The observed cost is that of the policy in force in the history of this report, by the same model. Days "
        "before the change are part of it if this history begins earlier, and the load may have changed since.</p>"
    )
    head = [("Group", "name"), ("Advised", "do"), ("Cost then", "number"), ("Predicted", "number")]
    head += [("Observed", "number"), ("Against the prediction", "number")]
    yield render_table("Groups that were advised to change, points a day", head, map(_render_row, advice.rows))
    columns = ("group", "use", "strategy", "followed", "before", "predicted", "observed")
    yield render_row_download("observed", columns, advice.rows)


def _render_row(row: Row) -> str:
    state = "followed" if row["followed"] else "not followed"
    difference = describe_change(row["predicted"], row["observed"]) if row["followed"] else ""
    texts = [format_number(row[name]) for name in ("before", "predicted", "observed")]
    return (
        f'<tr><th scope="row" class="name">{escape_text(row["group"])}</th>'
        f'<td class="do">use <strong>{escape_text(row["use"])}</strong>'
        f"<small>{state}; now {escape_text(row['strategy'])}</small></td>"
        f"{''.join(map(number_cell, [*texts, difference]))}</tr>"
    )
