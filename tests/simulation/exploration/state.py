"""The explored state as a value: API server, each pod's node and process, and the operator's knowledge and writes."""

from typing import Any, NamedTuple

from rota.handover import MIN_READY_LOST_SECONDS
from rota.model import Queue
from simulation.exploration.documents import Document
from simulation.exploration.processes import DiskState, Process, ReadReport

LOST_AFTER = 10.0
AGES = (LOST_AFTER, MIN_READY_LOST_SECONDS)  # ages are equal for the planner between these limits


def age(since: float | None, now: float) -> int:
    """Return how many of the limits an age exceeds, or -1 without a start."""
    return -1 if since is None else sum(now - since >= limit for limit in AGES)


class ApiPod(NamedTuple):
    """A pod as the API server has it."""

    uid: str
    ready: bool = False
    started: bool = False
    terminating: bool = False
    ended: bool = False
    finished: int = 0  # the number of the last sidecar process reported as ended


class PodSlot(NamedTuple):
    """A pod name: its pod at the API server, process and volume, and what the operator knows of it."""

    name: str
    pods_created: int = 0
    api_pod: ApiPod | None = None
    process: Process | None = None
    dead: bool = False  # no process of this pod starts again; the API server may not know yet
    hung: bool = False
    lost: bool = False  # its node is cut off: no reports, no updates of its volume
    disk: DiskState = DiskState()
    highest: int = 0  # the generation that its disk should have
    mounted: Document | None = None
    observed: ApiPod | None = None
    report: ReadReport | None = None
    silent_since: float | None = None  # when requests of the operator began to fail

    @property
    def is_reachable(self) -> bool:
        """Whether the operator can read its report."""
        return self.process is not None and not self.hung and not self.lost

    @property
    def finished(self) -> int:
        """The number of the last process that has ended."""
        return max(self.disk.starts - (self.process is not None), 0)


class Write(NamedTuple):
    """A document in flight and the version that it replaces; None: a create."""

    document: Document
    version: int | None


class ExploredState(NamedTuple):
    """The whole state of one exploration step."""

    slots: tuple[PodSlot, ...]
    route: tuple[Queue, ...]
    faults_left: tuple[int, ...]  # faults that may still happen, by kind; the last: in total
    stored: Document | None = None
    version: int = 0
    replaced: Document | None = None  # stored before; requests with it may still be under way to members
    write: Write | None = None
    former: Write | None = None  # of a replaced operator
    deleted_uids: frozenset[str] = frozenset()  # known to the operator
    # Members with a report still to refetch, after the stored assignment was found missing.
    awaited_reports: frozenset[str] | None = None
    paused: bool = False
    schema: int = 2  # the highest that the operator writes
    overruled: frozenset[tuple[Queue, str, int]] = frozenset()  # queue, pod uid, generation of each forced grant
    now: float = 0.0


class Transition(NamedTuple):
    """A step to a next state."""

    kind: str
    text: str
    state: ExploredState


def replace_slot(state: ExploredState, slot: PodSlot, **changed: Any) -> ExploredState:
    """Return the state with the slot of the same name replaced."""
    slots = tuple(slot if other.name == slot.name else other for other in state.slots)
    return state._replace(slots=slots, **changed)


def slot_of(state: ExploredState, name: str) -> PodSlot:
    """Return the slot of this name."""
    return next(slot for slot in state.slots if slot.name == name)


def accepted(write: Write, state: ExploredState) -> bool:
    """Return whether the API server accepts a write: a create, or a replacement of the present version."""
    if write.version is None or state.stored is None:
        return write.version is None and state.stored is None
    return write.version == state.version
