"""Writes to the API server that follow a stored assignment: annotations of pods, the status, Events.

Each write names the version or the uid that it was decided for, so the API server rejects one that is out of date.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from rota.kube.client.api import MANAGER, Api, ApiError, Unanswered
from rota.kube.client.objects import (
    DELETION_COST,
    POKE,
    Custom,
    Object,
    Pod,
)
from rota.kube.client.paths import GROUPS, collection_path, object_path
from rota.kube.state.group import Group
from rota.logs import of_group
from rota.model import Holder, Poke
from rota.planner import Event
from rota.timestamps import format_time

AT_ONCE = 20  # pokes of one group under way

_log = logging.getLogger(__name__)


async def mark(api: Api, group: Group, pokes: Mapping[str, Poke], *, settled: bool) -> int:
    """Change pods' annotations; return how many writes that took.

    A changed annotation makes the kubelet sync the mounted ConfigMap. Deletion costs make a shrinking Deployment end
    members with the fewest queues first; they are written along with pokes, alone only when nothing else is due.
    """
    room, shares = asyncio.Semaphore(AT_ONCE), group.record.shares

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
                _log.warning(
                    "A pod could not be annotated: %s", error, extra=of_group(group.namespace, group.name, member=name)
                )
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
        _log.warning("The status could not be written: %s", error, extra=of_group(group.namespace, group.name))
        return None


async def tell(api: Api, group: Group, event: Event) -> None:
    """Create an Event about the group, or count an equal one; a failure is logged and changes nothing else."""
    try:
        await _post_or_count(api, group.namespace, _event(group, event))
    except (ApiError, Unanswered) as error:
        _log.info("An Event could not be created: %s", error, extra=of_group(group.namespace, group.name))


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
    """Return an Event whose name is a digest of its text, so that a repeated Event is counted and not created again."""
    assert group.body is not None  # noqa: S101 - as above
    metadata, now = group.body.metadata, format_time(time.time(), "seconds")
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
