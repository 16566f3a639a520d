"""The web page that shows groups, the JSON that it is drawn from, and word of what has changed; all of it read-only."""

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from aiohttp import web

from rota.http_server import AdmissionLimit, SharedResponse, send
from rota.kube.client.objects import Key
from rota.kube.http import schema
from rota.kube.http.access.access import GroupReader, Reads, check_reads, reader_of
from rota.kube.http.access.reviews import ReviewError
from rota.kube.http.events import Hub, Listener
from rota.model import plain

GAP = 0.2  # seconds between two events on a connection: whatever changes meanwhile comes together
KEEP_ALIVE = 15.0  # a connection on which nothing is said for longer may be closed on the way
PATIENCE = 60.0  # for somebody who reads nothing of what is said
MAX_DETAILS = 16  # responses about one group that are being sent at once
TICK = 1.0  # how soon it is seen that a silent listener has gone

WEB = Path(__file__).parent / "web"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}

_SAFE = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_FILE = {**_SAFE, "cache-control": "no-cache"}  # kept, and asked for anew: another version may answer tomorrow
_ANSWER = {**_SAFE, "cache-control": "no-store"}
_JSON = {**_ANSWER, "content-type": "application/json"}


class Showing(Protocol):
    """Where the answers come from."""

    async def groups(self, reads: Reads | None = None) -> schema.Groups:
        """Return every group in a line; with `reads`, those of the namespaces for which it returns True."""

    def knows(self, namespace: str, name: str) -> bool:
        """Whether there is such a group."""

    def group(self, namespace: str, name: str) -> schema.Detail | None:
        """Return everything about a group; None if there is none."""

    async def why(self, namespace: str, name: str, queue: str | None) -> schema.Reasons | None:
        """Say why queues have their owners; None if there is no such group, ValueError if no such queue."""


def routes(showing: Showing, hub: Hub) -> list[web.RouteDef]:
    """Return the routes of the page."""
    site = _Site(showing, hub)
    return [
        web.get("/", site.page),
        web.get("/web/{file}", site.file),
        web.get("/v1/groups", site.groups),
        web.get("/v1/groups/{namespace}/{name}", site.group),
        web.get("/v1/groups/{namespace}/{name}/why", site.why),
        web.get("/v1/events", site.events, allow_head=False),
        web.route("*", "/v1{rest:(/.*)?}", site.nothing),  # after all others: programs read each refusal alike
    ]


class _Site:
    def __init__(self, showing: Showing, hub: Hub) -> None:
        self._showing, self._hub = showing, hub
        self._files = {path.name: path.read_bytes() for path in WEB.iterdir()}  # nothing else can be asked for
        self._details = AdmissionLimit(MAX_DETAILS)
        self._all_groups = SharedResponse(self._render_groups, _JSON)

    async def page(self, asked: web.Request) -> web.StreamResponse:
        return self._file(asked, "index.html")

    async def file(self, asked: web.Request) -> web.StreamResponse:
        return self._file(asked, asked.match_info["file"])

    def _file(self, asked: web.Request, name: str) -> web.StreamResponse:
        content = self._files.get(name)
        if content is None:
            return _refusal(404, "There is no such file")
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'  # files in images may all be of the same date
        headers = {**_FILE, "etag": tag, "content-type": TYPES[Path(name).suffix]}
        if tag in asked.headers.get("if-none-match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, headers=headers)

    async def groups(self, request: web.Request) -> web.StreamResponse:
        reader = reader_of(request)
        if await reader.reads_all():
            return await self._all_groups.respond(request)
        with self._details.admit() as admitted:
            return await _answer(request, await self._showing.groups(reader.reads)) if admitted else _too_many()

    async def _render_groups(self) -> bytes:
        return msgspec.json.encode(await self._showing.groups())

    async def group(self, request: web.Request) -> web.StreamResponse:
        with self._details.admit() as admitted:
            return await self._group(request) if admitted else _too_many()

    async def _group(self, request: web.Request) -> web.StreamResponse:
        namespace, name = await _readable(request)
        detail = self._showing.group(namespace, name)
        return await _answer(request, detail) if detail else _unknown(namespace, name)

    async def why(self, request: web.Request) -> web.StreamResponse:
        with self._details.admit() as admitted:
            return await self._why(request) if admitted else _too_many()

    async def _why(self, request: web.Request) -> web.StreamResponse:
        namespace, name = await _readable(request)
        try:
            reasons = await self._showing.why(namespace, name, request.query.get("queue"))
        except ValueError as error:
            return _refusal(400, str(error))
        return await _answer(request, reasons) if reasons else _unknown(namespace, name)

    async def events(self, asked: web.Request) -> web.StreamResponse:
        only = asked.query.get("group")
        namespace, _, name = (only or "").partition("/")
        if only is not None and (not (namespace and name) or "/" in name):
            return _refusal(400, f"group is NAMESPACE/NAME, not {plain(only, 100)!r}")
        if only is not None:
            await check_reads(asked, namespace)
        if only is not None and not self._showing.knows(namespace, name):
            return _unknown(namespace, name)
        if self._hub.closed:
            return _refusal(503, "This operator is ending; ask again")
        stream = web.StreamResponse(headers={**_ANSWER, "content-type": "text/event-stream"})
        with self._hub.listening((namespace, name) if only else None) as listener, suppress(ConnectionError):
            await stream.prepare(asked)
            with suppress(ReviewError):  # the stream ends, and its client connects again
                await self._follow(asked, stream, listener)
        return stream

    async def nothing(self, asked: web.Request) -> web.StreamResponse:
        if asked.method != "GET":
            return _refusal(405, f"{plain(asked.method, 20)} is not answered here; GET is", {"allow": "GET"})
        return _refusal(404, f"There is nothing at {plain(asked.path, 100)}; see docs/page.md")

    async def _follow(self, asked: web.Request, stream: web.StreamResponse, listener: Listener) -> None:
        """Say what changes, until nobody is there to hear it."""
        loop = asyncio.get_running_loop()
        word, said = b": here\n\n", loop.time()
        while not (self._hub.closed or listener.ended) and asked.transport and not asked.transport.is_closing():
            if word or loop.time() - said >= KEEP_ALIVE:
                if not await _written(stream, word or b": still here\n\n"):
                    asked.transport.abort()
                    return
                said = loop.time()
            if word:
                await asyncio.sleep(GAP)
            word = await _word(listener, reader_of(asked))


async def _written(stream: web.StreamResponse, word: bytes) -> bool:
    try:
        async with asyncio.timeout(PATIENCE):
            await stream.write(word)
    except TimeoutError:
        return False
    return True


async def _word(listener: Listener, reader: GroupReader) -> bytes:
    """Return what is to be said now, if anything is."""
    try:
        async with asyncio.timeout(TICK):
            news = await listener.news()
    except TimeoutError:
        return b""
    names = [f"{namespace}/{name}" for namespace, name in news if await reader.reads(namespace)]
    if news and not names:
        return b""
    told = msgspec.json.encode({"groups": names})
    return b"event: changed\ndata: %s\n\n" % told


async def _readable(request: web.Request) -> Key:
    """Return the group that is requested; refuse users who may not read it."""
    namespace, name = request.match_info["namespace"], request.match_info["name"]
    await check_reads(request, namespace)
    return namespace, name


async def _answer(request: web.Request, value: Any) -> web.StreamResponse:
    return await send(request, _JSON, msgspec.json.encode(value))


def _too_many() -> web.Response:
    return _refusal(503, f"{MAX_DETAILS} responses about groups are being sent; ask again")


def _unknown(namespace: str, name: str) -> web.Response:
    return _refusal(404, f"There is no group {plain(f'{namespace}/{name}')}, or it is not looked after")


def _refusal(status: int, sentence: str, headers: Mapping[str, str] = MappingProxyType({})) -> web.Response:
    body = msgspec.json.encode({"error": sentence})
    return web.Response(status=status, body=body, content_type="application/json", headers={**_ANSWER, **headers})
