"""Discrete-event simulation of one group's history in virtual time: the planner is real, the members are simulated.

    changes of the history ──> pods ────────┐
    arrival rates of the traffic model ─────┤
    reports of simulated members ───────────┴─> plan(snapshot, now) ──> document ──> members obey, drain, consume

A replay shows what a policy would have cost on a recorded history. A *document* is an assignment.

The planner runs after each event and, while a handover or a gate is pending, at the time that its last plan requested.
At other times it would return the same plan. Under a Balanced policy, queue weights are measured at every step and
filtered as in the operator: they change only when a member's load has clearly changed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

from rota.documents import Assignment
from rota.model import Holder, Queue, Reason
from rota.pipeline.replay.group_history import STEP_SECONDS, Change, GroupHistory
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.replay.simulated_fleet import SimulatedFleet
from rota.pipeline.replay.simulated_members import FOREVER_SECONDS, SimulatedMember
from rota.pipeline.replay.virtual_clock import VirtualClock
from rota.planner import Plan, QueueView, Snapshot, plan
from rota.planner.record import owners_of
from rota.spec import PolicySpec
from rota.weight_noise import Weights, filter_noise

MIN_REPLAN_SECONDS = 0.05  # the shortest delay before the next plan
# After so many plans without a change of the history, the planner will not settle, so no further plan is scheduled.
MAX_PLANS_PER_CHANGE = 5_000

WEIGHT_STRATEGY = "Balanced"  # the strategy that uses queue weights
NO_WEIGHTS: Weights = {}

# Gates that time alone does not open, so another plan would have the same result.
GATES_WITHOUT_TIMER = {
    Reason.NOTHING_WOULD_CHANGE,
    Reason.PAUSED,
    Reason.INVALID_POLICY,
    Reason.BROKER_METADATA_UNAVAILABLE,
}


class Replay:
    """Replay of a history under `policy` or, if it is None, under the policies recorded in the history."""

    def __init__(self, history: GroupHistory, policy: PolicySpec | None, metrics: ReplayMetrics) -> None:
        self.history = history
        self.metrics = metrics
        self.clock = VirtualClock(history.begins, metrics.advance_to)
        self.fleet = SimulatedFleet(self.clock, metrics, self._schedule_member_event, self.on_obeyed)
        self.document: Assignment = history.document
        self.owned: Mapping[Queue, Holder] = owners_of(history.document)
        self.status: Mapping[str, Any] = {}
        self._policy = policy
        self._current_change = history.changes[0]
        self._queue_views: dict[str, QueueView | None] = {}
        self._queues: frozenset[Queue] = frozenset()
        self._next_plan_at = inf
        self._filtered_weights: Weights = {}
        self._planned_weights: Weights | None = {}  # the weights of the last snapshot; None: unknown
        self._plans_since_change = 0
        self._pending_events = 0  # scheduled events in which members obey or finish a drain

    @property
    def now(self) -> float:
        """The present virtual time."""
        return self.clock.now

    @property
    def policy(self) -> PolicySpec:
        """The policy in force now."""
        return self._policy or self._current_change.policy

    def run(self) -> None:
        """Run the replay to the end of the history."""
        for change in self.history.changes:
            self.clock.schedule(change.at, partial(self._apply_change, change))
        strategies = {(self._policy or change.policy).strategy for change in self.history.changes}
        if WEIGHT_STRATEGY in strategies:
            for step in range(1, self.history.step_count):
                self.clock.schedule(self.history.begins + step * STEP_SECONDS, self._on_step)
        self.clock.run_until(self.history.ends)

    def _apply_change(self, change: Change) -> None:
        """Apply a change of members, queues or policy, then plan."""
        self._current_change = change
        self._plans_since_change = 0
        self.fleet.apply_presences(change.members, self.document)
        if change.queues != self._queues:
            self._set_queues(change.queues)
        self._run_plan()

    def _set_queues(self, queues: frozenset[Queue]) -> None:
        self._queues = queues
        topics: dict[str, list[Queue]] = {}
        for subscription in self.history.spec.subscriptions:
            topics[subscription.topic] = []
        for queue in sorted(queues):
            topics.setdefault(queue.topic, []).append(queue)
        self._queue_views = {}
        for topic, routed in topics.items():
            self._queue_views[topic] = QueueView(tuple(routed), stable_for=FOREVER_SECONDS)
        self.metrics.set_queues(queues)

    # Times of plans.

    def _schedule_member_event(self, seconds: float, callback: Callable[[], None]) -> None:
        """Schedule an event that changes members' reports: that they obey a document, or end a drain.

        The event schedules a plan, unless every holder of a revoked queue is still draining. Then a plan would change
        nothing, and the event that ends the first of these drains schedules a plan.
        """
        self._pending_events += 1

        def run_event() -> None:
            self._pending_events -= 1
            callback()
            if not self.fleet.is_only_draining(self.document):
                self._schedule_plan()

        self.clock.schedule(self.now + seconds, run_event)

    def _schedule_plan(self, delay: float = 0.0) -> None:
        """Schedule a plan after a delay in seconds, unless one is scheduled for the same time or earlier."""
        at = self.now + delay
        if at < self._next_plan_at:
            self._next_plan_at = at
            self.clock.schedule(at, partial(self._run_scheduled_plan, at))

    def _run_scheduled_plan(self, at: float) -> None:
        if at == self._next_plan_at:  # otherwise a plan has run since, or is scheduled for another time
            self._run_plan()

    def _schedule_next_plan(self, new_plan: Plan) -> None:
        """Schedule the next plan if time alone may change its result, unless a pending event will schedule one."""
        # A gate postpones moves of the plan (`hold`), and opens with time.
        is_gated = new_plan.hold is not None and new_plan.hold.reason not in GATES_WITHOUT_TIMER
        # Without a time limit, the planner requests the next plan only for the resync.
        has_time_limit = new_plan.requeue_after < self.policy.triggers.resync
        may_change = is_gated or self.document.releasing or has_time_limit
        self._plans_since_change += 1
        if may_change and not self._pending_events and self._plans_since_change < MAX_PLANS_PER_CHANGE:
            self._schedule_plan(max(new_plan.requeue_after, MIN_REPLAN_SECONDS))

    def _on_step(self) -> None:
        """Measure queue weights, and plan if the filtered weights have changed."""
        if self._measure_weights() is not self._planned_weights:  # unchanged weights are the same object
            self._run_plan()

    # Plans.

    def _measure_weights(self) -> Weights | None:
        """Return filtered queue weights as in the operator: None while unknown, empty if the strategy uses none."""
        if self.policy.strategy != WEIGHT_STRATEGY:
            return NO_WEIGHTS
        rates = self.metrics.measure_rates()
        if rates is None:
            return None
        owner_names = {queue: holder.name for queue, holder in self.owned.items()}
        self._filtered_weights = filter_noise(self._filtered_weights, rates, owner_names)
        return self._filtered_weights

    def _run_plan(self) -> None:
        self._next_plan_at = inf  # so a plan that is scheduled will not run, see `_run_scheduled_plan`
        self._planned_weights = self._measure_weights()
        new_plan = plan(self.snapshot(), self.now)
        previous = self.document
        self.status = new_plan.status
        if new_plan.document:
            self.document = new_plan.document
            self.owned = owners_of(new_plan.document)
        self.metrics.record_plan(new_plan, self.document, self.owned)
        self.on_planned(new_plan, previous)
        self.fleet.set_pokes(new_plan.pokes)
        if new_plan.document:
            self.fleet.follow_document(new_plan.document)
        self._schedule_next_plan(new_plan)

    def snapshot(self) -> Snapshot:
        """Return the group's present state as the planner's input."""
        return Snapshot(
            group=self.history.group,
            spec=self.history.spec,
            policy=self.policy,
            document=self.document,
            refetched=True,
            pods=self.fleet.to_pods(),
            deleted_uids=self.fleet.deleted_uids,
            views=self._queue_views,
            queue_weights=self._planned_weights,
            status=self.status,
        )

    # Hooks for a subclass that writes a journal; they do nothing here.

    def on_planned(self, new_plan: Plan, previous: Assignment) -> None:
        """Called after each plan; `document` and `owned` are already those of the plan, `previous` the one before."""

    def on_obeyed(self, member: SimulatedMember) -> None:
        """Called after a member has obeyed a document."""
