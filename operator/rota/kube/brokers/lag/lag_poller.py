"""Polls brokers for the lag of groups every 15 seconds, each broker on its own, so a slow one delays no other.

Committed offsets are read before the ends of queues (max_offset), so that no end is below a committed offset. An offset
that a broker does not report is unknown; earlier offsets are not reused. If a request to a broker times out, and the
broker responds to no other request meanwhile, it is *away*: the lag of all groups at this broker becomes unknown.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from time import time
from typing import NamedTuple

from rota.aio import yield_periodically
from rota.brokers.errors import NotFoundError
from rota.brokers.port import Brokers
from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, QueueLag
from rota.kube.brokers.lag.lag_merge import LagAtBroker, RequestTime, update_lags
from rota.kube.brokers.lag.offset_sampler import OffsetSampler
from rota.kube.brokers.lag.polled_broker import PolledBroker, brokers_to_keep, send_all
from rota.kube.brokers.lag.queue_resolver import MAX_OFFSET, QueueResolver
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.brokers.topic_interest import TopicInterest
from rota.kube.client.objects import ObjectKey
from rota.model import Queue

LAG_POLL_SECONDS = 15.0
FIRST_POLL_SECONDS = 0.5  # seconds until the next poll while no broker is known
DEAD_LETTERS_EVERY_POLLS = 4  # only each fourth poll counts dead letters, which are rare
LOST_BROKER_SECONDS = 60.0  # a broker that has left a topic's route may come back within this time
DEAD_LETTER_PREFIX = "%DLQ%"

_log = logging.getLogger(__name__)


class GroupLag(NamedTuple):
    """A group's lag, as far as its brokers reported it."""

    queues: Mapping[Queue, QueueLag]
    dead_letters: int | None = None
    sampled_at: float | None = None  # the oldest `LagAtBroker.sampled_at`, in seconds since 1970
    requested_at: float | None = None  # the oldest `LagAtBroker.requested_at`: a metric computes the lag's age from it
    incomplete_topics: frozenset[str] = frozenset()  # their routes have just lost a broker, which may come back
    incoming_rates: Mapping[Queue, float | None] = {}  # messages a second; only if the policy needs weights

    def queue_lag(self, queue: Queue) -> QueueLag:
        """Return the lag of the group on one queue."""
        return self.queues.get(queue, UNKNOWN_QUEUE_LAG)


class LagPoller:
    """Polls the brokers of one cluster for the lag of groups."""

    def __init__(
        self,
        brokers: Brokers,
        route_watcher: RouteWatcher,
        consumed_queues: Callable[[ObjectKey], Collection[Queue]],
        on_poll: Callable[[Collection[ObjectKey]], None] = lambda _: None,
        reported_offsets: Callable[[ObjectKey], Mapping[Queue, int]] = lambda _: {},
        *,
        on_known_change: Callable[[ObjectKey], None] = lambda _: None,
        topic_starts: Callable[[ObjectKey], Mapping[str, float]] = lambda _: {},
    ) -> None:
        """`on_poll` is called after each poll of a broker, `on_known_change` when lag becomes known or unknown.

        `consumed_queues` returns the queues of a group that have a consumer. Brokers do not know the offsets of a
        Broadcasting group: `reported_offsets` returns those of its slowest member. `topic_starts` returns since when
        a group has consumed its topics: on a queue without a commit, a group that starts at Latest has no lag from
        messages before that time.
        """
        self._brokers = brokers
        self._route_watcher = route_watcher
        self._consumed_queues = consumed_queues
        self._on_poll = on_poll
        self._on_known_change = on_known_change
        self._sampler = OffsetSampler(
            brokers, route_watcher.routes, reported_offsets, QueueResolver(brokers, topic_starts)
        )
        self._last_routed_at: dict[str, dict[str, float]] = {}  # by topic and broker: when the topic was last on it
        self._brokers_by_name: dict[str, PolledBroker] = {}
        self.poll_seconds = LAG_POLL_SECONDS

    async def run(self) -> None:
        """Poll until cancelled; leave out a broker while its previous poll still runs."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                groups_of_broker = self._groups_by_broker()
                now = asyncio.get_running_loop().time()
                self._note_routes(now)
                self._brokers_by_name = brokers_to_keep(self._brokers_by_name, groups_of_broker, now)
                # A broker that no route lists has no lag. Its samples are kept for a while (`brokers_to_keep`): if the
                # broker comes back, for instance after a restart, lag states and rates do not have to start anew.
                for name in self._brokers_by_name.keys() - groups_of_broker.keys():
                    self._brokers_by_name[name].lag_by_group = {}
                for name, groups in groups_of_broker.items():
                    broker = self._brokers_by_name.setdefault(name, PolledBroker(name))
                    broker.last_needed_at = now
                    if broker.poll_task is None or broker.poll_task.done():
                        broker.poll_task = tasks.create_task(self._poll_safely(broker, groups), name=f"lag {name}")
                await asyncio.sleep(self.poll_seconds if self._brokers_by_name else FIRST_POLL_SECONDS)

    def lag_of(self, key: ObjectKey) -> GroupLag:
        """Return a group's lag, merged from all brokers."""
        interest = self._route_watcher.interests_within_quota.get(key)
        if interest is None:
            return GroupLag({})
        brokers = list(self._brokers_by_name.values())  # a copy: the journal reads lag in a thread
        incomplete_topics = frozenset(filter(self._has_lost_a_broker, interest.consumed_topics))
        queues: dict[Queue, QueueLag] = {}
        incoming_rates: dict[Queue, float | None] = {}
        dead_letters: list[int | None] = []
        sampled_at: list[float | None] = []
        requested_at: list[float | None] = []
        for broker in brokers:
            if lag := broker.lag_of(key, interest):
                queues |= lag.queue_lags
                incoming_rates |= lag.incoming_rates
                dead_letters.append(lag.dead_letters)
                sampled_at.append(lag.sampled_at)
                requested_at.append(lag.requested_at)
        has_all_dead_letters = dead_letters and None not in dead_letters and not incomplete_topics
        return GroupLag(
            queues,
            sum(filter(None, dead_letters)) if has_all_dead_letters else None,
            _oldest(sampled_at),
            _oldest(requested_at),
            incomplete_topics,
            incoming_rates,
        )

    def _note_routes(self, now: float) -> None:
        """Remember when each broker was last in a topic's route.

        A broker that has left the route is remembered for LOST_BROKER_SECONDS. While the topic has no route at all, as
        after a failed poll, its last brokers count as if they were still in it.
        """
        topics: set[str] = set()
        for interest in self._route_watcher.interests_within_quota.values():
            topics.update(interest.consumed_topics)
        last_routed_at: dict[str, dict[str, float]] = {}
        for topic in topics:
            brokers = self._route_watcher.routes.brokers_of_topic(topic)
            routed_at = self._last_routed_at.get(topic, {})
            if brokers:
                recent = {name: at for name, at in routed_at.items() if now < at + LOST_BROKER_SECONDS}
                last_routed_at[topic] = recent | dict.fromkeys(brokers, now)
            else:
                last_routed_at[topic] = dict.fromkeys(routed_at, now)
        self._last_routed_at = last_routed_at

    def _has_lost_a_broker(self, topic: str) -> bool:
        brokers = self._route_watcher.routes.brokers_of_topic(topic)
        return bool(brokers and self._last_routed_at.get(topic, {}).keys() - brokers)

    def _groups_by_broker(self) -> dict[str, dict[ObjectKey, TopicInterest]]:
        """Return the groups with a topic on each broker."""
        groups_of_broker: dict[str, dict[ObjectKey, TopicInterest]] = {}
        for key, interest in self._route_watcher.interests_within_quota.items():
            for name in self._route_watcher.routes.brokers_of(interest.consumed_topics):
                groups_of_broker.setdefault(name, {})[key] = interest
        return groups_of_broker

    async def _poll_safely(self, broker: PolledBroker, groups: Mapping[ObjectKey, TopicInterest]) -> None:
        try:
            await self._poll_broker(broker, groups)
        except Exception:  # noqa: BLE001 - one broker's failed poll must not stop the others
            _log.exception("Polling lag at %s failed unexpectedly", broker.name)
            self._mark_unknown(broker, groups)

    def _mark_unknown(self, broker: PolledBroker, groups: Mapping[ObjectKey, TopicInterest]) -> None:
        """Make the lag of all groups at a broker unknown, and report that at once."""
        now = asyncio.get_running_loop().time()
        self._set_lags(broker, {key: broker.unknown_lag(key, interest, now) for key, interest in groups.items()})

    def _set_lags(self, broker: PolledBroker, lags: dict[ObjectKey, LagAtBroker]) -> None:
        previous = broker.lag_by_group
        broker.lag_by_group = lags
        self._on_poll(lags.keys())
        for key, lag in lags.items():
            if lag.is_known != (key in previous and previous[key].is_known):
                self._on_known_change(key)

    async def _poll_broker(self, broker: PolledBroker, groups: Mapping[ObjectKey, TopicInterest]) -> None:
        """Request the offsets of all groups from one broker, and set their lag; discard them if it falls silent."""
        broker.poll_started_at = asyncio.get_running_loop().time()
        broker.is_away = False
        # `send_all` sets `is_away` and calls `on_away` when the broker falls silent.
        broker.on_away = partial(self._mark_unknown, broker, groups)
        # `sample_groups` changes this mapping: it replaces the time of each group whose offsets it requests.
        requested_at = dict.fromkeys(groups, RequestTime(broker.poll_started_at, time()))
        samples = await self._sampler.sample_groups(broker, groups, requested_at)
        dead_letters = await self._count_dead_letters(broker, groups)
        consumed = {key: frozenset(self._consumed_queues(key)) async for key in yield_periodically(groups)}
        if not broker.is_away:
            lags = await asyncio.to_thread(update_lags, broker, groups, samples, consumed, requested_at)
            for key, lag in lags.items():
                lag.dead_letters = dead_letters.get(key) if key in samples else None
            self._set_lags(broker, lags)
        broker.polls += 1

    async def _count_dead_letters(
        self, broker: PolledBroker, groups: Mapping[ObjectKey, TopicInterest]
    ) -> dict[ObjectKey, int | None]:
        """Return the groups' numbers of dead letters: read in every fourth poll, for new or changed groups at once."""
        are_due = broker.polls % DEAD_LETTERS_EVERY_POLLS == 0
        counts: dict[ObjectKey, int | None] = {}
        requests: dict[ObjectKey, Callable[[], Awaitable[int | None]]] = {}
        for key, interest in groups.items():
            previous = broker.lag_of(key, interest)
            if previous is None or are_due:
                requests[key] = partial(self._read_dead_letters, broker.name, interest.consumer_group)
            else:
                counts[key] = previous.dead_letters
        return counts | await send_all(broker, requests)

    async def _read_dead_letters(self, broker: str, group: str) -> int | None:
        """Return a group's number of dead letters at a broker; None if the broker reports impossible offsets."""
        try:
            ranges = await self._brokers.offset_ranges(DEAD_LETTER_PREFIX + group, broker)
        except NotFoundError:
            return 0  # no message has become a dead letter yet
        count = 0
        for min_offset, max_offset, _ in ranges.values():
            if not 0 <= min_offset <= max_offset <= MAX_OFFSET:
                return None
            count += max_offset - min_offset
        return count


def _oldest(times: Iterable[float | None]) -> float | None:
    """Return the oldest of the known times; None if none is known."""
    return min((at for at in times if at is not None), default=None)
