"""Connections by address: opened when somebody asks, kept, and opened again with growing pauses when they break.

Each address is on its own: one that is dead delays nobody who asks another one.
"""

import asyncio
import random
import ssl
from collections.abc import Callable, Iterable

from rota.brokers import Unreachable
from rota.brokers.rocketmq.acl import Credentials, signed
from rota.brokers.rocketmq.codes import Answer
from rota.brokers.rocketmq.connection import Connection, Serve
from rota.brokers.rocketmq.frames import Frame

CALL_SECONDS = 3.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0


class _Place:
    """What is known of one address."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.opening = asyncio.Lock()
        self.pause = 0.0
        self.not_before = 0.0
        self.why = ""


class Connections:
    """All connections of one client."""

    def __init__(
        self,
        serve: Serve,
        *,
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
        opened: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Answer what the other sides ask by `serve`; `opened` is told of every address that is connected anew."""
        self._serve, self._opened = serve, opened
        self._tls = tls
        self._credentials = credentials
        self._places: dict[str, _Place] = {}
        self._closed = False

    async def ask(self, address: str, request: Frame, seconds: float = CALL_SECONDS) -> Frame:
        """Ask an address; who says GO_AWAY is about to close, and is asked once more by a new connection."""
        request = self._signed(request)
        connection = await self._open(address)
        answer = await connection.ask(request, seconds)
        if answer.code == Answer.GO_AWAY:
            connection.close("it sends everybody away")
            answer = await (await self._open(address)).ask(request, seconds)
        return answer

    async def tell(self, address: str, request: Frame) -> None:
        """Tell an address something that it does not answer."""
        (await self._open(address)).tell(self._signed(request))

    def keep(self, addresses: Iterable[str]) -> None:
        """Close the connections to all other addresses: a broker that moved left its old one for ever."""
        for address in self._places.keys() - set(addresses):
            place = self._places.pop(address)
            if place.connection:
                place.connection.close("the address is not in use any more")

    def close(self) -> None:
        """Close all, and open none any more."""
        self._closed = True
        self.keep(())

    def _signed(self, request: Frame) -> Frame:
        return signed(request, self._credentials) if self._credentials else request

    async def _open(self, address: str) -> Connection:
        if self._closed:
            raise Unreachable(f"{address} is not asked any more: this client was closed")
        place = self._places.setdefault(address, _Place())
        if place.connection and not place.connection.closed:
            return place.connection
        async with place.opening:
            if place.connection and not place.connection.closed:
                return place.connection
            now = asyncio.get_running_loop().time
            if now() < place.not_before:
                raise Unreachable(f"{place.why}; it is tried again in {place.not_before - now():.1f} s")
            try:
                place.connection = await Connection.open(address, self._serve, self._tls)
            except Unreachable as error:
                place.pause = min(max(2 * place.pause, FIRST_PAUSE), LONGEST_PAUSE)
                place.not_before = now() + place.pause * random.uniform(0.5, 1.0)  # noqa: S311 - not all at once
                place.why = str(error)
                raise
            if self._places.get(address) is not place:
                place.connection.close("the address went out of use while it was opened")
                raise Unreachable(f"{address} went out of use while it was opened")
            place.pause = 0.0
            self._opened(address)
            return place.connection
