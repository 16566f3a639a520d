"""Simulated pod of a replay: its member state comes from the history, and it obeys documents as a real member does."""

from dataclasses import dataclass, field

from rota.model import Holder, Poke, Queue
from rota.planner import DecodedReport, Pod
from rota.ranges import to_ranges
from rota.reports import Report

LONG = 1e9  # seconds: longer than any history

ELSEWHERE = "a broker"  # a broker that every member reaches, except one in state CutOff
AWAY = {"Ended", "Lost"}


@dataclass(frozen=True)
class _SimulatedReport(DecodedReport):
    """A report with its sets of queues, so that the planner need not parse them from ranges."""

    held: frozenset[Queue] = field(kw_only=True)
    working: frozenset[Queue] = field(kw_only=True)


@dataclass
class SimulatedMember:
    """State of a simulated pod and its sidecar."""

    name: str
    uid: str
    number: int  # its number in the arrays of the metrics
    standing: str
    room: str | None
    born: float
    since: float  # time since when it has had its member state
    generation: int = 0
    held: tuple[Queue, ...] = ()
    draining: tuple[Queue, ...] = ()
    drained: bool = False  # it has sent its final report
    poke: Poke = field(default_factory=Poke)
    poked: float = 0.0
    _heard: DecodedReport | None = None
    _ranges: dict[str, dict[str, str]] = field(default_factory=dict)  # `held` as ranges, for reports

    @property
    def holder(self) -> Holder:
        """The pod as an owner."""
        return Holder(self.name, self.uid)

    @property
    def obeys(self) -> bool:
        """Whether the pod reads documents and obeys them."""
        return self.standing not in {*AWAY, "Leaving"} and not self.drained

    @property
    def works(self) -> bool:
        """Whether the pod delivers messages."""
        return self.obeys and self.standing != "Joining"

    def stand(self, standing: str, room: str | None, now: float) -> None:
        """Set member state and machine room from now on."""
        self.room = room
        if standing != self.standing:
            self.standing, self.since = standing, now
            self._heard = None

    def obey(self, generation: int, queues: tuple[Queue, ...]) -> tuple[Queue, ...]:
        """Hold these queues; return the queues that it held before and now has to drain."""
        self.generation, self._heard, self.draining = generation, None, ()
        if queues != self.held:
            still_held = set(queues)
            self.draining = tuple(queue for queue in self.held if queue not in still_held)
            self.held, self._ranges = queues, to_ranges(queues)
        return self.draining

    def finish(self, *, for_good: bool = False) -> None:
        """End the drain of revoked queues, or of all queues if `for_good`."""
        self.draining, self._heard = (), None
        if for_good:
            self.held, self._ranges, self.drained = (), {}, True

    def seen(self, now: float) -> Pod:
        """Return the pod as input of the planner."""
        standing = self.standing
        ready = standing in {"Ready", "CutOff"}
        return Pod(
            name=self.name,
            uid=self.uid,
            started=standing != "Joining" or self.generation > 0,
            ready=ready,
            steady=LONG if standing == "Out" else now - self.since,
            age=now - self.born,
            terminating=standing == "Leaving",
            leaving=now - self.since if standing == "Leaving" else 0.0,
            ended=standing == "Ended",
            room=self.room,
            client_id=self.name,
            heard=self._report() if ready or self.generation else None,
            unheard=LONG if standing == "Lost" else 0.0,
            cut_off={ELSEWHERE: LONG} if standing == "CutOff" else {},
            poke=self.poke,
            poked=now - self.poked,
        )

    def _report(self) -> DecodedReport:
        if self._heard is None:
            report = Report(
                member=self.name,
                uid=self.uid,
                generation=self.generation,
                state="drained" if self.drained else "serving",
                final=self.drained,
                held=self._ranges,
                releasing=to_ranges(self.draining),
                brokers={ELSEWHERE: self.standing != "CutOff"},
            )
            self._heard = _SimulatedReport(
                report, held=frozenset(self.held), working=frozenset((*self.held, *self.draining))
            )
        return self._heard
