"""One reconcile of an observed group: plan, write the assignment, send it, annotate its pods, publish its status.

A reconcile depends on the current state only, never on the change that caused it. If the API server fails, a reconcile
raises the error, and the work queue repeats it. If the planner finds the assignment missing or damaged, the group is
refetched once, to be sure, and planned again.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from rota.aio import BackgroundTasks, loop_time
from rota.kube.brokers.lag import queue_weights
from rota.kube.brokers.lag.lag_totals import status_lag
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import ApiError, NoResponseError
from rota.kube.client.objects import assignment_name
from rota.kube.members.report_client import MAX_SENT_ASSIGNMENT_BYTES, Endpoint, ReportClient
from rota.kube.members.report_watchers import ReportWatchers
from rota.kube.reconcile.assignment_writer import REJECTED_STATUSES, AssignmentWriter, PendingPlan
from rota.kube.reconcile.observe import GroupStateReader
from rota.kube.reconcile.planning import PlanRunner
from rota.kube.reconcile.pod_annotator import PodAnnotator
from rota.kube.reconcile.status_publisher import StatusPublisher
from rota.kube.state.group import Group
from rota.model import Finding, Reason, single_line
from rota.planner import Plan, Snapshot, plan
from rota.spec.resolved import settings_digest


@dataclass
class QueuedGroup:
    """A group, its watchers, writers and publisher, and when it is reconciled next."""

    group: Group
    watchers: ReportWatchers
    publisher: StatusPublisher
    writer: AssignmentWriter
    annotator: PodAnnotator
    timer: asyncio.TimerHandle | None = None
    is_running: bool = False
    requested_seconds: float = math.inf  # until the next reconcile, as requested during this one; inf: no request
    failures: int = 0  # failed reconciles in a row

    def stop(self) -> None:
        """Stop the timer, polls, and writes to pods, status and Deployment, until the group is enqueued again."""
        if self.timer:
            self.timer.cancel()
            self.timer = None
        self.group.members_to_poll = frozenset()
        self.watchers.stop()
        self.annotator.stop()
        self.publisher.stop()


class ReconcileResult(NamedTuple):
    """The result of a reconcile, for metrics, traces and the journal."""

    group: Group
    plan: Plan
    planning_seconds: float
    # By kind. Only the ConfigMap is written by this reconcile; the others were written since the previous one.
    write_counts: Mapping[str, int]


class Reconciler:
    """Reconciles groups, also several concurrently; `WorkQueue` never starts two reconciles of one group."""

    def __init__(
        self,
        registry: BrokerRegistry,
        state_reader: GroupStateReader,
        reports: ReportClient,
        tasks: BackgroundTasks,
        wall_time: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._state_reader = state_reader
        self._reports = reports
        self._tasks = tasks
        self._wall_time = wall_time
        self.plan_runner = PlanRunner()
        self.is_leading = False  # whether this operator may write
        # Called after each reconcile; set in kube/operator.py:_build to kube/observers.py:Observers.on_reconciled.
        self.on_reconciled: Callable[[ReconcileResult], None] = lambda _: None

    async def reconcile(self, queued: QueuedGroup) -> float:
        """Reconcile a group once; return after how many seconds to reconcile it again if nothing changes."""
        group = queued.group
        self._start_unlocks(group)
        # If a write that got no response was stored after all, follow up its plan before the next plan is made: that
        # starts from the stored document, so it has neither the Events nor the journal records of this change.
        confirmed = queued.writer.take_confirmed()
        if confirmed:
            self._follow_up(queued, confirmed, is_written=True)
            return 0.0
        assignment_before = group.stored_assignment
        uid_before = group.uid
        pending = await self._plan(queued)
        new_plan = pending.plan
        if (assignment_before, uid_before) != (group.stored_assignment, group.uid):  # changed while the plan was made
            return 0.0
        if new_plan.refetch:
            await self._state_reader.refetch_state(group)
            group.assignment.was_everything_refetched = True
            return 0.0
        if not self.is_leading or group.body is None:
            return new_plan.requeue_after
        # Not writable: the ConfigMap belongs to another object, or its assignment names too many queues.
        needs_write = new_plan.document is not None and group.stored_assignment.is_writable
        if needs_write:
            await self._write_assignment(queued, pending)
        seconds_to_next_poke = math.inf
        if group.uid == uid_before:  # nothing follows for a group that was deleted or recreated during the write
            seconds_to_next_poke = self._follow_up(queued, pending, is_written=needs_write)
            await queued.annotator.wait_while_busy()
        return min(
            new_plan.requeue_after,
            seconds_to_next_poke,
            group.seconds_to_next_reread,
            group.status_throttle.seconds_to_write(group.published_status, loop_time()),
        )

    def snapshot(self, group: Group) -> Snapshot:
        """Return the planner's snapshot of a group."""
        broker = self._registry.state_of(group, loop_time())
        rooms = self._state_reader.topology.rooms_of(group)
        lag = self._registry.lag_of((group.namespace, group.name))
        weights = queue_weights.group_weights(group, broker, lag)
        return group.snapshot(loop_time(), broker, rooms, status_lag(group, broker, lag), weights)

    def _start_unlocks(self, group: Group) -> None:
        """Release, in the background, the locks that ended members of an Orderly group hold at the brokers."""
        spec = group.resolved_spec.spec
        if spec and spec.is_orderly:
            for client, queues in group.client_ids.take_locks_to_release():
                self._tasks.start(self._registry.unlock(group, client, queues))

    async def _plan(self, queued: QueuedGroup) -> PendingPlan:
        snapshot = self.snapshot(queued.group)
        started_at = loop_time()
        try:
            new_plan = await self.plan_runner.plan(snapshot, self._wall_time())
        except NoResponseError as error:  # a custom strategy did not return in time
            self._publish_problem(queued, Finding(Reason.STRATEGY_FAILED, str(error)))
            raise
        return PendingPlan(new_plan, loop_time() - started_at)

    async def _write_assignment(self, queued: QueuedGroup, pending: PendingPlan) -> None:
        """Write the assignment; if the API server rejects the write, publish this problem, and nothing of the plan."""
        try:
            await queued.writer.write(pending)
        except ApiError as error:
            if error.status in REJECTED_STATUSES:
                name = assignment_name(queued.group.name)
                cause = single_line(str(error))
                message = f"The API server rejected the ConfigMap {name}: {cause}; the assignment stays unchanged"
                self._publish_problem(queued, Finding(Reason.WRITE_REJECTED, message))
            raise

    def _publish_problem(self, queued: QueuedGroup, problem: Finding) -> None:
        """Publish a problem that prevented a plan or its write, and send due pokes; assignment and Deployment stay."""
        group = queued.group
        if self.is_leading and group.uid:
            # Without a spec, the plan has no assignment: it only reports, and pokes pods.
            snapshot = replace(self.snapshot(group), spec=None, problems=(problem,))
            new_plan = plan(snapshot, self._wall_time())
            self._start_drains(group, new_plan)
            queued.annotator.annotate(new_plan)
            queued.publisher.publish(new_plan, with_deployment=False)

    def _follow_up(self, queued: QueuedGroup, pending: PendingPlan, *, is_written: bool) -> float:
        """Send a stored assignment, poke pods, and publish the plan's status, Events and journal records.

        Background tasks do all of this. No assignment is sent while many annotations are being written. Return the
        seconds until postponed pokes are due.
        """
        group = queued.group
        new_plan = pending.plan
        # The next reconcile reads these holders' pods (`GroupStateReader`), to learn whether they have ended.
        group.pods.verify_ended = new_plan.verify_ended
        group.members_to_poll = new_plan.members_to_poll
        counts = queued.publisher.take_write_counts()
        counts["configmap"] += 1 if is_written else 0
        counts["poke"] += queued.annotator.take_write_count()
        seconds_to_next_poke = math.inf
        is_managed = self.is_leading and group.body is not None  # either may have changed during the write
        if is_managed:
            queued.watchers.update_polls()
            self._start_drains(group, new_plan)
            if is_written and not queued.annotator.is_busy:
                self._send_assignment(group, new_plan)
            seconds_to_next_poke = queued.annotator.annotate(new_plan)
        self.on_reconciled(ReconcileResult(group, new_plan, pending.planning_seconds, counts))
        if is_managed:
            queued.publisher.publish(new_plan, with_deployment=True)
        return seconds_to_next_poke

    def _start_drains(self, group: Group, new_plan: Plan) -> None:
        """Request the members that are to end, in background tasks, to drain."""
        for holder in new_plan.members_to_drain:
            if state := group.pods.find(holder):
                self._tasks.start(self._reports.drain(Endpoint.from_pod(state.pod, group.uid)))

    def _send_assignment(self, group: Group, new_plan: Plan) -> None:
        """Send a stored assignment to the members that have not obeyed it, in background tasks."""
        digest = settings_digest(group.stored_assignment.settings)
        for document in new_plan.config_map_data.values():  # one; none after a lost response
            if len(document) > MAX_SENT_ASSIGNMENT_BYTES:  # checked here to start no tasks for up to 10,000 members
                continue
            for name in new_plan.pokes.keys() - new_plan.settings_only_pokes:
                if state := group.pods.get(name):
                    endpoint = Endpoint.from_pod(state.pod, group.uid)
                    self._tasks.start(self._reports.send_assignment(endpoint, document, digest))
