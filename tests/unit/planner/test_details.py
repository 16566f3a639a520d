"""Tests details of the planner: member states, recovery of an assignment, pokes, moves, status, Events and journal."""

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest

from builders import BEGUN, LONG, NOW, a_document, a_pod, a_policy, a_report, a_snapshot, a_spec, a_view, obeying
from rota.documents import Assignment, Release, Share, decode_assignment, encode_assignment
from rota.handover import Proof
from rota.model import Finding, Holder, Poke, Queue, Reason, ReasonKind, Roster
from rota.planner import (
    Event,
    Plan,
    PodSnapshot,
    Snapshot,
    StrategyInputs,
    compute_owners,
    plan,
    pokes,
    record,
    share_with_unmanaged,
)
from rota.planner.members.member_states import MemberState, classify_members, members_in_transition
from rota.planner.target import resolve_options
from rota.spec import Handover, PolicySpec
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(10)]
M1, M2, M3 = (Holder(name, f"uid-{name}") for name in ("m1", "m2", "m3"))
DOCUMENT = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
JOINER = a_pod("m3", a_report("m3", 0))


def settled(**changed: Any) -> Snapshot:
    return a_snapshot(**({"document": DOCUMENT, "pods": obeying(changed.get("document") or DOCUMENT)} | changed))


def with_joiner(**changed: Any) -> Snapshot:
    return settled(**{"pods": (*obeying(DOCUMENT), JOINER), **changed})


def written_document(snapshot: Snapshot) -> Assignment:
    document = plan(snapshot, NOW).document
    assert document
    return document


def owned(document: Assignment) -> dict[str, list[int]]:
    return {name: [queue.id for queue in share.queues] for name, share in document.members.items()}


def conditions(new_plan: Plan) -> dict[str, tuple[str, str, str]]:
    return {
        condition["type"]: (condition["status"], condition["reason"], condition["message"])
        for condition in new_plan.status["conditions"]
    }


# Member states.

FINAL = {"report": a_report("m1", 5, state="drained", final=True)}


@pytest.mark.parametrize(
    ("changed", "with_queues", "without"),
    [
        ({}, "Ready", "Joining"),
        ({"report": a_report("m1", 0)}, "Ready", "Ready"),
        ({"report": a_report("m1", 5), "ready": False, "stable_for": 9.9}, "Unready", "Joining"),
        ({"report": a_report("m1", 5), "ready": False, "stable_for": 10.0}, "Out", "Joining"),
        ({"ready": False, "unreachable_for": 9.9}, "Out", "Joining"),
        ({"ready": False, "unreachable_for": 10.0}, "Lost", "Joining"),
        ({"ready": True, "unreachable_for": LONG}, "Ready", "Joining"),
        ({"terminating": True}, "Leaving", "Leaving"),
        (FINAL, "Leaving", "Leaving"),
        ({"terminating": True, "ended": True}, "Ended", "Ended"),
        ({"ended": True, "ready": False}, "Ended", "Ended"),
        ({"uid": "uid-gone"}, "Ended", "Ended"),
    ],
    ids=str,
)
def test_member_state_depends_on_whether_the_pod_owns_queues(
    changed: dict[str, Any], with_queues: str, without: str
) -> None:
    uid = changed.get("uid", "uid-m1")
    pod, deleted_uids = a_pod("m1", **changed), frozenset({"uid-gone"})
    for share, everyone, expected in (
        (Share(uid, (Q[0],)), None, with_queues),
        (Share(uid), tuple(Q), with_queues),
        (Share(uid), None, without),
        (Share(uid), (), without),
        (None, None, without),
    ):
        document = a_document(everyone=everyone)
        document = replace(document, members={"m1": share} if share else {})
        states = classify_members([pod], deleted_uids, a_policy(), document)
        assert {name: str(state) for name, state in states.items()} == {"m1": expected}


def test_member_recreated_by_name_is_joining_until_the_old_pod_ended() -> None:
    recreated = a_pod("m1", a_report("m1", 0, uid="new"), uid="new")
    assert classify_members([recreated], frozenset(), a_policy(), DOCUMENT) == {"m1": MemberState.JOINING}
    assert classify_members([recreated], frozenset({"uid-m1"}), a_policy(), DOCUMENT) == {"m1": MemberState.READY}
    unready = replace(recreated, ready=False)
    assert classify_members([unready], frozenset({"uid-m1"}), a_policy(), DOCUMENT) == {"m1": MemberState.JOINING}


def pod_reaching(name: str, *, reaches: bool, **changed: Any) -> PodSnapshot:
    return a_pod(name, a_report(name, 5, brokers={"a": reaches}), **changed)


@pytest.mark.parametrize(
    ("other_pods", "seconds", "expected"),
    [
        ((pod_reaching("m1", reaches=True),), 10.0, "CutOff"),
        ((pod_reaching("m1", reaches=True),), 9.9, "Ready"),
        (
            (pod_reaching("m1", reaches=True, cut_off_brokers={"c": LONG}), pod_reaching("m3", reaches=True)),
            10.0,
            "CutOff",
        ),
        ((pod_reaching("m1", reaches=False),), LONG, "Ready"),
        ((pod_reaching("m1", reaches=True, terminating=True), a_pod("m4")), LONG, "Ready"),
        ((a_pod("m1"),), LONG, "Ready"),
    ],
    ids=[
        "others reach it",
        "not for long",
        "a witness misses another broker",
        "no member reaches it",
        "only a terminating member reaches it",
        "no member reports its brokers",
    ],
)
def test_member_is_cut_off_only_from_brokers_that_other_members_reach(
    other_pods: tuple[PodSnapshot, ...], seconds: float, expected: str
) -> None:
    cut_off = pod_reaching("m2", reaches=False, cut_off_brokers={"b": 1.0, "a": seconds})
    states = classify_members([*other_pods, cut_off], frozenset(), a_policy(), DOCUMENT)
    assert str(states["m2"]) == expected
    leaving = replace(cut_off, terminating=True)
    assert classify_members([*other_pods, leaving], frozenset(), a_policy(), DOCUMENT)["m2"] is MemberState.LEAVING


def test_member_without_queues_counts_as_cut_off_at_once() -> None:
    joiner = pod_reaching("m4", reaches=False, cut_off_brokers={"a": 0.0})
    assert (
        classify_members([pod_reaching("m1", reaches=True), joiner], frozenset(), a_policy(), DOCUMENT)["m4"]
        is MemberState.CUT_OFF
    )


def test_member_cut_off_counts_as_ready_while_every_member_is_cut_off() -> None:
    cut_off_from_b = a_pod("m1", a_report("m1", 5, brokers={"a": True, "b": False}), cut_off_brokers={"b": LONG})
    cut_off_from_a = a_pod("m2", a_report("m2", 5, brokers={"a": False, "b": True}), cut_off_brokers={"a": LONG})
    unheard = a_pod("m3", a_report("m3", 5, brokers={"a": True, "b": True}), ready=False, unreachable_for=5.0)
    silent = a_pod("m4", a_report("m4", 5))
    for other_pods in ((), (unheard,), (silent,)):
        states = classify_members([cut_off_from_b, cut_off_from_a, *other_pods], frozenset(), a_policy(), DOCUMENT)
        assert (states["m1"], states["m2"]) == (MemberState.READY, MemberState.READY)
    reaching_all = a_pod("m4", a_report("m4", 5, brokers={"a": True, "b": True}))
    states = classify_members([cut_off_from_b, cut_off_from_a, reaching_all], frozenset(), a_policy(), DOCUMENT)
    assert [*states.values()] == [MemberState.CUT_OFF, MemberState.CUT_OFF, MemberState.READY]


def test_member_is_cut_off_if_other_members_together_reach_its_brokers() -> None:
    """Members report only brokers of queues that they own: possibly no single member reports all missed brokers."""
    report = a_report("m2", 5, brokers={"a": False, "b": False, "c": True})
    cut_off = a_pod("m2", report, cut_off_brokers={"a": LONG, "b": LONG})
    knows_a = a_pod("m1", a_report("m1", 5, brokers={"a": True}))
    knows_b = a_pod("m3", a_report("m3", 5, brokers={"b": True}))
    states = classify_members([knows_a, cut_off, knows_b], frozenset(), a_policy(), DOCUMENT)
    assert states == {"m1": MemberState.READY, "m2": MemberState.CUT_OFF, "m3": MemberState.READY}
    elsewhere = a_pod("m4", a_report("m4", 5, brokers={"d": False}), cut_off_brokers={"d": LONG})
    witness = a_pod("m5", a_report("m5", 5, brokers={"d": True}))
    states = classify_members([knows_a, cut_off, knows_b, elsewhere, witness], frozenset(), a_policy(), DOCUMENT)
    assert [name for name, state in states.items() if state is MemberState.CUT_OFF] == ["m2", "m4"]


@pytest.mark.parametrize(("reaches", "expected"), [(False, MemberState.CUT_OFF), (True, MemberState.OUT)])
def test_member_unready_for_long_is_cut_off_or_out_by_its_reach_of_the_broker(
    reaches: bool,  # noqa: FBT001 - a case
    expected: MemberState,
) -> None:
    cut_off = {} if reaches else {"a": 1.0}
    unready = pod_reaching("m2", reaches=reaches, cut_off_brokers=cut_off, ready=False, stable_for=10.0)
    states = classify_members([pod_reaching("m1", reaches=True), unready], frozenset(), a_policy(), DOCUMENT)
    assert states["m2"] is expected


@pytest.mark.parametrize(
    ("state", "changed", "seconds"),
    [
        (MemberState.JOINING, {"age": 0.5}, 19.5),
        (MemberState.JOINING, {"age": 19.5}, 0.5),
        (MemberState.JOINING, {"age": 20.0}, None),
        (MemberState.JOINING, {"age": 20.5}, None),
        (MemberState.LEAVING, {"terminating_for": 1.0}, 44.0),
        (MemberState.LEAVING, {"terminating_for": 45.5}, None),
        (MemberState.LEAVING, {"terminating_for": 20.0, "ready": False, "unreachable_for": 10.0}, None),
        (MemberState.LEAVING, {"terminating_for": 20.0, "ready": False, "unreachable_for": 9.5}, 25.0),
        (MemberState.LEAVING, {"terminating_for": 20.0, "unreachable_for": 10.0}, 25.0),
        (MemberState.READY, {"age": 5.0, "stable_for": 0.125}, 0.375),
        (MemberState.READY, {"age": 5.0, "stable_for": 0.75}, None),
        (MemberState.READY, {"age": 20.0, "stable_for": 0.125}, None),
        (MemberState.OUT, {"age": 5.0, "stable_for": 0.125}, None),
    ],
)
def test_membership_change_is_waited_for_only_a_limited_time(
    state: MemberState, changed: dict[str, Any], seconds: float | None
) -> None:
    policy = a_policy(triggers={"debounce": "500ms"}, handover={"drainTimeout": "30s"})
    seconds_left = members_in_transition([a_pod("m1", **changed)], {"m1": state}, policy)
    assert seconds_left == ({} if seconds is None else {"m1": seconds})


def test_member_facts_not_yet_observed_count_neither_for_nor_against_the_pod() -> None:
    unobserved = PodSnapshot(name="m1", uid="uid-m1")
    for pod, state, seconds in (
        (unobserved, MemberState.JOINING, 20.0),
        (replace(unobserved, decoded_report=JOINER.decoded_report), MemberState.JOINING, 20.0),
        (replace(unobserved, terminating=True), MemberState.LEAVING, 45.0),
        (replace(unobserved, ready=True, decoded_report=JOINER.decoded_report), MemberState.READY, 0.5),
    ):
        states = classify_members([pod], frozenset(), a_policy(), a_document())
        assert (states, members_in_transition([pod], states, a_policy())) == ({"m1": state}, {"m1": seconds})
    assert pokes.seconds_until_next_poke([replace(unobserved, poke=Poke(5, 1))], {}) == 1.0
    assert (unobserved.generation, unobserved.client_id, str(unobserved.poke)) == (0, "", "0-0")
    snapshot = Snapshot(group="shop/orders", spec=a_spec())
    assert plan(snapshot, NOW).refetch
    first = plan(replace(snapshot, refetched=True), NOW)
    assert first.status["observedGeneration"] == 0
    assert conditions(first)["Ready"][:2] == ("False", "BrokerMetadataUnavailable")


# Damaged, lost and rebuilt assignments.


def test_assignment_timestamps_are_formatted_and_parsed() -> None:
    assert format_time(NOW) == "2025-11-21T08:00:00.000Z"
    assert record.seconds_since("2025-11-21T07:59:58.500Z", NOW) == 1.5
    assert record.seconds_since("2025-11-21T08:00:01Z", NOW) == -1.0
    assert record.seconds_since("yesterday", NOW) == 0.0


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, ""),
        ({"document": None, "pods": ()}, ""),
        ({"damage": "The sum does not match"}, "The sum does not match"),
        ({"document": None, "pods": (a_pod("m1", a_report("m1", 3)),)}, "The assignment is missing"),
        ({"document": None, "pods": (a_pod("m1"),)}, "The assignment is missing"),
        ({"document": None, "pods": (a_pod("m1", poke=Poke(1, 1), started=False),)}, "The assignment is missing"),
        ({"document": None, "pods": (), "status": {"generation": 1}}, "The assignment is missing"),
        ({"document": None, "pods": (a_pod("m1", a_report("m1", 0)),)}, ""),
        ({"document": None, "pods": (a_pod("m1", started=False),)}, ""),
        ({"document": None, "pods": (a_pod("m1", ended=True),)}, ""),
        ({"document": None, "pods": (a_pod("m1"),), "deleted_uids": frozenset({"uid-m1"})}, ""),
        ({"document": a_document(group="shop/payments")}, "The assignment belongs to group shop/payments"),
        ({"status": {"generation": 5}}, ""),
        ({"status": {"generation": 6}}, "The assignment has generation 5, but generation 6 was already in use"),
        ({"highest_stored_generation": 5}, ""),
        ({"highest_stored_generation": 6}, "The assignment has generation 5, but generation 6 was already in use"),
        (
            {"pods": (a_pod("m1", a_report("m1", 7)),)},
            "The assignment has generation 5, but generation 7 was already in use",
        ),
        (
            {"pods": (a_pod("m1", poke=Poke(8, 1)),)},
            "The assignment has generation 5, but generation 8 was already in use",
        ),
        ({"pods": (a_pod("m1", a_report("m1", 7), ended=True),)}, ""),
    ],
)
def test_assignment_is_believed_unless_evidence_contradicts_it(changed: dict[str, Any], sentence: str) -> None:
    damage = record.find_damage(settled(**changed))
    assert damage.startswith(sentence) if sentence else damage == ""


@pytest.mark.parametrize(
    "damage",
    [
        {"damage": "The sum does not match"},
        {"document": None},
        {"document": None, "pods": ()},
        {"document": replace(DOCUMENT, generation=3), "pods": obeying(DOCUMENT)},
    ],
    ids=["torn", "missing", "a new group", "an old copy"],
)
def test_assignment_not_believed_is_refetched_before_it_is_rewritten(damage: dict[str, Any]) -> None:
    status = {"generation": 0, "lag": 7}
    new_plan = plan(settled(**{"refetched": False, "status": status, **damage}), NOW)
    assert new_plan == Plan(refetch=True, status=status, requeue_after=1.0)
    assert not plan(settled(refetched=False), NOW).refetch, "an undamaged assignment is not read again"


def test_assignment_rebuilt_names_owners_from_reports_and_counts_budget_as_spent() -> None:
    pods = (
        a_pod("m1", a_report("m1", 4, Q[:3])),
        a_pod("m2", a_report("m2", 5, Q[2:5])),
        a_pod("m3"),
        a_pod("m4", a_report("m4", 9, Q[5:]), ended=True),
        a_pod("m5", a_report("m5", 5, Q[5:])),
    )
    policy = a_policy(budget={"maxMoves": 3})
    lost = settled(document=None, damage="Torn", pods=pods, policy=policy, deleted_uids=frozenset({"uid-m5"}))
    assert record.rebuild_assignment(lost, NOW) == Assignment(
        group="shop/orders",
        generation=int(NOW),
        issued_at=format_time(NOW),
        strategy="Sticky",
        members={"m2": Share("uid-m2", tuple(Q[2:5])), "m1": Share("uid-m1", tuple(Q[:2])), "m3": Share("uid-m3")},
        spent=((format_time(NOW), 3),),
        barrier=int(NOW),
        begun={"orders": format_time(NOW)},
    )
    bare = record.rebuild_assignment(replace(lost, policy=None), NOW)
    assert bare.strategy == ""
    assert bare.spent[0][1] > 99_999, "more than any budget that the policy may have"
    assert list(bare.members) == ["m2", "m1", "m3"]
    assert record.rebuild_assignment(replace(lost, policy=a_policy()), NOW).spent == ()


def test_assignment_rebuilt_gives_a_tied_queue_to_the_first_member_by_name() -> None:
    pods = (a_pod("m2", a_report("m2", 5, Q[:1])), a_pod("m1", a_report("m1", 5, Q[:1])))
    rebuilt = record.rebuild_assignment(settled(document=None, pods=pods), NOW)
    assert {name: share.queues for name, share in rebuilt.members.items()} == {"m1": (Q[0],), "m2": ()}


def test_assignment_rebuilt_lists_the_queues_of_each_member_in_order() -> None:
    held = {Queue(topic, "a", number) for topic in ("orders", "payments") for number in range(20)}
    rebuilt = record.rebuild_assignment(settled(document=None, pods=(a_pod("m1", a_report("m1", 5, held)),)), NOW)
    assert list(rebuilt.members["m1"].queues) == sorted(held)


@pytest.mark.parametrize(
    ("evidence", "generation"),
    [
        ({"status": {"generation": int(NOW) + 7}}, int(NOW) + 8),
        ({"document": a_document(int(NOW) + 3)}, int(NOW) + 4),
        ({"pods": (a_pod("m1", poke=Poke(int(NOW) + 5, 2)),)}, int(NOW) + 6),
        ({}, int(NOW)),
    ],
)
def test_assignment_rebuilt_has_a_generation_above_all_seen(evidence: dict[str, Any], generation: int) -> None:
    rebuilt = record.rebuild_assignment(settled(damage="Torn", **evidence), NOW)
    assert (rebuilt.generation, rebuilt.barrier) == (generation, generation)


@pytest.mark.parametrize("number", [2**53, 2**53 - 1, 2**52 + 1])
def test_generation_too_high_to_continue_from_is_ignored(
    number: int,
) -> None:
    by_hand = (replace(obeying(DOCUMENT)[0], poke=Poke(number, 1)), obeying(DOCUMENT)[1])
    assert plan(settled(pods=by_hand), NOW).document is None
    lost = record.rebuild_assignment(settled(damage="Torn", pods=by_hand), NOW)
    assert lost.generation == int(NOW)
    highest = record.rebuild_assignment(settled(damage="Torn", status={"generation": 2**52}), NOW)
    assert decode_assignment(encode_assignment(highest)["assignment.json"]) == highest


def test_assignment_lost_emits_a_warning_event_and_a_journal_reason() -> None:
    report = a_report("m2", 4, Q[3:6])
    new_plan = plan(settled(damage="Torn", pods=(*obeying(DOCUMENT)[:1], a_pod("m2", report))), NOW)
    message = "Torn; it was rebuilt from the members' reports"
    assert new_plan.events[-1] == Event(Reason.ASSIGNMENT_LOST, message, warning=True)
    assert len(new_plan.events) == 1
    assert new_plan.requeue_after == 0.0
    plan_without_m2 = plan(settled(damage="Torn", pods=obeying(DOCUMENT)[:1]), NOW)
    assert [event.reason for event in plan_without_m2.events] == [Reason.QUEUES_UNOWNED, Reason.ASSIGNMENT_LOST]
    assert [line["kind"] for line in new_plan.journal_records] == ["membership", "plan", *["verdict"] * 3]
    assert new_plan.journal_records[1] == {
        "schema": 1,
        "kind": "plan",
        "group": "shop/orders",
        "at": format_time(NOW),
        "generation": int(NOW),
        "strategy": "Sticky",
        "reason": Reason.ASSIGNMENT_LOST,
        "message": message,
        "members": 2,
        "queues": 6,
        "held": None,
    }
    assert new_plan.journal_records[0] == {
        "schema": 1,
        "kind": "membership",
        "group": "shop/orders",
        "at": format_time(NOW),
        "generation": int(NOW),
        "members": {"m1": {"uid": "uid-m1", "standing": "Ready"}, "m2": {"uid": "uid-m2", "standing": "Ready"}},
    }


def test_broadcasting_assignment_lost_is_rebuilt_with_every_queue_for_every_member() -> None:
    spec = a_spec(messageModel="Broadcasting")
    pods = (a_pod("m1", a_report("m1", 4, [*Q[8:], *Q[:3]])), a_pod("m2", a_report("m2", 4, Q[3:7])))
    rebuilt = written_document(settled(spec=spec, damage="Torn", pods=pods, policy=a_policy(budget={"maxMoves": 1})))
    assert rebuilt == Assignment(
        group="shop/orders",
        generation=int(NOW),
        issued_at=format_time(NOW),
        strategy="",
        members={"m1": Share("uid-m1"), "m2": Share("uid-m2")},
        everyone=tuple(Q[:7] + Q[8:]),
        spent=((format_time(NOW), 1),),
        begun=BEGUN,
    )


def test_broadcasting_assignment_lost_is_rebuilt_also_with_queues_that_no_report_names() -> None:
    pods = (a_pod("m1", a_report("m1", 4, Q[:3])), a_pod("m2"))
    rebuilt = written_document(settled(spec=a_spec(messageModel="Broadcasting"), damage="Torn", pods=pods))
    assert rebuilt.everyone == tuple(Q[:6])


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ((), Proof.RELEASED),
        ((a_pod("m1", a_report("m1", 5)),), Proof.RELEASED),
        ((a_pod("m1", a_report("m1", 4)),), Proof.NONE),
        ((a_pod("m1", a_report("m1", 4), started=False),), Proof.RELEASED),
        ((a_pod("m1", a_report("m1", 4), ended=True),), Proof.RELEASED),
        ((a_pod("m1", unreachable_for=10.0, ready=False),), Proof.LOST),
        ((a_pod("m1", unreachable_for=9.0, ready=False),), Proof.NONE),
        ((a_pod("m1", unreachable_for=120.0),), Proof.LOST),
        ((a_pod("m1", unreachable_for=10.0, ready=False), a_pod("m2", a_report("m2", 4))), Proof.NONE),
    ],
)
def test_assignment_barrier_frees_unowned_queues_once_no_member_may_consume_them(
    pods: tuple[PodSnapshot, ...], expected: Proof
) -> None:
    document = a_document(5, barrier=5, age=120.0)
    assert record.barrier_proof(document, pods, Handover(), NOW) is expected
    assert record.barrier_proof(replace(document, barrier=0), pods, Handover(), NOW) is Proof.RELEASED
    just_written = a_document(5, barrier=5, age=0.0)
    independent_of_age = expected is not Proof.LOST or not pods[0].ready
    assert record.barrier_proof(just_written, pods, Handover(), NOW) is (expected if independent_of_age else Proof.NONE)


def test_assignment_entry_stays_until_its_pod_has_ended() -> None:
    document = a_document(members={"m1": (), "m2": (), "m3": (), "m4": ()})
    pods = (a_pod("m1"), a_pod("m2", ended=True), a_pod("m3", uid="new", ended=True), a_pod("m5"), a_pod("m6"))
    counted = [Holder("m1", "uid-m1"), Holder("m5", "uid-m5")]
    entries = record.member_entries(document, settled(pods=pods, deleted_uids=frozenset({"uid-m4"})), counted)
    assert entries == {"m1": "uid-m1", "m3": "uid-m3", "m5": "uid-m5"}


def test_assignment_drops_the_entry_of_an_ended_member_without_queues() -> None:
    document = a_document(members={"m1": Q[:6], "m2": ()})
    pods = obeying(document)[:1]
    assert plan(settled(document=document, pods=pods), NOW).document is None
    rewritten = written_document(settled(document=document, pods=pods, deleted_uids=frozenset({"uid-m2"})))
    assert owned(rewritten) == {"m1": [0, 1, 2, 3, 4, 5]}


# Pokes.


def test_poke_is_not_due_for_settings_that_a_pod_without_a_report_may_use() -> None:
    document = a_document(members={"m1": Q[:3]})
    assert pokes.pods_behind([a_pod("m2")], document, frozenset(), "digest") == []
    other_settings = a_pod("m2", a_report("m2", 4, settings="other"))
    assert pokes.pods_behind([other_settings], document, frozenset(), "digest") == [other_settings]


@pytest.mark.parametrize(
    ("changed", "deleted", "expected"),
    [
        ({}, (), True),
        ({"ended": True}, (), False),
        ({}, ("uid-m1",), False),
        ({"started": False}, (), True),
        ({"started": False, "ready": False}, (), False),
        ({"ready": False}, (), True),
        ({"report": a_report("m1", 5)}, (), False),
        ({"report": a_report("m1", 4, Q[:3])}, (), False),
        ({"report": a_report("m1", 4, Q[:2])}, (), True),
        ({"uid": "new"}, (), False),
    ],
)
def test_poke_considers_a_pod_behind_until_it_reports_its_queues(
    changed: dict[str, Any],
    deleted: tuple[str, ...],
    *,
    expected: bool,
) -> None:
    behind = pokes.pods_behind([a_pod("m1", **changed)], DOCUMENT, frozenset(deleted))
    assert bool(behind) is expected


def test_poke_considers_a_pod_behind_while_it_owes_a_release_or_the_barrier() -> None:
    pods = [a_pod("m1", a_report("m1", 4, Q[:3]))]
    early, late = (Release(M1, None, since, format_time(NOW)) for since in (3, 5))
    owing = replace(DOCUMENT, releasing={Q[3]: early, Q[4]: late, Q[5]: early})
    assert pokes.pods_behind(pods, owing, frozenset()) == pods
    assert pokes.pods_behind(pods, replace(DOCUMENT, releasing={Q[3]: early}), frozenset()) == []
    assert pokes.pods_behind(pods, replace(owing, releasing={Q[4]: replace(late, holder=M2)}), frozenset()) == []
    assert pokes.pods_behind(pods, replace(DOCUMENT, barrier=5), frozenset()) == pods
    assert pokes.pods_behind(pods, replace(DOCUMENT, barrier=4), frozenset()) == []
    consuming_all = [a_pod("m1", a_report("m1", 4, Q[:6]))]
    broadcast = replace(DOCUMENT, members={"m1": Share("uid-m1")}, everyone=tuple(Q[:6]))
    assert pokes.pods_behind(consuming_all, broadcast, frozenset()) == []
    assert pokes.pods_behind(pods, broadcast, frozenset()) == pods


def test_poke_is_repeated_for_a_restarted_process_whose_volume_does_not_show_the_obeyed_document() -> None:
    """The document was sent to the pod's first process. In Broadcasting groups no other document follows a restart."""
    broadcast = replace(DOCUMENT, members={"m1": Share("uid-m1")}, everyone=tuple(Q[:6]))
    restarted = a_pod("m1", a_report("m1", 5, reads=2, incarnation="2"), poke=Poke(5, 1))
    assert pokes.pods_behind([restarted], broadcast, frozenset(), "digest") == [restarted]
    assert pokes.due_pokes([restarted], broadcast) == {"m1": Poke(5, 2)}
    fields: dict[str, Any] = {"reads": 2, "incarnation": "2"}
    for changed in ({"settings": "digest"}, {"incarnation": "1"}, {"incarnation": "d1f0"}):
        report = a_report("m1", 5, **(fields | changed))
        assert pokes.pods_behind([a_pod("m1", report)], broadcast, frozenset(), "digest") == []


@pytest.mark.parametrize(
    ("poke", "poked", "due", "next_due"),
    [
        (Poke(4, 3), 0.0, Poke(5, 1), 1.0),
        (Poke(5, 1), 0.75, None, 0.25),
        (Poke(5, 1), 1.0, Poke(5, 2), 2.0),
        (Poke(5, 3), 3.5, None, 0.5),
        (Poke(5, 5), 15.5, None, 0.5),
        (Poke(5, 5), 16.0, Poke(5, 6), 30.0),
        (Poke(5, 6), 29.5, None, 0.5),
        (Poke(5, 5000), 30.0, Poke(5, 5001), 30.0),
    ],
)
def test_poke_interval_doubles_up_to_thirty_seconds(
    poke: Poke, poked: float, due: Poke | None, next_due: float
) -> None:
    pods = [a_pod("m1", poke=poke, poked_for=poked)]
    due_pokes = pokes.due_pokes(pods, DOCUMENT)
    assert due_pokes == ({"m1": due} if due else {})
    assert pokes.seconds_until_next_poke(pods, due_pokes) == next_due
    assert pokes.due_pokes([a_pod("m0", terminating=True), *pods], DOCUMENT) == due_pokes


def test_poke_next_due_ignores_terminating_pods_and_takes_the_soonest() -> None:
    assert pokes.seconds_until_next_poke([], {}) == math.inf
    overdue = a_pod("m1", terminating=True, poke=Poke(5, 1), poked_for=2.0)
    assert pokes.seconds_until_next_poke([overdue], {}) == math.inf, "a terminating pod is not poked any more"
    at_once = a_pod("m1", terminating=True, poke=Poke(5, 1), poked_for=1.0)
    sooner, later = a_pod("m2", poke=Poke(5, 2), poked_for=0.5), a_pod("m3", poke=Poke(5, 4), poked_for=0.5)
    assert pokes.seconds_until_next_poke([at_once, later, sooner], {}) == 1.5


# Options of policies.

ROSTER = Roster.of(Q[:4], ["m1", "m2"], {Q[0]: "m1"})
INPUTS = StrategyInputs({"m1": "east"}, {Q[0]: 2.0}, {"m2": 3.0})
NAMED_QUEUES = [{"topic": "orders", "broker": "a", "ids": "1,3-4"}]
EAST = [{"broker": "a", "room": "east"}]


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("Averagely", {}, {}),
        ("Sticky", {}, {}),
        (
            "ByConfig",
            {
                "members": [
                    {"index": 2, "queues": [NAMED_QUEUES[0] | {"ids": "0"}]},
                    {"index": 1, "queues": NAMED_QUEUES},
                ]
            },
            {"members": {"m2": [Q[1], Q[3]]}},  # a range may be wider than the topic
        ),
        ("ByMachineRoom", {"rooms": ["east"]}, {"rooms": ["east"]}),
        (
            "MachineRoomNearby",
            {"roomLabel": "room", "brokers": EAST, "inner": "Sticky"},
            {"inner": "Sticky", "queueRooms": {"a": "east"}, "memberRooms": {"m1": "east"}},
        ),
        ("ConsistentHash", {"virtualNodes": 7}, {"virtualNodes": 7}),
        (
            "Balanced",
            {"roomLabel": "room", "brokers": EAST},
            {
                "queueWeights": {Q[0]: 2.0},
                "memberWeights": {"m2": 3.0},
                "queueRooms": {"a": "east"},
                "memberRooms": {"m1": "east"},
                "maxMoves": None,
            },
        ),
        ("Custom", {"name": "mine", "options": {"fast": True}}, {"name": "mine", "options": {"fast": True}}),
    ],
)
def test_policy_options_are_resolved_to_names_of_the_roster(
    strategy: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    block = strategy[0].lower() + strategy[1:]
    policy = a_policy(strategy=strategy, options={block: options} if options else {})
    assert resolve_options(policy, ROSTER, INPUTS) == expected


@pytest.mark.parametrize("strategy", ["ByConfig", "MachineRoomNearby", "Custom"])
def test_strategy_without_its_required_options_is_rejected_with_a_sentence(strategy: Any) -> None:
    with pytest.raises(ValueError, match=f"^Strategy {strategy} needs the option "):
        compute_owners(PolicySpec(strategy=strategy), ROSTER)


@pytest.mark.parametrize("strategy", ["ByMachineRoom", "ConsistentHash", "Balanced"])
def test_strategy_whose_options_are_optional_runs_without_them(strategy: Any) -> None:
    assert len(compute_owners(PolicySpec(strategy=strategy), ROSTER)) == 4


@pytest.mark.parametrize(
    ("budget", "weights", "max_moves"),
    [
        (None, {}, None),
        (3, {}, 3),
        (None, None, 1),
        (3, None, 1),
        (0, None, 0),
    ],
)
def test_balanced_without_measured_weights_allows_at_most_one_move(
    budget: int | None, weights: dict[Queue, float] | None, max_moves: int | None
) -> None:
    policy = a_policy(strategy="Balanced", **({} if budget is None else {"budget": {"maxMoves": budget}}))
    options = resolve_options(policy, ROSTER, StrategyInputs(queue_weights=weights))
    assert (options["maxMoves"], options["queueWeights"]) == (max_moves, {})


def test_unmanaged_consumer_presence_shares_queues_averagely_by_client_id() -> None:
    owners = share_with_unmanaged(ROSTER, ["10.0.0.2@old"], {"m1": "10.0.0.3@m1", "m2": "10.0.0.1@m2"})
    assert (owners.tolist(), str(owners.dtype)) == ([1, 1, -1, 0], "int32")
    assert share_with_unmanaged(ROSTER, ["m11"], {}).tolist() == [0, 0, -1, 1]


def test_unmanaged_consumer_duplicates_of_a_client_id_are_each_counted() -> None:
    assert share_with_unmanaged(ROSTER, ["m0", "m0"], {}).tolist() == [-1, -1, 0, 1], "of four: the second has none"
    assert share_with_unmanaged(ROSTER, ["m11", "m11"], {}).tolist() == [0, -1, -1, 1]


# Handovers.

CHANGED_SETTINGS = {"settings": "{}", "desired_settings": '{"model":"Clustering"}'}  # these alone need a new document


def test_scale_up_first_assignment_in_full() -> None:
    revoked = journal_record(plan(with_joiner(), NOW), "handover")
    assert (revoked["act"], revoked["proof"], revoked["state"]) == ("Revoke", "None", "Owned")
    assert written_document(with_joiner()) == Assignment(
        group="shop/orders",
        generation=6,
        issued_at=format_time(NOW),
        strategy="Sticky",
        members={"m1": Share("uid-m1", tuple(Q[:2])), "m2": Share("uid-m2", tuple(Q[3:5])), "m3": Share("uid-m3")},
        releasing={Q[2]: Release(M1, "m3", 6, format_time(NOW)), Q[5]: Release(M2, "m3", 6, format_time(NOW))},
        begun=BEGUN,
    )


def test_assignment_records_the_start_time_of_each_topic_and_never_resets_it() -> None:
    """A member needs it to choose the first offset of a queue that the group never consumed, also of a later queue."""
    retries = {"%RETRY%orders": a_view(1, "%RETRY%orders")}
    alone = a_pod("m1", a_report("m1", 0))
    first = written_document(a_snapshot(pods=(alone,), views={"orders": a_view(4), **retries}))
    assert first.begun == {"orders": format_time(NOW)}
    without_members = settled(
        document=first, pods=(), deleted_uids=frozenset({"uid-m1"}), views={"orders": a_view(8), **retries}
    )
    views = {"orders": a_view(8), "payments": a_view(2, "payments"), **retries}
    with_new_member = replace(without_members, pods=(a_pod("m2", a_report("m2", 0)),), spec=BOTH, views=views)
    later = plan(with_new_member, NOW + 900).document
    assert later
    assert later.begun == {"orders": format_time(NOW), "payments": format_time(NOW + 900)}
    payments_only = a_spec(subscriptions=[{"topic": "payments"}])
    last = plan(replace(with_new_member, document=later, pods=obeying(later), spec=payments_only), NOW + 999).document
    assert last
    assert last.begun == {"payments": format_time(NOW + 900)}


def test_forced_grant_of_a_topics_first_queues_records_its_start_time() -> None:
    document = a_document(6, members={"m1": Q[:3], "m2": ()}, barrier=6, begun={})
    silent = {"ready": False, "unreachable_for": LONG, "report": a_report("m2", 4)}
    forced = written_document(
        settled(document=document, pods=obeying(document, m1={"report": a_report("m1", 6, Q[:3])}, m2=silent))
    )
    assert forced.forced
    assert forced.begun == {"orders": format_time(NOW)}


def test_topic_without_a_route_gets_no_start_time() -> None:
    snapshot = settled(document=replace(DOCUMENT, begun={}), spec=BOTH, **CHANGED_SETTINGS)
    assert written_document(snapshot).begun == {"orders": format_time(NOW)}


@pytest.mark.parametrize("strategy", ["Averagely", "AveragelyByCircle"])
def test_rolling_update_does_not_rerun_a_strategy_that_moves_many_queues(strategy: str) -> None:
    joiner = a_pod("m3", a_report("m3", 0), age=4.0, stable_for=0.1)
    document = replace(DOCUMENT, strategy=strategy)
    during = settled(
        document=document,
        policy=a_policy(strategy=strategy),
        pods=(obeying(DOCUMENT)[1], joiner),
        deleted_uids=frozenset({"uid-m1"}),
        views={"orders": a_view(8)},
    )
    document_during = written_document(during)
    assert (owned(document_during), document_during.releasing) == ({"m2": [0, 3, 4, 5], "m3": [1, 2, 6, 7]}, {})
    at_rest = written_document(replace(during, pods=(during.pods[0], replace(joiner, stable_for=LONG, age=LONG))))
    assert at_rest.releasing


def test_rolling_update_runs_a_strategy_that_moves_little_or_assigns_first() -> None:
    starting = a_pod("m3", ready=False, age=3.0)
    pods = (*obeying(DOCUMENT), starting)
    sticky = settled(document=replace(DOCUMENT, strategy="Averagely"), pods=pods)
    assert written_document(sticky).strategy == "Sticky"
    averagely = a_policy(strategy="Averagely")
    members = (a_pod("m1", a_report("m1", 5)), a_pod("m2", a_report("m2", 5)))
    first = settled(document=a_document(), pods=(*members, starting), policy=averagely)
    assert owned(written_document(first)) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}


def test_budget_is_not_spent_by_queues_of_a_terminating_member() -> None:
    policy = a_policy(budget={"maxMoves": 1})
    document = a_document(members={"m1": Q[:2], "m2": Q[2:6]})
    m1, m2 = obeying(document)
    pods = (replace(m1, terminating=True, terminating_for=50.0), m2, JOINER)
    new_document = written_document(settled(document=document, policy=policy, pods=pods))
    assert list(new_document.releasing) == [Q[5]]


def test_budget_feeds_members_that_own_least_first_and_reports_the_gate() -> None:
    document = a_document(members={"m1": Q[:6], "m2": Q[6:7]})
    snapshot = settled(
        document=document, pods=(*obeying(document), JOINER), views={"orders": a_view(7)}, policy=a_policy()
    )
    assert {queue: release.to for queue, release in written_document(snapshot).releasing.items()} == {
        Q[3]: "m2",
        Q[4]: "m3",
        Q[5]: "m3",
    }
    limited = replace(snapshot, policy=a_policy(budget={"maxMoves": 1}))
    new_plan = plan(limited, NOW)
    assert new_plan.document
    assert list(new_plan.document.releasing) == [Q[4]]
    (line,) = [line for line in new_plan.journal_records if line["kind"] == "plan"]
    assert line["held"] == "BudgetSpent"
    assert journal_record(plan(snapshot, NOW))["held"] is None


@pytest.mark.parametrize(
    ("spent", "moves", "remaining", "requeue_after"),
    [
        ([(50.0, 1), (10.0, 1)], 2, 0, 10.0),
        ([(50.0, 1), (10.0, 1)], 3, 1, None),
        ([(60.0, 5)], 1, 1, None),
        ([(59.0, 5)], 1, 0, 1.0),
        ([(-300.0, 1)], 1, 0, 0.0),
        ([], 0, 0, 20.0),
    ],
)
def test_budget_refills_as_each_spent_move_leaves_the_window(
    spent: list[tuple[float, int]], moves: int, remaining: int, requeue_after: float | None
) -> None:
    document = replace(DOCUMENT, spent=tuple((format_time(NOW - ago), count) for ago, count in spent))
    pods = (*obeying(document), JOINER)
    policy = a_policy(budget={"maxMoves": moves, "per": "1m"})
    new_plan = plan(settled(document=replace(document, members=entry_for_joiner()), pods=pods, policy=policy), NOW)
    assert len(new_plan.document.releasing if new_plan.document else ()) == remaining
    if requeue_after is not None:
        assert new_plan.requeue_after == pytest.approx(requeue_after)
        assert conditions(new_plan)["Progressing"][1] == "BudgetSpent"


def entry_for_joiner() -> dict[str, Share]:
    return {**DOCUMENT.members, "m3": Share("uid-m3")}


def test_budget_counts_only_queues_taken_from_members_that_could_keep_them() -> None:
    budget = {"policy": a_policy(budget={"maxMoves": 4})}
    at = format_time(NOW)
    assert written_document(with_joiner(**budget)).spent == ((at, 2),)
    assert written_document(with_joiner()).spent == ()
    assert (
        written_document(settled(**budget, pods=obeying(DOCUMENT)[:1], deleted_uids=frozenset({"uid-m2"}))).spent == ()
    )
    assert written_document(settled(**budget, views={"orders": a_view(4)})).spent == ((at, 1),)
    waiting = a_document(members={"m1": Q[:2], "m2": Q[3:6]}, taken={Q[2]: ("m2", "m1")})
    slow = obeying(waiting, m2={"report": a_report("m2", 4, Q[2:6])})
    assert written_document(settled(**budget, **CHANGED_SETTINGS, document=waiting, pods=slow)).spent == ()
    just_spent = replace(DOCUMENT, spent=((at, 2),))
    assert written_document(settled(**CHANGED_SETTINGS, document=just_spent)).spent == ()


def test_budget_times_in_the_future_count_as_spent_now() -> None:
    document = replace(DOCUMENT, spent=((format_time(NOW + 300), 2), (format_time(NOW - 10), 1)))
    policy = a_policy(budget={"maxMoves": 5})
    new_document = written_document(settled(document=document, policy=policy))
    assert new_document.spent == ((format_time(NOW), 2), (format_time(NOW - 10), 1))


def test_handover_to_a_departed_member_returns_queues_to_the_owner_still_consuming() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, taken={Q[4]: ("m2", "m3"), Q[5]: ("m1", "m3")})
    pods = obeying(document, m1={"report": a_report("m1", 4, [*Q[:2], Q[5]])}, m2={"report": a_report("m2", 4, Q[2:5])})
    new_plan = plan(settled(document=document, pods=pods), NOW)
    assert new_plan.document
    assert (owned(new_plan.document), new_plan.document.releasing) == ({"m1": [0, 1, 5], "m2": [2, 3, 4]}, {})
    assert [
        (line["act"], line["from"], line["to"]) for line in new_plan.journal_records if line["kind"] == "handover"
    ] == [
        ("Return", "m1", "m1"),
        ("Return", "m2", "m2"),
    ]


def test_handover_in_flight_keeps_its_taker_and_picks_another_if_the_taker_ended() -> None:
    taken = {Q[2]: ("m1", "m4"), Q[5]: ("m2", "m3")}
    document = a_document(members={"m1": Q[:2], "m2": Q[3:5], "m3": (), "m4": ()}, taken=taken)
    unreleased = {
        "m1": {"report": a_report("m1", 4, Q[:3])},
        "m2": {"report": a_report("m2", 4, Q[3:6])},
        "m3": {"report": a_report("m3", 5)},
        "m4": {"report": a_report("m4", 5)},
    }
    both = settled(document=document, pods=obeying(document, **unreleased), **CHANGED_SETTINGS)
    assert {queue: release.to for queue, release in written_document(both).releasing.items()} == {
        Q[2]: "m4",
        Q[5]: "m3",
    }
    m1, m2, m3, _ = both.pods
    without_taker = (replace(m1, ready=False, stable_for=LONG), m2, m3)
    new_document = written_document(replace(both, pods=without_taker, deleted_uids=frozenset({"uid-m4"})))
    assert new_document.releasing[Q[2]] == Release(M1, "m3", 5, format_time(NOW - LONG))


def test_queue_removed_from_the_route_is_released_and_then_dropped() -> None:
    taken = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken={Q[5]: ("m2", None)})
    route = {"orders": a_view(5)}
    draining = obeying(taken, m2={"report": a_report("m2", 4, Q[3:6])})
    assert plan(settled(document=taken, pods=draining, views=route), NOW).document is None
    drop_plan = plan(settled(document=taken, views=route), NOW)
    assert drop_plan.document
    assert drop_plan.document.releasing == {}
    assert [(line["act"], line["from"]) for line in drop_plan.journal_records if line["kind"] == "handover"] == [
        ("Drop", "m2")
    ]
    young = replace(taken, issued_at=format_time(NOW - 0.25))
    debounced = plan(settled(document=young, views=route), NOW)
    assert debounced.document is None
    assert debounced.requeue_after == pytest.approx(0.25)


def test_queue_no_longer_assigned_is_dropped_when_its_holder_ended() -> None:
    m2_ended = {"pods": obeying(DOCUMENT)[:1], "deleted_uids": frozenset({"uid-m2"})}
    assert owned(written_document(settled(**m2_ended, views={"orders": a_view(4)}))) == {"m1": [0, 1, 2, 3]}
    named = [{"index": 0, "queues": [{"topic": "orders", "broker": "a", "ids": "0-2"}]}]
    by_config = a_policy(strategy="ByConfig", options={"byConfig": {"members": named}})
    assert owned(written_document(settled(**m2_ended, policy=by_config))) == {"m1": [0, 1, 2]}


def test_queue_outside_the_route_is_revoked_while_others_are_free() -> None:
    document = a_document(members={"m1": [Q[0], Q[9]]})
    new_document = written_document(settled(document=document, views={"orders": a_view(3)}))
    assert (owned(new_document), list(new_document.releasing)) == ({"m1": [0, 1, 2]}, [Q[9]])


@pytest.mark.parametrize(
    ("pods", "deleted", "stays"),
    [
        ((), (), True),
        ((), ("uid-m1", "uid-m2"), False),
        ((a_pod("m1", a_report("m1", 6, Q[:3])), a_pod("m2", a_report("m2", 5, Q[3:6]))), (), False),
        ((a_pod("m1", a_report("m1", 6, Q[:3])), a_pod("m2", a_report("m2", 4, Q[3:6]))), (), True),
        ((a_pod("m1", a_report("m1", 6, Q[:3])), a_pod("m2", a_report("m2", 6, Q[:1]))), (), True),
        ((a_pod("m1", a_report("m1", 6, Q[:3])), a_pod("m2", a_report("m2", 6, Q[1:2]))), (), False),
        ((a_pod("m1", a_report("m1", 6, Q[:3])),), (), True),
        ((a_pod("m1", a_report("m1", 6, Q[:3])),), ("uid-m2",), False),
        ((a_pod("m1", a_report("m1", 6)), a_pod("m2", a_report("m2", 3), ended=True)), (), False),
        ((a_pod("m1", a_report("m1", 6)), a_pod("m2", started=False)), (), False),
        ((a_pod("m1", a_report("m1", 6)), a_pod("m2")), (), True),
    ],
)
def test_forced_grant_stays_marked_until_no_other_member_may_consume_the_queue(
    pods: tuple[PodSnapshot, ...],
    deleted: tuple[str, ...],
    *,
    stays: bool,
) -> None:
    document = replace(DOCUMENT, generation=6, forced={Q[0]: 5})
    snapshot = settled(document=document, pods=pods, deleted_uids=frozenset(deleted), **CHANGED_SETTINGS)
    assert written_document(snapshot).forced.get(Q[0]) == (5 if stays else None)
    forced_earlier = replace(document, forced={Q[0]: 1})
    without_m2 = settled(document=forced_earlier, pods=obeying(document)[:1], **CHANGED_SETTINGS)
    assert written_document(without_m2).forced == {Q[0]: 1}, "it is unknown which generation the missing member obeys"


def test_member_of_the_same_name_ending_does_not_end_the_owner() -> None:
    m1, _ = obeying(DOCUMENT)
    ended = a_pod("m2", uid="new", ended=True, ready=False)
    new_plan = plan(settled(pods=(m1, ended), **CHANGED_SETTINGS), NOW)
    assert new_plan.document
    assert owned(new_plan.document) == {"m1": [0, 1, 2], "m2": []}
    assert {release.holder for release in new_plan.document.releasing.values()} == {M2}
    assert new_plan.verify_ended == (M2,)


def test_assignment_barrier_uses_reported_queues_only_of_members_past_it() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    (m1,) = obeying(document)
    lost = a_pod("m2", a_report("m2", 4, Q[3:5]), ready=False, stable_for=LONG, unreachable_for=11.0)
    assert written_document(settled(document=document, pods=(m1, lost))).forced == dict.fromkeys(Q[3:6], 6)
    for changed, deleted in (({"ended": True}, ()), ({}, ("uid-m2",))):
        pods = (m1, a_pod("m2", a_report("m2", 5, Q[3:5]), **changed))
        new_document = written_document(settled(document=document, pods=pods, deleted_uids=frozenset(deleted)))
        assert owned(new_document) == {"m1": [0, 1, 2, 3, 4, 5]}
    without_barrier = replace(document, barrier=0)
    reporting = a_pod("m2", a_report("m2", 5, Q[3:5]))
    assert owned(written_document(settled(document=without_barrier, pods=(m1, reporting)))) == {
        "m1": [0, 1, 2],
        "m2": [3, 4, 5],
    }


def test_assignment_barrier_falls_once_every_member_is_past_it() -> None:
    document = replace(DOCUMENT, barrier=5)
    past, behind = a_pod("m3", a_report("m3", 5)), a_pod("m3", a_report("m3", 4), ready=False)
    for pod, barrier in ((past, 0), (behind, 5)):
        snapshot = settled(document=document, pods=(*obeying(DOCUMENT), pod), **CHANGED_SETTINGS)
        assert written_document(snapshot).barrier == barrier


def test_assignment_barrier_stays_while_a_pod_of_the_document_is_neither_listed_nor_known_to_have_ended() -> None:
    """A new leader's first list of pods may be outdated, and the pod may still drain queues without an owner."""
    document = a_document(members={"m1": Q[:3], "m2": ()}, barrier=5)
    m1, m2 = obeying(document)
    assert plan(settled(document=document, pods=(m1,)), NOW).verify_ended == (M2,)
    new_document = written_document(settled(document=document, pods=(m1,), **CHANGED_SETTINGS))
    assert owned(new_document) == {"m1": [0, 1, 2], "m2": []}
    assert new_document.barrier == 5
    for pods, deleted in (((m1, m2), ()), ((m1,), ("uid-m2",))):
        new_document = written_document(settled(document=document, pods=pods, deleted_uids=frozenset(deleted)))
        assert set().union(*owned(new_document).values()) == {0, 1, 2, 3, 4, 5}


def test_policy_missing_still_grants_orphans_that_were_in_handover() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken={Q[5]: ("m3", "m2")})
    snapshot = settled(document=document, policy=None, deleted_uids=frozenset({"uid-m3"}))
    assert owned(written_document(snapshot)) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}
    without_taker = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken={Q[5]: ("m3", None)})
    assert owned(written_document(replace(snapshot, document=without_taker))) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}


def test_balanced_places_queues_by_the_rooms_of_pods_and_brokers() -> None:
    brokers = [{"broker": "a", "room": "east"}, {"broker": "b", "room": "west"}]
    policy = a_policy(strategy="Balanced", options={"balanced": {"roomLabel": "room", "brokers": brokers}})
    pods = (a_pod("m1", a_report("m1", 0), room="west"), a_pod("m2", a_report("m2", 0), room="east"))
    snapshot = a_snapshot(policy=policy, pods=pods, views={"orders": a_view(2, brokers=("a", "b"))})
    shares = {
        name: {queue.broker for queue in share.queues} for name, share in written_document(snapshot).members.items()
    }
    assert shares == {"m1": {"b"}, "m2": {"a"}}


def test_unmanaged_consumer_presence_identifies_members_by_client_id() -> None:
    ids = {"m1": "z@m1", "m2": ""}
    pods = tuple(a_pod(name, a_report(name, 0), client_id=client) for name, client in ids.items())
    document = written_document(a_snapshot(pods=pods, unmanaged_consumers=("10.0.0.1@old",)))
    assert owned(document) == {"m1": [4, 5], "m2": [2, 3]}


@pytest.mark.parametrize(("age", "moves"), [(0.0, 0), (0.25, 0), (0.5, 2), (-0.5, 2), (-300.0, 2)])
def test_debounce_delays_moves_and_ignores_timestamps_in_the_future(age: float, moves: int) -> None:
    document = replace(DOCUMENT, members=entry_for_joiner(), issued_at=format_time(NOW - age))
    new_plan = plan(settled(document=document, pods=(*obeying(DOCUMENT), JOINER)), NOW)
    assert len(new_plan.document.releasing if new_plan.document else ()) == moves


def in_flight(*ages: float, to: str | None = "m3", **changed: Any) -> Snapshot:
    """Return a snapshot with a joiner while m2 still drains one queue of each age, for the joiner by default."""
    releasing = {Q[5 - n]: Release(M2, to, 5, format_time(NOW - age)) for n, age in enumerate(ages)}
    owned_queues = Q[3 : 6 - len(ages)]
    document = replace(a_document(members={"m1": Q[:3], "m2": owned_queues, "m3": ()}), releasing=releasing)
    draining = a_report("m2", 5, owned_queues, draining=list(releasing))
    pods = obeying(document, m2={"report": draining})
    policy = a_policy(handover={"drainTimeout": "1s"})
    return settled(**{"document": document, "pods": pods, "policy": policy} | changed)


@pytest.mark.parametrize(
    ("ages", "requeue_after"), [((0.0,), 6.0), ((5.0,), 1.0), ((-0.5,), 6.0), ((-300.0,), 6.0), ((3.0, 36.0), 3.0)]
)
def test_gate_waits_for_the_youngest_handover_plus_a_margin(ages: tuple[float, ...], requeue_after: float) -> None:
    new_plan = plan(in_flight(*ages), NOW)
    assert new_plan.document is None
    assert new_plan.requeue_after == pytest.approx(requeue_after)


def test_gate_does_not_wait_for_a_handover_that_is_over_or_cancelled() -> None:
    assert Q[2] in written_document(in_flight(6.5, 7.0)).releasing
    released = a_document(members={"m1": Q[:2], "m2": Q[2:5], "m3": ()}, taken={Q[5]: ("m1", "m2")}, age=1.0)
    assert set(written_document(settled(document=released)).releasing) == {Q[4]}
    taken = {Q[4]: ("m2", "m9")}
    returning = a_document(members={"m1": Q[:3], "m2": [Q[3], Q[5]], "m3": ()}, taken=taken, age=1.0)
    unreleased = obeying(returning, m2={"report": a_report("m2", 4, Q[3:6])})
    assert set(written_document(settled(document=returning, pods=unreleased)).releasing) == {Q[2], Q[5]}


def test_gate_waits_for_a_handover_to_no_member() -> None:
    snapshot = in_flight(1.0, to=None, views={"orders": a_view(5)})
    assert plan(snapshot, NOW).document is None


# When an assignment is written, and when the group is requeued.


@pytest.mark.parametrize(
    ("age", "writes", "requeue_after"),
    [(0.5, True, None), (0.25, False, 0.25), (0.0, False, 0.5), (-0.5, True, None), (-300.0, True, None)],
)
def test_debounce_delays_assignment_writes_that_move_no_queue(
    age: float,
    requeue_after: float | None,
    *,
    writes: bool,
) -> None:
    young = replace(DOCUMENT, issued_at=format_time(NOW - age))
    everyone = replace(young, strategy="", everyone=tuple(Q[:6]), members={"m1": Share("uid-m1")})
    consuming_all = (a_pod("m1", a_report("m1", 5, Q[:6])),)
    for snapshot in (
        settled(document=young, **CHANGED_SETTINGS),
        settled(document=everyone, pods=consuming_all, spec=a_spec(messageModel="Broadcasting"), **CHANGED_SETTINGS),
    ):
        new_plan = plan(snapshot, NOW)
        assert bool(new_plan.document) is writes
        assert requeue_after is None or new_plan.requeue_after == pytest.approx(requeue_after)


@pytest.mark.parametrize(("at", "writes"), [(-0.5, False), (0.0, False), (0.5, True), (300.0, True)])
def test_budget_entry_from_the_future_is_corrected(at: float, *, writes: bool) -> None:
    policy = a_policy(budget={"maxMoves": 5})
    document = replace(DOCUMENT, spent=((format_time(NOW + at), 1),))
    assert bool(plan(settled(document=document, policy=policy), NOW).document) is writes


@pytest.mark.parametrize("case", ["Clustering", "Broadcasting", "no policy"])
def test_budget_entry_from_the_future_is_corrected_once(case: str) -> None:
    """An operator whose clock was ahead has written the entry. If it stayed, each reconcile would write it again."""
    changes: dict[str, Any] = {"policy": None if case == "no policy" else a_policy(budget={"maxMoves": 5})}
    document = replace(DOCUMENT, spent=((format_time(NOW + 300), 1),))
    if case == "Broadcasting":
        changes["spec"] = a_spec(messageModel="Broadcasting")
        members = {name: Share(f"uid-{name}") for name in ("m1", "m2", "m3")}
        document = replace(document, everyone=tuple(Q), members=members)
    corrected = written_document(settled(document=document, **changes))
    assert corrected.spent == ((format_time(NOW), 1),)
    later = NOW + 60
    assert plan(settled(document=corrected, **changes), later).document is None


def test_strategy_change_that_moves_nothing_is_stored() -> None:
    new_plan = plan(settled(policy=a_policy(strategy="Balanced")), NOW)
    assert new_plan.document == replace(DOCUMENT, generation=6, issued_at=format_time(NOW), strategy="Balanced")
    assert journal_record(new_plan)["message"] == "The strategy is now Balanced"


def with_m1(**changed: Any) -> tuple[PodSnapshot, ...]:
    return obeying(DOCUMENT, m1=changed)


@pytest.mark.parametrize(
    ("changed", "requeue_after"),
    [
        ({}, 20.0),
        ({"policy": a_policy(triggers={"resync": "7s"})}, 7.0),
        ({"pods": with_m1(ready=False, stable_for=9.0)}, 1.0),
        ({"pods": with_m1(ready=False, stable_for=3.0, unreachable_for=8.0)}, 2.0),
        ({"pods": with_m1(ready=False, stable_for=3.0), "policy": a_policy(handover={"lostAfter": "4s"})}, 4.0),
        ({"pods": with_m1(stable_for=9.5)}, 20.0),
        ({"pods": (*obeying(DOCUMENT), a_pod("m0", ended=True, ready=False, stable_for=9.5))}, 20.0),
        ({"pods": with_m1(ready=False, stable_for=20.0), "policy": a_policy(triggers={"unreadyGrace": "30s"})}, 10.0),
        ({"pods": with_m1(cut_off_brokers={"a": 9.0, "b": 3.0})}, 1.0),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", age=17.0))}, 3.0),
        ({"views": {"orders": a_view(stable_for=38.0), "%RETRY%orders": None}}, 2.0),
        ({"views": {"orders": a_view(stable_for=40.0)}}, 20.0),
        ({"views": {"orders": a_view(stable_for=40.5)}}, 20.0),
    ],
)
def test_reconcile_is_requeued_when_time_alone_may_change_the_plan(
    changed: dict[str, Any], requeue_after: float
) -> None:
    new_plan = plan(settled(**changed), NOW)
    assert new_plan.document is None
    assert new_plan.requeue_after == pytest.approx(requeue_after)


def test_reconcile_requeue_time_for_a_silent_holder_a_poke_and_a_quiet_broadcast() -> None:
    taken = a_document(members={"m1": Q[:2], "m2": Q[3:6]}, taken={Q[2]: ("m2", "m1")}, age=119.0)
    silent = obeying(taken, m2={"report": a_report("m2", 4, Q[2:6]), "poke": Poke(5, 9), "poked_for": 0.0})
    assert plan(settled(document=taken, pods=silent), NOW).requeue_after == pytest.approx(1.0)
    assert plan(with_joiner(), NOW).requeue_after == 1.0, "when the pokes for the new document are due"
    everyone = a_document(strategy="", everyone=tuple(Q[:6]), members={"m1": ()})
    pods = (a_pod("m1", a_report("m1", 5, Q[:6])),)
    new_plan = plan(settled(document=everyone, pods=pods, spec=a_spec(messageModel="Broadcasting")), NOW)
    assert (new_plan.document, new_plan.requeue_after) == (None, 20.0)


# Broadcasting.

BROADCAST = a_document(members={"m1": (), "m2": ()}, strategy="", everyone=tuple(Q[:6]))
BROADCASTING_GROUP: dict[str, Any] = {
    "spec": a_spec(messageModel="Broadcasting"),
    "document": BROADCAST,
    "pods": tuple(a_pod(name, a_report(name, 5, Q[:6])) for name in ("m1", "m2")),
}


def test_broadcasting_queues_are_listed_in_order() -> None:
    backwards = a_view()._replace(queues=tuple(reversed(Q[:6])))
    assert plan(settled(**BROADCASTING_GROUP, views={"orders": backwards}), NOW).document is None
    more = written_document(settled(**BROADCASTING_GROUP, views={"orders": a_view(8)}))
    assert more == replace(BROADCAST, generation=6, issued_at=format_time(NOW), everyone=tuple(Q[:8]))


def test_broadcasting_without_a_route_admits_members_and_keeps_its_queues() -> None:
    pods = (*BROADCASTING_GROUP["pods"], JOINER)
    document = written_document(settled(**BROADCASTING_GROUP | {"pods": pods}, views={"orders": None}))
    members = {**BROADCAST.members, "m3": Share("uid-m3")}
    assert document == replace(BROADCAST, generation=6, issued_at=format_time(NOW), members=members)
    without_document = settled(
        **BROADCASTING_GROUP | {"pods": pods, "document": None, "damage": ""}, views={"orders": None}
    )
    first = plan(replace(without_document, pods=(JOINER,)), NOW).document
    assert first == Assignment(
        group="shop/orders", generation=1, issued_at=format_time(NOW), members={"m3": Share("uid-m3")}, everyone=()
    )


def test_broadcasting_switch_from_clustering_and_back_in_full() -> None:
    release = Release(M2, "m1", 5, format_time(NOW - LONG))
    document = replace(DOCUMENT, releasing={Q[9]: release}, forced={Q[0]: 4}, barrier=5, spent=())
    broadcasting = written_document(settled(document=document, spec=a_spec(messageModel="Broadcasting")))
    members = {"m1": Share("uid-m1"), "m2": Share("uid-m2")}
    assert broadcasting == replace(BROADCAST, generation=6, issued_at=format_time(NOW), members=members)
    clustering_plan = plan(settled(**BROADCASTING_GROUP | {"spec": a_spec()}), NOW)
    assert clustering_plan.document == replace(
        BROADCAST, generation=6, issued_at=format_time(NOW), everyone=None, barrier=6
    )


# Members to poll, to drain and to verify.

DRAINING = a_report("m2", 5, Q[3:6], draining=[Q[8]])
DISAGREEING_PODS = (  # m1 reaches a broker that m3 missed at its last report
    *obeying(DOCUMENT, m1={"report": a_report("m1", 5, Q[:2], brokers={"a": True})}),
    a_pod("m3", a_report("m3", 5, brokers={"a": False}), cut_off_brokers={"a": 1.0}),
)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, ""),
        ({"pods": with_m1(unreachable_for=3.0)}, "m1"),
        ({"pods": with_m1(report=a_report("m1", 4, Q[:2]))}, "m1"),
        ({"pods": with_m1(report=None)}, "m1"),
        ({"pods": with_m1(report=None), "document": replace(DOCUMENT, barrier=5)}, "m1"),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", ready=False))}, "m3"),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", ready=False, started=False))}, ""),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", ready=False, ended=True))}, ""),
        ({"pods": DISAGREEING_PODS}, "m1 m3"),
        ({"pods": (*DISAGREEING_PODS[:-1], replace(DISAGREEING_PODS[-1], ready=False, ended=True))}, ""),
        # No pod reaches broker c.
        ({"pods": (replace(DISAGREEING_PODS[0], cut_off_brokers={"c": 0.0}), obeying(DOCUMENT)[1])}, ""),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", ready=False, unreachable_for=3.0, ended=True, started=False))}, ""),
        ({"pods": obeying(DOCUMENT, m2={"report": DRAINING})}, ""),
        ({"pods": obeying(DOCUMENT, m2={"report": DRAINING}), "document": replace(DOCUMENT, barrier=5)}, "m2"),
        ({"pods": obeying(DOCUMENT, m2={"report": a_report("m2", 5, (), draining=Q[2:], state="draining")})}, "m2"),
    ],
)
def test_report_is_awaited_only_if_it_could_change_the_plan(changed: dict[str, Any], names: str) -> None:
    new_plan = plan(settled(**changed), NOW)
    assert " ".join(sorted(new_plan.members_to_poll)) == names


def test_status_counts_queues_in_handover_without_a_route() -> None:
    assert plan(in_flight(1.0, views={"orders": None}), NOW).status["queues"] == 6


def test_report_of_a_draining_member_is_awaited() -> None:
    assert plan(in_flight(1.0), NOW).members_to_poll == {"m2"}


def test_membership_confirms_absent_owners_in_order_unless_known_to_be_deleted() -> None:
    taken = {Q[5]: ("m2", "m1"), Q[6]: ("m0", "m1")}
    document = a_document(members={"m1": Q[:3], "m4": (), "m3": Q[3:5]}, taken=taken)
    pods = (a_pod("m1", a_report("m1", 5, Q[:3])),)
    new_plan = plan(settled(document=document, pods=pods, deleted_uids=frozenset({"uid-m4", "uid-m0"})), NOW)
    assert new_plan.verify_ended == (M2, M3)
    young = a_document(members={"m1": Q[:6], "m4": ()}, age=0.25)
    unwritten = plan(settled(document=young, pods=obeying(young)[:1], deleted_uids=frozenset({"uid-m4"})), NOW)
    assert (unwritten.document, unwritten.verify_ended) == (None, ())


def test_drain_final_is_requested_once_and_only_from_terminating_members() -> None:
    final = {"report": a_report("m2", 5, Q[3:6], state="draining", final=True)}
    for changed, holders in (
        ({"terminating": True}, (M2,)),
        ({"terminating": True, "report": None}, (M2,)),
        ({"terminating": True, **final}, ()),
        (final, ()),
        ({"terminating": True, "ended": True}, ()),
    ):
        assert plan(settled(pods=obeying(DOCUMENT, m2=changed)), NOW).members_to_drain == holders


# Status, Events and journal.


def journal_record(new_plan: Plan, kind: str = "plan") -> dict[str, Any]:
    return dict(next(line for line in new_plan.journal_records if line["kind"] == kind))


def with_ended(*names: str) -> dict[str, Any]:
    deleted_uids = frozenset(f"uid-{name}" for name in names)
    return {"pods": tuple(pod for pod in obeying(THREE_MEMBERS) if pod.name not in names), "deleted_uids": deleted_uids}


def with_changed(name: str, **changed: Any) -> dict[str, Any]:
    return {"pods": obeying(THREE_MEMBERS, **{name: changed})}


def two_topics(*topics: str, **views: Any) -> dict[str, Any]:
    return {"spec": a_spec(subscriptions=[{"topic": topic} for topic in topics]), "views": views}


SILENT_FOR_10_SECONDS = {"ready": False, "unreachable_for": 10.0}
THREE_MEMBERS = a_document(members={"m1": Q[:2], "m2": Q[2:4], "m3": Q[4:6]})
UNOWNED = {"document": a_document(2), "pods": (JOINER,)}
M2_CUT_OFF: dict[str, dict[str, Any]] = {
    "m1": {"report": a_report("m1", 5, Q[:2], brokers={"a": True})},
    "m2": {"report": a_report("m2", 5, Q[2:4], brokers={"a": False}), "cut_off_brokers": {"a": 10.0}},
}
DRAINED = a_report("m2", 5, state="drained", final=True)
PAYMENTS = a_view(1, topic="payments")
WEIGHED = {"document": replace(THREE_MEMBERS, strategy="Balanced"), "policy": a_policy(strategy="Balanced")}


@pytest.mark.parametrize(
    ("changed", "reason", "message"),
    [
        ({"spec": a_spec(paused=True)}, "GroupPaused", "The group is paused"),
        ({"document": None, "pods": ()}, "FirstAssignment", "A new group"),
        (UNOWNED | {"document": a_document(1)}, "FirstAssignment", "A new group"),
        (UNOWNED, "GroupResumed", "No queue had an owner"),
        (UNOWNED | {"document": a_document(2, barrier=2)}, "FirstAssignment", "A new group"),
        (with_ended("m2"), "MemberTerminated", "m2 ended"),
        (with_ended("m3", "m1"), "MemberTerminated", "m1, m3 ended"),
        (with_changed("m2", ended=True), "MemberTerminated", "m2 ended"),
        (
            with_changed("m2", uid="new", report=a_report("m2", 0, uid="new"))
            | {"deleted_uids": frozenset({"uid-m2"})},
            "MemberTerminated",
            "m2 ended",
        ),
        (
            with_ended("m2") | {"document": a_document(taken={Q[0]: ("m2", None)})},
            "MemberTerminated",
            "m2 ended",
        ),
        (with_changed("m2", ready=False, unreachable_for=10.0), "MemberLost", "m2 is not ready and does not respond"),
        (
            {"pods": obeying(THREE_MEMBERS, m2=SILENT_FOR_10_SECONDS, m3=SILENT_FOR_10_SECONDS)},
            "MemberLost",
            "m2, m3 are not ready and do not respond",
        ),
        (with_changed("m2", terminating=True, report=DRAINED), "MemberLeft", "m2 is leaving"),
        (
            {"pods": obeying(THREE_MEMBERS, m1={"terminating": True, "report": DRAINED}, m3={"ended": True})},
            "MemberTerminated",
            "m3 ended; m1 is leaving",
        ),
        (with_changed("m2", ready=False), "MemberUnready", "m2 has not been ready for longer than its grace"),
        (
            {"pods": obeying(THREE_MEMBERS, **M2_CUT_OFF)},
            "BrokerUnreachable",
            "m2 cannot reach a broker that other members reach",
        ),
        ({"views": {"orders": a_view(8)}}, "QueuesAdded", "2 queues added: orders/a/6, orders/a/7"),
        ({"views": {"orders": a_view(7)}}, "QueuesAdded", "1 queue added: orders/a/6"),
        (
            {"views": {"orders": a_view(10)}},
            "QueuesAdded",
            "4 queues added: orders/a/6, orders/a/7, orders/a/8 and 1 more",
        ),
        ({"views": {"orders": a_view(9)}}, "QueuesAdded", "3 queues added: orders/a/6, orders/a/7, orders/a/8"),
        ({"views": {"orders": a_view(5)}}, "QueuesRemoved", "1 queue removed: orders/a/5"),
        (
            {"views": {"orders": a_view(), "%RETRY%orders": a_view(1, topic="%RETRY%orders")}},
            "QueuesAdded",
            "1 queue added: %RETRY%orders/a/0",
        ),
        (
            two_topics("payments", "orders", orders=a_view(), payments=PAYMENTS),
            "SubscriptionChanged",
            "The subscription is now orders, payments",
        ),
        (
            two_topics("payments", "orders", orders=a_view(5), payments=PAYMENTS),
            "SubscriptionChanged",
            "The subscription is now orders, payments",
        ),
        (
            two_topics(*"edcba", **{topic: a_view(1, topic=topic) for topic in "abcde"}),
            "SubscriptionChanged",
            "The subscription is now a, b, c and 2 more",
        ),
        (
            {"document": a_document(members={"m1": [*Q[:2], *PAYMENTS.queues], "m2": Q[2:4], "m3": Q[4:6]})},
            "SubscriptionChanged",
            "The subscription is now orders",
        ),
        (two_topics("payments", payments=PAYMENTS), "SubscriptionChanged", "The subscription is now payments"),
        ({"pods": (*obeying(THREE_MEMBERS), a_pod("m4", a_report("m4", 0)))}, "MemberJoined", "m4 joined"),
        ({"policy": a_policy(strategy="Balanced")}, "PolicyChanged", "The strategy is now Balanced"),
        (
            {"unmanaged_consumers": ("a", "b"), "policy": a_policy()},
            "UnmanagedConsumers",
            "2 unmanaged consumers are in the group: a, b; queues are shared by their strategy, Averagely",
        ),
        (
            WEIGHED | {"queue_weights": dict.fromkeys(Q[:6], 1.0) | {Q[0]: 9.0}},
            "LoadShifted",
            "The weights of queues or the rooms of members changed",
        ),
        (CHANGED_SETTINGS, "SettingsChanged", "The group's settings or members changed; no queue moves"),
    ],
)
def test_journal_gives_the_reason_why_queues_change_hands(changed: dict[str, Any], reason: str, message: str) -> None:
    plan_record = journal_record(plan(settled(**{"document": THREE_MEMBERS} | changed), NOW))
    assert (plan_record["reason"], plan_record["message"]) == (reason, message)


INVALID_SPEC = Finding(Reason.INVALID_SPEC, "spec.subscriptions: expected an array")
NO_MEMBER_METADATA = Finding(
    Reason.BROKER_METADATA_UNAVAILABLE,
    "The broker returned no metadata of the group's members; the present assignment stays in force",
)
NO_PAYMENTS_ROUTE = Finding(
    Reason.BROKER_METADATA_UNAVAILABLE,
    "The broker returned no metadata of topic payments; the present assignment stays in force",
)
NO_ORDERS_ROUTE = NO_PAYMENTS_ROUTE._replace(message=NO_PAYMENTS_ROUTE.message.replace("payments", "orders"))
SWITCHED_OFF = Finding(Reason.CONSUMPTION_DISABLED, "The group is switched off at broker-a")
UNREACHABLE = Finding(Reason.BROKER_UNREACHABLE, "broker-a cannot be reached")
UNKNOWN_TOPIC = Finding(Reason.UNKNOWN_TOPIC, "There is no topic orders")
BOTH = a_spec(subscriptions=[{"topic": "orders"}, {"topic": "payments"}])


@pytest.mark.parametrize(
    ("changed", "ready", "degraded", "problems"),
    [
        ({}, ("True", "Settled", "6 queues, 2 members"), ("False", "Settled", "No problems"), {}),
        (
            {"spec": None},
            ("False", "InvalidSpec", "The group's spec is invalid"),
            ("False", "Settled", "No problems"),
            {},
        ),
        (
            {"spec": None, "problems": (INVALID_SPEC,)},
            ("False", *INVALID_SPEC),
            ("True", *INVALID_SPEC),
            {"InvalidSpec": INVALID_SPEC},
        ),
        (
            {"spec": a_spec(paused=True), "document": a_document(members={"m1": (), "m2": ()})},
            ("True", "GroupPaused", "spec.paused is set: no member consumes"),
            ("False", "Settled", "No problems"),
            {},
        ),
        (
            {"spec": a_spec(paused=True), "document": a_document(), "pods": ()},
            ("True", "GroupPaused", "spec.paused is set: no member consumes"),
            ("False", "Settled", "No problems"),
            {},
        ),
        (
            {"problems": (SWITCHED_OFF,)},
            ("False", *SWITCHED_OFF),
            ("True", *SWITCHED_OFF),
            {"ConsumptionDisabled": SWITCHED_OFF},
        ),
        (
            {"problems": (UNREACHABLE,)},
            ("True", "Settled", "6 queues, 2 members"),
            ("True", *UNREACHABLE),
            {"BrokerUnreachable": UNREACHABLE},
        ),
        (
            {"spec": BOTH, "problems": (INVALID_SPEC, INVALID_SPEC._replace(message="again"))},
            ("True", "Settled", "6 queues, 2 members"),
            ("True", "InvalidSpec", f"{INVALID_SPEC.message}; again; {NO_PAYMENTS_ROUTE.message}"),
            {"InvalidSpec": INVALID_SPEC, "BrokerMetadataUnavailable": NO_PAYMENTS_ROUTE},
        ),
        (
            {"document": a_document(members={"m1": (), "m2": ()}), "views": {"orders": None}},
            ("False", *NO_ORDERS_ROUTE),
            ("True", *NO_ORDERS_ROUTE),
            {"BrokerMetadataUnavailable": NO_ORDERS_ROUTE},
        ),
        (
            {
                "document": a_document(members={"m1": (), "m2": ()}),
                "views": {"orders": None},
                "problems": (Finding(Reason.UNMANAGED_CONSUMERS, "somebody"), UNKNOWN_TOPIC),
            },
            ("False", *UNKNOWN_TOPIC),
            ("True", "UnknownTopic", f"{UNKNOWN_TOPIC.message}; {NO_ORDERS_ROUTE.message}"),
            {
                "UnmanagedConsumers": Finding(Reason.UNMANAGED_CONSUMERS, "somebody"),
                "BrokerMetadataUnavailable": NO_ORDERS_ROUTE,
                "UnknownTopic": UNKNOWN_TOPIC,
            },
        ),
        (
            {"pods": (), "deleted_uids": frozenset({"uid-m1", "uid-m2"})},
            ("False", "NoMembers", "The group has no member to consume 6 queues"),
            ("True", "NoMembers", "The group has no member to consume 6 queues"),
            {"NoMembers": Finding(Reason.NO_MEMBERS, "The group has no member to consume 6 queues")},
        ),
        (
            {"views": {"orders": a_view(8)}, "unmanaged_consumers": None},
            ("False", "QueuesUnowned", "2 queues without an owner"),
            (
                "True",
                "BrokerMetadataUnavailable",
                f"{NO_MEMBER_METADATA.message}; 2 queues without an owner",
            ),
            {
                "BrokerMetadataUnavailable": NO_MEMBER_METADATA,
                "QueuesUnowned": Finding(Reason.QUEUES_UNOWNED, "2 queues without an owner"),
            },
        ),
        (
            {"document": a_document(members={"m1": Q[:1], "m2": ()}), "views": {"orders": a_view(1)}},
            ("True", "Settled", "1 queue, 2 members"),
            ("False", "Settled", "No problems"),
            {"IdleMembers": Finding(Reason.IDLE_MEMBERS, "2 members share 1 queue: 1 of them is idle")},
        ),
        (
            {"document": a_document(members={"m1": Q[:1], "m2": Q[1:2]}), "views": {"orders": a_view(2)}},
            ("True", "Settled", "2 queues, 2 members"),
            ("False", "Settled", "No problems"),
            {},
        ),
    ],
)
def test_condition_is_published_for_each_problem(
    changed: dict[str, Any], ready: tuple[str, ...], degraded: tuple[str, ...], problems: dict[str, Finding]
) -> None:
    new_plan = plan(settled(**changed), NOW)
    published = conditions(new_plan)
    assert list(published) == ["Ready", "Progressing", "Degraded", "Reconciling", "Stalled", *sorted(problems)]
    assert published.pop("Ready") == ready
    assert published.pop("Degraded") == degraded
    assert published.pop("Progressing")[:2] in {
        ("False", "Settled"),
        ("False", "BrokerMetadataUnavailable"),
        ("False", "NoMembers"),
    }
    reconciling = [
        problem
        for problem in problems.values()
        if problem.reason is Reason.BROKER_METADATA_UNAVAILABLE or ReasonKind.STALLS in problem.reason.kinds
    ]
    assert published.pop("Reconciling")[0] == str(bool(reconciling))
    assert published.pop("Stalled") == ("False", "Settled", "No problems")
    assert published == {kind: ("True", *finding) for kind, finding in problems.items()}
    warnings = {
        finding.reason: finding.reason not in {Reason.IDLE_MEMBERS, Reason.UNMANAGED_CONSUMERS}
        for finding in problems.values()
    }
    assert {event.reason: event.warning for event in new_plan.events} == warnings
    assert plan(settled(**changed, status=new_plan.status), NOW + 9).events == ()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("False", "Settled", "Every queue is with the member that the policy chooses")),
        (
            {"pods": obeying(DOCUMENT, m2={"terminating": True})},
            ("True", "HandoverInFlight", "1 queue or member is in transition"),
        ),
        (
            {
                "pods": obeying(
                    DOCUMENT, m1={"report": a_report("m1", 4, Q[:2])}, m2={"terminating": True, "report": DRAINING}
                )
            },
            ("True", "HandoverInFlight", "2 queues or members are in transition"),
        ),
        (
            {"document": a_document(members={"m1": (), "m2": ()}), "views": {"orders": None}},
            ("False", "BrokerMetadataUnavailable", "No queue of the group is known yet"),
        ),
        (
            {"pods": (*obeying(DOCUMENT), a_pod("m3", terminating=True))},
            ("False", "Settled", "Every queue is with the member that the policy chooses"),
        ),
    ],
)
def test_condition_progressing_counts_queues_and_members_in_transition(
    changed: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert conditions(plan(settled(**changed), NOW))["Progressing"] == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"policy": a_policy(paused=True)}, ("False", "Paused")),
        ({"views": {}}, ("False", "BrokerMetadataUnavailable")),
        ({"policy": None}, ("False", "InvalidPolicy")),
        ({"policy": None, "problems": (Finding(Reason.MISSING_POLICY, ""),)}, ("False", "MissingPolicy")),
        (
            {
                "pods": (*obeying(DOCUMENT), JOINER, a_pod("m4", age=3.0)),
                "problems": (Finding(Reason.MISSING_POLICY, ""),),
            },
            ("True", "MembersStillJoining"),
        ),
        ({"policy": a_policy(budget={"maxMoves": 0})}, ("False", "BudgetSpent")),
        ({"pods": (*obeying(DOCUMENT), JOINER, a_pod("m4", age=3.0))}, ("True", "MembersStillJoining")),
    ],
)
def test_condition_progressing_is_true_for_held_moves_unless_frozen(
    changed: dict[str, Any], expected: tuple[str, str]
) -> None:
    document = replace(DOCUMENT, members=entry_for_joiner())
    assert conditions(plan(with_joiner(document=document, **changed), NOW))["Progressing"][:2] == expected


def test_status_in_full() -> None:
    pods = (*obeying(DOCUMENT), JOINER, a_pod("m0", ended=True, ready=False))
    new_plan = plan(settled(pods=pods, lag=7, observed_generation=3), NOW)
    conditions = new_plan.status["conditions"]
    assert new_plan.status == {
        "observedGeneration": 3,
        "conditions": conditions,
        "replicas": 3,
        "selector": "rota.dev/group=orders",
        "members": 3,
        "queues": 6,
        "generation": 6,
        "strategy": "Sticky",
        "lag": 7,
        "lastRebalance": {"reason": "MemberJoined", "at": format_time(NOW), "moved": 0},
        "idleMembers": 1,
        "unownedQueues": 0,
    }
    assert conditions[1] == {
        "type": "Progressing",
        "status": "True",
        "reason": "HandoverInFlight",
        "message": "4 queues or members are in transition",
        "lastTransitionTime": format_time(NOW),
        "observedGeneration": 3,
    }
    later = plan(settled(pods=pods, observed_generation=4, status=new_plan.status), NOW + 9).status["conditions"]
    assert [condition["lastTransitionTime"] for condition in later] == [format_time(NOW)] * 5
    settled_status = plan(settled(status={"generation": 5}), NOW).status
    assert settled_status.keys() == new_plan.status.keys() - {"lag", "lastRebalance"}
    assert (settled_status["idleMembers"], settled_status["generation"]) == (0, 5)
    broadcasting = plan(settled(**BROADCASTING_GROUP), NOW).status
    assert "strategy" not in broadcasting
    assert (broadcasting["idleMembers"], broadcasting["unownedQueues"], broadcasting["queues"]) == (0, 0, 6)
    first = plan(a_snapshot(spec=None), NOW).status
    assert first["generation"] == 0


def test_status_last_rebalance_spans_first_assignment_to_last_release() -> None:
    unfinished = {"reason": "MemberJoined", "at": format_time(NOW - 2.124), "moved": 4}
    status = {"lastRebalance": unfinished, "generation": 5}
    continued = plan(settled(pods=obeying(DOCUMENT)[:1], deleted_uids=frozenset({"uid-m2"}), status=status), NOW)
    assert continued.status["lastRebalance"] == {**unfinished, "moved": 7}
    assert [event.reason for event in continued.events] == []
    unreleased = settled(pods=with_m1(report=a_report("m1", 4, Q[:2])), status=status)
    assert plan(unreleased, NOW).status["lastRebalance"] == unfinished
    finished = plan(settled(status=status), NOW)
    assert finished.status["lastRebalance"] == {**unfinished, "seconds": 2.124}
    assert finished.events == (Event(Reason.SETTLED, "MemberJoined: 4 queues moved in 2.124 s"),)
    between_milliseconds = plan(settled(status=status), NOW + 0.0004)
    assert between_milliseconds.status["lastRebalance"]["seconds"] == 2.124
    for seconds, event_count in ((1.999, 0), (2.0, 1)):  # a rebalance this short gets no second Event
        status_of_short = {"lastRebalance": {**unfinished, "at": format_time(NOW - seconds)}, "generation": 5}
        assert len(plan(settled(status=status_of_short), NOW).events) == event_count
    repeated = plan(settled(status=finished.status), NOW + 60)
    assert (repeated.status["lastRebalance"], repeated.events) == (finished.status["lastRebalance"], ())
    status_of_future = {"lastRebalance": {**unfinished, "at": format_time(NOW + 60)}, "generation": 5}
    assert plan(settled(status=status_of_future), NOW).status["lastRebalance"]["seconds"] == 0.0
    next_one = plan(replace(with_joiner(), status=finished.status), NOW + 60)
    assert next_one.status["lastRebalance"] == {"reason": "MemberJoined", "at": format_time(NOW + 60), "moved": 0}
    assert next_one.events == (Event(Reason.MEMBER_JOINED, "m3 joined; 2 queues change hands"),)


def test_reconcile_is_requeued_at_once_if_no_report_is_awaited_after_a_write() -> None:
    first = plan(settled(spec=a_spec(paused=True)), NOW)
    assert first.document is not None
    assert first.members_to_poll == {"m1", "m2"}
    assert first.requeue_after > 0
    last = plan(settled(spec=a_spec(paused=True), document=first.document, pods=obeying(first.document)), NOW + 1)
    assert last.document is not None
    assert (last.members_to_poll, last.requeue_after) == (frozenset(), 0.0)


@pytest.mark.parametrize(("unreachable_for", "expected"), [(9.0, "True"), (60.0, "False")])
def test_condition_progressing_does_not_wait_for_a_lost_member(unreachable_for: float, expected: str) -> None:
    document = a_document(6, members={"m1": Q[:6], "m2": ()})
    unreachable = a_pod(
        "m2", report=a_report("m2", 5, Q[:2]), ready=False, unreachable_for=unreachable_for, stable_for=60.0
    )
    pods = (obeying(document)[0], unreachable)
    assert conditions(plan(settled(document=document, pods=pods), NOW))["Progressing"][0] == expected


def test_condition_progressing_does_not_wait_for_a_member_that_drains_for_good_without_a_deletion() -> None:
    drained = a_pod("m2", a_report("m2", 5, state="drained", final=True))
    new_plan = plan(settled(pods=(obeying(DOCUMENT)[0], drained), policy=a_policy(paused=True)), NOW)
    assert (new_plan.document, new_plan.member_states["m2"]) == (None, MemberState.LEAVING)
    assert conditions(new_plan)["Progressing"][:2] == ("False", Reason.PAUSED)


def test_handover_immediate_mode_reports_the_number_of_moved_queues() -> None:
    at_once = plan(with_joiner(policy=a_policy(handover={"mode": "Immediate"})), NOW)
    assert at_once.status["lastRebalance"]["moved"] == 2
    assert at_once.status["idleMembers"] == 0
    assert at_once.events == (Event(Reason.MEMBER_JOINED, "m3 joined; 2 queues change hands"),)


def test_forced_grant_event_names_the_former_owners_if_known() -> None:
    lost = {"ready": False, "unreachable_for": 10.0}
    plan_of_two = plan(settled(document=THREE_MEMBERS, pods=obeying(THREE_MEMBERS, m3=lost, m2=lost)), NOW)
    warning = Event(Reason.QUEUES_FORCED, "4 queues taken from m2, m3, which did not respond", warning=True)
    assert [event for event in plan_of_two.events if event.reason is Reason.QUEUES_FORCED] == [warning]
    assert plan_of_two.status["lastRebalance"]["moved"] == 4
    assert "4 queues change hands" in plan_of_two.events[0].message
    names = [f"m{number}" for number in range(1, 7)]
    six_members = a_document(members={name: [queue] for name, queue in zip(names, Q, strict=False)})
    plan_of_five = plan(settled(document=six_members, pods=obeying(six_members, **dict.fromkeys(names[1:], lost))), NOW)
    message = next(event.message for event in plan_of_five.events if event.reason is Reason.QUEUES_FORCED)
    assert message == "5 queues taken from m2, m3, m4 and 2 more, which did not respond"
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    silent = a_pod("m2", ready=False, stable_for=LONG, unreachable_for=11.0)
    plan_of_unowned = plan(settled(document=document, pods=(*obeying(document), silent)), NOW)
    assert (
        Event(Reason.QUEUES_FORCED, "3 queues taken from a member, which did not respond", warning=True)
        in plan_of_unowned.events
    )


def test_journal_in_full() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, taken={Q[4]: ("m2", "m1"), Q[5]: ("m0", "m1")})
    pods = obeying(document, m2={"report": a_report("m2", 5, Q[2:4])})
    deleted_uids = frozenset({"uid-m0"})
    new_plan = plan(
        settled(document=document, pods=(*pods, JOINER), deleted_uids=deleted_uids, views={"orders": a_view(7)}), NOW
    )
    common = {"schema": 1, "group": "shop/orders", "at": format_time(NOW)}
    in_document = {**common, "generation": 6}
    granted = {"kind": "handover", **in_document, "act": "Grant"}
    assert list(new_plan.journal_records[:-3]) == [
        {
            "kind": "membership",
            **in_document,
            "members": {name: {"uid": f"uid-{name}", "standing": "Ready"} for name in ("m1", "m2", "m3")},
        },
        {
            "kind": "plan",
            **in_document,
            "strategy": "Sticky",
            "reason": "MemberTerminated",
            "message": "m0 ended",
            "members": 3,
            "queues": 7,
            "held": "NothingWouldChange",
        },
        {
            **granted,
            **to_member("m3"),
            **from_member("m0"),
            "proof": "Ended",
            "state": "Releasing",
            "queues": queue_ids(5),
        },
        {**granted, **to_member("m3"), "proof": "Released", "state": "Free", "queues": queue_ids(6)},
        {
            **granted,
            **to_member("m1"),
            **from_member("m2"),
            "proof": "Released",
            "state": "Releasing",
            "queues": queue_ids(4),
        },
    ]
    assert new_plan.journal_records[-3] == {
        "kind": "verdict",
        **common,
        "condition": "Ready",
        "status": "True",
        "reason": "Settled",
        "message": "7 queues, 3 members",
    }


def from_member(name: str) -> dict[str, str]:
    return {"from": name, "fromUid": f"uid-{name}"}


def to_member(name: str) -> dict[str, str]:
    return {"to": name, "toUid": f"uid-{name}"}


def queue_ids(*numbers: int) -> dict[str, dict[str, str]]:
    return {"orders": {"a": ",".join(map(str, numbers))}}


def test_journal_merges_handovers_that_differ_only_in_the_queue() -> None:
    new_plan = plan(settled(pods=obeying(DOCUMENT)[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    handovers = [line for line in new_plan.journal_records if line["kind"] == "handover"]
    assert [(line["from"], line["to"], line["queues"]) for line in handovers] == [
        ("m2", "m1", {"orders": {"a": "3-5"}})
    ]


def test_journal_separates_handovers_by_taker_and_state() -> None:
    document = a_document(members={"m1": [], "m2": Q[1:3], "m3": []}, taken={Q[0]: ("m2", "m1")})
    pods = tuple(pod for pod in obeying(document) if pod.name != "m2")
    deleted = frozenset({"uid-m2"})
    new_plan = plan(settled(document=document, pods=pods, deleted_uids=deleted, views={"orders": a_view(3)}), NOW)
    handovers = [line for line in new_plan.journal_records if line["kind"] == "handover"]
    assert [(line["state"], line["to"], line["queues"]) for line in handovers] == [
        ("Owned", "m1", queue_ids(1)),
        ("Owned", "m3", queue_ids(2)),
        ("Releasing", "m1", queue_ids(0)),
    ]


def test_journal_omits_conditions_that_did_not_change() -> None:
    first = plan(settled(), NOW)
    assert [line["condition"] for line in first.journal_records] == ["Ready", "Progressing", "Degraded"]
    paused = plan(settled(status=first.status, policy=a_policy(paused=True), views={}), NOW)
    assert [(line["condition"], line["status"]) for line in paused.journal_records] == [
        ("Degraded", "True"),
        ("BrokerMetadataUnavailable", "True"),
    ]


def test_assignment_too_large_changes_only_conditions_and_journal() -> None:
    long_name = "".join(hashlib.sha256(str(number).encode()).hexdigest() for number in range(40_000))
    view = a_view()._replace(queues=(*Q[:6], Queue("orders", long_name, 0)))
    document = replace(DOCUMENT, members=entry_for_joiner())
    snapshot = with_joiner(document=document, policy=a_policy(paused=True), views={"orders": view})
    new_plan = plan(replace(snapshot, status={"generation": 5}), NOW)
    assert (new_plan.document, new_plan.config_map_data, new_plan.pokes, new_plan.requeue_after) == (None, {}, {}, 20.0)
    assert conditions(new_plan)["Ready"][:2] == ("False", "AssignmentTooLarge")
    assert conditions(new_plan)["Ready"][2].endswith("; the present assignment stays in force")
    assert conditions(new_plan)["Degraded"][1] == "AssignmentTooLarge"
    assert conditions(new_plan)["Progressing"][1] == "Paused"
    assert "lastRebalance" not in new_plan.status
    assert {line["kind"] for line in new_plan.journal_records} == {"verdict"}


def test_event_lists_ended_members_in_order_of_names() -> None:
    """The order of a set differs between processes; six names are rarely sorted by chance."""
    document = a_document(members={f"m{number}": (Q[number],) for number in range(6)})
    deleted_uids = frozenset(f"uid-m{number}" for number in range(6))
    new_plan = plan(
        a_snapshot(document=document, pods=(a_pod("new", a_report("new", 5, ())),), deleted_uids=deleted_uids), NOW
    )
    assert new_plan.events[0].message.startswith("m0, m1, m2 and 3 more ended")


@pytest.mark.parametrize(
    ("brokers", "why"),
    [
        ({"a": False, "b": False, "c": True}, "m1, m2 cannot reach a, b"),
        ({"a": True}, "m1, m2 are not ready"),
    ],
)
def test_condition_no_members_says_why_present_members_cannot_consume(brokers: dict[str, bool], why: str) -> None:
    pods = tuple(a_pod(name, a_report(name, 5, brokers=brokers), ready=False) for name in ("m1", "m2"))
    new_plan = plan(settled(pods=pods), NOW)
    message = f"No member can consume 6 queues: {why}; the present assignment stays in force"
    assert [problem.message for problem in new_plan.problems if problem.reason is Reason.NO_MEMBERS] == [message]
    assert new_plan.document is None


def test_condition_message_uses_singular_for_one_member() -> None:
    document = a_document(members={"m1": Q[:6]})
    new_plan = plan(settled(document=document, pods=obeying(document)), NOW)
    ready = next(condition for condition in new_plan.status["conditions"] if condition["type"] == "Ready")
    assert ready["message"] == "6 queues, 1 member"
