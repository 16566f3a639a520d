"""Samples the queues of groups on one broker: requests committed offsets, then the ends of the queues (max_offset).

Of the responses only numbers are kept: to keep the objects of all groups' responses would prolong garbage collection,
which blocks the event loop. Queues that no route lists are dropped: a broker may report any number of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import time

from rota.aio import yield_periodically
from rota.brokers.errors import NotFoundError
from rota.brokers.port import Brokers
from rota.kube.brokers.lag.lag_merge import (
    CommittedOffsets,
    GroupSamples,
    OffsetRanges,
    RequestTime,
    RequestTimes,
    merge_responses,
)
from rota.kube.brokers.lag.polled_broker import PolledBroker, send_all
from rota.kube.brokers.lag.queue_resolver import QueueResolver, is_valid_offset
from rota.kube.brokers.topic_interest import TopicInterest
from rota.kube.brokers.topic_routes import TopicRoutes
from rota.kube.client.objects import ObjectKey
from rota.model import Queue

# Groups in a batch: their offsets are read first, then the ends of their queues, so no end is older than an offset.
BATCH_GROUPS = 32


class OffsetSampler:
    """Asks the brokers of one cluster for the offsets of groups."""

    def __init__(
        self,
        brokers: Brokers,
        routes: TopicRoutes,
        reported_offsets: Callable[[ObjectKey], Mapping[Queue, int]],
        resolver: QueueResolver,
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self._reported_offsets = reported_offsets
        self._resolver = resolver

    async def sample_groups(
        self, broker: PolledBroker, groups: Mapping[ObjectKey, TopicInterest], requested_at: RequestTimes
    ) -> GroupSamples:
        """Request the offsets of groups in batches, and set `requested_at`; groups without a response have no samples.

        Groups are sorted by the time of their last response, so that groups for which this poll has no time left are
        the first in the next one; and then by topics, because groups of the same topics share requests in a batch.
        A broker is away if a request gets no response, and no other response arrives meanwhile (`send_all`). A batch
        has many groups, so that the broker does not count as away if only one group's requests time out.

        A committed offset of 0, or none, may mean that the group never consumed the queue. These queues are requested
        one by one at the end (`QueueResolver`).
        """
        topics: dict[ObjectKey, dict[str, int]] = {}  # number of queues on the broker, by topic
        async for key, interest in yield_periodically(groups.items()):
            topics[key] = self._routes.queue_counts_at(broker.name, interest.consumed_topics)

        def polling_order(key: ObjectKey) -> tuple[float, list[str]]:
            lag = broker.lag_by_group.get(key)
            return lag.responded_at if lag else 0.0, list(topics[key])

        keys = sorted(groups, key=polling_order)
        samples: GroupSamples = {}
        unresolved: dict[ObjectKey, list[Queue]] = {}  # queues that the group may never have consumed
        for start in range(0, len(keys), BATCH_GROUPS):
            batch = {key: groups[key] for key in keys[start : start + BATCH_GROUPS]}
            requested_at |= dict.fromkeys(batch, RequestTime(asyncio.get_running_loop().time(), time()))
            offsets = await self._read_offsets(broker, batch, topics)
            if broker.is_away:  # requests for other groups would time out, too
                break
            counts: dict[str, int] = {}
            for key in batch:
                counts |= topics[key]
            requests = {topic: partial(self._read_ranges, broker.name, topic, count) for topic, count in counts.items()}
            ranges = await send_all(broker, requests)
            merge = partial(merge_responses, broker.name, batch, topics, offsets, ranges)
            batch_samples, batch_unresolved = await asyncio.to_thread(merge)
            samples |= batch_samples
            unresolved |= batch_unresolved
        await self._resolver.resolve(broker, groups, samples, unresolved)
        return samples

    async def _read_offsets(
        self,
        broker: PolledBroker,
        groups: Mapping[ObjectKey, TopicInterest],
        topics: Mapping[ObjectKey, Mapping[str, int]],
    ) -> dict[ObjectKey, CommittedOffsets]:
        """Return committed offsets; a Broadcasting group's come from its members, even if the broker is away."""
        requests: dict[ObjectKey, Callable[[], Awaitable[CommittedOffsets]]] = {}
        broadcasting: list[ObjectKey] = []
        for key, interest in groups.items():
            if interest.broadcasting:
                broadcasting.append(key)
            else:
                requests[key] = partial(self._read_progress, broker.name, interest.consumer_group, topics[key])
        responses = await send_all(broker, requests)
        for key in broadcasting:
            responses[key] = self._member_offsets(broker.name, key)
        return responses

    def _member_offsets(self, broker: str, key: ObjectKey) -> CommittedOffsets:
        offsets: CommittedOffsets = {}
        for queue, committed in self._reported_offsets(key).items():
            if queue.broker == broker and is_valid_offset(committed):
                offsets.setdefault(queue.topic, {})[queue.id] = committed
        return offsets

    async def _read_progress(self, broker: str, group: str, topics: Mapping[str, int]) -> CommittedOffsets:
        offsets: CommittedOffsets = {}
        for queue, progress in (await self._brokers.group_offsets(group, broker, topics.keys())).items():
            is_routed = 0 <= queue.id < topics.get(queue.topic, 0)
            if is_routed and is_valid_offset(progress.committed_offset):
                offsets.setdefault(queue.topic, {})[queue.id] = progress.committed_offset
        return offsets

    async def _read_ranges(self, broker: str, topic: str, count: int) -> OffsetRanges:
        ranges: OffsetRanges = {}
        try:
            reported = await self._brokers.offset_ranges(topic, broker)
        except NotFoundError:
            return ranges
        for queue, (min_offset, max_offset, _) in reported.items():
            is_routed = 0 <= queue.id < count
            if is_routed and is_valid_offset(min_offset) and is_valid_offset(max_offset):
                ranges[queue.id] = (min_offset, max_offset)
        return ranges
