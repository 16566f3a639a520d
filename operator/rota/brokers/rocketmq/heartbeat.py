"""Heartbeats of a member to its brokers, from joining a group to leaving it.

A broker considers a member online by the connections on which it sent a heartbeat, so each new connection needs one at
once.
"""

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
RETRY_SECONDS = 5.0  # until the next heartbeat to a broker that did not accept one

_log = logging.getLogger(__name__)


class HeartbeatSender:
    """Registration of a member with all brokers of its topics. Its state: new, joined or left."""

    def __init__(
        self, client: RoutingClient, member: Membership, subscriptions: Sequence[payloads.SubscriptionData]
    ) -> None:
        self._client = client
        self._member = member
        self._subscriptions = subscriptions
        self._topics = [subscription.topic for subscription in subscriptions]
        self._joined = False
        self._left = False
        self._periodic_task: asyncio.Task[None] | None = None
        self._sender_tasks: dict[str, asyncio.Task[None]] = {}  # by address: first heartbeats and retries

    async def join(self) -> None:
        """Register with every broker of the topics and stay registered; retry unreachable brokers later."""
        if self._joined or self._left:
            state = "left" if self._left else "joined"
            raise RuntimeError(f"Member {self._member.client_id} has already {state} group {self._member.group}")
        self._joined = True
        try:
            await self.fetch_routes()
            await self._send_heartbeats(self._replica_addresses())
            await self._check_group_exists()
            self._check_not_left()  # `leave` may have been called meanwhile
        except BaseException:
            self._joined = False
            self._cancel_tasks()
            raise
        self._periodic_task = asyncio.create_task(self._run_periodically())

    async def leave(self) -> None:
        """Unregister from the brokers, then close all connections, also if unregistering fails or is cancelled."""
        if self._left:
            return
        self._left = True
        try:
            if cancelled := self._cancel_tasks():
                await asyncio.wait(cancelled)
            request = requests.unregister(self._member.client_id, self._member.group)
            await asyncio.gather(*(self._send_request(address, request) for address in self._replica_addresses()))
        finally:
            self._client.close()

    async def fetch_routes(self) -> None:
        """Fetch the routes of all topics. Failures are retried later; raise only if no topic has a known broker."""
        self._check_not_left()
        await self._client.refresh(self._topics)
        if not self._client.topic_brokers:
            await self._client.fetch_route(self._topics[0])  # no topic is on any broker: this raises the reason
        self._check_not_left()

    def on_connected(self, address: str, request: Frame) -> None:
        """Send a heartbeat on a new connection at once, unless the connection was opened for a heartbeat.

        `request` is the one for which the connection was opened. Until the heartbeat arrives, the broker considers the
        member offline.
        """
        is_joined = self._joined and not self._left
        if is_joined and request.code != RequestCode.HEART_BEAT and address in self._replica_addresses():
            self._start_sending(address, 0)

    def _check_not_left(self) -> None:
        if self._left:
            raise UnreachableError(f"Member {self._member.client_id} has left group {self._member.group}")

    def _cancel_tasks(self) -> list[asyncio.Task[None]]:
        """Cancel all background tasks; return them."""
        tasks = [*self._sender_tasks.values()]
        if self._periodic_task:
            tasks.append(self._periodic_task)
        self._periodic_task = None
        self._sender_tasks = {}
        for task in tasks:
            task.cancel()
        return tasks

    async def _check_group_exists(self) -> None:
        """Raise if a broker lacks the group: without automatic creation it accepts heartbeats, but discards them."""
        request = requests.group_config(self._member.group)
        brokers = self._client.topic_brokers
        _, failed = await gather_results(self._client.call_or_raise(broker, request) for broker in brokers)
        for error in failed:
            if not isinstance(error, UnreachableError):  # an unreachable broker may have the group
                raise error

    async def _run_periodically(self) -> None:
        """Send heartbeats and refresh routes every HEARTBEAT_SECONDS; a failed round does not prevent the next one."""
        now = asyncio.get_running_loop().time
        due = now()
        while True:
            due = max(due + HEARTBEAT_SECONDS, now())  # at once if the previous round took longer
            await asyncio.sleep(due - now())
            try:
                addresses = self._replica_addresses()
                await self._send_heartbeats(addresses)
                await self._client.refresh(self._topics)
                await self._send_heartbeats(self._replica_addresses() - addresses)  # addresses that the refresh added
            except Exception:  # noqa: BLE001 - a bug here must not make the member go offline silently
                _log.exception(
                    "A heartbeat round of member %s in group %s failed", self._member.client_id, self._member.group
                )

    async def _send_heartbeats(self, addresses: Iterable[str]) -> None:
        """Send heartbeats concurrently; retry an address that did not accept one after RETRY_SECONDS."""
        targets = [*addresses]
        results = await asyncio.gather(*(self._send_request(address, self._heartbeat_request()) for address in targets))
        for address, accepted in zip(targets, results, strict=True):
            if not accepted:
                self._start_sending(address, RETRY_SECONDS)

    def _start_sending(self, address: str, delay_seconds: float) -> None:
        """Send heartbeats to one address in the background after a pause, until it accepts one."""
        if previous := self._sender_tasks.get(address):
            previous.cancel()
        self._sender_tasks = {target: task for target, task in self._sender_tasks.items() if not task.done()}
        self._sender_tasks[address] = asyncio.create_task(self._send_until_accepted(address, delay_seconds))

    async def _send_until_accepted(self, address: str, delay_seconds: float) -> None:
        accepted = False
        while not accepted and address in self._replica_addresses():
            await asyncio.sleep(delay_seconds)
            accepted = await self._send_request(address, self._heartbeat_request())
            delay_seconds = RETRY_SECONDS

    def _heartbeat_request(self) -> Frame:
        return requests.heartbeat(self._member.client_id, consumer_data(self._member, self._subscriptions))

    def _replica_addresses(self) -> frozenset[str]:
        """Return the addresses of all replicas of all brokers of the topics."""
        return self._client.addresses(self._client.topic_brokers)

    async def _send_request(self, address: str, request: Frame) -> bool:
        """Send a request to an address; log a failure, and return whether the request succeeded."""
        subject = f"{RequestCode(request.code).name} at {address}"
        try:
            require_success(subject, await self._client.connections.call(address, request))
        except BrokerError as error:
            _log.warning("%s failed: %s", subject, error)
            return False
        return True


def consumer_data(member: Membership, subscriptions: Iterable[payloads.SubscriptionData]) -> payloads.ConsumerData:
    """Return a member's settings in the form of heartbeats, which brokers and their tools show."""
    return payloads.ConsumerData(
        group_name=member.group,
        consume_type="CONSUME_PASSIVELY" if member.is_push else "CONSUME_ACTIVELY",
        message_model=payloads.MESSAGE_MODELS["Broadcasting" if member.broadcasting else "Clustering"],
        consume_from_where=payloads.START_POSITIONS[member.get_start_from().position],
        subscription_data_set=[*subscriptions],
    )
