"""SVG plots: lines over time and stacked bars. Colours are in `report.css`; each plot has a text for screen readers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from math import floor, isfinite, log10
from operator import itemgetter
from typing import NamedTuple, TypeGuard

from rota.model import single_line
from rota.pipeline.common.names import replace_unprintable

WIDTH = 340
HEIGHT = 170
LEFT_MARGIN = 44
RIGHT_MARGIN = 10
TOP_MARGIN = 10
BOTTOM_MARGIN = 24
MAX_TEXT_CHARACTERS = 200  # a longer text from outside, such as a group's name, is cut

_DAY_SECONDS = 86400
MAX_TICKS = 4  # approximate number of ticks of the time axis
_TICK_SECONDS = [60 * minutes for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360, 720, 1440)]

Points = Sequence[tuple[float, float | None]]  # seconds since 1970, and the value then; None: unknown


class PlotLine(NamedTuple):
    """One line of a plot: its name, its CSS class, and its points."""

    name: str
    css_class: str
    points: Points

    @property
    def known_points(self) -> list[tuple[float, float]]:
        """The points with a known value."""
        return [(at, value) for at, value in self.points if _is_known(value)]


class BarSegment(NamedTuple):
    """One part of a stacked bar."""

    name: str
    css_class: str
    value: float


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)


def escape_text(text: object) -> str:
    """Shorten and escape a text from outside for HTML; unprintable characters are replaced."""
    return escape(replace_unprintable(single_line(str(text), MAX_TEXT_CHARACTERS)), quote=True)


def format_number(value: float | None) -> str:
    """Write a number with up to three significant digits or as an integer: 0.25, 3.4, 120, 31,000, 1.2 M."""
    if not _is_known(value):
        return "unknown"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{_format_digits(value / size)}\N{NO-BREAK SPACE}{letter}"
    return _format_digits(value)


def _format_axis_number(value: float) -> str:
    """Write a number for a narrow axis: 120, 5,000, 31k."""
    is_shortened = 1e4 <= abs(value) < 1e6  # noqa: PLR2004 - one letter instead of four
    return f"{_format_digits(value / 1e3)}k" if is_shortened else format_number(value).replace("\N{NO-BREAK SPACE}", "")


def _format_digits(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2  # noqa: PLR2004 - three significant digits
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def draw_lines(title: str, plot_lines: Sequence[PlotLine], *, y_minimum: float = 0.0, is_stepped: bool = False) -> str:
    """Draw lines over time. The y axis starts at `y_minimum` or lower; a stepped line keeps a value until the next."""
    times: list[float] = []
    values: list[float] = []
    for line in plot_lines:
        times += map(itemgetter(0), line.points)
        values += map(itemgetter(1), line.known_points)
    if not values:
        return '<p class="none">No data.</p>'
    since = min(times)
    until = max(*times, since + 1)
    marks = _axis_marks(min(y_minimum, *values), max(values))
    low, high = marks[0], marks[-1]

    def x(at: float) -> float:
        return LEFT_MARGIN + (at - since) / (until - since) * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM_MARGIN - (value - low) / (high - low) * (HEIGHT - TOP_MARGIN - BOTTOM_MARGIN)

    parts = [*_draw_value_axis(marks, y), *_draw_time_axis(since, until, x)]
    for line in reversed(plot_lines):  # the first line is drawn on top
        commands = "".join(_path_commands(line.points, x, y, is_stepped=is_stepped))
        parts.append(f'<path class="line {line.css_class}" d="{commands}"/>')
    summary = "; ".join(map(_line_description, plot_lines))
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape_text(title)}: {summary}">'
        f"<g aria-hidden='true'>{''.join(parts)}</g></svg>"
    )


def _line_description(line: PlotLine) -> str:
    """Return a sentence about a line's values, as HTML."""
    known = line.known_points
    if not known:
        return f"{escape_text(line.name)}: unknown"
    highest_at, most = max(known, key=itemgetter(1))
    _, least = min(known, key=itemgetter(1))
    _, last = known[-1]
    values = f"{format_number(least)} to {format_number(most)}, highest at {format_utc(highest_at)}"
    return f"{escape_text(line.name)}: {values}, {format_number(last)} at the end"


def format_utc(at: float) -> str:
    """Return date and time of day in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


def _axis_marks(low: float, high: float) -> list[float]:
    """Return round numbers from below the lowest value to above the highest: 0, 50, 100, 150."""
    if low == high == 0:
        return [0.0, 1.0]
    spread = max(high - low, abs(high) * 1e-6, 1e-9)
    min_step = spread / 3
    power_of_ten = 10 ** floor(log10(min_step))  # the next lower one, so the last factor is always enough
    for factor in (1, 2, 2.5, 5, 10):
        step = power_of_ten * factor
        if step >= min_step:
            break
    first = floor(low / step + 1e-9)
    marks = [first * step]
    while marks[-1] < high - step * 1e-6:
        marks.append((first + len(marks)) * step)
    return marks if len(marks) > 1 else [*marks, marks[0] + step]


def _draw_value_axis(marks: Iterable[float], y: Callable[[float], float]) -> Iterator[str]:
    for mark in marks:
        at = f"{y(mark):.1f}"
        yield f'<path class="grid" d="M{LEFT_MARGIN} {at}H{WIDTH - RIGHT_MARGIN}"/>'
        yield f'<text x="{LEFT_MARGIN - 5}" y="{at}" dy=".35em" text-anchor="end">{_format_axis_number(mark)}</text>'


def _draw_time_axis(since: float, until: float, x: Callable[[float], float]) -> Iterator[str]:
    spread = until - since
    step = _tick_step(spread)
    has_days = spread > _DAY_SECONDS
    at = -(-since // step) * step  # rounded up to a multiple of the step
    while at <= until:
        place = f"{x(at):.1f}"
        when = datetime.fromtimestamp(at, UTC)
        time_format = "%d %b" if has_days and at % _DAY_SECONDS == 0 else "%H:%M"
        anchor = "start" if x(at) < LEFT_MARGIN + 12 else "end" if x(at) > WIDTH - RIGHT_MARGIN - 12 else "middle"
        yield f'<path class="grid" d="M{place} {HEIGHT - BOTTOM_MARGIN}v4"/>'
        yield f'<text x="{place}" y="{HEIGHT - 7}" text-anchor="{anchor}">{when:{time_format}}</text>'
        at += step


def _tick_step(spread: float) -> int:
    """Return the seconds between two ticks: the smallest usual step with few enough ticks, or else whole days."""
    for seconds in _TICK_SECONDS:
        if spread / seconds <= MAX_TICKS:
            return seconds
    return max(1, round(spread / MAX_TICKS / _DAY_SECONDS)) * _DAY_SECONDS


def _path_commands(
    points: Points, x: Callable[[float], float], y: Callable[[float], float], *, is_stepped: bool
) -> Iterator[str]:
    """Yield the commands of an SVG path through the points; unknown values are gaps."""
    previous: tuple[float, float | None] = (0.0, None)
    for at, value in points:
        if not _is_known(value):
            if is_stepped and previous[1] is not None:
                yield f"H{x(at):.1f}"
            previous = (at, None)
            continue
        place = f"{x(at):.1f} {y(value):.1f}"
        if previous[1] is None:
            yield f"M{place}h.1"  # a short stroke: a single point would be invisible
        elif not is_stepped:
            yield f"L{place}"
        elif value != previous[1]:
            yield f"H{x(at):.1f}V{y(value):.1f}"
        previous = (at, value)
    if is_stepped and previous[1] is not None:
        yield f"H{x(previous[0]):.1f}"


def draw_bar(title: str, segments: Sequence[BarSegment], full_width_value: float) -> str:
    """Draw a stacked bar, scaled so that `full_width_value` fills the width, without text."""
    rectangles = ""
    values: list[str] = []
    end = 0.0
    for segment in segments:
        if segment.value:
            values.append(f"{escape_text(segment.name)} {format_number(segment.value)}")
        start = end
        end += max(segment.value, 0.0) / (full_width_value or 1.0) * 100
        if end - start >= 0.01:  # noqa: PLR2004 - less is invisible
            rectangles += f'<rect class="{segment.css_class}" x="{start:.2f}" width="{end - start:.2f}" height="10"/>'
    label = f"{escape_text(title)}: {', '.join(values) or 'nothing'}"
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{rectangles}</svg>"
    )
