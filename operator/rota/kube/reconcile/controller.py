"""The controller: decides when each group is reconciled, and permits writes only while this operator leads.

A group is *observed* once its assignment, brokers and members were read since this operator began to lead, and since
another client wrote the assignment last. Until then, nothing is planned for it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from time import time

from rota.aio import BackgroundTasks, RateLimitedCall, StallDetector, loop_time, retry_pause
from rota.http_server import AdmissionLimit
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api, ApiError, ConflictError, NoResponseError
from rota.kube.client.objects import ObjectKey
from rota.kube.members.report_client import ReportClient
from rota.kube.members.report_watchers import MAX_STANDING_POLLS, ReportWatchers, WatcherEvents
from rota.kube.reconcile.assignment_writer import AssignmentWriter
from rota.kube.reconcile.group_specs import GroupSpecs
from rota.kube.reconcile.observe import MAX_CONCURRENT_POLLS, GroupStateReader, PriorityLimiter
from rota.kube.reconcile.pod_annotator import PodAnnotator, PokeLimits
from rota.kube.reconcile.reconciler import QueuedGroup, Reconciler
from rota.kube.reconcile.status_publisher import PublisherResources, StatusPublisher
from rota.kube.state.group import Group
from rota.kube.state.stored_assignment import AssignmentLimits
from rota.kube.workload.deployments import Deployments
from rota.logs import group_fields

# Delay of a reconcile, so that changes in quick succession cause only one; see `WorkQueue.enqueue_for_report`.
COALESCE_SECONDS = 0.02
# Least time between two polls of brokers for a group's consumers, if members report that these have changed.
CONSUMER_POLL_INTERVAL_SECONDS = 1.0
STALL_CHECK_SECONDS = 0.5  # between two checks whether this process was stalled (its event loop did not run)

_log = logging.getLogger(__name__)


class WorkQueue:
    """Reconciles each group that has changed, or is due, in a task of its own; no group waits for another."""

    def __init__(self, controller: "Controller", tasks: BackgroundTasks) -> None:
        self._controller = controller
        self._tasks = tasks
        self.groups: dict[ObjectKey, QueuedGroup] = {}

    def enqueue(self, key: ObjectKey, seconds: float = COALESCE_SECONDS) -> None:
        """Reconcile a group after `seconds`; of several calls the earliest time counts.

        All calls during a reconcile of the group cause one more. An operator that does not lead enqueues nothing.
        """
        self._schedule(key, max(seconds, COALESCE_SECONDS))

    def enqueue_for_report(self, key: ObjectKey, member: str) -> None:
        """Reconcile a group after a member's report: at once if the group's last plan waits for this member alone."""
        queued = self.groups.get(key)
        is_only_one = queued is not None and queued.group.members_to_poll == {member}
        self._schedule(key, 0.0 if is_only_one else COALESCE_SECONDS)

    def _schedule(self, key: ObjectKey, seconds: float) -> None:
        queued = self.groups.get(key)
        if queued is None or not self._controller.is_leading or queued.group.body is None or seconds == inf:
            return
        if queued.is_running:
            queued.requested_seconds = min(queued.requested_seconds, seconds)
            return
        loop = asyncio.get_running_loop()
        if queued.timer:
            if queued.timer.when() <= loop.time() + seconds:
                return
            queued.timer.cancel()
        queued.timer = loop.call_later(seconds, self._start_reconcile, key, queued)

    def _start_reconcile(self, key: ObjectKey, queued: QueuedGroup) -> None:
        queued.timer = None
        queued.is_running = True
        queued.requested_seconds = inf
        self._tasks.start(self._reconcile(key, queued), f"group {queued.group.namespaced_name}")

    async def _reconcile(self, key: ObjectKey, queued: QueuedGroup) -> None:
        """Reconcile a group, and enqueue it again: for the time that its plan names, or to retry after a failure."""
        queued.failures += 1  # counted in advance: reset below after a success
        delay = retry_pause(queued.failures)
        try:
            delay = await self._controller.reconcile(queued)
            queued.failures = 0
        except ConflictError:
            if queued.failures == 1:
                delay = 0.0  # the next reconcile reads the changed object; later conflicts wait like other failures
        except (ApiError, NoResponseError) as error:
            _log.warning("Reconcile failed; retrying: %s", error, extra=group_fields(*key, seconds=delay))
        except Exception:  # noqa: BLE001 - affects one group; the others continue
            _log.exception("Reconcile failed unexpectedly; retrying", extra=group_fields(*key, seconds=delay))
        finally:
            queued.is_running = False
        self._schedule(key, min(max(delay, COALESCE_SECONDS), queued.requested_seconds))


class Controller:
    """Reconciles all ConsumerGroups."""

    def __init__(
        self,
        api: Api,
        reports: ReportClient,
        registry: BrokerRegistry,
        deployments: Deployments,
        *,
        assignment_limits: AssignmentLimits | None = None,
        wall_time: Callable[[], float] = time,
    ) -> None:
        """`wall_time` returns the seconds since 1970."""
        self._api = api
        self._reports = reports
        self._registry = registry
        self._assignment_limits = assignment_limits or AssignmentLimits()
        self.deployments = deployments
        self.wall_time = wall_time
        self.specs = GroupSpecs(registry)
        self._is_observing = False  # whether `_note_observed` has yet to log that every group was observed
        self._stall_detector = StallDetector(0.0)  # replaced when this operator begins to lead
        self._stall_timer: asyncio.TimerHandle | None = None  # None while this operator does not lead
        self._standing_polls = AdmissionLimit(MAX_STANDING_POLLS)  # of `ReportWatchers`
        self._tasks = BackgroundTasks()
        self._publisher_resources = PublisherResources(api, deployments, self.specs, self._tasks)
        self.poll_limiter = PriorityLimiter(MAX_CONCURRENT_POLLS)
        self._state_reader = GroupStateReader(api, reports, registry, self.poll_limiter)
        self._poke_limits = PokeLimits()
        self.reconciler = Reconciler(registry, self._state_reader, reports, self._tasks, wall_time)
        self.queue = WorkQueue(self, self._tasks)
        registry.on_change = self.queue.enqueue

    @property
    def groups(self) -> Mapping[ObjectKey, Group]:
        """All known groups."""
        return {key: queued.group for key, queued in self.queue.groups.items()}

    def group(self, key: ObjectKey) -> Group | None:
        """Return a group by its key; None if it is not known."""
        queued = self.queue.groups.get(key)
        return queued.group if queued else None

    @property
    def is_leading(self) -> bool:
        """Whether this operator may write."""
        return self.reconciler.is_leading

    async def reconcile(self, queued: QueuedGroup) -> float:
        """Observe and reconcile a group; return after how many seconds to reconcile it again if nothing changes."""
        group = queued.group
        await self._state_reader.refresh_state(group)
        await self.deployments.ensure_key(group)
        self.check_stall()  # after a stall, this task may continue before the timer that checks for stalls
        # During the awaits, leadership may have changed, another client have written the assignment, the group been
        # recreated, or this process stalled.
        if not group.was_observed:
            return 0.0
        self._note_observed()
        return await self.reconciler.reconcile(queued)

    def get_or_add(self, key: ObjectKey) -> QueuedGroup:
        """Return a group by its key; add it if it is not known."""
        if key not in self.queue.groups:
            self.add_group(Group(*key, self._assignment_limits))
        return self.queue.groups[key]

    def add_group(self, group: Group) -> None:
        """Add a group to the queue."""
        key = (group.namespace, group.name)
        poll = RateLimitedCall(lambda: self._tasks.start(self._poll_consumers(key)), CONSUMER_POLL_INTERVAL_SECONDS)
        on_report_change = partial(self.queue.enqueue_for_report, key)
        events = WatcherEvents(on_report_change=on_report_change, on_consumers_change=poll.request)
        watchers = ReportWatchers(group, self._reports, events, self._standing_polls)
        annotator = PodAnnotator(self._api, group, self._poke_limits, self._tasks)
        publisher = StatusPublisher(
            group,
            self._publisher_resources,
            lambda seconds: self.queue.enqueue(key, seconds),
            annotator.wait_until_written,
        )
        writer = AssignmentWriter(self._api, group)
        self.queue.groups[key] = QueuedGroup(group, watchers, publisher, writer, annotator)

    async def _poll_consumers(self, key: ObjectKey) -> None:
        if self.is_leading:
            await self._registry.poll_consumers(key)

    def mark_deleted(self, queued: QueuedGroup) -> None:
        """Handle the deletion of a ConsumerGroup: the group's pods and its ConfigMap are not managed any more."""
        key = (queued.group.namespace, queued.group.name)
        queued.stop()
        self._registry.forget(key)
        self.reconciler.plan_runner.discard_request(queued.group.namespaced_name)
        queued.group.mark_deleted()
        self.forget_if_empty(key)

    def forget_if_empty(self, key: ObjectKey) -> None:
        """Forget a group that has neither a ConsumerGroup nor pods."""
        group = self.queue.groups[key].group
        has_pods = bool(group.pods or group.pods.without_sidecar)
        if group.body is None and not has_pods:
            del self.queue.groups[key]

    def set_leading(self, *, is_leading: bool) -> None:
        """Start or stop leading; a new leader observes every group before it writes."""
        self.reconciler.is_leading = is_leading
        self._is_observing = is_leading
        self._registry.set_leading(is_leading=is_leading)
        for queued in self._sort_handovers_first():
            queued.group.reset_observations()
            queued.writer.forget_pending()
            if is_leading:
                self.queue.enqueue((queued.group.namespace, queued.group.name))
            else:
                queued.stop()
        if self._stall_timer:
            self._stall_timer.cancel()
            self._stall_timer = None
        if is_leading:
            self._stall_detector = StallDetector(loop_time())
            self._look_for_stall()

    def _sort_handovers_first(self) -> list[QueuedGroup]:
        """Return the groups, those in a handover (not at rest) first."""
        return sorted(self.queue.groups.values(), key=lambda queued: queued.group.is_at_rest)  # False sorts first

    def _look_for_stall(self) -> None:
        """Check for a stall periodically, by a timer: after a stall it is overdue, and runs before most tasks."""
        self.check_stall()
        self._stall_timer = asyncio.get_running_loop().call_later(STALL_CHECK_SECONDS, self._look_for_stall)

    def check_stall(self) -> None:
        """After a stall of this process, observe all groups again: no member was polled during the stall.

        Otherwise a member that did not respond right before the stall would count as silent for all of it, and as lost.
        """
        stalled_seconds = self._stall_detector.observe(loop_time())
        if self.is_leading and stalled_seconds:
            _log.warning("The operator was stalled for %.1f s; it observes all groups again", stalled_seconds)
            for queued in self._sort_handovers_first():
                queued.group.reset_observations()
                self.queue.enqueue((queued.group.namespace, queued.group.name))

    async def close(self) -> None:
        """Stop leading, and cancel all tasks; the next leader continues from the stored assignments."""
        self.set_leading(is_leading=False)
        self.reconciler.plan_runner.close()
        await self._tasks.close()

    def _note_observed(self) -> None:
        """Log, once after this operator began to lead, that every group was observed."""
        if not self.is_leading or not self._is_observing:
            return
        groups = self.groups
        if all(group.was_observed for group in groups.values() if group.body):
            self._is_observing = False
            _log.info("All %d groups were observed", len(groups))
