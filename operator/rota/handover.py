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

LOST_READY_SECONDS = 120.0  # seconds: longer than the slowest kubelet and a usual drain
SLOWEST_KUBELET_SECONDS = 90.0  # seconds: the slowest kubelet


class State(StrEnum):
    """The state of a queue in the stored assignment."""

    FREE = "Free"
    OWNED = "Owned"
    RELEASING = "Releasing"


class Proof(StrEnum):
    """The evidence that a queue's holder no longer consumes it."""

    NONE = "None"  # the holder may consume the queue; of a free queue: a pod may, since the stored assignment was lost
    RELEASED = "Released"
    ENDED = "Ended"
    LOST = "Lost"


class DesiredOwner(StrEnum):
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


# A missing row cannot occur. A free queue that no member is to own needs no decision. A holder that provably no longer
# has a queue does not stay its owner, unless the queue was released and returns to it, or its process has ended and the
# pod's next process takes the queue. A free queue counts as "Released" once no pod can be consuming it. Until then,
# after the stored assignment was lost, its proof is that of the pods that may consume it: None or Lost. A queue of a
# lost holder is not dropped: a later grant must know which pod may still consume it. And if no member can take a queue
# over, no change is desired: it stays with its holder, whether or not the holder can be reached.
TABLE: dict[tuple[State, Proof, DesiredOwner], Act] = {
    (State.FREE, Proof.NONE, DesiredOwner.MOVE): Act.WAIT,
    (State.FREE, Proof.RELEASED, DesiredOwner.MOVE): Act.GRANT,
    (State.FREE, Proof.LOST, DesiredOwner.MOVE): Act.FORCE,
    (State.OWNED, Proof.NONE, DesiredOwner.STAY): Act.KEEP,
    (State.OWNED, Proof.NONE, DesiredOwner.MOVE): Act.REVOKE,
    (State.OWNED, Proof.NONE, DesiredOwner.LEAVE): Act.REVOKE,
    (State.OWNED, Proof.RELEASED, DesiredOwner.MOVE): Act.GRANT,
    (State.OWNED, Proof.RELEASED, DesiredOwner.LEAVE): Act.DROP,
    (State.OWNED, Proof.ENDED, DesiredOwner.STAY): Act.GRANT,
    (State.OWNED, Proof.ENDED, DesiredOwner.MOVE): Act.GRANT,
    (State.OWNED, Proof.ENDED, DesiredOwner.LEAVE): Act.DROP,
    (State.OWNED, Proof.LOST, DesiredOwner.MOVE): Act.FORCE,
    (State.OWNED, Proof.LOST, DesiredOwner.LEAVE): Act.REVOKE,
    (State.RELEASING, Proof.NONE, DesiredOwner.STAY): Act.RETURN,
    (State.RELEASING, Proof.NONE, DesiredOwner.MOVE): Act.WAIT,
    (State.RELEASING, Proof.NONE, DesiredOwner.LEAVE): Act.WAIT,
    (State.RELEASING, Proof.RELEASED, DesiredOwner.STAY): Act.RETURN,
    (State.RELEASING, Proof.RELEASED, DesiredOwner.MOVE): Act.GRANT,
    (State.RELEASING, Proof.RELEASED, DesiredOwner.LEAVE): Act.DROP,
    (State.RELEASING, Proof.ENDED, DesiredOwner.STAY): Act.GRANT,
    (State.RELEASING, Proof.ENDED, DesiredOwner.MOVE): Act.GRANT,
    (State.RELEASING, Proof.ENDED, DesiredOwner.LEAVE): Act.DROP,
    (State.RELEASING, Proof.LOST, DesiredOwner.STAY): Act.RETURN,
    (State.RELEASING, Proof.LOST, DesiredOwner.MOVE): Act.FORCE,
    (State.RELEASING, Proof.LOST, DesiredOwner.LEAVE): Act.WAIT,
}

NEXT: dict[Act, State | None] = {
    Act.KEEP: State.OWNED,
    Act.REVOKE: State.RELEASING,
    Act.WAIT: None,  # the state stays as it was
    Act.RETURN: State.OWNED,
    Act.GRANT: State.OWNED,
    Act.FORCE: State.OWNED,
    Act.DROP: State.FREE,
}


@dataclass(frozen=True, slots=True)
class HolderEvidence:
    """The evidence about a holder at this time."""

    ended: bool = False  # by an event or a consistent read
    terminating: bool = False
    ready: bool = True
    report: Report | None = None
    working: AbstractSet[Queue] = frozenset()  # queues that it may still deliver from or commit for, by its report
    unheard: float = 0.0  # seconds since its report was last read
    leaving: float = 0.0  # seconds since it was first seen terminating, which asks it to release everything

    def lost(self, rules: Handover, since_revoke: float = 0.0) -> bool:
        """Whether waiting for it costs more than the risk; `since_revoke`: seconds since a queue was revoked from it.

        A Ready member obeys, though the operator cannot reach it: it is lost only once it had time to read the revoke.
        """
        silent = self.unheard >= rules.lost_after and not self.ready
        return silent or min(max(since_revoke, self.leaving), self.unheard) >= lost_after_seconds(rules)

    def obeys(self, holder: Holder, generation: int) -> bool:
        """Whether a report of this pod, not of another with the same name, confirms this generation or a later one."""
        report = self.report
        return (
            report is not None
            and (report.member, report.uid) == (holder.name, holder.uid)
            and (report.generation >= generation)
        )


class Revocation(NamedTuple):
    """A queue's revocation from its holder: the generation, and how many seconds ago."""

    since: int
    ago: float


def lost_after_seconds(rules: Handover) -> float:
    """Return how long a Ready member that cannot be reached keeps its queues: its drain may take longer than usual."""
    return max(LOST_READY_SECONDS, SLOWEST_KUBELET_SECONDS + rules.drain_timeout)


def proof(
    queue: Queue, holder: Holder, revocation: Revocation | None, evidence: HolderEvidence, rules: Handover
) -> Proof:
    """Return the evidence that a holder no longer consumes a queue.

    Before the revoke, a holder that does not consume the queue proves nothing: it may start at any moment.
    """
    if evidence.ended:
        return Proof.ENDED
    if revocation and evidence.obeys(holder, revocation.since) and queue not in evidence.working:
        return Proof.RELEASED
    if evidence.terminating and evidence.obeys(holder, 0) and evidence.report and evidence.report.drained:
        return Proof.RELEASED
    if evidence.lost(rules, revocation.ago if revocation else 0.0):
        return Proof.LOST
    return Proof.NONE


def act(state: State, evidence: Proof, want: DesiredOwner, *, held_back: bool = False, immediate: bool = False) -> Act:
    """Return what the next document does with a queue; `held_back` is a gate's decision and stops revokes only."""
    chosen = TABLE[state, evidence, want]
    if chosen is Act.REVOKE and held_back:
        return Act.KEEP
    if chosen is Act.REVOKE and immediate:
        return Act.GRANT if want is DesiredOwner.MOVE else Act.DROP
    return chosen


def mermaid_diagram() -> str:
    """Return the table as a Mermaid state diagram, for docs/handover.md."""
    arrows: dict[tuple[State, State, Act], list[str]] = {}
    for (state, evidence, want), chosen in TABLE.items():
        end = NEXT[chosen] or state
        cause = want.value if evidence is Proof.NONE else f"{want.value}, {evidence.value}"
        arrows.setdefault((state, end, chosen), []).append(cause)
    lines = [
        f"    {state} --> {end}: {chosen} ({'; '.join(causes)})" for (state, end, chosen), causes in arrows.items()
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> Free", *lines]) + "\n"
