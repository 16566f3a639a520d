"""Formats numbers, times and untrusted texts."""

# ruff: noqa: T201 - this module prints

import math
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from difflib import get_close_matches

from rota.cli.console.output import COLUMN_GAP_CHARACTERS, print_table, sanitize_line
from rota.sentences import join_names

MAX_NUMBER = 2**63  # this number and larger ones are printed as unknown
MAX_DURATION_SECONDS = 1e10  # a longer duration is printed as unknown
MAX_SUGGESTED_NAMES = 3

_MINUTE_SECONDS = 60
_HOUR_SECONDS = 3600
_DAY_SECONDS = 86400


def print_line(text: str) -> None:
    """Print a line without terminal control characters."""
    print(sanitize_line(text))


def print_rows(records: list[dict[str, str]]) -> None:
    """Print a table or, if the terminal is too narrow for it, one line for each cell."""
    cleaned = list(map(_sanitize_row, records))
    # `print_table` wraps values, so only the headings must fit.
    if not cleaned or _terminal_width() >= sum(len(name) + COLUMN_GAP_CHARACTERS for name in cleaned[0]):
        print_table(cleaned)
        return
    for row in cleaned:
        print()
        for name, value in row.items():
            if value:
                print(f"{name.upper()}: {value}")
    print()


def _sanitize_row(row: dict[str, str]) -> dict[str, str]:
    return {name: sanitize_line(value) for name, value in row.items()}


def _terminal_width() -> float:
    if not sys.stdout.isatty():
        return math.inf
    from rich.console import Console  # noqa: PLC0415 - rich is for terminals only

    return Console().width


def suggest_names(name: str, names: Collection[str]) -> str:
    """Return the end of a sentence about an unknown name: the most similar names, else the first ones."""
    if not names:
        return "there is none"
    similar = get_close_matches(name, names, n=MAX_SUGGESTED_NAMES)
    if similar:
        return f"similar: {', '.join(similar)}"
    return f"there is {join_names(sorted(names), MAX_SUGGESTED_NAMES)}"


def format_number(value: int | None, *, is_estimate: bool = False) -> str:
    """Return a number as text, with ~ for an estimate; "unknown" for None."""
    if value is None or not 0 <= value < MAX_NUMBER:
        return "unknown"
    return f"~{value}" if is_estimate else f"{value}"


def format_rate(value: float | None) -> str:
    """Return a rate per second as text; "unknown" for None."""
    return "unknown" if value is None or not 0 <= value < MAX_NUMBER else f"{value:.1f}/s"


def or_unknown(text: str | None) -> str:
    """Return the text, or "unknown" if it is empty."""
    return text or "unknown"


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: 0.4s, 3s, 2m10s, 1h5m, 2d4h."""
    if seconds is None or not seconds <= MAX_DURATION_SECONDS:  # also rejects NaN
        return "unknown"
    if 0 < seconds < 1:
        return f"{seconds:.1f}s"
    rounded = round(max(seconds, 0))
    for unit, letter, next_unit, next_letter in (
        (_DAY_SECONDS, "d", _HOUR_SECONDS, "h"),
        (_HOUR_SECONDS, "h", _MINUTE_SECONDS, "m"),
        (_MINUTE_SECONDS, "m", 1, "s"),
    ):
        if rounded >= unit:
            whole, remainder = divmod(rounded, unit)
            rest = remainder // next_unit
            return f"{whole}{letter}" + (f"{rest}{next_letter}" if rest else "")
    return f"{rounded}s"


def format_age(at: str, now: datetime | None = None) -> str:
    """Return how long ago a time is; a text that is not a time is returned unchanged."""
    try:
        then = datetime.fromisoformat(at)
    except ValueError:
        return or_unknown(at)
    since = (now or datetime.now(UTC)) - (then if then.tzinfo else then.replace(tzinfo=UTC))
    return f"{format_duration(float(int(since.total_seconds())))} ago"
