"""Metrics of a replay: moves, pauses, idle time, duplicates, imbalance, lag."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rota.documents import Assignment
from rota.model import RETRY_TOPIC_PREFIX, Holder, Queue, Reason
from rota.pipeline.replay.group_history import STEP_SECONDS, GroupHistory
from rota.pipeline.replay.simulated_members import SimulatedMember
from rota.pipeline.replay.traffic import TrafficModel
from rota.planner import Plan
from rota.planner.moves import STRATEGY_FAILED_SUFFIX
from rota.planner.record import holders_of
from rota.weight_smoothing import Weights

IN_FLIGHT_SECONDS = 1.0  # seconds of a queue's arrivals that a member has started and not committed
POINT_SECONDS = 2 * STEP_SECONDS  # seconds between two points of a plot

MIN_OWNED_FRACTION = 0.01  # fraction of the time: a queue with an owner for less counts as having none
POLICY_FIELDS = {"queueRooms": "machineRoomNearby.brokers"}  # a policy's fields by the option of a strategy

MetricsRow = dict[str, Any]


class ReplayMetrics:
    """Metrics that accumulate while a replay runs; the replay reports each event and each span of time."""

    def __init__(self, history: GroupHistory) -> None:
        self.history = history
        self.traffic = TrafficModel(history.arrivals, history.lag, history.begins, history.capacity)
        self.moves = self.forced = self.rebalances = 0
        self.duplicates = self.unowned_seconds = self.idle_seconds = 0.0
        self.problem: str | None = None  # why the policy cannot be used for this group
        self.series: list[MetricsRow] = []
        count = len(history.queues)
        self._queue_indexes = {queue: index for index, queue in enumerate(history.queues)}
        self._consumers = np.full(count, -1)
        self._owners = np.full(count, -1)
        self._exists = np.zeros(count, dtype=bool)
        self._is_retry = np.array([queue.topic.startswith(RETRY_TOPIC_PREFIX) for queue in history.queues])
        self._weighed_indexes = np.flatnonzero(self._exists)
        self._measured_rates: Weights | None = None
        self._measured_step = -1
        self._paused_since = np.full(count, np.nan)  # start of each queue's present pause; NaN: no pause
        self._pause_seconds: list[float] = []
        self._member_numbers: dict[Holder, int] = {}
        self._document: Assignment | None = None
        self._holders: Mapping[Queue, Holder] = holders_of(history.document)
        self._member_count = 0
        self._sharing_members: list[int] = []
        self._ownable_seconds = np.zeros(count)  # seconds in which a queue existed and members could own it
        self._owned_seconds = np.zeros(count)  # seconds of `_ownable_seconds` in which the queue had an owner
        self._status: Mapping[str, Any] = {}
        self._imbalance_sum = self._imbalance_seconds = self._imbalance_max = 0.0

    @property
    def now(self) -> float:
        """The present virtual time."""
        return self.traffic.now

    # Events.

    def add_member(self, member: SimulatedMember) -> None:
        """Add a member."""
        self._member_numbers[member.holder] = member.index
        self._member_count = max(self._member_count, member.index + 1)

    def update_consumer(self, member: SimulatedMember) -> None:
        """Let a member consume exactly the queues that it holds; count pauses that end and duplicates."""
        is_held = np.zeros(len(self._consumers), dtype=bool)
        is_held[self._indexes_of(member.held)] = True
        is_consumed = self._consumers == member.index
        if np.array_equal(is_held, is_consumed):
            return
        self._pause_queues(is_consumed & ~is_held)
        is_new = is_held & ~is_consumed
        is_taken_over = is_new & (self._consumers >= 0)  # without a drain, messages in flight come again
        self._count_duplicates(is_taken_over)
        is_resumed = is_new & ~np.isnan(self._paused_since)
        self._pause_seconds += (self.now - self._paused_since[is_resumed]).tolist()
        self._paused_since[is_new] = np.nan
        self._consumers[is_new] = member.index

    def _indexes_of(self, queues: Iterable[Queue]) -> list[int]:
        return [self._queue_indexes[queue] for queue in queues if queue in self._queue_indexes]

    def stop_consumer(self, member: SimulatedMember, *, suddenly: bool = False) -> None:
        """Let a member stop consuming; if it stops suddenly, its messages in flight count as duplicates."""
        mine = self._consumers == member.index
        if suddenly:
            self._count_duplicates(mine)
        self._pause_queues(mine)

    def _pause_queues(self, mask: Any) -> None:
        self._consumers[mask] = -1
        self._paused_since[mask] = self.now

    def _count_duplicates(self, mask: Any) -> None:
        self.duplicates += float(self.traffic.arrival_rates(self.now)[mask].sum()) * IN_FLIGHT_SECONDS

    def set_queues(self, queues: frozenset[Queue]) -> None:
        """Set the queues that exist; pauses and lag of all other queues are dropped."""
        self._exists[:] = False
        self._exists[[self._queue_indexes[queue] for queue in queues]] = True
        self._paused_since[~self._exists] = np.nan
        new = self._exists & (self._consumers < 0) & np.isnan(self._paused_since)
        self._paused_since[new] = self.now
        self.traffic.set_queues(self._exists)
        self._weighed_indexes = np.flatnonzero(self._exists & ~self._is_retry)
        self._measured_step = -1

    def record_plan(self, plan: Plan, document: Assignment, owned: Mapping[Queue, Holder]) -> None:
        """Count the changes of a plan; `owned`: the owners by the document in force after it."""
        last = self._status.get("lastRebalance")
        rebalance = plan.status.get("lastRebalance")
        if rebalance and (not last or last["at"] != rebalance["at"]):
            self.rebalances += 1
        failed = (
            _policy_error(problem.message) for problem in plan.problems if problem.reason is Reason.STRATEGY_FAILED
        )
        self.problem = self.problem or next(failed, None)
        self._status = plan.status
        self._sharing_members = [
            number
            for holder, number in self._member_numbers.items()
            if plan.member_states.get(holder.name) in {"Ready", "Unready"} and _has_share(document, holder)
        ]
        if plan.document:
            previous = self._holders
            self.moves += sum(queue in previous and previous[queue] != holder for queue, holder in owned.items())
            self.forced += sum(generation == document.generation for generation in document.forced.values())
        if document is not self._document:
            self._store_owners(document, owned)

    def _store_owners(self, document: Assignment, owned: Mapping[Queue, Holder]) -> None:
        """Store the owner and the holder of each queue by a new document."""
        self._document = document
        self._holders = {queue: release.holder for queue, release in document.releasing.items()} | {**owned}
        self._owners[:] = -1
        self._owners[[self._queue_indexes[queue] for queue in owned]] = [
            self._member_numbers.get(holder, -1) for holder in owned.values()
        ]

    # Passing of time.

    def advance_to(self, until: float) -> None:
        """Advance to `until`, step by step because rates change with each step; add points to the plot's series."""
        while self.now < until:
            point = self.history.begins + POINT_SECONDS * len(self.series)
            if self.now >= point:
                self._add_point()
                continue
            self._advance(min(self.traffic.step_end, until))

    def _advance(self, until: float) -> None:
        seconds = until - self.now
        self.unowned_seconds += seconds * self._status.get("unownedQueues", 0)
        self.idle_seconds += seconds * self._status.get("idleMembers", 0)
        if self._sharing_members:
            self._ownable_seconds += seconds * self._exists
            self._owned_seconds += seconds * (self._exists & (self._owners >= 0))
        imbalance = self._load_imbalance()
        if imbalance is not None:
            self._imbalance_sum += imbalance * seconds
            self._imbalance_seconds += seconds
            self._imbalance_max = max(self._imbalance_max, imbalance)
        self.traffic.advance_to(until, self._consumers, self._member_count)

    def _add_point(self) -> None:
        at = datetime.fromtimestamp(self.now, UTC)
        lag = float(self.traffic.lag.sum())
        self.series.append({"at": at, "lag": lag, "imbalance": self._load_imbalance(), "moves": self.moves})

    def _load_imbalance(self) -> float | None:
        """Return the busiest member's load (the arrivals of its queues) over the mean: 1 is even, None unknown."""
        if not self._sharing_members:
            return None
        rates = self.traffic.arrival_rates(self.now)
        total = float(rates[self._owners >= 0].sum())
        if not total:
            return None
        loads = np.bincount(self._owners + 1, weights=rates, minlength=self._member_count + 1)[1:]
        return float(loads.max()) * len(self._sharing_members) / total

    def measure_rates(self) -> Weights | None:
        """Return each queue's mean rate over the last hour without retry queues; None unless all rates are known."""
        step = self.traffic.step_at(self.now)
        if step != self._measured_step:  # rates do not change within a step
            rates = self.traffic.mean_rates(self.now)[self._weighed_indexes]
            is_complete = len(rates) > 0 and not np.isnan(rates).any()
            queues = map(self.history.queues.__getitem__, self._weighed_indexes.tolist())
            self._measured_rates = dict(zip(queues, rates.tolist(), strict=True)) if is_complete else None
            self._measured_step = step
        return self._measured_rates

    def find_neglected_queue(self) -> str | None:
        """Return a sentence about a queue that had no owner for nearly all of the time; None if no queue had that."""
        [neglected] = np.nonzero(
            (self._ownable_seconds >= STEP_SECONDS) & (self._owned_seconds < MIN_OWNED_FRACTION * self._ownable_seconds)
        )
        if not len(neglected):
            return None
        queue = self.history.queues[neglected[0]]
        return f"Queue {queue} would have no owner nearly all the time: the policy assigns it to no present member"

    def to_row(self) -> MetricsRow:
        """Return the totals as a row of the results."""
        is_paused = self._exists & ~np.isnan(self._paused_since)
        pauses = [*self._pause_seconds, *(self.now - self._paused_since[is_paused]).tolist()]
        seconds = self.now - self.history.begins
        return {
            "hours": seconds / 3600,
            "changes": len(self.history.changes) - 1,
            "rebalances": self.rebalances,
            "moves": self.moves,
            "forced": self.forced,
            "pause_seconds": float(sum(pauses)),
            "pause_p99": float(np.percentile(pauses, 99)) if pauses else 0.0,
            "imbalance": self._imbalance_sum / self._imbalance_seconds if self._imbalance_seconds else None,
            "imbalance_max": self._imbalance_max or None,
            "idle_member_hours": self.idle_seconds / 3600,
            "unowned_queue_seconds": self.unowned_seconds,
            "duplicates": self.duplicates,
            "lag_mean": self.traffic.lag_seconds / seconds if seconds else 0.0,
            "lag_peak": self.traffic.peak_lag,
        }


def _policy_error(message: str) -> str:
    """Return a strategy's error for authors of policies: names of policy fields replace a strategy's own options."""
    for option, field in POLICY_FIELDS.items():
        message = message.replace(f" {option}", f" spec.options.{field}")
    return message.removesuffix(STRATEGY_FAILED_SUFFIX)


def _has_share(document: Assignment, holder: Holder) -> bool:
    share = document.members.get(holder.name)
    return share is not None and share.uid == holder.uid
