"""Tests the evidence about holders of queues, and the proofs that follow for queues without an owner."""

from dataclasses import replace

import pytest

from builders import a_document, a_pod, a_report, a_situation
from rota.documents import Share
from rota.handover import HolderEvidence, Proof
from rota.model import Holder, Queue
from rota.planner import PodSnapshot

Q = [Queue("orders", "a", number) for number in range(6)]
M1, M2, M3 = (Holder(name, f"uid-{name}") for name in ("m1", "m2", "m3"))


def test_handover_evidence_belongs_to_one_process_of_one_holder_and_is_computed_once() -> None:
    document = replace(a_document(), members={"m1": Share("uid-m1", tuple(Q[:3]), 1)}, incarnations_since=3)
    pod = a_pod("m1", a_report("m1", 5, reads=2, incarnation="2"))
    situation = a_situation(
        pod,
        a_pod("m2", a_report("m2", 5, reads=2, incarnation="1")),
        document=document,
        deleted_uids=frozenset({"uid-m3"}),
    )
    assert situation.proofs.evidence_of(M1, 1) == replace(pod.evidence, ended=True)
    assert situation.proofs.evidence_of(M1, 2) == pod.evidence
    assert situation.proofs.evidence_of(M1) == pod.evidence
    assert situation.proofs.evidence_of(M1, 3) == HolderEvidence(), "no report of this process"
    assert situation.proofs.evidence_of_owner(M1).ended
    assert not situation.proofs.evidence_of(M2, 1).ended
    assert situation.proofs.evidence_of(M3) == HolderEvidence(ended=True)
    assert situation.proofs.evidence_of(Holder("m1", "uid-earlier"), 1) == HolderEvidence()
    assert situation.proofs.evidence_of(M1, 1) is situation.proofs.evidence_of(M1, 1)


@pytest.mark.parametrize(
    ("barrier", "replaced_holders", "unmanaged", "proof"),
    [
        (0, (), (), Proof.RELEASED),
        (0, (M3,), (), Proof.RELEASED),
        (5, (), (), Proof.RELEASED),
        (5, (M3,), (), Proof.NONE),
        (0, (), None, Proof.NONE),
    ],
)
def test_assignment_barrier_holds_while_the_end_of_a_replaced_pod_is_not_known(
    barrier: int, replaced_holders: tuple[Holder, ...], unmanaged: tuple[str, ...] | None, proof: Proof
) -> None:
    situation = a_situation(
        a_pod("m1", a_report("m1", 5)),
        document=a_document(barrier=barrier),
        replaced_holders=frozenset(replaced_holders),
        unmanaged_consumers=unmanaged,
    )
    assert situation.proofs.unowned_proof is proof


def test_assignment_after_a_loss_waits_for_queues_that_pods_drain_but_not_for_those_of_ended_pods() -> None:
    ended = a_pod("m1", a_report("m1", 5, draining=[Q[0]]))
    pod = a_pod("m2", a_report("m2", 5, draining=[Q[1]]))
    document = a_document(members={}, barrier=5)
    situation = a_situation(ended, pod, document=document, deleted_uids=frozenset({"uid-m1"}))
    assert situation.proofs.unrecorded_drains == {Q[1]: Proof.NONE}


def test_forced_grant_is_resolved_once_every_pod_obeys_it_and_one_consumes_the_queue() -> None:
    def is_resolved(*pods: PodSnapshot) -> bool:
        return a_situation(*pods, document=a_document(members={})).proofs.is_forced_grant_resolved(Q[0], 5)

    past = a_pod("m1", a_report("m1", 5, [Q[0]]))
    assert is_resolved(past) is True
    assert is_resolved(past, a_pod("m2", a_report("m2", 4))) is False
    assert is_resolved(past, a_pod("m2", a_report("m2", 5, [Q[0]]))) is False
    assert is_resolved(past, a_pod("m2", a_report("m2", 5, draining=[Q[0]]))) is False
    assert is_resolved(past, a_pod("m2", a_report("m2", 6, [Q[1]]))) is True
    assert is_resolved(past, a_pod("m2", a_report("m2", 5, [Q[0]]), ended=True)) is True
