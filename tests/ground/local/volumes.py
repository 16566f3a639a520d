"""A pod's volumes as folders, written as the kubelet writes them.

Volumes of API objects (configMap, secret, downwardAPI, projected) are sets of files that change as a whole: the files
are in a folder named after the time, `..data` points to it and is swapped by a rename, and each name that a container
sees is a link through `..data`.
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
    """Reads the contents of volumes and variables, from the API server each time."""

    api: Api
    pod: Object
    facts: Mapping[str, str]  # fields of the downward API that are not in the pod's object: status.podIP ...
    tokens: dict[str, tuple[str, float]] = field(default_factory=dict)  # audience -> (token, when to renew it)

    async def content(self, kind: str, name: str, *, optional: bool = False) -> dict[str, bytes]:
        """Return the entries of a ConfigMap or Secret; a missing one raises, or has no entries if it is optional."""
        plural = {"configMap": "configmaps", "secret": "secrets"}[kind]
        try:
            resource = await self.api.get(f"/api/v1/namespaces/{self.pod['metadata']['namespace']}/{plural}/{name}")
        except ApiError as error:
            if error.status == 404 and optional:
                return {}
            if error.status == 404:
                raise Missing(f'{kind.lower()} "{name}" not found') from None
            raise
        plain = {key: text.encode() for key, text in (resource.get("data") or {}).items()}
        if kind == "configMap":
            return plain | {key: base64.b64decode(text) for key, text in (resource.get("binaryData") or {}).items()}
        return {key: base64.b64decode(text) for key, text in plain.items()}

    def field(self, path: str) -> str:
        """Return the downward API's value of a field path."""
        if path in self.facts:
            return self.facts[path]
        meta = self.pod["metadata"]
        for group in ("labels", "annotations"):
            entries = meta.get(group) or {}
            if path == f"metadata.{group}":
                return "\n".join(f"{key}={_quoted(text)}" for key, text in sorted(entries.items()))
            if path.startswith(f"metadata.{group}['"):
                return str(entries.get(path.removeprefix(f"metadata.{group}['").removesuffix("']"), ""))
        value: Any = self.pod
        for part in path.split("."):
            value = value.get(part, "") if isinstance(value, dict) else ""
        return str(value)

    async def token(self, audience: str, seconds: int) -> str:
        """Return a token of the pod's service account; a new one when most of the previous one's life is over."""
        token, expires_at = self.tokens.get(audience, ("", 0.0))
        if time.time() < expires_at:
            return token
        meta, spec = self.pod["metadata"], self.pod["spec"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        token_spec = {
            "audiences": [audience] if audience else [],
            "expirationSeconds": seconds,
            "boundObjectRef": bound,
        }
        account = (
            f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{spec.get('serviceAccountName') or 'default'}"
        )
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": token_spec}
        response = await self.api.create(f"{account}/token", body)
        self.tokens[audience] = (response["status"]["token"], time.time() + 0.8 * seconds)
        return str(response["status"]["token"])


def path_of(volume: Object, folder: Path) -> Path:
    """Return the path of a volume."""
    return Path(volume["hostPath"]["path"]) if "hostPath" in volume else folder / volume["name"]


async def read_files(volume: Object, sources: Sources) -> Files:
    """Return the present contents of a volume; empty for those that are plain folders."""
    if "emptyDir" in volume or "hostPath" in volume:
        return {}
    if "projected" in volume:
        mode = volume["projected"].get("defaultMode", _MODE)
        parts = await asyncio.gather(
            *(_source(source, mode, sources) for source in volume["projected"].get("sources") or [])
        )
        return {path: file for part in parts for path, file in part.items()}
    kind = next((kind for kind in ("configMap", "secret", "downwardAPI") if kind in volume), None)
    if kind is None:
        raise Missing(f'volume "{volume["name"]}" is of a kind that local pods do not have; use the real node')
    return await _source(volume, volume[kind].get("defaultMode", _MODE), sources)


def write_volume(volume: Object, folder: Path, content: Files) -> None:
    """Create a volume, or update its files."""
    path = path_of(volume, folder)
    if "emptyDir" in volume:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
    elif "hostPath" in volume:
        _host_path(path, volume["hostPath"].get("type") or "")
    else:
        publish(path, content)


async def _source(source: Object, mode: int, sources: Sources) -> Files:
    """Return the files of one source, a whole volume or a part of a projected one."""
    if "serviceAccountToken" in source:
        projection = source["serviceAccountToken"]
        token = await sources.token(projection.get("audience", ""), projection.get("expirationSeconds", _TOKEN_SECONDS))
        return {projection["path"]: (token.encode(), mode)}
    if "downwardAPI" in source:
        items = source["downwardAPI"].get("items") or []
        return {item["path"]: (_downward(item, sources), item.get("mode", mode)) for item in items}
    kind = next((kind for kind in ("configMap", "secret") if kind in source), None)
    if kind is None:
        raise Missing(f"volume source {', '.join(source)} is of a kind that local pods do not have; use the real node")
    selection = source[kind]
    name = selection.get("name") or selection.get("secretName")
    entries = await sources.content(kind, name, optional=selection.get("optional", False))
    return select_items(f'{kind.lower()} "{name}"', entries, selection, mode)


def select_items(what: str, entries: Mapping[str, bytes], selection: Object, mode: int) -> Files:
    """Return an object's entries as files: all of them, or those that `items` names, under the paths in `items`."""
    items = selection.get("items")
    if items is None:
        return {key: (content, mode) for key, content in entries.items()}
    absent = [item["key"] for item in items if item["key"] not in entries]
    if absent and not selection.get("optional"):
        raise Missing(f"{what} has no key {', '.join(absent)}")
    return {item["path"]: (entries[item["key"]], item.get("mode", mode)) for item in items if item["key"] in entries}


def publish(folder: Path, read_files: Files) -> None:
    """Replace the files of a folder at one moment; unchanged files are not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / _DATA
    old = data.resolve() if data.is_symlink() else None
    if old and _read(old) == read_files:
        return
    fresh = Path(tempfile.mkdtemp(prefix=datetime.now().strftime("..%Y_%m_%d_%H_%M_%S."), dir=folder))  # noqa: DTZ005
    fresh.chmod(0o755)
    for name, (content, mode) in read_files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
    link = folder / "..data_tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    link.rename(data)
    _show(folder, {Path(name).parts[0] for name in read_files})
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _show(folder: Path, names: set[str]) -> None:
    """Link each name that a container sees through `..data`, and remove links of files that no longer exist."""
    present = {path.name for path in folder.iterdir() if not path.name.startswith("..")}
    for name in names - present:
        (folder / name).symlink_to(f"{_DATA}/{name}")
    for name in present - names:
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


def subpath_of(folder: Path, sub: str) -> Path:
    """Return a subPath of a volume, created if missing."""
    path = folder / sub
    if not os.path.lexists(path):
        path.mkdir(parents=True)
    return path
