"""HTTP client for members, at their pods' addresses: reads reports, requests drains, and sends assignments."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple, Self
from urllib.parse import urlencode

import aiohttp
import msgspec

from rota.aio import loop_time
from rota.container import memory_limit_bytes
from rota.deliveries import DeliveriesPage, decode_deliveries
from rota.delivery_totals import MemberDeliveries
from rota.http_client import UNCOMPRESSED_HEADERS, BodyTooLargeError, is_compressed, read_body
from rota.kube.client.objects import REPORT_PORT, Pod
from rota.kube.state.retention_budget import RetentionBudget
from rota.model import Queue, Reason
from rota.queue_offsets import ProgressPage, QueueOffsets, decode_offsets, decode_progress
from rota.ranges import MAX_QUEUES_PER_DOCUMENT, count_topic_broker_pairs
from rota.reports import Report, ReportTooLargeError, decode_report
from rota.signing import NONCE_BYTES, NONCE_PARAMETER, SIGNATURE_HEADER, SignedRequest, is_report_signed, sign_request

REPORT_PATH = "/v1/report"
QUEUES_PATH = "/v1/report/queues"
DRAIN_PATH = "/v1/drain"
ASSIGNMENT_PATH = "/v1/assignment"
DELIVERIES_PATH = "/v1/report/deliveries"
MAX_PAGE_QUEUES = 500  # a longer page is not used; sidecars send up to 400 queues in one
PAGES_SECONDS = 5.0  # deadline for all pages of one member
RESPONSE_TIMEOUT_SECONDS = 2.0  # time limit of a request; of a long poll, after the time for which a member holds it
MAX_LATENESS_SECONDS = 1.0  # delay of a time-out in a busy process; after a longer delay, this process was stalled
LONG_POLL_SECONDS = 10  # for which a member holds a long poll
MAX_REPORT_BYTES = 5 * 2**20
MAX_LEGACY_REPORT_BYTES = 16 * 2**20  # reports of earlier versions contain measurements of all queues
MAX_SENT_ASSIGNMENT_BYTES = 64 * 1024  # larger ones are not sent: a group with a large one may have 10,000 members
MAX_PAGE_BYTES = 2**18  # of a page about queues or deliveries
MAX_DELIVERIES_BYTES = 64 * 2**20  # memory for the delivery counters of all members
DELIVERIES_MEMORY_FRACTION = 1 / 8  # largest fraction of a small container's memory for these counters
LARGE_REPORT_BYTES = 256 * 1024  # at most MAX_LARGE_REPORTS larger reports are read concurrently
MAX_LARGE_REPORTS = 2
BYTES_PER_ENTRY = 600  # memory per pair of topic and broker, and per entry of other fields, besides the report's text
BYTES_PER_OFFSET = 200  # memory per queue in a Broadcasting member's offsets
UNCOUNTED_BYTES = 64 * 1024  # smaller objects are not counted in a budget: the number of pods limits their sum
MAX_CONCURRENT_READS = 200  # concurrent reads; long polls do not count
MAX_CONCURRENT_SENDS = 100  # assignments that are sent concurrently; separate, so that they delay no read

_NO_RESPONSE_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)

_Query = dict[str, str]

_log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """The address of a member's HTTP server, and whether the member signs its responses."""

    uid: str  # of its pod
    address: str
    port: int
    is_signed: bool = False  # whether its pod mounts the group's key
    group_uid: str = ""
    namespace: str = ""

    @classmethod
    def from_pod(cls, pod: Pod, group_uid: str) -> Self:
        """Return a pod's endpoint. Its spec determines whether the member signs: responses cannot turn that off."""
        metadata = pod.metadata
        return cls(metadata.uid, pod.status.pod_ip, pod.control_port, pod.has_key, group_uid, metadata.namespace)

    def max_body_bytes(self, path: str) -> int:
        """Return the limit for the body of a response, in bytes."""
        if path in {QUEUES_PATH, DELIVERIES_PATH}:
            return MAX_PAGE_BYTES
        is_legacy = self.port == REPORT_PORT  # sidecars of earlier versions have no control port
        return MAX_LEGACY_REPORT_BYTES if is_legacy else MAX_REPORT_BYTES

    def url(self, target: str) -> str:
        """Return the URL of a path and query at the member."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}{target}"


class MemberResponse(NamedTuple):
    """A member's report, or the reason why its response is ignored; without either, the member is silent.

    An ignored response is not silence: `PodState.record_report` keeps the previous report, for as long as the pod's
    object exists. For a deleted pod, the API server cannot tell when the sidecar has ended: after a while without
    authenticated responses, `GroupStateReader._poll_deleted` assumes that it has.
    """

    report: Report | None  # None also if another pod responded
    silent_since: float  # loop's time since which the member is silent, if `report` is None
    ignored_reason: Reason | None = None
    may_be_from_pod: bool = False  # whether a response without a report leaves open if the pod has left


class _ResponseBody(NamedTuple):
    """The body of a response, or the reason to ignore the response; both None counts as silence."""

    text: bytes | None = None
    ignored_reason: Reason | None = None
    is_server_error: bool = False  # status 5xx: of the pod, or of a proxy before it

    def decode_response(self, member: Endpoint, silent_since: float, budget: RetentionBudget) -> MemberResponse:
        """Decode the member's response; its report is None if the body is invalid, too large, or from another pod."""
        uid = member.uid
        try:
            report = decode_report(self.text) if self.text is not None else None
        except ReportTooLargeError as error:
            _log.info("The pod %s: %s", uid, error)
            return MemberResponse(None, silent_since, Reason.REPORT_TOO_LARGE)
        except ValueError as error:
            _log.debug("The pod %s returned no valid report: %s", uid, error)
            return MemberResponse(None, silent_since, may_be_from_pod=member.is_signed)
        if report is None or report.uid != uid:
            return MemberResponse(None, silent_since, self.ignored_reason, may_be_from_pod=self.is_server_error)
        entries = count_topic_broker_pairs(report.held, report.releasing)
        entries += len(report.brokers) + len(report.troubles) + len(report.uncommitted)
        if not budget.admit(member.namespace, report, len(self.text or b"") + BYTES_PER_ENTRY * entries):
            text = "Pod %s: the memory budget of namespace %s does not allow another report of this size"
            _log.info(text, uid, member.namespace)
            return MemberResponse(None, silent_since, Reason.REPORT_TOO_LARGE)
        return MemberResponse(report, silent_since, self.ignored_reason)


class ReportClient:
    """HTTP client for the sidecars of all members."""

    def __init__(
        self, keys: Callable[[str], Sequence[bytes]] = lambda _: (), budget: RetentionBudget | None = None
    ) -> None:
        """`keys` returns a group's keys by the group's uid, the current one first.

        Any pod with the group's label is polled, so responses are not trusted: they are read up to a limit, not
        decompressed, and their cookies are dropped. Each request opens its own connection: a fleet has up to 10,000
        members, and most are polled rarely.
        """
        self._keys = keys
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=UNCOMPRESSED_HEADERS,
            auto_decompress=False,
        )
        self._read_slots = asyncio.Semaphore(MAX_CONCURRENT_READS)
        self._send_slots = asyncio.Semaphore(MAX_CONCURRENT_SENDS)
        self._large_report_slots = asyncio.Semaphore(MAX_LARGE_REPORTS)
        # For reports and offsets: `admit` counts each one until it is garbage-collected.
        self._budget = budget or RetentionBudget(uncounted_bytes=UNCOUNTED_BYTES)
        # A separate budget, so that counters take no memory from reports: without a report, a handover waits.
        deliveries_bytes = min(MAX_DELIVERIES_BYTES, memory_limit_bytes() * DELIVERIES_MEMORY_FRACTION)
        self._deliveries_budget = RetentionBudget(deliveries_bytes, uncounted_bytes=UNCOUNTED_BYTES)
        self._paging_slots = asyncio.Semaphore(MAX_LARGE_REPORTS)  # concurrent reads of several pages

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def read(self, member: Endpoint) -> MemberResponse:
        """Return the member's present report."""
        async with self._read_slots:
            requested_at = loop_time()
            body = await self._get(member, {}, RESPONSE_TIMEOUT_SECONDS)
            return body.decode_response(member, _silent_since(requested_at), self._budget)

    async def read_with_offsets(self, member: Endpoint) -> tuple[MemberResponse, Mapping[Queue, int | None] | None]:
        """Return the member's present report, and its offset of each queue; None if the offsets cannot be read.

        The offsets are in separate pages. Members of earlier versions have no pages: their reports have the offsets.
        """
        async with self._read_slots:
            requested_at = loop_time()
            body = await self._get(member, {}, RESPONSE_TIMEOUT_SECONDS)
        response = body.decode_response(member, _silent_since(requested_at), self._budget)
        if response.report is None:
            return response, None
        offsets: QueueOffsets | None = None
        if not member.is_signed:  # the member may be of an earlier version, which does not sign
            offsets = decode_offsets(body.text or b"").offsets or None
        if offsets is None:
            offsets = await self._read_all_offsets(member)
        if offsets is None:
            return response, None
        is_kept = self._budget.admit(member.namespace, offsets, BYTES_PER_OFFSET * len(offsets))
        return response, offsets if is_kept else None

    async def _read_all_offsets(self, member: Endpoint) -> QueueOffsets | None:
        """Return a member's offset of each queue; None if a page is missing or PAGES_SECONDS have passed."""
        offsets = QueueOffsets()
        until = loop_time() + PAGES_SECONDS
        while loop_time() < until:
            async with self._read_slots:
                body = await self._get(member, {"from": str(len(offsets))}, RESPONSE_TIMEOUT_SECONDS, QUEUES_PATH)
            page = decode_offsets(body.text) if body.text is not None else None
            if page is None or len(page.offsets) > MAX_PAGE_QUEUES:
                return None
            offsets |= page.offsets
            if page.next_start is None:
                return offsets
            if page.next_start != len(offsets) or not page.offsets or len(offsets) > MAX_QUEUES_PER_DOCUMENT:
                return None
        return None

    async def read_progress(self, member: Endpoint, start: int) -> ProgressPage | None:
        """Return a page of a member's progress, from its queue number `start` on; None if it cannot be read."""
        async with self._read_slots:
            body = await self._get(member, {"from": str(start)}, RESPONSE_TIMEOUT_SECONDS, QUEUES_PATH)
        page = decode_progress(body.text) if body.text is not None else None
        return page if page is not None and len(page.queues) <= MAX_PAGE_QUEUES else None

    async def read_deliveries(self, member: Endpoint) -> MemberDeliveries | None:
        """Return the delivery counters of a member.

        None if a page is missing, as with members of earlier versions, or if the memory budget is exhausted.
        """
        page = await self._read_deliveries_page(member, 0)
        if page is None:
            return None
        deliveries = MemberDeliveries.from_page(page)
        if page.next is not None:
            async with self._paging_slots:
                if not await self._read_further_pages(member, deliveries, page.next):
                    return None
        is_kept = self._deliveries_budget.admit(member.namespace, deliveries, deliveries.memory_bytes)
        return deliveries if is_kept else None

    async def _read_further_pages(self, member: Endpoint, deliveries: MemberDeliveries, start: int) -> bool:
        """Add a member's further pages; return whether all could be read, in time and within the memory limit."""
        until = loop_time() + PAGES_SECONDS
        while loop_time() < until and deliveries.memory_bytes <= MAX_DELIVERIES_BYTES:
            page = await self._read_deliveries_page(member, start)
            if page is None or page.incarnation != deliveries.incarnation:
                return False
            deliveries.add(page)
            if page.next is None:
                return True
            if page.next <= start:
                return False
            start = page.next
        return False

    async def _read_deliveries_page(self, member: Endpoint, start: int) -> DeliveriesPage | None:
        async with self._read_slots:
            body = await self._get(member, {"from": str(start)}, RESPONSE_TIMEOUT_SECONDS, DELIVERIES_PATH)
        return decode_deliveries(body.text) if body.text is not None else None

    async def long_poll(self, member: Endpoint, revision: int, seconds: int = LONG_POLL_SECONDS) -> MemberResponse:
        """Long poll: return the report when it has another revision than this one, or after `seconds` at the latest."""
        query = {"after": str(revision), "wait": f"{seconds}s"}
        until = loop_time() + seconds
        body = await self._get(member, query, seconds + RESPONSE_TIMEOUT_SECONDS)
        # The member may hold the poll until `until`: it is silent since then, or since now if the request failed.
        return body.decode_response(member, _silent_since(min(until, loop_time())), self._budget)

    async def read_if_present(self, member: Endpoint) -> MemberResponse | None:
        """Return the response of a pod that may have ended; None if the pod has left its address.

        The pod has left if the connection is refused or another server responds. Other responses without a report prove
        nothing, and are returned: a missing signature, an error of a proxy, a signed report that cannot be decoded.
        """
        requested_at = loop_time()
        try:
            body = await self._request(member, {}, RESPONSE_TIMEOUT_SECONDS)
        except aiohttp.ClientConnectorError as error:
            is_refused = isinstance(error.os_error, ConnectionRefusedError)
            return None if is_refused else MemberResponse(None, _silent_since(requested_at))
        except _NO_RESPONSE_ERRORS:
            return MemberResponse(None, _silent_since(requested_at))
        response = body.decode_response(member, _silent_since(requested_at), self._budget)
        return response if response.report or response.ignored_reason or response.may_be_from_pod else None

    async def drain(self, member: Endpoint) -> None:
        """Request a member's final drain. The caller repeats this until the member's report shows that it drains."""
        command = b"" if member.is_signed else msgspec.json.encode({"uid": member.uid})
        await self._send_command("POST", DRAIN_PATH, member, command, "application/json")

    async def send_assignment(self, member: Endpoint, document: str | bytes, settings_digest: str) -> None:
        """Send a stored assignment to a member, which obeys it before the kubelet has updated its volume.

        Only members that verify signatures get it, and no large assignment is sent: the volume has it, too. For the
        same reason it is given up after RESPONSE_TIMEOUT_SECONDS, even if it is still waiting to be sent: otherwise,
        requests to members that do not respond would pile up. The query has the digest of the document, because the
        signature does not cover the body; `settings_digest` is that of the settings which are stored with the
        assignment: a member with other settings in force waits for its volume.
        """
        if not (member.is_signed and member.address):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(RESPONSE_TIMEOUT_SECONDS), self._send_slots:
                # Encoded not before it is sent: thousands of requests may wait, and share the document.
                body = document.encode() if isinstance(document, str) else document
                if len(body) <= MAX_SENT_ASSIGNMENT_BYTES:
                    query = urlencode({"settings": settings_digest, "sha256": hashlib.sha256(body).hexdigest()})
                    target = f"{ASSIGNMENT_PATH}?{query}"
                    await self._send_command("PUT", target, member, body, "application/octet-stream")

    async def _send_command(self, method: str, target: str, member: Endpoint, body: bytes, content_type: str) -> None:
        """Send a request whose response is ignored: the member's next report shows the effect."""
        timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_SECONDS)
        headers = {"Content-Type": content_type, **self._signature(method, target, member)}
        url = member.url(target)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ):
                pass
        except _NO_RESPONSE_ERRORS as error:
            _log.debug("The request %s to %s failed: %s", target, member.address, error)

    async def _get(self, member: Endpoint, query: _Query, seconds: float, path: str = REPORT_PATH) -> _ResponseBody:
        try:
            return await self._request(member, query, seconds, path) if member.address else _ResponseBody()
        except _NO_RESPONSE_ERRORS as error:
            _log.debug("No response from %s: %s", member.address, error)
            return _ResponseBody()

    async def _request(self, member: Endpoint, query: _Query, seconds: float, path: str = REPORT_PATH) -> _ResponseBody:
        """Return the body of the response; errors, redirects, and compressed or oversized bodies have no text.

        Redirects are not followed: NetworkPolicies admit the operator to addresses that the pod could not reach.
        """
        timeout = aiohttp.ClientTimeout(total=seconds)
        nonce = secrets.token_hex(NONCE_BYTES) if member.is_signed else ""
        parameters = urlencode({**query, NONCE_PARAMETER: nonce} if nonce else query)
        target = f"{path}?{parameters}" if parameters else path
        url = member.url(target)
        headers = self._signature("GET", target, member)
        # From a member that signs, an unauthenticated response is ignored; from any other, it counts as silence.
        unusable = _ResponseBody(ignored_reason=Reason.MEMBER_NOT_AUTHENTICATED) if nonce else _ResponseBody()
        async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            if response.status == HTTPStatus.UNAUTHORIZED:
                return unusable
            if response.status != HTTPStatus.OK or is_compressed(response):
                # Counts as silence even if the member signs: a proxy may have sent the response, such as a 503.
                return _ResponseBody(is_server_error=response.status >= HTTPStatus.INTERNAL_SERVER_ERROR)
            try:
                limit = member.max_body_bytes(path)
                text = await read_body(response, limit, LARGE_REPORT_BYTES, self._large_report_slots)
            except BodyTooLargeError:  # a partial body's signature cannot be verified
                return unusable if nonce else _ResponseBody(ignored_reason=Reason.REPORT_TOO_LARGE)
            signature = response.headers.get(SIGNATURE_HEADER, "")
        if nonce and not is_report_signed(self._keys(member.group_uid), signature, nonce, text):
            return unusable
        return _ResponseBody(text)

    def _signature(self, method: str, target: str, member: Endpoint) -> dict[str, str]:
        if not member.is_signed:
            return {}
        request = SignedRequest(method, target, member.uid)
        return {SIGNATURE_HEADER: sign_request(self._keys(member.group_uid), request)}


def _silent_since(awaited_since: float) -> float:
    """Return since when a member counts as silent that has sent no response since `awaited_since`.

    If the time-out came late, this process was stalled, and the member may have responded: it is silent since now.
    """
    now = loop_time()
    is_late = now - awaited_since > RESPONSE_TIMEOUT_SECONDS + MAX_LATENESS_SECONDS
    return now if is_late else awaited_since
