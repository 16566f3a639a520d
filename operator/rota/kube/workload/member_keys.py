"""Keys by which the operator and the members authenticate each other: its own key, and a Secret for each group.

The operator's key is in a Secret next to its Lease. A group's key is derived from it and from the group's uid, so the
operator writes the group's Secret and never has to read it. To rotate the key, a user removes `current` from the
operator's Secret: the leader generates a new key, and the previous key stays valid for ten minutes, in which the
kubelets update mounted Secrets. The fields of that Secret:

    current     the operator's key
    last        a copy of `current`, which becomes `previous` when a user has removed `current`
    previous    the key before `current`, while it is valid
    changed     when `current` was generated

With the key of its group, a member signs its reports, so that the operator can ignore reports of other clients.
"""

import asyncio
import base64
import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import msgspec

from rota.aio import loop_time
from rota.kube.client.api import Api, ApiError, NoResponseError, read_if_exists
from rota.kube.client.objects import (
    GROUP_LABEL,
    KEY_FINGERPRINT_ANNOTATION,
    Metadata,
    PartialObjectMetadata,
    Pod,
    key_secret_name,
)
from rota.kube.client.paths import collection_path, object_path
from rota.kube.state.group import Group
from rota.kube.state.member_problems import unauthenticated_pods
from rota.kube.workload.deployment_manifest import MANAGED_BY_LABELS, owner_reference
from rota.model import Finding, Reason, single_line
from rota.signing import KEY_BYTES, derive_group_key, fingerprint
from rota.timestamps import format_time, parse_time

PREVIOUS_KEY_VALID_SECONDS = 600.0
REREAD_SECONDS = 15.0  # between reads of the operator's Secret
RETRY_SECONDS = 2.0  # between reads while the operator knows no key
LOAD_TRIES = 5  # reads of the operator's Secret, before the operator may lead without its key
REWRITE_SECONDS = 60.0  # until a group's Secret is written again, in case it was deleted

_log = logging.getLogger(__name__)


class OperatorKeys(NamedTuple):
    """The operator's key, and the previous one while it is valid."""

    current: bytes
    previous: bytes = b""
    changed_at: int = 0  # when the current key was generated, in seconds since 1970

    def group_keys(self, uid: str) -> tuple[bytes, ...]:
        """Return the keys of a group, the current one first."""
        current = derive_group_key(self.current, uid)
        return (current, derive_group_key(self.previous, uid)) if self.previous else (current,)


class _KeySecret(msgspec.Struct):
    metadata: Metadata
    data: dict[str, str] = {}


class _WrittenSecret(NamedTuple):
    """The content last written to a group's Secret."""

    keys: tuple[bytes, ...]
    written_at: float  # on the event loop's clock


class MemberKeys:
    """Loads and rotates the operator's key, and writes the groups' Secrets."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        """`namespace` and `name` are those of the operator's Secret."""
        self._api = api
        self._namespace = namespace
        self._name = name
        self._keys: OperatorKeys | None = None
        self._written: WeakKeyDictionary[Group, _WrittenSecret] = WeakKeyDictionary()

    def keys_of(self, group_uid: str) -> tuple[bytes, ...]:
        """Return the keys of the group with that uid, the current one first."""
        return self._keys.group_keys(group_uid) if self._keys else ()

    # The operator's Secret.

    async def load(self) -> None:
        """Read or create the operator's key; give up after a few tries.

        An operator without the key can lead: it ignores reports of members that sign, but counts no member as lost.
        """
        for _ in range(LOAD_TRIES):
            if await self._refresh(may_rotate=False):
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def run(self, is_leading: Callable[[], bool], on_change: Callable[[], None]) -> NoReturn:
        """Read the keys periodically, and call `on_change` when the valid keys change; only the leader rotates them."""
        while True:
            await asyncio.sleep(REREAD_SECONDS if self._keys else RETRY_SECONDS)
            previous = self._keys
            if await self._refresh(may_rotate=is_leading()) and self._keys != previous:
                _log.info("The operator's keys have changed; the leader writes the groups' Secrets")
                on_change()

    async def _refresh(self, *, may_rotate: bool) -> bool:
        """Read the operator's keys; return False if that failed, so that the keys known before stay."""
        try:
            keys = await self._load_or_rotate(may_rotate=may_rotate)
        except (ApiError, NoResponseError) as error:
            place = f"{self._namespace}/{self._name}"
            _log.warning("The Secret %s with the operator's key cannot be read or written: %s", place, error)
            return False
        if keys is None:  # another operator has written the Secret meanwhile
            return False
        self._keys = keys
        return True

    async def _load_or_rotate(self, *, may_rotate: bool) -> OperatorKeys | None:
        """Return the valid keys; None if this operator had to write the Secret, but another one wrote it meanwhile."""
        secret = await read_if_exists(self._api, object_path("secrets", self._namespace, self._name), _KeySecret)
        data = secret.data if secret else {}
        keys = read_or_generate_keys(data, self._keys, int(datetime.now(UTC).timestamp()))
        if not may_rotate and _decode_key(data.get("current", "")):
            return keys
        if not may_rotate and self._keys:  # a user has removed the key: the leader generates the next one
            return self._keys
        # This operator leads, or neither the Secret nor this operator has a key: write a new key, or drop the previous
        # one once it has expired.
        new_data = _secret_data(keys)
        is_stored = data == new_data or await self._write_secret(secret, new_data)
        return keys if is_stored else None

    async def _write_secret(self, secret: _KeySecret | None, data: dict[str, str]) -> bool:
        """Write the operator's Secret; return False if another operator has written it meanwhile."""
        metadata: dict[str, Any] = {"name": self._name, "labels": {**MANAGED_BY_LABELS}}
        body = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
        try:
            if secret is None:
                await self._api.create(collection_path("secrets", self._namespace), body, msgspec.Raw)
            else:
                metadata |= {
                    "resourceVersion": secret.metadata.resource_version,
                    "labels": secret.metadata.labels,
                    "annotations": secret.metadata.annotations,
                }
                await self._api.replace(object_path("secrets", self._namespace, self._name), body, msgspec.Raw)
        except ApiError as error:
            if error.is_conflict:
                return False
            raise
        return True

    # The groups' Secrets.

    async def distribute(self, group: Group) -> int:
        """Give the valid keys to a group's members, by its Secret; return the number of write requests."""
        secret_writes = await self.write_secret_if_due(group)
        keys = self.keys_of(group.uid)
        if group.body is None or not keys:
            return secret_writes
        pods = unauthenticated_pods(group.pods)
        return secret_writes + sum(await asyncio.gather(*(self._annotate_pod(pod, keys[0]) for pod in pods)))

    async def _annotate_pod(self, pod: Pod, key: bytes) -> int:
        """Annotate a pod, once for each key, so that its kubelet rereads the Secret; return the number of requests."""
        key_fingerprint = fingerprint(key)
        if pod.metadata.annotations.get(KEY_FINGERPRINT_ANNOTATION) == key_fingerprint:
            return 0
        body = {"metadata": {"uid": pod.metadata.uid, "annotations": {KEY_FINGERPRINT_ANNOTATION: key_fingerprint}}}
        try:
            await self._api.merge_patch(object_path("pods", *pod.metadata.key), body, PartialObjectMetadata)
        except (ApiError, NoResponseError) as error:
            _log.info("Could not annotate pod %s with its key's fingerprint: %s", pod.metadata.name, error)
        return 1

    async def write_secret_if_due(self, group: Group) -> int:
        """Write a group's Secret if the valid keys have changed, and every minute while it may be missing.

        Return the number of write requests. If a write fails, `group.key_problems` has the reason.
        """
        keys = self.keys_of(group.uid)
        if group.body is None or not keys:
            return 0
        written = self._written.get(group)
        now = loop_time()
        if written and written.keys == keys:
            may_be_missing = group.key_problems or unauthenticated_pods(group.pods)
            if not may_be_missing or now - written.written_at < REWRITE_SECONDS:
                return 0
        self._written[group] = _WrittenSecret(keys, now)
        try:
            await self._write_group_secret(group, keys)
        except (ApiError, NoResponseError) as error:
            reason = single_line(str(error))
            message = f"The API server rejected the Secret {key_secret_name(group.name)}: {reason}"
            group.key_problems = (Finding(Reason.WRITE_REJECTED, message),)
        else:
            group.key_problems = ()
        return 1

    async def _write_group_secret(self, group: Group, keys: tuple[bytes, ...]) -> None:
        """Replace or create the Secret. The response to a patch would show the old content, which must stay unread."""
        body = group_secret(group, keys)
        try:
            path = object_path("secrets", group.namespace, key_secret_name(group.name))
            await self._api.replace(path, body, msgspec.Raw)
        except ApiError as error:
            if not error.is_not_found:
                raise
            await self._api.create(collection_path("secrets", group.namespace), body, msgspec.Raw)


def read_or_generate_keys(data: dict[str, str], loaded: OperatorKeys | None, now: int) -> OperatorKeys:
    """Return the keys in the Secret's data; if it has no current key, generate one, to be stored by the caller.

    The key before a generated one stays valid for a while: that of `loaded`, the keys that this process knows, or
    after a restart the copy in the Secret.
    """
    current = _decode_key(data.get("current", ""))
    if not current:
        previous = loaded.current if loaded else _decode_key(data.get("last", ""))
        return OperatorKeys(secrets.token_bytes(KEY_BYTES), previous, now)
    changed_at = _decode_time(data.get("changed", ""))
    is_previous_valid = now - changed_at < PREVIOUS_KEY_VALID_SECONDS
    previous = _decode_key(data.get("previous", "")) if is_previous_valid else b""
    return OperatorKeys(current, previous, changed_at)


def group_secret(group: Group, keys: tuple[bytes, ...]) -> dict[str, Any]:
    """Return the Secret that a group's members mount."""
    assert group.body is not None  # noqa: S101 - only existing groups have keys
    names = ("current", "previous")  # one key only, if no previous key is valid
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": key_secret_name(group.name),
            "namespace": group.namespace,
            "labels": {GROUP_LABEL: group.name, **MANAGED_BY_LABELS},
            "ownerReferences": [owner_reference(group.body)],
        },
        "data": dict(zip(names, map(_encode, keys), strict=False)),
    }


def _secret_data(keys: OperatorKeys) -> dict[str, str]:
    current = _encode(keys.current)
    changed = _encode(format_time(keys.changed_at, "seconds").encode())
    data = {"current": current, "last": current, "changed": changed}
    return {**data, "previous": _encode(keys.previous)} if keys.previous else data


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def _decode_key(text: str) -> bytes:
    """Return the decoded key; an invalid one counts as removed."""
    key = _decode(text)
    return key if len(key) == KEY_BYTES else b""


def _decode_time(text: str) -> int:
    return max(0, int(parse_time(_decode(text).decode(errors="replace")) or 0))
