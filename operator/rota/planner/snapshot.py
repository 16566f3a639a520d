"""Input and output of the planner: the snapshot of a group, and the plan for it."""

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rota.documents import SCHEMA, Assignment
from rota.handover import HolderEvidence
from rota.model import Holder, Poke, Queue, Reason, Verdict
from rota.ranges import RangedQueues
from rota.reports import Report
from rota.spec import GroupSpec, PolicySpec


@dataclass(frozen=True)
class DecodedReport:
    """A decoded member report; its queue ranges are parsed at most once."""

    report: Report

    @cached_property
    def process(self) -> int:
        """The number of the sidecar process that sent the report; see `Report.process`."""
        return self.report.process

    @cached_property
    def held(self) -> AbstractSet[Queue]:
        """The queues that the member consumes."""
        return RangedQueues(self.report.held)

    @cached_property
    def working(self) -> AbstractSet[Queue]:
        """The queues that the member may still deliver from or commit for."""
        return RangedQueues(self.report.held, self.report.releasing) if self.report.releasing else self.held


NEVER = Poke()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of the group. Durations come from a monotonic clock; they may restart from 0, as with a new leader."""

    name: str
    uid: str
    started: bool = True  # its sidecar has run
    ready: bool = False
    steady: float = 0.0  # seconds since `ready` last changed
    age: float = 0.0  # seconds since it was first seen
    terminating: bool = False
    leaving: float = 0.0  # seconds since it was first seen terminating
    ended: bool = False  # Succeeded or Failed
    stopped: float | None = None  # seconds since its last heard sidecar process was found to have ended
    restarts: int = 0  # of its sidecar within the last ten minutes
    serving: float = math.inf  # seconds since the present process has both reported and been Ready
    obstacle: str = ""  # why its containers do not run, as Kubernetes reports it
    room: str | None = None
    client_id: str = ""
    heard: DecodedReport | None = None  # its last report, if that names this pod's uid
    unheard: float = 0.0  # seconds since its first unanswered request; 0: none
    doubted: float = 0.0  # seconds for which its responses have been ignored: unsigned or too large
    cut_off: Mapping[str, float] = field(default_factory=dict)  # by unreachable broker: seconds while others reach it
    poke: Poke = NEVER
    poked: float = 0.0  # seconds since the poke last changed

    @property
    def holder(self) -> Holder:
        """The pod as an owner."""
        return Holder(self.name, self.uid)

    @property
    def report(self) -> Report | None:
        """Its last report."""
        return self.heard.report if self.heard else None

    @property
    def incarnation(self) -> int:
        """The number of the sidecar process that reported last; 0: none, or a sidecar of an earlier version."""
        return self.heard.process if self.heard else 0

    @property
    def settings(self) -> str:
        """The digest of the settings that the member reports as in force; empty if it reports none."""
        return self.heard.report.settings if self.heard else ""

    @property
    def reaches(self) -> frozenset[str]:
        """The brokers that the pod reports as reachable; empty while the pod is silent."""
        brokers = self.report.brokers if self.report and not self.unheard else {}
        return frozenset(broker for broker, reached in brokers.items() if reached)

    @property
    def generation(self) -> int:
        """The generation that the pod reports to obey; 0: none, or no report."""
        return self.heard.report.generation if self.heard else 0

    @property
    def seen(self) -> HolderEvidence:
        """The evidence for the handover's proofs."""
        return HolderEvidence(
            ended=self.ended,
            terminating=self.terminating,
            ready=self.ready,
            report=self.report,
            working=self.heard.working if self.heard else frozenset(),
            unheard=self.unheard if self.started else 0.0,  # not polled before it has started
            leaving=self.leaving,
        )


class QueueView(NamedTuple):
    """A broker's positive answer: the queues of a topic, and for how many seconds the answer has been the same."""

    queues: tuple[Queue, ...]
    steady: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The observed state of one group."""

    group: str  # namespace/name
    spec: GroupSpec | None  # None: it is invalid; `problems` has the reason
    policy: PolicySpec | None = field(default_factory=PolicySpec)  # None: as above
    document: Assignment | None = None  # None: missing or damaged
    damage: str = ""  # why the stored record cannot be trusted
    settings: str = ""  # group.json as stored with the document
    settings_age: float = 0.0  # seconds since `settings` changed
    wanted_settings: str = ""  # group.json as it should be
    fresh: bool = False  # pods and reports were read again after the record was found missing or damaged
    pods: tuple[Pod, ...] = ()  # all of them: a new leader lists the pods and polls each one before it watches
    replaced: frozenset[Holder] = frozenset()  # another pod has the name, and the end of this one is not known
    gone: frozenset[str] = frozenset()  # uids known to be deleted or replaced: by an event or a consistent read
    views: Mapping[str, QueueView | None] = field(default_factory=dict)  # by topic, retry topics too; None: no answer
    foreigners: tuple[str, ...] | None = ()  # client ids of unmanaged consumers, with duplicates; None: no answer
    queue_weights: Mapping[Queue, float] | None = field(default_factory=dict)  # None: could not be measured
    member_weights: Mapping[str, float] = field(default_factory=dict)
    lag: int | None = None
    problems: tuple[Verdict, ...] = ()  # found while reading the state: a missing Secret, an unknown topic
    status: Mapping[str, Any] = field(default_factory=dict)  # as the last plan set it
    observed: int = 0  # metadata.generation
    max_schema: int = SCHEMA  # the highest document schema that may be written

    @property
    def is_duplicate(self) -> bool:
        """Whether another ConsumerGroup has the same consumer group, so that this one may own no queue."""
        return any(verdict.reason is Reason.CLAIMED_TWICE for verdict in self.problems)

    @property
    def must_release_all(self) -> bool:
        """Whether the group must give up every queue."""
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
    data: Mapping[str, str | bytes] = field(default_factory=dict)  # the document as the ConfigMap's entry
    for_settings: frozenset[str] = frozenset()  # pods that are poked only for settings, which is not urgent
    pokes: Mapping[str, Poke] = field(default_factory=dict)  # by pod
    drains: tuple[Holder, ...] = ()  # terminating members to ask for their final drain
    awaited: frozenset[str] = frozenset()  # members to poll: the next plan depends on their reports
    confirm: tuple[Holder, ...] = ()  # owners not among the pods: a consistent read decides whether they ended
    reread: bool = False  # the record is missing or damaged: read it, pods and reports again, then replan
    status: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()  # for the journal
    standings: Mapping[str, str] = field(default_factory=dict)  # the member state of each pod
    foreign: frozenset[Queue] = frozenset()  # queues of unmanaged consumers
    held: Verdict | None = None  # why queues that the policy wants elsewhere do not move yet
    problems: tuple[Verdict, ...] = ()  # all of them, the worst first
    again: float = 20.0  # seconds until the next plan, if no event comes before
