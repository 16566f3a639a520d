"""Routes of topics: how many queues each broker has; fetched once for all groups of a topic.

If the name server does not respond, the planner gets no `QueueView` of the topic, and leaves its queues with their
owners.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rota.brokers.errors import BrokerError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.port import Brokers, queues_of
from rota.kube.brokers.topic_interest import TopicInterest
from rota.model import Finding, Queue, Reason
from rota.planner import QueueView


@dataclass
class PolledRoute:
    """The last reported route of a topic, and since when it is unchanged."""

    name: str
    queue_counts: Mapping[str, int] | None = None  # number of queues by broker; None: no response yet, or an error
    unchanged_since: float = 0.0  # on the loop's clock; 0: never polled
    error: BrokerError | None = None
    brokers: frozenset[str] = field(init=False)  # computed once: each lag sample reads it for every topic

    def __post_init__(self) -> None:
        self.brokers = frozenset(self.queue_counts or ())

    @cached_property
    def queues(self) -> tuple[Queue, ...] | None:
        """All queues; computed only for groups within the `QueueQuota`, as a route may list very many queues."""
        return None if self.queue_counts is None else queues_of(self.name, self.queue_counts)

    def view(self, now: float) -> QueueView | None:
        """Return the planner's view of the topic; None without a route."""
        return None if self.queues is None else QueueView(self.queues, now - self.unchanged_since)

    def problem(self, *, is_subscribed: bool) -> Finding | None:
        """Return the problem that a user must know if the last poll failed.

        The retry topic is not subscribed (`is_subscribed`), and need not exist: only a rejection is reported.
        """
        if isinstance(self.error, NotFoundError) and is_subscribed:
            message = f"{self.error}; create the topic, or correct spec.subscriptions"
            return Finding(Reason.UNKNOWN_TOPIC, message)
        if isinstance(self.error, UnreachableError) and is_subscribed:
            return Finding(Reason.BROKER_UNREACHABLE, str(self.error))
        if isinstance(self.error, RejectedError):
            return Finding(Reason.BROKER_REFUSES, str(self.error))
        return None


class TopicRoutes:
    """The routes that the last polls of one broker cluster returned for the topics that groups consume."""

    def __init__(self, brokers: Brokers, slots: asyncio.Semaphore) -> None:
        """`slots` limits the concurrent requests to the cluster, together with those of `RouteWatcher`."""
        self._brokers = brokers
        self._slots = slots
        self._routes: dict[str, PolledRoute] = {}
        self._group_counts: Counter[str] = Counter()  # by topic: number of groups that consume it

    def route_of(self, topic: str) -> PolledRoute:
        """Return a topic's route by the last poll; an empty route if the poll failed, or none has ended yet."""
        return self._routes.get(topic) or PolledRoute(topic)

    def brokers_of_topic(self, topic: str) -> frozenset[str]:
        """Return the brokers of a topic by the last poll; none if the poll failed."""
        return self.route_of(topic).brokers

    def brokers_of(self, topics: Collection[str]) -> frozenset[str]:
        """Return the brokers of any of these topics by the last polls."""
        return frozenset().union(*map(self.brokers_of_topic, topics))

    def queue_counts_of(self, topics: Collection[str]) -> list[Mapping[str, int]]:
        """Return the numbers of queues, by broker, of each of these topics that has a route."""
        return [route.queue_counts for route in map(self.route_of, topics) if route.queue_counts]

    def queue_counts_at(self, broker: str, topics: Collection[str]) -> dict[str, int]:
        """Return how many queues each of these topics has on a broker by the last poll; omit topics without any."""
        counts: dict[str, int] = {}
        for topic in topics:
            counts_by_broker = self.route_of(topic).queue_counts or {}
            if broker in counts_by_broker:
                counts[topic] = counts_by_broker[broker]
        return counts

    def add_group(self, interest: TopicInterest) -> None:
        """Keep the routes of a group's topics from now on."""
        self._group_counts.update(interest.consumed_topics)

    def remove_group(self, interest: TopicInterest) -> None:
        """Drop the routes of topics that no group consumes any more."""
        self._group_counts.subtract(interest.consumed_topics)
        for topic in interest.consumed_topics:
            if not self._group_counts[topic]:
                del self._group_counts[topic]
                self._routes.pop(topic, None)

    async def poll(self, topic: str) -> bool:
        """Ask for a topic's queues; return whether its route has changed."""
        previous = self._routes.setdefault(topic, PolledRoute(topic))
        counts: Mapping[str, int] | None = None
        failure: BrokerError | None = None
        async with self._slots:
            try:
                counts = await self._brokers.queue_counts(topic)
            except BrokerError as error:
                failure = error
        # The text of a lasting error may change with each poll, so its type is compared.
        is_same = (counts, type(failure)) == (previous.queue_counts, type(previous.error))
        was_polled = previous.unchanged_since > 0
        if is_same and was_polled:
            return False
        if topic not in self._routes:  # no group consumes it any more
            return False
        self._routes[topic] = PolledRoute(topic, counts, asyncio.get_running_loop().time(), failure)
        return True
