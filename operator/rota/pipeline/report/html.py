"""HTML report of a recommendation: one file, no scripts, no external resources; the answer first, then the reasons."""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from importlib.resources import files

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.recommend.cost_weights import MEASURES
from rota.pipeline.recommend.ranking import EACH
from rota.pipeline.report.cards import card, manifest_of
from rota.pipeline.report.formatting import (
    count,
    improvements_and_drawbacks,
    percent,
    played_for,
    relative_change,
    span,
)
from rota.pipeline.report.plots import Segment, bar, clock, number, safe
from rota.pipeline.report.report_data import LISTED, Findings, best_for_all, leading, sums_of

MOST_POLICIES = 50  # rows of a table; more are not comparable at a glance

# The browser loads nothing and runs nothing, even if a group's or a policy's name contains HTML.
RULES = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 2 2'%3E%3Cpath fill='%23e8a33d' "
    "d='M0 0h1v1H0z'/%3E%3Cpath fill='%233d8fe8' d='M1 0h1v1H1z'/%3E%3Cpath fill='%2347b36b' "
    "d='M0 1h1v1H0z'/%3E%3Cpath fill='%23999' d='M1 1h1v1H1z'/%3E%3C/svg%3E"
)

UNKNOWN = (
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


def report(data: Findings, now: float) -> str:
    """Return the whole report; `now`: the time of the report in seconds since 1970."""
    style = (files("rota.pipeline.report") / "report.css").read_text(encoding="utf-8")
    sections = "".join(_sections(data))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="{RULES}">
<title>Which policy for which group - Rota</title>
<link rel="icon" href="{ICON}">
<style>
{style}</style>
</head>
<body>
<header><p><strong>Rota</strong>: recommendation</p><p>{clock(now)} UTC</p></header>
<main>
<h1>Which policy for which group</h1>
{sections}</main>
<footer><p>Made by rota {safe(version("rota-operator"))}, <code>rota pipeline recommend</code>.</p></footer>
</body>
</html>
"""


def _sections(data: Findings) -> Iterator[str]:
    yield f'<p class="lede">{_looked(data)}</p>'
    if not data.looked.groups:
        yield '<p class="notice">There is nothing to recommend: no group was simulated.</p>'
        return
    yield _section("answer", "The answer", [*_answer(data), *_tiles(data), *_cannot(data)])
    yield _section("policies", "If all groups used one policy", _policies(data))
    yield _section("groups", "What each group should do", _groups(data))
    if data.gaining:
        many = len(data.gaining)
        title = "The group that gains" if data.looked.changing == 1 else f"The {many} groups that gain most"
        yield _section("gains", title, [_lines_key(), *(card(data, *ranked) for ranked in enumerate(data.gaining, 1))])
        yield _section("apply", "What to apply", _apply(data))
    yield _section("weights", "What the cost is made of", _weights(data))
    yield _section("unknown", "What these figures do not know", [_list(UNKNOWN)])


def _section(name: str, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{safe(title)}</h2>\n{body}\n</section>\n'


def _list(texts: Iterable[str]) -> str:
    return f'<ul class="known">{"".join(f"<li>{text}</li>" for text in texts)}</ul>'


def _looked(data: Findings) -> str:
    looked = data.looked
    tried = [safe(name) for name in data.policies][:MOST_POLICIES]
    when = (
        f", from {clock(looked.since)} to {clock(looked.until)} UTC"
        if looked.since is not None and looked.until is not None
        else ""
    )
    names = ", ".join(tried) if tried else "no other policy"
    days = (
        f"{number(looked.hours / 24)} days of groups"
        if looked.hours >= 48  # noqa: PLR2004
        else f"{number(looked.hours)} hours"
    )
    return (
        f"{count(looked.groups, 'group')}{when}: {days} with {count(looked.changes, 'change')} of members or queues "
        f"were played again, under what was used then and under {names}. {played_for(looked.longest)}."
    )


# The answer.


def _answer(data: Findings) -> Iterator[str]:
    now, each, best = sums_of(data), sums_of(data, EACH), best_for_all(data)
    if now is None or each is None:
        yield '<p class="notice">Nobody can say what the groups cost now, so that there is nothing to compare with.</p>'
        return
    changing, judged = data.looked.changing, data.looked.groups - data.looked.unjudged
    if not changing:
        yield (
            f'<p class="answer">Leave everything as it is: no group would gain '
            f"{percent(data.least)} or more by another policy.</p>"
        )
    else:
        words, first = relative_change(now["cost"], each["cost"]), leading(data)
        of_that = f"; of that {percent(first.share)} is group {safe(first.group)}" if first else ""
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
            f'<p class="answer">If it shall be one policy for all: <strong>{safe(best["policy"])}</strong>, '
            f"{relative_change(now['cost'], best['cost'])} than now{stay}.</p>"
        )
    elif data.policies and now["cost"]:
        yield f"<p>No single policy would be better for all of them by {percent(data.least)} or more.</p>"
    better, worse = improvements_and_drawbacks(now, each) if changing else ([], [])
    if better:
        yield f"<p>On a day, for all groups together, that would be: {'; '.join(better)}.</p>"
    if worse:
        yield f"<p>It has a price: {'; '.join(worse)}.</p>"


def _tiles(data: Findings) -> Iterator[str]:
    now, each = sums_of(data), sums_of(data, EACH)
    if now is None or each is None or not data.looked.changing:
        return
    tiles = [("Cost a day", number, "cost"), ("Moves a day", number, "moves"), ("Pauses a day", span, "pause")]
    tiles += [("Duplicates a day", number, "duplicates"), ("Busiest to mean load", _times, "imbalance")]
    tiles += [("Mean lag", number, "lag_mean")]
    items = "".join(
        f'<div><dt>{title}</dt><dd class="much">{say(each[name])}</dd><dd class="was">now {say(now[name])}</dd></div>'
        for title, say, name in tiles
    )
    yield f'<dl class="tiles">{items}</dl>'


def _times(imbalance: float | None) -> str:
    return f"{_load(imbalance)}\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}"


def _load(imbalance: float | None) -> str:
    return "unknown" if imbalance is None else number(1 + imbalance)


def _cannot(data: Findings) -> Iterator[str]:
    if data.looked.unjudged:
        yield (
            f'<p class="notice">{count(data.looked.unjudged, "group")} could not be judged, because nobody can say '
            "what is used there costs; the sums are without.</p>"
        )
    if data.problems:
        yield "<p>Some policies cannot be used everywhere:</p>"
        yield _list(
            f"<strong>{_called(row['policy'])}</strong> in {count(row['groups'], 'group')}, such as "
            f"{safe(row['example'])}: {'' if row['policy'] == RECORDED else 'unusable: '}{safe(row['problem'])}"
            for row in data.problems
        )


# Tables.


def _table(caption: str, head: Iterable[tuple[str, str]], rows: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col" class="{style}">{title}</th>' for title, style in head)
    return (
        f'<div class="wide" role="region" aria-label="{caption}" tabindex="0"><table><caption>{caption}</caption>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


_FLEET: list[tuple[str, str, Callable[[float | None], str]]] = [
    ("Moves", "moves", number),
    ("Pauses", "pause", span),
    ("Duplicates", "duplicates", number),
    ("Busiest member", "imbalance", _load),
    ("Idle, h", "idle", number),
    ("Unowned", "unowned", span),
    ("Mean lag", "lag_mean", number),
]


def _policies(data: Findings) -> Iterator[str]:
    rows = [row for row in data.fleet if row["usable"]][:MOST_POLICIES]
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
    head = [("Policy", "name"), ("Cost", "cost"), *((title, "number") for title, _, _ in _FLEET)]
    yield _table("Policies, the cheapest first", head, (_policy(row, now, most) for row in rows))
    left_out = [safe(row["policy"]) for row in data.fleet if not row["usable"]][:MOST_POLICIES]
    if left_out:
        yield f"<p>Left out, for no group can use {'it' if len(left_out) == 1 else 'them'}: {', '.join(left_out)}.</p>"


def _called(policy: str) -> str:
    return {RECORDED: "What is used now", EACH: "Each group its own"}.get(policy, safe(policy))


def _policy(row: Row, now: Row | None, most: float) -> str:
    name = row["policy"]
    strategies = ", ".join(safe(strategy) for strategy in row["strategies"])
    notes = [strategies] + ([f"{count(row['unusable'], 'group')} cannot use it"] if row["unusable"] else [])
    change = "" if now is None or name == RECORDED else f", {relative_change(now['cost'], row['cost'])}"
    segments = [Segment(measure.title, part, row[f"cost_{part}"] or 0.0) for part, measure in MEASURES.items()]
    cells = "".join(f'<td class="number">{say(row[part])}</td>' for _, part, say in _FLEET)
    return (
        f"<tr{' class=own' if name in {EACH, RECORDED} else ''}>"
        f'<th scope="row" class="name">{_called(name)}<small>{"; ".join(filter(None, notes))}</small></th>'
        f'<td class="cost">{number(row["cost"])}{change}{bar(f"Cost of {name}", segments, most)}</td>{cells}</tr>'
    )


def _groups(data: Findings) -> Iterator[str]:
    head = [
        ("Group", "name"),
        ("What to do", "do"),
        ("Cost now", "number"),
        ("Then", "number"),
        ("Gain", "number"),
        ("Why", "why"),
    ]
    rows = (_group(row, place if place <= len(data.gaining) else None) for place, row in enumerate(data.groups, 1))
    yield _table("Groups, those that save most first; costs are points a day", head, rows)
    if (remaining := data.looked.groups - len(data.groups)) > 0:
        more = max(data.looked.changing - LISTED, 0)
        yield (
            f"<p>And {count(remaining, 'more group')}, {more:,} of which would gain. The folder chosen/ beside this "
            "file has them all, and policies/ what to type for each that gains.</p>"
        )


def _group(row: Row, place: int | None) -> str:
    name = f'<a href="#group-{place}">{safe(row["group"])}</a>' if place else safe(row["group"])
    gain = f'<span class="good">{percent(row["gain"])}</span>' if row["change"] else "none"
    do = f"use <strong>{safe(row['use'])}</strong>" if row["change"] else "stay"
    return (
        f'<tr><th scope="row" class="name">{name}</th>'
        f'<td class="do">{do}<small>now {safe(row["strategy"])}</small></td>'
        f'<td class="number">{number(row["cost_now"])}</td><td class="number">{number(row["cost_then"])}</td>'
        f'<td class="number">{gain}</td><td class="why">{safe(row["evidence"])}</td></tr>'
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
    for name in sorted({row["use"] for row in data.gaining} & data.policies.keys()):
        yield manifest_of(name, data.policies[name])


def _weights(data: Findings) -> Iterator[str]:
    yield (
        f"<p>A cost is a sum of points on a day. A change is recommended from a gain of {percent(data.least)} on, and "
        "among equals the one that changes nothing. What is unknown of one policy counts for none in that group.</p>"
    )
    rows = (
        f'<tr><th scope="row">{measure.title}</th>'
        f'<td class="number">{data.weights.of(name):g}</td><td>for each {measure.unit}</td>'
        f'<td class="why">{measure.why}</td></tr>'
        for name, measure in MEASURES.items()
    )
    yield _table(
        "Weights", [("Measure", ""), ("Points", "number"), ("What they are for", ""), ("Why this default", "why")], rows
    )
