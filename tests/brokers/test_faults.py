"""A member of real brokers and name servers that are killed, frozen, moved or stopped."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from ground.instance import temporary
from ground.poll import PATIENCE_SECONDS, soon
from ground.rocketmq import RocketMQ
from rota.brokers.errors import NotFoundError, UnreachableError
from rota.brokers.port import Membership
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.model import Queue
from rota.spec import Subscription

TOPIC = "orders"
GROUP = "shop"
KEEPERS = "keepers"
CLIENT = "10.0.0.1@orders-1#1"
QUEUES = [Queue(TOPIC, f"broker-{number}", 0) for number in range(2)]


@pytest.fixture(scope="module")
def pair() -> Iterator[RocketMQ]:
    """Start a name server and two brokers for faults; the brokers create no group automatically."""
    with temporary("faults") as instance:
        brokers = RocketMQ(instance, brokers=2, settings={"autoCreateSubscriptionGroup": False})
        brokers.up()
        brokers.create_topic(TOPIC, 1)
        yield brokers
        brokers.down()


@pytest.fixture
async def cluster(pair: RocketMQ) -> AsyncIterator[AdminClient]:
    opened = AdminClient(ConnectionConfig([pair.name_server]))
    for broker in await opened.broker_names():
        for group in (GROUP, KEEPERS):
            await opened.update_group(group, broker)
    yield opened
    await opened.close()


@asynccontextmanager
async def a_member(*name_servers: str, group: str = GROUP) -> AsyncIterator[RocketMQConsumer]:
    membership = Membership(group=group, client_id=CLIENT, subscriptions=[Subscription(topic=TOPIC)])
    member = RocketMQConsumer(ConnectionConfig(name_servers), membership)
    try:
        await member.join()
        yield member
    finally:
        await member.leave()


T = TypeVar("T")


async def eventually(call: Callable[[], Awaitable[T]], seconds: float = PATIENCE_SECONDS) -> T:
    """Call until the broker responds; only `UnreachableError` is retried."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                return await call()
            except UnreachableError:
                await asyncio.sleep(0.1)


def a_free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


async def test_broker_failure_fails_held_pulls_and_the_broker_is_found_at_its_new_address(
    pair: RocketMQ, cluster: AdminClient
) -> None:
    async with a_member(pair.name_server, group=KEEPERS) as member:
        end = await member.max_offset(QUEUES[0])
        await member.commit(QUEUES[1], 5)
        held = asyncio.create_task(member.pull(QUEUES[0], end, wait_seconds=60))
        await member.commit(QUEUES[0], 3)  # on the same connection, so the broker has received the pull
        pair.kill_broker(0)
        with pytest.raises(UnreachableError, match="was closed"):
            await asyncio.wait_for(held, PATIENCE_SECONDS)
        with pytest.raises(UnreachableError):  # never None, which means no committed offset
            await member.committed_offset(QUEUES[0])
        assert await member.max_offset(QUEUES[1]) == 0, "the other broker is unaffected"
        await asyncio.to_thread(pair.start_broker, 0, a_free_port(pair.address))
        assert (await eventually(lambda: member.pull(QUEUES[0], end, wait_seconds=0))).next_offset == end
        online = await soon(lambda: eventually(lambda: cluster.online_consumers(KEEPERS, "broker-0")))
        assert [consumer.client_id for consumer in online] == [CLIENT], (
            "the new connection registers the member at once"
        )
        assert await member.committed_offset(QUEUES[1]) == 5
        stored = await eventually(lambda: member.committed_offset(QUEUES[0]))
        assert stored in {None, 3}, "the broker may lose the latest commit, but stores no other offset"


@pytest.mark.slow("a broker that freezes during a pull")
async def test_broker_that_freezes_during_a_pull_continues_at_the_same_offset(
    pair: RocketMQ, cluster: AdminClient
) -> None:
    async with a_member(pair.name_server) as member:
        end = await member.max_offset(QUEUES[0])
        await member.commit(QUEUES[0], end)
        pulling = asyncio.create_task(member.pull(QUEUES[0], end, wait_seconds=1))
        await member.min_offset(QUEUES[0])  # on the same connection, so the broker has received the pull
        consumers = await cluster.online_consumers(GROUP, "broker-0")
        pair.stop_broker(0)
        try:
            with pytest.raises(UnreachableError, match="did not respond within 11 s"):
                await pulling
        finally:
            pair.continue_broker(0)
        assert await eventually(lambda: member.committed_offset(QUEUES[0])) == end
        await cluster.send(TOPIC, b"after", queue=QUEUES[0])

        async def has_arrived() -> bool:
            pulled = await eventually(lambda: member.pull(QUEUES[0], end, wait_seconds=0))
            return [message.body for message in pulled.messages] == [b"after"]

        await soon(has_arrived)
        assert await cluster.online_consumers(GROUP, "broker-0") == consumers
        assert await member.committed_offset(QUEUES[0]) == end


async def test_broker_that_is_frozen_delays_no_other_and_keeps_its_connections(
    pair: RocketMQ, cluster: AdminClient
) -> None:
    async with a_member(pair.name_server) as member:
        first = await member.min_offset(QUEUES[0])
        consumers = await cluster.online_consumers(GROUP, "broker-0")
        pair.stop_broker(0)
        try:
            frozen = asyncio.create_task(member.committed_offset(QUEUES[0]))
            assert await member.max_offset(QUEUES[1]) == 0
            assert not frozen.done()
            with pytest.raises(UnreachableError, match="did not respond within 3 s"):
                await frozen
        finally:
            pair.continue_broker(0)
        assert await eventually(lambda: member.min_offset(QUEUES[0])) == first
        assert await cluster.online_consumers(GROUP, "broker-0") == consumers


@pytest.mark.slow("a real name server that is unreachable, then has no routes")
async def test_name_server_outage_keeps_known_routes_and_an_empty_name_server_is_not_trusted(
    pair: RocketMQ, cluster: AdminClient
) -> None:
    async with a_member(pair.name_server) as member:
        end = await member.max_offset(QUEUES[0])
        pair.stop_name_server()
        with pytest.raises(UnreachableError, match="No name server responds"):
            await cluster.queues(TOPIC)
        assert (await member.pull(QUEUES[0], end, wait_seconds=0)).messages == ()
        await member.commit(QUEUES[0], end)
        assert await member.committed_offset(QUEUES[0]) == end, "the next owner of a queue needs it"
        await asyncio.to_thread(pair.start_name_server)
        queues = await eventually(
            lambda: cluster.queues(TOPIC)
        )  # it starts empty, which must not mean that the topic does not exist
        assert {queue.topic for queue in queues} == {TOPIC}
        with pytest.raises(NotFoundError, match="There is no topic nope"):
            await eventually(lambda: cluster.queues("nope"))  # when it knows both brokers
        await asyncio.to_thread(pair.up)  # until both brokers are known again


async def test_name_server_that_is_down_silent_or_another_service_is_skipped(pair: RocketMQ) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    requests: list[bytes] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(65536):
            requests.append(request)  # without a response
        writer.close()

    http_server = await asyncio.start_server(talk, "127.0.0.1", 0)
    slow = await asyncio.start_server(hang, "127.0.0.1", 0)
    closed_address = f"127.0.0.1:{a_free_port('127.0.0.1')}"
    addresses = [closed_address, *(f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in (http_server, slow))]
    async with a_member(*addresses, pair.name_server) as member:
        assert await member.max_offset(QUEUES[1]) == 0
        requests.clear()
        await member.check_subscriptions()
        assert requests == [], "the responding name server is preferred from then on"
    http_server.close()
    slow.close()


async def test_member_join_fails_for_a_group_that_the_broker_does_not_know(pair: RocketMQ) -> None:
    with pytest.raises(NotFoundError, match="missing-group"):
        async with a_member(pair.name_server, group="missing-group"):
            pass
    async with a_member(pair.name_server) as member:
        assert await member.committed_offset(QUEUES[1]) is None
        await member.commit(QUEUES[1], 0)
        assert await member.committed_offset(QUEUES[1]) == 0
