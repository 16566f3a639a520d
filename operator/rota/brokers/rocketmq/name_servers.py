"""Name server client with failover: any server may be down, slow, just started, or no name server at all."""

import asyncio
from collections.abc import Collection, Sequence

from rota.brokers.errors import BrokerError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.rocketmq.remembered import Addresses, checked
from rota.brokers.rocketmq.transport.connection_pool import Connections
from rota.brokers.rocketmq.transport.responses import body, error_of, gather_results, require_success
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame

NEXT_SECONDS = 1.0  # without an answer for so long, also ask the next name server

_TOLD = frozenset({ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST})
_NO_NAME_SERVER = frozenset({ResponseCode.SYSTEM_ERROR, ResponseCode.REQUEST_CODE_NOT_SUPPORTED})  # or it is not ready


class NameServers:
    """The name servers of one cluster, which should all give the same answers; the last that answered is preferred."""

    def __init__(self, connections: Connections, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError("There is no name server; name at least one")
        self._connections = connections
        self.addresses = list(addresses)  # the last server that answered comes first

    async def brokers(self) -> Addresses:
        """Return all brokers."""
        return _brokers(await self._ask(requests.cluster()))

    async def route(self, topic: str, brokers: Collection[str]) -> payloads.TopicRoute:
        """Return the route of a topic, which `brokers` may have; raise `NotFoundError` if it surely does not exist."""
        answer = await self._ask(requests.route(topic))
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            answer = await self._elsewhere(topic, brokers)
        return body(require_success(f"The route of {topic}", answer), payloads.TopicRoute)

    async def _ask(self, request: Frame) -> Frame:
        """Return the first answer: of the preferred server, or of the next ones if it fails or NEXT_SECONDS pass."""
        untried, failed = [*self.addresses], list[BrokerError]()
        pending: dict[asyncio.Task[Frame], str] = {}
        try:
            while untried or pending:
                if untried:
                    address = untried.pop(0)
                    pending[asyncio.create_task(self._told(address, request))] = address
                timeout = NEXT_SECONDS if untried else None
                done, _ = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    address = pending.pop(task)
                    try:
                        answer = task.result()
                    except BrokerError as error:
                        failed.append(error)
                    else:
                        self._prefer(address)
                        return answer
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        raise _failure(failed)

    async def _told(self, address: str, request: Frame) -> Frame:
        answer = await self._connections.ask(address, request)
        if answer.code not in _TOLD:
            raise error_of(f"The name server {address}", answer)
        return answer

    def _prefer(self, address: str) -> None:
        self.addresses.remove(address)
        self.addresses.insert(0, address)

    async def _elsewhere(self, topic: str, brokers: Collection[str]) -> Frame:
        """Ask all name servers for a topic that one of them does not know.

        Raise `NotFoundError` only if a server without the topic lists every broker that `brokers` or any server has. A
        server that has just started lists no brokers at first, then some, and their topics along with them.
        """
        answers, _ = await gather_results(self._all_and(address, topic) for address in self.addresses)
        all_brokers = {*brokers}.union(*(listed for listed, _ in answers))
        for _, answer in answers:
            if answer.code == ResponseCode.SUCCESS:
                return answer
        if all_brokers and any(listed >= all_brokers for listed, _ in answers):
            raise NotFoundError(f"There is no topic {topic}")
        raise UnreachableError(
            f"No name server knows all brokers yet, so none can tell whether there is a topic {topic}"
        )

    async def _all_and(self, address: str, topic: str) -> tuple[set[str], Frame]:
        """Ask one name server for its brokers, then for a topic: a broker that registers in between adds the topic."""
        listed = _brokers(await self._told(address, requests.cluster()))
        return {*listed}, await self._told(address, requests.route(topic))


def _brokers(answer: Frame) -> Addresses:
    brokers = body(require_success("The list of brokers", answer), payloads.ClusterInfo).broker_addr_table
    return checked({name: broker.broker_addrs for name, broker in brokers.items()})


def _failure(failed: Sequence[BrokerError]) -> BrokerError:
    """Return the error if no name server gave a usable answer: a rejection, such as denied access, comes first."""
    refusals = (error for error in failed if isinstance(error, RejectedError) and error.code not in _NO_NAME_SERVER)
    return next(refusals, UnreachableError(f"No name server answers: {'; '.join(map(str, failed))}"))
