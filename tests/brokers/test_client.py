"""A client among name servers and brokers that do what real ones do seldom: flap, lie, forget, come back elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from brokers.scripted import Names, Say, Server, a_broker, a_server, an_answer, silent, until
from fuzz.corpus import a_message
from ground.poll import soon
from rota.brokers import BrokerError, Garbled, Membership, Refused, Unknown, Unreachable
from rota.brokers.rocketmq import client as clients
from rota.brokers.rocketmq import presence
from rota.brokers.rocketmq.client import Client, Site
from rota.brokers.rocketmq.cluster import Cluster
from rota.brokers.rocketmq.codes import Answer, Request
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.frames import Frame, encode
from rota.model import Queue
from rota.spec import Subscription

A, B = Queue("orders", "a", 0), Queue("orders", "b", 0)


class World:
    """Name servers that know the same at first, brokers, and who asks them."""

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

    def cluster(self, *name_servers: Server) -> Cluster:
        made = Cluster(Site([it.address for it in name_servers]))
        self._stack.push_async_callback(made.close)
        return made

    def client(self, *name_servers: Server) -> Client:
        made = Client(Site([it.address for it in name_servers]), serve=lambda _: None)
        self._stack.callback(made.close)
        return made

    def member(self, *name_servers: Server, sql: str = "", **more: Any) -> RocketMQConsumer:
        wanted = Subscription(topic="orders", expression=sql or "*", type="SQL92" if sql else "Tag")
        known = Membership(group="shop", client_id="one", subscriptions=[wanted], **more)
        made = RocketMQConsumer(Site([it.address for it in name_servers]), known)
        self._stack.push_async_callback(made.leave)
        return made


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


@asynccontextmanager
async def going(*coroutines: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(it) for it in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# Name servers.


async def test_a_name_server_that_lists_some_brokers_only_is_not_believed_that_there_is_no_topic(world: World) -> None:
    await world.broker("a")
    await world.broker("b")
    world.names.topics["orders"] = {"b": 1}
    server = await world.start(world.names)
    cluster = world.cluster(server)
    assert await cluster.queues("orders") == (B,)
    b = world.names.brokers.pop("b")
    with pytest.raises(Unreachable, match="No name server knows all brokers yet"):
        await cluster.queues("orders")
    assert await cluster._client.address("b") == b[0]
    world.names.brokers["b"] = b
    assert await cluster.queues("orders") == (B,)
    world.names.topics.clear()
    with pytest.raises(Unknown, match="There is no topic orders"):
        await cluster.queues("orders")


async def test_what_one_name_server_does_not_know_the_others_are_asked(world: World) -> None:
    await world.broker("a")
    empty, partly = Names({}), Names(dict(world.names.brokers))
    for young in (empty, partly):
        cluster = world.cluster(await world.start(young), await world.start(world.names))
        assert await cluster.queues("orders") == (A,)


async def test_who_knows_nothing_yet_believes_no_name_server_that_knows_less_than_another_one(world: World) -> None:
    await world.broker("a")
    left, right = Names({"a": {0: "127.0.0.1:1"}}), Names({"b": {0: "127.0.0.1:2"}})
    servers = [await world.start(it) for it in (left, right)]
    with pytest.raises(Unreachable, match="No name server knows all brokers yet"):
        await world.cluster(*servers).queues("nowhere")
    right.brokers |= left.brokers
    with pytest.raises(Unknown):
        await world.cluster(*servers).queues("nowhere")
    with pytest.raises(Unreachable):
        await world.cluster(await world.start(Names({}))).queues("nowhere")


async def test_a_name_server_of_another_kind_is_not_preferred(world: World) -> None:
    await world.broker("a")
    other, right = await world.start(lambda it: an_answer(it, code=3)), await world.start(world.names)
    cluster = world.cluster(other, right)
    for _ in range(3):
        assert await cluster.queues("orders") == (A,)
    assert len(other.heard) == 1
    with pytest.raises(Unreachable, match=r"No name server answers: .*code 3"):
        await world.cluster(other).queues("orders")


async def test_a_name_server_that_lets_nobody_in_says_so(world: World) -> None:
    guarded = await world.start(lambda it: an_answer(it, code=Answer.NO_PERMISSION, remark="who are\nyou"))
    with pytest.raises(Refused, match="who are you"):
        await world.cluster(guarded).queues("orders")


async def test_a_silent_name_server_does_not_keep_from_the_next_one(world: World) -> None:
    await world.broker("a")
    frozen, right = await world.start(silent), await world.start(world.names)
    cluster = world.cluster(frozen, right)
    async with asyncio.timeout(2.5):  # less than one of them is waited for
        assert await cluster.queues("orders") == (A,)
    assert await cluster.queues("orders") == (A,)
    assert len(frozen.heard) == 1


@pytest.mark.parametrize("number", [3_000_000, 2**31 - 1])
async def test_a_route_of_more_queues_than_there_can_be_is_garbled(world: World, number: int) -> None:
    await world.broker("a")
    world.names.topics["orders"]["a"] = number
    with pytest.raises(Garbled, match="are the most"):
        await world.cluster(await world.start(world.names)).queues("orders")


async def test_a_route_that_names_a_broker_twice_is_garbled_for_a_queue_would_be_there_twice(world: World) -> None:
    await world.broker("a")
    world.names.times = 2
    with pytest.raises(Garbled, match=r"^The route of orders names the broker a twice$"):
        await world.cluster(await world.start(world.names)).queues("orders")


# Replicas.


async def test_a_master_that_a_name_server_lost_sight_of_is_still_asked_where_it_was(world: World) -> None:
    held: list[Frame] = []

    def say(frame: Frame) -> bytes:
        if frame.code == Request.PULL_MESSAGE:
            held.append(frame)
            return b""
        return a_broker(frame)

    master, slave = await world.broker("a", say), await world.start(a_broker)
    world.names.brokers["a"][1] = slave.address
    member = world.member(await world.start(world.names))
    await member.join()
    pulling = asyncio.create_task(member.pull(A, 0))
    await until(lambda: bool(held))
    world.names.brokers["a"] = {1: slave.address}
    await member._client.refresh(["orders"])
    await member.commit(A, 1)
    assert not pulling.done()
    assert master.connections == 1
    master.writers[0].write(an_answer(held[0], code=Answer.PULL_NOT_FOUND, nextBeginOffset=0, minOffset=0, maxOffset=0))
    assert (await pulling).next == 0


async def test_a_master_that_is_gone_is_looked_up_again_until_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LOOK_SECONDS", 0.0)
    slave = await world.start(a_broker)
    world.names.brokers["a"] = {1: slave.address}
    world.names.topics["orders"]["a"] = 1
    cluster = world.cluster(await world.start(world.names))
    await cluster.queues("orders")
    with pytest.raises(Unreachable, match="has no replica 0 at present"):
        await cluster.settings("shop", "a")
    await world.broker("a")
    assert (await cluster.settings("shop", "a")).enabled


async def test_a_broker_that_is_gone_for_good_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FORGET_SECONDS", 0.05)
    await world.broker("a")
    b = await world.broker("b")
    client = world.client(await world.start(world.names))
    await client.refresh(["orders"])
    await client.ask("b", Frame(code=Request.GET_BROKER_CONFIG))
    kept, topics = world.names.brokers, world.names.topics
    world.names.brokers, world.names.topics = {}, {}
    await client.brokers()  # nobody at all: it has just started
    world.names.brokers, world.names.topics = {"a": kept["a"]}, topics

    async def forgotten() -> bool:
        await client.refresh(["orders"])
        return [*client.hosts] == ["a"]

    await client.refresh(["orders"])
    assert [*client.hosts] == ["a", "b"]
    await soon(forgotten)
    await until(lambda: b.ended == [1])


async def test_an_operator_keeps_no_connections_to_where_a_broker_was(world: World) -> None:
    old = await world.broker("a")
    cluster = world.cluster(await world.start(world.names))
    await cluster.settings("shop", "a")
    new = await world.broker("a")
    await cluster.brokers()
    await until(lambda: old.ended == [1])
    await cluster.settings("shop", "a")
    assert new.connections == 1


# Calls that fail.


async def test_what_must_be_done_once_is_not_asked_again_of_a_broker_that_moved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LOOK_SECONDS", 0.0)
    old = await world.broker("a", lambda _: None)
    cluster = world.cluster(await world.start(world.names))
    await cluster.queues("orders")
    new = await world.broker("a")
    with pytest.raises(Unreachable, match="the other side closed it"):
        await cluster._client.ask("a", Frame(code=Request.SEND_MESSAGE_V2))
    assert (old.codes(), new.codes()) == ([Request.SEND_MESSAGE_V2], [])
    await cluster._client.ask("a", Frame(code=Request.SEND_MESSAGE_V2))
    assert new.codes() == [Request.SEND_MESSAGE_V2]


async def test_what_can_be_done_twice_is_asked_again_of_a_broker_that_moved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LOOK_SECONDS", 0.0)
    await world.broker("a", lambda _: None)
    cluster = world.cluster(await world.start(world.names))
    await cluster.queues("orders")
    await world.broker("a")
    assert (await cluster.settings("shop", "a")).enabled


async def test_a_call_that_fails_does_not_wait_long_for_silent_name_servers(world: World) -> None:
    speaks = [True]
    servers = [await world.start(lambda it: world.names(it) if speaks[0] else b"") for _ in range(4)]
    await world.broker("a", silent)
    client = world.client(*servers)
    await client.route("orders")
    speaks[0] = False
    async with asyncio.timeout(2):  # name servers alone would take 6 s
        with pytest.raises(Unreachable, match=r"did not answer within 0\.2 s"):
            await client.ask("a", Frame(code=Request.GET_BROKER_CONFIG), 0.2)


@pytest.mark.parametrize(
    "table",
    [
        b'{"offsetTable":{"x":%b}}',
        b'{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:%b}}',
    ],
    ids=["no queue", "a number beyond all"],
)
async def test_figures_that_cannot_be_read_are_garbled(world: World, table: bytes) -> None:
    beyond = b"1" + b"0" * 400 if b"queueId" in table else b"1"
    row = b'{"brokerOffset":1,"consumerOffset":1,"minOffset":1,"maxOffset":1,"lastTimestamp":N,"lastUpdateTimestamp":N}'
    await world.broker("a", lambda it: an_answer(it, table.replace(b"%b", row.replace(b"N", beyond))))
    cluster = world.cluster(await world.start(world.names))
    for call in (cluster.progress("shop", "a"), cluster.ends("orders", "a"), cluster.reset("shop", "orders", "a")):
        with pytest.raises(Garbled):
            await call


async def test_a_topic_that_cannot_be_read_is_sent_nothing(world: World) -> None:
    await world.broker("a")
    world.names.topics["orders"]["a"] = 0
    with pytest.raises(Refused, match="no queue that can be read"):
        await world.cluster(await world.start(world.names)).send("orders", b"body")


async def test_a_broker_that_fails_is_not_taken_for_one_where_nobody_is(world: World) -> None:
    said = ["no consumer for this group, shop"]
    await world.broker("a", lambda it: an_answer(it, code=Answer.SYSTEM_ERROR, remark=said[0]))
    cluster = world.cluster(await world.start(world.names))
    assert await cluster.client_ids("shop", "a") == ()
    said[0] = "java.lang.OutOfMemoryError:\n\tat X"
    with pytest.raises(Refused, match=r"java\.lang\.OutOfMemoryError: at X"):
        await cluster.client_ids("shop", "a")


async def test_the_ids_of_members_are_told_once_each(world: World) -> None:
    await world.broker("a", lambda it: an_answer(it, {"consumerIdList": ["y", "x", "y"]}))
    cluster = world.cluster(await world.start(world.names))
    assert await cluster.client_ids("shop", "a") == ("y", "x")


async def test_locks_are_given_back_side_by_side(world: World) -> None:
    await world.broker("a", silent)
    b = await world.broker("b")
    cluster = world.cluster(await world.start(world.names))
    unlocking = asyncio.create_task(cluster.unlock("shop", "one", [A, B]))
    await until(lambda: b.codes() == [Request.UNLOCK_BATCH_MQ])
    assert not unlocking.done()
    with pytest.raises(Unreachable, match="did not answer"):
        await unlocking


async def test_who_refuses_a_subscription_is_heard_though_others_are_silent(world: World) -> None:
    await world.broker("a", silent)
    await world.broker("b", lambda it: an_answer(it, code=Answer.SUBSCRIPTION_PARSE_FAILED, remark="no SQL92"))
    with pytest.raises(Refused, match="no SQL92"):
        await world.member(await world.start(world.names), sql="a > 1").check()


# Pulls.


def pulled(frame: Frame, body: bytes) -> bytes:
    return an_answer(frame, body, nextBeginOffset=99, minOffset=0, maxOffset=99)


async def test_a_pull_that_cannot_be_read_is_garbled_and_the_connection_stays(world: World) -> None:
    bodies = [b"\0\0\0\1nonsense", a_message(b"body")]
    a = await world.broker("a", lambda it: pulled(it, bodies.pop(0)))
    member = world.member(await world.start(world.names))
    await member._client.refresh(["orders"])
    with pytest.raises(Garbled, match="What was pulled from"):
        await member.pull(A, 0)
    assert [it.body for it in (await member.pull(A, 0)).messages] == [b"body"]
    assert a.connections == 1


async def test_an_offset_of_0_is_not_believed_of_what_was_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero: Say = lambda it: an_answer(it, code=Answer.QUERY_NOT_FOUND if it.code == 14 else 0, offset=0)  # noqa: E731
    await world.broker("a", zero)
    names = await world.start(world.names)
    member = world.member(names)
    assert (await member.last(A), await member.committed(A)) == (0, None)
    asked = len(names.heard)
    assert (await member.last(A), await member.first(A)) == (0, 0)
    assert len(names.heard) == asked, "the route is young"
    monkeypatch.setattr(clients, "DOUBT_SECONDS", 0.0)
    world.names.topics.clear()
    for call in (member.last(A), member.first(A), member.at(A, 1.0), member.committed(A)):
        with pytest.raises(Unknown):
            await call


async def test_an_offset_of_0_is_believed_where_no_name_server_says_anything_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "DOUBT_SECONDS", 0.0)
    await world.broker("a", lambda it: an_answer(it, offset=0))
    await world.broker("b")
    names = await world.start(world.names)
    member = world.member(names)
    assert await member.last(A) == 0
    names.say = silent
    assert await member.last(A) == 0
    names.say = world.names
    world.names.brokers.pop("a")
    assert await member.last(A) == 0, "who has lost sight of a broker knows nothing of its queues"


# Being there.


def beats(server: Server, connection: int = 0) -> int:
    return server.codes(connection).count(Request.HEART_BEAT)


async def used(member: RocketMQConsumer, queue: Queue) -> None:
    """Keep asking, so that a connection that breaks is opened again."""
    while True:
        with suppress(BrokerError):
            await member.commit(queue, 1)
        await asyncio.sleep(0.005)


async def flapping(server: Server) -> None:
    while True:
        await asyncio.sleep(0.03)
        server.cut()


async def test_a_broker_that_flaps_keeps_no_sign_of_life_from_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "HEARTBEAT_SECONDS", 0.1)
    a, b = await world.broker("a"), await world.broker("b")
    names = await world.start(world.names)
    member = world.member(names)
    await member.join()
    asked = len(names.heard)
    async with going(used(member, A), flapping(a)):
        await until(lambda: beats(b) > 5 and len(names.heard) > asked + 5 and a.connections > 5)


async def test_each_new_connection_is_made_known_though_another_broker_keeps_silent(world: World) -> None:
    speaks = [True]
    a = await world.broker("a")
    b = await world.broker("b", lambda it: a_broker(it) if speaks[0] or it.code != Request.HEART_BEAT else b"")
    member = world.member(await world.start(world.names))
    await member.join()
    assert (beats(a), beats(b)) == (1, 1)
    speaks[0] = False
    async with going(used(member, A), used(member, B)):
        b.cut()
        await until(lambda: beats(b) == 2)
        for connection in (2, 3, 4):
            a.cut()
            await until(lambda number=connection: beats(a, number) == 1)  # type: ignore[misc]


async def test_a_sign_of_life_that_is_not_taken_is_given_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "AGAIN_SECONDS", 0.01)
    a = await world.broker(
        "a", lambda it: a_broker(it) if it.code != Request.HEART_BEAT or beats(a) > 2 else an_answer(it, code=2)
    )
    member = world.member(await world.start(world.names))
    await member.join()
    await until(lambda: beats(a) == 3)


async def test_a_mistake_in_a_round_is_told_and_the_next_round_comes(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(presence, "HEARTBEAT_SECONDS", 0.02)
    a = await world.broker("a")
    member = world.member(await world.start(world.names))
    await member.join()

    async def fail(_: object) -> None:
        raise KeyError("a mistake of ours")

    with monkeypatch.context() as broken:
        broken.setattr(member._client, "refresh", fail)
        await until(lambda: "a mistake of ours" in caplog.text)
    before = beats(a)
    await until(lambda: beats(a) > before)


async def test_a_broker_that_comes_is_told_in_the_round_that_finds_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "HEARTBEAT_SECONDS", 0.1)
    await world.broker("a")
    member = world.member(await world.start(world.names))
    await member.join()
    b = await world.broker("b")
    await until(lambda: beats(b) == 1)


async def test_who_leaves_while_it_joins_is_gone(world: World) -> None:
    asked = asyncio.Event()

    def say(frame: Frame) -> bytes:
        if frame.code == Request.GET_SUBSCRIPTIONGROUP_CONFIG:
            asked.set()
            return b""
        return a_broker(frame)

    a = await world.broker("a", say)
    member = world.member(await world.start(world.names))
    joining = asyncio.create_task(member.join())
    await asked.wait()
    await member.leave()
    with pytest.raises(Unreachable, match="one has left shop"):
        await joining
    assert Request.UNREGISTER_CLIENT in a.codes()
    await until(lambda: a.ended == [1])
    assert a.connections == 1
    assert not [it for it in asyncio.all_tasks() if "presence" in str(it.get_coro())]


async def test_who_has_no_time_to_leave_closes_its_connections_all_the_same(world: World) -> None:
    a = await world.broker("a", lambda it: b"" if it.code == Request.UNREGISTER_CLIENT else a_broker(it))
    for _ in range(2):
        member = world.member(await world.start(world.names))
        await member.join()
        leaving = asyncio.create_task(member.leave())
        await until(lambda: a.codes(a.connections)[-1:] == [Request.UNREGISTER_CLIENT])
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(lambda: len(a.ended) == a.connections)


async def test_leaving_may_be_cancelled_at_once(world: World) -> None:
    a = await world.broker("a")
    member = world.member(await world.start(world.names))
    await member.join()
    leaving = asyncio.create_task(member.leave())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await until(lambda: a.ended == [1])


async def test_to_join_does_not_take_longer_the_more_brokers_are_silent(world: World) -> None:
    for name in "abcd":
        await world.broker(name, silent)
    member = world.member(await world.start(world.names))
    async with asyncio.timeout(10):  # one by one they would take 3 s each
        await member.join()


# What brokers ask.


@pytest.mark.parametrize("code", [Request.GET_CONSUMER_STATUS_FROM_CLIENT, Request.GET_CONSUMER_RUNNING_INFO])
async def test_questions_about_another_group_are_not_answered(world: World, code: Request) -> None:
    name = "consumerGroup" if code == Request.GET_CONSUMER_RUNNING_INFO else "group"

    def say(frame: Frame) -> bytes:
        if frame.answers:
            return b""
        asked = [
            encode(Frame(code=code, opaque=number, fields={name: group})) for number, group in enumerate(("shop", "x"))
        ]
        return b"".join(asked) + a_broker(frame)

    a = await world.broker("a", say)
    member = world.member(await world.start(world.names))
    await member._client.refresh(["orders"])
    await member.commit(A, 1)
    await until(lambda: len(a.heard) == 3)
    assert {it.opaque: it.code for it in a.heard if it.answers} == {0: Answer.SUCCESS, 1: Answer.SYSTEM_ERROR}


async def test_offsets_of_another_group_that_are_set_are_none_of_ours(world: World) -> None:
    table = b'{"offsetTable":{{"brokerName":"a","queueId":0,"topic":"orders"}:5}}'

    def say(frame: Frame) -> bytes:
        pushes = [
            encode(Frame(code=Request.RESET_CONSUMER_CLIENT_OFFSET, flag=2, fields={"group": group}, body=table))
            for group in ("x", "shop")
        ]
        return b"".join(pushes) + a_broker(frame)

    heard: list[object] = []
    await world.broker("a", say)
    member = world.member(await world.start(world.names), on_reset=heard.append)
    await member._client.refresh(["orders"])
    await member.commit(A, 1)
    assert heard == [{A: 5}]
