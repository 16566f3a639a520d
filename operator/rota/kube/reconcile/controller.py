"""The controller: connects event handlers, work queue and reconciler; it writes only while this operator leads."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from time import time
from typing import Any

from rota.aio import RateLimitedCall
from rota.http_server import AdmissionLimit
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api
from rota.kube.client.objects import ObjectKey
from rota.kube.members.report_client import ReportClient
from rota.kube.members.report_watchers import MAX_STANDING_POLLS, ReportWatchers, WatcherEvents
from rota.kube.reconcile.assignment_writer import AssignmentWriter
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.reconcile.reconciler import Reconciler, ReconcileResult
from rota.kube.reconcile.status_publisher import MAX_CONCURRENT_WRITES, PublisherHooks, StatusPublisher
from rota.kube.reconcile.work_queue import COALESCE_SECONDS, QueuedGroup, WorkQueue
from rota.kube.state.group import Group
from rota.kube.workload.deployments import Deployments
from rota.planner import Snapshot

CONSUMER_POLL_INTERVAL_SECONDS = 1.0  # between requests for a group's consumers, however many members were notified

_log = logging.getLogger(__name__)


class Controller:
    """Reconciles all ConsumerGroups."""

    def __init__(self, api: Api, reports: ReportClient, registry: BrokerRegistry, deployments: Deployments) -> None:
        self._api = api
        self._reports = reports
        self._registry = registry
        self._deployments = deployments
        self.on_reconciled: Callable[[ReconcileResult], None] = lambda _: None
        self.wall_time: Callable[[], float] = time
        # Limits of concurrent writes: of Events and statuses, and of Deployments.
        self._write_limits = (asyncio.Semaphore(MAX_CONCURRENT_WRITES), asyncio.Semaphore(MAX_CONCURRENT_WRITES))
        self._standing_polls = AdmissionLimit(MAX_STANDING_POLLS)
        self._is_observing = False  # True until every group was observed once
        self._reconciler = Reconciler(api, reports, registry, deployments, self)
        self._queue = WorkQueue(self._reconciler.reconcile)
        self.events = EventHandlers(self._queue, self._reconciler, registry, deployments, self.add_group)
        registry.on_change = self.enqueue

    @property
    def groups(self) -> Mapping[ObjectKey, Group]:
        """All known groups."""
        return {key: task.group for key, task in self._queue.tasks.items()}

    def group(self, key: ObjectKey) -> Group | None:
        """Return a group by its key; None if it is not known."""
        task = self._queue.tasks.get(key)
        return task.group if task else None

    @property
    def is_leading(self) -> bool:
        """Whether this operator may write."""
        return self._queue.is_leading

    def enqueue(self, key: ObjectKey, seconds: float = COALESCE_SECONDS) -> None:
        """Reconcile a group soon."""
        self._queue.enqueue(key, seconds)

    def start_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a coroutine that no reconcile waits for."""
        return self._queue.start_task(work)

    def add_group(self, group: Group) -> None:
        """Add a group to the queue."""
        key = (group.namespace, group.name)
        consumer_poll = RateLimitedCall(
            lambda: self.start_task(self._poll_consumers(key)), CONSUMER_POLL_INTERVAL_SECONDS
        )
        events = WatcherEvents(lambda: self.enqueue(key), consumer_poll.request)
        watchers = ReportWatchers(group, self._reports, events, self._standing_polls)
        hooks = PublisherHooks(
            self.start_task, self.events.set_spec, lambda seconds: self.enqueue(key, seconds), *self._write_limits
        )
        publisher = StatusPublisher(self._api, self._deployments, group, hooks)
        writer = AssignmentWriter(self._api, group)
        self._queue.tasks[key] = QueuedGroup(group, watchers, publisher, writer)

    async def _poll_consumers(self, key: ObjectKey) -> None:
        if self.is_leading:
            await self._registry.poll_consumers(key)

    def set_leading(self, *, is_leading: bool) -> None:
        """Start or stop leading; a new leader observes every group before it writes."""
        self._queue.is_leading = self._is_observing = is_leading
        self._registry.set_leading(is_leading=is_leading)
        handovers_first = sorted(self._queue.tasks.items(), key=lambda item: item[1].group.is_at_rest)
        for key, task in handovers_first:
            task.group.reset_observations()
            task.writer.forget_pending()
            if is_leading:
                self.enqueue(key)
            else:
                task.stop()

    async def close(self) -> None:
        """Stop leading, and cancel all tasks; the next leader continues from the stored assignments."""
        self.set_leading(is_leading=False)
        self._reconciler.close()
        await self._queue.close()

    def note_observed(self) -> None:
        """Log once that every group was observed since this operator began to lead."""
        tasks = self._queue.tasks
        if (
            self.is_leading
            and self._is_observing
            and all(task.group.was_observed for task in tasks.values() if task.group.body)
        ):
            self._is_observing = False
            _log.info("All %d groups were observed", len(tasks))

    def snapshot(self, group: Group) -> Snapshot:
        """Return the planner's snapshot of a group."""
        return self._reconciler.snapshot(group)
