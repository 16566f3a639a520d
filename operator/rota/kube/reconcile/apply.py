"""Writes to the API server that follow a stored assignment: annotations of pods, the status, Events.

Each write names the version or the uid that it was decided for, so the API server rejects an outdated write.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from rota.kube.client.api import FIELD_MANAGER, Api, ApiError, NoResponseError
from rota.kube.client.objects import (
    DELETION_COST_ANNOTATION,
    POKE_ANNOTATION,
    CustomResource,
    PartialObjectMetadata,
    Pod,
)
from rota.kube.client.paths import GROUPS, collection_path, object_path
from rota.kube.state.group import Group
from rota.logs import group_fields
from rota.model import Holder, Poke
from rota.planner import Event
from rota.timestamps import format_time

MAX_CONCURRENT_ANNOTATIONS = 20  # concurrent annotation writes of one group

_log = logging.getLogger(__name__)


async def annotate_pods(api: Api, group: Group, pokes: Mapping[str, Poke], *, is_settled: bool) -> int:
    """Annotate pods with pokes and deletion costs; return the number of successful writes.

    A changed annotation makes the kubelet sync the mounted ConfigMap. Deletion costs make a shrinking Deployment end
    members with the fewest queues first; they are written along with pokes, and alone only if the group is settled.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT_ANNOTATIONS)
    shares = group.stored_assignment.shares

    def cost(pod: Pod) -> str:
        return str(len(shares.get(Holder(pod.metadata.name, pod.metadata.uid), ())))

    counted = [state.pod for state in group.pods.values() if state.is_counted]
    outdated = [pod.metadata.name for pod in counted if is_settled and pod.deletion_cost != cost(pod)]

    async def annotate(name: str) -> bool:
        if name not in group.pods:  # it ended while the assignment was written
            return False
        pod = group.pods[name].pod
        poke = {POKE_ANNOTATION: str(pokes[name])} if name in pokes else {}
        body = {"metadata": {"uid": pod.metadata.uid, "annotations": {**poke, DELETION_COST_ANNOTATION: cost(pod)}}}
        try:
            async with slots:
                await api.merge_patch(object_path("pods", group.namespace, name), body, PartialObjectMetadata)
        except (ApiError, NoResponseError) as error:
            has_ended = isinstance(error, ApiError) and (error.is_not_found or error.is_conflict)
            if not has_ended:  # the watch reports an ended pod
                fields = group_fields(group.namespace, group.name, member=name)
                _log.warning("A pod could not be annotated: %s", error, extra=fields)
            return False
        return True

    return sum(await asyncio.gather(*map(annotate, dict.fromkeys([*pokes, *outdated]))))


async def write_status(api: Api, group: Group, status: Mapping[str, Any]) -> CustomResource | None:
    """Apply the group's status, removing fields that it lacks. Return None if the write failed."""
    body = {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "ConsumerGroup",
        "metadata": {
            "name": group.name,
            "namespace": group.namespace,
            "uid": group.uid,
            "resourceVersion": group.resource_version,  # so that a deposed leader's outdated status is rejected
        },
        "status": status,
    }
    try:
        return await api.apply(object_path(GROUPS, group.namespace, group.name, "status"), body, CustomResource)
    except (ApiError, NoResponseError) as error:
        _log.warning("The status could not be written: %s", error, extra=group_fields(group.namespace, group.name))
        return None


async def record_event(api: Api, group: Group, event: Event) -> None:
    """Create an Event about the group, or count an equal one; a failure is logged and changes nothing else."""
    try:
        await _post_or_count(api, group.namespace, _build_event(group, event))
    except (ApiError, NoResponseError) as error:
        _log.info("An Event could not be created: %s", error, extra=group_fields(group.namespace, group.name))


class _EventCount(msgspec.Struct):
    count: int | None = None


async def _post_or_count(api: Api, namespace: str, body: Mapping[str, Any]) -> None:
    try:
        await api.create(collection_path("events", namespace), body, msgspec.Raw)
    except ApiError as error:
        if not error.is_conflict:
            raise
        event = object_path("events", namespace, body["metadata"]["name"])
        count = (await api.get(event, _EventCount)).count or 1
        await api.merge_patch(event, {"count": count + 1, "lastTimestamp": body["lastTimestamp"]}, msgspec.Raw)


def _build_event(group: Group, event: Event) -> dict[str, Any]:
    """Return an Event whose name is a digest of its text, so that a repeated Event is counted and not created again."""
    assert group.body is not None  # noqa: S101 - only existing groups have Events
    metadata = group.body.metadata
    now = format_time(time.time(), "seconds")
    digest = hashlib.sha256(f"{metadata.uid} {event.reason} {event.message}".encode()).hexdigest()[:16]
    return {
        "metadata": {"name": f"{group.name}.{digest}", "namespace": group.namespace},
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
        "source": {"component": FIELD_MANAGER},
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
    }
