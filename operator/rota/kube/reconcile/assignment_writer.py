"""Writer of a group's assignment to its ConfigMap; it also resolves writes without a response.

The *document* is the assignment as JSON, in the ConfigMap. A plan is *followed up* after its document was stored: its
pods are poked, its status, Events and journal records are published. If the response to the write is lost, only the
ConfigMap shows whether the document was stored: the operator reads it again, and follows up the plan with the stored
document.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rota.kube.client.api import Api, ApiError, ConflictError, NoResponseError
from rota.kube.client.objects import GROUP_LABEL, SETTINGS_KEY, ConfigMap, assignment_name
from rota.kube.client.paths import collection_path, object_path
from rota.kube.state.group import Group
from rota.kube.workload.deployment_manifest import MANAGED_BY_LABELS, owner_reference
from rota.planner import Plan

REJECTED_STATUSES = frozenset({400, 403, 413, 422})  # because of schema, RBAC, quota or a webhook: a user must fix it
MAX_PENDING_PLANS = 5  # remembered plans of writes without a response; the ConfigMap confirms at most one of them


class PendingPlan(NamedTuple):
    """A plan whose document is still to be stored or confirmed, and the seconds that planning took."""

    plan: Plan
    planning_seconds: float


class AssignmentWriter:
    """Writes one group's document."""

    def __init__(self, api: Api, group: Group) -> None:
        self._api = api
        self._group = group
        self._pending: deque[PendingPlan] = deque(maxlen=MAX_PENDING_PLANS)

    async def write(self, pending: PendingPlan) -> None:
        """Write a plan's document. If it may have been stored without a response, remember the plan, and raise."""
        # Before the request: the watch may report the new version before the response arrives.
        self._group.assignment.requested = pending.plan.document
        try:
            written = await write_document(self._api, self._group, pending.plan)
        except (ApiError, NoResponseError, ConflictError) as error:
            # After a conflict, too, the document may be stored: a request is repeated when its connection breaks, and
            # then conflicts with its own first attempt.
            is_rejected = isinstance(error, ApiError) and error.status in REJECTED_STATUSES
            if not is_rejected:
                plan_without_data = replace(pending.plan, config_map_data={})  # the data is large
                self._pending.append(PendingPlan(plan_without_data, pending.planning_seconds))
                self._group.assignment.is_outdated = True
            raise
        self._pending.clear()
        if written.metadata.version_number < self._group.assignment.deleted_version:
            # The ConfigMap was deleted after this write, and the watch was faster than the response: read it again.
            self._group.assignment.is_outdated = True
        else:
            self._group.set_assignment(written)

    def take_confirmed(self) -> PendingPlan | None:
        """Return the remembered plan that has the stored document, and forget all; None if no plan has it."""
        document = self._group.stored_assignment.document
        confirmed = next((pending for pending in self._pending if pending.plan.document == document), None)
        if confirmed:
            self._pending.clear()
        return confirmed

    def forget_pending(self) -> None:
        """Forget remembered plans at a change of leadership: another leader follows up what is stored then."""
        self._pending.clear()


async def write_document(api: Api, group: Group, plan: Plan) -> ConfigMap:
    """Write the document. Raise ConflictError if the ConfigMap was changed, created or deleted since it was read."""
    body = build_config_map(group, plan.config_map_data)
    try:
        if group.stored_assignment.resource_version:
            path = object_path("configmaps", group.namespace, assignment_name(group.name))
            return await api.replace(path, body, ConfigMap)
        return await api.create(collection_path("configmaps", group.namespace), body, ConfigMap)
    except ApiError as error:
        if error.is_conflict or error.is_not_found:
            raise ConflictError(str(error)) from None
        raise


def build_config_map(group: Group, data: Mapping[str, str | bytes]) -> dict[str, Any]:
    """Return the ConfigMap that holds a document."""
    assert group.body is not None  # noqa: S101 - only groups with a ConsumerGroup are planned
    metadata: dict[str, Any] = {
        "name": assignment_name(group.name),
        "namespace": group.namespace,
        "labels": {GROUP_LABEL: group.name, **MANAGED_BY_LABELS},
        "ownerReferences": [owner_reference(group.body)],
    }
    if group.stored_assignment.resource_version:
        metadata["resourceVersion"] = group.stored_assignment.resource_version
    texts = {SETTINGS_KEY: group.desired_settings}
    packed: dict[str, bytes] = {}
    for key, value in data.items():
        if isinstance(value, str):
            texts[key] = value
        else:
            packed[key] = value
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": texts,
        "binaryData": packed,  # encoded as base64
    }
