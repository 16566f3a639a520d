"""Liveness and readiness probes of the operator, and the route of its metrics."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from rota.http_server import SharedResponse, listen
from rota.kube.client.informer import Informer, without_refused_namespaces
from rota.kube.http.access.page_security import OPEN, PageSecurity, Tls
from rota.kube.telemetry.operator_metrics import GroupSource, OperatorMetrics
from rota.metrics import Format

PORT = 8080
PROBE_PORT = 8081  # for the kubelet; it has its own connection limit, so clients of PORT cannot block probes
DEAF_SECONDS = 180.0  # a watch without events for so long is broken: the API server sends bookmarks more often


def ages(following: Sequence[Informer[Any]]) -> Mapping[str, float]:
    """Return the seconds since the last watch event of each kind; with one watch per namespace, the longest of them."""
    now, silences = asyncio.get_running_loop().time(), dict[str, float]()
    for watch in following:
        silences[watch.resource] = max(silences.get(watch.resource, 0.0), now - watch.heard)
    return silences


def metrics(measures: OperatorMetrics, groups: GroupSource) -> web.RouteDef:
    """Return the route that Prometheus scrapes."""
    responses = {
        style: SharedResponse(partial(measures.text, groups, style), {"content-type": style.value}) for style in Format
    }

    async def respond(request: web.Request) -> web.StreamResponse:
        return await responses[Format.accepted(request.headers.get("accept", ""))].respond(request)

    return web.get("/metrics", respond)


class ProbeServer:
    """Serves the probes: `/healthz` fails when a watch is silent for too long, and the kubelet restarts the operator.

    `/readyz` fails until all watched kinds are listed, and while the API server rejects the operator's credentials.
    """

    def __init__(
        self,
        following: Sequence[Informer[Any]],
        leads: Callable[[], bool],
        more: Sequence[web.RouteDef] = (),
        *,
        is_rejected: Callable[[], bool] = lambda: False,
    ) -> None:
        """`more` are further routes, served on the main port only."""
        self._following, self._leads, self._more = following, leads, more
        self._is_rejected = is_rejected

    async def serve(
        self,
        address: str,
        port: int = PORT,
        probe_port: int | None = None,
        security: PageSecurity = OPEN,
        inner: Sequence[Middleware] = (),
    ) -> AsyncExitStack:
        """Serve until the returned stack is closed; probes on their own port need no login.

        `inner` are middlewares of the main port, for requests that passed all checks.
        """
        async with AsyncExitStack() as serving:
            app = self._app(security)
            app.add_routes(self._more)
            await _listen(serving, app, address, port, "--port", tls=security.tls, inner=inner)
            if probe_port is not None:
                await _listen(serving, self._app(OPEN), address, probe_port, "--probe-port")
            return serving.pop_all()

    def _app(self, security: PageSecurity) -> web.Application:
        app = web.Application(middlewares=security.middlewares)
        app.add_routes([web.get("/healthz", self._health), web.get("/readyz", self._readiness)])
        return app

    async def _health(self, _: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        deaf = [watch.path for watch in without_refused_namespaces(self._following) if now - watch.heard > DEAF_SECONDS]
        if deaf:
            return web.Response(status=503, text=f"nothing was heard for {DEAF_SECONDS:.0f} s of {', '.join(deaf)}\n")
        return web.Response(text="leads\n" if self._leads() else "stands by\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        if self._is_rejected():
            return web.Response(status=503, text="the API server rejects the credentials; see the log\n")
        waiting = [watch.path for watch in without_refused_namespaces(self._following) if not watch.listed.is_set()]
        if waiting:
            return web.Response(status=503, text=f"not listed yet: {', '.join(waiting)}\n")
        return web.Response(text="ready\n")


async def _listen(
    serving: AsyncExitStack,
    app: web.Application,
    address: str,
    port: int,
    option: str,
    *,
    tls: Tls | None = None,
    inner: Sequence[Middleware] = (),
) -> None:
    hint = f"; give another --address or {option}"
    runner = await listen(app, address, port, hint, also_on_loopback=True, tls=tls, inner=inner)
    serving.push_async_callback(runner.cleanup)
