"""Throttle of status writes: changed conditions at once, figures once a second at most, lag alone once a minute.

A lag that becomes unknown, or known again, is written after five seconds at most: readers take a published figure for
the current one.
"""

import math
from collections.abc import Mapping
from typing import Any

FIGURES_EVERY, TURN_EVERY, LAG_EVERY = 1.0, 5.0, 60.0  # seconds

Status = Mapping[str, Any]


class StatusThrottle:
    """One group's status: the version being written, and the version waiting."""

    def __init__(self) -> None:
        self._untold: Status | None = None  # the newest status, while it waits to be written
        self._going: Status | None = None  # the newest status that is being written
        self._told = -LAG_EVERY

    def newest(self, written: Status) -> Status:
        """Return the newest status, even if it waits or is being written."""
        return self._known(written) if self._untold is None else self._untold

    def tell(self, status: Status, written: Status, now: float) -> bool:
        """Set the newest status; return whether the caller must write it now."""
        current = self._known(written)
        self._untold = None if status == current else status
        if self._untold is None or now < self._told + _minimum_interval(status, current):
            return False
        self._untold, self._going, self._told = None, status, now
        return True

    def taken(self, status: Status) -> None:
        """Note that a status was written."""
        if self._going is status:
            self._going = None

    def untaken(self, status: Status, now: float) -> None:
        """Note that a write failed: the status, or a newer one, waits for a second."""
        if self._going is status:
            self._untold, self._going = self._untold or status, None
            self._told = now + FIGURES_EVERY

    def seconds(self, written: Status, now: float) -> float:
        """Return the seconds until the waiting status must be written; infinite if none waits."""
        if self._untold is None:
            return math.inf
        return max(self._told + _minimum_interval(self._untold, self._known(written)) - now, 0.0)

    def _known(self, written: Status) -> Status:
        return written if self._going is None else self._going


def _minimum_interval(status: Status, written: Status) -> float:
    """Return the seconds for which the written status may stay in place of a newer one."""
    if _state(status) != _state(written):
        return 0.0
    if {**status, "lag": None} != {**written, "lag": None}:
        return FIGURES_EVERY
    turned = (status.get("lag") is None) != (written.get("lag") is None)
    return TURN_EVERY if turned else LAG_EVERY


def _state(status: Status) -> tuple[object, ...]:
    conditions = status.get("conditions") or []
    return status.get("observedGeneration"), *((item["type"], item["status"], item["reason"]) for item in conditions)
