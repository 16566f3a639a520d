"""Name servers: all ought to tell the same, and each may be gone, slow, just started, or something else altogether."""

import asyncio
from collections.abc import Collection, Sequence

from rota.brokers.errors import BrokerError, Refused, Unknown, Unreachable
from rota.brokers.rocketmq.remembered import Addresses, checked
from rota.brokers.rocketmq.transport.connection_pool import Connections
from rota.brokers.rocketmq.transport.responses import body, good, refusal, side_by_side
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import Answer
from rota.brokers.rocketmq.wire.frames import Frame

NEXT_SECONDS = 1.0  # a name server that says nothing for so long is not waited for alone

_TOLD = frozenset({Answer.SUCCESS, Answer.TOPIC_NOT_EXIST})
_NO_NAME_SERVER = frozenset({Answer.SYSTEM_ERROR, Answer.REQUEST_CODE_NOT_SUPPORTED})  # or one that is not ready


class NameServers:
    """Asks name servers."""

    def __init__(self, connections: Connections, addresses: Sequence[str]) -> None:
        """Ask the first one first, until another one answers."""
        if not addresses:
            raise ValueError("There is no name server; name at least one")
        self._connections = connections
        self.addresses = list(addresses)  # who answered last is the first

    async def brokers(self) -> Addresses:
        """Return all brokers."""
        return _brokers(await self._ask(requests.cluster()))

    async def route(self, topic: str, known: Collection[str]) -> payloads.TopicRoute:
        """Return where a topic is; `known` are the brokers that may have it."""
        answer = await self._ask(requests.route(topic))
        if answer.code == Answer.TOPIC_NOT_EXIST:
            answer = await self._elsewhere(topic, known)
        return body(good(f"The route of {topic}", answer), payloads.TopicRoute)

    async def _ask(self, request: Frame) -> Frame:
        """Ask the one that answered last, and the others in turn if it does not, or not soon."""
        left, failed = [*self.addresses], list[BrokerError]()
        asked: dict[asyncio.Task[Frame], str] = {}
        try:
            while left or asked:
                if left:
                    address = left.pop(0)
                    asked[asyncio.create_task(self._told(address, request))] = address
                patience = NEXT_SECONDS if left else None
                done, _ = await asyncio.wait(asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    address = asked.pop(task)
                    try:
                        answer = task.result()
                    except BrokerError as error:
                        failed.append(error)
                    else:
                        self._prefer(address)
                        return answer
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise _failure(failed)

    async def _told(self, address: str, request: Frame) -> Frame:
        answer = await self._connections.ask(address, request)
        if answer.code not in _TOLD:
            raise refusal(f"The name server {address}", answer)
        return answer

    def _prefer(self, address: str) -> None:
        self.addresses.remove(address)
        self.addresses.insert(0, address)

    async def _elsewhere(self, topic: str, known: Collection[str]) -> Frame:
        """Ask all of them for a topic that one does not know.

        That there is none is believed if one of them says so that knows every broker that anybody knows. One that has
        just started knows none, then some, and their topics with them.
        """
        found, _ = await side_by_side(self._all_and(address, topic) for address in self.addresses)
        everybody = {*known}.union(*(listed for listed, _ in found))
        for _, answer in found:
            if answer.code == Answer.SUCCESS:
                return answer
        if everybody and any(listed >= everybody for listed, _ in found):
            raise Unknown(f"There is no topic {topic}")
        raise Unreachable(f"No name server knows all brokers yet, so none can tell whether there is a topic {topic}")

    async def _all_and(self, address: str, topic: str) -> tuple[set[str], Frame]:
        """Ask one name server for all brokers, and only then for a topic: who registers in between brings it."""
        listed = _brokers(await self._told(address, requests.cluster()))
        return {*listed}, await self._told(address, requests.route(topic))


def _brokers(answer: Frame) -> Addresses:
    found = body(good("The list of brokers", answer), payloads.ClusterInfo).broker_addr_table
    return checked({name: broker.broker_addrs for name, broker in found.items()})


def _failure(failed: Sequence[BrokerError]) -> BrokerError:
    """Return what it means that none answered; one that lets us not in did."""
    said = (it for it in failed if isinstance(it, Refused) and it.code not in _NO_NAME_SERVER)
    return next(said, Unreachable(f"No name server answers: {'; '.join(map(str, failed))}"))
