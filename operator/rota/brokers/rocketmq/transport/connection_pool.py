"""Connection pool by address: connects on demand, keeps connections, and reconnects with exponential backoff.

Addresses are independent: a dead address does not delay requests to other addresses.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Iterable

from rota.brokers.errors import UnreachableError
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.connection import Connection, NotSentError, Serve
from rota.brokers.rocketmq.transport.frame_budget import FrameAccount, FrameBudget
from rota.brokers.rocketmq.wire.codes import ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.signing import Credentials, signed

CALL_SECONDS = 3.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

_log = logging.getLogger(__name__)

Opened = Callable[[str, Frame], None]  # called with a newly connected address and its first request


class _AddressState:
    """State of one address: its connection and its reconnect backoff."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.left: set[Connection] = set()  # replaced connections that only wait for pending answers
        self.opening = asyncio.Lock()
        self.pause = 0.0
        self.not_before = 0.0
        self.why = ""

    def clear(self) -> None:
        """Drop a closed connection; if it never received a frame, count it as a failure to connect."""
        if self.connection and self.connection.heard:
            self.pause = 0.0
        elif self.connection:
            self.fail(f"{self.connection.address} closed the connection: {self.connection.closed}")
            self.not_before += self.connection.closed_at - asyncio.get_running_loop().time()
        self.connection = None

    def fail(self, reason: str) -> None:
        """Record a failure; each failure doubles the pause before the next attempt."""
        self.pause = min(max(2 * self.pause, FIRST_PAUSE), LONGEST_PAUSE)
        pause = self.pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, so that clients do not reconnect together
        self.not_before, self.why = asyncio.get_running_loop().time() + pause, reason

    def leave(self, connection: Connection, reason: str) -> None:
        """Send no more requests on a connection; close it when its pending requests are answered."""
        self.left = {old for old in self.left if not old.closed} | {connection}
        self.pause = 0.0
        if self.connection is connection:
            self.connection = None
        connection.finish(reason)

    def close(self, reason: str) -> None:
        """Close the current connection and all replaced ones."""
        for connection in self.left | ({self.connection} if self.connection else set()):
            connection.close(reason)


class Connections:
    """All connections of one client."""

    def __init__(
        self,
        serve: Serve,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        credentials: Callable[[], Credentials] | None = None,
        policy: AddressPolicy | None = None,
        frames: FrameBudget | None = None,
        opened: Opened = lambda _, __: None,
    ) -> None:
        """Answer requests of peers with `serve`; call `opened` for every new connection.

        With a policy, unreachable and forbidden addresses raise the same message; the log has the reason.
        """
        self._serve, self._opened = serve, opened
        self._tls = tls
        self._policy = policy
        self._frames = FrameAccount(frames) if frames else None
        self._credentials = credentials
        self._places: dict[str, _AddressState] = {}
        self._closed = False
        self._renewals = 0

    async def ask(self, address: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Send a request to an address; if the peer answers GO_AWAY, retry once on a new connection."""
        try:
            return await self._ask(address, request, seconds)
        except UnreachableError as error:
            if self._policy is None:
                raise
            _log.info("%s does not answer: %s", address, error)
            raise type(error)(f"{address} does not answer") from None

    async def _ask(self, address: str, request: Frame, seconds: float) -> Frame:
        request = self._signed(request)
        connection = await self._open(address, request)
        answer = await connection.ask(request, seconds)
        if answer.code == ResponseCode.GO_AWAY and (place := self._places.get(address)):
            place.leave(connection, "it sends everybody away")
            answer = await (await self._open(address, request)).ask(request, seconds)
        return answer

    async def tell(self, address: str, request: Frame) -> None:
        """Send a one-way request to an address."""
        (await self._open(address, request)).tell(self._signed(request))

    def keep(self, addresses: Iterable[str]) -> None:
        """Close the connections to all other addresses: a broker that moved does not return to its old address."""
        for address in self._places.keys() - set(addresses):
            self._places.pop(address).close("the address is not in use any more")

    def renew(self) -> None:
        """Open new connections for further requests, with the TLS context of then.

        Each present one is closed when its pending requests are answered, or have timed out.
        """
        self._renewals += 1
        for place in self._places.values():
            place.pause = place.not_before = 0.0  # what was refused may be accepted now
            if place.connection and not place.connection.closed:
                place.leave(place.connection, "its certificates or credentials were renewed")

    def close(self) -> None:
        """Close all connections, and refuse to open new ones."""
        self._closed = True
        self.keep(())

    def _signed(self, request: Frame) -> Frame:
        return signed(request, self._credentials()) if self._credentials else request

    async def _open(self, address: str, request: Frame) -> Connection:
        if self._closed:
            raise NotSentError(f"{address} is not asked any more: this client was closed")
        place = self._places.setdefault(address, _AddressState())
        if place.connection and not place.connection.closed:
            return place.connection
        async with place.opening:
            if place.connection and not place.connection.closed:
                return place.connection
            place.clear()
            if place.not_before > asyncio.get_running_loop().time():
                raise NotSentError(f"{place.why}; it is tried again soon")
            try:
                connection = await self._connect(address)
            except NotSentError as error:
                place.fail(str(error))
                raise
            if self._places.get(address) is not place:
                connection.close("the address went out of use while it was opened")
                raise NotSentError(f"{address} went out of use while it was opened")
            place.connection = connection
            self._opened(address, request)
            return connection

    async def _connect(self, address: str) -> Connection:
        while True:
            renewals = self._renewals
            connection = await Connection.open(
                address, self._serve, self._tls() if self._tls else None, self._policy, frames=self._frames
            )
            if renewals == self._renewals:
                return connection
            connection.close("certificates or credentials were renewed while it was opened")
