"""One group as it is known now: what was seen of its pods, record and broker, put together for the planner.

Nothing here asks anybody; others tell. All times are measured on the loop's clock, which never jumps, and may start
anew: whoever begins to lead looks at everything once before it writes anything.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from rota.delivery_totals import GroupDeliveries
from rota.kube.client.objects import ConfigMap, Custom, Metadata, Pod
from rota.kube.state.broker_state import AtBroker, ClientIds
from rota.kube.state.member_problems import member_problems
from rota.kube.state.pod_state import GroupPods
from rota.kube.state.resolved_spec import Wish, wish_of
from rota.kube.state.status_throttle import Pace
from rota.kube.state.stored_assignment import Record, RecordLimits
from rota.lag import slowest
from rota.model import RETRY, Holder, Queue, Reason, Verdict
from rota.planner import Snapshot
from rota.planner.status import conditions
from rota.spec import GroupSpec, resolved
from rota.spec.consumer_settings import mismatches

LINGER_SECONDS = 1.0  # before a pod that may have ended is read again
REREAD_SECONDS = 60.0  # before an assignment that could not be used is read again
NO_WEIGHTS: Mapping[Queue, float] = {}


class Group:
    """What is known of one group."""

    def __init__(self, namespace: str, name: str, record_limits: RecordLimits | None = None) -> None:
        """Know nothing yet."""
        self.namespace, self.name = namespace, name
        self._record_limits = record_limits or RecordLimits()
        self.body: Custom | None = None
        self.wish = Wish()
        self._read_of: tuple[Custom, Custom | None] | None = None  # the objects that it was read from
        self.good: GroupSpec | None = None  # the last spec that could be understood
        self.pods = GroupPods(name)
        self._settings, self._settings_since = "", 0.0  # those that were stored last, and since when
        self.record = Record()
        self._client_ids = ClientIds(self.pods)
        self.fleet: tuple[Verdict, ...] = ()  # what is wrong with the pods that we run
        self.key_problems: tuple[Verdict, ...] = ()
        self._reached: dict[str, float] = {}  # which brokers somebody reaches, and since when
        self.awaited: frozenset[str] = frozenset()
        self.outdated = False  # the record is not the one that we know
        self._early: ConfigMap | None = None  # the record, seen before its group: whose it is cannot be told yet
        self.looked = False  # everything was looked at once since we began to lead
        self.fresh = False  # and again, after the record was found missing or damaged
        self.pace = Pace()
        self.deliveries = GroupDeliveries()
        self.weights: Mapping[Queue, float] = {}  # what its queues were last said to weigh

    @property
    def spelled(self) -> str:
        """Its name as documents have it."""
        return f"{self.namespace}/{self.name}"

    @property
    def uid(self) -> str:
        """The group's object's own."""
        return self.body.metadata.uid if self.body else ""

    @property
    def version(self) -> str:
        """The group's object's, as it is known."""
        return self.body.metadata.resource_version if self.body else ""

    def is_before(self, newer: Metadata) -> bool:
        """Whether that is a later version of this very group."""
        before = self.body.metadata if self.body else Metadata("")
        return before.uid == newer.uid and before.version < newer.version

    def begin(self) -> None:
        """Forget all waits: whoever begins to lead waits anew."""
        self.looked = self.fresh = self.outdated = False
        self.pace = Pace()
        self.deliveries = GroupDeliveries(_published_problem(self.written, Reason.DELIVERIES_FAILING))
        self.pods.restart()

    # What is told.

    def wants(self, body: Custom, policy: Custom | None) -> None:
        """Take the group's and its policy's newest texts."""
        is_another = self.body is None or self.body.metadata.uid != body.metadata.uid
        self.body = body
        if is_another:
            self._forget_record()  # it was another one's
            self.pods.forget_missed()
            self.pods.unsure, self.pods.gone, self.fleet, self.good = (), set(), (), None
            self.begin()
        before, self._read_of = self._read_of, (body, policy)
        if before is None or not (body.has_spec_of(before[0]) and _is_same(policy, before[1])):
            self.wish = wish_of(body, policy)
        self.good = self.wish.spec or self.good
        if self._early:
            self.keep(self._early)
            self._early = None

    def miss(self, pod: Pod) -> None:
        """Handle a pod that a watch does not report any more: deleted, or without the label."""
        self.pods.leave(pod, read_later=self.body is not None)

    @property
    def seconds_to_next_read(self) -> float:
        """How soon it is worth reading again what no watch tells."""
        if self.pods.missed:
            return LINGER_SECONDS
        return math.inf if self.record.ours else REREAD_SECONDS

    def keep(self, found: ConfigMap | None) -> None:
        """Take the record as it is; what is older than what is known is no news."""
        self.outdated = False
        if self.body is None:
            self._early = found if found and self._record_limits.may_keep(found) else None  # else it is read later
        elif found is None:
            self._forget_record()
            self.fresh = False
        elif found.metadata.version > self.record.number:
            self.record, self.fresh = self._record_limits.read(found, self.name, self.uid), False
        self.forget_ended()

    def end(self) -> None:
        """Know that the group's object is no more."""
        self.body = None
        self._forget_record()
        self.pods.forget_missed()

    @property
    def record(self) -> Record:
        """The assignment as it is stored."""
        return self._record

    @record.setter
    def record(self, record: Record) -> None:
        self._record, self.pods.assignment = record, record.document

    def _forget_record(self) -> None:
        self.record = Record()
        self._record_limits.forget((self.namespace, self.name))

    @property
    def at_rest(self) -> bool:
        """Whether the record gives queues to just the pods that are there: so much can be told without a plan."""
        document = self.record.document
        there = {name: known.pod.metadata.uid for name, known in self.pods.items()}
        if document is None or document.releasing:
            return False
        return there == {name: share.uid for name, share in document.members.items()} and not self.pods.missed

    @property
    def at_broker(self) -> str:
        """What brokers call it: also while its spec cannot be understood, for that never changes."""
        if self.good:
            return self.good.group or self.name
        return resolved.read_group_name(self.record.settings) or self.name

    @property
    def topics(self) -> frozenset[str]:
        """The topics that its members read: those that it subscribes to, and its retries."""
        subscribed = [it.topic for it in self.good.subscriptions] if self.good else []
        return frozenset([*subscribed, RETRY + self.at_broker])

    @property
    def reported(self) -> dict[Queue, int]:
        """Where the slowest member of a Broadcasting group is: who has not begun yet is none."""
        members = self.record.shares if self.record.broadcasting else {}
        there = [known for known in self.pods.values() if known.counts and known.pod.started]
        return slowest([it.offsets for it in there if Holder(it.pod.metadata.name, it.pod.metadata.uid) in members])

    def names(self, now: float) -> Collection[str]:
        """Return how client ids of our own members end."""
        return self._client_ids.suffixes(self.record, now)

    def locks_left(self) -> list[tuple[str, list[Queue]]]:
        """Return which locks of ended members brokers still hold; an Orderly group locks its queues."""
        return self._client_ids.locks_left(self.record) if self.wish.spec and self.wish.spec.orderly else []

    def forget_ended(self) -> None:
        """Forget deleted pods that the assignment does not name any more."""
        if self.record.document:
            self.pods.forget_gone(self.record.uids)
            self._client_ids.forget_gone(self.record.uids)

    # What the planner is given.

    @property
    def weighs_queues(self) -> bool:
        """Whether its policy goes by what comes to each queue."""
        return self.wish.policy is not None and self.wish.policy.strategy == "Balanced"

    def snapshot(
        self,
        now: float,
        broker: AtBroker,
        rooms: Mapping[str, str],
        lag: int | None = None,
        weights: Mapping[Queue, float] | None = NO_WEIGHTS,
    ) -> Snapshot:
        """Put together what is seen; `weights`: what queues weigh, None where that is not known and should be."""
        wish, record = self.wish, self.record
        reached = {broker for known in self.pods.values() for broker in known.reaches}
        self._reached = {broker: self._reached.get(broker, now) for broker in reached}
        pods = (known.shown(now, rooms.get(name), self._reached) for name, known in sorted(self.pods.items()))
        of_members = member_problems(self.pods, self.key_problems)
        if self.deliveries.problem:
            of_members.append(self.deliveries.problem)
        of_consumers = mismatches(wish.spec, broker.unmanaged)
        return Snapshot(
            group=self.spelled,
            spec=wish.spec if record.ours else None,  # nothing can be written, so nothing is decided
            policy=wish.policy,
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
            problems=(*wish.problems, *record.problems, *self.fleet, *broker.problems, *of_members, *of_consumers),
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
        """What the last plan said of the group, told to people or not yet."""
        return self.pace.newest(self.written)

    @property
    def written(self) -> Mapping[str, Any]:
        """The status that people see."""
        return self.body.status if self.body else {}

    @property
    def wanted_settings(self) -> str:
        """What the sidecar shall be told beside the document."""
        if self.wish.spec is None:
            return self.record.settings
        policy = self.wish.policy
        drain_timeout = policy.handover.drain_timeout if policy else resolved.read_drain_timeout(self.record.settings)
        created = self.body.metadata.creation_timestamp if self.body else None
        return resolved.write_settings(self.name, self.wish.spec, drain_timeout, created)


def _is_same(policy: Custom | None, before: Custom | None) -> bool:
    return policy.has_spec_of(before) if policy else before is None


def _published_problem(status: Mapping[str, Any], reason: Reason) -> str:
    """Return the message of a problem's condition; empty if the problem is over or never was."""
    condition = conditions.present(status, reason)
    return str(condition.get("message", "")) if condition else ""
