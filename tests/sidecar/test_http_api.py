"""The sidecar's responses on the pod's address: reports, drains, probes, metrics."""

import asyncio
import hashlib
import json
import socket
import tracemalloc
from contextlib import AsyncExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from aiohttp import ClientSession

from ground.poll import PATIENCE_SECONDS, soon
from rota.brokers.memory import BROKER, NAME_SERVER, MemoryCluster
from rota.deliveries import DeliveriesPage, decode_deliveries
from rota.metrics import MetricsFormat
from rota.model import Queue
from rota.reports import FullReport, decode_report
from rota.sidecar.status import http_api, problems
from rota.sidecar.status.control_api import ControlApi, KeyFiles
from rota.sidecar.status.http_api import StatusApi
from rota.sidecar.status.self_report import QueuesPage
from sidecar.in_memory import TOPIC, UID, Event, Latch, MemoryMember, a_member, accept

FIRST = Queue(TOPIC, BROKER, 0)


async def test_report_of_the_sidecar_is_readable_by_the_operator(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        queues = await member.queues()
        await member.assign(queues)
        status, text = await member.request("/v1/report")
        assert status == 200
        report = decode_report(text)
        assert (report.member, report.uid, report.generation, report.state) == ("a", UID, 1, "serving")
        assert report.active_queues == frozenset(queues)
        await member.send("1", queue=2)
        await member.wait_until_done("1")
        delivered = await member.wait_until(lambda report: report.queues[2].pulled == 1 and not report.inflight)
        assert [(queue.topic, queue.broker, queue.id) for queue in delivered.queues] == queues
        assert delivered.troubles == {}


async def test_report_long_poll_waits_for_another_revision(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        revision = (await member.assign([FIRST])).revision
        asking = asyncio.create_task(member.request(f"/v1/report?after={revision}&wait=30s"))
        _, at_once = await member.request(f"/v1/report?after={revision}&wait=0s")
        assert json.loads(at_once)["revision"] == revision
        assert not asking.done()
        member.publish([FIRST])
        report = decode_report((await asking)[1])
        assert (report.generation, report.revision > revision) == (2, True)


async def test_report_long_poll_returns_when_a_problem_occurs(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        revision = (await member.assign([FIRST])).revision
        asking = asyncio.create_task(member.request(f"/v1/report?after={revision}&wait=30s"))
        member.app.answer = missing
        await member.send("1", queue=0)
        report = decode_report((await asking)[1])
        assert (report.generation, report.revision > revision) == (1, True)
        assert "AppPathNotFound" in report.troubles


async def missing(_: Event) -> int:
    return 404


@pytest.mark.parametrize("revision", ["", "0", "999999", "999999999999999999"])
async def test_report_request_with_another_or_no_revision_is_answered_at_once(tmp_path: Path, revision: str) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await member.request(f"/v1/report?after={revision}&wait=30s"))[0] == 200


@pytest.mark.parametrize(
    "query",
    ["after=x", "after=-1", "after=1.5", "after=%D9%A1", f"after={'9' * 1900}", "after=1&wait=soon", "wait=10"],
)
async def test_report_request_with_invalid_parameters_is_rejected_with_a_sentence(tmp_path: Path, query: str) -> None:
    async with a_member(tmp_path) as member:
        rejection = 400, "after must be a revision, wait must be a duration such as 10s\n"
        assert await member.request(f"/v1/report?{query}") == rejection


async def test_report_of_deliveries_counts_the_answers_of_an_app_that_always_fails(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.app.answer = failing
        await member.assign(await member.queues())
        await member.send("1", "2", "3", queue=2)

        async def counted() -> DeliveriesPage | None:
            page = await deliveries(member)
            return page if sum(queue.failures.get("5xx", 0) for queue in page.queues) == 3 else None

        page = await soon(counted)
        assert page
        [counts] = page.queues
        assert (counts.topic, counts.id, counts.first_attempts, counts.done) == (TOPIC, 2, 3, 0)
        assert page.last_failure
        assert (page.last_failure.outcome, page.last_failure.status) == ("5xx", 500)
        assert [(times.topic, sum(times.buckets.values())) for times in page.times] == [(TOPIC, 3)]

        async def all_are_sent_back() -> bool:
            return (await deliveries(member)).delayed == 3

        await soon(all_are_sent_back)
        member.app.answer = accept
        await member.send("4", queue=2)
        await member.wait_until_done("4")

        async def is_done() -> bool:
            return (await deliveries(member)).queues[0].done == 1

        await soon(is_done)
        assert await member.request("/v1/report/deliveries?from=x") == (
            400,
            "from must be 0 or the next value of the previous page\n",
        )


async def test_report_of_deliveries_counts_refused_connections_as_no_attempt(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.port = 1  # no app listens there
        await member.assign([FIRST])
        await member.send("1", queue=0)

        async def counted() -> bool:
            page = await deliveries(member)
            return any(queue.failures.get("refused") and not queue.first_attempts for queue in page.queues)

        await soon(counted)
        page = await deliveries(member)
        assert (page.last_failure, page.delayed, page.times) == (None, 0, [])


async def failing(_: Event) -> int:
    return 500


async def deliveries(member: MemoryMember) -> DeliveriesPage:
    page = decode_deliveries((await member.request("/v1/report/deliveries"))[1])
    assert page
    return page


# Drains.


async def test_drain_status_responds_once_all_queues_are_released(tmp_path: Path) -> None:
    started, resumed = asyncio.Event(), asyncio.Event()

    async def slow(_: Event) -> int:
        started.set()
        await resumed.wait()
        return 204

    async with a_member(tmp_path) as member:
        member.app.answer = slow
        await member.assign([FIRST])
        await member.send("1", "2", queue=0)
        await started.wait()
        asking = [asyncio.create_task(member.request("/v1/drained")) for _ in range(2)]
        member.begin_drain()
        report = await member.wait_until(lambda report: report.state == "draining")
        assert (report.held, report.active_queues, report.final) == ({}, frozenset({FIRST}), False)
        assert not any(request.done() for request in asking)
        resumed.set()
        assert [await request for request in asking] == [(200, "drained\n")] * 2
        report = await member.report()
        assert (report.state, report.active_queues, report.inflight) == ("drained", frozenset(), 0)
        assert member.offset(0) == len(member.app.done)
        assert await member.request("/v1/drained") == (200, "drained\n")


HOOK = b"GET /v1/drained HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


# A client with the hook's own address is not tested before the hook: then it takes the hook's place (docs/security.md).
@pytest.mark.parametrize(
    ("attackers", "hook_is_first"),
    [
        (["127.0.0.2"], True),
        (["127.0.0.2"], False),
        ([f"127.0.0.{number}" for number in range(2, 42)], False),
        (["127.0.0.1"], True),
    ],
)
async def test_drain_status_request_of_an_apps_hook_is_not_displaced_by_other_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attackers: list[str], *, hook_is_first: bool
) -> None:
    """Too many waiting clients, and then 128 silent connections, caused the server to close the hook's connection."""
    monkeypatch.setattr(http_api, "DRAIN_START_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    latch = Latch()
    async with a_member(tmp_path) as member, AsyncExitStack() as connections:

        async def connect(address: str, sends: bytes) -> asyncio.StreamReader:
            host, _, port = member.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
            connections.callback(writer.close)
            writer.write(sends)
            return reader

        async def flood(sends: bytes, number: int) -> None:
            for address in islice(cycle(attackers), number):
                await connect(address, sends)
            assert await member.request("/healthz") == (200, "ok\n"), "the server has seen all connections before"

        member.app.answer = latch
        await member.assign([FIRST])
        await member.send("1", queue=0)
        await member.wait_until(lambda report: report.inflight == 1)
        if not hook_is_first:
            await flood(HOOK, 100)
        hook = await connect("127.0.0.1", HOOK)
        await flood(HOOK, 100)
        await flood(b"", 128)
        member.begin_drain()
        latch.opened.set()
        response = await hook.read()
        assert response.startswith(b"HTTP/1.1 200 ")
        assert response.endswith(b"drained\n")
        assert member.app.done == ["1"]


async def test_drain_status_responds_when_no_drain_begins_and_begins_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_api, "DRAIN_START_TIMEOUT_SECONDS", 0.05)
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        assert await member.request("/v1/drained") == (200, "no drain has started\n")
        assert (await member.request("/v1/drain"))[0] == 405
        report = await member.report()
        assert (report.state, report.active_queues) == ("serving", frozenset({FIRST}))


async def test_drain_status_waits_for_a_drain_that_a_busy_node_begins_seconds_later(tmp_path: Path) -> None:
    """The kubelet of a busy node took more than 2 s to run the sidecar's hook: the app was stopped at its message."""
    latch = Latch()
    async with a_member(tmp_path) as member:
        member.app.answer = latch
        await member.assign([FIRST])
        await member.send("1", queue=0)
        await member.wait_until(lambda report: report.inflight == 1)
        hook = asyncio.ensure_future(member.request("/v1/drained"))
        done, _ = await asyncio.wait([hook], timeout=2.5)
        assert not done, "the hook of the app's container has ended before the drain began"
        member.begin_drain()
        latch.opened.set()
        assert await hook == (200, "drained\n")
        assert member.app.done == ["1"]


async def test_drain_completes_though_the_caller_disconnects(tmp_path: Path) -> None:
    resumed = asyncio.Event()

    async def slow(_: Event) -> int:
        await resumed.wait()
        return 204

    async with a_member(tmp_path) as member:
        member.app.answer = slow
        await member.assign([FIRST])
        await member.send("1", queue=0)
        await member.wait_until(lambda report: report.inflight == 1)
        asking = asyncio.create_task(member.request("/v1/drain", "POST", UID))
        await member.wait_until(lambda report: report.state == "draining")
        asking.cancel()
        resumed.set()
        await member.wait_until(lambda report: report.state == "drained")


@pytest.mark.parametrize(
    "body", ["", "[" * 999, "{", "[]", "7", '"uid-a"', '{"uid":"uid-b"}', '{"uid":null}', '{"name":"a"}']
)
async def test_drain_final_requires_the_uid_of_the_pod(tmp_path: Path, body: str) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        assert await member.request("/v1/drain", "POST", body) == (403, "a final drain must name the pod's uid\n")
        report = await member.report()
        assert (report.state, report.active_queues) == ("serving", frozenset({FIRST}))


async def test_drain_final_remains_in_force_after_a_restart_of_the_sidecar(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        for body in (json.dumps({"uid": UID}), f"{UID}\n"):
            assert await member.request("/v1/drain", "POST", body) == (200, "drained permanently\n")
        assert await member.request("/readyz") == (503, "the member is permanently drained\n")
        assert await member.request("/healthz") == (200, "ok\n")
        member.publish([FIRST])
        report = await member.wait_until(lambda report: report.generation == 2)
        assert (report.final, report.state, report.active_queues) == (True, "drained", frozenset())
        await member.end()
        await member.start()
        report = await member.wait_until(lambda report: report.generation == 2)
        assert (report.final, report.state, report.active_queues) == (True, "drained", frozenset())
        member.publish([FIRST])
        report = await member.wait_until(lambda report: report.generation == 3)
        assert (report.final, report.active_queues) == (True, frozenset())


# Probes.


async def test_readiness_requires_that_the_member_has_joined_its_group(tmp_path: Path) -> None:
    memory = MemoryCluster()
    async with a_member(tmp_path, memory) as member:
        assert await member.request("/readyz") == (503, "the member has not joined its group\n")
        memory.take_down(NAME_SERVER)
        member.publish([FIRST])
        report = await member.wait_until(lambda report: "BrokerUnreachable" in report.troubles)
        assert report.generation == 1, "the member obeys all the same"
        assert await member.request("/readyz") == (503, "the member is not yet registered with the brokers of shop\n")
        assert await member.request("/healthz") == (200, "ok\n")
        memory.bring_up(NAME_SERVER)
        await member.wait_until(lambda report: not report.troubles)
        assert await member.request("/readyz") == (200, "ready\n")


async def test_report_of_a_member_without_a_broker_names_the_client_certificate_that_its_pod_does_not_mount(
    tmp_path: Path,
) -> None:
    memory = MemoryCluster()
    memory.take_down(NAME_SERVER)
    async with a_member(tmp_path, memory) as member:
        tls = {"enabled": True, "clientSecret": {"name": "client"}}
        member.settings["broker"] = {"rocketmq": {"nameServers": ["rmq:9876"], "tls": tls}}
        member.publish([FIRST])
        report = await member.wait_until(lambda report: "BrokerUnreachable" in report.troubles)
        hint = (
            "; the pod does not mount Secret client of spec.broker.rocketmq.tls.clientSecret:"
            " run rota inject again with --client-secret client"
        )
        assert report.troubles["BrokerUnreachable"].endswith(hint)
        await member.end()
        member.identity = member.identity._replace(client_folder=str(tmp_path))
        await member.start()
        report = await member.wait_until(lambda report: "BrokerUnreachable" in report.troubles)
        assert hint not in report.troubles["BrokerUnreachable"]


async def test_readiness_of_a_member_without_queues_does_not_depend_on_brokers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "UNREACHABLE_SECONDS", 0.2)
    memory = MemoryCluster()
    async with a_member(tmp_path, memory) as member:
        await member.assign([FIRST])
        memory.take_down(BROKER)
        await member.wait_until(lambda report: report.brokers.get(BROKER) is False)
        assert not await member.ready()
        await member.assign([])
        assert (await member.report()).brokers == {BROKER: False}, "it is probed"


async def test_readiness_fails_while_no_broker_of_the_members_queues_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "UNREACHABLE_SECONDS", 0.2)
    memory = MemoryCluster((BROKER, "other"))
    await memory.create_topic(TOPIC, "other", 1)
    async with a_member(tmp_path, memory) as member:
        await member.assign([FIRST, Queue(TOPIC, "other", 0)])
        memory.take_down(BROKER)
        report = await member.wait_until(lambda report: report.brokers.get(BROKER) is False)
        assert report.brokers.get("other", True)
        assert await member.ready(), "one of the two answers"
        memory.take_down("other")
        await member.wait_until(lambda report: report.brokers == {BROKER: False, "other": False})
        assert await member.request("/readyz") == (503, "no response from memory, other\n")
        assert await member.request("/healthz") == (200, "ok\n")
        for broker in (BROKER, "other"):
            memory.bring_up(broker)
        await member.wait_until(lambda report: report.brokers == {BROKER: True, "other": True})
        assert await member.ready()


async def test_broker_no_longer_read_from_is_reported_unreachable_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "UNREACHABLE_SECONDS", 0.2)
    memory = MemoryCluster((BROKER, "other"))
    await memory.create_topic(TOPIC, "other", 1)
    async with a_member(tmp_path, memory) as member:
        removed = Queue(TOPIC, "other", 0)
        await member.send("1", queue=0)
        await member.assign([FIRST, removed])
        memory.take_down("other")
        await member.wait_until(lambda report: report.brokers.get("other") is False)
        await member.send("2", queue=0)
        await member.wait_until_done("1", "2")
        member.drain_timeout = 0.5
        member.publish([FIRST])
        report = await member.wait_until(lambda report: report.active_queues == {FIRST})
        assert report.brokers == {BROKER: True, "other": False}, "else it would get queues of that broker at once"
        memory.bring_up("other")
        await member.wait_until(lambda report: report.brokers == {BROKER: True})


async def test_metrics_report_the_finished_deliveries(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        await member.send("1", "2", queue=0)
        await member.wait_until_done("1", "2")
        await member.wait_until(lambda report: report.inflight == 0)
        _, text = await member.request("/metrics")
        metrics = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert metrics['rota_sidecar_messages_total{outcome="done",topic="orders"}'] == "2.0"
        assert metrics["rota_sidecar_generation"] == "1"
        assert metrics["rota_sidecar_inflight"] == "0"
        assert metrics["rota_sidecar_delivery_duration_seconds_count"] == "2.0"
        assert metrics["rota_sidecar_redelivered_total"] == "0.0"


class LargeMember:
    """A member with a large report: it owns queues of many topics."""

    uid = UID
    pod_drain_started = asyncio.Event()

    def __init__(self, *, changes: bool) -> None:
        self.status = self
        self.changes = changes
        # Hashes: gzip cannot compress them much.
        names = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(20_000)]
        held = {name: {BROKER: "0-7"} for name in names}
        self.large = FullReport(member="a", uid=UID, generation=1, revision=1, held=held)

    def on_report_requested(self) -> None:
        pass

    def report(self) -> FullReport:
        if self.changes:
            self.large = msgspec.structs.replace(self.large, revision=self.large.revision + 1)
        return self.large

    def queues(self, _: int) -> QueuesPage:
        return QueuesPage([], None)

    def deliveries(self, _: int) -> DeliveriesPage:
        return DeliveriesPage("process", 1.0)

    def why_unready(self) -> str:
        return ""

    def render_metrics(self, _: MetricsFormat) -> bytes:
        return b""

    async def wait_drained(self) -> None:
        return

    async def wait_for_revision(self, _: int) -> None:
        return

    def receive_assignment(self, document: bytes, digest: str) -> bool:
        raise AssertionError(document, digest)

    async def drain(self, *, final: bool = False) -> None:
        assert not final


CLIENTS = 127
BYTES_OF_A_CLIENT = 224 * 1024  # three parts of the response, a request and its task


@pytest.mark.parametrize("accepts", ["", "gzip"])
@pytest.mark.parametrize("changes", [False, True])
async def test_report_that_many_clients_do_not_read_takes_a_bounded_number_of_bytes(
    tmp_path: Path, accepts: str, *, changes: bool
) -> None:
    """Each client kept its own version of a report that changed between requests: 300 MB."""
    member = LargeMember(changes=changes)
    server = await StatusApi(member, ControlApi(member, KeyFiles(str(tmp_path)))).serve("127.0.0.1", 0)
    (listening,) = cast("Any", next(iter(server.sites)))._sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)  # or the kernel keeps 4 MB for each client
    host, port = server.addresses[0][:2]
    request = f"GET /v1/report HTTP/1.1\r\nhost: localhost\r\naccept-encoding: {accepts}\r\n\r\n".encode()
    size = len(msgspec.json.encode(member.large))
    assert size > 1_000_000
    async with AsyncExitStack() as opened:
        session = await opened.enter_async_context(ClientSession(headers={"accept-encoding": accepts}))
        tracemalloc.start()
        opened.callback(tracemalloc.stop)
        for _ in range(CLIENTS):
            client = opened.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(0)
            await asyncio.get_running_loop().sock_connect(client, (host, port))
            await asyncio.get_running_loop().sock_sendall(client, request)
            assert await asyncio.get_running_loop().sock_recv(client, 12) == b"HTTP/1.1 200"
        async with session.get(f"http://{host}:{port}/v1/report") as response:
            assert len(await response.read()) >= size, "a client that reads gets all of it"
        _, peak = tracemalloc.get_traced_memory()
        assert server.server
        if not changes:
            assert len(server.server.connections) == CLIENTS + 1, "no client is closed while the report stays the same"
    await server.cleanup()
    assert peak < 12 * size + CLIENTS * BYTES_OF_A_CLIENT, "as text, compressed, and being read by the test"


async def test_http_server_reports_a_port_in_use_with_a_sentence(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        port = member.url.rpartition(":")[2]
        with pytest.raises(ValueError, match=rf"^Cannot listen on 127\.0\.0\.1, port {port}: Address already"):
            await StatusApi(member.sidecar, ControlApi(member.sidecar)).serve("127.0.0.1", int(port))


async def test_http_server_survives_malformed_requests_without_logging_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_member(tmp_path) as member:
        where = member.url.removeprefix("http://")
        host, _, port = where.partition(":")
        head = f"POST /v1/drain HTTP/1.1\r\nhost: {where}\r\n"
        packed = f"{head}content-encoding: gzip\r\ncontent-length: 2\r\n\r\nxx"
        for sent, status in (("GET / HTTP/9.9\r\n\r\n", b" 400 "), (packed, b" 415 ")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent.encode())
            assert status in await reader.readline()
            writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}content-length: 20\r\n\r\n".encode())
        await writer.drain()
        writer.transport.abort()
        assert await member.request("/healthz") == (200, "ok\n")
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
