"""Which unmanaged consumers are asked for their settings, and when."""

from rota.brokers.errors import Refused
from rota.brokers.memory import BROKER, Memory, MemoryConsumer
from rota.brokers.port import Membership
from rota.kube.brokers.consumer_poller import MAX_CONSUMERS, ConsumerPoller
from rota.kube.brokers.route_watcher import Interest, Views
from rota.spec import Subscription
from rota.spec.consumer_settings import ConsumerSettings

KEY = ("shop", "orders")
JAVA = "10.0.0.9@java"


class Cluster(Memory):
    """A cluster that counts what is asked, and whose consumers may refuse to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.silent: set[str] = set()

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        self.asked.append(client_id)
        if client_id in self.silent:
            raise Refused("It does not answer")
        return await super().consumer_settings(group, client_id, broker)

    async def join(self, client_id: str, expression: str = "*") -> MemoryConsumer:
        subscriptions = [Subscription("orders", expression)]
        consumer = MemoryConsumer(self, Membership(group="orders", client_id=client_id, subscriptions=subscriptions))
        await consumer.join()
        return consumer


class Poll:
    """A poller of one group, of which every consumer is unmanaged, and the changes that it told."""

    def __init__(self, cluster: Cluster) -> None:
        self.views = Views(cluster, lambda _: None)
        self.views.want(KEY, Interest("orders", ("orders",), broadcasting=False))
        self.news: list[tuple[str, str]] = []
        self.poller = ConsumerPoller(cluster, self.views, self.views.clients, self.news.append)

    async def ask(self, *, again: bool = False) -> None:
        await self.views.look(KEY)
        await self.poller.ask(KEY, again=again)

    @property
    def filters(self) -> dict[str, str]:
        found = self.poller.of(KEY)
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
    await poll.views.look(KEY)
    assert poll.filters == {}
    await poll.poller.ask(KEY)
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
