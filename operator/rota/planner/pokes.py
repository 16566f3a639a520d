"""Pokes: which pods get a changed annotation, so that their kubelets show a new document at once, not within a minute.

A pod is *behind* while it has not applied the newest document or settings. It is poked once for each generation, and
again with growing pauses.
"""

import math
from collections.abc import Mapping, Sequence

from rota.documents import Assignment
from rota.model import Holder, Poke
from rota.planner.members import incarnations
from rota.planner.snapshot import PodSnapshot, names_of

MAX_POKE_INTERVAL_SECONDS = 30.0  # between two pokes of a pod that does not obey


def pods_behind(
    pods: Sequence[PodSnapshot], document: Assignment, deleted_uids: frozenset[str], settings: str = ""
) -> list[PodSnapshot]:
    """Return the pods that have yet to apply the document or the settings (`settings` is their digest).

    A pod that obeys the document's generation is not behind: it has the settings, too. The exception is a process that
    uses no settings yet: an earlier process of the pod obeyed an assignment that was sent to it, and the volume, from
    which a restarted process reads it again, is older. Nor is a pod behind that obeys an older generation, if all of
    this holds:

    - no revoke, barrier or restart requires a later generation of it;
    - it uses these settings;
    - it consumes exactly the queues that the document gives it.
    """
    # By holder: the last generation that revoked a queue from it.
    revoked_in: dict[Holder, int] = {}
    for release in document.releasing.values():
        revoked_in[release.holder] = max(revoked_in.get(release.holder, 0), release.since)

    def is_behind(pod: PodSnapshot) -> bool:
        has_ended = pod.ended or pod.uid in deleted_uids
        if has_ended or not (pod.started or pod.ready):
            return False
        if pod.generation >= document.generation:
            return bool(settings) and _awaits_volume(pod)
        # A restarted pod must obey a document with incarnations: this proves that its earlier process has ended.
        after_restart = document.incarnations_since if incarnations.has_restarted(document, pod) else 0
        required_generation = max(revoked_in.get(pod.holder, 0), document.barrier, after_restart)
        if pod.generation < required_generation or has_other_settings(pod, settings):
            return True
        return not pod.consumes_exactly(incarnations.assigned_queues(document, pod))

    return list(filter(is_behind, pods))


def pods_behind_only_in_settings(
    pods: Sequence[PodSnapshot], document: Assignment, deleted_uids: frozenset[str]
) -> frozenset[str]:
    """Return which of these pods, which are behind, have applied the document: their pokes are not urgent."""
    return names_of(pods) - names_of(pods_behind(pods, document, deleted_uids))


def has_other_settings(pod: PodSnapshot, settings: str) -> bool:
    """Whether a member reports other settings than these (a digest); members of earlier versions may report none."""
    reported = pod.report.settings if pod.report else ""
    return bool(settings and reported and reported != settings)


def _awaits_volume(pod: PodSnapshot) -> bool:
    """Whether the pod's process has restarted, and has not found the assignment that the pod obeys in its volume.

    Sidecars whose processes have numbers report the settings in force, unless none are.
    """
    return pod.report is not None and pod.report.incarnation_number > 1 and not pod.report.settings


def due_pokes(pods: Sequence[PodSnapshot], document: Assignment) -> dict[str, Poke]:
    """Return the pokes to send now to these pods, which are behind.

    A terminating pod gets none, since it sees no new document.
    """
    pokes = {}
    for pod in pods:
        if pod.terminating:
            continue
        if pod.poke.generation < document.generation:
            pokes[pod.name] = Poke(document.generation, 1)
        elif pod.poked_for >= _poke_interval(pod.poke):
            pokes[pod.name] = Poke(document.generation, pod.poke.attempts + 1)
    return pokes


def seconds_until_next_poke(pods: Sequence[PodSnapshot], new_pokes: Mapping[str, Poke]) -> float:
    """Return the seconds until the next poke is due; infinity without one."""
    earliest = math.inf
    for pod in pods:
        new_poke = new_pokes.get(pod.name)
        seconds = _poke_interval(new_poke) if new_poke else _poke_interval(pod.poke) - pod.poked_for
        if seconds > 0:  # otherwise the pod is terminating: its poke is due, but it gets none
            earliest = min(earliest, seconds)
    return earliest


def _poke_interval(poke: Poke) -> float:
    """Return the seconds from this poke to the next: twice as many after each attempt, up to a limit."""
    return min(2.0 ** min(poke.attempts - 1, 10), MAX_POKE_INTERVAL_SECONDS)  # a user may write any number of attempts
