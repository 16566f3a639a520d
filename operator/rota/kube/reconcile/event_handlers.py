"""Handlers of watch events: they update the state of the groups concerned, and enqueue these groups."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping

from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.objects import ConfigMap, Custom, Deployment, Key, Pod, record_of
from rota.kube.reconcile.reconciler import Reconciler
from rota.kube.reconcile.work_queue import QueuedGroup, WorkQueue
from rota.kube.state.group import Group
from rota.kube.state.stored_assignment import RecordLimits
from rota.kube.workload.deployments import Deployments


class EventHandlers:
    """Handles added, changed and deleted groups, policies, pods, ConfigMaps and Deployments."""

    def __init__(
        self,
        queue: WorkQueue,
        reconciler: Reconciler,
        places: BrokerRegistry,
        fleets: Deployments,
        adopt: Callable[[Group], None],
    ) -> None:
        """`adopt`: adds a group to the queue."""
        self._queue, self._reconciler, self._places, self._fleets = queue, reconciler, places, fleets
        self._adopt = adopt
        self.record_limits = RecordLimits()
        self._policies: dict[Key, Custom] = {}
        self._labels: dict[str, str] = {}  # last seen group label, by pod uid

    def group_seen(self, body: Custom) -> None:
        """Handle an added or changed ConsumerGroup."""
        key = body.metadata.key
        task = self._task(key)
        previous = task.group.body
        if previous and body.metadata.version < previous.metadata.version:
            return
        if previous and previous.metadata.uid != body.metadata.uid:
            self.group_gone(previous)
            task = self._task(key)
        self.wants(task.group, body)
        if previous is None or previous.metadata.generation != body.metadata.generation:
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
        previous = self._policies.get(body.metadata.key)
        if previous and previous.metadata.version >= body.metadata.version:
            return
        self._policies[body.metadata.key] = body
        if not body.has_spec_of(previous):  # else only its metadata or status changed
            self._policy_changed(body)

    def policy_gone(self, body: Custom) -> None:
        """Handle a deleted RebalancePolicy; a recreated one has another uid and stays."""
        current = self._policies.get(body.metadata.key)
        if current and current.metadata.uid == body.metadata.uid:
            del self._policies[body.metadata.key]
            self._policy_changed(body)

    def _policy_changed(self, body: Custom) -> None:
        for key, task in list(self._queue.tasks.items()):
            policy_name = task.group.body and task.group.body.policy
            if task.group.body and (key[0], policy_name) == body.metadata.key:
                self.wants(task.group, task.group.body)
                self._queue.wake(key)

    @property
    def policies(self) -> Mapping[Key, Custom]:
        """All RebalancePolicies, as last seen."""
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
            state = task.group.pods.get(pod.metadata.name)
            previous = state.pod if state else None
            task.group.pods.see(pod, self._now)
            if previous is None or previous.telling != pod.telling:
                if previous and previous.ready and not pod.ready:
                    task.listeners.interrupt(pod.metadata.name)
                self._hurry(key)

    def pod_gone(self, pod: Pod) -> None:
        """Handle a pod that left the watch: it was deleted, or lost its label."""
        for key in self._concerned(pod):
            task = self._task(key)
            task.group.miss(pod)
            self._hurry(key)
            self._forget_nobodys(key)
        self._labels.pop(pod.metadata.uid, None)

    def _concerned(self, pod: Pod) -> list[Key]:
        """Return the groups of the pod's label, of its previous label, and of the assignment its sidecar mounts."""
        previous = self._labels.get(pod.metadata.uid, "")
        self._labels[pod.metadata.uid] = pod.labelled
        names = dict.fromkeys((pod.labelled, previous, pod.works_for))
        keys = [(pod.metadata.namespace, name) for name in names if name]
        return [key for key in keys if key[1] == pod.labelled or key in self._queue.tasks]

    def record_seen(self, config_map: ConfigMap) -> None:
        """Handle an added or changed assignment, the operator's own writes included."""
        key = config_map.metadata.group
        if config_map.metadata.name == record_of(key[1]):
            group = self._task(key).group  # its ConsumerGroup may arrive later
            previous = group.record
            group.keep(config_map)
            if group.record is not previous:
                self._queue.wake(key)

    def record_gone(self, config_map: ConfigMap) -> None:
        """Handle a deleted assignment."""
        task = self._queue.tasks.get(config_map.metadata.group)
        if not task or config_map.metadata.name != record_of(task.group.name):
            return
        if config_map.metadata.version >= task.group.record.number:  # else it was recreated meanwhile
            task.group.keep(None)
            self._queue.wake(config_map.metadata.group)
            self._forget_nobodys(config_map.metadata.group)

    def expected_records(self) -> Iterator[ConfigMap]:
        """Return the assignments that exist as far as the groups know, without their contents."""
        for task in self._queue.tasks.values():
            if metadata := task.group.record_metadata:
                yield ConfigMap(metadata)

    def deployment_seen(self, deployment: Deployment) -> None:
        """Handle an added or changed Deployment of a group; the reconcile reverts manual changes."""
        if self._fleets.seen(deployment):
            self._queue.wake(deployment.metadata.group)

    def deployment_gone(self, deployment: Deployment) -> None:
        """Handle a deleted Deployment of a group."""
        self._fleets.gone(deployment)
        self._queue.wake(deployment.metadata.group)

    def expected_deployments(self) -> Collection[Deployment]:
        """Return the Deployments that exist as far as the operator knows."""
        return self._fleets.expected

    def _forget_nobodys(self, key: Key) -> None:
        """Remove a group that has neither a ConsumerGroup nor pods."""
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
