"""A pod of a replay: it stands as the story says, and obeys as members do."""

from dataclasses import dataclass, field

from rota.model import Holder, Poke, Queue
from rota.planner import Heard, Pod
from rota.ranges import to_ranges
from rota.reports import Report

LONG = 1e9  # seconds: for ever

ELSEWHERE = "a broker"  # that others reach, and one that is cut off does not
AWAY = {"Ended", "Lost"}


@dataclass(frozen=True)
class _Known(Heard):
    """A report whose queues need not be spelled out of ranges: we know them."""

    held: frozenset[Queue] = field(kw_only=True)
    working: frozenset[Queue] = field(kw_only=True)


@dataclass
class Body:
    """What is imagined of a pod."""

    name: str
    uid: str
    number: int  # the place of what it works in arrays
    standing: str
    room: str | None
    born: float
    since: float  # when it came to stand so
    generation: int = 0
    held: tuple[Queue, ...] = ()
    draining: tuple[Queue, ...] = ()
    drained: bool = False  # for good
    poke: Poke = field(default_factory=Poke)
    poked: float = 0.0
    _heard: Heard | None = None
    _ranges: dict[str, dict[str, str]] = field(default_factory=dict)  # what it holds, as reports have it

    @property
    def holder(self) -> Holder:
        """It as an owner."""
        return Holder(self.name, self.uid)

    @property
    def obeys(self) -> bool:
        """Whether it is shown documents, and follows them."""
        return self.standing not in {*AWAY, "Leaving"} and not self.drained

    @property
    def works(self) -> bool:
        """Whether it delivers."""
        return self.obeys and self.standing != "Joining"

    def stand(self, standing: str, room: str | None, now: float) -> None:
        """Stand in another way from now on."""
        self.room = room
        if standing != self.standing:
            self.standing, self.since = standing, now
            self._heard = None

    def obey(self, generation: int, queues: tuple[Queue, ...]) -> tuple[Queue, ...]:
        """Hold these queues; return those that it no longer does and has to finish."""
        self.generation, self._heard, self.draining = generation, None, ()
        if queues != self.held:
            kept = set(queues)
            self.draining = tuple(queue for queue in self.held if queue not in kept)
            self.held, self._ranges = queues, to_ranges(queues)
        return self.draining

    def finish(self, *, for_good: bool = False) -> None:
        """Have finished what it had begun."""
        self.draining, self._heard = (), None
        if for_good:
            self.held, self._ranges, self.drained = (), {}, True

    def seen(self, now: float) -> Pod:
        """Show it as the planner sees pods."""
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

    def _report(self) -> Heard:
        if self._heard is None:
            told = Report(
                member=self.name,
                uid=self.uid,
                generation=self.generation,
                state="drained" if self.drained else "serving",
                final=self.drained,
                held=self._ranges,
                releasing=to_ranges(self.draining),
                brokers={ELSEWHERE: self.standing != "CutOff"},
            )
            self._heard = _Known(told, held=frozenset(self.held), working=frozenset((*self.held, *self.draining)))
        return self._heard
