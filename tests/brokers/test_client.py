"""A client of scripted name servers and brokers with rare behaviour: flapping, wrong or lost routes, new addresses."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from brokers.scripted import Names, Say, Server, a_broker, a_server, an_answer, silent, until
from fuzz.corpus import a_message
from ground.poll import PATIENCE_SECONDS, soon
from rota.brokers.errors import BrokerError, MalformedResponseError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.port import Membership
from rota.brokers.rocketmq import heartbeat, metadata_cache
from rota.brokers.rocketmq import routing as clients
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig, RoutingClient
from rota.brokers.rocketmq.transport.connection_pool import ConnectionPool
from rota.brokers.rocketmq.wire.codes import RequestCode, ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame, encode
from rota.model import Queue
from rota.spec import Subscription

A, B = Queue("orders", "a", 0), Queue("orders", "b", 0)


class BrokerNetwork:
    """Brokers, the routes that name servers return by default, and clients of both."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.names = Names({}, {"orders": {}})
        self.brokers: dict[str, Server] = {}

    async def start(self, say: Say) -> Server:
        return await self._stack.enter_async_context(a_server(say))

    async def broker(self, name: str, say: Say = a_broker) -> Server:
        self.brokers[name] = await self.start(say)
        self.names.brokers[name] = {0: self.brokers[name].address}
        self.names.topics["orders"][name] = 1
        return self.brokers[name]

    def cluster(self, *name_servers: Server) -> AdminClient:
        cluster = AdminClient(_config(name_servers))
        self._stack.push_async_callback(cluster.close)
        return cluster

    def client(self, *name_servers: Server) -> RoutingClient:
        client = RoutingClient(_config(name_servers), handle_request=lambda _: None)
        self._stack.callback(client.close)
        return client

    def member(self, *name_servers: Server, sql: str = "", **more: Any) -> RocketMQConsumer:
        subscription = Subscription(topic="orders", expression=sql or "*", type="SQL92" if sql else "Tag")
        membership = Membership(group="shop", client_id="one", subscriptions=[subscription], **more)
        member = RocketMQConsumer(_config(name_servers), membership)
        self._stack.push_async_callback(member.leave)
        return member


def _config(name_servers: Sequence[Server]) -> ConnectionConfig:
    return ConnectionConfig([server.address for server in name_servers])


@pytest.fixture
async def network() -> AsyncIterator[BrokerNetwork]:
    async with AsyncExitStack() as stack:
        yield BrokerNetwork(stack)


@pytest.fixture
def endless_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set all call timeouts to an hour: a caller that waits for a silent server fails the test."""
    for call in (ConnectionPool.call, RoutingClient.call, RoutingClient.call_or_raise):
        monkeypatch.setattr(call, "__defaults__", (3600.0,))


@asynccontextmanager
async def running(*coroutines: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# Name servers.


async def test_name_server_that_lists_only_some_brokers_does_not_make_a_topic_unknown(
    network: BrokerNetwork,
) -> None:
    await network.broker("a")
    await network.broker("b")
    network.names.topics["orders"] = {"b": 1}
    server = await network.start(network.names)
    cluster = network.cluster(server)
    assert await cluster.queues("orders") == (B,)
    b = network.names.brokers.pop("b")
    with pytest.raises(UnreachableError, match="No name server lists all brokers yet"):
        await cluster.queues("orders")
    assert await cluster._client.master_address("b") == b[0]
    network.names.brokers["b"] = b
    assert await cluster.queues("orders") == (B,)
    network.names.topics.clear()
    with pytest.raises(NotFoundError, match="There is no topic orders"):
        await cluster.queues("orders")


async def test_name_server_without_the_topic_makes_the_client_query_the_others(network: BrokerNetwork) -> None:
    await network.broker("a")
    empty, partly = Names({}), Names(dict(network.names.brokers))
    for young in (empty, partly):
        cluster = network.cluster(await network.start(young), await network.start(network.names))
        assert await cluster.queues("orders") == (A,)


async def test_name_server_that_knows_less_than_another_is_not_trusted_by_a_new_client(
    network: BrokerNetwork,
) -> None:
    await network.broker("a")
    first, second = Names({"a": {0: "127.0.0.1:1"}}), Names({"b": {0: "127.0.0.1:2"}})
    servers = [await network.start(names) for names in (first, second)]
    with pytest.raises(UnreachableError, match="No name server lists all brokers yet"):
        await network.cluster(*servers).queues("nowhere")
    second.brokers |= first.brokers
    with pytest.raises(NotFoundError):
        await network.cluster(*servers).queues("nowhere")
    with pytest.raises(UnreachableError):
        await network.cluster(await network.start(Names({}))).queues("nowhere")


async def test_name_server_that_supports_no_request_is_not_preferred(network: BrokerNetwork) -> None:
    await network.broker("a")
    unsupporting, supporting = (
        await network.start(lambda frame: an_answer(frame, code=3)),
        await network.start(network.names),
    )
    cluster = network.cluster(unsupporting, supporting)
    for _ in range(3):
        assert await cluster.queues("orders") == (A,)
    assert len(unsupporting.frames) == 1
    with pytest.raises(UnreachableError, match=r"No name server responds: .*code 3"):
        await network.cluster(unsupporting).queues("orders")


async def test_name_server_that_denies_permission_is_reported_with_its_remark(network: BrokerNetwork) -> None:
    guarded = await network.start(lambda frame: an_answer(frame, code=ResponseCode.NO_PERMISSION, remark="no\nrights"))
    with pytest.raises(RejectedError, match="no rights"):
        await network.cluster(guarded).queues("orders")


@pytest.mark.usefixtures("endless_calls")
async def test_name_server_that_is_silent_does_not_block_the_next_one(network: BrokerNetwork) -> None:
    await network.broker("a")
    frozen, answering = await network.start(silent), await network.start(network.names)
    cluster = network.cluster(frozen, answering)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await cluster.queues("orders") == (A,)
    assert await cluster.queues("orders") == (A,)
    assert len(frozen.frames) == 1


@pytest.mark.parametrize("number", [3_000_000, 2**31 - 1])
async def test_route_with_more_queues_than_possible_is_malformed(network: BrokerNetwork, number: int) -> None:
    await network.broker("a")
    network.names.topics["orders"]["a"] = number
    with pytest.raises(MalformedResponseError, match="are supported"):
        await network.cluster(await network.start(network.names)).queues("orders")


async def test_route_with_very_many_queues_is_counted_without_memory_for_each(network: BrokerNetwork) -> None:
    await network.broker("a")
    network.names.topics["orders"]["a"] = 2**31 - 1
    cluster = network.cluster(await network.start(network.names))
    assert await cluster.queue_counts("orders") == {"a": 2**31 - 1}


async def test_route_with_very_many_brokers_is_malformed(network: BrokerNetwork) -> None:
    names = [f"broker-{number}" for number in range(1025)]
    network.names.brokers |= {name: {0: "127.0.0.1:1"} for name in names}
    network.names.topics["orders"] = dict.fromkeys(names, 1)
    with pytest.raises(
        MalformedResponseError, match=r"^The route of topic orders names 1,025 brokers; at most 1,024 are supported$"
    ):
        await network.cluster(await network.start(network.names)).queue_counts("orders")


async def test_route_that_names_a_broker_twice_is_malformed(
    network: BrokerNetwork,
) -> None:
    await network.broker("a")
    network.names.times = 2
    with pytest.raises(MalformedResponseError, match=r"^The route of topic orders lists broker a twice$"):
        await network.cluster(await network.start(network.names)).queues("orders")


# Replicas.


async def test_broker_master_missing_from_the_name_server_is_still_used(network: BrokerNetwork) -> None:
    held: list[Frame] = []

    def say(frame: Frame) -> bytes:
        if frame.code == RequestCode.PULL_MESSAGE:
            held.append(frame)
            return b""
        return a_broker(frame)

    master, slave = await network.broker("a", say), await network.start(a_broker)
    network.names.brokers["a"][1] = slave.address
    member = network.member(await network.start(network.names))
    await member.join()
    pulling = asyncio.create_task(member.pull(A, 0))
    await until(lambda: bool(held))
    network.names.brokers["a"] = {1: slave.address}
    await member._client.refresh(["orders"])
    await member.commit(A, 1)
    assert not pulling.done()
    assert master.connections == 1
    master.writers[0].write(
        an_answer(held[0], code=ResponseCode.PULL_NOT_FOUND, nextBeginOffset=0, minOffset=0, maxOffset=0)
    )
    assert (await pulling).next_offset == 0


async def test_broker_master_that_is_down_is_looked_up_until_it_is_back(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LOOKUP_INTERVAL_SECONDS", 0.0)
    slave = await network.start(a_broker)
    network.names.brokers["a"] = {1: slave.address}
    network.names.topics["orders"]["a"] = 1
    cluster = network.cluster(await network.start(network.names))
    await cluster.queues("orders")
    with pytest.raises(UnreachableError, match="has no master"):
        await cluster.group_settings("shop", "a")
    await network.broker("a")
    assert (await cluster.group_settings("shop", "a")).consume_enabled


async def test_broker_removed_for_good_is_forgotten(network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_cache, "EVICT_UNLISTED_SECONDS", 0.05)
    await network.broker("a")
    b = await network.broker("b")
    client = network.client(await network.start(network.names))
    await client.refresh(["orders"])
    await client.call("b", Frame(code=RequestCode.GET_BROKER_CONFIG))
    brokers = network.names.brokers
    topics = network.names.topics
    network.names.brokers = {}
    network.names.topics = {}
    await client.fetch_brokers()  # no brokers at all: the name server has just restarted
    network.names.brokers = {"a": brokers["a"]}
    network.names.topics = topics

    async def is_forgotten() -> bool:
        await client.refresh(["orders"])
        return [*client.topic_brokers] == ["a"]

    await client.refresh(["orders"])
    assert [*client.topic_brokers] == ["a", "b"]
    await soon(is_forgotten)
    await until(lambda: b.ended == [1])


async def test_connection_to_the_old_address_of_a_moved_broker_is_closed(network: BrokerNetwork) -> None:
    old = await network.broker("a")
    cluster = network.cluster(await network.start(network.names))
    await cluster.group_settings("shop", "a")
    new = await network.broker("a")
    await cluster.broker_names()
    await until(lambda: old.ended == [1])
    await cluster.group_settings("shop", "a")
    assert new.connections == 1


# Calls that fail.


@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE])
async def test_request_that_must_run_once_is_not_repeated_at_a_moved_broker(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch, code: RequestCode
) -> None:
    monkeypatch.setattr(clients, "LOOKUP_INTERVAL_SECONDS", 0.0)
    old = await network.broker("a", lambda _: None)
    cluster = network.cluster(await network.start(network.names))
    await cluster.queues("orders")
    new = await network.broker("a")
    with pytest.raises(UnreachableError, match="the peer closed the connection"):
        await cluster._client.call("a", Frame(code=code))
    assert (old.codes(), new.codes()) == ([code], [])
    await cluster._client.call("a", Frame(code=code))
    assert new.codes() == [code]


async def test_request_that_is_idempotent_is_repeated_at_a_moved_broker(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LOOKUP_INTERVAL_SECONDS", 0.0)
    await network.broker("a", lambda _: None)
    cluster = network.cluster(await network.start(network.names))
    await cluster.queues("orders")
    await network.broker("a")
    assert (await cluster.group_settings("shop", "a")).consume_enabled


@pytest.mark.usefixtures("endless_calls")
async def test_request_that_fails_does_not_wait_long_for_silent_name_servers(network: BrokerNetwork) -> None:
    is_answering = [True]
    servers = [await network.start(lambda frame: network.names(frame) if is_answering[0] else b"") for _ in range(4)]
    await network.broker("a", silent)
    client = network.client(*servers)
    await client.fetch_route("orders")
    is_answering[0] = False
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(UnreachableError, match=r"did not respond within 0\.2 s"):
            await client.call("a", Frame(code=RequestCode.GET_BROKER_CONFIG), 0.2)


@pytest.mark.parametrize(
    "table",
    [
        b'{"offsetTable":{"x":%b}}',
        b'{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:%b}}',
    ],
    ids=["no queue", "a number beyond all"],
)
async def test_response_with_an_unreadable_offset_table_is_malformed(network: BrokerNetwork, table: bytes) -> None:
    beyond = b"1" + b"0" * 400 if b"queueId" in table else b"1"
    row = b'{"brokerOffset":1,"consumerOffset":1,"minOffset":1,"maxOffset":1,"lastTimestamp":N,"lastUpdateTimestamp":N}'
    await network.broker("a", lambda frame: an_answer(frame, table.replace(b"%b", row.replace(b"N", beyond))))
    cluster = network.cluster(await network.start(network.names))
    for call in (
        cluster.group_offsets("shop", "a"),
        cluster.offset_ranges("orders", "a"),
        cluster.reset_offsets("shop", "orders", "a"),
    ):
        with pytest.raises(MalformedResponseError):
            await call


async def test_offset_range_of_a_queue_whose_messages_were_deleted_has_no_time(network: BrokerNetwork) -> None:
    table = b'{"offsetTable":{{"brokerName":"a","queueId":0,"topic":"orders"}:%b}}'
    row = b'{"minOffset":7,"maxOffset":7,"lastUpdateTimestamp":-1}'
    await network.broker("a", lambda frame: an_answer(frame, table.replace(b"%b", row)))
    cluster = network.cluster(await network.start(network.names))
    assert await cluster.offset_ranges("orders", "a") == {A: (7, 7, 0.0)}


async def test_topic_without_readable_queues_cannot_be_sent_to(network: BrokerNetwork) -> None:
    await network.broker("a")
    network.names.topics["orders"]["a"] = 0
    with pytest.raises(RejectedError, match="no readable queue"):
        await network.cluster(await network.start(network.names)).send("orders", b"body")


async def test_broker_error_is_not_taken_for_a_group_without_members(network: BrokerNetwork) -> None:
    remark = ["no consumer for this group, shop"]
    await network.broker("a", lambda frame: an_answer(frame, code=ResponseCode.SYSTEM_ERROR, remark=remark[0]))
    cluster = network.cluster(await network.start(network.names))
    assert await cluster.client_ids("shop", "a") == ()
    remark[0] = "java.lang.OutOfMemoryError:\n\tat X"
    with pytest.raises(RejectedError, match=r"java\.lang\.OutOfMemoryError: at X"):
        await cluster.client_ids("shop", "a")


async def test_member_ids_are_listed_once_each(network: BrokerNetwork) -> None:
    await network.broker("a", lambda frame: an_answer(frame, {"consumerIdList": ["y", "x", "y"]}))
    cluster = network.cluster(await network.start(network.names))
    assert await cluster.client_ids("shop", "a") == ("y", "x")


async def test_lock_release_is_sent_to_brokers_concurrently(network: BrokerNetwork) -> None:
    await network.broker("a", silent)
    b = await network.broker("b")
    cluster = network.cluster(await network.start(network.names))
    unlocking = asyncio.create_task(cluster.unlock("shop", "one", [A, B]))
    await until(lambda: b.codes() == [RequestCode.UNLOCK_BATCH_MQ])
    assert not unlocking.done()
    with pytest.raises(UnreachableError, match="did not respond"):
        await unlocking


async def test_filter_rejected_by_one_broker_is_reported_though_another_is_silent(network: BrokerNetwork) -> None:
    await network.broker("a", silent)
    await network.broker(
        "b", lambda frame: an_answer(frame, code=ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark="no SQL92")
    )
    with pytest.raises(RejectedError, match="no SQL92"):
        await network.member(await network.start(network.names), sql="a > 1").check_subscriptions()


# Pulls.


def pulled(frame: Frame, body: bytes) -> bytes:
    return an_answer(frame, body, nextBeginOffset=99, minOffset=0, maxOffset=99)


async def test_pull_response_that_is_malformed_keeps_the_connection(network: BrokerNetwork) -> None:
    bodies = [b"\0\0\0\1nonsense", a_message(b"body")]
    a = await network.broker("a", lambda frame: pulled(frame, bodies.pop(0)))
    member = network.member(await network.start(network.names))
    await member._client.refresh(["orders"])
    with pytest.raises(MalformedResponseError, match="The response to a pull of"):
        await member.pull(A, 0)
    assert [message.body for message in (await member.pull(A, 0)).messages] == [b"body"]
    assert a.connections == 1


async def test_offset_0_of_a_deleted_topic_is_not_trusted(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero: Say = lambda frame: an_answer(frame, code=ResponseCode.QUERY_NOT_FOUND if frame.code == 14 else 0, offset=0)  # noqa: E731
    await network.broker("a", zero)
    names = await network.start(network.names)
    member = network.member(names)
    assert (await member.max_offset(A), await member.committed_offset(A)) == (0, None)
    request_count = len(names.frames)
    assert (await member.max_offset(A), await member.min_offset(A)) == (0, 0)
    assert len(names.frames) == request_count, "the route is still trusted"
    monkeypatch.setattr(clients, "ROUTE_TRUST_SECONDS", 0.0)
    network.names.topics.clear()
    for call in (member.max_offset(A), member.min_offset(A), member.offset_at_time(A, 1.0), member.committed_offset(A)):
        with pytest.raises(NotFoundError):
            await call


async def test_offset_0_is_trusted_unless_a_name_server_contradicts(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "ROUTE_TRUST_SECONDS", 0.0)
    await network.broker("a", lambda frame: an_answer(frame, offset=0))
    await network.broker("b")
    names = await network.start(network.names)
    member = network.member(names)
    assert await member.max_offset(A) == 0
    names.say = silent
    assert await member.max_offset(A) == 0
    names.say = network.names
    network.names.brokers.pop("a")
    assert await member.max_offset(A) == 0, "a name server that lost a broker does not know its queues"


# Membership.


def beats(server: Server, connection: int | None = None) -> int:
    return server.codes(connection).count(RequestCode.HEART_BEAT)


async def commit_repeatedly(member: RocketMQConsumer, queue: Queue) -> None:
    """Send requests repeatedly, so that a broken connection is reopened."""
    while True:
        with suppress(BrokerError):
            await member.commit(queue, 1)
        await asyncio.sleep(0.005)


async def cut_repeatedly(server: Server) -> None:
    while True:
        await asyncio.sleep(0.03)
        server.cut()


async def test_heartbeat_to_other_brokers_continues_while_one_flaps(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.1)
    a = await network.broker("a")
    b = await network.broker("b")
    names = await network.start(network.names)
    member = network.member(names)
    await member.join()
    request_count = len(names.frames)
    async with running(commit_repeatedly(member, A), cut_repeatedly(a)):
        await until(lambda: beats(b) > 5 and len(names.frames) > request_count + 5 and a.connections > 5)


async def test_heartbeat_is_sent_on_each_new_connection_though_another_broker_is_silent(network: BrokerNetwork) -> None:
    is_answering = [True]
    a = await network.broker("a")
    b = await network.broker(
        "b", lambda frame: a_broker(frame) if is_answering[0] or frame.code != RequestCode.HEART_BEAT else b""
    )
    member = network.member(await network.start(network.names))
    await member.join()
    assert (beats(a), beats(b)) == (1, 1)
    is_answering[0] = False
    async with running(commit_repeatedly(member, A), commit_repeatedly(member, B)):
        b.cut()
        await until(lambda: beats(b) == 2)
        for connection in (2, 3, 4):
            a.cut()
            await until(lambda number=connection: beats(a, number) == 1)  # type: ignore[misc]


async def test_heartbeat_that_is_rejected_is_sent_again(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "RETRY_SECONDS", 0.01)
    a = await network.broker(
        "a",
        lambda frame: (
            a_broker(frame) if frame.code != RequestCode.HEART_BEAT or beats(a) > 2 else an_answer(frame, code=2)
        ),
    )
    member = network.member(await network.start(network.names))
    await member.join()
    await until(lambda: beats(a) == 3)


async def test_heartbeat_loop_logs_an_unexpected_error_and_continues(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.02)
    a = await network.broker("a")
    member = network.member(await network.start(network.names))
    await member.join()

    async def fail(_: object) -> None:
        raise KeyError("a mistake of ours")

    with monkeypatch.context() as broken:
        broken.setattr(member._client, "refresh", fail)
        await until(lambda: "a mistake of ours" in caplog.text)
    previous = beats(a)
    await until(lambda: beats(a) > previous)


async def test_heartbeat_is_sent_to_a_newly_found_broker(
    network: BrokerNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.1)
    await network.broker("a")
    member = network.member(await network.start(network.names))
    await member.join()
    b = await network.broker("b")
    await until(lambda: beats(b) == 1)


async def test_member_that_leaves_while_it_joins_is_unregistered(network: BrokerNetwork) -> None:
    requested = asyncio.Event()

    def say(frame: Frame) -> bytes:
        if frame.code == RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG:
            requested.set()
            return b""
        return a_broker(frame)

    a = await network.broker("a", say)
    member = network.member(await network.start(network.names))
    joining = asyncio.create_task(member.join())
    await requested.wait()
    await member.leave()
    with pytest.raises(UnreachableError, match="one has left group shop"):
        await joining
    assert RequestCode.UNREGISTER_CLIENT in a.codes()
    await until(lambda: a.ended == [1])
    assert a.connections == 1
    assert not [task for task in asyncio.all_tasks() if "HeartbeatSender" in str(task.get_coro())]


async def test_member_leave_cancelled_at_a_silent_broker_closes_its_connections(network: BrokerNetwork) -> None:
    a = await network.broker("a", lambda frame: b"" if frame.code == RequestCode.UNREGISTER_CLIENT else a_broker(frame))
    for _ in range(2):
        member = network.member(await network.start(network.names))
        await member.join()
        leaving = asyncio.create_task(member.leave())
        await until(lambda: a.codes(a.connections)[-1:] == [RequestCode.UNREGISTER_CLIENT])
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(lambda: len(a.ended) == a.connections)


async def test_member_leave_cancelled_at_once_closes_its_connections(network: BrokerNetwork) -> None:
    a = await network.broker("a")
    member = network.member(await network.start(network.names))
    await member.join()
    leaving = asyncio.create_task(member.leave())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await until(lambda: a.ended == [1])


@pytest.mark.usefixtures("endless_calls")
async def test_member_join_does_not_take_longer_with_more_silent_brokers(network: BrokerNetwork) -> None:
    are_silent = [True]
    brokers = [
        await network.broker(name, lambda frame: silent(frame) if are_silent[0] else a_broker(frame)) for name in "abcd"
    ]
    member = network.member(await network.start(network.names))
    async with running(member.join()):
        await until(lambda: all(broker.frames for broker in brokers))
    are_silent[0] = False  # else the member could not leave


# Requests from brokers.


@pytest.mark.parametrize("code", [RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, RequestCode.GET_CONSUMER_RUNNING_INFO])
async def test_request_from_a_broker_about_another_group_is_rejected(network: BrokerNetwork, code: RequestCode) -> None:
    name = "consumerGroup" if code == RequestCode.GET_CONSUMER_RUNNING_INFO else "group"

    def say(frame: Frame) -> bytes:
        if frame.is_response:
            return b""
        requests = [
            encode(Frame(code=code, opaque=number, fields={name: group})) for number, group in enumerate(("shop", "x"))
        ]
        return b"".join(requests) + a_broker(frame)

    a = await network.broker("a", say)
    member = network.member(await network.start(network.names))
    await member._client.refresh(["orders"])
    await member.commit(A, 1)
    await until(lambda: len(a.frames) == 3)
    assert {frame.opaque: frame.code for frame in a.frames if frame.is_response} == {
        0: ResponseCode.SUCCESS,
        1: ResponseCode.SYSTEM_ERROR,
    }


async def test_offset_reset_of_another_group_is_ignored(network: BrokerNetwork) -> None:
    table = b'{"offsetTable":{{"brokerName":"a","queueId":0,"topic":"orders"}:5}}'

    def say(frame: Frame) -> bytes:
        pushes = [
            encode(Frame(code=RequestCode.RESET_CONSUMER_CLIENT_OFFSET, flag=2, fields={"group": group}, body=table))
            for group in ("x", "shop")
        ]
        return b"".join(pushes) + a_broker(frame)

    resets: list[object] = []
    await network.broker("a", say)
    member = network.member(await network.start(network.names), on_offsets_reset=resets.append)
    await member._client.refresh(["orders"])
    await member.commit(A, 1)
    assert resets == [{A: 5}]
