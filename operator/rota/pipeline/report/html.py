"""The report: one file of HTML that needs nothing but a browser, and no script; the answer first, then why."""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from importlib.resources import files

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.recommend.cost_weights import MEASURES
from rota.pipeline.recommend.ranking import EACH
from rota.pipeline.report.cards import card, manifest_of
from rota.pipeline.report.formatting import changes, count, less, percent, played_for, span
from rota.pipeline.report.plots import Segment, bar, clock, number, safe
from rota.pipeline.report.report_data import LISTED, Findings, best_for_all, leading, now_of

MOST_POLICIES = 50  # rows of a table; more than that nobody compares

# Nothing is loaded from anywhere, and nothing runs, whatever a name says.
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


def report(found: Findings, now: float) -> str:
    """Return the report as a whole; `now`, in seconds since 1970, is when it is made."""
    style = (files("rota.pipeline.report") / "report.css").read_text(encoding="utf-8")
    sections = "".join(_sections(found))
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


def _sections(found: Findings) -> Iterator[str]:
    yield f'<p class="lede">{_looked(found)}</p>'
    if not found.looked.groups:
        yield '<p class="notice">There is nothing to recommend: no group was simulated.</p>'
        return
    yield _section("answer", "The answer", [*_answer(found), *_tiles(found), *_cannot(found)])
    yield _section("policies", "If all groups used one policy", _policies(found))
    yield _section("groups", "What each group should do", _groups(found))
    if found.gaining:
        many = len(found.gaining)
        title = "The group that gains" if found.looked.changing == 1 else f"The {many} groups that gain most"
        yield _section("gains", title, [_lines_key(), *(card(found, *it) for it in enumerate(found.gaining, 1))])
        yield _section("apply", "What to apply", _apply(found))
    yield _section("weights", "What the cost is made of", _weights(found))
    yield _section("unknown", "What these figures do not know", [_list(UNKNOWN)])


def _section(name: str, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{safe(title)}</h2>\n{body}\n</section>\n'


def _list(texts: Iterable[str]) -> str:
    return f'<ul class="known">{"".join(f"<li>{text}</li>" for text in texts)}</ul>'


def _looked(found: Findings) -> str:
    it = found.looked
    tried = [safe(name) for name in found.policies][:MOST_POLICIES]
    when = f", from {clock(it.since)} to {clock(it.until)} UTC" if it.since is not None and it.until is not None else ""
    names = ", ".join(tried) if tried else "no other policy"
    days = f"{number(it.hours / 24)} days of groups" if it.hours >= 48 else f"{number(it.hours)} hours"  # noqa: PLR2004
    return (
        f"{count(it.groups, 'group')}{when}: {days} with {count(it.changes, 'change')} of members or queues were "
        f"played again, under what was used then and under {names}. {played_for(it.longest)}."
    )


# The answer.


def _answer(found: Findings) -> Iterator[str]:
    now, each, best = now_of(found), now_of(found, EACH), best_for_all(found)
    if now is None or each is None:
        yield '<p class="notice">Nobody can say what the groups cost now, so that there is nothing to compare with.</p>'
        return
    changing, judged = found.looked.changing, found.looked.groups - found.looked.unjudged
    if not changing:
        yield (
            f'<p class="answer">Leave everything as it is: no group would gain '
            f"{percent(found.least)} or more by another policy.</p>"
        )
    else:
        words, first = less(now["cost"], each["cost"]), leading(found)
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
            f"{less(now['cost'], best['cost'])} than now{stay}.</p>"
        )
    elif found.policies and now["cost"]:
        yield f"<p>No single policy would be better for all of them by {percent(found.least)} or more.</p>"
    better, worse = changes(now, each) if changing else ([], [])
    if better:
        yield f"<p>On a day, for all groups together, that would be: {'; '.join(better)}.</p>"
    if worse:
        yield f"<p>It has a price: {'; '.join(worse)}.</p>"


def _tiles(found: Findings) -> Iterator[str]:
    now, each = now_of(found), now_of(found, EACH)
    if now is None or each is None or not found.looked.changing:
        return
    tiles = [("Cost a day", number, "cost"), ("Moves a day", number, "moves"), ("Pauses a day", span, "pause")]
    tiles += [("Duplicates a day", number, "duplicates"), ("Busiest to mean load", _times, "imbalance")]
    tiles += [("Mean lag", number, "lag_mean")]
    told = "".join(
        f'<div><dt>{title}</dt><dd class="much">{say(each[name])}</dd><dd class="was">now {say(now[name])}</dd></div>'
        for title, say, name in tiles
    )
    yield f'<dl class="tiles">{told}</dl>'


def _times(imbalance: float | None) -> str:
    return f"{_load(imbalance)}\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}"


def _load(imbalance: float | None) -> str:
    return "unknown" if imbalance is None else number(1 + imbalance)


def _cannot(found: Findings) -> Iterator[str]:
    if found.looked.unjudged:
        yield (
            f'<p class="notice">{count(found.looked.unjudged, "group")} could not be judged, because nobody can say '
            "what is used there costs; the sums are without.</p>"
        )
    if found.problems:
        yield "<p>Some policies cannot be used everywhere:</p>"
        yield _list(
            f"<strong>{_called(row['policy'])}</strong> in {count(row['groups'], 'group')}, such as "
            f"{safe(row['example'])}: {'' if row['policy'] == RECORDED else 'unusable: '}{safe(row['problem'])}"
            for row in found.problems
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


def _policies(found: Findings) -> Iterator[str]:
    rows = [row for row in found.fleet if row["usable"]][:MOST_POLICIES]
    if not rows:
        yield '<p class="none">There is nothing to compare.</p>'
        return
    now, most = now_of(found), max(row["cost"] for row in rows)
    keys = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" height="10"/></svg>'
        f"{it.title}</li>"
        for name, it in MEASURES.items()
    )
    yield "<p>On a day, for all groups together; the cheapest first. The bars show what each cost is made of:</p>"
    yield f'<ul class="key" aria-label="Colours of the bars">{keys}</ul>'
    head = [("Policy", "name"), ("Cost", "cost"), *((title, "number") for title, _, _ in _FLEET)]
    yield _table("Policies, the cheapest first", head, (_policy(row, now, most) for row in rows))
    left_out = [safe(row["policy"]) for row in found.fleet if not row["usable"]][:MOST_POLICIES]
    if left_out:
        yield f"<p>Left out, for no group can use {'it' if len(left_out) == 1 else 'them'}: {', '.join(left_out)}.</p>"


def _called(policy: str) -> str:
    return {RECORDED: "What is used now", EACH: "Each group its own"}.get(policy, safe(policy))


def _policy(row: Row, now: Row | None, most: float) -> str:
    name = row["policy"]
    strategies = ", ".join(safe(it) for it in row["strategies"])
    notes = [strategies] + ([f"{count(row['unusable'], 'group')} cannot use it"] if row["unusable"] else [])
    change = "" if now is None or name == RECORDED else f", {less(now['cost'], row['cost'])}"
    segments = [Segment(it.title, part, row[f"cost_{part}"] or 0.0) for part, it in MEASURES.items()]
    cells = "".join(f'<td class="number">{say(row[part])}</td>' for _, part, say in _FLEET)
    return (
        f"<tr{' class=own' if name in {EACH, RECORDED} else ''}>"
        f'<th scope="row" class="name">{_called(name)}<small>{"; ".join(filter(None, notes))}</small></th>'
        f'<td class="cost">{number(row["cost"])}{change}{bar(f"Cost of {name}", segments, most)}</td>{cells}</tr>'
    )


def _groups(found: Findings) -> Iterator[str]:
    head = [
        ("Group", "name"),
        ("What to do", "do"),
        ("Cost now", "number"),
        ("Then", "number"),
        ("Gain", "number"),
        ("Why", "why"),
    ]
    rows = (_group(row, place if place <= len(found.gaining) else None) for place, row in enumerate(found.groups, 1))
    yield _table("Groups, those that save most first; costs are points a day", head, rows)
    if (rest := found.looked.groups - len(found.groups)) > 0:
        more = max(found.looked.changing - LISTED, 0)
        yield (
            f"<p>And {count(rest, 'more group')}, {more:,} of which would gain. The folder chosen/ beside this file "
            "has them all, and policies/ what to type for each that gains.</p>"
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
    told = "".join(
        f'<li><svg class="swatch" viewBox="0 0 28 12" aria-hidden="true"><path class="line {style}" d="M1 6H27"/></svg>'
        f"{text}</li>"
        for style, text in (("now", "what is used now"), ("then", "what is recommended"))
    )
    return f'<ul class="key" aria-label="Lines">{told}</ul>'


# What to do with it.


def _apply(found: Findings) -> Iterator[str]:
    yield (
        "<p>These files are in the folder policies/ beside this report, once for each namespace, with the commands "
        "for its groups. The operator takes up a change by itself; nothing is restarted.</p>"
    )
    for name in sorted({row["use"] for row in found.gaining} & found.policies.keys()):
        yield manifest_of(name, found.policies[name])


def _weights(found: Findings) -> Iterator[str]:
    yield (
        f"<p>A cost is a sum of points on a day. A change is recommended from a gain of {percent(found.least)} on, and "
        "among equals the one that changes nothing. What is unknown of one policy counts for none in that group.</p>"
    )
    rows = (
        f'<tr><th scope="row">{it.title}</th>'
        f'<td class="number">{found.weights.of(name):g}</td><td>for each {it.unit}</td>'
        f'<td class="why">{it.why}</td></tr>'
        for name, it in MEASURES.items()
    )
    yield _table(
        "Weights", [("Measure", ""), ("Points", "number"), ("What they are for", ""), ("Why this default", "why")], rows
    )
