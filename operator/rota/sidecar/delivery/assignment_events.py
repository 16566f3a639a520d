"""Which queues are held, told to the app as server-sent events: all of them first, then what changes."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from aiohttp import web

from rota.model import Queue
from rota.ranges import from_ranges, to_ranges
from rota.reports import Report

KEEP_ALIVE = 15.0  # a connection on which nothing is said for longer may be closed on the way

_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store"}


class Assignments:
    """What is held, and who hears of it."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._held: frozenset[Queue] = frozenset()
        self._generation = 0
        self._changed = asyncio.Event()
        self._closed = False

    def told(self, report: Report) -> frozenset[Queue]:
        """Take what the member says of itself; return what it held until now."""
        held, before = frozenset(from_ranges(report.held)), self._held
        self._held, self._generation = held, report.generation
        if held != before:
            self._wake()
        return before - held

    def close(self) -> None:
        """Let everybody go."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, asked: web.Request) -> web.StreamResponse:
        """Tell what is held until nobody listens; who reads slowly hears only of what is so in the end."""
        stream, held, changed = web.StreamResponse(headers=_HEADERS), self._held, self._changed
        with suppress(ConnectionError):
            await stream.prepare(asked)
            await stream.write(self._event("assigned", held))
            while not self._closed:
                try:
                    async with asyncio.timeout(KEEP_ALIVE):
                        await changed.wait()
                except TimeoutError:
                    await stream.write(b": still here\n\n")
                    continue
                before, held, changed = held, self._held, self._changed
                await stream.write(b"".join(self._news(before, held)))
        return stream

    def _news(self, before: frozenset[Queue], held: frozenset[Queue]) -> Iterator[bytes]:
        if revoked := before - held:
            yield self._event("revoked", revoked)
        if assigned := held - before:
            yield self._event("assigned", assigned)

    def _event(self, name: str, queues: frozenset[Queue]) -> bytes:
        told = msgspec.json.encode({"queues": to_ranges(queues), "generation": self._generation})
        return b"event: %s\ndata: %s\n\n" % (name.encode(), told)
