"""Figures in words, for managers."""

from collections.abc import Callable

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.report.plots import number

ENOUGH = 0.01  # of a measure: a smaller change is not worth a word

_UNITS = ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s")))


def count(many: int, what: str) -> str:
    """Return a number with its noun."""
    return f"{many:,} {what}" if many == 1 else f"{many:,} {what}s"


def figure(value: object) -> object:
    """Round a number for a table in a terminal; what is no number stays as it is."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        return value
    return number(value).replace("\N{NO-BREAK SPACE}", " ")


def unusable(row: Row, of: int) -> str:
    """Say where a policy cannot be used, and why; or that a group cannot be played at all."""
    many, example = row["groups"], row["example"]
    where = f"group {example}" if many == 1 else f"{many:,} of {count(of, 'group')}, such as {example}"
    if row["policy"] == RECORDED:
        return f"not judged: {where}: {row['problem']}"
    return f"{row['policy']} in {where}: unusable: {row['problem']}"


def span(seconds: float | None) -> str:
    """Return a time as people say it: 40 s, 8 min 45 s, 3 h 20 min, 4 d 3 h."""
    if seconds is None:
        return "unknown"
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{number(seconds)} s"
    whole = max(round(seconds), 60)
    unit, below, names = next(it for it in _UNITS if whole >= it[0])
    large, rest = divmod(whole, unit)
    return f"{large:,} {names[0]}" + (f" {rest // below} {names[1]}" if rest // below else "")


def percent(part: float) -> str:
    """Return a share; what is not nothing is not 0 %."""
    text = "less than 1%" if 0 < abs(part) < ENOUGH else f"{part:.0%}"
    return text.replace("%", "\N{NO-BREAK SPACE}%")


def played_for(hours: float) -> str:
    """Say of how long a time figures are, where counts are told by the day."""
    return f"Played were up to {span(hours * 3600)} of each group; what is counted is told per day"


def less(now: float | None, then: float | None) -> str:
    """Say how a cost changes."""
    if now is None or then is None:
        return "unknown"
    if not now or abs(then - now) < ENOUGH / 2 * now:
        return "as much"
    return f"{percent(abs(now - then) / now)}\N{NO-BREAK SPACE}{'less' if then < now else 'more'}"


def changes(now: Row, then: Row) -> tuple[list[str], list[str]]:
    """Return what gets better and what gets worse, each as a part of a sentence."""
    told: dict[str, Callable[[float, float], str]] = {
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
    for name, say in told.items():
        before, after = now[name], then[name]
        if before is None or after is None or abs(after - before) <= ENOUGH * max(before, after):
            continue
        (better if after < before else worse).append(say(before, after))
    return better, worse
