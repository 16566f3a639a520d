"""What a client caches from name servers' responses: bounded for hostile ones, sufficient for honest ones."""

from collections.abc import AsyncIterator
from itertools import count

import pytest

from brokers.scripted import Names, Replicas, Server, a_broker, a_server, an_answer, until
from rota.brokers.errors import BrokerError, MalformedResponseError
from rota.brokers.port import Membership
from rota.brokers.rocketmq.brokers import MAX_ONLINE_CONSUMERS, RocketMQBrokers
from rota.brokers.rocketmq.heartbeat import HeartbeatSender
from rota.brokers.rocketmq.metadata_cache import (
    MAX_ADDRESS_CHARACTERS,
    MAX_BROKER_REPLICAS,
    MAX_NAME_CHARACTERS,
    MAX_REPLICAS,
    MAX_ROUTE_ENTRIES,
    BrokerCache,
    Route,
    RouteCache,
)
from rota.brokers.rocketmq.routing import ConnectionConfig, RoutingClient
from rota.brokers.rocketmq.transport.responses import MAX_REASON_CHARACTERS
from rota.brokers.rocketmq.wire.codes import RequestCode, ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame
from rota.model import Queue

BROKERS = 1000  # in each response
RESPONSES = 3 * MAX_REPLICAS // BROKERS
NOWHERE = "127.0.0.1:1"


class ChangingNames:
    """A name server that lists other brokers in each response, and with topic orders a real broker."""

    def __init__(self, real: str) -> None:
        self._real = {"real": {0: real}}
        self._numbers = count()

    def __call__(self, frame: Frame) -> bytes:
        brokers = {f"broker-{next(self._numbers)}": {0: NOWHERE} for _ in range(BROKERS)}
        if frame.fields.get("topic") == "orders":
            brokers |= self._real
        topics = {frame.fields.get("topic", ""): dict.fromkeys(brokers, 1)}
        return Names(brokers, topics)(frame)


@pytest.fixture
async def broker() -> AsyncIterator[Server]:
    async with a_server(a_broker) as server:
        yield server


@pytest.fixture
async def client(broker: Server) -> AsyncIterator[RoutingClient]:
    """Return a client of a name server with changing brokers."""
    async with a_server(ChangingNames(broker.address)) as server:
        client = RoutingClient(ConnectionConfig([server.address]), handle_request=lambda _: None)
        yield client
        client.close()


def remembered_replicas(client: RoutingClient) -> int:
    return sum(map(len, client._brokers.addresses.values()))


async def test_name_server_with_other_brokers_in_each_list_does_not_fill_the_memory(
    client: RoutingClient, broker: Server
) -> None:
    await client.fetch_route("orders")
    for _ in range(RESPONSES):
        await client.fetch_brokers()
        assert remembered_replicas(client) <= MAX_REPLICAS
        assert len(client._brokers._unlisted_since) <= MAX_REPLICAS
    assert client.addresses(["real"]) == {broker.address}, "a route names the broker"
    assert (await client.call("real", Frame(code=RequestCode.GET_BROKER_CONFIG))).fields == {"offset": "7"}


async def test_name_server_with_other_brokers_in_each_route_does_not_fill_the_memory(
    client: RoutingClient, broker: Server
) -> None:
    for number in range(RESPONSES):
        await client.fetch_route("orders")
        await client.call("real", Frame(code=RequestCode.GET_BROKER_CONFIG))
        await client.fetch_route(f"topic-{number}")
        assert remembered_replicas(client) <= MAX_REPLICAS
        assert len(client.topic_brokers) <= MAX_REPLICAS
    assert broker.connections == 1, "the address was never forgotten"
    assert len(client.connections._states) == 2


async def test_route_memory_does_not_grow_with_topics_that_are_requested_once(client: RoutingClient) -> None:
    topics = MAX_ROUTE_ENTRIES // BROKERS + 10
    for number in range(topics):
        await client.fetch_route(f"topic-{number}")
    assert client._routes.get(f"topic-{topics - 1}")
    assert len(client._routes.brokers) <= MAX_ROUTE_ENTRIES
    assert not client._routes.get("topic-0")


async def test_broker_that_no_route_names_is_forgotten_first_and_the_oldest_before_newer_ones() -> None:
    cache = BrokerCache()
    cache.learn({"routed": {0: NOWHERE}, "old": {0: NOWHERE}, "seen-again": {0: NOWHERE}})
    cache.learn({f"broker-{number}": {0: NOWHERE} for number in range(MAX_REPLICAS - 2)})
    cache.learn({"seen-again": {1: NOWHERE}})
    assert cache.exceeds_limit
    cache.trim({"routed"})
    assert not cache.exceeds_limit
    assert {*cache.addresses} >= {"routed", "seen-again", f"broker-{MAX_REPLICAS - 3}"}
    assert {*cache.addresses}.isdisjoint({"old", "broker-0"})
    cache.learn({"": {}})
    cache.trim({*cache.addresses} - {"routed"})
    assert "routed" not in cache.addresses, "a broker without replicas takes memory, too"


def test_broker_with_other_replicas_in_each_answer_keeps_the_newest() -> None:
    cache = BrokerCache()
    for number in range(1000):
        cache.forget_missing({"a": {number: NOWHERE}}, 0.0)
        cache.learn({"a": {number: NOWHERE, number + 1: NOWHERE}})
    assert [*cache.addresses["a"]] == [*range(1001 - MAX_BROKER_REPLICAS, 1001)]
    assert len(cache._unlisted_since) <= MAX_BROKER_REPLICAS


def test_route_memory_forgets_the_topic_that_was_requested_longest_ago() -> None:
    routes = RouteCache()
    brokers = frozenset(map(str, range(MAX_ROUTE_ENTRIES // 4)))  # three routes fit
    for number, topic in enumerate("abcab"):
        routes.mark_requested(topic, number)
        routes.learn(Route(topic, {}, brokers))
    routes.mark_requested("d", 5.0)
    routes.learn(Route("d", {}, brokers))
    assert [bool(routes.get(topic)) for topic in "abcd"] == [True, True, False, True]
    assert (routes.requested_at("a"), routes.requested_at("c")) == (3.0, float("-inf"))
    routes.learn(Route("c", {}, brokers))
    assert routes.get("c") is None, "topic c was forgotten meanwhile, so nothing would remove it again"
    routes.forget("a")
    routes.forget("a")
    routes.mark_requested("e", 6.0)
    routes.learn(Route("e", {}, brokers))
    assert [bool(routes.get(topic)) for topic in "abcde"] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("replicas", "error"),
    [
        ({"a" * (MAX_NAME_CHARACTERS + 1): {0: NOWHERE}}, r"A broker's name is longer than 255 characters"),
        ({"a": {0: "a" * (MAX_ADDRESS_CHARACTERS + 1)}}, r"A broker's address is longer than 300 characters"),
        (
            {"a": dict.fromkeys(range(65), NOWHERE)},
            r"The name server lists 65 replicas of one broker; at most 64 are supported",
        ),
    ],
    ids=["name", "address", "replicas"],
)
async def test_route_and_broker_list_with_more_of_a_broker_than_possible_are_malformed(
    replicas: Replicas, error: str
) -> None:
    async with a_server(Names(replicas, {"orders": dict.fromkeys(replicas, 1)})) as server:
        client = RoutingClient(ConnectionConfig([server.address]), handle_request=lambda _: None)
        for request in (client.fetch_route("orders"), client.fetch_brokers()):
            with pytest.raises(MalformedResponseError, match=f"^{error}$"):
                await request
        client.close()


@pytest.mark.parametrize("long_part", ["remark", "fields"])
async def test_response_that_is_an_error_has_a_short_message(long_part: str) -> None:
    """Conditions keep an error's message; a frame's text may be as long as the frame."""
    text = "very long " * 2**17

    def respond(frame: Frame) -> bytes:
        if long_part == "fields":
            return an_answer(frame, other=text)
        return an_answer(frame, code=ResponseCode.NO_PERMISSION, remark=text)

    async with a_server(respond) as broker, a_server(Names({"a": {0: broker.address}})) as names:
        client = RocketMQBrokers(ConnectionConfig([names.address]))
        with pytest.raises(BrokerError, match="very long very long") as raised:
            await client.committed_offset("shop", Queue("orders", "a", 0))
        assert len(str(raised.value)) < MAX_REASON_CHARACTERS + 100
        await client.close()


async def test_response_with_very_many_consumers_is_malformed() -> None:
    peers = {"connectionSet": [{"clientId": str(number)} for number in range(MAX_ONLINE_CONSUMERS + 1)]}

    async with (
        a_server(lambda frame: an_answer(frame, peers)) as broker,
        a_server(Names({"a": {0: broker.address}})) as names,
    ):
        client = RocketMQBrokers(ConnectionConfig([names.address]))
        with pytest.raises(
            MalformedResponseError,
            match=r"^Broker a lists 20,001 consumers of group shop; at most 20,000 are supported$",
        ):
            await client.online_consumers("shop", "a")
        await client.close()


async def test_heartbeat_to_addresses_that_change_keeps_no_finished_tasks(broker: Server) -> None:
    async with a_server(Names({"a": {0: broker.address}}, {"orders": {"a": 1}})) as server:
        client = RoutingClient(ConnectionConfig([server.address]), handle_request=lambda _: None)
        heartbeat = HeartbeatSender(client, Membership(group="shop", client_id="one", subscriptions=[]), [])
        for number in range(20):
            heartbeat._start_sending(f"127.0.0.1:{number}", 0.0)
            await until(lambda: all(task.done() for task in heartbeat._sender_tasks.values()))
        assert len(heartbeat._sender_tasks) == 1
        client.close()
