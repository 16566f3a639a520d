"""Invariants of every state, and of states at rest."""

from itertools import combinations

from rota.documents import Assignment
from rota.model import Holder, Queue
from simulation.exploration.documents import Document
from simulation.exploration.state import ApiPod, ExploredState, PodSlot, age


def violation(state: ExploredState) -> str:
    """Return the invariant that a state violates, or an empty text."""
    for first, second in combinations(state.slots, 2):
        if first.process and second.process:
            for queue in first.process.consumed_queues & second.process.consumed_queues:
                uids = {first.process.member.uid, second.process.member.uid}
                if not any(lost == queue and uid in uids for lost, uid, _ in state.overruled):
                    return f"{queue} is consumed by {first.name} and by {second.name} without a forced grant"
    for slot in state.slots:
        if slot.process and slot.process.member.obeyed_generation < slot.highest:
            return f"{slot.name} steps back from generation {slot.highest} to {slot.process.member.obeyed_generation}"
    return ""


def early_force(state: ExploredState, document: Document) -> str:
    """Describe a forced grant that comes too early: its loser is silent too briefly, or Ready for the operator."""
    forced = {queue for queue, since in document.assignment.forced.items() if since == document.number}
    losers = {uid for queue, uid in state.stored.holding if queue in forced} if state.stored else set()
    for slot in state.slots:
        if slot.observed and slot.observed.uid in losers:
            min_age = 2 if slot.observed.ready else 1  # limits of AGES that the silence must exceed
            if age(slot.silent_since, state.now) < min_age:
                return f"{document} takes queues of {slot.observed.uid} by force too early"
    return ""


def forget_resolved_losses(state: ExploredState) -> ExploredState:
    """Forget the loser of a forced grant once its pod is deleted, or has obeyed the grant and stopped consuming.

    If the stored assignment is lost right after a forced grant, reports read one after another may show the old owner
    consuming and the new owner not yet. Recovery returns the queue to the old owner, which has meanwhile obeyed the
    grant and stopped, while the new owner starts. No order of reading avoids that, so nothing is forgotten while the
    stored assignment is missing or a member may not have passed its barrier.
    """
    if not state.overruled:
        return state
    living = {slot.api_pod.uid: slot for slot in state.slots if slot.api_pod}
    may_forget = state.stored is not None and not state.stored.assignment.barrier
    overruled: set[tuple[Queue, str, int]] = set()
    for queue, uid, since in state.overruled:
        if uid in living and (not may_forget or _may_consume(queue, since, living[uid])):
            overruled.add((queue, uid, since))
    return state._replace(overruled=frozenset(overruled))


def _may_consume(queue: Queue, since: int, slot: PodSlot) -> bool:
    return slot.highest < since or (slot.process is not None and queue in slot.process.consumed_queues)


def unsettled(state: ExploredState, *, healed: bool) -> str:
    """Describe the problem of a state at rest; `healed`: hung and cut-off pods are back."""
    able = {slot.api_pod.uid for slot in state.slots if slot.api_pod and _can_consume(slot, slot.api_pod)}
    if not able:
        return ""
    if state.stored is None:
        return "There is no stored assignment, and no operator will write one"
    document, owners = state.stored.assignment, state.stored.owners
    expected = () if state.paused else state.route
    return (
        _unowned(expected, owners, able)
        or _wrong_consumers(state, owners, able, healed=healed)
        or _unfinished(document, able, healed=healed)
    )


def _unowned(expected: tuple[Queue, ...], owners: dict[Queue, Holder], able: set[str]) -> str:
    if set(owners) != set(expected):
        return f"Owned are {sorted(owners)}, expected are {expected}"
    for queue, holder in owners.items():
        if holder.uid not in able:
            return f"{queue} is owned by {holder}, which cannot consume it"
    return ""


def _wrong_consumers(state: ExploredState, owners: dict[Queue, Holder], able: set[str], *, healed: bool) -> str:
    """Describe a queue that its owner does not consume, or that another reachable member consumes, too."""
    processes = [slot.process for slot in state.slots if slot.process]
    for queue in set(owners).union(*(process.consumed_queues for process in processes)):
        consumers = {process.member.uid for process in processes if queue in process.consumed_queues}
        owner = {owners[queue].uid} if queue in owners else set()
        if not owner <= consumers or (consumers - owner) & (consumers if healed else able):
            return f"{queue} is owned by {owner or 'no member'} and consumed by {consumers or 'no member'}"
    return ""


def _unfinished(document: Assignment, able: set[str], *, healed: bool) -> str:
    waiting = [queue for queue, release in document.releasing.items() if healed or release.holder.uid in able]
    return f"Still under release: {sorted(waiting)}" if waiting else ""


def _can_consume(slot: PodSlot, api_pod: ApiPod) -> bool:
    final = slot.process is not None and slot.process.member.final
    return slot.is_reachable and api_pod.ready and not api_pod.terminating and not api_pod.ended and not final
