"""Member states: the state of each pod, which determines whether the pod shares the queues (*counts*)."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from rota.documents import Assignment
from rota.planner.members import incarnations
from rota.planner.snapshot import PodSnapshot, brokers_reached_by
from rota.spec import PolicySpec

JOINING_PATIENCE_SECONDS = 20.0  # how long a rebalance waits for a new pod to become ready
LEAVING_MARGIN_SECONDS = 15.0  # beyond drainTimeout: how long a rebalance waits for a terminating pod to end


class MemberState(StrEnum):
    """State of a pod as a member."""

    JOINING = "Joining"  # gets no queues yet: not ready, without a report, or its predecessor may not have ended
    READY = "Ready"  # counts
    UNREADY = "Unready"  # counts, within its grace
    OUT = "Out"  # unready beyond its grace, but its sidecar responds: it releases its queues
    RESTARTING = "Restarting"  # its sidecar's process has ended, or the next one has not served for long enough
    CUT_OFF = "CutOff"  # cannot reach a broker that other members reach
    LOST = "Lost"  # not ready, and its sidecar does not respond
    LEAVING = "Leaving"  # terminates, or reports that it drains for good
    ENDED = "Ended"  # Succeeded, Failed, or deleted

    @property
    def is_counted(self) -> bool:
        """Whether a member in this state shares the queues."""
        return self in {MemberState.READY, MemberState.UNREADY}


def classify_members(
    pods: Sequence[PodSnapshot],
    deleted: frozenset[str],
    policy: PolicySpec,
    document: Assignment,
    *,
    is_orderly: bool = False,
) -> dict[str, MemberState]:
    """Return the state of each pod, by name."""
    states: dict[str, MemberState] = {}
    for pod in pods:
        # Such a pod is Joining, whatever its own state: its name's entry in the document is of another pod or process
        # that may not have ended, or its process has no number (incarnation), by which the document names owners.
        cannot_own_queues = awaits_namesake(document, pod, deleted) or incarnations.lacks_incarnation(document, pod)
        state = _member_state(pod, deleted, policy, has_queues=owns_queues(document, pod))
        states[pod.name] = MemberState.JOINING if cannot_own_queues else state
    for name in _cut_off_members(pods, states, policy, document):
        states[name] = MemberState.CUT_OFF
    # In Orderly groups, brokers keep locks for the pod: its next process gets the queues sooner than another member.
    # So a member stays counted during a restart.
    restarting = () if is_orderly else _restarting([pod for pod in pods if states[pod.name].is_counted], document)
    return states | dict.fromkeys(restarting, MemberState.RESTARTING)


def _restarting(pods: Sequence[PodSnapshot], document: Assignment) -> Collection[str]:
    """Return which of these counted members get no queues because their process has stopped or restarted lately.

    If that would leave no member, the pause after a restart is waived. If all have stopped, all keep their queues.
    """
    stopped = set(incarnations.stopped_members(pods, document))
    without_queues = stopped.union(incarnations.pausing_members(pods, document))
    if len(without_queues) < len(pods):
        return without_queues
    return stopped if len(stopped) < len(pods) else ()


def owns_queues(document: Assignment, pod: PodSnapshot) -> bool:
    """Whether the document gives queues to this pod, and not to another one of the same name."""
    share = document.share_of(pod.holder)
    return share is not None and bool(share.queues or document.everyone)


def awaits_namesake(document: Assignment, pod: PodSnapshot, deleted: frozenset[str]) -> bool:
    """Whether an earlier pod of this name, or an earlier process of this pod, has the entry and may not have ended.

    A document has one entry for each name, so the pod gets no queues until then.
    """
    share = document.members.get(pod.name)
    if share is None:
        return False
    if share.uid == pod.uid:
        return incarnations.awaits_end_of_earlier_process(document, pod)
    return share.uid not in deleted


def members_in_transition(
    pods: Sequence[PodSnapshot], states: Mapping[str, MemberState], policy: PolicySpec
) -> dict[str, float]:
    """Return the members that are joining or leaving, and for how many seconds to wait for each.

    A new pod that has just become ready is one of them: a rollout may bring more such pods. A leaving pod that is lost,
    as on a failed node, is not: it may never end.
    """
    debounce = policy.triggers.debounce
    drain = policy.handover.drain_timeout
    seconds_left: dict[str, float] = {}
    for pod in pods:
        match states[pod.name]:
            case MemberState.JOINING:
                seconds_left[pod.name] = JOINING_PATIENCE_SECONDS - pod.age
            case MemberState.LEAVING if not pod.is_lost(policy.handover):
                seconds_left[pod.name] = drain + LEAVING_MARGIN_SECONDS - pod.terminating_for
            case MemberState.READY if pod.age < JOINING_PATIENCE_SECONDS:  # `age`: since the operator first saw it
                seconds_left[pod.name] = debounce - pod.stable_for
    return {name: seconds for name, seconds in seconds_left.items() if seconds > 0}


def _member_state(pod: PodSnapshot, deleted: frozenset[str], policy: PolicySpec, *, has_queues: bool) -> MemberState:
    if pod.ended or pod.uid in deleted:
        return MemberState.ENDED
    if pod.terminating or pod.drains_for_good:
        return MemberState.LEAVING
    if pod.is_lost(policy.handover):
        return MemberState.LOST if has_queues else MemberState.JOINING
    if pod.ready and (pod.decoded_report or has_queues):
        return MemberState.READY
    if not has_queues:  # without queues it needs no grace: it joins once it is ready
        return MemberState.JOINING
    return MemberState.UNREADY if pod.stable_for < policy.triggers.unready_grace else MemberState.OUT


def _cut_off_members(
    pods: Sequence[PodSnapshot], states: Mapping[str, MemberState], policy: PolicySpec, document: Assignment
) -> Collection[str]:
    """Return the members that miss a broker for longer than their grace, if the others reach all missed brokers.

    If the others miss one of these brokers, too, nothing is gained: they could not consume its queues either. A member
    without queues has no grace, nor has a member that is OUT: the missed broker is why it is not ready.
    """
    suspects = [pod for pod in pods if pod.cut_off_brokers]
    if not suspects:
        return ()
    witnesses = [pod for pod in pods if states[pod.name] is MemberState.READY]
    reached = brokers_reached_by(witnesses)
    missed: dict[str, frozenset[str]] = {}  # by member: the brokers that only others reach
    for pod in suspects:
        state = states[pod.name]
        if state.is_counted or state is MemberState.OUT:
            grace = policy.triggers.unready_grace if state.is_counted and owns_queues(document, pod) else 0.0
            overdue = [broker for broker, seconds in pod.cut_off_brokers.items() if seconds >= grace]
            if brokers := reached.intersection(overdue):
                missed[pod.name] = brokers
    all_missed = frozenset().union(*missed.values())
    reached_by_others = brokers_reached_by(pod for pod in witnesses if pod.name not in missed)
    return missed if all_missed <= reached_by_others else ()
