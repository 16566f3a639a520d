"""Who counts: which pods share the queues, and in what state each one is."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from rota.documents import Assignment
from rota.planner.members import incarnations
from rota.planner.snapshot import Pod
from rota.spec import PolicySpec

JOINING_PATIENCE = 20.0  # seconds: a pod that takes longer to become ready is not worth waiting for


class Standing(StrEnum):
    """How a pod stands as a member."""

    JOINING = "Joining"  # never counted yet: not ready, or not heard
    READY = "Ready"  # counts
    UNREADY = "Unready"  # counts, within its grace
    OUT = "Out"  # unready beyond its grace, and heard: it gives its queues up
    RESTARTING = "Restarting"  # its sidecar's process has ended, or the next one has not served for long enough
    CUT_OFF = "CutOff"  # others reach a broker that it does not
    LOST = "Lost"  # not ready and not heard
    LEAVING = "Leaving"
    ENDED = "Ended"

    @property
    def counts(self) -> bool:
        """Whether it shares the queues."""
        return self in {Standing.READY, Standing.UNREADY}


def standings(
    pods: Sequence[Pod],
    gone: frozenset[str],
    policy: PolicySpec,
    document: Assignment,
    *,
    is_orderly: bool = False,
) -> dict[str, Standing]:
    """Return each pod's standing, by name."""
    found = {
        pod.name: Standing.JOINING
        if awaits_namesake(document, pod, gone) or incarnations.has_no_number(document, pod)
        else _standing(pod, gone, policy, works(document, pod))
        for pod in pods
    }
    for name in _cut_off(pods, found, policy, document):
        found[name] = Standing.CUT_OFF
    # In Orderly groups, brokers keep locks for the pod: its next process has its queues sooner than any other member.
    restarting = () if is_orderly else _restarting([pod for pod in pods if found[pod.name].counts], document)
    return found | dict.fromkeys(restarting, Standing.RESTARTING)


def _restarting(pods: Sequence[Pod], document: Assignment) -> Collection[str]:
    """Return those of the members that count which have no queues while their process restarts.

    Of those that are back and in their pause some have queues all the same, if no other member can.
    """
    stopped, pausing = incarnations.stopped(pods, document), incarnations.pausing(pods, document)
    candidates = [{*stopped, *pausing}, {*stopped}]
    return next((names for names in candidates if len(names) < len(pods)), ())


def works(document: Assignment, pod: Pod) -> bool:
    """Whether the record gives this very pod something to do."""
    share = document.members.get(pod.name)
    return share is not None and share.uid == pod.uid and bool(share.queues or document.everyone)


def awaits_namesake(document: Assignment, pod: Pod, gone: frozenset[str]) -> bool:
    """Whether an earlier pod of its name, or process of it, is on record and not known to have ended.

    A name has one entry in a document.
    """
    share = document.members.get(pod.name)
    if share is not None and share.uid == pod.uid:
        return incarnations.is_waited_for(document, pod)
    return share is not None and share.uid not in gone


def in_motion(pods: Sequence[Pod], found: Mapping[str, Standing], policy: PolicySpec) -> dict[str, float]:
    """Return who comes or goes at this moment, and for how long it is worth waiting for it.

    One that has just become ready is waited for too: others of its rollout are a moment behind it. One that leaves and
    is lost, on a node that is gone, is not: nobody knows when it will have ended.
    """
    debounce, drain = policy.triggers.debounce, policy.handover.drain_timeout
    left: dict[str, float] = {}
    for pod in pods:
        match found[pod.name]:
            case Standing.JOINING:
                left[pod.name] = JOINING_PATIENCE - pod.age
            case Standing.LEAVING if not pod.seen.lost(policy.handover):
                left[pod.name] = drain + 15 - pod.leaving
            case Standing.READY if pod.age < JOINING_PATIENCE:
                left[pod.name] = debounce - pod.steady
    return {name: seconds for name, seconds in left.items() if seconds > 0}


def _standing(pod: Pod, gone: frozenset[str], policy: PolicySpec, working: bool) -> Standing:  # noqa: FBT001
    if pod.ended or pod.uid in gone:
        return Standing.ENDED
    if pod.terminating or (pod.report and pod.report.final):
        return Standing.LEAVING
    if pod.seen.lost(policy.handover):
        return Standing.LOST if working else Standing.JOINING
    if pod.ready and (pod.heard or working):
        return Standing.READY
    if not working:  # who has nothing to do is not worth its grace: it comes in by becoming ready
        return Standing.JOINING
    return Standing.UNREADY if pod.steady < policy.triggers.unready_grace else Standing.OUT


def _cut_off(
    pods: Sequence[Pod], found: Mapping[str, Standing], policy: PolicySpec, document: Assignment
) -> Collection[str]:
    """Return who does not reach what others do, for longer than its grace, if the others reach all that is missed.

    Who has nothing to do has no grace, nor has who is out already: that it reaches no broker is why it is not ready.
    """
    witnesses = {pod.name: pod.reaches for pod in pods if found[pod.name] is Standing.READY and pod.reaches}
    reached = frozenset().union(*witnesses.values())
    missed: dict[str, set[str]] = {}
    for pod in pods:
        stands = found[pod.name]
        if stands.counts or stands is Standing.OUT:
            grace = policy.triggers.unready_grace if stands.counts and works(document, pod) else 0.0
            missed[pod.name] = {it for it, seconds in pod.cut_off.items() if it in reached and seconds >= grace}
    cut_off = {name for name, brokers in missed.items() if brokers}
    theirs = set().union(*missed.values())
    left = frozenset().union(*(brokers for name, brokers in witnesses.items() if name not in cut_off))
    return cut_off if theirs <= left else ()
