"""What a sidecar answers on the pod's address: its report, drains, probes and metrics."""

import asyncio
import re
from contextlib import suppress
from typing import Protocol

import msgspec
from aiohttp import web

from rota.documents import FullReport
from rota.http_server import AdmissionLimit, BodyReader, Limits, listen, release_connection
from rota.metrics import CONTENT_TYPE
from rota.spec import Seconds

PORT = 9911
LONGEST_WAIT = 30.0
MAX_CONNECTIONS = 128
MAX_HEADERS = 32
MAX_HEADER_BYTES = 2048
LIMITS = Limits(MAX_CONNECTIONS, headers=MAX_HEADERS, header_bytes=MAX_HEADER_BYTES)
MAX_WAITING_REPORTS = 32  # further long polls are answered at once
MAX_WAITING_DRAINS = 32  # further connections may be closed while they wait
MAX_DRAIN_BYTES = 1024
MAX_DRAIN_BODIES = 16  # being read at the same time

_REVISION = re.compile(r"\d{0,18}", re.ASCII)  # or nothing


class Shell(Protocol):
    """What is answered from."""

    uid: str

    def report(self) -> FullReport:
        """Return what the member says of itself now."""

    async def news(self, after: int) -> None:
        """Wait until its report has another revision."""

    async def drain(self, *, final: bool = False) -> None:
        """Give everything up, and return when that is done."""

    def unready(self) -> str:
        """Say why the member cannot work, if so."""

    def metrics(self) -> str:
        """Render what is counted."""


class Page:
    """The routes."""

    def __init__(self, shell: Shell) -> None:
        """Answer nothing yet."""
        self._shell = shell
        self._draining: dict[bool, asyncio.Task[None]] = {}  # by whether the drain is final
        self._waiting_drains = AdmissionLimit(MAX_WAITING_DRAINS)
        self._waiting_reports = AdmissionLimit(MAX_WAITING_REPORTS)
        self._drain_body = BodyReader(MAX_DRAIN_BYTES, MAX_DRAIN_BODIES)

    async def serve(self, address: str, port: int = PORT) -> web.AppRunner:
        """Answer from now on, until the runner is cleaned up."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/report", self._report),
                web.get("/v1/drain", self._drain),
                web.post("/v1/drain", self._drain_for_good),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
            ]
        )
        return await listen(app, address, port, limits=LIMITS)

    async def _report(self, asked: web.Request) -> web.Response:
        after, wait = asked.query.get("after", ""), duration(asked.query.get("wait", "10s"))
        if wait is None or not _REVISION.fullmatch(after):
            return web.Response(status=400, text="after is a revision, wait a duration such as 10s\n")
        with self._waiting_reports.admit() as may_wait, suppress(TimeoutError):
            if after and may_wait:
                async with asyncio.timeout(wait):
                    await self._shell.news(int(after))
        return web.Response(body=msgspec.json.encode(self._shell.report()), content_type="application/json")

    async def _drain(self, request: web.Request) -> web.Response:
        await self._drained(request, final=False)
        return web.Response(text="drained\n")

    async def _drain_for_good(self, asked: web.Request) -> web.Response:
        body = await self._drain_body.read(asked)
        try:
            told = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            told = {"uid": body.decode(errors="replace").strip()}  # by hand, without JSON around it
        if not isinstance(told, dict) or told.get("uid") != self._shell.uid:
            return web.Response(status=403, text="a final drain names the uid of the pod\n")
        await self._drained(asked, final=True)
        return web.Response(text="drained for good\n")

    async def _drained(self, request: web.Request, *, final: bool) -> None:
        """Drain to the end, also if the client does not wait for it; clients that ask meanwhile wait for the same."""
        draining = self._draining.get(final)
        if draining is None or draining.done():
            draining = self._draining[final] = asyncio.create_task(self._shell.drain(final=final))
        with self._waiting_drains.admit() as may_wait:
            if not may_wait:
                release_connection(request)
            await asyncio.shield(draining)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._shell.metrics(), headers={"content-type": CONTENT_TYPE})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="lives\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        why = self._shell.unready()
        return web.Response(status=503 if why else 200, text=f"{why or 'ready'}\n")


def duration(text: str) -> float | None:
    """Read how long to wait, 0s included; None if it is no duration."""
    with suppress(ValueError):
        return 0.0 if text in {"0", "0s"} else min(float(Seconds.parse(text)), LONGEST_WAIT)
    return None
