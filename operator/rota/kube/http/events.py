"""Server-sent events of the page: each stream is woken when a group that it shows has changed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from rota.kube.client.objects import Key

MAX_STREAMS = 64  # of events; a further one ends the oldest, whose page connects again


class Listener:
    """A stream of events about all groups, or about one."""

    def __init__(self, only: Key | None) -> None:
        self.ended = False
        self._only = only
        self._news: set[Key] = set()
        self._awake = asyncio.Event()

    def tell(self, groups: tuple[Key, ...]) -> None:
        """Note what changed; of no group: the operator itself."""
        mine = [it for it in groups if self._only in {None, it}]
        if mine or not groups:
            self._news.update(mine)
            self._awake.set()

    def end(self) -> None:
        """End the stream."""
        self.ended = True
        self._awake.set()

    async def news(self) -> list[Key]:
        """Wait until something changed, and return of which groups."""
        await self._awake.wait()
        self._awake.clear()
        news, self._news = sorted(self._news), set()
        return news


class Hub:
    """Who is told what changed."""

    def __init__(self) -> None:
        """Know nobody."""
        self._listeners: dict[Listener, None] = {}  # the oldest first
        self.closed = False

    def tell(self, *groups: Key) -> None:
        """Say that these groups changed; without any, that the operator did (whether it leads)."""
        for listener in self._listeners:
            listener.tell(groups)

    @contextmanager
    def listening(self, only: Key | None = None) -> Iterator[Listener]:
        """Publish changes to one more stream from now on, in place of the oldest if there are too many."""
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
        """Let everybody go; for `on_shutdown` of an application."""
        self.closed = True
        self.tell()
