"""HTTP/1.1 client for POSTs to one address over kept-alive connections, limited to the needs of deliveries.

aiohttp's client takes four times the CPU time per request (180 µs against 45). It also does not report whether a broken
connection had been used before: an app that closes an idle connection has not read the request.
"""

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from rota.aio import call_after_all

LONGEST_HEAD = 64 * 1024
WRITE_BYTES = 64 * 1024  # of a large body at a time: the transport copies all bytes that it cannot send yet
_NO_BODY = {204, 304}
_FIRST, _FINAL = 100, 200  # the lowest status, and the lowest one above the provisional ones (1xx)
_STATUS = re.compile(rb"HTTP/1\.[0-9] ([0-9]{3})(?: .*)?", re.DOTALL)
_DECIMAL, _HEXADECIMAL = re.compile(rb"[0-9]{1,18}"), re.compile(rb"[0-9a-f]{1,15}", re.IGNORECASE)
_TARGET = "".join(map(chr, range(0x21, 0x7F)))  # unescaped characters in a request line


class ConnectFailedError(Exception):
    """No connection could be opened, so nothing was sent."""


class SendForbiddenError(Exception):
    """The request may not be sent any more."""


class BadResponseError(Exception):
    """The response is missing or invalid."""


class _StaleConnectionError(BadResponseError):
    """A reused connection was closed without a response: the app had most likely closed it as idle."""


class HttpPoster:
    """Posts to one address, over a pool of connections."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: list[_Connection] = []
        self._closed = False
        url_host = f"[{host}]" if ":" in host else host
        self._host = f"host: {url_host}:{port}\r\n".encode()

    async def post(self, path: str, headers: bytes, body: bytes, seconds: float, may: Callable[[], bool]) -> int:
        """Return the response's status; raise TimeoutError without one in time, or an error above.

        `may` is called last, right before sending: connecting takes time, in which the process may stall.
        """
        deadline, length = asyncio.get_running_loop().time() + seconds, len(body)
        head = b"POST %s HTTP/1.1\r\n%s%scontent-length: %d\r\n\r\n" % (_target(path), self._host, headers, length)
        sent = False
        while True:
            try:
                connection = self._idle.pop() if self._idle and not sent else await self._connected(deadline)
            except ConnectFailedError:
                if sent:  # the request may have crashed the app
                    raise BadResponseError(
                        "The app closed the connection without an answer, and takes no other"
                    ) from None
                raise
            if connection.closed:
                continue
            try:
                status = await connection.ask(head, body, deadline, may)
            except _StaleConnectionError:
                sent = True
                continue  # most likely not read; a new connection is never stale, so this ends
            if self._closed:
                connection.close()
            elif not connection.closed:
                self._idle.append(connection)
            return status

    async def _connected(self, deadline: float) -> "_Connection":
        address = f"{self.host}, port {self.port}"
        try:
            async with asyncio.timeout_at(deadline):
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, self.host, self.port)
        except TimeoutError:  # nothing was sent, so this is not a late response
            raise ConnectFailedError(f"Nobody takes a connection at {address}") from None
        except OSError as error:
            raise ConnectFailedError(f"Nobody listens at {address}: {error.strerror or error}") from None
        return connection

    def close(self) -> None:
        """Close idle connections now, and each other one after its response."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


@lru_cache(16)
def _target(path: str) -> bytes:
    return quote(path, safe=_TARGET).encode()


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.closed = False
        self._used = self._heard = False  # sent a request before; received bytes of the current response
        self._answer: asyncio.Future[int] | None = None
        self._writable: asyncio.Future[None] | None = None  # set while the transport's buffer is full
        self._read = bytearray()
        self._status = 0
        self._left: int | None = None  # bytes of the body still to come; None: the connection's end ends it
        self._chunked = self._last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - narrows the type in asyncio's signature
        self.transport = transport

    async def ask(self, head: bytes, body: bytes, deadline: float, may: Callable[[], bool]) -> int:
        """Send a request and return the response's status; a caller that stops waiting closes the connection.

        The timeout fails the response's future instead of cancelling the caller. So a response that has arrived
        counts, even if the process stalled past the timeout before it read the response.
        """
        if not may():
            self.close()  # an app may serve one connection at a time: an unused one would block it
            raise SendForbiddenError
        self._answer = asyncio.get_running_loop().create_future()
        self._status, self._heard = 0, False
        timer = call_after_all(deadline, self._late, self._answer)
        try:
            await self._send(head, body, self._answer)
            return await self._answer
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
            self._answer, self._used = None, True

    async def _send(self, head: bytes, body: bytes, answer: asyncio.Future[int]) -> None:
        """Write a request; a large body in parts, as fast as they are sent, until a response arrives."""
        if len(body) <= WRITE_BYTES:
            self.transport.write(head + body)
            return
        self.transport.write(head)
        parts = memoryview(body)
        for start in range(0, len(body), WRITE_BYTES):
            if self._writable:
                awaited: list[asyncio.Future[Any]] = [self._writable, answer]
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                self.close()  # the app may wait for the rest of the body, and read no other request
                return
            self.transport.write(parts[start : start + WRITE_BYTES])

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable:
            self._writable.set_result(None)
            self._writable = None

    def close(self) -> None:
        self.closed = True
        self.transport.abort()  # do not wait until all bytes are sent: an app that hangs may never read them

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # no request is open
            self.close()
            return
        self._read += data
        self._heard = True
        try:
            if (self._status or self._head()) and self._body():
                self._end()
        except ValueError:
            self._fail(BadResponseError("The app's answer is no HTTP"))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._answer is None or self._answer.done():
            return
        if self._status and self._left is None and not self._chunked:
            self._end()
        elif self._used and not self._heard:
            self._fail(_StaleConnectionError())
        else:
            self._fail(
                BadResponseError(f"The app closed the connection without an answer{f': {error}' if error else ''}")
            )

    def _head(self) -> bool:
        """Parse a response's head and return True, or False while it is incomplete; skip provisional responses."""
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            first, *lines = bytes(self._read[:end]).split(b"\r\n")
            del self._read[: end + 4]
            status_line = _STATUS.fullmatch(first)
            status = int(status_line[1]) if status_line else 0
            if status < _FIRST:
                raise ValueError(first)
            if status < _FINAL:
                continue
            fields = {
                name.strip().lower(): value.strip().lower()
                for name, _, value in (line.partition(b":") for line in lines)
            }
            self._status, self._last, bodiless = status, False, status in _NO_BODY
            self._chunked = not bodiless and b"chunked" in fields.get(b"transfer-encoding", b"")
            length = b"0" if bodiless or self._chunked else fields.get(b"content-length")
            self._left = None if length is None else _number(_DECIMAL, length, 10)
            if b"close" in fields.get(b"connection", b"") or first.startswith(b"HTTP/1.0"):
                self.closed = True  # after this response
            return True
        if len(self._read) > LONGEST_HEAD:
            raise ValueError("too long")
        return False

    def _body(self) -> bool:
        """Discard the received part of the body; return whether the body is complete."""
        while True:
            if self._left is None:
                self._read.clear()
                return False
            discarded = min(self._left, len(self._read))
            del self._read[:discarded]
            self._left -= discarded
            if self._left or not self._chunked:
                return not self._left
            if not self._chunk():
                return False
            if self._chunked is False:
                return True

    def _chunk(self) -> bool:
        """Parse the line before a chunk, or a trailer after the last chunk; return whether the line is complete."""
        end = self._read.find(b"\r\n")
        if end < 0:
            if len(self._read) > LONGEST_HEAD:
                raise ValueError("too long")
            return False
        line = bytes(self._read[:end])
        del self._read[: end + 2]
        if self._last:  # a trailer, or the empty line that ends the body
            self._chunked = bool(line)
        elif line:
            self._left = _number(_HEXADECIMAL, line.partition(b";")[0].strip(), 16)
            self._last = not self._left
        return True

    def _end(self) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_result(self._status)
        if self.closed or self._read:  # its headers ask for it, or data follows the response
            self.close()

    def _late(self, answer: asyncio.Future[int]) -> None:
        if answer is self._answer:
            self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)
            self.close()


def _number(pattern: re.Pattern[bytes], text: bytes, base: int) -> int:
    """Parse a number in HTTP's syntax: int() would also accept signs, spaces and underscores."""
    if not pattern.fullmatch(text):
        raise ValueError(text)
    return int(text, base)
