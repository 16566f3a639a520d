"""Name server client with failover: a configured server may be down, slow, just started, or not a name server."""

import asyncio
from collections.abc import Collection, Sequence

from rota.brokers.errors import BrokerError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.rocketmq.metadata_cache import Addresses, check_addresses
from rota.brokers.rocketmq.transport.connection_pool import ConnectionPool
from rota.brokers.rocketmq.transport.responses import decode_body, error_of, gather_results, require_success
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame

FAILOVER_SECONDS = 1.0  # without a response for this time, also ask the next name server

_USABLE_CODES = frozenset({ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST})
# Rejections by a server that has just started, or that is no name server; they say nothing about the user's rights.
_NOT_READY_CODES = frozenset({ResponseCode.SYSTEM_ERROR, ResponseCode.REQUEST_CODE_NOT_SUPPORTED})


class NameServers:
    """The name servers of one cluster, which should all know the same; the last one that responded is preferred."""

    def __init__(self, connections: ConnectionPool, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError("No name server is configured; set at least one")
        self._connections = connections
        self.addresses = list(addresses)  # the last server that answered comes first

    async def fetch_brokers(self) -> Addresses:
        """Return all brokers."""
        return _parse_brokers(await self._call_any(requests.cluster_info()))

    async def fetch_route(self, topic: str, known_brokers: Collection[str]) -> payloads.TopicRoute:
        """Return the route of a topic; raise `NotFoundError` if it does not exist.

        `known_brokers` are the brokers that may have it: a server that does not list all of them proves nothing.
        """
        response = await self._call_any(requests.route(topic))
        if response.code == ResponseCode.TOPIC_NOT_EXIST:
            response = await self._find_topic(topic, known_brokers)
        return decode_body(require_success(f"The route of {topic}", response), payloads.TopicRoute)

    async def _call_any(self, request: Frame) -> Frame:
        """Ask the preferred server, then the next after a failure or FAILOVER_SECONDS; return the first response."""
        untried = [*self.addresses]
        failed: list[BrokerError] = []
        pending: dict[asyncio.Task[Frame], str] = {}
        try:
            while untried or pending:
                if untried:
                    address = untried.pop(0)
                    pending[asyncio.create_task(self._call_server(address, request))] = address
                timeout = FAILOVER_SECONDS if untried else None
                done, _ = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    address = pending.pop(task)
                    try:
                        response = task.result()
                    except BrokerError as error:
                        failed.append(error)
                    else:
                        self.addresses.remove(address)
                        self.addresses.insert(0, address)
                        return response
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        raise _choose_error(failed)

    async def _call_server(self, address: str, request: Frame) -> Frame:
        response = await self._connections.call(address, request)
        if response.code not in _USABLE_CODES:
            raise error_of(f"The name server {address}", response)
        return response

    async def _find_topic(self, topic: str, known_brokers: Collection[str]) -> Frame:
        """Ask all name servers for a topic that one of them does not know.

        Raise `NotFoundError` only if a server without the topic lists every broker of `known_brokers` and of the other
        servers' lists: a server that has just started lists no brokers at first, then some with their topics. Servers
        that do not respond are left out.
        """
        responses, _ = await gather_results(self._fetch_brokers_and_topic(address, topic) for address in self.addresses)
        all_brokers = set(known_brokers)
        for listed, response in responses:
            if response.code == ResponseCode.SUCCESS:
                return response
            all_brokers |= listed
        if all_brokers and any(listed >= all_brokers for listed, _ in responses):
            raise NotFoundError(f"There is no topic {topic}")
        raise UnreachableError(f"No name server lists all brokers yet, so it is unknown whether topic {topic} exists")

    async def _fetch_brokers_and_topic(self, address: str, topic: str) -> tuple[set[str], Frame]:
        """Ask one name server for its brokers, then for a topic: a broker that registers in between adds the topic."""
        listed = _parse_brokers(await self._call_server(address, requests.cluster_info()))
        return {*listed}, await self._call_server(address, requests.route(topic))


def _parse_brokers(response: Frame) -> Addresses:
    brokers = decode_body(require_success("The list of brokers", response), payloads.ClusterInfo).broker_addr_table
    return check_addresses({name: broker.broker_addrs for name, broker in brokers.items()})


def _choose_error(failed: Sequence[BrokerError]) -> BrokerError:
    """Return the error to raise: the first rejection about the user's rights, otherwise all servers' errors in one."""
    for error in failed:
        if isinstance(error, RejectedError) and error.code not in _NOT_READY_CODES:
            return error
    return UnreachableError(f"No name server responds: {'; '.join(map(str, failed))}")
