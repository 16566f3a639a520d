"""Last reads of a deleted pod, which may still consume: its report, no response, or proof that it terminated."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from builders import a_report
from rota.aio import loop_time
from rota.kube.members import report_client
from rota.kube.members.report_client import Endpoint, MemberResponse, ReportClient
from rota.model import Reason

HOST = "127.0.0.1"
CLOSED_PORT = 9  # without a listener


@pytest.fixture
async def client() -> AsyncIterator[ReportClient]:
    client = ReportClient()
    yield client
    await client.close()


async def read_from_server(
    client: ReportClient, body: bytes, status: int = 200, *, is_signed: bool = False
) -> MemberResponse | None:
    """Read the report of a member, signed or not, from a server that sends this response."""

    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    app = web.Application()
    app.add_routes([web.get("/v1/report", respond)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    response = await client.read_if_present(Endpoint("uid-m1", HOST, int(runner.addresses[0][1]), is_signed))
    await runner.cleanup()
    return response


async def test_report_of_a_deleted_pod_is_read(client: ReportClient) -> None:
    report = a_report("m1", 7)
    response = await read_from_server(client, msgspec.json.encode(report))
    assert response
    assert response.report == report


async def test_report_of_a_deleted_pod_is_none_if_another_server_answers_or_none_listens(
    client: ReportClient,
) -> None:
    report_of_another = msgspec.json.encode(a_report("m2", 7))
    assert await read_from_server(client, report_of_another) is None
    assert await read_from_server(client, b"Not found", 404) is None
    assert await client.read_if_present(Endpoint("uid-m1", HOST, CLOSED_PORT)) is None, "no server listens at the port"


async def test_report_error_of_a_proxy_does_not_prove_that_a_deleted_pod_terminated(client: ReportClient) -> None:
    response = await read_from_server(client, b"upstream connect error", 503)
    assert response
    assert response.report is None


@pytest.mark.parametrize(
    ("is_signed", "reason"), [(True, Reason.MEMBER_NOT_AUTHENTICATED), (False, Reason.REPORT_TOO_LARGE)]
)
async def test_report_that_is_too_long_to_be_verified_proves_no_member_with_a_key(
    client: ReportClient,
    is_signed: bool,  # noqa: FBT001 - a case
    reason: Reason,
) -> None:
    """Otherwise the next holder of a force-deleted pod's address could block the grant of its queues."""
    response = await read_from_server(client, b" " * (report_client.MAX_REPORT_BYTES + 1), is_signed=is_signed)
    assert response
    assert (response.report, response.ignored_reason) == (None, reason)


async def test_report_timeout_of_a_deleted_pod_does_not_prove_that_it_terminated(
    client: ReportClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_is_over = asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await test_is_over.wait()
        writer.close()

    server = await asyncio.start_server(hang, HOST, 0)
    monkeypatch.setattr(report_client, "RESPONSE_TIMEOUT_SECONDS", 0.05)
    response = await client.read_if_present(Endpoint("uid-m1", HOST, server.sockets[0].getsockname()[1]))
    assert response
    assert response.report is None
    test_is_over.set()
    server.close()


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_report_timeout_during_a_stall_of_the_operator_is_no_silence(
    client: ReportClient,
    monkeypatch: pytest.MonkeyPatch,
    is_deleted: bool,  # noqa: FBT001 - a case
) -> None:
    """The response may have come meanwhile. A single such request made a force-deleted pod count as ended."""

    async def respond_late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        time.sleep(0.4)  # noqa: ASYNC251 - stalls the whole process
        await test_is_over.wait()
        writer.close()

    test_is_over = asyncio.Event()
    server = await asyncio.start_server(respond_late, HOST, 0)
    monkeypatch.setattr(report_client, "RESPONSE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(report_client, "MAX_LATENESS_SECONDS", 0.1, raising=False)
    member = Endpoint("uid-m1", HOST, server.sockets[0].getsockname()[1])
    started_at = loop_time()
    response = await (client.read_if_present(member) if is_deleted else client.read(member))
    assert response
    assert response.report is None
    assert response.silent_since >= started_at + 0.4
    test_is_over.set()
    server.close()
