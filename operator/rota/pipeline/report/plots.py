"""SVG plots: lines over time and stacked bars. Colours are in `report.css`; each plot has a text for screen readers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from math import floor, isfinite, log10
from typing import NamedTuple

from rota.model import plain

WIDTH, HEIGHT = 340, 170
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24
MOST_LETTERS = 200  # of a text from outside

_DAY = 86400
_TIMES = [60 * minutes for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360, 720, 1440)]

Points = Sequence[tuple[float, float | None]]  # seconds since 1970, and the value then; None: unknown


class Line(NamedTuple):
    """One line of a plot: its name, its CSS class, and its points."""

    name: str
    style: str
    points: Points


class Segment(NamedTuple):
    """One part of a stacked bar."""

    name: str
    style: str
    value: float


def safe(text: object) -> str:
    """Shorten and escape a text from outside for HTML; unprintable characters are replaced."""
    letters = plain(str(text), MOST_LETTERS)
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in letters)
    return escape(shown, quote=True)


def number(value: float | None) -> str:
    """Write a number with up to three significant digits or as an integer: 0.25, 3.4, 120, 31,000, 1.2 M."""
    if value is None or not isfinite(value):
        return "unknown"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{_digits(value / size)}\N{NO-BREAK SPACE}{letter}"
    return _digits(value)


def _short(value: float) -> str:
    """Write a number for a narrow axis: 120, 5,000, 31k."""
    thousands = 1e4 <= abs(value) < 1e6  # noqa: PLR2004 - one letter instead of four
    return f"{_digits(value / 1e3)}k" if thousands else number(value).replace("\N{NO-BREAK SPACE}", "")


def _digits(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2  # noqa: PLR2004 - three significant digits
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def lines(title: str, drawn: Sequence[Line], *, least: float = 0.0, steps: bool = False) -> str:
    """Draw lines over time. `least`: the y axis starts there or lower; `steps`: a value holds until it changes."""
    valid = [(at, value) for line in drawn for at, value in line.points if value is not None and isfinite(value)]
    if not valid:
        return '<p class="none">Nothing is known of it.</p>'
    times = [at for line in drawn for at, _ in line.points]
    since, until = min(times), max(*times, min(times) + 1)
    marks = _marks(min(least, *(value for _, value in valid)), max(value for _, value in valid))
    low, high = marks[0], marks[-1]

    def x(at: float) -> float:
        return LEFT + (at - since) / (until - since) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [*_levels(marks, y), *_hours(since, until, x)]
    parts += [
        f'<path class="line {line.style}" d="{"".join(_path(line.points, x, y, steps=steps))}"/>'
        for line in reversed(drawn)
    ]
    summary = "; ".join(_line_description(line) for line in drawn)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(title)}: {escape(summary)}">'
        f"<g aria-hidden='true'>{''.join(parts)}</g></svg>"
    )


def _line_description(line: Line) -> str:
    valid = [(value, at) for at, value in line.points if value is not None and isfinite(value)]
    if not valid:
        return f"{safe(line.name)}: unknown"
    most, when = max(valid, key=lambda pair: pair[0])
    least, last = min(valid)[0], valid[-1][0]
    return f"{safe(line.name)}: {number(least)} to {number(most)}, most at {clock(when)}, {number(last)} at the end"


def clock(at: float) -> str:
    """Return date and time of day in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


def _marks(low: float, high: float) -> list[float]:
    """Return round numbers from below the lowest value to above the highest: 0, 50, 100, 150."""
    spread = max(high - low, abs(high) * 1e-6, 1e-9)
    size = 10 ** floor(log10(spread / 3))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= spread / 3)
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
    step = next((gap for gap in _TIMES if spread / gap <= 4), max(1, round(spread / 4 / _DAY)) * _DAY)  # noqa: PLR2004
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
    """Yield the commands of an SVG path through the points; unknown values are gaps."""
    previous: tuple[float, float | None] = (0.0, None)
    for at, value in points:
        if value is None or not isfinite(value):
            previous = (at, None)
            continue
        place = f"{x(at):.1f} {y(value):.1f}"
        if previous[1] is None:
            yield f"M{place}h.1"  # a short stroke: a single point would be invisible
        elif not steps:
            yield f"L{place}"
        elif value != previous[1]:
            yield f"H{x(at):.1f}V{y(value):.1f}"
        previous = (at, value)
    if steps and previous[1] is not None:
        yield f"H{x(previous[0]):.1f}"


def bar(title: str, segments: Sequence[Segment], most: float) -> str:
    """Draw a stacked bar, scaled so that `most` fills the width; it has no text, because its width varies."""
    ends = [0.0]
    for segment in segments:
        ends.append(ends[-1] + max(segment.value, 0.0) / (most or 1.0) * 100)
    drawn = [
        f'<rect class="{segment.style}" x="{start:.2f}" width="{end - start:.2f}" height="10"/>'
        for segment, (start, end) in zip(segments, pairwise(ends), strict=True)
        if end - start >= 0.01  # noqa: PLR2004 - less is invisible
    ]
    values = ", ".join(f"{safe(segment.name)} {number(segment.value)}" for segment in segments if segment.value)
    words = f"{safe(title)}: {values or 'nothing'}"
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f"{''.join(drawn)}</svg>"
    )
