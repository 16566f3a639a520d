"""What operator and member share: name servers, routes, and asking a broker by its name."""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from rota.brokers import BrokerError, Garbled, Refused, SwitchedOff, Unknown, Unreachable
from rota.brokers.rocketmq import bodies, fastjson, requests
from rota.brokers.rocketmq.acl import Credentials
from rota.brokers.rocketmq.codes import MASTER, READABLE, Answer, Request
from rota.brokers.rocketmq.connection import Serve
from rota.brokers.rocketmq.connections import CALL_SECONDS, Connections
from rota.brokers.rocketmq.frames import Frame, Malformed
from rota.model import Queue

T = TypeVar("T")

LOOK_SECONDS = 1.0

_NOTHING_KNOWN = frozenset({Answer.SYSTEM_BUSY, Answer.SERVICE_NOT_AVAILABLE, Answer.FLOW_CONTROL, Answer.GO_AWAY})
_NOT_THERE = frozenset({Answer.TOPIC_NOT_EXIST, Answer.SUBSCRIPTION_GROUP_NOT_EXIST})


@dataclass(frozen=True)
class Site:
    """Where a cluster is, and how to be let in."""

    name_servers: Sequence[str]
    tls: ssl.SSLContext | None = None
    credentials: Credentials | None = None


@dataclass(frozen=True)
class Route:
    """Where a topic is: its queues that can be read, and the addresses of its brokers by name and id."""

    queues: tuple[Queue, ...]
    addresses: dict[str, dict[int, str]]


def refusal(asked: str, answer: Frame) -> BrokerError:
    """Return what an answer other than SUCCESS means."""
    said = f"{asked}: {answer.remark.strip() or 'no reason given'} (code {answer.code})"
    if answer.code in _NOTHING_KNOWN:
        return Unreachable(said)
    if answer.code in _NOT_THERE:
        return Unknown(said)
    return SwitchedOff(said, answer.code) if "forbiddenType" in answer.fields else Refused(said, answer.code)


def body(answer: Frame, kind: type[T]) -> T:
    """Read an answer's body."""
    try:
        return fastjson.read(answer.body, kind)
    except Malformed as error:
        raise Garbled(f"An answer cannot be read: {error}") from None


def number(answer: Frame, field: str) -> int:
    """Read a number from an answer."""
    try:
        return int(answer.fields[field])
    except (KeyError, ValueError):
        raise Garbled(f"An answer has no number in {field!r}: {dict(answer.fields)}") from None


class Client:
    """Asks name servers and brokers.

    What name servers told is remembered: one that is gone, or has lost sight of a broker that is there, harms nobody.
    """

    def __init__(self, site: Site, serve: Serve, opened: Callable[[str], None] = lambda _: None) -> None:
        """Answer what brokers ask by `serve`; `opened` is told of every address that is connected anew."""
        if not site.name_servers:
            raise ValueError("There is no name server; name at least one")
        self.connections = Connections(serve, tls=site.tls, credentials=site.credentials, opened=opened)
        self._name_servers = list(site.name_servers)
        self._routes: dict[str, Route] = {}
        self._addresses: dict[str, dict[int, str]] = {}  # of brokers, by name and id; the last that was heard of
        self._hosts: set[str] = set()  # the brokers of our topics
        self._looked: dict[str, float] = {}  # when a broker's address was last looked up because of a failure

    # Name servers.

    async def ask_name_server(self, request: Frame) -> Frame:
        """Ask the name server that answered last, and the others in turn if it does not."""
        failures = []
        for address in tuple(self._name_servers):
            try:
                answer = await self.connections.ask(address, request)
            except Unreachable as error:
                failures.append(str(error))
            else:
                if answer.code not in _NOTHING_KNOWN and answer.code != Answer.SYSTEM_ERROR:
                    self._prefer(address)
                    return answer
                failures.append(str(refusal(f"The name server {address}", answer)))
        raise Unreachable(f"No name server answers: {'; '.join(failures)}")

    def _prefer(self, address: str) -> None:
        self._name_servers.remove(address)
        self._name_servers.insert(0, address)

    async def route(self, topic: str) -> Route:
        """Ask where a topic is."""
        answer = await self.ask_name_server(requests.route(topic))
        if answer.code == Answer.TOPIC_NOT_EXIST:
            if not await self.brokers():  # it has just started, and would say so of every topic
                raise Unreachable("The name server knows of no broker yet")
            answer = await self.ask_name_server(requests.route(topic))  # a broker may have come in between
        if answer.code == Answer.TOPIC_NOT_EXIST:
            self._routes.pop(topic, None)
            raise Unknown(f"There is no topic {topic}")
        self._routes[topic] = route = _route(topic, body(_good(f"The route of {topic}", answer), bodies.TopicRoute))
        self._addresses |= route.addresses
        self._hosts |= route.addresses.keys()
        return route

    @property
    def hosts(self) -> dict[str, dict[int, str]]:
        """The brokers of the topics that were asked for: their addresses by id."""
        return {name: self._addresses[name] for name in sorted(self._hosts)}

    async def brokers(self) -> dict[str, dict[int, str]]:
        """Return all brokers: their addresses by name and id."""
        answer = _good("The list of brokers", await self.ask_name_server(requests.cluster()))
        found = body(answer, bodies.ClusterInfo).broker_addr_table
        return {name: broker.broker_addrs for name, broker in found.items()}

    # Brokers.

    async def address(self, broker: str) -> str:
        """Return the address of a broker's master; one that no route names is looked for among all."""
        if broker not in self._addresses:
            self._addresses |= await self.brokers()
        ids = self._addresses.get(broker)
        if not ids:
            raise Unreachable(f"The name server knows of no broker {broker} at present")
        if MASTER not in ids:
            raise Unreachable(f"The broker {broker} has no replica {MASTER} at present")
        return ids[MASTER]

    async def ask(self, broker: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Ask a broker's master, and return the answer, whatever it says."""
        address = await self.address(broker)
        try:
            return await self.connections.ask(address, request, seconds)
        except Unreachable:
            moved = await self._moved(broker)
            if moved in {None, address}:
                raise
        return await self.connections.ask(str(moved), request, seconds)

    async def _moved(self, broker: str) -> str | None:
        """Look up, once a second at most, where a broker is that cannot be reached: its pod may have been moved."""
        now = asyncio.get_running_loop().time()
        if now - self._looked.get(broker, -LOOK_SECONDS) >= LOOK_SECONDS:
            self._looked[broker] = now
            with suppress(BrokerError):
                self._addresses |= await self.brokers()
        return self._addresses.get(broker, {}).get(MASTER)

    async def get(self, broker: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Ask a broker's master, and return its answer if that is SUCCESS."""
        answer = await self.ask(broker, request, seconds)
        if answer.code != Answer.SUCCESS:
            raise refusal(f"{_spelled(request)} at {broker}", answer)
        return answer

    async def need(self, queue: Queue) -> None:
        """Make sure that there is such a queue: brokers tell offsets of queues that there are not."""
        route = self._routes.get(queue.topic)
        if route is None or queue not in route.queues:
            route = await self.route(queue.topic)
        if queue.broker not in route.addresses:  # it is away, and its queues with it
            raise Unreachable(f"The name server knows of no broker {queue.broker} at present")
        if queue not in route.queues:
            raise Unknown(f"There is no queue {queue}")

    async def refresh(self, topics: Iterable[str]) -> None:
        """Ask for all routes again, and close connections to addresses that no route names any more."""
        found = await asyncio.gather(*map(self.route, topics), return_exceptions=True)
        errors = [error for error in found if isinstance(error, BaseException) and not isinstance(error, BrokerError)]
        if errors:
            raise errors[0]
        known = {address for ids in self._addresses.values() for address in ids.values()}
        self.connections.keep({*known, *self._name_servers})

    def close(self) -> None:
        """Close all connections."""
        self.connections.close()


def _spelled(request: Frame) -> str:
    """Say what is asked, and of what, for people."""
    names = (request.fields.get(name) for name in ("topic", "consumerGroup", "group"))
    subject = " ".join(name for name in names if name)
    return " of ".join(filter(None, (Request(request.code).name, subject)))


def _good(asked: str, answer: Frame) -> Frame:
    if answer.code != Answer.SUCCESS:
        raise refusal(asked, answer)
    return answer


def _route(topic: str, found: bodies.TopicRoute) -> Route:
    if found.topic_queue_mapping_by_broker:
        raise Refused(f"The topic {topic} is a static one, its queues move between brokers; Rota cannot read those")
    queues = (
        Queue(topic, data.broker_name, number)
        for data in found.queue_datas
        if data.perm & READABLE
        for number in range(data.read_queue_nums)
    )
    return Route(tuple(sorted(queues)), {broker.broker_name: broker.broker_addrs for broker in found.broker_datas})
