"""The answer, the first section of the report: how much other policies save, and which groups to change first.

`Findings` are the data of the report; the sums of OWN_POLICIES are those with each group's recommended policy.
"""

from collections.abc import Iterator

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.ranking import OWN_POLICIES
from rota.pipeline.report.elements import render_list, render_policy_title
from rota.pipeline.report.formatting import (
    describe_change,
    format_count,
    format_duration,
    format_load,
    format_percent,
    improvements_and_drawbacks,
)
from rota.pipeline.report.links import render_card_link
from rota.pipeline.report.plots import escape_text, format_number
from rota.pipeline.report.report_data import Findings, best_for_all, find_leading_group, sums_of
from rota.pipeline.report.sections.backtest_section import describe_result

FIRST_CHANGES = 3  # groups that the answer names


def render_answer(data: Findings) -> Iterator[str]:
    """Yield the parts of the section: the conclusion, the first changes, their effects, and problems."""
    yield from _conclusion(data)
    yield from _first_changes(data)
    yield from _summary_tiles(data)
    yield from _effects(data)
    if data.backtest is not None and data.backtest.groups:
        yield f'<p>{escape_text(describe_result(data.backtest))}: <a href="#backtest">the test</a>.</p>'
    yield from _problem_lists(data)


def _conclusion(data: Findings) -> Iterator[str]:
    present = sums_of(data)
    recommended = sums_of(data, OWN_POLICIES)
    best = best_for_all(data)
    if present is None or recommended is None:
        yield '<p class="notice">The present cost of the groups is unknown, so there is nothing to compare.</p>'
        return
    changing = data.scope.changing
    judged = data.scope.groups - data.scope.unjudged
    if not changing:
        yield (
            f'<p class="answer">Keep the present policies: no group would save '
            f"{format_percent(data.min_gain)} or more with another policy.</p>"
        )
    else:
        of_that = ""
        if first := find_leading_group(data):
            of_that = f"; of that {format_percent(first.gain_fraction)} is group {escape_text(first.group)}"
        difference = describe_change(present["cost"], recommended["cost"])
        yield (
            f'<p class="answer"><strong>{changing:,} of {format_count(judged, "group")}</strong> would benefit from '
            "another policy. If each used its own, all together would cost "
            f'<strong class="good">{difference}</strong> than now{of_that}.</p>'
        )
    if best is not None:
        excepted = format_count(best["unusable"], "group")
        exceptions = f" ({excepted} that cannot use it would keep theirs)" if best["unusable"] else ""
        yield (
            f'<p class="answer">As one policy for all groups: <strong>{escape_text(best["policy"])}</strong>, '
            f"{describe_change(present['cost'], best['cost'])} than now{exceptions}.</p>"
        )
    elif data.policies and present["cost"]:
        yield f"<p>No single policy would be better for all groups by {format_percent(data.min_gain)} or more.</p>"


def _first_changes(data: Findings) -> Iterator[str]:
    """Yield a list of the groups that save most, with the reason for each."""
    changing = [row for row in data.groups if row["change"]]
    if not changing:
        return
    card_count = len(data.plotted_groups)  # these, the first of `changing`, have cards with plots
    items: list[str] = []
    for rank, row in enumerate(changing[:FIRST_CHANGES], 1):
        items.append(
            f"<strong>{render_card_link(row, rank, has_card=rank <= card_count)}</strong>: use "
            f"<strong>{escape_text(row['use'])}</strong> instead of {escape_text(row['strategy'])}, "
            f'<span class="good">{format_percent(row["gain"])} less cost</span>. {escape_text(row["evidence"])}'
        )
    more = len(changing) > len(items)
    yield f"<p>{'Begin with the groups that save most' if more else 'Change'}:</p>"
    yield render_list(items)
    if more:
        yield '<p><a href="#groups">All groups</a></p>'


def _effects(data: Findings) -> Iterator[str]:
    present = sums_of(data)
    recommended = sums_of(data, OWN_POLICIES)
    if present is None or recommended is None or not data.scope.changing:
        return
    better, worse = improvements_and_drawbacks(present, recommended)
    if better:
        yield f"<p>Per day, for all groups together: {'; '.join(better)}.</p>"
    if worse:
        yield f"<p>Drawbacks: {'; '.join(worse)}.</p>"


def _summary_tiles(data: Findings) -> Iterator[str]:
    present = sums_of(data)
    recommended = sums_of(data, OWN_POLICIES)
    if present is None or recommended is None or not data.scope.changing:
        return
    items = ""
    for title, show, name in (
        ("Cost a day", format_number, "cost"),
        ("Moves a day", format_number, "moves"),
        ("Pauses a day", format_duration, "pause"),
        ("Duplicates a day", format_number, "duplicates"),
        ("Busiest to mean load", _format_load_factor, "imbalance"),
        ("Mean lag", format_number, "lag_mean"),
    ):
        then = f'<dd class="much">{show(recommended[name])}</dd>'
        items += f'<div><dt>{title}</dt>{then}<dd class="was">now {show(present[name])}</dd></div>'
    yield f'<dl class="tiles">{items}</dl>'


def _format_load_factor(imbalance: float | None) -> str:
    return f"{format_load(imbalance)}\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}"


def _problem_lists(data: Findings) -> Iterator[str]:
    if data.scope.unjudged:
        yield (
            f'<p class="notice">{format_count(data.scope.unjudged, "group")} could not be evaluated, because the '
            "cost of their present policy is unknown; they are not in the sums.</p>"
        )
    if data.problems:
        yield "<p>Some policies cannot be used everywhere:</p>"
        yield render_list(map(_problem_sentence, data.problems))


def _problem_sentence(row: Row) -> str:
    # A problem of the recorded policy, which is in force, is one of the group: its history cannot be replayed at all.
    unusable = "" if row["policy"] == RECORDED_POLICY else "unusable: "
    where = f"{format_count(row['groups'], 'group')}, such as {escape_text(row['example'])}"
    return f"<strong>{render_policy_title(row['policy'])}</strong> in {where}: {unusable}{escape_text(row['problem'])}"
