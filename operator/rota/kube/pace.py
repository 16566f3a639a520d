"""When people are told: a condition that turns at once, figures once a second at most, the lag alone once a minute.

But that a lag is not known any more, or is again, is told soon: a figure that stands is taken for what is so.
"""

import math
from collections.abc import Mapping
from typing import Any

FIGURES_EVERY, TURN_EVERY, LAG_EVERY = 1.0, 5.0, 60.0  # seconds

Status = Mapping[str, Any]


class Pace:
    """What of one group's status is written, and what waits."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self.untold: Status | None = None  # the newest status, while it is not worth a write
        self._told = -LAG_EVERY

    def tell(self, status: Status, written: Status, now: float) -> bool:
        """Take the newest status; return whether it is to be written now."""
        self.untold = None if status == written else status
        if self.untold is None or now < self._told + _patience(status, written):
            return False
        self.untold, self._told = None, now
        return True

    def untaken(self, status: Status, now: float) -> None:
        """Know that a status could not be written: it waits for a second."""
        self.untold, self._told = status, now + FIGURES_EVERY

    def seconds(self, written: Status, now: float) -> float:
        """Return the seconds until a status that waits is to be written."""
        if self.untold is None:
            return math.inf
        return max(self._told + _patience(self.untold, written) - now, 0.0)


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
