"""Outcomes of pulls: their metric labels, and the pause after a failed pull."""

from rota.brokers.errors import ConsumptionDisabledError, NotFoundError, UnreachableError
from rota.brokers.port import PullResult
from rota.sidecar.member.memory_budget import PullAdmission

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
SWITCHED_OFF_PAUSE = 3.0


def next_pause(error: Exception, pause: float) -> float:
    """Return for how many seconds a queue waits after a failed pull; `pause` is its previous wait, or 0."""
    if isinstance(error, ConsumptionDisabledError):
        return SWITCHED_OFF_PAUSE
    return min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)


def result_of(pulled: PullResult, admission: PullAdmission) -> str:
    """Return the metric label of an answered pull."""
    if pulled.moved:
        return "moved"
    if pulled.messages:
        return "found"
    return "no_memory" if admission.refused_bytes else "empty"


def failure_of(error: Exception) -> str:
    """Return the metric label of a failed pull."""
    kinds = ((ConsumptionDisabledError, "switched_off"), (UnreachableError, "unreachable"), (NotFoundError, "unknown"))
    return next((name for kind, name in kinds if isinstance(error, kind)), "refused")
