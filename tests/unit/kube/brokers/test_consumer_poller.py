"""Which unmanaged consumers are asked for their settings, and when."""

import asyncio

import pytest

from ground.poll import soon
from rota.brokers.errors import RejectedError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Membership
from rota.kube.brokers import consumer_poller
from rota.kube.brokers.consumer_poller import MAX_CONSUMERS, ConsumerPoller
from rota.kube.brokers.route_watcher import RouteWatcher, TopicInterest
from rota.spec import Subscription
from rota.spec.consumer_settings import ConsumerSettings

KEY, OTHER = ("shop", "orders"), ("shop", "bills")
JAVA = "10.0.0.9@java"


class Cluster(MemoryCluster):
    """A cluster that counts what is asked, and whose consumers may refuse to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.withheld: dict[str, asyncio.Event] = {}  # consumers that answer only then

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        self.asked.append(client_id)
        if client_id in self.silent:
            raise RejectedError("It does not answer")
        if client_id in self.withheld:
            await self.withheld[client_id].wait()
        return await super().consumer_settings(group, client_id, broker)

    async def until_asked(self, client_id: str, times: int = 1) -> None:
        async def is_asked() -> bool:
            return self.asked.count(client_id) >= times

        await soon(is_asked)

    async def join(self, client_id: str, expression: str = "*") -> MemoryConsumer:
        subscriptions = [Subscription("orders", expression)]
        consumer = MemoryConsumer(self, Membership(group="orders", client_id=client_id, subscriptions=subscriptions))
        await consumer.join()
        return consumer


class Poll:
    """A poller of one group, of which every consumer is unmanaged, and the changes that it told."""

    def __init__(self, cluster: Cluster) -> None:
        self.views = RouteWatcher(cluster, lambda _: None)
        self.views.set_interest(KEY, TopicInterest("orders", ("orders",), broadcasting=False))
        self.news: list[tuple[str, str]] = []
        self.poller = ConsumerPoller(cluster, self.views, self.views.consumers_of, self.news.append)

    async def ask(self, *, again: bool = False) -> None:
        await self.views.poll_group(KEY)
        await self.poller.poll_group(KEY, ask_all=again)

    @property
    def filters(self) -> dict[str, str]:
        found = self.poller.settings_of(KEY)
        return {name: settings.subscriptions[-1].expression for name, settings in found.items()}


async def a_cluster() -> Cluster:
    cluster = Cluster()
    await cluster.create_topic("orders", BROKER, 2)
    return cluster


async def test_unmanaged_consumer_is_asked_for_its_settings_once_until_the_next_refresh() -> None:
    cluster = await a_cluster()
    poll = Poll(cluster)
    await poll.ask()
    assert (cluster.asked, poll.news) == ([], [])
    java = await cluster.join(JAVA, "paid")
    await poll.ask()
    await poll.ask()
    assert (cluster.asked, poll.news, poll.filters) == ([JAVA], [KEY], {JAVA: "paid"})
    await java.leave()
    await cluster.join(JAVA, "open")  # as if it had subscribed anew
    await poll.ask(again=True)
    assert (cluster.asked, poll.news, poll.filters) == ([JAVA, JAVA], [KEY, KEY], {JAVA: "open"})


async def test_unmanaged_consumer_that_left_is_not_shown_and_leaves_nothing() -> None:
    cluster = await a_cluster()
    poll = Poll(cluster)
    java = await cluster.join(JAVA)
    await poll.ask()
    await java.leave()
    await poll.views.poll_group(KEY)
    assert poll.filters == {}
    await poll.poller.poll_group(KEY)
    assert poll.news == [KEY, KEY]
    assert poll.poller._settings == {KEY: {}}


async def test_unmanaged_consumer_that_does_not_answer_is_asked_again_with_the_next_refresh() -> None:
    cluster = await a_cluster()
    poll = Poll(cluster)
    await cluster.join(JAVA)
    cluster.silent = {JAVA}
    await poll.ask()
    await poll.ask()
    assert (cluster.asked, poll.filters) == ([JAVA], {})
    cluster.silent = set()
    await poll.ask(again=True)
    assert poll.filters == {JAVA: "*"}


async def test_membership_of_unmanaged_consumers_beyond_the_limit_is_not_asked_for() -> None:
    cluster = await a_cluster()
    poll = Poll(cluster)
    for number in range(MAX_CONSUMERS + 5):
        await cluster.join(f"10.0.0.9@{number}")
    await poll.ask()
    assert len(cluster.asked) == len(poll.filters) == MAX_CONSUMERS


async def test_unmanaged_consumer_that_is_silent_delays_no_other_group_and_is_asked_once_at_a_time() -> None:
    cluster = await a_cluster()
    poll = Poll(cluster)
    await cluster.join(JAVA)
    await cluster.join("10.0.0.9@php", "paid")
    answer = asyncio.Event()
    cluster.withheld = {JAVA: answer}
    await poll.views.poll_group(KEY)
    first = asyncio.create_task(poll.poller.poll_group(KEY))
    await cluster.until_asked(JAVA)
    await poll.poller.poll_group(KEY, ask_all=True)
    await poll.poller.poll_group(KEY, ask_all=True)
    assert cluster.asked == [JAVA], "calls that come meanwhile return, and ask nothing twice"
    answer.set()
    await first
    assert cluster.asked == [JAVA, "10.0.0.9@php"]
    assert poll.filters == {JAVA: "*", "10.0.0.9@php": "paid"}
    assert poll.news == [KEY, KEY], "each answer counts as soon as it has come"


async def test_unmanaged_consumer_of_a_second_group_is_asked_in_the_next_round_while_the_first_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_poller, "REFRESH_SECONDS", 0.0)
    cluster = await a_cluster()
    poll = Poll(cluster)
    await cluster.join(JAVA)
    cluster.withheld = {JAVA: asyncio.Event()}
    poll.views.set_interest(OTHER, TopicInterest("bills", ("orders",), broadcasting=False))
    subscriptions = [Subscription("orders", "paid")]
    php = MemoryConsumer(cluster, Membership(group="bills", client_id="10.0.0.9@php", subscriptions=subscriptions))
    await php.join()
    await poll.views.poll_group(KEY)
    await poll.views.poll_group(OTHER)
    polling = asyncio.create_task(poll.poller.run())
    await cluster.until_asked("10.0.0.9@php", times=3)
    assert cluster.asked.count(JAVA) == 1
    polling.cancel()
