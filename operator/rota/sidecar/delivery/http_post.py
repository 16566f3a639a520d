"""HTTP/1.1 client for POSTs to one address over kept-alive connections, limited to the needs of deliveries.

aiohttp's client does not report whether a broken connection had been used before: if so, the app most likely closed it
as idle, and the request may be sent again. It also takes four times the CPU time per request.
"""

import asyncio
import re
from collections.abc import Callable
from enum import Enum, auto
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple
from urllib.parse import quote

from rota.aio import ReceiverProtocol, call_after_pending_input

MAX_HEAD_BYTES = 64 * 1024
MAX_CACHED_HEAD_BYTES = 1024  # a longer head is parsed each time
WRITE_CHUNK_BYTES = 64 * 1024  # part of a body to write at once: the transport copies all bytes it cannot send yet
_BODILESS_STATUSES = {204, 304}
_MIN_STATUS = 100
_MIN_FINAL_STATUS = 200  # a lower status is provisional: the final response follows
_STATUS = re.compile(rb"HTTP/1\.[0-9] ([0-9]{3})(?: .*)?", re.DOTALL)
_DECIMAL = re.compile(rb"[0-9]{1,18}")
_HEXADECIMAL = re.compile(rb"[0-9a-f]{1,15}", re.IGNORECASE)
_TARGET_CHARACTERS = "".join(map(chr, range(0x21, 0x7F)))  # unescaped characters in a request line


class ConnectFailedError(Exception):
    """No connection could be opened, so nothing was sent."""


class SendForbiddenError(Exception):
    """The request may not be sent any more."""


class BadResponseError(Exception):
    """The response is missing or invalid."""


class _StaleConnectionError(BadResponseError):
    """A reused connection was closed without a response: the app had most likely closed it as idle."""


class _BodyEnd(Enum):
    """How the end of a response's body is found."""

    LENGTH = auto()  # the body has as many bytes as its header says
    CHUNKS = auto()  # a chunk of size 0 is the last one
    TRAILERS = auto()  # the last chunk has arrived: trailers follow, and an empty line
    CONNECTION = auto()  # the app closes the connection


class HttpPoster:
    """Posts to one address, over a pool of connections."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._idle: list[_Connection] = []
        self._closed = False
        url_host = f"[{host}]" if ":" in host else host
        self._host_header = f"host: {url_host}:{port}\r\n".encode()

    async def post(
        self, path: str, headers: bytes, body: bytes, timeout_seconds: float, may_send: Callable[[], bool]
    ) -> int:
        """Return the response's status; raise TimeoutError without one in time, or one of this module's errors.

        `may_send` is called last, right before sending: connecting takes time, in which the process may stall.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        length = str(len(body)).encode()
        head = b"".join((_request_line(path), self._host_header, headers, b"content-length: ", length, b"\r\n\r\n"))
        connection = self._take_idle() or await self._connect(deadline)
        try:
            status = await connection.send_request(head, body, deadline, may_send)
        except _StaleConnectionError:  # the app has most likely not read the request
            status = 0
        if not status:  # repeat the request on a new connection; not in the handler, see docker/compile_sidecar.py
            connection = await self._reconnect(deadline)
            status = await connection.send_request(head, body, deadline, may_send)
        if self._closed:
            connection.close()
        elif not connection.closed:
            self._idle.append(connection)
        return status

    def _take_idle(self) -> "_Connection | None":
        """Return the connection that was used last; None if the app has closed all idle ones."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _reconnect(self, deadline: float) -> "_Connection":
        """Connect again, to repeat a request. If that fails, raise BadResponseError instead of ConnectFailedError.

        The request was sent before, and the app may have crashed on it.
        """
        try:
            return await self._connect(deadline)
        except ConnectFailedError:
            message = "The app closed the connection without a response and accepts no new one"
            raise BadResponseError(message) from None

    async def _connect(self, deadline: float) -> "_Connection":
        address = f"{self.host}, port {self.port}"
        try:
            async with asyncio.timeout_at(deadline):
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, self.host, self.port)
        except TimeoutError:  # nothing was sent, so this is not a late response
            raise ConnectFailedError(f"The app does not accept connections at {address}") from None
        except OSError as error:
            raise ConnectFailedError(f"No process listens at {address}: {error.strerror or error}") from None
        return connection

    def close(self) -> None:
        """Close idle connections now, and each other one after its response."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


@lru_cache(16)
def _request_line(path: str) -> bytes:
    return f"POST {quote(path, safe=_TARGET_CHARACTERS)} HTTP/1.1\r\n".encode()


class _ResponseHead(NamedTuple):
    """The parsed head of a response."""

    status: int
    body_end: _BodyEnd
    body_bytes: int  # 0 if chunks or the connection's end delimit the body
    closes: bool  # whether the app closes the connection after the response


class _Connection(ReceiverProtocol):
    """One connection, with one request at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.closed = False
        self._is_reused = False  # whether an earlier request was sent over it
        self._response: asyncio.Future[int] | None = None  # the status, while a request is open
        self._write_resumed: asyncio.Future[None] | None = None  # pending while the transport's buffer is full
        self._received = bytearray()  # bytes that are not parsed yet
        self._has_received = False  # whether bytes of the current response have arrived
        self._status = 0  # status of the current response; 0 until its head is complete
        self._body_end = _BodyEnd.LENGTH
        self._bytes_left = 0  # bytes of the body, or of the current chunk, that have not arrived yet
        self._close_after_response = False  # the response's head asks for this
        self._deadline = inf  # of the open request, by the loop's clock; inf without one
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = inf  # when the timer calls; never after `_deadline`, maybe before: for an earlier request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - narrows the type in asyncio's signature
        self.transport = transport

    async def send_request(self, head: bytes, body: bytes, deadline: float, may_send: Callable[[], bool]) -> int:
        """Send a request and return the response's status; close the connection on an error or a cancellation.

        The timeout fails the response's future instead of cancelling the caller. So a response that arrived in time
        counts, even if this process stalled and reads it late (`call_after_pending_input`).
        """
        if not may_send():
            self.close()  # an app may serve one connection at a time: an unused one would block it
            raise SendForbiddenError
        self._response = asyncio.get_running_loop().create_future()
        self._status = 0
        self._has_received = False
        self._set_deadline(deadline)
        try:
            await self._send(head, body, self._response)
            return await self._response
        except BaseException:
            self.close()
            raise
        finally:
            self._deadline = inf
            self._response = None
            self._is_reused = True

    async def _send(self, head: bytes, body: bytes, response: asyncio.Future[int]) -> None:
        """Write a request; a large body in parts, as fast as they are sent, until a response arrives."""
        if len(body) <= WRITE_CHUNK_BYTES:
            self.transport.write(head + body)
            return
        self.transport.write(head)
        body_view = memoryview(body)  # slices of it are not copies
        for start in range(0, len(body), WRITE_CHUNK_BYTES):
            if self._write_resumed:
                awaited: list[asyncio.Future[Any]] = [self._write_resumed, response]
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                self.close()  # the app may wait for the rest of the body, and read no other request
                return
            self.transport.write(body_view[start : start + WRITE_CHUNK_BYTES])

    def pause_writing(self) -> None:
        self._write_resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._write_resumed:
            self._write_resumed.set_result(None)
            self._write_resumed = None

    def close(self) -> None:
        self.closed = True
        self._cancel_timer()
        self.transport.abort()  # do not wait until all bytes are sent: an app that hangs may never read them

    def data_received(self, data: bytes) -> None:
        if self._response is None or self._response.done():
            self.close()  # no request is open: otherwise these bytes would be taken for the next request's response
            return
        self._received += data
        self._has_received = True
        try:
            has_head = self._status > 0 or self._read_head()
            if has_head and self._skip_body():
                self._complete_response()
        except ValueError:
            self._fail(BadResponseError("The app's response is not valid HTTP"))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._cancel_timer()
        if self._response is None or self._response.done():
            return
        if self._status and self._body_end is _BodyEnd.CONNECTION:
            self._complete_response()
        elif self._is_reused and not self._has_received:
            self._fail(_StaleConnectionError())
        else:
            cause = f": {error}" if error else ""
            self._fail(BadResponseError(f"The app closed the connection without a response{cause}"))

    def _read_head(self) -> bool:
        """Parse a response's head, skipping provisional responses; return whether it is complete."""
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            text = bytes(self._received[:end])
            del self._received[: end + 4]
            head = _parse_head(text) if end <= MAX_CACHED_HEAD_BYTES else _parse_head.__wrapped__(text)
            if head.status < _MIN_FINAL_STATUS:
                continue
            self._status = head.status
            self._body_end = head.body_end
            self._bytes_left = head.body_bytes
            self._close_after_response = head.closes
            return True
        if len(self._received) > MAX_HEAD_BYTES:
            raise ValueError("too long")
        return False

    def _skip_body(self) -> bool:
        """Discard the received part of the body; return whether the body is complete."""
        if self._body_end is _BodyEnd.CONNECTION:
            self._received.clear()
            return False  # `connection_lost` completes the response
        while True:
            discarded = min(self._bytes_left, len(self._received))
            del self._received[:discarded]
            self._bytes_left -= discarded
            if self._bytes_left:
                return False
            if self._body_end is _BodyEnd.LENGTH:
                return True
            line = self._take_line()
            if line is None:
                return False
            if self._ends_body(line):
                return True

    def _take_line(self) -> bytes | None:
        """Take the next line from the received bytes; None while it is incomplete."""
        end = self._received.find(b"\r\n")
        if end < 0:
            if len(self._received) > MAX_HEAD_BYTES:
                raise ValueError("too long")
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        return line

    def _ends_body(self, line: bytes) -> bool:
        """Process a line of a chunked body, and return whether it ends the body.

        It is the size of a chunk, the empty end of a chunk's data, or a trailer.
        """
        if self._body_end is _BodyEnd.TRAILERS:
            return not line
        if line:  # the size of the next chunk
            self._bytes_left = _parse_number(_HEXADECIMAL, line.partition(b";")[0].strip(), 16)
            if not self._bytes_left:
                self._body_end = _BodyEnd.TRAILERS
        return False

    def _complete_response(self) -> None:
        if self._response and not self._response.done():
            self._response.set_result(self._status)
        has_surplus_bytes = bool(self._received)  # the response's own bytes were removed; these belong to no request
        if self._close_after_response or has_surplus_bytes:
            self.close()

    def _set_deadline(self, deadline: float) -> None:
        """Set the deadline of the open request. A timer that an earlier request started, and that is due before, stays.

        A connection starts few timers, because most requests are answered long before their deadlines.
        """
        self._deadline = deadline
        if deadline < self._timer_due:
            self._cancel_timer()
            self._timer_due = deadline
            self._timer = call_after_pending_input(deadline, self._on_timer, deadline)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._timer_due = inf

    def _on_timer(self, due: float) -> None:
        """Fail the open request if its deadline is over, else wait for its deadline; without one, stop."""
        if due != self._timer_due:
            return  # the timer was cancelled, but its call was queued already (`call_after_pending_input`)
        self._timer = None
        self._timer_due = inf
        if self._deadline <= asyncio.get_running_loop().time():
            self._fail(TimeoutError())
        elif self._deadline < inf:
            self._set_deadline(self._deadline)

    def _fail(self, error: Exception) -> None:
        if self._response and not self._response.done():
            self._response.set_exception(error)
            self.close()


@lru_cache(16)
def _parse_head(text: bytes) -> _ResponseHead:
    """Parse a response's head; raise ValueError if it is invalid. Cached, since most apps send the same head again."""
    first, *lines = text.split(b"\r\n")
    status_line = _STATUS.fullmatch(first)
    status = int(status_line[1]) if status_line else 0
    if status < _MIN_STATUS:
        raise ValueError(first)
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip().lower()
    closes = b"close" in fields.get(b"connection", b"") or first.startswith(b"HTTP/1.0")
    body_bytes = 0
    if status < _MIN_FINAL_STATUS or status in _BODILESS_STATUSES:
        body_end = _BodyEnd.LENGTH
    elif b"chunked" in fields.get(b"transfer-encoding", b""):  # overrides the length
        body_end = _BodyEnd.CHUNKS
    elif b"content-length" in fields:
        body_end = _BodyEnd.LENGTH
        body_bytes = _parse_number(_DECIMAL, fields[b"content-length"], 10)
    else:
        body_end = _BodyEnd.CONNECTION
    return _ResponseHead(status, body_end, body_bytes, closes)


def _parse_number(pattern: re.Pattern[bytes], text: bytes, base: int) -> int:
    """Parse a number in HTTP's syntax: int() would also accept signs, spaces and underscores."""
    if not pattern.fullmatch(text):
        raise ValueError(text)
    return int(text, base)
