"""Evidence about the holders of queues, and proofs that no pod consumes a queue that has no owner in the document.

`moves.py` grants a queue only with such a proof. `Situation.proofs` is this object.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rota.documents import Assignment
from rota.handover import HolderEvidence, Proof
from rota.model import Holder, Queue
from rota.planner import record
from rota.planner.members import incarnations
from rota.planner.snapshot import PodSnapshot, Snapshot
from rota.spec import Handover


@dataclass(frozen=True)
class HolderProofs:
    """What is proved about the holders of queues at this time; each proof is computed once, on first use."""

    snapshot: Snapshot
    pods: Mapping[str, PodSnapshot]  # by name
    document: Assignment
    owners: Mapping[Queue, Holder]
    rules: Handover
    now: float
    _evidence_cache: dict[tuple[Holder, int], HolderEvidence] = field(default_factory=dict)  # by process

    def evidence_of(self, holder: Holder, incarnation: int = 0) -> HolderEvidence:
        """Return the evidence about process `incarnation` of a holder's pod; 0: about the process that runs.

        A holder whose pod is not in the snapshot has ended only if its uid is in `deleted_uids`.
        """
        evidence = self._evidence_cache.get((holder, incarnation))
        if evidence is None:  # cached, as it is needed for each queue of a holder
            evidence = self._evidence_cache[holder, incarnation] = self._find_evidence(holder, incarnation)
        return evidence

    def _find_evidence(self, holder: Holder, incarnation: int) -> HolderEvidence:
        pod = self.pods.get(holder.name)
        if holder.uid in self.snapshot.deleted_uids:
            return HolderEvidence(ended=True)
        if pod and pod.uid == holder.uid:
            return incarnations.evidence_of(self.document, pod, incarnation)
        return HolderEvidence()

    def evidence_of_owner(self, holder: Holder) -> HolderEvidence:
        """Return the evidence about an owner's process, the one that the document names."""
        return self.evidence_of(holder, self.document.members[holder.name].incarnation)

    @cached_property
    def unowned_proof(self) -> Proof:
        """The proof that no pod consumes a queue that has no owner in the document.

        A rebuilt document, or the first one after Broadcasting, has a barrier: earlier documents may have given the
        queue to any pod.

        - RELEASED: there is no barrier, or every running pod has obeyed its generation (`record.barrier_proof`).
        - LOST: every running pod that has not obeyed it is lost.
        - NONE: a running pod has neither obeyed it nor is lost.
        - NONE also if there is a barrier, and a pod that is not in the snapshot may still obey an earlier document: one
          whose name another pod has now, or one that the document names, as a new leader's list of pods may be old.
        - NONE also if the broker did not return the group's consumers: an unmanaged one may consume the queue.
        """
        is_pod_missing = bool(self.snapshot.replaced_holders or self._absent_holders)
        if self.snapshot.unmanaged_consumers is None or (self.document.barrier and is_pod_missing):
            return Proof.NONE
        return record.barrier_proof(self.document, self.snapshot.pods, self.rules, self.now)

    def unowned_proof_of(self, queue: Queue) -> Proof:
        """Return the proof about a queue without an owner in the document."""
        return Proof.NONE if self.unowned_proof is Proof.NONE else self.unrecorded_drains.get(queue, self.unowned_proof)

    @cached_property
    def unrecorded_drains(self) -> dict[Queue, Proof]:
        """The queues that pods still own or drain, by their reports, but that a document with a barrier does not name.

        Each with its proof: LOST if every pod that may still consume the queue is lost, otherwise NONE.
        """
        if not self.document.barrier:
            return {}
        proofs: dict[Queue, Proof] = {}
        named = {*self.owners, *self.document.releasing}
        # The first document with the barrier already told pods to stop consuming these queues. Its time is not stored;
        # that of the present one is the same or later, so no pod counts as lost too early.
        revoked_for = record.seconds_since(self.document.issued_at, self.now)
        for pod in self.snapshot.pods:
            if self.evidence_of(pod.holder).ended:
                continue
            proof = Proof.LOST if pod.is_lost(self.rules, revoked_for) else Proof.NONE
            for queue in pod.active_queues - named:
                if proofs.get(queue) is not Proof.NONE:  # the weakest proof of all pods counts
                    proofs[queue] = proof
        return proofs

    @cached_property
    def unresolved_grants(self) -> dict[Queue, int]:
        """The forced grants in the document whose queues may still have two consumers."""
        forced = self.document.forced
        return {queue: forced[queue] for queue in forced if not self.is_forced_grant_resolved(queue, forced[queue])}

    def is_forced_grant_resolved(self, queue: Queue, generation: int) -> bool:
        """Whether a queue that `generation` granted by force has at most one consumer again.

        Every pod that may run has obeyed that generation, and at most one, the new owner, reports the queue.
        """
        if self._oldest_generation < generation:
            return False
        return sum(queue in pod.active_queues for pod in self.snapshot.running_pods) <= 1

    @cached_property
    def _absent_holders(self) -> list[Holder]:
        """The members of the document whose pods are neither in the snapshot nor known to have ended."""
        absent = self.document.entry_holders.difference(pod.holder for pod in self.snapshot.pods)
        return [holder for holder in absent if not self.evidence_of(holder).ended]

    @cached_property
    def _oldest_generation(self) -> int:
        """The oldest generation that a pod may obey; 0 if a member's pod is absent and not known to have ended."""
        if self._absent_holders:
            return 0
        pods = [pod for pod in self.snapshot.pods if not self.evidence_of(pod.holder).ended]
        # A pod that has not started consumes nothing, and its generation is 0.
        return min((pod.generation for pod in pods if pod.started), default=self.document.generation)
