"""Hours of the clock, in UTC: the hour of a time, and the hours of a period."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

HOUR = timedelta(hours=1)


class HourPart(NamedTuple):
    """The part of a period in one hour."""

    hour: datetime
    seconds: float


def hour_of(at: datetime) -> datetime:
    """Return the start of the hour that contains a time."""
    return at.replace(minute=0, second=0, microsecond=0)


def split_by_hour(since: datetime, until: datetime) -> Iterator[HourPart]:
    """Split a period at full hours; a period that ends before it starts has no part."""
    while since < until:
        hour = hour_of(since)
        end = min(until, hour + HOUR)
        yield HourPart(hour, (end - since).total_seconds())
        since = end


def touched_hours(since: datetime, until: datetime) -> Iterator[datetime]:
    """Yield the hours from that of `since` to that of `until`, both included; if `until` is earlier, only the first.

    So a gap counts in an hour even if a clock was set back during it.
    """
    hour = hour_of(since)
    yield hour
    while (hour := hour + HOUR) <= until:
        yield hour
