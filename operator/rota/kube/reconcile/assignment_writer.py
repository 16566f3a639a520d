"""A group's document on its way to the API server: an answer that gets lost does not say whether it was taken.

Only the record says that. So it is asked for, and the plan whose document it turns out to be is followed up then.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rota.kube.client.api import Api, ApiError, Stale, Unanswered
from rota.kube.client.objects import (
    GROUP_LABEL,
    SETTINGS,
    ConfigMap,
    record_of,
)
from rota.kube.client.paths import collection_path, object_path
from rota.kube.state.group import Group
from rota.kube.workload.deployment_manifest import OURS, owner
from rota.planner import Plan

REFUSED = frozenset({400, 403, 413, 422})  # by a shape, a right, a quota, a webhook: it is people's to mend
MOST_UNANSWERED = 5  # that are remembered: the record is asked for after each, and rules out all others


class Sent(NamedTuple):
    """A plan whose document is written, and the seconds that it took to make."""

    plan: Plan
    seconds: float


class Writing:
    """The writes of one group's document."""

    def __init__(self, api: Api, group: Group) -> None:
        """Write nothing yet."""
        self._api, self._group = api, group
        self._unanswered: deque[Sent] = deque(maxlen=MOST_UNANSWERED)

    async def write(self, sent: Sent) -> None:
        """Write a plan's document."""
        try:
            self._group.keep(await write_document(self._api, self._group, sent.plan))
        except (ApiError, Unanswered, Stale) as error:
            # A conflict may be with itself: requests are repeated where a connection breaks.
            if not (isinstance(error, ApiError) and error.status in REFUSED):
                self._unanswered.append(Sent(replace(sent.plan, data={}), sent.seconds))
                self._group.outdated = True
            raise
        self._unanswered.clear()

    def taken(self) -> Sent | None:
        """Return what was taken though nobody said so, once."""
        document = self._group.record.document
        found = next((it for it in self._unanswered if it.plan.document == document), None)
        if found:
            self._unanswered.clear()
        return found

    def forget(self) -> None:
        """Forget what was sent: whoever led meanwhile has told of the record as it is."""
        self._unanswered.clear()


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
