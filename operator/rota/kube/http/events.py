"""Broadcasts changes of groups to the page's streams of server-sent events."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from rota.kube.client.objects import Key

MAX_STREAMS = 64  # a further stream ends the oldest one; the page of that one reconnects


class Listener:
    """One stream's subscription to changes, of all groups or of one group."""

    def __init__(self, only: Key | None) -> None:
        self.ended = False
        self._only = only
        self._news: set[Key] = set()
        self._awake = asyncio.Event()

    def tell(self, groups: tuple[Key, ...]) -> None:
        """Record changed groups and wake the stream; an empty tuple means that the operator itself changed."""
        mine = [group for group in groups if self._only in {None, group}]
        if mine or not groups:
            self._news.update(mine)
            self._awake.set()

    def end(self) -> None:
        """End the stream."""
        self.ended = True
        self._awake.set()

    async def news(self) -> list[Key]:
        """Wait for a change; return the groups that changed since the last call."""
        await self._awake.wait()
        self._awake.clear()
        changed, self._news = sorted(self._news), set()
        return changed


class Broadcaster:
    """Broadcasts changes of groups to all open streams."""

    def __init__(self) -> None:
        self._listeners: dict[Listener, None] = {}  # the oldest first
        self.closed = False

    def tell(self, *groups: Key) -> None:
        """Publish that these groups changed; without groups, that the operator itself did, such as its leadership."""
        for listener in self._listeners:
            listener.tell(groups)

    @contextmanager
    def listening(self, only: Key | None = None) -> Iterator[Listener]:
        """Subscribe a stream until the context ends. At MAX_STREAMS, the oldest stream ends."""
        if len(self._listeners) >= MAX_STREAMS:
            oldest = next(iter(self._listeners))
            del self._listeners[oldest]
            oldest.end()
        listener = Listener(only)
        self._listeners[listener] = None
        try:
            yield listener
        finally:
            self._listeners.pop(listener, None)

    async def close(self, _: web.Application | None = None) -> None:
        """End all streams; for `on_shutdown` of an application."""
        self.closed = True
        self.tell()
