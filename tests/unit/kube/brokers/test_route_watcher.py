"""What brokers tell of groups: what comes too late is of nobody any more."""

import asyncio

import pytest

from rota.brokers.memory import BROKER, MemoryCluster
from rota.brokers.port import OnlineConsumer
from rota.kube.brokers.route_watcher import SILENT_CONNECTION_SECONDS, RouteWatcher, TopicInterest
from rota.kube.state.queue_quota import QueueQuota
from rota.model import Queue, Reason

KEY = ("shop", "orders")
ORDERS = TopicInterest("orders", ("orders",), broadcasting=False)


class Late(MemoryCluster):
    """A cluster that answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()
        self.slow = ""

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        await self._wait("queues")
        return await super().queues(topic)

    async def online_consumers(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        await self._wait("clients")
        return await super().online_consumers(group, broker)

    async def _wait(self, what: str) -> None:
        if self.slow == what:
            self.asked.set()
            await self.may.wait()


async def looked_too_late(what: str) -> RouteWatcher:
    """Forget a group while something is being asked for it."""
    memory = Late()
    await memory.create_topic("orders", BROKER, 2)
    views = RouteWatcher(memory, lambda _: None)
    views.set_interest(KEY, ORDERS)
    memory.slow = what
    looking = asyncio.create_task(views.poll_group(KEY))
    await memory.asked.wait()
    views.set_interest(KEY, None)
    memory.may.set()
    await looking
    return views


async def test_route_fetched_for_a_deleted_group_is_not_kept() -> None:
    views = await looked_too_late("queues")
    assert views.brokers_of_topic("orders") == frozenset()
    assert not views._routes


async def test_connection_list_fetched_for_a_deleted_group_is_not_kept() -> None:
    views = await looked_too_late("clients")
    assert not views._consumers
    assert views.consumers_of(KEY) == {}


async def test_queue_quota_hides_the_queues_of_a_group_that_exceeds_it_and_ends_questions_about_them() -> None:
    memory = MemoryCluster()
    await memory.create_topic("orders", BROKER, 3)
    await memory.create_topic("bills", BROKER, 2)
    heard: list[tuple[str, str]] = []
    views = RouteWatcher(memory, heard.append, QueueQuota(max_per_group=4, max_total=100))
    views.set_interest(KEY, TopicInterest("orders", ("orders", "bills"), broadcasting=False))
    await views.poll_group(KEY)
    found = views.state_of(KEY, 0.0, ())
    assert [problem.reason for problem in found.problems] == [Reason.TOO_MANY_QUEUES]
    assert {found.views["orders"], found.views["bills"]} == {None}
    assert KEY not in views.interests
    assert "queues" not in vars(views._routes["orders"]), "no queue was made"
    assert views.is_accepted(KEY) is None, "no broker was asked"
    views.set_interest(KEY, ORDERS)
    found = views.state_of(KEY, 0.0, ())
    assert found.problems == ()
    assert found.views["orders"]
    assert len(found.views["orders"].queues) == 3
    assert views.interests == {KEY: ORDERS}


async def test_queue_quota_is_claimed_again_by_a_rejected_group_once_another_one_is_deleted() -> None:
    memory = MemoryCluster()
    await memory.create_topic("orders", BROKER, 3)
    heard: list[tuple[str, str]] = []
    quota = QueueQuota(max_per_group=4, max_total=4)
    views = RouteWatcher(memory, heard.append, quota)
    other = ("shop", "other")
    for key in (other, KEY):
        views.set_interest(key, ORDERS)
        await views.poll_group(key)
    assert [problem.reason for problem in views.state_of(KEY, 0.0, ()).problems] == [Reason.TOO_MANY_QUEUES]
    views.set_interest(other, None)
    heard.clear()
    await views._poll_routes()
    assert views.state_of(KEY, 0.0, ()).problems == ()
    assert heard == [KEY]


async def test_retry_topic_of_another_group_must_exist_but_the_groups_own_need_not() -> None:
    memory = MemoryCluster()
    others = "%RETRY%others"
    views = RouteWatcher(memory, lambda _: None)
    views.set_interest(KEY, TopicInterest("orders", (others,), broadcasting=False))
    await views.poll_group(KEY)
    (problem,) = views.state_of(KEY, 0.0, ()).problems
    assert problem.reason is Reason.UNKNOWN_TOPIC
    assert others in problem.message
    await memory.create_topic(others, BROKER, 1)
    await views._poll_routes()
    assert views.brokers_of_topic(others) == {BROKER}, "with the first look, not now and then"


async def test_route_and_connections_fetched_in_time_are_kept() -> None:
    memory = MemoryCluster()
    await memory.create_topic("orders", BROKER, 2)
    views = RouteWatcher(memory, lambda _: None)
    views.set_interest(KEY, ORDERS)
    await views.poll_group(KEY)
    assert views.brokers_of_topic("orders") == {BROKER}
    assert views.state_of(KEY, 0.0, ()).unmanaged_ids == ()


@pytest.mark.parametrize(("groups", "seconds"), [(0, 5.0), (250, 5.0), (500, 10.0), (1000, 20.0), (5000, 20.0)])
def test_connection_poll_interval_is_shorter_for_few_groups(groups: int, seconds: float) -> None:
    views = RouteWatcher(MemoryCluster(), lambda _: None)
    for number in range(groups):
        views.set_interest(("shop", f"orders-{number}"), ORDERS)
    assert views.consumer_poll_pause() == seconds


class Worn(MemoryCluster):
    """A cluster whose broker tells of connections as it is told to."""

    connections: tuple[OnlineConsumer, ...] = ()

    async def online_consumers(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        assert (group, broker) == ("orders", BROKER)
        return self.connections


OURS, FOREIGN = "10.0.0.1@orders-a#12345678", "10.0.0.9@old"


async def worn(*connections: tuple[str, str]) -> tuple[Worn, RouteWatcher]:
    memory = Worn()
    await memory.create_topic("orders", BROKER, 2)
    views = RouteWatcher(memory, lambda _: None)
    views.set_interest(KEY, ORDERS)
    memory.connections = tuple(OnlineConsumer(*it) for it in connections)
    await views.poll_group(KEY)
    return memory, views


def duplicates(views: RouteWatcher, after: float = 0.0) -> list[Reason]:
    now = asyncio.get_running_loop().time() + after
    return [it.reason for it in views.state_of(KEY, now, {"orders-a#12345678"}).problems]


async def test_connection_still_held_by_the_broker_is_no_duplicate_until_it_expires() -> None:
    memory, views = await worn((OURS, "10.0.0.1:4711"), (OURS, "10.0.0.1:4712"))
    assert duplicates(views) == []
    assert duplicates(views, SILENT_CONNECTION_SECONDS - 1) == []
    await views.poll_group(KEY)
    assert duplicates(views, SILENT_CONNECTION_SECONDS + 1) == [Reason.DUPLICATE_CLIENT_IDS], "by then it would be gone"
    memory.connections = memory.connections[:1]
    await views.poll_group(KEY)
    assert duplicates(views, SILENT_CONNECTION_SECONDS + 1) == []
    memory.connections *= 2
    await views.poll_group(KEY)
    assert duplicates(views, SILENT_CONNECTION_SECONDS - 1) == [], "it counts anew"


async def test_connection_duplicates_at_two_addresses_or_unmanaged_are_reported_at_once() -> None:
    _, views = await worn((OURS, "10.0.0.1:4711"), (OURS, "10.0.0.2:4711"))
    assert duplicates(views) == [Reason.DUPLICATE_CLIENT_IDS]
    _, views = await worn((FOREIGN, "10.0.0.9:4711"), (FOREIGN, "10.0.0.9:4712"))
    assert duplicates(views) == [Reason.DUPLICATE_CLIENT_IDS]
    assert views.state_of(KEY, 0.0, ()).unmanaged_ids == (FOREIGN, FOREIGN), "as they count themselves"
