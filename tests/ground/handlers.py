"""Handlers of the HTTP servers that tests start in their own process."""

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler


def cancel_at_cleanup(app: web.Application) -> None:
    """Cancel the handlers that still run when the app is cleaned up.

    aiohttp forgets a handler whose client has disconnected, and lets it run on.
    """
    running: set[asyncio.Task[Any]] = set()

    @web.middleware
    async def track(request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task
        running.add(task)
        task.add_done_callback(running.discard)
        return await handler(request)

    async def cancel(_: web.Application) -> None:
        for task in running:
            task.cancel()

    app.middlewares.append(track)
    app.on_cleanup.append(cancel)
