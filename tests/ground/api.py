"""The API server over HTTP for tests and the local agent: plain dicts in and out, paths as the server spells them.

    async with Api.connect(kubeconfig) as api:
        pod = await api.get("/api/v1/namespaces/default/pods/web-0")
        await api.patch("/api/v1/namespaces/default/pods/web-0", {"metadata": {"annotations": {"a": "b"}}})

An error response of the server raises `ApiError`; no response at all raises one of `GONE` (see there).
"""

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml

from ground.report import Missing

Object = dict[str, Any]
Objects = list[Object]

# Raised when the server cannot be reached or does not respond in time: catch it where a further attempt makes sense.
GONE = (aiohttp.ClientError, TimeoutError, OSError)

_PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}
_REQUEST = aiohttp.ClientTimeout(total=120, sock_connect=60)  # long enough for a busy machine
_WATCH = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=330)


class ApiError(Exception):
    """The server rejected a request; `status` is the HTTP code and `reason` the API's reason."""

    def __init__(self, answer: Object) -> None:
        super().__init__(answer.get("message") or f"The API server answered {answer.get('code')}")
        self.status = int(answer.get("code") or 0)
        self.reason = str(answer.get("reason") or "")

    def relist_version(self) -> str:
        """Return the empty version, which means to list again, where that may help; raise itself where it cannot."""
        if self.status < 500 and self.status not in {
            410,
            429,
        }:  # most often 410: the version is too old to continue from
            raise self
        return ""


@dataclass(frozen=True)
class Access:
    """The address of a cluster, and the credentials for it."""

    server: str
    trust: ssl.SSLContext
    headers: dict[str, str]

    @classmethod
    def read(cls, kubeconfig: Path) -> "Access":
        """Read the current context of a kubeconfig: client certificate or token, inline or in files."""
        config = yaml.safe_load(kubeconfig.read_text())
        context = _named(config, "context", config["current-context"])
        cluster, user = _named(config, "cluster", context["cluster"]), _named(config, "user", context["user"])
        if "exec" in user or "auth-provider" in user:
            raise Missing(f"{kubeconfig} logs in by a program; give one with a client certificate or a token instead")
        folder = kubeconfig.parent
        authority = _material(cluster, "certificate-authority", folder)
        trust = ssl.create_default_context(cadata=authority.decode() if authority else None)
        if cluster.get("insecure-skip-tls-verify"):
            trust.check_hostname = False
            trust.verify_mode = ssl.CERT_NONE
        certificate, key = (_material(user, name, folder) for name in ("client-certificate", "client-key"))
        if certificate and key:
            with tempfile.NamedTemporaryFile() as pair:  # ssl reads files only
                pair.write(certificate + b"\n" + key)
                pair.flush()
                trust.load_cert_chain(pair.name)
        token = user.get("token") or (Path(user["tokenFile"]).read_text() if "tokenFile" in user else "")
        return cls(cluster["server"].rstrip("/"), trust, {"Authorization": f"Bearer {token.strip()}"} if token else {})


class Api:
    """An open connection to one API server."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._session = aiohttp.ClientSession(
            access.server,
            headers=access.headers,
            connector=aiohttp.TCPConnector(ssl=access.trust, limit=0),
            timeout=_REQUEST,
            read_bufsize=2**21,  # a watch event is one line
        )

    @classmethod
    def connect(cls, kubeconfig: Path) -> "Api":
        """Return a client for the cluster of that kubeconfig, to be used with `async with`."""
        return cls(Access.read(kubeconfig))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        await asyncio.sleep(0.25)  # aiohttp does not wait for the end of the TLS shutdown

    async def get(self, path: str, **params: str) -> Object:
        """Read an object, or a collection as its List object."""
        return await self._ask("GET", path, None, params)

    async def list(self, path: str, **params: str) -> Objects:
        """Read the objects of a collection."""
        items: Objects = (await self.get(path, **params)).get("items") or []
        return items

    async def create(self, path: str, body: Object, **params: str) -> Object:
        """Post an object to its collection (or a request to a subresource)."""
        return await self._ask("POST", path, body, params)

    async def create_from_text(self, path: str, text: str) -> None:
        """Post an object given as text; the response may be nested too deeply to be parsed."""
        headers = {"Content-Type": "application/json"}
        async with self._session.post(path, data=BytesIO(text.encode()), headers=headers) as answer:
            raw = await answer.read()
            if answer.status >= 400:
                raise ApiError(_error_body(answer.status, raw))

    async def replace(self, path: str, body: Object, **params: str) -> Object:
        """Replace an object as a whole."""
        return await self._ask("PUT", path, body, params)

    async def patch(self, path: str, body: Object | Objects, kind: str = "merge", **params: str) -> Object:
        """Change parts of an object; `kind` is merge, json, strategic or apply."""
        if kind == "apply":
            params = {"fieldManager": "ground", "force": "true", **params}
        return await self._ask("PATCH", path, body, params, content=_PATCHES[kind])

    async def delete(self, path: str, body: Object | None = None, **params: str) -> Object:
        """Delete an object; `body` may hold DeleteOptions with preconditions."""
        return await self._ask("DELETE", path, body, params)

    async def watch(self, path: str, **params: str) -> AsyncGenerator[Object]:
        """Yield the events of one watch until the server ends it; an ERROR event is raised."""
        params = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "300", **params}
        async with self._session.get(path, params=params, timeout=_WATCH) as answer:
            if answer.status >= 400:
                raise ApiError(_error_body(answer.status, await answer.read()))
            async for line in answer.content:
                event: Object = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(event["object"])
                yield event

    async def follow(self, path: str, **params: str) -> AsyncGenerator[Object]:
        """Yield events forever: all existing objects as ADDED, then changes; continues after errors of the server.

        After a gap everything is listed again: existing objects come as MODIFIED, those deleted in the gap as DELETED.
        """
        objects: dict[str, Object] = {}
        version = ""
        while True:
            try:
                if not version:
                    listed = await self.get(path, **params)
                    for event in _differences(objects, listed["items"]):
                        yield event
                    version = listed["metadata"]["resourceVersion"]
                async for event in self.watch(path, resourceVersion=version, **params):
                    version = event["object"]["metadata"]["resourceVersion"]
                    if _apply_event(objects, event):
                        yield event
            except (ApiError, *GONE) as error:
                if isinstance(error, ApiError):
                    version = error.relist_version()
                await asyncio.sleep(0.2)

    async def _ask(
        self, method: str, path: str, body: Object | Objects | None, params: dict[str, str], *, content: str = ""
    ) -> Object:
        headers = {"Content-Type": content or "application/json"}
        text = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=text, params=params, headers=headers) as answer:
            raw = await answer.read()
            if answer.status >= 400:
                raise ApiError(_error_body(answer.status, raw))
            parsed: Object = json.loads(raw)
            return parsed


def _differences(objects: dict[str, Object], items: Objects) -> Objects:
    """Update `objects` to the listed items and return the events for the difference."""
    present = {item["metadata"]["uid"] for item in items}
    events = [{"type": "DELETED", "object": deleted} for uid, deleted in objects.items() if uid not in present]
    events += [
        {"type": "MODIFIED" if item["metadata"]["uid"] in objects else "ADDED", "object": item} for item in items
    ]
    for event in events:
        _apply_event(objects, event)
    return events


def _apply_event(objects: dict[str, Object], event: Object) -> bool:
    """Apply an event to `objects`; return whether it is an event of an object."""
    if event["type"] == "BOOKMARK":
        return False
    uid = event["object"]["metadata"]["uid"]
    if event["type"] == "DELETED":
        objects.pop(uid, None)
    else:
        objects[uid] = event["object"]
    return True


def _error_body(status: int, raw: bytes) -> Object:
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = {"message": raw.decode(errors="replace")}  # the proxy in front and old paths answer in plain text
    return {"code": status, **(answer if isinstance(answer, dict) else {})}


def _named(config: Object, kind: str, name: str) -> Object:
    entry_of_kind: Object = next(entry[kind] for entry in config[f"{kind}s"] if entry["name"] == name)
    return entry_of_kind


def _material(entry: Object, name: str, folder: Path) -> bytes:
    """Return a certificate or key, given inline or by a path relative to the kubeconfig."""
    if f"{name}-data" in entry:
        return base64.b64decode(entry[f"{name}-data"])
    return (folder / entry[name]).read_bytes() if name in entry else b""
