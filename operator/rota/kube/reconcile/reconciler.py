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
from rota.kube.client.objects import record_of
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.members.report_watchers import ReportWatchers
from rota.kube.reconcile import apply
from rota.kube.reconcile.assignment_writer import REFUSED, AssignmentWriter, PendingPlan
from rota.kube.reconcile.limiter import TokenBucket
from rota.kube.reconcile.observe import Gatherer
from rota.kube.reconcile.planning import Planning
from rota.kube.reconcile.status_publisher import StatusPublisher
from rota.kube.state.group import Group
from rota.kube.workload.deployments import Deployments
from rota.model import Poke, Reason, Verdict, plain
from rota.planner import Plan, Snapshot, plan

SETTINGS_POKES_A_SECOND = 100.0  # of all groups together: a kubelet shows changed settings within a minute anyway
SETTINGS_POKES_AT_ONCE = 100
REPEATED_POKES_A_SECOND = 10.0  # separate, so that pods that obey nothing delay no first poke of others
SETTINGS_RETRY_SECONDS = 5.0  # until postponed pokes are tried again: a thousand groups may wait


@dataclass
class GroupTask:
    """A group, with the report watchers, status publisher and assignment writer that serve it."""

    group: Group
    listeners: ReportWatchers
    telling: StatusPublisher
    writing: AssignmentWriter


class ReconcileResult(NamedTuple):
    """The result of a reconcile, for metrics, traces and the journal."""

    group: Group
    plan: Plan
    seconds: float  # of planning
    writes: Mapping[str, int]  # by kind; writes of the status are those of earlier plans


class ReconcilerHost(Protocol):
    """What a reconcile needs of the controller."""

    done: Callable[[ReconcileResult], None]
    time: Callable[[], float]  # seconds since 1970

    @property
    def leads(self) -> bool:
        """Whether this operator may write."""

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a coroutine that no reconcile waits for."""

    def note_observed(self) -> None:
        """Note that a group was observed."""


class Reconciler:
    """Reconciles groups, one at a time or several concurrently, but never one group twice at the same time."""

    def __init__(
        self, api: Api, reports: ReportClient, places: BrokerRegistry, fleets: Deployments, host: ReconcilerHost
    ) -> None:
        self._api, self._reports, self._places, self._fleets = api, reports, places, fleets
        self._host = host
        self._planning = Planning()
        self._first_pokes = TokenBucket(SETTINGS_POKES_A_SECOND, SETTINGS_POKES_AT_ONCE)
        self._repeated_pokes = TokenBucket(REPEATED_POKES_A_SECOND, SETTINGS_POKES_AT_ONCE)
        self._gatherer = Gatherer(api, reports, places)

    def hurry(self, group: Group) -> None:
        """Observe a group before others that wait for their first reconcile."""
        self._gatherer.hurry(group)

    def forget(self, group: Group) -> None:
        """Discard the pending plan of a deleted group."""
        self._planning.forget(group.spelled)

    def close(self) -> None:
        """Discard all pending plans."""
        self._planning.close()

    async def reconcile(self, task: GroupTask) -> float:
        """Reconcile a group once; return the seconds after which time alone may change its plan."""
        group = task.group
        await self._observe(group)
        if stored := task.writing.taken():  # first: a newer plan would hide the changes of this one
            await self._follow_up(task, stored, written=True)
            return 0.0
        record, uid = group.record, group.uid
        sent = await self._plan(task)
        new_plan = sent.plan
        if (record, uid) != (group.record, group.uid):  # changed while a large plan was made
            return 0.0
        if new_plan.reread:
            await self._gatherer.ask_anew(group)
            group.fresh = True
            return 0.0
        if not self._host.leads or group.body is None:
            return new_plan.again
        if written := bool(new_plan.document) and group.record.ours:
            await self._write(task, sent)
        postponed = math.inf
        if group.uid == uid:  # the writes of a group that was deleted meanwhile are not counted
            postponed = await self._follow_up(task, sent, written=written)
        return min(new_plan.again, postponed, group.seconds_to_next_read, group.pace.seconds(group.written, self._now))

    def snapshot(self, group: Group) -> Snapshot:
        """Return the planner's snapshot of a group."""
        broker, rooms = self._places.of(group, self._now), self._gatherer.rooms.of(group)
        lag = self._places.lag((group.namespace, group.name))
        return group.snapshot(
            self._now, broker, rooms, status_lag(group, broker, lag), queue_weights.of_group(group, broker, lag)
        )

    async def publish_only(self, task: GroupTask, verdict: Verdict) -> None:
        """Publish the problem that prevents a decision about a group; its assignment stays, and due pokes are sent."""
        if self._host.leads and (uid := task.group.uid):
            snapshot = replace(self.snapshot(task.group), spec=None, problems=(verdict,))
            new_plan = plan(snapshot, self._host.time())
            await self._annotate(task.group, new_plan, self._take_allowed_pokes(new_plan))
            self._publish(task, new_plan, uid, whole=False)

    async def _observe(self, group: Group) -> None:
        await self._gatherer.catch_up(group)
        await self._fleets.give_key(group)
        self._host.note_observed()
        for client, queues in group.locks_left():
            self._host.start(self._places.unlock(group, client, queues))

    async def _plan(self, task: GroupTask) -> PendingPlan:
        snapshot, started = self.snapshot(task.group), self._now
        try:
            new_plan = await self._planning.plan(snapshot, self._host.time())
        except NoResponseError as error:
            await self.publish_only(task, Verdict(Reason.STRATEGY_FAILED, str(error)))
            raise
        return PendingPlan(new_plan, self._now - started)

    async def _write(self, task: GroupTask, sent: PendingPlan) -> None:
        """Write the assignment; if the API server rejects it, publish only that."""
        try:
            await task.writing.write(sent)
        except ApiError as error:
            if error.status in REFUSED:
                name, cause = record_of(task.group.name), plain(str(error))
                message = f"The ConfigMap {name} is refused: {cause}; what was assigned stays"
                await self.publish_only(task, Verdict(Reason.WRITE_REFUSED, message))
            raise

    async def _follow_up(self, task: GroupTask, sent: PendingPlan, *, written: bool) -> float:
        """Do what follows from a plan whose assignment is stored; return the seconds until postponed pokes are due."""
        group, uid, new_plan = task.group, task.group.uid, sent.plan
        self._listen(task, new_plan)
        counts = task.telling.take_counts()
        counts["configmap"] += written
        pokes = self._take_allowed_pokes(new_plan)
        try:
            counts["poke"] += await self._annotate(group, new_plan, pokes)
        finally:  # the assignment is stored, so it is counted even if this fails
            self._host.done(ReconcileResult(group, *sent, counts))
        self._publish(task, new_plan, uid, whole=True)
        return math.inf if len(pokes) == len(new_plan.pokes) else SETTINGS_RETRY_SECONDS

    def _take_allowed_pokes(self, new_plan: Plan) -> Mapping[str, Poke]:
        """Return the pokes to send now. Those for settings only are rate-limited: a policy can have 1,000 groups."""
        first = sorted(name for name in new_plan.for_settings if new_plan.pokes[name].times == 1)
        repeated = sorted(new_plan.for_settings.difference(first))
        postponed = {
            *first[self._first_pokes.take(len(first), self._now) :],
            *repeated[self._repeated_pokes.take(len(repeated), self._now) :],
        }
        return {name: poke for name, poke in new_plan.pokes.items() if name not in postponed}

    def _listen(self, task: GroupTask, new_plan: Plan) -> None:
        task.group.pods.unsure, task.group.awaited = new_plan.confirm, new_plan.awaited
        if self._host.leads and task.group.body:
            task.listeners.listen()

    async def _annotate(self, group: Group, new_plan: Plan, pokes: Mapping[str, Poke]) -> int:
        """Annotate the pods of a plan, and drain the pods that must end; return the number of writes."""
        for holder in new_plan.drains:
            state = group.pods.get(holder.name)
            if state and state.pod.metadata.uid == holder.uid:
                self._host.start(self._reports.drain(Endpoint.of(state.pod, group.uid)))
        return await apply.annotate_pods(self._api, group, pokes, settled=not new_plan.awaited)

    def _publish(self, task: GroupTask, new_plan: Plan, uid: str, *, whole: bool) -> None:
        """Publish status and Events, if this operator still leads and the group was not recreated."""
        if self._host.leads and task.group.uid == uid:
            task.telling.take(new_plan, self._now, whole=whole)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()
