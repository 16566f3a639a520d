"""Large responses of the HTTP server: rendered once for many clients, compressed if they accept it, sent in parts."""

import asyncio
import gzip
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
from aiohttp import hdrs, web

SEND_TIMEOUT_SECONDS = 30.0  # time in which a client must receive a large response
COMPRESS_MIN_BYTES = 4096  # responses larger than this are compressed
CHUNK_BYTES = 64 * 1024  # written at once of a large response: the transport copies what the socket does not take
MAX_VERSIONS = 4  # versions of one response that are being sent at the same time

# The connections on which a request is being handled.
BUSY_CONNECTIONS: Final = web.AppKey("busy", set[object])


@dataclass(eq=False)
class _RenderedBody:
    """One rendered version of a response."""

    body: bytes
    compressed: bytes = b""  # the body with gzip; empty until the first client that accepts gzip


class SharedResponse:
    """Responds with a large body. Requests that arrive while it is being rendered share the next rendering.

    Each response copies one part of the body at a time. The connection of a client that reads slowly is closed when the
    server needs a connection for another client, when MAX_VERSIONS newer versions are being sent, or after
    SEND_TIMEOUT_SECONDS.
    """

    def __init__(self, render: Callable[[], Awaitable[bytes]], headers: Mapping[str, str]) -> None:
        self._render = render
        self._headers = headers
        self._lock = asyncio.Lock()
        self._latest = _RenderedBody(b"")
        self._render_started_at = -math.inf
        self._requests_by_body: dict[_RenderedBody, list[web.Request]] = {}  # the oldest first

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Handle a request."""
        accepts_gzip = _accepts_gzip(request)
        # `shield`: finish rendering even if this client disconnects, or the next request would render concurrently.
        version = await asyncio.shield(asyncio.ensure_future(self._render_if_stale(with_gzip=accepts_gzip)))
        requests = self._requests_by_body.setdefault(version, [])
        requests.append(request)
        try:
            if accepts_gzip:
                return await _write_body(request, {**self._headers, hdrs.CONTENT_ENCODING: "gzip"}, version.compressed)
            return await _write_body(request, self._headers, version.body)
        finally:
            requests.remove(request)
            if not requests:
                self._requests_by_body.pop(version, None)

    async def _render_if_stale(self, *, with_gzip: bool) -> _RenderedBody:
        """Return the latest version, rendered again if its rendering began before this request arrived."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        async with self._lock:
            if self._render_started_at <= arrived:
                started = loop.time()
                body = await self._render()
                if body != self._latest.body:
                    self._close_readers_of_oldest()
                    self._latest = _RenderedBody(body)
                self._render_started_at = started
            if with_gzip and not self._latest.compressed:
                self._latest.compressed = await asyncio.to_thread(gzip.compress, self._latest.body, 1)
            return self._latest

    def _close_readers_of_oldest(self) -> None:
        """Close the connections of clients that still read the oldest version, if one more would be too many."""
        if len(self._requests_by_body) < MAX_VERSIONS:
            return
        requests_of_oldest = next(iter(self._requests_by_body.values()))
        for request in tuple(requests_of_oldest):
            if request.transport:
                request.transport.abort()


def release_connection(request: web.Request) -> None:
    """Allow the server to close this connection for another client's, although its request is still being handled."""
    if busy := request.app.get(BUSY_CONNECTIONS):
        busy.discard(request.protocol)


async def send_body(request: web.Request, headers: Mapping[str, str], body: bytes) -> web.StreamResponse:
    """Respond with a body rendered for this request only, compressed if it is large and the client accepts gzip."""
    if len(body) > COMPRESS_MIN_BYTES and _accepts_gzip(request):
        body = await asyncio.to_thread(gzip.compress, body, 1)
        headers = {**headers, hdrs.CONTENT_ENCODING: "gzip"}
    return await _write_body(request, headers, body)


async def forward_response(
    request: web.Request, upstream: aiohttp.ClientResponse, header_names: Iterable[str]
) -> web.StreamResponse:
    """Forward another server's response, part by part as it arrives.

    If either connection fails after the head was sent, close the client's connection and raise the error.
    """
    headers = {name: upstream.headers[name] for name in header_names if name in upstream.headers}
    response = web.StreamResponse(status=upstream.status, headers=headers)
    await response.prepare(request)
    try:
        async for part in upstream.content.iter_any():
            async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
                await response.write(part)
        await response.write_eof()
    except Exception:
        if request.transport:
            request.transport.abort()
        raise
    return response


async def _write_body(request: web.Request, headers: Mapping[str, str], body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={**headers, hdrs.VARY: hdrs.ACCEPT_ENCODING})
    response.content_length = len(body)
    release_connection(request)
    parts = memoryview(body if request.method != hdrs.METH_HEAD else b"")
    try:
        async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
            await response.prepare(request)
            for start in range(0, len(parts), CHUNK_BYTES):
                await response.write(parts[start : start + CHUNK_BYTES])
            await response.write_eof()
    except TimeoutError:
        if request.transport:
            request.transport.abort()
        raise ConnectionResetError from None  # aiohttp ends the request silently, as if the client had disconnected
    return response


def _accepts_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "")
