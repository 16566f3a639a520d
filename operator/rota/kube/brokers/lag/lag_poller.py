"""Polls brokers for the lag of groups every few seconds, each broker on its own, so a slow one delays no other.

Committed offsets are read before the ends of queues, so that no end lies below them. What a broker does not report is
unknown; earlier values are not reused. A broker that lets a request wait until its timeout, and answers nothing else
meanwhile, is away: all lag that it reported becomes unknown.
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
from rota.kube.brokers.lag.polled_broker import PolledBroker, brokers_to_keep, send_all
from rota.kube.brokers.route_watcher import RouteWatcher, TopicInterest, topics_of
from rota.kube.client.objects import ObjectKey
from rota.model import Queue

LAG_POLL_SECONDS = 15.0
FIRST_POLL_SECONDS = 0.5  # seconds until the next poll while no broker is known
DEAD_LETTERS_EVERY_POLLS = 4  # polls; dead letters are rare
REUSE_POLLS = 4  # polls in which an answer about one queue is reused: that the group is at 0, or never consumed it
BATCH_GROUPS = 32  # groups in a batch: offsets of all are read before the ends of their queues, so that no end is below
LOST_BROKER_SECONDS = 60.0  # for which a broker that has left a topic's route may still come back
MAX_QUEUES_ASKED = 1000  # queues asked about one by one in a poll; the others stay unknown until the next one
MAX_OFFSET = 2**63 - 1  # brokers count in Java's longs: a larger or negative number is no offset

DEAD_LETTER_PREFIX = "%DLQ%"


_log = logging.getLogger(__name__)


class GroupLag(NamedTuple):
    """A group's lag, as far as its brokers reported it."""

    queues: Mapping[Queue, QueueLag]
    dead_letters: int | None = None  # letters
    sampled_at: float | None = None  # seconds since 1970: when the broker with the oldest answer was asked for it
    requested_at: float | None = None  # the same on the loop's clock; for a broker without an answer, its first request
    incomplete_topics: frozenset[str] = (
        frozenset()
    )  # topics with a route that has just lost a broker, which may come back
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
        """`worked` returns the queues of a group that have a consumer; `on_poll` is called after each poll of a broker.

        Brokers do not know the offsets of a Broadcasting group: `reported` returns those of its slowest member.
        `turned` is called when a group's lag becomes known or unknown. `begun` returns since when topics are consumed:
        a group that starts at Latest is behind by everything that came later.
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
                groups_of_broker, now = self._groups_by_broker(), asyncio.get_running_loop().time()
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
        every = [broker.lag_by_group[key] for broker in self._brokers_by_name.values() if key in broker.lag_by_group]
        reports = [report for report in every if interest and report.matches(interest)]
        missing = frozenset(filter(self._has_lost_a_broker, topics_of(interest))) if interest else frozenset()
        queues: dict[Queue, QueueLag] = {}
        flows: dict[Queue, float | None] = {}
        for report in reports:
            queues |= report.queue_lags
            flows |= report.incoming_rates
        dead = [report.dead_letters for report in reports if report.dead_letters is not None]
        times = [report.sampled_at for report in reports if report.sampled_at is not None]
        asked_at = [report.requested_at for report in reports if report.requested_at is not None]
        letters = sum(dead) if reports and len(dead) == len(reports) and not missing else None
        return GroupLag(queues, letters, min(times, default=None), min(asked_at, default=None), missing, flows)

    def _note_routes(self, now: float) -> None:
        """Remember each topic's brokers: a removed one for a while; all of them while the topic has no route."""
        routes: dict[str, dict[str, float]] = {}
        for topic in {topic for interest in self._route_watcher.interests.values() for topic in topics_of(interest)}:
            brokers, last = self._route_watcher.brokers_of_topic(topic), self._last_routed_at.get(topic, {})
            past = {
                name: at if brokers else now
                for name, at in last.items()
                if not brokers or now < at + LOST_BROKER_SECONDS
            }
            routes[topic] = past | dict.fromkeys(brokers, now)
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
        previous, broker.lag_by_group = broker.lag_by_group, lags
        self._on_poll(lags.keys())
        for key, lag in lags.items():
            if lag.is_known != (key in previous and previous[key].is_known):
                self._on_known_change(key)

    async def _poll_broker(self, broker: PolledBroker, groups: Mapping[ObjectKey, TopicInterest]) -> None:
        """Ask one broker about all groups and judge its answers; discard them if it falls silent meanwhile."""
        broker.poll_started_at, broker.is_away = asyncio.get_running_loop().time(), False
        broker.on_away = partial(self._mark_unknown, broker, groups)
        asked_at = dict.fromkeys(groups, (broker.poll_started_at, time()))
        samples = await self._sample_groups(broker, groups, asked_at)
        dead = await self._count_dead_letters(broker, groups)
        worked = {key: frozenset(self._consumed_queues(key)) async for key in yield_periodically(groups)}
        if not broker.is_away:
            lags = await asyncio.to_thread(judge_samples, broker, groups, samples, worked, asked_at)
            for key, lag in lags.items():
                lag.dead_letters = None if samples[key] is None else dead.get(key)
            self._set_lags(broker, lags)
        broker.polls += 1

    async def _sample_groups(
        self,
        broker: PolledBroker,
        groups: Mapping[ObjectKey, TopicInterest],
        requested_at: dict[ObjectKey, tuple[float, float]],
    ) -> GroupSamples:
        """Ask about groups in batches: for their offsets, then for the ends of their queues; set times in `asked_at`.

        Groups with the oldest answers come first, so that none is left out for ever if the time is too short. A group
        without an answer is asked about together with others, which show whether the broker answers at all.
        """
        topics = {
            key: self._topics_at(broker.name, interest) async for key, interest in yield_periodically(groups.items())
        }
        last = {
            key: lag.requested_at if lag.sampled_at and lag.requested_at else 0.0
            for key, lag in broker.lag_by_group.items()
        }
        keys = sorted(groups, key=lambda key: (last.get(key, 0.0), list(topics[key])))
        samples: GroupSamples = dict.fromkeys(groups)
        doubts: list[tuple[ObjectKey, Queue]] = []
        for batch in (keys[start : start + BATCH_GROUPS] for start in range(0, len(keys), BATCH_GROUPS)):
            requested_at |= dict.fromkeys(batch, (asyncio.get_running_loop().time(), time()))
            offsets = await self._read_offsets(broker, {key: groups[key] for key in batch}, topics)
            if broker.is_away:  # requests for other groups would time out, too
                break
            counts = {topic: count for key in batch for topic, count in sorted(topics[key].items())}
            requests = {topic: partial(self._read_ranges, broker.name, topic, count) for topic, count in counts.items()}
            ends = await send_all(broker, requests)
            merge = partial(merge_responses, broadcasting_keys={key for key in batch if groups[key].broadcasting})
            merged, open_ = await asyncio.to_thread(merge, broker.name, batch, topics, offsets, ends)
            samples |= merged
            doubts += open_
        await self._resolve_queues(broker, groups, samples, doubts)
        return samples

    def _topics_at(self, name: str, interest: TopicInterest) -> dict[str, int]:
        """Return a group's topics on one broker, and how many queues each has there."""
        topics = [topic for topic in topics_of(interest) if name in self._route_watcher.brokers_of_topic(topic)]
        return {topic: self._route_watcher.queue_count(topic, name) for topic in topics}

    # Only numbers of the answers are kept: the objects of all groups' answers would prolong garbage collection, which
    # blocks the event loop. Queues that no route lists are dropped: a broker may answer with any number of them.

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
        answers = await send_all(broker, requests)
        return answers | {key: self._member_offsets(broker.name, key) for key in groups if groups[key].broadcasting}

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
        """Ask one by one for queues that the group may never have consumed by the statistics; empty ones last."""
        names = {doubt: (groups[doubt[0]].consumer_group, doubt[1]) for doubt in group_queues}
        empty = {
            names[doubt]: sample_of(samples, doubt).min_offset == sample_of(samples, doubt).max_offset
            for doubt in group_queues
        }
        # An answer from when the queue was empty does not hold once it is not: the group may have started since.
        reusable = {
            name: resolved
            for name, resolved in broker.resolved.items()
            if broker.polls - resolved[0] < REUSE_POLLS and resolved[1] == empty.get(name, resolved[1])
        }
        to_ask = sorted((name for name in empty if name not in reusable), key=empty.__getitem__)
        begun = {
            key: self._topic_starts(key)
            for key in {key for key, _ in names}
            if groups[key].start_from.position == "Latest"
        }
        since = {name: begun.get(key, {}).get(name[1].topic) for (key, _), name in names.items()}
        answers = await send_all(
            broker, {name: partial(self._read_position, *name, since[name]) for name in to_ask[:MAX_QUEUES_ASKED]}
        )
        valid = {name: offset for name, offset in answers.items() if offset is None or 0 <= offset <= MAX_OFFSET}
        broker.resolved = reusable | {name: (broker.polls, empty[name], offset) for name, offset in valid.items()}
        for doubt, name in names.items():
            *_, committed = broker.resolved.get(name, (None,))
            is_known = name in broker.resolved or empty[name]  # an empty queue has no lag
            (samples[doubt[0]] or {})[doubt[1].topic][doubt[1].id] = replace(
                sample_of(samples, doubt), committed=committed, is_known=is_known
            )

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
        previous = {} if not broker.polls % DEAD_LETTERS_EVERY_POLLS else broker.lag_by_group
        counts = {key: lag.dead_letters for key, lag in previous.items() if key in groups and lag.matches(groups[key])}
        calls = {
            key: partial(self._read_dead_letters, broker.name, it.consumer_group)
            for key, it in groups.items()
            if key not in counts
        }
        return counts | await send_all(broker, calls)

    async def _read_dead_letters(self, broker: str, group: str) -> int | None:
        try:
            ends = (await self._brokers.offset_ranges(DEAD_LETTER_PREFIX + group, broker)).values()
        except NotFoundError:
            return 0
        return (
            sum(it.max_offset - it.min_offset for it in ends)
            if all(0 <= it.min_offset <= it.max_offset <= MAX_OFFSET for it in ends)
            else None
        )
