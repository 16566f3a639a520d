"""HTTP server of the operator: the liveness and readiness probes, on both of its ports, and the route of its metrics.

The routes of the page (`site.py`) are passed in, and served on the main port only.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from rota.http_server import SharedResponse, listen
from rota.kube.client.informer import Informer, without_forbidden_namespaces
from rota.kube.http.access.page_security import UNRESTRICTED_PAGE, PageSecurity
from rota.kube.telemetry.operator_metrics import GroupSource, OperatorMetrics
from rota.metrics import MetricsFormat

PORT = 8080  # the main port: page, API, metrics and probes
PROBE_PORT = 8081  # for the kubelet; it has its own connection limit, so clients of PORT cannot block probes
# A watch without events for so long is broken: the API server sends bookmarks more often.
MAX_WATCH_SILENCE_SECONDS = 180.0


def watch_ages(informers: Sequence[Informer[Any]]) -> Mapping[str, float]:
    """Return the seconds since the last watch event of each kind; with one watch per namespace, the longest of them."""
    ages: dict[str, float] = {}
    for informer in informers:
        ages[informer.resource] = max(ages.get(informer.resource, 0.0), informer.silent_seconds)
    return ages


def metrics_route(operator_metrics: OperatorMetrics, groups: GroupSource) -> web.RouteDef:
    """Return the route that Prometheus scrapes."""
    responses: dict[MetricsFormat, SharedResponse] = {}
    for style in MetricsFormat:
        render = partial(operator_metrics.render, groups, style)
        responses[style] = SharedResponse(render, {"content-type": style.value})

    async def respond(request: web.Request) -> web.StreamResponse:
        return await responses[MetricsFormat.from_accept_header(request.headers.get("accept", ""))].respond(request)

    return web.get("/metrics", respond)


class ProbeServer:
    """Serves the probes: `/healthz` fails when a watch is silent for too long, and the kubelet restarts the operator.

    `/readyz` fails until all watched kinds are listed, and while the API server rejects the operator's credentials.
    """

    def __init__(
        self,
        informers: Sequence[Informer[Any]],
        is_leading: Callable[[], bool],
        extra_routes: Sequence[web.RouteDef] = (),
        *,
        is_login_rejected: Callable[[], bool] = lambda: False,
    ) -> None:
        """`extra_routes` (page and metrics) are served on the main port only."""
        self._informers = informers
        self._is_leading = is_leading
        self._extra_routes = extra_routes
        self._is_login_rejected = is_login_rejected

    async def serve(
        self,
        address: str,
        port: int = PORT,
        probe_port: int | None = None,
        security: PageSecurity = UNRESTRICTED_PAGE,
        inner: Sequence[Middleware] = (),
    ) -> AsyncExitStack:
        """Serve until the returned stack is closed.

        `probe_port` serves the probes only, without login; None: no second port. `inner` are middlewares of the main
        port that get the requests which passed the checks of `security`.
        """
        async with AsyncExitStack() as serving:
            app = self._build_app(security)
            app.add_routes(self._extra_routes)
            await _listen(serving, app, address, port, "--port", get_tls_context=security.tls, middlewares=inner)
            if probe_port is not None:
                await _listen(serving, self._build_app(UNRESTRICTED_PAGE), address, probe_port, "--probe-port")
            return serving.pop_all()

    def _build_app(self, security: PageSecurity) -> web.Application:
        app = web.Application(middlewares=security.middlewares)
        app.add_routes([web.get("/healthz", self._health), web.get("/readyz", self._readiness)])
        return app

    async def _health(self, _: web.Request) -> web.Response:
        watches = without_forbidden_namespaces(self._informers)
        silent = [watch.path for watch in watches if watch.silent_seconds > MAX_WATCH_SILENCE_SECONDS]
        if silent:
            text = f"no watch event for {MAX_WATCH_SILENCE_SECONDS:.0f} s: {', '.join(silent)}\n"
            return web.Response(status=503, text=text)
        return web.Response(text="leader\n" if self._is_leading() else "standby\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        if self._is_login_rejected():
            return web.Response(status=503, text="the API server rejects the credentials; see the log\n")
        waiting = [watch.path for watch in without_forbidden_namespaces(self._informers) if not watch.listed.is_set()]
        if waiting:
            return web.Response(status=503, text=f"not listed yet: {', '.join(waiting)}\n")
        return web.Response(text="ready\n")


async def _listen(
    serving: AsyncExitStack, app: web.Application, address: str, port: int, option: str, **settings: Any
) -> None:
    hint = f"; give another --address or {option}"
    runner = await listen(app, address, port, hint, also_on_loopback=True, **settings)
    serving.push_async_callback(runner.cleanup)
