"""The relay of a standby replica: requests that it passes on to the leader, and requests that it answers itself."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import unused_port
from yarl import URL

from ground.keys import Authority
from rota.http_server import listen
from rota.kube.http import leader_relay
from rota.kube.http.access.server_tls import server_context
from rota.kube.http.leader_relay import (
    PAGE_CERTIFICATE_ANNOTATION,
    PAGE_URL_ANNOTATION,
    LeaderPage,
    LeaderRelay,
    page_annotations,
    parse_leader_page,
)
from rota.tls import KeyPair, certificate_digest

DIGEST = 64 * "a"
TLS = {PAGE_URL_ANNOTATION: "https://10.1.2.3:8080", PAGE_CERTIFICATE_ANNOTATION: DIGEST}
OPEN = {PAGE_URL_ANNOTATION: "http://10.1.2.3:8080"}
POD = "10.1.2.4"
TOKEN = {"Authorization": "Bearer t"}


@pytest.mark.parametrize(
    ("address", "certificate", "annotations"),
    [
        ("10.1.2.3", DIGEST, TLS),
        ("10.1.2.3", "", OPEN),
        ("fd00::3", "", {PAGE_URL_ANNOTATION: "http://[fd00::3]:8080"}),
        ("0.0.0.0", DIGEST, {}),
        ("::", "", {}),
        ("rota.example", "", {}),
    ],
)
def test_page_of_the_leader_is_announced_by_its_address(
    address: str, certificate: str, annotations: dict[str, str]
) -> None:
    assert page_annotations(address, 8080, certificate) == annotations


@pytest.mark.parametrize("annotations", [TLS, OPEN, {**OPEN, PAGE_URL_ANNOTATION: "http://[fd00::3]:8080"}])
def test_page_of_the_leader_is_found_by_its_annotations(annotations: dict[str, str]) -> None:
    page = parse_leader_page(annotations, POD, has_tls=PAGE_CERTIFICATE_ANNOTATION in annotations)
    assert page == LeaderPage(URL(annotations[PAGE_URL_ANNOTATION]), annotations.get(PAGE_CERTIFICATE_ANNOTATION, ""))


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        OPEN,
        {PAGE_URL_ANNOTATION: TLS[PAGE_URL_ANNOTATION]},
        {**TLS, PAGE_CERTIFICATE_ANNOTATION: "abc"},
        {**TLS, PAGE_URL_ANNOTATION: "http://10.1.2.3:8080"},
        {**TLS, PAGE_URL_ANNOTATION: "https://evil.example:8080"},
        {**TLS, PAGE_URL_ANNOTATION: "https://127.0.0.1:8080"},
        {**TLS, PAGE_URL_ANNOTATION: "https://[::1"},
        {**TLS, PAGE_URL_ANNOTATION: "https://[::ffff:127.0.0.1]:8080"},
        {**TLS, PAGE_URL_ANNOTATION: "https://0.0.0.0:8080"},
        {**TLS, PAGE_URL_ANNOTATION: "https://169.254.169.254:8080"},
    ],
)
def test_page_with_tls_sends_tokens_to_no_leader_whose_certificate_or_address_is_unknown(
    annotations: dict[str, str],
) -> None:
    assert parse_leader_page(annotations, POD, has_tls=True) is None
    assert parse_leader_page(TLS, "", has_tls=False) is None


@dataclass
class Leader:
    """A leader's page."""

    page: LeaderPage | None = None
    requests: list[web.Request] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if request.path == "/v1/events":
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            await stream.write(b": here\n\n")
            assert request.transport
            request.transport.abort()  # the stream breaks off
            return stream
        if request.path == "/v1/hangs":
            await asyncio.Event().wait()
        if request.path == "/v1/page":
            return web.Response(text="<script>", content_type="text/html")
        body = {"path": request.rel_url.raw_path_qs, "encodings": request.headers.get("Accept-Encoding")}
        return web.json_response(body, status=403, headers={"Cache-Control": "no-store", "Server-Secret": "x"})


async def answer_itself(_: web.Request) -> web.Response:
    return web.Response(text="own")


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    """Run a leader that serves by TLS."""
    leader = Leader()
    pair = Authority(tmp_path, "authority").issue("one", "one")
    keys = KeyPair(pair.certificate.read_text(), pair.key.read_text())
    context = server_context(keys, "")
    app = web.Application()
    port = unused_port()
    app.add_routes([web.get("/{path:.*}", leader.answer)])
    runner = await listen(app, "127.0.0.1", port, get_tls_context=lambda: context)
    leader.page = LeaderPage(URL(f"https://127.0.0.1:{port}"), certificate_digest(keys))
    yield leader
    await runner.cleanup()


@pytest.fixture
async def standby(leader: Leader) -> AsyncIterator[str]:
    """Run a page that relays requests; return its URL."""
    async with LeaderRelay(lambda: leader.page, lambda request: "Authorization" in request.headers) as relay:
        app = web.Application()
        port = unused_port()
        app.add_routes([web.get("/{path:.*}", answer_itself)])
        runner = await listen(app, "127.0.0.1", port, middlewares=[relay.relay])
        yield f"http://127.0.0.1:{port}"
        await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[ClientSession]:
    async with ClientSession() as session:
        yield session


async def test_page_of_a_standby_passes_a_request_on_with_the_users_credentials(
    leader: Leader, standby: str, session: ClientSession
) -> None:
    headers = {**TOKEN, "Impersonate-User": "ann", "Cookie": "secret=1"}
    async with session.get(f"{standby}/v1/groups/shop/a%2Fb?queue=o%20p", headers=headers) as response:
        assert response.status == 403
        assert (await response.json())["path"] == "/v1/groups/shop/a%2Fb?queue=o%20p"
        assert response.headers["Cache-Control"] == "no-store"
        assert "Server-Secret" not in response.headers
    [request] = leader.requests
    assert (request.headers["Authorization"], request.headers["Impersonate-User"]) == ("Bearer t", "ann")
    assert "Cookie" not in request.headers


async def test_page_of_a_standby_requests_no_compression_that_its_client_does_not_accept(standby: str) -> None:
    async with (
        ClientSession(skip_auto_headers=["Accept-Encoding"]) as plain_session,
        plain_session.get(f"{standby}/v1/groups", headers=TOKEN) as response,
    ):
        assert (await response.json())["encodings"] is None


async def test_page_of_a_standby_passes_on_no_request_of_a_foreign_web_page(
    leader: Leader, standby: str, session: ClientSession
) -> None:
    """The name of a foreign site may resolve to this machine."""
    async with session.get(f"{standby}/v1/groups", headers={**TOKEN, "Host": "evil.example"}) as response:
        assert response.status == 403
    assert leader.requests == []


async def test_page_of_a_standby_reuses_its_connection_to_the_leader(
    leader: Leader, standby: str, session: ClientSession
) -> None:
    for _ in range(3):
        async with session.get(f"{standby}/v1/groups", headers=TOKEN) as response:
            await response.read()
    assert len({request.get_extra_info("peername") for request in leader.requests}) == 1


async def test_page_of_a_standby_passes_on_no_web_page(leader: Leader, standby: str, session: ClientSession) -> None:
    async with session.get(f"{standby}/v1/page", headers=TOKEN) as response:
        assert await response.text() == "own"
    assert len(leader.requests) == 1


async def test_page_of_a_standby_sends_no_request_to_a_failed_leader_for_a_while(
    leader: Leader, standby: str, session: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_relay, "HEAD_SECONDS", 0.1)
    for _ in range(2):
        async with session.get(f"{standby}/v1/hangs", headers=TOKEN) as response:
            assert await response.text() == "own"
    assert [request.path for request in leader.requests] == ["/v1/hangs"]


async def test_page_of_a_standby_answers_requests_itself_that_cannot_be_passed_on(
    leader: Leader, standby: str, session: ClientSession
) -> None:
    for path, headers in (
        ("/", TOKEN),  # a file of the page
        ("/metrics", TOKEN),
        ("/v1/groups", {}),  # a user logged in by a certificate
        ("/v1/groups", {**TOKEN, "Rota-Relayed": "1"}),  # from another replica that mistakes this one for the leader
    ):
        async with session.get(standby + path, headers=headers) as response:
            assert await response.text() == "own"
    async with session.head(f"{standby}/v1/groups", headers=TOKEN) as response:
        assert response.status == 200
    assert leader.requests == []


async def test_page_of_a_standby_answers_itself_if_the_leader_cannot_be_reached(
    leader: Leader, standby: str, session: ClientSession
) -> None:
    assert leader.page
    for page in (
        None,
        leader.page._replace(certificate_digest=DIGEST),
        leader.page._replace(url=URL(f"https://127.0.0.1:{unused_port()}")),
    ):
        leader.page = page
        async with session.get(f"{standby}/v1/groups", headers=TOKEN) as response:
            assert await response.text() == "own"
    assert leader.requests == []


async def test_page_of_a_standby_ends_a_stream_that_the_leader_ends(
    leader: Leader, standby: str, session: ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async with session.get(f"{standby}/v1/events", headers=TOKEN) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readline() == b": here\n"
        with pytest.raises(ClientError):
            await response.content.read()
    assert len(leader.requests) == 1
    assert not [record for record in caplog.records if record.exc_info]
