"""RocketMQ client shared by operator and member: topic routes, and requests to brokers by broker name."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from rota.brokers.errors import BrokerError, MalformedResponseError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.rocketmq.name_servers import NameServers
from rota.brokers.rocketmq.remembered import (
    Addresses,
    BrokerCache,
    Route,
    RouteCache,
    check_name,
    checked,
)
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.connection import NotSentError, Serve
from rota.brokers.rocketmq.transport.connection_pool import CALL_SECONDS, Connections, Opened
from rota.brokers.rocketmq.transport.frame_budget import FrameBudget
from rota.brokers.rocketmq.transport.responses import gather_results, require_success
from rota.brokers.rocketmq.wire import payloads
from rota.brokers.rocketmq.wire.codes import MASTER, ONCE, READABLE, RequestCode
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.model import Queue

LOOK_SECONDS = 1.0  # interval between lookups of all brokers, however many calls fail
DOUBT_SECONDS = 3.0  # a route younger than this may prove that a queue does not exist
MOST_BROKERS = 1024  # brokers of one topic


@dataclass(frozen=True)
class ConnectionConfig:
    """Connection settings of a cluster: name servers, TLS, credentials, limits."""

    name_servers: Sequence[str]
    tls: Callable[[], ssl.SSLContext] | None = None  # called for each connection: CAs may be rotated
    credentials: Callable[[], Credentials] | None = None  # called for each request: they may be rotated
    policy: AddressPolicy | None = None  # restricts the addresses to connect to; None: all allowed
    frames: FrameBudget | None = None  # shared limit on large frames of all connections; None: no limit


class RoutingClient:
    """Client of a cluster's name servers and brokers.

    Answers of name servers are cached, so a name server that is down or does not list a live broker causes no failure.
    """

    def __init__(self, site: ConnectionConfig, serve: Serve, opened: Opened = lambda _, __: None) -> None:
        """Answer requests from brokers with `serve`; call `opened` for every new connection."""
        self.connections = Connections(
            serve,
            tls=site.tls,
            credentials=site.credentials,
            policy=site.policy,
            frames=site.frames,
            opened=opened,
        )
        self._names = NameServers(self.connections, site.name_servers)
        self._routes = RouteCache()
        self._brokers = BrokerCache()
        self._hosts: set[str] = set()  # brokers of the requested topics
        self._looking, self._doubting = asyncio.Lock(), asyncio.Lock()
        self._looked = -inf

    # Name servers.

    async def route(self, topic: str) -> Route:
        """Fetch and cache the route of a topic; raise `NotFoundError` if the topic does not exist."""
        cached = self._routes.get(topic)
        self._routes.note_asked(topic, _now())
        try:
            response = await self._names.route(topic, cached.brokers if cached else self._addresses)
        except NotFoundError:
            self._routes.forget(topic)
            raise
        route = _route(topic, response)
        self._routes.learn(route)
        self._hosts |= route.brokers
        self._learn({broker.broker_name: broker.broker_addrs for broker in response.broker_datas})
        return route

    @property
    def _addresses(self) -> Addresses:
        return self._brokers.addresses

    @property
    def hosts(self) -> Addresses:
        """Addresses of the brokers of all topics whose routes were requested."""
        return {name: self._addresses[name] for name in sorted(self._hosts)}

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return the known addresses of these brokers' replicas."""
        return frozenset(address for name in brokers for address in self._addresses.get(name, {}).values())

    async def brokers(self) -> Addresses:
        """Fetch and return all brokers; evict replicas that have not been listed for FORGET_SECONDS."""
        try:
            listed = await self._names.brokers()
        except BrokerError:
            self._brokers.mark_all_listed()
            raise
        if listed:  # an empty list: the name server has just started
            self._brokers.forget_missing(listed, _now())
        self._learn(listed)
        return listed

    def _learn(self, listed: Addresses) -> None:
        """Update the addresses of listed replicas; an unlisted replica keeps its last address.

        Connections to addresses that no replica has any more are closed: a broker does not return to an old address.
        """
        self._brokers.learn(listed)
        if self._brokers.is_full:
            self._brokers.trim(self._routes.brokers)
        self._hosts &= self._addresses.keys()
        self.connections.keep({*self.addresses(self._addresses), *self._names.addresses})

    async def _look(self) -> None:
        """Fetch all brokers, at most once in LOOK_SECONDS; concurrent callers wait for the same answer."""
        async with self._looking:
            if _now() - self._looked >= LOOK_SECONDS:
                try:
                    await self.brokers()
                finally:
                    self._looked = _now()

    # Brokers.

    async def address(self, broker: str) -> str:
        """Return the address of a broker's master; look up all brokers if it is not cached."""
        if MASTER not in self._addresses.get(broker, {}):
            await self._look()
        ids = self._addresses.get(broker)
        if not ids:
            raise UnreachableError(f"The name server knows of no broker {broker} at present")
        if MASTER not in ids:
            raise UnreachableError(f"The broker {broker} has no replica {MASTER} at present")
        return ids[MASTER]

    async def ask(self, broker: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Send a request to a broker's master; return the answer, also one with an error code.

        If the master is unreachable, its pod may have moved: look up its address and retry at a new one. Requests in
        ONCE are retried only if the first attempt was not sent.
        """
        address = await self.address(broker)
        try:
            return await self.connections.ask(address, request, seconds)
        except UnreachableError as error:
            with suppress(BrokerError, TimeoutError):
                async with asyncio.timeout(min(seconds, CALL_SECONDS)):
                    await self._look()
            moved = self._addresses.get(broker, {}).get(MASTER, address)
            if moved == address or not (isinstance(error, NotSentError) or request.code not in ONCE):
                raise
        return await self.connections.ask(moved, request, seconds)

    async def get(self, broker: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Send a request to a broker's master; return the answer, or raise unless it is SUCCESS."""
        return require_success(f"{_spelled(request)} at {broker}", await self.ask(broker, request, seconds))

    async def need(self, queue: Queue) -> None:
        """Raise `NotFoundError` for a queue outside its topic's route: brokers return offsets even for such queues."""
        route = self._routes.get(queue.topic)
        if route is None or queue not in route:
            route = await self.route(queue.topic)
        if queue.broker not in route.brokers:  # broker and queues are temporarily missing from the route
            raise UnreachableError(f"The name server knows of no broker {queue.broker} at present")
        if queue not in route:
            raise NotFoundError(f"There is no queue {queue}")

    async def doubt(self, queue: Queue) -> None:
        """Recheck a queue with a route not older than DOUBT_SECONDS: the queue may have been deleted meanwhile.

        Raise `NotFoundError` only if the route contains the queue's broker. An unreachable name server proves nothing.
        """
        async with self._doubting:
            if _now() - self._routes.asked_at(queue.topic) >= DOUBT_SECONDS:
                with suppress(UnreachableError):
                    await self.route(queue.topic)
        route = self._routes.get(queue.topic) or await self.route(queue.topic)
        if queue.broker in route.brokers and queue not in route:
            raise NotFoundError(f"There is no queue {queue}")

    async def refresh(self, topics: Iterable[str]) -> None:
        """Fetch the routes of topics and all brokers again; a failed request leaves its cached data unchanged."""
        await gather_results([*map(self.route, topics), self.brokers()])

    def reconnect(self) -> None:
        """Use new connections from now on; present ones end when their pending requests do."""
        self.connections.renew()

    def close(self) -> None:
        """Close all connections."""
        self.connections.close()


def _spelled(request: Frame) -> str:
    """Return a readable name of a request with its topic and group, for error messages."""
    names = (request.fields.get(name) for name in ("topic", "consumerGroup", "group"))
    subject = " ".join(name for name in names if name)
    return " of ".join(filter(None, (RequestCode(request.code).name, subject)))


def _route(topic: str, response: payloads.TopicRoute) -> Route:
    if response.is_static:
        raise RejectedError(
            f"The topic {topic} is a static one, its queues move between brokers; Rota cannot read those"
        )
    readable = [data for data in response.queue_datas if data.perm & READABLE and data.read_queue_nums > 0]
    if (brokers := max(len(readable), len(response.broker_datas))) > MOST_BROKERS:
        raise MalformedResponseError(f"The route of {topic} names {brokers:,} brokers; {MOST_BROKERS:,} are the most")
    addresses = checked({broker.broker_name: broker.broker_addrs for broker in response.broker_datas})
    names = Counter(data.broker_name for data in readable)
    for name in names:
        check_name(name)
    if duplicates := [name for name, times in names.items() if times > 1]:
        raise MalformedResponseError(f"The route of {topic} names the broker {duplicates[0]} twice")
    counts = {data.broker_name: data.read_queue_nums for data in readable}
    return Route(topic, counts, frozenset(addresses))


def _now() -> float:
    return asyncio.get_running_loop().time()
