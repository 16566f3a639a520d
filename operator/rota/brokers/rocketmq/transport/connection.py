"""One connection to one address: many requests at a time, each with its own patience.

A request that is not answered in time is given up alone: the connection stays, and with it what else waits on it. When
the connection breaks, everything that waits on it fails at once, for no answer can come any more.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf

import msgspec

from rota.aio import call_after_all
from rota.brokers.errors import Unreachable
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.frame_budget import FREE_BYTES, FrameAccount, Reservation
from rota.brokers.rocketmq.wire.addresses import split_address
from rota.brokers.rocketmq.wire.codes import Answer
from rota.brokers.rocketmq.wire.frames import Decoder, Frame, Malformed, encode

CONNECT_SECONDS = 3.0
NEXT_ADDRESS_SECONDS = 0.25  # a name may have several addresses, and the first of them be dead
# Requests that time out one after the other, and in all that time not one frame: there is nothing to be lost any more.
# Inside of a frame it is sooner: of one that tells a wrong length all later answers become a part.
SILENT_SECONDS, INSIDE_SECONDS = 30.0, 10.0
LAST_NUMBER = 2**31 - 1  # of a request; Java has no higher ones
# A peer that has vanished is noticed by the kernel, not by a late answer: one that only stands still may go on.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}

Serve = Callable[[Frame], Frame | None]  # what the other side asks; None: no answer

_log = logging.getLogger(__name__)


class Unasked(Unreachable):
    """It was not even sent what was asked, so it cannot have done it."""


async def _resolve_allowed_addresses(host: str, port: int, policy: AddressPolicy) -> list[str]:
    """Return the IP addresses of a host that may be connected to; raise an OSError if none may."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    allowed = [address for address in addresses if policy.allows(address, port)]
    if not allowed:
        raise OSError(errno.EACCES, f"--broker-networks does not allow {', '.join(addresses)}, port {port}")
    return allowed


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


class Connection(asyncio.Protocol):
    """An open connection; `closed` says why it is not any more."""

    def __init__(self, address: str, serve: Serve, frames: FrameAccount | None = None) -> None:
        """Take `open` instead."""
        self.address = address
        self.closed, self.closed_at = "", 0.0
        self.heard = False  # whether one frame came at least
        self._serve = serve
        self._decoder = Decoder()
        self._frames = frames
        self._room: Reservation | None = None  # of the frame that has begun, if it is a large one
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._number = 0
        self._silent_since = inf  # since when nothing came, though what was asked then was to be answered by now
        self._ending = ""
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._is_writing_paused = False

    @classmethod
    async def open(
        cls,
        address: str,
        serve: Serve,
        tls: ssl.SSLContext | None = None,
        policy: AddressPolicy | None = None,
        *,
        frames: FrameAccount | None = None,
    ) -> "Connection":
        """Connect; what cannot be reached, or may not be by the policy, is `Unreachable`.

        With `frames`, a large frame is read when there is room for it.
        """
        loop, endpoint = asyncio.get_running_loop(), split_address(address)
        if endpoint is None:
            raise Unasked(f"{address!r} is no address; write host:port")
        host, port = endpoint
        create = partial(cls, address, serve, frames)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if policy:
                    return await cls._open_allowed(host, port, create, tls, policy)
                _, connection = await loop.create_connection(
                    create,
                    host,
                    port,
                    ssl=tls,
                    # A cancelled race of addresses leaves a socket open, so there is none where there is one address.
                    happy_eyeballs_delay=None if _is_ip_address(host) else NEXT_ADDRESS_SECONDS,
                )
        except TimeoutError:
            raise Unasked(f"{address} did not take a connection within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise Unasked(f"{address} cannot be reached: {error.strerror or error}") from None
        except ValueError:  # of a name that is none
            raise Unasked(f"{address!r} is no address; write host:port") from None
        return connection

    @staticmethod
    async def _open_allowed(
        host: str,
        port: int,
        create: Callable[[], "Connection"],
        tls: ssl.SSLContext | None,
        policy: AddressPolicy,
    ) -> "Connection":
        """Connect to the first address of a host that is allowed and answers; each has its share of the time."""
        addresses = await _resolve_allowed_addresses(host, port, policy)
        failed: OSError = TimeoutError()
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_SECONDS / len(addresses)):
                    _, connection = await asyncio.get_running_loop().create_connection(
                        create, address, port, ssl=tls, server_hostname=host if tls else None
                    )
                    return connection
            except OSError as error:  # a TimeoutError is one
                failed = error
        raise failed

    async def ask(self, request: Frame, seconds: float) -> Frame:
        """Send a request and return the answer to it, whatever it says."""
        loop, number = asyncio.get_running_loop(), self._next()
        self._send(msgspec.structs.replace(request, opaque=number))
        answer: asyncio.Future[Frame] = loop.create_future()
        self._waiting[number] = answer
        # A third of what `asyncio.timeout` costs, and an answer that is here counts.
        patience = call_after_all(loop.time() + seconds, self._give_up, answer, seconds)
        try:
            return await answer
        finally:
            patience.cancel()
            self._waiting.pop(number, None)
            self._end_when_idle()

    def _next(self) -> int:
        self._number = self._number % LAST_NUMBER + 1
        return self._number

    def _give_up(self, answer: "asyncio.Future[Frame]", seconds: float) -> None:
        """Fail a request that took too long; if nothing comes at all, and for long, then the connection."""
        if answer.done():
            return
        _fail(answer, Unreachable(f"{self.address} did not answer within {seconds:g} s"))
        now = asyncio.get_running_loop().time()
        self._silent_since = min(self._silent_since, now - seconds)
        if now - self._silent_since >= (INSIDE_SECONDS if self._decoder.inside else SILENT_SECONDS):
            self.close(f"no whole frame came for {now - self._silent_since:.0f} s")

    def tell(self, request: Frame) -> None:
        """Send a request that nobody answers."""
        self._send(msgspec.structs.replace(request.unanswered(), opaque=self._next()))

    def _send(self, frame: Frame) -> None:
        if self.closed:
            raise Unasked(f"{self.address} closed the connection: {self.closed}")
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

    def finish(self, why: str) -> None:
        """Close it as soon as nothing waits on it any more; nothing new shall be asked by it."""
        self._ending = why
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self._ending and not self._waiting:
            self.close(self._ending)

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
            return
        if self._frames and self._room is None and self._decoder.announced_bytes > FREE_BYTES:
            self._reserve_room(self._frames)

    def _reserve_room(self, frames: FrameAccount) -> None:
        """Read no more before there is room for the large frame that has begun."""
        if self.closed:
            return
        self._room = frames.reserve(self._decoder.announced_bytes, self._read_on, self.close)
        if not self._room.granted and self._transport:
            self._transport.pause_reading()

    def _release_room(self) -> None:
        room, self._room = self._room, None
        if room:
            room.release()

    def _take(self, frame: Frame) -> None:
        self.heard, self._silent_since = True, inf
        if self._room:
            self._release_room()
        if not frame.answers:
            self._answer(frame)
            return
        waiting = self._waiting.pop(frame.opaque, None)
        if waiting and not waiting.done():
            waiting.set_result(frame)

    def _answer(self, asked: Frame) -> None:
        """Answer what the other side asks; a mistake of who serves shall not cost what waits on the connection."""
        try:
            answer = self._serve(asked)
            if answer and not asked.one_way:
                self._write(answer)
        except Exception:  # noqa: BLE001 - whatever who serves does wrong
            _log.exception("What %s asked, %d, could not be answered", self.address, asked.code)
            if not asked.one_way:
                self._write(asked.reply(Answer.SYSTEM_ERROR, remark="The member could not answer; its log says why"))

    def pause_writing(self) -> None:
        """Read no more from who does not read what it is sent: its questions would pile up as answers."""
        self._is_writing_paused = True
        if self._transport:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        self._is_writing_paused = False
        self._read_on()

    def _read_on(self) -> None:
        """Resume reading unless it is paused for another reason, too."""
        has_room = self._room is None or self._room.granted
        if self._transport and has_room and not self._is_writing_paused:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail everything that waits."""
        self._end(str(error) if error else "the other side closed it")

    def _end(self, why: str) -> None:
        if not self.closed:
            self.closed, self.closed_at = why, asyncio.get_running_loop().time()
            self._decoder = Decoder()  # what has come of a frame is not kept
            self._release_room()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            _fail(answer, Unreachable(f"{self.address} closed the connection: {self.closed}"))


def _fail(answer: "asyncio.Future[Frame]", why: Unreachable) -> None:
    if not answer.done():
        answer.set_exception(why)
