"""Numbers, durations and comparisons as text for the report."""

from collections.abc import Callable

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.report.plots import format_number

MIN_CHANGE_FRACTION = 0.01  # fraction of a measure: smaller changes are not mentioned

_UNITS = ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s")))


def count(many: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{many:,} {noun}" if many == 1 else f"{many:,} {noun}s"


def format_value(value: object) -> object:
    """Format a number for a table in a terminal; return any other value unchanged."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        return value
    return format_number(value).replace("\N{NO-BREAK SPACE}", " ")


def describe_problem(row: Row, group_count: int) -> str:
    """Return where a policy is unusable (RECORDED_POLICY: where no cost is known) of `group_count` groups, and why."""
    many = row["groups"]
    example = row["example"]
    where = f"group {example}" if many == 1 else f"{many:,} of {count(group_count, 'group')}, such as {example}"
    if row["policy"] == RECORDED_POLICY:
        return f"not evaluated: {where}: {row['problem']}"
    return f"{row['policy']} in {where}: unusable: {row['problem']}"


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: 40 s, 8 min 45 s, 3 h 20 min, 4 d 3 h."""
    if seconds is None:
        return "unknown"
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{format_number(seconds)} s"
    rounded = max(round(seconds), 60)
    unit, below, names = next(entry for entry in _UNITS if rounded >= entry[0])
    large, remainder = divmod(rounded, unit)
    return f"{large:,} {names[0]}" + (f" {remainder // below} {names[1]}" if remainder // below else "")


def format_percent(part: float) -> str:
    """Return a fraction in percent; a small one is "less than 1%", never 0 %."""
    text = "less than 1%" if 0 < abs(part) < MIN_CHANGE_FRACTION else f"{part:.0%}"
    return text.replace("%", "\N{NO-BREAK SPACE}%")


def describe_history_length(hours: float) -> str:
    """Return a sentence with the length of the histories, for a page with counts per day."""
    return f"Up to {format_duration(hours * 3600)} of each group's history was replayed; counts are per day"


def describe_change(now: float | None, then: float | None) -> str:
    """Return the relative change of a cost, such as "20% less"."""
    if now is None or then is None:
        return "unknown"
    if not now or abs(then - now) < MIN_CHANGE_FRACTION / 2 * now:
        return "as much"
    return f"{format_percent(abs(now - then) / now)}\N{NO-BREAK SPACE}{'less' if then < now else 'more'}"


def improvements_and_drawbacks(now: Row, then: Row) -> tuple[list[str], list[str]]:
    """Return the improvements and the drawbacks of a change, each as a phrase."""
    phrases: dict[str, Callable[[float, float], str]] = {
        "moves": lambda a, b: f"{format_number(b)} moves of queues instead of {format_number(a)}",
        "pause": lambda a, b: f"queues are paused for {format_duration(b)} in total instead of {format_duration(a)}",
        "duplicates": lambda a, b: f"{format_number(b)} messages expected twice instead of {format_number(a)}",
        "imbalance": lambda a, b: (
            f"the busiest member has {format_number(1 + b)} times the mean load instead of {format_number(1 + a)}"
        ),
        "idle": lambda a, b: f"members idle for {format_number(b)} h instead of {format_number(a)} h",
        "unowned": lambda a, b: f"queues have no owner for {format_duration(b)} instead of {format_duration(a)}",
        "lag_mean": lambda a, b: f"a mean lag of {format_number(b)} instead of {format_number(a)}",
    }
    better: list[str] = []
    worse: list[str] = []
    for name, phrase in phrases.items():
        old, new = now[name], then[name]
        if old is None or new is None or abs(new - old) <= MIN_CHANGE_FRACTION * max(old, new):
            continue
        (better if new < old else worse).append(phrase(old, new))
    return better, worse
