"""The one brain: for each group it gathers, lets the planner decide, and applies; by what is, never by what changed.

A group is looked at when something about it happened, and when time alone may have changed the plan. What happens while
it is being looked at makes it be looked at once more. Each group has a task of its own: none waits for another.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import Any, NamedTuple

from rota.kube import apply
from rota.kube.api import Api, ApiError, Unanswered
from rota.kube.fleets import Fleets
from rota.kube.group import Group, Known, client_id
from rota.kube.objects import ConfigMap, Custom, Deployment, Pod, path
from rota.kube.places import Places
from rota.kube.reports import WAIT_SECONDS, Reports
from rota.planner import Plan, plan

SETTLE_SECONDS = 0.02  # what happens within so short a time is looked at once
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after failures in a row
LOOKS_AT_ONCE = 20  # groups that a new leader reads whole at the same time
UNHEARD_SECONDS = 1.0  # before a member that could not be heard is asked again

Key = tuple[str, str]

_log = logging.getLogger(__name__)


@dataclass
class _Task:
    """What goes on for one group."""

    group: Group
    again: asyncio.TimerHandle | None = None
    running: bool = False
    woken: bool = False
    failures: int = 0
    readers: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by pod


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
        self._api, self._reports, self._places, self._fleets, self._done = api, reports, places, fleets, done
        self._tasks: dict[Key, _Task] = {}
        self._policies: dict[Key, Custom] = {}
        self._rounds: set[asyncio.Task[None]] = set()
        self._looking = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._leads = False
        self.time: Callable[[], float] = time
        places.news = self.wake

    @property
    def groups(self) -> Mapping[Key, Group]:
        """Every group that is known."""
        return {key: it.group for key, it in self._tasks.items()}

    @property
    def leads(self) -> bool:
        """Whether it writes."""
        return self._leads

    def adopt(self, group: Group) -> None:
        """Take a group whose texts are read by somebody else."""
        self._tasks[group.namespace, group.name] = _Task(group)

    def lead(self, *, leads: bool) -> None:
        """Begin or end to write; who begins looks at everything first."""
        self._leads = leads
        for key, task in self._tasks.items():
            task.group.looked = False
            if leads:
                self.wake(key)
            else:
                self._rest(task)

    async def close(self) -> None:
        """Stop in the middle of whatever is going on: whoever leads next goes on from what is written."""
        self.lead(leads=False)
        for task in self._rounds:
            task.cancel()
        await asyncio.gather(*self._rounds, return_exceptions=True)

    # What is told.

    def group_seen(self, body: Custom) -> None:
        """Take a group's newest text."""
        key = body.metadata.key
        task = self._task(key)
        before = task.group.body
        if before and before.metadata.uid != body.metadata.uid:
            self.group_gone(before)
            task = self._task(key)
        elif before and body.metadata.version < before.metadata.version:
            return
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
            if not (task.group.pods or task.group.strangers):
                del self._tasks[body.metadata.key]

    def policy_seen(self, body: Custom) -> None:
        """Take a policy's newest text."""
        self._policies[body.metadata.key] = body
        self._policy_changed(body)

    def policy_gone(self, body: Custom) -> None:
        """Know that a policy is no more."""
        self._policies.pop(body.metadata.key, None)
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
        task = self._task(pod.metadata.group)
        known = task.group.pods.get(pod.metadata.name)
        before = known and (known.pod.metadata.uid, *_telling(known.pod))
        task.group.see(pod, self._now)
        if before != (pod.metadata.uid, *_telling(pod)):
            if before and before[2] and not pod.ready and (reader := task.readers.pop(pod.metadata.name, None)):
                reader.cancel()  # a poll that it is right to leave unanswered would hide that nobody answers
            self.wake(pod.metadata.group)

    def pod_gone(self, pod: Pod) -> None:
        """Know that a pod has ended."""
        task = self._task(pod.metadata.group)
        task.group.lose(pod)
        if task.group.body is None and not (task.group.pods or task.group.strangers):
            del self._tasks[pod.metadata.group]  # a group that was never there, or is not any more
        self.wake(pod.metadata.group)

    def record_seen(self, found: ConfigMap) -> None:
        """Take a record's newest text; our own comes back here too."""
        task = self._tasks.get(found.metadata.group)
        if task and found.metadata.name == f"{task.group.name}-rota":
            before = task.group.record
            task.group.keep(found)
            if task.group.record is not before:
                self.wake(found.metadata.group)

    def record_gone(self, found: ConfigMap) -> None:
        """Know that a record is no more."""
        task = self._tasks.get(found.metadata.group)
        if not task or found.metadata.name != f"{task.group.name}-rota":
            return
        if found.metadata.version >= task.group.record.number:  # else it was made anew meanwhile
            task.group.keep(None)
            self.wake(found.metadata.group)

    def deployment_seen(self, found: Deployment) -> None:
        """Take a fleet of ours as it is; what somebody changed by hand is changed back."""
        if self._fleets.seen(found):
            self.wake(found.metadata.group)

    def deployment_gone(self, found: Deployment) -> None:
        """Know that a fleet of ours is no more."""
        self._fleets.gone(found)
        self.wake(found.metadata.group)

    def _task(self, key: Key) -> _Task:
        if key not in self._tasks:
            self._tasks[key] = _Task(Group(*key))
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

    def _begin(self, key: Key, task: _Task) -> None:
        task.again, task.running, task.woken = None, True, False
        running = asyncio.get_running_loop().create_task(self._round(key, task), name=f"group {task.group.spelled}")
        self._rounds.add(running)
        running.add_done_callback(self._rounds.discard)

    def _rest(self, task: _Task) -> None:
        if task.again:
            task.again.cancel()
            task.again = None
        for reader in task.readers.values():
            reader.cancel()
        task.readers.clear()

    async def _round(self, key: Key, task: _Task) -> None:
        try:
            again = await self._decide(task)
            task.failures = 0
        except apply.Stale:
            again = await self._read_record(task.group)
        except (ApiError, Unanswered) as error:
            again = PAUSES[min(task.failures, len(PAUSES) - 1)]
            task.failures += 1
            _log.warning("%s is looked at again in %g s: %s", task.group.spelled, again, error)
        except Exception:  # noqa: BLE001 - of one group; the others go on
            again = PAUSES[min(task.failures, len(PAUSES) - 1)]
            task.failures += 1
            _log.exception("%s could not be looked at; again in %g s", task.group.spelled, again)
        finally:
            task.running = False
        self.wake(key, SETTLE_SECONDS if task.woken else again)

    async def _decide(self, task: _Task) -> float:
        """Look at a group once, and do what is to be done; return the seconds until it is worth looking again."""
        group = task.group
        if not group.looked:
            async with self._looking:
                await self._look(group)
            group.looked = True
        await self._confirm(group)
        group.forget_ended()
        stated = await self._fleets.keep(group) if self._leads else 0
        for holder, client in group.locks_left():
            queues = group.shares[holder]
            self._background(self._places.unlock(group, client, queues))
        found, seconds = self._plan(group)
        if found.reread:
            await self._look(group)
            group.fresh = True
            return 0.0
        if not self._leads or group.body is None:
            return found.again
        writes = {"deployment": stated, **await self._apply(group, found)}
        self._await(task, found)
        self._done(Done(group, found, seconds, writes))
        return found.again

    def _plan(self, group: Group) -> tuple[Plan, float]:
        loop = asyncio.get_running_loop()
        ids = {client_id(known.pod) for known in group.pods.values()}
        seen = self._places.of(group, loop.time(), ids)
        snapshot = group.snapshot(loop.time(), seen, self._places.rooms(group))
        began = loop.time()
        return plan(snapshot, self.time()), loop.time() - began

    async def _apply(self, group: Group, found: Plan) -> dict[str, int]:
        writes = {"configmap": 0, "poke": 0, "status": 0, "event": 0}
        if found.document and group.record.ours:
            group.keep(await apply.write_document(self._api, group, found))
            group.fresh = False
            writes["configmap"] = 1
        writes["poke"] = await apply.poke(self._api, group, found.pokes)
        for holder in found.drains:
            known = group.pods.get(holder.name)
            if known and known.pod.metadata.uid == holder.uid:
                self._background(self._reports.drain(known.pod.status.pod_ip, holder.uid))
        if group.body and found.status != group.body.status:
            self._wants(group, await apply.write_status(self._api, group, found.status))
            writes["status"] = 1
        for event in found.events:
            await apply.tell(self._api, group, event)
            writes["event"] += 1
        group.unsure = found.confirm
        return writes

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)

    # Looking.

    async def _look(self, group: Group) -> None:
        """Read record, pods, routes and reports anew; each is a consistent read."""
        await self._read_record(group)
        selector = {"labelSelector": f"rota.dev/group={group.name}"}
        pods, _ = await self._api.list(path("pods", group.namespace), Pod, selector)
        there = {pod.metadata.uid for pod in pods}
        for known in [known for known in group.pods.values() if known.pod.metadata.uid not in there]:
            group.lose(known.pod)
        for pod in pods:
            group.see(pod, self._now)
        await self._places.look(group)
        heard = [self._hear(group, known) for known in group.pods.values() if known.pod.started and not known.pod.ended]
        await asyncio.gather(*heard)

    async def _hear(self, group: Group, known: Known) -> None:
        uid, asked = known.pod.metadata.uid, self._now
        report = await self._reports.read(known.pod.status.pod_ip, uid)
        if (still := group.pods.get(known.pod.metadata.name)) and still.pod.metadata.uid == uid:
            still.hear(report, self._now, asked)

    async def _read_record(self, group: Group) -> float:
        try:
            name = f"{group.name}-rota"
            group.keep(await self._api.get(path("configmaps", group.namespace, name), ConfigMap))
        except ApiError as error:
            if not error.unknown:
                raise
            group.keep(None)
        return 0.0

    async def _confirm(self, group: Group) -> None:
        """Look for owners who are not among the pods: a read of the one object tells whether they ended."""
        for holder in group.unsure:
            try:
                pod: Pod | None = await self._api.get(path("pods", group.namespace, holder.name), Pod)
            except ApiError as error:
                if not error.unknown:
                    raise
                pod = None
            if pod is None or pod.metadata.uid != holder.uid:
                group.gone.add(holder.uid)
            if pod and pod.metadata.group == (group.namespace, group.name):
                group.see(pod, self._now)
        group.unsure = ()

    # Hearing members, as long as something is awaited of them.

    def _await(self, task: _Task, found: Plan) -> None:
        task.group.awaited = found.awaited
        for name in sorted(found.awaited):  # a set has an order of its own in each process
            if name not in task.readers or task.readers[name].done():
                reader = asyncio.get_running_loop().create_task(self._listen(task.group, name), name=f"hear {name}")
                task.readers[name] = reader
                reader.add_done_callback(partial(_forget, task.readers, name))

    async def _listen(self, group: Group, name: str) -> None:
        """Read a member's report as often as it changes, until nothing is awaited of it any more."""
        after: int | None = None
        while name in group.awaited and (known := group.pods.get(name)):
            uid, address, asked = known.pod.metadata.uid, known.pod.status.pod_ip, self._now
            if after is None:
                report = await self._reports.read(address, uid)
            else:
                report = await self._reports.next(address, uid, after)
                asked = min(asked + WAIT_SECONDS, self._now)  # until then it was right to be silent
            after = report.revision if report else None
            known = group.pods.get(name)
            if known and known.pod.metadata.uid == uid and known.hear(report, self._now, asked):
                self.wake((group.namespace, group.name))
            if report is None:
                await asyncio.sleep(UNHEARD_SECONDS)


def _forget(readers: dict[str, asyncio.Task[None]], name: str, reader: asyncio.Task[None]) -> None:
    """Forget a reader that has ended, unless another one has taken its place."""
    if readers.get(name) is reader:
        del readers[name]


def _telling(pod: Pod) -> tuple[object, ...]:
    """Return what of a pod can change a plan; its heartbeat and its annotations' noise do not."""
    return pod.started, pod.ready, pod.terminating, pod.ended, pod.poke, pod.status.pod_ip, pod.has_sidecar
