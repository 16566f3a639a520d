"""Brokers in memory that respond late."""

import asyncio
from collections.abc import Mapping

from rota.brokers.memory import MemoryCluster


class SlowCluster(MemoryCluster):
    """Brokers that respond to requests for a route once `released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.released = asyncio.Event()

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        self.asked.set()
        await self.released.wait()
        return await super().queue_counts(topic)
