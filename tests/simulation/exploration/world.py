"""A world as a value: the API server, each pod's node and process, and what the operator knows and does."""

from typing import Any, NamedTuple

from rota.handover import MIN_READY_LOST_SECONDS
from rota.model import Queue
from simulation.exploration.documents import Document
from simulation.exploration.processes import Process, Told

LOST_AFTER = 10.0
AGES = (LOST_AFTER, MIN_READY_LOST_SECONDS)  # an age matters only by which of these it is beyond


def age(since: float | None, now: float) -> int:
    """Return what matters of an age."""
    return -1 if since is None else sum(now - since >= limit for limit in AGES)


class Facts(NamedTuple):
    """What the API server says of a pod."""

    uid: str
    ready: bool = False
    started: bool = False
    terminating: bool = False
    ended: bool = False
    finished: int = 0  # the last process of its sidecar that is said to have ended


class Place(NamedTuple):
    """A name: its pod at the API server, process and volume behind it, and what the operator knows of it."""

    name: str
    made: int = 0  # pods, so far
    facts: Facts | None = None
    process: Process | None = None
    over: bool = False  # no process of this pod comes back; the API server may not know it yet
    hung: bool = False
    lost: bool = False  # its node is cut off: it is not heard and shown nothing
    disk: tuple[int, bool, int] = (0, False, 0)  # the generation, the final drain and the starts that it remembers
    highest: int = 0  # the generation that it should remember
    shown: Document | None = None
    seen: Facts | None = None
    heard: Told | None = None
    silent: float | None = None  # since when the operator is not answered

    @property
    def answers(self) -> bool:
        """Whether its report can be read."""
        return self.process is not None and not self.hung and not self.lost

    @property
    def finished(self) -> int:
        """The last process that has ended, of those that are numbered."""
        return max(self.disk[2] - (self.process is not None), 0)


class Write(NamedTuple):
    """A document on its way, and the version of the record that it replaces; none: it is a create."""

    document: Document
    version: int | None


class ExploredState(NamedTuple):
    """Everything there is."""

    places: tuple[Place, ...]
    route: tuple[Queue, ...]
    left: tuple[int, ...]  # faults that may still happen, by kind; the last: altogether
    record: Document | None = None
    version: int = 0
    write: Write | None = None
    former: Write | None = None  # of an operator that another one has replaced
    gone: frozenset[str] = frozenset()  # uids that the operator knows to have ended
    asking: frozenset[str] | None = None  # whose report is not read anew yet, after the record was found missing
    paused: bool = False
    schema: int = 2  # of documents that the operator writes at most
    overruled: frozenset[tuple[Queue, str, int]] = frozenset()  # who lost a queue by force, in which generation
    now: float = 0.0


class Turn(NamedTuple):
    """Something that can happen next."""

    kind: str
    text: str
    world: ExploredState


def put(world: ExploredState, place: Place, **changed: Any) -> ExploredState:
    """Put a place that changed where it was."""
    places = tuple(place if it.name == place.name else it for it in world.places)
    return world._replace(places=places, **changed)


def named(world: ExploredState, name: str) -> Place:
    """Return the place of this name."""
    return next(place for place in world.places if place.name == name)


def accepted(write: Write, world: ExploredState) -> bool:
    """Say what the API server makes of a write: a create, or a replacement of the version that its writer knew."""
    if write.version is None or world.record is None:
        return write.version is None and world.record is None
    return write.version == world.version
