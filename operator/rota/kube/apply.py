"""A plan, written down: the document first, then whom it concerns, then what people are told.

Each write names what it rests on: the document the version that was read, a poke the pod's uid. So a plan that rests on
something old is refused whole, by whomever it was made.
"""

import asyncio
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from rota.kube.api import Api, ApiError
from rota.kube.group import SETTINGS, Group
from rota.kube.manifests import OURS, owner
from rota.kube.objects import DELETION_COST, GROUP_LABEL, GROUPS, POKE, ConfigMap, Custom, Object, path
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
    collection = path("configmaps", group.namespace)
    try:
        if group.record.version:
            return await api.replace(f"{collection}/{group.name}-rota", body, ConfigMap)
        return await api.create(collection, body, ConfigMap)
    except ApiError as error:
        if error.conflict or error.unknown:
            raise Stale(str(error)) from None
        raise


def record(group: Group, data: Mapping[str, str | bytes]) -> dict[str, Any]:
    """Return the ConfigMap that holds a document."""
    assert group.body is not None  # noqa: S101 - as above
    name = f"{group.name}-rota"
    metadata: dict[str, Any] = {
        "name": name,
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


async def poke(api: Api, group: Group, pokes: Mapping[str, Poke]) -> int:
    """Change pods' annotations, so that their kubelets look; return how many writes that took."""
    room, shares = asyncio.Semaphore(AT_ONCE), group.shares

    async def one(name: str, said: Poke) -> bool:
        uid = group.pods[name].pod.metadata.uid
        cost = len(shares.get(Holder(name, uid), ()))  # who owns least is ended first when the fleet shrinks
        body = {"metadata": {"uid": uid, "annotations": {POKE: str(said), DELETION_COST: str(cost)}}}
        try:
            async with room:
                await api.merge(path("pods", group.namespace, name), body, Object)
        except ApiError as error:  # it ended, or is another one now: the watch tells
            if not (error.unknown or error.conflict):
                _log.warning("%s/%s could not be poked: %s", group.namespace, name, error)
            return False
        return True

    return sum(await asyncio.gather(*(one(name, said) for name, said in pokes.items())))


async def write_status(api: Api, group: Group, status: Mapping[str, Any]) -> Custom:
    """State the group's status as we see it; what is not in it any more goes."""
    body = {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "ConsumerGroup",
        "metadata": {"name": group.name, "namespace": group.namespace},
        "status": status,
    }
    return await api.apply(path(GROUPS, group.namespace, group.name, "status"), body, Custom)


async def tell(api: Api, group: Group, event: Event) -> None:
    """Post an Event about the group; one that cannot be posted is only missed by people."""
    assert group.body is not None  # noqa: S101 - as above
    at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    metadata = group.body.metadata
    body = {
        "metadata": {"generateName": f"{group.name}-", "namespace": group.namespace},
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
        "eventTime": at,
        "action": "Rebalance",
        "reportingComponent": "rota",
        "reportingInstance": "rota",
        "firstTimestamp": None,
    }
    try:
        await api.create(path("events", group.namespace), body, msgspec.Raw)
    except ApiError as error:
        _log.info("An Event about %s was not taken: %s", group.spelled, error)
