"""Handlers of watch events: they update the state of the groups concerned, and enqueue these groups."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping

from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.objects import ConfigMap, CustomResource, Deployment, ObjectKey, Pod, assignment_name
from rota.kube.reconcile.reconciler import Reconciler
from rota.kube.reconcile.work_queue import QueuedGroup, WorkQueue
from rota.kube.state.group import Group
from rota.kube.state.stored_assignment import AssignmentLimits
from rota.kube.workload.deployments import Deployments


class EventHandlers:
    """Handles added, changed and deleted groups, policies, pods, ConfigMaps and Deployments."""

    def __init__(
        self,
        queue: WorkQueue,
        reconciler: Reconciler,
        registry: BrokerRegistry,
        deployments: Deployments,
        add_group: Callable[[Group], None],
    ) -> None:
        """`add_group` adds a group to the queue."""
        self._queue = queue
        self._reconciler = reconciler
        self._registry = registry
        self._deployments = deployments
        self._add_group = add_group
        self.assignment_limits = AssignmentLimits()
        self._policies: dict[ObjectKey, CustomResource] = {}
        self._last_labels: dict[str, str] = {}  # last seen group label, by pod uid

    def on_group_upsert(self, body: CustomResource) -> None:
        """Handle an added or changed ConsumerGroup."""
        key = body.metadata.key
        task = self._get_or_add(key)
        previous = task.group.body
        if previous and body.metadata.version_number < previous.metadata.version_number:
            return
        if previous and previous.metadata.uid != body.metadata.uid:
            self.on_group_delete(previous)
            task = self._get_or_add(key)
        self.set_spec(task.group, body)
        if previous is None or previous.metadata.generation != body.metadata.generation:
            self._queue.enqueue(key)

    def on_group_delete(self, body: CustomResource) -> None:
        """Handle a deleted ConsumerGroup: its pods and its ConfigMap are not managed any more."""
        task = self._queue.tasks.get(body.metadata.key)
        if task and task.group.body and task.group.body.metadata.uid == body.metadata.uid:
            task.stop()
            self._registry.forget(body.metadata.key)
            self._reconciler.forget(task.group)
            task.group.mark_deleted()
            self._forget_if_empty(body.metadata.key)

    def on_policy_upsert(self, body: CustomResource) -> None:
        """Handle an added or changed RebalancePolicy."""
        previous = self._policies.get(body.metadata.key)
        if previous and previous.metadata.version_number >= body.metadata.version_number:
            return
        self._policies[body.metadata.key] = body
        if not body.has_same_spec(previous):  # else only its metadata or status changed
            self._enqueue_policy_users(body)

    def on_policy_delete(self, body: CustomResource) -> None:
        """Handle a deleted RebalancePolicy; a recreated one has another uid and stays."""
        current = self._policies.get(body.metadata.key)
        if current and current.metadata.uid == body.metadata.uid:
            del self._policies[body.metadata.key]
            self._enqueue_policy_users(body)

    def _enqueue_policy_users(self, body: CustomResource) -> None:
        for key, task in list(self._queue.tasks.items()):
            policy_name = task.group.body and task.group.body.policy_name
            if task.group.body and (key[0], policy_name) == body.metadata.key:
                self.set_spec(task.group, task.group.body)
                self._queue.enqueue(key)

    @property
    def policies(self) -> Mapping[ObjectKey, CustomResource]:
        """All RebalancePolicies, as last seen."""
        return self._policies

    def policy_users(self) -> dict[ObjectKey, list[str]]:
        """Return the names of the groups that refer to each policy."""
        users: dict[ObjectKey, list[str]] = {}
        for (namespace, name), task in self._queue.tasks.items():
            if task.group.body and (policy := task.group.body.policy_name):
                users.setdefault((namespace, policy), []).append(name)
        return users

    def set_spec(self, group: Group, body: CustomResource) -> None:
        """Set the spec and policy that a group has now."""
        group.set_spec(body, self._policies.get((group.namespace, body.policy_name)))
        self._registry.update_group(group)

    def on_pod_upsert(self, pod: Pod) -> None:
        """Handle an added or changed pod."""
        for key in self._groups_of_pod(pod):
            task = self._get_or_add(key)
            state = task.group.pods.get(pod.metadata.name)
            previous = state.pod if state else None
            task.group.pods.upsert(pod, self._now)
            if previous is None or previous.planning_fields != pod.planning_fields:
                if previous and previous.ready and not pod.ready:
                    task.watchers.cancel_polls(pod.metadata.name)
                self._prioritize(key)

    def on_pod_delete(self, pod: Pod) -> None:
        """Handle a pod that left the watch: it was deleted, or lost its label."""
        for key in self._groups_of_pod(pod):
            task = self._get_or_add(key)
            task.group.mark_pod_missing(pod)
            self._prioritize(key)
            self._forget_if_empty(key)
        self._last_labels.pop(pod.metadata.uid, None)

    def _groups_of_pod(self, pod: Pod) -> list[ObjectKey]:
        """Return the groups of the pod's label, of its previous label, and of the assignment its sidecar mounts."""
        previous = self._last_labels.get(pod.metadata.uid, "")
        self._last_labels[pod.metadata.uid] = pod.labelled_group
        names = dict.fromkeys((pod.labelled_group, previous, pod.mounted_group))
        keys = [(pod.metadata.namespace, name) for name in names if name]
        return [key for key in keys if key[1] == pod.labelled_group or key in self._queue.tasks]

    def on_assignment_upsert(self, config_map: ConfigMap) -> None:
        """Handle an added or changed assignment, the operator's own writes included."""
        key = config_map.metadata.group_key
        if config_map.metadata.name == assignment_name(key[1]):
            group = self._get_or_add(key).group  # its ConsumerGroup may arrive later
            previous = group.stored_assignment
            group.set_assignment(config_map)
            if group.stored_assignment is not previous:
                self._queue.enqueue(key)

    def on_assignment_delete(self, config_map: ConfigMap) -> None:
        """Handle a deleted assignment."""
        task = self._queue.tasks.get(config_map.metadata.group_key)
        if not task or config_map.metadata.name != assignment_name(task.group.name):
            return
        was_recreated = config_map.metadata.version_number < task.group.stored_assignment.version_number
        if not was_recreated:
            task.group.set_assignment(None)
            self._queue.enqueue(config_map.metadata.group_key)
            self._forget_if_empty(config_map.metadata.group_key)

    def expected_assignments(self) -> Iterator[ConfigMap]:
        """Return the assignments that exist as far as the groups know, without their contents."""
        for task in self._queue.tasks.values():
            if metadata := task.group.assignment_metadata:
                yield ConfigMap(metadata)

    def on_deployment_upsert(self, deployment: Deployment) -> None:
        """Handle an added or changed Deployment of a group; the reconcile reverts manual changes."""
        if self._deployments.on_upsert(deployment):
            self._queue.enqueue(deployment.metadata.group_key)

    def on_deployment_delete(self, deployment: Deployment) -> None:
        """Handle a deleted Deployment of a group."""
        self._deployments.on_delete(deployment)
        self._queue.enqueue(deployment.metadata.group_key)

    def expected_deployments(self) -> Collection[Deployment]:
        """Return the Deployments that exist as far as the operator knows."""
        return self._deployments.expected

    def _forget_if_empty(self, key: ObjectKey) -> None:
        """Remove a group that has neither a ConsumerGroup nor pods."""
        group = self._queue.tasks[key].group
        if group.body is None and not (group.pods or group.pods.without_sidecar):
            del self._queue.tasks[key]

    def _get_or_add(self, key: ObjectKey) -> QueuedGroup:
        if key not in self._queue.tasks:
            self._add_group(Group(*key, self.assignment_limits))
        return self._queue.tasks[key]

    def _prioritize(self, key: ObjectKey) -> None:
        """Reconcile a group soon, before groups that were never observed."""
        self._queue.enqueue(key)
        self._reconciler.prioritize(self._queue.tasks[key].group)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()
