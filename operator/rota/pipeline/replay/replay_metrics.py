"""What a replay comes to: moves, pauses, idle time, duplicates, imbalance, lag."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rota.documents import Assignment
from rota.model import RETRY, Holder, Queue, Reason
from rota.pipeline.replay.group_history import STEP, Story
from rota.pipeline.replay.simulated_members import Body
from rota.pipeline.replay.traffic import Fluid
from rota.planner import Plan
from rota.planner.record import holders
from rota.weight_smoothing import Weights

IN_FLIGHT = 1.0  # seconds of a queue's messages that a member has begun and not committed
POINT = 2 * STEP  # seconds between two points of a plot

NEGLECTED = 0.01  # of the time: a queue that is somebody's for less is as good as nobody's
FIELDS = {"queueRooms": "machineRoomNearby.brokers"}  # of a policy, by the strategies' options

Row = dict[str, Any]


class Figures:
    """Counted while it is played."""

    def __init__(self, story: Story) -> None:
        """Nothing has happened yet."""
        self.story = story
        self.fluid = Fluid(story.arrivals, story.lag, story.begins, story.capacity)
        self.moves = self.forced = self.rebalances = 0
        self.duplicates = self.unowned = self.idle = 0.0
        self.problem: str | None = None  # why the policy cannot be followed here
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
        self._stopped = np.full(count, np.nan)  # since when nobody works a queue
        self._pauses: list[float] = []
        self._numbers: dict[Holder, int] = {}
        self._document: Assignment | None = None
        self._holders: Mapping[Queue, Holder] = holders(story.document)
        self._members = 0
        self._sharing: list[int] = []
        self._wanted = np.zeros(count)  # seconds in which a queue was there, and members to share it
        self._owned = np.zeros(count)  # and those of them in which it was somebody's
        self._status: Mapping[str, Any] = {}
        self._imbalance = self._imbalanced = self._imbalance_max = 0.0

    @property
    def now(self) -> float:
        """The time."""
        return self.fluid.now

    # What happens.

    def born(self, body: Body) -> None:
        """Know of a member."""
        self._numbers[body.holder] = body.number
        self._members = max(self._members, body.number + 1)

    def works(self, body: Body) -> None:
        """Have a member work what it holds, and nothing else."""
        held = np.zeros(len(self._workers), dtype=bool)
        held[self._at(body.held)] = True
        mine = self._workers == body.number
        if np.array_equal(held, mine):
            return
        self._stop(mine & ~held)
        taken = held & ~mine
        both = taken & (self._workers >= 0)  # nobody waited for the one that has it: what he has begun comes again
        self._double(both)
        waited = taken & ~np.isnan(self._stopped)
        self._pauses += (self.now - self._stopped[waited]).tolist()
        self._stopped[taken] = np.nan
        self._workers[taken] = body.number

    def _at(self, queues: Iterable[Queue]) -> list[int]:
        return [self._places[queue] for queue in queues if queue in self._places]

    def stops(self, body: Body, *, suddenly: bool = False) -> None:
        """Have a member work nothing any more; what it had begun comes again if it could not finish."""
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
        """Know which queues there are; what waits in others is nobody's any more."""
        self._there[:] = False
        self._there[[self._places[queue] for queue in queues]] = True
        self._stopped[~self._there] = np.nan
        new = self._there & (self._workers < 0) & np.isnan(self._stopped)
        self._stopped[new] = self.now
        self.fluid.keep(self._there)
        self._weighed = np.flatnonzero(self._there & ~self._retries)
        self._measured_at = -1

    def decided(self, plan: Plan, document: Assignment, owned: Mapping[Queue, Holder]) -> None:
        """Count what a plan changes; `owned`: who owns what by the document that now stands."""
        last, told = self._status.get("lastRebalance"), plan.status.get("lastRebalance")
        if told and (not last or last["at"] != told["at"]):
            self.rebalances += 1
        failed = (_unusable(it.message) for it in plan.problems if it.reason is Reason.STRATEGY_FAILED)
        self.problem = self.problem or next(failed, None)
        self._status = plan.status
        self._sharing = [
            number
            for holder, number in self._numbers.items()
            if plan.standings.get(holder.name) in {"Ready", "Unready"} and _is_in(document, holder)
        ]
        if plan.document:
            was = self._holders
            self.moves += sum(queue in was and was[queue] != holder for queue, holder in owned.items())
            self.forced += sum(generation == document.generation for generation in document.forced.values())
        if document is not self._document:
            self._follow(document, owned)

    def _follow(self, document: Assignment, owned: Mapping[Queue, Holder]) -> None:
        """Know who owns what, and who may work it."""
        self._document = document
        self._holders = {queue: release.holder for queue, release in document.releasing.items()} | {**owned}
        self._owners[:] = -1
        self._owners[[self._places[queue] for queue in owned]] = [self._numbers.get(it, -1) for it in owned.values()]

    # Time passes.

    def wait(self, until: float) -> None:
        """Let it pass, step by step, for what comes changes with each; points of a plot are where some of them end."""
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
        found = self._unevenness()
        if found is not None:
            self._imbalance += found * seconds
            self._imbalanced += seconds
            self._imbalance_max = max(self._imbalance_max, found)
        self.fluid.flow(until, self._workers, self._members)

    def _point(self) -> None:
        at = datetime.fromtimestamp(self.now, UTC)
        lag = float(self.fluid.lag.sum())
        self.series.append({"at": at, "lag": lag, "imbalance": self._unevenness(), "moves": self.moves})

    def _unevenness(self) -> float | None:
        """Return what the most loaded member has over the mean, by the rate of what it owns; 1 is even."""
        if not self._sharing:
            return None
        rates = self.fluid.rates(self.now)
        whole = float(rates[self._owners >= 0].sum())
        if not whole:
            return None
        loads = np.bincount(self._owners + 1, weights=rates, minlength=self._members + 1)[1:]
        return float(loads.max()) * len(self._sharing) / whole

    def measured(self) -> Weights | None:
        """Say what came to each queue over the last hour, if that is known of all; of retry queues nobody asks."""
        step = self.fluid.step(self.now)
        if step != self._measured_at:  # within a step there is nothing new
            rates = self.fluid.measured(self.now)[self._weighed]
            known = len(rates) > 0 and not np.isnan(rates).any()
            queues = map(self.story.queues.__getitem__, self._weighed.tolist())
            self._measured = dict(zip(queues, rates.tolist(), strict=True)) if known else None
            self._measured_at = step
        return self._measured

    def neglected(self) -> str | None:
        """Say which queue was nobody's practically all the time."""
        [places] = np.nonzero((self._wanted >= STEP) & (self._owned < NEGLECTED * self._wanted))
        if not len(places):
            return None
        queue = self.story.queues[places[0]]
        return f"Queue {queue} would be nobody's nearly all the time: the policy gives it to no member that is there"

    def row(self) -> Row:
        """Return what it came to."""
        open_ = self._there & ~np.isnan(self._stopped)
        pauses = [*self._pauses, *(self.now - self._stopped[open_]).tolist()]
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


def _unusable(told: str) -> str:
    """Say why a strategy failed to who knows policies only: their fields, not a strategy's own options."""
    for option, field in FIELDS.items():
        told = told.replace(f" {option}", f" spec.options.{field}")
    return told.partition("; until then ")[0]


def _is_in(document: Assignment, holder: Holder) -> bool:
    share = document.members.get(holder.name)
    return share is not None and share.uid == holder.uid
