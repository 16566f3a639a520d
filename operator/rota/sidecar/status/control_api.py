"""HTTP API that only the operator uses: the member's report, the report's pages, new assignments, and the final drain.

A member whose pod mounts a key answers on a separate port, and only requests that are signed with that key; it also
signs its reports. A member without a key, in a pod that no operator made, answers unsigned requests on the probe port,
and takes no assignments there.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
from aiohttp import web

from rota.deliveries import DeliveriesPage
from rota.http_server import AdmissionLimit, BodyReader, ServerLimits, listen, release_connection
from rota.reports import FullReport
from rota.sidecar.status.self_report import QueuesPage
from rota.signing import KEY_BYTES, NONCE_PARAMETER, SIGNATURE_HEADER, SignedRequest, is_request_signed, sign_report
from rota.spec import Seconds

PORT: Final = 9913
MAX_WAIT_SECONDS = 30.0
LIMITS = ServerLimits(max_connections=128, max_headers=32, max_header_bytes=2048)
MAX_WAITING_REPORTS = 32  # further long polls are answered at once
MAX_WAITING_DRAINS = 32  # connections of further drain requests may be closed while they wait
MAX_DRAIN_BYTES = 1024  # body of a drain request
MAX_DRAIN_BODIES = 16  # bodies that are read at the same time
MAX_ASSIGNMENT_BYTES = 64 * 1024  # operators send no larger ones: MAX_SENT_ASSIGNMENT_BYTES
MAX_ASSIGNMENT_BODIES = 2  # bodies that are read at the same time

_NUMBER = re.compile(r"\d{0,18}", re.ASCII)  # may be empty: the parameter is optional


class ReportSource(Protocol):
    """The member's reports and progress pages."""

    def report(self) -> FullReport:
        """Return the member's report as it is now."""

    def queues(self, start: int) -> QueuesPage:
        """Return the page of the queues' progress that starts at index `start`."""

    def deliveries(self, start: int) -> DeliveriesPage:
        """Return the page of delivery counts that starts at index `start`."""

    async def wait_for_revision(self, after: int) -> None:
        """Wait until the report's revision differs from `after`."""


class ControlHost(Protocol):
    """The member that the control port serves."""

    uid: str

    @property
    def status(self) -> ReportSource:
        """The member's reports and progress pages."""

    def on_report_requested(self) -> None:
        """Record that the operator has requested the report."""

    def receive_assignment(self, document: bytes, digest: str) -> bool:
        """Obey an assignment, which is stored with the settings of this digest; return whether it is in force."""

    async def drain(self, *, final: bool = False) -> None:
        """Release all queues, and return when that is done."""


class KeyFiles:
    """The keys in a mounted Secret: the current one, and for a while after a change the previous one."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def read(self) -> list[bytes]:
        """Return the mounted keys, the current one first; an empty list while the Secret does not exist."""
        keys: list[bytes] = []
        for name in ("current", "previous"):
            with suppress(OSError):
                key = (self._folder / name).read_bytes()
                if len(key) == KEY_BYTES:
                    keys.append(key)
        return keys


class ControlApi:
    """The routes of the control port."""

    def __init__(self, host: ControlHost, keys: KeyFiles | None = None) -> None:
        """Serve `host`; `keys` verify requests and sign reports, and without them nothing is signed."""
        self._host = host
        self._keys = keys
        self._drain_task: asyncio.Task[None] | None = None
        self._waiting_drains = AdmissionLimit(MAX_WAITING_DRAINS)
        self._waiting_reports = AdmissionLimit(MAX_WAITING_REPORTS)
        self._drain_body = BodyReader(MAX_DRAIN_BYTES, MAX_DRAIN_BODIES)
        self._assignment_body = BodyReader(MAX_ASSIGNMENT_BYTES, MAX_ASSIGNMENT_BODIES)

    @property
    def is_signed(self) -> bool:
        """Whether only signed requests are answered, on a separate port."""
        return self._keys is not None

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes, for the control port or, without a key, the probe port."""
        routes = [
            web.get("/v1/report", self._report),
            web.get("/v1/report/queues", partial(self._page, self._host.status.queues)),
            web.get("/v1/report/deliveries", partial(self._page, self._host.status.deliveries)),
            web.post("/v1/drain", self._drain),
        ]
        return [*routes, web.put("/v1/assignment", self._receive_assignment)] if self.is_signed else routes

    async def serve(self, address: str, port: int = PORT) -> web.AppRunner:
        """Serve the control port until the returned runner is cleaned up."""
        app = web.Application()
        app.add_routes(self.routes)
        return await listen(app, address, port, limits=LIMITS)

    async def _report(self, request: web.Request) -> web.Response:
        keys = self._authenticate(request)
        self._host.on_report_requested()
        after = request.query.get("after", "")
        wait = parse_wait(request.query.get("wait", "10s"))
        if wait is None or not _NUMBER.fullmatch(after):
            return web.Response(status=400, text="after must be a revision, wait must be a duration such as 10s\n")
        with self._waiting_reports.admit() as may_wait, suppress(TimeoutError):
            if after and may_wait:
                async with asyncio.timeout(wait):
                    await self._host.status.wait_for_revision(int(after))
        return _respond(request, encode_report(self._host), keys)

    async def _page(self, page_of: Callable[[int], object], request: web.Request) -> web.Response:
        keys = self._authenticate(request)
        start = request.query.get("from", "")
        if not _NUMBER.fullmatch(start):
            return web.Response(status=400, text="from must be 0 or the next value of the previous page\n")
        return _respond(request, msgspec.json.encode(page_of(int(start or 0))), keys)

    async def _drain(self, request: web.Request) -> web.Response:
        """Drain permanently. The signature covers the pod's uid; an unsigned request must name it in its body."""
        is_unsigned = not self._authenticate(request)
        if is_unsigned and await self._named_uid(request) != self._host.uid:
            return web.Response(status=403, text="a final drain must name the pod's uid\n")
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = asyncio.create_task(self._host.drain(final=True))
        with self._waiting_drains.admit() as may_wait:
            if not may_wait:
                release_connection(request)
            await asyncio.shield(self._drain_task)  # the drain completes even if the client disconnects
        return web.Response(text="drained permanently\n")

    async def _receive_assignment(self, request: web.Request) -> web.Response:
        """Obey the assignment in the body. The signature covers the body's digest, which is in the query."""
        self._authenticate(request)
        body = await self._assignment_body.read(request)
        if hashlib.sha256(body).hexdigest() != request.query.get("sha256"):
            return web.Response(status=400, text="sha256 must be the SHA-256 digest of the body\n")
        if not self._host.receive_assignment(body, request.query.get("settings", "")):
            return web.Response(
                status=409, text="the assignment is not obeyed; the report names the generation in force\n"
            )
        return web.Response(status=204)

    async def _named_uid(self, request: web.Request) -> object:
        body = await self._drain_body.read(request)
        try:
            command = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            return body.decode(errors="replace").strip()  # sent manually, without JSON
        return command.get("uid") if isinstance(command, dict) else None

    def _authenticate(self, request: web.Request) -> Sequence[bytes]:
        """Return the valid keys; raise HTTPUnauthorized for an unsigned request. A member without keys has none.

        The signature does not cover the body; of an assignment, the only one with a body, it covers the digest.
        """
        if self._keys is None:
            return ()
        keys = self._keys.read()
        header = request.headers.get(SIGNATURE_HEADER, "")
        signed = SignedRequest(request.method, request.raw_path, self._host.uid)
        if not is_request_signed(keys, header, signed):
            reason = "it is not signed with the key of the pod's group" if keys else "the pod has no key yet"
            raise web.HTTPUnauthorized(text=f"The request is rejected: {reason}\n")
        return keys


def _respond(request: web.Request, body: bytes, keys: Sequence[bytes]) -> web.Response:
    """Return a response with a report or a page, signed with the first of the keys if there is one."""
    response = web.Response(body=body, content_type="application/json")
    if keys:
        response.headers[SIGNATURE_HEADER] = sign_report(keys[0], request.query.get(NONCE_PARAMETER, ""), body)
    return response


def encode_report(host: ControlHost) -> bytes:
    """Return the encoded current report."""
    return msgspec.json.encode(host.status.report())


def parse_wait(text: str) -> float | None:
    """Return the seconds that a client asks to wait, at most MAX_WAIT_SECONDS; None if the text is no duration."""
    with suppress(ValueError):
        return 0.0 if text in {"0", "0s"} else min(float(Seconds.parse(text)), MAX_WAIT_SECONDS)
    return None
