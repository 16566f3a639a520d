"""Times in documents, objects and records: RFC 3339 in UTC, such as 2026-11-22T03:43:24.100Z."""

from datetime import UTC, datetime
from functools import lru_cache


def format_time(seconds: float, precision: str = "milliseconds") -> str:
    """Return the text of a time that is given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def parse_time(text: object) -> float | None:
    """Return the seconds since 1970 of a time.

    None if the text is not a time, has no zone, or is outside the years 1 to 9999 in UTC.
    """
    return _parse(text) if isinstance(text, str) else None


@lru_cache(64)  # all queues that one document revokes have the same time text
def _parse(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC).timestamp() if moment.tzinfo else None
    except (ValueError, OverflowError):
        return None
