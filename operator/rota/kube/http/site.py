"""HTTP routes of the web page: its files, the JSON API behind it, and the stream of changes; all read-only."""

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rota.aio import loop_time
from rota.http_server import AdmissionLimit, SharedResponse, send_body
from rota.kube.client.objects import ObjectKey
from rota.kube.http import schema
from rota.kube.http.access.access import GroupViewer, MayRead, check_may_read, viewer_of
from rota.kube.http.access.reviews import ReviewError
from rota.kube.http.broadcaster import Broadcaster, Listener
from rota.model import single_line

EVENT_INTERVAL_SECONDS = 0.2  # after each write to a stream: changes in between are sent as one event
KEEP_ALIVE_SECONDS = 15.0  # proxies may close a connection that is silent for longer
WRITE_TIMEOUT_SECONDS = 60.0  # until the connection of a client that does not read is aborted
MAX_CONCURRENT_REQUESTS = 16  # whose response is rendered for this request only: all but the list of all groups
DISCONNECT_CHECK_SECONDS = 1.0  # of an idle stream: between two checks whether the client has disconnected

EVENTS_PATH = "/v1/events"
WEB_FOLDER = Path(__file__).parent / "web"
CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}

_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
# "no-cache": browsers keep a file, but ask whether it has changed, as it may with the operator's next version.
_FILE_HEADERS = {**_SECURITY_HEADERS, "cache-control": "no-cache"}
_RESPONSE_HEADERS = {**_SECURITY_HEADERS, "cache-control": "no-store"}
_JSON_HEADERS = {**_RESPONSE_HEADERS, "content-type": "application/json"}


class GroupViews(Protocol):
    """The data behind the responses."""

    async def list_groups(self, may_read: MayRead | None = None) -> schema.GroupList:
        """Return a summary of every group; with `may_read`, of groups in namespaces for which it returns True."""

    def has_group(self, namespace: str, name: str) -> bool:
        """Whether the group exists."""

    def describe_group(self, namespace: str, name: str) -> schema.GroupDetail | None:
        """Return all details of a group; None if it does not exist."""

    async def explain(self, namespace: str, name: str, queue: str | None) -> schema.OwnerReasons | None:
        """Explain why queues have their owners; None if the group does not exist, ValueError if the queue does not."""


def page_routes(views: GroupViews, broadcaster: Broadcaster) -> list[web.RouteDef]:
    """Return the routes of the page."""
    site = _Site(views, broadcaster)
    return [
        web.get("/", site.page),
        web.get("/web/{file}", site.file),
        web.get("/v1/groups", site.groups),
        web.get("/v1/groups/{namespace}/{name}", site.group),
        web.get("/v1/groups/{namespace}/{name}/why", site.why),
        web.get(EVENTS_PATH, site.events, allow_head=False),
        web.route("*", "/v1{rest:(/.*)?}", site.refuse),  # after all other routes, so that every refusal is JSON
    ]


class _Site:
    def __init__(self, views: GroupViews, broadcaster: Broadcaster) -> None:
        self._views = views
        self._broadcaster = broadcaster
        self._files = {path.name: path.read_bytes() for path in WEB_FOLDER.iterdir()}  # no other file is served
        self._admission = AdmissionLimit(MAX_CONCURRENT_REQUESTS)
        self._all_groups = SharedResponse(self._render_groups, _JSON_HEADERS)

    async def page(self, request: web.Request) -> web.StreamResponse:
        return self._file(request, "index.html")

    async def file(self, request: web.Request) -> web.StreamResponse:
        return self._file(request, request.match_info["file"])

    def _file(self, request: web.Request, name: str) -> web.StreamResponse:
        content = self._files.get(name)
        if content is None:
            return _error_response(404, "No such file")
        # A hash, not the file's date: a container image may give all of its files the same date.
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {**_FILE_HEADERS, "etag": tag, "content-type": CONTENT_TYPES[Path(name).suffix]}
        if tag in request.headers.get("if-none-match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, headers=headers)

    async def groups(self, request: web.Request) -> web.StreamResponse:
        if await viewer_of(request).may_read_all():  # concurrent requests of such users share one rendered response
            return await self._all_groups.respond(request)
        return await self._admit(request, self._readable_groups)

    async def _render_groups(self) -> bytes:
        return msgspec.json.encode(await self._views.list_groups())

    async def _readable_groups(self, request: web.Request) -> web.StreamResponse:
        return await _send_json(request, await self._views.list_groups(viewer_of(request).may_read))

    async def _admit(self, request: web.Request, handle: Handler) -> web.StreamResponse:
        """Handle a request, unless as many as allowed are being handled."""
        with self._admission.admit() as admitted:
            if admitted:
                return await handle(request)
            return _error_response(503, f"Too many concurrent requests ({MAX_CONCURRENT_REQUESTS}); retry")

    async def group(self, request: web.Request) -> web.StreamResponse:
        return await self._admit(request, self._group)

    async def _group(self, request: web.Request) -> web.StreamResponse:
        namespace, name = await _authorized_key(request)
        detail = self._views.describe_group(namespace, name)
        return await _send_json(request, detail) if detail else _group_not_found(namespace, name)

    async def why(self, request: web.Request) -> web.StreamResponse:
        return await self._admit(request, self._why)

    async def _why(self, request: web.Request) -> web.StreamResponse:
        namespace, name = await _authorized_key(request)
        try:
            reasons = await self._views.explain(namespace, name, request.query.get("queue"))
        except ValueError as error:
            return _error_response(400, str(error))
        return await _send_json(request, reasons) if reasons else _group_not_found(namespace, name)

    async def events(self, request: web.Request) -> web.StreamResponse:
        group: ObjectKey | None = None
        requested = request.query.get("group")
        if requested is not None:
            namespace, _, name = requested.partition("/")
            if not namespace or not name or "/" in name:
                return _error_response(400, f"group must be NAMESPACE/NAME, not {single_line(requested, 100)!r}")
            await check_may_read(request, namespace)
            if not self._views.has_group(namespace, name):
                return _group_not_found(namespace, name)
            group = (namespace, name)
        if self._broadcaster.is_closed:
            return _error_response(503, "The operator is shutting down; retry")
        stream = web.StreamResponse(headers={**_RESPONSE_HEADERS, "content-type": "text/event-stream"})
        with self._broadcaster.subscribe(group) as listener, suppress(ConnectionError):
            await stream.prepare(request)
            with suppress(ReviewError):  # the user's rights cannot be checked now: end the stream, the page reconnects
                await self._stream_events(request, stream, listener)
        return stream

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        methods = ("GET",) if request.path == EVENTS_PATH else ("GET", "HEAD")
        if request.method not in methods:
            sentence = f"Method {single_line(request.method, 20)} is not allowed; use GET"
            return _error_response(405, sentence, {"allow": ", ".join(methods)})
        return _error_response(404, f"No such path: {single_line(request.path, 100)}; see docs/page.md")

    async def _stream_events(self, request: web.Request, stream: web.StreamResponse, listener: Listener) -> None:
        """Write events, and comments (`: …`) when there is none for long, until the client or the stream ends."""
        output = b": here\n\n"  # at once, so that the client knows that the stream is open
        written_at = loop_time()
        while not (self._broadcaster.is_closed or listener.is_ended):
            if request.transport is None or request.transport.is_closing():
                return
            if output:
                if not await _write(stream, output):
                    request.transport.abort()
                    return
                written_at = loop_time()
                await asyncio.sleep(EVENT_INTERVAL_SECONDS)
            event = await _next_event(listener, viewer_of(request))
            is_keep_alive_due = loop_time() - written_at >= KEEP_ALIVE_SECONDS
            output = event or (b": still here\n\n" if is_keep_alive_due else b"")


async def _write(stream: web.StreamResponse, output: bytes) -> bool:
    """Write to a stream; return False if the client does not read within WRITE_TIMEOUT_SECONDS."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
            await stream.write(output)
    except TimeoutError:
        return False
    return True


async def _next_event(listener: Listener, viewer: GroupViewer) -> bytes:
    """Return the next event; empty if nothing that the viewer may read changed within DISCONNECT_CHECK_SECONDS."""
    try:
        async with asyncio.timeout(DISCONNECT_CHECK_SECONDS):
            changed = await listener.wait_for_changes()
    except TimeoutError:
        return b""
    names = [f"{namespace}/{name}" for namespace, name in changed if await viewer.may_read(namespace)]
    if changed and not names:
        return b""
    # If the operator itself changed, `changed` and `groups` are empty: every group may look different now.
    data = msgspec.json.encode({"groups": names})
    return b"event: changed\ndata: %s\n\n" % data


async def _authorized_key(request: web.Request) -> ObjectKey:
    """Return the key of the requested group; refuse the request if its user may not read it."""
    namespace = request.match_info["namespace"]
    name = request.match_info["name"]
    await check_may_read(request, namespace)
    return namespace, name


async def _send_json(request: web.Request, value: Any) -> web.StreamResponse:
    return await send_body(request, _JSON_HEADERS, msgspec.json.encode(value))


def _group_not_found(namespace: str, name: str) -> web.Response:
    group = single_line(f"{namespace}/{name}")
    return _error_response(404, f"Group {group} does not exist, or this operator does not watch its namespace")


def _error_response(status: int, sentence: str, headers: Mapping[str, str] = MappingProxyType({})) -> web.Response:
    body = msgspec.json.encode({"error": sentence})
    return web.Response(
        status=status, body=body, content_type="application/json", headers={**_RESPONSE_HEADERS, **headers}
    )
