"""Metrics of a replay: moves, pauses, idle time, duplicates, imbalance, lag."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rota.documents import Assignment
from rota.model import RETRY, Holder, Queue, Reason
from rota.pipeline.replay.group_history import STEP, GroupHistory
from rota.pipeline.replay.simulated_members import SimulatedMember
from rota.pipeline.replay.traffic import TrafficModel
from rota.planner import Plan
from rota.planner.record import holders
from rota.weight_smoothing import Weights

IN_FLIGHT = 1.0  # seconds of a queue's arrivals that a member has started and not committed
POINT = 2 * STEP  # seconds between two points of a plot

NEGLECTED = 0.01  # fraction of the time: a queue with an owner for less counts as having none
FIELDS = {"queueRooms": "machineRoomNearby.brokers"}  # a policy's fields by the option of a strategy

Row = dict[str, Any]


class ReplayMetrics:
    """Metrics that accumulate while a replay runs; the replay reports each event and each span of time."""

    def __init__(self, story: GroupHistory) -> None:
        self.story = story
        self.fluid = TrafficModel(story.arrivals, story.lag, story.begins, story.capacity)
        self.moves = self.forced = self.rebalances = 0
        self.duplicates = self.unowned = self.idle = 0.0
        self.problem: str | None = None  # why the policy cannot be used for this group
        self.series: list[Row] = []
        count = len(story.queues)
        self._places = {queue: index for index, queue in enumerate(story.queues)}
        self._workers = np.full(count, -1)
        self._owners = np.full(count, -1)
        self._there = np.zeros(count, dtype=bool)
        self._retries = np.array([queue.topic.startswith(RETRY) for queue in story.queues])
        self._weighed = np.flatnonzero(self._there)
        self._measured: Weights | None = None
        self._measured_at = -1
        self._stopped = np.full(count, np.nan)  # start of each queue's present pause; NaN: no pause
        self._pauses: list[float] = []
        self._numbers: dict[Holder, int] = {}
        self._document: Assignment | None = None
        self._holders: Mapping[Queue, Holder] = holders(story.document)
        self._members = 0
        self._sharing: list[int] = []
        self._wanted = np.zeros(count)  # seconds in which a queue existed and members could own it
        self._owned = np.zeros(count)  # seconds of `_wanted` in which the queue had an owner
        self._status: Mapping[str, Any] = {}
        self._imbalance = self._imbalanced = self._imbalance_max = 0.0

    @property
    def now(self) -> float:
        """The present virtual time."""
        return self.fluid.now

    # Events.

    def born(self, body: SimulatedMember) -> None:
        """Add a member."""
        self._numbers[body.holder] = body.number
        self._members = max(self._members, body.number + 1)

    def works(self, body: SimulatedMember) -> None:
        """Let a member consume exactly the queues that it holds; count pauses that end and duplicates."""
        is_held = np.zeros(len(self._workers), dtype=bool)
        is_held[self._at(body.held)] = True
        is_consumed = self._workers == body.number
        if np.array_equal(is_held, is_consumed):
            return
        self._stop(is_consumed & ~is_held)
        is_new = is_held & ~is_consumed
        is_taken_over = is_new & (self._workers >= 0)  # without a drain, messages in flight come again
        self._double(is_taken_over)
        is_resumed = is_new & ~np.isnan(self._stopped)
        self._pauses += (self.now - self._stopped[is_resumed]).tolist()
        self._stopped[is_new] = np.nan
        self._workers[is_new] = body.number

    def _at(self, queues: Iterable[Queue]) -> list[int]:
        return [self._places[queue] for queue in queues if queue in self._places]

    def stops(self, body: SimulatedMember, *, suddenly: bool = False) -> None:
        """Let a member stop consuming; if it stops suddenly, its messages in flight count as duplicates."""
        mine = self._workers == body.number
        if suddenly:
            self._double(mine)
        self._stop(mine)

    def _stop(self, which: Any) -> None:
        self._workers[which] = -1
        self._stopped[which] = self.now

    def _double(self, which: Any) -> None:
        self.duplicates += float(self.fluid.rates(self.now)[which].sum()) * IN_FLIGHT

    def routes(self, queues: frozenset[Queue]) -> None:
        """Set the queues that exist; pauses and lag of all other queues are dropped."""
        self._there[:] = False
        self._there[[self._places[queue] for queue in queues]] = True
        self._stopped[~self._there] = np.nan
        new = self._there & (self._workers < 0) & np.isnan(self._stopped)
        self._stopped[new] = self.now
        self.fluid.keep(self._there)
        self._weighed = np.flatnonzero(self._there & ~self._retries)
        self._measured_at = -1

    def decided(self, plan: Plan, document: Assignment, owned: Mapping[Queue, Holder]) -> None:
        """Count the changes of a plan; `owned`: the owners by the document in force after it."""
        last, rebalance = self._status.get("lastRebalance"), plan.status.get("lastRebalance")
        if rebalance and (not last or last["at"] != rebalance["at"]):
            self.rebalances += 1
        failed = (
            _policy_error(problem.message) for problem in plan.problems if problem.reason is Reason.STRATEGY_FAILED
        )
        self.problem = self.problem or next(failed, None)
        self._status = plan.status
        self._sharing = [
            number
            for holder, number in self._numbers.items()
            if plan.standings.get(holder.name) in {"Ready", "Unready"} and _is_in(document, holder)
        ]
        if plan.document:
            previous = self._holders
            self.moves += sum(queue in previous and previous[queue] != holder for queue, holder in owned.items())
            self.forced += sum(generation == document.generation for generation in document.forced.values())
        if document is not self._document:
            self._follow(document, owned)

    def _follow(self, document: Assignment, owned: Mapping[Queue, Holder]) -> None:
        """Store the owner and the holder of each queue by a new document."""
        self._document = document
        self._holders = {queue: release.holder for queue, release in document.releasing.items()} | {**owned}
        self._owners[:] = -1
        self._owners[[self._places[queue] for queue in owned]] = [
            self._numbers.get(holder, -1) for holder in owned.values()
        ]

    # Passing of time.

    def wait(self, until: float) -> None:
        """Advance to `until`, step by step because rates change with each step; add points to the plot's series."""
        while self.now < until:
            point = self.story.begins + POINT * len(self.series)
            if self.now >= point:
                self._point()
                continue
            self._pass(min(self.fluid.edge, until))

    def _pass(self, until: float) -> None:
        seconds = until - self.now
        self.unowned += seconds * self._status.get("unownedQueues", 0)
        self.idle += seconds * self._status.get("idleMembers", 0)
        if self._sharing:
            self._wanted += seconds * self._there
            self._owned += seconds * (self._there & (self._owners >= 0))
        unevenness = self._unevenness()
        if unevenness is not None:
            self._imbalance += unevenness * seconds
            self._imbalanced += seconds
            self._imbalance_max = max(self._imbalance_max, unevenness)
        self.fluid.flow(until, self._workers, self._members)

    def _point(self) -> None:
        at = datetime.fromtimestamp(self.now, UTC)
        lag = float(self.fluid.lag.sum())
        self.series.append({"at": at, "lag": lag, "imbalance": self._unevenness(), "moves": self.moves})

    def _unevenness(self) -> float | None:
        """Return the busiest member's load (the arrivals of its queues) over the mean: 1 is even, None unknown."""
        if not self._sharing:
            return None
        rates = self.fluid.rates(self.now)
        total = float(rates[self._owners >= 0].sum())
        if not total:
            return None
        loads = np.bincount(self._owners + 1, weights=rates, minlength=self._members + 1)[1:]
        return float(loads.max()) * len(self._sharing) / total

    def measured(self) -> Weights | None:
        """Return each queue's mean rate over the last hour without retry queues; None unless all rates are known."""
        step = self.fluid.step(self.now)
        if step != self._measured_at:  # rates do not change within a step
            rates = self.fluid.measured(self.now)[self._weighed]
            is_complete = len(rates) > 0 and not np.isnan(rates).any()
            queues = map(self.story.queues.__getitem__, self._weighed.tolist())
            self._measured = dict(zip(queues, rates.tolist(), strict=True)) if is_complete else None
            self._measured_at = step
        return self._measured

    def neglected(self) -> str | None:
        """Return a sentence about a queue that had no owner for nearly all of the time; None if no queue had that."""
        [places] = np.nonzero((self._wanted >= STEP) & (self._owned < NEGLECTED * self._wanted))
        if not len(places):
            return None
        queue = self.story.queues[places[0]]
        return f"Queue {queue} would be nobody's nearly all the time: the policy gives it to no member that is there"

    def row(self) -> Row:
        """Return the totals as a row of the results."""
        is_paused = self._there & ~np.isnan(self._stopped)
        pauses = [*self._pauses, *(self.now - self._stopped[is_paused]).tolist()]
        seconds = self.now - self.story.begins
        return {
            "hours": seconds / 3600,
            "changes": len(self.story.changes) - 1,
            "rebalances": self.rebalances,
            "moves": self.moves,
            "forced": self.forced,
            "pause_seconds": float(sum(pauses)),
            "pause_p99": float(np.percentile(pauses, 99)) if pauses else 0.0,
            "imbalance": self._imbalance / self._imbalanced if self._imbalanced else None,
            "imbalance_max": self._imbalance_max or None,
            "idle_member_hours": self.idle / 3600,
            "unowned_queue_seconds": self.unowned,
            "duplicates": self.duplicates,
            "lag_mean": self.fluid.waited / seconds if seconds else 0.0,
            "lag_peak": self.fluid.peak,
        }


def _policy_error(message: str) -> str:
    """Return a strategy's error for authors of policies: names of policy fields replace a strategy's own options."""
    for option, field in FIELDS.items():
        message = message.replace(f" {option}", f" spec.options.{field}")
    return message.partition("; until then ")[0]


def _is_in(document: Assignment, holder: Holder) -> bool:
    share = document.members.get(holder.name)
    return share is not None and share.uid == holder.uid
