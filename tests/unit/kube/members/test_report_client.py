"""Members' reports over HTTP: which reports the operator believes, and which requests members accept."""

import asyncio
import hashlib
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from ground.poll import soon
from rota.deliveries import DeliveriesPage, QueueCounts
from rota.delivery_totals import BYTES_PER_QUEUE
from rota.kube.client.objects import Pod
from rota.kube.members import report_client
from rota.kube.members.report_client import BYTES_PER_ENTRY, BYTES_PER_OFFSET, MAX_PAGE_BYTES, Endpoint, ReportClient
from rota.kube.state.retention_budget import RetentionBudget
from rota.model import Queue, Reason
from rota.ranges import MAX_QUEUES_PER_DOCUMENT, MAX_TOPIC_BROKER_PAIRS, to_ranges
from rota.reports import (
    MAX_UNCOMMITTED_ENTRIES,
    FullReport,
    QueueState,
    QueueStatus,
    Report,
    Uncommitted,
    decode_report,
)
from rota.sidecar.status.control_api import MAX_ASSIGNMENT_BYTES, ControlApi, KeyFiles
from rota.sidecar.status.delivery_counts import DELIVERY_PAGE_QUEUES
from rota.sidecar.status.self_report import PROGRESS_PAGE_QUEUES, QueuesPage
from rota.signing import KEY_BYTES, SIGNATURE_HEADER, SignedRequest, sign_request

HOST, UID, GROUP_UID = "127.0.0.1", "uid-a", "uid-of-the-group"
KEY, OTHER = (bytes([number]) * KEY_BYTES for number in range(2))


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@dataclass
class Member:
    """A member, as its control port sees it."""

    uid: str = UID
    final: bool = False
    revision: int = 1
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    offsets: range = range(1)
    wrong_next: int | None = None  # start of the next page in each page, if it is to be wrong
    pages: list[int] = field(default_factory=list)
    incarnation: str = "process"  # empty: each page has a different one
    report_requests: int = 0
    assignments: list[tuple[bytes, str]] = field(default_factory=list)  # each with the digest of its settings

    def on_report_requested(self) -> None:
        self.report_requests += 1

    @property
    def status(self) -> "Member":
        return self

    def report(self) -> FullReport:
        return FullReport(member="a", uid=self.uid, generation=1, revision=self.revision)

    def queues(self, start: int) -> QueuesPage:
        self.pages.append(start)
        stop = start + PROGRESS_PAGE_QUEUES
        statuses = [
            QueueStatus("orders", "broker-a", queue_id, queue_id, queue_id, 0, locked=False)
            for queue_id in self.offsets[start:stop]
        ]
        if self.wrong_next is not None:
            return QueuesPage(statuses, self.wrong_next)
        return QueuesPage(statuses, stop if stop < len(self.offsets) else None)

    def deliveries(self, start: int) -> DeliveriesPage:
        self.pages.append(start)
        stop = start + DELIVERY_PAGE_QUEUES
        queues = [QueueCounts("orders", "broker-a", queue_id, done=queue_id) for queue_id in self.offsets[start:stop]]
        next_page = self.wrong_next or (stop if stop < len(self.offsets) else None)
        incarnation = self.incarnation or str(start)
        delayed = 0 if start else 7
        return DeliveriesPage(incarnation, 1.0, queues, delayed=delayed, next=next_page)

    async def wait_for_revision(self, after: int) -> None:
        while self.revision == after:
            await self.changed.wait()

    async def drain(self, *, final: bool = False) -> None:
        self.final = final

    def receive_assignment(self, document: bytes, digest: str) -> bool:
        self.assignments.append((document, digest))
        return len(self.assignments) == 1


async def as_awaitable(value: bool) -> bool:  # noqa: FBT001 - the only argument
    return value


@asynccontextmanager
async def serve_control_port(member: Member, folder: Path | None) -> AsyncIterator[int]:
    """Serve the control port of a member; without a folder, the member has no key."""
    runner = await ControlApi(member, KeyFiles(str(folder)) if folder else None).serve(HOST, 0)
    yield int(runner.addresses[0][1])
    await runner.cleanup()


@asynccontextmanager
async def a_client(*keys: bytes, budget: RetentionBudget | None = None) -> AsyncIterator[ReportClient]:
    """Return the client of an operator with these keys of the group."""
    client = ReportClient(lambda uid: keys if uid == GROUP_UID else (), budget)
    yield client
    await client.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "current").write_bytes(KEY)
    return tmp_path


async def test_signature_proves_a_report_and_a_drain(folder: Path) -> None:
    member = Member()
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        response = await client.read(endpoint)
        assert response.report is not None
        assert (response.report.uid, response.ignored_reason) == (UID, None)
        long_poll = asyncio.create_task(client.long_poll(endpoint, 1))
        member.revision = 2
        member.changed.set()
        report = (await long_poll).report
        assert report is not None
        assert report.revision == 2
        assert (await client.read_with_offsets(endpoint))[0].report is not None
        assert await client.read_if_present(endpoint) is not None
        await client.drain(endpoint)
        assert member.final


async def test_signature_by_another_key_proves_nothing_and_drains_no_member(folder: Path) -> None:
    member = Member()
    async with serve_control_port(member, folder) as port, a_client(OTHER) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        for response in (await client.read(endpoint), await client.long_poll(endpoint, 1)):
            assert (response.report, response.ignored_reason) == (None, Reason.MEMBER_NOT_AUTHENTICATED)
        last_response = await client.read_if_present(endpoint)
        assert last_response is not None, "the member may still run"
        assert last_response.report is None
        await client.drain(endpoint)
        assert not member.final


async def test_report_that_is_signed_and_cannot_be_decoded_does_not_prove_that_a_deleted_pod_terminated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar of a later version may send one."""

    def reject(_: bytes) -> Report:
        raise ValueError("a field of a later version")

    async with serve_control_port(Member(), folder) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        monkeypatch.setattr(report_client, "decode_report", reject)
        response = await client.read_if_present(endpoint)
    assert response is not None
    assert (response.report, response.ignored_reason) == (None, None)


@pytest.mark.parametrize("document", ["{}", b"\x1f\x8b compressed", "x" * MAX_ASSIGNMENT_BYTES])
async def test_assignment_is_sent_to_a_member_with_the_digest_of_its_settings(
    folder: Path, document: str | bytes
) -> None:
    member = Member()
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        await client.send_assignment(endpoint, document, "0f&=")
    sent = document if isinstance(document, bytes) else document.encode()
    assert member.assignments == [(sent, "0f&=")]


@pytest.mark.parametrize("case", ["too large", "unsigned member", "another key", "no address", "no server"])
async def test_assignment_is_not_sent_to_a_member_that_cannot_use_it(folder: Path, case: str) -> None:
    member = Member()
    keys = OTHER if case == "another key" else KEY
    async with serve_control_port(member, folder) as port, a_client(keys) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=case != "unsigned member", group_uid=GROUP_UID)
        if case == "no address":
            endpoint = endpoint._replace(address="")
        if case == "no server":
            endpoint = endpoint._replace(port=await unused_port())
        document = "x" * (MAX_ASSIGNMENT_BYTES + 1) if case == "too large" else "{}"
        await client.send_assignment(endpoint, document, "")
    assert member.assignments == []


async def unused_port() -> int:
    """Return a port at which no server listens."""
    server = await asyncio.start_server(lambda *_: None, HOST, 0)
    port = int(server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()
    return port


@pytest.mark.parametrize(
    ("body", "digest", "status"),
    [(b"{}", sha256(b"{}"), 204), (b"{}", sha256(b"{ }"), 400), (b"", "", 400), (b"{}" * 2**15 + b" ", "", 413)],
    ids=["valid", "another body", "no digest", "too large"],
)
async def test_assignment_needs_the_digest_of_its_body(folder: Path, body: bytes, digest: str, status: int) -> None:
    member = Member()
    async with serve_control_port(member, folder) as port, aiohttp.ClientSession(f"http://{HOST}:{port}") as session:
        target = f"/v1/assignment?settings=1&sha256={digest}"
        headers = {SIGNATURE_HEADER: sign_request([KEY], SignedRequest("PUT", target, UID))}
        for expected in (status, 409 if status == 204 else status):
            async with session.put(target, data=body, headers=headers) as response:
                assert response.status == expected
        other = f"{target}&more=1"
        async with session.put(other, data=body, headers=headers) as response:
            assert response.status == 401
    assert bool(member.assignments) == (status == 204)


async def test_assignment_is_not_received_without_a_key() -> None:
    member = Member()
    server = await ControlApi(member).serve(HOST, 0)
    url = f"http://{HOST}:{server.addresses[0][1]}/v1/assignment?sha256={sha256(b'')}"
    async with aiohttp.ClientSession() as session, session.put(url) as response:
        assert response.status == 404
    await server.cleanup()
    assert member.assignments == []


async def test_signature_is_accepted_while_one_side_has_the_previous_key(folder: Path) -> None:
    async with serve_control_port(Member(), folder) as port, a_client(OTHER, KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        assert (await client.read(endpoint)).report, "the member does not have the current key yet"
        (folder / "current").write_bytes(OTHER)
        (folder / "previous").write_bytes(KEY)
        assert (await client.read(endpoint)).report
        (folder / "previous").unlink()
        assert (await client.read(endpoint)).report
    async with serve_control_port(Member(), folder) as port, a_client(KEY) as client:
        (folder / "previous").write_bytes(KEY)
        response = await client.read(Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID))
        assert response.ignored_reason is Reason.MEMBER_NOT_AUTHENTICATED, "reports are signed with the current key"


@pytest.mark.parametrize("content", [None, b"", b"short"])
async def test_signature_is_not_expected_to_match_a_key_that_is_missing(folder: Path, content: bytes | None) -> None:
    (folder / "current").unlink()
    if content is not None:
        (folder / "current").write_bytes(content)
    member = Member()
    async with serve_control_port(member, folder) as port, a_client(KEY) as client, a_client() as without_key:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        assert (await client.read(endpoint)).ignored_reason is Reason.MEMBER_NOT_AUTHENTICATED
        await client.drain(endpoint)
        assert (await without_key.read(endpoint)).ignored_reason is Reason.MEMBER_NOT_AUTHENTICATED
        await without_key.drain(endpoint)
        await without_key.drain(endpoint._replace(is_signed=False))
        assert not member.final


async def test_signature_is_required_for_each_request_to_the_control_port(folder: Path) -> None:
    member = Member()
    signed = {SIGNATURE_HEADER: sign_request([KEY], SignedRequest("GET", "/v1/report?nonce=1", UID))}
    async with serve_control_port(member, folder) as port, aiohttp.ClientSession(f"http://{HOST}:{port}") as session:
        for method, path, headers in [
            ("GET", "/v1/report", {}),
            ("GET", "/v1/report?after=1&wait=30s", {}),
            ("GET", "/v1/report?nonce=2", signed),
            ("HEAD", "/v1/report?nonce=1", signed),
            ("POST", "/v1/drain", signed),
            ("POST", "/v1/drain", {}),
        ]:
            async with session.request(method, path, headers=headers, json={"uid": UID}) as response:
                assert response.status == 401, (method, path)
        async with session.get("/v1/report?nonce=1", headers=signed) as response:
            assert response.status == 200
        for path in ("/healthz", "/metrics", "/v1/drained"):
            async with session.get(path) as response:
                assert response.status == 404, path
        assert not member.final


async def test_signature_of_a_report_cannot_be_used_for_another_request(folder: Path) -> None:
    """A recorded report of a member is not believed when it is replayed at an address that the member had."""
    recorded: list[web.Response] = []

    async def replay(_: web.Request) -> web.Response:
        return web.Response(body=recorded[0].body, headers={SIGNATURE_HEADER: recorded[0].headers[SIGNATURE_HEADER]})

    async def record(request: web.Request) -> web.StreamResponse:
        async with aiohttp.ClientSession() as session:
            url = f"http://{HOST}:{port}{request.raw_path}"
            headers = {SIGNATURE_HEADER: request.headers[SIGNATURE_HEADER]}
            async with session.get(url, headers=headers) as response:
                headers = {SIGNATURE_HEADER: response.headers[SIGNATURE_HEADER]}
                recorded.append(web.Response(body=await response.read(), headers=headers))
        return recorded[0]

    async with serve_control_port(Member(), folder) as port, a_client(KEY) as client:
        for handler, is_believed in ((record, True), (replay, False)):
            app = web.Application()
            app.add_routes([web.get("/v1/report", handler)])
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, HOST, 0).start()
            member_response = await client.read(
                Endpoint(UID, HOST, int(runner.addresses[0][1]), is_signed=True, group_uid=GROUP_UID)
            )
            assert bool(member_response.report) is is_believed
            await runner.cleanup()
    assert msgspec.json.decode(bytes(str(recorded[0].text), "utf-8"))["uid"] == UID


async def test_signature_is_not_required_of_members_whose_pods_mount_no_key() -> None:
    member = Member()
    async with serve_control_port(member, None) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port)
        assert (await client.read(endpoint)).report
        await client.drain(endpoint._replace(uid="uid-b"))
        assert not member.final
        await client.drain(endpoint)
        assert member.final


def a_pod(*, host_network: bool = False, **container: object) -> Pod:
    spec = {"hostNetwork": host_network, "initContainers": [{"name": "rota-sidecar", **container}]}
    body = {"metadata": {"name": "a", "uid": UID}, "spec": spec, "status": {"podIP": HOST}}
    return msgspec.convert(body, Pod)


def test_signature_is_required_by_the_pods_spec_and_not_by_its_answers() -> None:
    ports = [{"name": "rota-report", "containerPort": 9911}, {"name": "rota-control", "containerPort": 9913}]
    mounts = [{"name": "rota-key", "mountPath": "/etc/rota-key"}]
    signed = Endpoint(UID, HOST, 9913, is_signed=True, group_uid="1")
    unsigned = Endpoint(UID, HOST, 9911, group_uid="1")
    assert Endpoint.from_pod(a_pod(ports=ports, volumeMounts=mounts), "1") == signed
    assert Endpoint.from_pod(a_pod(volumeMounts=mounts), "1") == signed, "a manifest written by hand"
    assert Endpoint.from_pod(a_pod(ports=ports[:1]), "1") == unsigned, "a sidecar of an earlier version"
    assert Endpoint.from_pod(a_pod(), "1") == unsigned


@pytest.mark.parametrize("number", [22, 2379, 9911, 10250])
def test_report_of_a_pod_in_the_nodes_network_is_not_requested_at_a_port_of_the_tenants_choice(number: int) -> None:
    ports = [{"name": "rota-control", "containerPort": number}]
    mounts = [{"name": "rota-key", "mountPath": "/etc/rota-key"}]
    assert Endpoint.from_pod(a_pod(host_network=True, ports=ports, volumeMounts=mounts), "1").port == 9913
    assert Endpoint.from_pod(a_pod(host_network=True, ports=ports), "1").port == 9911
    assert Endpoint.from_pod(a_pod(ports=ports, volumeMounts=mounts), "1").port == number, "a pod with its own network"


# Pages of queues.


async def test_report_pages_have_offsets_of_all_queues(folder: Path) -> None:
    member = Member(offsets=range(1201))
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        response, offsets = await client.read_with_offsets(endpoint)
        assert response.report
        assert offsets == {Queue("orders", "broker-a", number): number for number in range(1201)}
        assert member.pages == [0, 400, 800, 1200]
        member.offsets = range(0)
        assert (await client.read_with_offsets(endpoint))[1] == {}


@pytest.mark.parametrize("wrong_next", [0, 2, 500, -1, 2**40])
async def test_report_pages_with_a_wrong_next_start_are_not_followed(folder: Path, wrong_next: int) -> None:
    member = Member(wrong_next=wrong_next)
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        assert (await client.read_with_offsets(endpoint))[1] is None
    assert member.pages == [0]


async def test_report_pages_that_never_end_are_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.kube.members.report_client.PAGES_SECONDS", 0.2)
    member = Member(offsets=range(10**9))
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        assert (await client.read_with_offsets(endpoint))[1] is None
    assert member.pages == list(range(0, 400 * len(member.pages), 400))


async def test_report_pages_of_a_member_that_is_not_authenticated_are_not_requested(folder: Path) -> None:
    member = Member()
    async with serve_control_port(member, folder) as port, a_client(OTHER) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        response, offsets = await client.read_with_offsets(endpoint)
    assert (response.ignored_reason, offsets, member.pages) == (Reason.MEMBER_NOT_AUTHENTICATED, None, [])


@asynccontextmanager
async def serve_unsigned(respond: Callable[[], object]) -> AsyncIterator[Endpoint]:
    """Serve the reports of a member with a sidecar of an earlier version."""

    async def report(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(respond()))

    app = web.Application()
    app.add_routes([web.get("/v1/report", report)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    yield Endpoint(UID, HOST, int(runner.addresses[0][1]), namespace="shop")
    await runner.cleanup()


async def test_report_of_an_earlier_version_contains_offsets() -> None:
    queues: list[dict[str, object]] = []
    report = {"member": "a", "uid": UID, "generation": 1, "queues": queues}
    async with serve_unsigned(lambda: report) as member, a_client() as client:
        assert (await client.read_with_offsets(member))[1] is None, "it has no queues yet, and no pages"
        queues.append({"topic": "orders", "broker": "broker-a", "id": 1, "committed": 7})
        assert (await client.read_with_offsets(member))[1] == {Queue("orders", "broker-a", 1): 7}


async def test_report_is_not_kept_beyond_the_memory_for_reports_of_a_namespace() -> None:
    """Without the limit, forty pods with reports of 20,000 topics each took 280 MB."""
    report = FullReport(
        member="a", uid=UID, generation=1, held={f"t{number}": {"a": "0"} for number in range(MAX_TOPIC_BROKER_PAIRS)}
    )
    size = len(msgspec.json.encode(report)) + BYTES_PER_ENTRY * MAX_TOPIC_BROKER_PAIRS
    async with serve_unsigned(lambda: report) as member, a_client(budget=RetentionBudget(5 * size)) as client:
        retained_reports = [(await client.read(member)).report for _ in range(2)]
        assert None not in retained_reports
        response = await client.read(member)
        assert (response.report, response.ignored_reason) == (None, Reason.REPORT_TOO_LARGE)
        assert (await client.read(member._replace(namespace="other"))).report, "another namespace has its own limit"
        retained_reports.pop()
        assert (await client.read(member)).report


async def test_report_offsets_are_not_kept_beyond_the_memory_for_reports() -> None:
    queues = [{"topic": "orders", "broker": "a", "id": number, "committed": 7} for number in range(1000)]
    report = {"member": "a", "uid": UID, "generation": 1, "queues": queues}
    async with (
        serve_unsigned(lambda: report) as member,
        a_client(budget=RetentionBudget(5000 * BYTES_PER_OFFSET)) as client,
    ):
        retained_offsets = [(await client.read_with_offsets(member))[1] for _ in range(2)]
        assert [len(offsets or ()) for offsets in retained_offsets] == [1000, 1000]
        response, offsets = await client.read_with_offsets(member)
        assert (response.report is None, offsets) == (False, None)


def test_report_of_as_many_queues_as_a_group_can_have_is_small() -> None:
    queues = [Queue(f"topic-{number % 4}", "broker-a", number) for number in range(MAX_QUEUES_PER_DOCUMENT)]
    report = FullReport(member="a" * 253, uid="u" * 36, generation=1, held=to_ranges(queues))
    text = msgspec.json.encode(report)
    assert len(text) <= 2 * 2**20
    assert len(decode_report(text).active_queues) == MAX_QUEUES_PER_DOCUMENT


def test_report_page_is_small_however_long_names_are() -> None:
    state: QueueState = "draining"
    numbers = 2**31, 2**63 - 1, 2**63 - 1, 2**31
    statuses = [
        QueueStatus(
            "t" * 127,
            "b" * 255,
            *numbers,
            locked=False,
            state=state,
            pull_age=1e9 + 0.123,
            start=2**63 - 1,
            given=2**63 - 1,
        )
    ] * PROGRESS_PAGE_QUEUES
    assert len(msgspec.json.encode(QueuesPage(statuses, 2**17, "i" * 64))) <= MAX_PAGE_BYTES


def test_report_of_offsets_that_are_not_committed_is_small_however_long_names_are() -> None:
    entries = [Uncommitted("t" * 127, "b" * 255, 2**31, 2**63 - 1, 2**63 - 1)] * MAX_UNCOMMITTED_ENTRIES
    text = msgspec.json.encode(FullReport(member="a", uid="u", generation=1, uncommitted=entries))
    assert decode_report(text).uncommitted == entries


async def test_report_page_of_progress_is_read_with_the_groups_key(folder: Path) -> None:
    member = Member(offsets=range(PROGRESS_PAGE_QUEUES + 1))
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        first = await client.read_progress(endpoint, 0)
        assert first is not None
        assert (len(first.queues), first.next_start) == (PROGRESS_PAGE_QUEUES, PROGRESS_PAGE_QUEUES)
        last = await client.read_progress(endpoint, PROGRESS_PAGE_QUEUES)
        assert last is not None
        assert (len(last.queues), last.next_start) == (1, None)
    async with serve_control_port(member, folder) as port, a_client(OTHER) as client:
        assert await client.read_progress(endpoint, 0) is None


# Pages of deliveries.


async def test_report_pages_have_deliveries_of_all_queues(folder: Path) -> None:
    member = Member(offsets=range(2 * DELIVERY_PAGE_QUEUES + 1))
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        deliveries = await client.read_deliveries(Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID))
    assert deliveries
    assert {queue.id: counts.done for queue, counts in deliveries.queues.items()} == {
        queue_id: queue_id for queue_id in member.offsets
    }
    assert (deliveries.incarnation, deliveries.delayed_messages) == ("process", 7)
    assert member.pages == [0, DELIVERY_PAGE_QUEUES, 2 * DELIVERY_PAGE_QUEUES]


async def test_report_pages_of_deliveries_are_only_for_signed_requests(folder: Path) -> None:
    member = Member()
    async with serve_control_port(member, folder) as port, a_client(OTHER) as client:
        assert await client.read_deliveries(Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)) is None
    assert member.pages == []


@pytest.mark.parametrize(
    ("wrong_next", "incarnation"), [(-1, "process"), (DELIVERY_PAGE_QUEUES, "process"), (None, "")]
)
async def test_report_pages_of_deliveries_that_are_inconsistent_are_dropped(
    folder: Path, wrong_next: int | None, incarnation: str
) -> None:
    member = Member(offsets=range(10 * DELIVERY_PAGE_QUEUES), wrong_next=wrong_next, incarnation=incarnation)
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        assert await client.read_deliveries(Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)) is None
    assert len(member.pages) <= 2


async def test_report_pages_of_deliveries_that_never_end_are_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.kube.members.report_client.MAX_DELIVERIES_BYTES", 500 * BYTES_PER_QUEUE)
    member = Member(offsets=range(10**9))
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        assert await client.read_deliveries(Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)) is None
    assert len(member.pages) == 3


async def test_report_pages_of_deliveries_are_not_kept_beyond_the_memory_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 5 * DELIVERY_PAGE_QUEUES * BYTES_PER_QUEUE
    monkeypatch.setattr("rota.kube.members.report_client.MAX_DELIVERIES_BYTES", limit)
    member = Member(offsets=range(DELIVERY_PAGE_QUEUES))
    async with serve_control_port(member, folder) as port, a_client(KEY) as client:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        retained_deliveries = [await client.read_deliveries(endpoint) for _ in range(2)]
        assert None not in retained_deliveries
        assert await client.read_deliveries(endpoint) is None
        assert (await client.read(endpoint)).report, "reports have their own limit"
        retained_deliveries.pop()
        assert await client.read_deliveries(endpoint)


async def test_upgrade_tolerates_members_without_the_page_about_deliveries() -> None:
    report = {"member": "a", "uid": UID, "generation": 1}
    async with serve_unsigned(lambda: report) as member, a_client() as client:
        assert await client.read_deliveries(member) is None
        assert (await client.read(member)).report


async def test_restart_of_a_sidecar_is_known_to_an_operator_only_by_signed_requests(folder: Path) -> None:
    """A restarted process resumes by itself unless an operator reads its report."""
    member = Member()
    async with serve_control_port(member, folder) as port:
        endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
        async with a_client(OTHER) as client:
            assert (await client.read(endpoint)).report is None
        assert member.report_requests == 0
        async with a_client(KEY) as client:
            assert (await client.read(endpoint)).report
        assert member.report_requests == 1


@asynccontextmanager
async def serve_silently() -> AsyncIterator[tuple[Endpoint, list[bytes]]]:
    """Serve an address that receives requests and never responds; yield it, and what it has received."""
    received: list[bytes] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.read()  # until the client disconnects
        writer.close()

    server = await asyncio.start_server(receive, HOST, 0)
    port = int(server.sockets[0].getsockname()[1])
    yield Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID), received
    server.close()


async def test_report_is_read_while_assignments_are_sent_to_members_that_do_not_respond(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_client, "MAX_CONCURRENT_READS", 2)
    monkeypatch.setattr(report_client, "RESPONSE_TIMEOUT_SECONDS", 60.0)
    async with (
        serve_control_port(Member(), folder) as port,
        serve_silently() as (silent, received),
        a_client(KEY) as client,
    ):
        sends = [asyncio.create_task(client.send_assignment(silent, "{}", "digest")) for _ in range(5)]
        await soon(lambda: as_awaitable(len(received) >= 2))
        async with asyncio.timeout(30):
            endpoint = Endpoint(UID, HOST, port, is_signed=True, group_uid=GROUP_UID)
            assert (await client.read(endpoint)).report
        for send in sends:
            send.cancel()
        await asyncio.gather(*sends, return_exceptions=True)


async def test_assignment_is_not_sent_once_its_volume_has_had_time_to_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise requests of members that do not respond would pile up, with each generation more."""
    monkeypatch.setattr(report_client, "MAX_CONCURRENT_READS", 1)
    monkeypatch.setattr(report_client, "MAX_CONCURRENT_SENDS", 1)
    monkeypatch.setattr(report_client, "RESPONSE_TIMEOUT_SECONDS", 0.2)
    async with serve_silently() as (silent, received), a_client(KEY) as client:
        await asyncio.gather(*(client.send_assignment(silent, "{}", "digest") for _ in range(20)))
        assert len(received) < 10


async def test_assignment_that_waits_to_be_sent_takes_no_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_client, "MAX_CONCURRENT_READS", 1)
    monkeypatch.setattr(report_client, "MAX_CONCURRENT_SENDS", 1)
    document = "x" * report_client.MAX_SENT_ASSIGNMENT_BYTES
    async with serve_silently() as (silent, received), a_client(KEY) as client:
        tracemalloc.start()
        sends = [asyncio.create_task(client.send_assignment(silent, document, "digest")) for _ in range(200)]
        await soon(lambda: as_awaitable(bool(received)))
        allocated, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for send in sends:
            send.cancel()
        await asyncio.gather(*sends, return_exceptions=True)
    assert allocated < 50 * len(document)


async def test_drain_request_to_a_member_of_an_earlier_version_has_json() -> None:
    content_types: list[str] = []

    async def drain(request: web.Request) -> web.Response:
        content_types.append(request.content_type)
        assert await request.json() == {"uid": UID}
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/drain", drain)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    async with a_client() as client:
        await client.drain(Endpoint(UID, HOST, int(runner.addresses[0][1])))
    await runner.cleanup()
    assert content_types == ["application/json"]
