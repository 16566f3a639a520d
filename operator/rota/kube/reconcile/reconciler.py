"""One reconcile of a group: observe, plan, write the assignment, annotate its pods, publish its status.

A reconcile depends on the current state only, never on the change that caused it. It raises if the API server fails;
the work queue then repeats it. If the planner finds the assignment missing or damaged, everything is refetched once, to
be sure, and planned again.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from rota.aio import loop_time
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

# Limits of pokes for changed settings only, for all groups together. They are not urgent, as kubelets show changed
# settings within a minute anyway, and must leave capacity of the API server to handovers.
SETTINGS_POKES_PER_SECOND = 100.0
SETTINGS_POKES_BURST = 100
REPEATED_POKES_PER_SECOND = 10.0  # a limit of its own: pods that never obey must not use up that of first pokes
SETTINGS_RETRY_SECONDS = 5.0  # until postponed pokes are tried again, by up to a thousand groups


@dataclass
class GroupContext:
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
    write_counts: Mapping[str, int]  # by kind; status, Events and Deployment are written later, and counted next time


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

    def check_stall(self) -> None:
        """After a stall of this process, have all groups observed again."""


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

    async def reconcile(self, context: GroupContext) -> float:
        """Reconcile a group once; return after how many seconds to reconcile it again if nothing changes."""
        group = context.group
        await self._state_reader.refresh_state(group)
        await self._deployments.ensure_key(group)
        self._host.check_stall()
        if not group.was_observed:  # leadership has changed, the group was recreated, or this process was stalled
            return 0.0
        self._host.note_observed()
        self._start_unlocks(group)
        # If a write that got no response was stored after all, follow up its plan before the next one is made: that
        # starts from the stored document, so it has neither the Events nor the journal records of this change.
        confirmed = context.writer.take_confirmed()
        if confirmed:
            await self._follow_up(context, confirmed, is_written=True)
            return 0.0
        assignment_before = group.stored_assignment
        uid_before = group.uid
        pending = await self._plan(context)
        new_plan = pending.plan
        if (assignment_before, uid_before) != (group.stored_assignment, group.uid):  # changed while the plan was made
            return 0.0
        if new_plan.refetch:
            await self._state_reader.refetch_state(group)
            group.refetched = True
            return 0.0
        if not self._host.is_leading or group.body is None:
            return new_plan.requeue_after
        needs_write = new_plan.document is not None and group.stored_assignment.is_ours
        if needs_write:
            await self._write_assignment(context, pending)
        seconds_to_next_poke = math.inf
        if group.uid == uid_before:  # nothing follows for a group that was deleted or recreated during the write
            seconds_to_next_poke = await self._follow_up(context, pending, is_written=needs_write)
        return min(
            new_plan.requeue_after,
            seconds_to_next_poke,
            group.seconds_to_next_read,
            group.status_throttle.seconds_to_write(group.published_status, loop_time()),
        )

    def snapshot(self, group: Group) -> Snapshot:
        """Return the planner's snapshot of a group."""
        broker = self._registry.state_of(group, loop_time())
        rooms = self._state_reader.topology.rooms_of(group)
        lag = self._registry.lag_of((group.namespace, group.name))
        weights = queue_weights.group_weights(group, broker, lag)
        return group.snapshot(loop_time(), broker, rooms, status_lag(group, broker, lag), weights)

    async def publish_problem(self, context: GroupContext, problem: Finding) -> None:
        """Publish the problem that prevents a decision; assignment and Deployment stay, and due pokes are sent."""
        uid = context.group.uid
        if self._host.is_leading and uid:
            snapshot = replace(self.snapshot(context.group), spec=None, problems=(problem,))
            new_plan = plan(snapshot, self._host.wall_time())
            await self._annotate_and_drain(context.group, new_plan, self._take_allowed_pokes(new_plan))
            self._publish(context, new_plan, uid, with_deployment=False)

    def _start_unlocks(self, group: Group) -> None:
        """Start to release the locks that ended members of an Orderly group hold at the brokers."""
        for client, queues in group.take_locks_to_release():
            self._host.start_task(self._registry.unlock(group, client, queues))

    async def _plan(self, context: GroupContext) -> PendingPlan:
        snapshot = self.snapshot(context.group)
        started_at = loop_time()
        try:
            new_plan = await self._plan_runner.plan(snapshot, self._host.wall_time())
        except NoResponseError as error:
            await self.publish_problem(context, Finding(Reason.STRATEGY_FAILED, str(error)))
            raise
        return PendingPlan(new_plan, loop_time() - started_at)

    async def _write_assignment(self, context: GroupContext, pending: PendingPlan) -> None:
        """Write the assignment; if the API server rejects it, publish only that."""
        try:
            await context.writer.write(pending)
        except ApiError as error:
            if error.status in REJECTED_STATUSES:
                name = assignment_name(context.group.name)
                cause = single_line(str(error))
                message = f"The API server rejected the ConfigMap {name}: {cause}; the assignment stays unchanged"
                await self.publish_problem(context, Finding(Reason.WRITE_REJECTED, message))
            raise

    async def _follow_up(self, context: GroupContext, pending: PendingPlan, *, is_written: bool) -> float:
        """Do what follows from a plan whose assignment is stored; return the seconds until postponed pokes are due."""
        group = context.group
        uid = group.uid
        new_plan = pending.plan
        self._update_watchers(context, new_plan)
        counts = context.publisher.take_write_counts()
        counts["configmap"] += 1 if is_written else 0
        pokes = self._take_allowed_pokes(new_plan)
        try:
            counts["poke"] += await self._annotate_and_drain(group, new_plan, pokes)
        finally:  # the assignment is stored, so it is counted even if this fails
            self._host.on_reconciled(ReconcileResult(group, new_plan, pending.planning_seconds, counts))
        self._publish(context, new_plan, uid, with_deployment=True)
        has_postponed = len(pokes) < len(new_plan.pokes)
        return SETTINGS_RETRY_SECONDS if has_postponed else math.inf

    def _take_allowed_pokes(self, new_plan: Plan) -> Mapping[str, Poke]:
        """Return the pokes to send now. Those for settings only are rate-limited: a policy can have 1,000 groups."""
        first = sorted(name for name in new_plan.settings_only_pokes if new_plan.pokes[name].attempts == 1)
        repeated = sorted(new_plan.settings_only_pokes.difference(first))
        first_allowed = self._first_pokes.take(len(first), loop_time())
        repeated_allowed = self._repeated_pokes.take(len(repeated), loop_time())
        postponed = {*first[first_allowed:], *repeated[repeated_allowed:]}
        return {name: poke for name, poke in new_plan.pokes.items() if name not in postponed}

    def _update_watchers(self, context: GroupContext, new_plan: Plan) -> None:
        context.group.pods.verify_ended = new_plan.verify_ended
        context.group.members_to_poll = new_plan.members_to_poll
        if self._host.is_leading and context.group.body:
            context.watchers.update_polls()

    async def _annotate_and_drain(self, group: Group, new_plan: Plan, pokes: Mapping[str, Poke]) -> int:
        """Annotate the pods of a plan, and drain the pods that must end; return the number of writes."""
        for holder in new_plan.members_to_drain:
            state = group.pods.get(holder.name)
            if state and state.pod.metadata.uid == holder.uid:
                self._host.start_task(self._reports.drain(Endpoint.from_pod(state.pod, group.uid)))
        return await apply.annotate_pods(self._api, group, pokes, is_settled=not new_plan.members_to_poll)

    def _publish(self, context: GroupContext, new_plan: Plan, uid: str, *, with_deployment: bool) -> None:
        """Publish status and Events, if this operator still leads and the group was not recreated."""
        if self._host.is_leading and context.group.uid == uid:
            context.publisher.publish(new_plan, loop_time(), with_deployment=with_deployment)
