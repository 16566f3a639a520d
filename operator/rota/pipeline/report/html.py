"""HTML report of a recommendation: one file, no scripts, no external resources; the answer first, then the reasons."""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from importlib.resources import files

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.cost_weights import MEASURES
from rota.pipeline.recommend.ranking import OWN_POLICIES
from rota.pipeline.report.cards import render_card, render_manifest
from rota.pipeline.report.formatting import (
    count,
    describe_change,
    describe_history_length,
    format_duration,
    format_percent,
    improvements_and_drawbacks,
)
from rota.pipeline.report.plots import BarSegment, draw_bar, escape_text, format_number, format_utc
from rota.pipeline.report.report_data import MAX_LISTED_GROUPS, Findings, best_for_all, find_leading_group, sums_of

MAX_POLICY_ROWS = 50  # rows of a table; more are not comparable at a glance

# The browser loads nothing and runs nothing, even if a group's or a policy's name contains HTML.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 2 2'%3E%3Cpath fill='%23e8a33d' "
    "d='M0 0h1v1H0z'/%3E%3Cpath fill='%233d8fe8' d='M1 0h1v1H1z'/%3E%3Cpath fill='%2347b36b' "
    "d='M0 1h1v1H0z'/%3E%3Cpath fill='%23999' d='M1 1h1v1H1z'/%3E%3C/svg%3E"
)

LIMITATIONS = (
    (
        "What is used now was replayed, too: both sides of each comparison come from the same model, so that its "
        "faults weigh on both. Neither is what was really measured."
    ),
    (
        "Members obey, finish and start in typical times that are the same for all. A slow start, a slow broker or a "
        "cold cache is not known."
    ),
    (
        "Messages are a fluid: they come evenly between two looks at the offsets, some minutes apart, and every member "
        "works as fast as the group's were once seen to. Shorter peaks, slow messages and retries are not known."
    ),
    "Duplicates are what is to be expected, not a count.",
    "Pods come and go as they did. Under another policy an autoscaler might have decided otherwise.",
    "Hours of which the journal has nothing are in no figure; of a group that is new, there are few.",
    "Points are no money. Other weights may have another answer: those that were used are above.",
    "It was like this then. Look again some days after a change.",
)


def render_report(data: Findings, now: float) -> str:
    """Return the whole report; `now`: the time of the report in seconds since 1970."""
    style = (files("rota.pipeline.report") / "report.css").read_text(encoding="utf-8")
    sections = "".join(_sections(data))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="{CONTENT_SECURITY_POLICY}">
<title>Which policy for which group - Rota</title>
<link rel="icon" href="{ICON}">
<style>
{style}</style>
</head>
<body>
<header><p><strong>Rota</strong>: recommendation</p><p>{format_utc(now)} UTC</p></header>
<main>
<h1>Which policy for which group</h1>
{sections}</main>
<footer><p>Made by rota {escape_text(version("rota-operator"))}, <code>rota pipeline recommend</code>.</p></footer>
</body>
</html>
"""


def _sections(data: Findings) -> Iterator[str]:
    yield f'<p class="lede">{_scope_sentence(data)}</p>'
    if not data.scope.groups:
        yield '<p class="notice">There is nothing to recommend: no group was simulated.</p>'
        return
    yield _section("answer", "The answer", [*_answer(data), *_tiles(data), *_problem_lists(data)])
    yield _section("policies", "If all groups used one policy", _policies_table(data))
    yield _section("groups", "What each group should do", _groups_table(data))
    if data.plotted_groups:
        many = len(data.plotted_groups)
        title = "The group that gains" if data.scope.changing == 1 else f"The {many} groups that gain most"
        yield _section(
            "gains",
            title,
            [_lines_key(), *(render_card(data, *ranked) for ranked in enumerate(data.plotted_groups, 1))],
        )
        yield _section("apply", "What to apply", _apply(data))
    yield _section("weights", "What the cost is made of", _weights_table(data))
    yield _section("unknown", "What these figures do not know", [_list(LIMITATIONS)])


def _section(name: str, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape_text(title)}</h2>\n{body}\n</section>\n'


def _list(texts: Iterable[str]) -> str:
    return f'<ul class="known">{"".join(f"<li>{text}</li>" for text in texts)}</ul>'


def _scope_sentence(data: Findings) -> str:
    looked = data.scope
    tried = [escape_text(name) for name in data.policies][:MAX_POLICY_ROWS]
    when = (
        f", from {format_utc(looked.since)} to {format_utc(looked.until)} UTC"
        if looked.since is not None and looked.until is not None
        else ""
    )
    names = ", ".join(tried) if tried else "no other policy"
    days = (
        f"{format_number(looked.hours / 24)} days of groups"
        if looked.hours >= 48  # noqa: PLR2004
        else f"{format_number(looked.hours)} hours"
    )
    return (
        f"{count(looked.groups, 'group')}{when}: {days} with {count(looked.changes, 'change')} of members or queues "
        f"were played again, under what was used then and under {names}. {describe_history_length(looked.longest)}."
    )


# The answer.


def _answer(data: Findings) -> Iterator[str]:
    now, each, best = sums_of(data), sums_of(data, OWN_POLICIES), best_for_all(data)
    if now is None or each is None:
        yield '<p class="notice">Nobody can say what the groups cost now, so that there is nothing to compare with.</p>'
        return
    changing, judged = data.scope.changing, data.scope.groups - data.scope.unjudged
    if not changing:
        yield (
            f'<p class="answer">Leave everything as it is: no group would gain '
            f"{format_percent(data.min_gain)} or more by another policy.</p>"
        )
    else:
        words, first = describe_change(now["cost"], each["cost"]), find_leading_group(data)
        of_that = (
            f"; of that {format_percent(first.gain_fraction)} is group {escape_text(first.group)}" if first else ""
        )
        yield (
            f'<p class="answer"><strong>{changing:,} of {count(judged, "group")}</strong> would gain by another '
            f'policy. If each used its own, all together would cost <strong class="good">{words}</strong> than now'
            f"{of_that}.</p>"
        )
    if best is not None:
        stay = (
            f" ({count(best['unusable'], 'group')} that cannot use it would stay as they are)"
            if best["unusable"]
            else ""
        )
        yield (
            f'<p class="answer">If it shall be one policy for all: <strong>{escape_text(best["policy"])}</strong>, '
            f"{describe_change(now['cost'], best['cost'])} than now{stay}.</p>"
        )
    elif data.policies and now["cost"]:
        yield f"<p>No single policy would be better for all of them by {format_percent(data.min_gain)} or more.</p>"
    better, worse = improvements_and_drawbacks(now, each) if changing else ([], [])
    if better:
        yield f"<p>On a day, for all groups together, that would be: {'; '.join(better)}.</p>"
    if worse:
        yield f"<p>It has a price: {'; '.join(worse)}.</p>"


def _tiles(data: Findings) -> Iterator[str]:
    now, each = sums_of(data), sums_of(data, OWN_POLICIES)
    if now is None or each is None or not data.scope.changing:
        return
    tiles = [
        ("Cost a day", format_number, "cost"),
        ("Moves a day", format_number, "moves"),
        ("Pauses a day", format_duration, "pause"),
    ]
    tiles += [
        ("Duplicates a day", format_number, "duplicates"),
        ("Busiest to mean load", _format_load_factor, "imbalance"),
    ]
    tiles += [("Mean lag", format_number, "lag_mean")]
    items = "".join(
        f'<div><dt>{title}</dt><dd class="much">{say(each[name])}</dd><dd class="was">now {say(now[name])}</dd></div>'
        for title, say, name in tiles
    )
    yield f'<dl class="tiles">{items}</dl>'


def _format_load_factor(imbalance: float | None) -> str:
    return f"{_format_load(imbalance)}\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}"


def _format_load(imbalance: float | None) -> str:
    return "unknown" if imbalance is None else format_number(1 + imbalance)


def _problem_lists(data: Findings) -> Iterator[str]:
    if data.scope.unjudged:
        yield (
            f'<p class="notice">{count(data.scope.unjudged, "group")} could not be judged, because nobody can say '
            "what is used there costs; the sums are without.</p>"
        )
    if data.problems:
        yield "<p>Some policies cannot be used everywhere:</p>"
        yield _list(
            f"<strong>{_policy_title(row['policy'])}</strong> in {count(row['groups'], 'group')}, such as "
            f"{escape_text(row['example'])}: {_unusable(row['policy'])}{escape_text(row['problem'])}"
            for row in data.problems
        )


# Tables.


def _table(caption: str, head: Iterable[tuple[str, str]], rows: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col" class="{style}">{title}</th>' for title, style in head)
    return (
        f'<div class="wide" role="region" aria-label="{caption}" tabindex="0"><table><caption>{caption}</caption>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


_POLICY_COLUMNS: list[tuple[str, str, Callable[[float | None], str]]] = [
    ("Moves", "moves", format_number),
    ("Pauses", "pause", format_duration),
    ("Duplicates", "duplicates", format_number),
    ("Busiest member", "imbalance", _format_load),
    ("Idle, h", "idle", format_number),
    ("Unowned", "unowned", format_duration),
    ("Mean lag", "lag_mean", format_number),
]


def _policies_table(data: Findings) -> Iterator[str]:
    rows = [row for row in data.policy_sums if row["usable"]][:MAX_POLICY_ROWS]
    if not rows:
        yield '<p class="none">There is nothing to compare.</p>'
        return
    now, most = sums_of(data), max(row["cost"] for row in rows)
    keys = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" height="10"/></svg>'
        f"{measure.title}</li>"
        for name, measure in MEASURES.items()
    )
    yield "<p>On a day, for all groups together; the cheapest first. The bars show what each cost is made of:</p>"
    yield f'<ul class="key" aria-label="Colours of the bars">{keys}</ul>'
    head = [("Policy", "name"), ("Cost", "cost"), *((title, "number") for title, _, _ in _POLICY_COLUMNS)]
    yield _table("Policies, the cheapest first", head, (_policy_row(row, now, most) for row in rows))
    left_out = [escape_text(row["policy"]) for row in data.policy_sums if not row["usable"]][:MAX_POLICY_ROWS]
    if left_out:
        yield f"<p>Left out, for no group can use {'it' if len(left_out) == 1 else 'them'}: {', '.join(left_out)}.</p>"


def _policy_title(policy: str) -> str:
    return {RECORDED_POLICY: "What is used now", OWN_POLICIES: "Each group its own"}.get(policy, escape_text(policy))


def _policy_row(row: Row, now: Row | None, most: float) -> str:
    name = row["policy"]
    strategies = ", ".join(escape_text(strategy) for strategy in row["strategies"])
    notes = [strategies] + ([f"{count(row['unusable'], 'group')} cannot use it"] if row["unusable"] else [])
    change = "" if now is None or name == RECORDED_POLICY else f", {describe_change(now['cost'], row['cost'])}"
    segments = [BarSegment(measure.title, part, row[f"cost_{part}"] or 0.0) for part, measure in MEASURES.items()]
    cells = "".join(f'<td class="number">{say(row[part])}</td>' for _, part, say in _POLICY_COLUMNS)
    return (
        f"<tr{' class=own' if name in {OWN_POLICIES, RECORDED_POLICY} else ''}>"
        f'<th scope="row" class="name">{_policy_title(name)}<small>{"; ".join(filter(None, notes))}</small></th>'
        f'<td class="cost">{format_number(row["cost"])}{change}{draw_bar(f"Cost of {name}", segments, most)}</td>'
        f"{cells}</tr>"
    )


def _unusable(policy: str) -> str:
    return "" if policy == RECORDED_POLICY else "unusable: "


def _groups_table(data: Findings) -> Iterator[str]:
    head = [
        ("Group", "name"),
        ("What to do", "do"),
        ("Cost now", "number"),
        ("Then", "number"),
        ("Gain", "number"),
        ("Why", "why"),
    ]
    rows = (
        _group_row(row, place if place <= len(data.plotted_groups) else None)
        for place, row in enumerate(data.groups, 1)
    )
    yield _table("Groups, those that save most first; costs are points a day", head, rows)
    if (remaining := data.scope.groups - len(data.groups)) > 0:
        more = max(data.scope.changing - MAX_LISTED_GROUPS, 0)
        yield (
            f"<p>And {count(remaining, 'more group')}, {more:,} of which would gain. The folder chosen/ beside this "
            "file has them all, and policies/ what to type for each that gains.</p>"
        )


def _group_row(row: Row, place: int | None) -> str:
    name = f'<a href="#group-{place}">{escape_text(row["group"])}</a>' if place else escape_text(row["group"])
    gain = f'<span class="good">{format_percent(row["gain"])}</span>' if row["change"] else "none"
    do = f"use <strong>{escape_text(row['use'])}</strong>" if row["change"] else "stay"
    return (
        f'<tr><th scope="row" class="name">{name}</th>'
        f'<td class="do">{do}<small>now {escape_text(row["strategy"])}</small></td>'
        f'<td class="number">{format_number(row["cost_now"])}</td>'
        f'<td class="number">{format_number(row["cost_then"])}</td>'
        f'<td class="number">{gain}</td><td class="why">{escape_text(row["evidence"])}</td></tr>'
    )


def _lines_key() -> str:
    items = "".join(
        f'<li><svg class="swatch" viewBox="0 0 28 12" aria-hidden="true"><path class="line {style}" d="M1 6H27"/></svg>'
        f"{text}</li>"
        for style, text in (("now", "what is used now"), ("then", "what is recommended"))
    )
    return f'<ul class="key" aria-label="Lines">{items}</ul>'


# How to apply it.


def _apply(data: Findings) -> Iterator[str]:
    yield (
        "<p>These files are in the folder policies/ beside this report, once for each namespace, with the commands "
        "for its groups. The operator takes up a change by itself; nothing is restarted.</p>"
    )
    for name in sorted({row["use"] for row in data.plotted_groups} & data.policies.keys()):
        yield render_manifest(name, data.policies[name])


def _weights_table(data: Findings) -> Iterator[str]:
    yield (
        f"<p>A cost is a sum of points per day. A change is recommended if it gains at least "
        f"{format_percent(data.min_gain)}; among equal policies the present one stays. A measure that is unknown for"
        " one policy counts for none in that group.</p>"
    )
    rows = (
        f'<tr><th scope="row">{measure.title}</th>'
        f'<td class="number">{data.weights.weight_of(name):g}</td><td>for each {measure.unit}</td>'
        f'<td class="why">{measure.reason}</td></tr>'
        for name, measure in MEASURES.items()
    )
    yield _table(
        "Weights", [("Measure", ""), ("Points", "number"), ("What they are for", ""), ("Why this default", "why")], rows
    )
