"""State machine of one queue at its member: start, consume, drain, release.

A lease begins only when the assignment grants the queue, and each of its commands and answers carries the lease's
number, so a late answer changes nothing. A queue is released only after its last delivery has ended and its last
commit was answered. Orderly queues are protected by the broker's lock as well. docs/handover.md explains the rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rota.model import Queue

TRUST = 30.0  # seconds for which a lock is trusted, from sending its request
RENEWAL, ASK_AGAIN = 20.0, 5.0  # age at which a lock is renewed, and retry interval without an answer; seconds
KEPT = 60.0  # seconds for which the broker keeps a lock
HOLD = 60.0  # seconds for which a doubtful lock is held before the first delivery
LONGEST_PAUSE = 30.0


class LeaseState(StrEnum):
    """The state of a queue at the member; a queue without an entry is Released."""

    WANTED = "Wanted"
    LOCKING = "Locking"
    STARTING = "Starting"
    RUNNING = "Running"
    STUCK = "Stuck"
    DRAINING = "Draining"
    RELEASED = "Released"


class LeaseEvent(StrEnum):
    """An event of a queue: from the assignment, answered by the shell, or due by the clock."""

    GIVEN = "Given"  # by the assignment
    AGAIN = "Again"  # given while draining, without a direct way back: the queue must become empty first
    TAKEN = "Taken"  # the assignment no longer gives the queue to this member, or the member drains
    CONCURRENT = "Concurrent"  # the group's ordering, which decides the first step of a wanted queue
    ORDERLY = "Orderly"
    LOCKED = "Locked"  # answers Lock
    REFUSED = "Refused"  # answers Lock: the broker refused
    PLACED = "Placed"  # answers Place: the start offset is known
    EARLY = "Early"  # the start offset is known, but the lock is still in its hold time
    FAILED = "Failed"  # answers Lock or Place: the request failed
    READER_FAILED = "ReaderFailed"  # answers Fetch: the reader ended with an unexpected error
    EMPTY = "Empty"  # answers Stop and Cut: no delivery is open, the last commit is answered
    UNLOCKED = "Unlocked"  # answers Unlock, also if it failed: broker locks expire; queues without a lock skip it
    HELD = "Held"  # the hold time of the lock is over
    RENEW = "Renew"  # the lock is old enough for a renewal
    EXPIRED = "Expired"  # trust in the lock ran out
    RETRY = "Retry"
    RESUME = "Resume"  # the retry of a failed reader: the window and the lock are still good
    LATE = "Late"  # drainTimeout has expired


class LeaseAction(StrEnum):
    """A command of the lifecycle to the shell; commands of one queue are carried out in order."""

    LOCK = "Lock"
    PLACE = "Place"  # discard buffered messages and look up the start offset
    FETCH = "Fetch"
    STOP = "Stop"  # stop fetching and starting deliveries; open deliveries end and are committed
    CUT = "Cut"  # end open deliveries now, and commit
    UNLOCK = "Unlock"


class Command(NamedTuple):
    """An act that the shell carries out; its answer repeats the queue and the life number."""

    act: LeaseAction
    queue: Queue
    life: int


_S, _E, _A = LeaseState, LeaseEvent, LeaseAction

# A missing row means that the event comes too late or changes nothing. Wanted is left at once.
TABLE: dict[tuple[LeaseState, LeaseEvent], tuple[LeaseState, tuple[LeaseAction, ...]]] = {
    (_S.RELEASED, _E.GIVEN): (_S.WANTED, ()),
    (_S.WANTED, _E.CONCURRENT): (_S.STARTING, (_A.PLACE,)),
    (_S.WANTED, _E.ORDERLY): (_S.LOCKING, (_A.LOCK,)),
    (_S.LOCKING, _E.LOCKED): (_S.STARTING, (_A.PLACE,)),
    (_S.LOCKING, _E.REFUSED): (_S.STUCK, ()),
    (_S.LOCKING, _E.FAILED): (_S.STUCK, ()),
    (_S.LOCKING, _E.TAKEN): (_S.DRAINING, (_A.STOP,)),
    (_S.STARTING, _E.PLACED): (_S.RUNNING, (_A.FETCH,)),
    (_S.STARTING, _E.EARLY): (_S.STARTING, ()),
    (_S.STARTING, _E.HELD): (_S.STARTING, (_A.PLACE,)),  # other members may have committed meanwhile
    (_S.STARTING, _E.FAILED): (_S.STUCK, ()),
    (_S.STARTING, _E.RENEW): (_S.STARTING, (_A.LOCK,)),
    (_S.STARTING, _E.LOCKED): (_S.STARTING, ()),
    (_S.STARTING, _E.REFUSED): (_S.STUCK, ()),
    (_S.STARTING, _E.EXPIRED): (_S.WANTED, ()),
    (_S.STARTING, _E.TAKEN): (_S.DRAINING, (_A.STOP,)),
    (_S.RUNNING, _E.RENEW): (_S.RUNNING, (_A.LOCK,)),
    (_S.RUNNING, _E.LOCKED): (_S.RUNNING, ()),
    (_S.RUNNING, _E.REFUSED): (_S.STUCK, (_A.STOP,)),
    (_S.RUNNING, _E.EXPIRED): (_S.WANTED, (_A.STOP,)),
    (_S.RUNNING, _E.READER_FAILED): (_S.STUCK, ()),
    (_S.RUNNING, _E.TAKEN): (_S.DRAINING, (_A.STOP,)),
    (_S.STUCK, _E.RETRY): (_S.WANTED, ()),
    (_S.STUCK, _E.RESUME): (_S.RUNNING, (_A.FETCH,)),
    (_S.STUCK, _E.EXPIRED): (_S.WANTED, (_A.STOP,)),  # deliveries of a failed reader may be open still
    (_S.STUCK, _E.REFUSED): (_S.STUCK, (_A.STOP,)),  # answers a renewal that was sent before the reader failed
    (_S.STUCK, _E.TAKEN): (_S.DRAINING, (_A.STOP,)),  # deliveries under a lost lock may be open still
    (_S.DRAINING, _E.TAKEN): (_S.DRAINING, ()),
    (_S.DRAINING, _E.GIVEN): (_S.RUNNING, (_A.FETCH,)),
    (_S.DRAINING, _E.AGAIN): (_S.DRAINING, ()),
    (_S.DRAINING, _E.REFUSED): (_S.DRAINING, ()),  # so there is no direct way back to Running
    (_S.DRAINING, _E.LATE): (_S.DRAINING, (_A.CUT,)),
    (_S.DRAINING, _E.EMPTY): (_S.DRAINING, (_A.UNLOCK,)),
    (_S.DRAINING, _E.UNLOCKED): (_S.RELEASED, ()),
}


@dataclass(slots=True, kw_only=True)
class QueueLease:
    """State of one queue at the member, from Given to Released; times are seconds of a monotonic clock."""

    queue: Queue
    orderly: bool
    numbers: Iterator[int]
    drain_timeout: float = 30.0
    wary: bool = False  # the next lock is held for HOLD seconds before the first delivery
    state: LeaseState = LeaseState.RELEASED
    number: int = 0
    locked: float | None = None  # when the request for the trusted lock was sent
    asked: float = 0.0  # when Lock was last commanded
    not_before: float = 0.0  # no delivery before this
    early: bool = False  # the start offset is known, and the queue waits for `not_before`
    trouble: LeaseEvent | None = None  # the failure that last led to Stuck
    pause: float = 0.0
    retry: float = 0.0
    late: float | None = None  # when drainTimeout ends the drain
    back: bool = False  # whether Given leads directly back to Running
    again: bool = False  # given while it drains: starts again once empty

    def happened(self, event: LeaseEvent, now: float, sent: float = 0.0) -> list[Command]:
        """Apply an event and return its commands; with Locked, `sent` is the time of the lock request."""
        commands: list[Command] = []
        current_event: LeaseEvent | None = event
        while current_event is not None:
            current_event = self._meant(current_event, now, sent)
            row = TABLE.get((self.state, current_event))
            if row is None:
                break
            self._note_start(current_event, now, sent)
            self._note_turn(current_event, now)
            commands += [Command(act, self.queue, self.number) for act in row[1]]
            self.state = row[0]
            current_event = self._follows()
        return commands

    def trusts(self, now: float, push_timeout: float = 0.0) -> bool:
        """Whether the queue needs no lock, or its lock is trusted for as long as a delivery takes."""
        if not self.orderly:
            return True
        return self.locked is not None and now - self.locked < min(TRUST, KEPT - push_timeout)

    def due(self) -> tuple[float, LeaseEvent] | None:
        """Return the next timer event and its time; None if no timer is set."""
        match self.state:
            case LeaseState.DRAINING:
                return None if self.late is None else (self.late, LeaseEvent.LATE)
            case LeaseState.STUCK:
                return self.retry, LeaseEvent.RETRY
            case LeaseState.STARTING | LeaseState.RUNNING:
                return min(self._waits(), default=None)
            case _:
                return None

    def _waits(self) -> Iterator[tuple[float, LeaseEvent]]:
        if self.state is LeaseState.STARTING and self.early:
            yield self.not_before, LeaseEvent.HELD
        if self.locked is not None:
            yield self.locked + TRUST, LeaseEvent.EXPIRED
            yield max(self.locked + RENEWAL, self.asked + ASK_AGAIN), LeaseEvent.RENEW

    def _meant(self, event: LeaseEvent, now: float, sent: float) -> LeaseEvent:
        """Return the event that applies in the queue's present state, such as Again instead of Given."""
        match event:
            case LeaseEvent.GIVEN if self.state is LeaseState.DRAINING and not (self.back and self.trusts(now)):
                return LeaseEvent.AGAIN
            case LeaseEvent.PLACED if now < self.not_before:
                return LeaseEvent.EARLY
            case LeaseEvent.RETRY if self.trouble is LeaseEvent.READER_FAILED:
                return LeaseEvent.RESUME if self.trusts(now) else LeaseEvent.EXPIRED
            case LeaseEvent.EMPTY if not self.orderly:
                return LeaseEvent.UNLOCKED
            case LeaseEvent.LOCKED if self.state is not LeaseState.LOCKING and self._lapsed(sent):
                return LeaseEvent.EXPIRED
            case _:
                return event

    def _lapsed(self, sent: float) -> bool:
        """Whether trust in the lock had run out when the lock was requested again."""
        return self.locked is not None and sent - self.locked >= TRUST

    def _note_start(self, event: LeaseEvent, now: float, sent: float) -> None:
        match event:
            case LeaseEvent.ORDERLY | LeaseEvent.RENEW:
                self.asked = now
            case LeaseEvent.LOCKED:
                if self.wary or self._lapsed(sent):
                    self.not_before, self.wary = now + HOLD, False
                self.locked = sent if self.locked is None else max(self.locked, sent)
            case LeaseEvent.EARLY:
                self.early = True
            case LeaseEvent.PLACED:
                self.pause, self.trouble = 0.0, None
            case LeaseEvent.REFUSED | LeaseEvent.FAILED | LeaseEvent.READER_FAILED:
                self._note_failure(event, now)
            case _:
                pass

    def _note_failure(self, event: LeaseEvent, now: float) -> None:
        """Schedule the retry: the pause doubles, but starts over for a reader that ran for LONGEST_PAUSE."""
        if event is LeaseEvent.READER_FAILED and now - self.retry > LONGEST_PAUSE:
            self.pause = 0.0
        self.pause = min(max(1.0, 2 * self.pause), LONGEST_PAUSE)
        self.retry, self.trouble = now + self.pause, event
        if event is LeaseEvent.REFUSED:
            self.wary, self.locked = self.wary or self.locked is not None, None

    def _note_turn(self, event: LeaseEvent, now: float) -> None:
        match event:
            case LeaseEvent.GIVEN | LeaseEvent.HELD:
                self.number, self.early = next(self.numbers), False
            case LeaseEvent.TAKEN:
                self.again = False
                if self.state is not LeaseState.DRAINING:
                    self.late, self.back = now + self.drain_timeout, self.state is LeaseState.RUNNING
            case LeaseEvent.AGAIN:
                self.again = True
            case LeaseEvent.LATE | LeaseEvent.EMPTY | LeaseEvent.UNLOCKED:
                self.late, self.back = None, False
            case _:
                pass

    def _follows(self) -> LeaseEvent | None:
        """Return the event that follows at once in a state that is only passed through."""
        if self.state is LeaseState.WANTED:
            self.number, self.early = next(self.numbers), False
            return LeaseEvent.ORDERLY if self.orderly else LeaseEvent.CONCURRENT
        if self.state is LeaseState.RELEASED and self.again:
            self.again, self.locked, self.pause = False, None, 0.0
            return LeaseEvent.GIVEN
        return None


def mermaid_diagram() -> str:
    """Return the table as a Mermaid state diagram, for docs/handover.md."""
    arrows: dict[tuple[LeaseState, LeaseState, tuple[LeaseAction, ...]], list[str]] = {}
    for (state, event), (next_state, acts) in TABLE.items():
        arrows.setdefault((state, next_state, acts), []).append(event.value)
    lines = [
        f"    {state} --> {next_state}: {'; '.join(events)}" + (f" ({', '.join(acts)})" if acts else "")
        for (state, next_state, acts), events in arrows.items()
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> Released", *lines]) + "\n"
