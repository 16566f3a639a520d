"""`rota status` at an operator that serves users of the cluster: over a port that the API server forwards."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

from ground.keys import Authority
from ground.poll import PATIENCE_SECONDS, soon
from rota.cli import main
from rota.cli.client import forward, leader_connection
from rota.cli.client.requests import OperatorRequestError
from rota.cli.client.watch import Target
from rota.cli.commands import page
from rota.http_server import listen
from rota.kube.client.login import session
from rota.kube.client.login.kubeconfig import LoginOptions
from rota.kube.http.access.access import user_of_certificate
from rota.kube.http.access.server_tls import self_signed, server_context

LEASE = "/apis/coordination.k8s.io/v1/namespaces/rota-system/leases/rota"
PODS = "/api/v1/namespaces/rota-system/pods"
GROUPS = {"operator": {"identity": "rota-0", "version": "0", "leads": True}, "groups": []}


class Operator:
    """An operator that records its users."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.users: list[str] = []
        self.headers: list[str] = []
        self.is_waiting = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def events(self, request: web.Request) -> web.StreamResponse:
        if "stream" in request.query:
            stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await stream.prepare(request)
            await stream.write(b": here\n\n")
            await asyncio.Event().wait()
        self.is_waiting.set()
        await self.may_answer.wait()
        return web.json_response({})

    async def groups(self, request: web.Request) -> web.Response:
        user = user_of_certificate(request.get_extra_info("peercert"), time.time())
        self.users.append(user.name if user else "")
        self.tokens.append(request.headers.get("Authorization", ""))
        self.headers.append(request.headers.get("Impersonate-User", ""))
        if self.tokens[-1] == "Bearer outdated":
            return web.json_response({"error": "Log in again"}, status=401)
        return web.json_response(GROUPS)

    @asynccontextmanager
    async def serve(self, authority: str, port: int) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes([web.get("/v1/groups", self.groups), web.get("/v1/events", self.events)])
        context = server_context(self_signed(["localhost", "127.0.0.1"]), authority)
        runner = await listen(app, "127.0.0.1", port, get_tls_context=lambda: context)
        yield
        await runner.cleanup()


class ApiServer:
    """An API server that forwards connections to one port, as a kubelet does."""

    def __init__(self, port: int) -> None:
        self.leader = "rota-0"
        self.status = 0  # of the response to a forwarding request; 0: forward
        self.error = ""
        self.requests: list[tuple[str, str]] = []
        self._port = port

    async def lease(self, _: web.Request) -> web.Response:
        spec = {"holderIdentity": self.leader, "leaseDurationSeconds": 15, "renewTime": "2999-01-01T00:00:00.000000Z"}
        metadata = {"name": "rota", "annotations": {"rota.dev/page-auth": "Kubernetes"}}
        return web.json_response({"kind": "Lease", "metadata": metadata, "spec": spec})

    async def forward(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.match_info["pod"], request.query["ports"]))
        if self.status:
            return web.json_response({"kind": "Status", "message": "no"}, status=self.status)
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        for channel in (0, 1):
            await socket.send_bytes(bytes([channel]) + (8080).to_bytes(2, "little"))
        if self.error:
            await socket.send_bytes(b"\1" + self.error.encode())
            await socket.close()
            return socket
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def relay_responses() -> None:
            while content := await reader.read(1000):
                await socket.send_bytes(b"\0" + content)

        relay = asyncio.create_task(relay_responses())
        try:
            async for message in socket:
                assert message.type is aiohttp.WSMsgType.BINARY
                assert message.data[0] == 0
                writer.write(message.data[1:])
        finally:
            relay.cancel()
            writer.close()
        return socket


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "keys", "cluster")


@pytest.fixture
async def operator(authority: Authority, unused_tcp_port: int) -> AsyncIterator[Operator]:
    operator = Operator()
    async with operator.serve(authority.own.certificate.read_text(), unused_tcp_port):
        yield operator


@pytest.fixture
async def api(unused_tcp_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    api = ApiServer(unused_tcp_port)
    app = web.Application()
    app.add_routes([web.get(LEASE, api.lease), web.get(PODS + "/{pod}/portforward", api.forward)])
    async with TestServer(app) as server:
        write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{server.port}", token="t")  # noqa: S106
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield api


def write_kubeconfig(file: Path, url: str, **user: Any) -> None:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me", "namespace": "shop"}}],
        "clusters": [{"name": "one", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": user}],
    }
    file.write_text(yaml.safe_dump(config))


def change_user(file: Path, **user: Any) -> None:
    url = yaml.safe_load(file.read_text())["clusters"][0]["cluster"]["server"]
    write_kubeconfig(file, url, **user)


async def rota(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


async def assert_rejected(sentence: str) -> None:
    result = await rota("status")
    assert result.exit_code == 2, result.output
    assert result.output.startswith("rota: "), result.output
    assert sentence in result.output
    assert len(result.output.splitlines()) == 1


async def test_cli_sends_the_users_token_over_a_forwarded_port(api: ApiServer, operator: Operator) -> None:
    result = await rota("status", "-o", "json")
    assert json.loads(result.output) == {**GROUPS, "groups": []}
    assert (operator.tokens, operator.users) == (["Bearer t"], [""])
    assert api.requests == [("rota-0", "8080")]


async def test_cli_sends_the_impersonated_user_over_a_forwarded_port(api: ApiServer, operator: Operator) -> None:
    assert (await rota("status", "--as", "alice")).exit_code == 0
    assert operator.headers == ["alice"]
    assert len(api.requests) == 1


@pytest.mark.usefixtures("api")
async def test_cli_shows_the_users_certificate_over_a_forwarded_port(
    operator: Operator, authority: Authority, tmp_path: Path
) -> None:
    pair = authority.issue("alice", "alice", "ops")
    encoded = {
        "client-certificate-data": base64.b64encode(pair.certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(pair.key.read_bytes()).decode(),
    }
    change_user(tmp_path / "config", **encoded)
    result = await rota("status")
    assert result.exit_code == 0, result.output
    assert (operator.tokens, operator.users) == ([""], ["alice"])


@pytest.mark.usefixtures("api")
async def test_cli_shows_a_renewed_certificate_of_an_exec_plugin_and_completes_requests_with_the_former_one(
    operator: Operator, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renew(name: str) -> None:
        pair = authority.issue(name, name)
        status = {
            "clientCertificateData": pair.certificate.read_text(),
            "clientKeyData": pair.key.read_text(),
            "expirationTimestamp": "2026-01-01T00:00:00Z",
        }
        version = "client.authentication.k8s.io/v1"
        credential = {"apiVersion": version, "kind": "ExecCredential", "status": status}
        (tmp_path / "printed").write_text(json.dumps(credential))
        plugin = {"command": "cat", "args": [str(tmp_path / "printed")], "interactiveMode": "Never"}
        change_user(tmp_path / "config", exec={"apiVersion": version, **plugin})

    monkeypatch.setattr(session, "RENEW_SECONDS", -1.0)  # for each request to the API server
    renew("alice")
    async with leader_connection.connect_through_cluster(
        "rota-system", "rota", LoginOptions(prefers_kubeconfig=True)
    ) as send:

        async def send_as(user: str) -> bool:
            assert (await send("/v1/groups", {}))[0] == 200
            return operator.users[-1] == user

        async def wait_for_events() -> tuple[int, bytes]:
            return await send("/v1/events", {})

        assert await send_as("alice")
        stream = asyncio.create_task(wait_for_events())
        await operator.is_waiting.wait()
        renew("bob")
        await soon(lambda: send_as("bob"))
        assert set(operator.users) == {"alice", "bob"}
        operator.may_answer.set()
        assert await stream == (200, b"{}")


@pytest.mark.usefixtures("operator")
async def test_cli_connects_again_after_the_port_for_another_leader_could_not_be_opened(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leader_connection.connect_through_cluster(
        "rota-system", "rota", LoginOptions(prefers_kubeconfig=True)
    ) as send:
        assert (await send("/v1/groups", {}))[0] == 200
        api.leader = "rota-1"
        with monkeypatch.context() as patch:
            patch.setattr(forward, "LOOPBACK_ADDRESS", "192.0.2.1")  # not an address of this machine
            with pytest.raises(OperatorRequestError, match=r"^No port of this machine .* to pod rota-1: .*; try again"):
                await send("/v1/groups", {})
        api.leader = "rota-0"
        assert (await send("/v1/groups", {}))[0] == 200


@pytest.mark.usefixtures("operator")
async def test_cli_forwarded_port_failure_is_one_sentence(api: ApiServer, tmp_path: Path) -> None:
    for status, sentence in (
        (
            403,
            "You have no permission to connect to the leading pod rota-0; ask for get and create on",
        ),
        (404, "Pod rota-0 does not exist in namespace rota-system; wait until another pod becomes leader"),
        (
            500,
            "Pod rota-0 in namespace rota-system cannot be reached: The API server responded with status 500 to",
        ),
    ):
        api.status = status
        await assert_rejected(sentence)
    api.status = 0
    api.error = "error forwarding port 8080 to pod: exit status 1"
    await assert_rejected(
        "Pod rota-0 in namespace rota-system cannot be reached: error forwarding port 8080 to pod: exit"
    )
    api.error = ""
    change_user(tmp_path / "config", token="outdated")  # noqa: S106
    await assert_rejected("Log in again")


async def test_page_command_serves_the_page_in_the_users_name(
    api: ApiServer, operator: Operator, unused_tcp_port_factory: Callable[[], int]
) -> None:
    port = unused_tcp_port_factory()
    target = Target(None, "rota-system", "rota", LoginOptions(prefers_kubeconfig=True))
    server = asyncio.create_task(page.serve_until_cancelled(target, port))
    async with aiohttp.ClientSession() as session:

        async def get(path: str, **headers: str) -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as response:
                return response.status, await response.text()

        async def is_serving() -> bool:
            with suppress(aiohttp.ClientConnectionError):
                return (await get("/v1/groups"))[0] == 200
            return False

        await soon(is_serving)
        status, body = await get("/v1/groups", Authorization="Bearer of-the-browser")
        assert (status, json.loads(body)) == (200, GROUPS)
        assert {*operator.tokens} == {"Bearer t"}
        assert (await get("/v1/nothing"))[0] == 404
        assert (await get("/v1/groups", Origin="https://evil.example"))[0] == 403
        api.leader = ""
        status, body = await get("/v1/groups")
        assert (status, "No operator is leader" in json.loads(body)["error"]) == (502, True)
        api.leader = "rota-1"  # a new connection
        api.status = 403
        status, body = await get("/v1/groups")
        permission = "ask for get and create on pods/portforward in namespace rota-system"
        sentence = f"You have no permission to connect to the leading pod rota-1; {permission}"
        assert (status, json.loads(body)["error"]) == (502, sentence)
    server.cancel()
    await asyncio.wait([server])


@pytest.mark.usefixtures("operator")
async def test_page_command_ends_event_streams_of_the_former_leader(
    api: ApiServer, unused_tcp_port_factory: Callable[[], int]
) -> None:
    """The browser then connects again, to the leader; the former one sends no events."""
    port = unused_tcp_port_factory()
    target = Target(None, "rota-system", "rota", LoginOptions(prefers_kubeconfig=True))
    server = asyncio.create_task(page.serve_until_cancelled(target, port))
    url = f"http://127.0.0.1:{port}/v1"
    async with aiohttp.ClientSession() as session:

        async def is_serving() -> bool:
            with suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{url}/groups") as response:
                    return response.status == 200
            return False

        await soon(is_serving)
        async with session.get(f"{url}/events?stream=yes") as stream:
            assert await stream.content.readline() == b": here\n"
            api.leader = "rota-1"
            assert await is_serving()
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(aiohttp.ClientError):
                    await stream.content.read()
    assert [pod for pod, _ in api.requests][-1] == "rota-1"
    server.cancel()
    await asyncio.wait([server])


async def test_page_command_names_no_option_that_it_does_not_have(api: ApiServer) -> None:
    async def get_error(*arguments: str) -> str:
        result = await rota("page", *arguments)
        assert result.exit_code == 2, result.output
        return result.output

    api.leader = "my laptop/7"
    error = "rota: The Lease rota in namespace rota-system is held by 'my laptop/7', which is not a valid pod name"
    assert await get_error() == f"{error}; run the operator in the cluster\n"
    missing = await get_error("--lease", "none")
    assert missing.endswith("check that the operator runs, or give --operator-namespace or --lease\n")
    assert "--operator " not in await get_error("--context", "none")
    assert "or give --operator with its address" in (await rota("status", "--lease", "none")).output


async def test_cli_without_an_operator_at_the_forwarded_port_is_one_sentence(api: ApiServer) -> None:
    api.error = "connection refused"
    await assert_rejected("cannot be reached: connection refused; try again, or give --operator")
    assert api.requests
    api.leader = ""
    await assert_rejected("No operator is leader")
