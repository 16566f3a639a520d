"""What name servers said, as far as a client remembers it: where brokers are, and the routes of topics.

A name server may say something else each time, so both have limits. Forgetting costs little: a broker that is asked is
looked up again, and so is a route.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from rota.brokers.errors import Garbled
from rota.brokers.port import queues_of
from rota.model import Queue

FORGET_SECONDS = 300.0  # after that a broker that no name server lists is gone for good
MOST_QUEUES = 2**18  # of a topic; a route is short, however many it names
MOST_REPLICAS = 4096  # of all brokers; four for each of the most brokers that a group may have
MOST_REPLICAS_OF_BROKER = 64
MOST_PLACES = 2**15  # pairs of topic and broker
LONGEST_NAME = 255  # of a broker
LONGEST_ADDRESS = 300  # a host's name has up to 253 characters

Addresses = dict[str, dict[int, str]]  # of brokers, by name and id


def checked(found: Addresses) -> Addresses:
    """Return the addresses that a name server lists, or raise Garbled if any broker has more than is possible."""
    for name, replicas in found.items():
        check_name(name)
        if len(replicas) > MOST_REPLICAS_OF_BROKER:
            raise Garbled(f"A broker has {len(replicas):,} replicas; {MOST_REPLICAS_OF_BROKER} are the most")
        if any(len(address) > LONGEST_ADDRESS for address in replicas.values()):
            raise Garbled(f"A broker's address is longer than {LONGEST_ADDRESS} characters")
    return found


def check_name(broker: str) -> None:
    """Raise Garbled if a broker's name is longer than any."""
    if len(broker) > LONGEST_NAME:
        raise Garbled(f"A broker's name is longer than {LONGEST_NAME} characters")


@dataclass(frozen=True)
class Route:
    """Where a topic is: its brokers, and how many queues can be read at each of those that have some."""

    topic: str
    queue_counts: Mapping[str, int]
    brokers: frozenset[str]

    def __contains__(self, queue: Queue) -> bool:
        """Whether there is this queue of the topic."""
        return 0 <= queue.id < self.queue_counts.get(queue.broker, 0)

    def queues(self) -> tuple[Queue, ...]:
        """Return all queues; raise Garbled if there are more than any topic has."""
        if (most := sum(self.queue_counts.values())) > MOST_QUEUES:
            raise Garbled(f"The route of {self.topic} names {most:,} queues; {MOST_QUEUES:,} are the most")
        return queues_of(self.topic, self.queue_counts)


class RememberedRoutes:
    """The last route of each topic, and when it was last asked for; those that were not asked for longest go first."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}  # in the order of time
        self._routes: dict[str, Route] = {}
        self._places = 0

    def get(self, topic: str) -> Route | None:
        """Return a topic's route."""
        return self._routes.get(topic)

    def asked_at(self, topic: str) -> float:
        """Return when a topic's route was last asked for."""
        return self._asked.get(topic, -inf)

    @property
    def brokers(self) -> set[str]:
        """The brokers of all routes."""
        return {broker for route in self._routes.values() for broker in route.brokers}

    def note_asked(self, topic: str, now: float) -> None:
        """Note that a topic's route is asked for."""
        self._asked.pop(topic, None)
        self._asked[topic] = now
        self._trim()

    def learn(self, route: Route) -> None:
        """Remember a route in place of the one before, unless its topic was forgotten while it was asked for."""
        self.forget(route.topic)
        if route.topic not in self._asked:
            return
        self._routes[route.topic] = route
        self._places += len(route.brokers)
        self._trim()

    def forget(self, topic: str) -> None:
        """Remember no route of a topic."""
        route = self._routes.pop(topic, None)
        self._places -= len(route.brokers) if route else 0

    def _trim(self) -> None:
        """Forget topics until no more is remembered than allowed, but not the last one."""
        while self._places + len(self._asked) > MOST_PLACES and len(self._asked) > 1:
            oldest = next(iter(self._asked))
            del self._asked[oldest]
            self.forget(oldest)


class RememberedBrokers:
    """The last known address of each replica, also of those that name servers do not list any more."""

    def __init__(self) -> None:
        self.addresses: Addresses = {}  # the brokers that were listed last come last
        self._missed: dict[tuple[str, int], float] = {}  # replicas that name servers list no more, and since when

    def learn(self, found: Addresses) -> None:
        """Remember replicas where they are now; one that is not listed is still where it was."""
        for name, replicas in found.items():
            before = self.addresses.pop(name, {})
            kept = {number: address for number, address in before.items() if number not in replicas}
            self.addresses[name] = dict([*kept.items(), *replicas.items()][-MOST_REPLICAS_OF_BROKER:])

    def trim(self, routed: Collection[str]) -> None:
        """Forget brokers until no more is remembered than allowed: the oldest first, and of those `routed` last."""
        excess = self._size - MOST_REPLICAS
        for name in sorted(self.addresses, key=routed.__contains__):
            if excess <= 0:
                break
            excess -= _weight(self.addresses.pop(name))

    @property
    def is_full(self) -> bool:
        """Whether more is remembered than allowed."""
        return self._size > MOST_REPLICAS

    @property
    def _size(self) -> int:
        return sum(map(_weight, self.addresses.values()))

    def forget_missing(self, listed: Addresses, now: float) -> None:
        """Forget replicas that name servers have not listed for long; `listed`: those that one lists now."""
        before, self._missed = self._missed, {}
        for name, number in [(name, number) for name, replicas in self.addresses.items() for number in replicas]:
            if number in listed.get(name, {}):
                continue
            since = before.get((name, number), now)
            if now - since < FORGET_SECONDS:
                self._missed[name, number] = since
                continue
            del self.addresses[name][number]
            if not self.addresses[name]:
                del self.addresses[name]

    def believe_all(self) -> None:
        """Take all replicas for listed: no name server could be asked."""
        self._missed.clear()


def _weight(replicas: Mapping[int, str]) -> int:
    return max(1, len(replicas))
