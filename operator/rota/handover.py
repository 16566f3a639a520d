"""State machine of one queue's handover: revoke, release, grant.

A queue is granted to another member only if it is free, or with a proof about its present holder: the holder reported
its release, its pod or process has ended, or it has been silent for so long that it counts as lost. Each proof stays
valid until the next document, so a decision can be written by any operator. docs/handover.md explains why a queue
never has two owners, and why none waits forever.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rota.model import Holder, Queue
from rota.reports import Report
from rota.spec import Handover

MIN_READY_LOST_SECONDS = 120.0  # longer than the slowest kubelet and a usual drain
MAX_KUBELET_SYNC_SECONDS = 90.0  # until the slowest kubelet shows a changed document to its pods


class OwnershipState(StrEnum):
    """The state of a queue in the stored assignment."""

    FREE = "Free"
    OWNED = "Owned"
    RELEASING = "Releasing"


class Proof(StrEnum):
    """The evidence that a queue's holder no longer consumes it."""

    # The holder may consume the queue. Of a free queue: some pod may, since the stored assignment was lost.
    NONE = "None"
    RELEASED = "Released"
    ENDED = "Ended"
    LOST = "Lost"


class DesiredChange(StrEnum):
    """The desired change of a queue's owner."""

    STAY = "Stay"  # its holder keeps it
    MOVE = "Move"  # another member gets it
    # No member gets it: the queue left the route or the subscription, the group is paused, the strategy assigns it to
    # no member, or it is the share of an unmanaged consumer.
    LEAVE = "Leave"


class Act(StrEnum):
    """The change that the next document makes to a queue."""

    KEEP = "Keep"
    REVOKE = "Revoke"
    WAIT = "Wait"
    RETURN = "Return"
    GRANT = "Grant"
    FORCE = "Force"
    DROP = "Drop"


# Notes on the rows, and why others are missing:
# - FREE has only MOVE: a free queue that no member is to own needs no decision.
# - FREE is Released once no pod can be consuming the queue. Until then, after the stored assignment was lost, its proof
#   is that of the pods that may consume it: None or Lost.
# - STAY with a proof: the queue is in release and returns to its holder, or the holder's process has ended and the
#   pod's next process gets the queue. OWNED has no STAY with Released or Lost: such a holder does not stay the owner.
# - LOST with LEAVE does not drop the queue: a later grant must know which pod may still consume it.
# - If no member can take a queue over, no change is desired: it stays with its holder, reachable or not.
TRANSITIONS: dict[tuple[OwnershipState, Proof, DesiredChange], Act] = {
    (OwnershipState.FREE, Proof.NONE, DesiredChange.MOVE): Act.WAIT,
    (OwnershipState.FREE, Proof.RELEASED, DesiredChange.MOVE): Act.GRANT,
    (OwnershipState.FREE, Proof.LOST, DesiredChange.MOVE): Act.FORCE,
    (OwnershipState.OWNED, Proof.NONE, DesiredChange.STAY): Act.KEEP,
    (OwnershipState.OWNED, Proof.NONE, DesiredChange.MOVE): Act.REVOKE,
    (OwnershipState.OWNED, Proof.NONE, DesiredChange.LEAVE): Act.REVOKE,
    (OwnershipState.OWNED, Proof.RELEASED, DesiredChange.MOVE): Act.GRANT,
    (OwnershipState.OWNED, Proof.RELEASED, DesiredChange.LEAVE): Act.DROP,
    (OwnershipState.OWNED, Proof.ENDED, DesiredChange.STAY): Act.GRANT,
    (OwnershipState.OWNED, Proof.ENDED, DesiredChange.MOVE): Act.GRANT,
    (OwnershipState.OWNED, Proof.ENDED, DesiredChange.LEAVE): Act.DROP,
    (OwnershipState.OWNED, Proof.LOST, DesiredChange.MOVE): Act.FORCE,
    (OwnershipState.OWNED, Proof.LOST, DesiredChange.LEAVE): Act.REVOKE,
    (OwnershipState.RELEASING, Proof.NONE, DesiredChange.STAY): Act.RETURN,
    (OwnershipState.RELEASING, Proof.NONE, DesiredChange.MOVE): Act.WAIT,
    (OwnershipState.RELEASING, Proof.NONE, DesiredChange.LEAVE): Act.WAIT,
    (OwnershipState.RELEASING, Proof.RELEASED, DesiredChange.STAY): Act.RETURN,
    (OwnershipState.RELEASING, Proof.RELEASED, DesiredChange.MOVE): Act.GRANT,
    (OwnershipState.RELEASING, Proof.RELEASED, DesiredChange.LEAVE): Act.DROP,
    (OwnershipState.RELEASING, Proof.ENDED, DesiredChange.STAY): Act.GRANT,
    (OwnershipState.RELEASING, Proof.ENDED, DesiredChange.MOVE): Act.GRANT,
    (OwnershipState.RELEASING, Proof.ENDED, DesiredChange.LEAVE): Act.DROP,
    (OwnershipState.RELEASING, Proof.LOST, DesiredChange.STAY): Act.RETURN,
    (OwnershipState.RELEASING, Proof.LOST, DesiredChange.MOVE): Act.FORCE,
    (OwnershipState.RELEASING, Proof.LOST, DesiredChange.LEAVE): Act.WAIT,
}


@dataclass(frozen=True, slots=True)
class HolderEvidence:
    """The evidence about a holder, or about one process of its pod, at this time."""

    ended: bool = False  # proved, such as by a deletion event, a consistent read, or a later process of the pod
    terminating: bool = False
    ready: bool = True
    report: Report | None = None
    active_queues: AbstractSet[Queue] = frozenset()  # queues that it may deliver from or commit for, by its report
    unreachable_for: float = 0.0  # seconds since its first unanswered request; 0: it answers
    terminating_for: float = 0.0  # seconds since it was first seen terminating: from then on it has to release all

    def is_lost(self, rules: Handover, revoked_for: float = 0.0) -> bool:
        """Whether the holder is silent, and waiting longer costs more than the risk of two consumers.

        `revoked_for`: seconds since its queue was revoked. A Ready member obeys even if the operator cannot reach it:
        it is lost only once it had time to read the revoke.
        """
        if not self.ready and self.unreachable_for >= rules.lost_after:
            return True
        release_due_for = max(revoked_for, self.terminating_for)  # seconds since the revoke or the pod's deletion
        limit = ready_member_lost_after(rules)
        return release_due_for >= limit and self.unreachable_for >= limit

    def has_obeyed(self, holder: Holder, generation: int) -> bool:
        """Whether a report of this pod, not of another with the same name, confirms this generation or a later one."""
        report = self.report
        if report is None or (report.member, report.uid) != holder:
            return False
        return report.generation >= generation

    def has_reported(self, holder: Holder) -> bool:
        """Whether the report is of this pod, of any generation."""
        return self.has_obeyed(holder, 0)


class Revocation(NamedTuple):
    """A queue's revocation from its holder: the generation, and how many seconds ago."""

    generation: int
    seconds_ago: float


def ready_member_lost_after(rules: Handover) -> float:
    """Return after how many seconds a Ready member that cannot be reached counts as lost.

    `lostAfter` is for members that are not Ready. A Ready one still reads documents and obeys, so it gets the time that
    the slowest kubelet and a drain take.
    """
    return max(MIN_READY_LOST_SECONDS, MAX_KUBELET_SYNC_SECONDS + rules.drain_timeout)


def find_proof(
    queue: Queue, holder: Holder, revocation: Revocation | None, evidence: HolderEvidence, rules: Handover
) -> Proof:
    """Return the evidence that a holder no longer consumes a queue; `revocation` is None if the queue is still owned.

    Before the revoke, a report without the queue proves nothing: the holder may start to consume at any moment.
    """
    if evidence.ended:
        return Proof.ENDED
    if revocation and evidence.has_obeyed(holder, revocation.generation) and queue not in evidence.active_queues:
        return Proof.RELEASED
    if evidence.terminating and evidence.has_reported(holder) and evidence.report and evidence.report.is_drained:
        return Proof.RELEASED
    if evidence.is_lost(rules, revocation.seconds_ago if revocation else 0.0):
        return Proof.LOST
    return Proof.NONE


def choose_act(
    state: OwnershipState,
    proof: Proof,
    desired_change: DesiredChange,
    *,
    held_back: bool = False,
    immediate: bool = False,
) -> Act:
    """Return what the next document does with a queue.

    `held_back`: a gate or the budget postpones the revoke; other acts are never held back. `immediate`: the policy's
    handover mode, in which a queue is granted or dropped without a revoke.
    """
    chosen = TRANSITIONS[state, proof, desired_change]
    if chosen is Act.REVOKE and held_back:
        return Act.KEEP
    if chosen is Act.REVOKE and immediate:
        return Act.GRANT if desired_change is DesiredChange.MOVE else Act.DROP
    return chosen
