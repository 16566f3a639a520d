"""Polls brokers for the lag of groups every few seconds, each broker on its own, so a slow one delays no other.

Committed offsets are read before the ends of queues, so that no end lies below them. What a broker does not report is
unknown; earlier values are not reused. A broker that lets a request time out, and responds to no other meanwhile, is
away: all lag that it reported becomes unknown.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import time
from typing import NamedTuple

from msgspec.structs import replace

from rota.aio import yield_periodically
from rota.brokers.errors import NotFoundError
from rota.brokers.port import Brokers
from rota.kube.brokers.lag.lag_history import QueueLag
from rota.kube.brokers.lag.lag_merge import (
    CommittedOffsets,
    GroupSamples,
    LagAtBroker,
    OffsetRanges,
    judge_samples,
    merge_responses,
    sample_of,
    unknown_lag,
)
from rota.kube.brokers.lag.polled_broker import GroupQueue, PolledBroker, ResolvedOffset, brokers_to_keep, send_all
from rota.kube.brokers.route_watcher import RouteWatcher, TopicInterest, topics_of
from rota.kube.client.objects import ObjectKey
from rota.model import Queue

LAG_POLL_SECONDS = 15.0
FIRST_POLL_SECONDS = 0.5  # seconds until the next poll while no broker is known
DEAD_LETTERS_EVERY_POLLS = 4  # only each fourth poll counts dead letters, which are rare
REUSE_POLLS = 4  # for so many polls, a response about one queue is reused
BATCH_GROUPS = (
    32  # groups whose offsets are read before the ends of their queues: an end must not be older than an offset
)
LOST_BROKER_SECONDS = 60.0  # a broker that has left a topic's route may come back within this time
MAX_QUEUES_ASKED = 1000  # queues asked about one by one in a poll; the others stay unknown until the next one
MAX_OFFSET = 2**63 - 1  # brokers count in Java's longs: a larger or negative number is no offset

DEAD_LETTER_PREFIX = "%DLQ%"


_log = logging.getLogger(__name__)


class GroupLag(NamedTuple):
    """A group's lag, as far as its brokers reported it."""

    queues: Mapping[Queue, QueueLag]
    dead_letters: int | None = None
    sampled_at: float | None = None  # seconds since 1970: time of the oldest request with a response
    requested_at: float | None = None  # the same on the loop's clock; without a response, time of the first request
    incomplete_topics: frozenset[str] = frozenset()  # their routes have just lost a broker, which may come back
    incoming_rates: Mapping[Queue, float | None] = {}  # incoming messages a second of each queue, if needed


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
        topics are consumed: the lag of a group that starts at Latest includes all later messages.
        """
        self._brokers = brokers
        self._route_watcher = route_watcher
        self._consumed_queues = consumed_queues
        self._on_poll = on_poll
        self._reported_offsets = reported_offsets
        self._on_known_change = on_known_change
        self._topic_starts = topic_starts
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
        interest = self._route_watcher.interests.get(key)
        reported = [broker.lag_by_group.get(key) for broker in self._brokers_by_name.values()]
        lags = [lag for lag in reported if interest and lag and lag.matches(interest)]
        incomplete_topics = frozenset(filter(self._has_lost_a_broker, topics_of(interest))) if interest else frozenset()
        queues: dict[Queue, QueueLag] = {}
        incoming_rates: dict[Queue, float | None] = {}
        for lag in lags:
            queues |= lag.queue_lags
            incoming_rates |= lag.incoming_rates
        dead_letters = [lag.dead_letters for lag in lags if lag.dead_letters is not None]
        sampled_at = [lag.sampled_at for lag in lags if lag.sampled_at is not None]
        requested_at = [lag.requested_at for lag in lags if lag.requested_at is not None]
        has_all_dead_letters = lags and len(dead_letters) == len(lags) and not incomplete_topics
        return GroupLag(
            queues,
            sum(dead_letters) if has_all_dead_letters else None,
            min(sampled_at, default=None),
            min(requested_at, default=None),
            incomplete_topics,
            incoming_rates,
        )

    def _note_routes(self, now: float) -> None:
        """Remember each topic's brokers: a removed one for a while; all of them while the topic has no route."""
        routes: dict[str, dict[str, float]] = {}
        for topic in {topic for interest in self._route_watcher.interests.values() for topic in topics_of(interest)}:
            brokers = self._route_watcher.brokers_of_topic(topic)
            routed_at = self._last_routed_at.get(topic, {})
            if brokers:
                recent = {name: at for name, at in routed_at.items() if now < at + LOST_BROKER_SECONDS}
                routes[topic] = recent | dict.fromkeys(brokers, now)
            else:
                routes[topic] = dict.fromkeys(routed_at, now)
        self._last_routed_at = routes

    def _has_lost_a_broker(self, topic: str) -> bool:
        brokers = self._route_watcher.brokers_of_topic(topic)
        return bool(brokers and self._last_routed_at.get(topic, {}).keys() - brokers)

    def _groups_by_broker(self) -> dict[str, dict[ObjectKey, TopicInterest]]:
        """Return the groups with a topic on each broker."""
        groups_of_broker: dict[str, dict[ObjectKey, TopicInterest]] = {}
        for key, interest in self._route_watcher.interests.items():
            for name in self._route_watcher.brokers_of(interest):
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
        self._set_lags(
            broker, {key: unknown_lag(broker.lag_by_group.get(key), interest, now) for key, interest in groups.items()}
        )

    def _set_lags(self, broker: PolledBroker, lags: dict[ObjectKey, LagAtBroker]) -> None:
        previous = broker.lag_by_group
        broker.lag_by_group = lags
        self._on_poll(lags.keys())
        for key, lag in lags.items():
            if lag.is_known != (key in previous and previous[key].is_known):
                self._on_known_change(key)

    async def _poll_broker(self, broker: PolledBroker, groups: Mapping[ObjectKey, TopicInterest]) -> None:
        """Ask one broker about all groups and judge its responses; discard them if it falls silent meanwhile."""
        broker.poll_started_at = asyncio.get_running_loop().time()
        broker.is_away = False
        broker.on_away = partial(self._mark_unknown, broker, groups)
        requested_at = dict.fromkeys(groups, (broker.poll_started_at, time()))
        samples = await self._sample_groups(broker, groups, requested_at)
        dead_letters = await self._count_dead_letters(broker, groups)
        consumed = {key: frozenset(self._consumed_queues(key)) async for key in yield_periodically(groups)}
        if not broker.is_away:
            lags = await asyncio.to_thread(judge_samples, broker, groups, samples, consumed, requested_at)
            for key, lag in lags.items():
                lag.dead_letters = None if samples[key] is None else dead_letters.get(key)
            self._set_lags(broker, lags)
        broker.polls += 1

    async def _sample_groups(
        self,
        broker: PolledBroker,
        groups: Mapping[ObjectKey, TopicInterest],
        requested_at: dict[ObjectKey, tuple[float, float]],
    ) -> GroupSamples:
        """Ask about groups in batches: for their offsets, then for the ends of their queues; set `requested_at`.

        Groups with the oldest responses come first: if the poll's time is too short, the others are first next time. A
        group without a response shares its batch with others, whose responses show that the broker is not away.
        """
        topics = {
            key: self._topics_at(broker.name, interest) async for key, interest in yield_periodically(groups.items())
        }
        last_requested = {
            key: lag.requested_at if lag.sampled_at and lag.requested_at else 0.0
            for key, lag in broker.lag_by_group.items()
        }
        keys = sorted(groups, key=lambda key: (last_requested.get(key, 0.0), list(topics[key])))
        samples: GroupSamples = dict.fromkeys(groups)
        unresolved: list[tuple[ObjectKey, Queue]] = []
        for start in range(0, len(keys), BATCH_GROUPS):
            batch = keys[start : start + BATCH_GROUPS]
            requested_at |= dict.fromkeys(batch, (asyncio.get_running_loop().time(), time()))
            offsets = await self._read_offsets(broker, {key: groups[key] for key in batch}, topics)
            if broker.is_away:  # requests for other groups would time out, too
                break
            counts = {topic: count for key in batch for topic, count in sorted(topics[key].items())}
            requests = {topic: partial(self._read_ranges, broker.name, topic, count) for topic, count in counts.items()}
            batch_ranges = await send_all(broker, requests)
            merge = partial(merge_responses, broadcasting_keys={key for key in batch if groups[key].broadcasting})
            merged, batch_unresolved = await asyncio.to_thread(merge, broker.name, batch, topics, offsets, batch_ranges)
            samples |= merged
            unresolved += batch_unresolved
        await self._resolve_queues(broker, groups, samples, unresolved)
        return samples

    def _topics_at(self, name: str, interest: TopicInterest) -> dict[str, int]:
        """Return a group's topics on one broker, and how many queues each has there."""
        topics = [topic for topic in topics_of(interest) if name in self._route_watcher.brokers_of_topic(topic)]
        return {topic: self._route_watcher.queue_count(topic, name) for topic in topics}

    # Only numbers of the responses are kept: the objects of all groups' responses would prolong garbage collection,
    # which blocks the event loop. Queues that no route lists are dropped: a broker may report any number of them.

    async def _read_offsets(
        self,
        broker: PolledBroker,
        groups: Mapping[ObjectKey, TopicInterest],
        topics: Mapping[ObjectKey, Mapping[str, int]],
    ) -> dict[ObjectKey, CommittedOffsets]:
        """Return committed offsets; a Broadcasting group's come from its members, even if the broker is away."""
        requests = {
            key: partial(self._read_progress, broker.name, interest.consumer_group, topics[key])
            for key, interest in groups.items()
            if not interest.broadcasting
        }
        responses = await send_all(broker, requests)
        return responses | {key: self._member_offsets(broker.name, key) for key in groups if groups[key].broadcasting}

    def _member_offsets(self, broker: str, key: ObjectKey) -> CommittedOffsets:
        offsets: CommittedOffsets = {}
        for queue, committed in self._reported_offsets(key).items():
            if queue.broker == broker and 0 <= committed <= MAX_OFFSET:
                offsets.setdefault(queue.topic, {})[queue.id] = committed
        return offsets

    async def _read_progress(self, broker: str, group: str, topics: Mapping[str, int]) -> CommittedOffsets:
        offsets: CommittedOffsets = {}
        for queue, progress in (await self._brokers.group_offsets(group, broker, topics.keys())).items():
            if 0 <= progress.committed_offset <= MAX_OFFSET and 0 <= queue.id < topics.get(queue.topic, 0):
                offsets.setdefault(queue.topic, {})[queue.id] = progress.committed_offset
        return offsets

    async def _read_ranges(self, broker: str, topic: str, count: int) -> OffsetRanges:
        try:
            ends = await self._brokers.offset_ranges(topic, broker)
        except NotFoundError:
            return {}
        possible = {queue.id: end[:2] for queue, end in ends.items() if 0 <= queue.id < count}
        return {number: end for number, end in possible.items() if min(end) >= 0 and max(end) <= MAX_OFFSET}

    async def _resolve_queues(
        self,
        broker: PolledBroker,
        groups: Mapping[ObjectKey, TopicInterest],
        samples: GroupSamples,
        group_queues: Sequence[tuple[ObjectKey, Queue]],
    ) -> None:
        """Ask one by one about queues with offset 0 in a group's statistics, which it may never have consumed.

        Empty queues come last. One request is enough for all ConsumerGroups that name the same consumer group.
        """
        names: dict[tuple[ObjectKey, Queue], GroupQueue] = {}
        empty: dict[GroupQueue, bool] = {}
        since: dict[GroupQueue, float | None] = {}
        asked_groups = {key for key, _ in group_queues}
        starts = {key: self._topic_starts(key) for key in asked_groups if groups[key].start_from.position == "Latest"}
        for key, queue in group_queues:
            name = (groups[key].consumer_group, queue)
            names[key, queue] = name
            sample = sample_of(samples, (key, queue))
            empty[name] = sample.min_offset == sample.max_offset
            since[name] = starts.get(key, {}).get(queue.topic)
        earlier = broker.resolved.items()
        resolved = {name: response for name, response in earlier if _is_reusable(broker, response, empty.get(name))}
        to_ask = sorted((name for name in empty if name not in resolved), key=empty.__getitem__)
        requests = {name: partial(self._read_position, *name, since[name]) for name in to_ask[:MAX_QUEUES_ASKED]}
        for name, offset in (await send_all(broker, requests)).items():
            if offset is None or 0 <= offset <= MAX_OFFSET:
                resolved[name] = ResolvedOffset(broker.polls, empty[name], offset)
        broker.resolved = resolved
        for (key, queue), name in names.items():
            response = resolved.get(name)
            committed = response.offset if response else None
            is_known = response is not None or empty[name]  # an empty queue has no lag
            sample = replace(sample_of(samples, (key, queue)), committed=committed, is_known=is_known)
            (samples[key] or {})[queue.topic][queue.id] = sample

    async def _read_position(self, group: str, queue: Queue, since: float | None) -> int | None:
        """Return a group's committed offset on a queue, or where it will start; None if neither is known."""
        committed = await self._brokers.committed_offset(group, queue)
        if committed is None and since is not None:
            return await self._brokers.offset_at_time(queue, since)
        return committed

    async def _count_dead_letters(
        self, broker: PolledBroker, groups: Mapping[ObjectKey, TopicInterest]
    ) -> dict[ObjectKey, int | None]:
        """Return the groups' numbers of dead letters; asked for rarely, but at once for a changed name or model."""
        are_due = broker.polls % DEAD_LETTERS_EVERY_POLLS == 0
        previous = {} if are_due else broker.lag_by_group
        counts = {key: lag.dead_letters for key, lag in previous.items() if key in groups and lag.matches(groups[key])}
        calls = {
            key: partial(self._read_dead_letters, broker.name, interest.consumer_group)
            for key, interest in groups.items()
            if key not in counts
        }
        return counts | await send_all(broker, calls)

    async def _read_dead_letters(self, broker: str, group: str) -> int | None:
        try:
            ranges = (await self._brokers.offset_ranges(DEAD_LETTER_PREFIX + group, broker)).values()
        except NotFoundError:
            return 0
        if not all(0 <= range_.min_offset <= range_.max_offset <= MAX_OFFSET for range_ in ranges):
            return None
        return sum(range_.max_offset - range_.min_offset for range_ in ranges)


def _is_reusable(broker: PolledBroker, resolved: ResolvedOffset, is_empty: bool | None) -> bool:  # noqa: FBT001
    """Whether a response is recent, and the queue as empty as it was then; `is_empty` None: this poll does not ask."""
    is_recent = broker.polls - resolved.poll < REUSE_POLLS
    return is_recent and is_empty in {None, resolved.was_empty}
