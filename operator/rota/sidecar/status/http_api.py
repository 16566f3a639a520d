"""What a sidecar answers everybody on the pod's address: probes, metrics, and whether it has drained."""

import asyncio
from typing import Protocol

from aiohttp import web

from rota.http_server import SharedResponse, listen
from rota.metrics import Format
from rota.sidecar.status.control_api import LIMITS, Control, Reports, encode_report
from rota.sidecar.status.control_api import Shell as Controlled
from rota.sidecar.status.waiting_hooks import WaitingHooks

PORT = 9911
# How long the hooks of app containers wait for the sidecar's hook, which runs at the same time. If no drain begins,
# only the app's container is being stopped. A node on which many pods end at once needs seconds to run that hook.
DRAIN_BEGINS_SECONDS = 10.0


class Status(Reports, Protocol):
    """What everybody may ask of the member."""

    def unready(self) -> str:
        """Say why the member cannot work, if so."""

    def metrics(self, style: Format) -> bytes:
        """Render what is counted."""


class Shell(Controlled, Protocol):
    """What is answered from."""

    @property
    def status(self) -> Status:
        """What the member says of itself."""

    @property
    def ends(self) -> asyncio.Event:
        """Set once a drain has begun that lasts until the pod ends."""

    async def drained(self) -> None:
        """Wait until everything is given up."""


class Page:
    """The routes; those of the control port are among them for a member without a key."""

    def __init__(self, shell: Shell, control: Control) -> None:
        """Answer nothing yet."""
        self._shell = shell
        self._control = control
        self._waiting_hooks = WaitingHooks()

    async def serve(self, address: str, port: int = PORT) -> web.AppRunner:
        """Answer from now on, until the runner is cleaned up."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/drained", self._drained),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
            ]
        )
        # An operator of the previous version knows no control port: it must not see silence here.
        report = web.get("/v1/report", SharedResponse(self._report, {"content-type": "application/json"}).respond)
        app.add_routes([report] if self._control.is_signed else self._control.routes)
        return await listen(app, address, port, limits=LIMITS)

    async def _report(self) -> bytes:
        return encode_report(self._shell)

    async def _drained(self, request: web.Request) -> web.Response:
        """Let the hook of an app's container wait for the drain, if one begins."""
        with self._waiting_hooks.protect(request):
            try:
                async with asyncio.timeout(DRAIN_BEGINS_SECONDS):
                    await self._shell.ends.wait()
            except TimeoutError:
                return web.Response(text="no drain has begun\n")
            await self._shell.drained()
        return web.Response(text="drained\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        style = Format.accepted(request.headers.get("accept", ""))
        return web.Response(body=self._shell.status.metrics(style), headers={"content-type": style.value})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="lives\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        why = self._shell.status.unready()
        return web.Response(status=503 if why else 200, text=f"{why or 'ready'}\n")
