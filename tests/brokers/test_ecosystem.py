"""A Python member among Java ones, and as RocketMQ's own admin tool sees it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from typing import Literal

import pytest

from ground import java
from ground.fixtures import skip_what_is_missing
from ground.peers import Peer, producer, push_consumer
from ground.poll import eventually, soon
from ground.rocketmq import RocketMQ
from rota.brokers.port import ConsumedQueue, Membership
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.model import Queue
from rota.spec import StartFrom, Subscription
from rota.spec.consumer_settings import ConsumerSettings
from rota.strategies import allocate

TOPIC, GROUP, CLIENT, BROKER = "mixed", "mixers", "10.0.0.1@python-1#abc", "broker-0"


class Sharing:
    """A member that finds its share as the reference does: by itself, of all it sees, whenever others come or go."""

    def __init__(self, rocketmq: RocketMQ, cluster: AdminClient) -> None:
        self._cluster = cluster
        self._changed = asyncio.Event()
        self.numbers: list[int] = []
        self.offsets: dict[Queue, int] = {}
        wanted = Membership(
            group=GROUP,
            client_id=CLIENT,
            subscriptions=[Subscription(topic=TOPIC)],
            on_members_changed=self._changed.set,
            get_queues=lambda: {
                queue: ConsumedQueue(committed_offset=offset) for queue, offset in self.offsets.items()
            },
        )
        self.member = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), wanted)

    async def run(self) -> None:
        """Take over and give up queues, and pull from those in between."""
        await self.member.join()
        pulling: dict[Queue, asyncio.Task[None]] = {}
        try:
            while True:
                for queue in await self._share():
                    if queue not in pulling:
                        self.offsets[queue] = await self.member.committed_offset(queue) or 0
                        pulling[queue] = asyncio.create_task(self._pull(queue))
                for queue in pulling.keys() - await self._share():
                    pulling.pop(queue).cancel()
                    await self.member.commit(queue, self.offsets.pop(queue))
                await self._changed.wait()
                self._changed.clear()
        finally:
            for task in pulling.values():
                task.cancel()
            await self.member.leave()

    async def _share(self) -> set[Queue]:
        ids = [it.client_id for it in await self._cluster.online_consumers(GROUP, BROKER)]
        found = allocate("AVG", await self._cluster.queues(TOPIC), ids)
        return {Queue(*queue) for queue in found[CLIENT]}

    async def _pull(self, queue: Queue) -> None:
        while True:
            found = await self.member.pull(queue, self.offsets[queue], wait_seconds=1)
            self.numbers += [int(it.body.split()[0]) for it in found.messages]
            self.offsets[queue] = found.next_offset
            await self.member.commit(queue, found.next_offset)


@pytest.fixture(scope="module")
def java_member(rocketmq: RocketMQ) -> Iterator[Peer]:
    """Start a Java push consumer of the group."""
    with nullcontext() if java.javac() else skip_what_is_missing():
        java.classes()
    rocketmq.create_topic(TOPIC, 5)
    peer = push_consumer(rocketmq, GROUP, TOPIC, instance="java-1", poll=500)
    yield peer
    peer.stop()


@pytest.fixture
async def cluster(rocketmq: RocketMQ) -> AsyncIterator[AdminClient]:
    opened = AdminClient(ConnectionConfig([rocketmq.name_server]))
    yield opened
    await opened.close()


def queues_of(peer: Peer) -> list[int]:
    told = [line["queues"] for line in peer.lines("rebalance") if line["topic"] == TOPIC]
    return [int(queue.partition(":")[2]) for queue in " ".join(told[-1:]).split()]


async def test_member_in_python_shares_a_group_with_a_java_consumer(
    rocketmq: RocketMQ, java_member: Peer, cluster: AdminClient
) -> None:
    eventually(lambda: queues_of(java_member) == [0, 1, 2, 3, 4])
    ours = Sharing(rocketmq, cluster)
    running = asyncio.create_task(ours.run())

    async def shared() -> bool:
        assert not running.done()
        mine = [queue.id for queue in ours.offsets]
        return len(mine) in {2, 3} and sorted([*queues_of(java_member), *mine]) == [0, 1, 2, 3, 4]

    await soon(shared)
    for number in range(200):
        await cluster.send(TOPIC, b"%d" % number)

    async def arrived() -> bool:
        assert not running.done()
        return {*java_member.numbers(), *ours.numbers} == set(range(200))

    await soon(arrived)
    assert sorted([*java_member.numbers(), *ours.numbers]) == list(range(200)), "each was read once"
    assert java_member.numbers()
    assert ours.numbers

    printed = await asyncio.to_thread(rocketmq.mqadmin, "consumerStatus", "-g", GROUP)
    assert CLIENT in printed
    assert "java-1" in printed
    assert "Same subscription in the same group of consumer" in printed

    running.cancel()
    await asyncio.wait([running])
    eventually(lambda: queues_of(java_member) == [0, 1, 2, 3, 4])


async def test_heartbeat_reports_the_same_settings_as_a_java_consumer_does(
    rocketmq: RocketMQ, cluster: AdminClient, java_member: Peer
) -> None:
    assert java_member.program
    rocketmq.create_topic("filtered", 1)
    wanted = Subscription("filtered", "red || blue")
    options = {"instance": "java-2", "expression": wanted.expression, "from": "last"}
    java_consumer = push_consumer(rocketmq, "filters", wanted.topic, **options)
    try:
        (java_id,) = await soon(lambda: online(cluster, "filters"))
        java_settings = await cluster.consumer_settings("filters", java_id, BROKER)
        assert java_settings == ConsumerSettings((Subscription("%RETRY%filters"), wanted), "Clustering", "Latest")
        printed = await connections(rocketmq, "filters")
    finally:
        java_consumer.stop()
    member = RocketMQConsumer(
        ConnectionConfig([rocketmq.name_server]), Membership(group="filters", client_id=CLIENT, subscriptions=[wanted])
    )
    await member.join()
    try:
        assert await cluster.consumer_settings("filters", CLIENT, BROKER) == java_settings
        assert await connections(rocketmq, "filters") == printed
    finally:
        await member.leave()


@pytest.mark.parametrize(
    ("position", "told"), [("Earliest", "CONSUME_FROM_FIRST_OFFSET"), ("Timestamp", "CONSUME_FROM_TIMESTAMP")]
)
async def test_heartbeat_reports_where_the_group_starts(
    rocketmq: RocketMQ, position: Literal["Earliest", "Timestamp"], told: str
) -> None:
    rocketmq.create_topic("filtered", 1)
    wanted = Membership(
        group="starters",
        client_id=CLIENT,
        subscriptions=[Subscription("filtered")],
        get_start_from=lambda: StartFrom(position=position),
    )
    member = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), wanted)
    await member.join()
    try:
        assert f"ConsumeFromWhere: {told}" in await connections(rocketmq, "starters")
    finally:
        await member.leave()


async def online(cluster: AdminClient, group: str) -> list[str]:
    return [it.client_id for it in await cluster.online_consumers(group, BROKER)]


async def connections(rocketmq: RocketMQ, group: str) -> list[str]:
    """Return what mqadmin prints below the list of a group's consumers: subscriptions, model, start."""
    printed = await asyncio.to_thread(rocketmq.mqadmin, "consumerConnection", "-g", group)
    lines = [line.strip() for line in printed.splitlines()]
    return sorted(line for line in lines[lines.index("Below is subscription:") :] if line)


async def test_compression_by_a_java_producer_is_decompressed(
    rocketmq: RocketMQ, cluster: AdminClient, java_member: Peer
) -> None:
    assert java_member.program
    rocketmq.create_topic("packed", 1)
    sending = producer(rocketmq, "packed", 3, size=20_000, tags="odd,even")
    eventually(lambda: sending.done)
    wanted = Membership(
        group="unpackers", client_id=CLIENT, subscriptions=[Subscription(topic="packed", expression="odd")]
    )
    member = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), wanted)
    (queue,) = await cluster.queues("packed")
    found = await member.pull(queue, 0)
    assert [(it.body, it.tag, it.keys, it.body_error) for it in found.messages] == [
        (b"%d" % number + b" " * 19_999, "odd", str(number), "") for number in (0, 2)
    ]
    assert found.next_offset == 3
    await member.leave()
