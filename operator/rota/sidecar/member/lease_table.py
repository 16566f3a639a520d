"""Leases of all queues of a member, with their timers.

A lease is the state of one queue at the member, from its assignment to its release; `queue_lifecycle` is its state
machine.
"""

import heapq
from itertools import count

from rota.model import Queue
from rota.sidecar.member.queue_lifecycle import Command, LeaseEvent, LeaseState, QueueLease


class LeaseTable:
    """Passes events and due timers to the leases; a queue has an entry until it is released."""

    def __init__(self, drain_timeout: float) -> None:
        self.leases: dict[Queue, QueueLease] = {}
        self.drain_timeout = drain_timeout
        self.reported_changes = 0  # number of changes that the member's report shows
        self._lease_numbers = count(1)
        self._timers: list[tuple[float, Queue]] = []  # a heap; outdated entries are skipped

    def assign(self, queue: Queue, now: float, *, orderly: bool, needs_lock_hold: bool) -> list[Command]:
        """Grant a queue to the member.

        The options apply to a queue that it does not have yet. `needs_lock_hold`: once the broker has granted the lock,
        wait before the first delivery (LOCK_HOLD_SECONDS).
        """
        lease = self.leases.get(queue) or QueueLease(
            queue=queue, orderly=orderly, lease_numbers=self._lease_numbers, needs_lock_hold=needs_lock_hold
        )
        return self.apply_event(lease, LeaseEvent.ASSIGNED, now)

    def apply_event(self, lease: QueueLease, event: LeaseEvent, now: float, sent_at: float = 0.0) -> list[Command]:
        """Apply an event to a lease, and return the commands that follow from it."""
        previously_reported = _reported_flags(lease)
        lease.drain_timeout = self.drain_timeout
        commands = lease.on_event(event, now, sent_at)
        if lease.state is LeaseState.RELEASED:
            self.leases.pop(lease.queue, None)
        else:
            self.leases[lease.queue] = lease
        if (timer := lease.next_timer()) is not None:
            due_at, _ = timer
            heapq.heappush(self._timers, (due_at, lease.queue))
        if _reported_flags(lease) != previously_reported:
            self.reported_changes += 1
        return commands

    def next_timer_at(self) -> float | None:
        """Return when the first timer is due; None if no timer is set. Drops outdated entries before it."""
        while self._timers:
            due_at, queue = self._timers[0]
            lease = self.leases.get(queue)
            timer = lease.next_timer() if lease else None
            if timer is not None and timer[0] == due_at:
                return due_at
            heapq.heappop(self._timers)
        return None

    def run_due_timers(self, now: float) -> list[Command]:
        """Apply all timers that are due."""
        commands: list[Command] = []
        while (due_at := self.next_timer_at()) is not None and due_at <= now:
            _, queue = heapq.heappop(self._timers)  # valid: `next_timer_at` has just compared it with its lease's timer
            lease = self.leases[queue]
            timer = lease.next_timer()
            if timer is not None:
                _, event = timer
                commands += self.apply_event(lease, event, now)
        return commands


def _reported_flags(lease: QueueLease) -> tuple[bool, bool]:
    """Return the properties of a queue that its member's report shows."""
    return lease.state is LeaseState.RELEASED, lease.state is LeaseState.DRAINING
