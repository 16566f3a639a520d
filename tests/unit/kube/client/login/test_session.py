"""Credentials of requests, renewed when the server rejects them; failures of proxies are reported as a sentence."""

import asyncio
import base64
import json
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from multidict import CIMultiDictProxy

from ground.keys import Authority
from logins import a_kubeconfig, an_api, log_in
from rota.kube.client.api import ApiError
from rota.kube.client.kopf_watch import _session_opener
from rota.kube.client.login import session
from rota.kube.client.login.kubeconfig import LoginError

HOST = "127.0.0.1"
VERSION = "client.authentication.k8s.io/v1"


class Server:
    """An API server that accepts one token and records the requests."""

    def __init__(self) -> None:
        self.accepts = "Bearer t"
        self.port = 0
        self.requests: list[tuple[str, str]] = []
        self.headers: list[CIMultiDictProxy[str]] = []

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        self.headers.append(request.headers)
        if request.headers.get("Authorization") != self.accepts:
            return web.json_response({"kind": "Status", "reason": "Unauthorized", "code": 401}, status=401)
        return web.json_response({"body": await request.text()})


@asynccontextmanager
async def serve(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0, ssl_context=tls)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    async with serve(server.handle) as server.port:
        yield server


async def test_login_sends_token_impersonation_and_user_agent_below_the_servers_path(
    server: Server, tmp_path: Path
) -> None:
    config = a_kubeconfig(tmp_path / "config", f"{server.url}/k8s/clusters/c-1/")
    async with an_api(config, impersonate="jane", impersonate_groups=["a", "b"]) as api:
        await api.get("/api/v1/pods", msgspec.Raw)
    (headers,) = server.headers
    assert server.requests == [("GET", "/k8s/clusters/c-1/api/v1/pods")]
    assert headers["User-Agent"].startswith("rota/")
    assert (headers["Impersonate-User"], headers.getall("Impersonate-Group")) == ("jane", ["a", "b"])


async def test_login_renews_a_token_that_the_server_rejects_and_sends_the_request_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RETRY_SECONDS", -1.0)
    (tmp_path / "token").write_text("t")
    config = a_kubeconfig(tmp_path / "config", server.url, {"tokenFile": "token"})
    async with an_api(config) as api:
        await api.get("/a", msgspec.Raw)
        server.accepts = "Bearer newer"
        with pytest.raises(ApiError) as caught:
            await api.get("/b", msgspec.Raw)
        assert caught.value.status == 401
        (tmp_path / "token").write_text("newer\n")
        body = await api.create("/c", {"sent": "twice"}, msgspec.Raw)
    assert msgspec.json.decode(bytes(body)) == {"body": '{"sent":"twice"}'}
    assert server.requests == [("GET", "/a"), ("GET", "/b"), ("POST", "/c"), ("POST", "/c")]


class CertificateServer:
    """An API server that accepts the client certificates of one common name; `released` ends its watches."""

    def __init__(self) -> None:
        self.accepts = ""
        self.requests: list[tuple[str, str]] = []
        self.watched = asyncio.Event()
        self.released = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport
        certificate = request.transport.get_extra_info("peercert")
        name = dict(part[0] for part in certificate["subject"])["commonName"]
        self.requests.append((name, request.path))
        if name != self.accepts:
            return web.json_response({"kind": "Status", "reason": "Unauthorized", "code": 401}, status=401)
        if request.path == "/websocket":
            websocket = web.WebSocketResponse(protocols=["echo"])
            await websocket.prepare(request)
            await websocket.send_str(name)
            await websocket.close()
            return websocket
        if request.path == "/watch":
            self.watched.set()
            await self.released.wait()
        return web.json_response({"body": await request.text()})


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates", "authority")


@pytest.fixture
async def certificate_server(authority: Authority) -> AsyncIterator[tuple[CertificateServer, str]]:
    pair = authority.issue("server", "server", ips=[HOST])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.own.certificate))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(pair.certificate, pair.key)
    server = CertificateServer()
    async with serve(server.handle, tls) as port:
        yield server, f"https://{HOST}:{port}"


Rotate = Callable[[str], None]


@pytest.fixture(params=["rotated file", "exec plugin"])
def rotating_user(
    request: pytest.FixtureRequest, authority: Authority, tmp_path: Path
) -> tuple[dict[str, Any], Rotate]:
    """Return a kubeconfig's user with a client certificate, and a function that replaces it by one of another name."""
    printed = tmp_path / "printed"

    def rotate(name: str) -> None:
        pair = authority.issue(name, name)
        (tmp_path / "tls.crt").write_bytes(pair.certificate.read_bytes())
        (tmp_path / "tls.key").write_bytes(pair.key.read_bytes())
        status = {"clientCertificateData": pair.certificate.read_text(), "clientKeyData": pair.key.read_text()}
        printed.write_text(json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": status}))

    if request.param == "exec plugin":
        return {"exec": {"apiVersion": VERSION, "command": "cat", "args": [str(printed)]}}, rotate
    return {"client-certificate": "tls.crt", "client-key": "tls.key"}, rotate


async def test_login_repeats_the_first_request_that_is_rejected_after_the_client_certificate_changed(
    certificate_server: tuple[CertificateServer, str],
    rotating_user: tuple[dict[str, Any], Rotate],
    authority: Authority,
    tmp_path: Path,
) -> None:
    (server, url), (user, rotate) = certificate_server, rotating_user
    cluster = {"certificate-authority": str(authority.own.certificate)}
    rotate("old")
    server.accepts = "old"
    async with an_api(a_kubeconfig(tmp_path / "config", url, user, cluster)) as api:
        watch = asyncio.create_task(api.get("/watch", msgspec.Raw))
        await server.watched.wait()
        rotate("new")
        server.accepts = "new"
        body = await api.create("/a", {"sent": "twice"}, msgspec.Raw)
        assert msgspec.json.decode(bytes(body)) == {"body": '{"sent":"twice"}'}
        assert server.requests == [("old", "/watch"), ("old", "/a"), ("new", "/a")]
        await asyncio.gather(*(api.get("/b", msgspec.Raw) for _ in range(5)))
        server.released.set()
        await watch
    assert server.requests[3:] == [("new", "/b")] * 5, "the watch on the old connection was not interrupted"


async def test_login_repeats_concurrent_requests_and_websockets_that_are_rejected_after_the_certificate_changed(
    certificate_server: tuple[CertificateServer, str],
    rotating_user: tuple[dict[str, Any], Rotate],
    authority: Authority,
    tmp_path: Path,
) -> None:
    (server, url), (user, rotate) = certificate_server, rotating_user
    cluster = {"certificate-authority": str(authority.own.certificate)}
    rotate("old")
    async with an_api(a_kubeconfig(tmp_path / "config", url, user, cluster)) as api:
        rotate("new")
        server.accepts = "new"

        async def open_websocket() -> str:
            async with api.websocket("/websocket", {}, "echo") as websocket:
                return await websocket.receive_str()

        name, *_ = await asyncio.gather(open_websocket(), *(api.get("/a", msgspec.Raw) for _ in range(5)))
        assert name == "new"
    async with await log_in(a_kubeconfig(tmp_path / "config", url, user, cluster)) as login:
        rotate("newest")
        server.accepts = "newest"
        await login.verify()
        assert not login.problem


async def test_login_renews_credentials_in_the_background(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "RENEW_SECONDS", -1.0)
    monkeypatch.setattr(session, "RETRY_SECONDS", -1.0)
    (tmp_path / "token").write_text("t")
    config = a_kubeconfig(tmp_path / "config", server.url, {"tokenFile": "token"})
    async with await log_in(config) as login, login.open_session() as http_session:
        (tmp_path / "token").write_text("newer")
        server.accepts = "Bearer newer"
        for _ in range(100):
            async with http_session.get(f"{login.server}/a") as response:
                if response.status == 200:
                    break
        assert response.status == 200
        assert server.requests.count(("GET", "/a")) > 1, "the first request did not wait"
        config.unlink()
        while "config does not exist" not in caplog.text:
            async with http_session.get(f"{login.server}/b") as response:
                assert response.status == 200
            await asyncio.sleep(0.01)
        assert not login.problem, "the credentials are still accepted"
        server.accepts = "nobody"
        async with http_session.get(f"{login.server}/c") as response:
            assert response.status == 401
        assert "config does not exist" in login.problem


async def test_login_runs_an_exec_plugin_again_only_when_its_token_expires_or_is_rejected(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RENEW_SECONDS", -1.0)
    runs = tmp_path / "runs"
    text = (
        f"import json; runs = open({str(runs)!r}, 'a'); runs.write('x'); runs.close();"
        f"status = dict(token='t%d' % len(open({str(runs)!r}).read()), expirationTimestamp='2999-01-01T00:00:00Z');"
        f"print(json.dumps(dict(apiVersion={VERSION!r}, kind='ExecCredential', status=status)))"
    )
    program = {"exec": {"apiVersion": VERSION, "command": sys.executable, "args": ["-c", text]}}
    server.accepts = "Bearer t1"
    async with an_api(a_kubeconfig(tmp_path / "config", server.url, program)) as api:
        for _ in range(5):
            await api.get("/a", msgspec.Raw)
        assert runs.read_text() == "x"
        server.accepts = "Bearer t2"
        await asyncio.gather(*(api.get("/b", msgspec.Raw) for _ in range(5)))
    assert runs.read_text() == "xx"


async def test_login_sends_the_token_to_no_other_server(server: Server, tmp_path: Path) -> None:
    async def redirect(_: web.BaseRequest) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"{server.url}/api/v1/pods")

    async with serve(redirect) as port:
        login = await log_in(a_kubeconfig(tmp_path / "config", f"http://{HOST}:{port}"))
        http_session = (await _session_opener(login)()).aiohttp_session
        async with login, http_session:
            with pytest.raises(aiohttp.ClientConnectionError, match=r"A redirect to http://.* is not followed"):
                await http_session.get(f"{login.server}/api/v1/pods")
    assert not server.requests


async def test_login_verification_reports_rejected_credentials(server: Server, tmp_path: Path) -> None:
    async with await log_in(a_kubeconfig(tmp_path / "config", server.url)) as login:
        await login.verify()
        server.accepts = "nobody"
        with pytest.raises(LoginError, match=r"^The API server http://.* rejects the credentials; log in again$"):
            await login.verify()


async def test_login_verification_reports_a_redirect_and_passes_a_server_that_is_down_behind_its_proxy(
    tmp_path: Path,
) -> None:
    async def redirect(_: web.BaseRequest) -> web.StreamResponse:
        raise web.HTTPFound("https://login.example/")

    async def fail(_: web.BaseRequest) -> web.StreamResponse:
        raise web.HTTPBadGateway

    async with serve(redirect) as port, await log_in(a_kubeconfig(tmp_path / "a", f"http://{HOST}:{port}")) as login:
        with pytest.raises(LoginError, match=r"redirects to https://login\.example/; configure that address instead"):
            await login.verify()
    async with serve(fail) as port:
        proxied = {"proxy-url": f"http://{HOST}:{port}"}
        config = a_kubeconfig(tmp_path / "b", "https://api.example:6443", cluster=proxied)
        async with await log_in(config) as login:
            await login.verify()


async def test_login_keeps_its_server_when_the_context_names_another_one(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RETRY_SECONDS", -1.0)
    config = a_kubeconfig(tmp_path / "config", server.url)
    async with await log_in(config) as login, login.open_session() as http_session:
        a_kubeconfig(config, "https://another", {"token": "of another"})
        server.accepts = "nobody"
        async with http_session.get(f"{login.server}/a") as response:
            assert response.status == 401
        assert "names another server now; start again" in login.problem
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer t"}


async def test_login_verification_reports_a_proxy_that_rejects_the_request_or_does_not_respond(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        raise web.HTTPForbidden

    server = "https://api.example:6443"
    async with serve(refuse) as port:
        config = a_kubeconfig(tmp_path / "config", server, cluster={"proxy-url": f"http://{HOST}:{port}"})
        async with await log_in(config) as login:
            with pytest.raises(
                LoginError, match=rf"^The API server {server} cannot be reached: the proxy refused with 403"
            ):
                await login.verify()
    config = a_kubeconfig(tmp_path / "config", server, cluster={"proxy-url": f"http://{HOST}:{unused_tcp_port}"})
    async with await log_in(config) as login:
        with pytest.raises(LoginError, match=r"the proxy 127\.0\.0\.1:\d+ does not respond \(Connection refused\)"):
            await login.verify()


async def test_login_verification_passes_while_the_server_is_not_running_yet(
    tmp_path: Path, unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with await log_in(a_kubeconfig(tmp_path / "config", f"http://{HOST}:{unused_tcp_port}")) as login:
        await login.verify()
    assert "cannot be reached: Connection refused" in caplog.text


def token_of(**claims: Any) -> dict[str, Any]:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return {"auth-provider": {"name": "oidc", "config": {"id-token": f"e30.{payload}.c2ln"}}}


async def test_login_with_openid_connect_sends_the_id_token(server: Server, tmp_path: Path) -> None:
    user = token_of(exp=32503680000)
    server.accepts = f"Bearer {user['auth-provider']['config']['id-token']}"
    async with an_api(a_kubeconfig(tmp_path / "config", server.url, user)) as api:
        await api.get("/a", msgspec.Raw)


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        (token_of(exp=1), "The kubeconfig's id-token has expired; run any command of kubectl, which renews it"),
        ({"auth-provider": {"name": "oidc"}}, "has no readable id-token; log in with kubectl"),
        ({"auth-provider": {"name": "oidc", "config": {"id-token": "a.bm8.c"}}}, "has no readable id-token"),
        ({"auth-provider": {"name": "gcp"}}, "Kubernetes no longer supports the auth-provider 'gcp'"),
        ({"auth-provider": "oidc"}, "The kubeconfig's auth-provider cannot be used: Expected `object`, got `str`"),
        ({"tokenFile": "missing"}, "The file of the kubeconfig's token cannot be read: No such file"),
        ({"token": "a\nb"}, "The token has characters that no header may have"),
        ({"token": "t", "as": "jane\r\nX: y"}, "The value of Impersonate-User has characters"),
        ({"token": "t", "as-groups": ["a"]}, "needs a user, too"),
        ({"client-certificate-data": "bm9uZQ=="}, "has a client certificate without its key, or a key alone"),
        (
            {"client-certificate-data": "abc", "client-key-data": "abc"},
            "client certificate is not valid base64",
        ),
        (
            {"client-certificate": "none.crt", "client-key": "none.key"},
            "client certificate cannot be read: No such file",
        ),
        ({"client-certificate-data": "bm9uZQ==", "client-key-data": "bm9uZQ=="}, "The client certificate or its key"),
    ],
)
async def test_login_with_unusable_credentials_is_one_sentence(
    user: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(LoginError) as caught:
        await log_in(a_kubeconfig(tmp_path / "config", "https://one", user))
    assert sentence in str(caught.value)
    assert str(caught.value).isprintable()


async def test_login_with_an_unusable_certificate_authority_is_one_sentence(tmp_path: Path) -> None:
    authority = {"certificate-authority-data": "bm9uZQ=="}
    with pytest.raises(LoginError, match=r"^The cluster's certificate authority is not a PEM certificate"):
        await log_in(a_kubeconfig(tmp_path / "config", "https://one", cluster=authority))


async def test_login_impersonates_no_group_without_a_user(tmp_path: Path) -> None:
    with pytest.raises(LoginError, match="needs a user, too; give --as"):
        await log_in(a_kubeconfig(tmp_path / "config", "https://one"), impersonate_groups=["a"])
