"""Broadcasts changes of groups to the page's streams of server-sent events, which `site.py` writes.

Kubernetes Events are another thing: `kube/reconcile/status_publisher.py` posts these.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from rota.kube.client.objects import ObjectKey

MAX_STREAMS = 64  # at the limit, a new stream ends the oldest one, whose page then reconnects


class Listener:
    """One stream's subscription to changes, of all groups or of one group."""

    def __init__(self, group: ObjectKey | None) -> None:
        """`group`: the group whose changes the stream gets; None: all groups."""
        self.is_ended = False
        self._group = group
        self._changed_groups: set[ObjectKey] = set()
        self._changed = asyncio.Event()

    def notify(self, groups: tuple[ObjectKey, ...]) -> None:
        """Record changed groups and wake the stream; an empty tuple means that the operator itself changed."""
        watched = [group for group in groups if self._group is None or group == self._group]
        if watched or not groups:
            self._changed_groups.update(watched)
            self._changed.set()

    def end(self) -> None:
        """End the stream."""
        self.is_ended = True
        self._changed.set()

    async def wait_for_changes(self) -> list[ObjectKey]:
        """Wait for a change or the stream's end; return the groups that changed since the last call, maybe none."""
        await self._changed.wait()
        self._changed.clear()
        changed = sorted(self._changed_groups)
        self._changed_groups = set()
        return changed


class Broadcaster:
    """Broadcasts changes of groups to all open streams."""

    def __init__(self) -> None:
        self._listeners: dict[Listener, None] = {}  # the oldest first
        self.is_closed = False  # set before the last notification; each stream then ends itself

    def publish(self, *groups: ObjectKey) -> None:
        """Publish that these groups changed; without groups, that the operator itself did, such as its leadership."""
        for listener in self._listeners:
            listener.notify(groups)

    @contextmanager
    def subscribe(self, group: ObjectKey | None = None) -> Iterator[Listener]:
        """Subscribe a stream until the context ends. At MAX_STREAMS, the oldest stream ends."""
        if len(self._listeners) >= MAX_STREAMS:
            oldest = next(iter(self._listeners))
            del self._listeners[oldest]
            oldest.end()
        listener = Listener(group)
        self._listeners[listener] = None
        try:
            yield listener
        finally:
            self._listeners.pop(listener, None)

    async def close(self, _: web.Application | None = None) -> None:
        """End all streams, as the server shuts down; the signature is that of aiohttp's `on_shutdown` handlers."""
        self.is_closed = True
        self.publish()
