"""Who asks for messages and waits for them."""

import asyncio

from aiohttp import web

from rota.sidecar.delivery.scheduler import Taken


class Asker:
    """A request for messages, and what it gets."""

    def __init__(self, asked: web.Request, most: int) -> None:
        """Wait for something."""
        self.asked, self.most = asked, most
        self.taken: list[Taken] = []
        self._served = asyncio.Event()

    @property
    def there(self) -> bool:
        """Whether anybody still waits."""
        transport = self.asked.transport
        return not self._served.is_set() and transport is not None and not transport.is_closing()

    def serve(self, taken: list[Taken]) -> None:
        """Get something, or learn that there is nothing."""
        self.taken = taken
        self._served.set()

    async def wait(self, seconds: float) -> None:
        """Wait for something to get."""
        if not self._served.is_set():
            timer = asyncio.get_running_loop().call_later(seconds, self._served.set)
            try:
                await self._served.wait()
            finally:
                timer.cancel()
                self._served.set()
