"""Listening at an address over HTTP, for operator and sidecar."""

import asyncio
import ipaddress
import logging
import os
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

PATIENCE = 1.0  # seconds for answers that are under way at the end
DISCARD_SECONDS = 1.0  # the rest of a rejected request's body is read and discarded for this long
KEPT = 60.0  # seconds for which a connection is kept that asks nothing, or whose question is not whole
MOST = 512  # connections; of a process that may have few descriptors, half of those
AGAIN = 1.0  # seconds before the next try where the system gives no descriptor
SAID = 60.0  # seconds between two complaints at least: whoever knocks decides how often there is a reason
BACKLOG = 128
LOCAL = "127.0.0.1"

_log = logging.getLogger(__name__)


async def listen(
    app: web.Application,
    address: str,
    port: int,
    hint: str = "",
    *,
    kept: float | None = None,
    forwarded: bool = False,
    patience: float = PATIENCE,
) -> web.AppRunner:
    """Answer from now on, until the runner is cleaned up; what is wrong with the address is a sentence.

    What is to be forwarded is answered locally, too: there kubectl port-forward knocks.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    asking = _Asking()
    app.middlewares.extend([asking.note, _refuse_what_cannot_be_read, _read_in_time])
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=patience,
        keepalive_timeout=kept or KEPT,
        lingering_time=DISCARD_SECONDS,
    )
    await runner.setup()
    try:
        sockets = await _bound(address, port)
        if forwarded and not any(_is_local(it) for it in sockets):
            with suppress(OSError):  # then something else listens there
                sockets += await _bound(LOCAL, port)
        await _Door(runner, sockets, asking).start()
    except OSError as error:
        await runner.cleanup()
        raise ValueError(f"Nothing can be answered at {address}, port {port}: {_why(error)}{hint}") from None
    return runner


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):  # its numbers are not the system's
        return "that address cannot be resolved"
    return os.strerror(error.errno) if error.errno else str(error)


async def _bound(address: str, port: int) -> list[socket.socket]:
    """Return sockets on which the system lets connections wait."""
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    places = await asyncio.get_running_loop().getaddrinfo(address or None, port, type=kind, flags=flags)
    found: list[socket.socket] = []
    try:
        for family, place in dict.fromkeys((it[0], it[4]) for it in places):
            found.append(socket.create_server(place[:2], family=family, backlog=BACKLOG))
    except OSError:
        for it in found:
            it.close()
        raise
    for it in found:
        it.settimeout(0)
    return found


def _is_local(it: socket.socket) -> bool:
    place = ipaddress.ip_address(it.getsockname()[0])
    return place.is_loopback or place.is_unspecified


class _Asking:
    """The connections on which something is being answered."""

    def __init__(self) -> None:
        self.now: set[object] = set()

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.now.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self.now.discard(request.protocol)


class _Sockets:
    """What the runner looks for where it listens: its sockets, and their end."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self.sockets = sockets

    def close(self) -> None:
        for it in self.sockets:
            it.close()


class _Door(web.BaseSite):
    """Lets connections in, one by one and so many at most: descriptors are needed for other things, too.

    asyncio's own takes whatever comes; once no descriptor is left, it goes round without end and logs each time.
    """

    def __init__(self, runner: web.AppRunner, sockets: Sequence[socket.socket], asking: _Asking) -> None:
        super().__init__(runner)
        self._server = cast("asyncio.AbstractServer", _Sockets(sockets))
        self._sockets, self._asking = sockets, asking
        self._tasks: list[asyncio.Task[None]] = []
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST if limit == resource.RLIM_INFINITY else min(MOST, limit // 2)
        self._said = -SAID

    @property
    def name(self) -> str:
        return "http"

    async def start(self) -> None:
        await super().start()
        self._tasks = [asyncio.create_task(self._let_in(it), name="listen") for it in self._sockets]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().stop()

    async def _let_in(self, door: socket.socket) -> None:
        while True:
            await _knocked(door)
            try:
                come, _ = door.accept()
            except (BlockingIOError, ConnectionError):  # whoever knocked has gone
                continue
            except OSError as error:
                self._complain(f"No connection can be taken: {error.strerror}")
                await asyncio.sleep(AGAIN)
                continue
            come.settimeout(0)
            await self._take(come)

    async def _take(self, come: socket.socket) -> None:
        server = self._runner.server
        if server is None or not self._is_room(server):
            come.close()
            await asyncio.sleep(0)  # others go on, however many knock
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(server, come)
        except OSError:  # it has gone again
            come.close()

    def _is_room(self, server: web.Server) -> bool:
        """Whether one more can come in; if need be, in place of the oldest on which nothing is being answered."""
        there = [it for it in server.connections if it.transport]
        if len(there) < self._most:
            return True
        self._complain(f"{len(there)} connections are open, as many as may be; those that ask nothing are closed")
        idle = next((it for it in there if it not in self._asking.now), None)
        if idle is None or idle.transport is None:
            return False
        transport = idle.transport
        idle.force_close()
        transport.abort()  # also where what was answered is not read
        return True

    def _complain(self, sentence: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._said >= SAID:
            self._said = now
            _log.warning("%s", sentence)


async def _knocked(door: socket.socket) -> None:
    """Wait until somebody can be let in; asyncio's own would lose who is let in just when nobody waits any more."""
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    loop.add_reader(door, heard.set)
    try:
        await heard.wait()
    finally:
        loop.remove_reader(door)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether what went wrong is our mistake: who sends nonsense shall not fill the log with it."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


@web.middleware
async def _refuse_what_cannot_be_read(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.RequestPayloadError as error:
        return web.Response(status=400, text=f"The body cannot be read: {error}\n")
    except ConnectionError:  # whoever asked has gone
        return web.Response(status=400)


@web.middleware
async def _read_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Have the whole body first: one of which the rest never comes would hold its connection for ever."""
    if request.can_read_body:
        try:
            async with asyncio.timeout(KEPT):
                await request.read()
        except TimeoutError:
            return web.Response(status=408, text=f"The body did not come within {KEPT:g} s\n")
    return await handler(request)
