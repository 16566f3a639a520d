"""Tests the facts that decisions rest on, one by one."""

from dataclasses import replace
from typing import Any

import pytest

from builders import NOW, a_document, a_pod, a_report, a_snapshot, a_spec, a_view
from rota.documents import Assignment, Release, Share
from rota.handover import HolderEvidence, Proof
from rota.model import Holder, Queue
from rota.planner import PodSnapshot, Snapshot
from rota.planner.members.member_states import MemberState
from rota.planner.situation import Situation

Q = [Queue("orders", "a", number) for number in range(6)]
M1, M2, M3 = (Holder(name, f"uid-{name}") for name in ("m1", "m2", "m3"))
SINCE = 3


def situation_of(
    *pods: PodSnapshot, document: Assignment | None = None, states: dict[str, MemberState] | None = None, **changed: Any
) -> Situation:
    """Return a situation in which every pod counts as a member, unless another state is given."""
    member_states = {pod.name: MemberState.READY for pod in pods} | (states or {})
    snapshot = a_snapshot(pods=pods, document=document, **changed)
    return Situation(snapshot, member_states, document or a_document(members={}), NOW)


def process(incarnation: int, name: str = "m1", **changed: Any) -> PodSnapshot:
    """Return a pod whose process has this number."""
    held = changed.pop("held", ())
    return a_pod(name, a_report(name, 5, held, reads=2, incarnation=str(incarnation or "")), **changed)


def document_of(share: Share | None, **changed: Any) -> Assignment:
    """Return a document with incarnations, and with this share of m1."""
    fields: dict[str, Any] = {"members": {"m1": share} if share else {}, "incarnations_since": SINCE} | changed
    return replace(a_document(), **fields)


# Topics and queues


def test_topic_of_retries_is_that_of_the_consumer_group() -> None:
    assert situation_of().retry_topic == "%RETRY%orders"
    assert situation_of(spec=a_spec(group="GID_orders")).retry_topic == "%RETRY%GID_orders"
    assert situation_of(spec=None).retry_topic == "%RETRY%orders"


def test_queue_of_the_retry_topic_is_listed_once_although_the_topic_is_subscribed_to() -> None:
    subscriptions = [{"topic": "orders"}, {"topic": "%RETRY%orders"}]
    views = {"orders": a_view(2), "%RETRY%orders": a_view(1, "%RETRY%orders")}
    retry_queue = Queue("%RETRY%orders", "a", 0)
    for spec in (a_spec(), a_spec(subscriptions=subscriptions)):
        assert situation_of(spec=spec, views=views).queues == [*Q[:2], retry_queue]


def test_queue_list_has_recorded_queues_in_order_until_the_route_is_complete() -> None:
    document = a_document(members={"m1": Q[4:]}, taken={Q[3]: ("m1", "m2"), Q[2]: ("m1", None)})

    def listed(**views: Any) -> list[Queue]:
        return situation_of(document=document, views=views).queues

    assert listed(orders=a_view(2, stable_for=39.9)) == [Q[0], Q[1], Q[3], Q[4], Q[5]], "queue 2 is released for good"
    assert listed(orders=a_view(2, stable_for=40.0)) == Q[:2]
    assert listed() == listed(orders=a_view(0)) == Q[2:], "the brokers returned no route"


# Evidence about holders


def test_handover_evidence_belongs_to_one_process_of_one_holder_and_is_computed_once() -> None:
    document = document_of(Share("uid-m1", tuple(Q[:3]), 1))
    pod = process(2)
    situation = situation_of(pod, process(1, "m2"), document=document, deleted_uids=frozenset({"uid-m3"}))
    assert situation.evidence_of(M1, 1) == replace(pod.evidence, ended=True)
    assert situation.evidence_of(M1, 2) == pod.evidence
    assert situation.evidence_of(M1) == pod.evidence
    assert situation.evidence_of(M1, 3) == HolderEvidence(), "no report of this process"
    assert situation.evidence_of_owner(M1).ended
    assert not situation.evidence_of(M2, 1).ended
    assert situation.evidence_of(M3) == HolderEvidence(ended=True)
    assert situation.evidence_of(Holder("m1", "uid-earlier"), 1) == HolderEvidence()
    assert situation.evidence_of(M1, 1) is situation.evidence_of(M1, 1)


@pytest.mark.parametrize(
    ("pod", "state", "share", "expected"),
    [
        # A member that counts: the process that reports, whatever the document names.
        (process(4), "Ready", Share("uid-m1", (), 2), 4),
        (process(4), "Ready", None, 4),
        # A member that does not count keeps its process on record, unless a later one has inherited its queues.
        (process(4), "Out", Share("uid-m1", (Q[0],), 2), 2),
        (process(4, held=[Q[0]]), "Out", Share("uid-m1", (Q[0],), 2), 4),
        (process(4), "Out", Share("uid-m1", (), 0), 4),
        (process(4), "Out", None, 4),
        (process(4), "Out", Share("uid-earlier", (), 2), 4),
        # A pod without a number, or without a report.
        (process(0), "Ready", Share("uid-m1", (), 2), 2),
        (process(0), "Ready", Share("uid-m1", (), 0), 0),
        (a_pod("m1"), "Ready", Share("uid-m1", (), 2), 2),
        (a_pod("m1"), "Ready", None, 0),
        # No pod, or only one of the same name.
        (None, "Ended", Share("uid-m1", (), 2), 2),
        (None, "Ended", Share("uid-m1", (), 0), 0),
        (None, "Ended", Share("uid-earlier", (), 2), 0),
        (None, "Ended", None, 0),
        (process(4, uid="uid-later"), "Ready", Share("uid-m1", (), 2), 2),
        (process(4, uid="uid-later"), "Ready", Share("uid-m1", (), 0), 0),
        (process(4, uid="uid-later"), "Ready", Share("uid-later", (), 2), 0),
        (process(4, uid="uid-later"), "Ready", None, 0),
    ],
)
def test_assignment_names_the_process_that_may_consume_the_queues_of_a_pod(
    pod: PodSnapshot | None, state: str, share: Share | None, expected: int
) -> None:
    document = document_of(share)
    pods = [pod] if pod else []
    situation = situation_of(*pods, document=document, states={"m1": MemberState(state)})
    assert situation.incarnation_of("m1", "uid-m1") == expected
    earlier_version = a_pod("m9", a_report("m9", 5))  # it cannot read incarnations
    situation = situation_of(*pods, earlier_version, document=document, states={"m1": MemberState(state)})
    assert situation.incarnation_of("m1", "uid-m1") == 0


def test_member_counts_if_its_state_does() -> None:
    situation = situation_of(a_pod("m1"), a_pod("m2"), a_pod("m3"), states={"m2": MemberState.OUT})
    assert [situation.is_counted(name) for name in ("m1", "m2", "m3", "m4")] == [True, False, True, False]
    assert situation.counted_members == ["m1", "m3"]


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
    situation = situation_of(
        a_pod("m1", a_report("m1", 5)),
        document=a_document(barrier=barrier),
        replaced_holders=frozenset(replaced_holders),
        unmanaged_consumers=unmanaged,
    )
    assert situation.unowned_proof is proof


def test_forced_grant_is_resolved_once_every_pod_obeys_it_and_one_consumes_the_queue() -> None:
    def is_resolved(*pods: PodSnapshot) -> bool:
        return situation_of(*pods, document=a_document(members={})).is_forced_grant_resolved(Q[0], 5)

    past = a_pod("m1", a_report("m1", 5, [Q[0]]))
    assert is_resolved(past) is True
    assert is_resolved(past, a_pod("m2", a_report("m2", 4))) is False
    assert is_resolved(past, a_pod("m2", a_report("m2", 5, [Q[0]]))) is False
    assert is_resolved(past, a_pod("m2", a_report("m2", 5, draining=[Q[0]]))) is False
    assert is_resolved(past, a_pod("m2", a_report("m2", 6, [Q[1]]))) is True


# Queues without a consumer


def unowned(document: Assignment, *pods: PodSnapshot, **changed: Any) -> list[int]:
    return [queue.id for queue in situation_of(*pods, document=document, **changed).unowned_queues(document)]


OWNED = document_of(Share("uid-m1", tuple(Q)), incarnations_since=0)


def test_queue_of_an_ended_pod_is_unowned_until_a_pod_with_this_uid_counts() -> None:
    deleted = {"deleted_uids": frozenset({"uid-m1"})}
    assert unowned(OWNED, a_pod("m1", a_report("m1", 5, Q))) == []
    assert unowned(OWNED, **deleted) == [0, 1, 2, 3, 4, 5]
    assert unowned(OWNED, a_pod("m1", uid="uid-later"), **deleted) == [0, 1, 2, 3, 4, 5], "a pod of the same name"
    restarted = document_of(Share("uid-m1", tuple(Q), 1))
    assert unowned(restarted, process(2)) == [], "its next process takes the queues up"
    assert unowned(restarted, process(2), states={"m1": MemberState.RESTARTING}) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("generation", [0, 1, 5])
def test_queue_is_unowned_if_its_member_was_asked_to_drain_and_does_not_end(generation: int) -> None:
    draining = a_report("m1", generation, Q[:2], draining=[Q[2]], state="draining")
    assert unowned(OWNED, a_pod("m1", draining)) == [3, 4, 5]
    assert unowned(OWNED, a_pod("m1", draining, terminating=True)) == []
    assert unowned(OWNED, a_pod("m1", a_report("m1", generation, state="drained", final=True))) == []
    assert unowned(OWNED, a_pod("m1", a_report("m1", generation, Q[:2]))) == [], "it begins with the others soon"
    assert unowned(OWNED, a_pod("m1", a_report("m8", generation, state="drained"))) == [], "not its report"


def test_queue_is_unowned_by_a_new_document_if_no_share_has_it() -> None:
    pod = a_pod("m1", a_report("m1", 5, Q))
    situation: Situation = situation_of(pod, document=OWNED)
    taken = {Q[5]: Release(M1, "m2", 6, "")}
    successor = replace(OWNED, members={"m1": Share("uid-m1", tuple(Q[:3]))}, releasing=taken)
    assert situation.unowned_queues(OWNED) == []
    assert situation.unowned_queues(successor) == Q[3:5]
    snapshot: Snapshot = situation.snapshot
    assert Situation(snapshot, {"m1": MemberState.READY}, successor, NOW).unowned_queues(successor) == Q[3:5]
