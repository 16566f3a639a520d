"""One group's story, played again in virtual time: the real planner decides, members that obey are imagined.

    changes of the story ──> pods ──┐
    the fluid's rates ──────────────┤
    what members say they obey ─────┴─> plan(snapshot, now) ──> document ──> members obey, drain, take up

The planner is asked when something happens, and when it wants to be asked again while something is under way; in a
world that stands still it is not asked, for it would answer the same. For Balanced queues are weighed anew at every
step, and as the operator does it: what was measured stands until somebody carries clearly more or less.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from rota.documents import Assignment
from rota.model import Holder, Queue, Reason
from rota.pipeline.replay.group_history import STEP, Change, Story
from rota.pipeline.replay.replay_metrics import Figures
from rota.pipeline.replay.simulated_members import AWAY, LONG, Body
from rota.planner import Plan, Snapshot, View, plan
from rota.planner.record import owners
from rota.spec import PolicySpec
from rota.weight_smoothing import Weights, settled

OBEY = 0.3  # seconds from a document's writing until the members that were poked obey it
DRAIN = 0.2  # seconds until a member has finished what it had begun
AGAIN = 0.05  # seconds: sooner than this nobody looks again
ENDLESS = 5_000  # plans since anything happened: something does not settle

WEIGHING = "Balanced"  # the strategy that goes by what queues weigh
NO_WEIGHTS: Weights = {}

# What only somebody's word will lift, or nothing: to ask again is no use.
STILL = {Reason.NOTHING_WOULD_CHANGE, Reason.PAUSED, Reason.INVALID_POLICY, Reason.NO_VIEW}


class Replay:
    """A story under a policy; without one, under those that were in force."""

    def __init__(self, story: Story, policy: PolicySpec | None, figures: Figures) -> None:
        """Stand where the story begins."""
        self.story, self.figures = story, figures
        self.now = story.begins
        self.document: Assignment = story.document
        self.owned: Mapping[Queue, Holder] = owners(story.document)
        self.status: Mapping[str, Any] = {}
        self.bodies: dict[str, Body] = {}
        self.gone: frozenset[str] = frozenset()
        self._policy = policy
        self._change = story.changes[0]
        self._views: dict[str, View | None] = {}
        self._routes: frozenset[Queue] = frozenset()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._numbers = count(), count()
        self._asked_for = inf
        self._weights: Weights = {}  # that stand
        self._weighed: Weights | None = {}  # that the planner was given last
        self._plans = 0  # since the last change
        self._expected = 0  # how many members are about to say something

    @property
    def policy(self) -> PolicySpec:
        """The one in force."""
        return self._policy or self._change.policy

    def run(self) -> None:
        """Play it to its end."""
        for change in self.story.changes:
            self.at(change.at, partial(self._changes, change))
        if any((self._policy or it.policy).strategy == WEIGHING for it in self.story.changes):
            for step in range(1, self.story.steps):
                self.at(self.story.begins + step * STEP, self._step)
        while self._events and self._events[0][0] <= self.story.ends:
            at, _, happen = heappop(self._events)
            self._pass(at)
            happen()
        self._pass(self.story.ends)

    def at(self, at: float, happen: Callable[[], None]) -> None:
        """Have something happen at a time."""
        heappush(self._events, (at, next(self._order), happen))

    def _pass(self, at: float) -> None:
        if at > self.now:
            self.figures.wait(at)
            self.now = at

    # What happens.

    def _changes(self, change: Change) -> None:
        """Have others there, or other queues, or another policy."""
        self._change, self._plans = change, 0
        first = self.now == self.story.begins and not self.bodies
        for name, there in change.members.items():
            body = self.bodies.get(name)
            if body and body.uid != there.uid:
                self._ends(body)
                body = None
            if body is None:
                born = -LONG if first else self.now
                body = Body(name, there.uid, next(self._numbers), there.standing, there.room, born, born)
                self.bodies[name] = body
                self.figures.born(body)
                if first:
                    self._resumes(body)
            else:
                self._stands(body, there.standing, there.room)
        for name in self.bodies.keys() - change.members.keys():
            self._ends(self.bodies[name])
        self._routed(change.queues)
        self._plan()

    def _resumes(self, body: Body) -> None:
        """Have a member that was there before obey what the story begins with."""
        share = self.document.members.get(body.name)
        if share and share.uid == body.uid and body.standing != "Ended":
            still = [queue for queue, it in self.document.releasing.items() if it.holder == body.holder]
            body.obey(self.document.generation - bool(still), (*share.queues, *still))
            if body.works:
                self.figures.works(body)
            if body.obeys and still:
                self._soon(OBEY, partial(self._obeys, body, self.document))
        if body.standing == "Leaving":
            self._soon(DRAIN, partial(self._finishes, body, for_good=True))

    def _stands(self, body: Body, standing: str, room: str | None) -> None:
        before = body.standing
        body.stand(standing, room, self.now)
        if standing == before:
            return
        if standing in AWAY:
            self.figures.stops(body, suddenly=not body.drained)
        elif standing == "Leaving":
            self.figures.stops(body)
            self._soon(DRAIN, partial(self._finishes, body, for_good=True))
        elif before in AWAY or before == "Joining":  # it catches up with what was written meanwhile
            self._soon(OBEY, partial(self._obeys, body, self.document, again=True))

    def _ends(self, body: Body) -> None:
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
        self._views = {topic: View(tuple(some), LONG) for topic, some in topics.items()}
        self.figures.routes(queues)

    def _obeys(self, body: Body, document: Assignment, *, again: bool = False) -> None:
        """Have a member follow a document, unless it is not there any more or knows a later one."""
        there = self.bodies.get(body.name) is body and body.obeys
        if not there or body.generation + (not again) > document.generation:
            return
        share = document.members.get(body.name)
        queues = share.queues if share and share.uid == body.uid else ()
        if body.obey(document.generation, queues):
            self._soon(DRAIN, partial(self._finishes, body))
        if body.works:
            self.figures.works(body)
        self.obeyed(body)

    def _finishes(self, body: Body, *, for_good: bool = False) -> None:
        if self.bodies.get(body.name) is body:
            body.finish(for_good=for_good)

    # What is decided.

    def _soon(self, seconds: float, happen: Callable[[], None]) -> None:
        """Have members say something."""
        self._expected += 1

        def happens() -> None:
            self._expected -= 1
            happen()
            if not self._all_drain():
                self._look()

        self.at(self.now + seconds, happens)

    def _all_drain(self) -> bool:
        """Whether who is under way will tell in a moment when it is done: to ask before that changes nothing."""
        draining = {body.holder for body in self.bodies.values() if body.draining and body.obeys}
        under_way = {it.holder for it in self.document.releasing.values()}
        return bool(under_way) and under_way <= draining

    def _look(self, after: float = 0.0) -> None:
        """Have the planner asked once, whatever else happens at the same moment."""
        at = self.now + after
        if at < self._asked_for:
            self._asked_for = at
            self.at(at, partial(self._asked, at))

    def _asked(self, at: float) -> None:
        if at == self._asked_for:
            self._plan()

    def _step(self) -> None:
        """Measure anew; what stands as it was changes nothing."""
        if self._weigh() is not self._weighed:
            self._plan()

    def _weigh(self) -> Weights | None:
        """Say what queues weigh, as the operator does; None while that is not known, nothing where nobody asks."""
        if self.policy.strategy != WEIGHING:
            return NO_WEIGHTS
        found = self.figures.measured()
        if found is not None:
            found = self._weights = settled(self._weights, found, {queue: it.name for queue, it in self.owned.items()})
        return found

    def _plan(self) -> None:
        self._asked_for = inf
        self._weighed = self._weigh()
        decided = plan(self.snapshot(), self.now)
        before, self.status = self.document, decided.status
        if decided.document:
            self.document, self.owned = decided.document, owners(decided.document)
        self.figures.decided(decided, self.document, self.owned)
        self.told(decided, before)
        for name, poke in decided.pokes.items():
            self.bodies[name].poke, self.bodies[name].poked = poke, self.now
        if decided.document:
            self._written(decided.document)
        self._again(decided)

    def told(self, decided: Plan, before: Assignment) -> None:
        """Tell whoever keeps a journal what was decided; nobody does."""

    def obeyed(self, body: Body) -> None:
        """And who obeys."""

    def snapshot(self) -> Snapshot:
        """Show the world as the planner sees it."""
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
        """Have everybody obey a moment later."""
        followers = [body for body in self.bodies.values() if body.obeys]
        self._soon(OBEY, partial(self._all_obey, followers, document))
        named = {share.uid for share in document.members.values()} | {
            it.holder.uid for it in document.releasing.values()
        }
        self.gone &= named  # of others nobody asks any more

    def _all_obey(self, followers: Iterable[Body], document: Assignment) -> None:
        for body in followers:
            self._obeys(body, document)

    def _again(self, decided: Plan) -> None:
        """Look again when time alone may change something; while members are about to say something, after that."""
        held = decided.held is not None and decided.held.reason not in STILL
        waits = held or self.document.releasing or decided.again < self.policy.triggers.resync
        self._plans += 1
        if waits and not self._expected and self._plans < ENDLESS:
            self._look(max(decided.again, AGAIN))
