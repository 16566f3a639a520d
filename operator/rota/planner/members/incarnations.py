"""Processes of one pod: which of them owns queues, and when one is known to have ended.

See *Restarts* in `rota.handover`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from rota.documents import Assignment, Share
from rota.handover import Seen
from rota.model import Holder, Queue
from rota.planner.snapshot import Pod, Snapshot

FRESH_SECONDS = 20.0  # for which news of a process prove something; see RESUME_SECONDS of the member
READS = 2  # the schema of documents in which shares name incarnations
# How long a member that restarted must have served before it gets queues again; the next pause after each restart.
PAUSES = (1.0, 10.0, 60.0, 300.0)


def since(snapshot: Snapshot, document: Assignment) -> int:
    """Return from which generation on shares name incarnations in the document that follows; 0: they do not.

    They begin when every member is heard and reads such documents, and end as soon as one does not.
    """
    pods = [pod for pod in snapshot.pods if pod.started and not pod.ended and pod.uid not in snapshot.gone]
    readers = [pod for pod in pods if pod.report and pod.report.reads >= READS]
    if snapshot.max_schema < READS or any(pod.report and pod.report.reads < READS for pod in pods):
        return 0
    if document.incarnations_since:
        return document.incarnations_since
    known = {pod.holder for pod in readers if pod.incarnation}
    holders = {Holder(name, share.uid) for name, share in document.members.items() if share.queues}
    holders |= {release.holder for release in document.releasing.values()}
    ended = snapshot.gone | {pod.uid for pod in snapshot.pods if pod.ended}
    are_heard = len(known) == len(pods) and all(holder in known or holder.uid in ended for holder in holders)
    return document.generation + 1 if are_heard and pods else 0


def inherits(document: Assignment, pod: Pod) -> bool:
    """Whether its process works queues that the document gives to an earlier one, after nobody was heard for long."""
    return pod.heard is not None and any(queue in pod.heard.working for queue in _of_earlier_ones(document, pod))


def _share_of(document: Assignment, pod: Pod) -> Share:
    """Return what the document gives this very pod; an empty share if it gives it nothing."""
    share = document.members.get(pod.name)
    return share if share is not None and share.uid == pod.uid else Share(pod.uid)


def _of_earlier_ones(document: Assignment, pod: Pod) -> Collection[Queue]:
    share = _share_of(document, pod)
    released = document.releases_by_holder.get(pod.holder, ()) if pod.incarnation > 1 else ()
    queues = [queue for queue in released if 0 < document.releasing[queue].incarnation < pod.incarnation]
    return [*share.queues, *queues] if 0 < share.incarnation < pod.incarnation else queues


def seen(document: Assignment, pod: Pod, incarnation: int) -> Seen:
    """Return what is known of that process of a pod; 0: of whichever runs."""
    if not (incarnation and pod.incarnation):
        return pod.seen
    has_obeyed = pod.generation >= document.incarnations_since > 0
    is_fresh = max(pod.unheard, pod.doubted) < FRESH_SECONDS
    if pod.incarnation == incarnation:
        is_over = has_obeyed and is_fresh and pod.stopped is not None and pod.stopped < FRESH_SECONDS
        return replace(pod.seen, ended=pod.ended or is_over)
    if pod.incarnation > incarnation and inherits(document, pod):
        return pod.seen
    if pod.incarnation > incarnation and has_obeyed and is_fresh:
        return replace(pod.seen, ended=True)
    return replace(pod.seen, report=None, working=frozenset())


def has_no_number(document: Assignment, pod: Pod) -> bool:
    """Whether its process could not note its start: then no document can give queues to it alone."""
    is_numbered = pod.report is None or pod.report.reads < READS or bool(pod.incarnation)
    return bool(document.incarnations_since) and not is_numbered


def is_waited_for(document: Assignment, pod: Pod) -> bool:
    """Whether queues are given to an earlier process of the pod whose end is not proved yet."""
    if not has_restarted(document, pod):
        return False
    return not (inherits(document, pod) or seen(document, pod, document.members[pod.name].incarnation).ended)


def has_restarted(document: Assignment, pod: Pod) -> bool:
    """Whether the document gives queues to an earlier process than the one that was heard."""
    share = _share_of(document, pod)
    return bool(share.queues) and 0 < share.incarnation < pod.incarnation


def shown_queues(document: Assignment, pod: Pod) -> Collection[Queue]:
    """Return which queues the pod's process works once it obeys the document."""
    share = document.members.get(pod.name)
    if share is None or share.uid != pod.uid:
        return ()
    if document.everyone is not None:
        return document.everyone
    is_for_it = not share.incarnation or not pod.incarnation or share.incarnation == pod.incarnation
    return share.queues if is_for_it or inherits(document, pod) else ()


def stopped(pods: Sequence[Pod], document: Assignment) -> Collection[str]:
    """Return the members whose process has ended; none if more than half have: it would be too much for the others.

    The whole fleet may have been restarted. Then each process that is back goes on with its pod's queues.
    """
    if not document.incarnations_since:
        return ()
    names = {pod.name for pod in pods if pod.stopped is not None}
    return names if 2 * len(names) <= len(pods) else ()


def pausing(pods: Sequence[Pod], document: Assignment) -> Collection[str]:
    """Return the members whose process restarted and has not served for long enough to get queues.

    A member that is back for the first time before its queues went to others keeps them, and so does one whose present
    process was given queues.
    """
    if not document.incarnations_since:
        return ()
    return {pod.name for pod in pods if pod.stopped is None and pod.serving < _pause(pod, document)}


def _pause(pod: Pod, document: Assignment) -> float:
    share = _share_of(document, pod)
    has_taken_up = share.incarnation == pod.incarnation
    if not pod.restarts or (share.queues and (pod.restarts == 1 or has_taken_up)):
        return 0.0
    return PAUSES[min(pod.restarts, len(PAUSES)) - 1]


def seconds_left(pod: Pod, document: Assignment) -> float:
    """Return the seconds until a member that restarted may have queues again; 0 also if that is not known."""
    is_ready = pod.ready and pod.stopped is None
    return max(_pause(pod, document) - pod.serving, 0.0) if document.incarnations_since and is_ready else 0.0
