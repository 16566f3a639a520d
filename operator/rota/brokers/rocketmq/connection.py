"""One connection to one address: many requests at a time, each with its own patience.

A request that is not answered in time is given up alone: the connection stays, and with it what else waits on it. When
the connection breaks, everything that waits on it fails at once, for no answer can come any more.
"""

import asyncio
import itertools
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import msgspec

from rota.brokers import Unreachable
from rota.brokers.rocketmq.frames import Decoder, Frame, Malformed, encode

CONNECT_SECONDS = 3.0
# A peer that has vanished is noticed by the kernel, not by a late answer: one that only stands still may go on.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}

Serve = Callable[[Frame], Frame | None]  # what the other side asks; None: no answer


class Connection(asyncio.Protocol):
    """An open connection; `closed` says why it is not any more."""

    def __init__(self, address: str, serve: Serve) -> None:
        """Take `open` instead."""
        self.address = address
        self.closed = ""
        self._serve = serve
        self._decoder = Decoder()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._numbers = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []

    @classmethod
    async def open(cls, address: str, serve: Serve, tls: ssl.SSLContext | None = None) -> "Connection":
        """Connect; what cannot be reached is `Unreachable`."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: cls(address, serve), host.strip("[]"), int(port), ssl=tls
                )
        except TimeoutError:
            raise Unreachable(f"{address} did not take a connection within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise Unreachable(f"{address} cannot be reached: {error.strerror or error}") from None
        except (ValueError, OverflowError):
            raise Unreachable(f"{address!r} is no address; write host:port") from None
        return connection

    async def ask(self, request: Frame, seconds: float) -> Frame:
        """Send a request and return the answer to it, whatever it says."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        self._send(msgspec.structs.replace(request, opaque=number))
        answer: asyncio.Future[Frame] = loop.create_future()
        self._waiting[number] = answer
        patience = loop.call_later(seconds, self._give_up, answer, seconds)  # a third of what `asyncio.timeout` costs
        try:
            return await answer
        finally:
            patience.cancel()
            self._waiting.pop(number, None)

    def _give_up(self, answer: "asyncio.Future[Frame]", seconds: float) -> None:
        _fail(answer, Unreachable(f"{self.address} did not answer within {seconds:g} s"))

    def tell(self, request: Frame) -> None:
        """Send a request that nobody answers."""
        self._send(msgspec.structs.replace(request.unanswered(), opaque=next(self._numbers)))

    def _send(self, frame: Frame) -> None:
        if self.closed:
            raise Unreachable(f"{self.address} closed the connection: {self.closed}")
        self._write(frame)

    def _write(self, frame: Frame) -> None:
        """Write when the loop's turn ends: once for all that is sent in it, for each write wakes the other side.

        Nobody waits until it is taken: who asks waits for the answer, and that bounds what can pile up.
        """
        self._outgoing.append(encode(frame))
        if len(self._outgoing) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport and not self.closed:
            self._transport.write(b"".join(outgoing))

    def close(self, why: str = "we are done with it") -> None:
        """Close it; what waits on it fails."""
        self._end(why)
        if self._transport:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; keep an eye on a peer that may vanish."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - the loop makes no other
        self._transport = transport
        found = transport.get_extra_info("socket")
        with suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                if hasattr(socket, name):
                    found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        """Hand answers to who waits for them, and requests to who serves."""
        try:
            for frame in self._decoder.feed(data):
                self._take(frame)
        except Malformed as error:
            self.close(str(error))

    def _take(self, frame: Frame) -> None:
        if frame.answers:
            waiting = self._waiting.pop(frame.opaque, None)
            if waiting and not waiting.done():
                waiting.set_result(frame)
            return
        answer = self._serve(frame)
        if answer and not frame.one_way:
            self._write(answer)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail everything that waits."""
        self._end(str(error) if error else "the other side closed it")

    def _end(self, why: str) -> None:
        self.closed = self.closed or why
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            _fail(answer, Unreachable(f"{self.address} closed the connection: {self.closed}"))


def _fail(answer: "asyncio.Future[Frame]", why: Unreachable) -> None:
    if not answer.done():
        answer.set_exception(why)
