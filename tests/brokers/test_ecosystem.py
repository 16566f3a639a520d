"""A Python member in a group with Java consumers, and in the output of RocketMQ's admin tool."""

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

TOPIC = "mixed"
GROUP = "mixers"
CLIENT = "10.0.0.1@python-1#abc"
BROKER = "broker-0"


class SelfAssigningMember:
    """A member that assigns itself queues as the reference client does, whenever consumers join or leave."""

    def __init__(self, rocketmq: RocketMQ, cluster: AdminClient) -> None:
        self._cluster = cluster
        self._changed = asyncio.Event()
        self.numbers: list[int] = []
        self.offsets: dict[Queue, int] = {}
        membership = Membership(
            group=GROUP,
            client_id=CLIENT,
            subscriptions=[Subscription(topic=TOPIC)],
            on_members_changed=self._changed.set,
            get_queues=lambda: {
                queue: ConsumedQueue(committed_offset=offset) for queue, offset in self.offsets.items()
            },
        )
        self.member = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), membership)

    async def run(self) -> None:
        """Pull from the assigned queues; commit and release queues that another consumer gets."""
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
        ids = [consumer.client_id for consumer in await self._cluster.online_consumers(GROUP, BROKER)]
        assigned = allocate("AVG", await self._cluster.queues(TOPIC), ids)
        return {Queue(*queue) for queue in assigned[CLIENT]}

    async def _pull(self, queue: Queue) -> None:
        while True:
            pulled = await self.member.pull(queue, self.offsets[queue], wait_seconds=1)
            self.numbers += [int(message.body.split()[0]) for message in pulled.messages]
            self.offsets[queue] = pulled.next_offset
            await self.member.commit(queue, pulled.next_offset)


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
    assignments = [line["queues"] for line in peer.lines("rebalance") if line["topic"] == TOPIC]
    return [int(queue.partition(":")[2]) for queue in " ".join(assignments[-1:]).split()]


async def test_member_in_python_shares_a_group_with_a_java_consumer(
    rocketmq: RocketMQ, java_member: Peer, cluster: AdminClient
) -> None:
    eventually(lambda: queues_of(java_member) == [0, 1, 2, 3, 4])
    ours = SelfAssigningMember(rocketmq, cluster)
    running = asyncio.create_task(ours.run())

    async def is_shared() -> bool:
        assert not running.done()
        queue_ids = [queue.id for queue in ours.offsets]
        return len(queue_ids) in {2, 3} and sorted([*queues_of(java_member), *queue_ids]) == [0, 1, 2, 3, 4]

    await soon(is_shared)
    for number in range(200):
        await cluster.send(TOPIC, b"%d" % number)

    async def have_arrived() -> bool:
        assert not running.done()
        return {*java_member.numbers(), *ours.numbers} == set(range(200))

    await soon(have_arrived)
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
    subscription = Subscription("filtered", "red || blue")
    options = {"instance": "java-2", "expression": subscription.expression, "from": "last"}
    java_consumer = push_consumer(rocketmq, "filters", subscription.topic, **options)
    try:
        (java_id,) = await soon(lambda: online(cluster, "filters"))
        java_settings = await cluster.consumer_settings("filters", java_id, BROKER)
        assert java_settings == ConsumerSettings((Subscription("%RETRY%filters"), subscription), "Clustering", "Latest")
        printed = await connections(rocketmq, "filters")
    finally:
        java_consumer.stop()
    member = RocketMQConsumer(
        ConnectionConfig([rocketmq.name_server]),
        Membership(group="filters", client_id=CLIENT, subscriptions=[subscription]),
    )
    await member.join()
    try:
        assert await cluster.consumer_settings("filters", CLIENT, BROKER) == java_settings
        assert await connections(rocketmq, "filters") == printed
    finally:
        await member.leave()


@pytest.mark.parametrize(
    ("position", "consume_from"), [("Earliest", "CONSUME_FROM_FIRST_OFFSET"), ("Timestamp", "CONSUME_FROM_TIMESTAMP")]
)
async def test_heartbeat_reports_where_the_group_starts(
    rocketmq: RocketMQ, position: Literal["Earliest", "Timestamp"], consume_from: str
) -> None:
    rocketmq.create_topic("filtered", 1)
    membership = Membership(
        group="starters",
        client_id=CLIENT,
        subscriptions=[Subscription("filtered")],
        get_start_from=lambda: StartFrom(position=position),
    )
    member = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), membership)
    await member.join()
    try:
        assert f"ConsumeFromWhere: {consume_from}" in await connections(rocketmq, "starters")
    finally:
        await member.leave()


async def online(cluster: AdminClient, group: str) -> list[str]:
    return [consumer.client_id for consumer in await cluster.online_consumers(group, BROKER)]


async def connections(rocketmq: RocketMQ, group: str) -> list[str]:
    """Return mqadmin's output below the list of a group's consumers: subscriptions, model, start."""
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
    membership = Membership(
        group="unpackers", client_id=CLIENT, subscriptions=[Subscription(topic="packed", expression="odd")]
    )
    member = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), membership)
    (queue,) = await cluster.queues("packed")
    pulled = await member.pull(queue, 0)
    assert [(message.body, message.tag, message.keys, message.body_error) for message in pulled.messages] == [
        (b"%d" % number + b" " * 19_999, "odd", str(number), "") for number in (0, 2)
    ]
    assert pulled.next_offset == 3
    await member.leave()
