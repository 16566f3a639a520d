"""The planner's finer points, step by step: who counts, what is believed, who is woken, what people are told."""

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
    Measurements,
    Plan,
    PodSnapshot,
    Snapshot,
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


def written_by(snapshot: Snapshot) -> Assignment:
    document = plan(snapshot, NOW).document
    assert document
    return document


def owned(document: Assignment) -> dict[str, list[int]]:
    return {name: [queue.id for queue in share.queues] for name, share in document.members.items()}


def conditions(found: Plan) -> dict[str, tuple[str, str, str]]:
    return {it["type"]: (it["status"], it["reason"], it["message"]) for it in found.status["conditions"]}


# Who counts.

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
    pod, gone = a_pod("m1", **changed), frozenset({"uid-gone"})
    for share, everyone, expected in (
        (Share(uid, (Q[0],)), None, with_queues),
        (Share(uid), tuple(Q), with_queues),
        (Share(uid), None, without),
        (Share(uid), (), without),
        (None, None, without),
    ):
        document = a_document(everyone=everyone)
        document = replace(document, members={"m1": share} if share else {})
        found = classify_members([pod], gone, a_policy(), document)
        assert {name: str(standing) for name, standing in found.items()} == {"m1": expected}


def test_member_recreated_by_name_is_joining_until_the_old_pod_ended() -> None:
    anew = a_pod("m1", a_report("m1", 0, uid="new"), uid="new")
    assert classify_members([anew], frozenset(), a_policy(), DOCUMENT) == {"m1": MemberState.JOINING}
    assert classify_members([anew], frozenset({"uid-m1"}), a_policy(), DOCUMENT) == {"m1": MemberState.READY}
    unready = replace(anew, ready=False)
    assert classify_members([unready], frozenset({"uid-m1"}), a_policy(), DOCUMENT) == {"m1": MemberState.JOINING}


def reaching(name: str, *, reaches: bool, **changed: Any) -> PodSnapshot:
    return a_pod(name, a_report(name, 5, brokers={"a": reaches}), **changed)


@pytest.mark.parametrize(
    ("others", "seconds", "expected"),
    [
        ((reaching("m1", reaches=True),), 10.0, "CutOff"),
        ((reaching("m1", reaches=True),), 9.9, "Ready"),
        ((reaching("m1", reaches=True, cut_off_brokers={"c": LONG}), reaching("m3", reaches=True)), 10.0, "CutOff"),
        ((reaching("m1", reaches=False),), LONG, "Ready"),
        ((reaching("m1", reaches=True, terminating=True), a_pod("m4")), LONG, "Ready"),
        ((a_pod("m1"),), LONG, "Ready"),
    ],
    ids=["others reach it", "not for long", "one misses another", "nobody does", "only one that leaves", "nobody says"],
)
def test_member_is_cut_off_only_from_brokers_that_other_members_reach(
    others: tuple[PodSnapshot, ...], seconds: float, expected: str
) -> None:
    cut = reaching("m2", reaches=False, cut_off_brokers={"b": 1.0, "a": seconds})
    found = classify_members([*others, cut], frozenset(), a_policy(), DOCUMENT)
    assert str(found["m2"]) == expected
    leaving = replace(cut, terminating=True)
    assert classify_members([*others, leaving], frozenset(), a_policy(), DOCUMENT)["m2"] is MemberState.LEAVING


def test_member_without_queues_counts_as_cut_off_at_once() -> None:
    new = reaching("m4", reaches=False, cut_off_brokers={"a": 0.0})
    assert (
        classify_members([reaching("m1", reaches=True), new], frozenset(), a_policy(), DOCUMENT)["m4"]
        is MemberState.CUT_OFF
    )


def test_member_cut_off_counts_as_ready_while_every_member_is_cut_off() -> None:
    one = a_pod("m1", a_report("m1", 5, brokers={"a": True, "b": False}), cut_off_brokers={"b": LONG})
    other = a_pod("m2", a_report("m2", 5, brokers={"a": False, "b": True}), cut_off_brokers={"a": LONG})
    unheard = a_pod("m3", a_report("m3", 5, brokers={"a": True, "b": True}), ready=False, unreachable_for=5.0)
    silent = a_pod("m4", a_report("m4", 5))
    for others in ((), (unheard,), (silent,)):
        found = classify_members([one, other, *others], frozenset(), a_policy(), DOCUMENT)
        assert (found["m1"], found["m2"]) == (MemberState.READY, MemberState.READY)
    whole = a_pod("m4", a_report("m4", 5, brokers={"a": True, "b": True}))
    found = classify_members([one, other, whole], frozenset(), a_policy(), DOCUMENT)
    assert [*found.values()] == [MemberState.CUT_OFF, MemberState.CUT_OFF, MemberState.READY]


def test_member_is_cut_off_if_other_members_together_reach_its_brokers() -> None:
    """Members speak only of the brokers whose queues they work: no single one may know all that are missed."""
    report = a_report("m2", 5, brokers={"a": False, "b": False, "c": True})
    cut = a_pod("m2", report, cut_off_brokers={"a": LONG, "b": LONG})
    knows_a, knows_b = (a_pod(name, a_report(name, 5, brokers={it: True})) for name, it in (("m1", "a"), ("m3", "b")))
    found = classify_members([knows_a, cut, knows_b], frozenset(), a_policy(), DOCUMENT)
    assert found == {"m1": MemberState.READY, "m2": MemberState.CUT_OFF, "m3": MemberState.READY}
    elsewhere = a_pod("m4", a_report("m4", 5, brokers={"d": False}), cut_off_brokers={"d": LONG})
    witness = a_pod("m5", a_report("m5", 5, brokers={"d": True}))
    found = classify_members([knows_a, cut, knows_b, elsewhere, witness], frozenset(), a_policy(), DOCUMENT)
    assert [name for name, it in found.items() if it is MemberState.CUT_OFF] == ["m2", "m4"]


@pytest.mark.parametrize(("reaches", "expected"), [(False, MemberState.CUT_OFF), (True, MemberState.OUT)])
def test_member_unready_for_long_is_cut_off_or_out_by_its_reach_of_the_broker(
    reaches: bool,  # noqa: FBT001 - a case
    expected: MemberState,
) -> None:
    cut_off = {} if reaches else {"a": 1.0}
    unready = reaching("m2", reaches=reaches, cut_off_brokers=cut_off, ready=False, stable_for=10.0)
    found = classify_members([reaching("m1", reaches=True), unready], frozenset(), a_policy(), DOCUMENT)
    assert found["m2"] is expected


@pytest.mark.parametrize(
    ("standing", "changed", "seconds"),
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
    standing: MemberState, changed: dict[str, Any], seconds: float | None
) -> None:
    policy = a_policy(triggers={"debounce": "500ms"}, handover={"drainTimeout": "30s"})
    found = members_in_transition([a_pod("m1", **changed)], {"m1": standing}, policy)
    assert found == ({} if seconds is None else {"m1": seconds})


def test_member_facts_not_yet_observed_count_neither_for_nor_against_the_pod() -> None:
    new = PodSnapshot(name="m1", uid="uid-m1")
    for pod, standing, seconds in (
        (new, MemberState.JOINING, 20.0),
        (replace(new, decoded_report=JOINER.decoded_report), MemberState.JOINING, 20.0),
        (replace(new, terminating=True), MemberState.LEAVING, 45.0),
        (replace(new, ready=True, decoded_report=JOINER.decoded_report), MemberState.READY, 0.5),
    ):
        found = classify_members([pod], frozenset(), a_policy(), a_document())
        assert (found, members_in_transition([pod], found, a_policy())) == ({"m1": standing}, {"m1": seconds})
    assert pokes.seconds_until_next_poke([replace(new, poke=Poke(5, 1))], {}) == 1.0
    assert (new.generation, new.client_id, str(new.poke)) == (0, "", "0-0")
    unknown = Snapshot(group="shop/orders", spec=a_spec())
    assert plan(unknown, NOW).refetch
    first = plan(replace(unknown, revalidated=True), NOW)
    assert first.status["observedGeneration"] == 0
    assert conditions(first)["Ready"][:2] == ("False", "BrokerMetadataUnavailable")


# What is believed.


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
    found = record.find_damage(settled(**changed))
    assert found.startswith(sentence) if sentence else found == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"damage": "The sum does not match"},
        {"document": None},
        {"document": None, "pods": ()},
        {"document": replace(DOCUMENT, generation=3), "pods": obeying(DOCUMENT)},
    ],
    ids=["torn", "gone", "a new group", "an old copy"],
)
def test_assignment_not_believed_is_refetched_before_it_is_rewritten(wrong: dict[str, Any]) -> None:
    status = {"generation": 0, "lag": 7}
    found = plan(settled(**{"revalidated": False, "status": status, **wrong}), NOW)
    assert found == Plan(refetch=True, status=status, requeue_after=1.0)
    assert not plan(settled(revalidated=False), NOW).refetch, "a record that can be believed is not read again"


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
    assert bare.spent[0][1] > 99_999, "more than any budget that the policy may turn out to have"
    assert list(bare.members) == ["m2", "m1", "m3"]
    assert record.rebuild_assignment(replace(lost, policy=a_policy()), NOW).spent == ()


def test_assignment_rebuilt_gives_a_tied_queue_to_the_first_member_by_name() -> None:
    pods = (a_pod("m2", a_report("m2", 5, Q[:1])), a_pod("m1", a_report("m1", 5, Q[:1])))
    found = record.rebuild_assignment(settled(document=None, pods=pods), NOW)
    assert {name: share.queues for name, share in found.members.items()} == {"m1": (Q[0],), "m2": ()}


@pytest.mark.parametrize(
    ("seen", "generation"),
    [
        ({"status": {"generation": int(NOW) + 7}}, int(NOW) + 8),
        ({"document": a_document(int(NOW) + 3)}, int(NOW) + 4),
        ({"pods": (a_pod("m1", poke=Poke(int(NOW) + 5, 2)),)}, int(NOW) + 6),
        ({}, int(NOW)),
    ],
)
def test_assignment_rebuilt_has_a_generation_above_all_seen(seen: dict[str, Any], generation: int) -> None:
    found = record.rebuild_assignment(settled(damage="Torn", **seen), NOW)
    assert (found.generation, found.barrier) == (generation, generation)


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
    found = plan(settled(damage="Torn", pods=(*obeying(DOCUMENT)[:1], a_pod("m2", report))), NOW)
    told = "Torn; it was rebuilt from the members' reports"
    assert found.events[-1] == Event(Reason.ASSIGNMENT_LOST, told, warning=True)
    assert len(found.events) == 1
    assert found.requeue_after == 0.0
    less = plan(settled(damage="Torn", pods=obeying(DOCUMENT)[:1]), NOW)
    assert [event.reason for event in less.events] == [Reason.QUEUES_UNOWNED, Reason.ASSIGNMENT_LOST]
    assert [line["kind"] for line in found.journal_records] == ["membership", "plan", *["verdict"] * 3]
    assert found.journal_records[1] == {
        "schema": 1,
        "kind": "plan",
        "group": "shop/orders",
        "at": format_time(NOW),
        "generation": int(NOW),
        "strategy": "Sticky",
        "reason": Reason.ASSIGNMENT_LOST,
        "message": told,
        "members": 2,
        "queues": 6,
        "held": None,
    }
    assert found.journal_records[0] == {
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
    found = written_by(settled(spec=spec, damage="Torn", pods=pods, policy=a_policy(budget={"maxMoves": 1})))
    assert found == Assignment(
        group="shop/orders",
        generation=int(NOW),
        issued_at=format_time(NOW),
        strategy="",
        members={"m1": Share("uid-m1"), "m2": Share("uid-m2")},
        everyone=tuple(Q[:7] + Q[8:]),
        spent=((format_time(NOW), 1),),
        begun=BEGUN,
    )


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
    heard = expected is not Proof.LOST or not pods[0].ready
    assert record.barrier_proof(just_written, pods, Handover(), NOW) is (expected if heard else Proof.NONE)


def test_assignment_entry_stays_until_its_pod_has_ended() -> None:
    document = a_document(members={"m1": (), "m2": (), "m3": (), "m4": ()})
    pods = (a_pod("m1"), a_pod("m2", ended=True), a_pod("m3", uid="new", ended=True), a_pod("m5"), a_pod("m6"))
    found = record.member_entries(document, settled(pods=pods, deleted_uids=frozenset({"uid-m4"})), ["m1", "m5"])
    assert found == {"m1": "uid-m1", "m3": "uid-m3", "m5": "uid-m5"}


# Who is woken.


@pytest.mark.parametrize(
    ("changed", "gone", "expected"),
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
    gone: tuple[str, ...],
    *,
    expected: bool,
) -> None:
    found = pokes.pods_behind([a_pod("m1", **changed)], DOCUMENT, frozenset(gone))
    assert bool(found) is expected


def test_poke_considers_a_pod_behind_while_it_owes_a_release_or_the_barrier() -> None:
    shown = [a_pod("m1", a_report("m1", 4, Q[:3]))]
    early, late = (Release(M1, None, since, format_time(NOW)) for since in (3, 5))
    owing = replace(DOCUMENT, releasing={Q[3]: early, Q[4]: late, Q[5]: early})
    assert pokes.pods_behind(shown, owing, frozenset()) == shown
    assert pokes.pods_behind(shown, replace(DOCUMENT, releasing={Q[3]: early}), frozenset()) == []
    assert pokes.pods_behind(shown, replace(owing, releasing={Q[4]: replace(late, holder=M2)}), frozenset()) == []
    assert pokes.pods_behind(shown, replace(DOCUMENT, barrier=5), frozenset()) == shown
    assert pokes.pods_behind(shown, replace(DOCUMENT, barrier=4), frozenset()) == []
    everything = [a_pod("m1", a_report("m1", 4, Q[:6]))]
    broadcast = replace(DOCUMENT, members={"m1": Share("uid-m1")}, everyone=tuple(Q[:6]))
    assert pokes.pods_behind(everything, broadcast, frozenset()) == []
    assert pokes.pods_behind(shown, broadcast, frozenset()) == shown


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
    found = pokes.due_pokes(pods, DOCUMENT)
    assert found == ({"m1": due} if due else {})
    assert pokes.seconds_until_next_poke(pods, found) == next_due
    assert pokes.due_pokes([a_pod("m0", terminating=True), *pods], DOCUMENT) == found


def test_poke_next_due_ignores_terminating_pods_and_takes_the_soonest() -> None:
    assert pokes.seconds_until_next_poke([], {}) == math.inf
    overdue = a_pod("m1", terminating=True, poke=Poke(5, 1), poked_for=2.0)
    assert pokes.seconds_until_next_poke([overdue], {}) == math.inf, "it is not poked any more"
    at_once = a_pod("m1", terminating=True, poke=Poke(5, 1), poked_for=1.0)
    sooner, later = a_pod("m2", poke=Poke(5, 2), poked_for=0.5), a_pod("m3", poke=Poke(5, 4), poked_for=0.5)
    assert pokes.seconds_until_next_poke([at_once, later, sooner], {}) == 1.5


# What the policy wants.

ROSTER = Roster.of(Q[:4], ["m1", "m2"], {Q[0]: "m1"})
MEASURED = Measurements({"m1": "east"}, {Q[0]: 2.0}, {"m2": 3.0})
NAMED = [{"topic": "orders", "broker": "a", "ids": "1,3-4"}]
EAST = [{"broker": "a", "room": "east"}]


@pytest.mark.parametrize(
    ("strategy", "given", "expected"),
    [
        ("Averagely", {}, {}),
        ("Sticky", {}, {}),
        (
            "ByConfig",
            {"members": [{"index": 1, "queues": NAMED}, {"index": 2, "queues": [NAMED[0] | {"ids": "0"}]}]},
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
    strategy: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    block = strategy[0].lower() + strategy[1:]
    policy = a_policy(strategy=strategy, options={block: given} if given else {})
    assert resolve_options(policy, ROSTER, MEASURED) == expected


@pytest.mark.parametrize("strategy", ["ByConfig", "MachineRoomNearby", "Custom"])
def test_strategy_without_its_required_options_is_rejected_with_a_sentence(strategy: Any) -> None:
    with pytest.raises(ValueError, match=f"^Strategy {strategy} needs the option "):
        compute_owners(PolicySpec(strategy=strategy), ROSTER)


@pytest.mark.parametrize("strategy", ["ByMachineRoom", "ConsistentHash", "Balanced"])
def test_strategy_whose_options_are_optional_runs_without_them(strategy: Any) -> None:
    assert len(compute_owners(PolicySpec(strategy=strategy), ROSTER)) == 4


@pytest.mark.parametrize(
    ("budget", "weights", "most"),
    [
        (None, {}, None),
        (3, {}, 3),
        (None, None, 1),
        (3, None, 1),
        (0, None, 0),
    ],
)
def test_balanced_without_measured_weights_allows_at_most_one_move(
    budget: int | None, weights: dict[Queue, float] | None, most: int | None
) -> None:
    policy = a_policy(strategy="Balanced", **({} if budget is None else {"budget": {"maxMoves": budget}}))
    found = resolve_options(policy, ROSTER, Measurements(queue_weights=weights))
    assert (found["maxMoves"], found["queueWeights"]) == (most, {})


def test_unmanaged_consumer_presence_shares_queues_averagely_by_client_id() -> None:
    found = share_with_unmanaged(ROSTER, ["10.0.0.2@old"], {"m1": "10.0.0.3@m1", "m2": "10.0.0.1@m2"})
    assert (found.tolist(), str(found.dtype)) == ([1, 1, -1, 0], "int32")
    assert share_with_unmanaged(ROSTER, ["m11"], {}).tolist() == [0, 0, -1, 1]


def test_unmanaged_consumer_duplicates_of_a_client_id_are_each_counted() -> None:
    assert share_with_unmanaged(ROSTER, ["m0", "m0"], {}).tolist() == [-1, -1, 0, 1], "of four: the second has none"
    assert share_with_unmanaged(ROSTER, ["m11", "m11"], {}).tolist() == [0, -1, -1, 1]


# Who gives what to whom.

CHANGED_SETTINGS = {"settings": "{}", "desired_settings": '{"model":"Clustering"}'}  # a new document, whatever else


def test_scale_up_first_assignment_in_full() -> None:
    revoked = journal(plan(with_joiner(), NOW), "handover")
    assert (revoked["act"], revoked["proof"], revoked["state"]) == ("Revoke", "None", "Owned")
    assert written_by(with_joiner()) == Assignment(
        group="shop/orders",
        generation=6,
        issued_at=format_time(NOW),
        strategy="Sticky",
        members={"m1": Share("uid-m1", tuple(Q[:2])), "m2": Share("uid-m2", tuple(Q[3:5])), "m3": Share("uid-m3")},
        releasing={Q[2]: Release(M1, "m3", 6, format_time(NOW)), Q[5]: Release(M2, "m3", 6, format_time(NOW))},
        begun=BEGUN,
    )


def test_assignment_records_the_start_time_of_each_topic_and_never_resets_it() -> None:
    """By that a member knows where a queue begins that the group never was at: also one that the topic got later."""
    retries = {"%RETRY%orders": a_view(1, "%RETRY%orders")}
    alone = a_pod("m1", a_report("m1", 0))
    first = written_by(a_snapshot(pods=(alone,), views={"orders": a_view(4), **retries}))
    assert first.begun == {"orders": format_time(NOW)}
    left = settled(document=first, pods=(), deleted_uids=frozenset({"uid-m1"}), views={"orders": a_view(8), **retries})
    more = {"orders": a_view(8), "payments": a_view(2, "payments"), **retries}
    back = replace(left, pods=(a_pod("m2", a_report("m2", 0)),), spec=BOTH, views=more)
    later = plan(back, NOW + 900).document
    assert later
    assert later.begun == {"orders": format_time(NOW), "payments": format_time(NOW + 900)}
    one = a_spec(subscriptions=[{"topic": "payments"}])
    last = plan(replace(back, document=later, pods=obeying(later), spec=one), NOW + 999).document
    assert last
    assert last.begun == {"payments": format_time(NOW + 900)}


def test_forced_grant_of_a_topics_first_queues_records_its_start_time() -> None:
    document = a_document(6, members={"m1": Q[:3], "m2": ()}, barrier=6, begun={})
    silent = {"ready": False, "unreachable_for": LONG, "report": a_report("m2", 4)}
    forced = written_by(
        settled(document=document, pods=obeying(document, m1={"report": a_report("m1", 6, Q[:3])}, m2=silent))
    )
    assert forced.forced
    assert forced.begun == {"orders": format_time(NOW)}


def test_topic_without_a_route_gets_no_start_time() -> None:
    unseen = settled(document=replace(DOCUMENT, begun={}), spec=BOTH, **CHANGED_SETTINGS)
    assert written_by(unseen).begun == {"orders": format_time(NOW)}


@pytest.mark.parametrize("strategy", ["Averagely", "AveragelyByCircle"])
def test_rolling_update_does_not_rerun_a_strategy_that_moves_many_queues(strategy: str) -> None:
    arrived = a_pod("m3", a_report("m3", 0), age=4.0, stable_for=0.1)
    document = replace(DOCUMENT, strategy=strategy)
    during = settled(
        document=document,
        policy=a_policy(strategy=strategy),
        pods=(obeying(DOCUMENT)[1], arrived),
        deleted_uids=frozenset({"uid-m1"}),
        views={"orders": a_view(8)},
    )
    found = written_by(during)
    assert (owned(found), found.releasing) == ({"m2": [0, 3, 4, 5], "m3": [1, 2, 6, 7]}, {})
    at_rest = written_by(replace(during, pods=(during.pods[0], replace(arrived, stable_for=LONG, age=LONG))))
    assert at_rest.releasing


def test_rolling_update_runs_a_strategy_that_moves_little_or_assigns_first() -> None:
    starting = a_pod("m3", ready=False, age=3.0)
    pods = (*obeying(DOCUMENT), starting)
    sticky = settled(document=replace(DOCUMENT, strategy="Averagely"), pods=pods)
    assert written_by(sticky).strategy == "Sticky"
    averagely = a_policy(strategy="Averagely")
    members = (a_pod("m1", a_report("m1", 5)), a_pod("m2", a_report("m2", 5)))
    first = settled(document=a_document(), pods=(*members, starting), policy=averagely)
    assert owned(written_by(first)) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}


def test_budget_is_not_spent_by_queues_of_a_terminating_member() -> None:
    policy = a_policy(budget={"maxMoves": 1})
    document = a_document(members={"m1": Q[:2], "m2": Q[2:6]})
    m1, m2 = obeying(document)
    pods = (replace(m1, terminating=True, terminating_for=50.0), m2, JOINER)
    found = written_by(settled(document=document, policy=policy, pods=pods))
    assert list(found.releasing) == [Q[5]]


def test_budget_feeds_members_that_own_least_first_and_reports_the_gate() -> None:
    document = a_document(members={"m1": Q[:6], "m2": Q[6:7]})
    snapshot = settled(
        document=document, pods=(*obeying(document), JOINER), views={"orders": a_view(7)}, policy=a_policy()
    )
    assert {queue: it.to for queue, it in written_by(snapshot).releasing.items()} == {
        Q[3]: "m2",
        Q[4]: "m3",
        Q[5]: "m3",
    }
    limited = replace(snapshot, policy=a_policy(budget={"maxMoves": 1}))
    found = plan(limited, NOW)
    assert found.document
    assert list(found.document.releasing) == [Q[4]]
    (line,) = [line for line in found.journal_records if line["kind"] == "plan"]
    assert line["held"] == "BudgetSpent"
    assert journal(plan(snapshot, NOW))["held"] is None


@pytest.mark.parametrize(
    ("spent", "moves", "left", "again"),
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
    spent: list[tuple[float, int]], moves: int, left: int, again: float | None
) -> None:
    document = replace(DOCUMENT, spent=tuple((format_time(NOW - ago), count) for ago, count in spent))
    pods = (*obeying(document), JOINER)
    policy = a_policy(budget={"maxMoves": moves, "per": "1m"})
    found = plan(settled(document=replace(document, members=entry_for_joiner()), pods=pods, policy=policy), NOW)
    assert len(found.document.releasing if found.document else ()) == left
    if again is not None:
        assert found.requeue_after == pytest.approx(again)
        assert conditions(found)["Progressing"][1] == "BudgetSpent"


def entry_for_joiner() -> dict[str, Share]:
    return {**DOCUMENT.members, "m3": Share("uid-m3")}


def test_budget_counts_only_queues_taken_from_members_that_could_keep_them() -> None:
    budget = {"policy": a_policy(budget={"maxMoves": 4})}
    at = format_time(NOW)
    assert written_by(with_joiner(**budget)).spent == ((at, 2),)
    assert written_by(with_joiner()).spent == ()
    assert written_by(settled(**budget, pods=obeying(DOCUMENT)[:1], deleted_uids=frozenset({"uid-m2"}))).spent == ()
    assert written_by(settled(**budget, views={"orders": a_view(4)})).spent == ((at, 1),)
    waiting = a_document(members={"m1": Q[:2], "m2": Q[3:6]}, taken={Q[2]: ("m2", "m1")})
    slow = obeying(waiting, m2={"report": a_report("m2", 4, Q[2:6])})
    assert written_by(settled(**budget, **CHANGED_SETTINGS, document=waiting, pods=slow)).spent == ()
    just_spent = replace(DOCUMENT, spent=((at, 2),))
    assert written_by(settled(**CHANGED_SETTINGS, document=just_spent)).spent == ()


def test_budget_times_in_the_future_count_as_spent_now() -> None:
    document = replace(DOCUMENT, spent=((format_time(NOW + 300), 2), (format_time(NOW - 10), 1)))
    policy = a_policy(budget={"maxMoves": 5})
    found = written_by(settled(document=document, policy=policy))
    assert found.spent == ((format_time(NOW), 2), (format_time(NOW - 10), 1))


def test_handover_to_a_departed_member_returns_queues_to_the_owner_still_consuming() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, taken={Q[4]: ("m2", "m3"), Q[5]: ("m1", "m3")})
    working = obeying(
        document, m1={"report": a_report("m1", 4, [*Q[:2], Q[5]])}, m2={"report": a_report("m2", 4, Q[2:5])}
    )
    found = plan(settled(document=document, pods=working), NOW)
    assert found.document
    assert (owned(found.document), found.document.releasing) == ({"m1": [0, 1, 5], "m2": [2, 3, 4]}, {})
    assert [
        (line["act"], line["from"], line["to"]) for line in found.journal_records if line["kind"] == "handover"
    ] == [
        ("Return", "m1", "m1"),
        ("Return", "m2", "m2"),
    ]


def test_handover_in_flight_keeps_its_taker_and_picks_another_if_the_taker_ended() -> None:
    taken = {Q[2]: ("m1", "m4"), Q[5]: ("m2", "m3")}
    document = a_document(members={"m1": Q[:2], "m2": Q[3:5], "m3": (), "m4": ()}, taken=taken)
    slow = {
        "m1": {"report": a_report("m1", 4, Q[:3])},
        "m2": {"report": a_report("m2", 4, Q[3:6])},
        "m3": {"report": a_report("m3", 5)},
        "m4": {"report": a_report("m4", 5)},
    }
    both = settled(document=document, pods=obeying(document, **slow), **CHANGED_SETTINGS)
    assert {queue: it.to for queue, it in written_by(both).releasing.items()} == {Q[2]: "m4", Q[5]: "m3"}
    m1, m2, m3, _ = both.pods
    without_taker = (replace(m1, ready=False, stable_for=LONG), m2, m3)
    found = written_by(replace(both, pods=without_taker, deleted_uids=frozenset({"uid-m4"})))
    assert found.releasing[Q[2]] == Release(M1, "m3", 5, format_time(NOW - LONG))


def test_queue_removed_from_the_route_is_released_and_then_dropped() -> None:
    taken = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken={Q[5]: ("m2", None)})
    route = {"orders": a_view(5)}
    busy = obeying(taken, m2={"report": a_report("m2", 4, Q[3:6])})
    assert plan(settled(document=taken, pods=busy, views=route), NOW).document is None
    forgotten = plan(settled(document=taken, views=route), NOW)
    assert forgotten.document
    assert forgotten.document.releasing == {}
    assert [(line["act"], line["from"]) for line in forgotten.journal_records if line["kind"] == "handover"] == [
        ("Drop", "m2")
    ]
    young = replace(taken, issued_at=format_time(NOW - 0.25))
    waits = plan(settled(document=young, views=route), NOW)
    assert waits.document is None
    assert waits.requeue_after == pytest.approx(0.25)


def test_queue_no_longer_wanted_is_dropped_when_its_holder_ended() -> None:
    gone = {"pods": obeying(DOCUMENT)[:1], "deleted_uids": frozenset({"uid-m2"})}
    assert owned(written_by(settled(**gone, views={"orders": a_view(4)}))) == {"m1": [0, 1, 2, 3]}
    named = [{"index": 0, "queues": [{"topic": "orders", "broker": "a", "ids": "0-2"}]}]
    by_config = a_policy(strategy="ByConfig", options={"byConfig": {"members": named}})
    assert owned(written_by(settled(**gone, policy=by_config))) == {"m1": [0, 1, 2]}


def test_queue_outside_the_route_is_revoked_while_others_are_free() -> None:
    document = a_document(members={"m1": [Q[0], Q[9]]})
    found = written_by(settled(document=document, views={"orders": a_view(3)}))
    assert (owned(found), list(found.releasing)) == ({"m1": [0, 1, 2]}, [Q[9]])


@pytest.mark.parametrize(
    ("pods", "gone", "kept"),
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
    gone: tuple[str, ...],
    *,
    kept: bool,
) -> None:
    document = replace(DOCUMENT, generation=6, forced={Q[0]: 5})
    snapshot = settled(document=document, pods=pods, deleted_uids=frozenset(gone), **CHANGED_SETTINGS)
    assert written_by(snapshot).forced.get(Q[0]) == (5 if kept else None)
    first = replace(document, forced={Q[0]: 1})
    unknown = settled(document=first, pods=obeying(document)[:1], **CHANGED_SETTINGS)
    assert written_by(unknown).forced == {Q[0]: 1}, "nobody knows what the one who is not there obeys"


def test_member_of_the_same_name_ending_does_not_end_the_owner() -> None:
    m1, _ = obeying(DOCUMENT)
    ended = a_pod("m2", uid="new", ended=True, ready=False)
    found = plan(settled(pods=(m1, ended), **CHANGED_SETTINGS), NOW)
    assert found.document
    assert owned(found.document) == {"m1": [0, 1, 2], "m2": []}
    assert {it.holder for it in found.document.releasing.values()} == {M2}
    assert found.verify_ended == (M2,)


def test_assignment_barrier_uses_reported_queues_only_of_members_past_it() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    (m1,) = obeying(document)
    lost = a_pod("m2", a_report("m2", 4, Q[3:5]), ready=False, stable_for=LONG, unreachable_for=11.0)
    assert written_by(settled(document=document, pods=(m1, lost))).forced == dict.fromkeys(Q[3:6], 6)
    for over, gone in (({"ended": True}, ()), ({}, ("uid-m2",))):
        pods = (m1, a_pod("m2", a_report("m2", 5, Q[3:5]), **over))
        found = written_by(settled(document=document, pods=pods, deleted_uids=frozenset(gone)))
        assert owned(found) == {"m1": [0, 1, 2, 3, 4, 5]}
    ordinary = replace(document, barrier=0)
    ahead = a_pod("m2", a_report("m2", 5, Q[3:5]))
    assert owned(written_by(settled(document=ordinary, pods=(m1, ahead)))) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}


def test_assignment_barrier_falls_once_every_member_is_past_it() -> None:
    document = replace(DOCUMENT, barrier=5)
    past, behind = a_pod("m3", a_report("m3", 5)), a_pod("m3", a_report("m3", 4), ready=False)
    for pod, barrier in ((past, 0), (behind, 5)):
        snapshot = settled(document=document, pods=(*obeying(DOCUMENT), pod), **CHANGED_SETTINGS)
        assert written_by(snapshot).barrier == barrier


def test_policy_missing_still_grants_orphans_that_were_in_handover() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken={Q[5]: ("m3", "m2")})
    snapshot = settled(document=document, policy=None, deleted_uids=frozenset({"uid-m3"}))
    assert owned(written_by(snapshot)) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}
    nobody_takes_it = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken={Q[5]: ("m3", None)})
    assert owned(written_by(replace(snapshot, document=nobody_takes_it))) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}


def test_balanced_places_queues_by_the_rooms_of_pods_and_brokers() -> None:
    brokers = [{"broker": "a", "room": "east"}, {"broker": "b", "room": "west"}]
    policy = a_policy(strategy="Balanced", options={"balanced": {"roomLabel": "room", "brokers": brokers}})
    pods = (a_pod("m1", a_report("m1", 0), room="west"), a_pod("m2", a_report("m2", 0), room="east"))
    snapshot = a_snapshot(policy=policy, pods=pods, views={"orders": a_view(2, brokers=("a", "b"))})
    shares = {name: {it.broker for it in share.queues} for name, share in written_by(snapshot).members.items()}
    assert shares == {"m1": {"b"}, "m2": {"a"}}


def test_unmanaged_consumer_presence_identifies_members_by_client_id() -> None:
    ids = {"m1": "z@m1", "m2": ""}
    pods = tuple(a_pod(name, a_report(name, 0), client_id=client) for name, client in ids.items())
    found = written_by(a_snapshot(pods=pods, unmanaged_consumers=("10.0.0.1@old",)))
    assert owned(found) == {"m1": [4, 5], "m2": [2, 3]}


@pytest.mark.parametrize(("age", "moves"), [(0.0, 0), (0.25, 0), (0.5, 2), (-0.5, 2), (-300.0, 2)])
def test_debounce_delays_moves_and_ignores_timestamps_in_the_future(age: float, moves: int) -> None:
    document = replace(DOCUMENT, members=entry_for_joiner(), issued_at=format_time(NOW - age))
    found = plan(settled(document=document, pods=(*obeying(DOCUMENT), JOINER)), NOW)
    assert len(found.document.releasing if found.document else ()) == moves


def in_flight(*ages: float, to: str | None = "m1", **changed: Any) -> Snapshot:
    """Return a group that has a joiner while m2 still drains a queue for m1, one for each age."""
    releasing = {Q[5 - n]: Release(M2, to, 5, format_time(NOW - age)) for n, age in enumerate(ages)}
    kept = Q[3 : 6 - len(ages)]
    document = replace(a_document(members={"m1": Q[:3], "m2": kept, "m3": ()}), releasing=releasing)
    draining = a_report("m2", 5, kept, draining=list(releasing))
    pods = obeying(document, m2={"report": draining})
    policy = a_policy(handover={"drainTimeout": "1s"})
    return settled(**{"document": document, "pods": pods, "policy": policy} | changed)


@pytest.mark.parametrize(
    ("ages", "again"), [((0.0,), 6.0), ((5.0,), 1.0), ((-0.5,), 6.0), ((-300.0,), 6.0), ((3.0, 36.0), 3.0)]
)
def test_gate_waits_for_the_youngest_handover_plus_a_margin(ages: tuple[float, ...], again: float) -> None:
    found = plan(in_flight(*ages), NOW)
    assert found.document is None
    assert found.requeue_after == pytest.approx(again)


def test_gate_does_not_wait_for_a_handover_that_is_over_or_cancelled() -> None:
    assert Q[2] in written_by(in_flight(6.5, 7.0)).releasing
    released = a_document(members={"m1": Q[:2], "m2": Q[2:5], "m3": ()}, taken={Q[5]: ("m1", "m2")}, age=1.0)
    assert set(written_by(settled(document=released)).releasing) == {Q[4]}
    taken = {Q[4]: ("m2", "m9")}
    returning = a_document(members={"m1": Q[:3], "m2": [Q[3], Q[5]], "m3": ()}, taken=taken, age=1.0)
    slow = obeying(returning, m2={"report": a_report("m2", 4, Q[3:6])})
    assert set(written_by(settled(document=returning, pods=slow)).releasing) == {Q[2], Q[5]}


def test_gate_waits_for_a_handover_to_no_member() -> None:
    snapshot = in_flight(1.0, to=None, views={"orders": a_view(5)})
    assert plan(snapshot, NOW).document is None


# When a document is worth writing, and when to look again.


@pytest.mark.parametrize(
    ("age", "writes", "again"),
    [(0.5, True, None), (0.25, False, 0.25), (0.0, False, 0.5), (-0.5, True, None), (-300.0, True, None)],
)
def test_debounce_delays_assignment_writes_that_move_no_queue(
    age: float,
    again: float | None,
    *,
    writes: bool,
) -> None:
    young = replace(DOCUMENT, issued_at=format_time(NOW - age))
    everyone = replace(young, strategy="", everyone=tuple(Q[:6]), members={"m1": Share("uid-m1")})
    works_all = (a_pod("m1", a_report("m1", 5, Q[:6])),)
    for snapshot in (
        settled(document=young, **CHANGED_SETTINGS),
        settled(document=everyone, pods=works_all, spec=a_spec(messageModel="Broadcasting"), **CHANGED_SETTINGS),
    ):
        found = plan(snapshot, NOW)
        assert bool(found.document) is writes
        assert again is None or found.requeue_after == pytest.approx(again)


@pytest.mark.parametrize(("at", "writes"), [(-0.5, False), (0.0, False), (0.5, True), (300.0, True)])
def test_budget_entry_from_the_future_is_corrected(at: float, *, writes: bool) -> None:
    policy = a_policy(budget={"maxMoves": 5})
    document = replace(DOCUMENT, spent=((format_time(NOW + at), 1),))
    assert bool(plan(settled(document=document, policy=policy), NOW).document) is writes


def test_strategy_change_that_moves_nothing_is_stored() -> None:
    found = plan(settled(policy=a_policy(strategy="Balanced")), NOW)
    assert found.document == replace(DOCUMENT, generation=6, issued_at=format_time(NOW), strategy="Balanced")
    assert journal(found)["message"] == "The strategy is now Balanced"


def unready(name: str, **changed: Any) -> tuple[PodSnapshot, ...]:
    return obeying(DOCUMENT, **{name: {"ready": False, **changed}})


def only(**changed: Any) -> tuple[PodSnapshot, ...]:
    return obeying(DOCUMENT, m1=changed)


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({}, 20.0),
        ({"policy": a_policy(triggers={"resync": "7s"})}, 7.0),
        ({"pods": only(ready=False, stable_for=9.0)}, 1.0),
        ({"pods": only(ready=False, stable_for=3.0, unreachable_for=8.0)}, 2.0),
        ({"pods": only(ready=False, stable_for=3.0), "policy": a_policy(handover={"lostAfter": "4s"})}, 4.0),
        ({"pods": only(stable_for=9.5)}, 20.0),
        ({"pods": (*obeying(DOCUMENT), a_pod("m0", ended=True, ready=False, stable_for=9.5))}, 20.0),
        ({"pods": only(ready=False, stable_for=20.0), "policy": a_policy(triggers={"unreadyGrace": "30s"})}, 10.0),
        ({"pods": only(cut_off_brokers={"a": 9.0, "b": 3.0})}, 1.0),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", age=17.0))}, 3.0),
        ({"views": {"orders": a_view(stable_for=38.0), "%RETRY%orders": None}}, 2.0),
        ({"views": {"orders": a_view(stable_for=40.0)}}, 20.0),
        ({"views": {"orders": a_view(stable_for=40.5)}}, 20.0),
    ],
)
def test_reconcile_is_requeued_when_time_alone_may_change_the_plan(changed: dict[str, Any], again: float) -> None:
    found = plan(settled(**changed), NOW)
    assert found.document is None
    assert found.requeue_after == pytest.approx(again)


def test_reconcile_requeue_time_for_a_silent_holder_a_poke_and_a_quiet_broadcast() -> None:
    taken = a_document(members={"m1": Q[:2], "m2": Q[3:6]}, taken={Q[2]: ("m2", "m1")}, age=119.0)
    silent = obeying(taken, m2={"report": a_report("m2", 4, Q[2:6]), "poke": Poke(5, 9), "poked_for": 0.0})
    assert plan(settled(document=taken, pods=silent), NOW).requeue_after == pytest.approx(1.0)
    assert plan(with_joiner(), NOW).requeue_after == 1.0, "when the pokes of the document just written come round"
    everyone = a_document(strategy="", everyone=tuple(Q[:6]), members={"m1": ()})
    pods = (a_pod("m1", a_report("m1", 5, Q[:6])),)
    found = plan(settled(document=everyone, pods=pods, spec=a_spec(messageModel="Broadcasting")), NOW)
    assert (found.document, found.requeue_after) == (None, 20.0)


# Everybody works everything.

BROADCAST = a_document(members={"m1": (), "m2": ()}, strategy="", everyone=tuple(Q[:6]))
TO_ALL: dict[str, Any] = {
    "spec": a_spec(messageModel="Broadcasting"),
    "document": BROADCAST,
    "pods": tuple(a_pod(name, a_report(name, 5, Q[:6])) for name in ("m1", "m2")),
}


def test_broadcasting_queues_are_listed_in_order() -> None:
    backwards = a_view()._replace(queues=tuple(reversed(Q[:6])))
    assert plan(settled(**TO_ALL, views={"orders": backwards}), NOW).document is None
    more = written_by(settled(**TO_ALL, views={"orders": a_view(8)}))
    assert more == replace(BROADCAST, generation=6, issued_at=format_time(NOW), everyone=tuple(Q[:8]))


def test_broadcasting_without_a_route_admits_members_and_keeps_its_queues() -> None:
    pods = (*TO_ALL["pods"], JOINER)
    found = written_by(settled(**TO_ALL | {"pods": pods}, views={"orders": None}))
    members = {**BROADCAST.members, "m3": Share("uid-m3")}
    assert found == replace(BROADCAST, generation=6, issued_at=format_time(NOW), members=members)
    unknown = settled(**TO_ALL | {"pods": pods, "document": None, "damage": ""}, views={"orders": None})
    first = plan(replace(unknown, pods=(JOINER,)), NOW).document
    assert first == Assignment(
        group="shop/orders", generation=1, issued_at=format_time(NOW), members={"m3": Share("uid-m3")}, everyone=()
    )


def test_broadcasting_switch_from_clustering_and_back_in_full() -> None:
    release = Release(M2, "m1", 5, format_time(NOW - LONG))
    document = replace(DOCUMENT, releasing={Q[9]: release}, forced={Q[0]: 4}, barrier=5, spent=())
    there = written_by(settled(document=document, spec=a_spec(messageModel="Broadcasting")))
    members = {"m1": Share("uid-m1"), "m2": Share("uid-m2")}
    assert there == replace(BROADCAST, generation=6, issued_at=format_time(NOW), members=members)
    back = plan(settled(**TO_ALL | {"spec": a_spec()}), NOW)
    assert back.document == replace(BROADCAST, generation=6, issued_at=format_time(NOW), everyone=None, barrier=6)


# Who is listened to, asked, and confirmed.

DRAINING = a_report("m2", 5, Q[3:6], draining=[Q[8]])
DISPUTED = (  # one reaches a broker that another one missed when it was heard last
    *obeying(DOCUMENT, m1={"report": a_report("m1", 5, Q[:2], brokers={"a": True})}),
    a_pod("m3", a_report("m3", 5, brokers={"a": False}), cut_off_brokers={"a": 1.0}),
)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, ""),
        ({"pods": only(unreachable_for=3.0)}, "m1"),
        ({"pods": only(report=a_report("m1", 4, Q[:2]))}, "m1"),
        ({"pods": only(report=None)}, "m1"),
        ({"pods": only(report=None), "document": replace(DOCUMENT, barrier=5)}, "m1"),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", ready=False))}, "m3"),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", ready=False, started=False))}, ""),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", ready=False, ended=True))}, ""),
        ({"pods": DISPUTED}, "m1 m3"),
        ({"pods": (*DISPUTED[:-1], replace(DISPUTED[-1], ready=False, ended=True))}, ""),
        ({"pods": (*obeying(DOCUMENT), a_pod("m3", ready=False, unreachable_for=3.0, ended=True, started=False))}, ""),
        ({"pods": obeying(DOCUMENT, m2={"report": DRAINING})}, ""),
        ({"pods": obeying(DOCUMENT, m2={"report": DRAINING}), "document": replace(DOCUMENT, barrier=5)}, "m2"),
        ({"pods": obeying(DOCUMENT, m2={"report": a_report("m2", 5, (), draining=Q[2:], state="draining")})}, "m2"),
    ],
)
def test_report_is_awaited_only_if_it_could_change_the_plan(changed: dict[str, Any], names: str) -> None:
    found = plan(settled(**changed), NOW)
    assert " ".join(sorted(found.members_to_poll)) == names


def test_status_counts_queues_in_handover_without_a_route() -> None:
    assert plan(in_flight(1.0, views={"orders": None}), NOW).status["queues"] == 6


def test_report_of_a_draining_member_is_awaited() -> None:
    assert plan(in_flight(1.0), NOW).members_to_poll == {"m2"}


def test_membership_confirms_absent_owners_in_order_unless_known_to_be_deleted() -> None:
    taken = {Q[5]: ("m2", "m1"), Q[6]: ("m0", "m1")}
    document = a_document(members={"m1": Q[:3], "m4": (), "m3": Q[3:5]}, taken=taken)
    pods = (a_pod("m1", a_report("m1", 5, Q[:3])),)
    found = plan(settled(document=document, pods=pods, deleted_uids=frozenset({"uid-m4", "uid-m0"})), NOW)
    assert found.verify_ended == (M2, M3)
    young = a_document(members={"m1": Q[:6], "m4": ()}, age=0.25)
    unwritten = plan(settled(document=young, pods=obeying(young)[:1], deleted_uids=frozenset({"uid-m4"})), NOW)
    assert (unwritten.document, unwritten.verify_ended) == (None, ())


def test_drain_final_is_requested_once_and_only_from_terminating_members() -> None:
    final = {"report": a_report("m2", 5, Q[3:6], state="draining", final=True)}
    for changed, asked in (
        ({"terminating": True}, (M2,)),
        ({"terminating": True, "report": None}, (M2,)),
        ({"terminating": True, **final}, ()),
        (final, ()),
        ({"terminating": True, "ended": True}, ()),
    ):
        assert plan(settled(pods=obeying(DOCUMENT, m2=changed)), NOW).members_to_drain == asked


# What people are told.


def journal(found: Plan, kind: str = "plan") -> dict[str, Any]:
    return dict(next(line for line in found.journal_records if line["kind"] == kind))


def ended(*names: str) -> dict[str, Any]:
    gone = frozenset(f"uid-{name}" for name in names)
    return {"pods": tuple(pod for pod in obeying(THREE) if pod.name not in names), "deleted_uids": gone}


def one(name: str, **changed: Any) -> dict[str, Any]:
    return {"pods": obeying(THREE, **{name: changed})}


def two_topics(*topics: str, **views: Any) -> dict[str, Any]:
    return {"spec": a_spec(subscriptions=[{"topic": topic} for topic in topics]), "views": views}


SILENT_FOR_10_SECONDS = {"ready": False, "unreachable_for": 10.0}
THREE = a_document(members={"m1": Q[:2], "m2": Q[2:4], "m3": Q[4:6]})
NOBODYS = {"document": a_document(2), "pods": (JOINER,)}
CUT: dict[str, dict[str, Any]] = {
    "m1": {"report": a_report("m1", 5, Q[:2], brokers={"a": True})},
    "m2": {"report": a_report("m2", 5, Q[2:4], brokers={"a": False}), "cut_off_brokers": {"a": 10.0}},
}
DRAINED = a_report("m2", 5, state="drained", final=True)
PAYMENTS = a_view(1, topic="payments")
WEIGHED = {"document": replace(THREE, strategy="Balanced"), "policy": a_policy(strategy="Balanced")}


@pytest.mark.parametrize(
    ("changed", "reason", "message"),
    [
        ({"spec": a_spec(paused=True)}, "GroupPaused", "The group is paused"),
        ({"document": None, "pods": ()}, "FirstAssignment", "A new group"),
        (NOBODYS | {"document": a_document(1)}, "FirstAssignment", "A new group"),
        (NOBODYS, "GroupResumed", "No queue had an owner"),
        (NOBODYS | {"document": a_document(2, barrier=2)}, "FirstAssignment", "A new group"),
        (ended("m2"), "MemberTerminated", "m2 ended"),
        (ended("m3", "m1"), "MemberTerminated", "m1, m3 ended"),
        (one("m2", ended=True), "MemberTerminated", "m2 ended"),
        (
            one("m2", uid="new", report=a_report("m2", 0, uid="new")) | {"deleted_uids": frozenset({"uid-m2"})},
            "MemberTerminated",
            "m2 ended",
        ),
        (
            ended("m2") | {"document": a_document(taken={Q[0]: ("m2", None)})},
            "MemberTerminated",
            "m2 ended",
        ),
        (one("m2", ready=False, unreachable_for=10.0), "MemberLost", "m2 is not ready and does not respond"),
        (
            {"pods": obeying(THREE, m2=SILENT_FOR_10_SECONDS, m3=SILENT_FOR_10_SECONDS)},
            "MemberLost",
            "m2, m3 are not ready and do not respond",
        ),
        (one("m2", terminating=True, report=DRAINED), "MemberLeft", "m2 is leaving"),
        (
            {"pods": obeying(THREE, m1={"terminating": True, "report": DRAINED}, m3={"ended": True})},
            "MemberTerminated",
            "m3 ended; m1 is leaving",
        ),
        (one("m2", ready=False), "MemberUnready", "m2 has not been ready for longer than its grace"),
        ({"pods": obeying(THREE, **CUT)}, "BrokerUnreachable", "m2 cannot reach a broker that other members reach"),
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
        ({"pods": (*obeying(THREE), a_pod("m4", a_report("m4", 0)))}, "MemberJoined", "m4 joined"),
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
    told = journal(plan(settled(**{"document": THREE} | changed), NOW))
    assert (told["reason"], told["message"]) == (reason, message)


TORN = Finding(Reason.INVALID_SPEC, "spec.subscriptions: expected an array")
UNKNOWN = Finding(
    Reason.BROKER_METADATA_UNAVAILABLE,
    "The broker returned no metadata of the group's members; the present assignment stays in force",
)
UNSEEN = Finding(
    Reason.BROKER_METADATA_UNAVAILABLE,
    "The broker returned no metadata of topic payments; the present assignment stays in force",
)
UNSEEN_ORDERS = UNSEEN._replace(message=UNSEEN.message.replace("payments", "orders"))
SWITCHED_OFF = Finding(Reason.CONSUMPTION_DISABLED, "The group is switched off at broker-a")
UNREACHABLE = Finding(Reason.BROKER_UNREACHABLE, "broker-a cannot be reached")
UNKNOWN_TOPIC = Finding(Reason.UNKNOWN_TOPIC, "There is no topic orders")
BOTH = a_spec(subscriptions=[{"topic": "orders"}, {"topic": "payments"}])


@pytest.mark.parametrize(
    ("changed", "ready", "degraded", "others"),
    [
        ({}, ("True", "Settled", "6 queues, 2 members"), ("False", "Settled", "No problems"), {}),
        (
            {"spec": None},
            ("False", "InvalidSpec", "The group's spec is invalid"),
            ("False", "Settled", "No problems"),
            {},
        ),
        (
            {"spec": None, "problems": (TORN,)},
            ("False", *TORN),
            ("True", *TORN),
            {"InvalidSpec": TORN},
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
            {"spec": BOTH, "problems": (TORN, TORN._replace(message="again"))},
            ("True", "Settled", "6 queues, 2 members"),
            ("True", "InvalidSpec", f"{TORN.message}; again; {UNSEEN.message}"),
            {"InvalidSpec": TORN, "BrokerMetadataUnavailable": UNSEEN},
        ),
        (
            {"document": a_document(members={"m1": (), "m2": ()}), "views": {"orders": None}},
            ("False", *UNSEEN_ORDERS),
            ("True", *UNSEEN_ORDERS),
            {"BrokerMetadataUnavailable": UNSEEN_ORDERS},
        ),
        (
            {
                "document": a_document(members={"m1": (), "m2": ()}),
                "views": {"orders": None},
                "problems": (Finding(Reason.UNMANAGED_CONSUMERS, "somebody"), UNKNOWN_TOPIC),
            },
            ("False", *UNKNOWN_TOPIC),
            ("True", "UnknownTopic", f"{UNKNOWN_TOPIC.message}; {UNSEEN_ORDERS.message}"),
            {
                "UnmanagedConsumers": Finding(Reason.UNMANAGED_CONSUMERS, "somebody"),
                "BrokerMetadataUnavailable": UNSEEN_ORDERS,
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
                f"{UNKNOWN.message}; 2 queues without an owner",
            ),
            {
                "BrokerMetadataUnavailable": UNKNOWN,
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
    changed: dict[str, Any], ready: tuple[str, ...], degraded: tuple[str, ...], others: dict[str, Finding]
) -> None:
    found = plan(settled(**changed), NOW)
    told = conditions(found)
    assert list(told) == ["Ready", "Progressing", "Degraded", "Reconciling", "Stalled", *sorted(others)]
    assert told.pop("Ready") == ready
    assert told.pop("Degraded") == degraded
    assert told.pop("Progressing")[:2] in {
        ("False", "Settled"),
        ("False", "BrokerMetadataUnavailable"),
        ("False", "NoMembers"),
    }
    at_first = [
        it
        for it in others.values()
        if it.reason is Reason.BROKER_METADATA_UNAVAILABLE or ReasonKind.STALLS in it.reason.kinds
    ]
    assert told.pop("Reconciling")[0] == str(bool(at_first))
    assert told.pop("Stalled") == ("False", "Settled", "No problems")
    assert told == {kind: ("True", *verdict) for kind, verdict in others.items()}
    warnings = {
        verdict.reason: verdict.reason not in {Reason.IDLE_MEMBERS, Reason.UNMANAGED_CONSUMERS}
        for verdict in others.values()
    }
    assert {event.reason: event.warning for event in found.events} == warnings
    assert plan(settled(**changed, status=found.status), NOW + 9).events == ()


@pytest.mark.parametrize(
    ("changed", "told"),
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
    changed: dict[str, Any], told: tuple[str, str, str]
) -> None:
    assert conditions(plan(settled(**changed), NOW))["Progressing"] == told


@pytest.mark.parametrize(
    ("changed", "told"),
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
    changed: dict[str, Any], told: tuple[str, str]
) -> None:
    document = replace(DOCUMENT, members=entry_for_joiner())
    assert conditions(plan(with_joiner(document=document, **changed), NOW))["Progressing"][:2] == told


def test_status_in_full() -> None:
    pods = (*obeying(DOCUMENT), JOINER, a_pod("m0", ended=True, ready=False))
    found = plan(settled(pods=pods, lag=7, observed_generation=3), NOW)
    conditions = found.status["conditions"]
    assert found.status == {
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
    later = plan(settled(pods=pods, observed_generation=4, status=found.status), NOW + 9).status["conditions"]
    assert [one["lastTransitionTime"] for one in later] == [format_time(NOW)] * 5
    quiet = plan(settled(status={"generation": 5}), NOW).status
    assert quiet.keys() == found.status.keys() - {"lag", "lastRebalance"}
    assert (quiet["idleMembers"], quiet["generation"]) == (0, 5)
    everybody = plan(settled(**TO_ALL), NOW).status
    assert "strategy" not in everybody
    assert (everybody["idleMembers"], everybody["unownedQueues"], everybody["queues"]) == (0, 0, 6)
    new = plan(a_snapshot(spec=None), NOW).status
    assert new["generation"] == 0


def test_status_last_rebalance_spans_first_assignment_to_last_release() -> None:
    going = {"reason": "MemberJoined", "at": format_time(NOW - 2.124), "moved": 4}
    status = {"lastRebalance": going, "generation": 5}
    more = plan(settled(pods=obeying(DOCUMENT)[:1], deleted_uids=frozenset({"uid-m2"}), status=status), NOW)
    assert more.status["lastRebalance"] == {**going, "moved": 7}
    assert [event.reason for event in more.events] == []
    slow = settled(pods=only(report=a_report("m1", 4, Q[:2])), status=status)
    assert plan(slow, NOW).status["lastRebalance"] == going
    over = plan(settled(status=status), NOW)
    assert over.status["lastRebalance"] == {**going, "seconds": 2.124}
    assert over.events == (Event(Reason.SETTLED, "MemberJoined: 4 queues moved in 2.124 s"),)
    for seconds, told in ((1.999, 0), (2.0, 1)):  # what was over so soon was told enough by its beginning
        swift = {"lastRebalance": {**going, "at": format_time(NOW - seconds)}, "generation": 5}
        assert len(plan(settled(status=swift), NOW).events) == told
    again = plan(settled(status=over.status), NOW + 60)
    assert (again.status["lastRebalance"], again.events) == (over.status["lastRebalance"], ())
    ahead = {"lastRebalance": {**going, "at": format_time(NOW + 60)}, "generation": 5}
    assert plan(settled(status=ahead), NOW).status["lastRebalance"]["seconds"] == 0.0
    next_one = plan(replace(with_joiner(), status=over.status), NOW + 60)
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


@pytest.mark.parametrize(("unheard", "told"), [(9.0, "True"), (60.0, "False")])
def test_condition_progressing_does_not_wait_for_a_lost_member(unheard: float, told: str) -> None:
    document = a_document(6, members={"m1": Q[:6], "m2": ()})
    lags = a_pod("m2", report=a_report("m2", 5, Q[:2]), ready=False, unreachable_for=unheard, stable_for=60.0)
    pods = (obeying(document)[0], lags)
    assert conditions(plan(settled(document=document, pods=pods), NOW))["Progressing"][0] == told


def test_handover_immediate_mode_reports_the_number_of_moved_queues() -> None:
    at_once = plan(with_joiner(policy=a_policy(handover={"mode": "Immediate"})), NOW)
    assert at_once.status["lastRebalance"]["moved"] == 2
    assert at_once.status["idleMembers"] == 0
    assert at_once.events == (Event(Reason.MEMBER_JOINED, "m3 joined; 2 queues change hands"),)


def test_forced_grant_event_names_the_former_owners_if_known() -> None:
    lost = {"ready": False, "unreachable_for": 10.0}
    both = plan(settled(document=THREE, pods=obeying(THREE, m3=lost, m2=lost)), NOW)
    warning = Event(Reason.QUEUES_FORCED, "4 queues taken from m2, m3, which did not respond", warning=True)
    assert [event for event in both.events if event.reason is Reason.QUEUES_FORCED] == [warning]
    assert both.status["lastRebalance"]["moved"] == 4
    assert "4 queues change hands" in both.events[0].message
    names = [f"m{number}" for number in range(1, 7)]
    six = a_document(members={name: [queue] for name, queue in zip(names, Q, strict=False)})
    five = plan(settled(document=six, pods=obeying(six, **dict.fromkeys(names[1:], lost))), NOW)
    told = next(event.message for event in five.events if event.reason is Reason.QUEUES_FORCED)
    assert told == "5 queues taken from m2, m3, m4 and 2 more, which did not respond"
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    silent = a_pod("m2", ready=False, stable_for=LONG, unreachable_for=11.0)
    free = plan(settled(document=document, pods=(*obeying(document), silent)), NOW)
    assert (
        Event(Reason.QUEUES_FORCED, "3 queues taken from a member, which did not respond", warning=True) in free.events
    )


def test_journal_in_full() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, taken={Q[4]: ("m2", "m1"), Q[5]: ("m0", "m1")})
    pods = obeying(document, m2={"report": a_report("m2", 5, Q[2:4])})
    gone = frozenset({"uid-m0"})
    found = plan(settled(document=document, pods=(*pods, JOINER), deleted_uids=gone, views={"orders": a_view(7)}), NOW)
    common = {"schema": 1, "group": "shop/orders", "at": format_time(NOW)}
    in_document = {**common, "generation": 6}
    granted = {"kind": "handover", **in_document, "act": "Grant"}
    assert list(found.journal_records[:-3]) == [
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
        {**granted, **to("m3"), **of("m0"), "proof": "Ended", "state": "Releasing", "queues": ids(5)},
        {**granted, **to("m3"), "proof": "Released", "state": "Free", "queues": ids(6)},
        {**granted, **to("m1"), **of("m2"), "proof": "Released", "state": "Releasing", "queues": ids(4)},
    ]
    assert found.journal_records[-3] == {
        "kind": "verdict",
        **common,
        "condition": "Ready",
        "status": "True",
        "reason": "Settled",
        "message": "7 queues, 3 members",
    }


def of(name: str) -> dict[str, str]:
    return {"from": name, "fromUid": f"uid-{name}"}


def to(name: str) -> dict[str, str]:
    return {"to": name, "toUid": f"uid-{name}"}


def ids(*numbers: int) -> dict[str, dict[str, str]]:
    return {"orders": {"a": ",".join(map(str, numbers))}}


def test_journal_merges_handovers_that_differ_only_in_the_queue() -> None:
    found = plan(settled(pods=obeying(DOCUMENT)[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    handovers = [line for line in found.journal_records if line["kind"] == "handover"]
    assert [(line["from"], line["to"], line["queues"]) for line in handovers] == [
        ("m2", "m1", {"orders": {"a": "3-5"}})
    ]


def test_journal_separates_handovers_by_taker_and_state() -> None:
    document = a_document(members={"m1": [], "m2": Q[1:3], "m3": []}, taken={Q[0]: ("m2", "m1")})
    pods = tuple(pod for pod in obeying(document) if pod.name != "m2")
    deleted = frozenset({"uid-m2"})
    found = plan(settled(document=document, pods=pods, deleted_uids=deleted, views={"orders": a_view(3)}), NOW)
    handovers = [line for line in found.journal_records if line["kind"] == "handover"]
    assert [(line["state"], line["to"], line["queues"]) for line in handovers] == [
        ("Owned", "m1", ids(1)),
        ("Owned", "m3", ids(2)),
        ("Releasing", "m1", ids(0)),
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
    endless = "".join(hashlib.sha256(str(number).encode()).hexdigest() for number in range(40_000))
    more = a_view()._replace(queues=(*Q[:6], Queue("orders", endless, 0)))
    document = replace(DOCUMENT, members=entry_for_joiner())
    snapshot = with_joiner(document=document, policy=a_policy(paused=True), views={"orders": more})
    found = plan(replace(snapshot, status={"generation": 5}), NOW)
    assert (found.document, found.config_map_data, found.pokes, found.requeue_after) == (None, {}, {}, 20.0)
    assert conditions(found)["Ready"][:2] == ("False", "AssignmentTooLarge")
    assert conditions(found)["Ready"][2].endswith("; the present assignment stays in force")
    assert conditions(found)["Degraded"][1] == "AssignmentTooLarge"
    assert conditions(found)["Progressing"][1] == "Paused"
    assert "lastRebalance" not in found.status
    assert {line["kind"] for line in found.journal_records} == {"verdict"}


def test_event_lists_ended_members_in_order_of_names() -> None:
    """Sets have an order of their own in each process; six of them are rarely in that of their names."""
    document = a_document(members={f"m{number}": (Q[number],) for number in range(6)})
    gone = frozenset(f"uid-m{number}" for number in range(6))
    found = plan(a_snapshot(document=document, pods=(a_pod("new", a_report("new", 5, ())),), deleted_uids=gone), NOW)
    assert found.events[0].message.startswith("m0, m1, m2 and 3 more ended")


@pytest.mark.parametrize(
    ("brokers", "why"),
    [
        ({"a": False, "b": False, "c": True}, "m1, m2 cannot reach a, b"),
        ({"a": True}, "m1, m2 are not ready"),
    ],
)
def test_condition_no_members_says_why_present_members_cannot_consume(brokers: dict[str, bool], why: str) -> None:
    pods = tuple(a_pod(name, a_report(name, 5, brokers=brokers), ready=False) for name in ("m1", "m2"))
    found = plan(settled(pods=pods), NOW)
    told = f"No member can consume 6 queues: {why}; the present assignment stays in force"
    assert [it.message for it in found.problems if it.reason is Reason.NO_MEMBERS] == [told]
    assert found.document is None


def test_condition_message_uses_singular_for_one_member() -> None:
    document = a_document(members={"m1": Q[:6]})
    found = plan(settled(document=document, pods=obeying(document)), NOW)
    ready = next(it for it in found.status["conditions"] if it["type"] == "Ready")
    assert ready["message"] == "6 queues, 1 member"
