"""Publisher of a group's status and Events, which also maintains its Deployment.

Both run concurrently with reconciles and with each other, so a slow API server or a hanging webhook delays no handover.
The newest status and all Events that arrive during a write are written right after it.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from rota.kube.client.api import Api, ApiError, ConflictError, NoResponseError
from rota.kube.client.objects import CustomResource
from rota.kube.reconcile import apply
from rota.kube.state.group import Group
from rota.kube.state.member_problems import unauthenticated_pods
from rota.kube.workload.deployments import Deployments
from rota.kube.workload.member_keys import REWRITE_SECONDS
from rota.logs import group_fields
from rota.planner import Event, Plan

RETRY_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after consecutive failures
MAX_QUEUED_EVENTS = 50  # that wait to be written; older ones are dropped: only users read them
MAX_CONCURRENT_WRITES = 15  # concurrent status and Event writes, and Deployment writes: leaves capacity for assignments

_log = logging.getLogger(__name__)

StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class PublisherHooks(NamedTuple):
    """Callbacks and limits that the controller provides."""

    start_task: StartTask
    set_spec: Callable[[Group, CustomResource], None]  # handles the ConsumerGroup as it was written
    requeue_after: Callable[[float], None]  # reconciles the group in so many seconds
    status_slots: asyncio.Semaphore  # limits status and Event writes of all groups to MAX_CONCURRENT_WRITES
    deployment_slots: asyncio.Semaphore  # limits Deployment writes: a hanging webhook must delay no status


class CoalescingTask:
    """Runs a coroutine function once at a time, and once more if that was requested during the run."""

    def __init__(self, start_task: StartTask, work: Callable[[], Awaitable[None]]) -> None:
        self._start_task = start_task
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._is_requested = False

    def request(self) -> None:
        """Request a run."""
        self._is_requested = True
        if self._task is None:
            self._task = self._start_task(self._run())

    def cancel(self) -> None:
        """Cancel the current run and the requested one."""
        self._is_requested = False
        if self._task:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while self._is_requested:
            self._is_requested = False
            await self._work()
        self._task = None


class _Step(StrEnum):
    """A step whose failures in a row are counted; log lines name it by its value."""

    PUBLISH = "Writing status and Events"
    STATUS = "Writing the status"
    DEPLOYMENT = "Updating the Deployment"


class StatusPublisher:
    """Publishes the status and Events of one group, and maintains its Deployment."""

    def __init__(self, api: Api, deployments: Deployments, group: Group, hooks: PublisherHooks) -> None:
        self._api = api
        self._deployments = deployments
        self._group = group
        self._hooks = hooks
        self._queued_status: Mapping[str, Any] | None = None
        self._queued_events: deque[Event] = deque(maxlen=MAX_QUEUED_EVENTS)
        self._status_task = CoalescingTask(hooks.start_task, self._write_queued)
        self._deployment_task = CoalescingTask(hooks.start_task, self._sync_deployment)
        self._failures: Counter[_Step] = Counter()
        self._write_counts = _zero_writes()

    def publish(self, plan: Plan, now: float, *, with_deployment: bool) -> None:
        """Publish a plan's status and Events, and update the Deployment, too, if `with_deployment`."""
        if self._group.status_throttle.offer(plan.status, self._group.published_status, now):
            self._queued_status = plan.status
        self._queued_events += plan.events
        if self._queued_status is not None or self._queued_events:
            self._status_task.request()
        if with_deployment:
            self._deployment_task.request()

    def stop(self) -> None:
        """Stop publishing: another operator leads, or the group was deleted."""
        self._status_task.cancel()
        self._deployment_task.cancel()
        self._queued_status = None
        self._queued_events.clear()
        self._failures.clear()

    def take_write_counts(self) -> Counter[str]:
        """Return the writes since the last call, by kind; the reconciler adds those of ConfigMap and pokes."""
        counts = self._write_counts
        self._write_counts = _zero_writes()
        return counts

    async def _write_queued(self) -> None:
        try:
            while self._queued_status is not None or self._queued_events:
                async with self._hooks.status_slots:
                    await self._write_next()
        except Exception as error:  # noqa: BLE001 - affects one group; the status is written again
            self._retry_later(_Step.PUBLISH, error)
        else:
            self._failures[_Step.PUBLISH] = 0

    async def _write_next(self) -> None:
        """Write the newest status and the oldest Event, so that the status does not wait for all Events."""
        status = self._queued_status
        self._queued_status = None
        if status is not None:
            await self._write_status(status)
        if self._queued_events:
            await apply.record_event(self._api, self._group, self._queued_events.popleft())
            self._write_counts["event"] += 1

    async def _write_status(self, status: Mapping[str, Any]) -> None:
        group = self._group
        throttle = group.status_throttle
        loop = asyncio.get_running_loop()
        try:
            written = await apply.write_status(self._api, group, status)
        except Exception:
            throttle.on_write_failed(status, loop.time())
            raise
        self._write_counts["status"] += 1
        if written is None:
            throttle.on_write_failed(status, loop.time())
            seconds_to_write = throttle.seconds_to_write(group.published_status, loop.time())
            self._hooks.requeue_after(max(self._count_failure(_Step.STATUS), seconds_to_write))
            return
        self._failures[_Step.STATUS] = 0
        throttle.on_written(status)
        if group.is_older_than(written.metadata):
            self._hooks.set_spec(group, written)

    async def _sync_deployment(self) -> None:
        previous_problems = self._group.deployment_problems
        previous_rollout = self._group.rollout
        try:
            async with self._hooks.deployment_slots:
                writes = await self._deployments.sync(self._group)
        except Exception as error:  # noqa: BLE001 - affects one group; the Deployment is updated again
            self._retry_later(_Step.DEPLOYMENT, error)
            return
        self._write_counts["deployment"] += writes
        if self._group.key_problems or unauthenticated_pods(self._group.pods):
            self._hooks.requeue_after(REWRITE_SECONDS)  # the Secret may be missing
        self._failures[_Step.DEPLOYMENT] = 0
        problems = self._group.deployment_problems
        if previous_rollout != self._group.rollout:
            self._hooks.requeue_after(0.0)
        elif previous_problems != problems:  # the next plan publishes them
            has_same_reasons = [old.reason for old in previous_problems] == [new.reason for new in problems]
            # Pause if only a message differs, as it may in each attempt: otherwise attempts would follow without end.
            self._hooks.requeue_after(RETRY_PAUSES_SECONDS[0] if has_same_reasons else 0.0)

    def _retry_later(self, step: _Step, error: Exception) -> None:
        """Repeat a failed step later; at once after a first conflict, which means that another writer came first."""
        is_conflict = isinstance(error, ConflictError)
        is_first_failure = not self._failures[step]
        pause = self._count_failure(step)
        seconds = 0.0 if is_conflict and is_first_failure else pause
        if not is_conflict:
            is_expected = isinstance(error, ApiError | NoResponseError)
            fields = group_fields(self._group.namespace, self._group.name, seconds=seconds)
            _log.warning("%s failed; retrying: %s", step, error, exc_info=None if is_expected else error, extra=fields)
        self._hooks.requeue_after(seconds)

    def _count_failure(self, step: _Step) -> float:
        """Count a failure of a step; return the seconds to wait after it."""
        self._failures[step] += 1
        return RETRY_PAUSES_SECONDS[min(self._failures[step], len(RETRY_PAUSES_SECONDS)) - 1]


def _zero_writes() -> Counter[str]:
    return Counter(dict.fromkeys(("configmap", "poke", "status", "event", "deployment"), 0))
