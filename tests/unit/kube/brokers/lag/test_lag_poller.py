"""How far groups are behind, read from brokers in memory: what is told, and what is not known."""

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
from rota.kube.brokers.lag import lag_poller, polled_broker
from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag, LagPoller
from rota.kube.brokers.route_watcher import RouteWatcher, TopicInterest
from rota.lag import LagState
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.spec import StartFrom, Subscription

KEY = ("shop", "orders")
A, B = "broker-a", "broker-b"
AT_A, AT_B = Queue("orders", A, 0), Queue("orders", B, 0)
RETRIED = Queue(RETRY_TOPIC_PREFIX + "orders", A, 0)


class Slow(MemoryCluster):
    """A cluster of which some brokers do not answer for as long as that is wanted, and others change meanwhile."""

    def __init__(self, brokers: Collection[str]) -> None:
        super().__init__(tuple(brokers))
        self.silent: set[str] = set()
        self.freed = asyncio.Event()
        self.between: list[Queue] = []  # sent to after a group's progress was told
        self.asked = 0
        self.forgotten: set[str] = set()  # brokers that the name servers have lost sight of
        self.hangs: set[tuple[str, str]] = set()  # what is not answered, by which broker or of which group
        self.hung = 0
        self.refused: set[str] = set()  # groups
        self.takes = 0.0  # seconds, each answer about a group
        self.ends_of: dict[Queue, tuple[int, int]] = {}  # which it tells otherwise than they are
        self.breaks: set[str] = set()  # brokers whose answers nobody can bear
        self.invented = 0  # queues that are on no route, of which brokers tell all the same

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        return tuple(it for it in await super().queues(topic) if it.broker not in self.forgotten)

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        while broker in self.silent:
            await self.freed.wait()
        await asyncio.sleep(self.takes)
        await self.maybe("progress", broker)
        await self.maybe("progress", group)
        if group in self.refused:
            raise RejectedError("No permission")
        told = await super().group_offsets(group, broker, topics)
        told |= dict.fromkeys(self.invent("orders", broker), BrokerOffsets(9, 5, 5, 0.0))
        told |= dict.fromkeys(self.invent("other", broker), BrokerOffsets(9, 5, 5, 0.0))
        for queue in self.between:
            await self.send(queue.topic, b"new", queue=queue)
            self.committed_offsets[group][queue] = len(await self.messages_of(queue))
        return told

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        self.asked += 1
        await self.maybe("committed", queue.broker)
        return await super().committed_offset(group, queue)

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        await self.maybe("dead" if topic.startswith(lag_poller.DEAD_LETTER_PREFIX) else "ends", broker)
        if broker in self.breaks:
            raise OverflowError
        found = await super().offset_ranges(topic, broker)
        found |= {queue: OffsetRange(*it) for queue, it in self.ends_of.items() if queue in found}
        return found | dict.fromkeys(self.invent(topic, broker), OffsetRange(0, 9))

    def invent(self, topic: str, broker: str) -> list[Queue]:
        return [Queue(topic, broker, 1 + number) for number in range(self.invented)]

    async def maybe(self, what: str, who: str) -> None:
        if (what, who) in self.hangs:
            self.hung += 1
            await asyncio.Event().wait()  # who asks gives up, or waits for ever


@dataclass
class Cluster:
    """Brokers in memory, a group that reads from them, and what is known of it."""

    memory: Slow
    views: RouteWatcher
    lags: LagPoller
    worked: set[Queue] = field(default_factory=set)
    reported: dict[Queue, int] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)

    async def sends(self, queue: Queue, count: int) -> None:
        for _ in range(count):
            await self.memory.send(queue.topic, b"it", queue=queue)

    def commits(self, queue: Queue, offset: int) -> None:
        self.memory.committed_offsets["orders"][queue] = offset

    @property
    def lag(self) -> GroupLag:
        return self.lags.lag_of(KEY)

    async def tells(self, queue: Queue, lag: int | None) -> QueueLag:
        """Wait until that is told of a queue."""

        async def told() -> QueueLag | None:
            found = self.lag.queues.get(queue)
            return found if found and found.lag == lag else None

        found = await soon(told)
        assert found
        return found

    async def unknown(self, queue: Queue) -> QueueLag:
        """Wait until nothing is told of how far behind a queue is."""

        async def untold() -> QueueLag | None:
            found = self.lag.queues.get(queue, UNKNOWN_QUEUE_LAG)
            return found if found.lag is None else None

        found = await soon(untold)
        assert found
        return found

    async def is_asked(self, broker: str) -> None:
        """Wait until a broker is one of those to ask, by what is known of routes now."""
        now = asyncio.get_running_loop().time()

        async def asked() -> bool:
            return broker in self.lags._brokers_by_name and self.lags._brokers_by_name[broker].last_needed_at > now

        await soon(asked)

    async def looks(self, broker: str = A, times: int = 1) -> None:
        """Wait until one broker was looked at again."""
        known = self.lags._brokers_by_name[broker]
        wanted = known.polls + times

        async def looked() -> bool:
            return known.polls >= wanted

        await soon(looked)


@asynccontextmanager
async def a_cluster(*brokers: str, begins: StartFrom = StartFrom()) -> AsyncIterator[Cluster]:  # noqa: B008 - a value
    memory = Slow(brokers or (A,))
    for broker in brokers or (A,):
        await memory.create_topic("orders", broker, 1)
    views = RouteWatcher(memory, lambda _: None)
    worked: set[Queue] = set()
    reported: dict[Queue, int] = {}
    begun: dict[str, float] = {}
    known = LagPoller(
        memory, views, lambda _: worked, reported_offsets=lambda _: reported, topic_starts=lambda _: begun
    )
    known.poll_seconds = 0.01
    views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False, start_from=begins))
    await views.poll_group(KEY)
    running = asyncio.create_task(known.run())
    try:
        yield Cluster(memory, views, known, worked, reported, begun)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_lag_is_reported_by_queue() -> None:
    async with a_cluster(A, B) as it:
        await it.sends(AT_A, 5)
        await it.sends(AT_B, 3)
        it.commits(AT_A, 2)
        it.commits(AT_B, 3)
        assert (await it.tells(AT_A, 3))[:3] == (0, 5, 2)
        assert (await it.tells(AT_B, 0))[:3] == (0, 3, 3)
        assert it.lag.sampled_at is not None


async def test_lag_of_a_group_without_online_members_is_reported() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 1)
        assert not it.memory.members["orders"]
        await it.tells(AT_A, 4)


async def test_lag_of_an_uncommitted_queue_is_0_with_start_from_latest() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        assert (await it.tells(AT_A, 0)).committed is None
        await it.looks(times=3)
        assert it.lag.queues[AT_A].lag == 0


async def test_lag_with_start_from_latest_counts_messages_since_consumption_started() -> None:
    """So it is for a queue that the topic got later, and that nobody has taken up yet."""
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.begun["orders"] = (await it.memory.messages_of(AT_A))[-1].stored_ms / 1000 + 0.001
        await soon(lambda: later_than(it.begun["orders"]))
        await it.sends(AT_A, 3)
        assert (await it.tells(AT_A, 3))[:3] == (0, 8, 5)
        await it.looks(times=lag_poller.REUSE_POLLS + 1)
        assert it.lag.queues[AT_A].lag == 3
        it.commits(AT_A, 7)
        await it.tells(AT_A, 1)


async def test_lag_with_start_from_earliest_ignores_when_consumption_started() -> None:
    async with a_cluster(begins=StartFrom(position="Earliest")) as it:
        it.begun["orders"] = time.time() + 60
        await it.sends(AT_A, 5)
        await it.tells(AT_A, 5)


async def later_than(at: float) -> bool:
    return time.time() > at


async def test_lag_with_start_from_earliest_is_the_whole_queue() -> None:
    async with a_cluster(begins=StartFrom(position="Earliest")) as it:
        await it.sends(AT_A, 5)
        it.memory.min_offsets[AT_A] = 2
        assert (await it.tells(AT_A, 3)).committed is None


async def test_lag_with_start_from_timestamp_is_unknown() -> None:
    async with a_cluster(begins=StartFrom(position="Timestamp")) as it:
        await it.sends(AT_A, 5)
        await it.tells(AT_A, None)


async def test_lag_at_committed_offset_0_is_the_whole_queue() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 0)
        assert (await it.tells(AT_A, 5)).committed == 0


async def test_lag_of_a_queue_missing_from_broker_statistics_is_queried() -> None:
    """While somebody is online who reads other topics, a broker's statistics are silent about this one."""
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 2)
        await it.memory.create_topic("others", A, 1)
        wanted = [Subscription(topic="others")]
        other = MemoryConsumer(it.memory, Membership(group="orders", client_id="foreign", subscriptions=wanted))
        await other.join()
        await it.looks(times=2)
        assert it.lag.queues[AT_A].lag == 3


async def test_lag_polls_do_not_query_an_uncommitted_queue_each_time() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        await it.looks(times=40)
        assert it.memory.asked < 20


async def test_lag_is_not_negative_when_responses_differ_in_age() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 5)
        it.memory.between = [AT_A]
        for _ in range(20):
            await it.looks()
            lag = it.lag.queues[AT_A].lag
            assert lag is not None
            assert lag >= 0


async def test_lag_with_an_offset_above_the_end_is_unknown() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 7)
        assert (await it.tells(AT_A, None)).committed == 7


async def test_lag_is_unknown_only_at_the_broker_that_is_down() -> None:
    async with a_cluster(A, B) as it:
        await it.sends(AT_A, 5)
        await it.sends(AT_B, 5)
        it.commits(AT_A, 1)
        it.commits(AT_B, 1)
        await it.tells(AT_A, 4)
        it.memory.take_down(A)
        assert await it.tells(AT_A, None) == UNKNOWN_QUEUE_LAG
        it.commits(AT_B, 2)
        await it.tells(AT_B, 3)
        it.memory.bring_up(A)
        await it.tells(AT_A, 4)


async def test_lag_polls_of_a_slow_broker_delay_no_other() -> None:
    async with a_cluster(A, B) as it:
        await it.sends(AT_B, 5)
        it.commits(AT_B, 1)
        it.memory.silent.add(A)
        await it.tells(AT_B, 4)
        it.commits(AT_B, 4)
        await it.tells(AT_B, 1)
        it.memory.silent.clear()
        it.memory.freed.set()
        await it.tells(AT_A, 0)


async def test_lag_of_retries_counts_from_the_oldest_and_dead_letters_are_counted() -> None:
    async with a_cluster() as it:
        it.memory.create_queues(RETRIED.topic, A, 1)
        it.memory.create_queues(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 1)
        await it.sends(RETRIED, 2)
        await it.sends(Queue(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 0), 3)
        await it.views.poll_group(KEY)
        await it.tells(RETRIED, 2)

        async def counted() -> bool:
            return it.lag.dead_letters == 3

        await soon(counted)


async def test_lag_of_a_deleted_topic_is_removed() -> None:
    async with a_cluster() as it:
        await it.tells(AT_A, 0)
        await it.memory.delete_topic("orders")

        async def gone() -> bool:
            return AT_A not in it.lag.queues

        await soon(gone)


async def test_verdict_is_stopped_without_owner_and_stalled_with_one() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 1)

        async def judged(verdict: LagState) -> None:
            async def told() -> bool:
                return AT_A in it.lag.queues and it.lag.queues[AT_A].lag_state is verdict

            await soon(told)

        await judged(LagState.STOPPED)
        it.worked.add(AT_A)
        await judged(LagState.STALLED)


async def test_broadcasting_lag_uses_offsets_reported_by_members_not_brokers() -> None:
    async with a_cluster(A, B) as it:
        it.views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=True))
        await it.sends(AT_A, 5)
        await it.sends(AT_B, 4)
        it.commits(AT_A, 1)
        it.reported[AT_A] = 2
        await it.tells(AT_A, 3)
        await it.looks(A, times=3)
        await it.looks(B, times=2)
        found = it.lag.queues[AT_A]
        assert (found.lag, found.committed, found.delay, found.lag_state, found.consumed_rate) == (
            3,
            2,
            None,
            None,
            None,
        )
        assert it.lag.queues[AT_B][:4] == (0, 4, None, None), "nobody told it; it is not 0 for beginning at the end"
        assert it.memory.asked == 0
        assert it.lag.dead_letters == 0
        it.reported[AT_B] = 0
        await it.tells(AT_B, 4)


async def test_broadcasting_offsets_are_dropped_when_the_group_becomes_clustering() -> None:
    async with a_cluster() as it:
        it.views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=True))
        await it.sends(AT_A, 5)
        it.reported[AT_A] = 4
        await it.tells(AT_A, 1)
        it.commits(AT_A, 2)
        it.views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False))
        assert it.lag.queues == {}
        await it.tells(AT_A, 3)
        await it.looks(times=2)
        assert it.lag.queues[AT_A].lag_state is not LagState.REWOUND


async def test_lag_is_incomplete_for_a_while_after_a_broker_leaves_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(A, B) as it:
        await it.tells(AT_B, 0)
        await soon(lambda: _is(it.lag.dead_letters == 0))
        assert it.lag.incomplete_topics == frozenset()
        it.memory.forgotten = {B}
        await it.views.poll_group(KEY)
        await it.looks(times=3)
        assert (it.lag.incomplete_topics, it.lag.dead_letters) == (frozenset({"orders"}), None)
        it.memory.forgotten = set()
        await it.views.poll_group(KEY)
        assert it.lag.incomplete_topics == frozenset()
        it.memory.forgotten = {B}
        await it.views.poll_group(KEY)
        monkeypatch.setattr(lag_poller, "LOST_BROKER_SECONDS", 0.0)
        await soon(lambda: _is(not it.lag.incomplete_topics))
        assert {*it.lag.queues} == {AT_A}


async def test_lag_grace_for_a_lost_broker_excludes_time_without_route() -> None:
    memory = Slow((A, B))
    for broker in (A, B):
        await memory.create_topic("orders", broker, 1)
    views = RouteWatcher(memory, lambda _: None)
    known = LagPoller(memory, views, lambda _: ())
    views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False))
    await views.poll_group(KEY)
    known._note_routes(0.0)
    memory.take_down(NAME_SERVER)
    await views.poll_group(KEY)
    known._note_routes(1000.0)
    memory.bring_up(NAME_SERVER)
    memory.forgotten = {B}
    await views.poll_group(KEY)
    known._note_routes(1000.0 + lag_poller.LOST_BROKER_SECONDS - 1)
    assert known.lag_of(KEY).incomplete_topics == {"orders"}
    known._note_routes(1000.0 + lag_poller.LOST_BROKER_SECONDS)
    assert known.lag_of(KEY).incomplete_topics == frozenset()


async def _is(true: bool) -> bool:  # noqa: FBT001 - a value
    return true


async def test_lag_records_since_when_a_silent_broker_has_been_polled() -> None:
    async with a_cluster() as it:
        it.memory.take_down(A)
        await soon(lambda: _is(it.lag.requested_at is not None))
        first = it.lag.requested_at
        await it.looks(times=2)
        assert it.lag.requested_at == first is not None
        assert it.lag.sampled_at is None
        it.memory.bring_up(A)
        await it.tells(AT_A, 0)
        assert it.lag.requested_at is not None
        assert it.lag.requested_at > first


async def test_lag_of_another_groups_retries_follows_start_from() -> None:
    others = Queue(RETRY_TOPIC_PREFIX + "others", A, 0)
    async with a_cluster() as it:
        it.memory.create_queues(others.topic, A, 1)
        await it.sends(others, 2)
        it.views.set_interest(KEY, TopicInterest("orders", (others.topic,), broadcasting=False))
        await it.views.poll_group(KEY)
        await it.tells(others, 0)


async def test_lag_of_a_replaced_group_is_not_that_of_its_predecessor() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 1)
        await it.tells(AT_A, 4)
        it.memory.committed_offsets["others"][AT_A] = 3
        it.views.set_interest(KEY, TopicInterest("others", ("orders",), broadcasting=False))
        assert it.lag == GroupLag({})
        found = await it.tells(AT_A, 2)
        assert found.lag_state is None or found.lag_state is LagState.STOPPED


async def test_lag_samples_are_kept_while_no_route_is_known() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 1)
        await it.looks(times=3)
        it.memory.take_down(NAME_SERVER)
        await it.views.poll_group(KEY)

        async def unknown() -> bool:
            return it.lag == GroupLag({})

        await soon(unknown)
        it.memory.bring_up(NAME_SERVER)
        await it.views.poll_group(KEY)
        assert (await it.tells(AT_A, 4)).lag_state is LagState.STOPPED


async def test_lag_samples_hold_no_queues_that_no_route_names() -> None:
    async with a_cluster() as it:
        it.memory.invented = 1000
        await it.sends(AT_A, 5)
        it.commits(AT_A, 1)
        await it.looks(times=3)
        await it.tells(AT_A, 4)
        known = it.lags._brokers_by_name[A]
        assert {queue for told in known.lag_by_group.values() for queue in told.queue_lags} == {AT_A}
        assert [history._ids for history in known.histories[KEY].values() if history._ids] == [(0,)]
        assert known.resolved.keys() <= {("orders", AT_A)}
        (offsets,) = (await it.lags._read_offsets(known, {KEY: it.views.interests[KEY]}, {KEY: {"orders": 1}})).values()
        assert offsets == {"orders": {0: 1}}


async def test_lag_samples_of_brokers_that_left_the_route_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may tell of other brokers each time."""
    monkeypatch.setattr(polled_broker, "MAX_KEPT_BROKERS", 3)
    brokers = [f"broker-{number}" for number in range(10)]
    async with a_cluster(*brokers) as it:
        for broker in brokers:
            it.memory.forgotten = {*brokers} - {broker}
            await it.views.poll_group(KEY)
            await it.is_asked(broker)
        assert {*it.lags._brokers_by_name} == {*brokers[6:]}, "the last one is on the route, and three were before"


async def test_lag_at_offset_0_of_many_queues_is_known_after_several_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag_poller, "MAX_QUEUES_ASKED", 1)
    async with a_cluster() as it:
        await it.memory.create_topic("orders", A, 3)
        await it.views.poll_group(KEY)
        for number in range(3):
            await it.sends(Queue("orders", A, number), 5)
            it.commits(Queue("orders", A, number), 0)

        async def all_known() -> bool:
            return [judged.lag for judged in it.lag.queues.values()] == [5, 5, 5]

        await soon(all_known)


class Away(MemoryCluster):
    """A broker that only its name server knows."""

    asked = 0

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        self.asked += 1
        self.take_down(broker)
        return await super().group_offsets(group, broker, topics)


async def test_lag_polls_of_an_unreachable_broker_are_bounded() -> None:
    memory = Away((A,))
    await memory.create_topic("orders", A, 1)
    views = RouteWatcher(memory, lambda _: None)
    for number in range(1000):
        views.set_interest(("shop", str(number)), TopicInterest(str(number), ("orders",), broadcasting=False))
    await views.poll_group(("shop", "0"))
    looked = asyncio.Event()
    known = LagPoller(memory, views, lambda _: (), lambda _: looked.set())
    running = asyncio.create_task(known.run())
    await looked.wait()
    running.cancel()
    assert memory.asked <= 2 * polled_broker.MAX_CONCURRENT_REQUESTS


async def test_lag_at_a_hanging_broker_is_unknown_after_one_unanswered_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it hangs at: where groups are, where queues end, whether a group ever was at a queue, dead letters."""
    monkeypatch.setattr(polled_broker, "REQUEST_TIMEOUT_SECONDS", 0.1)
    for hangs in ("progress", "ends", "committed", "dead"):
        async with a_cluster(A, B) as it:
            for number in range(100):
                queue = Queue("orders", A, number)
                it.memory.create_queues("orders", A, number + 1)
                await it.sends(queue, 5)
                it.commits(queue, 0)
            await it.views.poll_group(KEY)
            it.lags._brokers_by_name.clear()
            await soon(lambda: _is(len(it.lag.queues) > 100))
            it.commits(AT_A, 1)
            await it.tells(AT_A, 4)
            at_broker = it.lags._brokers_by_name[A]
            looks = at_broker.polls
            it.memory.hangs.add((hangs, A))
            assert await it.tells(AT_A, None) == UNKNOWN_QUEUE_LAG
            begun = at_broker.polls - looks + 1
            assert it.memory.hung <= begun * polled_broker.MAX_CONCURRENT_REQUESTS, f"in {begun} looks"
            assert it.lag.queues[AT_B].lag == 0
            it.memory.hangs.clear()
            await it.tells(AT_A, 4)


async def test_broadcasting_lag_is_unknown_while_the_broker_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polled_broker, "REQUEST_TIMEOUT_SECONDS", 0.05)
    async with a_cluster() as it:
        it.views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=True))
        await it.sends(AT_A, 5)
        it.reported[AT_A] = 2
        await it.tells(AT_A, 3)
        it.memory.hangs.add(("ends", A))
        await it.tells(AT_A, None)


async def test_lag_of_other_groups_is_known_when_one_response_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_broker, "REQUEST_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(lag_poller, "BATCH_GROUPS", 2)
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        for name in ("one", "other"):
            it.views.set_interest(("shop", name), TopicInterest(name, ("orders",), broadcasting=False))
            it.memory.committed_offsets[name][AT_A] = 4
        it.commits(AT_A, 4)
        await it.tells(AT_A, 1)
        it.memory.hangs.add(("progress", "one"))
        looks = it.lags._brokers_by_name[A].polls
        await it.looks(times=3)
        assert it.lags._brokers_by_name[A].polls > looks
        for _ in range(5):
            await it.looks()
            assert it.lag.queues[AT_A].lag == 1
            assert it.lags.lag_of(("shop", "other")).queues[AT_A].lag == 1
            assert it.lags.lag_of(("shop", "one")).queues.get(AT_A, UNKNOWN_QUEUE_LAG) == UNKNOWN_QUEUE_LAG


async def test_lag_of_other_groups_is_known_when_the_broker_rejects_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lag_poller, "BATCH_GROUPS", 2)
    async with a_cluster() as it:
        for name in ("one", "other", "third"):
            it.views.set_interest(("shop", name), TopicInterest(name, ("orders",), broadcasting=False))
            it.memory.refused.add(name)
        await it.tells(AT_A, 0)
        await it.looks(times=3)
        assert it.lag.queues[AT_A].lag == 0
        assert it.lags.lag_of(("shop", "one")).queues == {}


async def test_lag_polls_limited_in_time_reach_every_group_eventually(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lag_poller, "BATCH_GROUPS", 1)
    monkeypatch.setattr(polled_broker, "POLL_DEADLINE_SECONDS", 0.08)
    async with a_cluster() as it:
        keys = [("shop", str(number)) for number in range(6)]
        for key in keys:
            it.views.set_interest(key, TopicInterest(key[1], ("orders",), broadcasting=False))
        it.memory.takes = 0.03
        told: set[tuple[str, str]] = set()

        async def each() -> bool:
            told.update(key for key in keys if AT_A in (queues := it.lags.lag_of(key).queues) and queues[AT_A].lag == 0)
            return told == {*keys}

        await soon(each)


async def test_lag_is_unknown_after_an_invalid_offset_or_broken_response() -> None:
    async with a_cluster(A, B) as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 1)
        await it.tells(AT_A, 4)
        await it.memory.create_topic("orders", A, 2)
        await it.views.poll_group(KEY)
        other = Queue("orders", A, 1)
        await it.tells(other, 0)
        for ends in [(0, 2**63), (-1, 5), (9, 5)]:
            it.memory.ends_of[AT_A] = ends
            assert (await it.unknown(AT_A)).lag is None
            assert it.lag.queues[other].lag == 0, "of others it is believed"
            it.memory.ends_of.clear()
            await it.tells(AT_A, 4)
        for committed in (2**63, -2):
            it.commits(AT_A, committed)
            assert (await it.unknown(AT_A)).lag is None
            assert it.lag.queues[other].lag == 0
            it.commits(AT_A, 1)
            await it.tells(AT_A, 4)
        it.memory.breaks.add(A)
        assert await it.unknown(AT_A) == UNKNOWN_QUEUE_LAG
        assert it.lag.queues[AT_B].lag == 0
        it.memory.breaks.clear()
        await it.tells(AT_A, 4)


async def test_dead_letter_queue_that_ends_before_its_start_is_not_counted() -> None:
    async with a_cluster() as it:
        letters = Queue(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 0)
        it.memory.create_queues(letters.topic, A, 1)
        await it.sends(letters, 3)
        await soon(lambda: _is(it.lag.dead_letters == 3))
        it.memory.ends_of[letters] = (9, 5)
        await soon(lambda: _is(it.lag.dead_letters is None))


async def test_lag_of_a_replaced_group_keeps_no_dead_letters_or_offsets() -> None:
    async with a_cluster() as it:
        await it.sends(AT_A, 5)
        it.commits(AT_A, 0)
        it.memory.create_queues(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 1)
        await it.sends(Queue(lag_poller.DEAD_LETTER_PREFIX + "orders", A, 0), 3)
        await it.tells(AT_A, 5)
        await soon(lambda: _is(it.lag.dead_letters == 3))
        for looks in range(lag_poller.DEAD_LETTERS_EVERY_POLLS):
            name = f"others{looks}"
            it.views.set_interest(KEY, TopicInterest(name, ("orders",), broadcasting=False))
            await soon(lambda: _is(AT_A in it.lag.queues))
            found = it.lag
            assert found.dead_letters == 0
            assert (found.queues[AT_A].committed, found.queues[AT_A].lag) == (None, 0)
            it.views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False))
            await soon(lambda: _is(AT_A in it.lag.queues))
            assert it.lag.dead_letters == 3
            assert it.lag.queues[AT_A].committed == 0
            await it.looks()


async def test_lag_distinguishes_no_offset_from_offset_0_of_an_empty_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster() as it:
        found = await it.tells(AT_A, 0)
        assert found.committed is None
        it.commits(AT_A, 0)
        await soon(lambda: _is(it.lag.queues[AT_A].committed == 0))
        del it.memory.committed_offsets["orders"][AT_A]
        await soon(lambda: _is(it.lag.queues[AT_A].committed is None))
        monkeypatch.setattr(lag_poller, "REUSE_POLLS", 1000)
        it.commits(AT_A, 0)
        await it.sends(AT_A, 3)
        await it.tells(AT_A, 3)
        it.memory.min_offsets[AT_A] = 3
        await it.tells(AT_A, 0)
        monkeypatch.setattr(lag_poller, "MAX_QUEUES_ASKED", 1)
        await it.memory.create_topic("orders", A, 3)
        await it.views.poll_group(KEY)
        last = Queue("orders", A, 2)
        await it.sends(last, 5)
        it.commits(last, 0)
        it.lags._brokers_by_name[A].resolved.clear()
        found = await it.tells(last, 5)
        assert found.committed == 0, "those that something lies in come first"
        assert [it.lag.queues[Queue("orders", A, number)].lag for number in range(2)] == [0, 0]


async def test_lag_poller_notifies_when_lag_becomes_unknown_or_known_again() -> None:
    turned: list[tuple[str, str]] = []
    async with a_cluster() as it:
        it.lags._on_known_change = turned.append
        await it.tells(AT_A, 0)
        await it.looks(times=3)
        turned.clear()
        await it.looks(times=3)
        assert turned == []
        it.memory.take_down(A)
        await it.unknown(AT_A)
        await it.looks(times=3)
        assert turned == [KEY]
        it.memory.bring_up(A)
        await it.tells(AT_A, 0)
        await it.looks(times=3)
        assert turned == [KEY, KEY]


async def test_lag_flows_are_kept_for_weighted_groups_while_the_broker_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster() as it:
        await it.tells(AT_A, 0)
        assert it.lag.incoming_rates == {}
        it.views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False, needs_weights=True))
        await soon(lambda: _is(it.lag.incoming_rates == {AT_A: None}))
        monkeypatch.setattr("rota.kube.brokers.lag.lag_history.MIN_HISTORY_SECONDS", 0.0)
        await it.sends(AT_A, 5)
        await soon(lambda: _is((it.lag.incoming_rates[AT_A] or 0) > 0))
        it.memory.take_down(A)
        await it.unknown(AT_A)
        assert (it.lag.incoming_rates[AT_A] or 0) > 0
