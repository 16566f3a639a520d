"""Processes of a pod's sidecar: which one owns queues, and which have ended; see *Restarts* in docs/handover.md."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from rota.documents import Assignment, Share
from rota.handover import HolderEvidence
from rota.model import Holder, Queue
from rota.planner.snapshot import PodSnapshot, Snapshot

# Age up to which a report proves something about a process; see the member's RESUME_SECONDS.
MAX_REPORT_AGE_SECONDS = 20.0
INCARNATIONS_SCHEMA = 2  # the document schema in which shares name incarnations
# By number of restarts: how long a member serves before it gets queues again.
RESTART_PAUSES_SECONDS = (1.0, 10.0, 60.0, 300.0)


def incarnations_since(snapshot: Snapshot, document: Assignment) -> int:
    """Return from which generation on shares name incarnations, for the next document; 0: they do not.

    Shares begin to name them when every member has reported and can read them, and stop if a member cannot.
    """
    pods = [pod for pod in snapshot.pods if pod.started and not pod.ended and pod.uid not in snapshot.deleted_uids]
    readers = [pod for pod in pods if pod.report and pod.report.reads >= INCARNATIONS_SCHEMA]
    if snapshot.max_schema < INCARNATIONS_SCHEMA or any(
        pod.report and pod.report.reads < INCARNATIONS_SCHEMA for pod in pods
    ):
        return 0
    if document.incarnations_since:
        return document.incarnations_since
    identified = {pod.holder for pod in readers if pod.incarnation}
    holders = {Holder(name, share.uid) for name, share in document.members.items() if share.queues}
    holders |= {release.holder for release in document.releasing.values()}
    ended = snapshot.deleted_uids | {pod.uid for pod in snapshot.pods if pod.ended}
    all_identified = len(identified) == len(pods) and all(
        holder in identified or holder.uid in ended for holder in holders
    )
    return document.generation + 1 if all_identified and pods else 0


def has_inherited(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the process consumes queues of an earlier one: it does if the operator does not poll it for long."""
    return pod.decoded_report is not None and any(
        queue in pod.decoded_report.active_queues for queue in _queues_of_earlier_processes(document, pod)
    )


def _share_of(document: Assignment, pod: PodSnapshot) -> Share:
    """Return the pod's share in the document; an empty one if it has none, or a namesake has it."""
    share = document.members.get(pod.name)
    return share if share is not None and share.uid == pod.uid else Share(pod.uid)


def _queues_of_earlier_processes(document: Assignment, pod: PodSnapshot) -> Collection[Queue]:
    share = _share_of(document, pod)
    released = document.releases_by_holder.get(pod.holder, ()) if pod.incarnation > 1 else ()
    queues = [queue for queue in released if 0 < document.releasing[queue].incarnation < pod.incarnation]
    return [*share.queues, *queues] if 0 < share.incarnation < pod.incarnation else queues


def evidence_of(document: Assignment, pod: PodSnapshot, incarnation: int) -> HolderEvidence:
    """Return the evidence about this process of a pod; 0: about the process that runs."""
    if not (incarnation and pod.incarnation):
        return pod.evidence
    has_obeyed = pod.generation >= document.incarnations_since > 0
    is_fresh = max(pod.unreachable_for, pod.rejected_for) < MAX_REPORT_AGE_SECONDS
    if pod.incarnation == incarnation:
        is_over = has_obeyed and is_fresh and pod.stopped_for is not None and pod.stopped_for < MAX_REPORT_AGE_SECONDS
        return replace(pod.evidence, ended=pod.ended or is_over)
    if pod.incarnation > incarnation and has_inherited(document, pod):
        return pod.evidence
    if pod.incarnation > incarnation and has_obeyed and is_fresh:
        return replace(pod.evidence, ended=True)
    return replace(pod.evidence, report=None, active_queues=frozenset())


def lacks_incarnation(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the process could not store its number: then no document can give queues to it alone."""
    is_numbered = pod.report is None or pod.report.reads < INCARNATIONS_SCHEMA or bool(pod.incarnation)
    return bool(document.incarnations_since) and not is_numbered


def awaits_earlier_process(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the document gives queues to an earlier process of the pod, and its end is not proved yet."""
    if not has_restarted(document, pod):
        return False
    return not (
        has_inherited(document, pod) or evidence_of(document, pod, document.members[pod.name].incarnation).ended
    )


def has_restarted(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the document gives queues to an earlier process than the one that reported last."""
    share = _share_of(document, pod)
    return bool(share.queues) and 0 < share.incarnation < pod.incarnation


def assigned_queues(document: Assignment, pod: PodSnapshot) -> Collection[Queue]:
    """Return the queues that the pod's process consumes once it obeys the document."""
    share = document.members.get(pod.name)
    if share is None or share.uid != pod.uid:
        return ()
    if document.everyone is not None:
        return document.everyone
    is_own = not share.incarnation or not pod.incarnation or share.incarnation == pod.incarnation
    return share.queues if is_own or has_inherited(document, pod) else ()


def stopped_members(pods: Sequence[PodSnapshot], document: Assignment) -> Collection[str]:
    """Return the members with an ended process; none if these are more than half: too many for the others.

    The whole fleet may have been restarted. Then each new process takes over its pod's queues.
    """
    if not document.incarnations_since:
        return ()
    names = {pod.name for pod in pods if pod.stopped_for is not None}
    return names if 2 * len(names) <= len(pods) else ()


def pausing_members(pods: Sequence[PodSnapshot], document: Assignment) -> Collection[str]:
    """Return the members that restarted and have not served for long enough to get queues.

    After a first restart, a member keeps its remaining queues; after later ones, only queues of its present process.
    """
    if not document.incarnations_since:
        return ()
    return {pod.name for pod in pods if pod.stopped_for is None and pod.serving_for < _restart_pause(pod, document)}


def _restart_pause(pod: PodSnapshot, document: Assignment) -> float:
    share = _share_of(document, pod)
    has_taken_up = share.incarnation == pod.incarnation
    if not pod.restarts or (share.queues and (pod.restarts == 1 or has_taken_up)):
        return 0.0
    return RESTART_PAUSES_SECONDS[min(pod.restarts, len(RESTART_PAUSES_SECONDS)) - 1]


def pause_seconds_left(pod: PodSnapshot, document: Assignment) -> float:
    """Return the seconds until a member that restarted may have queues again; 0 also if that is not known."""
    is_ready = pod.ready and pod.stopped_for is None
    return (
        max(_restart_pause(pod, document) - pod.serving_for, 0.0) if document.incarnations_since and is_ready else 0.0
    )
