"""Outcomes of pulls: their metric labels, and the pause after a failed pull.

The labels are frozen, for users' dashboards name them: some have other words than the code.
"""

from rota.brokers.errors import ConsumptionDisabledError, NotFoundError, UnreachableError
from rota.brokers.port import PullResult
from rota.sidecar.member.memory_budget import PullAdmission

MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
# While a user has disabled consumption at the broker: no backoff, since the broker is well. The reference client waits
# as long after any failed pull.
DISABLED_PAUSE_SECONDS = 3.0

_FAILURE_LABELS: dict[type[Exception], str] = {
    ConsumptionDisabledError: "switched_off",
    UnreachableError: "unreachable",
    NotFoundError: "unknown",  # the topic or queue
}


def next_backoff(error: Exception, previous_seconds: float) -> float:
    """Return for how many seconds a queue waits after a failed pull; `previous_seconds` is its last wait, or 0."""
    if isinstance(error, ConsumptionDisabledError):
        return DISABLED_PAUSE_SECONDS
    return min(max(MIN_BACKOFF_SECONDS, 2 * previous_seconds), MAX_BACKOFF_SECONDS)


def result_label(pulled: PullResult, admission: PullAdmission) -> str:
    """Return the metric label of an answered pull."""
    if pulled.correction:
        return "moved"  # the broker names another offset to go on from
    if pulled.messages:
        return "found"
    return "no_memory" if admission.refused_bytes else "empty"


def failure_label(error: Exception) -> str:
    """Return the metric label of a failed pull."""
    labels = (label for kind, label in _FAILURE_LABELS.items() if isinstance(error, kind))
    return next(labels, "refused")
