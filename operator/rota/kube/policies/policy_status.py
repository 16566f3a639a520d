"""The status of each RebalancePolicy: whether it is accepted, and which groups use it.

The leader computes the status of all policies, and writes each changed one at most once in ten seconds. A status
write changes neither uid nor spec of a policy, so no group is reconciled because of it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import Any

from rota.aio import yield_periodically
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.objects import CustomResource, ObjectKey
from rota.kube.client.paths import POLICIES, object_path
from rota.kube.state.resolved_spec import policy_of_resource
from rota.model import single_line
from rota.spec import InvalidSpecError
from rota.timestamps import format_time

WRITE_INTERVAL_SECONDS = 10.0
MAX_NAMES = 20  # names of groups in a status
MAX_MESSAGE_CHARACTERS = 1000  # a message may quote a tenant's text

_log = logging.getLogger(__name__)


def policy_status(policy: CustomResource, groups: Sequence[str], now: float) -> dict[str, Any]:
    """Return the status of a policy; `groups` are the names of the groups that use it."""
    mistake = _find_mistake(policy)
    # kstatus reads Stalled: only a user can fix a policy that is not accepted.
    statuses = {"Accepted": str(not mistake), "Stalled": str(bool(mistake))}
    return {
        "observedGeneration": policy.metadata.generation,
        "groups": len(groups),
        "usedBy": sorted(groups)[:MAX_NAMES],
        "conditions": [_condition(policy, kind, status, mistake, now) for kind, status in statuses.items()],
    }


def _condition(policy: CustomResource, kind: str, status: str, mistake: str, now: float) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": "InvalidPolicy" if mistake else "Accepted",
        "message": mistake or "The policy can be used",
        "observedGeneration": policy.metadata.generation,
        "lastTransitionTime": _transition_time(policy.status, kind, status) or format_time(now, "seconds"),
    }


def _find_mistake(policy: CustomResource) -> str:
    """Return the message of the first mistake in a policy; empty if it has none."""
    try:
        policy_of_resource(policy)
    except InvalidSpecError as mistake:
        return single_line(str(mistake), MAX_MESSAGE_CHARACTERS)
    return ""


def _transition_time(status: Mapping[str, Any], kind: str, value: str) -> str | None:
    """Return since when the published condition has this status; None if it has another status, or does not exist."""
    for condition in _published_conditions(status):
        if (condition.get("type"), condition.get("status")) == (kind, value):
            since = condition.get("lastTransitionTime")
            return since if isinstance(since, str) else None
    return None


def is_published(policy: CustomResource, status: Mapping[str, Any]) -> bool:
    """Whether a policy's published status is this one, apart from conditions that other controllers have added."""
    types = {condition["type"] for condition in status["conditions"]}
    conditions = [entry for entry in _published_conditions(policy.status) if entry.get("type") in types]
    return {**policy.status, "conditions": conditions} == status


def _published_conditions(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    conditions = status.get("conditions")
    entries = conditions if isinstance(conditions, list) else []  # a user may have edited the status
    return [entry for entry in entries if isinstance(entry, dict)]


class PolicyStatusWriter:
    """Writes the status of policies."""

    def __init__(
        self,
        api: Api,
        policies: Mapping[ObjectKey, CustomResource],
        groups_by_policy: Callable[[], Mapping[ObjectKey, Sequence[str]]],
        is_leading: Callable[[], bool],
    ) -> None:
        """`groups_by_policy` returns the names of the groups that use each policy."""
        self._api = api
        self._policies = policies
        self._groups_by_policy = groups_by_policy
        self._is_leading = is_leading
        self._is_failing = False

    async def run(self) -> None:
        """Write due statuses periodically while this operator leads."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_SECONDS)
            if self._is_leading():
                await self.write_due()

    async def write_due(self) -> None:
        """Write each status that differs from the published one. After a failure, the others wait for the next run."""
        groups = self._groups_by_policy()
        async for key, policy in yield_periodically(list(self._policies.items())):
            status = policy_status(policy, groups.get(key, ()), time())
            if not is_published(policy, status) and not await self._write(policy, status):
                break

    async def _write(self, policy: CustomResource, status: Mapping[str, Any]) -> bool:
        """Write a status; return False if the API server fails. Log only the first failure in a row."""
        namespace, name = policy.metadata.key
        metadata = {"name": name, "namespace": namespace, "uid": policy.metadata.uid}
        metadata["resourceVersion"] = policy.metadata.resource_version
        body = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": metadata, "status": status}
        try:
            await self._api.apply(object_path(POLICIES, namespace, name, "status"), body, CustomResource)
        except (ApiError, NoResponseError) as error:
            has_changed = isinstance(error, ApiError) and (error.is_conflict or error.is_not_found)
            if has_changed:  # the watch reports the changed or deleted policy, and the next run writes its status
                return True
            if not self._is_failing:
                _log.warning("The status of RebalancePolicy %s/%s could not be written: %s", namespace, name, error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True
