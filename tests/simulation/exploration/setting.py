"""Configurations of explorations, and the parts that all states of one share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from builders import GROUP, a_spec, a_view
from rota.planner import Plan
from rota.spec import Handover, PolicySpec, Seconds, Triggers
from simulation.exploration.documents import Documents
from simulation.exploration.processes import DiskState, Processes
from simulation.exploration.state import LOST_AFTER, ApiPod, ExploredState, PodSlot

# Transitions that take no time unless a configuration slows them down: start offsets found, probes, watches,
# kubelets. In every configuration a member may read its document, and the operator a report, arbitrarily late.
INSTANT = ("place", "ready", "see", "show")
NAMES = ("m1", "m2", "m3")
DRAIN_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Members and queues, and which faults may happen how often."""

    members: int = 2
    queues: int = 2
    late_members: int = 0  # how many of the members join later
    faults: Mapping[str, int]
    max_faults: int = 9  # in total
    fault_targets: tuple[str, ...] = NAMES  # pods that faults hit
    slow: tuple[str, ...] = ()  # kinds of INSTANT that take time
    orderly: bool = False
    with_incarnations: bool = False  # of processes
    schema: int = 2  # the highest schema of documents, at first
    late_timers: bool = False  # drains time out, and locks expire
    min_states: int = 1  # fewer mean that the exploration has become incomplete


class Setting:
    """The real parts of a configuration, and their results so far."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.queues = a_view(configuration.queues).queues
        self.faults = tuple(sorted(configuration.faults))
        ordering = "Orderly" if configuration.orderly else "Concurrent"
        self.specs = {paused: a_spec(ordering=ordering, paused=paused) for paused in (False, True)}
        self.policy = PolicySpec(
            strategy="Sticky",
            handover=Handover(drain_timeout=Seconds(DRAIN_TIMEOUT_SECONDS), lost_after=Seconds(LOST_AFTER)),
            triggers=Triggers(debounce=Seconds(0)),  # no write waits for the age of another
        )
        self.documents = Documents()
        self.instant = frozenset(INSTANT) - frozenset(configuration.slow)
        is_start_instant = "place" in self.instant
        self.processes = Processes(
            GROUP,
            orderly=configuration.orderly,
            drain_timeout=DRAIN_TIMEOUT_SECONDS,
            starts_found_at_once=is_start_instant,
        )
        self.plans: dict[object, Plan] = {}

    def first(self) -> ExploredState:
        """Return the first state: no assignment is stored."""
        configuration = self.configuration
        slots = [
            self._first_slot(name, is_present=number < configuration.members - configuration.late_members)
            for number, name in enumerate(NAMES)
        ]
        faults_left = (*(configuration.faults[kind] for kind in self.faults), configuration.max_faults)
        return ExploredState(
            tuple(slots[: configuration.members]), self.queues, faults_left, schema=configuration.schema
        )

    def _first_slot(self, name: str, *, is_present: bool) -> PodSlot:
        if not is_present:
            return PodSlot(name)
        api_pod = ApiPod(f"{name}.1", ready=True, started=True)
        disk = self.disk_after_start(DiskState())
        process = self.processes.start(name, api_pod.uid, disk)
        return PodSlot(name, 1, api_pod, process, disk=disk, observed=api_pod, report=process.report)

    def disk_after_start(self, disk: DiskState) -> DiskState:
        """Return the state of a disk after a process has started on it; without incarnations no start is counted."""
        return disk._replace(starts=disk.starts + self.configuration.with_incarnations)

    def spend(self, state: ExploredState, kind: str) -> Iterator[ExploredState]:
        """Yield the state with one fault of this kind less, if one is left."""
        if kind not in self.faults or not state.faults_left[-1]:
            return
        position = self.faults.index(kind)
        if state.faults_left[position]:
            remaining = list(state.faults_left)
            remaining[position] -= 1
            remaining[-1] -= 1  # the number in total
            yield state._replace(faults_left=tuple(remaining))
