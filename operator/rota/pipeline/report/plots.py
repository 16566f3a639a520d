"""Plots as SVG: lines over time, bars of parts. The page's style has the colours; each says in words what it shows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from math import floor, isfinite, log10
from typing import NamedTuple

from rota.model import plain

WIDTH, HEIGHT = 340, 170
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24
MOST_LETTERS = 200  # of a stranger's name

_DAY = 86400
_TIMES = [60 * minutes for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360, 720, 1440)]

Points = Sequence[tuple[float, float | None]]  # seconds since 1970, and what was then; None: not known


class Line(NamedTuple):
    """One line of a plot: its name, its class in the style, and its points."""

    name: str
    style: str
    points: Points


class Segment(NamedTuple):
    """A part of a bar."""

    name: str
    style: str
    value: float


def safe(text: object) -> str:
    """Return a stranger's text as HTML shows it, not as it obeys it."""
    letters = plain(str(text), MOST_LETTERS)
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in letters)
    return escape(shown, quote=True)


def number(value: float | None) -> str:
    """Write a number with as many digits as people read: 0.25, 3.4, 120, 31,000, 1.2 M."""
    if value is None or not isfinite(value):
        return "unknown"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{_digits(value / size)}\N{NO-BREAK SPACE}{letter}"
    return _digits(value)


def _short(value: float) -> str:
    """Write a number where there is little room: 120, 5,000, 31k."""
    thousands = 1e4 <= abs(value) < 1e6  # noqa: PLR2004 - one letter instead of four
    return f"{_digits(value / 1e3)}k" if thousands else number(value).replace("\N{NO-BREAK SPACE}", "")


def _digits(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2  # noqa: PLR2004 - three digits that count
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def lines(title: str, drawn: Sequence[Line], *, least: float = 0.0, steps: bool = False) -> str:
    """Draw lines over time. `least` is where the upward axis begins, `steps`: what holds until it changes."""
    known = [(at, value) for line in drawn for at, value in line.points if value is not None and isfinite(value)]
    if not known:
        return '<p class="none">Nothing is known of it.</p>'
    times = [at for line in drawn for at, _ in line.points]
    since, until = min(times), max(*times, min(times) + 1)
    marks = _marks(min(least, *(value for _, value in known)), max(value for _, value in known))
    low, high = marks[0], marks[-1]

    def x(at: float) -> float:
        return LEFT + (at - since) / (until - since) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [*_levels(marks, y), *_hours(since, until, x)]
    parts += [
        f'<path class="line {it.style}" d="{"".join(_path(it.points, x, y, steps=steps))}"/>' for it in reversed(drawn)
    ]
    told = "; ".join(_told(line) for line in drawn)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(title)}: {escape(told)}">'
        f"<g aria-hidden='true'>{''.join(parts)}</g></svg>"
    )


def _told(line: Line) -> str:
    known = [(value, at) for at, value in line.points if value is not None and isfinite(value)]
    if not known:
        return f"{safe(line.name)}: unknown"
    most, when = max(known, key=lambda it: it[0])
    least, last = min(known)[0], known[-1][0]
    return f"{safe(line.name)}: {number(least)} to {number(most)}, most at {clock(when)}, {number(last)} at the end"


def clock(at: float) -> str:
    """Return a time of the day, with its day, in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


def _marks(low: float, high: float) -> list[float]:
    """Return round numbers from below the lowest value to above the highest: 0, 50, 100, 150."""
    spread = max(high - low, abs(high) * 1e-6, 1e-9)
    size = 10 ** floor(log10(spread / 3))
    step = next(size * it for it in (1, 2, 2.5, 5, 10) if size * it >= spread / 3)
    first = floor(low / step + 1e-9)
    marks = [first * step]
    while marks[-1] < high - step * 1e-6:
        marks.append((first + len(marks)) * step)
    return marks if len(marks) > 1 else [*marks, marks[0] + step]


def _levels(marks: Iterable[float], y: Callable[[float], float]) -> Iterator[str]:
    for mark in marks:
        at = f"{y(mark):.1f}"
        yield f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 5}" y="{at}" dy=".35em" text-anchor="end">{_short(mark)}</text>'


def _hours(since: float, until: float, x: Callable[[float], float]) -> Iterator[str]:
    spread = until - since
    step = next((it for it in _TIMES if spread / it <= 4), max(1, round(spread / 4 / _DAY)) * _DAY)  # noqa: PLR2004
    many = spread > _DAY
    at = -(-since // step) * step
    while at <= until:
        place, when = f"{x(at):.1f}", datetime.fromtimestamp(at, UTC)
        form = "%d %b" if many and at % _DAY == 0 else "%H:%M"
        anchor = "start" if x(at) < LEFT + 12 else "end" if x(at) > WIDTH - RIGHT - 12 else "middle"
        yield f'<path class="grid" d="M{place} {HEIGHT - BOTTOM}v4"/>'
        yield f'<text x="{place}" y="{HEIGHT - 7}" text-anchor="{anchor}">{when:{form}}</text>'
        at += step


def _path(points: Points, x: Callable[[float], float], y: Callable[[float], float], *, steps: bool) -> Iterator[str]:
    """Draw through what is known; what is not is a gap."""
    before: tuple[float, float | None] = (0.0, None)
    for at, value in points:
        if value is None or not isfinite(value):
            before = (at, None)
            continue
        place = f"{x(at):.1f} {y(value):.1f}"
        if before[1] is None:
            yield f"M{place}h.1"  # else a point alone would not be seen
        elif not steps:
            yield f"L{place}"
        elif value != before[1]:
            yield f"H{x(at):.1f}V{y(value):.1f}"
        before = (at, value)
    if steps and before[1] is not None:
        yield f"H{x(before[0]):.1f}"


def bar(title: str, segments: Sequence[Segment], most: float) -> str:
    """Draw a bar of parts, as long as its sum is of `most`; it is as wide as there is room, so no text is in it."""
    ends = [0.0]
    for segment in segments:
        ends.append(ends[-1] + max(segment.value, 0.0) / (most or 1.0) * 100)
    drawn = [
        f'<rect class="{segment.style}" x="{start:.2f}" width="{end - start:.2f}" height="10"/>'
        for segment, (start, end) in zip(segments, pairwise(ends), strict=True)
        if end - start >= 0.01  # noqa: PLR2004 - less is not seen
    ]
    told = ", ".join(f"{safe(it.name)} {number(it.value)}" for it in segments if it.value)
    words = f"{safe(title)}: {told or 'nothing'}"
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f"{''.join(drawn)}</svg>"
    )
