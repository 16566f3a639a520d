"""What the operator answers over HTTP: whether it lives, and whether it sees."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from rota.kube.follow import Follower
from rota.listening import listen

PORT = 8080
DEAF_SECONDS = 180.0  # a watch that is silent for so long hears nothing any more: the server sends bookmarks


class Page:
    """`/healthz` fails when a watch fell silent, so that the kubelet starts us anew; `/readyz` until all is listed."""

    def __init__(self, following: Sequence[Follower[Any]], leads: Callable[[], bool]) -> None:
        """Answer nothing yet."""
        self._following, self._leads = following, leads

    async def serve(self, address: str, port: int = PORT) -> web.AppRunner:
        """Answer from now on, until the runner is cleaned up."""
        app = web.Application()
        app.add_routes([web.get("/healthz", self._health), web.get("/readyz", self._readiness)])
        return await listen(app, address, port, "; give another --address or --port")

    async def _health(self, _: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        deaf = [it.path for it in self._following if now - it.heard > DEAF_SECONDS]
        if deaf:
            return web.Response(status=503, text=f"nothing was heard for {DEAF_SECONDS:.0f} s of {', '.join(deaf)}\n")
        return web.Response(text="leads\n" if self._leads() else "stands by\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        waiting = [it.path for it in self._following if not it.listed.is_set()]
        if waiting:
            return web.Response(status=503, text=f"not listed yet: {', '.join(waiting)}\n")
        return web.Response(text="ready\n")
