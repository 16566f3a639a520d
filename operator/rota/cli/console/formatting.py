"""Figures, times and strangers' texts as people read them."""

# ruff: noqa: T201 - this is where we speak

import math
import sys
from datetime import UTC, datetime

from rota.cli.console.output import GAP, clean, table

MOST = 2**63  # what is not below it, or is below 0, counts nothing
LONGEST = 1e10  # seconds: nothing takes 300 years

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def say(text: str) -> None:
    """Print a line."""
    print(clean(text))


def rows(them: list[dict[str, str]]) -> None:
    """Print a table, or where the terminal has no room for its columns, line by line what would stand in them."""
    cleaned = [{name: clean(value) for name, value in row.items()} for row in them]
    if cleaned and _room() < sum(len(name) + GAP for name in cleaned[0]):
        for row in cleaned:
            print("\n".join(["", *(f"{name.upper()}: {value}" for name, value in row.items() if value)]))
        print()
    else:
        table(cleaned)


def _room() -> float:
    if not sys.stdout.isatty():
        return math.inf
    from rich.console import Console  # noqa: PLC0415 - rich is for terminals only

    return Console().width


def number(value: int | None, *, estimate: bool = False) -> str:
    """Return a number that may not be known, or only about."""
    if value is None or not 0 <= value < MOST:
        return "unknown"
    return f"~{value}" if estimate else f"{value}"


def rate(value: float | None) -> str:
    """Return how many a second, which may not be known."""
    return "unknown" if value is None or not 0 <= value < MOST else f"{value:.1f}/s"


def unknown(text: str | None) -> str:
    """Return a text that may not be known."""
    return text or "unknown"


def duration(seconds: float | None) -> str:
    """Return how long something takes, by its two largest units: 0.4s, 3s, 2m10s, 1h5m, 2d4h."""
    if seconds is None or not seconds <= LONGEST:  # nor what is no number
        return "unknown"
    whole = round(max(seconds, 0))
    if 0 < seconds < 1:
        return f"{seconds:.1f}s"
    for unit, below, names in ((_DAY, _HOUR, "dh"), (_HOUR, _MINUTE, "hm"), (_MINUTE, 1, "ms")):
        if whole >= unit:
            large, rest = divmod(whole, unit)
            return f"{large}{names[0]}" + (f"{rest // below}{names[1]}" if rest // below else "")
    return f"{whole}s"


def ago(at: str, now: datetime | None = None) -> str:
    """Return how long ago a time is; what is no time, as it stands."""
    try:
        then = datetime.fromisoformat(at)
    except ValueError:
        return unknown(at)
    since = (now or datetime.now(UTC)) - (then if then.tzinfo else then.replace(tzinfo=UTC))
    return f"{duration(float(int(since.total_seconds())))} ago"
