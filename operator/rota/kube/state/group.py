"""State of one group: its spec, pods, stored assignment and brokers, combined into the planner's snapshot.

Nothing here sends requests: event handlers, pollers and reconciles pass in their results. All times are those of the
event loop's monotonic clock, which mean nothing to another process: so a new leader starts all timers anew, and writes
only after it has observed everything once.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rota.delivery_totals import GroupDeliveries
from rota.kube.client.objects import ConfigMap, CustomResource, Metadata, Pod
from rota.kube.state.broker_state import BrokerState, ClientIds
from rota.kube.state.member_problems import member_problems
from rota.kube.state.pod_state import GroupPods
from rota.kube.state.resolved_spec import ResolvedSpec, resolve_spec
from rota.kube.state.status_throttle import StatusThrottle
from rota.kube.state.stored_assignment import AssignmentLimits, AssignmentState, StoredAssignment
from rota.lag import lowest_offsets
from rota.model import RETRY_TOPIC_PREFIX, Finding, Queue, Reason
from rota.planner import PodSnapshot, Snapshot
from rota.planner.status import conditions
from rota.spec import GroupSpec, resolved
from rota.spec.consumer_settings import find_mismatches

RECHECK_MISSING_SECONDS = 1.0  # until a pod that left the watch is read again
REREAD_ASSIGNMENT_SECONDS = 60.0  # until an assignment that could not be used is read again
NO_WEIGHTS: Mapping[Queue, float] = {}  # for a group whose policy needs no queue weights


class AppliedTemplate(NamedTuple):
    """The ConsumerGroup's `metadata.generation` when its Deployment was last applied, and the Deployment's state."""

    generation: int = 0
    is_rolling_out: bool = False


class Group:
    """State of one group; its ConsumerGroup may not have been seen yet, or may be deleted."""

    def __init__(self, namespace: str, name: str, assignment_limits: AssignmentLimits | None = None) -> None:
        self.namespace = namespace
        self.name = name
        self.body: CustomResource | None = None
        self.resolved_spec = ResolvedSpec()
        self._parsed_body: CustomResource | None = None  # the group and the policy that `resolved_spec` was parsed from
        self._parsed_policy: CustomResource | None = None
        self.last_valid_spec: GroupSpec | None = None
        self.pods = GroupPods(name)
        # The ConfigMap; `stored_assignment` returns its content, and the content's `document` is the assignment.
        self.assignment = AssignmentState(namespace, name, assignment_limits or AssignmentLimits(), self.pods)
        self.client_ids = ClientIds(self.pods, self.assignment)
        self.deployment_problems: tuple[Finding, ...] = ()  # problems with the Deployment that the operator runs
        self.rollout = AppliedTemplate()
        self.key_problems: tuple[Finding, ...] = ()  # why the Secret with the members' keys could not be written
        # By broker, since when any member reaches it: so a broker that is down is no sign that a member is cut off.
        self._broker_reached_since: dict[str, float] = {}
        self.members_to_poll: frozenset[str] = frozenset()  # members on whose reports the last plan waits: long polls
        # Whether everything was observed since this operator began to lead, and since another client last wrote the
        # assignment.
        self.was_observed = False
        self.observation_resets = 0  # calls of `_require_observation`: compared by a running observation
        self.status_throttle = StatusThrottle()
        self.deliveries = GroupDeliveries()
        self.queue_weights: Mapping[Queue, float] = {}  # traffic by queue, as last measured

    @property
    def namespaced_name(self) -> str:
        """`namespace/name`, as in assignment documents."""
        return f"{self.namespace}/{self.name}"

    @property
    def uid(self) -> str:
        """Uid of the ConsumerGroup; empty if it does not exist."""
        return self.body.metadata.uid if self.body else ""

    def is_older_than(self, newer: Metadata) -> bool:
        """Whether `newer` is a later version of the same ConsumerGroup object."""
        current = self.body.metadata if self.body else Metadata("")
        return current.uid == newer.uid and current.version_number < newer.version_number

    def reset_observations(self) -> None:
        """Reset observations and timers: leadership has changed, or the ConsumerGroup was recreated."""
        self._require_observation()
        self.assignment.was_everything_refetched = False  # the planner rebuilds no assignment before that
        self.assignment.is_outdated = False
        self.assignment.requested = None
        self.rollout = AppliedTemplate()
        self.status_throttle = StatusThrottle()
        # Keeps a published problem for a while, until members' deliveries show whether it is over.
        self.deliveries = GroupDeliveries(_published_problem(self.published_status, Reason.DELIVERIES_FAILING))
        self.pods.reset_reports()

    def _require_observation(self) -> None:
        """Require that everything is observed before the next plan; an observation that is running does not count."""
        self.was_observed = False
        self.observation_resets += 1

    # Updates.

    def set_spec(self, body: CustomResource, policy: CustomResource | None) -> None:
        """Set the newest versions of the ConsumerGroup and its policy; a recreated group starts without assignment."""
        is_new_object = self.body is None or self.body.metadata.uid != body.metadata.uid
        self.body = body
        if is_new_object:
            self.assignment.clear()  # it belonged to the deleted ConsumerGroup
            self.assignment.highest_generation = 0
            self.pods.forget_missing()
            self.pods.verify_ended = ()
            self.pods.deleted_uids = set()
            self.deployment_problems = ()
            self.last_valid_spec = None
            self.reset_observations()
        if not (body.has_same_spec(self._parsed_body) and _has_same_spec(policy, self._parsed_policy)):
            self.resolved_spec = resolve_spec(body, policy)
        self._parsed_body = body
        self._parsed_policy = policy
        self.last_valid_spec = self.resolved_spec.spec or self.last_valid_spec
        if self.assignment.unclaimed_config_map:
            self.set_assignment(self.assignment.unclaimed_config_map)
            self.assignment.unclaimed_config_map = None

    def mark_pod_missing(self, pod: Pod) -> None:
        """Handle a pod that left the watch: it was deleted, or lost its label."""
        self.pods.mark_missing(pod, read_later=self.body is not None)

    @property
    def seconds_to_next_reread(self) -> float:
        """Seconds until pods that left the watch, or an assignment that cannot be used, are read again."""
        if self.pods.missing:
            return RECHECK_MISSING_SECONDS
        return math.inf if self.stored_assignment.is_writable else REREAD_ASSIGNMENT_SECONDS

    def set_assignment(self, config_map: ConfigMap | None) -> None:
        """Set the stored assignment; None: its ConfigMap does not exist, and the planner will request a refetch.

        A version that another client wrote may be a restored old copy. Only reports that are read after it show that:
        they name a later generation.
        """
        version_before = self.stored_assignment.resource_version
        self.assignment.set(config_map, self.body.metadata.uid if self.body else None)
        if self.stored_assignment.resource_version not in {"", version_before}:
            if self.assignment.is_own:
                self.assignment.requested = self.stored_assignment.document  # equal: frees one of the two
            else:
                self.assignment.requested = None
                self._require_observation()
        self.forget_deleted_pods()

    def mark_assignment_deleted(self, version: int) -> None:
        """Handle a ConfigMap that left the watch: it was deleted, or lost its label."""
        self.assignment.deleted_version = version
        self.set_assignment(None)

    def mark_deleted(self) -> None:
        """Handle the deletion of the ConsumerGroup."""
        self.body = None
        self.assignment.clear()
        self.pods.forget_missing()

    @property
    def stored_assignment(self) -> StoredAssignment:
        """The ConfigMap as last seen, parsed; it may be outdated (`assignment.is_outdated`)."""
        return self.assignment.stored

    @property
    def is_at_rest(self) -> bool:
        """Whether the assignment's members are exactly the known pods and no queue moves.

        Other groups are urgent: a new leader observes and plans them first.
        """
        document = self.stored_assignment.document
        if document is None or document.releasing or self.pods.missing:
            return False
        return self.pods.holders == self.stored_assignment.shares.keys()

    @property
    def consumer_group(self) -> str:
        """Name of the consumer group at the brokers.

        The name is immutable: while the spec is invalid, use that of the last valid spec or of the stored settings.
        """
        if self.last_valid_spec:
            return self.last_valid_spec.group or self.name
        return resolved.decode_group_name(self.stored_assignment.settings) or self.name

    @property
    def topics(self) -> frozenset[str]:
        """The topics that the members read: the group's subscriptions and its retry topic."""
        topics = {RETRY_TOPIC_PREFIX + self.consumer_group}
        if self.last_valid_spec:
            topics.update(self.last_valid_spec.topics)
        return frozenset(topics)

    @property
    def reported_offsets(self) -> dict[Queue, int]:
        """For a Broadcasting group, the lowest offset of each queue that all its running members report.

        Members that are terminating or have lost the label do not count.
        """
        if not self.stored_assignment.is_broadcasting:
            return {}
        members = self.stored_assignment.shares
        running = [state for state in self.pods.values() if state.is_staying and state.pod.started]
        return lowest_offsets([state.offsets for state in running if state.pod.holder in members])

    def forget_deleted_pods(self) -> None:
        """Forget deleted pods that the assignment does not name any more."""
        if self.stored_assignment.document:
            self.pods.forget_deleted(self.stored_assignment.uids)
            self.client_ids.forget_deleted(self.stored_assignment.uids)

    # Input of the planner.

    def snapshot(
        self,
        now: float,
        broker: BrokerState,
        rooms_by_pod: Mapping[str, str],
        lag: int | None = None,
        weights: Mapping[Queue, float] | None = NO_WEIGHTS,
    ) -> Snapshot:
        """Return the planner's snapshot. `rooms_by_pod` are machine rooms.

        `weights` are NO_WEIGHTS if the policy needs none, and None if it needs them and they are unknown.
        """
        resolved_spec = self.resolved_spec
        stored = self.stored_assignment
        self._update_broker_reached_since(now)
        pods: list[PodSnapshot] = []
        for name, state in sorted(self.pods.items()):
            pods.append(state.to_planner_pod(now, rooms_by_pod.get(name), self._broker_reached_since))
        member_findings = member_problems(self.pods, self.key_problems)
        if self.deliveries.problem:
            member_findings.append(self.deliveries.problem)
        consumer_findings = find_mismatches(resolved_spec.spec, broker.unmanaged_settings)
        return Snapshot(
            group=self.namespaced_name,
            # Without a spec the planner decides nothing: a decision could not be written.
            spec=resolved_spec.spec if stored.is_writable else None,
            policy=resolved_spec.policy,
            document=stored.document,
            damage=stored.damage,
            highest_stored_generation=self.assignment.highest_generation,
            settings=stored.settings,
            settings_age=self.assignment.observe_settings_age(now),
            desired_settings=self.desired_settings,
            refetched=self.assignment.was_everything_refetched,
            pods=tuple(pods),
            replaced_holders=frozenset(self.pods.replaced),
            deleted_uids=frozenset(self.pods.deleted_uids),
            views=broker.views,
            unmanaged_consumers=broker.unmanaged_ids,
            queue_weights=weights,
            lag=lag,
            problems=(
                *resolved_spec.problems,
                *stored.problems,
                *self.deployment_problems,
                *broker.problems,
                *member_findings,
                *consumer_findings,
            ),
            status=self.latest_status,
            observed_generation=self.body.metadata.generation if self.body else 0,
            rolling_out=self._is_rolling_out,
            max_schema=self.assignment.limits.max_schema,
        )

    def _update_broker_reached_since(self, now: float) -> None:
        """Update since when each broker is reached by at least one member; drop brokers that no member reaches."""
        reached_since: dict[str, float] = {}
        for state in self.pods.values():
            for broker_name in state.reachable_brokers:
                reached_since[broker_name] = self._broker_reached_since.get(broker_name, now)
        self._broker_reached_since = reached_since

    @property
    def _is_rolling_out(self) -> bool | None:
        """Whether the group's Deployment is being rolled out; None if it was not applied for the newest spec yet."""
        spec = self.resolved_spec.spec
        if self.body is None or spec is None or spec.template is None:
            return False
        return self.rollout.is_rolling_out if self.rollout.generation == self.body.metadata.generation else None

    @property
    def latest_status(self) -> Mapping[str, Any]:
        """The status from the last plan, whether or not it is published yet."""
        return self.status_throttle.newest(self.published_status)

    @property
    def published_status(self) -> Mapping[str, Any]:
        """The status that is published."""
        return self.body.status if self.body else {}

    @property
    def desired_settings(self) -> str:
        """The sidecars' settings to be stored next to the document; if the spec is invalid, those that are stored."""
        if self.resolved_spec.spec is None:
            return self.stored_assignment.settings
        created = self.body.metadata.creation_timestamp if self.body else None
        return resolved.encode_settings(self.name, self.resolved_spec.spec, self.drain_timeout, created)

    @property
    def drain_timeout(self) -> float:
        """The policy's drain timeout in seconds; without a valid policy, that of the stored settings."""
        if self.resolved_spec.policy:
            return self.resolved_spec.policy.handover.drain_timeout
        return resolved.decode_drain_timeout(self.stored_assignment.settings)


def _has_same_spec(policy: CustomResource | None, previous: CustomResource | None) -> bool:
    return policy.has_same_spec(previous) if policy else previous is None


def _published_problem(status: Mapping[str, Any], reason: Reason) -> str:
    """Return the message of a problem's condition; empty if the problem is over or never was."""
    condition = conditions.find_condition(status, reason)
    return str(condition.get("message", "")) if condition else ""
