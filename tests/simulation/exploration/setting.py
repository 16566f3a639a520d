"""What a configuration says, and what stays the same in all its worlds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from builders import GROUP, a_spec, a_view
from rota.planner import Plan
from rota.spec import Handover, PolicySpec, Seconds, Triggers
from simulation.exploration.documents import Documents
from simulation.exploration.processes import Processes
from simulation.exploration.world import LOST_AFTER, ExploredState, Facts, Place

# What takes no time unless a configuration is about just that: starts looked up, probes, watches, kubelets. In
# any of them a member may read its document, and the operator a report, ever so late.
SWIFT = ("place", "ready", "see", "show")
NAMES = ("m1", "m2", "m3")
DRAIN_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Who is there, what may go wrong, and how often."""

    members: int = 2
    queues: int = 2
    later: int = 0  # how many of the members come later
    faults: Mapping[str, int]
    most: int = 9  # faults altogether
    hit: tuple[str, ...] = NAMES  # whom faults hit
    slow: tuple[str, ...] = ()  # what of SWIFT takes time
    orderly: bool = False
    numbered: bool = False  # processes have incarnations
    schema: int = 2  # of documents at most, at first
    late: bool = False  # drains are cut, and locks grow old
    floor: int = 1  # fewer states than these mean that something is not explored any more


class Setting:
    """The real parts that a configuration works with, and all that was asked of them."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = it = configuration
        self.queues = a_view(it.queues).queues
        self.faults = tuple(sorted(it.faults))
        ordering = "Orderly" if it.orderly else "Concurrent"
        self.specs = {paused: a_spec(ordering=ordering, paused=paused) for paused in (False, True)}
        self.policy = PolicySpec(
            strategy="Sticky",
            handover=Handover(drain_timeout=Seconds(DRAIN_TIMEOUT), lost_after=Seconds(LOST_AFTER)),
            triggers=Triggers(debounce=Seconds(0)),  # no write waits for another one's age
        )
        self.documents = Documents()
        self.swift = frozenset(SWIFT) - frozenset(it.slow)
        at_once = "place" in self.swift
        self.processes = Processes(GROUP, orderly=it.orderly, drain_timeout=DRAIN_TIMEOUT, placed_at_once=at_once)
        self.plans: dict[object, Plan] = {}

    def first(self) -> ExploredState:
        """Return a world in which everything is new."""
        it = self.configuration
        places = [self._place(name, there=number < it.members - it.later) for number, name in enumerate(NAMES)]
        left = (*(it.faults[kind] for kind in self.faults), it.most)
        return ExploredState(tuple(places[: it.members]), self.queues, left, schema=it.schema)

    def _place(self, name: str, *, there: bool) -> Place:
        if not there:
            return Place(name)
        facts = Facts(f"{name}.1", ready=True, started=True)
        disk = self.begun((0, False, 0))
        process = self.processes.start(name, facts.uid, disk)
        return Place(name, 1, facts, process, disk=disk, seen=facts, heard=process.told)

    def begun(self, disk: tuple[int, bool, int]) -> tuple[int, bool, int]:
        """Return what the disk remembers once a process has started on it."""
        return (*disk[:2], disk[2] + self.configuration.numbered)

    def spend(self, world: ExploredState, kind: str) -> Iterator[ExploredState]:
        """Return the world with one such fault less left, if there is one."""
        if kind not in self.faults or not world.left[-1]:
            return
        place = self.faults.index(kind)
        if world.left[place]:
            left = [number - (index == place) for index, number in enumerate(world.left)]
            left[-1] -= 1
            yield world._replace(left=tuple(left))
