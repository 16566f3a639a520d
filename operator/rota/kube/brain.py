"""The one brain: for each group it gathers, lets the planner decide, and applies; by what is, never by what changed.

A group is looked at when something about it happened, and when time alone may have changed the plan. What happens while
it is being looked at makes it be looked at once more. Each group has a task of its own: none waits for another.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from math import inf
from time import time
from typing import Any, NamedTuple

from rota.kube import apply, weights
from rota.kube.api import Api, ApiError, Unanswered
from rota.kube.assignment_record import RecordLimits
from rota.kube.fleets import Fleets
from rota.kube.gather import Gatherer
from rota.kube.group import Group
from rota.kube.listeners import Listeners
from rota.kube.objects import ConfigMap, Custom, Deployment, Pod, record_of
from rota.kube.places import Places
from rota.kube.planning import Planning
from rota.kube.reports import Endpoint, Reports
from rota.kube.sums import told
from rota.kube.telling import AT_ONCE, PAUSES, Deciding, Telling
from rota.kube.writing import REFUSED, Sent, Writing
from rota.model import Reason, Verdict, plain
from rota.planner import Plan, Snapshot, plan

SETTLE_SECONDS = 0.02  # to look once at what happens together

Key = tuple[str, str]

_log = logging.getLogger(__name__)


@dataclass
class _Task:
    """What goes on for one group."""

    group: Group
    listeners: Listeners
    telling: Telling
    writing: Writing
    again: asyncio.TimerHandle | None = None
    running: bool = False
    woken: float = inf  # in how many seconds it is to be looked at once more, if it was woken while it runs
    failures: int = 0


class Done(NamedTuple):
    """What a round did; who measures or keeps a journal wants to know."""

    group: Group
    plan: Plan
    seconds: float  # that planning took
    writes: Mapping[str, int]  # by kind; what was told meanwhile is of the plans before


class Brain:
    """All groups."""

    def __init__(self, api: Api, reports: Reports, places: Places, fleets: Fleets) -> None:
        """Decide nothing before it `leads`."""
        self._api, self._reports, self._places, self._fleets = api, reports, places, fleets
        self.done: Callable[[Done], None] = lambda _: None
        self.record_limits = RecordLimits()
        self._tasks: dict[Key, _Task] = {}
        self._policies: dict[Key, Custom] = {}
        self._labels: dict[str, str] = {}  # by pods' uids
        self._rounds: set[asyncio.Task[None]] = set()
        self._planning = Planning()
        self._gatherer = Gatherer(api, reports, places)
        self._rooms = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(AT_ONCE)
        self._leads = False
        self._looking = False  # until every group was looked at once
        self.time: Callable[[], float] = time
        places.news = self.wake

    @property
    def groups(self) -> Mapping[Key, Group]:
        """Every group that is known."""
        return {key: it.group for key, it in self._tasks.items()}

    def group(self, key: Key) -> Group | None:
        """Return one of them."""
        task = self._tasks.get(key)
        return task.group if task else None

    @property
    def leads(self) -> bool:
        """Whether it writes."""
        return self._leads

    def adopt(self, group: Group) -> None:
        """Take a group whose texts are read by somebody else."""
        key = (group.namespace, group.name)
        listeners = Listeners(group, self._reports, lambda: self.wake(key))
        deciding = Deciding(self._background, self._wants, lambda seconds: self.wake(key, seconds), *self._rooms)
        telling, writing = Telling(self._api, self._fleets, group, deciding), Writing(self._api, group)
        self._tasks[key] = _Task(group, listeners, telling, writing)

    def lead(self, *, leads: bool) -> None:
        """Begin or end to write; who begins looks at everything first."""
        self._leads = self._looking = leads
        self._places.lead(leads=leads)
        for key, task in sorted(self._tasks.items(), key=lambda it: it[1].group.at_rest):  # those first that wait
            task.group.begin()
            task.writing.forget()
            if leads:
                self.wake(key)
            else:
                self._rest(task)

    async def close(self) -> None:
        """Stop in the middle of whatever is going on: whoever leads next goes on from what is written."""
        self.lead(leads=False)
        self._planning.close()
        for task in self._rounds:
            task.cancel()
        await asyncio.gather(*self._rounds, return_exceptions=True)

    # What is told.

    def group_seen(self, body: Custom) -> None:
        """Take a group's newest text."""
        key = body.metadata.key
        task = self._task(key)
        before = task.group.body
        if before and body.metadata.version < before.metadata.version:
            return
        if before and before.metadata.uid != body.metadata.uid:
            self.group_gone(before)
            task = self._task(key)
        self._wants(task.group, body)
        if before is None or before.metadata.generation != body.metadata.generation:
            self.wake(key)

    def group_gone(self, body: Custom) -> None:
        """Forget a group; its pods and its record are somebody else's now."""
        task = self._tasks.get(body.metadata.key)
        if task and task.group.body and task.group.body.metadata.uid == body.metadata.uid:
            self._rest(task)
            self._places.forget(body.metadata.key)
            self._planning.forget(task.group.spelled)
            task.group.end()
            self._forget_nobodys(body.metadata.key)

    def policy_seen(self, body: Custom) -> None:
        """Take a policy's newest text."""
        known = self._policies.get(body.metadata.key)
        if known is None or known.metadata.version < body.metadata.version:
            self._policies[body.metadata.key] = body
            self._policy_changed(body)

    def policy_gone(self, body: Custom) -> None:
        """Know that a policy is no more; one that was made anew under its name is another."""
        known = self._policies.get(body.metadata.key)
        if known and known.metadata.uid == body.metadata.uid:
            del self._policies[body.metadata.key]
            self._policy_changed(body)

    def _policy_changed(self, body: Custom) -> None:
        for key, task in list(self._tasks.items()):
            wanted = task.group.body and task.group.body.policy
            if task.group.body and (key[0], wanted) == body.metadata.key:
                self._wants(task.group, task.group.body)
                self.wake(key)

    def _wants(self, group: Group, body: Custom) -> None:
        group.wants(body, self._policies.get((group.namespace, body.policy)))
        self._places.want(group)

    def pod_seen(self, pod: Pod) -> None:
        """Take a pod's newest state."""
        for key in self._concerned(pod):
            task = self._task(key)
            known = task.group.pods.get(pod.metadata.name)
            before = known.pod if known else None
            task.group.see(pod, self._now)
            if before is None or before.telling != pod.telling:
                if before and before.ready and not pod.ready:
                    task.listeners.interrupt(pod.metadata.name)
                self._hurry(key)

    def pod_gone(self, pod: Pod) -> None:
        """Know that a pod is not told of any more: it has ended, or lost its label."""
        for key in self._concerned(pod):
            task = self._task(key)
            task.group.miss(pod)
            self._hurry(key)
            self._forget_nobodys(key)
        self._labels.pop(pod.metadata.uid, None)

    def _concerned(self, pod: Pod) -> list[Key]:
        """Return the groups that a pod's label names and named before, and the one that its sidecar works for."""
        before = self._labels.get(pod.metadata.uid, "")
        self._labels[pod.metadata.uid] = pod.labelled
        names = dict.fromkeys((pod.labelled, before, pod.works_for))
        keys = [(pod.metadata.namespace, name) for name in names if name]
        return [key for key in keys if key[1] == pod.labelled or key in self._tasks]

    def record_seen(self, found: ConfigMap) -> None:
        """Take a record's newest text; our own comes back here too."""
        key = found.metadata.group
        if found.metadata.name == record_of(key[1]):
            group = self._task(key).group  # which may be seen later
            before = group.record
            group.keep(found)
            if group.record is not before:
                self.wake(key)

    def record_gone(self, found: ConfigMap) -> None:
        """Know that a record is no more."""
        task = self._tasks.get(found.metadata.group)
        if not task or found.metadata.name != record_of(task.group.name):
            return
        if found.metadata.version >= task.group.record.number:  # else it was made anew meanwhile
            task.group.keep(None)
            self.wake(found.metadata.group)
            self._forget_nobodys(found.metadata.group)

    def deployment_seen(self, found: Deployment) -> None:
        """Take a fleet of ours as it is; what somebody changed by hand is changed back."""
        if self._fleets.seen(found):
            self.wake(found.metadata.group)

    def deployment_gone(self, found: Deployment) -> None:
        """Know that a fleet of ours is no more."""
        self._fleets.gone(found)
        self.wake(found.metadata.group)

    def _forget_nobodys(self, key: Key) -> None:
        """Forget what is known of a group that was never there, or is not any more."""
        group = self._tasks[key].group
        if group.body is None and not (group.pods or group.strangers):
            del self._tasks[key]

    def _task(self, key: Key) -> _Task:
        if key not in self._tasks:
            self.adopt(Group(*key, self.record_limits))
        return self._tasks[key]

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Rounds.

    def wake(self, key: Key, seconds: float = SETTLE_SECONDS) -> None:
        """Look at a group soon; to be woken often is to be looked at once."""
        task = self._tasks.get(key)
        if task is None or not self._leads or task.group.body is None or seconds == inf:
            return
        if task.running:
            task.woken = min(task.woken, seconds)
            return
        loop, seconds = asyncio.get_running_loop(), max(seconds, SETTLE_SECONDS)
        if task.again:
            if task.again.when() <= loop.time() + seconds:
                return
            task.again.cancel()
        task.again = loop.call_later(seconds, self._begin, key, task)

    def _hurry(self, key: Key) -> None:
        """Look at a group soon, and before those of whom nothing is known but that they are there."""
        self.wake(key)
        self._gatherer.hurry(self._tasks[key].group)

    def _begin(self, key: Key, task: _Task) -> None:
        task.again, task.running, task.woken = None, True, inf
        self._background(self._round(key, task), f"group {task.group.spelled}")

    def _rest(self, task: _Task) -> None:
        if task.again:
            task.again.cancel()
            task.again = None
        task.group.awaited = frozenset()
        task.listeners.rest()
        task.telling.rest()

    async def _round(self, key: Key, task: _Task) -> None:
        again, failures = PAUSES[min(task.failures, len(PAUSES) - 1)], task.failures
        task.failures += 1
        try:
            again = await self._decide(task)
            task.failures = 0
        except apply.Stale:
            again = again if failures else 0.0
        except (ApiError, Unanswered) as error:
            _log.warning("%s is looked at again in %g s: %s", task.group.spelled, again, error)
        except Exception:  # noqa: BLE001 - of one group; the others go on
            _log.exception("%s could not be looked at; again in %g s", task.group.spelled, again)
        finally:
            task.running = False
        self.wake(key, min(again, task.woken))

    async def _decide(self, task: _Task) -> float:
        """Look at a group once, and do what is to be done; return the seconds until it is worth looking again."""
        group = task.group
        await self._gatherer.catch_up(group)
        await self._fleets.give_key(group)
        self._looked()
        for client, queues in group.locks_left():
            self._background(self._places.unlock(group, client, queues))
        if taken := task.writing.taken():  # before there is a newer plan, which would hide what this one did
            await self._follow_up(task, taken, written=True)
            return 0.0
        rests_on = group.record, group.uid
        sent = await self._plan(task)
        found = sent.plan
        if rests_on != (group.record, group.uid):  # something happened while a large plan was made
            return 0.0
        if found.reread:
            await self._gatherer.ask_anew(group)
            group.fresh = True
            return 0.0
        if not self._leads or group.body is None:
            return found.again
        if written := bool(found.document) and group.record.ours:
            await self._write(task, sent)
        if group.uid == rests_on[1]:  # what a group was given that went meanwhile is nobody's to count
            await self._follow_up(task, sent, written=written)
        return min(found.again, group.seconds_to_next_read, group.pace.seconds(group.written, self._now))

    async def _follow_up(self, task: _Task, sent: Sent, *, written: bool) -> None:
        """Do what follows from a plan whose document stands."""
        group, uid, found = task.group, task.group.uid, sent.plan
        self._listen(task, found)
        counts = task.telling.take_counts()
        counts["configmap"] += written
        try:
            counts["poke"] += await self._poke(group, found)
        finally:  # what is written is noted, whatever becomes of it
            self.done(Done(group, *sent, counts))
        self._tell(task, found, uid, whole=True)

    async def _write(self, task: _Task, sent: Sent) -> None:
        """Write the document; where that is refused, tell it, and nothing that rests on it."""
        try:
            await task.writing.write(sent)
        except ApiError as error:
            if error.status in REFUSED:
                name, why = record_of(task.group.name), plain(str(error))
                told = f"The ConfigMap {name} is refused: {why}; what was assigned stays"
                await self._tell_only(task, Verdict(Reason.WRITE_REFUSED, told))
            raise

    async def _tell_only(self, task: _Task, verdict: Verdict) -> None:
        """Tell what keeps us from deciding anything about a group, and nothing else of it."""
        if self._leads and (uid := task.group.uid):
            found = plan(replace(self.snapshot(task.group), spec=None, problems=(verdict,)), self.time())
            await self._poke(task.group, found)
            self._tell(task, found, uid, whole=False)

    def _tell(self, task: _Task, found: Plan, uid: str, *, whole: bool) -> None:
        """Have people told, if that is ours still, and the group the same."""
        if self._leads and task.group.uid == uid:
            task.telling.take(found, self._now, whole=whole)

    def _looked(self) -> None:
        if self._leads and self._looking and all(it.group.looked for it in self._tasks.values() if it.group.body):
            self._looking = False
            _log.info("All groups are known: %d", len(self._tasks))

    def _listen(self, task: _Task, found: Plan) -> None:
        task.group.unsure, task.group.awaited = found.confirm, found.awaited
        if self._leads and task.group.body:
            task.listeners.listen()

    async def _plan(self, task: _Task) -> Sent:
        snapshot, began = self.snapshot(task.group), self._now
        try:
            found = await self._planning.plan(snapshot, self.time())
        except Unanswered as error:
            await self._tell_only(task, Verdict(Reason.STRATEGY_FAILED, str(error)))
            raise
        return Sent(found, self._now - began)

    def snapshot(self, group: Group) -> Snapshot:
        """Return a group's world as it is known now."""
        broker, rooms = self._places.of(group, self._now), self._gatherer.rooms.of(group)
        lag = self._places.lag((group.namespace, group.name))
        return group.snapshot(self._now, broker, rooms, told(group, broker, lag), weights.of_group(group, broker, lag))

    async def _poke(self, group: Group, found: Plan) -> int:
        """Tell those whom the plan concerns; return how many writes that took."""
        for holder in found.drains:
            known = group.pods.get(holder.name)
            if known and known.pod.metadata.uid == holder.uid:
                self._background(self._reports.drain(Endpoint.of(known.pod, group.uid)))
        return await apply.mark(self._api, group, found.pokes, settled=not found.awaited)

    def _background(self, work: Coroutine[Any, Any, None], name: str = "") -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, name=name or None)
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)
        return task
