"""Facts derived from a snapshot: counted members, queues, their owners, and the evidence about the owners."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rota.documents import Assignment, Share
from rota.handover import HolderEvidence, Proof
from rota.model import RETRY_TOPIC_PREFIX, Holder, Queue
from rota.planner import record
from rota.planner.members import incarnations
from rota.planner.members.member_states import MemberState, members_in_transition
from rota.planner.snapshot import PodSnapshot, Snapshot
from rota.spec import Handover, PolicySpec, Seconds

SHRINK_PATIENCE_SECONDS = 40.0  # brokers register every 30 s: a new name server knows only some of them
# Without a policy, the limit for silence is not known: with an infinite one, no member counts as lost too early.
WITHOUT_POLICY = PolicySpec(handover=Handover(lost_after=Seconds("inf")))


@dataclass(frozen=True)
class Situation:
    """The facts that decisions rest on; each is computed once, on first use."""

    snapshot: Snapshot
    member_states: Mapping[str, MemberState]
    document: Assignment
    now: float

    @cached_property
    def policy(self) -> PolicySpec:
        """The policy, or `WITHOUT_POLICY` if it is missing or invalid."""
        return self.snapshot.policy or WITHOUT_POLICY

    @cached_property
    def pods(self) -> dict[str, PodSnapshot]:
        """The pods by name."""
        return {pod.name: pod for pod in self.snapshot.pods}

    @cached_property
    def counted_members(self) -> list[str]:
        """The names of the members that share the queues."""
        return [pod.name for pod in self.snapshot.pods if self.member_states[pod.name].is_counted]

    @cached_property
    def in_transition(self) -> dict[str, float]:
        """The members that join or leave at this moment, and for how many seconds to wait for each."""
        return members_in_transition(self.snapshot.pods, self.member_states, self.policy)

    @cached_property
    def owners(self) -> dict[Queue, Holder]:
        """The owner of each queue."""
        return record.owners_of(self.document)

    @cached_property
    def queues(self) -> list[Queue]:
        """Every queue to consume: those in the route and, while that may be incomplete, those on record."""
        return [queue for topic in self._topics for queue in self._queues_of(topic)]

    @cached_property
    def missing_metadata(self) -> list[str]:
        """Topics (or the group's members) not reported by brokers: no queue may move. A retry topic may be missing."""
        visible = {topic for topic, view in self.snapshot.views.items() if view and view.queues}
        names = [f"topic {topic}" for topic in self._topics if topic not in visible and topic != self.retry_topic]
        if self.snapshot.unmanaged_consumers is None:
            names.append("the group's members")
        return names

    @cached_property
    def recorded_queues(self) -> dict[str, set[Queue]]:
        """The queues on record, by topic."""
        by_topic: dict[str, set[Queue]] = {}
        for queue in [*self.owners, *self.document.releasing]:
            by_topic.setdefault(queue.topic, set()).add(queue)
        return by_topic

    @cached_property
    def releasable_queues(self) -> frozenset[Queue]:
        """The queues that may be revoked although the policy gives them to no member.

        None while unmanaged consumers have a share: these queues are theirs, and stay until they consume them.
        """
        return frozenset() if self.snapshot.unmanaged_consumers else frozenset(self.queues)

    @property
    def _topics(self) -> list[str]:
        spec = self.snapshot.spec
        if spec is None or self.snapshot.must_release_all:
            return []
        topics = [subscription.topic for subscription in spec.subscriptions]  # may include other groups' retry topics
        return topics + [topic for topic in self.snapshot.views if topic == self.retry_topic and topic not in topics]

    @property
    def retry_topic(self) -> str:
        """The group's own retry topic; those of other groups may be subscribed to like any topic."""
        spec = self.snapshot.spec
        _, _, name = self.snapshot.group.partition("/")
        return RETRY_TOPIC_PREFIX + ((spec and spec.group) or name)

    def _queues_of(self, topic: str) -> Sequence[Queue]:
        view = self.snapshot.views.get(topic)
        if view and view.queues and view.stable_for >= SHRINK_PATIENCE_SECONDS:
            return view.queues
        recorded = self.recorded_queues.get(topic, set())
        if view and view.queues:  # drop queues that are being released for good and are not in the route
            recorded = {queue for queue in recorded if not self._is_released_for_good(queue)}
        return sorted(recorded.union(view.queues if view else ()))

    def _is_released_for_good(self, queue: Queue) -> bool:
        release = self.document.releasing.get(queue)
        return release is not None and release.to is None

    def evidence_of(self, holder: Holder, incarnation: int = 0) -> HolderEvidence:
        """Return the evidence about a holder's process; absence from the pods does not prove its end."""
        evidence = self._evidence_cache.get((holder, incarnation))
        if evidence is None:
            evidence = self._evidence_cache[holder, incarnation] = self._find_evidence(holder, incarnation)
        return evidence

    @cached_property
    def _evidence_cache(self) -> dict[tuple[Holder, int], HolderEvidence]:
        """Cache of `evidence_of`, which is called for each queue of a holder."""
        return {}

    def _find_evidence(self, holder: Holder, incarnation: int) -> HolderEvidence:
        pod = self.pods.get(holder.name)
        if holder.uid in self.snapshot.deleted_uids:
            return HolderEvidence(ended=True)
        if pod and pod.uid == holder.uid:
            return incarnations.evidence_of(self.document, pod, incarnation)
        return HolderEvidence()

    def evidence_of_owner(self, holder: Holder) -> HolderEvidence:
        """Return the evidence about the process to which the document gives queues."""
        return self.evidence_of(holder, self.document.members[holder.name].incarnation)

    @cached_property
    def incarnations_since(self) -> int:
        """The generation from which on shares name incarnations, for the next document."""
        return incarnations.incarnations_since(self.snapshot, self.document)

    def incarnation_of(self, name: str, uid: str) -> int:
        """Return the process of a pod that the next document names.

        The reporting process, if the member counts or this process has inherited the share; else the process on record,
        which may still hold queues; else, if none is on record, the reporting one. 0 if shares name no processes.
        """
        if not self.incarnations_since:
            return 0
        pod = self.pods.get(name)
        share = self.document.members.get(name)
        reporting = pod.incarnation if pod and pod.uid == uid else 0
        recorded = share.incarnation if share and share.uid == uid else 0
        if pod and reporting and (self.is_counted(name) or incarnations.has_inherited(self.document, pod)):
            return reporting
        return recorded or reporting

    def is_counted(self, name: str) -> bool:
        """Whether the member of this name shares the queues."""
        return name in self.member_states and self.member_states[name].is_counted

    @cached_property
    def unowned_proof(self) -> Proof:
        """The proof that no member consumes a queue without an owner on record.

        There is none while the brokers' consumers are unknown, or while a replaced pod may obey a lost assignment.
        """
        may_obey_lost_assignment = self.document.barrier and self.snapshot.replaced_holders
        if self.snapshot.unmanaged_consumers is None or may_obey_lost_assignment:
            return Proof.NONE
        return record.barrier_proof(self.document, self.snapshot.pods, self.policy.handover, self.now)

    def unowned_proof_of(self, queue: Queue) -> Proof:
        """Return the proof about a queue without an owner on record."""
        return Proof.NONE if self.unowned_proof is Proof.NONE else self.unrecorded_drains.get(queue, self.unowned_proof)

    @cached_property
    def unrecorded_drains(self) -> dict[Queue, Proof]:
        """The queues that a pod still drains after the assignment was lost, and that the new one does not name."""
        if not self.document.barrier:
            return {}
        proofs: dict[Queue, Proof] = {}
        named = {*self.owners, *self.document.releasing}
        seconds_since_loss = record.seconds_since(self.document.issued_at, self.now)
        for pod in self.snapshot.pods:
            if pod.decoded_report and not self.evidence_of(pod.holder).ended:
                is_lost = pod.evidence.is_lost(self.policy.handover, seconds_since_loss)
                for queue in pod.decoded_report.active_queues - named:
                    if proofs.get(queue) is not Proof.NONE:
                        proofs[queue] = Proof.LOST if is_lost else Proof.NONE
        return proofs

    def is_forced_grant_resolved(self, queue: Queue, generation: int) -> bool:
        """Whether a queue that this generation granted by force has one consumer again, if any.

        Each process that may run has obeyed that generation, and at most one, the new owner, reports the queue.
        """
        if self._oldest_generation < generation:
            return False
        reports = [pod.decoded_report for pod in self.snapshot.pods if pod.decoded_report]
        return sum(queue in report.active_queues for report in reports) <= 1

    def unowned_queues(self, document: Assignment) -> list[Queue]:
        """Return the queues that no member consumes: they have no owner, and are not being released.

        On record a queue stays with an ended member until another takes it over, and with a member asked to drain.
        """
        if document.everyone is not None:
            return []
        owned = self.owners if document is self.document else record.owners_of(document)
        idle = frozenset[Queue]().union(*(self._unconsumed_queues(*share) for share in document.members.items()))
        releasing = document.releasing
        return [queue for queue in self.queues if (queue not in owned or queue in idle) and queue not in releasing]

    def _unconsumed_queues(self, name: str, share: Share) -> Collection[Queue]:
        """Return the queues of a share that the owner does not consume: it has ended, or drains while it stays."""
        holder = Holder(name, share.uid)
        evidence = self.evidence_of(holder, share.incarnation)
        if evidence.ended and not (self.is_counted(name) and self.pods[name].uid == share.uid):
            return share.queues
        report = evidence.report if evidence.has_obeyed(holder, 0) else None
        is_draining = report and report.state != "serving" and not (report.final or evidence.terminating)
        return frozenset(share.queues) - evidence.active_queues if is_draining else ()

    @cached_property
    def _oldest_generation(self) -> int:
        """The oldest generation that a member may still obey."""
        pods = [pod for pod in self.snapshot.pods if not self.evidence_of(pod.holder).ended]
        present = {pod.holder for pod in pods}
        on_record = (Holder(name, share.uid) for name, share in self.document.members.items())
        if any(holder not in present and not self.evidence_of(holder).ended for holder in on_record):
            return 0
        return min((pod.generation for pod in pods if pod.started), default=self.document.generation)
