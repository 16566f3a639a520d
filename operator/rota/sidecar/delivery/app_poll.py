"""Long poll of an app for messages."""

import asyncio

from aiohttp import web

from rota.sidecar.delivery.scheduler import Batch


class AppPoll:
    """One request for messages, and the deliveries for its response."""

    def __init__(self, request: web.Request, max_messages: int) -> None:
        self.request = request
        self.max_messages = max_messages
        self.batches: list[Batch] = []
        self._has_ended = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether the client still waits."""
        transport = self.request.transport
        return not self._has_ended.is_set() and transport is not None and not transport.is_closing()

    def end_wait(self, batches: list[Batch]) -> None:
        """End the wait with these deliveries, or without any."""
        self.batches = batches
        self._has_ended.set()

    async def wait(self, seconds: float) -> None:
        """Wait for deliveries, for at most that many seconds."""
        if not self._has_ended.is_set():
            timer = asyncio.get_running_loop().call_later(seconds, self._has_ended.set)
            try:
                await self._has_ended.wait()
            finally:
                timer.cancel()
                self._has_ended.set()
