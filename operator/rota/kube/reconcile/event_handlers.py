"""Handlers of watch events, one class a kind: they update the state of the groups concerned, and enqueue the groups.

`kube/informers.py` gives the handlers of each kind to its informer, which calls them; kopf calls those of groups and
policies, too (`kube/client/kopf_watch.py`).

`expected` returns the objects that exist as far as the operator knows. Some of them may not be in the informer's cache:
kopf reported them, or this operator wrote them. After each list, the informer calls `on_delete` for every expected
object that the list lacks.

`on_group_changed` publishes a change to the page, and drops the counters of a deleted group. It is called here because
no reconcile follows, and publishes, on an operator that does not lead or after a deletion.
"""

from collections.abc import Callable, Collection, Iterator

from rota.aio import loop_time
from rota.kube.client.objects import ConfigMap, CustomResource, Deployment, ObjectKey, Pod, assignment_name
from rota.kube.reconcile.controller import Controller

OnGroupChange = Callable[[ObjectKey], None]  # called with the key of a group that changed


class GroupHandlers:
    """Handles ConsumerGroups."""

    def __init__(self, controller: Controller, on_group_changed: OnGroupChange) -> None:
        self._controller = controller
        self._on_group_changed = on_group_changed

    def on_upsert(self, body: CustomResource) -> None:
        """Handle an added or changed ConsumerGroup."""
        self._update(body)
        self._on_group_changed(body.metadata.key)

    def on_delete(self, body: CustomResource) -> None:
        """Handle a deleted ConsumerGroup."""
        self._mark_deleted(body)
        self._on_group_changed(body.metadata.key)

    def expected(self) -> list[CustomResource]:
        """Return the ConsumerGroups that exist as far as the operator knows."""
        return [group.body for group in self._controller.groups.values() if group.body]

    def _update(self, body: CustomResource) -> None:
        key = body.metadata.key
        group = self._controller.get_or_add(key).group
        previous = group.body
        if _is_older(body, previous):
            return
        if previous and previous.metadata.uid != body.metadata.uid:
            self._mark_deleted(previous)
            group = self._controller.get_or_add(key).group  # the controller may have forgotten it
        self._controller.specs.set_spec(group, body)
        if previous is None or previous.metadata.generation != body.metadata.generation:
            self._controller.queue.enqueue(key)

    def _mark_deleted(self, body: CustomResource) -> None:
        """Mark a group as deleted, unless its ConsumerGroup was recreated and has another uid now."""
        queued = self._controller.queue.groups.get(body.metadata.key)
        if queued and queued.group.body and queued.group.body.metadata.uid == body.metadata.uid:
            self._controller.mark_deleted(queued)


class PolicyHandlers:
    """Handles RebalancePolicies."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._policies = controller.specs.policies

    def on_upsert(self, body: CustomResource) -> None:
        """Handle an added or changed RebalancePolicy."""
        previous = self._policies.get(body.metadata.key)
        if _is_older(body, previous):
            return
        self._policies[body.metadata.key] = body
        if not body.has_same_spec(previous):  # metadata and status concern no group
            self._enqueue_groups(body)

    def on_delete(self, body: CustomResource) -> None:
        """Handle a deleted RebalancePolicy; a recreated one has another uid and stays."""
        current = self._policies.get(body.metadata.key)
        if current and current.metadata.uid == body.metadata.uid:
            del self._policies[body.metadata.key]
            self._enqueue_groups(body)

    def expected(self) -> Collection[CustomResource]:
        """Return the policies that exist as far as the operator knows."""
        return self._policies.values()

    def _enqueue_groups(self, policy: CustomResource) -> None:
        for key, group in self._controller.groups.items():
            if group.body and (group.namespace, group.body.policy_name) == policy.metadata.key:
                self._controller.specs.set_spec(group, group.body)
                self._controller.queue.enqueue(key)

    def groups_by_policy(self) -> dict[ObjectKey, list[str]]:
        """Return the names of the groups that refer to each policy."""
        groups: dict[ObjectKey, list[str]] = {}
        for (namespace, name), group in self._controller.groups.items():
            policy = group.body.policy_name if group.body else ""
            if policy:
                groups.setdefault((namespace, policy), []).append(name)
        return groups


class PodHandlers:
    """Handles pods with the group label."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._last_labels: dict[str, str] = {}  # last seen group label, by pod uid

    def on_upsert(self, pod: Pod) -> None:
        """Handle an added or changed pod."""
        keys = self._groups_of(pod)  # called before the label is replaced, as it reads the previous one
        self._last_labels[pod.metadata.uid] = pod.labelled_group
        for key in keys:
            queued = self._controller.get_or_add(key)
            state = queued.group.pods.get(pod.metadata.name)
            previous = state.pod if state else None
            queued.group.pods.upsert(pod, loop_time())
            if previous is None or previous.planning_fields != pod.planning_fields:  # including readiness
                if previous and previous.ready and not pod.ready:
                    # The member may hang: a poll that it holds would hide its silence. The reconcile starts a new poll.
                    queued.watchers.cancel_polls(pod.metadata.name)
                self._controller.queue.enqueue(key)
                self._controller.poll_limiter.prioritize(queued.group)

    def on_delete(self, pod: Pod) -> None:
        """Handle a pod that left the watch: it was deleted, or lost its label."""
        for key in self._groups_of(pod):
            group = self._controller.get_or_add(key).group
            group.mark_pod_missing(pod)
            self._controller.queue.enqueue(key)
            self._controller.poll_limiter.prioritize(group)
            self._controller.forget_if_empty(key)
        self._last_labels.pop(pod.metadata.uid, None)

    def expected(self) -> Collection[Pod]:
        """Return no pods: the informer's cache has all that the operator knows."""
        return ()

    def _groups_of(self, pod: Pod) -> list[ObjectKey]:
        """Return the groups of the pod's label, of its previous label, and of the assignment its sidecar mounts.

        Only the label names a group that is not known yet, as its ConsumerGroup may arrive later than its pods.
        """
        keys = [pod.metadata.group_key] if pod.labelled_group else []
        previous_label = self._last_labels.get(pod.metadata.uid, "")
        for name in (previous_label, pod.mounted_group):
            key = (pod.metadata.namespace, name)
            if key in self._controller.queue.groups and key not in keys:
                keys.append(key)
        return keys


class AssignmentHandlers:
    """Handles the ConfigMaps of groups' assignments."""

    def __init__(self, controller: Controller, on_group_changed: OnGroupChange) -> None:
        self._controller = controller
        self._on_group_changed = on_group_changed

    def on_upsert(self, config_map: ConfigMap) -> None:
        """Handle an added or changed assignment, the operator's own writes included."""
        key = config_map.metadata.group_key
        if _is_assignment(config_map):
            group = self._controller.get_or_add(key).group  # its ConsumerGroup may arrive later
            previous = group.stored_assignment
            group.set_assignment(config_map)
            if group.stored_assignment is not previous:
                self._controller.queue.enqueue(key)
        self._on_group_changed(key)

    def on_delete(self, config_map: ConfigMap) -> None:
        """Handle a deleted assignment, unless it was recreated."""
        key = config_map.metadata.group_key
        version = config_map.metadata.version_number
        group = self._controller.group(key)
        if group and _is_assignment(config_map) and version >= group.stored_assignment.version_number:
            group.mark_assignment_deleted(version)
            self._controller.queue.enqueue(key)
            self._controller.forget_if_empty(key)
        self._on_group_changed(key)

    def expected(self) -> Iterator[ConfigMap]:
        """Return the assignments that groups know, without contents."""
        for group in self._controller.groups.values():
            if metadata := group.assignment.metadata:
                yield ConfigMap(metadata)


class DeploymentHandlers:
    """Handles the Deployments of groups; a reconcile reverts manual changes of them."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def on_upsert(self, deployment: Deployment) -> None:
        """Handle an added or changed Deployment of a group."""
        if self._controller.deployments.on_upsert(deployment):
            self._controller.queue.enqueue(deployment.metadata.group_key)

    def on_delete(self, deployment: Deployment) -> None:
        """Handle a deleted Deployment of a group."""
        self._controller.deployments.on_delete(deployment)
        self._controller.queue.enqueue(deployment.metadata.group_key)

    def expected(self) -> Collection[Deployment]:
        """Return the Deployments that the operator has seen or written."""
        return self._controller.deployments.expected


class EventHandlers:
    """The handlers of all watched kinds."""

    def __init__(self, controller: Controller, on_group_changed: OnGroupChange = lambda _: None) -> None:
        """`on_group_changed` is called after each event of a ConsumerGroup or an assignment."""
        self.groups = GroupHandlers(controller, on_group_changed)
        self.policies = PolicyHandlers(controller)
        self.pods = PodHandlers(controller)
        self.assignments = AssignmentHandlers(controller, on_group_changed)
        self.deployments = DeploymentHandlers(controller)


def _is_older(body: CustomResource, known: CustomResource | None) -> bool:
    """Whether an object is older than the known version: lists, watches and own writes arrive in any order."""
    return known is not None and body.metadata.version_number < known.metadata.version_number


def _is_assignment(config_map: ConfigMap) -> bool:
    """Whether a ConfigMap has the name of its group's assignment."""
    _, group_name = config_map.metadata.group_key
    return config_map.metadata.name == assignment_name(group_name)
