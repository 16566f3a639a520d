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
from rota.pipeline.replay.group_history import STEP, Change, GroupHistory
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.replay.simulated_members import AWAY, LONG, SimulatedMember
from rota.planner import Plan, QueueView, Snapshot, plan
from rota.planner.record import owners
from rota.spec import PolicySpec
from rota.weight_smoothing import Weights, filter_noise

OBEY = 0.3  # seconds from the write of a document until members obey it
DRAIN = 0.2  # seconds that a member needs to finish the messages that it has started
AGAIN = 0.05  # seconds: the shortest delay before the next plan
ENDLESS = 5_000  # plans since the last change; after that many the planner will not settle, so no more are scheduled

WEIGHING = "Balanced"  # the strategy that uses queue weights
NO_WEIGHTS: Weights = {}

# Gates that time alone does not open: another plan would give the same result.
STILL = {Reason.NOTHING_WOULD_CHANGE, Reason.PAUSED, Reason.INVALID_POLICY, Reason.NO_VIEW}


class Replay:
    """Replay of a history under `policy`; if that is None, under the policies recorded in the history."""

    def __init__(self, story: GroupHistory, policy: PolicySpec | None, figures: ReplayMetrics) -> None:
        self.story, self.figures = story, figures
        self.now = story.begins
        self.document: Assignment = story.document
        self.owned: Mapping[Queue, Holder] = owners(story.document)
        self.status: Mapping[str, Any] = {}
        self.bodies: dict[str, SimulatedMember] = {}
        self.gone: frozenset[str] = frozenset()
        self._policy = policy
        self._change = story.changes[0]
        self._views: dict[str, QueueView | None] = {}
        self._routes: frozenset[Queue] = frozenset()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._numbers = count(), count()
        self._asked_for = inf
        self._weights: Weights = {}  # the last smoothed weights
        self._weighed: Weights | None = {}  # the weights of the last snapshot
        self._plans = 0  # since the last change
        self._expected = 0  # scheduled events in which members obey or finish a drain

    @property
    def policy(self) -> PolicySpec:
        """The policy in force now."""
        return self._policy or self._change.policy

    def run(self) -> None:
        """Run the replay to the end of the history."""
        for change in self.story.changes:
            self.at(change.at, partial(self._changes, change))
        if any((self._policy or change.policy).strategy == WEIGHING for change in self.story.changes):
            for step in range(1, self.story.steps):
                self.at(self.story.begins + step * STEP, self._step)
        while self._events and self._events[0][0] <= self.story.ends:
            at, _, happen = heappop(self._events)
            self._pass(at)
            happen()
        self._pass(self.story.ends)

    def at(self, at: float, happen: Callable[[], None]) -> None:
        """Schedule a callback at a virtual time; callbacks of the same time run in the order of their calls."""
        heappush(self._events, (at, next(self._order), happen))

    def _pass(self, at: float) -> None:
        if at > self.now:
            self.figures.wait(at)
            self.now = at

    # Events.

    def _changes(self, change: Change) -> None:
        """Apply a change of pods, queues or policy, then plan."""
        self._change, self._plans = change, 0
        first = self.now == self.story.begins and not self.bodies
        for name, presence in change.members.items():
            body = self.bodies.get(name)
            if body and body.uid != presence.uid:
                self._ends(body)
                body = None
            if body is None:
                born = -LONG if first else self.now
                body = SimulatedMember(
                    name, presence.uid, next(self._numbers), presence.standing, presence.room, born, born
                )
                self.bodies[name] = body
                self.figures.born(body)
                if first:
                    self._resumes(body)
            else:
                self._stands(body, presence.standing, presence.room)
        for name in self.bodies.keys() - change.members.keys():
            self._ends(self.bodies[name])
        self._routed(change.queues)
        self._plan()

    def _resumes(self, body: SimulatedMember) -> None:
        """Let a member that exists at the start of the history obey the history's first document."""
        share = self.document.members.get(body.name)
        if share and share.uid == body.uid and body.standing != "Ended":
            revoked = [queue for queue, release in self.document.releasing.items() if release.holder == body.holder]
            body.obey(self.document.generation - bool(revoked), (*share.queues, *revoked))
            if body.works:
                self.figures.works(body)
            if body.obeys and revoked:
                self._soon(OBEY, partial(self._obeys, body, self.document))
        if body.standing == "Leaving":
            self._soon(DRAIN, partial(self._finishes, body, for_good=True))

    def _stands(self, body: SimulatedMember, standing: str, room: str | None) -> None:
        previous = body.standing
        body.stand(standing, room, self.now)
        if standing == previous:
            return
        if standing in AWAY:
            self.figures.stops(body, suddenly=not body.drained)
        elif standing == "Leaving":
            self.figures.stops(body)
            self._soon(DRAIN, partial(self._finishes, body, for_good=True))
        elif previous in AWAY or previous == "Joining":  # it reads the document that was written meanwhile
            self._soon(OBEY, partial(self._obeys, body, self.document, again=True))

    def _ends(self, body: SimulatedMember) -> None:
        self.figures.stops(body, suddenly=body.standing not in AWAY and not body.drained)
        self.gone |= {body.uid}
        del self.bodies[body.name]
        body.stand("Ended", body.room, self.now)

    def _routed(self, queues: frozenset[Queue]) -> None:
        if queues == self._routes:
            return
        self._routes = queues
        topics: dict[str, list[Queue]] = {topic.topic: [] for topic in self.story.spec.subscriptions}
        for queue in sorted(queues):
            topics.setdefault(queue.topic, []).append(queue)
        self._views = {topic: QueueView(tuple(routed), LONG) for topic, routed in topics.items()}
        self.figures.routes(queues)

    def _obeys(self, body: SimulatedMember, document: Assignment, *, again: bool = False) -> None:
        """Let a member obey a document, unless it cannot or has a newer one; `again`: even if it has obeyed it."""
        can_obey = self.bodies.get(body.name) is body and body.obeys
        if not can_obey or body.generation + (not again) > document.generation:
            return
        share = document.members.get(body.name)
        queues = share.queues if share and share.uid == body.uid else ()
        if body.obey(document.generation, queues):
            self._soon(DRAIN, partial(self._finishes, body))
        if body.works:
            self.figures.works(body)
        self.obeyed(body)

    def _finishes(self, body: SimulatedMember, *, for_good: bool = False) -> None:
        if self.bodies.get(body.name) is body:
            body.finish(for_good=for_good)

    # Plans.

    def _soon(self, seconds: float, happen: Callable[[], None]) -> None:
        """Schedule an event that changes members' reports; after it a plan is due, unless only drains are pending."""
        self._expected += 1

        def happens() -> None:
            self._expected -= 1
            happen()
            if not self._all_drain():
                self._look()

        self.at(self.now + seconds, happens)

    def _all_drain(self) -> bool:
        """Whether every holder of a revoked queue is draining: until one of them ends, a plan would change nothing."""
        draining = {body.holder for body in self.bodies.values() if body.draining and body.obeys}
        under_way = {release.holder for release in self.document.releasing.values()}
        return bool(under_way) and under_way <= draining

    def _look(self, delay: float = 0.0) -> None:
        """Schedule a plan after a delay in seconds, unless one is scheduled for the same time or earlier."""
        at = self.now + delay
        if at < self._asked_for:
            self._asked_for = at
            self.at(at, partial(self._asked, at))

    def _asked(self, at: float) -> None:
        if at == self._asked_for:
            self._plan()

    def _step(self) -> None:
        """Measure queue weights, and plan if the smoothed weights have changed."""
        if self._weigh() is not self._weighed:
            self._plan()

    def _weigh(self) -> Weights | None:
        """Return smoothed queue weights as in the operator: None while unknown, empty if the strategy uses none."""
        if self.policy.strategy != WEIGHING:
            return NO_WEIGHTS
        weights = self.figures.measured()
        if weights is not None:
            weights = self._weights = filter_noise(
                self._weights, weights, {queue: holder.name for queue, holder in self.owned.items()}
            )
        return weights

    def _plan(self) -> None:
        self._asked_for = inf
        self._weighed = self._weigh()
        decided = plan(self.snapshot(), self.now)
        previous, self.status = self.document, decided.status
        if decided.document:
            self.document, self.owned = decided.document, owners(decided.document)
        self.figures.decided(decided, self.document, self.owned)
        self.told(decided, previous)
        for name, poke in decided.pokes.items():
            self.bodies[name].poke, self.bodies[name].poked = poke, self.now
        if decided.document:
            self._written(decided.document)
        self._again(decided)

    def told(self, decided: Plan, before: Assignment) -> None:
        """Hook after each plan, for a subclass that writes a journal; does nothing here."""

    def obeyed(self, body: SimulatedMember) -> None:
        """Hook after a member has obeyed a document; does nothing here."""

    def snapshot(self) -> Snapshot:
        """Return the group's present state as the planner's input."""
        return Snapshot(
            group=self.story.group,
            spec=self.story.spec,
            policy=self.policy,
            document=self.document,
            fresh=True,
            pods=tuple(body.seen(self.now) for _, body in sorted(self.bodies.items())),
            gone=self.gone,
            views=self._views,
            queue_weights=self._weighed,
            status=self.status,
        )

    def _written(self, document: Assignment) -> None:
        """Schedule that members obey a new document, and drop uids that it does not contain."""
        followers = [body for body in self.bodies.values() if body.obeys]
        self._soon(OBEY, partial(self._all_obey, followers, document))
        named = {share.uid for share in document.members.values()} | {
            release.holder.uid for release in document.releasing.values()
        }
        self.gone &= named  # the planner does not look up other uids

    def _all_obey(self, followers: Iterable[SimulatedMember], document: Assignment) -> None:
        for body in followers:
            self._obeys(body, document)

    def _again(self, decided: Plan) -> None:
        """Schedule the next plan if time alone may change its result; pending events of members schedule their own."""
        held = decided.held is not None and decided.held.reason not in STILL
        waits = held or self.document.releasing or decided.again < self.policy.triggers.resync
        self._plans += 1
        if waits and not self._expected and self._plans < ENDLESS:
            self._look(max(decided.again, AGAIN))
