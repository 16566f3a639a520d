"""Local offset store of a Broadcasting group: implements `OffsetStore` on the member's own disk."""

import asyncio

from rota.aio import shield_until_done
from rota.model import Queue
from rota.sidecar.storage.offset_files import OffsetFiles


class LocalOffsetStore:
    """Offsets by queue, loaded per topic on first use; disk access runs in a thread, one call at a time."""

    def __init__(self, offset_files: OffsetFiles) -> None:
        self._offset_files = offset_files
        self._loaded_topics: dict[str, dict[Queue, int]] = {}
        self._disk_lock = asyncio.Lock()

    async def committed_offset(self, queue: Queue) -> int | None:
        """Return this member's committed offset; None if it has none."""
        async with self._disk_lock:
            topic_offsets = await self._load_once(queue.topic)
            return topic_offsets.get(queue)

    async def commit(self, queue: Queue, offset: int) -> None:
        """Write an offset to the disk."""
        async with self._disk_lock:
            topic_offsets = await self._load_once(queue.topic)
            await shield_until_done(asyncio.to_thread(self._offset_files.store_offset, queue, offset))
            topic_offsets[queue] = offset

    async def consuming_since(self, topic: str) -> float:
        """Return since when this member consumes a topic."""
        async with self._disk_lock:
            await self._load_once(topic)
            return self._offset_files.consuming_since(topic)

    async def _load_once(self, topic: str) -> dict[Queue, int]:
        if topic not in self._loaded_topics:
            self._loaded_topics[topic] = await asyncio.to_thread(self._offset_files.load, topic)
        return self._loaded_topics[topic]
