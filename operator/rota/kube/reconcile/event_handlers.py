"""Handlers of watch events: they update the state of the groups concerned, and queue those."""

import asyncio
from collections.abc import Callable, Mapping

from rota.kube.brokers.registry import Places
from rota.kube.client.objects import ConfigMap, Custom, Deployment, Key, Pod, record_of
from rota.kube.reconcile.reconciler import Reconciler
from rota.kube.reconcile.work_queue import QueuedGroup, WorkQueue
from rota.kube.state.group import Group
from rota.kube.state.stored_assignment import RecordLimits
from rota.kube.workload.deployments import Fleets


class EventHandlers:
    """Handles added, changed and deleted groups, policies, pods, ConfigMaps and Deployments."""

    def __init__(
        self, queue: WorkQueue, reconciler: Reconciler, places: Places, fleets: Fleets, adopt: Callable[[Group], None]
    ) -> None:
        """`adopt`: adds a group to the queue."""
        self._queue, self._reconciler, self._places, self._fleets = queue, reconciler, places, fleets
        self._adopt = adopt
        self.record_limits = RecordLimits()
        self._policies: dict[Key, Custom] = {}
        self._labels: dict[str, str] = {}  # by pods' uids

    def group_seen(self, body: Custom) -> None:
        """Handle an added or changed ConsumerGroup."""
        key = body.metadata.key
        task = self._task(key)
        before = task.group.body
        if before and body.metadata.version < before.metadata.version:
            return
        if before and before.metadata.uid != body.metadata.uid:
            self.group_gone(before)
            task = self._task(key)
        self.wants(task.group, body)
        if before is None or before.metadata.generation != body.metadata.generation:
            self._queue.wake(key)

    def group_gone(self, body: Custom) -> None:
        """Handle a deleted ConsumerGroup: its pods and its ConfigMap are not managed any more."""
        task = self._queue.tasks.get(body.metadata.key)
        if task and task.group.body and task.group.body.metadata.uid == body.metadata.uid:
            task.rest()
            self._places.forget(body.metadata.key)
            self._reconciler.forget(task.group)
            task.group.end()
            self._forget_nobodys(body.metadata.key)

    def policy_seen(self, body: Custom) -> None:
        """Handle an added or changed RebalancePolicy."""
        known = self._policies.get(body.metadata.key)
        if known and known.metadata.version >= body.metadata.version:
            return
        self._policies[body.metadata.key] = body
        if not body.has_spec_of(known):  # else its status was written
            self._policy_changed(body)

    def policy_gone(self, body: Custom) -> None:
        """Handle a deleted RebalancePolicy; one that was created again has another uid."""
        known = self._policies.get(body.metadata.key)
        if known and known.metadata.uid == body.metadata.uid:
            del self._policies[body.metadata.key]
            self._policy_changed(body)

    def _policy_changed(self, body: Custom) -> None:
        for key, task in list(self._queue.tasks.items()):
            wanted = task.group.body and task.group.body.policy
            if task.group.body and (key[0], wanted) == body.metadata.key:
                self.wants(task.group, task.group.body)
                self._queue.wake(key)

    @property
    def policies(self) -> Mapping[Key, Custom]:
        """Every RebalancePolicy, as it was seen last."""
        return self._policies

    def policy_users(self) -> dict[Key, list[str]]:
        """Return the names of the groups that refer to each policy."""
        users: dict[Key, list[str]] = {}
        for (namespace, name), task in self._queue.tasks.items():
            if task.group.body and (policy := task.group.body.policy):
                users.setdefault((namespace, policy), []).append(name)
        return users

    def wants(self, group: Group, body: Custom) -> None:
        """Set the spec and policy that a group has now."""
        group.wants(body, self._policies.get((group.namespace, body.policy)))
        self._places.want(group)

    def pod_seen(self, pod: Pod) -> None:
        """Handle an added or changed pod."""
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
        """Handle a pod that is not watched any more: it is deleted, or has lost its label."""
        for key in self._concerned(pod):
            task = self._task(key)
            task.group.miss(pod)
            self._hurry(key)
            self._forget_nobodys(key)
        self._labels.pop(pod.metadata.uid, None)

    def _concerned(self, pod: Pod) -> list[Key]:
        """Return the groups that the pod's label names and named before, and the one that its sidecar works for."""
        before = self._labels.get(pod.metadata.uid, "")
        self._labels[pod.metadata.uid] = pod.labelled
        names = dict.fromkeys((pod.labelled, before, pod.works_for))
        keys = [(pod.metadata.namespace, name) for name in names if name]
        return [key for key in keys if key[1] == pod.labelled or key in self._queue.tasks]

    def record_seen(self, found: ConfigMap) -> None:
        """Handle an added or changed assignment, the operator's own writes included."""
        key = found.metadata.group
        if found.metadata.name == record_of(key[1]):
            group = self._task(key).group  # which may be seen later
            before = group.record
            group.keep(found)
            if group.record is not before:
                self._queue.wake(key)

    def record_gone(self, found: ConfigMap) -> None:
        """Handle a deleted assignment."""
        task = self._queue.tasks.get(found.metadata.group)
        if not task or found.metadata.name != record_of(task.group.name):
            return
        if found.metadata.version >= task.group.record.number:  # else it was made anew meanwhile
            task.group.keep(None)
            self._queue.wake(found.metadata.group)
            self._forget_nobodys(found.metadata.group)

    def deployment_seen(self, found: Deployment) -> None:
        """Handle an added or changed Deployment of a group; what somebody changed by hand is changed back."""
        if self._fleets.seen(found):
            self._queue.wake(found.metadata.group)

    def deployment_gone(self, found: Deployment) -> None:
        """Handle a deleted Deployment of a group."""
        self._fleets.gone(found)
        self._queue.wake(found.metadata.group)

    def _forget_nobodys(self, key: Key) -> None:
        """Remove a group that does not exist and has no pods."""
        group = self._queue.tasks[key].group
        if group.body is None and not (group.pods or group.pods.strangers):
            del self._queue.tasks[key]

    def _task(self, key: Key) -> QueuedGroup:
        if key not in self._queue.tasks:
            self._adopt(Group(*key, self.record_limits))
        return self._queue.tasks[key]

    def _hurry(self, key: Key) -> None:
        """Reconcile a group soon, before groups that were never observed."""
        self._queue.wake(key)
        self._reconciler.hurry(self._queue.tasks[key].group)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()
