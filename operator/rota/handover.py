"""How one queue changes hands: revoke, release, grant; a table, and the theory that it rests on.

**Who decides, who obeys.** The operator alone writes the document; its generations grow by writing. A member obeys
the highest generation it has seen, and works exactly the queues which that document lists under its name and uid. It
can be behind, it can never be ahead.

**What a queue's record can say.** `Free`: nobody's. `Owned`: granted to one holder (a member's name and uid: a pod
made anew under an old name is somebody else). `Releasing`: taken from its holder by generation n and granted to
nobody yet.

**Why two owners cannot happen.** A queue is granted to another only out of `Free` or with proof about its holder:

- *Released*: the holder itself says that it obeys generation n or a later one and neither holds nor drains the queue.
  No later document lists the queue for it, and a member never steps back a generation, so it cannot take it up again.
  Or its pod is terminating and its final drain is done: such a process takes no queue again, whatever it reads.
- *Ended*: the pod with that uid is known to be no more (seen, never guessed from its absence), its process with it.
  Where a pod was deleted by force, only its API object is gone. As long as its sidecar answers it counts as one that
  leaves, and is asked to drain. If it is silent, who deleted it has said that its process is no more, and is believed;
  so it is by an operator that began only after that, and does not know where it could be heard.
  A single process of a pod has ended, too, once its container is seen terminated, or a later process of the same pod
  reports: see *Restarts*.
- *Lost*: nobody has heard it for so long that waiting costs more than the risk: it is not Ready and silent, or it had
  two minutes (more if it may drain for longer) to see that the queue was taken from it. Only this proof can be wrong,
  so such a grant is marked forced, and the time both may have worked the queue is counted.

**Restarts.** A sidecar's process has an *incarnation*: a counter on the pod's emptyDir, on the disk before the process
does anything else. Where all members can read that (schema 2 of the document), each share names the incarnation that
may consume it, and a process consumes only shares of its own. So once a process has ended, its queues go to other
members at once, although the pod's volume may still show a document that gives them to the pod: the next process finds
another incarnation there, and consumes nothing until a document names its own. Three rules keep this safe:

- Documents of schema 1 name no incarnation, and a process that reads one late consumes what it gives. So a process
  counts as ended only if its pod has obeyed the generation with which incarnations began, or a later one; what was
  obeyed is on its disk.
- A process that nobody has asked for a report for 180 s goes on with its predecessor's share: there may be no operator.
  The operator grants queues of an ended process only on a report that was asked for at most 50 s ago (a long poll of
  30 s that failed, and 20 s), and the slowest kubelet shows what it writes within 90 s: before the 180 s are over.
- The process that was heard last has ended if its container finished after the process had started, both by the clock
  of the node. The clock of a sidecar in a virtual machine of its own may be behind: a process that responds after that
  end was known has not ended.

If the processes of more than half of the members have ended, as after a restart of the whole fleet, queues stay with
their pods: those that are back first could not work them all.

Each proof stays true until the document changes: once released, ended or given up, the holder never comes to own the
queue again without a new document. So a decision that was right when it was made is right when it is written, by
whichever operator, and the record's resourceVersion keeps two of them from deciding twice.

**Why nobody waits for ever.** Every holder is heard, ended or lost in bounded time, and a queue that is released,
ended or lost is always granted: gates, pauses and budgets hold back only the first step, the revoke. The exception is a
member whose responses are unsigned or too large: it keeps its queues, and a condition reports it. A pod that was
deleted by force and gives no signed response is treated as ended after a few seconds.

A queue that goes back to its present holder before it was granted to another simply returns: one owner throughout.
Immediate groups take the two steps in one. Broadcasting groups have no owners and use no handover. Orderly groups use
the same table; the broker's queue lock fences them besides, at the member.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rota.model import Holder, Queue
from rota.reports import Report
from rota.spec import Handover

GIVEN_UP = 120.0  # seconds: longer than the slowest kubelet and a usual drain
KUBELET = 90.0  # seconds: the slowest kubelet


class State(StrEnum):
    """What the record says of a queue."""

    FREE = "Free"
    OWNED = "Owned"
    RELEASING = "Releasing"


class Proof(StrEnum):
    """What is known of the holder."""

    NONE = "None"  # it may be working the queue; of a free queue: somebody may, the record was lost
    RELEASED = "Released"
    ENDED = "Ended"
    LOST = "Lost"


class Want(StrEnum):
    """What shall become of the queue."""

    STAY = "Stay"  # its holder shall own it
    MOVE = "Move"  # another member shall
    # Nobody shall: it left the route or the subscription, the group is paused, the strategy gives it to nobody, or
    # it is a foreigner's share.
    LEAVE = "Leave"


class Act(StrEnum):
    """What the next document says of the queue."""

    KEEP = "Keep"
    REVOKE = "Revoke"
    WAIT = "Wait"
    RETURN = "Return"
    GRANT = "Grant"
    FORCE = "Force"
    DROP = "Drop"


# A missing row cannot come about: a free queue that nobody shall own is no question, and nobody stays the owner of a
# queue that is proved to be no longer his, unless it was released and comes back to him, or his process has ended and
# its successor takes it up. A free queue is "Released"
# once nobody can be working it; until then, after the record was lost, it is as unproved, or lost, as the pods that
# may. A holder that is only lost is never forgotten: who grants the queue again must know whom it may still be with.
# And where nobody is there to take a queue over, nothing is wanted of it: it stays with its holder, seen or not.
TABLE: dict[tuple[State, Proof, Want], Act] = {
    (State.FREE, Proof.NONE, Want.MOVE): Act.WAIT,
    (State.FREE, Proof.RELEASED, Want.MOVE): Act.GRANT,
    (State.FREE, Proof.LOST, Want.MOVE): Act.FORCE,
    (State.OWNED, Proof.NONE, Want.STAY): Act.KEEP,
    (State.OWNED, Proof.NONE, Want.MOVE): Act.REVOKE,
    (State.OWNED, Proof.NONE, Want.LEAVE): Act.REVOKE,
    (State.OWNED, Proof.RELEASED, Want.MOVE): Act.GRANT,
    (State.OWNED, Proof.RELEASED, Want.LEAVE): Act.DROP,
    (State.OWNED, Proof.ENDED, Want.STAY): Act.GRANT,
    (State.OWNED, Proof.ENDED, Want.MOVE): Act.GRANT,
    (State.OWNED, Proof.ENDED, Want.LEAVE): Act.DROP,
    (State.OWNED, Proof.LOST, Want.MOVE): Act.FORCE,
    (State.OWNED, Proof.LOST, Want.LEAVE): Act.REVOKE,
    (State.RELEASING, Proof.NONE, Want.STAY): Act.RETURN,
    (State.RELEASING, Proof.NONE, Want.MOVE): Act.WAIT,
    (State.RELEASING, Proof.NONE, Want.LEAVE): Act.WAIT,
    (State.RELEASING, Proof.RELEASED, Want.STAY): Act.RETURN,
    (State.RELEASING, Proof.RELEASED, Want.MOVE): Act.GRANT,
    (State.RELEASING, Proof.RELEASED, Want.LEAVE): Act.DROP,
    (State.RELEASING, Proof.ENDED, Want.STAY): Act.GRANT,
    (State.RELEASING, Proof.ENDED, Want.MOVE): Act.GRANT,
    (State.RELEASING, Proof.ENDED, Want.LEAVE): Act.DROP,
    (State.RELEASING, Proof.LOST, Want.STAY): Act.RETURN,
    (State.RELEASING, Proof.LOST, Want.MOVE): Act.FORCE,
    (State.RELEASING, Proof.LOST, Want.LEAVE): Act.WAIT,
}

NEXT: dict[Act, State | None] = {
    Act.KEEP: State.OWNED,
    Act.REVOKE: State.RELEASING,
    Act.WAIT: None,  # as it was
    Act.RETURN: State.OWNED,
    Act.GRANT: State.OWNED,
    Act.FORCE: State.OWNED,
    Act.DROP: State.FREE,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a holder now."""

    ended: bool = False  # by an event or a consistent read
    terminating: bool = False
    ready: bool = True
    report: Report | None = None
    working: AbstractSet[Queue] = frozenset()  # what the report says it may still deliver from or commit for
    unheard: float = 0.0  # seconds since its report was last read
    leaving: float = 0.0  # seconds since it was first seen terminating, and so asked to give up everything

    def lost(self, rules: Handover, asked: float = 0.0) -> bool:
        """Whether waiting for it costs more than the risk; `asked`: how long ago it was asked to give something up.

        A member that is Ready obeys, though we do not hear it: it is lost only after it had time to see that it must.
        """
        silent = self.unheard >= rules.lost_after and not self.ready
        return silent or min(max(asked, self.leaving), self.unheard) >= given_up(rules)

    def obeys(self, holder: Holder, generation: int) -> bool:
        """Whether its own report, not a namesake's, says that it obeys this generation."""
        report = self.report
        return (
            report is not None
            and (report.member, report.uid) == (holder.name, holder.uid)
            and (report.generation >= generation)
        )


class Taken(NamedTuple):
    """That a queue was taken from its holder: by which generation, and how many seconds ago."""

    since: int
    ago: float


def given_up(rules: Handover) -> float:
    """Return how long nobody is overruled who is Ready, but not heard: it may have to drain for longer than usual."""
    return max(GIVEN_UP, KUBELET + rules.drain_timeout)


def proof(queue: Queue, holder: Holder, taken: Taken | None, seen: Seen, rules: Handover) -> Proof:
    """Say what is known about a holder that shall give up a queue.

    While it was not taken from him, that he does not work it proves nothing: he may take it up any moment.
    """
    if seen.ended:
        return Proof.ENDED
    if taken and seen.obeys(holder, taken.since) and queue not in seen.working:
        return Proof.RELEASED
    if seen.terminating and seen.obeys(holder, 0) and seen.report and seen.report.drained:
        return Proof.RELEASED
    if seen.lost(rules, taken.ago if taken else 0.0):
        return Proof.LOST
    return Proof.NONE


def act(state: State, known: Proof, want: Want, *, held_back: bool = False, immediate: bool = False) -> Act:
    """Return what the next document says of a queue; `held_back` is a gate's word and stops revokes only."""
    chosen = TABLE[state, known, want]
    if chosen is Act.REVOKE and held_back:
        return Act.KEEP
    if chosen is Act.REVOKE and immediate:
        return Act.GRANT if want is Want.MOVE else Act.DROP
    return chosen


def picture() -> str:
    """Draw the table as a Mermaid state diagram, for docs/handover.md."""
    arrows: dict[tuple[State, State, Act], list[str]] = {}
    for (state, known, want), chosen in TABLE.items():
        after = NEXT[chosen] or state
        cause = want.value if known is Proof.NONE else f"{want.value}, {known.value}"
        arrows.setdefault((state, after, chosen), []).append(cause)
    lines = [
        f"    {state} --> {after}: {chosen} ({'; '.join(causes)})" for (state, after, chosen), causes in arrows.items()
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> Free", *lines]) + "\n"
