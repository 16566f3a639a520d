"""A group's card in the report: recommendation, reason, plots over time, and the command to apply it."""

from collections.abc import Iterator

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.cost_weights import MEASURES
from rota.pipeline.recommend.policy_manifests import build_manifest, patch_command
from rota.pipeline.report.elements import escape_lines, number_cell
from rota.pipeline.report.formatting import format_duration, format_percent
from rota.pipeline.report.links import render_group_links
from rota.pipeline.report.plots import PlotLine, draw_lines, escape_text, format_number
from rota.pipeline.report.report_data import Findings
from rota.spec import PolicySpec

MAX_MANIFEST_CHARACTERS = 4000  # a longer manifest is cut: those of strategy ByConfig may be long

_PLOTS = (  # title, column of SERIES, lowest value of the y axis, whether a line is stepped
    ("Lag, messages", "lag", 0.0, False),
    ("Busiest member, times the mean load", "imbalance", 1.0, False),
    ("Moves of queues so far", "moves", 0.0, True),
)


def render_card(data: Findings, rank: int, row: Row) -> str:
    """Return a group's card as HTML."""
    group = row["group"]
    use = row["use"]
    current = data.measures.get((group, RECORDED_POLICY))
    recommended = data.measures.get((group, use))
    strategy = f" ({escape_text(recommended['strategy'])})" if recommended else ""
    plots = "".join(_draw_plots(data, group, use))
    figures = _measures_table(current, recommended) if current and recommended else ""
    command = patch_command(group, use)
    command_box = (
        f"<pre>{escape_lines(command)}</pre>" if command else '<p class="none">This is not a valid Kubernetes name.</p>'
    )
    return (
        f'<article aria-labelledby="group-{rank}"><h3 id="group-{rank}">{escape_text(group)}</h3>'
        f"<p>Use <strong>{escape_text(use)}</strong>{strategy} instead of {escape_text(row['strategy'])}: "
        f'<strong class="good">{format_percent(row["gain"])} less cost</strong>. {escape_text(row["evidence"])}</p>'
        f'{render_group_links(data.links, group)}<div class="plots">{plots}</div>'
        f"<details><summary>Figures and command</summary>{figures}{command_box}</details></article>\n"
    )


def _draw_plots(data: Findings, group: str, use: str) -> Iterator[str]:
    rows_by_policy = data.series.get(group, {})
    lines = ((RECORDED_POLICY, "now", "now"), (use, f"with {use}", "then"))  # policy, name, CSS class
    for title, column, y_minimum, is_stepped in _PLOTS:
        plotted: list[PlotLine] = []
        for policy, name, css_class in lines:
            if policy in rows_by_policy:
                points = [(row["at"], row[column]) for row in rows_by_policy[policy]]
                plotted.append(PlotLine(name, css_class, points))
        plot = draw_lines(f"{group}, {title}", plotted, y_minimum=y_minimum, is_stepped=is_stepped)
        yield f"<figure><figcaption>{title}</figcaption>{plot}</figure>"


def _measures_table(current: Row, recommended: Row) -> str:
    rows = ""
    for name, measure in MEASURES.items():
        cells = [_format_measure(name, current), _format_measure(name, recommended)]
        cells += [format_number(current[f"cost_{name}"]), format_number(recommended[f"cost_{name}"])]
        rows += f'<tr><th scope="row">{measure.title}</th>{"".join(map(number_cell, cells))}</tr>'
    titles = map('<th scope="col" class=number>{}</th>'.format, ("Now", "Then", "Points now", "Points then"))
    head = f'<th scope="col">A day</th>{"".join(titles)}'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _format_measure(name: str, row: Row) -> str:
    if name == "lag":
        return f"mean {format_number(row['lag_mean'])}, highest {format_number(row['lag_peak'])}"
    if row[name] is None:
        return "unknown"
    if name == "imbalance":  # the excess over the mean, unlike the column of SERIES, which is the ratio
        return f"{format_number(1 + row[name])} times the mean"
    if name in {"pause", "unowned"}:
        return format_duration(row[name])
    return f"{format_number(row[name])}{' h' if name == 'idle' else ''}"


def render_manifest(name: str, policy: PolicySpec) -> str:
    """Return a policy's manifest as HTML, folded below the policy's name."""
    text = build_manifest(name, policy)
    cut = "" if len(text) <= MAX_MANIFEST_CHARACTERS else f"\n# The rest is in policies/{name}.yaml."
    return (
        f"<details open><summary>RebalancePolicy {escape_text(name)}</summary>"
        f"<pre>{escape_lines(text[:MAX_MANIFEST_CHARACTERS] + cut)}</pre></details>"
    )
