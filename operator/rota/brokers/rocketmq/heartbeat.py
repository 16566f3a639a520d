"""Heartbeats of a member to its brokers, on each connection, from joining a group to leaving it."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from rota.brokers.errors import BrokerError, UnreachableError
from rota.brokers.port import Membership
from rota.brokers.rocketmq.routing import RoutingClient
from rota.brokers.rocketmq.transport.responses import gather_results, require_success
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import RequestCode
from rota.brokers.rocketmq.wire.frames import Frame

HEARTBEAT_SECONDS = 30.0
AGAIN_SECONDS = 5.0  # until the next heartbeat to a broker that did not accept one

_log = logging.getLogger(__name__)


class Heartbeat:
    """Registration of a member with all brokers of its topics. Its state: new, joined or left."""

    def __init__(
        self, client: RoutingClient, member: Membership, subscriptions: Sequence[payloads.SubscriptionData]
    ) -> None:
        self._client, self._member, self._subscriptions = client, member, subscriptions
        self._joined = self._left = False
        self._rounds: asyncio.Task[None] | None = None
        self._greetings: dict[str, asyncio.Task[None]] = {}  # by address: heartbeats between rounds

    async def join(self) -> None:
        """Register with every broker of the topics and stay registered; retry unreachable brokers later."""
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
        """Unregister from the brokers and close all connections, even if the first fails or is cancelled."""
        if self._left:
            return
        self._left = True
        try:
            if cancelled := self._cancel():
                await asyncio.wait(cancelled)
            request = requests.unregister(self._member.client_id, self._member.group)
            await asyncio.gather(*(self._tell(address, request) for address in self._addresses()))
        finally:
            self._client.close()

    async def look(self) -> None:
        """Fetch the routes of all topics; missing topics are fetched again later, but raise if none has a broker."""
        self._stay()
        topics = [subscription.topic for subscription in self._subscriptions]
        await self._client.refresh(topics)
        if not self._client.hosts:
            await self._client.route(topics[0])  # raises the reason
        self._stay()

    def opened(self, address: str, request: Frame) -> None:
        """Send a heartbeat on a new connection at once, unless the connection was opened for a heartbeat.

        Until the heartbeat arrives, the broker considers the member offline.
        """
        is_joined = self._joined and not self._left
        if is_joined and request.code != RequestCode.HEART_BEAT and address in self._addresses():
            self._greet(address, 0)

    def _stay(self) -> None:
        if self._left:
            raise UnreachableError(f"{self._member.client_id} has left {self._member.group}")

    def _cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all background tasks; return them."""
        tasks = [*self._greetings.values(), *([self._rounds] if self._rounds else [])]
        self._rounds, self._greetings = None, {}
        for task in tasks:
            task.cancel()
        return tasks

    async def _make_sure(self) -> None:
        """Raise if a broker lacks the group: without automatic creation it accepts heartbeats, but discards them."""
        request = requests.group_config(self._member.group)
        _, failed = await gather_results(self._client.get(broker, request) for broker in self._client.hosts)
        for error in failed:
            if not isinstance(error, UnreachableError):
                raise error

    async def _keep_beating(self) -> None:
        """Send heartbeats and refresh routes every HEARTBEAT_SECONDS; a failed round does not prevent the next one."""
        now = asyncio.get_running_loop().time
        due = now()
        while True:
            due = max(due + HEARTBEAT_SECONDS, now())
            await asyncio.sleep(due - now())
            try:
                addresses = self._addresses()
                await self._beat(addresses)
                await self._client.refresh(subscription.topic for subscription in self._subscriptions)
                await self._beat(self._addresses() - addresses)
            except Exception:  # noqa: BLE001 - a bug here must not make the member go offline silently
                _log.exception("A round of %s in %s failed", self._member.client_id, self._member.group)

    async def _beat(self, addresses: Iterable[str]) -> None:
        """Send heartbeats concurrently; retry an address that did not accept one after AGAIN_SECONDS."""
        targets = [*addresses]
        results = await asyncio.gather(*(self._tell(address, self._sign_of_life()) for address in targets))
        for address, accepted in zip(targets, results, strict=True):
            if not accepted:
                self._greet(address, AGAIN_SECONDS)

    def _greet(self, address: str, pause: float) -> None:
        """Send heartbeats to one address in the background after a pause, until it accepts one."""
        if previous := self._greetings.get(address):
            previous.cancel()
        self._greetings = {target: task for target, task in self._greetings.items() if not task.done()}
        self._greetings[address] = asyncio.create_task(self._until_taken(address, pause))

    async def _until_taken(self, address: str, pause: float) -> None:
        accepted = False
        while not accepted and address in self._addresses():
            await asyncio.sleep(pause)
            accepted, pause = await self._tell(address, self._sign_of_life()), AGAIN_SECONDS

    def _sign_of_life(self) -> Frame:
        return requests.heartbeat(self._member.client_id, consumer_data(self._member, self._subscriptions))

    def _addresses(self) -> set[str]:
        """Return the addresses of all replicas of all brokers of the topics."""
        return {address for ids in self._client.hosts.values() for address in ids.values()}

    async def _tell(self, address: str, request: Frame) -> bool:
        """Send a request to an address; log a failure, and return whether the request succeeded."""
        subject = f"{RequestCode(request.code).name} at {address}"
        try:
            require_success(subject, await self._client.connections.ask(address, request))
        except BrokerError as error:
            _log.warning("%s failed: %s", subject, error)
            return False
        return True


def consumer_data(member: Membership, subscriptions: Iterable[payloads.SubscriptionData]) -> payloads.ConsumerData:
    """Return a member's settings in the form of heartbeats, which brokers and their tools show."""
    return payloads.ConsumerData(
        group_name=member.group,
        consume_type="CONSUME_PASSIVELY" if member.pushed else "CONSUME_ACTIVELY",
        message_model=payloads.MODELS["Broadcasting" if member.broadcasting else "Clustering"],
        consume_from_where=payloads.STARTS[member.start_from().position],
        subscription_data_set=[*subscriptions],
    )
