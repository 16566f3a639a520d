"""What operator and member share: routes, and asking a broker by its name."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from rota.brokers.errors import BrokerError, Garbled, Refused, Unknown, Unreachable
from rota.brokers.rocketmq.name_servers import NameServers
from rota.brokers.rocketmq.remembered import (
    Addresses,
    RememberedBrokers,
    RememberedRoutes,
    Route,
    check_name,
    checked,
)
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.connection import Serve, Unasked
from rota.brokers.rocketmq.transport.connection_pool import CALL_SECONDS, Connections, Opened
from rota.brokers.rocketmq.transport.frame_budget import FrameBudget
from rota.brokers.rocketmq.transport.responses import good, side_by_side
from rota.brokers.rocketmq.wire import payloads
from rota.brokers.rocketmq.wire.codes import MASTER, ONCE, READABLE, Request
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.model import Queue

LOOK_SECONDS = 1.0  # so often brokers are looked up, however many calls fail
DOUBT_SECONDS = 3.0  # how old a route may be that is held against a broker
MOST_BROKERS = 1024  # of a topic


@dataclass(frozen=True)
class Site:
    """Where a cluster is, and how to be let in."""

    name_servers: Sequence[str]
    tls: Callable[[], ssl.SSLContext] | None = None  # called for each connection: authorities may be replaced
    credentials: Callable[[], Credentials] | None = None  # called for each request: they may be renewed
    policy: AddressPolicy | None = None  # which addresses may be connected to; None: all
    frames: FrameBudget | None = None  # for large frames of all connections of the process; None: no limit


class Client:
    """Asks name servers and brokers.

    What name servers told is remembered: one that is gone, or has lost sight of a broker that is there, harms nobody.
    """

    def __init__(self, site: Site, serve: Serve, opened: Opened = lambda _, __: None) -> None:
        """Answer what brokers ask by `serve`; `opened` is told of every connection."""
        self.connections = Connections(
            serve,
            tls=site.tls,
            credentials=site.credentials,
            policy=site.policy,
            frames=site.frames,
            opened=opened,
        )
        self._names = NameServers(self.connections, site.name_servers)
        self._routes = RememberedRoutes()
        self._brokers = RememberedBrokers()
        self._hosts: set[str] = set()  # the brokers of our topics
        self._looking, self._doubting = asyncio.Lock(), asyncio.Lock()
        self._looked = -inf

    # Name servers.

    async def route(self, topic: str) -> Route:
        """Ask where a topic is."""
        before = self._routes.get(topic)
        self._routes.note_asked(topic, _now())
        try:
            told = await self._names.route(topic, before.brokers if before else self._addresses)
        except Unknown:
            self._routes.forget(topic)
            raise
        route = _route(topic, told)
        self._routes.learn(route)
        self._hosts |= route.brokers
        self._learn({broker.broker_name: broker.broker_addrs for broker in told.broker_datas})
        return route

    @property
    def _addresses(self) -> Addresses:
        return self._brokers.addresses

    @property
    def hosts(self) -> Addresses:
        """The brokers of the topics that were asked for."""
        return {name: self._addresses[name] for name in sorted(self._hosts)}

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return the known addresses of these brokers' replicas."""
        return frozenset(address for name in brokers for address in self._addresses.get(name, {}).values())

    async def brokers(self) -> Addresses:
        """Return all brokers; who has not been among them for long is forgotten."""
        try:
            found = await self._names.brokers()
        except BrokerError:
            self._brokers.believe_all()
            raise
        if found:  # or the name server has just started
            self._brokers.forget_missing(found, _now())
        self._learn(found)
        return found

    def _learn(self, found: Addresses) -> None:
        """Remember replicas where they are now; one that is not told of is still where it was.

        Connections to other addresses are closed: a broker that moved left its old one for ever.
        """
        self._brokers.learn(found)
        if self._brokers.is_full:
            self._brokers.trim(self._routes.brokers)
        self._hosts &= self._addresses.keys()
        self.connections.keep({*self.addresses(self._addresses), *self._names.addresses})

    async def _look(self) -> None:
        """Ask for all brokers, once a second at most; who comes meanwhile waits for the same answer."""
        async with self._looking:
            if _now() - self._looked >= LOOK_SECONDS:
                try:
                    await self.brokers()
                finally:
                    self._looked = _now()

    # Brokers.

    async def address(self, broker: str) -> str:
        """Return the address of a broker's master; one that no route names is looked for among all."""
        if MASTER not in self._addresses.get(broker, {}):
            await self._look()
        ids = self._addresses.get(broker)
        if not ids:
            raise Unreachable(f"The name server knows of no broker {broker} at present")
        if MASTER not in ids:
            raise Unreachable(f"The broker {broker} has no replica {MASTER} at present")
        return ids[MASTER]

    async def ask(self, broker: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Ask a broker's master, and return the answer, whatever it says.

        One that cannot be asked is looked up, for its pod may have been moved, and asked there; not if it may have
        done what must be done once.
        """
        address = await self.address(broker)
        try:
            return await self.connections.ask(address, request, seconds)
        except Unreachable as error:
            with suppress(BrokerError, TimeoutError):
                async with asyncio.timeout(min(seconds, CALL_SECONDS)):
                    await self._look()
            moved = self._addresses.get(broker, {}).get(MASTER, address)
            if moved == address or not (isinstance(error, Unasked) or request.code not in ONCE):
                raise
        return await self.connections.ask(moved, request, seconds)

    async def get(self, broker: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Ask a broker's master, and return its answer if that is SUCCESS."""
        return good(f"{_spelled(request)} at {broker}", await self.ask(broker, request, seconds))

    async def need(self, queue: Queue) -> None:
        """Make sure that there is such a queue: brokers tell offsets of queues that there are not."""
        route = self._routes.get(queue.topic)
        if route is None or queue not in route:
            route = await self.route(queue.topic)
        if queue.broker not in route.brokers:  # it is away, and its queues with it
            raise Unreachable(f"The name server knows of no broker {queue.broker} at present")
        if queue not in route:
            raise Unknown(f"There is no queue {queue}")

    async def doubt(self, queue: Queue) -> None:
        """Look again whether there is such a queue, if that is a while ago: it may have been deleted since.

        Only a name server that knows its broker is believed; one that cannot be asked says nothing against it.
        """
        async with self._doubting:
            if _now() - self._routes.asked_at(queue.topic) >= DOUBT_SECONDS:
                with suppress(Unreachable):
                    await self.route(queue.topic)
        route = self._routes.get(queue.topic) or await self.route(queue.topic)
        if queue.broker in route.brokers and queue not in route:
            raise Unknown(f"There is no queue {queue}")

    async def refresh(self, topics: Iterable[str]) -> None:
        """Ask for all routes and brokers again; what is not told stays as it was."""
        await side_by_side([*map(self.route, topics), self.brokers()])

    def close(self) -> None:
        """Close all connections."""
        self.connections.close()


def _spelled(request: Frame) -> str:
    """Say what is asked, and of what, for people."""
    names = (request.fields.get(name) for name in ("topic", "consumerGroup", "group"))
    subject = " ".join(name for name in names if name)
    return " of ".join(filter(None, (Request(request.code).name, subject)))


def _route(topic: str, found: payloads.TopicRoute) -> Route:
    if found.is_static:
        raise Refused(f"The topic {topic} is a static one, its queues move between brokers; Rota cannot read those")
    readable = [data for data in found.queue_datas if data.perm & READABLE and data.read_queue_nums > 0]
    if (brokers := max(len(readable), len(found.broker_datas))) > MOST_BROKERS:
        raise Garbled(f"The route of {topic} names {brokers:,} brokers; {MOST_BROKERS:,} are the most")
    addresses = checked({broker.broker_name: broker.broker_addrs for broker in found.broker_datas})
    names = Counter(data.broker_name for data in readable)
    for name in names:
        check_name(name)
    if twice := [name for name, times in names.items() if times > 1]:
        raise Garbled(f"The route of {topic} names the broker {twice[0]} twice")
    counts = {data.broker_name: data.read_queue_nums for data in readable}
    return Route(topic, counts, frozenset(addresses))


def _now() -> float:
    return asyncio.get_running_loop().time()
