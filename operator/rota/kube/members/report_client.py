"""HTTP client for members' reports, at their pods' addresses: immediate reads, long polls, and drain requests."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple, Self
from urllib.parse import urlencode

import aiohttp

from rota.container import memory_limit
from rota.deliveries import DeliveriesPage, read_deliveries
from rota.delivery_totals import MemberDeliveries
from rota.http_client import NOT_COMPRESSED, TooLongError, is_compressed, read_body
from rota.kube.client.objects import REPORT_PORT, Pod
from rota.kube.state.retention_budget import RetentionBudget
from rota.model import Queue, Reason
from rota.queue_offsets import ProgressPage, QueueOffsets, read_offsets, read_progress
from rota.ranges import MOST_IDS, places_in
from rota.reports import Report, ReportTooLargeError, read_report
from rota.signing import NONCE, NONCE_BYTES, SIGNATURE_HEADER, Request, is_report_signed, sign_request

REPORT_PATH, QUEUES_PATH, DRAIN_PATH = "/v1/report", "/v1/report/queues", "/v1/drain"
DELIVERIES_PATH = "/v1/report/deliveries"
QUEUES_IN_A_PAGE = 500
PAGES_SECONDS = 5.0  # deadline for all pages of one member
READ_SECONDS = 2.0  # response timeout
WAIT_SECONDS = 10  # for which a member holds a long poll
STANDING_WAIT_SECONDS = 30  # the same while no report is awaited; members hold no long poll longer
LARGEST = 5 * 2**20  # bytes of a report
LARGEST_OF_EARLIER_VERSIONS = 16 * 2**20  # bytes; their reports contain measurements of all queues
LARGEST_PAGE = 2**18  # bytes of a page about queues or deliveries
MAX_DELIVERIES_BYTES = 64 * 2**20  # memory for what members report of deliveries; less in a small container
DELIVERIES_PART_OF_MEMORY = 1 / 8
LARGE_REPORT_BYTES = 256 * 1024  # bytes; at most MAX_LARGE_REPORTS larger reports are read concurrently
MAX_LARGE_REPORTS = 2
BYTES_PER_ENTRY = 600  # memory of a report per pair of topic and broker, in addition to its text
BYTES_PER_OFFSET = 200
FREE_BYTES = 64 * 1024  # smaller objects are not counted: the number of pods bounds them
AT_ONCE = 200  # concurrent reads; long polls do not count

_UNHEARD = (aiohttp.ClientError, TimeoutError, OSError, ValueError)

_log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """The address of a member's HTTP server, and whether it signs."""

    uid: str  # of its pod
    address: str
    port: int
    signs: bool = False  # whether its pod mounts the group's key
    group_uid: str = ""
    namespace: str = ""

    @classmethod
    def of(cls, pod: Pod, group_uid: str) -> Self:
        """Return a pod's endpoint. Its spec determines whether the member signs: responses cannot turn that off."""
        metadata = pod.metadata
        return cls(metadata.uid, pod.status.pod_ip, pod.control_port, pod.has_key, group_uid, metadata.namespace)

    def largest(self, path: str) -> int:
        """Return the limit for the body of a response, in bytes."""
        if path in {QUEUES_PATH, DELIVERIES_PATH}:
            return LARGEST_PAGE
        return LARGEST_OF_EARLIER_VERSIONS if self.port == REPORT_PORT else LARGEST

    def url(self, target: str) -> str:
        """Return the URL of a path and query at the member."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}{target}"


class MemberResponse(NamedTuple):
    """A member's response; `report` is None if the member did not respond, or if another pod did."""

    report: Report | None
    asked: float  # if the member did not respond: the start of its silence
    doubt: Reason | None = None  # why a response is ignored; the member does not count as silent then


class _Body(NamedTuple):
    """The body of a response, or the reason to ignore it; both None without a response, or if it is no report."""

    text: bytes | None = None
    doubt: Reason | None = None

    def as_answer(self, member: Endpoint, asked_at: float, budget: RetentionBudget) -> MemberResponse:
        """Decode the member's answer; its report is None if the body is invalid, too large, or from another pod."""
        uid = member.uid
        try:
            report = read_report(self.text) if self.text is not None else None
        except ReportTooLargeError as error:
            _log.info("The pod %s: %s", uid, error)
            return MemberResponse(None, asked_at, Reason.REPORT_TOO_LARGE)
        except ValueError as error:
            _log.debug("The pod %s says no report: %s", uid, error)
            return MemberResponse(None, asked_at)
        if report is None or report.uid != uid:
            return MemberResponse(None, asked_at, self.doubt)
        entries = places_in(report.held, report.releasing)
        entries += len(report.brokers) + len(report.troubles) + len(report.uncommitted)
        if not budget.admit(member.namespace, report, len(self.text or b"") + BYTES_PER_ENTRY * entries):
            _log.info("The pod %s: there is no memory for its report beside others of %s", uid, member.namespace)
            return MemberResponse(None, asked_at, Reason.REPORT_TOO_LARGE)
        return MemberResponse(report, asked_at, self.doubt)


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
            headers=NOT_COMPRESSED,
            auto_decompress=False,
        )
        self._room = asyncio.Semaphore(AT_ONCE)
        self._large = asyncio.Semaphore(MAX_LARGE_REPORTS)
        self._budget = budget or RetentionBudget(free=FREE_BYTES)
        # A separate budget: without memory for reports, handovers wait; counters without memory are just not shown.
        deliveries_bytes = min(MAX_DELIVERIES_BYTES, memory_limit() * DELIVERIES_PART_OF_MEMORY)
        self._deliveries_budget = RetentionBudget(deliveries_bytes, free=FREE_BYTES)
        self._paged = asyncio.Semaphore(MAX_LARGE_REPORTS)  # concurrent reads of several pages

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def read(self, member: Endpoint) -> MemberResponse:
        """Return the member's present report."""
        async with self._room:
            asked_at = self._now
            return (await self._get(member, {}, READ_SECONDS)).as_answer(member, asked_at, self._budget)

    async def read_with_offsets(self, member: Endpoint) -> tuple[MemberResponse, Mapping[Queue, int | None] | None]:
        """Return the member's present report, and its offset of each queue; None if they cannot be read."""
        async with self._room:
            asked_at = self._now
            body = await self._get(member, {}, READ_SECONDS)
        answer = body.as_answer(member, asked_at, self._budget)
        if answer.report is None:
            return answer, None
        # Members of earlier versions send the offsets in the report.
        offsets = None if member.signs else read_offsets(body.text or b"").offsets or None
        if offsets is None:
            offsets = await self._read_pages(member)
        if offsets is not None and not self._budget.admit(member.namespace, offsets, BYTES_PER_OFFSET * len(offsets)):
            return answer, None
        return answer, offsets if member.signs else offsets or {}

    async def _read_pages(self, member: Endpoint) -> QueueOffsets | None:
        """Return a member's offset of each queue; None if a page is missing or PAGES_SECONDS have passed."""
        offsets = QueueOffsets()
        until = self._now + PAGES_SECONDS
        while self._now < until:
            async with self._room:
                body = await self._get(member, {"from": str(len(offsets))}, READ_SECONDS, QUEUES_PATH)
            page = read_offsets(body.text) if body.text is not None else None
            if page is None or len(page.offsets) > QUEUES_IN_A_PAGE:
                return None
            offsets |= page.offsets
            if page.next is None:
                return offsets
            if page.next != len(offsets) or not page.offsets or len(offsets) > MOST_IDS:
                return None
        return None

    async def read_progress(self, member: Endpoint, start: int) -> ProgressPage | None:
        """Return a page of a member's progress, from its queue number `start` on; None if it cannot be read."""
        async with self._room:
            body = await self._get(member, {"from": str(start)}, READ_SECONDS, QUEUES_PATH)
        page = read_progress(body.text) if body.text is not None else None
        return page if page is not None and len(page.queues) <= QUEUES_IN_A_PAGE else None

    async def read_deliveries(self, member: Endpoint) -> MemberDeliveries | None:
        """Return the delivery counters of a member.

        None if a page is missing, as with members of earlier versions, or if the memory budget is exhausted.
        """
        page = await self._read_deliveries_page(member, 0)
        if page is None:
            return None
        deliveries = MemberDeliveries.of(page)
        if page.next is not None:
            async with self._paged:
                if not await self._read_further_pages(member, deliveries, page.next):
                    return None
        is_kept = self._deliveries_budget.admit(member.namespace, deliveries, deliveries.bytes_kept)
        return deliveries if is_kept else None

    async def _read_further_pages(self, member: Endpoint, deliveries: MemberDeliveries, start: int) -> bool:
        """Add a member's further pages; return whether all could be read, in time and within the memory limit."""
        until = self._now + PAGES_SECONDS
        while self._now < until and deliveries.bytes_kept <= MAX_DELIVERIES_BYTES:
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
        async with self._room:
            body = await self._get(member, {"from": str(start)}, READ_SECONDS, DELIVERIES_PATH)
        return read_deliveries(body.text) if body.text is not None else None

    async def next(self, member: Endpoint, revision: int, seconds: int = WAIT_SECONDS) -> MemberResponse:
        """Long poll: return the report when it has another revision than this one, or after `seconds` at the latest."""
        query = {"after": str(revision), "wait": f"{seconds}s"}
        until = self._now + seconds
        body = await self._get(member, query, seconds + READ_SECONDS)
        return body.as_answer(member, min(until, self._now), self._budget)

    async def last_words(self, member: Endpoint) -> MemberResponse | None:
        """Return the answer of a pod that may have ended: a report, or silence; None if it has left its address.

        It has left if the connection is refused or another server responds. A response without the required signature
        counts as silence: it does not prove its sender.
        """
        asked_at = self._now
        try:
            body = await self._ask(member, {}, READ_SECONDS)
        except aiohttp.ClientConnectorError as error:
            return None if isinstance(error.os_error, ConnectionRefusedError) else MemberResponse(None, asked_at)
        except _UNHEARD:
            return MemberResponse(None, asked_at)
        answer = body.as_answer(member, asked_at, self._budget)
        return answer if answer.report or answer.doubt else None

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def drain(self, member: Endpoint) -> None:
        """Request a member's final drain. The caller repeats this until the member's report shows that it drains."""
        try:
            await self._post_drain(member)
        except _UNHEARD as error:
            _log.debug("%s was not asked to drain: %s", member.address, error)

    async def _post_drain(self, member: Endpoint) -> None:
        timeout = aiohttp.ClientTimeout(total=READ_SECONDS)
        url = member.url(DRAIN_PATH)
        headers = self._signature("POST", DRAIN_PATH, member)
        command = None if member.signs else {"uid": member.uid}
        async with self._session.post(url, json=command, headers=headers, timeout=timeout, allow_redirects=False):
            pass  # its status and body are ignored: the member's next report shows the effect

    async def _get(self, member: Endpoint, query: dict[str, str], seconds: float, path: str = REPORT_PATH) -> _Body:
        try:
            return await self._ask(member, query, seconds, path) if member.address else _Body()
        except _UNHEARD as error:
            _log.debug("%s cannot be heard: %s", member.address, error)
            return _Body()

    async def _ask(self, member: Endpoint, query: dict[str, str], seconds: float, path: str = REPORT_PATH) -> _Body:
        """Return the body of the response; errors, redirects, and compressed or oversized bodies have no text.

        Redirects are not followed: NetworkPolicies admit the operator to addresses that the pod could not reach.
        """
        timeout = aiohttp.ClientTimeout(total=seconds)
        nonce = secrets.token_hex(NONCE_BYTES) if member.signs else ""
        parameters = urlencode({**query, NONCE: nonce} if nonce else query)
        target = f"{path}?{parameters}" if parameters else path
        url = member.url(target)
        headers = self._signature("GET", target, member)
        unusable = _Body(doubt=Reason.MEMBER_NOT_AUTHENTICATED) if nonce else _Body()
        async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            if response.status == HTTPStatus.UNAUTHORIZED:
                return unusable
            if response.status != HTTPStatus.OK or is_compressed(response):
                return _Body()
            try:
                text = await read_body(response, member.largest(path), LARGE_REPORT_BYTES, self._large)
            except TooLongError:  # a partial body's signature cannot be verified
                return unusable if nonce else _Body(doubt=Reason.REPORT_TOO_LARGE)
            signature = response.headers.get(SIGNATURE_HEADER, "")
        if nonce and not is_report_signed(self._keys(member.group_uid), signature, nonce, text):
            return unusable
        return _Body(text)

    def _signature(self, method: str, target: str, member: Endpoint) -> dict[str, str]:
        if not member.signs:
            return {}
        request = Request(method, target, member.uid)
        return {SIGNATURE_HEADER: sign_request(self._keys(member.group_uid), request)}
