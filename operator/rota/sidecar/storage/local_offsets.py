"""Local offset store of a Broadcasting group: implements `OffsetStore` on the member's own disk."""

import asyncio

from rota.aio import shield_until_done
from rota.model import Queue
from rota.sidecar.storage.offset_files import OffsetFiles


class LocalOffsetStore:
    """Offsets by queue, loaded per topic on first use; disk access runs in a thread, one call at a time."""

    def __init__(self, offsets: OffsetFiles) -> None:
        self._offsets = offsets
        self._known: dict[str, dict[Queue, int]] = {}
        self._one = asyncio.Lock()

    async def committed(self, queue: Queue) -> int | None:
        """Return this member's committed offset; None if it has none."""
        async with self._one:
            return (await self._of(queue.topic)).get(queue)

    async def commit(self, queue: Queue, offset: int) -> None:
        """Write an offset to the disk."""
        async with self._one:
            topic_offsets = await self._of(queue.topic)
            await shield_until_done(asyncio.to_thread(self._offsets.keep, {queue: offset}))
            topic_offsets[queue] = offset

    async def begun(self, topic: str) -> float:
        """Return since when this member consumes a topic."""
        async with self._one:
            await self._of(topic)
            return self._offsets.begun(topic)

    async def _of(self, topic: str) -> dict[Queue, int]:
        if topic not in self._known:
            self._known[topic] = await asyncio.to_thread(self._offsets.load, topic)
        return self._known[topic]
