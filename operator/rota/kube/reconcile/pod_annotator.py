"""Annotations of a group's pods, written after its assignment was stored: pokes and deletion costs.

A poke makes the kubelet update the pod's mounted ConfigMap at once. The deletion cost is the member's number of queues:
a Deployment that is scaled down ends the pods with the lowest costs first.

Each write names the uid of its pod, so that the API server rejects a write for a recreated pod.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

from rota.aio import BackgroundTasks, loop_time
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.objects import DELETION_COST_ANNOTATION, POKE_ANNOTATION, PartialObjectMetadata
from rota.kube.client.paths import object_path
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.state.group import Group
from rota.kube.state.pod_state import PodState
from rota.logs import group_fields
from rota.model import Poke
from rota.planner import Plan

MAX_CONCURRENT_ANNOTATIONS = 20  # concurrent annotation writes of one group
# Limits of pokes for changed settings only, for all groups together. Such pokes are not urgent, as kubelets update the
# mounted settings within a minute anyway, and must leave capacity of the API server to handovers.
SETTINGS_POKES_PER_SECOND = 100.0
SETTINGS_POKES_BURST = 100
REPEATED_POKES_PER_SECOND = 10.0  # a separate limit: pods that never obey must not use up the limit of first pokes
SETTINGS_RETRY_SECONDS = 5.0  # until a group with postponed pokes is reconciled again: there may be 1,000 such groups

_log = logging.getLogger(__name__)


class TokenBucket:
    """Allows `per_second` actions a second, and up to `burst` at once after a pause."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at = 0.0

    def take(self, requested: int, now: float) -> int:
        """Return how many of the requested actions are allowed now."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        allowed = min(requested, int(self._tokens))
        self._tokens -= allowed
        return allowed


class AnnotationResult(NamedTuple):
    """The number of successful writes, and the seconds until postponed pokes are tried again."""

    writes: int
    retry_seconds: float


class PodAnnotator:
    """Annotates the pods of all groups, and asks pods that must end to drain."""

    def __init__(self, api: Api, reports: ReportClient, tasks: BackgroundTasks) -> None:
        self._api = api
        self._reports = reports
        self._tasks = tasks
        self._first_pokes = TokenBucket(SETTINGS_POKES_PER_SECOND, SETTINGS_POKES_BURST)
        self._repeated_pokes = TokenBucket(REPEATED_POKES_PER_SECOND, SETTINGS_POKES_BURST)

    async def annotate(self, group: Group, plan: Plan) -> AnnotationResult:
        """Send the pokes of a plan that are allowed now, and drain the pods that must end."""
        pokes = self._take_allowed_pokes(plan)
        for holder in plan.members_to_drain:
            if state := group.pods.find(holder):
                self._tasks.start(self._reports.drain(Endpoint.from_pod(state.pod, group.uid)))
        writes = await annotate_pods(self._api, group, pokes, is_settled=not plan.members_to_poll)
        has_postponed = len(pokes) < len(plan.pokes)
        return AnnotationResult(writes, SETTINGS_RETRY_SECONDS if has_postponed else math.inf)

    def _take_allowed_pokes(self, plan: Plan) -> Mapping[str, Poke]:
        """Return the pokes to send now. Pokes for settings only are rate-limited: 1,000 groups may share a policy."""
        first = sorted(name for name in plan.settings_only_pokes if plan.pokes[name].attempts == 1)
        repeated = sorted(plan.settings_only_pokes.difference(first))
        first_allowed = self._first_pokes.take(len(first), loop_time())
        repeated_allowed = self._repeated_pokes.take(len(repeated), loop_time())
        # The first pods in alphabetical order are poked; the pokes of the others are postponed.
        postponed = {*first[first_allowed:], *repeated[repeated_allowed:]}
        return {name: poke for name, poke in plan.pokes.items() if name not in postponed}


async def annotate_pods(api: Api, group: Group, pokes: Mapping[str, Poke], *, is_settled: bool) -> int:
    """Annotate pods with pokes and deletion costs; return the number of successful writes.

    Deletion costs are written along with pokes. They are written alone only if the group is settled (no member's report
    could change the next plan), because they would change again with the next assignment.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT_ANNOTATIONS)
    queues_by_member = group.stored_assignment.shares

    def deletion_cost_of(state: PodState) -> str:
        return str(len(queues_by_member.get(state.pod.holder, ())))

    def has_outdated_cost(state: PodState) -> bool:
        return state.is_staying and state.pod.deletion_cost != deletion_cost_of(state)

    names = dict.fromkeys(pokes)  # the pods to annotate, each once, in order
    if is_settled:
        names |= dict.fromkeys(name for name, state in group.pods.items() if has_outdated_cost(state))

    async def annotate(name: str) -> bool:
        if name not in group.pods:  # the pod ended while the assignment was written
            return False
        state = group.pods[name]
        annotations = {POKE_ANNOTATION: str(pokes[name])} if name in pokes else {}
        annotations[DELETION_COST_ANNOTATION] = deletion_cost_of(state)
        body = {"metadata": {"uid": state.pod.metadata.uid, "annotations": annotations}}
        try:
            async with slots:
                await api.merge_patch(object_path("pods", group.namespace, name), body, PartialObjectMetadata)
        except (ApiError, NoResponseError) as error:
            has_ended = isinstance(error, ApiError) and (error.is_not_found or error.is_conflict)
            if not has_ended:  # an ended pod needs no warning: the watch reports it
                fields = group_fields(group.namespace, group.name, member=name)
                _log.warning("A pod could not be annotated: %s", error, extra=fields)
            return False
        return True

    return sum(await asyncio.gather(*map(annotate, names)))
