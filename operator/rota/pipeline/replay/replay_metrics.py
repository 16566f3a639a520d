"""Metrics of a replay: moves, pauses, idle time, duplicates, imbalance, lag.

A *replay* simulates a policy on a group's recorded history. It reports each plan and each advance of the virtual time;
`to_row` returns the totals as a row of RESULTS. A *document* is an assignment.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rota.documents import Assignment
from rota.model import RETRY_TOPIC_PREFIX, Holder, Queue, Reason
from rota.pipeline.replay.consumer_tracker import ConsumerTracker
from rota.pipeline.replay.group_history import STEP_SECONDS, GroupHistory, index_queues
from rota.pipeline.replay.simulated_members import SimulatedMember
from rota.pipeline.replay.traffic import TrafficModel
from rota.planner import Plan
from rota.planner.moves import STRATEGY_FAILED_SUFFIX
from rota.planner.record import holders_of
from rota.weight_noise import Weights

# A queue is neglected if it has an owner for less than this fraction of the time in which it could have one.
MIN_OWNED_FRACTION = 0.01
POINT_SECONDS = 2 * STEP_SECONDS  # seconds between two points of a plot
# In a strategy's error, the name of this option is replaced by the field of the policy that sets it.
POLICY_FIELDS = {"queueRooms": "machineRoomNearby.brokers"}
COUNTED_STATES = {"Ready", "Unready"}  # states of counted members, which are given queues

MetricsRow = dict[str, Any]


class ReplayMetrics:
    """Metrics that accumulate while a replay runs."""

    def __init__(self, history: GroupHistory) -> None:
        self.history = history
        self.traffic = TrafficModel(history.arrivals, history.lag, history.begins, history.capacity)
        self.consumer_tracker = ConsumerTracker(history.queues, self.traffic)
        self.moves = 0
        self.forced_grants = 0
        self.rebalances = 0
        self.unowned_seconds = 0.0
        self.idle_seconds = 0.0
        self.problem: str | None = None  # why the policy cannot be used for this group
        self.series: list[MetricsRow] = []
        self._index_of_queue = index_queues(history.queues)
        self._member_numbers: dict[Holder, int] = {}
        self._member_count = 0
        self._counted_members = 0  # number of counted members, by the last plan
        self._owners = np.full(len(history.queues), -1)  # by queue the number of the member that owns it; -1: none
        # By queue: seconds in which it existed and the group had counted members, so that it could have an owner.
        self._ownable_seconds = np.zeros(len(history.queues))
        self._owned_seconds = np.zeros(len(history.queues))  # the part of `_ownable_seconds` with an owner
        self._imbalance_sum = 0.0
        self._imbalance_seconds = 0.0
        self._imbalance_max = 0.0
        self._document: Assignment | None = None
        self._holders: Mapping[Queue, Holder] = holders_of(history.document)
        self._status: Mapping[str, Any] = {}
        self._is_retry = np.array([queue.topic.startswith(RETRY_TOPIC_PREFIX) for queue in history.queues])
        # Indexes of the queues that exist, without retry queues; none exists before the first `set_queues`.
        self._weighed_indexes = np.flatnonzero(self.consumer_tracker.exists)
        self._measured_rates: Weights | None = None
        self._measured_step = -1  # the step of `_measured_rates`; -1: not measured
        self._imbalance: float | None = None
        self._imbalance_step = -1  # the step of `_imbalance`; -1: not computed

    # Events.

    def add_member(self, member: SimulatedMember) -> None:
        """Add a member."""
        self._member_numbers[member.holder] = member.index
        self._member_count = max(self._member_count, member.index + 1)

    def set_queues(self, queues: Iterable[Queue]) -> None:
        """Set the queues that exist; pauses and lag of all other queues are dropped."""
        self.consumer_tracker.set_queues(queues)
        self.traffic.set_queues(self.consumer_tracker.exists)
        self._weighed_indexes = np.flatnonzero(self.consumer_tracker.exists & ~self._is_retry)
        self._measured_step = -1
        self._imbalance_step = -1

    def record_plan(self, plan: Plan, document: Assignment, owned: Mapping[Queue, Holder]) -> None:
        """Count the changes of a plan; `document`: the one in force after the plan, `owned`: its owners."""
        last = self._status.get("lastRebalance")
        rebalance = plan.status.get("lastRebalance")
        if rebalance and (not last or last["at"] != rebalance["at"]):
            self.rebalances += 1
        for problem in plan.problems:
            if problem.reason is Reason.STRATEGY_FAILED and not self.problem:
                self.problem = _policy_error(problem.message)
        self._status = plan.status
        self._counted_members = self._count_members(plan, document)
        self._imbalance_step = -1
        if plan.document:
            # `_holders` are still the previous ones. A queue without a previous holder is assigned, not moved.
            self.moves += sum(self._holders.get(queue, holder) != holder for queue, holder in owned.items())
            # `forced` has the generation of each queue's forced grant.
            self.forced_grants += list(document.forced.values()).count(document.generation)
        if document is not self._document:
            self._document = document
            self._holders = holders_of(document)
            self._owners[:] = -1
            for queue, holder in owned.items():
                self._owners[self._index_of_queue[queue]] = self._member_numbers.get(holder, -1)

    def _count_members(self, plan: Plan, document: Assignment) -> int:
        """Count the counted members of a plan that have an entry in the document and are pods of this replay."""
        count = 0
        for name, share in document.members.items():
            is_counted = plan.member_states.get(name) in COUNTED_STATES
            if is_counted and Holder(name, share.uid) in self._member_numbers:
                count += 1
        return count

    # Passing of time.

    def advance_to(self, until: float) -> None:
        """Advance to `until`, step by step because rates change with each step; add points to the plot's series."""
        while self.traffic.now < until:
            point = self.history.begins + POINT_SECONDS * len(self.series)
            if self.traffic.now >= point:
                self._add_point()
                continue  # the next point may be due, too
            self._advance(min(self.traffic.step_end, until))

    def _advance(self, until: float) -> None:
        seconds = until - self.traffic.now
        self.unowned_seconds += seconds * self._status.get("unownedQueues", 0)
        self.idle_seconds += seconds * self._status.get("idleMembers", 0)
        if self._counted_members:
            self._ownable_seconds += seconds * self.consumer_tracker.exists
            self._owned_seconds += seconds * (self.consumer_tracker.exists & (self._owners >= 0))
        imbalance = self._load_imbalance()
        if imbalance is not None:
            self._imbalance_sum += imbalance * seconds
            self._imbalance_seconds += seconds
            self._imbalance_max = max(self._imbalance_max, imbalance)
        self.traffic.advance_to(until, self.consumer_tracker.consumers, self._member_count)

    def _add_point(self) -> None:
        at = datetime.fromtimestamp(self.traffic.now, UTC)
        imbalance = self._load_imbalance()
        self.series.append({"at": at, "lag": self.traffic.total_lag, "imbalance": imbalance, "moves": self.moves})

    def _load_imbalance(self) -> float | None:
        """Return the load of the busiest member divided by the mean load: 1 means even; None: unknown."""
        step = self.traffic.step_at(self.traffic.now)
        if step != self._imbalance_step:  # cached within a step; `record_plan` and `set_queues` invalidate it by -1
            self._imbalance = self._compute_imbalance()
            self._imbalance_step = step
        return self._imbalance

    def _compute_imbalance(self) -> float | None:
        if not self._counted_members:
            return None
        rates = self.traffic.arrival_rates(self.traffic.now)
        total = float(rates[self._owners >= 0].sum())
        if not total:
            return None
        # A member's load is the sum of its queues' rates. Index 0 collects the queues without an owner (-1).
        load_by_owner = np.bincount(self._owners + 1, weights=rates, minlength=self._member_count + 1)
        return float(load_by_owner[1:].max()) * self._counted_members / total

    def measure_rates(self) -> Weights | None:
        """Return each queue's mean rate over the last hour without retry queues; None unless all rates are known."""
        step = self.traffic.step_at(self.traffic.now)
        if step != self._measured_step:  # rates do not change within a step
            rates = self.traffic.mean_rates(self.traffic.now)[self._weighed_indexes]
            is_complete = len(rates) > 0 and not np.isnan(rates).any()
            queues = map(self.history.queues.__getitem__, self._weighed_indexes.tolist())
            self._measured_rates = dict(zip(queues, rates.tolist(), strict=True)) if is_complete else None
            self._measured_step = step
        return self._measured_rates

    # Results.

    def find_neglected_queue(self) -> str | None:
        """Return a sentence about a queue that had no owner for nearly all of the time; None without such a queue."""
        min_owned_seconds = MIN_OWNED_FRACTION * self._ownable_seconds
        is_neglected = (self._ownable_seconds >= STEP_SECONDS) & (self._owned_seconds < min_owned_seconds)
        if not is_neglected.any():
            return None
        queue = self.history.queues[int(is_neglected.argmax())]
        return f"Queue {queue} would have no owner nearly all the time: the policy assigns it to no present member"

    def to_row(self) -> MetricsRow:
        """Return the totals as a row of the results."""
        pauses = self.consumer_tracker.pause_seconds()
        seconds = self.traffic.now - self.history.begins
        return {
            "hours": seconds / 3600,
            "changes": len(self.history.changes) - 1,  # the first one is the state at the start
            "rebalances": self.rebalances,
            "moves": self.moves,
            "forced": self.forced_grants,
            "pause_seconds": float(sum(pauses)),
            "pause_p99": float(np.percentile(pauses, 99)) if pauses else 0.0,
            "imbalance": self._imbalance_sum / self._imbalance_seconds if self._imbalance_seconds else None,
            "imbalance_max": self._imbalance_max or None,
            "idle_member_hours": self.idle_seconds / 3600,
            "unowned_queue_seconds": self.unowned_seconds,
            "duplicates": self.consumer_tracker.duplicates,
            "lag_mean": self.traffic.lag_seconds / seconds if seconds else 0.0,
            "lag_peak": self.traffic.peak_lag,
        }


def _policy_error(message: str) -> str:
    """Return a strategy's error with the names of policy fields, and without the planner's suffix about the owners."""
    for option, field in POLICY_FIELDS.items():
        message = message.replace(f" {option}", f" spec.options.{field}")
    return message.removesuffix(STRATEGY_FAILED_SUFFIX)
