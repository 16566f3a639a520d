"""Routes and online consumers of groups; responses for a deleted group are dropped."""

import asyncio

import pytest

from rota.brokers.memory import BROKER, MemoryCluster
from rota.brokers.port import OnlineConsumer
from rota.kube.brokers.online_consumers import SILENT_CONNECTION_SECONDS
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.brokers.topic_interest import TopicInterest
from rota.kube.state.queue_quota import QueueQuota
from rota.model import Queue, Reason

KEY = ("shop", "orders")
ORDERS = TopicInterest("orders", ("orders",), broadcasting=False)


class SlowCluster(MemoryCluster):
    """A cluster that delays responses to one kind of request until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = asyncio.Event()
        self.released = asyncio.Event()
        self.delayed_request = ""

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        await self._wait("queues")
        return await super().queues(topic)

    async def online_consumers(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        await self._wait("clients")
        return await super().online_consumers(group, broker)

    async def _wait(self, request: str) -> None:
        if self.delayed_request == request:
            self.requested.set()
            await self.released.wait()


async def delete_group_during(request: str) -> RouteWatcher:
    """Delete a group while a request for it is under way."""
    memory = SlowCluster()
    await memory.create_topic("orders", BROKER, 2)
    watcher = RouteWatcher(memory, lambda _: None)
    watcher.set_interest(KEY, ORDERS)
    memory.delayed_request = request
    poll = asyncio.create_task(watcher.poll_group(KEY))
    await memory.requested.wait()
    watcher.set_interest(KEY, None)
    memory.released.set()
    await poll
    return watcher


async def test_route_fetched_for_a_deleted_group_is_not_kept() -> None:
    watcher = await delete_group_during("queues")
    assert watcher.routes.brokers_of_topic("orders") == frozenset()
    assert not watcher.routes._routes


async def test_connection_list_fetched_for_a_deleted_group_is_not_kept() -> None:
    watcher = await delete_group_during("clients")
    assert not watcher._consumers
    assert watcher.online_of(KEY).consumers == {}


async def test_queue_quota_hides_the_queues_of_a_group_that_exceeds_it_and_ends_its_polls() -> None:
    memory = MemoryCluster()
    await memory.create_topic("orders", BROKER, 3)
    await memory.create_topic("bills", BROKER, 2)
    changed_keys: list[tuple[str, str]] = []
    watcher = RouteWatcher(memory, changed_keys.append, QueueQuota(max_per_group=4, max_total=100))
    watcher.set_interest(KEY, TopicInterest("orders", ("orders", "bills"), broadcasting=False))
    await watcher.poll_group(KEY)
    state = watcher.state_of(KEY, 0.0, ())
    assert [problem.reason for problem in state.problems] == [Reason.TOO_MANY_QUEUES]
    assert {state.views["orders"], state.views["bills"]} == {None}
    assert KEY not in watcher.interests_within_quota
    assert "queues" not in vars(watcher.routes._routes["orders"]), "no Queue was constructed"
    assert watcher.online_of(KEY).is_accepted is None, "no broker was polled"
    watcher.set_interest(KEY, ORDERS)
    state = watcher.state_of(KEY, 0.0, ())
    assert state.problems == ()
    assert state.views["orders"]
    assert len(state.views["orders"].queues) == 3
    assert watcher.interests_within_quota == {KEY: ORDERS}


async def test_queue_quota_is_claimed_again_by_a_rejected_group_once_another_one_is_deleted() -> None:
    memory = MemoryCluster()
    await memory.create_topic("orders", BROKER, 3)
    changed_keys: list[tuple[str, str]] = []
    quota = QueueQuota(max_per_group=4, max_total=4)
    watcher = RouteWatcher(memory, changed_keys.append, quota)
    other_key = ("shop", "other")
    for key in (other_key, KEY):
        watcher.set_interest(key, ORDERS)
        await watcher.poll_group(key)
    assert [problem.reason for problem in watcher.state_of(KEY, 0.0, ()).problems] == [Reason.TOO_MANY_QUEUES]
    watcher.set_interest(other_key, None)
    changed_keys.clear()
    await watcher._poll_routes()
    assert watcher.state_of(KEY, 0.0, ()).problems == ()
    assert changed_keys == [KEY]


async def test_retry_topic_of_another_group_must_exist_but_the_groups_own_need_not() -> None:
    memory = MemoryCluster()
    retry_topic = "%RETRY%others"
    watcher = RouteWatcher(memory, lambda _: None)
    watcher.set_interest(KEY, TopicInterest("orders", (retry_topic,), broadcasting=False))
    await watcher.poll_group(KEY)
    (problem,) = watcher.state_of(KEY, 0.0, ()).problems
    assert problem.reason is Reason.UNKNOWN_TOPIC
    assert retry_topic in problem.message
    await memory.create_topic(retry_topic, BROKER, 1)
    await watcher._poll_routes()
    assert watcher.routes.brokers_of_topic(retry_topic) == {BROKER}, "polled each time until it exists"


async def test_route_and_connections_fetched_in_time_are_kept() -> None:
    memory = MemoryCluster()
    await memory.create_topic("orders", BROKER, 2)
    watcher = RouteWatcher(memory, lambda _: None)
    watcher.set_interest(KEY, ORDERS)
    await watcher.poll_group(KEY)
    assert watcher.routes.brokers_of_topic("orders") == {BROKER}
    assert watcher.state_of(KEY, 0.0, ()).unmanaged_ids == ()


@pytest.mark.parametrize(("groups", "seconds"), [(0, 5.0), (250, 5.0), (500, 10.0), (1000, 20.0), (5000, 20.0)])
def test_connection_poll_interval_is_shorter_for_few_groups(groups: int, seconds: float) -> None:
    watcher = RouteWatcher(MemoryCluster(), lambda _: None)
    for number in range(groups):
        watcher.set_interest(("shop", f"orders-{number}"), ORDERS)
    assert watcher.consumer_poll_pause() == seconds


class ReusedConnections(MemoryCluster):
    """A cluster with a broker that reports the connections set by a test."""

    connections: tuple[OnlineConsumer, ...] = ()

    async def online_consumers(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        assert (group, broker) == ("orders", BROKER)
        return self.connections


OURS, FOREIGN = "10.0.0.1@orders-a#12345678", "10.0.0.9@old"


async def poll_connections(*connections: tuple[str, str]) -> tuple[ReusedConnections, RouteWatcher]:
    memory = ReusedConnections()
    await memory.create_topic("orders", BROKER, 2)
    watcher = RouteWatcher(memory, lambda _: None)
    watcher.set_interest(KEY, ORDERS)
    memory.connections = tuple(OnlineConsumer(*connection) for connection in connections)
    await watcher.poll_group(KEY)
    return memory, watcher


def duplicates(watcher: RouteWatcher, later_by: float = 0.0) -> list[Reason]:
    now = asyncio.get_running_loop().time() + later_by
    return [problem.reason for problem in watcher.state_of(KEY, now, {"orders-a#12345678"}).problems]


async def test_connection_still_held_by_the_broker_is_no_duplicate_until_it_expires() -> None:
    memory, watcher = await poll_connections((OURS, "10.0.0.1:4711"), (OURS, "10.0.0.1:4712"))
    assert duplicates(watcher) == []
    assert duplicates(watcher, SILENT_CONNECTION_SECONDS - 1) == []
    await watcher.poll_group(KEY)
    assert duplicates(watcher, SILENT_CONNECTION_SECONDS + 1) == [Reason.DUPLICATE_CLIENT_IDS], (
        "by then the old connection would have expired"
    )
    memory.connections = memory.connections[:1]
    await watcher.poll_group(KEY)
    assert duplicates(watcher, SILENT_CONNECTION_SECONDS + 1) == []
    memory.connections *= 2
    await watcher.poll_group(KEY)
    assert duplicates(watcher, SILENT_CONNECTION_SECONDS - 1) == [], "the time starts over"


async def test_connection_duplicates_at_two_addresses_or_unmanaged_are_reported_at_once() -> None:
    _, watcher = await poll_connections((OURS, "10.0.0.1:4711"), (OURS, "10.0.0.2:4711"))
    assert duplicates(watcher) == [Reason.DUPLICATE_CLIENT_IDS]
    _, watcher = await poll_connections((FOREIGN, "10.0.0.9:4711"), (FOREIGN, "10.0.0.9:4712"))
    assert duplicates(watcher) == [Reason.DUPLICATE_CLIENT_IDS]
    assert watcher.state_of(KEY, 0.0, ()).unmanaged_ids == (FOREIGN, FOREIGN), "each connection counts"
