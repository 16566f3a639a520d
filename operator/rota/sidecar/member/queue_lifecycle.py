"""One queue at the member: taken up, worked, given back; a table, and the theory that it rests on.

**Only what is given is worked.** A life begins with `Given`, and only the document says that. From every state in
which something could be fetched, `Taken` leads to `Draining`, and from there only `Given` leads back. What a shell
answers moves a life on, it never begins one: each command carries the number of its life, each answer brings it
back, and no number is used twice. So an answer that comes late, after the queue was taken, cut or given anew,
belongs to a number that is no more, and changes nothing.

**What is said to be released is released.** The one way to `Released` is through `Empty`: after `Stop` the last
delivery has ended and the broker has answered the last commit; only then a lock is given back. No number fetches
again after its `Stop` (going back to `Running` takes a new one), so nothing can come after its `Empty`.

**The broker's lock** fences Orderly queues. It is trusted for 30 s, counted from sending the request, and asked
for again after 20 s; the broker keeps it for 60 s. A lock proves little where somebody else may have worked the
queue: after a forced grant, and where it was refused or trust in it ran out meanwhile, for a restarted broker has
forgotten its locks. Then it is held for 60 s, longer than any delivery under an older lock. The start is looked up
again after that, for others may have committed until then.

**Nothing is guessed.** A lock that is refused and a start that cannot be found lead to `Stuck`, and are asked for
again 1 s later, then 2 s, up to 30 s: a network error never means that there is no offset.

**A reader that fails is restarted.** An unexpected error in the reading of a running queue leads to `Stuck`, too. The
queue keeps its life number and its window: the retry fetches from the next offset, if the lock is still trusted. If it
is not, the queue goes to `Wanted` and takes the lock first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rota.model import Queue

TRUST = 30.0  # seconds from sending the request for which a lock is believed in
RENEWAL, ASK_AGAIN = 20.0, 5.0  # a lock of this age is asked for again, and again if there is no answer
KEPT = 60.0  # for so long the broker keeps a lock
HOLD = 60.0  # for so long a doubtful lock is held before the first delivery
LONGEST_PAUSE = 30.0


class State(StrEnum):
    """Where the member is with a queue; one that it does not know is Released."""

    WANTED = "Wanted"
    LOCKING = "Locking"
    STARTING = "Starting"
    RUNNING = "Running"
    STUCK = "Stuck"
    DRAINING = "Draining"
    RELEASED = "Released"


class Event(StrEnum):
    """What can happen to a queue: said by the document, answered by the shell, or due by the clock."""

    GIVEN = "Given"  # by the document
    AGAIN = "Again"  # given, too, but there is no way straight back: it must be empty first
    TAKEN = "Taken"  # the document gives it no more, or the member drains
    CONCURRENT = "Concurrent"  # the group's ordering: what a wanted queue needs first
    ORDERLY = "Orderly"
    LOCKED = "Locked"  # answers Lock
    REFUSED = "Refused"  # answers Lock: the broker says no
    PLACED = "Placed"  # answers Place: the start is known
    EARLY = "Early"  # the start is known, but the lock is still held back
    FAILED = "Failed"  # answers Lock or Place: the broker could not be asked
    READER_FAILED = "ReaderFailed"  # answers Fetch: reading ended with an unexpected error
    EMPTY = "Empty"  # answers Stop and Cut: no delivery is open, the last commit is answered
    UNLOCKED = "Unlocked"  # answers Unlock, also if it failed: broker locks expire; queues without a lock skip it
    HELD = "Held"  # the lock was held for long enough
    RENEW = "Renew"  # the lock's age
    EXPIRED = "Expired"  # trust in the lock ran out
    RETRY = "Retry"
    RESUME = "Resume"  # the retry of a failed reader: the window and the lock are still good
    LATE = "Late"  # drainTimeout is over


class Act(StrEnum):
    """What the shell shall do; of one queue one thing after another, in order."""

    LOCK = "Lock"
    PLACE = "Place"  # forget what is buffered and find where to start
    FETCH = "Fetch"
    STOP = "Stop"  # fetch no more, begin no delivery; what is open ends and is committed
    CUT = "Cut"  # end what is open now, and commit
    UNLOCK = "Unlock"


class Command(NamedTuple):
    """An act for the shell; its answer names queue and life again."""

    act: Act
    queue: Queue
    life: int


_S, _E, _A = State, Event, Act

# A missing row means: it comes too late, or changes nothing. Wanted is left at once.
TABLE: dict[tuple[State, Event], tuple[State, tuple[Act, ...]]] = {
    (_S.RELEASED, _E.GIVEN): (_S.WANTED, ()),
    (_S.WANTED, _E.CONCURRENT): (_S.STARTING, (_A.PLACE,)),
    (_S.WANTED, _E.ORDERLY): (_S.LOCKING, (_A.LOCK,)),
    (_S.LOCKING, _E.LOCKED): (_S.STARTING, (_A.PLACE,)),
    (_S.LOCKING, _E.REFUSED): (_S.STUCK, ()),
    (_S.LOCKING, _E.FAILED): (_S.STUCK, ()),
    (_S.LOCKING, _E.TAKEN): (_S.DRAINING, (_A.STOP,)),
    (_S.STARTING, _E.PLACED): (_S.RUNNING, (_A.FETCH,)),
    (_S.STARTING, _E.EARLY): (_S.STARTING, ()),
    (_S.STARTING, _E.HELD): (_S.STARTING, (_A.PLACE,)),  # others may have committed meanwhile
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
    (_S.DRAINING, _E.REFUSED): (_S.DRAINING, ()),  # so there is no way straight back
    (_S.DRAINING, _E.LATE): (_S.DRAINING, (_A.CUT,)),
    (_S.DRAINING, _E.EMPTY): (_S.DRAINING, (_A.UNLOCK,)),
    (_S.DRAINING, _E.UNLOCKED): (_S.RELEASED, ()),
}


@dataclass(slots=True, kw_only=True)
class Life:
    """One queue at the member, from Given to Released; times are a monotonic clock's seconds."""

    queue: Queue
    orderly: bool
    numbers: Iterator[int]
    drain_timeout: float = 30.0
    wary: bool = False  # the next lock it takes is held
    state: State = State.RELEASED
    number: int = 0
    locked: float | None = None  # when the request for the trusted lock was sent
    asked: float = 0.0  # when a lock was last commanded
    not_before: float = 0.0  # no delivery before this
    early: bool = False  # placed, waits for that
    trouble: Event | None = None  # why it was last stuck
    pause: float = 0.0
    retry: float = 0.0
    late: float | None = None  # when its drain is cut
    back: bool = False  # whether Given leads straight back to Running
    again: bool = False  # given while it drains: begins anew once empty

    def happened(self, event: Event, now: float, sent: float = 0.0) -> list[Command]:
        """Walk the table; `sent` is when the request of the lock was sent that is answered by Locked."""
        commands: list[Command] = []
        told: Event | None = event
        while told is not None:
            told = self._meant(told, now, sent)
            row = TABLE.get((self.state, told))
            if row is None:
                break
            self._note_start(told, now, sent)
            self._note_turn(told, now)
            commands += [Command(act, self.queue, self.number) for act in row[1]]
            self.state = row[0]
            told = self._follows()
        return commands

    def trusts(self, now: float, push_timeout: float = 0.0) -> bool:
        """Whether it needs no lock, or believes in the one it has for as long as a delivery takes."""
        if not self.orderly:
            return True
        return self.locked is not None and now - self.locked < min(TRUST, KEPT - push_timeout)

    def due(self) -> tuple[float, Event] | None:
        """Return what the clock brings next, and when."""
        match self.state:
            case State.DRAINING:
                return None if self.late is None else (self.late, Event.LATE)
            case State.STUCK:
                return self.retry, Event.RETRY
            case State.STARTING | State.RUNNING:
                return min(self._waits(), default=None)
            case _:
                return None

    def _waits(self) -> Iterator[tuple[float, Event]]:
        if self.state is State.STARTING and self.early:
            yield self.not_before, Event.HELD
        if self.locked is not None:
            yield self.locked + TRUST, Event.EXPIRED
            yield max(self.locked + RENEWAL, self.asked + ASK_AGAIN), Event.RENEW

    def _meant(self, event: Event, now: float, sent: float) -> Event:
        """Say what an event means to this life."""
        match event:
            case Event.GIVEN if self.state is State.DRAINING and not (self.back and self.trusts(now)):
                return Event.AGAIN
            case Event.PLACED if now < self.not_before:
                return Event.EARLY
            case Event.RETRY if self.trouble is Event.READER_FAILED:
                return Event.RESUME if self.trusts(now) else Event.EXPIRED
            case Event.EMPTY if not self.orderly:
                return Event.UNLOCKED
            case Event.LOCKED if self.state is not State.LOCKING and self._lapsed(sent):
                return Event.EXPIRED
            case _:
                return event

    def _lapsed(self, sent: float) -> bool:
        """Whether trust had run out when the lock was asked for again."""
        return self.locked is not None and sent - self.locked >= TRUST

    def _note_start(self, event: Event, now: float, sent: float) -> None:
        match event:
            case Event.ORDERLY | Event.RENEW:
                self.asked = now
            case Event.LOCKED:
                if self.wary or self._lapsed(sent):
                    self.not_before, self.wary = now + HOLD, False
                self.locked = sent if self.locked is None else max(self.locked, sent)
            case Event.EARLY:
                self.early = True
            case Event.PLACED:
                self.pause, self.trouble = 0.0, None
            case Event.REFUSED | Event.FAILED | Event.READER_FAILED:
                self._note_failure(event, now)
            case _:
                pass

    def _note_failure(self, event: Event, now: float) -> None:
        """Schedule the retry: the pause doubles, but starts anew for a reader that ran for LONGEST_PAUSE."""
        if event is Event.READER_FAILED and now - self.retry > LONGEST_PAUSE:
            self.pause = 0.0
        self.pause = min(max(1.0, 2 * self.pause), LONGEST_PAUSE)
        self.retry, self.trouble = now + self.pause, event
        if event is Event.REFUSED:
            self.wary, self.locked = self.wary or self.locked is not None, None

    def _note_turn(self, event: Event, now: float) -> None:
        match event:
            case Event.GIVEN | Event.HELD:
                self.number, self.early = next(self.numbers), False
            case Event.TAKEN:
                self.again = False
                if self.state is not State.DRAINING:
                    self.late, self.back = now + self.drain_timeout, self.state is State.RUNNING
            case Event.AGAIN:
                self.again = True
            case Event.LATE | Event.EMPTY | Event.UNLOCKED:
                self.late, self.back = None, False
            case _:
                pass

    def _follows(self) -> Event | None:
        """Return what happens at once in a state that is only passed through."""
        if self.state is State.WANTED:
            self.number, self.early = next(self.numbers), False
            return Event.ORDERLY if self.orderly else Event.CONCURRENT
        if self.state is State.RELEASED and self.again:
            self.again, self.locked, self.pause = False, None, 0.0
            return Event.GIVEN
        return None


def picture() -> str:
    """Draw the table as a Mermaid state diagram, for docs/handover.md."""
    arrows: dict[tuple[State, State, tuple[Act, ...]], list[str]] = {}
    for (state, event), (after, acts) in TABLE.items():
        arrows.setdefault((state, after, acts), []).append(event.value)
    lines = [
        f"    {state} --> {after}: {'; '.join(events)}" + (f" ({', '.join(acts)})" if acts else "")
        for (state, after, acts), events in arrows.items()
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> Released", *lines]) + "\n"
