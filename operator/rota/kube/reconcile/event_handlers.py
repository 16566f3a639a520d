"""Handlers of watch events: they update the state of the groups concerned, and enqueue these groups."""

from collections.abc import Callable, Collection, Iterator, Mapping

from rota.aio import loop_time
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
        queued = self._get_or_add(key)
        previous = queued.group.body
        if _is_older(body, previous):
            return
        if previous and previous.metadata.uid != body.metadata.uid:
            self.on_group_delete(previous)
            queued = self._get_or_add(key)
        self.set_spec(queued.group, body)
        if previous is None or previous.metadata.generation != body.metadata.generation:
            self._queue.enqueue(key)

    def on_group_delete(self, body: CustomResource) -> None:
        """Handle a deleted ConsumerGroup: its pods and its ConfigMap are not managed any more."""
        queued = self._queue.groups.get(body.metadata.key)
        if queued and queued.group.body and queued.group.body.metadata.uid == body.metadata.uid:
            queued.stop()
            self._registry.forget(body.metadata.key)
            self._reconciler.forget(queued.group)
            queued.group.mark_deleted()
            self._forget_if_empty(body.metadata.key)

    def expected_groups(self) -> list[CustomResource]:
        """Return the ConsumerGroups that exist as far as the operator knows; those that a list lacks were deleted."""
        return [queued.group.body for queued in self._queue.groups.values() if queued.group.body]

    def on_policy_upsert(self, body: CustomResource) -> None:
        """Handle an added or changed RebalancePolicy."""
        previous = self._policies.get(body.metadata.key)
        if _is_older(body, previous):
            return
        self._policies[body.metadata.key] = body
        if not body.has_same_spec(previous):  # otherwise only its metadata or status changed, or nothing
            self._enqueue_policy_users(body)

    def on_policy_delete(self, body: CustomResource) -> None:
        """Handle a deleted RebalancePolicy; a recreated one has another uid and stays."""
        current = self._policies.get(body.metadata.key)
        if current and current.metadata.uid == body.metadata.uid:
            del self._policies[body.metadata.key]
            self._enqueue_policy_users(body)

    def _enqueue_policy_users(self, body: CustomResource) -> None:
        for key, queued in list(self._queue.groups.items()):
            group_body = queued.group.body
            if group_body and (queued.group.namespace, group_body.policy_name) == body.metadata.key:
                self.set_spec(queued.group, group_body)
                self._queue.enqueue(key)

    @property
    def policies(self) -> Mapping[ObjectKey, CustomResource]:
        """All RebalancePolicies, as last seen."""
        return self._policies

    def policy_users(self) -> dict[ObjectKey, list[str]]:
        """Return the names of the groups that refer to each policy."""
        users: dict[ObjectKey, list[str]] = {}
        for (namespace, name), queued in self._queue.groups.items():
            policy = queued.group.body.policy_name if queued.group.body else ""
            if policy:
                users.setdefault((namespace, policy), []).append(name)
        return users

    def set_spec(self, group: Group, body: CustomResource) -> None:
        """Set the spec and policy that a group has now."""
        group.set_spec(body, self._policies.get((group.namespace, body.policy_name)))
        self._registry.update_group(group)

    def on_pod_upsert(self, pod: Pod) -> None:
        """Handle an added or changed pod."""
        keys = self._groups_of_pod(pod)
        self._last_labels[pod.metadata.uid] = pod.labelled_group
        for key in keys:
            queued = self._get_or_add(key)
            state = queued.group.pods.get(pod.metadata.name)
            previous = state.pod if state else None
            queued.group.pods.upsert(pod, loop_time())
            if previous is None or previous.planning_fields != pod.planning_fields:
                if previous and previous.ready and not pod.ready:
                    # The member may hang: a poll that it holds would hide its silence. The reconcile starts another.
                    queued.watchers.cancel_polls(pod.metadata.name)
                self._prioritize(key)

    def on_pod_delete(self, pod: Pod) -> None:
        """Handle a pod that left the watch: it was deleted, or lost its label."""
        for key in self._groups_of_pod(pod):
            queued = self._get_or_add(key)
            queued.group.mark_pod_missing(pod)
            self._prioritize(key)
            self._forget_if_empty(key)
        self._last_labels.pop(pod.metadata.uid, None)

    def _groups_of_pod(self, pod: Pod) -> list[ObjectKey]:
        """Return the groups of the pod's label, of its previous label, and of the assignment its sidecar mounts.

        Only the label names a group that is not known yet, as its ConsumerGroup may arrive later than its pods.
        """
        previous_label = self._last_labels.get(pod.metadata.uid, "")
        names = dict.fromkeys((pod.labelled_group, previous_label, pod.mounted_group))
        keys = [(pod.metadata.namespace, name) for name in names if name]
        return [key for key in keys if key in self._queue.groups or key == pod.metadata.group_key]

    def on_assignment_upsert(self, config_map: ConfigMap) -> None:
        """Handle an added or changed assignment, the operator's own writes included."""
        key = config_map.metadata.group_key
        _, group_name = key
        if config_map.metadata.name == assignment_name(group_name):
            group = self._get_or_add(key).group  # its ConsumerGroup may arrive later
            previous = group.stored_assignment
            group.set_assignment(config_map)
            if group.stored_assignment is not previous:
                self._queue.enqueue(key)

    def on_assignment_delete(self, config_map: ConfigMap) -> None:
        """Handle a deleted assignment."""
        queued = self._queue.groups.get(config_map.metadata.group_key)
        if not queued or config_map.metadata.name != assignment_name(queued.group.name):
            return
        was_recreated = config_map.metadata.version_number < queued.group.stored_assignment.version_number
        if not was_recreated:
            queued.group.mark_assignment_deleted(config_map.metadata.version_number)
            self._queue.enqueue(config_map.metadata.group_key)
            self._forget_if_empty(config_map.metadata.group_key)

    def expected_assignments(self) -> Iterator[ConfigMap]:
        """Return the assignments that groups know, without contents; those that a list lacks were deleted."""
        for queued in self._queue.groups.values():
            if metadata := queued.group.assignment_metadata:
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
        """Return the Deployments that the operator knows; those that a list lacks were deleted."""
        return self._deployments.expected

    def _forget_if_empty(self, key: ObjectKey) -> None:
        """Remove a group that has neither a ConsumerGroup nor pods."""
        group = self._queue.groups[key].group
        has_pods = bool(group.pods or group.pods.without_sidecar)
        if group.body is None and not has_pods:
            del self._queue.groups[key]

    def _get_or_add(self, key: ObjectKey) -> QueuedGroup:
        if key not in self._queue.groups:
            self._add_group(Group(*key, self.assignment_limits))
        return self._queue.groups[key]

    def _prioritize(self, key: ObjectKey) -> None:
        """Reconcile a group soon, before groups that were never observed."""
        self._queue.enqueue(key)
        self._reconciler.prioritize(self._queue.groups[key].group)


def _is_older(body: CustomResource, known: CustomResource | None) -> bool:
    """Whether an object is older than the known version: lists, watches and own writes arrive in any order."""
    return known is not None and body.metadata.version_number < known.metadata.version_number
