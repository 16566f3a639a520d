"""Client-side cache of name server responses: addresses of brokers, and routes of topics.

A name server may return different names each time, so both caches are limited. Eviction costs little: the client
looks up a broker or route again when it needs it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from rota.brokers.errors import MalformedResponseError
from rota.brokers.port import queues_of
from rota.model import Queue

# A replica is evicted if no list of all brokers has named it in this time. Each list is from one name server, which may
# have just started and know only some brokers: so a single list evicts nothing.
EVICT_UNLISTED_SECONDS = 300.0
MAX_TOPIC_QUEUES = 2**18  # queues of a topic; even a short route can declare any number
MAX_REPLICAS = 4096  # replicas of all brokers: four for each broker that a topic may have (`routing.MAX_TOPIC_BROKERS`)
MAX_BROKER_REPLICAS = 64  # replicas of one broker
MAX_ROUTE_ENTRIES = 2**15  # requested topics, plus pairs of topic and broker in all routes
MAX_NAME_CHARACTERS = 255  # characters of a broker's name
MAX_ADDRESS_CHARACTERS = 300  # characters; a host name has up to 253

Addresses = dict[str, dict[int, str]]  # addresses of replicas by broker name and broker id


def check_addresses(addresses: Addresses) -> Addresses:
    """Return the addresses that a name server lists; raise MalformedResponseError if a broker exceeds the limits."""
    for name, replicas in addresses.items():
        check_broker_name(name)
        if len(replicas) > MAX_BROKER_REPLICAS:
            limit = f"at most {MAX_BROKER_REPLICAS} are supported"
            raise MalformedResponseError(f"The name server lists {len(replicas):,} replicas of one broker; {limit}")
        if max(map(len, replicas.values()), default=0) > MAX_ADDRESS_CHARACTERS:
            raise MalformedResponseError(f"A broker's address is longer than {MAX_ADDRESS_CHARACTERS} characters")
    return addresses


def check_broker_name(broker: str) -> None:
    """Raise MalformedResponseError if a broker's name exceeds the limit."""
    if len(broker) > MAX_NAME_CHARACTERS:
        raise MalformedResponseError(f"A broker's name is longer than {MAX_NAME_CHARACTERS} characters")


@dataclass(frozen=True)
class Route:
    """The route of a topic: its brokers, and the number of readable queues on each broker that has any."""

    topic: str
    queue_counts: Mapping[str, int]
    brokers: frozenset[str]

    def __contains__(self, queue: Queue) -> bool:
        """Return whether the topic has this queue."""
        return 0 <= queue.id < self.queue_counts.get(queue.broker, 0)

    def queues(self) -> tuple[Queue, ...]:
        """Return all queues; raise MalformedResponseError if they are more than MAX_TOPIC_QUEUES."""
        count = sum(self.queue_counts.values())
        if count > MAX_TOPIC_QUEUES:
            raise MalformedResponseError(
                f"The route of topic {self.topic} has {count:,} queues; at most {MAX_TOPIC_QUEUES:,} are supported"
            )
        return queues_of(self.topic, self.queue_counts)


class RouteCache:
    """The last route of each topic and the time of its last request. The least recently requested is evicted first."""

    def __init__(self) -> None:
        self._requested_at: dict[str, float] = {}  # by topic, the oldest request first
        self._routes: dict[str, Route] = {}
        self._route_entries = 0  # pairs of topic and broker in all routes

    def get(self, topic: str) -> Route | None:
        """Return the cached route of a topic."""
        return self._routes.get(topic)

    def requested_at(self, topic: str) -> float:
        """Return when a topic's route was last requested; -inf if never, or if it was evicted."""
        return self._requested_at.get(topic, -inf)

    @property
    def brokers(self) -> set[str]:
        """The brokers of all cached routes."""
        return set().union(*(route.brokers for route in self._routes.values()))

    def mark_requested(self, topic: str, now: float) -> None:
        """Record that a topic's route is requested now."""
        self._requested_at.pop(topic, None)
        self._requested_at[topic] = now
        self._trim()

    def learn(self, route: Route) -> None:
        """Replace the cached route of a topic, unless the topic was evicted during the request."""
        self.forget(route.topic)
        if route.topic not in self._requested_at:
            return
        self._routes[route.topic] = route
        self._route_entries += len(route.brokers)
        self._trim()

    def forget(self, topic: str) -> None:
        """Remove the cached route of a topic."""
        route = self._routes.pop(topic, None)
        self._route_entries -= len(route.brokers) if route else 0

    def _trim(self) -> None:
        """Evict topics until the cache is within its limit, but keep the most recent one."""
        while self._route_entries + len(self._requested_at) > MAX_ROUTE_ENTRIES and len(self._requested_at) > 1:
            oldest = next(iter(self._requested_at))
            del self._requested_at[oldest]
            self.forget(oldest)


class BrokerCache:
    """The last known address of each replica, also of replicas that name servers no longer list."""

    def __init__(self) -> None:
        self.addresses: Addresses = {}  # the most recently listed brokers come last
        # By broker name and id, only for replicas missing from the last list of all brokers: when they went missing.
        self._unlisted_since: dict[tuple[str, int], float] = {}

    def learn(self, listed: Addresses) -> None:
        """Update the addresses of listed replicas: of one topic's brokers, or of all that one name server lists.

        A replica that is not listed keeps its last address.
        """
        for name, replicas in listed.items():
            previous = self.addresses.pop(name, {})
            unlisted = {number: address for number, address in previous.items() if number not in replicas}
            merged = [*unlisted.items(), *replicas.items()]
            self.addresses[name] = dict(merged[-MAX_BROKER_REPLICAS:])  # above the limit, drop unlisted replicas first

    def trim(self, routed_brokers: Collection[str]) -> None:
        """Evict brokers until the cache is within its limit: the oldest first, those of cached routes last."""
        excess = self._size - MAX_REPLICAS
        unrouted_first = sorted(self.addresses, key=routed_brokers.__contains__)
        for name in unrouted_first:
            if excess <= 0:
                break
            excess -= _weight(self.addresses.pop(name))

    @property
    def exceeds_limit(self) -> bool:
        """Whether the cache exceeds its limit."""
        return self._size > MAX_REPLICAS

    @property
    def _size(self) -> int:
        return sum(map(_weight, self.addresses.values()))

    def forget_missing(self, listed: Addresses, now: float) -> None:
        """Evict replicas that were not listed for EVICT_UNLISTED_SECONDS.

        `listed` must have all brokers that one name server lists now, not only the brokers of a route.
        """
        previous = self._unlisted_since
        self._unlisted_since = {}
        for name, replicas in [*self.addresses.items()]:
            for number in replicas.keys() - listed.get(name, {}).keys():
                since = previous.get((name, number), now)
                if now - since < EVICT_UNLISTED_SECONDS:
                    self._unlisted_since[name, number] = since
                    continue
                del replicas[number]
                if not replicas:
                    del self.addresses[name]

    def mark_all_listed(self) -> None:
        """Restart EVICT_UNLISTED_SECONDS for every replica: no name server answered, so none is known to be missing."""
        self._unlisted_since.clear()


def _weight(replicas: Mapping[int, str]) -> int:
    """Return how many replicas a broker counts for; a name without replicas takes memory, too."""
    return max(1, len(replicas))
