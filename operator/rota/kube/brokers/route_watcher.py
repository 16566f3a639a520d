"""Polls brokers for topic routes (once for all groups of a topic), and for the online consumers of each group.

A missing response proves nothing: the topic has no view then, and the planner changes nothing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rota.brokers.errors import BrokerError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.port import BrokerGroupSettings, Brokers, OnlineConsumer, queues_of
from rota.kube.client.objects import ObjectKey
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.queue_quota import QueueQuota
from rota.logs import group_fields
from rota.model import RETRY_TOPIC_PREFIX, Finding, Queue, Reason
from rota.planner import QueueView
from rota.spec import GroupSpec, StartFrom

ROUTE_POLL_SECONDS = 5.0
MIN_CONSUMER_POLL_SECONDS = 5.0
MAX_CONSUMER_POLL_SECONDS = 20.0
CONSUMER_POLLS_PER_SECOND = 50
RETRY_TOPICS_EVERY_POLLS = 4  # only each fourth poll of routes includes retry topics
MAX_CONCURRENT_REQUESTS = 16  # requests under way to one cluster
SILENT_CONNECTION_SECONDS = 120.0  # for which brokers keep a silent connection

_log = logging.getLogger(__name__)


class TopicInterest(NamedTuple):
    """What a group needs to know from its brokers."""

    consumer_group: str  # at the broker
    topics: tuple[str, ...]
    broadcasting: bool
    start_from: StartFrom = StartFrom()
    needs_weights: bool = False  # whether each queue's incoming rate is needed


@dataclass
class _TopicRoute:
    """The last reported route of a topic, and since when it is unchanged."""

    name: str
    queue_counts: Mapping[str, int] | None = None  # number of queues by broker; None: no response yet, or an error
    unchanged_since: float = 0.0
    error: BrokerError | None = None
    brokers: frozenset[str] = field(init=False)  # computed once: each lag sample reads it for every topic

    def __post_init__(self) -> None:
        self.brokers = frozenset(self.queue_counts or ())

    @cached_property
    def queues(self) -> tuple[Queue, ...] | None:
        """All queues; computed only for groups within the queue quota, as there may be very many."""
        return None if self.queue_counts is None else queues_of(self.name, self.queue_counts)


@dataclass(frozen=True)
class _OnlineConsumers:
    """The consumers last seen in a group, and its problems."""

    ids: tuple[str, ...] | None = None  # each as often as one broker lists it
    consumers: Mapping[str, OnlineConsumer] = field(default_factory=dict)  # by id
    settings: Mapping[str, BrokerGroupSettings] = field(default_factory=dict)  # by broker
    problems: tuple[Finding, ...] = ()
    duplicates: Mapping[str, "_DuplicateId"] = field(default_factory=dict)  # ids that one broker lists more than once


class _DuplicateId(NamedTuple):
    """Since when an id is listed twice, and whether at one address: it may be one consumer and its old connection."""

    since: float
    same_address: bool


class RouteWatcher:
    """The routes and online consumers that one broker cluster reports."""

    def __init__(
        self, brokers: Brokers, on_change: Callable[[ObjectKey], None], quota: QueueQuota | None = None
    ) -> None:
        """Ask nothing before `run`; `on_change` is called for a group when its routes or consumers change."""
        self._brokers = brokers
        self._on_change = on_change
        self._quota = quota or QueueQuota()
        self._interests: dict[ObjectKey, TopicInterest] = {}
        self._within_quota: dict[ObjectKey, TopicInterest] = {}
        self._routes: dict[str, _TopicRoute] = {}
        self._groups_of_topic: Counter[str] = Counter()  # how many groups consume each topic
        self._consumers: dict[ObjectKey, _OnlineConsumers] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._route_polls = 0

    @property
    def interests(self) -> Mapping[ObjectKey, TopicInterest]:
        """The interests of the groups that are within the queue quota."""
        return self._within_quota

    def brokers_of_topic(self, topic: str) -> frozenset[str]:
        """Return the brokers that a topic was last seen on."""
        return self._routes[topic].brokers if topic in self._routes else frozenset()

    def queue_count(self, topic: str, broker: str) -> int:
        """Return how many queues of a topic a broker was last seen to have."""
        counts = self._routes[topic].queue_counts if topic in self._routes else None
        return counts.get(broker, 0) if counts else 0

    def brokers_of(self, interest: TopicInterest) -> frozenset[str]:
        """Return the brokers of a group's topics."""
        return frozenset().union(*map(self.brokers_of_topic, topics_of(interest)))

    @property
    def is_idle(self) -> bool:
        """Whether no group is interested any more."""
        return not self._interests

    def set_interest(self, key: ObjectKey, interest: TopicInterest | None) -> None:
        """Set a group's interest; None ends it."""
        previous = self._interests.get(key)
        if previous == interest:
            return
        if interest is None:
            del self._interests[key]
            self._within_quota.pop(key, None)
            self._quota.release(key)
            self._consumers.pop(key, None)
        else:
            self._interests[key] = interest
            self._groups_of_topic.update(topics_of(interest))
            self._claim_queues(key)
        if previous is not None:
            self._forget_topics(topics_of(previous))

    def _claim_queues(self, key: ObjectKey) -> None:
        """Claim a group's queues; a group above the quota is left out of lag polling."""
        interest = self._interests[key]
        topics = [self._routes[topic] for topic in topics_of(interest) if topic in self._routes]
        self._quota.claim(key, [topic.queue_counts for topic in topics if topic.queue_counts])
        if self._quota.rejection(key):
            self._within_quota.pop(key, None)
        else:
            self._within_quota[key] = interest

    def _forget_topics(self, topics: Collection[str]) -> None:
        """Drop the routes of topics that no group consumes any more."""
        self._groups_of_topic.subtract(topics)
        for topic in topics:
            if not self._groups_of_topic[topic]:
                del self._groups_of_topic[topic]
                self._routes.pop(topic, None)

    async def run(self) -> None:
        """Poll routes and online consumers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll_periodically(lambda: ROUTE_POLL_SECONDS, self._poll_routes))
            tasks.create_task(self._poll_periodically(self.consumer_poll_pause, self._poll_all_consumers))

    def consumer_poll_pause(self) -> float:
        """Return the pause between polls of consumers: short, to notice unmanaged ones; longer for many groups."""
        seconds = max(MIN_CONSUMER_POLL_SECONDS, len(self._interests) / CONSUMER_POLLS_PER_SECOND)
        return min(seconds, MAX_CONSUMER_POLL_SECONDS)

    async def _poll_periodically(
        self, pause: Callable[[], float], poll: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            await asyncio.sleep(pause())
            try:
                await poll()
            except Exception:  # noqa: BLE001 - one failed poll must not end the polling
                _log.exception("Polling brokers failed unexpectedly")

    async def poll_group(self, key: ObjectKey) -> None:
        """Poll routes and online consumers of one group now."""
        if interest := self._interests.get(key):
            await asyncio.gather(*(self._poll_topic(topic) for topic in topics_of(interest)))
            await self._poll_group_consumers(key, interest)

    async def poll_consumers(self, key: ObjectKey) -> None:
        """Poll the online consumers of one group now."""
        interest = self._interests.get(key)
        if interest and await self._poll_group_consumers(key, interest):
            self._on_change(key)

    async def _poll_routes(self) -> None:
        """Poll all topics; retry topics, one a group, more rarely, because a retry topic stays once it exists."""
        self._route_polls += 1
        with_retry_topics = self._route_polls % RETRY_TOPICS_EVERY_POLLS == 0
        topics: set[str] = set()
        for interest in self._interests.values():
            topics.update(topics_of(interest) if with_retry_topics else interest.topics)
        await asyncio.gather(*map(self._poll_topic, topics))
        self._retry_claims()

    def _retry_claims(self) -> None:
        """Claim queues again for rejected groups, because another group may have released some."""
        for key in [key for key in self._interests if self._quota.rejection(key)]:
            self._claim_queues(key)
            if not self._quota.rejection(key):
                self._on_change(key)

    async def _poll_all_consumers(self) -> None:
        interests = list(self._interests.items())
        changes = await asyncio.gather(*(self._poll_group_consumers(key, interest) for key, interest in interests))
        for (key, _), has_changed in zip(interests, changes, strict=True):
            if has_changed:
                self._on_change(key)

    async def _poll_topic(self, topic: str) -> None:
        """Ask for a topic's queues; if they have changed, claim them and report all groups of the topic."""
        previous = self._routes.setdefault(topic, _TopicRoute(topic))
        counts: Mapping[str, int] | None = None
        failure: BrokerError | None = None
        async with self._slots:
            try:
                counts = await self._brokers.queue_counts(topic)
            except BrokerError as error:
                failure = error
        is_same = (counts, type(failure)) == (previous.queue_counts, type(previous.error))
        was_polled = previous.unchanged_since > 0
        if is_same and was_polled:
            return
        if topic not in self._routes:  # no group consumes it any more
            return
        self._routes[topic] = _TopicRoute(topic, counts, asyncio.get_running_loop().time(), failure)
        for key in [key for key, interest in self._interests.items() if topic in topics_of(interest)]:
            self._claim_queues(key)
            self._on_change(key)

    async def _poll_group_consumers(self, key: ObjectKey, interest: TopicInterest) -> bool:
        """Ask every broker of a group's topics for online consumers; return whether they have changed."""
        topics = () if self._quota.rejection(key) else interest.topics
        brokers = sorted({broker for topic in topics for broker in self.brokers_of_topic(topic)})
        try:
            responses = await asyncio.gather(*(self._read_broker(interest, broker) for broker in brokers))
            previous_duplicates = self._consumers.get(key, _OnlineConsumers()).duplicates
            current = _OnlineConsumers()
            if brokers:
                current = _merge_consumers(responses, previous_duplicates, asyncio.get_running_loop().time())
        except BrokerError as error:
            _log.info("The broker rejected the request or did not respond: %s", error, extra=group_fields(*key))
            is_rejected = isinstance(error, RejectedError)
            current = _OnlineConsumers(problems=(Finding(Reason.BROKER_REFUSES, str(error)),) if is_rejected else ())
        if self._interests.get(key) != interest:  # the group was deleted or changed during the requests
            return False
        previous = self._consumers.get(key)
        self._consumers[key] = current
        return previous != current

    async def _read_broker(self, interest: TopicInterest, broker: str) -> "_BrokerResponse":
        async with self._slots:
            clients = await self._brokers.online_consumers(interest.consumer_group, broker)
        try:
            async with self._slots:
                return _BrokerResponse(
                    broker, clients, await self._brokers.group_settings(interest.consumer_group, broker)
                )
        except NotFoundError:
            return _BrokerResponse(broker, clients, None)  # no consumer has joined at this broker yet

    def settings_of(self, key: ObjectKey) -> Mapping[str, BrokerGroupSettings]:
        """Return a group's settings as last seen, by broker."""
        return self._consumers.get(key, _OnlineConsumers()).settings

    def is_accepted(self, key: ObjectKey) -> bool | None:
        """Whether the brokers of a group's topics accept it and list its consumers; None: they did not respond."""
        online = self._consumers.get(key, _OnlineConsumers())
        is_refused = any(problem.reason is Reason.BROKER_REFUSES for problem in online.problems)
        if online.ids is not None:
            return True
        return False if is_refused else None

    def consumers_of(self, key: ObjectKey) -> Mapping[str, OnlineConsumer]:
        """Return the consumers last seen in a group, by client id."""
        return self._consumers.get(key, _OnlineConsumers()).consumers

    def state_of(self, key: ObjectKey, now: float, member_suffixes: Collection[str]) -> BrokerState:
        """Return a group's state at its brokers; `member_suffixes` are those of its members' client ids."""
        interest = self._interests.get(key)
        if interest is None:
            return BrokerState()
        views: dict[str, QueueView | None] = {}
        rejection = self._quota.rejection(key)
        problems = [rejection] if rejection else []
        for topic in topics_of(interest):
            route = self._routes.get(topic) or _TopicRoute(topic)
            views[topic] = (
                None if rejection or route.queues is None else QueueView(route.queues, now - route.unchanged_since)
            )
            if isinstance(route.error, NotFoundError) and topic in interest.topics:
                message = f"{route.error}; create the topic, or correct spec.subscriptions"
                problems.append(Finding(Reason.UNKNOWN_TOPIC, message))
            elif isinstance(route.error, UnreachableError) and topic in interest.topics:
                problems.append(Finding(Reason.BROKER_UNREACHABLE, str(route.error)))
            elif isinstance(route.error, RejectedError):
                problems.append(Finding(Reason.BROKER_REFUSES, str(route.error)))
        online = self._consumers.get(key, _OnlineConsumers())
        unmanaged: tuple[str, ...] | None = None
        if online.ids is not None:
            unmanaged = tuple(name for name in online.ids if suffix_of(name) not in member_suffixes)
        problems += [*online.problems, *_duplicate_id_problems(online, now, member_suffixes)]
        # In a Broadcasting group, unmanaged consumers take no queues from the members.
        return BrokerState(views, () if interest.broadcasting else unmanaged, tuple(problems))


class _BrokerResponse(NamedTuple):
    """One broker's response about a group."""

    broker: str
    consumers: tuple[OnlineConsumer, ...]
    settings: BrokerGroupSettings | None


def _merge_consumers(
    responses: Collection[_BrokerResponse], previous_duplicates: Mapping[str, _DuplicateId], now: float
) -> _OnlineConsumers:
    """Merge the responses of a group's brokers; `previous_duplicates` are those of the last poll."""
    problems: list[Finding] = []
    settings = {response.broker: response.settings for response in responses if response.settings}
    disabled = [broker for broker, setting in settings.items() if not setting.consume_enabled]
    if disabled:
        message = f"Consumption is disabled for the group at {', '.join(disabled)}"
        message += "; enable it with mqadmin updateSubGroup -s true"
        problems.append(Finding(Reason.CONSUMPTION_DISABLED, message))
    duplicates: dict[str, _DuplicateId] = {}
    occurrences = Counter[str]()
    for _, listed, _ in responses:
        counts = Counter(client.client_id for client in listed)
        occurrences |= counts  # each consumer is online at every broker
        for name in (name for name, count in counts.items() if count > 1):
            since, same_address = duplicates.get(name) or _DuplicateId(
                previous_duplicates[name].since if name in previous_duplicates else now, same_address=True
            )
            hosts = {client.address.rpartition(":")[0] for client in listed if client.client_id == name}
            duplicates[name] = _DuplicateId(since, same_address and len(hosts) == 1)
    clients = {client.client_id: client for _, listed, _ in responses for client in listed}
    return _OnlineConsumers(tuple(sorted(occurrences.elements())), clients, settings, tuple(problems), duplicates)


def _duplicate_id_problems(online: _OnlineConsumers, now: float, member_suffixes: Collection[str]) -> list[Finding]:
    """Report client ids of several consumers; not a member's while a broker may still hold its old connection."""
    duplicate_ids = sorted(
        client_id
        for client_id, (since, same_address) in online.duplicates.items()
        if not same_address or suffix_of(client_id) not in member_suffixes or now - since > SILENT_CONNECTION_SECONDS
    )
    if not duplicate_ids:
        return []
    names = ", ".join(duplicate_ids[:3])
    message = f"Several consumers use the client ids {names}, so some of their queues stay unread"
    return [Finding(Reason.DUPLICATE_CLIENT_IDS, f"{message}; make client ids unique")]


def suffix_of(client_id: str) -> str:
    """Return the suffix of a client id: for a member's `address@pod#uid` it is `pod#uid`."""
    return client_id.partition("@")[2]


def interest_of(spec: GroupSpec, name: str, *, is_weighed: bool) -> TopicInterest:
    """Return what a ConsumerGroup of this name needs to know from its brokers."""
    topics = tuple(subscription.topic for subscription in spec.subscriptions)
    return TopicInterest(
        spec.group or name, topics, spec.message_model == "Broadcasting", spec.start_from, needs_weights=is_weighed
    )


def topics_of(interest: TopicInterest) -> tuple[str, ...]:
    """Return the topics that members consume: the subscribed ones, and the retry topic unless Broadcasting."""
    return (
        interest.topics if interest.broadcasting else (*interest.topics, RETRY_TOPIC_PREFIX + interest.consumer_group)
    )
