"""The lag of groups, polled from brokers in memory: reported lag and unknown lag."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from ground.poll import soon
from rota.brokers.errors import RejectedError
from rota.brokers.memory import NAME_SERVER, MemoryCluster, MemoryConsumer
from rota.brokers.port import BrokerOffsets, Membership, OffsetRange
from rota.kube.brokers.lag import lag_poller, offset_sampler, polled_broker, queue_resolver
from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag, LagPoller
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.brokers.topic_interest import OffsetSource, TopicInterest
from rota.lag import LagState
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.spec import StartFrom, Subscription

KEY = ("shop", "orders")
A, B = "broker-a", "broker-b"
AT_A, AT_B = Queue("orders", A, 0), Queue("orders", B, 0)
RETRIED = Queue(RETRY_TOPIC_PREFIX + "orders", A, 0)


class SlowCluster(MemoryCluster):
    """A cluster with faults: silent, hanging or broken brokers, rejected groups, offsets that change during a poll."""

    def __init__(self, brokers: Collection[str]) -> None:
        super().__init__(tuple(brokers))
        self.silent: set[str] = set()
        self.released = asyncio.Event()
        self.arriving_queues: list[Queue] = []  # each receives and commits a message after a group's offsets were read
        self.offset_queries = 0
        self.hidden_brokers: set[str] = set()  # brokers that the name servers do not list
        self.hanging: set[tuple[str, str]] = set()  # kind of request, and the broker or group
        self.hanging_requests = 0
        self.rejected_groups: set[str] = set()
        self.response_seconds = 0.0  # duration of each request for a group's offsets
        self.replaced_ranges: dict[Queue, tuple[int, int]] = {}  # ranges reported instead of the real ones
        self.broken_brokers: set[str] = set()  # requests to these brokers raise an unexpected exception
        self.invented_count = 0  # queues that brokers report although no route lists them

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        return tuple(queue for queue in await super().queues(topic) if queue.broker not in self.hidden_brokers)

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        while broker in self.silent:
            await self.released.wait()
        await asyncio.sleep(self.response_seconds)
        await self.hang_if_chosen("progress", broker)
        await self.hang_if_chosen("progress", group)
        if group in self.rejected_groups:
            raise RejectedError("No permission")
        offsets = await super().group_offsets(group, broker, topics)
        offsets |= dict.fromkeys(self.invented_queues("orders", broker), BrokerOffsets(9, 5, 5, 0.0))
        offsets |= dict.fromkeys(self.invented_queues("other", broker), BrokerOffsets(9, 5, 5, 0.0))
        for queue in self.arriving_queues:
            await self.send(queue.topic, b"new", queue=queue)
            self.groups.committed_offsets[group][queue] = len(await self.messages_of(queue))
        return offsets

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        self.offset_queries += 1
        await self.hang_if_chosen("committed", queue.broker)
        return await super().committed_offset(group, queue)

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        await self.hang_if_chosen("dead" if topic.startswith(lag_poller.DEAD_LETTER_PREFIX) else "ends", broker)
        if broker in self.broken_brokers:
            raise OverflowError
        ranges = await super().offset_ranges(topic, broker)
        for queue in ranges.keys() & self.replaced_ranges.keys():
            ranges[queue] = OffsetRange(*self.replaced_ranges[queue])
        return ranges | dict.fromkeys(self.invented_queues(topic, broker), OffsetRange(0, 9))

    def invented_queues(self, topic: str, broker: str) -> list[Queue]:
        return [Queue(topic, broker, 1 + number) for number in range(self.invented_count)]

    async def hang_if_chosen(self, kind: str, name: str) -> None:
        if (kind, name) in self.hanging:
            self.hanging_requests += 1
            await asyncio.Event().wait()  # until the caller's timeout


@dataclass
class Cluster:
    """Brokers in memory, a group that consumes from them, and the poller of its lag."""

    memory: SlowCluster
    route_watcher: RouteWatcher
    poller: LagPoller
    consumed_queues: set[Queue] = field(default_factory=set)
    reported_offsets: dict[Queue, int] = field(default_factory=dict)
    topic_starts: dict[str, float] = field(default_factory=dict)

    async def send_messages(self, queue: Queue, count: int) -> None:
        for _ in range(count):
            await self.memory.send(queue.topic, b"message", queue=queue)

    def commit(self, queue: Queue, offset: int) -> None:
        self.memory.groups.committed_offsets["orders"][queue] = offset

    @property
    def lag(self) -> GroupLag:
        return self.poller.lag_of(KEY)

    async def wait_for_lag(self, queue: Queue, lag: int | None) -> QueueLag:
        """Wait until the poller reports this lag of a queue."""

        async def reported() -> QueueLag | None:
            queue_lag = self.lag.queues.get(queue)
            return queue_lag if queue_lag and queue_lag.lag == lag else None

        queue_lag = await soon(reported)
        assert queue_lag
        return queue_lag

    async def wait_for_unknown_lag(self, queue: Queue) -> QueueLag:
        """Wait until the lag of a queue is unknown."""

        async def is_unknown() -> QueueLag | None:
            queue_lag = self.lag.queues.get(queue, UNKNOWN_QUEUE_LAG)
            return queue_lag if queue_lag.lag is None else None

        queue_lag = await soon(is_unknown)
        assert queue_lag
        return queue_lag

    async def wait_until_needed(self, broker: str) -> None:
        """Wait until the poller has found a broker on a current route."""
        now = asyncio.get_running_loop().time()

        async def is_needed() -> bool:
            return broker in self.poller._brokers_by_name and self.poller._brokers_by_name[broker].last_needed_at > now

        await soon(is_needed)

    async def wait_for_polls(self, broker: str = A, times: int = 1) -> None:
        """Wait until a broker was polled again."""
        polled = self.poller._brokers_by_name[broker]
        goal = polled.polls + times

        async def has_polled() -> bool:
            return polled.polls >= goal

        await soon(has_polled)


@asynccontextmanager
async def a_cluster(*brokers: str, start_from: StartFrom = StartFrom()) -> AsyncIterator[Cluster]:  # noqa: B008 - a value
    memory = SlowCluster(brokers or (A,))
    for broker in brokers or (A,):
        await memory.create_topic("orders", broker, 1)
    route_watcher = RouteWatcher(memory, lambda _: None)
    consumed_queues: set[Queue] = set()
    reported_offsets: dict[Queue, int] = {}
    topic_starts: dict[str, float] = {}
    poller = LagPoller(
        memory,
        route_watcher,
        lambda _: consumed_queues,
        reported_offsets=lambda _: reported_offsets,
        topic_starts=lambda _: topic_starts,
    )
    poller.poll_seconds = 0.01
    route_watcher.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False, start_from=start_from))
    await route_watcher.poll_group(KEY)
    running = asyncio.create_task(poller.run())
    try:
        yield Cluster(memory, route_watcher, poller, consumed_queues, reported_offsets, topic_starts)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_lag_is_reported_by_queue() -> None:
    async with a_cluster(A, B) as cluster:
        await cluster.send_messages(AT_A, 5)
        await cluster.send_messages(AT_B, 3)
        cluster.commit(AT_A, 2)
        cluster.commit(AT_B, 3)
        assert (await cluster.wait_for_lag(AT_A, 3))[:3] == (0, 5, 2)
        assert (await cluster.wait_for_lag(AT_B, 0))[:3] == (0, 3, 3)
        assert cluster.lag.sampled_at is not None


async def test_lag_of_a_group_without_online_members_is_reported() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 1)
        assert not cluster.memory.groups.members["orders"]
        await cluster.wait_for_lag(AT_A, 4)


async def test_lag_of_an_uncommitted_queue_is_0_with_start_from_latest() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        assert (await cluster.wait_for_lag(AT_A, 0)).committed is None
        await cluster.wait_for_polls(times=3)
        assert cluster.lag.queues[AT_A].lag == 0


async def test_lag_with_start_from_latest_counts_messages_since_consumption_started() -> None:
    """This includes a queue that was added to the topic later and has no owner yet."""
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.topic_starts["orders"] = (await cluster.memory.messages_of(AT_A))[-1].stored_ms / 1000 + 0.001
        await soon(lambda: later_than(cluster.topic_starts["orders"]))
        await cluster.send_messages(AT_A, 3)
        assert (await cluster.wait_for_lag(AT_A, 3))[:3] == (0, 8, 5)
        await cluster.wait_for_polls(times=queue_resolver.REUSE_POLLS + 1)
        assert cluster.lag.queues[AT_A].lag == 3
        cluster.commit(AT_A, 7)
        await cluster.wait_for_lag(AT_A, 1)


async def test_lag_with_start_from_earliest_ignores_when_consumption_started() -> None:
    async with a_cluster(start_from=StartFrom(position="Earliest")) as cluster:
        cluster.topic_starts["orders"] = time.time() + 60
        await cluster.send_messages(AT_A, 5)
        await cluster.wait_for_lag(AT_A, 5)


async def test_lag_of_two_groups_with_one_name_at_the_broker_follows_the_start_of_each() -> None:
    async with a_cluster() as cluster:
        cluster.topic_starts["orders"] = time.time() + 60
        await cluster.send_messages(AT_A, 5)
        earliest = StartFrom(position="Earliest")
        for key in (("shop", "before"), ("shop", "rival")):  # one of them comes before KEY, and one after it
            rival = TopicInterest("orders", ("orders",), broadcasting=False, start_from=earliest)
            cluster.route_watcher.set_interest(key, rival)
            await cluster.route_watcher.poll_group(key)
            await cluster.wait_for_polls(times=3)
            assert cluster.poller.lag_of(key).queues[AT_A].lag == 5
            assert cluster.lag.queues[AT_A].lag == 0


async def test_lag_follows_a_changed_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_resolver, "REUSE_POLLS", 1_000_000)
    async with a_cluster() as cluster:
        cluster.topic_starts["orders"] = time.time() + 60
        await cluster.send_messages(AT_A, 5)
        await cluster.wait_for_lag(AT_A, 0)
        earliest = StartFrom(position="Earliest")
        cluster.route_watcher.set_interest(
            KEY, TopicInterest("orders", ("orders",), broadcasting=False, start_from=earliest)
        )
        await cluster.wait_for_lag(AT_A, 5)


async def later_than(timestamp: float) -> bool:
    return time.time() > timestamp


async def test_lag_with_start_from_earliest_is_the_whole_queue() -> None:
    async with a_cluster(start_from=StartFrom(position="Earliest")) as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.memory.store.min_offsets[AT_A] = 2
        assert (await cluster.wait_for_lag(AT_A, 3)).committed is None


async def test_lag_with_start_from_timestamp_is_unknown() -> None:
    async with a_cluster(start_from=StartFrom(position="Timestamp")) as cluster:
        await cluster.send_messages(AT_A, 5)
        await cluster.wait_for_lag(AT_A, None)


async def test_lag_at_committed_offset_0_is_the_whole_queue() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 0)
        assert (await cluster.wait_for_lag(AT_A, 5)).committed == 0


async def test_lag_of_a_queue_missing_from_broker_statistics_is_queried() -> None:
    """While a consumer of other topics is online, a broker's statistics leave out this topic."""
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 2)
        await cluster.memory.create_topic("others", A, 1)
        subscriptions = [Subscription(topic="others")]
        consumer = MemoryConsumer(
            cluster.memory, Membership(group="orders", client_id="foreign", subscriptions=subscriptions)
        )
        await consumer.join()
        await cluster.wait_for_polls(times=2)
        assert cluster.lag.queues[AT_A].lag == 3


async def test_lag_polls_do_not_query_an_uncommitted_queue_each_time() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        await cluster.wait_for_polls(times=40)
        assert cluster.memory.offset_queries < 20


async def test_lag_is_not_negative_when_responses_differ_in_age() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 5)
        cluster.memory.arriving_queues = [AT_A]
        for _ in range(20):
            await cluster.wait_for_polls()
            lag = cluster.lag.queues[AT_A].lag
            assert lag is not None
            assert lag >= 0


async def test_lag_with_an_offset_above_the_end_is_unknown() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 7)
        assert (await cluster.wait_for_lag(AT_A, None)).committed == 7


async def test_lag_is_unknown_only_at_the_broker_that_is_down() -> None:
    async with a_cluster(A, B) as cluster:
        await cluster.send_messages(AT_A, 5)
        await cluster.send_messages(AT_B, 5)
        cluster.commit(AT_A, 1)
        cluster.commit(AT_B, 1)
        await cluster.wait_for_lag(AT_A, 4)
        cluster.memory.take_down(A)
        assert await cluster.wait_for_lag(AT_A, None) == UNKNOWN_QUEUE_LAG
        cluster.commit(AT_B, 2)
        await cluster.wait_for_lag(AT_B, 3)
        cluster.memory.bring_up(A)
        await cluster.wait_for_lag(AT_A, 4)


async def test_lag_polls_of_a_slow_broker_delay_no_other() -> None:
    async with a_cluster(A, B) as cluster:
        await cluster.send_messages(AT_B, 5)
        cluster.commit(AT_B, 1)
        cluster.memory.silent.add(A)
        await cluster.wait_for_lag(AT_B, 4)
        cluster.commit(AT_B, 4)
        await cluster.wait_for_lag(AT_B, 1)
        cluster.memory.silent.clear()
        cluster.memory.released.set()
        await cluster.wait_for_lag(AT_A, 0)


async def test_lag_of_retries_counts_from_the_oldest_and_dead_letters_are_counted() -> None:
    async with a_cluster() as cluster:
        cluster.memory.store.create_queues(RETRIED.topic, A, 1)
        cluster.memory.store.create_queues(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 1)
        await cluster.send_messages(RETRIED, 2)
        await cluster.send_messages(Queue(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 0), 3)
        await cluster.route_watcher.poll_group(KEY)
        await cluster.wait_for_lag(RETRIED, 2)

        async def is_counted() -> bool:
            return cluster.lag.dead_letters == 3

        await soon(is_counted)


async def test_lag_of_a_deleted_topic_is_removed() -> None:
    async with a_cluster() as cluster:
        await cluster.wait_for_lag(AT_A, 0)
        await cluster.memory.delete_topic("orders")

        async def is_removed() -> bool:
            return AT_A not in cluster.lag.queues

        await soon(is_removed)


async def test_verdict_is_stopped_without_owner_and_stalled_with_one() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 1)

        async def wait_for_state(lag_state: LagState) -> None:
            async def has_state() -> bool:
                return AT_A in cluster.lag.queues and cluster.lag.queues[AT_A].lag_state is lag_state

            await soon(has_state)

        await wait_for_state(LagState.STOPPED)
        cluster.consumed_queues.add(AT_A)
        await wait_for_state(LagState.STALLED)


async def test_broadcasting_lag_uses_offsets_reported_by_members_not_brokers() -> None:
    async with a_cluster(A, B) as cluster:
        cluster.route_watcher.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=True))
        await cluster.send_messages(AT_A, 5)
        await cluster.send_messages(AT_B, 4)
        cluster.commit(AT_A, 1)
        cluster.reported_offsets[AT_A] = 2
        await cluster.wait_for_lag(AT_A, 3)
        await cluster.wait_for_polls(A, times=3)
        await cluster.wait_for_polls(B, times=2)
        queue_lag = cluster.lag.queues[AT_A]
        assert (queue_lag.lag, queue_lag.committed, queue_lag.delay, queue_lag.lag_state, queue_lag.consumed_rate) == (
            3,
            2,
            None,
            None,
            None,
        )
        assert cluster.lag.queues[AT_B][:4] == (0, 4, None, None), "no member reported an offset: unknown, not 0"
        assert cluster.memory.offset_queries == 0
        assert cluster.lag.dead_letters == 0
        cluster.reported_offsets[AT_B] = 0
        await cluster.wait_for_lag(AT_B, 4)


async def test_broadcasting_offsets_are_dropped_when_the_group_becomes_clustering() -> None:
    async with a_cluster() as cluster:
        cluster.route_watcher.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=True))
        await cluster.send_messages(AT_A, 5)
        cluster.reported_offsets[AT_A] = 4
        await cluster.wait_for_lag(AT_A, 1)
        cluster.commit(AT_A, 2)
        cluster.route_watcher.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False))
        assert cluster.lag.queues == {}
        await cluster.wait_for_lag(AT_A, 3)
        await cluster.wait_for_polls(times=2)
        assert cluster.lag.queues[AT_A].lag_state is not LagState.REWOUND


async def test_lag_is_incomplete_for_a_while_after_a_broker_leaves_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(A, B) as cluster:
        await cluster.wait_for_lag(AT_B, 0)
        await soon(lambda: holds(cluster.lag.dead_letters == 0))
        assert cluster.lag.incomplete_topics == frozenset()
        cluster.memory.hidden_brokers = {B}
        await cluster.route_watcher.poll_group(KEY)
        await cluster.wait_for_polls(times=3)
        assert (cluster.lag.incomplete_topics, cluster.lag.dead_letters) == (frozenset({"orders"}), None)
        cluster.memory.hidden_brokers = set()
        await cluster.route_watcher.poll_group(KEY)
        assert cluster.lag.incomplete_topics == frozenset()
        cluster.memory.hidden_brokers = {B}
        await cluster.route_watcher.poll_group(KEY)
        monkeypatch.setattr(lag_poller, "LOST_BROKER_SECONDS", 0.0)
        await soon(lambda: holds(not cluster.lag.incomplete_topics))
        assert {*cluster.lag.queues} == {AT_A}


async def test_lag_grace_for_a_lost_broker_excludes_time_without_route() -> None:
    memory = SlowCluster((A, B))
    for broker in (A, B):
        await memory.create_topic("orders", broker, 1)
    route_watcher = RouteWatcher(memory, lambda _: None)
    poller = LagPoller(memory, route_watcher, lambda _: ())
    route_watcher.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False))
    await route_watcher.poll_group(KEY)
    poller._note_routes(0.0)
    memory.take_down(NAME_SERVER)
    await route_watcher.poll_group(KEY)
    poller._note_routes(1000.0)
    memory.bring_up(NAME_SERVER)
    memory.hidden_brokers = {B}
    await route_watcher.poll_group(KEY)
    poller._note_routes(1000.0 + lag_poller.LOST_BROKER_SECONDS - 1)
    assert poller.lag_of(KEY).incomplete_topics == {"orders"}
    poller._note_routes(1000.0 + lag_poller.LOST_BROKER_SECONDS)
    assert poller.lag_of(KEY).incomplete_topics == frozenset()


async def holds(condition: bool) -> bool:  # noqa: FBT001 - a value
    return condition


async def test_lag_records_since_when_a_silent_broker_has_been_polled() -> None:
    async with a_cluster() as cluster:
        cluster.memory.take_down(A)
        await soon(lambda: holds(cluster.lag.requested_at is not None))
        first = cluster.lag.requested_at
        await cluster.wait_for_polls(times=2)
        assert cluster.lag.requested_at == first is not None
        assert cluster.lag.sampled_at is None
        cluster.memory.bring_up(A)
        await cluster.wait_for_lag(AT_A, 0)
        assert cluster.lag.requested_at is not None
        assert cluster.lag.requested_at > first


async def test_lag_of_another_groups_retries_follows_start_from() -> None:
    retried = Queue(RETRY_TOPIC_PREFIX + "others", A, 0)
    async with a_cluster() as cluster:
        cluster.memory.store.create_queues(retried.topic, A, 1)
        await cluster.send_messages(retried, 2)
        cluster.route_watcher.set_interest(KEY, TopicInterest("orders", (retried.topic,), broadcasting=False))
        await cluster.route_watcher.poll_group(KEY)
        await cluster.wait_for_lag(retried, 0)


async def test_lag_of_a_replaced_group_is_not_that_of_its_predecessor() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 1)
        await cluster.wait_for_lag(AT_A, 4)
        cluster.memory.groups.committed_offsets["others"][AT_A] = 3
        cluster.route_watcher.set_interest(KEY, TopicInterest("others", ("orders",), broadcasting=False))
        assert cluster.lag == GroupLag({})
        queue_lag = await cluster.wait_for_lag(AT_A, 2)
        assert queue_lag.lag_state is None or queue_lag.lag_state is LagState.STOPPED


async def test_lag_of_a_group_replaced_while_no_route_is_known_is_not_that_of_its_predecessor() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 4)
        await cluster.wait_for_polls(times=3)
        cluster.memory.take_down(NAME_SERVER)
        await cluster.route_watcher.poll_group(KEY)
        await soon(lambda: holds(cluster.lag == GroupLag({})))
        cluster.memory.groups.committed_offsets["others"][AT_A] = 3
        cluster.route_watcher.set_interest(KEY, TopicInterest("others", ("orders",), broadcasting=False))
        cluster.memory.bring_up(NAME_SERVER)
        await cluster.route_watcher.poll_group(KEY)
        assert (await cluster.wait_for_lag(AT_A, 2)).lag_state is not LagState.REWOUND


async def test_lag_samples_are_kept_while_no_route_is_known() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 1)
        await cluster.wait_for_polls(times=3)
        cluster.memory.take_down(NAME_SERVER)
        await cluster.route_watcher.poll_group(KEY)

        async def is_empty() -> bool:
            return cluster.lag == GroupLag({})

        await soon(is_empty)
        cluster.memory.bring_up(NAME_SERVER)
        await cluster.route_watcher.poll_group(KEY)
        assert (await cluster.wait_for_lag(AT_A, 4)).lag_state is LagState.STOPPED


async def test_lag_samples_hold_no_queues_that_no_route_names() -> None:
    async with a_cluster() as cluster:
        cluster.memory.invented_count = 1000
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 1)
        await cluster.wait_for_polls(times=3)
        await cluster.wait_for_lag(AT_A, 4)
        polled = cluster.poller._brokers_by_name[A]
        assert {queue for group_lag in polled.lag_by_group.values() for queue in group_lag.queue_lags} == {AT_A}
        assert [
            history._ids
            for history in polled.histories[KEY, OffsetSource("orders", broadcasting=False)].values()
            if history._ids
        ] == [(0,)]
        assert {question.queue for question in polled.resolved} <= {AT_A}
        (offsets,) = (
            await cluster.poller._sampler._read_offsets(
                polled, {KEY: cluster.route_watcher.interests_within_quota[KEY]}, {KEY: {"orders": 1}}
            )
        ).values()
        assert offsets == {"orders": {0: 1}}


async def test_lag_samples_of_brokers_that_left_the_route_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may list different brokers each time."""
    monkeypatch.setattr(polled_broker, "MAX_KEPT_BROKERS", 3)
    brokers = [f"broker-{number}" for number in range(10)]
    async with a_cluster(*brokers) as cluster:
        for broker in brokers:
            cluster.memory.hidden_brokers = {*brokers} - {broker}
            await cluster.route_watcher.poll_group(KEY)
            await cluster.wait_until_needed(broker)
        assert {*cluster.poller._brokers_by_name} == {*brokers[6:]}, (
            "the last broker is on the route, three were on it before"
        )


async def test_lag_at_offset_0_of_many_queues_is_known_after_several_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_resolver, "MAX_QUEUES_ASKED", 1)
    async with a_cluster() as cluster:
        await cluster.memory.create_topic("orders", A, 3)
        await cluster.route_watcher.poll_group(KEY)
        for number in range(3):
            await cluster.send_messages(Queue("orders", A, number), 5)
            cluster.commit(Queue("orders", A, number), 0)

        async def all_known() -> bool:
            return [queue_lag.lag for queue_lag in cluster.lag.queues.values()] == [5, 5, 5]

        await soon(all_known)


class UnreachableCluster(MemoryCluster):
    """A cluster with a broker that goes down at the first request; the name server still lists it."""

    progress_queries = 0

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        self.progress_queries += 1
        self.take_down(broker)
        return await super().group_offsets(group, broker, topics)


async def test_lag_polls_of_an_unreachable_broker_are_bounded() -> None:
    memory = UnreachableCluster((A,))
    await memory.create_topic("orders", A, 1)
    route_watcher = RouteWatcher(memory, lambda _: None)
    for number in range(1000):
        route_watcher.set_interest(("shop", str(number)), TopicInterest(str(number), ("orders",), broadcasting=False))
    await route_watcher.poll_group(("shop", "0"))
    polled = asyncio.Event()
    poller = LagPoller(memory, route_watcher, lambda _: (), lambda _: polled.set())
    running = asyncio.create_task(poller.run())
    await polled.wait()
    running.cancel()
    assert memory.progress_queries <= 2 * polled_broker.MAX_CONCURRENT_REQUESTS


async def test_lag_at_a_hanging_broker_is_unknown_after_one_unanswered_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds for each kind of request: group offsets, queue ranges, one queue's offset, dead letters."""
    monkeypatch.setattr(polled_broker, "REQUEST_TIMEOUT_SECONDS", 0.1)
    for kind in ("progress", "ends", "committed", "dead"):
        async with a_cluster(A, B) as cluster:
            for number in range(100):
                queue = Queue("orders", A, number)
                cluster.memory.store.create_queues("orders", A, number + 1)
                await cluster.send_messages(queue, 5)
                cluster.commit(queue, 0)
            await cluster.route_watcher.poll_group(KEY)
            cluster.poller._brokers_by_name.clear()
            await soon(lambda: holds(len(cluster.lag.queues) > 100))
            cluster.commit(AT_A, 1)
            await cluster.wait_for_lag(AT_A, 4)
            polled = cluster.poller._brokers_by_name[A]
            previous_polls = polled.polls
            cluster.memory.hanging.add((kind, A))
            assert await cluster.wait_for_lag(AT_A, None) == UNKNOWN_QUEUE_LAG
            polls = polled.polls - previous_polls + 1
            assert cluster.memory.hanging_requests <= polls * polled_broker.MAX_CONCURRENT_REQUESTS, f"in {polls} polls"
            assert cluster.lag.queues[AT_B].lag == 0
            cluster.memory.hanging.clear()
            await cluster.wait_for_lag(AT_A, 4)


async def test_broadcasting_lag_is_unknown_while_the_broker_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polled_broker, "REQUEST_TIMEOUT_SECONDS", 0.05)
    async with a_cluster() as cluster:
        cluster.route_watcher.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=True))
        await cluster.send_messages(AT_A, 5)
        cluster.reported_offsets[AT_A] = 2
        await cluster.wait_for_lag(AT_A, 3)
        cluster.memory.hanging.add(("ends", A))
        await cluster.wait_for_lag(AT_A, None)


async def test_lag_of_other_groups_is_known_when_one_response_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_broker, "REQUEST_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(offset_sampler, "BATCH_GROUPS", 2)
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        for name in ("one", "other"):
            cluster.route_watcher.set_interest(("shop", name), TopicInterest(name, ("orders",), broadcasting=False))
            cluster.memory.groups.committed_offsets[name][AT_A] = 4
        cluster.commit(AT_A, 4)
        await cluster.wait_for_lag(AT_A, 1)
        cluster.memory.hanging.add(("progress", "one"))
        previous_polls = cluster.poller._brokers_by_name[A].polls
        await cluster.wait_for_polls(times=3)
        assert cluster.poller._brokers_by_name[A].polls > previous_polls
        for _ in range(5):
            await cluster.wait_for_polls()
            assert cluster.lag.queues[AT_A].lag == 1
            assert cluster.poller.lag_of(("shop", "other")).queues[AT_A].lag == 1
            assert cluster.poller.lag_of(("shop", "one")).queues.get(AT_A, UNKNOWN_QUEUE_LAG) == UNKNOWN_QUEUE_LAG


async def test_lag_of_other_groups_is_known_when_the_broker_rejects_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offset_sampler, "BATCH_GROUPS", 2)
    async with a_cluster() as cluster:
        for name in ("one", "other", "third"):
            cluster.route_watcher.set_interest(("shop", name), TopicInterest(name, ("orders",), broadcasting=False))
            cluster.memory.rejected_groups.add(name)
        await cluster.wait_for_lag(AT_A, 0)
        await cluster.wait_for_polls(times=3)
        assert cluster.lag.queues[AT_A].lag == 0
        assert cluster.poller.lag_of(("shop", "one")).queues == {}


async def test_lag_polls_limited_in_time_reach_every_group_eventually(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offset_sampler, "BATCH_GROUPS", 1)
    monkeypatch.setattr(polled_broker, "POLL_DEADLINE_SECONDS", 0.08)
    async with a_cluster() as cluster:
        keys = [("shop", str(number)) for number in range(6)]
        for key in keys:
            cluster.route_watcher.set_interest(key, TopicInterest(key[1], ("orders",), broadcasting=False))
        cluster.memory.response_seconds = 0.03
        reached: set[tuple[str, str]] = set()

        async def are_all_reached() -> bool:
            for key in keys:
                queue_lag = cluster.poller.lag_of(key).queues.get(AT_A)
                if queue_lag and queue_lag.lag == 0:
                    reached.add(key)
            return reached == {*keys}

        await soon(are_all_reached)


async def test_lag_is_unknown_after_an_invalid_offset_or_broken_response() -> None:
    async with a_cluster(A, B) as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 1)
        await cluster.wait_for_lag(AT_A, 4)
        await cluster.memory.create_topic("orders", A, 2)
        await cluster.route_watcher.poll_group(KEY)
        second_queue = Queue("orders", A, 1)
        await cluster.wait_for_lag(second_queue, 0)
        for offset_range in [(0, 2**63), (-1, 5), (9, 5)]:
            cluster.memory.replaced_ranges[AT_A] = offset_range
            assert (await cluster.wait_for_unknown_lag(AT_A)).lag is None
            assert cluster.lag.queues[second_queue].lag == 0, "other queues of the broker stay known"
            cluster.memory.replaced_ranges.clear()
            await cluster.wait_for_lag(AT_A, 4)
        for committed in (2**63, -2):
            cluster.commit(AT_A, committed)
            assert (await cluster.wait_for_unknown_lag(AT_A)).lag is None
            assert cluster.lag.queues[second_queue].lag == 0
            cluster.commit(AT_A, 1)
            await cluster.wait_for_lag(AT_A, 4)
        cluster.memory.broken_brokers.add(A)
        assert await cluster.wait_for_unknown_lag(AT_A) == UNKNOWN_QUEUE_LAG
        assert cluster.lag.queues[AT_B].lag == 0
        cluster.memory.broken_brokers.clear()
        await cluster.wait_for_lag(AT_A, 4)


async def test_dead_letter_queue_that_ends_before_its_start_is_not_counted() -> None:
    async with a_cluster() as cluster:
        letters = Queue(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 0)
        cluster.memory.store.create_queues(letters.topic, A, 1)
        await cluster.send_messages(letters, 3)
        await soon(lambda: holds(cluster.lag.dead_letters == 3))
        cluster.memory.replaced_ranges[letters] = (9, 5)
        await soon(lambda: holds(cluster.lag.dead_letters is None))


async def test_lag_of_a_replaced_group_keeps_no_dead_letters_or_offsets() -> None:
    async with a_cluster() as cluster:
        await cluster.send_messages(AT_A, 5)
        cluster.commit(AT_A, 0)
        cluster.memory.store.create_queues(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 1)
        await cluster.send_messages(Queue(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 0), 3)
        await cluster.wait_for_lag(AT_A, 5)
        await soon(lambda: holds(cluster.lag.dead_letters == 3))
        for number in range(lag_poller.DEAD_LETTERS_EVERY_POLLS):
            name = f"others{number}"
            cluster.route_watcher.set_interest(KEY, TopicInterest(name, ("orders",), broadcasting=False))
            await soon(lambda: holds(AT_A in cluster.lag.queues))
            lag = cluster.lag
            assert lag.dead_letters == 0
            assert (lag.queues[AT_A].committed, lag.queues[AT_A].lag) == (None, 0)
            cluster.route_watcher.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False))
            await soon(lambda: holds(AT_A in cluster.lag.queues))
            assert cluster.lag.dead_letters == 3
            assert cluster.lag.queues[AT_A].committed == 0
            await cluster.wait_for_polls()


async def test_lag_distinguishes_no_offset_from_offset_0_of_an_empty_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster() as cluster:
        queue_lag = await cluster.wait_for_lag(AT_A, 0)
        assert queue_lag.committed is None
        cluster.commit(AT_A, 0)
        await soon(lambda: holds(cluster.lag.queues[AT_A].committed == 0))
        del cluster.memory.groups.committed_offsets["orders"][AT_A]
        await soon(lambda: holds(cluster.lag.queues[AT_A].committed is None))
        monkeypatch.setattr(queue_resolver, "REUSE_POLLS", 1000)
        cluster.commit(AT_A, 0)
        await cluster.send_messages(AT_A, 3)
        await cluster.wait_for_lag(AT_A, 3)
        cluster.memory.store.min_offsets[AT_A] = 3
        await cluster.wait_for_lag(AT_A, 0)
        monkeypatch.setattr(queue_resolver, "MAX_QUEUES_ASKED", 1)
        await cluster.memory.create_topic("orders", A, 3)
        await cluster.route_watcher.poll_group(KEY)
        last = Queue("orders", A, 2)
        await cluster.send_messages(last, 5)
        cluster.commit(last, 0)
        cluster.poller._brokers_by_name[A].resolved.clear()
        queue_lag = await cluster.wait_for_lag(last, 5)
        assert queue_lag.committed == 0, "queues with messages are queried first"
        assert [cluster.lag.queues[Queue("orders", A, number)].lag for number in range(2)] == [0, 0]


async def test_lag_poller_notifies_when_lag_becomes_unknown_or_known_again() -> None:
    changed_keys: list[tuple[str, str]] = []
    async with a_cluster() as cluster:
        cluster.poller._on_known_change = changed_keys.append
        await cluster.wait_for_lag(AT_A, 0)
        await cluster.wait_for_polls(times=3)
        changed_keys.clear()
        await cluster.wait_for_polls(times=3)
        assert changed_keys == []
        cluster.memory.take_down(A)
        await cluster.wait_for_unknown_lag(AT_A)
        await cluster.wait_for_polls(times=3)
        assert changed_keys == [KEY]
        cluster.memory.bring_up(A)
        await cluster.wait_for_lag(AT_A, 0)
        await cluster.wait_for_polls(times=3)
        assert changed_keys == [KEY, KEY]


async def test_lag_flows_are_kept_for_weighted_groups_while_the_broker_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster() as cluster:
        await cluster.wait_for_lag(AT_A, 0)
        assert cluster.lag.incoming_rates == {}
        cluster.route_watcher.set_interest(
            KEY, TopicInterest("orders", ("orders",), broadcasting=False, needs_weights=True)
        )
        await soon(lambda: holds(cluster.lag.incoming_rates == {AT_A: None}))
        monkeypatch.setattr("rota.kube.brokers.lag.lag_history.MIN_HISTORY_SECONDS", 0.0)
        await cluster.send_messages(AT_A, 5)
        await soon(lambda: holds((cluster.lag.incoming_rates[AT_A] or 0) > 0))
        cluster.memory.take_down(A)
        await cluster.wait_for_unknown_lag(AT_A)
        assert (cluster.lag.incoming_rates[AT_A] or 0) > 0
