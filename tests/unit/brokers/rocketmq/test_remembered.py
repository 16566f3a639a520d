"""What a client remembers of what name servers say: of hostile ones not much more each time, of honest ones enough."""

from collections.abc import AsyncIterator
from itertools import count

import pytest

from brokers.scripted import Names, Replicas, Server, a_broker, a_server, an_answer, until
from rota.brokers.errors import BrokerError, MalformedResponseError
from rota.brokers.port import Membership
from rota.brokers.rocketmq.admin import MOST_ONLINE, AdminClient
from rota.brokers.rocketmq.heartbeat import Heartbeat
from rota.brokers.rocketmq.remembered import (
    LONGEST_ADDRESS,
    LONGEST_NAME,
    MOST_PLACES,
    MOST_REPLICAS,
    MOST_REPLICAS_OF_BROKER,
    BrokerCache,
    Route,
    RouteCache,
)
from rota.brokers.rocketmq.routing import ConnectionConfig, RoutingClient
from rota.brokers.rocketmq.transport.responses import LONGEST_REASON
from rota.brokers.rocketmq.wire.codes import RequestCode, ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame
from rota.model import Queue

BROKERS = 1000  # in each answer
ANSWERS = 3 * MOST_REPLICAS // BROKERS
NOWHERE = "127.0.0.1:1"


class OtherNames:
    """A name server that names other brokers with each answer, and one real broker with some."""

    def __init__(self, real: str) -> None:
        self._real = {"real": {0: real}}
        self._numbers = count()

    def __call__(self, frame: Frame) -> bytes:
        found = {f"broker-{next(self._numbers)}": {0: NOWHERE} for _ in range(BROKERS)}
        if frame.fields.get("topic") == "orders":
            found |= self._real
        topics = {frame.fields.get("topic", ""): dict.fromkeys(found, 1)}
        return Names(found, topics)(frame)


@pytest.fixture
async def broker() -> AsyncIterator[Server]:
    async with a_server(a_broker) as server:
        yield server


@pytest.fixture
async def client(broker: Server) -> AsyncIterator[RoutingClient]:
    """Return a client of that name server."""
    async with a_server(OtherNames(broker.address)) as server:
        made = RoutingClient(ConnectionConfig([server.address]), serve=lambda _: None)
        yield made
        made.close()


def remembered_replicas(client: RoutingClient) -> int:
    return sum(map(len, client._addresses.values()))


async def test_name_server_with_other_brokers_in_each_list_does_not_fill_the_memory(
    client: RoutingClient, broker: Server
) -> None:
    await client.route("orders")
    for _ in range(ANSWERS):
        await client.brokers()
        assert remembered_replicas(client) <= MOST_REPLICAS
        assert len(client._brokers._missed) <= MOST_REPLICAS
    assert client.addresses(["real"]) == {broker.address}, "a route names it"
    assert (await client.ask("real", Frame(code=RequestCode.GET_BROKER_CONFIG))).fields == {"offset": "7"}


async def test_name_server_with_other_brokers_in_each_route_does_not_fill_the_memory(
    client: RoutingClient, broker: Server
) -> None:
    for number in range(ANSWERS):
        await client.route("orders")
        await client.ask("real", Frame(code=RequestCode.GET_BROKER_CONFIG))
        await client.route(f"topic-{number}")
        assert remembered_replicas(client) <= MOST_REPLICAS
        assert len(client.hosts) <= MOST_REPLICAS
    assert broker.connections == 1, "it was known all the time"
    assert len(client.connections._places) == 2


async def test_route_memory_does_not_grow_with_topics_that_are_asked_for_once(client: RoutingClient) -> None:
    topics = MOST_PLACES // BROKERS + 10
    for number in range(topics):
        await client.route(f"topic-{number}")
    assert client._routes.get(f"topic-{topics - 1}")
    assert len(client._routes.brokers) <= MOST_PLACES
    assert not client._routes.get("topic-0")


async def test_broker_that_no_route_names_is_forgotten_first_and_the_oldest_of_them_before_others() -> None:
    known = BrokerCache()
    known.learn({"routed": {0: NOWHERE}, "old": {0: NOWHERE}, "seen-again": {0: NOWHERE}})
    known.learn({f"broker-{number}": {0: NOWHERE} for number in range(MOST_REPLICAS - 2)})
    known.learn({"seen-again": {1: NOWHERE}})
    assert known.is_full
    known.trim({"routed"})
    assert not known.is_full
    assert {*known.addresses} >= {"routed", "seen-again", f"broker-{MOST_REPLICAS - 3}"}
    assert {*known.addresses}.isdisjoint({"old", "broker-0"})
    known.learn({"": {}})
    known.trim({*known.addresses} - {"routed"})
    assert "routed" not in known.addresses, "a broker without replicas takes memory, too"


def test_broker_with_other_replicas_in_each_answer_keeps_the_newest() -> None:
    known = BrokerCache()
    for number in range(1000):
        known.forget_missing({"a": {number: NOWHERE}}, 0.0)
        known.learn({"a": {number: NOWHERE, number + 1: NOWHERE}})
    assert [*known.addresses["a"]] == [*range(1001 - MOST_REPLICAS_OF_BROKER, 1001)]
    assert len(known._missed) <= MOST_REPLICAS_OF_BROKER


def test_route_memory_forgets_what_was_asked_for_longest_ago() -> None:
    routes = RouteCache()
    brokers = frozenset(map(str, range(MOST_PLACES // 4)))  # three routes fit
    for number, topic in enumerate("abcab"):
        routes.note_asked(topic, number)
        routes.learn(Route(topic, {}, brokers))
    routes.note_asked("d", 5.0)
    routes.learn(Route("d", {}, brokers))
    assert [bool(routes.get(topic)) for topic in "abcd"] == [True, True, False, True]
    assert (routes.asked_at("a"), routes.asked_at("c")) == (3.0, float("-inf"))
    routes.learn(Route("c", {}, brokers))
    assert routes.get("c") is None, "it was forgotten meanwhile, so nothing would forget it again"
    routes.forget("a")
    routes.forget("a")
    routes.note_asked("e", 6.0)
    routes.learn(Route("e", {}, brokers))
    assert [bool(routes.get(topic)) for topic in "abcde"] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("replicas", "told"),
    [
        ({"a" * (LONGEST_NAME + 1): {0: NOWHERE}}, r"A broker's name is longer than 255 characters"),
        ({"a": {0: "a" * (LONGEST_ADDRESS + 1)}}, r"A broker's address is longer than 300 characters"),
        ({"a": dict.fromkeys(range(65), NOWHERE)}, r"A broker has 65 replicas; 64 are the most"),
    ],
    ids=["name", "address", "replicas"],
)
async def test_route_and_broker_list_with_more_of_a_broker_than_possible_are_malformed(
    replicas: Replicas, told: str
) -> None:
    async with a_server(Names(replicas, {"orders": dict.fromkeys(replicas, 1)})) as server:
        client = RoutingClient(ConnectionConfig([server.address]), serve=lambda _: None)
        for asked in (client.route("orders"), client.brokers()):
            with pytest.raises(MalformedResponseError, match=f"^{told}$"):
                await asked
        client.close()


@pytest.mark.parametrize("say", ["remark", "fields"])
async def test_response_that_is_an_error_keeps_little_of_what_it_says(say: str) -> None:
    """Errors go into conditions, and stay there; the text of a frame may be as long as the frame."""
    long = "very long " * 2**17

    def answer(frame: Frame) -> bytes:
        if say == "fields":
            return an_answer(frame, other=long)
        return an_answer(frame, code=ResponseCode.NO_PERMISSION, remark=long)

    async with a_server(answer) as broker, a_server(Names({"a": {0: broker.address}})) as names:
        cluster = AdminClient(ConnectionConfig([names.address]))
        with pytest.raises(BrokerError, match="very long very long") as said:
            await cluster.committed("shop", Queue("orders", "a", 0))
        assert len(str(said.value)) < LONGEST_REASON + 100
        await cluster.close()


async def test_response_with_very_many_consumers_is_malformed() -> None:
    peers = {"connectionSet": [{"clientId": str(number)} for number in range(MOST_ONLINE + 1)]}

    async with (
        a_server(lambda frame: an_answer(frame, peers)) as broker,
        a_server(Names({"a": {0: broker.address}})) as names,
    ):
        cluster = AdminClient(ConnectionConfig([names.address]))
        with pytest.raises(MalformedResponseError, match=r"^a names 20,001 consumers of shop; 20,000 are the most$"):
            await cluster.clients("shop", "a")
        await cluster.close()


async def test_heartbeat_to_addresses_that_change_keeps_no_finished_tasks(broker: Server) -> None:
    async with a_server(Names({"a": {0: broker.address}}, {"orders": {"a": 1}})) as server:
        client = RoutingClient(ConnectionConfig([server.address]), serve=lambda _: None)
        presence = Heartbeat(client, Membership(group="shop", client_id="one", subscriptions=[]), [])
        for number in range(20):
            presence._greet(f"127.0.0.1:{number}", 0.0)
            await until(lambda: all(task.done() for task in presence._greetings.values()))
        assert len(presence._greetings) == 1
        client.close()
