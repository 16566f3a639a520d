"""Publisher of a group's status and Events, which also maintains its Deployment.

Both tasks run concurrently with reconciles and with each other, so a slow API server or a hanging webhook delays no
handover. The newest status and all Events that arrive during a write are written right after it.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rota.aio import BackgroundTasks, loop_time, retry_pause
from rota.kube.client.api import FIELD_MANAGER, Api, ApiError, ConflictError, NoResponseError
from rota.kube.client.objects import CustomResource
from rota.kube.client.paths import GROUPS, collection_path, object_path
from rota.kube.reconcile.group_specs import GroupSpecs
from rota.kube.state.group import Group
from rota.kube.state.member_problems import unauthenticated_pods
from rota.kube.workload.deployments import Deployments
from rota.kube.workload.member_keys import REWRITE_SECONDS
from rota.logs import group_fields
from rota.model import Finding, Reason
from rota.planner import Event, Plan
from rota.timestamps import format_time

MAX_QUEUED_EVENTS = 50  # waiting Events of a group; older Events are dropped, as no controller reads them
MAX_CONCURRENT_WRITES = 15  # of statuses and Events, and as many of Deployments: leaves capacity for assignments

_log = logging.getLogger(__name__)


class PublisherResources:
    """The collaborators and limits that the publishers of all groups have in common."""

    def __init__(self, api: Api, deployments: Deployments, specs: GroupSpecs, tasks: BackgroundTasks) -> None:
        self.api = api
        self.deployments = deployments
        self.specs = specs
        self.tasks = tasks
        self.status_slots = asyncio.Semaphore(MAX_CONCURRENT_WRITES)  # for statuses and Events
        self.deployment_slots = asyncio.Semaphore(MAX_CONCURRENT_WRITES)  # a hanging webhook must delay no status


class CoalescingTask:
    """Runs a coroutine function at most once at a time, and once more if a run was requested meanwhile."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        self._is_requested = False

    def request(self, work: Callable[[], Awaitable[None]]) -> None:
        """Request a run of `work`, the same function in each call."""
        self._is_requested = True
        if self._task is None or self._task.done():
            self._task = self._tasks.start(self._run(work))

    def cancel(self) -> None:
        """Cancel the current run and the requested one."""
        self._is_requested = False
        if self._task:
            self._task.cancel()
            self._task = None

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        while self._is_requested:
            self._is_requested = False
            await work()


class _Step(StrEnum):
    """A step whose failures in a row are counted; log lines name it by its value."""

    PUBLISH = "Writing status and Events"  # unexpected errors in either
    STATUS = "Writing the status"  # the API server rejects the status, or does not respond
    DEPLOYMENT = "Updating the Deployment"


class StatusPublisher:
    """Publishes the status and Events of one group, and maintains its Deployment."""

    def __init__(
        self,
        group: Group,
        resources: PublisherResources,
        requeue_after: Callable[[float], None],
        wait_for_pokes: Callable[[], Awaitable[None]],
    ) -> None:
        """`requeue_after` reconciles the group after a number of seconds.

        `wait_for_pokes` returns once all pokes of the group are written, or a time limit has passed.
        """
        self._group = group
        self._resources = resources
        self._api = resources.api
        self._requeue_after = requeue_after
        self._wait_for_pokes = wait_for_pokes
        self._queued_status: Mapping[str, Any] | None = None
        self._queued_events: deque[Event] = deque(maxlen=MAX_QUEUED_EVENTS)
        self._status_task = CoalescingTask(resources.tasks)
        self._deployment_task = CoalescingTask(resources.tasks)
        self._failures: Counter[_Step] = Counter()
        self._write_counts = _start_counts()

    def publish(self, plan: Plan, *, with_deployment: bool) -> None:
        """Publish a plan's status and Events, and update the Deployment, too, if `with_deployment`."""
        # The throttle limits how often a status is written. One that must wait is offered again by the group's next
        # reconcile, which is due then at the latest (`StatusThrottle.seconds_to_write`).
        if self._group.status_throttle.offer(plan.status, self._group.published_status, loop_time()):
            self._queued_status = plan.status
        self._queued_events += plan.events
        if self._queued_status is not None or self._queued_events:
            self._status_task.request(self._write_queued)
        if with_deployment:
            self._deployment_task.request(self._sync_deployment)

    def stop(self) -> None:
        """Stop publishing: another operator leads, or the group was deleted."""
        self._status_task.cancel()
        self._deployment_task.cancel()
        self._queued_status = None
        self._queued_events.clear()
        self._failures.clear()

    def take_write_counts(self) -> Counter[str]:
        """Return the writes since the last call, by kind, and reset them; the reconciler counts ConfigMap and pokes."""
        counts = self._write_counts
        self._write_counts = _start_counts()
        return counts

    async def _write_queued(self) -> None:
        """Write the newest status, and then one Event at a time: a newer status does not wait for all Events."""
        try:
            while self._queued_status is not None or self._queued_events:
                await self._wait_for_pokes()  # pokes have priority: handovers wait for them
                async with self._resources.status_slots:
                    if self._queued_status is not None:
                        status = self._queued_status
                        self._queued_status = None
                        await self._write_status(status)
                    if self._queued_events:
                        await _record_event(self._api, self._group, self._queued_events.popleft())
                        self._write_counts["event"] += 1
        except Exception as error:  # noqa: BLE001 - affects one group; the next reconcile writes the status again
            self._retry_later(_Step.PUBLISH, error)
        else:
            self._failures[_Step.PUBLISH] = 0

    async def _write_status(self, status: Mapping[str, Any]) -> None:
        """Apply the status, so that its missing fields are removed; after a failure, reconcile the group again."""
        group = self._group
        throttle = group.status_throttle
        path = object_path(GROUPS, group.namespace, group.name, "status")
        try:
            written = await self._api.apply(path, _status_body(group, status), CustomResource)
        except (ApiError, NoResponseError) as error:
            _log.warning("The status could not be written: %s", error, extra=group_fields(group.namespace, group.name))
            self._write_counts["status"] += 1  # a failed request counts, too
            throttle.on_write_failed(status, loop_time())
            seconds_to_write = throttle.seconds_to_write(group.published_status, loop_time())
            self._requeue_after(max(self._count_failure(_Step.STATUS), seconds_to_write))
        except Exception:
            throttle.on_write_failed(status, loop_time())
            raise
        else:
            self._write_counts["status"] += 1
            self._failures[_Step.STATUS] = 0
            throttle.on_written(status)
            if group.is_older_than(written.metadata):  # the next write needs the new resourceVersion
                self._resources.specs.set_spec(group, written)

    async def _sync_deployment(self) -> None:
        """Update Secret and Deployment; reconcile the group again if that changed its problems or its rollout."""
        previous_problems = self._group.deployment_problems
        previous_rollout = self._group.rollout
        try:
            async with self._resources.deployment_slots:
                writes = await self._resources.deployments.sync(self._group)
        except Exception as error:  # noqa: BLE001 - affects one group; the next reconcile updates the Deployment
            self._retry_later(_Step.DEPLOYMENT, error)
            return
        self._write_counts["deployment"] += writes
        if self._group.key_problems or unauthenticated_pods(self._group.pods):
            # The Secret may be missing, or have another key than the pods: the next reconcile writes it again.
            self._requeue_after(REWRITE_SECONDS)
        self._failures[_Step.DEPLOYMENT] = 0
        problems = self._group.deployment_problems
        if previous_rollout != self._group.rollout:
            self._requeue_after(0.0)
        elif previous_problems != problems:  # the next plan publishes them
            has_same_reasons = _reasons_of(previous_problems) == _reasons_of(problems)
            # Pause if only a message differs: it may differ after each attempt, and attempts would follow without end.
            self._requeue_after(retry_pause(1) if has_same_reasons else 0.0)

    def _retry_later(self, step: _Step, error: Exception) -> None:
        """Repeat a failed step later; at once after a first ConflictError (the Deployment has changed meanwhile)."""
        is_conflict = isinstance(error, ConflictError)
        is_first_failure = not self._failures[step]
        pause = self._count_failure(step)
        seconds = 0.0 if is_conflict and is_first_failure else pause
        if not is_conflict:
            is_expected = isinstance(error, ApiError | NoResponseError)
            fields = group_fields(self._group.namespace, self._group.name, seconds=seconds)
            _log.warning("%s failed; retrying: %s", step, error, exc_info=None if is_expected else error, extra=fields)
        self._requeue_after(seconds)

    def _count_failure(self, step: _Step) -> float:
        """Count a failure of a step; return the seconds to wait after it."""
        self._failures[step] += 1
        return retry_pause(self._failures[step])


def _reasons_of(problems: Iterable[Finding]) -> list[Reason]:
    return [problem.reason for problem in problems]


def _start_counts() -> Counter[str]:
    return Counter(dict.fromkeys(("configmap", "poke", "status", "event", "deployment"), 0))


def _status_body(group: Group, status: Mapping[str, Any]) -> dict[str, Any]:
    version = group.body.metadata.resource_version if group.body else ""
    return {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "ConsumerGroup",
        "metadata": {
            "name": group.name,
            "namespace": group.namespace,
            "uid": group.uid,
            "resourceVersion": version,  # so that a deposed leader's outdated status is rejected
        },
        "status": status,
    }


async def _record_event(api: Api, group: Group, event: Event) -> None:
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
