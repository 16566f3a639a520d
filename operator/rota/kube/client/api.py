"""The API server over HTTP: paths as the server spells them, bodies as plain values, answers as the type asked for.

An answer of the server that is an error raises `ApiError`; no answer at all raises `Unanswered`, after which nothing is
known: a write may have happened or not.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar, cast

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from rota.http_client import TooLongError, describe_failure, is_redirect, read_body
from rota.kube.client.login.session import Login
from rota.model import plain
from rota.nesting import without_deep_values

T = TypeVar("T")
Params = Mapping[str, str]

MANAGER: Final = "rota"  # whose fields they are in a server-side apply
MAX_OBJECTS = 500  # in one response to a list
MAX_PAGE_BYTES = 4 * 2**20  # of one response; if a page is larger, a smaller one is requested
WATCH_SECONDS = 300  # a watch ends after so long, and is begun anew
QUIET_SECONDS = 90.0  # the server sends a bookmark every minute: who is silent for longer is gone

AT_ONCE = 50  # requests under way: more only wait at the server, and everybody else with them
LONGEST_WAIT = 10.0  # seconds, whatever a busy server asks for
_REQUEST = aiohttp.ClientTimeout(total=30, sock_connect=5)
_WATCH = aiohttp.ClientTimeout(total=None, connect=15, sock_connect=5, sock_read=QUIET_SECONDS)
MAX_OBJECT_BYTES = 2**24  # etcd stores 1.5 MiB, and `<` takes six bytes in JSON
DEEPEST = 100  # levels of an object; what lies deeper is read as null if the decoder cannot read the whole


class ApiError(Exception):
    """The server refused; `status` is the HTTP code and `reason` the word that the API has for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        """Keep what the server said."""
        super().__init__(message or f"The API server answered {status}")
        self.status, self.reason = status, reason

    @property
    def unknown(self) -> bool:
        """Whether there is no such thing."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def forbidden(self) -> bool:
        """Whether there are no rights to it: they go with their namespace."""
        return self.status == HTTPStatus.FORBIDDEN

    @property
    def conflict(self) -> bool:
        """Whether somebody else has written meanwhile, or an object of that name is there already."""
        return self.status == HTTPStatus.CONFLICT

    @property
    def expired(self) -> bool:
        """Whether a list or watch cannot go on from where it was."""
        return self.status == HTTPStatus.GONE


class Stale(Exception):  # noqa: N818 - it is what happened
    """An object has been written since it was read: nothing that was decided from it counts."""


class Unanswered(Exception):  # noqa: N818 - it is what happened
    """The server did not answer."""


class _TooLong(Unanswered):
    """The response is longer than its limit."""


class _Status(msgspec.Struct):
    """How the server says no."""

    code: int = 0
    reason: str = ""
    message: str = ""


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    next: str = msgspec.field(name="continue", default="")


class _Listed(msgspec.Struct):
    metadata: _Metadata
    items: list[msgspec.Raw] = []


class _Versioned(msgspec.Struct):
    metadata: _Metadata


class _News(msgspec.Struct):
    type: str
    object: msgspec.Raw


class Page(NamedTuple, Generic[T]):
    """Some objects of a collection, and the version of the whole collection."""

    objects: list[T]
    version: str


class Api:
    """Connections to one API server."""

    def __init__(self, login: Login) -> None:
        """Connect when something is asked."""
        self._server = login.server
        # A line of a watch may have twice the size of the buffer.
        self._connections = login.connect(timeout=_REQUEST, read_bufsize=MAX_OBJECT_BYTES // 2)
        self._room = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> Self:
        """Do nothing yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._connections.close()

    async def get(self, path: str, kind: type[T], params: Params | None = None) -> T:
        """Read an object."""
        return _read(await self._ask("GET", path, params=params), kind)

    async def read_through_proxy(self, path: str, params: Params, limit_bytes: int) -> tuple[int, bytes]:
        """Return the status and body that a pod answers through the API server's proxy.

        The pod is trusted less than the server, so its answer is bounded.
        """
        return await self._answer("GET", path, None, params=params, limit_bytes=limit_bytes)

    @asynccontextmanager
    async def websocket(
        self, path: str, params: Params, protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket of a subprotocol."""
        url = self._server + path
        try:
            async with self._connections.session.ws_connect(url, params=params, protocols=[protocol]) as websocket:
                yield websocket
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(error.status, "", f"The API server answered {error.status} to {path}") from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unanswered(f"The API server did not answer {path}: {describe_failure(error)}") from error

    async def pages(self, path: str, kind: type[T], params: Params | None = None) -> AsyncGenerator[Page[T]]:
        """Read a collection page by page, as it is now.

        Tenants can fill objects up to 1.5 MiB, so the bytes of a page are limited, too.
        """
        count, start = MAX_OBJECTS, ""
        while True:
            asked = {**(params or {}), "limit": str(count), **({"continue": start} if start else {})}
            try:
                limit_bytes = MAX_PAGE_BYTES if count > 1 else MAX_OBJECT_BYTES
                text = await self._ask("GET", path, params=asked, limit_bytes=limit_bytes)
            except _TooLong:
                if count == 1:
                    raise
                count = max(1, count // 4)
                continue
            page = _read(text, _Listed)
            yield Page([_read(item, kind) for item in page.items], page.metadata.resource_version)
            if not page.metadata.next:
                return
            start = page.metadata.next
            count = min(MAX_OBJECTS, max(1, len(page.items) * MAX_PAGE_BYTES // (2 * len(text))))

    async def list(self, path: str, kind: type[T], params: Params | None = None) -> tuple[list[T], str]:
        """Read a collection as it is now; return its objects and the version it has."""
        found: list[T] = []
        version = ""
        async for page in self.pages(path, kind, params):
            found += page.objects
            version = page.version
        return found, version

    async def watch(
        self, path: str, kind: type[T], version: str, params: Params | None = None
    ) -> AsyncGenerator[tuple[str, T | None, str]]:
        """Yield what happens after a version: ADDED, MODIFIED, DELETED or BOOKMARK, the object, and its version."""
        asked = {
            **(params or {}),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS + random.randrange(60)),  # noqa: S311 - not all at once
        }
        try:
            options: dict[str, Any] = {"timeout": _WATCH, "allow_redirects": False}
            async with self._connections.session.get(self._server + path, params=asked, **options) as answer:
                _check_not_redirected("GET", path, answer)
                if answer.status != HTTPStatus.OK:
                    raise _refusal(answer.status, await answer.read())
                async for line in answer.content:
                    news = _read(line, _News)
                    if news.type == "ERROR":
                        raise _refusal(0, bytes(news.object))
                    at = _read(news.object, _Versioned).metadata.resource_version
                    yield news.type, None if news.type == "BOOKMARK" else _read(news.object, kind), at
        except HttpProcessingError as error:  # the same event would come again
            raise ApiError(HTTPStatus.GONE, "Expired", f"An event is too long: {error}") from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unanswered(f"The watch of {path} broke: {describe_failure(error)}") from None

    async def create(self, path: str, body: Mapping[str, Any], kind: type[T], params: Params | None = None) -> T:
        """Post an object to its collection."""
        return _read(await self._ask("POST", path, body, params=params), kind)

    async def replace(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """Replace an object whole; the version in the body is the one it must still have."""
        return _read(await self._ask("PUT", path, body), kind)

    async def merge(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """Change some fields of an object."""
        return _read(await self._ask("PATCH", path, body, content="application/merge-patch+json"), kind)

    async def apply(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """State an object as we want it: fields that others state stay theirs."""
        params = {"fieldManager": MANAGER, "force": "true"}
        return _read(await self._ask("PATCH", path, body, params=params, content="application/apply-patch+yaml"), kind)

    async def delete(self, path: str, uid: str) -> None:
        """Delete just this object, not one that was made anew under its name."""
        await self._ask("DELETE", path, {"preconditions": {"uid": uid}})

    async def _once(
        self, method: str, path: str, *, limit_bytes: float, **sent: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send one request. A redirect is not followed: the request carries credentials for this server alone."""
        async with self._connections.session.request(
            method, self._server + path, allow_redirects=False, **sent
        ) as response:
            _check_not_redirected(method, path, response)
            try:
                return response, await read_body(response, limit_bytes)
            except TooLongError as error:
                raise _TooLong(f"What is answered to {method} {path} is too long: {error}") from error

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Params | None = None,
        content: str = "application/json",
        limit_bytes: float = math.inf,
    ) -> bytes:
        status, told = await self._answer(method, path, body, params=params, content=content, limit_bytes=limit_bytes)
        if status >= HTTPStatus.BAD_REQUEST:
            raise _refusal(status, told)
        return told

    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        params: Params | None,
        content: str = "application/json",
        limit_bytes: float = math.inf,
    ) -> tuple[int, bytes]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": content}
        try:
            async with self._room:
                sent: dict[str, Any] = {"data": data, "params": params, "headers": headers, "limit_bytes": limit_bytes}
                answer, told = await self._once(method, path, **sent)
                if answer.status == HTTPStatus.TOO_MANY_REQUESTS:  # once: who waits longer looks at everything anew
                    await asyncio.sleep(_wait(answer))
                    answer, told = await self._once(method, path, **sent)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unanswered(f"The API server did not answer {method} {path}: {describe_failure(error)}") from None
        return answer.status, told


def _check_not_redirected(method: str, path: str, response: aiohttp.ClientResponse) -> None:
    if is_redirect(response.status):
        location = plain(response.headers.get("Location", "nowhere"), 100)
        raise Unanswered(f"{method} {path} was answered by a redirect to {location}, which is not followed")


def _wait(answer: aiohttp.ClientResponse) -> float:
    """Return the seconds that a busy server asks for."""
    told = answer.headers.get("Retry-After", "")
    return min(float(told), LONGEST_WAIT) if told.isdecimal() else 1.0


def _read(text: bytes | msgspec.Raw, kind: type[T]) -> T:
    if kind is msgspec.Raw:
        return cast("T", msgspec.Raw(bytes(text)))
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except RecursionError:
            return msgspec.json.decode(without_deep_values(bytes(text), DEEPEST), type=kind)
    except msgspec.DecodeError as error:  # a proxy in between, or an object that is none
        raise Unanswered(f"What the API server answered is no {kind.__name__}: {error}") from None


def _refusal(status: int, text: bytes) -> ApiError:
    try:
        told = msgspec.json.decode(text, type=_Status)
    except (msgspec.DecodeError, RecursionError):
        told = _Status(message=text[:200].decode(errors="replace"))
    return ApiError(told.code or status, told.reason, told.message)
