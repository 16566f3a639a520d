"""State of one group: its spec, pods, stored assignment and brokers, combined into the planner's snapshot.

Nothing here sends requests: event handlers, pollers and reconciles pass in their results. All times are those of the
event loop's clock, which never jumps and may restart: a new leader observes everything once before it writes.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from rota.delivery_totals import GroupDeliveries
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, Custom, Metadata, Pod, record_of
from rota.kube.state.broker_state import BrokerState, ClientIds
from rota.kube.state.member_problems import member_problems
from rota.kube.state.pod_state import GroupPods
from rota.kube.state.resolved_spec import ResolvedSpec, resolve_spec
from rota.kube.state.status_throttle import StatusThrottle
from rota.kube.state.stored_assignment import RecordLimits, StoredAssignment
from rota.lag import lowest_offsets
from rota.model import RETRY, Holder, Queue, Reason, Verdict
from rota.planner import Snapshot
from rota.planner.status import conditions
from rota.spec import GroupSpec, resolved
from rota.spec.consumer_settings import mismatches

LINGER_SECONDS = 1.0  # until a pod that may have ended is read again
REREAD_SECONDS = 60.0  # until an assignment that could not be used is read again
NO_WEIGHTS: Mapping[Queue, float] = {}


class Group:
    """State of one group; its ConsumerGroup may not have been seen yet, or may be deleted."""

    def __init__(self, namespace: str, name: str, record_limits: RecordLimits | None = None) -> None:
        self.namespace, self.name = namespace, name
        self._record_limits = record_limits or RecordLimits()
        self.body: Custom | None = None
        self.wish = ResolvedSpec()
        self._read_of: tuple[Custom, Custom | None] | None = None  # the group and policy that `wish` was read from
        self.good: GroupSpec | None = None  # the last valid spec
        self.pods = GroupPods(name)
        self._settings, self._settings_since = "", 0.0  # the stored settings as last seen, and since when
        self.record = StoredAssignment()
        self._client_ids = ClientIds(self.pods)
        self.fleet: tuple[Verdict, ...] = ()  # problems with the Deployment that the operator runs
        self.key_problems: tuple[Verdict, ...] = ()
        self._reached: dict[str, float] = {}  # since when at least one member reaches each broker
        self.awaited: frozenset[str] = frozenset()
        self.outdated = False  # the stored assignment may differ from `record` and must be read
        self._early: ConfigMap | None = None  # the assignment that arrived before its ConsumerGroup
        self.looked = False  # everything was observed once since this operator began to lead
        self.fresh = False  # and again, after the assignment was found missing or damaged
        self.pace = StatusThrottle()
        self.deliveries = GroupDeliveries()
        self.weights: Mapping[Queue, float] = {}  # its queues' weights as last measured

    @property
    def spelled(self) -> str:
        """`namespace/name`, as in assignment documents."""
        return f"{self.namespace}/{self.name}"

    @property
    def uid(self) -> str:
        """Uid of the ConsumerGroup; empty if it does not exist."""
        return self.body.metadata.uid if self.body else ""

    @property
    def version(self) -> str:
        """The resourceVersion of the ConsumerGroup as last seen; empty if it does not exist."""
        return self.body.metadata.resource_version if self.body else ""

    def is_before(self, newer: Metadata) -> bool:
        """Whether `newer` is a later version of the same ConsumerGroup object."""
        current = self.body.metadata if self.body else Metadata("")
        return current.uid == newer.uid and current.version < newer.version

    def begin(self) -> None:
        """Reset observations and timers: leadership has changed, or the ConsumerGroup was recreated."""
        self.looked = self.fresh = self.outdated = False
        self.pace = StatusThrottle()
        self.deliveries = GroupDeliveries(_published_problem(self.written, Reason.DELIVERIES_FAILING))
        self.pods.restart()

    # Updates.

    def wants(self, body: Custom, policy: Custom | None) -> None:
        """Set the newest versions of the ConsumerGroup and its policy; a recreated group starts without assignment."""
        is_another = self.body is None or self.body.metadata.uid != body.metadata.uid
        self.body = body
        if is_another:
            self._forget_record()  # it belonged to the deleted ConsumerGroup
            self.pods.forget_missed()
            self.pods.unsure, self.pods.gone, self.fleet, self.good = (), set(), (), None
            self.begin()
        previous, self._read_of = self._read_of, (body, policy)
        if previous is None or not (body.has_spec_of(previous[0]) and _is_same(policy, previous[1])):
            self.wish = resolve_spec(body, policy)
        self.good = self.wish.spec or self.good
        if self._early:
            self.keep(self._early)
            self._early = None

    def miss(self, pod: Pod) -> None:
        """Handle a pod that left the watch: it was deleted, or lost its label."""
        self.pods.leave(pod, read_later=self.body is not None)

    @property
    def seconds_to_next_read(self) -> float:
        """Seconds until objects that no watch reports are read again."""
        if self.pods.missed:
            return LINGER_SECONDS
        return math.inf if self.record.ours else REREAD_SECONDS

    def keep(self, config_map: ConfigMap | None) -> None:
        """Set the stored assignment (None: it does not exist); a version older than the known one is ignored."""
        self.outdated = False
        if self.body is None:
            # A ConfigMap that exceeds the budget is read later.
            self._early = config_map if config_map and self._record_limits.may_keep(config_map) else None
        elif config_map is None:
            self._forget_record()
            self.fresh = False
        elif config_map.metadata.version > self.record.number:
            self.record, self.fresh = self._record_limits.read(config_map, self.name, self.uid), False
        self.forget_ended()

    @property
    def record_metadata(self) -> Metadata | None:
        """Name and version of the ConfigMap that it is read from; None if there is none, or no watch may report it."""
        if not self.record.version or self.record.damage or not self.record.ours:
            return None
        labels = {GROUP_LABEL: self.name}
        return Metadata(
            record_of(self.name), namespace=self.namespace, resource_version=self.record.version, labels=labels
        )

    def end(self) -> None:
        """Handle the deletion of the ConsumerGroup."""
        self.body = None
        self._forget_record()
        self.pods.forget_missed()

    @property
    def record(self) -> StoredAssignment:
        """The stored assignment."""
        return self._record

    @record.setter
    def record(self, record: StoredAssignment) -> None:
        self._record, self.pods.assignment = record, record.document

    def _forget_record(self) -> None:
        self.record = StoredAssignment()
        self._record_limits.forget((self.namespace, self.name))

    @property
    def at_rest(self) -> bool:
        """Whether the assignment's members are exactly the known pods and no queue moves; this needs no plan."""
        document = self.record.document
        uids = {name: state.pod.metadata.uid for name, state in self.pods.items()}
        if document is None or document.releasing:
            return False
        return uids == {name: share.uid for name, share in document.members.items()} and not self.pods.missed

    @property
    def at_broker(self) -> str:
        """Name of the consumer group at the brokers; it never changes, so an invalid spec does not hide it."""
        if self.good:
            return self.good.group or self.name
        return resolved.read_group_name(self.record.settings) or self.name

    @property
    def topics(self) -> frozenset[str]:
        """The topics that its members read: its subscriptions and its retry topic."""
        subscribed = [subscription.topic for subscription in self.good.subscriptions] if self.good else []
        return frozenset([*subscribed, RETRY + self.at_broker])

    @property
    def reported(self) -> dict[Queue, int]:
        """Offsets of the slowest member of a Broadcasting group; pods that have not started are ignored."""
        members = self.record.shares if self.record.broadcasting else {}
        running = [state for state in self.pods.values() if state.counts and state.pod.started]
        return lowest_offsets(
            [state.offsets for state in running if Holder(state.pod.metadata.name, state.pod.metadata.uid) in members]
        )

    def names(self, now: float) -> Collection[str]:
        """Return the suffixes of the client ids of the group's own members."""
        return self._client_ids.suffixes(self.record, now)

    def locks_left(self) -> list[tuple[str, list[Queue]]]:
        """Return the locks of ended members to release, by client id; only an Orderly group locks its queues."""
        return self._client_ids.locks_left(self.record) if self.wish.spec and self.wish.spec.orderly else []

    def forget_ended(self) -> None:
        """Forget deleted pods that the assignment does not name any more."""
        if self.record.document:
            self.pods.forget_gone(self.record.uids)
            self._client_ids.forget_gone(self.record.uids)

    # Input of the planner.

    @property
    def weighs_queues(self) -> bool:
        """Whether its policy balances queues by the traffic of each."""
        return self.wish.policy is not None and self.wish.policy.strategy == "Balanced"

    def snapshot(
        self,
        now: float,
        broker: BrokerState,
        rooms: Mapping[str, str],
        lag: int | None = None,
        weights: Mapping[Queue, float] | None = NO_WEIGHTS,
    ) -> Snapshot:
        """Return the planner's snapshot; `weights` is None if the policy needs queue weights and they are unknown."""
        specs, record = self.wish, self.record
        reached = {broker for state in self.pods.values() for broker in state.reaches}
        self._reached = {broker: self._reached.get(broker, now) for broker in reached}
        pods = (state.shown(now, rooms.get(name), self._reached) for name, state in sorted(self.pods.items()))
        of_members = member_problems(self.pods, self.key_problems)
        if self.deliveries.problem:
            of_members.append(self.deliveries.problem)
        of_consumers = mismatches(specs.spec, broker.unmanaged)
        return Snapshot(
            group=self.spelled,
            spec=specs.spec if record.ours else None,  # nothing can be written, so nothing is decided
            policy=specs.policy,
            document=record.document,
            damage=record.damage,
            settings=record.settings,
            settings_age=self._settings_age(now),
            wanted_settings=self.wanted_settings,
            fresh=self.fresh,
            pods=tuple(pods),
            replaced=frozenset(self.pods.replaced),
            gone=frozenset(self.pods.gone),
            views=broker.views,
            foreigners=broker.foreigners,
            queue_weights=weights,
            lag=lag,
            problems=(*specs.problems, *record.problems, *self.fleet, *broker.problems, *of_members, *of_consumers),
            status=self.status,
            observed=self.body.metadata.generation if self.body else 0,
            max_schema=self._record_limits.max_schema,
        )

    def _settings_age(self, now: float) -> float:
        """Return the seconds since the stored settings changed, as far as this operator has seen."""
        if self.record.settings != self._settings:
            self._settings, self._settings_since = self.record.settings, now
        return now - self._settings_since

    @property
    def status(self) -> Mapping[str, Any]:
        """The status from the last plan, published or not yet."""
        return self.pace.newest(self.written)

    @property
    def written(self) -> Mapping[str, Any]:
        """The status that is published."""
        return self.body.status if self.body else {}

    @property
    def wanted_settings(self) -> str:
        """The settings for sidecars that the ConfigMap should hold next to the document."""
        if self.wish.spec is None:
            return self.record.settings
        policy = self.wish.policy
        drain_timeout = policy.handover.drain_timeout if policy else resolved.read_drain_timeout(self.record.settings)
        created = self.body.metadata.creation_timestamp if self.body else None
        return resolved.write_settings(self.name, self.wish.spec, drain_timeout, created)


def _is_same(policy: Custom | None, previous: Custom | None) -> bool:
    return policy.has_spec_of(previous) if policy else previous is None


def _published_problem(status: Mapping[str, Any], reason: Reason) -> str:
    """Return the message of a problem's condition; empty if the problem is over or never was."""
    condition = conditions.present(status, reason)
    return str(condition.get("message", "")) if condition else ""
