"""Connections by address: opened when somebody asks, kept, and opened again with growing pauses when they break.

Each address is on its own: one that is dead delays nobody who asks another one.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Iterable

from rota.brokers.errors import Unreachable
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.connection import Connection, Serve, Unasked
from rota.brokers.rocketmq.transport.frame_budget import FrameAccount, FrameBudget
from rota.brokers.rocketmq.wire.codes import Answer
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.signing import Credentials, signed

CALL_SECONDS = 3.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

_log = logging.getLogger(__name__)

Opened = Callable[[str, Frame], None]  # an address that is connected anew, and what is going to be asked by it


class _Place:
    """What is known of one address."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.left: set[Connection] = set()  # by which nothing new is asked; some answers may still come by them
        self.opening = asyncio.Lock()
        self.pause = 0.0
        self.not_before = 0.0
        self.why = ""

    def clear(self) -> None:
        """Let go of a connection that is closed; one on which nothing was heard was as good as none."""
        if self.connection and self.connection.heard:
            self.pause = 0.0
        elif self.connection:
            self.fail(f"{self.connection.address} closed the connection: {self.connection.closed}")
            self.not_before += self.connection.closed_at - asyncio.get_running_loop().time()
        self.connection = None

    def fail(self, why: str) -> None:
        """Note a failure; the next try is later each time."""
        self.pause = min(max(2 * self.pause, FIRST_PAUSE), LONGEST_PAUSE)
        pause = self.pause * random.uniform(0.5, 1.0)  # noqa: S311 - not all at once
        self.not_before, self.why = asyncio.get_running_loop().time() + pause, why

    def leave(self, connection: Connection) -> None:
        """Ask nothing more by a connection, and close it when all that was asked is answered."""
        self.left = {it for it in self.left if not it.closed} | {connection}
        self.pause = 0.0
        if self.connection is connection:
            self.connection = None
        connection.finish("it sends everybody away")

    def close(self, why: str) -> None:
        """Close all there are."""
        for connection in self.left | ({self.connection} if self.connection else set()):
            connection.close(why)


class Connections:
    """All connections of one client."""

    def __init__(
        self,
        serve: Serve,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        credentials: Callable[[], Credentials] | None = None,
        policy: AddressPolicy | None = None,
        frames: FrameBudget | None = None,
        opened: Opened = lambda _, __: None,
    ) -> None:
        """Answer what the other sides ask by `serve`; `opened` is told of every connection.

        With a policy, unreachable and forbidden addresses raise the same message; the log has the reason.
        """
        self._serve, self._opened = serve, opened
        self._tls = tls
        self._policy = policy
        self._frames = FrameAccount(frames) if frames else None
        self._credentials = credentials
        self._places: dict[str, _Place] = {}
        self._closed = False

    async def ask(self, address: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Ask an address; who says GO_AWAY is about to close, and is asked once more by a new connection."""
        try:
            return await self._ask(address, request, seconds)
        except Unreachable as error:
            if self._policy is None:
                raise
            _log.info("%s does not answer: %s", address, error)
            raise type(error)(f"{address} does not answer") from None

    async def _ask(self, address: str, request: Frame, seconds: float) -> Frame:
        request = self._signed(request)
        connection = await self._open(address, request)
        answer = await connection.ask(request, seconds)
        if answer.code == Answer.GO_AWAY and (place := self._places.get(address)):
            place.leave(connection)
            answer = await (await self._open(address, request)).ask(request, seconds)
        return answer

    async def tell(self, address: str, request: Frame) -> None:
        """Tell an address something that it does not answer."""
        (await self._open(address, request)).tell(self._signed(request))

    def keep(self, addresses: Iterable[str]) -> None:
        """Close the connections to all other addresses: a broker that moved left its old one for ever."""
        for address in self._places.keys() - set(addresses):
            self._places.pop(address).close("the address is not in use any more")

    def close(self) -> None:
        """Close all, and open none any more."""
        self._closed = True
        self.keep(())

    def _signed(self, request: Frame) -> Frame:
        return signed(request, self._credentials()) if self._credentials else request

    async def _open(self, address: str, request: Frame) -> Connection:
        if self._closed:
            raise Unasked(f"{address} is not asked any more: this client was closed")
        place = self._places.setdefault(address, _Place())
        if place.connection and not place.connection.closed:
            return place.connection
        async with place.opening:
            if place.connection and not place.connection.closed:
                return place.connection
            place.clear()
            if place.not_before > asyncio.get_running_loop().time():
                raise Unasked(f"{place.why}; it is tried again soon")
            try:
                connection = await Connection.open(
                    address, self._serve, self._tls() if self._tls else None, self._policy, frames=self._frames
                )
            except Unasked as error:
                place.fail(str(error))
                raise
            if self._places.get(address) is not place:
                connection.close("the address went out of use while it was opened")
                raise Unasked(f"{address} went out of use while it was opened")
            place.connection = connection
            self._opened(address, request)
            return connection
