"""Tracks the rebalances and handovers of one group from plan to plan, for metrics, the page and traces.

A queue's handover starts when the queue is revoked from its holder, and completes when the next owner reports that it
obeys the document that grants it. Handovers in progress at the first plan are not counted: their start is not known.
So one stored document opens handovers (queues that it adds to `releasing`), a later one grants them (an owner that it
gives to the queue), and members' reports complete them. A queue that was not revoked before is opened by its grant: it
had no owner, or its owner had ended.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Any, NamedTuple

from msgspec import structs

from rota.documents import Assignment
from rota.kube.state.rebalance import Rebalance
from rota.model import Holder, Queue, Reason
from rota.planner import Plan
from rota.planner.record import holders_of, owners_of

MAX_REBALANCES = 20  # rebalances kept for each group
MAX_HANDOVERS = 200  # handovers kept for one rebalance


class QueueHandover(NamedTuple):
    """A completed handover of a queue; times are seconds on the event loop's clock."""

    queue: Queue
    previous_owner: Holder | None  # None: the queue had no owner
    next_owner: Holder
    revoked_at: float  # the time of the grant if the queue was not revoked before
    granted_at: float
    obeyed_at: float
    is_forced: bool
    generation: int = 0  # of the document that granted it

    @property
    def seconds(self) -> float:
        """The time from the revoke, or from the grant without a revoke, until the next owner obeyed the grant."""
        return self.obeyed_at - self.revoked_at


class CompletedRebalance(NamedTuple):
    """A completed rebalance and its handovers, for a trace; it may have begun before the first plan seen here."""

    rebalance: Rebalance
    slowest_handovers: tuple[QueueHandover, ...]  # at most MAX_HANDOVERS: forced handovers first, then the longest
    handover_count: int  # number of all its handovers


class RebalanceChange(NamedTuple):
    """What one plan changed, for the metrics and the journal."""

    moved_queues: int = 0
    handovers: tuple[QueueHandover, ...] = ()
    ended_rebalance: Rebalance | None = None  # the completed one, if its start was seen here
    gate_reason: Reason | None = None  # the reason of a gate that began to hold queues with this plan
    completed: CompletedRebalance | None = None  # whether or not its start was seen


@dataclass
class _OpenHandover:
    """A handover in progress."""

    previous_owner: Holder | None
    revoked_at: float
    next_owner: Holder | None = None  # None until the queue is granted
    generation: int = 0  # of the document that grants the queue
    granted_at: float = 0.0
    is_forced: bool = False


@dataclass
class RebalanceTracker:
    """The history of one group: recent rebalances, handovers in progress, and totals; `record_plan` updates it."""

    last_plan: Plan = field(default_factory=Plan)
    rebalances: deque[Rebalance] = field(default_factory=lambda: deque(maxlen=MAX_REBALANCES))  # newest first
    unowned_seconds: float = 0.0  # queue-seconds without an owner
    contested_seconds: float = 0.0  # queue-seconds in which two members may have consumed a queue
    _document: Assignment | None = None
    _open_handovers: dict[Queue, _OpenHandover] = field(default_factory=dict)
    _saw_start: bool = False  # whether the present rebalance began under observation
    _longest_seconds: float = 0.0  # of the present rebalance: the duration of its longest handover
    _slowest: list[QueueHandover] = field(default_factory=list)  # of the present rebalance
    _handover_count: int = 0
    _counted_until: float | None = None  # until when queue-seconds are counted; None: no plan yet

    def record_plan(
        self, plan: Plan, document: Assignment | None, obeyed_generations: Mapping[Holder, int], now: float
    ) -> RebalanceChange:
        """Update the history with a plan, the stored document after it, and the generation that each member obeys."""
        is_first = self._counted_until is None
        self.count_seconds(now)  # before the update: the time so far belongs to the previous plan and document
        previous = self.last_plan
        self.last_plan = replace(plan, document=None, config_map_data={}, journal_records=())  # without large fields
        moved, forced = self._apply_document(document, now) if document else (0, 0)
        completed = self._complete_handovers(obeyed_generations, now)
        for handover in completed:
            if handover.previous_owner:
                self._longest_seconds = max(self._longest_seconds, handover.seconds)
        # `gate_reason` is set only for the plan with which a gate begins to hold queues. Whether that is the first plan
        # seen here is not known. NOTHING_WOULD_CHANGE holds no queue.
        gate_reason = plan.hold.reason if plan.hold else None
        previous_reason = previous.hold.reason if previous.hold else None
        if is_first or gate_reason in {previous_reason, Reason.NOTHING_WOULD_CHANGE}:
            gate_reason = None
        completed_rebalance = self._update_rebalance(plan, forced, completed)
        # Metrics do not count a rebalance that began before the first plan seen here.
        ended = completed_rebalance.rebalance if completed_rebalance and self._saw_start else None
        return RebalanceChange(moved, completed, ended, gate_reason, completed_rebalance)

    def count_seconds(self, now: float) -> None:
        """Add the time since the last call to the queue-seconds of unowned and of contested queues."""
        seconds = 0.0 if self._counted_until is None else now - self._counted_until
        self._counted_until = now
        self.unowned_seconds += seconds * self.last_plan.status.get("unownedQueues", 0)
        self.contested_seconds += seconds * (len(self._document.forced) if self._document else 0)

    def copy_at(self, now: float) -> "RebalanceTracker":
        """Update the totals to `now`, and return a copy, which a thread may read while the original changes."""
        self.count_seconds(now)
        return replace(self, rebalances=self.rebalances.copy(), _open_handovers=dict(self._open_handovers))

    def oldest_handover_seconds(self, now: float) -> float:
        """Return the age of the oldest handover in progress, in seconds; 0 without one."""
        started = [entry.revoked_at for entry in self._open_handovers.values() if entry.previous_owner]
        return now - min(started, default=now)

    def _apply_document(self, new: Assignment, now: float) -> tuple[int, int]:
        """Open and grant handovers for a new document; return how many queues change owner, and how many by force."""
        last = self._document
        self._document = new
        if last is None or last.generation == new.generation:
            return 0, 0
        if new.generation != last.generation + 1:  # recreated, or another operator wrote the documents in between
            self._open_handovers.clear()
            if new.generation < last.generation:  # the ConsumerGroup was recreated
                self.rebalances.clear()
            return 0, 0
        owned = owners_of(new)
        previous = holders_of(last)
        for queue, release in new.releasing.items():
            if queue not in last.releasing:
                self._open_handovers[queue] = _OpenHandover(release.holder, now)
        granted = {queue: owner for queue, owner in owned.items() if previous.get(queue) != owner}
        forced = {queue for queue in granted if new.forced.get(queue) == new.generation}
        for queue, owner in granted.items():
            if queue in self._open_handovers or queue not in last.releasing:  # otherwise its start is not known
                entry = self._open_handovers.setdefault(queue, _OpenHandover(previous.get(queue), now))
                entry.next_owner = owner
                entry.generation = new.generation
                entry.granted_at = now
                entry.is_forced = queue in forced
        self._drop_cancelled(owned, new.releasing)
        return len(granted.keys() & previous.keys()), len(forced)

    def _drop_cancelled(self, owned: Collection[Queue], releasing: Collection[Queue]) -> None:
        """Drop handovers of queues that went back to their holder, or that the group does not consume any more."""
        # A granted handover stays while its queue is owned, any other one while its queue is in `releasing`.
        for queue, entry in list(self._open_handovers.items()):
            if queue not in (owned if entry.next_owner else releasing):
                del self._open_handovers[queue]

    def _complete_handovers(self, obeyed_generations: Mapping[Holder, int], now: float) -> tuple[QueueHandover, ...]:
        """Remove and return completed handovers: the next owner obeys the document that grants it the queue."""
        completed: list[QueueHandover] = []
        for queue, entry in list(self._open_handovers.items()):
            if entry.next_owner and obeyed_generations.get(entry.next_owner, 0) >= entry.generation:
                del self._open_handovers[queue]
                owners = (entry.previous_owner, entry.next_owner)
                times = (entry.revoked_at, entry.granted_at, now)
                completed.append(QueueHandover(queue, *owners, *times, entry.is_forced, entry.generation))
        return tuple(completed)

    def _update_rebalance(
        self, plan: Plan, forced: int, completed: tuple[QueueHandover, ...]
    ) -> CompletedRebalance | None:
        """Update the group's last rebalance from the status; return it if this plan completed it."""
        status = plan.status.get("lastRebalance")
        if not status:
            return None
        last = self.rebalances[0] if self.rebalances else None
        if last is None or last.at != status["at"]:
            self._longest_seconds = 0.0
            self._slowest = []
            self._handover_count = 0
            plan_record = _find_plan_record(plan, status["at"])
            self._saw_start = bool(plan_record)
            generation = plan_record.get("generation", plan.status.get("generation", 0))
            message = str(plan_record.get("message", ""))
            last = Rebalance(reason=status["reason"], message=message, at=status["at"], generation=generation)
            self.rebalances.appendleft(last)
            if "seconds" in status and not plan_record:  # it completed before the first plan seen here
                self.rebalances[0] = structs.replace(last, moved=status["moved"], seconds=status["seconds"])
                return None
        if completed:
            self._handover_count += len(completed)
            handovers = [*self._slowest, *completed]
            self._slowest = nlargest(MAX_HANDOVERS, handovers, key=lambda move: (move.is_forced, move.seconds))
        seconds = status.get("seconds")
        updated = structs.replace(last, moved=status["moved"], forced=last.forced + forced, seconds=seconds)
        is_completed = last.seconds is None and "seconds" in status
        if is_completed:
            updated = structs.replace(updated, longest=round(self._longest_seconds, 3) or None)  # None: no queue moved
        self.rebalances[0] = updated
        if not is_completed:
            return None
        slowest = tuple(self._slowest)
        self._slowest = []
        return CompletedRebalance(updated, slowest, self._handover_count)


def _find_plan_record(plan: Plan, at: str) -> Mapping[str, Any]:
    """Return the journal record of a plan that started the rebalance with start time `at`; empty if it did not."""
    for record in plan.journal_records:
        if record.get("kind") == "plan" and record.get("at") == at:
            return record
    return {}
