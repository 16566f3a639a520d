"""Server-sent events for the app about the queues that the pod holds: first all of them, then each change.

A held queue is one that the member owns; queues that it drains are not held any more.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from aiohttp import web

from rota.model import Queue
from rota.ranges import from_ranges, to_ranges
from rota.reports import Report

KEEP_ALIVE_SECONDS = 15.0  # seconds between comments: a proxy may close a connection that is silent for longer

_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store"}


class AssignmentStream:
    """Streams the held queues to every connected client."""

    def __init__(self) -> None:
        self._held: frozenset[Queue] = frozenset()
        self._generation = 0
        self._change_event = asyncio.Event()
        self._closed = False

    def update_held(self, report: Report) -> frozenset[Queue]:
        """Set the held queues to those of a report, and stream a change; return queues that are not held any more."""
        held = frozenset(from_ranges(report.held))
        previous = self._held
        self._held = held
        self._generation = report.generation
        if held != previous:
            self._notify_change()
        return previous - held

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._notify_change()

    def _notify_change(self) -> None:
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def stream_changes(self, request: web.Request) -> web.StreamResponse:
        """Stream the held queues until the client disconnects; a slow client skips intermediate states."""
        stream = web.StreamResponse(headers=_HEADERS)
        held = self._held
        changed = self._change_event  # read together with `held`, before the awaits, so that no change is missed
        with suppress(ConnectionError):
            await stream.prepare(request)
            await stream.write(self._encode_event("assigned", held))
            while not self._closed:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    await stream.write(b": still here\n\n")
                    continue
                previous = held
                held = self._held
                changed = self._change_event
                await stream.write(b"".join(self._change_events(previous, held)))
        return stream

    def _change_events(self, previous: frozenset[Queue], held: frozenset[Queue]) -> Iterator[bytes]:
        if revoked := previous - held:
            yield self._encode_event("revoked", revoked)
        if assigned := held - previous:
            yield self._encode_event("assigned", assigned)

    def _encode_event(self, name: str, queues: frozenset[Queue]) -> bytes:
        content = msgspec.json.encode({"queues": to_ranges(queues), "generation": self._generation})
        return b"event: %s\ndata: %s\n\n" % (name.encode(), content)
