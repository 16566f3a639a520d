"""Outcomes of pulls: how each is counted, and how long a queue waits after one that failed."""

from rota.brokers.errors import SwitchedOff, Unknown, Unreachable
from rota.brokers.port import Pulled
from rota.sidecar.member.memory_budget import PullAdmission

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
SWITCHED_OFF_PAUSE = 3.0


def next_pause(error: Exception, pause: float) -> float:
    """Return for how many seconds a queue waits after a failed pull; `pause` is how long it waited last."""
    if isinstance(error, SwitchedOff):
        return SWITCHED_OFF_PAUSE
    return min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)


def result_of(pulled: Pulled, admission: PullAdmission) -> str:
    """Return the label by which an answered pull is counted."""
    if pulled.moved:
        return "moved"
    if pulled.messages:
        return "found"
    return "no_memory" if admission.refused_bytes else "empty"


def failure_of(error: Exception) -> str:
    """Return the label by which a failed pull is counted."""
    kinds = ((SwitchedOff, "switched_off"), (Unreachable, "unreachable"), (Unknown, "unknown"))
    return next((name for kind, name in kinds if isinstance(error, kind)), "refused")
