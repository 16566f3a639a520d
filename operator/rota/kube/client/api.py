"""HTTP client of the API server: takes paths and bodies of plain values, returns objects of the requested type.

An error response raises `ApiError`, except in `read_through_proxy`. Without a usable response, `NoResponseError` is
raised: a write may have taken effect, or not.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar, cast

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from rota.http_client import BodyTooLargeError, describe_failure, is_redirect, read_body
from rota.kube.client.login.session import Login
from rota.model import single_line
from rota.nesting import without_deep_values

T = TypeVar("T")
Params = Mapping[str, str]

FIELD_MANAGER: Final = "rota"  # field manager of server-side apply
MAX_PAGE_OBJECTS = 500  # objects in one page of a list
MAX_PAGE_BYTES = 4 * 2**20  # bytes of one page; a larger page is discarded, and requested again with fewer objects
WATCH_TIMEOUT_SECONDS = 300  # after which the server ends a watch, and it is reopened
# The server sends a bookmark every minute; after a longer silence the connection is dead.
MAX_WATCH_SILENCE_SECONDS = 90.0

MAX_CONCURRENT_REQUESTS = 50  # requests under way: more would only queue at the server, and delay its other clients
MAX_RETRY_AFTER_SECONDS = 10.0  # pause before a request is repeated, even if a busy server asks for more
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=15, sock_connect=5, sock_read=MAX_WATCH_SILENCE_SECONDS)
MAX_OBJECT_BYTES = 2**24  # of one object in JSON: etcd stores up to 1.5 MiB, and JSON has six bytes for a `<`
MAX_DEPTH_LEVELS = 100  # for objects nested too deeply for the decoder: values below this level are read as null


class ApiError(Exception):
    """The server rejected the request; `status` is the HTTP code, and `reason` the API's machine-readable cause."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message or f"The API server responded with status {status}")
        self.status = status
        self.reason = reason

    @property
    def is_not_found(self) -> bool:
        """Whether the object or resource does not exist."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def is_forbidden(self) -> bool:
        """Whether the operator lacks the rights, also because a deleted namespace took them with it."""
        return self.status == HTTPStatus.FORBIDDEN

    @property
    def is_conflict(self) -> bool:
        """Whether another client has written the object since it was read, or an object of that name exists already."""
        return self.status == HTTPStatus.CONFLICT

    @property
    def is_expired(self) -> bool:
        """Whether a list or watch cannot resume from its version."""
        return self.status == HTTPStatus.GONE


class ConflictError(Exception):
    """An object was written since it was read: raised by callers that must plan again, not by this client."""


class NoResponseError(Exception):
    """No usable response: none came, or it was a redirect, too long or malformed; a write may have taken effect."""


class _TooLongError(NoResponseError):
    """The response is longer than its limit."""


class _Status(msgspec.Struct):
    """An error response of the server."""

    code: int = 0
    reason: str = ""
    message: str = ""


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    next: str = msgspec.field(name="continue", default="")


class _VersionedObject(msgspec.Struct):
    metadata: _ListMetadata


class _ObjectList(_VersionedObject):
    items: list[msgspec.Raw] = []


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class Page(NamedTuple, Generic[T]):
    """Some objects of a collection, and the version of the whole collection."""

    objects: list[T]
    version: str


class WatchedEvent(NamedTuple, Generic[T]):
    """An event of a watch."""

    type: str  # ADDED, MODIFIED, DELETED or BOOKMARK
    changed: T | None  # None: a BOOKMARK, which has only a version
    version: str


class Api:
    """Connections to one API server."""

    def __init__(self, login: Login) -> None:
        self._server = login.server
        # aiohttp accepts a line of up to twice this size, so an event of a watch may have MAX_OBJECT_BYTES.
        self._connections = login.connect(timeout=_REQUEST_TIMEOUT, read_bufsize=MAX_OBJECT_BYTES // 2)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def __aenter__(self) -> Self:
        """Return self; connections are opened by the first requests."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._connections.close()

    async def get(self, path: str, kind: type[T]) -> T:
        """Read an object."""
        return _decode(await self._request("GET", path), kind)

    async def read_through_proxy(self, path: str, params: Params, limit_bytes: int) -> tuple[int, bytes]:
        """Return status and body of a pod's response through the API server's proxy, or of the server's own error.

        The pod is trusted less than the server, so the size of its response is limited.
        """
        return await self._send("GET", path, params=params, limit_bytes=limit_bytes)

    @asynccontextmanager
    async def websocket(
        self, path: str, params: Params, protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket of a subprotocol."""
        url = self._server + path
        try:
            async with self._connections.websocket(url, params=params, protocols=[protocol]) as websocket:
                yield websocket
        except aiohttp.WSServerHandshakeError as error:
            message = f"The API server responded with status {error.status} to {path}"
            raise ApiError(error.status, reason="", message=message) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise NoResponseError(f"The API server did not respond to {path}: {describe_failure(error)}") from error

    async def pages(self, path: str, kind: type[T], params: Params | None = None) -> AsyncGenerator[Page[T]]:
        """Read the current objects of a collection, page by page.

        Tenants can fill objects up to 1.5 MiB, so the bytes of a page are limited, too.
        """
        query = {**(params or {})}
        count = MAX_PAGE_OBJECTS
        while True:
            query["limit"] = str(count)
            # A page of one object cannot be made smaller, so it may be as large as an object.
            limit_bytes = MAX_PAGE_BYTES if count > 1 else MAX_OBJECT_BYTES
            try:
                text = await self._request("GET", path, params=query, limit_bytes=limit_bytes)
            except _TooLongError:
                if count == 1:
                    raise
                count = max(1, count // 4)
                continue
            page = _decode(text, _ObjectList)
            objects = [_decode(item, kind) for item in page.items]
            yield Page(objects, page.metadata.resource_version)
            if not page.metadata.next:
                return
            query["continue"] = page.metadata.next
            # If the next objects are as large as those of this page, they fill half of MAX_PAGE_BYTES.
            count = min(MAX_PAGE_OBJECTS, max(1, len(page.items) * MAX_PAGE_BYTES // (2 * len(text))))

    async def list(self, path: str, kind: type[T], params: Params | None = None) -> tuple[list[T], str]:
        """Read a collection; return its objects and its version."""
        objects: list[T] = []
        version = ""
        async for page in self.pages(path, kind, params):
            objects += page.objects
            version = page.version
        return objects, version

    async def watch(
        self, path: str, kind: type[T], version: str, params: Params | None = None
    ) -> AsyncGenerator[WatchedEvent[T]]:
        """Yield the events after a version."""
        query = {
            **(params or {}),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_TIMEOUT_SECONDS + random.randrange(60)),  # noqa: S311 - so that watches end one by one
        }
        try:
            options: dict[str, Any] = {"timeout": _WATCH_TIMEOUT, "allow_redirects": False}
            async with self._connections.request("GET", self._server + path, params=query, **options) as response:
                _check_not_redirected("GET", path, response)
                if response.status != HTTPStatus.OK:
                    raise _decode_error(response.status, await response.read())
                async for line in response.content:
                    event = _decode(line, _WatchEvent)
                    if event.type == "ERROR":  # its object is a Status, which has the code
                        raise _decode_error(0, bytes(event.object))
                    event_version = _decode(event.object, _VersionedObject).metadata.resource_version
                    changed = None if event.type == "BOOKMARK" else _decode(event.object, kind)
                    yield WatchedEvent(event.type, changed, event_version)
        except HttpProcessingError as error:  # Expired: the caller lists again, as resuming would bring the same event
            raise ApiError(HTTPStatus.GONE, "Expired", f"A watch event is too large: {error}") from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise NoResponseError(f"The watch of {path} failed: {describe_failure(error)}") from None

    async def create(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """Post an object to its collection."""
        return _decode(await self._request("POST", path, body), kind)

    async def replace(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """Replace an object; it must still have the version in the body."""
        return _decode(await self._request("PUT", path, body), kind)

    async def merge_patch(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """Change the fields of an object that the body holds."""
        return _decode(await self._request("PATCH", path, body, content_type="application/merge-patch+json"), kind)

    async def apply(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """Apply an object server-side; fields of other managers are kept unless the body sets them."""
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        content_type = "application/apply-patch+yaml"
        return _decode(await self._request("PATCH", path, body, params=params, content_type=content_type), kind)

    async def delete(self, path: str, uid: str) -> None:
        """Delete the object with this uid; an object that was recreated under its name stays."""
        await self._request("DELETE", path, {"preconditions": {"uid": uid}})

    async def _send_once(
        self, method: str, path: str, limit_bytes: float, **options: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send one request. A redirect is not followed: the request carries credentials for this server alone."""
        async with self._connections.request(method, self._server + path, allow_redirects=False, **options) as response:
            _check_not_redirected(method, path, response)
            try:
                return response, await read_body(response, limit_bytes)
            except BodyTooLargeError as error:
                raise _TooLongError(f"The response to {method} {path} is too large: {error}") from error

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> bytes:
        """Return the body of the response. Raise ApiError if it is an error, NoResponseError without a response."""
        status, text = await self._send(method, path, body, **options)
        if status >= HTTPStatus.BAD_REQUEST:
            raise _decode_error(status, text)
        return text

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Params | None = None,
        content_type: str = "application/json",
        limit_bytes: float = math.inf,
    ) -> tuple[int, bytes]:
        """Send a request, and once more if the server is busy; return the status and body of the response."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": content_type}
        send = partial(self._send_once, method, path, limit_bytes, data=data, params=params, headers=headers)
        try:
            async with self._slots:
                response, text = await send()
                if response.status == HTTPStatus.TOO_MANY_REQUESTS:  # retry only once: the request becomes outdated
                    await asyncio.sleep(_retry_after_seconds(response))
                    response, text = await send()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            cause = describe_failure(error)
            raise NoResponseError(f"The API server did not respond to {method} {path}: {cause}") from None
        return response.status, text


async def read_if_exists(api: Api, path: str, kind: type[T]) -> T | None:
    """Read an object; return None if it does not exist."""
    try:
        return await api.get(path, kind)
    except ApiError as error:
        if error.is_not_found:
            return None
        raise


def _check_not_redirected(method: str, path: str, response: aiohttp.ClientResponse) -> None:
    if is_redirect(response.status):
        location = single_line(response.headers.get("Location", "an unnamed location"), 100)
        raise NoResponseError(f"{method} {path} was redirected to {location}; redirects are not followed")


def _retry_after_seconds(response: aiohttp.ClientResponse) -> float:
    """Return for how many seconds a busy server asks to wait."""
    seconds = response.headers.get("Retry-After", "")
    return min(float(seconds), MAX_RETRY_AFTER_SECONDS) if seconds.isdecimal() else 1.0


def _decode(text: bytes | msgspec.Raw, kind: type[T]) -> T:
    if kind is msgspec.Raw:
        return cast("T", msgspec.Raw(bytes(text)))
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except RecursionError:
            return msgspec.json.decode(without_deep_values(bytes(text), MAX_DEPTH_LEVELS), type=kind)
    except msgspec.DecodeError as error:  # a response of a proxy in between, or a malformed object
        raise NoResponseError(f"The API server's response is not a valid {kind.__name__}: {error}") from None


def _decode_error(status: int, text: bytes) -> ApiError:
    try:
        status_object = msgspec.json.decode(text, type=_Status)
    except (msgspec.DecodeError, RecursionError):
        status_object = _Status(message=text[:200].decode(errors="replace"))
    return ApiError(status_object.code or status, status_object.reason, status_object.message)
