"""Long poll of an app for messages."""

import asyncio

from aiohttp import web

from rota.sidecar.delivery.scheduler import Batch


class AppPoll:
    """One request for messages, and the deliveries for its response."""

    def __init__(self, request: web.Request, most: int) -> None:
        self.asked, self.most = request, most
        self.taken: list[Batch] = []
        self._served = asyncio.Event()

    @property
    def there(self) -> bool:
        """Whether the client still waits."""
        transport = self.asked.transport
        return not self._served.is_set() and transport is not None and not transport.is_closing()

    def serve(self, deliveries: list[Batch]) -> None:
        """End the wait with these deliveries, or without any."""
        self.taken = deliveries
        self._served.set()

    async def wait(self, seconds: float) -> None:
        """Wait for deliveries, for at most that many seconds."""
        if not self._served.is_set():
            timer = asyncio.get_running_loop().call_later(seconds, self._served.set)
            try:
                await self._served.wait()
            finally:
                timer.cancel()
                self._served.set()
