"""What a pod says that was deleted, and may work on: its word, silence, or that it is not there any more."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from builders import a_report
from rota.kube.members import report_client
from rota.kube.members.report_client import Endpoint, MemberResponse, ReportClient
from rota.model import Reason

WHERE, CLOSED = "127.0.0.1", 9  # nothing listens at that port


@pytest.fixture
async def asker() -> AsyncIterator[ReportClient]:
    found = ReportClient()
    yield found
    await found.close()


async def heard(asker: ReportClient, text: bytes, status: int = 200, *, signs: bool = False) -> MemberResponse | None:
    """Ask a server that answers so in place of a member that signs, or does not."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=text, status=status)

    app = web.Application()
    app.add_routes([web.get("/v1/report", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, WHERE, 0).start()
    found = await asker.read_if_present(Endpoint("uid-m1", WHERE, int(runner.addresses[0][1]), signs))
    await runner.cleanup()
    return found


async def test_report_of_a_deleted_pod_is_read(asker: ReportClient) -> None:
    report = a_report("m1", 7)
    found = await heard(asker, msgspec.json.encode(report))
    assert found
    assert found.report == report


async def test_report_of_a_deleted_pod_is_none_if_another_server_answers_or_none_listens(
    asker: ReportClient,
) -> None:
    other = msgspec.json.encode(a_report("m2", 7))
    assert await heard(asker, other) is None
    assert await heard(asker, b"Not found", 404) is None
    assert await asker.read_if_present(Endpoint("uid-m1", WHERE, CLOSED)) is None, "nothing listens there any more"


@pytest.mark.parametrize(
    ("signs", "wanted"), [(True, Reason.MEMBER_NOT_AUTHENTICATED), (False, Reason.REPORT_TOO_LARGE)]
)
async def test_report_that_is_too_long_to_be_verified_proves_no_member_with_a_key(
    asker: ReportClient,
    signs: bool,  # noqa: FBT001 - a case
    wanted: Reason,
) -> None:
    """Whoever has the address of a pod that was deleted by force could keep its queues from being assigned."""
    found = await heard(asker, b" " * (report_client.MAX_REPORT_BYTES + 1), signs=signs)
    assert found
    assert (found.report, found.ignored_reason) == (None, wanted)


async def test_report_timeout_of_a_deleted_pod_does_not_prove_that_it_terminated(
    asker: ReportClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(silent, WHERE, 0)
    monkeypatch.setattr(report_client, "RESPONSE_TIMEOUT_SECONDS", 0.05)
    found = await asker.read_if_present(Endpoint("uid-m1", WHERE, server.sockets[0].getsockname()[1]))
    assert found
    assert found.report is None
    over.set()
    server.close()
