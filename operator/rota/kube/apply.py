"""A plan, written down: the document first, then whom it concerns, then what people are told.

Each write names what it rests on: the document the version that was read, a poke the pod's uid. So a plan that rests on
something old is refused whole, by whomever it was made.
"""

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from rota.kube.api import MANAGER, Api, ApiError, Unanswered
from rota.kube.group import Group
from rota.kube.manifests import OURS, owner
from rota.kube.objects import DELETION_COST, GROUP_LABEL, POKE, SETTINGS, ConfigMap, Custom, Object, Pod, record_of
from rota.kube.paths import GROUPS, collection_path, object_path
from rota.model import Holder
from rota.planner import Event, Plan, Poke

AT_ONCE = 20  # pokes of one group under way

_log = logging.getLogger(__name__)


class Stale(Exception):  # noqa: N818 - it is what happened
    """The plan rests on a record that has been written meanwhile: nothing of it counts."""


async def write_document(api: Api, group: Group, found: Plan) -> ConfigMap:
    """Write the document, unless the record is not the one that was read."""
    assert group.body is not None  # noqa: S101 - nobody plans for a group that is not there
    body = record(group, found.data)
    try:
        if group.record.version:
            return await api.replace(object_path("configmaps", group.namespace, record_of(group.name)), body, ConfigMap)
        return await api.create(collection_path("configmaps", group.namespace), body, ConfigMap)
    except ApiError as error:
        if error.conflict or error.unknown:
            raise Stale(str(error)) from None
        raise


def record(group: Group, data: Mapping[str, str | bytes]) -> dict[str, Any]:
    """Return the ConfigMap that holds a document."""
    assert group.body is not None  # noqa: S101 - as above
    metadata: dict[str, Any] = {
        "name": record_of(group.name),
        "namespace": group.namespace,
        "labels": {GROUP_LABEL: group.name, **OURS},
        "ownerReferences": [owner(group.body)],
    }
    if group.record.version:
        metadata["resourceVersion"] = group.record.version
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {SETTINGS: group.wanted_settings} | {key: it for key, it in data.items() if isinstance(it, str)},
        "binaryData": {key: it for key, it in data.items() if isinstance(it, bytes)},  # encoded as base64
    }


async def mark(api: Api, group: Group, pokes: Mapping[str, Poke], *, settled: bool) -> int:
    """Change pods' annotations; return how many writes that took.

    A poke makes a kubelet look. By their costs, whoever owns least is ended first when the fleet shrinks: they come
    with pokes, and by themselves only where all is settled and they are still wrong.
    """
    room, shares = asyncio.Semaphore(AT_ONCE), group.shares

    def cost(pod: Pod) -> str:
        return str(len(shares.get(Holder(pod.metadata.name, pod.metadata.uid), ())))

    wrong = [name for name, it in group.pods.items() if it.counts and it.pod.cost != cost(it.pod)] if settled else []

    async def one(name: str) -> bool:
        if name not in group.pods:  # it ended while the document was written
            return False
        pod = group.pods[name].pod
        poke = {POKE: str(pokes[name])} if name in pokes else {}
        body = {"metadata": {"uid": pod.metadata.uid, "annotations": {**poke, DELETION_COST: cost(pod)}}}
        try:
            async with room:
                await api.merge(object_path("pods", group.namespace, name), body, Object)
        except (ApiError, Unanswered) as error:
            if not (isinstance(error, ApiError) and (error.unknown or error.conflict)):  # it ended: the watch tells
                _log.warning("%s/%s could not be told: %s", group.namespace, name, error)
            return False
        return True

    return sum(await asyncio.gather(*map(one, dict.fromkeys([*pokes, *wrong]))))


async def write_status(api: Api, group: Group, status: Mapping[str, Any]) -> Custom | None:
    """State the group's status as we see it; what is not in it any more goes. None: it was not taken."""
    body = {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "ConsumerGroup",
        "metadata": {
            "name": group.name,
            "namespace": group.namespace,
            "uid": group.uid,
            "resourceVersion": group.version,  # what a deposed leader tells comes too late
        },
        "status": status,
    }
    try:
        return await api.apply(object_path(GROUPS, group.namespace, group.name, "status"), body, Custom)
    except (ApiError, Unanswered) as error:
        _log.warning("The status of %s was not taken: %s", group.spelled, error)
        return None


async def tell(api: Api, group: Group, event: Event) -> None:
    """Post an Event about the group, or count one that says the same; one that is not taken only people miss."""
    try:
        await _post_or_count(api, group.namespace, _event(group, event))
    except (ApiError, Unanswered) as error:
        _log.info("An Event about %s was not taken: %s", group.spelled, error)


class _Told(msgspec.Struct):
    count: int | None = None


async def _post_or_count(api: Api, namespace: str, body: Mapping[str, Any]) -> None:
    try:
        await api.create(collection_path("events", namespace), body, msgspec.Raw)
    except ApiError as error:
        if not error.conflict:
            raise
        event = object_path("events", namespace, body["metadata"]["name"])
        count = (await api.get(event, _Told)).count or 1
        await api.merge(event, {"count": count + 1, "lastTimestamp": body["lastTimestamp"]}, msgspec.Raw)


def _event(group: Group, event: Event) -> dict[str, Any]:
    """Return an Event whose name is made of what it says: said again, it has it again."""
    assert group.body is not None  # noqa: S101 - as above
    metadata, now = group.body.metadata, datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    mark = hashlib.sha256(f"{metadata.uid} {event.reason} {event.message}".encode()).hexdigest()[:16]
    return {
        "metadata": {"name": f"{group.name}.{mark}", "namespace": group.namespace},
        "involvedObject": {
            "apiVersion": "rota.dev/v1alpha1",
            "kind": "ConsumerGroup",
            "name": group.name,
            "namespace": group.namespace,
            "uid": metadata.uid,
        },
        "reason": str(event.reason),
        "message": event.message[:1000],
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": MANAGER},
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
    }
