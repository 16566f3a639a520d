"""Pokes of pods: the kubelet shows a changed document late unless an annotation of the pod changes too."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from rota.documents import Assignment
from rota.model import Holder, Poke, Queue
from rota.planner.members import incarnations
from rota.planner.snapshot import PodSnapshot

MAX_POKE_INTERVAL_SECONDS = 30.0  # between two pokes of a pod that does not obey


def pods_behind(
    pods: Sequence[PodSnapshot], document: Assignment, deleted_uids: frozenset[str], settings: str = ""
) -> list[PodSnapshot]:
    """Return the pods that have yet to apply a change of the document or of the settings (given as digest)."""
    revoked_in: dict[Holder, int] = {}
    for release in document.releasing.values():
        revoked_in[release.holder] = max(revoked_in.get(release.holder, 0), release.since)

    def is_behind(pod: PodSnapshot) -> bool:
        required = max(revoked_in.get(pod.holder, 0), document.barrier, _generation_after_restart(pod, document))
        differs = _held_queues(pod) != _assigned_queues(pod, document) or has_other_settings(pod, settings)
        return pod.generation < required or differs

    running = [pod for pod in pods if not pod.ended and pod.uid not in deleted_uids and (pod.started or pod.ready)]
    return [pod for pod in running if pod.generation < document.generation and is_behind(pod)]


def pods_behind_in_settings(
    pods: Sequence[PodSnapshot], document: Assignment, deleted_uids: frozenset[str]
) -> frozenset[str]:
    """Return the names of the pods that lag behind in settings only: their pokes are not urgent."""
    urgent = {pod.name for pod in pods_behind(pods, document, deleted_uids)}
    return frozenset(pod.name for pod in pods if pod.name not in urgent)


def has_other_settings(pod: PodSnapshot, settings: str) -> bool:
    """Whether a member reports other settings than these; members of earlier versions may report none."""
    return bool(settings and pod.settings and pod.settings != settings)


def due_pokes(pods: Sequence[PodSnapshot], document: Assignment) -> dict[str, Poke]:
    """Return the pokes that are due now; a terminating pod sees no new document, so it gets none."""
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
    remaining = [
        _poke_interval(new_pokes[pod.name]) if pod.name in new_pokes else _poke_interval(pod.poke) - pod.poked_for
        for pod in pods
    ]
    return min((seconds for seconds in remaining if seconds > 0), default=math.inf)


def _poke_interval(poke: Poke) -> float:
    return min(2.0 ** min(poke.attempts - 1, 10), MAX_POKE_INTERVAL_SECONDS)


def _held_queues(pod: PodSnapshot) -> AbstractSet[Queue]:
    return pod.decoded_report.held_queues if pod.decoded_report else frozenset()


def _assigned_queues(pod: PodSnapshot, document: Assignment) -> frozenset[Queue]:
    return frozenset(incarnations.assigned_queues(document, pod))


def _generation_after_restart(pod: PodSnapshot, document: Assignment) -> int:
    """Return the generation that a restarted pod must obey to prove the end of its earlier process; otherwise 0."""
    return document.incarnations_since if incarnations.has_restarted(document, pod) else 0
