"""Annotations of a group's pods, written after its assignment was stored: pokes and deletion costs.

A poke makes the kubelet update the pod's mounted ConfigMap at once. The deletion cost is the member's number of queues:
a Deployment that is scaled down ends the pods with the lowest costs first.

Each write names the uid of its pod, so that the API server rejects a write for a recreated pod.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from rota.aio import BackgroundTasks, loop_time
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.objects import DELETION_COST_ANNOTATION, POKE_ANNOTATION, PartialObjectMetadata
from rota.kube.client.paths import object_path
from rota.kube.state.group import Group
from rota.kube.state.pod_state import PodState
from rota.logs import group_fields
from rota.model import Holder, Poke
from rota.planner import Plan

MAX_CONCURRENT_ANNOTATIONS = 20  # concurrent annotation writes of one group
# Repeated pokes and pokes for settings are limited while so many annotation writes of all groups are in progress, or
# so many pods of the group itself wait for theirs.
BUSY_WRITES = 50
BUSY_POKES_PER_SECOND = 5  # repeated pokes and pokes for settings of all groups meanwhile
BUSY_RETRY_SECONDS = 1.0  # until a group with postponed pokes is reconciled again
# Limits of pokes for changed settings only, for all groups together. Such pokes are not urgent, as kubelets update the
# mounted settings within a minute anyway, and must leave capacity of the API server to handovers.
SETTINGS_POKES_PER_SECOND = 100.0
SETTINGS_POKES_BURST = 100
REPEATED_POKES_PER_SECOND = 10.0  # a separate limit: pods that never obey must not use up the limit of first pokes
SETTINGS_RETRY_SECONDS = 5.0  # instead of BUSY_RETRY_SECONDS, if only pokes for settings are postponed: in many groups
MAX_WAIT_SECONDS = 10.0  # for which status, Events and the next reconcile wait for a group's annotation writes

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
      and more writes would delay the first pokes of other pods. A few are allowed even then: the writes of one group
      may take hours, if a webhook hangs, and must not stop the repeated pokes of all others.
    """

    def __init__(self) -> None:
        self.writes_in_progress = 0  # of the annotators of all groups
        self._first = TokenBucket(SETTINGS_POKES_PER_SECOND, SETTINGS_POKES_BURST)
        self._repeated = TokenBucket(REPEATED_POKES_PER_SECOND, SETTINGS_POKES_BURST)
        self._while_busy = TokenBucket(BUSY_POKES_PER_SECOND, BUSY_POKES_PER_SECOND)

    @property
    def is_busy(self) -> bool:
        """Whether so many annotations are being written that the API server is the bottleneck."""
        return self.writes_in_progress >= BUSY_WRITES

    def take_allowed(
        self, pokes: Mapping[str, Poke], settings_only: AbstractSet[str], *, is_busy: bool
    ) -> Mapping[str, Poke]:
        """Return the pokes that may be sent now, the first pods in alphabetical order; the others are postponed.

        `settings_only` are the pods that are poked for changed settings only.
        """
        repeated = {name for name, poke in pokes.items() if poke.attempts > 1}
        if is_busy:
            postponed = _exceeding(self._while_busy, repeated | settings_only)
        else:
            postponed = _exceeding(self._first, settings_only - repeated)
            postponed |= _exceeding(self._repeated, settings_only & repeated)
        return {name: poke for name, poke in pokes.items() if name not in postponed}


def _exceeding(bucket: TokenBucket, names: Iterable[str]) -> set[str]:
    """Return the names that exceed a limit now, the last ones in alphabetical order."""
    ordered = sorted(names)
    return set(ordered[bucket.take(len(ordered), loop_time()) :])


class _Write(NamedTuple):
    """A write of a pod's annotations that is in progress, or has succeeded and was not reported by the watch yet."""

    annotations: Mapping[str, str]
    version: float = math.inf  # the pod's resource version after the write; inf: in progress

    def covers(self, annotations: Mapping[str, str]) -> bool:
        """Whether this write has these annotations, so that no other write of them is needed."""
        return annotations.items() <= self.annotations.items()


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
        self._queued: dict[Holder, Poke | None] = {}  # pods to be annotated; None: with the deletion cost only
        self._last_writes: dict[Holder, _Write] = {}
        self._running: dict[Holder, asyncio.Task[None]] = {}  # the task that writes all that is queued for a pod
        self._running_since = 0.0  # since when at least one of these tasks runs
        self._write_count = 0

    @property
    def is_busy(self) -> bool:
        """Whether more writes of this group would only wait, for the API server or for the group's earlier writes."""
        return self._limits.is_busy or len(self._running) >= BUSY_WRITES

    def annotate(self, plan: Plan) -> float:
        """Start to write the pokes of a plan that are allowed now, and outdated deletion costs.

        Return the seconds until postponed pokes are tried again; infinity without any. Deletion costs are written along
        with pokes. They are written alone only if the group is settled (no member's report could change the next plan),
        because they would change again with the next assignment.
        """
        self._forget_reported_writes()
        pods = self._group.pods
        # The planner repeats a poke until the watch reports it. Only new pokes count towards the limits.
        new_pokes = {name: poke for name, poke in plan.pokes.items() if self._is_new(name, poke)}
        settings_only = plan.settings_only_pokes & new_pokes.keys()
        allowed = self._limits.take_allowed(new_pokes, settings_only, is_busy=self.is_busy)
        for name, poke in allowed.items():
            self._request(pods[name], poke)
        if not plan.members_to_poll:
            for state in pods.values():
                if state.is_staying and state.pod.deletion_cost != self._deletion_cost_of(state):
                    self._request(state, None)
        postponed = new_pokes.keys() - allowed.keys()
        if not postponed:
            return math.inf
        return SETTINGS_RETRY_SECONDS if postponed <= settings_only else BUSY_RETRY_SECONDS

    def stop(self) -> None:
        """Start no further write until the next `annotate`.

        Writes in progress continue. If another operator leads by then, it pokes the pod again for a newer assignment.
        """
        self._queued.clear()

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
        if self.is_busy:
            await self.wait_until_written()

    async def wait_until_written(self) -> None:
        """Wait until no write is requested or in progress, or until that has lasted for MAX_WAIT_SECONDS.

        New requests may follow without end: if writes fail, the planner requests them again.
        """
        while self._running:
            seconds_left = self._running_since + MAX_WAIT_SECONDS - loop_time()
            if seconds_left <= 0:
                return
            await asyncio.wait(self._running.values(), timeout=seconds_left)

    def _forget_reported_writes(self) -> None:
        """Forget the writes that the watch has reported, and those of ended pods."""
        unreported: dict[Holder, _Write] = {}
        for holder, write in self._last_writes.items():
            state = self._group.pods.find(holder)
            if state and state.pod.metadata.version_number < write.version:
                unreported[holder] = write
        self._last_writes = unreported

    def _is_new(self, name: str, poke: Poke) -> bool:
        """Whether the pod exists, and its poke is neither queued nor being written nor written."""
        state = self._group.pods.get(name)
        if state is None:  # the pod ended while the assignment was written
            return False
        last_write = self._last_writes.get(state.pod.holder)
        is_written = last_write is not None and last_write.covers({POKE_ANNOTATION: str(poke)})
        return not is_written and self._queued.get(state.pod.holder) != poke

    def _request(self, state: PodState, poke: Poke | None) -> None:
        """Queue a pod's deletion cost, along with a poke (None: with the queued one), and start a task to write it."""
        holder = state.pod.holder
        poke = poke or self._queued.get(holder)
        last_write = self._last_writes.get(holder)
        if last_write and last_write.covers(self._annotations_of(state, poke)):
            self._queued.pop(holder, None)
            return
        self._queued[holder] = poke
        if not self._running:
            self._running_since = loop_time()
        if holder not in self._running:
            self._running[holder] = self._tasks.start(self._write_queued(holder))

    async def _write_queued(self, holder: Holder) -> None:
        """Write the newest queued annotations of a pod, until none are queued."""
        try:
            while holder in self._queued:
                async with self._slots:
                    if holder not in self._queued:  # `stop` was called meanwhile, or the last write covers it
                        return
                    poke = self._queued.pop(holder)
                    if state := self._group.pods.find(holder):  # None: the pod has ended
                        await self._write(state, poke)
        finally:
            del self._running[holder]

    async def _write(self, state: PodState, poke: Poke | None) -> None:
        holder = state.pod.holder
        annotations = self._annotations_of(state, poke)
        body = {"metadata": {"uid": holder.uid, "annotations": annotations}}
        path = object_path("pods", self._group.namespace, holder.name)
        fields = group_fields(self._group.namespace, self._group.name, member=holder.name)
        in_progress = self._last_writes[holder] = _Write(annotations)
        self._limits.writes_in_progress += 1
        try:
            written = await self._api.merge_patch(path, body, PartialObjectMetadata)
            self._last_writes[holder] = _Write(annotations, written.metadata.version_number)
            self._write_count += 1
        except (ApiError, NoResponseError) as error:
            has_ended = isinstance(error, ApiError) and (error.is_not_found or error.is_conflict)
            if not has_ended:  # an ended pod needs no warning: the watch reports it
                _log.warning("A pod could not be annotated: %s", error, extra=fields)
        except Exception:  # noqa: BLE001 - affects one pod; the next plan pokes it again
            _log.exception("Annotating a pod failed unexpectedly", extra=fields)
        finally:
            self._limits.writes_in_progress -= 1
            if self._last_writes.get(holder) is in_progress:  # it failed
                del self._last_writes[holder]

    def _annotations_of(self, state: PodState, poke: Poke | None) -> dict[str, str]:
        pokes = {POKE_ANNOTATION: str(poke)} if poke else {}
        return {**pokes, DELETION_COST_ANNOTATION: self._deletion_cost_of(state)}

    def _deletion_cost_of(self, state: PodState) -> str:
        return str(len(self._group.stored_assignment.shares.get(state.pod.holder, ())))
