"""POST to one address over HTTP/1.1, by connections that are kept: what a delivery needs of HTTP, and no more.

aiohttp's client, which does all of HTTP, takes four times the processor's time for a request (180 µs against 45), and
does not say whether a connection that broke had been used before: an app that closes an idle one did not hear us.
"""

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from rota.aio import call_after_all

LONGEST_HEAD = 64 * 1024
WRITE_BYTES = 64 * 1024  # of a large body at once: what the transport cannot send yet, it copies
_NO_BODY = {204, 304}
_FIRST, _FINAL = 100, 200  # the lowest status, and the lowest that is no provisional one
_STATUS = re.compile(rb"HTTP/1\.[0-9] ([0-9]{3})(?: .*)?", re.DOTALL)
_DECIMAL, _HEXADECIMAL = re.compile(rb"[0-9]{1,18}"), re.compile(rb"[0-9a-f]{1,15}", re.IGNORECASE)
_TARGET = "".join(map(chr, range(0x21, 0x7F)))  # what a request's first line may hold as it is


class Away(Exception):  # noqa: N818 - it says what is so
    """There is no connection to be had, so nothing was sent."""


class Forbidden(Exception):  # noqa: N818 - as above
    """It is not to be sent any more."""


class Broken(Exception):  # noqa: N818 - as above
    """What came back was no answer."""


class _Stale(Broken):
    """A connection that had been used before was closed without a word: the other end had done with it."""


class Post:
    """Where to post to."""

    def __init__(self, host: str, port: int) -> None:
        """Connect when something is posted."""
        self.host, self.port = host, port
        self._idle: list[_Connection] = []
        self._closed = False
        spelled = f"[{host}]" if ":" in host else host
        self._host = f"host: {spelled}:{port}\r\n".encode()

    async def post(self, path: str, headers: bytes, body: bytes, seconds: float, may: Callable[[], bool]) -> int:
        """Return the status that the other end answers; a TimeoutError if it does not in that time.

        Whether it may be sent is asked last: to connect takes time, in which a process may stand still.
        """
        until, length = asyncio.get_running_loop().time() + seconds, len(body)
        head = b"POST %s HTTP/1.1\r\n%s%scontent-length: %d\r\n\r\n" % (_target(path), self._host, headers, length)
        sent = False
        while True:
            try:
                connection = self._idle.pop() if self._idle and not sent else await self._connected(until)
            except Away:
                if sent:  # it may have died of this very request
                    raise Broken("The app closed the connection without an answer, and takes no other") from None
                raise
            if connection.closed:
                continue
            try:
                status = await connection.ask(head, body, until, may)
            except _Stale:
                sent = True
                continue  # most likely it did not hear us; a new connection is not stale, so this ends
            if self._closed:
                connection.close()
            elif not connection.closed:
                self._idle.append(connection)
            return status

    async def _connected(self, until: float) -> "_Connection":
        where = f"{self.host}, port {self.port}"
        try:
            async with asyncio.timeout_at(until):
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, self.host, self.port)
        except TimeoutError:  # nothing was sent: this is no answer that does not come
            raise Away(f"Nobody takes a connection at {where}") from None
        except OSError as error:
            raise Away(f"Nobody listens at {where}: {error.strerror or error}") from None
        return connection

    def close(self) -> None:
        """Close what is idle now, and what will be."""
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
        self._used = self._heard = False  # an answer; anything of this one
        self._answer: asyncio.Future[int] | None = None
        self._writable: asyncio.Future[None] | None = None  # while the transport has as much as it takes
        self._read = bytearray()
        self._status = 0
        self._left: int | None = None  # bytes of the body that are to come; None: until the connection is closed
        self._chunked = self._last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio's signature says less than it gives
        self.transport = transport

    async def ask(self, head: bytes, body: bytes, until: float, may: Callable[[], bool]) -> int:
        """Send a request and return its answer's status; who stops waiting leaves a connection that is closed.

        Time that is up fails the answer, and not who waits for it: an answer that is here counts, also where the
        process stood still and finds both.
        """
        if not may():
            self.close()  # an app may serve one at a time: a connection without a request would keep it
            raise Forbidden
        self._answer = asyncio.get_running_loop().create_future()
        self._status, self._heard = 0, False
        timer = call_after_all(until, self._late, self._answer)
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
        """Write a request; a large body in parts, as fast as they are sent, unless the answer comes before."""
        if len(body) <= WRITE_BYTES:
            self.transport.write(head + body)
            return
        self.transport.write(head)
        parts = memoryview(body)
        for start in range(0, len(body), WRITE_BYTES):
            if self._writable:
                waited: list[asyncio.Future[Any]] = [self._writable, answer]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                self.close()  # the other end may wait for the rest of the body, and read nothing more
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
        self.transport.abort()  # what was not sent yet is not waited for: who hangs may never read it

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # nobody asked
            self.close()
            return
        self._read += data
        self._heard = True
        try:
            if (self._status or self._head()) and self._body():
                self._end()
        except ValueError:
            self._fail(Broken("The app's answer is no HTTP"))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._answer is None or self._answer.done():
            return
        if self._status and self._left is None and not self._chunked:
            self._end()
        elif self._used and not self._heard:
            self._fail(_Stale())
        else:
            self._fail(Broken(f"The app closed the connection without an answer{f': {error}' if error else ''}"))

    def _head(self) -> bool:
        """Read an answer's head if it is here; a provisional one is passed over."""
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            first, *lines = bytes(self._read[:end]).split(b"\r\n")
            del self._read[: end + 4]
            said = _STATUS.fullmatch(first)
            status = int(said[1]) if said else 0
            if status < _FIRST:
                raise ValueError(first)
            if status < _FINAL:
                continue
            fields = {
                name.strip().lower(): value.strip().lower() for name, _, value in (it.partition(b":") for it in lines)
            }
            self._status, self._last, bodiless = status, False, status in _NO_BODY
            self._chunked = not bodiless and b"chunked" in fields.get(b"transfer-encoding", b"")
            length = b"0" if bodiless or self._chunked else fields.get(b"content-length")
            self._left = None if length is None else _number(_DECIMAL, length, 10)
            if b"close" in fields.get(b"connection", b"") or first.startswith(b"HTTP/1.0"):
                self.closed = True  # after this answer
            return True
        if len(self._read) > LONGEST_HEAD:
            raise ValueError("too long")
        return False

    def _body(self) -> bool:
        """Pass over what is here of the body; whether that was all."""
        while True:
            if self._left is None:
                self._read.clear()
                return False
            passed = min(self._left, len(self._read))
            del self._read[:passed]
            self._left -= passed
            if self._left or not self._chunked:
                return not self._left
            if not self._chunk():
                return False
            if self._chunked is False:
                return True

    def _chunk(self) -> bool:
        """Read the line before the next chunk; whether it is here. After the last one there is none."""
        end = self._read.find(b"\r\n")
        if end < 0:
            if len(self._read) > LONGEST_HEAD:
                raise ValueError("too long")
            return False
        line = bytes(self._read[:end])
        del self._read[: end + 2]
        if self._last:  # a trailer, or the empty line that ends it all
            self._chunked = bool(line)
        elif line:
            self._left = _number(_HEXADECIMAL, line.partition(b";")[0].strip(), 16)
            self._last = not self._left
        return True

    def _end(self) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_result(self._status)
        if self.closed or self._read:  # it said so, or said more than it was asked
            self.close()

    def _late(self, answer: asyncio.Future[int]) -> None:
        if answer is self._answer:
            self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)
            self.close()


def _number(written: re.Pattern[bytes], text: bytes, base: int) -> int:
    """Read a number as HTTP writes them: Python would take signs and more."""
    if not written.fullmatch(text):
        raise ValueError(text)
    return int(text, base)
