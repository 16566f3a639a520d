"""Tracks the rebalances and handovers of one group from plan to plan, for metrics, the page and traces.

A queue's handover starts when the queue is revoked from its holder, and completes when the next owner reports that it
obeys the document that grants it. Handovers in progress at the first plan are not counted: their start is not known.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Any, NamedTuple

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
    previous_owner: Holder | None
    next_owner: Holder
    revoked_at: float
    granted_at: float
    obeyed_at: float
    is_forced: bool
    generation: int = 0  # of the document that granted it

    @property
    def seconds(self) -> float:
        """The time from the revoke until the next owner obeyed the grant."""
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
    ended_rebalance: Rebalance | None = None
    gate_reason: Reason | None = None  # the reason of a gate that began to hold queues with this plan
    completed: CompletedRebalance | None = None


@dataclass
class _OpenHandover:
    """A handover in progress."""

    previous_owner: Holder | None
    revoked_at: float
    next_owner: Holder | None = None
    generation: int = 0  # of the document that grants the queue
    granted_at: float = 0.0
    is_forced: bool = False


@dataclass
class RebalanceTracker:
    """The history of one group: recent rebalances, handovers in progress, and totals; `record_plan` updates it."""

    last_plan: Plan = field(default_factory=Plan)
    rebalances: deque[Rebalance] = field(default_factory=lambda: deque(maxlen=MAX_REBALANCES))  # newest first
    unowned_seconds: float = 0.0  # queue-seconds
    contested_seconds: float = 0.0
    _document: Assignment | None = None
    _open_handovers: dict[Queue, _OpenHandover] = field(default_factory=dict)
    _saw_start: bool = False  # whether the present rebalance began under observation
    _longest_seconds: float = 0.0  # seconds of its longest handover
    _slowest: list[QueueHandover] = field(default_factory=list)  # of the present rebalance
    _handover_count: int = 0
    _counted_until: float | None = None

    def record_plan(
        self, plan: Plan, document: Assignment | None, obeyed_generations: Mapping[Holder, int], now: float
    ) -> RebalanceChange:
        """Update the history with a plan, the stored document after it, and the generation that each member obeys."""
        is_first = self._counted_until is None
        self.count_seconds(now)
        previous = self.last_plan
        self.last_plan = replace(plan, document=None, config_map_data={}, journal_records=())
        moved, forced = self._apply_document(document, now) if document else (0, 0)
        completed = tuple(self._complete_handovers(obeyed_generations, now))
        self._longest_seconds = max(
            [self._longest_seconds, *(handover.seconds for handover in completed if handover.previous_owner)]
        )
        gate_reason = plan.hold.reason if plan.hold else None
        previous_reason = previous.hold.reason if previous.hold else None
        if is_first or gate_reason in {previous_reason, Reason.NOTHING_WOULD_CHANGE}:
            gate_reason = None
        rebalance = self._update_rebalance(plan, forced, completed)
        ended = rebalance.rebalance if rebalance and self._saw_start else None
        return RebalanceChange(moved, completed, ended, gate_reason, rebalance)

    def count_seconds(self, now: float) -> None:
        """Add the time since the last call to the queue-seconds of unowned and of contested queues."""
        seconds = now - (now if self._counted_until is None else self._counted_until)
        self._counted_until = now
        self.unowned_seconds += seconds * self.last_plan.status.get("unownedQueues", 0)
        self.contested_seconds += seconds * (len(self._document.forced) if self._document else 0)

    def copy_at(self, now: float) -> "RebalanceTracker":
        """Return a copy with its totals updated to `now`: readers use it while the original changes."""
        self.count_seconds(now)
        return replace(self, rebalances=self.rebalances.copy(), _open_handovers=dict(self._open_handovers))

    def oldest_handover_seconds(self, now: float) -> float:
        """Return the age of the oldest handover in progress, in seconds; 0 without one."""
        return max(
            (now - entry.revoked_at for entry in self._open_handovers.values() if entry.previous_owner), default=0.0
        )

    def _apply_document(self, new: Assignment, now: float) -> tuple[int, int]:
        """Open and grant handovers for a new document; return how many queues change owner, and how many by force."""
        last = self._document
        self._document = new
        if last is None or last.generation == new.generation:
            return 0, 0
        if new.generation != last.generation + 1:  # recreated, or written by another operator meanwhile
            self._open_handovers.clear()
            if new.generation < last.generation:
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
        # Drop cancelled handovers: the queue went back to its holder, or the group does not own it any more.
        self._open_handovers = {
            queue: entry
            for queue, entry in self._open_handovers.items()
            if queue in (owned if entry.next_owner else new.releasing)
        }
        return len(granted.keys() & previous.keys()), len(forced)

    def _complete_handovers(self, obeyed_generations: Mapping[Holder, int], now: float) -> Iterable[QueueHandover]:
        """Yield and remove completed handovers: the next owner obeys the document that grants it the queue."""
        for queue, entry in list(self._open_handovers.items()):
            if entry.next_owner and obeyed_generations.get(entry.next_owner, 0) >= entry.generation:
                del self._open_handovers[queue]
                yield QueueHandover(
                    queue,
                    entry.previous_owner,
                    entry.next_owner,
                    entry.revoked_at,
                    entry.granted_at,
                    now,
                    entry.is_forced,
                    entry.generation,
                )

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
            records = [
                line for line in plan.journal_records if line.get("kind") == "plan" and line.get("at") == status["at"]
            ]
            plan_record: Mapping[str, Any] = records[0] if records else {}  # empty if that plan was not seen
            self._saw_start = bool(plan_record)
            generation = plan_record.get("generation", plan.status.get("generation", 0))
            last = Rebalance(status["reason"], str(plan_record.get("message", "")), status["at"], generation)
            self.rebalances.appendleft(last)
            if "seconds" in status and not plan_record:  # it completed before the first plan seen here
                self.rebalances[0] = _updated_rebalance(last, status, 0, None)
                return None
        if completed:
            self._handover_count += len(completed)
            self._slowest = nlargest(
                MAX_HANDOVERS, [*self._slowest, *completed], key=lambda move: (move.is_forced, move.seconds)
            )
        is_completed = last.seconds is None and "seconds" in status
        longest = (round(self._longest_seconds, 3) or None) if is_completed else last.longest  # None: no queue moved
        self.rebalances[0] = _updated_rebalance(last, status, last.forced + forced, longest)
        if not is_completed:
            return None
        slowest = tuple(self._slowest)
        self._slowest = []
        return CompletedRebalance(self.rebalances[0], slowest, self._handover_count)


def _updated_rebalance(last: Rebalance, status: Mapping[str, Any], forced: int, longest: float | None) -> Rebalance:
    return Rebalance(
        last.reason, last.message, last.at, last.generation, status["moved"], forced, status.get("seconds"), longest
    )
