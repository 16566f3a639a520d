"""Unauthenticated HTTP API on the pod's address: probes, metrics, and whether the member has drained."""

import asyncio
from typing import Protocol

from aiohttp import web

from rota.http_server import SharedResponse, listen
from rota.metrics import MetricsFormat
from rota.sidecar.status.control_api import LIMITS, ControlApi, ControlHost, ReportSource, encode_report
from rota.sidecar.status.waiting_hooks import WaitingHooks

PORT = 9911
# An app container's preStop hook waits this long for a drain to start. The hook runs in two cases:
# - The pod ends: the sidecar's own hook starts a drain, within seconds even if many pods of the node end at once.
# - Only the app's container is stopped: no drain starts, and there is nothing to wait for.
DRAIN_START_TIMEOUT_SECONDS = 10.0


class StatusSource(ReportSource, Protocol):
    """The part of the member's status that needs no authentication."""

    def why_unready(self) -> str:
        """Return why the member cannot consume; empty if it can."""

    def render_metrics(self, style: MetricsFormat) -> bytes:
        """Render all metrics."""


class ApiHost(ControlHost, Protocol):
    """The member that this API serves."""

    @property
    def status(self) -> StatusSource:
        """The member's reports, probes and metrics."""

    @property
    def pod_drain_started(self) -> asyncio.Event:
        """An event that is set once a drain has started that lasts until the pod ends."""

    async def wait_drained(self) -> None:
        """Wait until all queues are released."""


class StatusApi:
    """The routes of this port; also those of `ControlApi` if the member has no key, and so no control port."""

    def __init__(self, host: ApiHost, control: ControlApi) -> None:
        self._host = host
        self._control = control
        self._waiting_hooks = WaitingHooks()

    async def serve(self, address: str, port: int = PORT) -> web.AppRunner:
        """Serve until the returned runner is cleaned up."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/drained", self._drained),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
            ]
        )
        # An operator of the previous version does not know the control port: it must get a response here.
        report = web.get("/v1/report", SharedResponse(self._report, {"content-type": "application/json"}).respond)
        # Without a key, all routes of `ControlApi` are here, /v1/report among them.
        app.add_routes([report] if self._control.is_signed else self._control.routes)
        return await listen(app, address, port, limits=LIMITS)

    async def _report(self) -> bytes:
        return encode_report(self._host)

    async def _drained(self, request: web.Request) -> web.Response:
        """Let an app container's hook wait for the drain, if one starts.

        Meanwhile the server does not close its connection for another client (up to a limit, see `WaitingHooks`).
        """
        with self._waiting_hooks.protect(request):
            try:
                async with asyncio.timeout(DRAIN_START_TIMEOUT_SECONDS):
                    await self._host.pod_drain_started.wait()
            except TimeoutError:
                return web.Response(text="no drain has started\n")
            await self._host.wait_drained()
        return web.Response(text="drained\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        style = MetricsFormat.from_accept_header(request.headers.get("accept", ""))
        return web.Response(body=self._host.status.render_metrics(style), headers={"content-type": style.value})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        reason = self._host.status.why_unready()
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ready'}\n")
