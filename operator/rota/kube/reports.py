"""Members' reports, read over HTTP at their pods' addresses: at once, or by long poll where one is awaited."""

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

import aiohttp

from rota.documents import Report, read_offsets, read_report
from rota.http_client import NOT_COMPRESSED, TooLongError, is_compressed, read_body
from rota.kube.manifests import PORT
from rota.model import Queue

READ_SECONDS = 2.0  # an answer that takes longer is none
WAIT_SECONDS = 10  # that a long poll is held for
LARGEST = 16 * 2**20  # bytes of a report
LARGE_REPORT_BYTES = 256 * 1024  # bytes; only few reports that are larger are read at the same time
MAX_LARGE_REPORTS = 2
AT_ONCE = 200  # reads that are under way; long polls do not count

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What a member says; None: it cannot be heard, or somebody else answers."""

    report: Report | None
    asked: float  # since when it was not right to be silent, if it was


class Reports:
    """Where members can be heard."""

    def __init__(self) -> None:
        """Open a connection for each request: a fleet has up to ten thousand members, and most are asked once.

        Any pod with the group's label is asked, so its answer is limited: it is read up to LARGEST bytes, it is not
        decompressed, and its cookies are dropped.
        """
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=NOT_COMPRESSED,
            auto_decompress=False,
        )
        self._room = asyncio.Semaphore(AT_ONCE)
        self._large = asyncio.Semaphore(MAX_LARGE_REPORTS)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def read(self, address: str, uid: str) -> Answer:
        """Return what the pod with that uid says now."""
        async with self._room:
            asked = self._now
            return Answer(_report(await self._get(address, {}, READ_SECONDS), uid), asked)

    async def read_with_offsets(self, address: str, uid: str) -> tuple[Answer, Mapping[Queue, int | None] | None]:
        """Return the same, and where it is with each queue; None: it cannot be heard."""
        async with self._room:
            asked = self._now
            text = await self._get(address, {}, READ_SECONDS)
        report = _report(text, uid)
        return Answer(report, asked), read_offsets(text or b"") if report else None

    async def next(self, address: str, uid: str, after: int) -> Answer:
        """Return its report once that has another revision, or after a while as it is."""
        asked = {"after": str(after), "wait": f"{WAIT_SECONDS}s"}
        until = self._now + WAIT_SECONDS
        text = await self._get(address, asked, WAIT_SECONDS + READ_SECONDS)
        report = _report(text, uid)
        return Answer(report, min(until, self._now))

    async def last_words(self, address: str, uid: str) -> Answer | None:
        """Return what a pod says that may have ended: a report, or silence. None: it is not at its address any more.

        For nothing listens there, or it is somebody else who answers.
        """
        asked = self._now
        try:
            text = await self._ask(address, {}, READ_SECONDS)
        except aiohttp.ClientConnectorError as error:
            return None if isinstance(error.os_error, ConnectionRefusedError) else Answer(None, asked)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return Answer(None, asked)
        report = _report(text, uid)
        return Answer(report, asked) if report else None

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def drain(self, address: str, uid: str) -> None:
        """Ask a member for its final drain. The caller repeats this until the member's report says that it drains."""
        timeout = aiohttp.ClientTimeout(total=READ_SECONDS)
        url = f"http://{_host(address)}:{PORT}/v1/drain"
        try:
            async with self._session.post(url, json={"uid": uid}, timeout=timeout, allow_redirects=False):
                pass  # its status and body say nothing that the member's next report does not
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.debug("%s was not asked to drain: %s", address, error)

    async def _get(self, address: str, asked: dict[str, str], seconds: float) -> bytes | None:
        try:
            return await self._ask(address, asked, seconds) if address else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.debug("%s cannot be heard: %s", address, error)
            return None

    async def _ask(self, address: str, asked: dict[str, str], seconds: float) -> bytes | None:
        """Return the body of the answer; None if it is no report: an error, a redirect, compressed or too long.

        A redirect is not followed: NetworkPolicies admit the operator to members that the pod could not reach.
        """
        timeout = aiohttp.ClientTimeout(total=seconds)
        url = f"http://{_host(address)}:{PORT}/v1/report"
        async with self._session.get(url, params=asked, timeout=timeout, allow_redirects=False) as response:
            if response.status != HTTPStatus.OK or is_compressed(response):
                return None
            try:
                return await read_body(response, LARGEST, LARGE_REPORT_BYTES, self._large)
            except TooLongError:
                return None


def _report(text: bytes | None, uid: str) -> Report | None:
    """Return what the pod with that uid says; what somebody else says, or what is no report, is nothing."""
    try:
        report = read_report(text) if text is not None else None
    except ValueError as error:
        _log.debug("The pod %s says no report: %s", uid, error)
        return None
    return report if report and report.uid == uid else None


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
