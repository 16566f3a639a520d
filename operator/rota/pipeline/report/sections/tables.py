"""The tables of the report: policies, groups, and the weights of the cost."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.cost_weights import MEASURES
from rota.pipeline.recommend.group_costs import COST_COLUMNS
from rota.pipeline.recommend.ranking import OWN_POLICIES
from rota.pipeline.report.elements import number_cell, render_policy_title, render_table
from rota.pipeline.report.formatting import describe_change, format_count, format_duration, format_load, format_percent
from rota.pipeline.report.links import render_card_link, render_group_links, render_row_download
from rota.pipeline.report.plots import BarSegment, draw_bar, escape_text, format_number
from rota.pipeline.report.report_data import MAX_LISTED_GROUPS, Findings, sums_of

MAX_POLICY_ROWS = 50  # more policies are not comparable at a glance


class _PolicyColumn(NamedTuple):
    """A column with a measure: its title, the measure's name in the sums, and how it is written."""

    title: str
    measure: str
    write: Callable[[float | None], str]


_POLICY_COLUMNS = (
    _PolicyColumn("Moves", "moves", format_number),
    _PolicyColumn("Pauses", "pause", format_duration),
    _PolicyColumn("Duplicates", "duplicates", format_number),
    _PolicyColumn("Busiest member", "imbalance", format_load),
    _PolicyColumn("Idle, h", "idle", format_number),
    _PolicyColumn("Unowned", "unowned", format_duration),
    _PolicyColumn("Mean lag", "lag_mean", format_number),
)


def render_policies_table(data: Findings) -> Iterator[str]:
    """Yield the table of what each policy would cost if all groups used it, the cheapest first."""
    rows = [row for row in data.policy_sums if row["usable"]][:MAX_POLICY_ROWS]
    if not rows:
        yield '<p class="none">There is nothing to compare.</p>'
        return
    present = sums_of(data)
    highest_cost = max(row["cost"] for row in rows)
    keys = ""
    for name, measure in MEASURES.items():
        sample = f'<svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" height="10"/></svg>'
        keys += f"<li>{sample}{measure.title}</li>"
    yield "<p>Per day, for all groups together; the cheapest first. The bars show the components of each cost:</p>"
    yield f'<ul class="key" aria-label="Colours of the bars">{keys}</ul>'
    head = [("Policy", "name"), ("Cost", "cost")]
    columns = ["policy", "cost", *COST_COLUMNS]
    for column in _POLICY_COLUMNS:
        head.append((column.title, "number"))
        columns.append(column.measure)
    yield render_table("Policies, the cheapest first", head, [_policy_row(row, present, highest_cost) for row in rows])
    yield render_row_download("policies", [*columns, "usable", "unusable"], rows)
    unusable = [escape_text(row["policy"]) for row in data.policy_sums if not row["usable"]]
    if unusable:
        names = ", ".join(unusable[:MAX_POLICY_ROWS])
        yield f"<p>Not shown, because no group can use them: {names}.</p>"


def _policy_row(row: Row, present: Row | None, highest_cost: float) -> str:
    name = row["policy"]
    strategies = ", ".join(map(escape_text, row["strategies"]))
    exceptions = f"{format_count(row['unusable'], 'group')} cannot use it" if row["unusable"] else ""
    notes = "; ".join(filter(None, [strategies, exceptions]))
    change = "" if present is None or name == RECORDED_POLICY else f", {describe_change(present['cost'], row['cost'])}"
    segments: list[BarSegment] = []
    for part, measure in MEASURES.items():
        segments.append(BarSegment(measure.title, part, row[f"cost_{part}"] or 0.0))
    bar = draw_bar(f"Cost of {name}", segments, highest_cost)
    cells = ""
    for column in _POLICY_COLUMNS:
        cells += number_cell(column.write(row[column.measure]))
    # These rows are of no single policy: the sums with each group's recommended policy, and with its present one.
    is_policy_per_group = name in {OWN_POLICIES, RECORDED_POLICY}
    return (
        f"<tr{' class=own' if is_policy_per_group else ''}>"
        f'<th scope="row" class="name">{render_policy_title(name)}<small>{notes}</small></th>'
        f'<td class="cost">{format_number(row["cost"])}{change}{bar}</td>'
        f"{cells}</tr>"
    )


def render_groups_table(data: Findings) -> Iterator[str]:
    """Yield the table of recommendations for the listed groups, those that save most first."""
    head = [("Group", "name"), ("Recommendation", "do"), ("Cost now", "number"), ("Then", "number")]
    head += [("Gain", "number"), ("Why", "why")]
    card_count = len(data.plotted_groups)  # the first groups of the table have cards
    rows: list[str] = []
    for rank, row in enumerate(data.groups, 1):
        rows.append(_group_row(data, row, rank, has_card=rank <= card_count))
    yield render_table("Groups, those that save most first; costs are points a day", head, rows)
    columns = ("group", "strategy", "use", "change", "best", "cost_now", "cost_then", "gain", "evidence")
    yield render_row_download("groups", columns, data.groups)
    if (remaining := data.scope.groups - len(data.groups)) > 0:
        benefiting = max(data.scope.changing - MAX_LISTED_GROUPS, 0)  # the table has those that benefit first
        yield (
            f"<p>And {format_count(remaining, 'more group')}, {benefiting:,} of which would benefit. The table "
            "marts/chosen of the lake has all groups; the folder policies/ next to this report has the command for "
            "each group that benefits.</p>"
        )


def _group_row(data: Findings, row: Row, rank: int, *, has_card: bool) -> str:
    name = render_card_link(row, rank, has_card=has_card)
    gain = f'<span class="good">{format_percent(row["gain"])}</span>' if row["change"] else "none"
    do = f"use <strong>{escape_text(row['use'])}</strong>" if row["change"] else "keep"
    links = render_group_links(data.links, row["group"]) if row["change"] else ""
    return (
        f'<tr><th scope="row" class="name">{name}{links}</th>'
        f'<td class="do">{do}<small>now {escape_text(row["strategy"])}</small></td>'
        f"{number_cell(format_number(row['cost_now']))}{number_cell(format_number(row['cost_then']))}"
        f'{number_cell(gain)}<td class="why">{escape_text(row["evidence"])}</td></tr>'
    )


def render_weights_table(data: Findings) -> Iterator[str]:
    """Yield the table of each measure's weight, and the reason for its default."""
    yield (
        f"<p>A cost is a sum of points per day. A change is recommended if it gains at least "
        f"{format_percent(data.min_gain)}; among equal costs the present policy wins. A measure that is unknown "
        "for one policy is ignored for all policies of that group.</p>"
    )
    rows = ""
    for name, measure in MEASURES.items():
        weight = number_cell(f"{data.weights.weight_of(name):g}")
        rows += f'<tr><th scope="row">{measure.title}</th>{weight}<td>for each {measure.unit}</td>'
        rows += f'<td class="why">{measure.reason}</td></tr>'
    yield render_table(
        "Weights", [("Measure", ""), ("Points", "number"), ("Unit", ""), ("Why this default", "why")], rows
    )
