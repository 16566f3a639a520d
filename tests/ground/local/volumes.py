"""A pod's volumes as folders, written as the kubelet writes them.

What comes from objects (configMap, secret, downwardAPI, projected) is a set of files that changes as a whole: they lie
in a folder named after the time, `..data` points to it and is swapped by a rename, and each name a container sees is a
link through `..data`.
"""

import asyncio
import base64
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ground.api import Api, ApiError
from ground.report import Missing

Object = dict[str, Any]
Files = dict[str, tuple[bytes, int]]  # path -> (content, mode)

_MODE = 0o644
_DATA = "..data"
_TOKEN_SECONDS = 3600


@dataclass
class Sources:
    """Reads what volumes and environments are made of, afresh from the API server each time."""

    api: Api
    pod: Object
    facts: Mapping[str, str]  # what the downward API knows besides the pod's object: status.podIP ...
    tokens: dict[str, tuple[str, float]] = field(default_factory=dict)  # audience -> (token, when to take a new one)

    async def content(self, kind: str, name: str, *, optional: bool = False) -> dict[str, bytes]:
        """Return the entries of a ConfigMap or Secret; where it is missing raise, or return none if it is optional."""
        plural = {"configMap": "configmaps", "secret": "secrets"}[kind]
        try:
            found = await self.api.get(f"/api/v1/namespaces/{self.pod['metadata']['namespace']}/{plural}/{name}")
        except ApiError as error:
            if error.status == 404 and optional:
                return {}
            if error.status == 404:
                raise Missing(f'{kind.lower()} "{name}" not found') from None
            raise
        plain = {key: text.encode() for key, text in (found.get("data") or {}).items()}
        if kind == "configMap":
            return plain | {key: base64.b64decode(text) for key, text in (found.get("binaryData") or {}).items()}
        return {key: base64.b64decode(text) for key, text in plain.items()}

    def field(self, path: str) -> str:
        """Return what the downward API says for a field path."""
        if path in self.facts:
            return self.facts[path]
        meta = self.pod["metadata"]
        for group in ("labels", "annotations"):
            entries = meta.get(group) or {}
            if path == f"metadata.{group}":
                return "\n".join(f"{key}={_quoted(text)}" for key, text in sorted(entries.items()))
            if path.startswith(f"metadata.{group}['"):
                return str(entries.get(path.removeprefix(f"metadata.{group}['").removesuffix("']"), ""))
        found: Any = self.pod
        for part in path.split("."):
            found = found.get(part, "") if isinstance(found, dict) else ""
        return str(found)

    async def token(self, audience: str, seconds: int) -> str:
        """Return a token of the pod's service account, a new one when most of its life is over."""
        known, until = self.tokens.get(audience, ("", 0.0))
        if time.time() < until:
            return known
        meta, spec = self.pod["metadata"], self.pod["spec"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        wish = {"audiences": [audience] if audience else [], "expirationSeconds": seconds, "boundObjectRef": bound}
        account = (
            f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{spec.get('serviceAccountName') or 'default'}"
        )
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": wish}
        made = await self.api.create(f"{account}/token", body)
        self.tokens[audience] = (made["status"]["token"], time.time() + 0.8 * seconds)
        return str(made["status"]["token"])


def place(volume: Object, folder: Path) -> Path:
    """Return where a volume lies."""
    return Path(volume["hostPath"]["path"]) if "hostPath" in volume else folder / volume["name"]


async def files(volume: Object, sources: Sources) -> Files:
    """Return what a volume holds now; nothing for those that are just folders."""
    if "emptyDir" in volume or "hostPath" in volume:
        return {}
    if "projected" in volume:
        mode = volume["projected"].get("defaultMode", _MODE)
        parts = await asyncio.gather(*(_source(s, mode, sources) for s in volume["projected"].get("sources") or []))
        return {path: file for part in parts for path, file in part.items()}
    kind = next((kind for kind in ("configMap", "secret", "downwardAPI") if kind in volume), None)
    if kind is None:
        raise Missing(f'volume "{volume["name"]}" is of a kind that local pods do not have; use the real node')
    return await _source(volume, volume[kind].get("defaultMode", _MODE), sources)


def write(volume: Object, folder: Path, content: Files) -> None:
    """Make a volume, or bring its files up to date."""
    path = place(volume, folder)
    if "emptyDir" in volume:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
    elif "hostPath" in volume:
        _host_path(path, volume["hostPath"].get("type") or "")
    else:
        publish(path, content)


async def _source(source: Object, mode: int, sources: Sources) -> Files:
    """Return the files of one source, of a volume of its own or inside a projected one."""
    if "serviceAccountToken" in source:
        wish = source["serviceAccountToken"]
        token = await sources.token(wish.get("audience", ""), wish.get("expirationSeconds", _TOKEN_SECONDS))
        return {wish["path"]: (token.encode(), mode)}
    if "downwardAPI" in source:
        return {
            i["path"]: (_downward(i, sources), i.get("mode", mode)) for i in source["downwardAPI"].get("items") or []
        }
    kind = next((kind for kind in ("configMap", "secret") if kind in source), None)
    if kind is None:
        raise Missing(f"volume source {', '.join(source)} is of a kind that local pods do not have; use the real node")
    wish = source[kind]
    name = wish.get("name") or wish.get("secretName")
    entries = await sources.content(kind, name, optional=wish.get("optional", False))
    return chosen(f'{kind.lower()} "{name}"', entries, wish, mode)


def chosen(what: str, entries: Mapping[str, bytes], wish: Object, mode: int) -> Files:
    """Return an object's entries as files: all of them, or those that `items` names, under the paths given there."""
    items = wish.get("items")
    if items is None:
        return {key: (content, mode) for key, content in entries.items()}
    absent = [item["key"] for item in items if item["key"] not in entries]
    if absent and not wish.get("optional"):
        raise Missing(f"{what} has no key {', '.join(absent)}")
    return {i["path"]: (entries[i["key"]], i.get("mode", mode)) for i in items if i["key"] in entries}


def publish(folder: Path, files: Files) -> None:
    """Replace the files of a folder at one moment; nothing is touched if they are as they should be."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / _DATA
    old = data.resolve() if data.is_symlink() else None
    if old and _read(old) == files:
        return
    fresh = Path(tempfile.mkdtemp(prefix=datetime.now().strftime("..%Y_%m_%d_%H_%M_%S."), dir=folder))  # noqa: DTZ005
    fresh.chmod(0o755)
    for name, (content, mode) in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
    link = folder / "..data_tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    link.rename(data)
    _show(folder, {Path(name).parts[0] for name in files})
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _show(folder: Path, names: set[str]) -> None:
    """Link each name that a container sees through `..data`, and take away those that are gone."""
    shown = {path.name for path in folder.iterdir() if not path.name.startswith("..")}
    for name in names - shown:
        (folder / name).symlink_to(f"{_DATA}/{name}")
    for name in shown - names:
        (folder / name).unlink()


def _read(folder: Path) -> Files:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode & 0o777) for path in paths}


def _downward(item: Object, sources: Sources) -> bytes:
    if "fieldRef" not in item:
        raise Missing(
            f"downward API file {item['path']}: local pods know fieldRef only, their resources are not limited"
        )
    return sources.field(item["fieldRef"]["fieldPath"]).encode()


def _host_path(path: Path, kind: str) -> None:
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    elif kind and not path.exists():
        raise Missing(f"hostPath {path} is not there")


def _quoted(text: str) -> str:
    """Quote a value as the downward API's label and annotation files do."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def within(folder: Path, sub: str) -> Path:
    """Return a subPath of a volume, made where it is missing."""
    path = folder / sub
    if not os.path.lexists(path):
        path.mkdir(parents=True)
    return path
