"""Remoting connection to one address: multiplexes concurrent requests, each with its own timeout.

A request that times out fails alone: other requests stay pending. Only when no complete frame has arrived for too long
(SILENT_SECONDS), the connection is closed, and all pending requests fail at once.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from math import inf

import msgspec

from rota.aio import ReceiverProtocol, call_after_pending_input
from rota.brokers.errors import UnreachableError
from rota.brokers.rocketmq.transport.frame_budget import MAX_UNRESERVED_BYTES, FrameAccount, FrameReservation
from rota.brokers.rocketmq.wire.codes import ResponseCode
from rota.brokers.rocketmq.wire.frames import Decoder, Frame, MalformedFrameError, encode

# A peer is silent since the oldest timed-out request was sent, or since its last complete frame if that is later. When
# a request times out, the connection is closed if its peer has been silent for SILENT_SECONDS. While a frame is
# incomplete, the limit is INCOMPLETE_FRAME_SECONDS: a frame with a wrong length would swallow all later responses.
SILENT_SECONDS = 30.0
INCOMPLETE_FRAME_SECONDS = 10.0
MAX_OPAQUE = 2**31 - 1  # the highest request number: Java's largest int
# By TCP keepalive, the kernel detects a peer that has vanished. A timeout does not show that: the peer may be paused.
_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}

RequestHandler = Callable[[Frame], Frame | None]  # handles a request of the peer; None: no response

_log = logging.getLogger(__name__)


class NotSentError(UnreachableError):
    """The request was not sent, so the peer cannot have executed it."""


class _ReadFlow:
    """Pauses reading from the peer while the peer's large frame waits for memory, or while the peer does not read."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reservation: FrameReservation | None = None  # memory for the incomplete frame; None: it is small
        self._is_peer_reading = True

    def reserve(self, frame_account: FrameAccount, size_bytes: int, on_rejected: Callable[[str], None]) -> None:
        """Pause reading until the budget has room for the large frame that has begun."""
        self.reservation = frame_account.reserve(size_bytes, self._resume, on_rejected)
        if not self.reservation.granted and self.transport:
            self.transport.pause_reading()

    def release(self) -> None:
        """End the reservation: the frame is complete, or the connection is closed."""
        reservation = self.reservation
        self.reservation = None
        if reservation:
            reservation.release()

    def set_peer_reading(self, *, is_reading: bool) -> None:
        """Pause while the peer does not read: responses to its requests would pile up."""
        self._is_peer_reading = is_reading
        if is_reading:
            self._resume()
        elif self.transport:
            self.transport.pause_reading()

    def _resume(self) -> None:
        """Resume reading unless another reason to pause remains."""
        has_room = self.reservation is None or self.reservation.granted
        if self.transport and has_room and self._is_peer_reading:
            self.transport.resume_reading()


class Connection(ReceiverProtocol):
    """One connection; `close_reason` is empty while it is open, then the reason."""

    def __init__(self, address: str, handle_request: RequestHandler, frame_account: FrameAccount | None = None) -> None:
        self.address = address
        self.close_reason = ""
        self.closed_at = 0.0
        self.has_received = False  # whether at least one frame has arrived
        self._handle_request = handle_request
        self._decoder = Decoder()
        self._frame_account = frame_account
        self._read_flow = _ReadFlow()
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._last_opaque = 0
        self._last_frame_at = -inf
        self._silent_since = inf  # see SILENT_SECONDS; inf: no request has timed out since the last frame
        self._pending_close_reason = ""  # if not empty, the connection is closed once no request is pending
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []

    async def call(self, request: Frame, seconds: float) -> Frame:
        """Send a request and return its response, also one with an error code."""
        loop = asyncio.get_running_loop()
        if self.close_reason:
            raise NotSentError(self.describe_close())
        number = self._last_opaque % MAX_OPAQUE + 1
        self._last_opaque = number
        self._write(msgspec.structs.replace(request, opaque=number))
        response: asyncio.Future[Frame] = loop.create_future()
        self._pending[number] = response
        # Costs a third of `asyncio.timeout`, and accepts a response that has arrived but was not read yet.
        timeout = call_after_pending_input(loop.time() + seconds, self._on_timeout, response, seconds)
        try:
            return await response
        finally:
            timeout.cancel()
            self._pending.pop(number, None)
            self._close_if_idle()

    def _on_timeout(self, response: "asyncio.Future[Frame]", seconds: float) -> None:
        """Fail a request that timed out; close the connection if the peer has been silent for too long."""
        if response.done():
            return
        _fail(response, UnreachableError(f"{self.address} did not respond within {seconds:g} s"))
        now = asyncio.get_running_loop().time()
        sent_at = now - seconds
        silent_since = max(sent_at, self._last_frame_at)
        self._silent_since = min(self._silent_since, silent_since)  # the oldest request counts
        silent_seconds = now - self._silent_since
        if silent_seconds >= (INCOMPLETE_FRAME_SECONDS if self._decoder.is_inside_frame else SILENT_SECONDS):
            self.close(f"no complete frame arrived for {silent_seconds:.0f} s")

    def _write(self, frame: Frame) -> None:
        """Queue a frame; all frames of one event loop turn are written at once, since each write wakes the peer.

        No caller waits for the write itself. Callers wait for the responses, which limits the unsent data.
        """
        self._outgoing.append(encode(frame))
        if len(self._outgoing) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        outgoing = self._outgoing
        self._outgoing = []
        if self._transport and not self.close_reason:
            self._transport.write(b"".join(outgoing))

    def close(self, reason: str = "it is no longer needed") -> None:
        """Close the connection; pending requests fail."""
        self._mark_closed(reason)
        if self._transport:
            self._transport.abort()

    def describe_close(self) -> str:
        """Return a sentence with the reason why the connection was closed."""
        return f"The connection to {self.address} was closed: {self.close_reason}"

    def close_when_idle(self, reason: str) -> None:
        """Close the connection when no request is pending any more; callers must send no new ones."""
        self._pending_close_reason = reason
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._pending_close_reason and not self._pending:
            self.close(self._pending_close_reason)

    # Callbacks of asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport; enable TCP keepalive to detect a vanished peer."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - create_connection passes no other
        self._transport = transport
        self._read_flow.transport = transport
        sock = transport.get_extra_info("socket")
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE_OPTIONS.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        """Pass responses to callers, and requests to `handle_request`; reserve memory for the rest of a large frame."""
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except MalformedFrameError as error:
            self.close(str(error))
            return
        if self._frame_account and self._read_flow.reservation is None and not self.close_reason:
            announced_bytes = self._decoder.announced_bytes
            if announced_bytes > MAX_UNRESERVED_BYTES:
                self._read_flow.reserve(self._frame_account, announced_bytes, self.close)

    def _on_frame(self, frame: Frame) -> None:
        self.has_received = True
        self._last_frame_at = asyncio.get_running_loop().time()
        self._silent_since = inf
        if self._read_flow.reservation:
            self._read_flow.release()
        if not frame.is_response:
            self._answer_request(frame)
            return
        pending = self._pending.pop(frame.opaque, None)
        if pending and not pending.done():
            pending.set_result(frame)

    def _answer_request(self, request: Frame) -> None:
        """Answer a request of the peer; an exception in the handler must not end the connection's pending requests."""
        try:
            response = self._handle_request(request)
            if response and not request.is_one_way:
                self._write(response)
        except Exception:  # noqa: BLE001 - the handler may raise anything
            _log.exception("Request %d of %s could not be answered", request.code, self.address)
            if not request.is_one_way:
                self._write(
                    request.make_response(
                        ResponseCode.SYSTEM_ERROR, remark="The member failed to answer; its log has the error"
                    )
                )

    def pause_writing(self) -> None:
        """Stop reading from a peer that does not read."""
        self._read_flow.set_peer_reading(is_reading=False)

    def resume_writing(self) -> None:
        """Resume reading once the peer reads again."""
        self._read_flow.set_peer_reading(is_reading=True)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all pending requests."""
        self._mark_closed(str(error) if error else "the peer closed the connection")

    def _mark_closed(self, reason: str) -> None:
        if not self.close_reason:
            self.close_reason = reason
            self.closed_at = asyncio.get_running_loop().time()
            self._decoder = Decoder()  # frees the buffer of an incomplete frame
            self._read_flow.release()
        pending = self._pending
        self._pending = {}
        for response in pending.values():
            _fail(response, UnreachableError(self.describe_close()))


def _fail(response: "asyncio.Future[Frame]", error: UnreachableError) -> None:
    if not response.done():
        response.set_exception(error)
