"""When people are told: a condition that turns at once, figures once a second at most, the lag alone once a minute.

But that a lag is not known any more, or is again, is told soon: a figure that stands is taken for what is so.
"""

import math
from collections.abc import Mapping
from typing import Any

FIGURES_EVERY, TURN_EVERY, LAG_EVERY = 1.0, 5.0, 60.0  # seconds

Status = Mapping[str, Any]


class Pace:
    """What of one group's status is written, what is being written, and what waits."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._untold: Status | None = None  # the newest status, while it is not worth a write
        self._going: Status | None = None  # the newest one that is on its way
        self._told = -LAG_EVERY

    def newest(self, written: Status) -> Status:
        """Return the newest status, told or not yet."""
        return self._known(written) if self._untold is None else self._untold

    def tell(self, status: Status, written: Status, now: float) -> bool:
        """Take the newest status; return whether it is to be written now."""
        known = self._known(written)
        self._untold = None if status == known else status
        if self._untold is None or now < self._told + _patience(status, known):
            return False
        self._untold, self._going, self._told = None, status, now
        return True

    def taken(self, status: Status) -> None:
        """Know that a status is written."""
        if self._going is status:
            self._going = None

    def untaken(self, status: Status, now: float) -> None:
        """Know that a status could not be written: it, or a newer one, waits for a second."""
        if self._going is status:
            self._untold, self._going = self._untold or status, None
            self._told = now + FIGURES_EVERY

    def seconds(self, written: Status, now: float) -> float:
        """Return the seconds until a status that waits is to be written."""
        if self._untold is None:
            return math.inf
        return max(self._told + _patience(self._untold, self._known(written)) - now, 0.0)

    def _known(self, written: Status) -> Status:
        return written if self._going is None else self._going


def _patience(status: Status, written: Status) -> float:
    """Return for how long what is written may stand."""
    if _state(status) != _state(written):
        return 0.0
    if {**status, "lag": None} != {**written, "lag": None}:
        return FIGURES_EVERY
    turned = (status.get("lag") is None) != (written.get("lag") is None)
    return TURN_EVERY if turned else LAG_EVERY


def _state(status: Status) -> tuple[object, ...]:
    conditions = status.get("conditions") or []
    return status.get("observedGeneration"), *((it["type"], it["status"], it["reason"]) for it in conditions)
