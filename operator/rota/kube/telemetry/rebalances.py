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
from rota.planner.record import holders, owners

KEPT = 20  # rebalances kept for each group
SLOWEST = 200  # handovers kept for one rebalance


class QueueHandover(NamedTuple):
    """A completed handover of a queue; times are seconds on the event loop's clock."""

    queue: Queue
    before: Holder | None
    after: Holder
    revoked: float
    granted: float
    obeyed: float
    forced: bool
    generation: int = 0  # of the document that granted it

    @property
    def seconds(self) -> float:
        """The time from the revoke until the next owner obeyed the grant."""
        return self.obeyed - self.revoked


class CompletedRebalance(NamedTuple):
    """A completed rebalance and its handovers, for a trace; it may have begun before the first plan seen here."""

    rebalance: Rebalance
    slowest: tuple[QueueHandover, ...]  # at most SLOWEST: forced handovers first, then the longest
    handed: int  # number of all its handovers


class RebalanceChange(NamedTuple):
    """What one plan changed, for the metrics and the journal."""

    moved: int = 0
    handovers: tuple[QueueHandover, ...] = ()
    ended: Rebalance | None = None
    held: Reason | None = None  # the reason of a gate that began to hold queues with this plan
    past: CompletedRebalance | None = None


@dataclass
class _OpenRebalance:
    """A handover in progress."""

    before: Holder | None
    revoked: float
    after: Holder | None = None
    generation: int = 0  # of the document that grants the queue
    granted: float = 0.0
    forced: bool = False


@dataclass
class RebalanceTracker:
    """The history of one group: recent rebalances, handovers in progress, and totals; `take` updates it."""

    plan: Plan = field(default_factory=Plan)
    rebalances: deque[Rebalance] = field(default_factory=lambda: deque(maxlen=KEPT))  # newest first
    unowned: float = 0.0  # queue-seconds
    contested: float = 0.0
    _document: Assignment | None = None
    _open: dict[Queue, _OpenRebalance] = field(default_factory=dict)
    _began: bool = False  # whether the present rebalance began under observation
    _longest: float = 0.0  # seconds of its longest handover
    _slowest: list[QueueHandover] = field(default_factory=list)  # of the present rebalance
    _handed: int = 0
    _at: float | None = None

    def take(
        self, plan: Plan, document: Assignment | None, obeyed: Mapping[Holder, int], now: float
    ) -> RebalanceChange:
        """Update the history with a plan, the stored document after it, and the generation that each member obeys."""
        begun = self._at is not None
        self.wait(now)
        previous, self.plan = self.plan, replace(plan, document=None, data={}, records=())
        moved, forced = self._follow(document, now) if document else (0, 0)
        completed = tuple(self._over(obeyed, now))
        self._longest = max([self._longest, *(handover.seconds for handover in completed if handover.before)])
        held = plan.held.reason if plan.held else None
        newly_held = held if begun and held != (previous.held.reason if previous.held else None) else None
        past = self._rebalance(plan, forced, completed)
        ended = past.rebalance if past and self._began else None
        return RebalanceChange(
            moved, completed, ended, None if newly_held is Reason.NOTHING_WOULD_CHANGE else newly_held, past
        )

    def wait(self, now: float) -> None:
        """Add the time since the last call to the queue-seconds of unowned and of contested queues."""
        seconds, self._at = now - (now if self._at is None else self._at), now
        self.unowned += seconds * self.plan.status.get("unownedQueues", 0)
        self.contested += seconds * (len(self._document.forced) if self._document else 0)

    def seen(self, now: float) -> "RebalanceTracker":
        """Return a copy with its totals updated to `now`: readers use it while the original changes."""
        self.wait(now)
        return replace(self, rebalances=self.rebalances.copy(), _open=dict(self._open))

    def oldest(self, now: float) -> float:
        """Return the age of the oldest handover in progress, in seconds; 0 without one."""
        return max((now - entry.revoked for entry in self._open.values() if entry.before), default=0.0)

    def _follow(self, new: Assignment, now: float) -> tuple[int, int]:
        """Open and grant handovers for a new document; return how many queues change owner, and how many by force."""
        last, self._document = self._document, new
        if last is None or last.generation == new.generation:
            return 0, 0
        if new.generation != last.generation + 1:  # recreated, or written by another operator meanwhile
            self._open.clear()
            if new.generation < last.generation:
                self.rebalances.clear()
            return 0, 0
        owned, previous = owners(new), holders(last)
        for queue, release in new.releasing.items():
            if queue not in last.releasing:
                self._open[queue] = _OpenRebalance(release.holder, now)
        granted = {queue: owner for queue, owner in owned.items() if previous.get(queue) != owner}
        forced = {queue for queue in granted if new.forced.get(queue) == new.generation}
        for queue, owner in granted.items():
            if queue in self._open or queue not in last.releasing:  # otherwise its start is not known
                entry = self._open.setdefault(queue, _OpenRebalance(previous.get(queue), now))
                entry.after, entry.generation, entry.granted, entry.forced = owner, new.generation, now, queue in forced
        # Drop cancelled handovers: the queue went back to its holder, or the group does not own it any more.
        self._open = {
            queue: entry for queue, entry in self._open.items() if queue in (owned if entry.after else new.releasing)
        }
        return len(granted.keys() & previous.keys()), len(forced)

    def _over(self, obeyed: Mapping[Holder, int], now: float) -> Iterable[QueueHandover]:
        """Yield and remove completed handovers: the next owner obeys the document that grants it the queue."""
        for queue, entry in list(self._open.items()):
            if entry.after and obeyed.get(entry.after, 0) >= entry.generation:
                del self._open[queue]
                yield QueueHandover(
                    queue, entry.before, entry.after, entry.revoked, entry.granted, now, entry.forced, entry.generation
                )

    def _rebalance(self, plan: Plan, forced: int, finished: tuple[QueueHandover, ...]) -> CompletedRebalance | None:
        """Update the group's last rebalance from the status; return it if this plan completed it."""
        status = plan.status.get("lastRebalance")
        if not status:
            return None
        last = self.rebalances[0] if self.rebalances else None
        if last is None or last.at != status["at"]:
            self._longest, self._slowest, self._handed = 0.0, [], 0
            records = [line for line in plan.records if line.get("kind") == "plan" and line.get("at") == status["at"]]
            plan_record: Mapping[str, Any] = records[0] if records else {}  # empty if that plan was not seen
            self._began = bool(plan_record)
            generation = plan_record.get("generation", plan.status.get("generation", 0))
            last = Rebalance(status["reason"], str(plan_record.get("message", "")), status["at"], generation)
            self.rebalances.appendleft(last)
            if "seconds" in status and not plan_record:  # it completed before the first plan seen here
                self.rebalances[0] = _updated_rebalance(last, status, 0, None)
                return None
        if finished:
            self._handed += len(finished)
            self._slowest = nlargest(SLOWEST, [*self._slowest, *finished], key=lambda move: (move.forced, move.seconds))
        ended = last.seconds is None and "seconds" in status
        longest = (round(self._longest, 3) or None) if ended else last.longest  # None: no queue changed hands
        self.rebalances[0] = _updated_rebalance(last, status, last.forced + forced, longest)
        if not ended:
            return None
        past, self._slowest = CompletedRebalance(self.rebalances[0], tuple(self._slowest), self._handed), []
        return past


def _updated_rebalance(last: Rebalance, status: Mapping[str, Any], forced: int, longest: float | None) -> Rebalance:
    return Rebalance(
        last.reason, last.message, last.at, last.generation, status["moved"], forced, status.get("seconds"), longest
    )
