"""What the planner is given and what it gives: the world as it was seen, and everything to do about it."""

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rota.documents import SCHEMA, Assignment
from rota.handover import Seen
from rota.model import Holder, Poke, Queue, Reason, Verdict
from rota.ranges import RangedQueues
from rota.reports import Report
from rota.spec import GroupSpec, PolicySpec


@dataclass(frozen=True)
class Heard:
    """A member's report as it was read; its ranges are parsed once, however often they are asked for."""

    report: Report

    @cached_property
    def process(self) -> int:
        """The number of the process that sent it; see `Report.process`."""
        return self.report.process

    @cached_property
    def held(self) -> AbstractSet[Queue]:
        """Every queue that it works."""
        return RangedQueues(self.report.held)

    @cached_property
    def working(self) -> AbstractSet[Queue]:
        """Every queue that it may still deliver from or commit for."""
        return RangedQueues(self.report.held, self.report.releasing) if self.report.releasing else self.held


NEVER = Poke()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of the group. Durations are measured by whoever looks, on a clock that never jumps; they may start anew."""

    name: str
    uid: str
    started: bool = True  # its sidecar has run
    ready: bool = False
    steady: float = 0.0  # seconds since `ready` last changed
    age: float = 0.0  # seconds since it was first seen
    terminating: bool = False
    leaving: float = 0.0  # seconds since it was first seen terminating
    ended: bool = False  # Succeeded or Failed
    stopped: float | None = None  # seconds since its sidecar's process, the one last heard, is seen to have ended
    restarts: int = 0  # of its sidecar within the last ten minutes
    serving: float = math.inf  # seconds since the present process is both heard and Ready
    obstacle: str = ""  # what keeps its containers from running, in Kubernetes' words
    room: str | None = None
    client_id: str = ""
    heard: Heard | None = None  # its last report, if it speaks of this very pod
    unheard: float = 0.0  # seconds since that was read, or since one was first asked for
    doubted: float = 0.0  # seconds since its responses are ignored, for they are unsigned or too large
    # Brokers that it cannot reach, and for how many seconds: since it, or another one that can, said so last.
    cut_off: Mapping[str, float] = field(default_factory=dict)
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
        """Which process of its sidecar was heard last; 0: none, or one of an earlier version."""
        return self.heard.process if self.heard else 0

    @property
    def settings(self) -> str:
        """The digest of the settings that it says are in force; empty if it does not say."""
        return self.heard.report.settings if self.heard else ""

    @property
    def reaches(self) -> frozenset[str]:
        """The brokers that it says it reaches; of who is not heard nothing is known."""
        said = self.report.brokers if self.report and not self.unheard else {}
        return frozenset(broker for broker, reached in said.items() if reached)

    @property
    def generation(self) -> int:
        """The generation that it says it obeys; 0: none, or it was not heard."""
        return self.heard.report.generation if self.heard else 0

    @property
    def seen(self) -> Seen:
        """What the handover's proofs rest on."""
        return Seen(
            ended=self.ended,
            terminating=self.terminating,
            ready=self.ready,
            report=self.report,
            working=self.heard.working if self.heard else frozenset(),
            unheard=self.unheard if self.started else 0.0,  # nobody asks who has not begun
            leaving=self.leaving,
        )


class View(NamedTuple):
    """A positive answer of the broker: which queues a topic has, and for how many seconds it has said just that."""

    queues: tuple[Queue, ...]
    steady: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The world as it was seen for one group."""

    group: str  # namespace/name
    spec: GroupSpec | None  # None: it cannot be understood, `problems` says why
    policy: PolicySpec | None = field(default_factory=PolicySpec)  # None: as above
    document: Assignment | None = None  # None: there is none, or it is damaged
    damage: str = ""  # why the record that is there cannot be believed
    settings: str = ""  # group.json beside it
    settings_age: float = 0.0  # seconds since that changed
    wanted_settings: str = ""  # what it should be
    fresh: bool = False  # pods and reports were read anew after the record was found missing or damaged
    pods: tuple[Pod, ...] = ()  # all: whoever begins to lead lists them and asks each for its report, then watches
    replaced: frozenset[Holder] = frozenset()  # whose name another pod has, and of whose end nothing is known
    gone: frozenset[str] = frozenset()  # uids known to be deleted or replaced: by an event or a consistent read
    views: Mapping[str, View | None] = field(default_factory=dict)  # by topic, retry topics too; None: no answer
    foreigners: tuple[str, ...] | None = ()  # client ids that are not Rota's, each as often as worn; None: no answer
    queue_weights: Mapping[Queue, float] | None = field(default_factory=dict)  # None: could not be measured
    member_weights: Mapping[str, float] = field(default_factory=dict)
    lag: int | None = None
    problems: tuple[Verdict, ...] = ()  # found by those who read the world: a missing Secret, an unknown topic
    status: Mapping[str, Any] = field(default_factory=dict)  # as it stands in the group
    observed: int = 0  # metadata.generation
    max_schema: int = SCHEMA  # of documents that are written

    @property
    def is_duplicate(self) -> bool:
        """Whether the consumer group belongs to another ConsumerGroup, so that this one may own no queue."""
        return any(verdict.reason is Reason.CLAIMED_TWICE for verdict in self.problems)

    @property
    def must_release_all(self) -> bool:
        """Whether the group must give up every queue."""
        return self.is_duplicate or (self.spec is not None and self.spec.paused)


@dataclass(frozen=True, slots=True)
class Event:
    """Something for `kubectl describe`."""

    reason: Reason
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything to do now, decided in one pass. Order matters: the document first; if it meets a conflict, nothing."""

    document: Assignment | None = None  # None: what is written stays
    data: Mapping[str, str | bytes] = field(default_factory=dict)  # the document as the ConfigMap's entry
    for_settings: frozenset[str] = frozenset()  # pods that are poked for nothing but settings, which is not urgent
    pokes: Mapping[str, Poke] = field(default_factory=dict)  # by pod
    drains: tuple[Holder, ...] = ()  # terminating members to ask for their final drain
    awaited: frozenset[str] = frozenset()  # members whose report something waits for
    confirm: tuple[Holder, ...] = ()  # owners not among the pods: a consistent read must tell whether they ended
    reread: bool = False  # the record is missing or damaged: read it, pods and reports anew, then plan again
    status: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()  # for the journal
    standings: Mapping[str, str] = field(default_factory=dict)  # how each pod stands as a member
    foreign: frozenset[Queue] = frozenset()  # whose owners are consumers that are not Rota's
    held: Verdict | None = None  # what holds back queues that the policy wants elsewhere
    problems: tuple[Verdict, ...] = ()  # everything that is wrong, worst first
    again: float = 20.0  # seconds until it is worth looking again, if nothing happens before
