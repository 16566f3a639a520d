"""Numbers, durations and comparisons as text for the report."""

from collections.abc import Callable
from itertools import pairwise

from pyspark.sql import Row

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.report.plots import format_number

AS_MUCH = "as much"
MIN_CHANGE_FRACTION = 0.01  # of a measure; a smaller change is neither an improvement nor a drawback
_UNIT_SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}  # by unit, the largest first


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 group, 1,200 groups."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_value(value: object) -> object:
    """Format a number for a table in a terminal, None as "unknown"; return any other value unchanged."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return format_number(value).replace("\N{NO-BREAK SPACE}", " ")
    return value


def describe_problem(row: Row, group_count: int) -> str:
    """Return a sentence about a problem of `count_problems`: the policy, an example of its groups, the reason.

    `group_count` is the number of all groups. The problem of RECORDED_POLICY is that no cost is known.
    """
    affected = row["groups"]
    example = row["example"]
    all_groups = format_count(group_count, "group")
    where = f"group {example}" if affected == 1 else f"{affected:,} of {all_groups}, such as {example}"
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
    for units in pairwise(_UNIT_SECONDS):
        if rounded >= _UNIT_SECONDS[units[0]]:  # true for minutes at the latest
            break
    unit, smaller_unit = units
    number, rest = divmod(rounded, _UNIT_SECONDS[unit])
    rest_number = rest // _UNIT_SECONDS[smaller_unit]
    return f"{number:,} {unit}" + (f" {rest_number} {smaller_unit}" if rest_number else "")


def format_percent(fraction: float) -> str:
    """Return a fraction in percent; a small one is "less than 1%", never 0 %."""
    text = "less than 1%" if 0 < abs(fraction) < MIN_CHANGE_FRACTION else f"{fraction:.0%}"
    return text.replace("%", "\N{NO-BREAK SPACE}%")


def describe_history_length(hours: float) -> str:
    """Return a sentence with the length of the histories, for a page with counts per day."""
    return f"Up to {format_duration(hours * 3600)} of each group's history was replayed; counts are per day"


def describe_change(current: float | None, proposed: float | None) -> str:
    """Return the relative change of a cost, such as "20% less"."""
    if current is None or proposed is None:
        return "unknown"
    # A change that rounds to 0 % is none; up to 1 % it is "less than 1%".
    if not current or abs(proposed - current) < MIN_CHANGE_FRACTION / 2 * current:
        return AS_MUCH
    direction = "less" if proposed < current else "more"
    return f"{format_percent(abs(proposed - current) / current)}\N{NO-BREAK SPACE}{direction}"


def compare_cost(reference: float | None, cost: float | None, name: str) -> str:
    """Return the relative difference to a named cost, such as "20% less than now"."""
    change = describe_change(reference, cost)
    return f"{change} {'as' if change == AS_MUCH else 'than'} {name}"


def format_load(imbalance: float | None) -> str:
    """Return the load of the busiest member divided by the mean; `imbalance` is the excess over 1, None: unknown."""
    return "unknown" if imbalance is None else format_number(1 + imbalance)


_PHRASES: dict[str, tuple[Callable[[float], str], str]] = {  # by measure
    "moves": (format_number, "{new} moves of queues instead of {old}"),
    "pause": (format_duration, "queues are paused for {new} in total instead of {old}"),
    "duplicates": (format_number, "{new} messages expected twice instead of {old}"),
    "imbalance": (format_load, "the busiest member has {new} times the mean load instead of {old}"),
    "idle": (format_number, "members idle for {new} h instead of {old} h"),
    "unowned": (format_duration, "queues have no owner for {new} instead of {old}"),
    "lag_mean": (format_number, "a mean lag of {new} instead of {old}"),
}


def improvements_and_drawbacks(current: Row, proposed: Row) -> tuple[list[str], list[str]]:
    """Return the improvements and the drawbacks of a change, each as a phrase."""
    better: list[str] = []
    worse: list[str] = []
    for name, (write, phrase) in _PHRASES.items():
        old = current[name]
        new = proposed[name]
        if old is None or new is None or abs(new - old) <= MIN_CHANGE_FRACTION * max(old, new):
            continue
        (better if new < old else worse).append(phrase.format(new=write(new), old=write(old)))
    return better, worse
