"""Accepts the connections of the HTTP server, up to a limit, with or without TLS."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import cast

from aiohttp import web

from rota.aio import supervise

READ_BUFFER_BYTES = 16 * 1024
ACCEPT_RETRY_SECONDS = 1.0  # after the system had no file descriptor left
LOG_INTERVAL_SECONDS = 60.0  # minimum between two warnings, since clients can trigger them at any rate
HANDSHAKE_SECONDS = 10.0  # time-out of a TLS handshake
MAX_HANDSHAKES = 128  # TLS handshakes in progress, not counted as connections; each takes 300 KiB of memory

_log = logging.getLogger("rota.http_server")


class _BoundSockets:
    """The interface that aiohttp's runner requires of a server: its sockets, and a way to close them."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self.sockets = sockets

    def close(self) -> None:
        for bound in self.sockets:
            bound.close()


class LimitedSite(web.BaseSite):
    """Accepts connections one by one, up to a limit: the process needs file descriptors for other purposes, too.

    asyncio's own server accepts without limit. Once no descriptor is left, it retries at once and logs each time.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        sockets: Sequence[socket.socket],
        busy_connections: set[object],
        max_connections: int,
        get_tls_context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        super().__init__(runner)
        self._server = cast("asyncio.AbstractServer", _BoundSockets(sockets))
        self._sockets = sockets
        self._busy_connections = busy_connections
        self._get_tls_context = get_tls_context
        self._handshakes = _Handshakes()
        self._tasks: list[asyncio.Task[None]] = []
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        is_unlimited = descriptors == resource.RLIM_INFINITY
        self._max_connections = max_connections if is_unlimited else min(max_connections, descriptors // 2)
        self._warned_at = -LOG_INTERVAL_SECONDS

    @property
    def name(self) -> str:
        """Return a name for logs."""
        return "http"

    async def start(self) -> None:
        """Accept connections."""
        await super().start()
        for bound in self._sockets:
            accepting = supervise("HTTP server", partial(self._accept_from, bound))
            self._tasks.append(asyncio.create_task(accepting, name="listen"))

    async def stop(self) -> None:
        """Stop accepting connections."""
        for task in self._tasks:
            task.cancel()
        self._handshakes.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().stop()

    async def _accept_from(self, bound: socket.socket) -> None:
        while True:
            await _wait_until_readable(bound)
            try:
                connection, _ = bound.accept()
            except (BlockingIOError, ConnectionError):  # the client has disconnected
                continue
            except OSError as error:
                self._warn(f"Cannot accept a connection: {error.strerror}")
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            connection.settimeout(0)
            await self._handle_connection(connection)

    async def _handle_connection(self, connection: socket.socket) -> None:
        server = self._runner.server
        if server is None or not self._ensure_capacity(server):
            connection.close()
            await asyncio.sleep(0)  # let other tasks run, however many clients connect
            return
        if self._get_tls_context is None:
            await self._connect(server, connection, None)
        else:
            self._handshakes.start(self._connect(server, connection, self._get_tls_context()))

    async def _connect(self, server: web.Server, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        seconds = HANDSHAKE_SECONDS if tls else None
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=tls, ssl_handshake_timeout=seconds
            )
            # asyncio reads 256 KiB at once, and an exception of the parser keeps that until it is collected.
            transport.max_size = READ_BUFFER_BYTES  # type: ignore[attr-defined]
            if tls:
                # Other handshakes may have ended during this one: above the limit, close an idle connection. If all
                # are busy, this one stays.
                self._ensure_capacity(server, additional=0)
        except OSError:  # the client has disconnected
            connection.close()

    def _ensure_capacity(self, server: web.Server, additional: int = 1) -> bool:
        """Return whether `additional` connections fit; at the limit, make room by closing the oldest idle one."""
        connected = [connection for connection in server.connections if connection.transport]
        if len(connected) + additional <= self._max_connections:
            return True
        self._warn(f"The limit of {self._max_connections} connections is reached; idle ones are closed")
        for connection in connected:  # the oldest first
            if connection not in self._busy_connections and (transport := connection.transport):
                connection.force_close()
                transport.abort()  # even if the client does not read the response
                return True
        return False

    def _warn(self, message: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= LOG_INTERVAL_SECONDS:
            self._warned_at = now
            _log.warning("%s", message)


async def _wait_until_readable(bound: socket.socket) -> None:
    """Wait for a client; asyncio's sock_accept could lose one when it is cancelled."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(bound, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(bound)


class _Handshakes:
    """TLS handshakes in progress, limited so that silent clients do not keep others from connecting."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # the oldest first

    def start(self, handshake: Coroutine[None, None, None]) -> None:
        """Start a handshake; if too many are in progress, cancel the oldest."""
        if len(self._tasks) >= MAX_HANDSHAKES:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        task = asyncio.create_task(handshake, name="TLS handshake")
        self._tasks[task] = None
        task.add_done_callback(self._finish)

    def cancel(self) -> None:
        """Cancel all handshakes."""
        for task in self._tasks:
            task.cancel()

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
