"""The controller: connects event handlers, work queue and reconciler; it writes only while this operator leads."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from time import time
from typing import Any

from rota.aio import RateLimitedCall, loop_time
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

CONSUMER_POLL_INTERVAL_SECONDS = 1.0  # between requests for a group's consumers that brokers' notices cause
STALL_CHECK_SECONDS = 0.5  # between two looks for a stall
STALL_SECONDS = 5.0  # after a longer stall of the event loop, no silence of members counts

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
        self._status_slots = asyncio.Semaphore(MAX_CONCURRENT_WRITES)  # concurrent writes of statuses and Events
        self._deployment_slots = asyncio.Semaphore(MAX_CONCURRENT_WRITES)
        self._standing_polls = AdmissionLimit(MAX_STANDING_POLLS)
        self._is_observing = False  # whether a group was not observed yet since this operator began to lead
        self._last_alive_at = 0.0  # when the event loop last looked for a stall
        self._stall_timer: asyncio.TimerHandle | None = None  # while this operator leads
        self._reconciler = Reconciler(api, reports, registry, deployments, self)
        self._queue = WorkQueue(self._reconciler.reconcile)
        self.events = EventHandlers(self._queue, self._reconciler, registry, deployments, self.add_group)
        registry.on_change = self.enqueue

    @property
    def groups(self) -> Mapping[ObjectKey, Group]:
        """All known groups."""
        return {key: queued.group for key, queued in self._queue.groups.items()}

    def group(self, key: ObjectKey) -> Group | None:
        """Return a group by its key; None if it is not known."""
        queued = self._queue.groups.get(key)
        return queued.group if queued else None

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
        poll = RateLimitedCall(lambda: self.start_task(self._poll_consumers(key)), CONSUMER_POLL_INTERVAL_SECONDS)
        events = WatcherEvents(on_report_change=lambda: self.enqueue(key), on_consumers_change=poll.request)
        watchers = ReportWatchers(group, self._reports, events, self._standing_polls)
        hooks = PublisherHooks(
            start_task=self.start_task,
            set_spec=self.events.set_spec,
            requeue_after=lambda seconds: self.enqueue(key, seconds),
            status_slots=self._status_slots,
            deployment_slots=self._deployment_slots,
        )
        publisher = StatusPublisher(self._api, self._deployments, group, hooks)
        writer = AssignmentWriter(self._api, group)
        self._queue.groups[key] = QueuedGroup(group, watchers, publisher, writer)

    async def _poll_consumers(self, key: ObjectKey) -> None:
        if self.is_leading:
            await self._registry.poll_consumers(key)

    def set_leading(self, *, is_leading: bool) -> None:
        """Start or stop leading; a new leader observes every group before it writes."""
        self._queue.is_leading = self._is_observing = is_leading
        self._registry.set_leading(is_leading=is_leading)
        for queued in self._handovers_first():
            queued.group.reset_observations()
            queued.writer.forget_pending()
            if is_leading:
                self.enqueue((queued.group.namespace, queued.group.name))
            else:
                queued.stop()
        if self._stall_timer:
            self._stall_timer.cancel()
            self._stall_timer = None
        if is_leading:
            self._last_alive_at = loop_time()
            self._look_for_stall()

    def _handovers_first(self) -> list[QueuedGroup]:
        return sorted(self._queue.groups.values(), key=lambda queued: queued.group.is_at_rest)

    def _look_for_stall(self) -> None:
        """Look for a stall periodically, by a timer: due since the stall's start, it runs before any task continues."""
        self.check_stall()
        self._stall_timer = asyncio.get_running_loop().call_later(STALL_CHECK_SECONDS, self._look_for_stall)

    def check_stall(self) -> None:
        """After a stall of this process, observe all groups again: it has asked no member meanwhile.

        Otherwise one missing response before a stall would count as silence until its end, and the member as lost.
        """
        now = loop_time()
        seconds = now - self._last_alive_at
        self._last_alive_at = now
        if self.is_leading and seconds > STALL_SECONDS:
            _log.warning("The operator was stalled for %.1f s; it observes all groups again", seconds)
            for queued in self._handovers_first():
                queued.group.reset_observations()
                self.enqueue((queued.group.namespace, queued.group.name))

    async def close(self) -> None:
        """Stop leading, and cancel all tasks; the next leader continues from the stored assignments."""
        self.set_leading(is_leading=False)
        self._reconciler.close()
        await self._queue.close()

    def note_observed(self) -> None:
        """Log, once after this operator began to lead, that every group was observed."""
        if not self.is_leading or not self._is_observing:
            return
        groups = self.groups
        if all(group.was_observed for group in groups.values() if group.body):
            self._is_observing = False
            _log.info("All %d groups were observed", len(groups))

    def snapshot(self, group: Group) -> Snapshot:
        """Return the planner's snapshot of a group."""
        return self._reconciler.snapshot(group)
