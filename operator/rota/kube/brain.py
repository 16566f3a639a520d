"""The one brain: for each group it gathers, lets the planner decide, and applies; by what is, never by what changed.

A group is looked at when something about it happened, and when time alone may have changed the plan. What happens while
it is being looked at makes it be looked at once more. Each group has a task of its own: none waits for another.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import time
from typing import Any, NamedTuple

from rota.kube import apply, weights
from rota.kube.api import Api, ApiError, Unanswered
from rota.kube.fleets import Fleets
from rota.kube.gather import Gatherer
from rota.kube.group import Group
from rota.kube.listeners import Listeners
from rota.kube.objects import ConfigMap, Custom, Deployment, Pod, record_of
from rota.kube.places import Places
from rota.kube.reports import Reports
from rota.kube.sums import told
from rota.model import Reason, Verdict, plain
from rota.planner import Plan, Snapshot, plan

SETTLE_SECONDS = 0.02  # what happens within so short a time is looked at once
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after failures in a row
STRANGERS, STRANGERS_SECONDS = 4, 10.0  # custom strategies at work at once; what one of them may take
REFUSED = frozenset({400, 403, 413, 422})  # by a shape, a right, a quota, a webhook: it is people's to mend
LARGE = 2000  # queues and pods: a plan about more takes longer than ten milliseconds

Key = tuple[str, str]

_log = logging.getLogger(__name__)


@dataclass
class _Task:
    """What goes on for one group."""

    group: Group
    listeners: Listeners
    again: asyncio.TimerHandle | None = None
    running: bool = False
    woken: bool = False
    failures: int = 0
    stranger: "Future[Plan] | None" = None  # a plan that a custom strategy is still at


class Done(NamedTuple):
    """What a round did; who measures or keeps a journal wants to know."""

    group: Group
    plan: Plan
    seconds: float  # that planning took
    writes: Mapping[str, int]


class Brain:
    """All groups."""

    def __init__(
        self, api: Api, reports: Reports, places: Places, fleets: Fleets, done: Callable[[Done], None] = lambda _: None
    ) -> None:
        """Decide nothing before it `leads`."""
        self._api, self._reports, self._places, self._fleets, self.done = api, reports, places, fleets, done
        self._tasks: dict[Key, _Task] = {}
        self._policies: dict[Key, Custom] = {}
        self._labels: dict[str, str] = {}  # by pods' uids
        self._rounds: set[asyncio.Task[None]] = set()
        self._strangers = ThreadPoolExecutor(STRANGERS, thread_name_prefix="custom")
        self._gatherer = Gatherer(api, reports, places)
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
        self._tasks[key] = _Task(group, Listeners(group, self._reports, lambda: self.wake(key)))

    def lead(self, *, leads: bool) -> None:
        """Begin or end to write; who begins looks at everything first."""
        self._leads = self._looking = leads
        self._places.lead(leads=leads)
        for key, task in sorted(self._tasks.items(), key=lambda it: it[1].group.at_rest):  # those first that wait
            task.group.begin()
            if leads:
                self.wake(key)
            else:
                self._rest(task)

    async def close(self) -> None:
        """Stop in the middle of whatever is going on: whoever leads next goes on from what is written."""
        self.lead(leads=False)
        self._strangers.shutdown(wait=False, cancel_futures=True)
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
            task.group.body = None
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
            self.adopt(Group(*key))
        return self._tasks[key]

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Rounds.

    def wake(self, key: Key, seconds: float = SETTLE_SECONDS) -> None:
        """Look at a group soon; to be woken often is to be looked at once."""
        task = self._tasks.get(key)
        if task is None or not self._leads or task.group.body is None:
            return
        if task.running:
            task.woken = True
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
        task.again, task.running, task.woken = None, True, False
        running = asyncio.get_running_loop().create_task(self._round(key, task), name=f"group {task.group.spelled}")
        self._rounds.add(running)
        running.add_done_callback(self._rounds.discard)

    def _rest(self, task: _Task) -> None:
        if task.again:
            task.again.cancel()
            task.again = None
        task.group.awaited = frozenset()
        task.listeners.rest()

    async def _round(self, key: Key, task: _Task) -> None:
        again, failures = PAUSES[min(task.failures, len(PAUSES) - 1)], task.failures
        task.failures += 1
        try:
            again = await self._decide(task)
            task.failures = 0
        except apply.Stale:
            again, task.group.outdated = again if failures else 0.0, True
        except (ApiError, Unanswered) as error:
            _log.warning("%s is looked at again in %g s: %s", task.group.spelled, again, error)
        except Exception:  # noqa: BLE001 - of one group; the others go on
            _log.exception("%s could not be looked at; again in %g s", task.group.spelled, again)
        finally:
            task.running = False
        self.wake(key, SETTLE_SECONDS if task.woken else again)

    async def _decide(self, task: _Task) -> float:
        """Look at a group once, and do what is to be done; return the seconds until it is worth looking again."""
        group = task.group
        await self._gatherer.catch_up(group)
        self._looked()
        for client, queues in group.locks_left():
            self._background(self._places.unlock(group, client, queues))
        rests_on = group.record, group.uid
        found, seconds = await self._plan(task)
        if rests_on != (group.record, group.uid):  # something happened while a large plan was made
            return 0.0
        if found.reread:
            await self._gatherer.ask_anew(group)
            group.fresh = True
            return 0.0
        if not self._leads or group.body is None:
            return found.again
        writes = dict.fromkeys(("configmap", "poke", "status", "event", "deployment"), 0)
        if found.document and group.record.ours:
            await self._write(group, found)
            writes["configmap"] = 1
        self._listen(task, found)
        before = group.fleet
        try:
            await self._tell(group, found, writes)
            if self._leads:
                writes["deployment"] = await self._fleets.keep(group)  # last: whatever hangs there holds up no queue
        finally:
            self.done(Done(group, found, seconds, writes))
        return min(found.again, group.pace.seconds(group.written, self._now)) if group.fleet == before else 0.0

    async def _write(self, group: Group, found: Plan) -> None:
        """Write the document; where that is refused, tell it, and nothing that rests on it."""
        try:
            group.keep(await apply.write_document(self._api, group, found))
        except ApiError as error:
            if error.status in REFUSED:
                told = f"The ConfigMap {record_of(group.name)} is refused: {plain(str(error))}; what was assigned stays"
                await self._tell_only(group, Verdict(Reason.WRITE_REFUSED, told))
            raise

    async def _tell_only(self, group: Group, verdict: Verdict) -> None:
        """Tell what keeps us from deciding anything about a group, and nothing else of it."""
        if self._leads:
            snapshot = replace(self.snapshot(group), spec=None, problems=(verdict,))
            await self._tell(group, plan(snapshot, self.time()), {})

    def _looked(self) -> None:
        if self._leads and self._looking and all(it.group.looked for it in self._tasks.values() if it.group.body):
            self._looking = False
            _log.info("All groups are known: %d", len(self._tasks))

    def _listen(self, task: _Task, found: Plan) -> None:
        task.group.unsure, task.group.awaited = found.confirm, found.awaited
        if self._leads and task.group.body:
            task.listeners.listen()

    async def _plan(self, task: _Task) -> tuple[Plan, float]:
        """Plan; what takes long, or may, is planned aside, so that it delays no other group."""
        snapshot, began = self.snapshot(task.group), self._now
        if snapshot.policy and snapshot.policy.strategy == "Custom":
            found = await self._plan_with_a_strangers_code(task, snapshot)
        elif len(snapshot.pods) + sum(len(view.queues) for view in snapshot.views.values() if view) > LARGE:
            found = await asyncio.to_thread(plan, snapshot, self.time())
        else:
            found = plan(snapshot, self.time())
        return found, self._now - began

    async def _plan_with_a_strangers_code(self, task: _Task, snapshot: Snapshot) -> Plan:
        if task.stranger is None or task.stranger.done():
            task.stranger = self._strangers.submit(plan, snapshot, self.time())
            await asyncio.wait({asyncio.wrap_future(task.stranger)}, timeout=STRANGERS_SECONDS)
            if task.stranger.done():
                return task.stranger.result()
        told = f"The custom strategy has not answered for {STRANGERS_SECONDS:g} s; what was assigned stays"
        await self._tell_only(task.group, Verdict(Reason.STRATEGY_FAILED, told))
        raise Unanswered(told)

    def snapshot(self, group: Group) -> Snapshot:
        """Return a group's world as it is known now."""
        broker, rooms = self._places.of(group, self._now), self._gatherer.rooms.of(group)
        lag = self._places.lag((group.namespace, group.name))
        return group.snapshot(self._now, broker, rooms, told(group, broker, lag), weights.of_group(group, broker, lag))

    async def _tell(self, group: Group, found: Plan, writes: dict[str, int]) -> None:
        """Tell those whom the plan concerns, and then people."""
        writes["poke"] = await apply.mark(self._api, group, found.pokes, settled=not found.awaited)
        for holder in found.drains:
            known = group.pods.get(holder.name)
            if known and known.pod.metadata.uid == holder.uid:
                self._background(self._reports.drain(known.pod.status.pod_ip, holder.uid))
        if self._leads and group.pace.tell(found.status, group.written, self._now):
            written = await apply.write_status(self._api, group, found.status)
            writes["status"] = 1
            if written is None:
                group.pace.untaken(found.status, self._now)
            elif group.is_before(written.metadata):
                self._wants(group, written)
        for event in found.events:
            await apply.tell(self._api, group, event)
            writes["event"] = writes.get("event", 0) + 1

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)
