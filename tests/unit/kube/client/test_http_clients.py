"""HTTP clients follow no redirect, decompress no report, and limit responses, except those of the API server."""

import asyncio
import gzip
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

import rota
from builders import a_report
from ground.poll import PATIENCE_SECONDS
from logins import a_kubeconfig, an_api
from rota.kube.client.api import NoResponseError
from rota.kube.members import report_client
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.model import Reason

HOST = "127.0.0.1"
MEBIBYTE = 2**20
UID = "uid-m1"
REDIRECTS = [301, 302, 303, 307, 308]
PAGE = Path(__file__).parents[4] / "docs/decisions/20-http-clients.md"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Recorder:
    """A server that records its requests."""

    def __init__(self, handler: Handler | None = None) -> None:
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._handler = handler

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Record a request and answer it."""
        self.requests.append((request.method, request.path))
        self.headers.append(dict(request.headers))
        return await self._handler(request) if self._handler else web.json_response({})


@asynccontextmanager
async def a_recorder(handler: Handler | None = None) -> AsyncIterator[Recorder]:
    """Start a server on loopback, and stop it."""
    recorder = Recorder(handler)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    recorder.port = int(runner.addresses[0][1])
    try:
        yield recorder
    finally:
        await runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[ReportClient]:
    created = ReportClient()
    yield created
    await created.close()


def redirect_to(port: int, status: int, path: str) -> Handler:
    """Return a handler that sends every request on to another server."""

    async def redirect(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": f"http://{HOST}:{port}{path}"})

    return redirect


@pytest.mark.parametrize("status", REDIRECTS)
async def test_http_client_for_reports_follows_no_redirect_to_another_member(client: ReportClient, status: int) -> None:
    async with a_recorder() as victim, a_recorder(redirect_to(victim.port, status, "/v1/drain")) as attacker:
        endpoint = Endpoint(UID, HOST, attacker.port)
        assert (await client.read(endpoint)).report is None
        assert (await client.read_with_offsets(endpoint))[0].report is None
        assert (await client.long_poll(endpoint, 1)).report is None
        assert await client.read_if_present(endpoint) is None
        await client.drain(endpoint)
        assert len(attacker.requests) == 5
        assert victim.requests == []


async def test_http_client_neither_requests_nor_decompresses_a_compressed_report(
    client: ReportClient,
) -> None:
    compressed_report = gzip.compress(msgspec.json.encode(a_report("m1", 7)))

    async def answer_compressed(_: web.Request) -> web.Response:
        return web.Response(body=compressed_report, headers={"Content-Encoding": "gzip"})

    async with a_recorder(answer_compressed) as member:
        endpoint = Endpoint(UID, HOST, member.port)
        assert (await client.read(endpoint)).report is None
        assert [headers["Accept-Encoding"] for headers in member.headers] == ["identity"]


async def test_http_client_stops_reading_a_report_that_is_too_long(
    client: ReportClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    async def answer_without_end(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while sent < 64 * report_client.MAX_REPORT_BYTES:
            await response.write(bytes(2**16))
            sent += 2**16
        return response

    monkeypatch.setattr(report_client, "MAX_REPORT_BYTES", 2**20)
    async with a_recorder(answer_without_end) as member:
        endpoint = Endpoint(UID, HOST, member.port)
        response = await client.read(endpoint)
    assert (response.report, response.ignored_reason) == (None, Reason.REPORT_TOO_LARGE), (
        "the member counts as reachable"
    )
    assert sent < 64 * report_client.MAX_REPORT_BYTES


async def test_http_client_reads_only_few_large_reports_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_client, "MAX_REPORT_BYTES", 64 * MEBIBYTE)
    monkeypatch.setattr(report_client, "MAX_LARGE_REPORTS", 1)
    monkeypatch.setattr(report_client, "RESPONSE_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    in_progress: set[int] = set()
    most = 0

    async def answer_large(request: web.Request) -> web.StreamResponse:
        nonlocal most
        response = web.StreamResponse()
        await response.prepare(request)
        for sent in range(32):
            await response.write(bytes(MEBIBYTE))
            if sent >= 16:  # far more than all buffers in between hold
                in_progress.add(id(request))
                most = max(most, len(in_progress))
        await response.write_eof()
        in_progress.discard(id(request))
        return response

    client = ReportClient()
    async with a_recorder(answer_large) as member:
        endpoint = Endpoint(UID, HOST, member.port)
        await asyncio.gather(*(client.read(endpoint) for _ in range(4)))
    await client.close()
    assert (len(member.requests), most) == (4, 1)


@pytest.mark.parametrize("status", REDIRECTS)
async def test_http_client_for_the_api_server_follows_no_redirect(status: int, tmp_path: Path) -> None:
    async with a_recorder() as victim, a_recorder(redirect_to(victim.port, status, "/api/v1/pods")) as server:
        async with an_api(a_kubeconfig(tmp_path / "config", f"http://{HOST}:{server.port}")) as api:
            with pytest.raises(
                NoResponseError, match=r"GET /api/v1/pods was redirected to .*; redirects are not followed"
            ):
                await api.list("/api/v1/pods", msgspec.Raw)
            with pytest.raises(NoResponseError, match="POST /api/v1/pods was redirected"):
                await api.create("/api/v1/pods", {}, msgspec.Raw)
            with pytest.raises(NoResponseError, match="was redirected"):
                await api.read_through_proxy("/api/v1/pods/p/proxy/v1/groups", {}, 100)
            async with aclosing(api.watch("/api/v1/pods", msgspec.Raw, "0")) as events:
                with pytest.raises(NoResponseError, match="was redirected"):
                    await anext(events)
        assert len(server.requests) == 4
        assert victim.requests == []


async def test_http_client_limits_the_decompressed_size_of_a_proxied_response(tmp_path: Path) -> None:
    async def answer_with_a_bomb(_: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(bytes(2**24)), headers={"Content-Encoding": "gzip"})

    async with (
        a_recorder(answer_with_a_bomb) as server,
        an_api(a_kubeconfig(tmp_path / "config", f"http://{HOST}:{server.port}")) as api,
    ):
        with pytest.raises(NoResponseError, match="is too large"):
            await api.read_through_proxy("/api/v1/pods/p/proxy/v1/groups", {}, 2**20)


def test_http_client_modules_each_have_a_row_in_the_table_of_http_clients() -> None:
    root = Path(rota.__file__).parent
    openers = {
        f"{path.relative_to(root)}"
        for path in root.rglob("*.py")
        if re.search(
            r"aiohttp\.(ClientSession|request)\(|\.open_session\(|login\.connect\(|create_connection\(_Connection|requests\.Session\(",
            path.read_text(),
        )
    }
    rows = re.findall(r"^\| `([a-z_/]+\.py)`", PAGE.read_text(), re.MULTILINE)
    assert openers <= {*rows}, "docs/decisions/20-http-clients.md"
    kube = ("client/api", "members/report_client", "client/kopf_watch")
    assert openers >= {f"kube/{name}.py" for name in kube}
    assert openers >= {"cli/client/http.py", "sidecar/delivery/http_post.py"}
