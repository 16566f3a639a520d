"""State machine of one queue at its member: start, consume, drain, release.

A lease is the state of one queue at the member, from its assignment to its release. Each of its commands and answers
carries the lease's number, so that a late answer changes nothing. A queue is released only after its last delivery has
ended and its last commit was answered. Orderly queues are protected by the broker's lock as well.
docs/handover.md explains the rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rota.model import Queue

# Ages of a lock, from sending its last request:
LOCK_RENEWAL_SECONDS = 20.0  # the member renews it
LOCK_TRUST_SECONDS = 30.0  # the member starts no delivery with it any more
LOCK_EXPIRY_SECONDS = 60.0  # the broker may give it to another consumer

LOCK_RETRY_SECONDS = 5.0  # between two requests to renew a lock
LOCK_HOLD_SECONDS = 60.0  # from a new lock to the first delivery, if another consumer may still trust an older one
MAX_BACKOFF_SECONDS = 30.0  # before a stuck queue is started again


class LeaseState(StrEnum):
    """The state of a queue at the member; a queue without a lease is Released."""

    WANTED = "Wanted"
    LOCKING = "Locking"
    STARTING = "Starting"
    RUNNING = "Running"
    STUCK = "Stuck"
    DRAINING = "Draining"
    RELEASED = "Released"


class LeaseEvent(StrEnum):
    """An event of a queue: from the assignment, answered by the agent, or due by the clock."""

    ASSIGNED = "Assigned"  # by the assignment
    REASSIGNED = "Reassigned"  # assigned while draining, without a direct way back: the drain must end first
    REVOKED = "Revoked"  # the assignment no longer grants the queue to this member, or the member drains
    CONCURRENT = "Concurrent"  # first event of a queue that needs no lock
    ORDERLY = "Orderly"  # first event of a queue that needs the broker's lock
    LOCKED = "Locked"  # answers Lock
    REFUSED = "Refused"  # answers Lock: the broker refused
    START_FOUND = "StartFound"  # answers FindStart: the start offset is known
    START_HELD = "StartHeld"  # the start offset is known, but the lock is still in its hold time
    FAILED = "Failed"  # answers Lock or FindStart: the request failed
    READER_FAILED = "ReaderFailed"  # answers Fetch: the reader ended with an unexpected error
    DRAINED = "Drained"  # answers Stop and Abort: no delivery is open, the last commit is answered
    UNLOCKED = "Unlocked"  # answers Unlock, also if it failed: broker locks expire; queues without a lock skip it
    HOLD_OVER = "HoldOver"  # the hold time of the lock is over
    RENEW = "Renew"  # the lock is old enough for a renewal
    EXPIRED = "Expired"  # trust in the lock ran out
    RETRY = "Retry"  # the backoff of a stuck queue is over
    RESUME = "Resume"  # the retry of a failed reader: the window and the lock are still good
    DRAIN_TIMEOUT = "DrainTimeout"  # drainTimeout has expired


class LeaseAction(StrEnum):
    """A command of the lifecycle to the agent; commands of one queue are carried out in order."""

    LOCK = "Lock"
    FIND_START = "FindStart"  # discard buffered messages and look up the start offset
    FETCH = "Fetch"
    STOP = "Stop"  # stop fetching and starting deliveries; open deliveries end and are committed
    ABORT = "Abort"  # end open deliveries now, and commit
    UNLOCK = "Unlock"


class Command(NamedTuple):
    """A command that the agent carries out; its answer repeats the queue and the lease number."""

    action: LeaseAction
    queue: Queue
    lease_number: int


_S = LeaseState
_E = LeaseEvent
_A = LeaseAction

# A missing row means that the event comes too late or changes nothing. Wanted is left at once.
TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], tuple[LeaseState, tuple[LeaseAction, ...]]] = {
    (_S.RELEASED, _E.ASSIGNED): (_S.WANTED, ()),
    (_S.WANTED, _E.CONCURRENT): (_S.STARTING, (_A.FIND_START,)),
    (_S.WANTED, _E.ORDERLY): (_S.LOCKING, (_A.LOCK,)),
    (_S.LOCKING, _E.LOCKED): (_S.STARTING, (_A.FIND_START,)),
    (_S.LOCKING, _E.REFUSED): (_S.STUCK, ()),
    (_S.LOCKING, _E.FAILED): (_S.STUCK, ()),
    (_S.LOCKING, _E.REVOKED): (_S.DRAINING, (_A.STOP,)),
    (_S.STARTING, _E.START_FOUND): (_S.RUNNING, (_A.FETCH,)),
    (_S.STARTING, _E.START_HELD): (_S.STARTING, ()),
    (_S.STARTING, _E.HOLD_OVER): (_S.STARTING, (_A.FIND_START,)),  # other members may have committed meanwhile
    (_S.STARTING, _E.FAILED): (_S.STUCK, ()),
    (_S.STARTING, _E.RENEW): (_S.STARTING, (_A.LOCK,)),
    (_S.STARTING, _E.LOCKED): (_S.STARTING, ()),
    (_S.STARTING, _E.REFUSED): (_S.STUCK, ()),
    (_S.STARTING, _E.EXPIRED): (_S.WANTED, ()),
    (_S.STARTING, _E.REVOKED): (_S.DRAINING, (_A.STOP,)),
    (_S.RUNNING, _E.RENEW): (_S.RUNNING, (_A.LOCK,)),
    (_S.RUNNING, _E.LOCKED): (_S.RUNNING, ()),
    (_S.RUNNING, _E.REFUSED): (_S.STUCK, (_A.STOP,)),
    (_S.RUNNING, _E.EXPIRED): (_S.WANTED, (_A.STOP,)),
    (_S.RUNNING, _E.READER_FAILED): (_S.STUCK, ()),
    (_S.RUNNING, _E.REVOKED): (_S.DRAINING, (_A.STOP,)),
    (_S.STUCK, _E.RETRY): (_S.WANTED, ()),
    (_S.STUCK, _E.RESUME): (_S.RUNNING, (_A.FETCH,)),
    (_S.STUCK, _E.EXPIRED): (_S.WANTED, (_A.STOP,)),  # a Retry without a trusted lock; deliveries may be open still
    (_S.STUCK, _E.REFUSED): (_S.STUCK, (_A.STOP,)),  # answers a renewal that was sent before the reader failed
    (_S.STUCK, _E.REVOKED): (_S.DRAINING, (_A.STOP,)),  # deliveries under a lost lock may be open still
    (_S.DRAINING, _E.REVOKED): (_S.DRAINING, ()),
    (_S.DRAINING, _E.ASSIGNED): (_S.RUNNING, (_A.FETCH,)),
    (_S.DRAINING, _E.REASSIGNED): (_S.DRAINING, ()),
    (_S.DRAINING, _E.REFUSED): (_S.DRAINING, ()),  # the lock is lost, so Assigned becomes Reassigned
    (_S.DRAINING, _E.DRAIN_TIMEOUT): (_S.DRAINING, (_A.ABORT,)),
    (_S.DRAINING, _E.DRAINED): (_S.DRAINING, (_A.UNLOCK,)),
    (_S.DRAINING, _E.UNLOCKED): (_S.RELEASED, ()),
}


@dataclass(slots=True, kw_only=True)
class QueueLease:
    """State of one queue at the member, from Assigned to Released; times are seconds of a monotonic clock."""

    queue: Queue
    orderly: bool
    lease_numbers: Iterator[int]
    drain_timeout: float = 30.0
    needs_lock_hold: bool = False  # the next lock is held for LOCK_HOLD_SECONDS before the first delivery
    state: LeaseState = LeaseState.RELEASED
    number: int = 0
    locked_at: float | None = None  # when the request for the trusted lock was sent
    lock_requested_at: float = 0.0  # when Lock was last commanded
    deliver_after: float = 0.0  # no delivery before this
    is_held: bool = False  # the start offset is known, and the queue waits for `deliver_after`
    last_failure: LeaseEvent | None = None  # the failure that last led to Stuck
    backoff_seconds: float = 0.0
    retry_at: float = 0.0
    drain_deadline: float | None = None  # when drainTimeout ends the drain
    may_resume: bool = False  # whether Assigned leads directly back to Running
    is_reassigned: bool = False  # assigned while it drains: starts again once drained

    @property
    def failure(self) -> LeaseEvent | None:
        """Why the queue is stuck: Refused, Failed or ReaderFailed; None in other states."""
        return self.last_failure if self.state is LeaseState.STUCK else None

    def on_event(self, event: LeaseEvent, now: float, sent_at: float = 0.0) -> list[Command]:
        """Apply an event and return its commands; with Locked, `sent_at` is the time of the lock request."""
        commands: list[Command] = []
        current_event: LeaseEvent | None = event
        while current_event is not None:
            current_event = self._resolve_event(current_event, now, sent_at)
            row = TRANSITIONS.get((self.state, current_event))
            if row is None:
                break
            next_state, actions = row
            self._update_start_and_lock(current_event, now, sent_at)  # first, as commands carry a new lease's number
            self._update_drain(current_event, now)
            commands += [Command(action, self.queue, self.number) for action in actions]
            self.state = next_state
            current_event = self._follow_up_event()
        return commands

    def is_lock_trusted(self, now: float, push_timeout: float = 0.0) -> bool:
        """Whether no lock is needed, or the lock is trusted now and lasts at the broker for `push_timeout` more."""
        if not self.orderly:
            return True
        trusted_seconds = min(LOCK_TRUST_SECONDS, LOCK_EXPIRY_SECONDS - push_timeout)
        return self.locked_at is not None and now - self.locked_at < trusted_seconds

    def next_timer(self) -> tuple[float, LeaseEvent] | None:
        """Return the next timer event and its time; None if no timer is set."""
        match self.state:
            case LeaseState.DRAINING:
                return None if self.drain_deadline is None else (self.drain_deadline, LeaseEvent.DRAIN_TIMEOUT)
            case LeaseState.STUCK:
                return self.retry_at, LeaseEvent.RETRY
            case LeaseState.STARTING | LeaseState.RUNNING:
                return min(self._timers(), default=None)
            case _:
                return None

    def _timers(self) -> Iterator[tuple[float, LeaseEvent]]:
        """Yield the timers of a queue that starts or runs; a renewal without success is repeated after a pause."""
        if self.state is LeaseState.STARTING and self.is_held:
            yield self.deliver_after, LeaseEvent.HOLD_OVER
        if self.locked_at is not None:
            yield self.locked_at + LOCK_TRUST_SECONDS, LeaseEvent.EXPIRED
            renew_at = max(self.locked_at + LOCK_RENEWAL_SECONDS, self.lock_requested_at + LOCK_RETRY_SECONDS)
            yield renew_at, LeaseEvent.RENEW

    def _resolve_event(self, event: LeaseEvent, now: float, sent_at: float) -> LeaseEvent:
        """Return the event that applies in the queue's present state, such as Reassigned instead of Assigned."""
        match event:
            case LeaseEvent.ASSIGNED if self.state is LeaseState.DRAINING and not (
                self.may_resume and self.is_lock_trusted(now)
            ):
                return LeaseEvent.REASSIGNED
            case LeaseEvent.START_FOUND if now < self.deliver_after:
                return LeaseEvent.START_HELD
            case LeaseEvent.RETRY if self.last_failure is LeaseEvent.READER_FAILED:
                return LeaseEvent.RESUME if self.is_lock_trusted(now) else LeaseEvent.EXPIRED
            case LeaseEvent.DRAINED if not self.orderly:
                return LeaseEvent.UNLOCKED
            case LeaseEvent.LOCKED if self.state is not LeaseState.LOCKING and self._has_lock_lapsed(sent_at):
                return LeaseEvent.EXPIRED
            case _:
                return event

    def _has_lock_lapsed(self, sent_at: float) -> bool:
        """Whether trust in the lock had run out when the lock was requested again."""
        return self.locked_at is not None and sent_at - self.locked_at >= LOCK_TRUST_SECONDS

    def _update_start_and_lock(self, event: LeaseEvent, now: float, sent_at: float) -> None:
        match event:
            case LeaseEvent.ASSIGNED | LeaseEvent.HOLD_OVER:
                self._take_next_number()
            case LeaseEvent.ORDERLY | LeaseEvent.RENEW:
                self.lock_requested_at = now
            case LeaseEvent.LOCKED:
                if self.needs_lock_hold or self._has_lock_lapsed(sent_at):
                    self.deliver_after = now + LOCK_HOLD_SECONDS
                    self.needs_lock_hold = False
                self.locked_at = sent_at if self.locked_at is None else max(self.locked_at, sent_at)
            case LeaseEvent.START_HELD:
                self.is_held = True
            case LeaseEvent.START_FOUND:
                self.backoff_seconds = 0.0
                self.last_failure = None
            case LeaseEvent.REFUSED | LeaseEvent.FAILED | LeaseEvent.READER_FAILED:
                self._schedule_retry(event, now)

    def _schedule_retry(self, event: LeaseEvent, now: float) -> None:
        """Schedule the retry: the pause doubles, but starts over for a reader that ran for MAX_BACKOFF_SECONDS."""
        # `retry_at` is the time of the last retry, since which the reader has run.
        if event is LeaseEvent.READER_FAILED and now - self.retry_at > MAX_BACKOFF_SECONDS:
            self.backoff_seconds = 0.0
        self.backoff_seconds = min(max(1.0, 2 * self.backoff_seconds), MAX_BACKOFF_SECONDS)
        self.retry_at = now + self.backoff_seconds
        self.last_failure = event
        if event is LeaseEvent.REFUSED:
            if self.locked_at is not None:  # the trusted lock is lost: another consumer may have the queue
                self.needs_lock_hold = True
            self.locked_at = None

    def _update_drain(self, event: LeaseEvent, now: float) -> None:
        match event:
            case LeaseEvent.REVOKED:
                self.is_reassigned = False
                if self.state is not LeaseState.DRAINING:
                    self.drain_deadline = now + self.drain_timeout
                    self.may_resume = self.state is LeaseState.RUNNING
            case LeaseEvent.REASSIGNED:
                self.is_reassigned = True
            case LeaseEvent.DRAIN_TIMEOUT | LeaseEvent.DRAINED | LeaseEvent.UNLOCKED:
                self.drain_deadline = None
                self.may_resume = False

    def _take_next_number(self) -> None:
        """Start another lease of the queue: answers to commands of the previous one are ignored from now on.

        Numbers may be skipped: Released passes through Wanted, which takes one more.
        """
        self.number = next(self.lease_numbers)
        self.is_held = False

    def _follow_up_event(self) -> LeaseEvent | None:
        """Return the event that follows at once in a state that is only passed through."""
        if self.state is LeaseState.WANTED:
            self._take_next_number()
            return LeaseEvent.ORDERLY if self.orderly else LeaseEvent.CONCURRENT
        if self.state is LeaseState.RELEASED and self.is_reassigned:
            self.is_reassigned = False
            self.locked_at = None
            self.backoff_seconds = 0.0
            return LeaseEvent.ASSIGNED
        return None
