"""Discrete-event simulation of one group's history in virtual time: the planner is real, the members are simulated.

    changes of the history ──> pods ────────┐
    arrival rates of the traffic model ─────┤
    reports of simulated members ───────────┴─> plan(snapshot, now) ──> document ──> members obey, drain, consume

The planner runs after each event and, while a handover or a gate is pending, at the time that its last plan requested.
Otherwise it does not run: it would return the same plan. Under a Balanced policy, queue weights are measured at every
step and smoothed as in the operator: they change only when a member's load has clearly changed.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from rota.documents import Assignment
from rota.model import Holder, Queue, Reason
from rota.pipeline.replay.group_history import STEP_SECONDS, Change, GroupHistory
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.replay.simulated_members import AWAY_STATES, FOREVER_SECONDS, SimulatedMember
from rota.planner import Plan, QueueView, Snapshot, plan
from rota.planner.record import owners_of
from rota.spec import PolicySpec
from rota.weight_smoothing import Weights, filter_noise

OBEY_SECONDS = 0.3  # seconds from the write of a document until members obey it
DRAIN_SECONDS = 0.2  # seconds that a member needs to finish the messages that it has started
MIN_REPLAN_SECONDS = 0.05  # seconds: the shortest delay before the next plan
# Plans since the last change; after that many the planner will not settle, so no more are scheduled.
MAX_PLANS_PER_CHANGE = 5_000

WEIGHT_STRATEGY = "Balanced"  # the strategy that uses queue weights
NO_WEIGHTS: Weights = {}

# Gates that time alone does not open: another plan would give the same result.
GATES_WITHOUT_TIMER = {
    Reason.NOTHING_WOULD_CHANGE,
    Reason.PAUSED,
    Reason.INVALID_POLICY,
    Reason.BROKER_METADATA_UNAVAILABLE,
}


class Replay:
    """Replay of a history under `policy`; if that is None, under the policies recorded in the history."""

    def __init__(self, history: GroupHistory, policy: PolicySpec | None, metrics: ReplayMetrics) -> None:
        self.history = history
        self.metrics = metrics
        self.now = history.begins
        self.document: Assignment = history.document
        self.owned: Mapping[Queue, Holder] = owners_of(history.document)
        self.status: Mapping[str, Any] = {}
        self.members: dict[str, SimulatedMember] = {}
        self.deleted_uids: frozenset[str] = frozenset()
        self._policy = policy
        self._current_change = history.changes[0]
        self._queue_views: dict[str, QueueView | None] = {}
        self._queues: frozenset[Queue] = frozenset()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_numbers = count()
        self._member_numbers = count()
        self._next_plan_at = inf
        self._smoothed_weights: Weights = {}  # the last smoothed weights
        self._planned_weights: Weights | None = {}  # the weights of the last snapshot
        self._plans_since_change = 0  # since the last change
        self._pending_events = 0  # scheduled events in which members obey or finish a drain

    @property
    def policy(self) -> PolicySpec:
        """The policy in force now."""
        return self._policy or self._current_change.policy

    def run(self) -> None:
        """Run the replay to the end of the history."""
        for change in self.history.changes:
            self.schedule(change.at, partial(self._apply_change, change))
        if any((self._policy or change.policy).strategy == WEIGHT_STRATEGY for change in self.history.changes):
            for step in range(1, self.history.step_count):
                self.schedule(self.history.begins + step * STEP_SECONDS, self._on_step)
        while self._events and self._events[0][0] <= self.history.ends:
            at, _, callback = heappop(self._events)
            self._advance_to(at)
            callback()
        self._advance_to(self.history.ends)

    def schedule(self, at: float, callback: Callable[[], None]) -> None:
        """Schedule a callback at a virtual time; callbacks of the same time run in the order of their calls."""
        heappush(self._events, (at, next(self._event_numbers), callback))

    def _advance_to(self, at: float) -> None:
        if at > self.now:
            self.metrics.advance_to(at)
            self.now = at

    # Events.

    def _apply_change(self, change: Change) -> None:
        """Apply a change of pods, queues or policy, then plan."""
        self._current_change = change
        self._plans_since_change = 0
        first = self.now == self.history.begins and not self.members
        for name, presence in change.members.items():
            member = self.members.get(name)
            if member and member.uid != presence.uid:
                self._end_member(member)
                member = None
            if member is None:
                created_at = -FOREVER_SECONDS if first else self.now
                member = SimulatedMember(
                    name,
                    presence.uid,
                    next(self._member_numbers),
                    presence.state,
                    presence.room,
                    created_at,
                    created_at,
                )
                self.members[name] = member
                self.metrics.add_member(member)
                if first:
                    self._resume_member(member)
            else:
                self._set_member_state(member, presence.state, presence.room)
        for name in self.members.keys() - change.members.keys():
            self._end_member(self.members[name])
        self._set_queues(change.queues)
        self._run_plan()

    def _resume_member(self, member: SimulatedMember) -> None:
        """Let a member that exists at the start of the history obey the history's first document."""
        share = self.document.members.get(member.name)
        if share and share.uid == member.uid and member.state != "Ended":
            revoked = [queue for queue, release in self.document.releasing.items() if release.holder == member.holder]
            member.obey(self.document.generation - bool(revoked), (*share.queues, *revoked))
            if member.may_consume:
                self.metrics.update_consumer(member)
            if member.may_obey and revoked:
                self._schedule_member_event(OBEY_SECONDS, partial(self._obey_document, member, self.document))
        if member.state == "Leaving":
            self._schedule_member_event(DRAIN_SECONDS, partial(self._finish_drain, member, is_final=True))

    def _set_member_state(self, member: SimulatedMember, state: str, room: str | None) -> None:
        previous = member.state
        member.set_state(state, room, self.now)
        if state == previous:
            return
        if state in AWAY_STATES:
            self.metrics.stop_consumer(member, suddenly=not member.has_drained)
        elif state == "Leaving":
            self.metrics.stop_consumer(member)
            self._schedule_member_event(DRAIN_SECONDS, partial(self._finish_drain, member, is_final=True))
        elif previous in AWAY_STATES or previous == "Joining":  # it reads the document that was written meanwhile
            self._schedule_member_event(
                OBEY_SECONDS, partial(self._obey_document, member, self.document, is_repeat=True)
            )

    def _end_member(self, member: SimulatedMember) -> None:
        self.metrics.stop_consumer(member, suddenly=member.state not in AWAY_STATES and not member.has_drained)
        self.deleted_uids |= {member.uid}
        del self.members[member.name]
        member.set_state("Ended", member.room, self.now)

    def _set_queues(self, queues: frozenset[Queue]) -> None:
        if queues == self._queues:
            return
        self._queues = queues
        topics: dict[str, list[Queue]] = {topic.topic: [] for topic in self.history.spec.subscriptions}
        for queue in sorted(queues):
            topics.setdefault(queue.topic, []).append(queue)
        self._queue_views = {topic: QueueView(tuple(routed), FOREVER_SECONDS) for topic, routed in topics.items()}
        self.metrics.set_queues(queues)

    def _obey_document(self, member: SimulatedMember, document: Assignment, *, is_repeat: bool = False) -> None:
        """Let a member obey a document, unless it cannot or has a newer one; `is_repeat`: even if it has obeyed it."""
        can_obey = self.members.get(member.name) is member and member.may_obey
        if not can_obey or member.generation + (not is_repeat) > document.generation:
            return
        share = document.members.get(member.name)
        queues = share.queues if share and share.uid == member.uid else ()
        if member.obey(document.generation, queues):
            self._schedule_member_event(DRAIN_SECONDS, partial(self._finish_drain, member))
        if member.may_consume:
            self.metrics.update_consumer(member)
        self.on_obeyed(member)

    def _finish_drain(self, member: SimulatedMember, *, is_final: bool = False) -> None:
        if self.members.get(member.name) is member:
            member.finish_drain(is_final=is_final)

    # Plans.

    def _schedule_member_event(self, seconds: float, callback: Callable[[], None]) -> None:
        """Schedule an event that changes members' reports; after it a plan is due, unless only drains are pending."""
        self._pending_events += 1

        def run_event() -> None:
            self._pending_events -= 1
            callback()
            if not self._is_only_draining():
                self._schedule_plan()

        self.schedule(self.now + seconds, run_event)

    def _is_only_draining(self) -> bool:
        """Whether every holder of a revoked queue is draining: until one of them ends, a plan would change nothing."""
        draining = {member.holder for member in self.members.values() if member.draining and member.may_obey}
        holders = {release.holder for release in self.document.releasing.values()}
        return bool(holders) and holders <= draining

    def _schedule_plan(self, delay: float = 0.0) -> None:
        """Schedule a plan after a delay in seconds, unless one is scheduled for the same time or earlier."""
        at = self.now + delay
        if at < self._next_plan_at:
            self._next_plan_at = at
            self.schedule(at, partial(self._run_scheduled_plan, at))

    def _run_scheduled_plan(self, at: float) -> None:
        if at == self._next_plan_at:
            self._run_plan()

    def _on_step(self) -> None:
        """Measure queue weights, and plan if the smoothed weights have changed."""
        if self._measure_weights() is not self._planned_weights:
            self._run_plan()

    def _measure_weights(self) -> Weights | None:
        """Return smoothed queue weights as in the operator: None while unknown, empty if the strategy uses none."""
        if self.policy.strategy != WEIGHT_STRATEGY:
            return NO_WEIGHTS
        weights = self.metrics.measure_rates()
        if weights is not None:
            weights = self._smoothed_weights = filter_noise(
                self._smoothed_weights, weights, {queue: holder.name for queue, holder in self.owned.items()}
            )
        return weights

    def _run_plan(self) -> None:
        self._next_plan_at = inf
        self._planned_weights = self._measure_weights()
        new_plan = plan(self.snapshot(), self.now)
        previous = self.document
        self.status = new_plan.status
        if new_plan.document:
            self.document = new_plan.document
            self.owned = owners_of(new_plan.document)
        self.metrics.record_plan(new_plan, self.document, self.owned)
        self.on_planned(new_plan, previous)
        for name, poke in new_plan.pokes.items():
            self.members[name].poke = poke
            self.members[name].poked_at = self.now
        if new_plan.document:
            self._schedule_followers(new_plan.document)
        self._schedule_next_plan(new_plan)

    def on_planned(self, new_plan: Plan, previous: Assignment) -> None:
        """Hook after each plan, for a subclass that writes a journal; does nothing here."""

    def on_obeyed(self, member: SimulatedMember) -> None:
        """Hook after a member has obeyed a document; does nothing here."""

    def snapshot(self) -> Snapshot:
        """Return the group's present state as the planner's input."""
        return Snapshot(
            group=self.history.group,
            spec=self.history.spec,
            policy=self.policy,
            document=self.document,
            refetched=True,
            pods=tuple(member.to_pod(self.now) for _, member in sorted(self.members.items())),
            deleted_uids=self.deleted_uids,
            views=self._queue_views,
            queue_weights=self._planned_weights,
            status=self.status,
        )

    def _schedule_followers(self, document: Assignment) -> None:
        """Schedule that members obey a new document, and drop uids that it does not contain."""
        followers = [member for member in self.members.values() if member.may_obey]
        self._schedule_member_event(OBEY_SECONDS, partial(self._obey_all, followers, document))
        named = {share.uid for share in document.members.values()} | {
            release.holder.uid for release in document.releasing.values()
        }
        self.deleted_uids &= named  # the planner does not look up other uids

    def _obey_all(self, followers: Iterable[SimulatedMember], document: Assignment) -> None:
        for member in followers:
            self._obey_document(member, document)

    def _schedule_next_plan(self, new_plan: Plan) -> None:
        """Schedule the next plan if time alone may change its result; pending events of members schedule their own."""
        is_gated = new_plan.hold is not None and new_plan.hold.reason not in GATES_WITHOUT_TIMER
        waits = is_gated or self.document.releasing or new_plan.requeue_after < self.policy.triggers.resync
        self._plans_since_change += 1
        if waits and not self._pending_events and self._plans_since_change < MAX_PLANS_PER_CHANGE:
            self._schedule_plan(max(new_plan.requeue_after, MIN_REPLAN_SECONDS))
