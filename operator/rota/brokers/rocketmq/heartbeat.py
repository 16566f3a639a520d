"""Being known to brokers: signs of life, by each connection, from joining to leaving."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from rota.brokers.errors import BrokerError, Unreachable
from rota.brokers.port import Membership
from rota.brokers.rocketmq.routing import Client
from rota.brokers.rocketmq.transport.responses import good, side_by_side
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import Request
from rota.brokers.rocketmq.wire.frames import Frame

HEARTBEAT_SECONDS = 30.0
AGAIN_SECONDS = 5.0  # until a broker that did not take a sign of life is given another one

_log = logging.getLogger(__name__)


class Presence:
    """A member's presence at all brokers of its topics: it is new, has joined, or has left."""

    def __init__(self, client: Client, member: Membership, subscriptions: Sequence[payloads.SubscriptionData]) -> None:
        """Do nothing until `join`."""
        self._client, self._member, self._subscriptions = client, member, subscriptions
        self._joined = self._left = False
        self._rounds: asyncio.Task[None] | None = None
        self._greetings: dict[str, asyncio.Task[None]] = {}  # by address: between rounds, to who does not know us yet

    async def join(self) -> None:
        """Become known to every broker of the topics, and stay so; one that cannot be reached is told later."""
        if self._joined or self._left:
            done = "has left" if self._left else "has joined"
            raise RuntimeError(f"{self._member.client_id} {done} {self._member.group} already; a member joins once")
        self._joined = True
        try:
            await self.look()
            await self._beat(self._addresses())
            await self._make_sure()
            self._stay()
        except BaseException:
            self._joined = False
            self._cancel()
            raise
        self._rounds = asyncio.create_task(self._keep_beating())

    async def leave(self) -> None:
        """Tell the brokers that the member goes, and close all connections, whatever comes in between."""
        if self._left:
            return
        self._left = True
        try:
            if ending := self._cancel():
                await asyncio.wait(ending)
            goodbye = requests.unregister(self._member.client_id, self._member.group)
            await asyncio.gather(*(self._tell(address, goodbye) for address in self._addresses()))
        finally:
            self._client.close()

    async def look(self) -> None:
        """Ask for the routes; a topic that is not there yet is found later, but some must be."""
        self._stay()
        topics = [it.topic for it in self._subscriptions]
        await self._client.refresh(topics)
        if not self._client.hosts:
            await self._client.route(topics[0])  # says why
        self._stay()

    def opened(self, address: str, request: Frame) -> None:
        """Make ourselves known by a new connection at once, if that is not what it was opened for.

        Until then its broker takes us for gone.
        """
        here = self._joined and not self._left
        if here and request.code != Request.HEART_BEAT and address in self._addresses():
            self._greet(address, 0)

    def _stay(self) -> None:
        if self._left:
            raise Unreachable(f"{self._member.client_id} has left {self._member.group}")

    def _cancel(self) -> list[asyncio.Task[None]]:
        """End all that goes on by itself."""
        going = [*self._greetings.values(), *([self._rounds] if self._rounds else [])]
        self._rounds, self._greetings = None, {}
        for task in going:
            task.cancel()
        return going

    async def _make_sure(self) -> None:
        """Ask each broker for the group: one that makes none by itself takes signs of life, and forgets them."""
        asked = requests.group_config(self._member.group)
        _, failed = await side_by_side(self._client.get(broker, asked) for broker in self._client.hosts)
        for error in failed:
            if not isinstance(error, Unreachable):
                raise error

    async def _keep_beating(self) -> None:
        """Go round when it is time, whatever happens in between; what goes wrong in one round does not end the next."""
        now = asyncio.get_running_loop().time
        due = now()
        while True:
            due = max(due + HEARTBEAT_SECONDS, now())
            await asyncio.sleep(due - now())
            try:
                told = self._addresses()
                await self._beat(told)
                await self._client.refresh(it.topic for it in self._subscriptions)
                await self._beat(self._addresses() - told)
            except Exception:  # noqa: BLE001 - a mistake of ours shall not make the member vanish silently
                _log.exception("A round of %s in %s failed", self._member.client_id, self._member.group)

    async def _beat(self, addresses: Iterable[str]) -> None:
        """Give signs of life side by side; who does not take it is given another one soon."""
        asked = [*addresses]
        taken = await asyncio.gather(*(self._tell(address, self._sign_of_life()) for address in asked))
        for address, took in zip(asked, taken, strict=True):
            if not took:
                self._greet(address, AGAIN_SECONDS)

    def _greet(self, address: str, pause: float) -> None:
        """Give signs of life to one address after a pause, until one is taken."""
        if before := self._greetings.get(address):
            before.cancel()
        self._greetings = {known: task for known, task in self._greetings.items() if not task.done()}
        self._greetings[address] = asyncio.create_task(self._until_taken(address, pause))

    async def _until_taken(self, address: str, pause: float) -> None:
        taken = False
        while not taken and address in self._addresses():
            await asyncio.sleep(pause)
            taken, pause = await self._tell(address, self._sign_of_life()), AGAIN_SECONDS

    def _sign_of_life(self) -> Frame:
        return requests.heartbeat(self._member.client_id, consumer_data(self._member, self._subscriptions))

    def _addresses(self) -> set[str]:
        """Return every replica of every broker of the topics."""
        return {address for ids in self._client.hosts.values() for address in ids.values()}

    async def _tell(self, address: str, request: Frame) -> bool:
        """Tell an address something; whether it took it."""
        told = f"{Request(request.code).name} at {address}"
        try:
            good(told, await self._client.connections.ask(address, request))
        except BrokerError as error:
            _log.warning("%s failed: %s", told, error)
            return False
        return True


def consumer_data(member: Membership, subscriptions: Iterable[payloads.SubscriptionData]) -> payloads.ConsumerData:
    """Return a member's settings as brokers and their tools know them."""
    return payloads.ConsumerData(
        group_name=member.group,
        consume_type="CONSUME_PASSIVELY" if member.pushed else "CONSUME_ACTIVELY",
        message_model=payloads.MODELS["Broadcasting" if member.broadcasting else "Clustering"],
        consume_from_where=payloads.STARTS[member.start_from().position],
        subscription_data_set=[*subscriptions],
    )
