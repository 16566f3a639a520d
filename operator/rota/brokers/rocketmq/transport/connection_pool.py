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
from rota.brokers.rocketmq.transport.connection import Connection, NotSentError, RequestHandler
from rota.brokers.rocketmq.transport.connector import open_connection
from rota.brokers.rocketmq.transport.frame_budget import FrameAccount, FrameBudget
from rota.brokers.rocketmq.wire.codes import ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.signing import Credentials, sign_frame

CALL_SECONDS = 3.0
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0

_log = logging.getLogger(__name__)

ConnectedCallback = Callable[[str, Frame], None]  # called with a newly connected address and its first request


class _AddressState:
    """State of one address: its connection and its reconnect backoff."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.retired: set[Connection] = set()  # replaced connections that only wait for pending responses
        self.open_lock = asyncio.Lock()
        self.backoff_seconds = 0.0
        self.retry_at = 0.0
        self.last_failure = ""

    def drop_closed(self) -> None:
        """Drop a closed connection; if it never received a frame, count it as a failure to connect."""
        if self.connection and self.connection.has_received:
            self.backoff_seconds = 0.0
        elif self.connection:
            self.record_failure(self.connection.describe_close())
            # The pause starts when the connection was closed, not now.
            self.retry_at += self.connection.closed_at - asyncio.get_running_loop().time()
        self.connection = None

    def record_failure(self, reason: str) -> None:
        """Record a failure; each failure doubles the pause before the next attempt."""
        self.backoff_seconds = min(max(2 * self.backoff_seconds, MIN_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)
        pause = self.backoff_seconds * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, so that clients do not reconnect together
        self.retry_at = asyncio.get_running_loop().time() + pause
        self.last_failure = reason

    def retire(self, connection: Connection, reason: str) -> None:
        """Send no more requests on a connection; close it when its pending requests are answered."""
        self.retired = {old for old in self.retired if not old.close_reason} | {connection}
        self.backoff_seconds = 0.0
        if self.connection is connection:
            self.connection = None
        connection.close_when_idle(reason)

    def close(self, reason: str) -> None:
        """Close the current connection and all replaced ones."""
        for connection in filter(None, (self.connection, *self.retired)):
            connection.close(reason)


class ConnectionPool:
    """All connections of one client."""

    def __init__(
        self,
        handle_request: RequestHandler,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        credentials: Callable[[], Credentials] | None = None,
        address_policy: AddressPolicy | None = None,
        frame_budget: FrameBudget | None = None,
        on_connected: ConnectedCallback = lambda _, __: None,
    ) -> None:
        """Answer requests of peers with `handle_request`; call `on_connected` for every new connection."""
        self._handle_request = handle_request
        self._on_connected = on_connected
        self._tls = tls
        self._address_policy = address_policy
        self._frame_account = FrameAccount(frame_budget) if frame_budget else None
        self._credentials = credentials
        self._states: dict[str, _AddressState] = {}
        self._closed = False
        self._renewals = 0  # `_connect` compares it to detect a renewal while it connects

    async def call(self, address: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Send a request to an address; if the peer answers GO_AWAY, retry once on a new connection.

        With an address policy, unreachable and forbidden addresses raise the same message: tenants, who name the
        addresses, must not learn which ones exist in the operator's network. The log has the reason.
        """
        try:
            return await self._call(address, request, seconds)
        except UnreachableError as error:
            if self._address_policy is None:
                raise
            _log.info("%s does not respond: %s", address, error)
            raise type(error)(f"{address} does not respond") from None

    async def _call(self, address: str, request: Frame, seconds: float) -> Frame:
        connection = await self._open(address, request)
        response = await connection.call(self._sign(request), seconds)
        state = self._states.get(address)
        if response.code == ResponseCode.GO_AWAY and state:  # without a state, the address is no longer in use
            state.retire(connection, "the peer is shutting down (GO_AWAY)")
            connection = await self._open(address, request)
            response = await connection.call(self._sign(request), seconds)
        return response

    def _sign(self, request: Frame) -> Frame:
        """Return the request with the present credentials' signature; they may be renewed before a retry."""
        return sign_frame(request, self._credentials()) if self._credentials else request

    def close_others(self, kept_addresses: Iterable[str]) -> None:
        """Close the connections to all other addresses: a broker that moved does not return to its old address."""
        for address in self._states.keys() - set(kept_addresses):
            self._states.pop(address).close("the address is no longer in use")

    def renew(self) -> None:
        """Open new connections for further requests, with the renewed TLS context and credentials.

        Each present connection is closed when its pending requests are answered, or have timed out.
        """
        self._renewals += 1
        for state in self._states.values():
            # Connect without a pause: a server that refused the old credentials may accept the new ones.
            state.backoff_seconds = 0.0
            state.retry_at = 0.0
            if state.connection and not state.connection.close_reason:
                state.retire(state.connection, "its certificates or credentials were renewed")

    def close(self) -> None:
        """Close all connections, and refuse to open new ones."""
        self._closed = True
        self.close_others(())

    async def _open(self, address: str, request: Frame) -> Connection:
        if self._closed:
            raise NotSentError(f"The request to {address} was not sent: the client is closed")
        state = self._states.setdefault(address, _AddressState())
        if state.connection and not state.connection.close_reason:
            return state.connection
        async with state.open_lock:
            if state.connection and not state.connection.close_reason:  # another call has connected meanwhile
                return state.connection
            state.drop_closed()
            if state.retry_at > asyncio.get_running_loop().time():
                raise NotSentError(f"{state.last_failure}; the next attempt follows shortly")
            try:
                connection = await self._connect(address)
            except NotSentError as error:
                state.record_failure(str(error))
                raise
            if self._states.get(address) is not state:
                connection.close("the address is no longer in use")
                raise NotSentError(f"{address} was no longer needed when the connection was established")
            state.connection = connection
            self._on_connected(address, request)
            return connection

    async def _connect(self, address: str) -> Connection:
        while True:
            renewals = self._renewals
            connection = await open_connection(
                address,
                self._handle_request,
                self._tls() if self._tls else None,
                self._address_policy,
                frame_account=self._frame_account,
            )
            if renewals == self._renewals:
                return connection
            connection.close("certificates or credentials were renewed while it was opened")
