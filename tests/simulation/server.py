"""The API server and the broker of a simulated world: what is true, and what goes wrong on the way to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rota.documents import GZIP_KEY, PLAIN_KEY
from rota.model import RETRY_TOPIC_PREFIX, Queue
from simulation.clock import Clock

LOCK_LIVES = 60.0


class Unreachable(Exception):  # noqa: N818 - it is what happened
    """The server did not answer, or its answer got lost."""


class Conflict(Exception):  # noqa: N818 - it is what happened
    """Somebody else has written meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodObject:
    """A pod as the API server has it."""

    name: str
    uid: str
    version: int = 0
    started: bool = False
    ready: bool = False
    terminating: bool = False
    ended: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stored:
    """The ConfigMap."""

    data: Mapping[str, str | bytes]
    settings: str
    version: int

    @property
    def text(self) -> str | bytes:
        """Return the assignment in it."""
        return self.data.get(PLAIN_KEY) or self.data.get(GZIP_KEY) or ""


Watcher = Callable[[str, PodObject | None, int], None]


class Api:
    """Objects with versions; watchers are told of each change, later, by whoever connects them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.version = 0
        self.record: Stored | None = None
        self.pods: dict[str, PodObject] = {}
        self.status: Mapping[str, Any] = {}
        self.down = False
        self.losing_replies = 0
        self.writes: list[float] = []
        self.watchers: list[Watcher] = []
        self.on_record: list[Callable[[Stored | None], None]] = []

    def answer(self) -> None:
        """Raise if nobody answers."""
        if self.down:
            raise Unreachable

    def write_record(self, data: Mapping[str, str | bytes], settings: str, based_on: int | None) -> None:
        """Create the ConfigMap, or replace the version that the writer knows; the answer may get lost."""
        self.answer()
        if based_on != (self.record.version if self.record else None):
            raise Conflict
        self.put_record(data, settings)
        if self.losing_replies:
            self.losing_replies -= 1
            raise Unreachable

    def put_record(self, data: Mapping[str, str | bytes] | None, settings: str = "") -> None:
        """Change the record without asking, as a person with kubectl does."""
        self.version += 1
        self.writes.append(self.clock.now)
        self.record = None if data is None else Stored(dict(data), settings, self.version)
        for told in self.on_record:
            told(self.record)

    def patch(self, name: str, **changed: object) -> None:
        """Change a pod; watchers hear of it."""
        if name in self.pods:
            self.put(replace(self.pods[name], **changed))  # type: ignore[arg-type]

    def put(self, pod: PodObject) -> None:
        """Make or replace a pod."""
        self.version += 1
        self.pods[pod.name] = replace(pod, version=self.version)
        self._tell(pod.name, self.pods[pod.name])

    def remove(self, name: str) -> None:
        """Delete a pod for good."""
        self.version += 1
        if self.pods.pop(name, None):
            self._tell(name, None)

    def _tell(self, name: str, pod: PodObject | None) -> None:
        for watcher in self.watchers:
            watcher(name, pod, self.version)


class Broker:
    """Routes and queue locks."""

    def __init__(self, clock: Clock, routes: dict[str, dict[str, int]]) -> None:
        self.clock, self.routes = clock, routes
        self.failing = False
        self.hidden: set[str] = set()  # brokers that the name server does not know yet
        self.foreigners: tuple[str, ...] | None = ()
        self.locks: dict[Queue, tuple[str, float]] = {}
        self.changed: dict[str, float] = {}  # topic -> when its true route last changed

    def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the true queues of a topic."""
        return tuple(
            Queue(topic, broker, n) for broker, many in sorted(self.routes[topic].items()) for n in range(many)
        )

    def told(self, topic: str) -> tuple[Queue, ...] | None:
        """Return what the name server says."""
        if self.failing or (topic not in self.routes and not topic.startswith(RETRY_TOPIC_PREFIX)):
            return None
        return tuple(queue for queue in self.queues(topic) if queue.broker not in self.hidden)

    def lock(self, queue: Queue, owner: str) -> bool:
        """Give a lock, or renew it."""
        holder, until = self.locks.get(queue, ("", 0.0))
        if holder not in {"", owner} and until > self.clock.now:
            return False
        self.locks[queue] = (owner, self.clock.now + LOCK_LIVES)
        return True

    def unlock(self, queue: Queue, owner: str) -> None:
        """Take a lock back from its owner."""
        if self.locks.get(queue, ("", 0.0))[0] == owner:
            del self.locks[queue]
