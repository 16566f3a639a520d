"""The HTTP server of operator and sidecar.

Connections, request heads, bodies and waiting requests are limited, so that no client exhausts memory or file
descriptors.
"""

import asyncio
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from rota.http_server.limited_site import READ_BUFFER_BYTES, LimitedSite
from rota.http_server.responses import BUSY_CONNECTIONS, SharedResponse, forward_response, release_connection, send_body

__all__ = [
    "AdmissionLimit",
    "BodyReader",
    "ServerLimits",
    "SharedResponse",
    "forward_response",
    "listen",
    "release_connection",
    "send_body",
]

SHUTDOWN_SECONDS = 1.0  # time for responses in progress when the server stops
DISCARD_SECONDS = 0.2  # time for which an unread body is discarded, so that the client can read the response
KEEPALIVE_SECONDS = 60.0  # time after which an idle connection is closed
BODY_TIMEOUT_SECONDS = 2.0  # time in which a whole body must arrive
MAX_CONNECTIONS = 128
MAX_HEADERS = 64  # a browser sends 20, and an ingress adds as many
MAX_HEADER_BYTES = 8190  # limit of the request line and of each header: one has all cookies that a browser sends
LISTEN_BACKLOG = 128
LOOPBACK_ADDRESS = "127.0.0.1"

_log = logging.getLogger(__name__)


class ServerLimits(NamedTuple):
    """Limits of one server on its connections and request heads."""

    max_connections: int = MAX_CONNECTIONS  # lowered to half of the process's file descriptors if it is more
    keepalive_seconds: float = KEEPALIVE_SECONDS
    max_headers: int = MAX_HEADERS
    max_header_bytes: int = MAX_HEADER_BYTES
    shutdown_seconds: float = SHUTDOWN_SECONDS


async def listen(
    app: web.Application,
    address: str,
    port: int,
    hint: str = "",
    *,
    limits: ServerLimits | None = None,
    also_on_loopback: bool = False,
    get_tls_context: Callable[[], ssl.SSLContext] | None = None,
    middlewares: Sequence[Middleware] = (),
) -> web.AppRunner:
    """Serve the application until the runner is cleaned up; raise ValueError if the address cannot be bound.

    `also_on_loopback` is for kubectl port-forward, which connects to that address. `hint` ends the error's sentence.
    `get_tls_context` returns the context for a new connection; without it connections are not encrypted. The
    application's own middlewares handle a request first, then the server's, which may reject it, then `middlewares`.
    """
    limits = limits or ServerLimits()
    logging.getLogger("aiohttp.server").addFilter(_is_error_of_server)
    app[BUSY_CONNECTIONS] = set()
    app.middlewares.extend([_track_busy, _reject_web_pages, _reject_unreadable_body, *middlewares])
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=limits.shutdown_seconds,
        keepalive_timeout=limits.keepalive_seconds,
        lingering_time=DISCARD_SECONDS,
        handler_cancellation=True,
        auto_decompress=False,
        read_bufsize=READ_BUFFER_BYTES,
        max_headers=limits.max_headers,
        max_line_size=limits.max_header_bytes,
        max_field_size=limits.max_header_bytes,
    )
    await runner.setup()
    try:
        sockets = await _bind(address, port)
        if also_on_loopback and not any(map(_includes_loopback, sockets)):
            with suppress(OSError):  # another process listens there
                sockets += await _bind(LOOPBACK_ADDRESS, port)
        await LimitedSite(runner, sockets, app[BUSY_CONNECTIONS], limits.max_connections, get_tls_context).start()
    except OSError as error:
        await runner.cleanup()
        raise ValueError(f"Cannot listen on {address}, port {port}: {_describe_bind_error(error)}{hint}") from None
    return runner


class BodyReader:
    """Reads the request bodies of one route, within limits. Other routes leave bodies unread.

    Handlers call it after all checks of the request's head, so that the body of a rejected request is not read.
    """

    def __init__(self, max_bytes: int, max_concurrent: int) -> None:
        self._max_bytes = max_bytes
        self._admission = AdmissionLimit(max_concurrent)

    async def read(self, request: web.Request) -> bytes:
        """Return the body; raise the HTTP error to answer with if it is compressed, too large or late."""
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() != "identity":
            raise web.HTTPUnsupportedMediaType(text="The body is compressed; send it uncompressed\n")
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large_error(request.content_length)
        with self._admission.admit() as admitted:
            if not admitted:
                raise web.HTTPServiceUnavailable(text="Too many bodies are being read; try again\n")
            try:
                async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                    return await self._collect(request)
            except TimeoutError:
                raise web.HTTPRequestTimeout(
                    text=f"The body did not arrive within {BODY_TIMEOUT_SECONDS:g} s\n"
                ) from None

    async def _collect(self, request: web.Request) -> bytes:
        if request.transport is None:  # aiohttp would raise a RuntimeError
            raise ConnectionResetError
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > self._max_bytes:
                raise self._too_large_error(len(body))
        return bytes(body)

    def _too_large_error(self, size: int | None) -> web.HTTPRequestEntityTooLarge:
        text = f"The body is larger than {self._max_bytes} bytes\n"
        return web.HTTPRequestEntityTooLarge(self._max_bytes, size or 0, text=text)


class AdmissionLimit:
    """Limits how many requests of a kind are handled at once, so that connections and memory remain for others."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._admitted = 0

    @contextmanager
    def admit(self) -> Iterator[bool]:
        """Yield whether this request is admitted; an admitted request counts until the context ends."""
        if self._admitted >= self._max_requests:
            yield False
            return
        self._admitted += 1
        try:
            yield True
        finally:
            self._admitted -= 1


def _describe_bind_error(error: OSError) -> str:
    if isinstance(error, socket.gaierror):  # its numbers are not those of errno
        return "that address cannot be resolved"
    return os.strerror(error.errno) if error.errno else str(error)


async def _bind(address: str, port: int) -> list[socket.socket]:
    """Return listening sockets, one for each address that the host name resolves to."""
    loop = asyncio.get_running_loop()
    # An empty address means all interfaces.
    resolved = await loop.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    distinct = dict.fromkeys((family, socket_address) for family, *_, socket_address in resolved)
    sockets: list[socket.socket] = []
    try:
        for family, (host, bound_port, *_) in distinct:  # IPv6 addresses have two more parts
            sockets.append(socket.create_server((host, bound_port), family=family, backlog=LISTEN_BACKLOG))
    except OSError:
        for bound in sockets:
            bound.close()
        raise
    for bound in sockets:
        bound.settimeout(0)
    return sockets


def _includes_loopback(bound: socket.socket) -> bool:
    address = ipaddress.ip_address(bound.getsockname()[0])
    return address.is_loopback or address.is_unspecified


@web.middleware
async def _track_busy(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep a connection in BUSY_CONNECTIONS while its request is handled: `LimitedSite` closes only other ones."""
    busy = request.app[BUSY_CONNECTIONS]
    busy.add(request.protocol)
    try:
        return await handler(request)
    finally:
        busy.discard(request.protocol)


@web.middleware
async def _reject_web_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """On loopback addresses, reject requests that another site's page sends from a browser on this machine.

    Such a request has that site's Origin; or, if the site's name resolves to a loopback address, that name as its Host.
    """
    local = request.transport and request.transport.get_extra_info("sockname")
    if local and ipaddress.ip_address(local[0]).is_loopback:
        origin = request.headers.get(hdrs.ORIGIN)
        if not _is_loopback_name(f"//{request.host}") or (origin and not _is_loopback_name(origin)):
            return web.Response(status=403, text="Host and Origin must be localhost, or a loopback address\n")
    return await handler(request)


def _is_loopback_name(url: str) -> bool:
    with suppress(ValueError):
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


@web.middleware
async def _reject_unreadable_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.RequestPayloadError as error:
        return web.Response(status=400, text=f"The body cannot be read: {error}\n")
    except ConnectionError:  # the client has disconnected
        return web.Response(status=400)


def _is_error_of_server(record: logging.LogRecord) -> bool:
    """Filter aiohttp's log: keep errors of the server; drop invalid requests, with which clients could fill the log."""
    _, error, _ = record.exc_info or (None, None, None)
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)
