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
from rota.kube.client.objects import Key
from rota.kube.members.report_client import ReportClient
from rota.kube.members.report_watchers import MAX_STANDING_POLLS, ReportWatchers, WatcherEvents
from rota.kube.reconcile.assignment_writer import AssignmentWriter
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.reconcile.reconciler import Reconciler, ReconcileResult
from rota.kube.reconcile.status_publisher import AT_ONCE, PublisherHooks, StatusPublisher
from rota.kube.reconcile.work_queue import SETTLE_SECONDS, QueuedGroup, WorkQueue
from rota.kube.state.group import Group
from rota.kube.workload.deployments import Deployments
from rota.planner import Snapshot

CONSUMERS_SECONDS = 1.0  # between requests for a group's consumers, however many members were notified

_log = logging.getLogger(__name__)


class Controller:
    """Reconciles all ConsumerGroups."""

    def __init__(self, api: Api, reports: ReportClient, places: BrokerRegistry, fleets: Deployments) -> None:
        self._api, self._reports, self._places, self._fleets = api, reports, places, fleets
        self.done: Callable[[ReconcileResult], None] = lambda _: None
        self.time: Callable[[], float] = time
        self._limits = (
            asyncio.Semaphore(AT_ONCE),
            asyncio.Semaphore(AT_ONCE),
        )  # concurrent writes of Events and statuses, and of Deployments
        self._standing_polls = AdmissionLimit(MAX_STANDING_POLLS)
        self._looking = False  # True until every group was observed once
        self._reconciler = Reconciler(api, reports, places, fleets, self)
        self._queue = WorkQueue(self._reconciler.reconcile)
        self.events = EventHandlers(self._queue, self._reconciler, places, fleets, self.adopt)
        places.news = self.wake

    @property
    def groups(self) -> Mapping[Key, Group]:
        """All known groups."""
        return {key: task.group for key, task in self._queue.tasks.items()}

    def group(self, key: Key) -> Group | None:
        """Return a group by its key; None if it is not known."""
        task = self._queue.tasks.get(key)
        return task.group if task else None

    @property
    def leads(self) -> bool:
        """Whether this operator may write."""
        return self._queue.leads

    def wake(self, key: Key, seconds: float = SETTLE_SECONDS) -> None:
        """Reconcile a group soon."""
        self._queue.wake(key, seconds)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a coroutine that no reconcile waits for."""
        return self._queue.start(work)

    def adopt(self, group: Group) -> None:
        """Add a group to the queue."""
        key = (group.namespace, group.name)
        consumer_poll = RateLimitedCall(lambda: self.start(self._look_who_is_there(key)), CONSUMERS_SECONDS)
        events = WatcherEvents(lambda: self.wake(key), consumer_poll.request)
        watchers = ReportWatchers(group, self._reports, events, self._standing_polls)
        hooks = PublisherHooks(self.start, self.events.wants, lambda seconds: self.wake(key, seconds), *self._limits)
        publisher, writer = StatusPublisher(self._api, self._fleets, group, hooks), AssignmentWriter(self._api, group)
        self._queue.tasks[key] = QueuedGroup(group, watchers, publisher, writer)

    async def _look_who_is_there(self, key: Key) -> None:
        if self.leads:
            await self._places.look_who_is_there(key)

    def lead(self, *, leads: bool) -> None:
        """Start or stop leading; a new leader observes every group before it writes."""
        self._queue.leads = self._looking = leads
        self._places.lead(leads=leads)
        for key, task in sorted(self._queue.tasks.items(), key=lambda item: item[1].group.at_rest):  # handovers first
            task.group.begin()
            task.writing.forget()
            if leads:
                self.wake(key)
            else:
                task.rest()

    async def close(self) -> None:
        """Stop leading, and cancel all tasks; the next leader continues from the stored assignments."""
        self.lead(leads=False)
        self._reconciler.close()
        await self._queue.close()

    def note_observed(self) -> None:
        """Log once that every group was observed since this operator began to lead."""
        tasks = self._queue.tasks
        if self.leads and self._looking and all(task.group.looked for task in tasks.values() if task.group.body):
            self._looking = False
            _log.info("All groups are known: %d", len(tasks))

    def snapshot(self, group: Group) -> Snapshot:
        """Return the planner's snapshot of a group."""
        return self._reconciler.snapshot(group)
