"""One reconcile of a group: observe, plan, write the assignment, annotate its pods, publish its status.

A reconcile depends on what is known now, never on what has changed. It raises if the API server fails; the controller
then repeats it.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from rota.kube.brokers.lag import queue_weights
from rota.kube.brokers.lag.lag_totals import told
from rota.kube.brokers.registry import Places
from rota.kube.client.api import Api, ApiError, Unanswered
from rota.kube.client.objects import record_of
from rota.kube.members.report_client import Endpoint, Reports
from rota.kube.members.report_watchers import Listeners
from rota.kube.reconcile import apply
from rota.kube.reconcile.assignment_writer import REFUSED, Sent, Writing
from rota.kube.reconcile.limiter import TokenBucket
from rota.kube.reconcile.observe import Gatherer
from rota.kube.reconcile.planning import Planning
from rota.kube.reconcile.status_publisher import Telling
from rota.kube.state.group import Group
from rota.kube.workload.deployments import Fleets
from rota.model import Poke, Reason, Verdict, plain
from rota.planner import Plan, Snapshot, plan

SETTINGS_POKES_A_SECOND = 100.0  # of all groups together: a kubelet shows changed settings within a minute anyway
SETTINGS_POKES_AT_ONCE = 100
REPEATED_POKES_A_SECOND = 10.0  # so pods that obey nothing delay no first poke of others
SETTINGS_RETRY_SECONDS = 5.0  # before postponed pokes are tried again: a thousand groups may wait


@dataclass
class GroupTask:
    """A group, and what runs for it between reconciles."""

    group: Group
    listeners: Listeners
    telling: Telling
    writing: Writing


class Done(NamedTuple):
    """The result of a reconcile, for metrics, traces and the journal."""

    group: Group
    plan: Plan
    seconds: float  # of planning
    writes: Mapping[str, int]  # by kind; writes of the status are those of earlier plans


class ReconcilerHost(Protocol):
    """What a reconcile needs of the controller."""

    done: Callable[[Done], None]
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

    def __init__(self, api: Api, reports: Reports, places: Places, fleets: Fleets, host: ReconcilerHost) -> None:
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
        """End a plan that is being made for a group that is gone."""
        self._planning.forget(group.spelled)

    def close(self) -> None:
        """End all plans that are being made."""
        self._planning.close()

    async def reconcile(self, task: GroupTask) -> float:
        """Reconcile a group once; return after how many seconds time alone may change its plan."""
        group = task.group
        await self._observe(group)
        if stored := task.writing.taken():  # first: a newer plan would hide what this one did
            await self._follow_up(task, stored, written=True)
            return 0.0
        record, uid = group.record, group.uid
        sent = await self._plan(task)
        found = sent.plan
        if (record, uid) != (group.record, group.uid):  # changed while a large plan was made
            return 0.0
        if found.reread:
            await self._gatherer.ask_anew(group)
            group.fresh = True
            return 0.0
        if not self._host.leads or group.body is None:
            return found.again
        if written := bool(found.document) and group.record.ours:
            await self._write(task, sent)
        postponed = math.inf
        if group.uid == uid:  # the writes of a group that was deleted meanwhile are not counted
            postponed = await self._follow_up(task, sent, written=written)
        return min(found.again, postponed, group.seconds_to_next_read, group.pace.seconds(group.written, self._now))

    def snapshot(self, group: Group) -> Snapshot:
        """Return what is known of a group, as the planner takes it."""
        broker, rooms = self._places.of(group, self._now), self._gatherer.rooms.of(group)
        lag = self._places.lag((group.namespace, group.name))
        return group.snapshot(
            self._now, broker, rooms, told(group, broker, lag), queue_weights.of_group(group, broker, lag)
        )

    async def publish_only(self, task: GroupTask, verdict: Verdict) -> None:
        """Publish what prevents a decision about a group, and nothing else of its plan."""
        if self._host.leads and (uid := task.group.uid):
            snapshot = replace(self.snapshot(task.group), spec=None, problems=(verdict,))
            found = plan(snapshot, self._host.time())
            await self._annotate(task.group, found, self._take_allowed_pokes(found))
            self._publish(task, found, uid, whole=False)

    async def _observe(self, group: Group) -> None:
        await self._gatherer.catch_up(group)
        await self._fleets.give_key(group)
        self._host.note_observed()
        for client, queues in group.locks_left():
            self._host.start(self._places.unlock(group, client, queues))

    async def _plan(self, task: GroupTask) -> Sent:
        snapshot, began = self.snapshot(task.group), self._now
        try:
            found = await self._planning.plan(snapshot, self._host.time())
        except Unanswered as error:
            await self.publish_only(task, Verdict(Reason.STRATEGY_FAILED, str(error)))
            raise
        return Sent(found, self._now - began)

    async def _write(self, task: GroupTask, sent: Sent) -> None:
        """Write the assignment; if the API server rejects it, publish only that."""
        try:
            await task.writing.write(sent)
        except ApiError as error:
            if error.status in REFUSED:
                name, why = record_of(task.group.name), plain(str(error))
                message = f"The ConfigMap {name} is refused: {why}; what was assigned stays"
                await self.publish_only(task, Verdict(Reason.WRITE_REFUSED, message))
            raise

    async def _follow_up(self, task: GroupTask, sent: Sent, *, written: bool) -> float:
        """Do what follows from a plan whose assignment is stored; return the seconds until postponed pokes are due."""
        group, uid, found = task.group, task.group.uid, sent.plan
        self._listen(task, found)
        counts = task.telling.take_counts()
        counts["configmap"] += written
        pokes = self._take_allowed_pokes(found)
        try:
            counts["poke"] += await self._annotate(group, found, pokes)
        finally:  # the assignment is stored, so it is counted even if this fails
            self._host.done(Done(group, *sent, counts))
        self._publish(task, found, uid, whole=True)
        return math.inf if len(pokes) == len(found.pokes) else SETTINGS_RETRY_SECONDS

    def _take_allowed_pokes(self, found: Plan) -> Mapping[str, Poke]:
        """Return the pokes to send now. Those for settings only are limited: a policy can change a thousand groups'."""
        first = sorted(name for name in found.for_settings if found.pokes[name].times == 1)
        repeated = sorted(found.for_settings.difference(first))
        postponed = {
            *first[self._first_pokes.take(len(first), self._now) :],
            *repeated[self._repeated_pokes.take(len(repeated), self._now) :],
        }
        return {name: poke for name, poke in found.pokes.items() if name not in postponed}

    def _listen(self, task: GroupTask, found: Plan) -> None:
        task.group.pods.unsure, task.group.awaited = found.confirm, found.awaited
        if self._host.leads and task.group.body:
            task.listeners.listen()

    async def _annotate(self, group: Group, found: Plan, pokes: Mapping[str, Poke]) -> int:
        """Annotate the pods that a plan concerns, and drain those that must end; return the number of writes."""
        for holder in found.drains:
            known = group.pods.get(holder.name)
            if known and known.pod.metadata.uid == holder.uid:
                self._host.start(self._reports.drain(Endpoint.of(known.pod, group.uid)))
        return await apply.mark(self._api, group, pokes, settled=not found.awaited)

    def _publish(self, task: GroupTask, found: Plan, uid: str, *, whole: bool) -> None:
        """Have status and Events published, if this operator still leads and the group was not recreated."""
        if self._host.leads and task.group.uid == uid:
            task.telling.take(found, self._now, whole=whole)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()
