"""The offsets of a Broadcasting group, on the member's own disk: `Store`."""

import asyncio

from rota.aio import to_the_end
from rota.model import Queue
from rota.sidecar.storage.offset_files import Offsets


class Local:
    """Offsets by queue; the disk is waited for in a thread, one call at a time."""

    def __init__(self, offsets: Offsets) -> None:
        """Read a topic when it is first asked for."""
        self._offsets = offsets
        self._known: dict[str, dict[Queue, int]] = {}
        self._one = asyncio.Lock()

    async def committed(self, queue: Queue) -> int | None:
        """Return where this member is, or None where it never was."""
        async with self._one:
            return (await self._of(queue.topic)).get(queue)

    async def commit(self, queue: Queue, offset: int) -> None:
        """Put it on the disk."""
        async with self._one:
            known = await self._of(queue.topic)
            await to_the_end(asyncio.to_thread(self._offsets.keep, {queue: offset}))
            known[queue] = offset

    async def begun(self, topic: str) -> float:
        """Return since when this member works a topic."""
        async with self._one:
            await self._of(topic)
            return self._offsets.begun(topic)

    async def _of(self, topic: str) -> dict[Queue, int]:
        if topic not in self._known:
            self._known[topic] = await asyncio.to_thread(self._offsets.load, topic)
        return self._known[topic]
