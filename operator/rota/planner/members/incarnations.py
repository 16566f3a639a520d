"""Processes of a pod's sidecar: which one owns queues, and which have ended (docs/handover.md, *Restarts*).

Each process has an incarnation, a number that grows with each restart in the pod (`PodSnapshot.incarnation` is that of
the process that reported last). `Assignment.incarnations_since` is the first generation whose shares (a member's part
of the document) name the incarnation that owns their queues. A process with a higher number does not consume the
queues of such a share, so its report proves that the named process has ended.

Exception: if no operator has polled the later process for RESUME_SECONDS (180 s, `member.py`), it *inherits* the share.
It consumes the queues, so that they have a consumer even without an operator. From then on, its reports prove nothing
about the earlier process.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from rota.documents import Assignment, Share
from rota.handover import HolderEvidence
from rota.model import Queue
from rota.planner.snapshot import PodSnapshot, Snapshot, names_of

# Once a pod has been silent, or its responses rejected (unsigned or too large), for this time, its last report proves
# nothing: a later process may soon inherit the queues. This is far below RESUME_SECONDS.
MAX_SILENCE_SECONDS = 20.0
INCARNATIONS_SCHEMA = 2  # the document schema in which shares name incarnations
# How long a member must serve after its first, second, third, and each later restart within ten minutes before it gets
# queues.
RESTART_PAUSES_SECONDS = (1.0, 10.0, 60.0, 300.0)


def incarnations_since(snapshot: Snapshot, document: Assignment) -> int:
    """Return `incarnations_since` for the next document; 0: its shares name no incarnations.

    Shares name incarnations once every running pod has reported its incarnation, and every other holder of queues has
    ended. They no longer do if a running member cannot read such documents, or if this schema may not be written.
    """
    pods = snapshot.running_pods
    if snapshot.max_schema < INCARNATIONS_SCHEMA or not all(map(_may_read_incarnations, pods)):
        return 0
    if document.incarnations_since:
        return document.incarnations_since
    holders_with_incarnation = {pod.holder for pod in pods if pod.incarnation}
    if not pods or len(holders_with_incarnation) < len(pods):
        return 0
    uids_of_others = {holder.uid for holder in document.queue_holders - holders_with_incarnation}
    return document.generation + 1 if uids_of_others <= snapshot.ended_uids else 0


def _may_read_incarnations(pod: PodSnapshot) -> bool:
    """Whether the member reports to read documents with incarnations, or has no report yet."""
    return pod.report is None or pod.report.reads >= INCARNATIONS_SCHEMA


def has_restarted(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the document gives queues to an earlier process than the one that reported last."""
    if pod.incarnation <= 1:  # its first process, or one without a number: no share names an earlier one
        return False
    share = _share_of(document, pod)
    return bool(share.queues) and pod.is_successor_of(share.incarnation)


def consumes_inherited_queues(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the process consumes or drains queues that the document leaves to an earlier process of the pod."""
    return not pod.active_queues.isdisjoint(_queues_of_earlier_processes(document, pod))


def has_outdated_share(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the pod's share names an earlier process, and the present one has inherited queues from it."""
    return has_restarted(document, pod) and consumes_inherited_queues(document, pod)


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
    """Return the pod's evidence as it applies to process `incarnation`; 0: to the process that runs.

    `ended` is set once that process is proved to have ended. The report of another process is removed, unless this one
    may consume inherited queues. A process is proved to have ended only if

    - the pod has obeyed a document with incarnations: otherwise a later process may obey an older document, and consume
      the share;
    - and the last report is fresh: otherwise a later process may be about to inherit the share.
    """
    if not (incarnation and pod.incarnation):  # one of the two has no number to compare
        return pod.evidence
    has_obeyed = pod.generation >= document.incarnations_since > 0
    is_fresh = max(pod.unreachable_for, pod.rejected_for) < MAX_SILENCE_SECONDS
    if pod.incarnation == incarnation:  # it reported last; `stopped_for` is set once its container has ended
        # After a longer stop, the next process may have inherited its queues.
        has_just_stopped = pod.stopped_for is not None and pod.stopped_for < MAX_SILENCE_SECONDS
        has_ended = has_obeyed and is_fresh and has_just_stopped
        return replace(pod.evidence, ended=True) if has_ended else pod.evidence
    if pod.incarnation > incarnation:  # a later process reported last
        # A later process that drains only for a while may have inherited the queues before, and consume them again.
        may_resume = pod.report is not None and pod.report.may_resume
        if consumes_inherited_queues(document, pod) or may_resume:
            return pod.evidence
        if has_obeyed and is_fresh:
            return replace(pod.evidence, ended=True)
    # The report is of another process, and says nothing about the queues of this one.
    return replace(pod.evidence, report=None, active_queues=frozenset())


def lacks_incarnation(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the sidecar supports incarnations but could not store one: then no share can name its process."""
    if not document.incarnations_since or pod.report is None:
        return False
    return pod.report.reads >= INCARNATIONS_SCHEMA and not pod.incarnation


def awaits_end_of_earlier_process(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the document gives queues to an earlier process of the pod that is not proved to have ended."""
    if not has_restarted(document, pod) or consumes_inherited_queues(document, pod):
        return False
    return not evidence_of(document, pod, document.members[pod.name].incarnation).ended


def assigned_queues(document: Assignment, pod: PodSnapshot) -> Collection[Queue]:
    """Return the queues that the pod's process consumes once it obeys the document."""
    share = document.share_of(pod.holder)
    if share is None:
        return ()
    if document.everyone is not None:
        return document.everyone
    is_own_share = not share.incarnation or not pod.incarnation or share.incarnation == pod.incarnation
    return share.queues if is_own_share or consumes_inherited_queues(document, pod) else ()


def stopped_members(pods: Sequence[PodSnapshot], document: Assignment) -> Collection[str]:
    """Return the members whose process has ended; none if these are more than half of the pods.

    If more than half have ended, the whole fleet was probably restarted: queues stay with their pods, whose next
    processes take them over.
    """
    if not document.incarnations_since:
        return ()
    names = names_of(pod for pod in pods if pod.stopped_for is not None)
    return names if 2 * len(names) <= len(pods) else ()


def pausing_members(pods: Sequence[PodSnapshot], document: Assignment) -> Collection[str]:
    """Return the members that restarted and have not served for long enough to get queues.

    After its first restart, a member keeps the queues that it has in the document; after further restarts, only if its
    share names its present process.
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
    """Return the seconds until a member that restarted may have queues again.

    0 also while the pod is not Ready or its process has stopped: the pause has not begun.
    """
    if not document.incarnations_since or not pod.ready or pod.stopped_for is not None:
        return 0.0
    return max(_restart_pause(pod, document) - pod.serving_for, 0.0)
