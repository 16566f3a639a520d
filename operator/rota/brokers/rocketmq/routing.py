"""RocketMQ client shared by operator and member: topic routes, and requests to brokers by broker name."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from rota.brokers.errors import BrokerError, MalformedResponseError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.rocketmq.metadata_cache import (
    Addresses,
    BrokerCache,
    Route,
    RouteCache,
    check_addresses,
    check_broker_name,
)
from rota.brokers.rocketmq.name_servers import NameServers
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.connection import NotSentError, RequestHandler
from rota.brokers.rocketmq.transport.connection_pool import CALL_SECONDS, ConnectedCallback, ConnectionPool
from rota.brokers.rocketmq.transport.frame_budget import FrameBudget
from rota.brokers.rocketmq.transport.responses import gather_results, require_success
from rota.brokers.rocketmq.wire import payloads
from rota.brokers.rocketmq.wire.codes import MASTER_ID, NOT_IDEMPOTENT, RequestCode
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.model import Queue

LOOKUP_INTERVAL_SECONDS = 1.0  # minimum time between lookups of all brokers, however many calls fail
ROUTE_TRUST_SECONDS = 3.0  # a route younger than this may prove that a queue does not exist
MAX_TOPIC_BROKERS = 1024  # brokers of one topic


@dataclass(frozen=True)
class ConnectionConfig:
    """Connection settings of a cluster: name servers, TLS, credentials, limits."""

    name_servers: Sequence[str]
    tls: Callable[[], ssl.SSLContext] | None = None  # called for each connection: CAs may be rotated
    credentials: Callable[[], Credentials] | None = None  # called for each request: they may be rotated
    address_policy: AddressPolicy | None = None  # restricts the addresses to connect to; None: all allowed
    frame_budget: FrameBudget | None = None  # shared limit on large frames of all connections; None: no limit


class RoutingClient:
    """Client of a cluster's name servers and brokers.

    Name servers' responses are cached, so a name server that is down or does not list a live broker causes no failure.
    """

    def __init__(
        self,
        config: ConnectionConfig,
        handle_request: RequestHandler,
        on_connected: ConnectedCallback = lambda _, __: None,
    ) -> None:
        """Answer requests from brokers with `handle_request`; call `on_connected` for every new connection."""
        self.connections = ConnectionPool(
            handle_request,
            tls=config.tls,
            credentials=config.credentials,
            address_policy=config.address_policy,
            frame_budget=config.frame_budget,
            on_connected=on_connected,
        )
        self._name_servers = NameServers(self.connections, config.name_servers)
        self._routes = RouteCache()
        self._brokers = BrokerCache()
        self._topic_brokers: set[str] = set()  # brokers of the requested topics
        self._lookup_lock = asyncio.Lock()
        self._recheck_lock = asyncio.Lock()
        self._last_lookup_at = -inf

    # Name servers.

    async def fetch_route(self, topic: str) -> Route:
        """Fetch and cache the route of a topic; raise `NotFoundError` if the topic does not exist."""
        cached = self._routes.get(topic)
        self._routes.mark_requested(topic, _loop_time())
        # A name server that does not list all brokers that may have the topic does not prove that it is missing: the
        # server may have just started. Without a cached route, the topic may be on any broker.
        possible_brokers = cached.brokers if cached else self._brokers.addresses
        try:
            response = await self._name_servers.fetch_route(topic, possible_brokers)
        except NotFoundError:
            self._routes.forget(topic)
            raise
        route = _parse_route(topic, response)
        self._routes.learn(route)
        self._topic_brokers |= route.brokers
        self._update_addresses(response.addresses)  # `_parse_route` has checked them
        return route

    @property
    def topic_brokers(self) -> list[str]:
        """The brokers of all topics whose routes were requested."""
        return sorted(self._topic_brokers)

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return the known addresses of these brokers' replicas."""
        addresses: set[str] = set()
        for name in brokers:
            addresses.update(self._brokers.addresses.get(name, {}).values())
        return frozenset(addresses)

    async def fetch_brokers(self) -> Addresses:
        """Fetch and return all brokers; evict replicas that have been unlisted for too long (`metadata_cache`)."""
        try:
            listed = await self._name_servers.fetch_brokers()
        except BrokerError:
            self._brokers.mark_all_listed()  # a failed lookup must not count as "unlisted"
            raise
        if listed:  # a name server that has just started lists no broker
            self._brokers.forget_missing(listed, _loop_time())
        self._update_addresses(listed)
        return listed

    def _update_addresses(self, listed: Addresses) -> None:
        """Update the addresses of listed replicas; an unlisted replica keeps its last address.

        Connections to addresses that no replica has any more are closed: a broker does not return to an old address.
        """
        self._brokers.learn(listed)
        if self._brokers.exceeds_limit:
            self._brokers.trim(self._routes.brokers)
        self._topic_brokers &= self._brokers.addresses.keys()
        self.connections.close_others({*self.addresses(self._brokers.addresses), *self._name_servers.addresses})

    async def _look_up_brokers(self) -> None:
        """Fetch all brokers, at most once in LOOKUP_INTERVAL_SECONDS; concurrent callers wait for the same response."""
        async with self._lookup_lock:
            if _loop_time() - self._last_lookup_at >= LOOKUP_INTERVAL_SECONDS:
                try:
                    await self.fetch_brokers()
                finally:
                    self._last_lookup_at = _loop_time()

    # Brokers.

    async def master_address(self, broker: str) -> str:
        """Return the address of a broker's master; look up all brokers if it is not cached."""
        if MASTER_ID not in self._brokers.addresses.get(broker, {}):
            await self._look_up_brokers()
        replicas = self._brokers.addresses.get(broker)
        if not replicas:
            raise UnreachableError(f"No name server lists broker {broker} at the moment")
        if MASTER_ID not in replicas:
            raise UnreachableError(f"Broker {broker} has no master (replica {MASTER_ID}) at the moment")
        return replicas[MASTER_ID]

    async def call(self, broker: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Send a request to a broker's master; return the response, also one with an error code.

        If the master is unreachable, its pod may have moved: look up its address and retry at a new one. Requests in
        NOT_IDEMPOTENT are retried only if the first attempt was not sent.
        """
        address = await self.master_address(broker)
        try:
            return await self.connections.call(address, request, seconds)
        except UnreachableError as error:
            with suppress(BrokerError, TimeoutError):
                async with asyncio.timeout(min(seconds, CALL_SECONDS)):
                    await self._look_up_brokers()
            new_address = self._brokers.addresses.get(broker, {}).get(MASTER_ID, address)
            may_retry = isinstance(error, NotSentError) or request.code not in NOT_IDEMPOTENT
            if new_address == address or not may_retry:
                raise
        return await self.connections.call(new_address, request, seconds)

    async def call_or_raise(self, broker: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Send a request to a broker's master; return the response, or raise unless it is SUCCESS."""
        return require_success(f"{_describe_request(request)} at {broker}", await self.call(broker, request, seconds))

    async def require_queue(self, queue: Queue) -> None:
        """Raise `NotFoundError` for a queue outside its topic's route: brokers return offsets even for such queues.

        A cached route that has the queue is trusted, however old it is; `recheck_queue` fetches such a route again.
        While the route lacks the queue's broker, raise `UnreachableError`.
        """
        route = self._routes.get(queue.topic)
        if route is None or queue not in route:
            route = await self.fetch_route(queue.topic)
        if queue.broker not in route.brokers:  # broker and queues are temporarily missing from the route
            raise UnreachableError(f"No name server lists broker {queue.broker} at the moment")
        if queue not in route:
            raise NotFoundError(f"There is no queue {queue}")

    async def recheck_queue(self, queue: Queue) -> None:
        """Raise `NotFoundError` if the topic is gone, or its route has the queue's broker but not the queue.

        Fetch the route again unless that was tried in the last ROUTE_TRUST_SECONDS; a failed request is not repeated
        sooner. If no name server answers, the cached route decides; without one, raise `UnreachableError`.
        """
        async with self._recheck_lock:
            if _loop_time() - self._routes.requested_at(queue.topic) >= ROUTE_TRUST_SECONDS:
                with suppress(UnreachableError):
                    await self.fetch_route(queue.topic)
        route = self._routes.get(queue.topic) or await self.fetch_route(queue.topic)
        if queue.broker in route.brokers and queue not in route:
            raise NotFoundError(f"There is no queue {queue}")

    async def refresh(self, topics: Iterable[str]) -> None:
        """Fetch the routes of topics and all brokers again; a request that fails with a BrokerError is left out."""
        await gather_results([*map(self.fetch_route, topics), self.fetch_brokers()])

    def close(self) -> None:
        """Close all connections."""
        self.connections.close()


def _describe_request(request: Frame) -> str:
    """Return a readable name of a request with its topic and group, for error messages."""
    name = RequestCode(request.code).name
    subject = " ".join(filter(None, map(request.fields.get, ("topic", "consumerGroup", "group"))))
    return f"{name} of {subject}" if subject else name


def _parse_route(topic: str, response: payloads.TopicRoute) -> Route:
    if response.is_static:
        raise RejectedError(
            f"Topic {topic} is a static topic (its queues are mapped to brokers one by one); "
            "Rota does not support static topics"
        )
    readable = [data for data in response.queue_datas if data.is_readable]
    count = max(len(readable), len(response.broker_datas))
    if count > MAX_TOPIC_BROKERS:
        problem = f"The route of topic {topic} names {count:,} brokers; at most {MAX_TOPIC_BROKERS:,} are supported"
        raise MalformedResponseError(problem)
    addresses = check_addresses(response.addresses)
    queue_counts = {data.broker_name: data.read_queue_nums for data in readable}
    for name in queue_counts:
        check_broker_name(name)
    for name, times in Counter(data.broker_name for data in readable).items():
        if times > 1:
            raise MalformedResponseError(f"The route of topic {topic} lists broker {name} twice")
    return Route(topic, queue_counts, frozenset(addresses))


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
