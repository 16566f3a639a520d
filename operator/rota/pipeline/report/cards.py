"""A group's card in the report: recommendation, reason, plots over time, and the command to apply it."""

from collections.abc import Iterator
from html import escape

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.recommend.cost_weights import MEASURES
from rota.pipeline.recommend.policy_manifests import command, manifest
from rota.pipeline.report.formatting import percent, span
from rota.pipeline.report.plots import Line, lines, number, safe
from rota.pipeline.report.report_data import Findings
from rota.spec import PolicySpec

MOST_LETTERS = 4000  # shown of a manifest: ByConfig's may be long

_PLOTS = (
    ("Lag, messages", "lag", 0.0, False),
    ("Busiest member, times the mean load", "imbalance", 1.0, False),
    ("Moves of queues so far", "moves", 0.0, True),
)


def card(data: Findings, place: int, row: Row) -> str:
    """Return a group's card as HTML."""
    group, use = row["group"], row["use"]
    now, then = data.figures.get((group, RECORDED)), data.figures.get((group, use))
    strategy = f" ({safe(then['strategy'])})" if then else ""
    plots = "".join(_plots(data, group, use))
    figures = _figures(now, then) if now and then else ""
    typed = command(group, use)
    do = f"<pre>{safe_lines(typed)}</pre>" if typed else '<p class="none">No group of Kubernetes has this name.</p>'
    return (
        f'<article aria-labelledby="group-{place}"><h3 id="group-{place}">{safe(group)}</h3>'
        f"<p>Use <strong>{safe(use)}</strong>{strategy} instead of {safe(row['strategy'])}: "
        f'<strong class="good">{percent(row["gain"])} less cost</strong>. {safe(row["evidence"])}</p>'
        f'<div class="plots">{plots}</div>'
        f"<details><summary>Figures, and what to type</summary>{figures}{do}</details></article>\n"
    )


def _plots(data: Findings, group: str, use: str) -> Iterator[str]:
    drawn = data.lines.get(group, {})
    names = ((RECORDED, "now", "now"), (use, f"with {use}", "then"))
    for title, column, least, steps in _PLOTS:
        plotted = [
            Line(name, style, [(row["at"], row[column]) for row in drawn[policy]])
            for policy, name, style in names
            if policy in drawn
        ]
        plot = lines(f"{group}, {title}", plotted, least=least, steps=steps)
        yield f"<figure><figcaption>{title}</figcaption>{plot}</figure>"


def _figures(now: Row, then: Row) -> str:
    rows = "".join(
        f'<tr><th scope="row">{title}</th><td class="number">{_say(name, now)}</td>'
        f'<td class="number">{_say(name, then)}</td><td class="number">{number(now[cost])}</td>'
        f'<td class="number">{number(then[cost])}</td></tr>'
        for name, title, cost in ((name, measure.title, f"cost_{name}") for name, measure in MEASURES.items())
    )
    heads = ("A day", "Now", "Then", "Points now", "Points then")
    head = "".join(f'<th scope="col"{" class=number" * bool(at)}>{title}</th>' for at, title in enumerate(heads))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _say(name: str, row: Row) -> str:
    if name == "lag":
        return f"mean {number(row['lag_mean'])}, highest {number(row['lag_peak'])}"
    if row[name] is None:
        return "unknown"
    if name == "imbalance":
        return f"{number(1 + row[name])} times the mean"
    if name in {"pause", "unowned"}:
        return span(row[name])
    return f"{number(row[name])}{' h' if name == 'idle' else ''}"


def manifest_of(name: str, policy: PolicySpec) -> str:
    """Return a policy's manifest as HTML, folded below the policy's name."""
    text = manifest(name, policy)
    cut = "" if len(text) <= MOST_LETTERS else f"\n# The rest is in policies/{name}.yaml."
    return (
        f"<details open><summary>RebalancePolicy {safe(name)}</summary>"
        f"<pre>{safe_lines(text[:MOST_LETTERS] + cut)}</pre></details>"
    )


def safe_lines(text: str) -> str:
    """Escape a text for HTML; line breaks stay, other unprintable characters are replaced."""
    shown = "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return escape(shown, quote=True)
