"""Processes of a pod's sidecar: which one owns queues, and which have ended (docs/handover.md, *Restarts*).

Each process has an incarnation, a number that grows with each restart in the pod. From generation `incarnations_since`
on, a share (a member's part of the document) names the incarnation that owns its queues. A later process does not
consume them, so a report of a later process proves that the named one has ended. If no operator polls it for
RESUME_SECONDS (180 s, `member.py`), however, a later process inherits the share: it consumes the queues, and its
reports prove nothing about the earlier process any more.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from rota.documents import Assignment, Share
from rota.handover import HolderEvidence
from rota.model import Queue
from rota.planner.snapshot import PodSnapshot, Snapshot, names_of

# If a member is silent or rejected for longer, its report proves nothing: its next process may inherit the queues soon.
MAX_SILENCE_SECONDS = 20.0
INCARNATIONS_SCHEMA = 2  # the document schema in which shares name incarnations
RESTART_PAUSES_SECONDS = (1.0, 10.0, 60.0, 300.0)  # by number of restarts: until a member gets queues again


def incarnations_since(snapshot: Snapshot, document: Assignment) -> int:
    """Return, for the next document, the first generation whose shares name incarnations; 0: its shares do not.

    Shares begin to name them once every running pod has reported one, and every other holder of queues has ended. They
    stop when a member cannot read them, or when documents of this schema may not be written.
    """
    pods = snapshot.running_pods
    if snapshot.max_schema < INCARNATIONS_SCHEMA or not all(map(_may_read_incarnations, pods)):
        return 0
    if document.incarnations_since:
        return document.incarnations_since
    identified = {pod.holder for pod in pods if pod.incarnation}
    if not pods or len(identified) < len(pods):
        return 0
    uids_of_others = {holder.uid for holder in document.queue_holders - identified}
    return document.generation + 1 if uids_of_others <= snapshot.ended_uids else 0


def _may_read_incarnations(pod: PodSnapshot) -> bool:
    """Whether the member reports to read documents with incarnations, or has no report yet."""
    return pod.report is None or pod.report.reads >= INCARNATIONS_SCHEMA


def has_inherited(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the process consumes or drains queues that the document leaves to an earlier process of the pod."""
    return not pod.active_queues.isdisjoint(_queues_of_earlier_processes(document, pod))


def has_inherited_share(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the process has inherited queues of a share that names an earlier one; the next share names this one."""
    return has_restarted(document, pod) and has_inherited(document, pod)


def _share_of(document: Assignment, pod: PodSnapshot) -> Share:
    """Return the pod's share in the document; an empty one if it has none."""
    return document.share_of(pod.holder) or Share(pod.uid)


def _queues_of_earlier_processes(document: Assignment, pod: PodSnapshot) -> Collection[Queue]:
    """Return the queues of the pod, owned or being released, that the document leaves to an earlier process."""
    share = _share_of(document, pod)
    released = document.releases_by_holder.get(pod.holder, ())
    queues = [queue for queue in released if pod.is_successor_of(document.releasing[queue].incarnation)]
    return [*share.queues, *queues] if pod.is_successor_of(share.incarnation) else queues


def evidence_of(document: Assignment, pod: PodSnapshot, incarnation: int) -> HolderEvidence:
    """Return the evidence about process `incarnation` of a pod; 0: about the process that runs.

    A process counts as ended only if its pod has obeyed a document with incarnations (else a later process may still
    obey an older document and consume its share), and if the report is fresh (else a later one may inherit the share).
    """
    if not (incarnation and pod.incarnation):  # one of the two has no number to compare
        return pod.evidence
    has_obeyed = pod.generation >= document.incarnations_since > 0
    is_fresh = max(pod.unreachable_for, pod.rejected_for) < MAX_SILENCE_SECONDS
    if pod.incarnation == incarnation:  # the process that reported last; it may have stopped since
        # After a longer stop, the next process may have inherited its queues.
        has_just_stopped = pod.stopped_for is not None and pod.stopped_for < MAX_SILENCE_SECONDS
        has_ended = has_obeyed and is_fresh and has_just_stopped
        return replace(pod.evidence, ended=True) if has_ended else pod.evidence
    is_later = pod.incarnation > incarnation  # the report is of a later process
    may_resume = pod.report is not None and pod.report.may_resume  # and consume inherited queues
    if is_later and (has_inherited(document, pod) or may_resume):
        return pod.evidence
    if is_later and has_obeyed and is_fresh:
        return replace(pod.evidence, ended=True)
    # The report is not of this process, so it says nothing about the queues of this process.
    return replace(pod.evidence, report=None, active_queues=frozenset())


def lacks_incarnation(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the process could not store its number: then no document can give queues to it alone."""
    if not document.incarnations_since or pod.report is None:
        return False
    return pod.report.reads >= INCARNATIONS_SCHEMA and not pod.incarnation


def awaits_earlier_process(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the document gives queues to an earlier process of the pod, and its end is not proved yet."""
    if not has_restarted(document, pod) or has_inherited(document, pod):
        return False
    return not evidence_of(document, pod, document.members[pod.name].incarnation).ended


def has_restarted(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the document gives queues to an earlier process than the one that reported last."""
    if pod.incarnation <= 1:  # its first process, or one without a number: no share names an earlier one
        return False
    share = _share_of(document, pod)
    return bool(share.queues) and pod.is_successor_of(share.incarnation)


def assigned_queues(document: Assignment, pod: PodSnapshot) -> Collection[Queue]:
    """Return the queues that the pod's process consumes once it obeys the document."""
    share = document.share_of(pod.holder)
    if share is None:
        return ()
    if document.everyone is not None:
        return document.everyone
    is_own_share = not share.incarnation or not pod.incarnation or share.incarnation == pod.incarnation
    return share.queues if is_own_share or has_inherited(document, pod) else ()


def stopped_members(pods: Sequence[PodSnapshot], document: Assignment) -> Collection[str]:
    """Return the members whose process has ended; none if these are more than half of the pods.

    Then the whole fleet may have been restarted, so each new process takes over its pod's queues.
    """
    if not document.incarnations_since:
        return ()
    names = names_of(pod for pod in pods if pod.stopped_for is not None)
    return names if 2 * len(names) <= len(pods) else ()


def pausing_members(pods: Sequence[PodSnapshot], document: Assignment) -> Collection[str]:
    """Return the members that restarted and have not served for long enough to get queues.

    After a first restart, a member keeps its remaining queues; after later ones, only queues of its present process.
    """
    if not document.incarnations_since:
        return ()
    return names_of(pod for pod in pods if _is_pausing(pod, document))


def _is_pausing(pod: PodSnapshot, document: Assignment) -> bool:
    return pod.stopped_for is None and pod.serving_for < _restart_pause(pod, document)


def _restart_pause(pod: PodSnapshot, document: Assignment) -> float:
    """Return how long a member has to serve before it gets queues; 0 while it keeps those in the document."""
    share = _share_of(document, pod)
    may_keep_queues = pod.restarts == 1 or share.incarnation == pod.incarnation
    if not pod.restarts or (share.queues and may_keep_queues):
        return 0.0
    return RESTART_PAUSES_SECONDS[min(pod.restarts, len(RESTART_PAUSES_SECONDS)) - 1]


def pause_seconds_left(pod: PodSnapshot, document: Assignment) -> float:
    """Return the seconds until a member that restarted may have queues again; 0 also if that is not known."""
    if not document.incarnations_since or not pod.ready or pod.stopped_for is not None:
        return 0.0
    return max(_restart_pause(pod, document) - pod.serving_for, 0.0)
