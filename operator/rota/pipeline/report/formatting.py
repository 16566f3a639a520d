"""Numbers, durations and comparisons as text for the report."""

from collections.abc import Callable

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.report.plots import number

ENOUGH = 0.01  # fraction of a measure: smaller changes are not mentioned

_UNITS = ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s")))


def count(many: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{many:,} {noun}" if many == 1 else f"{many:,} {noun}s"


def format_value(value: object) -> object:
    """Format a number for a table in a terminal; return any other value unchanged."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        return value
    return number(value).replace("\N{NO-BREAK SPACE}", " ")


def unusable(row: Row, of: int) -> str:
    """Return where a policy is unusable (RECORDED: where no cost is known) and why; `of`: the number of all groups."""
    many, example = row["groups"], row["example"]
    where = f"group {example}" if many == 1 else f"{many:,} of {count(of, 'group')}, such as {example}"
    if row["policy"] == RECORDED:
        return f"not judged: {where}: {row['problem']}"
    return f"{row['policy']} in {where}: unusable: {row['problem']}"


def span(seconds: float | None) -> str:
    """Return a duration in its two largest units: 40 s, 8 min 45 s, 3 h 20 min, 4 d 3 h."""
    if seconds is None:
        return "unknown"
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{number(seconds)} s"
    whole = max(round(seconds), 60)
    unit, below, names = next(entry for entry in _UNITS if whole >= entry[0])
    large, remainder = divmod(whole, unit)
    return f"{large:,} {names[0]}" + (f" {remainder // below} {names[1]}" if remainder // below else "")


def percent(part: float) -> str:
    """Return a fraction in percent; a small one is "less than 1%", never 0 %."""
    text = "less than 1%" if 0 < abs(part) < ENOUGH else f"{part:.0%}"
    return text.replace("%", "\N{NO-BREAK SPACE}%")


def played_for(hours: float) -> str:
    """Return a sentence with the length of the histories, for a page with counts per day."""
    return f"Played were up to {span(hours * 3600)} of each group; what is counted is told per day"


def relative_change(now: float | None, then: float | None) -> str:
    """Return the relative change of a cost, such as "20% less"."""
    if now is None or then is None:
        return "unknown"
    if not now or abs(then - now) < ENOUGH / 2 * now:
        return "as much"
    return f"{percent(abs(now - then) / now)}\N{NO-BREAK SPACE}{'less' if then < now else 'more'}"


def improvements_and_drawbacks(now: Row, then: Row) -> tuple[list[str], list[str]]:
    """Return the improvements and the drawbacks of a change, each as a phrase."""
    phrases: dict[str, Callable[[float, float], str]] = {
        "moves": lambda a, b: f"{number(b)} moves of queues instead of {number(a)}",
        "pause": lambda a, b: f"queues stand still for {span(b)} in all instead of {span(a)}",
        "duplicates": lambda a, b: f"{number(b)} messages expected twice instead of {number(a)}",
        "imbalance": lambda a, b: (
            f"the busiest member has {number(1 + b)} times the mean load instead of {number(1 + a)}"
        ),
        "idle": lambda a, b: f"members idle for {number(b)} h instead of {number(a)} h",
        "unowned": lambda a, b: f"queues are nobody's for {span(b)} instead of {span(a)}",
        "lag_mean": lambda a, b: f"a mean lag of {number(b)} instead of {number(a)}",
    }
    better: list[str] = []
    worse: list[str] = []
    for name, phrase in phrases.items():
        old, new = now[name], then[name]
        if old is None or new is None or abs(new - old) <= ENOUGH * max(old, new):
            continue
        (better if new < old else worse).append(phrase(old, new))
    return better, worse
