"""TLS of the page's port: renewed certificates, unusable certificates, and client certificates of users."""

import asyncio
import logging
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectorCertificateError, ClientError, ClientSession, TCPConnector, web
from aiohttp.typedefs import Handler, Middleware

from ground.keys import Authority, Pair
from ground.poll import soon
from rota.http_server import ServerLimits, limited_site, listen
from rota.kube.client.api import ApiError
from rota.kube.http.access.access import PageAccess, user_of_certificate
from rota.kube.http.access.server_tls import ServerTls, read_page_certificate, self_signed, server_context


class ApiServer:
    """An API server that publishes the authority of client certificates."""

    def __init__(self, authority: str = "") -> None:
        self.authority = authority
        self.problem: Exception | None = None

    async def get(self, path: str, kind: Any) -> Any:
        assert path == "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
        if self.problem:
            raise self.problem
        return kind({"client-ca-file": self.authority} if self.authority else {})


def write_secret(folder: Path, pair: Pair) -> Path:
    """Write a pair into a folder, as the kubelet mounts a Secret."""
    folder.mkdir(exist_ok=True)
    (folder / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (folder / "tls.key").write_bytes(pair.key.read_bytes())
    return folder


async def user_at_server(port: int, trust: ssl.SSLContext) -> str:
    """Return the name of the user that the server recognizes."""
    async with (
        ClientSession(connector=TCPConnector(ssl=trust)) as session,
        session.get(f"https://127.0.0.1:{port}/") as response,
    ):
        return await response.text()


async def serve(tls: ServerTls, port: int, middlewares: Sequence[Middleware] = ()) -> web.AppRunner:
    async def answer(request: web.Request) -> web.Response:
        user = user_of_certificate(request.get_extra_info("peercert"), time.time())
        return web.Response(text=user.name if user else "nobody")

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    return await listen(app, "127.0.0.1", port, get_tls_context=tls.context, middlewares=middlewares)


def trust_context(authority: Authority, user: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.own.certificate))
    if user:
        context.load_cert_chain(user.certificate, user.key)
    return context


async def test_tls_certificate_and_client_authority_that_change_apply_to_new_connections(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    servers = Authority(tmp_path / "a", "servers")
    other_servers = Authority(tmp_path / "b", "others")
    cluster = Authority(tmp_path / "c", "cluster")
    alice = cluster.issue("alice", "alice", "ops")
    folder = write_secret(tmp_path / "tls", servers.issue("page", "page", ips=["127.0.0.1"]))
    api: Any = ApiServer()
    tls = ServerTls(api, [], folder)
    runner = await serve(tls, unused_tcp_port)
    assert await user_at_server(unused_tcp_port, trust_context(servers)) == "nobody"
    assert await user_at_server(unused_tcp_port, trust_context(servers, alice)) == "nobody", (
        "no client authority is known"
    )
    api.authority = cluster.own.certificate.read_text()
    write_secret(folder, other_servers.issue("page", "page", ips=["127.0.0.1"]))
    await tls.refresh()
    assert await user_at_server(unused_tcp_port, trust_context(other_servers, alice)) == "alice"
    assert await user_at_server(unused_tcp_port, trust_context(other_servers)) == "nobody"
    with pytest.raises(ClientConnectorCertificateError):
        await user_at_server(unused_tcp_port, trust_context(servers))
    await runner.cleanup()


async def test_tls_of_a_client_certificate_by_another_authority_fails(tmp_path: Path, unused_tcp_port: int) -> None:
    cluster = Authority(tmp_path / "c", "cluster")
    servers = Authority(tmp_path / "a", "servers")
    api: Any = ApiServer(cluster.own.certificate.read_text())
    tls = ServerTls(api, [], write_secret(tmp_path / "tls", servers.issue("page", "page", ips=["127.0.0.1"])))
    await tls.refresh()
    runner = await serve(tls, unused_tcp_port)
    with pytest.raises((OSError, ClientError)):
        await user_at_server(
            unused_tcp_port, trust_context(servers, servers.issue("mallory", "admin", "system:masters"))
        )
    await runner.cleanup()


async def test_tls_connections_of_a_replaced_client_authority_end_at_their_next_request(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    old = Authority(tmp_path / "a", "old")
    new = Authority(tmp_path / "b", "new")
    servers = Authority(tmp_path / "c", "servers")
    api: Any = ApiServer(old.own.certificate.read_text())
    folder = write_secret(tmp_path / "tls", servers.issue("page", "page", ips=["127.0.0.1"]))
    tls = ServerTls(api, [], folder)
    await tls.refresh()
    no_reviews: Any = None
    connections: set[object] = set()

    @web.middleware
    async def note_connection(request: web.Request, handler: Handler) -> web.StreamResponse:
        connections.add(request.protocol)
        return await handler(request)

    check = PageAccess(no_reviews, tls.has_current_authority).check
    runner = await serve(tls, unused_tcp_port, [check, note_connection])
    trust = trust_context(servers, old.issue("alice", "alice"))
    async with ClientSession(connector=TCPConnector(ssl=trust, limit=1)) as session:

        async def get_user() -> str:
            async with session.get(f"https://127.0.0.1:{unused_tcp_port}/") as response:
                return await response.text()

        assert await get_user() == "alice"
        write_secret(folder, servers.issue("page", "page", ips=["127.0.0.1"]))
        await tls.refresh()
        assert await get_user() == "alice"
        assert len(connections) == 1, "a renewed certificate of the server ends no connection"
        api.authority += new.own.certificate.read_text()
        await tls.refresh()
        assert await get_user() == "alice", "the client connects again without an error"
        assert len(connections) == 2
        api.authority = new.own.certificate.read_text()
        await tls.refresh()
        with pytest.raises((OSError, ClientError)):
            await get_user()
    assert await user_at_server(unused_tcp_port, trust_context(servers, new.issue("bob", "bob"))) == "bob"
    await runner.cleanup()


async def test_tls_stays_unchanged_while_its_files_or_authority_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = Authority(tmp_path / "a", "servers")
    folder = write_secret(tmp_path / "tls", servers.issue("page", "page"))
    api: Any = ApiServer()
    tls = ServerTls(api, [], folder)
    previous_context = tls.context()
    (folder / "tls.key").write_text("torn")
    with caplog.at_level(logging.WARNING):
        await tls.refresh()
        await tls.refresh()
    assert len(caplog.records) == 1
    assert "has no usable tls.crt and tls.key" in caplog.text
    write_secret(folder, servers.issue("page", "page"))
    api.problem = ApiError(403, "Forbidden", "configmaps is forbidden")
    await tls.refresh()
    assert "configmaps is forbidden" in caplog.text
    assert tls.context() is previous_context


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "No such file or directory"),
        ({"tls.crt": "x", "tls.key": "x"}, "correct them"),
    ],
)
def test_tls_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^--page-tls {tmp_path} has no usable tls.crt and tls.key: .*{reason}"):
        read_page_certificate(tmp_path)


async def test_tls_clients_that_are_silent_block_no_other_client(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_site, "MAX_HANDSHAKES", 3)
    context = server_context(self_signed(["localhost", "127.0.0.1"]), "")
    runner = await listen(web.Application(), "127.0.0.1", unused_tcp_port, get_tls_context=lambda: context)
    silent_clients = [await asyncio.open_connection("127.0.0.1", unused_tcp_port) for _ in range(5)]
    trust = ssl.create_default_context()
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE
    assert await user_at_server(unused_tcp_port, trust) == "404: Not Found"
    async with asyncio.timeout(20):
        assert await silent_clients[0][0].read() == b"", "the server closed the oldest connection"
    await runner.cleanup()
    for _, writer in silent_clients:
        writer.close()


async def test_tls_handshakes_that_end_together_stay_within_the_limit_of_connections(unused_tcp_port: int) -> None:
    context = server_context(self_signed(["localhost", "127.0.0.1"]), "")
    limits = ServerLimits(max_connections=3)
    runner = await listen(
        web.Application(), "127.0.0.1", unused_tcp_port, limits=limits, get_tls_context=lambda: context
    )
    clients = [await asyncio.open_connection("127.0.0.1", unused_tcp_port) for _ in range(8)]
    trust = ssl.create_default_context()
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE
    await asyncio.gather(*(writer.start_tls(trust) for _, writer in clients))

    async def has_no_handshakes() -> bool:
        return all(task.get_name() != "TLS handshake" for task in asyncio.all_tasks())

    await soon(has_no_handshakes)
    assert runner.server
    assert sum(connection.transport is not None for connection in runner.server.connections) == limits.max_connections
    await runner.cleanup()
    for _, writer in clients:
        writer.close()
