"""Requests for the settings of unmanaged consumers: which consumers, and when."""

import asyncio

import pytest

from ground.poll import soon
from rota.brokers.errors import RejectedError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Membership
from rota.kube.brokers import consumer_poller
from rota.kube.brokers.consumer_poller import MAX_CONSUMERS, ConsumerPoller
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.brokers.topic_interest import TopicInterest
from rota.spec import Subscription
from rota.spec.consumer_settings import ConsumerSettings

KEY, OTHER = ("shop", "orders"), ("shop", "bills")
JAVA = "10.0.0.9@java"


class Cluster(MemoryCluster):
    """A cluster that records requests for settings; its consumers may reject or delay them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.silent: set[str] = set()
        self.delayed: dict[str, asyncio.Event] = {}  # responses wait for the event

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        self.requests.append(client_id)
        if client_id in self.silent:
            raise RejectedError("It does not answer")
        if client_id in self.delayed:
            await self.delayed[client_id].wait()
        return await super().consumer_settings(group, client_id, broker)

    async def wait_for_requests(self, client_id: str, times: int = 1) -> None:
        async def is_requested() -> bool:
            return self.requests.count(client_id) >= times

        await soon(is_requested)

    async def join(self, client_id: str, expression: str = "*") -> MemoryConsumer:
        subscriptions = [Subscription("orders", expression)]
        consumer = MemoryConsumer(self, Membership(group="orders", client_id=client_id, subscriptions=subscriptions))
        await consumer.join()
        return consumer


class PolledGroup:
    """A group with only unmanaged consumers, its poller, and the changes that the poller notified."""

    def __init__(self, cluster: Cluster) -> None:
        self.route_watcher = RouteWatcher(cluster, lambda _: None)
        self.route_watcher.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False))
        self.changed_keys: list[tuple[str, str]] = []
        self.poller = ConsumerPoller(
            cluster,
            self.route_watcher,
            lambda key: self.route_watcher.online_of(key).consumers,
            self.changed_keys.append,
        )

    async def poll(self, *, refresh: bool = False) -> None:
        await self.route_watcher.poll_group(KEY)
        await self.poller.poll_settings(KEY, ask_all=refresh)

    @property
    def filters(self) -> dict[str, str]:
        settings_by_client = self.poller.settings_of(KEY)
        return {name: settings.subscriptions[-1].expression for name, settings in settings_by_client.items()}


async def a_cluster() -> Cluster:
    cluster = Cluster()
    await cluster.create_topic("orders", BROKER, 2)
    return cluster


async def test_unmanaged_consumer_settings_are_requested_once_until_the_next_refresh() -> None:
    cluster = await a_cluster()
    polled = PolledGroup(cluster)
    await polled.poll()
    assert (cluster.requests, polled.changed_keys) == ([], [])
    java = await cluster.join(JAVA, "paid")
    await polled.poll()
    await polled.poll()
    assert (cluster.requests, polled.changed_keys, polled.filters) == ([JAVA], [KEY], {JAVA: "paid"})
    await java.leave()
    await cluster.join(JAVA, "open")  # with another subscription
    await polled.poll(refresh=True)
    assert (cluster.requests, polled.changed_keys, polled.filters) == ([JAVA, JAVA], [KEY, KEY], {JAVA: "open"})


async def test_unmanaged_consumer_that_left_is_neither_shown_nor_kept() -> None:
    cluster = await a_cluster()
    polled = PolledGroup(cluster)
    java = await cluster.join(JAVA)
    await polled.poll()
    await java.leave()
    await polled.route_watcher.poll_group(KEY)
    assert polled.filters == {}
    await polled.poller.poll_settings(KEY)
    assert polled.changed_keys == [KEY, KEY]
    assert polled.poller._settings == {KEY: {}}


async def test_unmanaged_consumer_that_does_not_respond_is_polled_again_with_the_next_refresh() -> None:
    cluster = await a_cluster()
    polled = PolledGroup(cluster)
    await cluster.join(JAVA)
    cluster.silent = {JAVA}
    await polled.poll()
    await polled.poll()
    assert (cluster.requests, polled.filters) == ([JAVA], {})
    cluster.silent = set()
    await polled.poll(refresh=True)
    assert polled.filters == {JAVA: "*"}


async def test_membership_of_unmanaged_consumers_beyond_the_limit_is_not_requested() -> None:
    cluster = await a_cluster()
    polled = PolledGroup(cluster)
    for number in range(MAX_CONSUMERS + 5):
        await cluster.join(f"10.0.0.9@{number}")
    await polled.poll()
    assert len(cluster.requests) == len(polled.filters) == MAX_CONSUMERS


async def test_unmanaged_consumer_that_is_silent_delays_no_other_group_and_gets_one_request_at_a_time() -> None:
    cluster = await a_cluster()
    polled = PolledGroup(cluster)
    await cluster.join(JAVA)
    await cluster.join("10.0.0.9@php", "paid")
    released = asyncio.Event()
    cluster.delayed = {JAVA: released}
    await polled.route_watcher.poll_group(KEY)
    first = asyncio.create_task(polled.poller.poll_settings(KEY))
    await cluster.wait_for_requests(JAVA)
    await polled.poller.poll_settings(KEY, ask_all=True)
    await polled.poller.poll_settings(KEY, ask_all=True)
    assert cluster.requests == [JAVA], "concurrent polls send no request twice"
    released.set()
    await first
    assert cluster.requests == [JAVA, "10.0.0.9@php"]
    assert polled.filters == {JAVA: "*", "10.0.0.9@php": "paid"}
    assert polled.changed_keys == [KEY, KEY], "each response counts on arrival"


async def test_unmanaged_consumer_of_a_second_group_is_polled_in_the_next_round_while_the_first_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_poller, "REFRESH_SECONDS", 0.0)
    cluster = await a_cluster()
    polled = PolledGroup(cluster)
    await cluster.join(JAVA)
    cluster.delayed = {JAVA: asyncio.Event()}
    polled.route_watcher.set_interest(OTHER, TopicInterest("bills", ("orders",), broadcasting=False))
    subscriptions = [Subscription("orders", "paid")]
    php = MemoryConsumer(cluster, Membership(group="bills", client_id="10.0.0.9@php", subscriptions=subscriptions))
    await php.join()
    await polled.route_watcher.poll_group(KEY)
    await polled.route_watcher.poll_group(OTHER)
    polling = asyncio.create_task(polled.poller.run())
    await cluster.wait_for_requests("10.0.0.9@php", times=3)
    assert cluster.requests.count(JAVA) == 1
    polling.cancel()
