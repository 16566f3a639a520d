"""Annotations of a group's pods, written after its assignment was stored: pokes and deletion costs.

A poke makes the kubelet update the pod's mounted ConfigMap at once. The deletion cost is the member's number of queues:
a Deployment that is scaled down ends the pods with the lowest costs first.

Each write names the uid of its pod, so that the API server rejects a write for a recreated pod.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rota.aio import BackgroundTasks, loop_time
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.objects import DELETION_COST_ANNOTATION, POKE_ANNOTATION, PartialObjectMetadata
from rota.kube.client.paths import object_path
from rota.kube.state.group import Group
from rota.kube.state.pod_state import PodState
from rota.logs import group_fields
from rota.model import Poke
from rota.planner import Plan

MAX_CONCURRENT_ANNOTATIONS = 20  # concurrent annotation writes of one group
BUSY_WRITES = 50  # with so many annotations being written for all groups, only urgent first pokes are added
BUSY_RETRY_SECONDS = 1.0  # until a group whose repeated pokes were postponed is reconciled again
# Limits of pokes for changed settings only, for all groups together. Such pokes are not urgent, as kubelets update the
# mounted settings within a minute anyway, and must leave capacity of the API server to handovers.
SETTINGS_POKES_PER_SECOND = 100.0
SETTINGS_POKES_BURST = 100
REPEATED_POKES_PER_SECOND = 10.0  # a separate limit: pods that never obey must not use up the limit of first pokes
# A watch may report a written annotation so long after the response to the write; until then it is not written again.
WATCH_DELAY_SECONDS = 2.0
SETTINGS_RETRY_SECONDS = 5.0  # the same for postponed pokes for settings: there may be 1,000 such groups

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


class PokeLimits:
    """The limits of less urgent pokes, which all groups share.

    - Pokes for changed settings only: 1,000 groups may share a policy.
    - Repeated pokes, while many annotations are being written: the API server is the bottleneck then, not the kubelets,
      and more writes would delay the first pokes of other pods.
    """

    def __init__(self) -> None:
        self.writes_in_progress = 0  # of the annotators of all groups
        self._first = TokenBucket(SETTINGS_POKES_PER_SECOND, SETTINGS_POKES_BURST)
        self._repeated = TokenBucket(REPEATED_POKES_PER_SECOND, SETTINGS_POKES_BURST)

    @property
    def is_busy(self) -> bool:
        """Whether so many annotations are being written that the API server is the bottleneck."""
        return self.writes_in_progress >= BUSY_WRITES

    def take_allowed(self, plan: Plan) -> Mapping[str, Poke]:
        """Return the pokes of a plan that may be sent now."""
        if self.is_busy:
            urgent = plan.pokes.keys() - plan.settings_only_pokes
            return {name: poke for name, poke in plan.pokes.items() if name in urgent and poke.attempts == 1}
        first = sorted(name for name in plan.settings_only_pokes if plan.pokes[name].attempts == 1)
        repeated = sorted(plan.settings_only_pokes.difference(first))
        first_allowed = self._first.take(len(first), loop_time())
        repeated_allowed = self._repeated.take(len(repeated), loop_time())
        # The first pods in alphabetical order are poked; the pokes of the others are postponed.
        postponed = {*first[first_allowed:], *repeated[repeated_allowed:]}
        return {name: poke for name, poke in plan.pokes.items() if name not in postponed}


class _Write(NamedTuple):
    """A write of a pod's annotations that is in progress or has succeeded."""

    metadata: Mapping[str, Any]  # uid and annotations
    written_at: float = math.inf  # by the loop's clock; inf: in progress

    def covers(self, metadata: Mapping[str, Any], now: float) -> bool:
        """Whether this write makes another one of the same metadata unnecessary."""
        return self.metadata == metadata and now - self.written_at < WATCH_DELAY_SECONDS


class PodAnnotator:
    """Annotates the pods of one group in background tasks, so that its next reconcile does not wait for the writes.

    Each pod has at most one write in progress; of the annotations requested meanwhile, the newest are written next.
    """

    def __init__(self, api: Api, group: Group, limits: PokeLimits, tasks: BackgroundTasks) -> None:
        self._api = api
        self._group = group
        self._limits = limits
        self._tasks = tasks
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_ANNOTATIONS)
        self._requested: dict[str, Poke | None] = {}  # by pod; None: its deletion cost only
        self._last_writes: dict[str, _Write] = {}  # by pod
        self._running: dict[str, asyncio.Task[None]] = {}  # by pod: the task that writes all that is requested for it
        self._write_count = 0

    def annotate(self, plan: Plan) -> float:
        """Start to write the pokes of a plan that are allowed now, and outdated deletion costs.

        Return the seconds until postponed pokes are tried again; infinity without any. Deletion costs are written along
        with pokes. They are written alone only if the group is settled (no member's report could change the next plan),
        because they would change again with the next assignment.
        """
        for name in self._last_writes.keys() - self._group.pods.keys():
            del self._last_writes[name]
        pokes = self._limits.take_allowed(plan)
        for name, poke in pokes.items():
            self._request(name, poke)
        if not plan.members_to_poll:
            for name, state in self._group.pods.items():
                if state.is_staying and state.pod.deletion_cost != self._deletion_cost_of(state):
                    self._request(name, pokes.get(name))
        postponed = plan.pokes.keys() - pokes.keys()
        if not postponed:
            return math.inf
        return SETTINGS_RETRY_SECONDS if postponed <= plan.settings_only_pokes else BUSY_RETRY_SECONDS

    def stop(self) -> None:
        """Send no further annotations until the next `annotate`."""
        self._requested.clear()

    def take_write_count(self) -> int:
        """Return the number of successful writes since the last call."""
        count = self._write_count
        self._write_count = 0
        return count

    async def wait_while_busy(self) -> None:
        """While the API server is the bottleneck, wait until all that was requested for this group is written.

        The group's next assignment is planned later then, so that it covers more reports: assignments that follow each
        other quickly would need more pokes.
        """
        if self._limits.is_busy:
            await self.wait_until_written()

    async def wait_until_written(self) -> None:
        """Wait until all that was requested is written, or has failed."""
        while self._running:
            await asyncio.wait(self._running.values())

    def _request(self, name: str, poke: Poke | None) -> None:
        state = self._group.pods.get(name)
        if state is None:  # the pod ended while the assignment was written
            return
        poke = poke or self._requested.get(name)
        last_write = self._last_writes.get(name)
        if last_write and last_write.covers(self._metadata_of(state, poke), loop_time()):
            self._requested.pop(name, None)
            return
        self._requested[name] = poke
        if name not in self._running:
            self._limits.writes_in_progress += 1
            self._running[name] = self._tasks.start(self._write_requested(name))

    async def _write_requested(self, name: str) -> None:
        """Write the newest requested annotations of a pod, until no others have been requested meanwhile."""
        try:
            while name in self._requested:
                async with self._slots:
                    if name not in self._requested:  # `stop` was called meanwhile
                        return
                    poke = self._requested.pop(name)
                    if state := self._group.pods.get(name):  # None: the pod has ended
                        await self._write(state, poke)
        finally:
            self._limits.writes_in_progress -= 1
            del self._running[name]

    async def _write(self, state: PodState, poke: Poke | None) -> None:
        name = state.pod.metadata.name
        metadata = self._metadata_of(state, poke)
        in_progress = self._last_writes[name] = _Write(metadata)
        path = object_path("pods", self._group.namespace, name)
        try:
            await self._api.merge_patch(path, {"metadata": metadata}, PartialObjectMetadata)
            self._last_writes[name] = _Write(metadata, loop_time())
            self._write_count += 1
        except (ApiError, NoResponseError) as error:
            has_ended = isinstance(error, ApiError) and (error.is_not_found or error.is_conflict)
            if not has_ended:  # an ended pod needs no warning: the watch reports it
                fields = group_fields(self._group.namespace, self._group.name, member=name)
                _log.warning("A pod could not be annotated: %s", error, extra=fields)
        finally:
            if self._last_writes.get(name) is in_progress:  # it failed
                del self._last_writes[name]

    def _metadata_of(self, state: PodState, poke: Poke | None) -> dict[str, Any]:
        pokes = {POKE_ANNOTATION: str(poke)} if poke else {}
        annotations = {**pokes, DELETION_COST_ANNOTATION: self._deletion_cost_of(state)}
        return {"uid": state.pod.metadata.uid, "annotations": annotations}

    def _deletion_cost_of(self, state: PodState) -> str:
        return str(len(self._group.stored_assignment.shares.get(state.pod.holder, ())))
