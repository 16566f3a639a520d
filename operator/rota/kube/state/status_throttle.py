"""Throttle of status writes, each of which costs a request and an event for every watcher of the ConsumerGroup.

changed conditions                            written at once
other fields, such as the number of members   at most one write a second
lag becomes unknown, or known again           within five seconds: users take a published lag for the current one
another value of the lag, and nothing else    at most one write a minute
"""

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

FIGURES_INTERVAL_SECONDS = 1.0  # if no condition, but another field than the lag has changed
LAG_KNOWN_INTERVAL_SECONDS = 5.0  # if the lag has become unknown, or known again
LAG_INTERVAL_SECONDS = 60.0  # if only the value of the lag has changed

Status = Mapping[str, Any]


class StatusThrottle:
    """One group's status: the version being written, and the version waiting."""

    def __init__(self) -> None:
        self._waiting: Status | None = None  # the newest status, while it waits to be written
        self._in_flight: Status | None = None  # the newest status that is being written
        self._last_write_at = -LAG_INTERVAL_SECONDS  # on the event loop's clock; the first write is due at once

    def newest(self, written: Status) -> Status:
        """Return the newest status: the waiting one, the one being written, or else `written`, the published one."""
        return self._current(written) if self._waiting is None else self._waiting

    def offer(self, status: Status, written: Status, now: float) -> bool:
        """Set the newest status; return whether the caller must write it now. `written` is the published one."""
        current = self._current(written)
        self._waiting = None if status == current else status
        if self._waiting is None or now < self._last_write_at + _minimum_interval(status, current):
            return False
        self._waiting = None
        self._in_flight = status
        self._last_write_at = now
        return True

    def on_written(self, status: Status) -> None:
        """Record that a status was written."""
        if self._in_flight is status:
            self._in_flight = None

    def on_write_failed(self, status: Status, now: float) -> None:
        """Record that a write failed: the status, or a newer one, waits for a second."""
        if self._in_flight is status:
            self._waiting = self._waiting or status
            self._in_flight = None
            self._last_write_at = now + FIGURES_INTERVAL_SECONDS  # in the future: even changed conditions wait

    def seconds_to_write(self, written: Status, now: float) -> float:
        """Return the seconds until the waiting status must be written; infinite if none waits."""
        if self._waiting is None:
            return math.inf
        return max(self._last_write_at + _minimum_interval(self._waiting, self._current(written)) - now, 0.0)

    def _current(self, written: Status) -> Status:
        return written if self._in_flight is None else self._in_flight


def _minimum_interval(status: Status, written: Status) -> float:
    """Return the seconds for which the written status may stay in place of a newer one."""
    if _urgent_fields(status) != _urgent_fields(written):
        return 0.0
    if {**status, "lag": None} != {**written, "lag": None}:
        return FIGURES_INTERVAL_SECONDS
    becomes_known_or_unknown = (status.get("lag") is None) != (written.get("lag") is None)
    return LAG_KNOWN_INTERVAL_SECONDS if becomes_known_or_unknown else LAG_INTERVAL_SECONDS


def _urgent_fields(status: Status) -> tuple[object, ...]:
    conditions = status.get("conditions") or []
    return status.get("observedGeneration"), *map(itemgetter("type", "status", "reason"), conditions)
