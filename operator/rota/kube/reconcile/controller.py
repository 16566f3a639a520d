"""The controller: connects event handlers, work queue and reconciler; it writes only while this operator leads."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from time import time
from typing import Any

from rota.aio import RateLimitedCall
from rota.http_server import AdmissionLimit
from rota.kube.brokers.registry import Places
from rota.kube.client.api import Api
from rota.kube.client.objects import Key
from rota.kube.members.report_client import Reports
from rota.kube.members.report_watchers import MAX_STANDING_POLLS, Listeners, WatcherEvents
from rota.kube.reconcile.assignment_writer import Writing
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.reconcile.reconciler import Done, Reconciler
from rota.kube.reconcile.status_publisher import AT_ONCE, Deciding, Telling
from rota.kube.reconcile.work_queue import SETTLE_SECONDS, QueuedGroup, WorkQueue
from rota.kube.state.group import Group
from rota.kube.workload.deployments import Fleets
from rota.planner import Snapshot

CONSUMERS_SECONDS = 1.0  # between two questions who is online in a group, however many members were notified

_log = logging.getLogger(__name__)


class Brain:
    """Reconciles all ConsumerGroups."""

    def __init__(self, api: Api, reports: Reports, places: Places, fleets: Fleets) -> None:
        """Decide nothing before it `leads`."""
        self._api, self._reports, self._places, self._fleets = api, reports, places, fleets
        self.done: Callable[[Done], None] = lambda _: None
        self.time: Callable[[], float] = time
        self._limits = (
            asyncio.Semaphore(AT_ONCE),
            asyncio.Semaphore(AT_ONCE),
        )  # of Events and statuses, and of Deployments
        self._standing_polls = AdmissionLimit(MAX_STANDING_POLLS)
        self._looking = False  # until every group was observed once
        self._reconciler = Reconciler(api, reports, places, fleets, self)
        self._queue = WorkQueue(self._reconciler.reconcile)
        self.events = EventHandlers(self._queue, self._reconciler, places, fleets, self.adopt)
        places.news = self.wake

    @property
    def groups(self) -> Mapping[Key, Group]:
        """Every group that is known."""
        return {key: it.group for key, it in self._queue.tasks.items()}

    def group(self, key: Key) -> Group | None:
        """Return one of them."""
        task = self._queue.tasks.get(key)
        return task.group if task else None

    @property
    def leads(self) -> bool:
        """Whether it writes."""
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
        asking = RateLimitedCall(lambda: self.start(self._look_who_is_there(key)), CONSUMERS_SECONDS)
        events = WatcherEvents(lambda: self.wake(key), asking.request)
        listeners = Listeners(group, self._reports, events, self._standing_polls)
        deciding = Deciding(self.start, self.events.wants, lambda seconds: self.wake(key, seconds), *self._limits)
        telling, writing = Telling(self._api, self._fleets, group, deciding), Writing(self._api, group)
        self._queue.tasks[key] = QueuedGroup(group, listeners, telling, writing)

    async def _look_who_is_there(self, key: Key) -> None:
        if self.leads:
            await self._places.look_who_is_there(key)

    def lead(self, *, leads: bool) -> None:
        """Begin or end to write; who begins looks at everything first."""
        self._queue.leads = self._looking = leads
        self._places.lead(leads=leads)
        for key, task in sorted(self._queue.tasks.items(), key=lambda it: it[1].group.at_rest):  # those first that wait
            task.group.begin()
            task.writing.forget()
            if leads:
                self.wake(key)
            else:
                task.rest()

    async def close(self) -> None:
        """Stop leading, and cancel what runs: the next leader continues from what is written."""
        self.lead(leads=False)
        self._reconciler.close()
        await self._queue.close()

    def note_observed(self) -> None:
        """Log once that every group was observed since this operator began to lead."""
        tasks = self._queue.tasks
        if self.leads and self._looking and all(it.group.looked for it in tasks.values() if it.group.body):
            self._looking = False
            _log.info("All groups are known: %d", len(tasks))

    def snapshot(self, group: Group) -> Snapshot:
        """Return what is known of a group, as the planner takes it."""
        return self._reconciler.snapshot(group)
