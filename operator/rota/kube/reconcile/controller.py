"""The controller: takes what watches report, and reconciles each group that has changed, or whose time has come.

A change during a reconcile causes one more. Each group is reconciled in a task of its own: no group waits for another.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from math import inf
from time import time
from typing import Any

from rota.kube.brokers.registry import Places
from rota.kube.client.api import Api, ApiError, Stale, Unanswered
from rota.kube.client.objects import ConfigMap, Custom, Deployment, Key, Pod, record_of
from rota.kube.members.report_client import Reports
from rota.kube.members.report_watchers import Listeners
from rota.kube.reconcile.assignment_writer import Writing
from rota.kube.reconcile.reconciler import Done, GroupTask, Reconciler
from rota.kube.reconcile.status_publisher import AT_ONCE, PAUSES, Deciding, Telling
from rota.kube.state.group import Group
from rota.kube.state.stored_assignment import RecordLimits
from rota.kube.workload.deployments import Fleets
from rota.planner import Snapshot

SETTLE_SECONDS = 0.02  # to look once at what happens together


_log = logging.getLogger(__name__)


@dataclass
class _Task(GroupTask):
    """A group in the queue of reconciles."""

    again: asyncio.TimerHandle | None = None
    running: bool = False
    woken: float = inf  # seconds until the next reconcile, if one was requested while this one runs
    failures: int = 0


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
        self._rooms = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(AT_ONCE)
        self._leads = False
        self._looking = False  # until every group was looked at once
        self.time: Callable[[], float] = time
        self._reconciler = Reconciler(api, reports, places, fleets, self)
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
        """Register a group whose spec and assignment another component reads."""
        key = (group.namespace, group.name)
        listeners = Listeners(group, self._reports, lambda: self.wake(key))
        deciding = Deciding(self.start, self._wants, lambda seconds: self.wake(key, seconds), *self._rooms)
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
        self._reconciler.close()
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
            self._reconciler.forget(task.group)
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
            task.group.pods.see(pod, self._now)
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
        if group.body is None and not (group.pods or group.pods.strangers):
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
        """Reconcile a group soon, before groups that were never observed."""
        self.wake(key)
        self._reconciler.hurry(self._tasks[key].group)

    def _begin(self, key: Key, task: _Task) -> None:
        task.again, task.running, task.woken = None, True, inf
        self.start(self._round(key, task), f"group {task.group.spelled}")

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
            again = await self._reconciler.reconcile(task)
            task.failures = 0
        except Stale:
            again = again if failures else 0.0
        except (ApiError, Unanswered) as error:
            _log.warning("%s is looked at again in %g s: %s", task.group.spelled, again, error)
        except Exception:  # noqa: BLE001 - of one group; the others go on
            _log.exception("%s could not be looked at; again in %g s", task.group.spelled, again)
        finally:
            task.running = False
        self.wake(key, min(again, task.woken))

    def note_observed(self) -> None:
        """Log once that every group was observed since this operator began to lead."""
        if self._leads and self._looking and all(it.group.looked for it in self._tasks.values() if it.group.body):
            self._looking = False
            _log.info("All groups are known: %d", len(self._tasks))

    def snapshot(self, group: Group) -> Snapshot:
        """Return what is known of a group, as the planner takes it."""
        return self._reconciler.snapshot(group)

    def start(self, work: Coroutine[Any, Any, None], name: str = "") -> "asyncio.Task[None]":
        """Run a coroutine until it ends or the controller is closed."""
        task = asyncio.get_running_loop().create_task(work, name=name or None)
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)
        return task
