"""One reconcile of a group: observe, plan, write the assignment, annotate its pods, publish its status.

A reconcile depends on the current state only, never on the change that caused it. It raises if the API server fails;
the controller then repeats it.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from rota.kube.brokers.lag import queue_weights
from rota.kube.brokers.lag.lag_totals import status_lag
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.objects import assignment_name
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.members.report_watchers import ReportWatchers
from rota.kube.reconcile import apply
from rota.kube.reconcile.assignment_writer import REJECTED_STATUSES, AssignmentWriter, PendingPlan
from rota.kube.reconcile.limiter import TokenBucket
from rota.kube.reconcile.observe import GroupStateReader
from rota.kube.reconcile.planning import PlanRunner
from rota.kube.reconcile.status_publisher import StatusPublisher
from rota.kube.state.group import Group
from rota.kube.workload.deployments import Deployments
from rota.model import Finding, Poke, Reason, single_line
from rota.planner import Plan, Snapshot, plan

SETTINGS_POKES_PER_SECOND = 100.0  # of all groups together: a kubelet shows changed settings within a minute anyway
SETTINGS_POKES_BURST = 100
REPEATED_POKES_PER_SECOND = 10.0  # separate, so that pods that obey nothing delay no first poke of others
SETTINGS_RETRY_SECONDS = 5.0  # until postponed pokes are tried again: a thousand groups may wait


@dataclass
class GroupTask:
    """A group, with the report watchers, status publisher and assignment writer that serve it."""

    group: Group
    watchers: ReportWatchers
    publisher: StatusPublisher
    writer: AssignmentWriter


class ReconcileResult(NamedTuple):
    """The result of a reconcile, for metrics, traces and the journal."""

    group: Group
    plan: Plan
    planning_seconds: float
    write_counts: Mapping[str, int]  # by kind; writes of the status are those of earlier plans


class ReconcilerHost(Protocol):
    """What a reconcile needs of the controller."""

    on_reconciled: Callable[[ReconcileResult], None]
    wall_time: Callable[[], float]  # seconds since 1970

    @property
    def is_leading(self) -> bool:
        """Whether this operator may write."""

    def start_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a coroutine that no reconcile waits for."""

    def note_observed(self) -> None:
        """Note that a group was observed."""


class Reconciler:
    """Reconciles groups, one at a time or several concurrently, but never one group twice at the same time."""

    def __init__(
        self, api: Api, reports: ReportClient, registry: BrokerRegistry, deployments: Deployments, host: ReconcilerHost
    ) -> None:
        self._api = api
        self._reports = reports
        self._registry = registry
        self._deployments = deployments
        self._host = host
        self._plan_runner = PlanRunner()
        self._first_pokes = TokenBucket(SETTINGS_POKES_PER_SECOND, SETTINGS_POKES_BURST)
        self._repeated_pokes = TokenBucket(REPEATED_POKES_PER_SECOND, SETTINGS_POKES_BURST)
        self._state_reader = GroupStateReader(api, reports, registry)

    def prioritize(self, group: Group) -> None:
        """Observe a group before others that wait for their first reconcile."""
        self._state_reader.prioritize(group)

    def forget(self, group: Group) -> None:
        """Discard the pending plan of a deleted group."""
        self._plan_runner.discard_request(group.namespaced_name)

    def close(self) -> None:
        """Discard all pending plans."""
        self._plan_runner.close()

    async def reconcile(self, task: GroupTask) -> float:
        """Reconcile a group once; return the seconds after which time alone may change its plan."""
        group = task.group
        await self._observe(group)
        if confirmed := task.writer.take_confirmed():  # first: a newer plan would hide the changes of this one
            await self._follow_up(task, confirmed, is_written=True)
            return 0.0
        observed = group.stored_assignment
        uid = group.uid
        pending = await self._plan(task)
        new_plan = pending.plan
        if (observed, uid) != (group.stored_assignment, group.uid):  # changed while a large plan was made
            return 0.0
        if new_plan.refetch:
            await self._state_reader.reread_state(group)
            group.revalidated = True
            return 0.0
        if not self._host.is_leading or group.body is None:
            return new_plan.requeue_after
        if is_written := bool(new_plan.document) and group.stored_assignment.is_ours:
            await self._write_assignment(task, pending)
        postponed = math.inf
        if group.uid == uid:  # the writes of a group that was deleted meanwhile are not counted
            postponed = await self._follow_up(task, pending, is_written=is_written)
        return min(
            new_plan.requeue_after,
            postponed,
            group.seconds_to_next_read,
            group.status_throttle.seconds_to_write(group.published_status, self._now),
        )

    def snapshot(self, group: Group) -> Snapshot:
        """Return the planner's snapshot of a group."""
        broker = self._registry.state_of(group, self._now)
        rooms = self._state_reader.topology.rooms_of(group)
        lag = self._registry.lag_of((group.namespace, group.name))
        return group.snapshot(
            self._now, broker, rooms, status_lag(group, broker, lag), queue_weights.group_weights(group, broker, lag)
        )

    async def publish_problem(self, task: GroupTask, problem: Finding) -> None:
        """Publish the problem that prevents a decision about a group; its assignment stays, and due pokes are sent."""
        if self._host.is_leading and (uid := task.group.uid):
            snapshot = replace(self.snapshot(task.group), spec=None, problems=(problem,))
            new_plan = plan(snapshot, self._host.wall_time())
            await self._annotate_and_drain(task.group, new_plan, self._take_allowed_pokes(new_plan))
            self._publish(task, new_plan, uid, is_carried_out=False)

    async def _observe(self, group: Group) -> None:
        await self._state_reader.refresh_state(group)
        await self._deployments.ensure_key(group)
        self._host.note_observed()
        for client, queues in group.locks_to_release():
            self._host.start_task(self._registry.unlock(group, client, queues))

    async def _plan(self, task: GroupTask) -> PendingPlan:
        snapshot = self.snapshot(task.group)
        started = self._now
        try:
            new_plan = await self._plan_runner.plan(snapshot, self._host.wall_time())
        except NoResponseError as error:
            await self.publish_problem(task, Finding(Reason.STRATEGY_FAILED, str(error)))
            raise
        return PendingPlan(new_plan, self._now - started)

    async def _write_assignment(self, task: GroupTask, pending: PendingPlan) -> None:
        """Write the assignment; if the API server rejects it, publish only that."""
        try:
            await task.writer.write(pending)
        except ApiError as error:
            if error.status in REJECTED_STATUSES:
                name = assignment_name(task.group.name)
                cause = single_line(str(error))
                message = f"The API server rejected the ConfigMap {name}: {cause}; the assignment stays unchanged"
                await self.publish_problem(task, Finding(Reason.WRITE_REJECTED, message))
            raise

    async def _follow_up(self, task: GroupTask, pending: PendingPlan, *, is_written: bool) -> float:
        """Do what follows from a plan whose assignment is stored; return the seconds until postponed pokes are due."""
        group = task.group
        uid = task.group.uid
        new_plan = pending.plan
        self._update_watchers(task, new_plan)
        counts = task.publisher.take_write_counts()
        counts["configmap"] += is_written
        pokes = self._take_allowed_pokes(new_plan)
        try:
            counts["poke"] += await self._annotate_and_drain(group, new_plan, pokes)
        finally:  # the assignment is stored, so it is counted even if this fails
            self._host.on_reconciled(ReconcileResult(group, *pending, counts))
        self._publish(task, new_plan, uid, is_carried_out=True)
        return math.inf if len(pokes) == len(new_plan.pokes) else SETTINGS_RETRY_SECONDS

    def _take_allowed_pokes(self, new_plan: Plan) -> Mapping[str, Poke]:
        """Return the pokes to send now. Those for settings only are rate-limited: a policy can have 1,000 groups."""
        first = sorted(name for name in new_plan.settings_only_pokes if new_plan.pokes[name].attempts == 1)
        repeated = sorted(new_plan.settings_only_pokes.difference(first))
        postponed = {
            *first[self._first_pokes.take(len(first), self._now) :],
            *repeated[self._repeated_pokes.take(len(repeated), self._now) :],
        }
        return {name: poke for name, poke in new_plan.pokes.items() if name not in postponed}

    def _update_watchers(self, task: GroupTask, new_plan: Plan) -> None:
        task.group.pods.to_verify = new_plan.verify_ended
        task.group.awaited = new_plan.members_to_poll
        if self._host.is_leading and task.group.body:
            task.watchers.update_polls()

    async def _annotate_and_drain(self, group: Group, new_plan: Plan, pokes: Mapping[str, Poke]) -> int:
        """Annotate the pods of a plan, and drain the pods that must end; return the number of writes."""
        for holder in new_plan.members_to_drain:
            state = group.pods.get(holder.name)
            if state and state.pod.metadata.uid == holder.uid:
                self._host.start_task(self._reports.drain(Endpoint.from_pod(state.pod, group.uid)))
        return await apply.annotate_pods(self._api, group, pokes, is_settled=not new_plan.members_to_poll)

    def _publish(self, task: GroupTask, new_plan: Plan, uid: str, *, is_carried_out: bool) -> None:
        """Publish status and Events, if this operator still leads and the group was not recreated."""
        if self._host.is_leading and task.group.uid == uid:
            task.publisher.publish(new_plan, self._now, is_carried_out=is_carried_out)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()
