"""Polls one broker cluster for the routes of topics and the online consumers of groups, and reports their changes.

The *interest* of a group is what it consumes (`TopicInterest`). `QueueQuota` limits the queues of a group, and of all
groups together: a group above the limit is rejected, and not polled for consumers or lag.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from itertools import starmap
from typing import Any

from rota.brokers.errors import BrokerError, RejectedError
from rota.brokers.port import Brokers
from rota.kube.brokers.online_consumers import OnlineConsumers, merge_consumers, read_group_at
from rota.kube.brokers.topic_interest import TopicInterest
from rota.kube.brokers.topic_routes import TopicRoutes
from rota.kube.client.objects import ObjectKey
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.queue_quota import QueueQuota
from rota.logs import group_fields
from rota.model import Finding, Reason
from rota.planner import QueueView

ROUTE_POLL_SECONDS = 5.0
MIN_CONSUMER_POLL_SECONDS = 5.0
MAX_CONSUMER_POLL_SECONDS = 20.0
CONSUMER_POLLS_PER_SECOND = 50
RETRY_TOPICS_EVERY_POLLS = 4  # only each fourth poll of routes includes retry topics
MAX_CONCURRENT_REQUESTS = 16  # requests under way to one cluster

_log = logging.getLogger(__name__)


class RouteWatcher:
    """Watches the topics and consumers of the groups that use one broker cluster."""

    def __init__(
        self, brokers: Brokers, on_change: Callable[[ObjectKey], None], quota: QueueQuota | None = None
    ) -> None:
        """`on_change` is called for a group when its routes or consumers change."""
        self._on_change = on_change
        self._quota = quota or QueueQuota()
        self._interests: dict[ObjectKey, TopicInterest] = {}
        self._within_quota: dict[ObjectKey, TopicInterest] = {}
        slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._read_group_at = partial(read_group_at, brokers, slots)
        self.routes = TopicRoutes(brokers, slots)
        self._consumers: dict[ObjectKey, OnlineConsumers] = {}
        self._route_polls = 0

    @property
    def interests_within_quota(self) -> Mapping[ObjectKey, TopicInterest]:
        """The interests of the groups that are within the quota of queues for all groups (`QueueQuota`)."""
        return self._within_quota

    @property
    def is_idle(self) -> bool:
        """Whether no group uses the cluster."""
        return not self._interests

    def set_interest(self, key: ObjectKey, interest: TopicInterest | None) -> None:
        """Set a group's interest; None: the group does not use the cluster any more."""
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
            self.routes.add_group(interest)
            self._claim_queues(key)
        if previous is not None:  # after `add_group`: topics of both interests keep their routes
            self.routes.remove_group(previous)

    def _claim_queues(self, key: ObjectKey) -> None:
        """Claim a group's queues; a group above the quota is left out of `interests_within_quota`."""
        interest = self._interests[key]
        self._quota.claim(key, self.routes.queue_counts_of(interest.consumed_topics))
        if self._quota.rejection(key):
            self._within_quota.pop(key, None)
        else:
            self._within_quota[key] = interest

    async def run(self) -> None:
        """Poll routes and online consumers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll_periodically(lambda: ROUTE_POLL_SECONDS, self._poll_routes))
            tasks.create_task(self._poll_periodically(self.consumer_poll_pause, self._poll_all_consumers))

    def consumer_poll_pause(self) -> float:
        """Return the pause between polls of consumers: short, to notice unmanaged consumers; longer for many groups."""
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
        """Poll routes and online consumers of one group now; call `on_change` for changed routes, not for consumers.

        The callers handle changed consumers: a reconcile (`BrokerRegistry.poll_group`) reads them after the poll, and
        `BrokerRegistry.update_group`, which polls after a change of the spec, reports the group itself.
        """
        if interest := self._interests.get(key):
            await asyncio.gather(*map(self._poll_topic, interest.consumed_topics))
            await self._poll_group_consumers(key, interest)

    async def poll_consumers(self, key: ObjectKey) -> None:
        """Poll the online consumers of one group now, and report a change."""
        interest = self._interests.get(key)
        if interest and await self._poll_group_consumers(key, interest):
            self._on_change(key)

    async def _poll_routes(self) -> None:
        """Poll all topics; retry topics only every fourth time: each group has one, and it stays once it exists."""
        self._route_polls += 1
        with_retry_topics = self._route_polls % RETRY_TOPICS_EVERY_POLLS == 0
        topics: set[str] = set()
        for interest in self._interests.values():
            topics.update(interest.consumed_topics if with_retry_topics else interest.topics)
        await asyncio.gather(*map(self._poll_topic, topics))
        self._retry_claims()

    async def _poll_topic(self, topic: str) -> None:
        """Ask for a topic's queues; if they have changed, claim them and report all groups of the topic."""
        if not await self.routes.poll(topic):
            return
        for key, interest in list(self._interests.items()):
            if topic in interest.consumed_topics:
                self._claim_queues(key)
                self._on_change(key)

    def _retry_claims(self) -> None:
        """Claim queues again for rejected groups, because another group may have released some."""
        for key in filter(self._quota.rejection, list(self._interests)):
            self._claim_queues(key)
            if not self._quota.rejection(key):
                self._on_change(key)

    async def _poll_all_consumers(self) -> None:
        interests = list(self._interests.items())
        changes = await asyncio.gather(*starmap(self._poll_group_consumers, interests))
        for (key, _), has_changed in zip(interests, changes, strict=True):
            if has_changed:
                self._on_change(key)

    async def _poll_group_consumers(self, key: ObjectKey, interest: TopicInterest) -> bool:
        """Ask every broker of a group's topics for online consumers; return whether they have changed."""
        brokers = () if self._quota.rejection(key) else sorted(self.routes.brokers_of(interest.topics))
        try:
            responses = await asyncio.gather(*map(partial(self._read_group_at, interest.consumer_group), brokers))
            current = OnlineConsumers()  # if there is no broker to ask: nothing is known
            if brokers:
                current = merge_consumers(responses, self.online_of(key).duplicates, asyncio.get_running_loop().time())
        except BrokerError as error:
            _log.info("The broker rejected the request or did not respond: %s", error, extra=group_fields(*key))
            is_rejected = isinstance(error, RejectedError)
            current = OnlineConsumers(problems=(Finding(Reason.BROKER_REFUSES, str(error)),) if is_rejected else ())
        if self._interests.get(key) != interest:  # the group was deleted or changed during the requests
            return False
        previous = self._consumers.get(key)
        self._consumers[key] = current
        return previous != current

    def online_of(self, key: ObjectKey) -> OnlineConsumers:
        """Return the consumers last seen in a group."""
        return self._consumers.get(key, OnlineConsumers())

    def state_of(self, key: ObjectKey, now: float, member_suffixes: Collection[str]) -> BrokerState:
        """Return a group's state at its brokers; `member_suffixes` are the suffixes of its members' client ids.

        A client id begins with the pod's address, which may change or be unknown, so members are matched by the suffix.
        """
        interest = self._interests.get(key)
        if interest is None:
            return BrokerState()
        views: dict[str, QueueView | None] = {}
        rejection = self._quota.rejection(key)
        problems = [rejection] if rejection else []
        for topic in interest.consumed_topics:
            route = self.routes.route_of(topic)
            views[topic] = None if rejection else route.view(now)
            if problem := route.problem(is_subscribed=topic in interest.topics):
                problems.append(problem)
        online = self.online_of(key)
        problems += [*online.problems, *online.duplicate_problems(now, member_suffixes)]
        # In a Broadcasting group, unmanaged consumers take no queues from the members.
        unmanaged_ids = () if interest.broadcasting else online.unmanaged_ids(member_suffixes)
        return BrokerState(views, unmanaged_ids, tuple(problems))
