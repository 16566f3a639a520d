"""Members' reports, read over HTTP at their pods' addresses: at once, or by long poll where one is awaited."""

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
PAGES_SECONDS = 5.0  # in which all pages must come
READ_SECONDS = 2.0  # response timeout
WAIT_SECONDS = 10  # that a long poll is held for
STANDING_WAIT_SECONDS = 30  # that a long poll is held for while nothing is awaited; members hold none longer
LARGEST = 5 * 2**20  # bytes of a report
LARGEST_OF_EARLIER_VERSIONS = 16 * 2**20  # bytes; their reports have the measurements of all queues
LARGEST_PAGE = 2**18  # bytes of a page about queues or deliveries
MAX_DELIVERIES_BYTES = 64 * 2**20  # memory for what members report of deliveries; less in a small container
DELIVERIES_PART_OF_MEMORY = 1 / 8
LARGE_REPORT_BYTES = 256 * 1024  # bytes; only few reports that are larger are read at the same time
MAX_LARGE_REPORTS = 2
BYTES_PER_ENTRY = 600  # memory that a report takes for each pair of topic and broker, beside its text
BYTES_PER_OFFSET = 200
FREE_BYTES = 64 * 1024  # what takes less is not counted: it is bounded by the number of pods
AT_ONCE = 200  # reads that are under way; long polls do not count

_UNHEARD = (aiohttp.ClientError, TimeoutError, OSError, ValueError)

_log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """Where a member answers."""

    uid: str  # of its pod
    address: str
    port: int
    signs: bool = False  # whether its pod mounts the group's key
    group_uid: str = ""
    namespace: str = ""

    @classmethod
    def of(cls, pod: Pod, group_uid: str) -> Self:
        """Return it as the pod's spec has it: whether a member signs is not for its answers to decide."""
        metadata = pod.metadata
        return cls(metadata.uid, pod.status.pod_ip, pod.control_port, pod.has_key, group_uid, metadata.namespace)

    def largest(self, path: str) -> int:
        """Return how many bytes of an answer are read."""
        if path in {QUEUES_PATH, DELIVERIES_PATH}:
            return LARGEST_PAGE
        return LARGEST_OF_EARLIER_VERSIONS if self.port == REPORT_PORT else LARGEST

    def url(self, target: str) -> str:
        """Return the address of a resource there."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}{target}"


class Answer(NamedTuple):
    """What a member responds; `report` is None if it did not respond, or if another pod did."""

    report: Report | None
    asked: float  # the start of its silence, if it did not respond
    doubt: Reason | None = None  # why a response is ignored; the member is not silent, though


class _Body(NamedTuple):
    """The body of a response, or why it is ignored; neither, if nobody answered or it is no report."""

    text: bytes | None = None
    doubt: Reason | None = None

    def as_answer(self, member: Endpoint, asked: float, budget: RetentionBudget) -> Answer:
        """Return the member's answer; there is no report if the body is invalid, or if another pod sent it."""
        uid = member.uid
        try:
            report = read_report(self.text) if self.text is not None else None
        except ReportTooLargeError as error:
            _log.info("The pod %s: %s", uid, error)
            return Answer(None, asked, Reason.REPORT_TOO_LARGE)
        except ValueError as error:
            _log.debug("The pod %s says no report: %s", uid, error)
            return Answer(None, asked)
        if report is None or report.uid != uid:
            return Answer(None, asked, self.doubt)
        entries = places_in(report.held, report.releasing)
        entries += len(report.brokers) + len(report.troubles) + len(report.uncommitted)
        if not budget.admit(member.namespace, report, len(self.text or b"") + BYTES_PER_ENTRY * entries):
            _log.info("The pod %s: there is no memory for its report beside others of %s", uid, member.namespace)
            return Answer(None, asked, Reason.REPORT_TOO_LARGE)
        return Answer(report, asked, self.doubt)


class Reports:
    """Where members can be heard."""

    def __init__(
        self, keys: Callable[[str], Sequence[bytes]] = lambda _: (), budget: RetentionBudget | None = None
    ) -> None:
        """`keys` returns a group's keys by the group's uid, the current one first.

        Any pod with the group's label is asked, so its answer is limited: it is read up to a limit, it is not
        decompressed, and its cookies are dropped. Each request has a connection of its own: a fleet has up to ten
        thousand members, and most are asked once.
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
        # Separate: without room for a report, handovers wait; without room for counters, they are only not shown.
        deliveries_bytes = min(MAX_DELIVERIES_BYTES, memory_limit() * DELIVERIES_PART_OF_MEMORY)
        self._deliveries_budget = RetentionBudget(deliveries_bytes, free=FREE_BYTES)
        self._paged = asyncio.Semaphore(MAX_LARGE_REPORTS)  # reads of several pages at the same time

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def read(self, member: Endpoint) -> Answer:
        """Return what the member says now."""
        async with self._room:
            asked = self._now
            return (await self._get(member, {}, READ_SECONDS)).as_answer(member, asked, self._budget)

    async def read_with_offsets(self, member: Endpoint) -> tuple[Answer, Mapping[Queue, int | None] | None]:
        """Return the same, and where it is with each queue; None: it cannot be heard."""
        async with self._room:
            asked = self._now
            body = await self._get(member, {}, READ_SECONDS)
        answer = body.as_answer(member, asked, self._budget)
        if answer.report is None:
            return answer, None
        # Members of earlier versions have them in the report.
        offsets = None if member.signs else read_offsets(body.text or b"").offsets or None
        if offsets is None:
            offsets = await self._read_pages(member)
        if offsets is not None and not self._budget.admit(member.namespace, offsets, BYTES_PER_OFFSET * len(offsets)):
            return answer, None
        return answer, offsets if member.signs else offsets or {}

    async def _read_pages(self, member: Endpoint) -> QueueOffsets | None:
        """Return where a member is with each queue; None if a page is missing, or all of them take too long."""
        found = QueueOffsets()
        until = self._now + PAGES_SECONDS
        while self._now < until:
            async with self._room:
                body = await self._get(member, {"from": str(len(found))}, READ_SECONDS, QUEUES_PATH)
            page = read_offsets(body.text) if body.text is not None else None
            if page is None or len(page.offsets) > QUEUES_IN_A_PAGE:
                return None
            found |= page.offsets
            if page.next is None:
                return found
            if page.next != len(found) or not page.offsets or len(found) > MOST_IDS:
                return None
        return None

    async def read_progress(self, member: Endpoint, start: int) -> ProgressPage | None:
        """Return how far a member is with some of its queues, from index `start` on; None if it does not say."""
        async with self._room:
            body = await self._get(member, {"from": str(start)}, READ_SECONDS, QUEUES_PATH)
        page = read_progress(body.text) if body.text is not None else None
        return page if page is not None and len(page.queues) <= QUEUES_IN_A_PAGE else None

    async def read_deliveries(self, member: Endpoint) -> MemberDeliveries | None:
        """Return what a member's deliveries came to.

        None if a page is missing, as of members of earlier versions, or if there is no memory for it.
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
        """Add a member's other pages; return whether all of them could be read, in time and within the limit."""
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

    async def next(self, member: Endpoint, after: int, seconds: int = WAIT_SECONDS) -> Answer:
        """Return its report once that has another revision, or after these seconds as it is."""
        query = {"after": str(after), "wait": f"{seconds}s"}
        until = self._now + seconds
        body = await self._get(member, query, seconds + READ_SECONDS)
        return body.as_answer(member, min(until, self._now), self._budget)

    async def last_words(self, member: Endpoint) -> Answer | None:
        """Return what a pod says that may have ended: a report, or silence. None: it is not at its address any more.

        Nothing listens there then, or another server does. A response without the signature that it must have counts as
        none: it does not show who the sender is.
        """
        asked = self._now
        try:
            body = await self._ask(member, {}, READ_SECONDS)
        except aiohttp.ClientConnectorError as error:
            return None if isinstance(error.os_error, ConnectionRefusedError) else Answer(None, asked)
        except _UNHEARD:
            return Answer(None, asked)
        answer = body.as_answer(member, asked, self._budget)
        return answer if answer.report or answer.doubt else None

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def drain(self, member: Endpoint) -> None:
        """Ask a member for its final drain. The caller repeats this until the member's report says that it drains."""
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
            pass  # its status and body say nothing that the member's next report does not

    async def _get(self, member: Endpoint, query: dict[str, str], seconds: float, path: str = REPORT_PATH) -> _Body:
        try:
            return await self._ask(member, query, seconds, path) if member.address else _Body()
        except _UNHEARD as error:
            _log.debug("%s cannot be heard: %s", member.address, error)
            return _Body()

    async def _ask(self, member: Endpoint, query: dict[str, str], seconds: float, path: str = REPORT_PATH) -> _Body:
        """Return the body of the answer, unless it is no report: an error, a redirect, compressed or too long.

        A redirect is not followed: NetworkPolicies admit the operator to members that the pod could not reach.
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
            except TooLongError:  # no signature can be verified then
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
