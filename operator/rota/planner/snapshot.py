"""Input and output of the planner: the snapshot of a group, and the plan for it.

`rota.kube` builds the snapshot and writes the plan; the pipeline's replays do the same with simulated groups.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rota.documents import ASSIGNMENT_SCHEMA, Assignment
from rota.handover import HolderEvidence
from rota.model import Finding, Holder, Poke, Queue, Reason
from rota.ranges import RangedQueues, to_ranges
from rota.reports import Report
from rota.spec import GroupSpec, Handover, PolicySpec


@dataclass(frozen=True)
class DecodedReport:
    """A decoded member report; its queue ranges are parsed at most once."""

    report: Report

    @cached_property
    def incarnation_number(self) -> int:
        """The number of the sidecar process that sent the report; see `Report.incarnation_number`."""
        return self.report.incarnation_number

    @cached_property
    def held_queues(self) -> AbstractSet[Queue]:
        """The queues that the member consumes."""
        return RangedQueues(self.report.held)

    @cached_property
    def active_queues(self) -> AbstractSet[Queue]:
        """The queues that the member may still deliver from or commit for."""
        return RangedQueues(self.report.held, self.report.releasing) if self.report.releasing else self.held_queues


NO_POKE = Poke()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSnapshot:
    """A pod of the group. Durations come from a monotonic clock; a new leader measures them again from 0."""

    name: str
    uid: str
    started: bool = True  # its sidecar has run
    ready: bool = False
    stable_for: float = 0.0  # seconds since `ready` last changed
    age: float = 0.0  # seconds since it was first seen
    terminating: bool = False
    terminating_for: float = 0.0  # seconds since it was first seen terminating
    ended: bool = False  # Succeeded or Failed
    # Seconds since the sidecar process that reported last was found to have ended; None: it was not.
    stopped_for: float | None = None
    restarts: int = 0  # of its sidecar within the last ten minutes
    serving_for: float = math.inf  # seconds since the present process has both reported and been Ready
    obstacle: str = ""  # why its containers do not run, as Kubernetes reports it
    room: str | None = None  # its machine room, by its own label or its node's; None: unknown
    client_id: str = ""
    decoded_report: DecodedReport | None = None  # its last report, if that names this pod's uid
    unreachable_for: float = 0.0  # seconds since its first unanswered request; 0: none
    rejected_for: float = 0.0  # seconds for which its responses have been ignored: unsigned or too large
    # Brokers that the pod cannot reach, each with the seconds for which only other pods have reached it; 0: none does.
    cut_off_brokers: Mapping[str, float] = field(default_factory=dict)
    poke: Poke = NO_POKE
    poked_for: float = 0.0  # seconds since the poke last changed

    @property
    def holder(self) -> Holder:
        """The pod as an owner."""
        return Holder(self.name, self.uid)

    @property
    def is_running(self) -> bool:
        """Whether its sidecar has run, and the pod has not ended."""
        return self.started and not self.ended

    @property
    def report(self) -> Report | None:
        """Its last report."""
        return self.decoded_report.report if self.decoded_report else None

    @property
    def drains_for_good(self) -> bool:
        """Whether the member reports that it drains for good, since its pod ends."""
        return self.report is not None and self.report.final

    @property
    def incarnation(self) -> int:
        """The number of the sidecar process that reported last; 0: none, or a sidecar of an earlier version."""
        return self.decoded_report.incarnation_number if self.decoded_report else 0

    def is_successor_of(self, incarnation: int) -> bool:
        """Whether the process that reported last is later than process `incarnation`; 0 names no process."""
        return 0 < incarnation < self.incarnation

    @property
    def held_queues(self) -> AbstractSet[Queue]:
        """The queues that the member reports to consume."""
        return self.decoded_report.held_queues if self.decoded_report else frozenset()

    def consumes_exactly(self, queues: Collection[Queue]) -> bool:
        """Whether the member consumes these queues and no others, by its last report."""
        if self.report and self.report.held == to_ranges(queues):  # usual; a report with other ranges is parsed
            return True
        return self.held_queues == frozenset(queues)

    @property
    def active_queues(self) -> AbstractSet[Queue]:
        """The queues that the member may still deliver from or commit for, by its last report."""
        return self.decoded_report.active_queues if self.decoded_report else frozenset()

    @property
    def reachable_brokers(self) -> frozenset[str]:
        """The brokers that the pod reports as reachable; empty while the pod is silent."""
        brokers = self.report.brokers if self.report and not self.unreachable_for else {}
        return frozenset(broker for broker, reached in brokers.items() if reached)

    @property
    def generation(self) -> int:
        """The generation that the pod reports to obey; 0: none, or no report."""
        return self.decoded_report.report.generation if self.decoded_report else 0

    @property
    def evidence(self) -> HolderEvidence:
        """The evidence for the handover's proofs."""
        return HolderEvidence(
            ended=self.ended,
            terminating=self.terminating,
            ready=self.ready,
            report=self.report,
            active_queues=self.active_queues,
            unreachable_for=self.unreachable_for if self.started else 0.0,  # not polled before it has started
            terminating_for=self.terminating_for,
        )

    def is_lost(self, rules: Handover, revoked_for: float = 0.0) -> bool:
        """Whether the pod counts as lost, see `HolderEvidence.is_lost`; one that responds never does."""
        return self.unreachable_for > 0 and self.evidence.is_lost(rules, revoked_for)


def names_of(pods: Iterable[PodSnapshot]) -> frozenset[str]:
    """Return the names of these pods."""
    return frozenset(pod.name for pod in pods)


def brokers_reached_by(pods: Iterable[PodSnapshot]) -> frozenset[str]:
    """Return the brokers that at least one of these pods reports as reachable."""
    return frozenset().union(*(pod.reachable_brokers for pod in pods))


class QueueView(NamedTuple):
    """A topic's route: its queues, and for how many seconds the route has been the same."""

    queues: tuple[Queue, ...]
    stable_for: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The observed state of one group."""

    group: str  # namespace/name
    spec: GroupSpec | None  # None: it is invalid; `problems` has the reason
    policy: PolicySpec | None = field(default_factory=PolicySpec)  # None: it is missing or invalid
    document: Assignment | None = None  # None: not written yet, missing or damaged
    damage: str = ""  # why the stored assignment cannot be trusted
    highest_stored_generation: int = 0  # of all assignments of the group that this operator has seen
    settings: str = ""  # the members' settings, group.json, as stored with the document
    settings_age: float = 0.0  # seconds since `settings` changed
    desired_settings: str = ""  # group.json as it should be
    refetched: bool = False  # pods and reports were read again after the assignment was found missing or damaged
    pods: tuple[PodSnapshot, ...] = ()  # all: a new leader lists them, and polls the running ones, before it plans
    # Holders whose name another pod has now, and which are not known to have ended.
    replaced_holders: frozenset[Holder] = frozenset()
    deleted_uids: frozenset[str] = frozenset()  # uids known to be deleted or replaced: by an event or a consistent read
    views: Mapping[str, QueueView | None] = field(default_factory=dict)  # by topic, retry topics too; None: no response
    unmanaged_consumers: tuple[str, ...] | None = ()  # client ids, with duplicates; None: the broker did not respond
    queue_weights: Mapping[Queue, float] | None = field(default_factory=dict)  # None: could not be measured
    member_weights: Mapping[str, float] = field(default_factory=dict)
    lag: int | None = None
    problems: tuple[Finding, ...] = ()  # found while reading the state: a missing Secret, an unknown topic
    status: Mapping[str, Any] = field(default_factory=dict)  # as the last plan set it
    observed_generation: int = 0  # metadata.generation
    # Whether the group's Deployment is being rolled out; None: it was not applied for this metadata.generation yet.
    rolling_out: bool | None = False
    max_schema: int = ASSIGNMENT_SCHEMA  # the highest document schema that may be written

    @property
    def pods_by_name(self) -> dict[str, PodSnapshot]:
        """The pods by name."""
        return {pod.name: pod for pod in self.pods}

    @property
    def running_pods(self) -> list[PodSnapshot]:
        """The pods whose sidecar has run, and that are not known to have ended."""
        return [pod for pod in self.pods if pod.is_running and pod.uid not in self.deleted_uids]

    @property
    def ended_uids(self) -> frozenset[str]:
        """The uids of all pods that are known to have ended."""
        return self.deleted_uids.union(pod.uid for pod in self.pods if pod.ended)

    @property
    def problem_reasons(self) -> frozenset[Reason]:
        """The reasons of the problems that were found while reading the state."""
        return frozenset(finding.reason for finding in self.problems)

    @property
    def published_conditions(self) -> dict[str, Mapping[str, Any]]:
        """The conditions in the status, by type."""
        return {condition["type"]: condition for condition in self.status.get("conditions") or ()}

    @property
    def last_rebalance(self) -> Mapping[str, Any] | None:
        """The last rebalance in the status; it has `seconds` once it is over."""
        return self.status.get("lastRebalance")

    @property
    def ongoing_rebalance(self) -> Mapping[str, Any] | None:
        """The last rebalance in the status while it is not over; otherwise None."""
        last = self.last_rebalance
        return last if last and "seconds" not in last else None

    @property
    def subscribed_topics(self) -> list[str]:
        """The topics of the subscriptions, also other groups' retry topics; none if the spec is invalid."""
        return self.spec.topics if self.spec else []

    @property
    def routed_queues(self) -> set[Queue]:
        """The queues of all topics for which brokers responded."""
        return set().union(*(view.queues for view in self.views.values() if view))

    @property
    def is_duplicate(self) -> bool:
        """Whether another ConsumerGroup has the same consumer group, so that this one may own no queue."""
        return Reason.DUPLICATE_CONSUMER_GROUP in self.problem_reasons

    @property
    def must_release_all(self) -> bool:
        """Whether the group must release every queue."""
        return self.is_duplicate or (self.spec is not None and self.spec.paused)


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event, as `kubectl describe` shows it."""

    reason: Reason
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything to do now. The document is written first; if that write meets a conflict, nothing else is done."""

    document: Assignment | None = None  # None: the stored one stays
    config_map_data: Mapping[str, str | bytes] = field(default_factory=dict)  # the document as the ConfigMap's entry
    settings_only_pokes: frozenset[str] = frozenset()  # pods that are poked only for settings, which is not urgent
    pokes: Mapping[str, Poke] = field(default_factory=dict)  # by pod
    members_to_drain: tuple[Holder, ...] = ()  # terminating members to ask for their final drain
    members_to_poll: frozenset[str] = frozenset()  # members to poll: the next plan depends on their reports
    verify_ended: tuple[Holder, ...] = ()  # holders not among the pods: a consistent read decides whether they ended
    refetch: bool = False  # the assignment is missing or damaged: read it, pods and reports again, then replan
    status: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    journal_records: tuple[Mapping[str, Any], ...] = ()  # for the journal
    member_states: Mapping[str, str] = field(default_factory=dict)  # the member state of each pod
    unmanaged_queues: frozenset[Queue] = frozenset()  # queues of unmanaged consumers
    hold: Finding | None = None  # why queues that the policy wants elsewhere do not move yet
    problems: tuple[Finding, ...] = ()  # causes before consequences
    requeue_after: float = 20.0  # seconds until the next plan, if no event comes before
