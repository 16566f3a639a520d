"""The API server and the broker of a simulation: the true state, and faults in the access to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from rota.documents import GZIP_KEY, PLAIN_KEY
from rota.model import RETRY_TOPIC_PREFIX, Queue
from simulation.clock import Clock

LOCK_SECONDS = 60.0


class UnreachableError(Exception):
    """The server did not respond, or its response was lost."""


class StaleVersionError(Exception):
    """Another client has written meanwhile."""


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
class StoredConfigMap:
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
    """Objects with versions; watchers are called for each change, and add delays themselves."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.version = 0
        self.config_map: StoredConfigMap | None = None
        self.pods: dict[str, PodObject] = {}
        self.status: Mapping[str, Any] = {}
        self.down = False
        self.responses_to_lose = 0
        self.writes: list[float] = []
        self.watchers: list[Watcher] = []
        self.on_config_map_change: list[Callable[[StoredConfigMap | None], None]] = []

    def require_up(self) -> None:
        """Raise UnreachableError while the server is down."""
        if self.down:
            raise UnreachableError

    def write_config_map(self, data: Mapping[str, str | bytes], settings: str, based_on: int | None) -> None:
        """Create the ConfigMap, or replace the version that the writer knows; the response may be lost."""
        self.require_up()
        if based_on != (self.config_map.version if self.config_map else None):
            raise StaleVersionError
        self.put_config_map(data, settings)
        if self.responses_to_lose:
            self.responses_to_lose -= 1
            raise UnreachableError

    def put_config_map(self, data: Mapping[str, str | bytes] | None, settings: str = "") -> None:
        """Change the ConfigMap unconditionally, as a user with kubectl does."""
        self.version += 1
        self.writes.append(self.clock.now)
        self.config_map = None if data is None else StoredConfigMap(dict(data), settings, self.version)
        for watcher in self.on_config_map_change:
            watcher(self.config_map)

    def patch(self, name: str, **changed: object) -> None:
        """Change a pod and notify the watchers."""
        if name in self.pods:
            self.put(replace(self.pods[name], **changed))  # type: ignore[arg-type]

    def put(self, pod: PodObject) -> None:
        """Create or replace a pod."""
        self.version += 1
        self.pods[pod.name] = replace(pod, version=self.version)
        self._notify(pod.name, self.pods[pod.name])

    def remove(self, name: str) -> None:
        """Delete a pod for good."""
        self.version += 1
        if self.pods.pop(name, None):
            self._notify(name, None)

    def _notify(self, name: str, pod: PodObject | None) -> None:
        for watcher in self.watchers:
            watcher(name, pod, self.version)


class Broker:
    """Routes and queue locks."""

    def __init__(self, clock: Clock, routes: dict[str, dict[str, int]]) -> None:
        self.clock = clock
        self.routes = routes
        self.failing = False
        self.hidden: set[str] = set()  # brokers that the name server does not know yet
        self.all_listed_since = -inf
        self.unmanaged_consumers: tuple[str, ...] | None = ()
        self.locks: dict[Queue, tuple[str, float]] = {}
        self.changed: dict[str, float] = {}  # topic → time of the last change of its true route

    def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the true queues of a topic."""
        return tuple(
            Queue(topic, broker, number)
            for broker, count in sorted(self.routes[topic].items())
            for number in range(count)
        )

    def visible_queues(self, topic: str) -> tuple[Queue, ...] | None:
        """Return the queues that the name server knows; None if it does not respond."""
        if self.failing or (topic not in self.routes and not topic.startswith(RETRY_TOPIC_PREFIX)):
            return None
        return tuple(queue for queue in self.queues(topic) if queue.broker not in self.hidden)

    def list_all(self) -> None:
        """Every broker has registered at the name server."""
        self.hidden.clear()
        self.all_listed_since = self.clock.now

    def lock(self, queue: Queue, owner: str) -> bool:
        """Grant a lock, or renew it; False if another owner holds it."""
        holder, until = self.locks.get(queue, ("", 0.0))
        if holder not in {"", owner} and until > self.clock.now:
            return False
        self.locks[queue] = (owner, self.clock.now + LOCK_SECONDS)
        return True

    def unlock(self, queue: Queue, owner: str) -> None:
        """Release the lock of this owner."""
        if self.locks.get(queue, ("", 0.0))[0] == owner:
            del self.locks[queue]
