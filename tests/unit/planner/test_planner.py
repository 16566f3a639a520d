"""Tests `plan()` case by case: a snapshot goes in, and the test checks the plan that comes out."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from builders import (
    LONG,
    NOW,
    a_document,
    a_pod,
    a_policy,
    a_report,
    a_snapshot,
    a_spec,
    a_view,
    obeying,
)
from rota.documents import Assignment, decode_assignment
from rota.model import Finding, Holder, Poke, Queue, Reason
from rota.planner import Plan, PodSnapshot, Snapshot, plan
from rota.planner.record import MAX_PLAUSIBLE_GENERATION
from rota.spec.resolved import settings_digest
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(8)]


def conditions(new_plan: Plan) -> dict[str, tuple[str, str]]:
    return {
        condition["type"]: (condition["status"], condition["reason"]) for condition in new_plan.status["conditions"]
    }


def messages(new_plan: Plan) -> dict[str, str]:
    return {condition["type"]: condition["message"] for condition in new_plan.status["conditions"]}


def owned(document: Assignment | None) -> dict[str, list[int]]:
    assert document
    return {name: [queue.id for queue in share.queues] for name, share in document.members.items()}


def settled(**changed: Any) -> Snapshot:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
    return a_snapshot(**({"document": document, "pods": obeying(document)} | changed))


def test_assignment_of_a_new_group_is_written_before_it_has_pods() -> None:
    new_plan = plan(a_snapshot(), NOW)
    assert new_plan.document
    assert (new_plan.document.generation, new_plan.document.barrier) == (1, 0)
    assert conditions(new_plan)["Ready"] == ("False", "MembersStillJoining")


def test_assignment_gives_the_first_members_all_queues_at_once() -> None:
    pods = [a_pod(name, a_report(name, 0)) for name in ("m1", "m2")]
    new_plan = plan(a_snapshot(pods=tuple(pods)), NOW)
    assert owned(new_plan.document) == {"m1": [0, 2, 4], "m2": [1, 3, 5]}
    assert new_plan.pokes == {"m1": Poke(1, 1), "m2": Poke(1, 1)}
    assert conditions(new_plan)["Ready"] == ("True", "Settled")
    assert conditions(new_plan)["Progressing"] == ("True", "HandoverInFlight")
    assert [event.reason for event in new_plan.events] == [Reason.FIRST_ASSIGNMENT]
    assert new_plan.document
    assert decode_assignment(new_plan.config_map_data["assignment.json"]) == new_plan.document


def test_reconcile_of_a_settled_group_changes_nothing() -> None:
    new_plan = plan(settled(), NOW)
    assert new_plan.document is None
    assert (new_plan.pokes, new_plan.members_to_drain, new_plan.members_to_poll, new_plan.events) == (
        {},
        (),
        frozenset(),
        (),
    )
    assert {kind: holds for kind, (holds, _) in conditions(new_plan).items()} == {
        "Ready": "True",
        "Progressing": "False",
        "Degraded": "False",
        "Reconciling": "False",
        "Stalled": "False",
    }
    repeated = plan(settled(status=new_plan.status), NOW + 7)
    assert repeated.status == new_plan.status, "an unchanged status is not written"
    assert repeated.journal_records == ()


def test_scale_up_gives_the_new_member_queues_in_two_steps() -> None:
    snapshot = settled()
    joiner = a_pod("m3", a_report("m3", 0))
    first = plan(replace(snapshot, pods=(*snapshot.pods, joiner)), NOW)
    assert first.document
    assert owned(first.document) == {"m1": [0, 1], "m2": [3, 4], "m3": []}
    assert {queue.id: (release.holder.name, release.to) for queue, release in first.document.releasing.items()} == {
        2: ("m1", "m3"),
        5: ("m2", "m3"),
    }
    assert first.pokes == {"m1": Poke(6, 1), "m2": Poke(6, 1)}
    assert first.members_to_poll == {"m1", "m2"}
    assert first.status["lastRebalance"] == {
        "reason": "MemberJoined",
        "at": first.document.issued_at,
        "moved": 0,
    }

    m1_obeys = obeying(first.document, m2={"report": a_report("m2", 5, Q[3:6])})
    second = plan(settled(document=first.document, pods=m1_obeys, status=first.status), NOW + 1)
    assert owned(second.document) == {"m1": [0, 1], "m2": [3, 4], "m3": [2]}
    assert second.pokes == {"m2": Poke(7, 1), "m3": Poke(7, 1)}, "m1 already obeys"

    assert second.document
    third = plan(settled(document=second.document, pods=obeying(second.document), status=second.status), NOW + 2)
    assert owned(third.document)["m3"] == [2, 5]
    assert third.document
    last = plan(settled(document=third.document, pods=obeying(third.document), status=third.status), NOW + 3)
    assert last.document is None
    assert last.status["lastRebalance"] == {**first.status["lastRebalance"], "moved": 2, "seconds": 3.0}
    assert [event.reason for event in last.events] == [Reason.SETTLED]


def test_failover_grants_queues_once_the_pod_ended_not_while_it_is_only_unseen() -> None:
    snapshot = settled()
    while_missing = plan(replace(snapshot, pods=snapshot.pods[:1]), NOW)
    assert [holder.name for holder in while_missing.verify_ended] == ["m2"]
    assert owned(while_missing.document) == {"m1": [0, 1, 2], "m2": []}, "it may still consume them"
    assert set(while_missing.document.releasing) == set(Q[3:6]) if while_missing.document else False
    after_deletion = plan(replace(snapshot, pods=snapshot.pods[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    assert owned(after_deletion.document) == {"m1": [0, 1, 2, 3, 4, 5]}
    assert after_deletion.status["lastRebalance"]["reason"] == "MemberTerminated"
    after_pod_ended = plan(
        replace(snapshot, pods=(snapshot.pods[0], replace(snapshot.pods[1], ended=True, ready=False))), NOW
    )
    assert owned(after_pod_ended.document) == {"m1": [0, 1, 2, 3, 4, 5]}


def test_scale_down_drains_the_terminating_member_and_then_moves_its_queues() -> None:
    snapshot = settled()
    leaving = replace(snapshot.pods[1], terminating=True)
    first = plan(replace(snapshot, pods=(snapshot.pods[0], leaving)), NOW)
    assert [holder.name for holder in first.members_to_drain] == ["m2"]
    assert first.document is None, "a terminating pod gets no document any more, so none is written"
    assert conditions(first)["Progressing"] == ("True", "HandoverInFlight")
    draining = a_pod("m2", a_report("m2", 5, draining=Q[3:6], state="draining", final=True), terminating=True)
    during_drain = plan(replace(snapshot, pods=(snapshot.pods[0], draining)), NOW)
    assert (during_drain.document, during_drain.members_to_drain) == (None, ())
    drained = a_pod("m2", a_report("m2", 5, state="drained", final=True), terminating=True)
    second = plan(replace(snapshot, pods=(snapshot.pods[0], drained)), NOW + 1)
    assert owned(second.document) == {"m1": [0, 1, 2, 3, 4, 5], "m2": []}, "the entry stays until the pod has ended"
    assert second.status["lastRebalance"]["reason"] == "MemberLeft"


def test_forced_grant_moves_and_marks_the_queues_of_a_lost_member() -> None:
    snapshot = settled()
    silent = replace(snapshot.pods[1], ready=False, stable_for=12.0, unreachable_for=10.0)
    new_plan = plan(replace(snapshot, pods=(snapshot.pods[0], silent)), NOW)
    assert new_plan.document
    assert owned(new_plan.document) == {"m1": [0, 1, 2, 3, 4, 5], "m2": []}
    assert new_plan.document.forced == dict.fromkeys(Q[3:6], 6)
    assert [event.reason for event in new_plan.events if event.warning] == [Reason.QUEUES_FORCED]
    assert new_plan.status["lastRebalance"]["reason"] == "MemberLost"


def test_forced_grant_from_a_silent_ready_member_comes_two_minutes_after_termination() -> None:
    snapshot = settled()
    leaving = a_pod("m1", snapshot.pods[0].report, terminating=True, unreachable_for=LONG)
    after_119_seconds = plan(replace(snapshot, pods=(replace(leaving, terminating_for=119.0), snapshot.pods[1])), NOW)
    assert after_119_seconds.document is None
    document = plan(replace(snapshot, pods=(replace(leaving, terminating_for=120.0), snapshot.pods[1])), NOW).document
    assert document
    assert document.forced == dict.fromkeys(Q[:3], 6)


def test_readiness_grace_keeps_queues_of_an_unready_member_and_admits_no_idle_one() -> None:
    snapshot = settled()
    within_grace = plan(
        replace(snapshot, pods=(snapshot.pods[0], replace(snapshot.pods[1], ready=False, stable_for=9.0))), NOW
    )
    assert within_grace.document is None
    assert within_grace.requeue_after == pytest.approx(1.0)
    after_grace = plan(
        replace(snapshot, pods=(snapshot.pods[0], replace(snapshot.pods[1], ready=False, stable_for=10.0))), NOW
    )
    assert after_grace.document
    assert set(after_grace.document.releasing) == set(Q[3:6])
    idle = a_pod("m3", a_report("m3", 0), ready=False, stable_for=1.0)
    assert plan(replace(snapshot, pods=(*snapshot.pods, idle)), NOW).document is None


def test_assignment_is_kept_when_no_member_can_own_queues() -> None:
    snapshot = settled()
    unready = tuple(replace(pod, ready=False, stable_for=60.0) for pod in snapshot.pods)
    new_plan = plan(replace(snapshot, pods=unready), NOW)
    assert new_plan.document is None
    assert conditions(new_plan)["Ready"] == ("False", "NoMembers")
    without_pods = plan(replace(snapshot, pods=(), deleted_uids=frozenset({"uid-m1", "uid-m2"})), NOW)
    assert without_pods.document is None


def test_queue_additions_apply_at_once_and_removals_after_a_delay() -> None:
    snapshot = settled()
    with_more_queues = plan(replace(snapshot, views={"orders": a_view(8, stable_for=0)}), NOW)
    assert owned(with_more_queues.document) == {"m1": [0, 1, 2, 6], "m2": [3, 4, 5, 7]}
    assert with_more_queues.status["lastRebalance"]["reason"] == "QueuesAdded"
    fewer = replace(snapshot, views={"orders": a_view(4, stable_for=39)})
    assert plan(fewer, NOW).document is None
    assert plan(fewer, NOW).requeue_after == pytest.approx(1.0)
    with_fewer_queues = plan(replace(snapshot, views={"orders": a_view(4, stable_for=40)}), NOW)
    assert with_fewer_queues.document
    assert {queue: release.to for queue, release in with_fewer_queues.document.releasing.items()} == {
        Q[2]: "m2",
        Q[4]: None,
        Q[5]: None,
    }


@pytest.mark.parametrize("views", [{}, {"orders": None}, {"orders": a_view(0)}], ids=["unknown", "failed", "empty"])
def test_route_that_is_unknown_or_empty_moves_no_queue_but_orphans_are_granted(views: dict[str, Any]) -> None:
    snapshot = settled(views=views)
    at_rest = plan(snapshot, NOW)
    assert at_rest.document is None
    assert conditions(at_rest)["Degraded"] == ("True", "BrokerMetadataUnavailable")
    with_joiner = plan(replace(snapshot, pods=(*snapshot.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    assert owned(with_joiner.document) == {"m1": [0, 1, 2], "m2": [3, 4, 5], "m3": []}
    assert conditions(with_joiner)["Progressing"][1] == "BrokerMetadataUnavailable"
    after_deletion = plan(replace(snapshot, pods=snapshot.pods[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    assert owned(after_deletion.document) == {"m1": [0, 1, 2, 3, 4, 5]}


def test_retry_topic_without_a_route_holds_no_move_back() -> None:
    snapshot = settled(views={"orders": a_view(), "%RETRY%orders": None})
    with_joiner = plan(replace(snapshot, pods=(*snapshot.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    assert with_joiner.document
    assert with_joiner.document.releasing


DUPLICATE = Finding(Reason.DUPLICATE_CONSUMER_GROUP, "The consumer group orders belongs to an older ConsumerGroup")


def test_duplicate_consumer_group_gets_no_document() -> None:
    pods = tuple(a_pod(name, a_report(name, 0)) for name in ("m1", "m2"))
    new_plan = plan(a_snapshot(pods=pods, problems=(DUPLICATE,)), NOW)
    assert (new_plan.document, new_plan.pokes, new_plan.members_to_drain) == (None, {}, ())
    assert conditions(new_plan)["Ready"] == ("False", "DuplicateConsumerGroup")
    assert conditions(new_plan)["DuplicateConsumerGroup"] == ("True", "DuplicateConsumerGroup")


def test_duplicate_consumer_group_releases_its_queues_and_gets_them_back_once_it_is_the_only_one() -> None:
    revoked = plan(settled(problems=(DUPLICATE,)), NOW)
    assert revoked.document
    assert owned(revoked.document) == {"m1": [], "m2": []}
    assert {release.to for release in revoked.document.releasing.values()} == {None}
    assert conditions(revoked)["Ready"] == ("False", "DuplicateConsumerGroup")
    assert {event.reason for event in revoked.events} == {Reason.DUPLICATE_CONSUMER_GROUP}
    released = plan(settled(problems=(DUPLICATE,), document=revoked.document, pods=obeying(revoked.document)), NOW + 1)
    assert released.document
    assert released.document.releasing == {}
    granted = plan(settled(document=released.document, pods=obeying(released.document)), NOW + 60)
    assert owned(granted.document) == {"m1": [0, 2, 4], "m2": [1, 3, 5]}


def test_pause_of_a_group_releases_all_queues_and_resume_reassigns_them() -> None:
    revoked = plan(settled(spec=a_spec(paused=True)), NOW)
    assert revoked.document
    assert owned(revoked.document) == {"m1": [], "m2": []}
    assert conditions(revoked)["Ready"] == ("False", "GroupPaused")
    released = plan(
        settled(spec=a_spec(paused=True), document=revoked.document, pods=obeying(revoked.document)),
        NOW + 1,
    )
    assert released.document
    assert not released.document.releasing
    assert conditions(released)["Ready"] == ("False", "GroupPaused"), "this plan only now stores that all are released"
    at_rest = plan(settled(spec=a_spec(paused=True), document=released.document, pods=obeying(released.document)), NOW)
    assert conditions(at_rest)["Ready"] == ("True", "GroupPaused")
    assert conditions(at_rest)["Reconciling"][0] == "False"
    resumed = plan(settled(document=released.document, pods=obeying(released.document)), NOW + 60)
    assert owned(resumed.document) == {"m1": [0, 2, 4], "m2": [1, 3, 5]}
    assert resumed.status["lastRebalance"]["reason"] == "GroupResumed"


def test_pause_of_a_policy_stops_moves_but_still_grants_orphans() -> None:
    snapshot = settled(policy=a_policy(paused=True))
    with_joiner = plan(replace(snapshot, pods=(*snapshot.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    assert with_joiner.document
    assert not with_joiner.document.releasing
    assert conditions(with_joiner)["Progressing"] == ("False", "Paused")
    after_deletion = plan(replace(snapshot, pods=snapshot.pods[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    assert owned(after_deletion.document) == {"m1": [0, 1, 2, 3, 4, 5]}


NOWHERE: dict[str, Any] = {"strategy": "ByMachineRoom", "options": {"byMachineRoom": {"rooms": ["elsewhere"]}}}


@pytest.mark.parametrize(
    ("policy", "changed", "reason"),
    [
        ({"paused": True}, {}, "Paused"),
        ({"budget": {"maxMoves": 0, "per": "1m"}}, {}, "BudgetSpent"),
        ({"triggers": {"debounce": "1h"}}, {}, "Debounce"),
        ({}, {"views": {}}, "BrokerMetadataUnavailable"),
    ],
    ids=["paused", "no budget", "a young document", "no view"],
)
def test_gate_holds_back_queues_that_the_policy_assigns_to_no_member(
    policy: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    new_plan = plan(settled(policy=a_policy(**NOWHERE, **policy), **changed), NOW)
    assert new_plan.document is None or not new_plan.document.releasing
    assert conditions(new_plan)["Progressing"][1] == reason


def test_policy_that_assigns_queues_to_no_member_revokes_them_within_the_budget() -> None:
    document = plan(settled(policy=a_policy(**NOWHERE, budget={"maxMoves": 4, "per": "1m"})), NOW).document
    assert document
    assert [release.to for release in document.releasing.values()] == [None] * 4
    assert [count for _, count in document.spent] == [4]


def test_budget_limits_moves_and_refills_when_its_window_ends() -> None:
    policy = a_policy(budget={"maxMoves": 1, "per": "1m"})
    snapshot = settled(policy=policy)
    pods = (*snapshot.pods, a_pod("m3", a_report("m3", 0)))
    first = plan(replace(snapshot, pods=pods), NOW)
    assert first.document
    assert list(first.document.releasing) == [Q[2]]
    assert first.document.spent == ((first.document.issued_at, 1),)
    granted = plan(settled(policy=policy, document=first.document, pods=obeying(first.document)), NOW + 1)
    assert granted.document
    within_window = plan(settled(policy=policy, document=granted.document, pods=obeying(granted.document)), NOW + 59)
    assert within_window.document is None
    assert conditions(within_window)["Progressing"] == ("True", "BudgetSpent")
    assert within_window.requeue_after == pytest.approx(1.0)
    after_window = plan(settled(policy=policy, document=granted.document, pods=obeying(granted.document)), NOW + 60)
    assert after_window.document
    assert list(after_window.document.releasing) == [Q[5]]
    assert len(after_window.document.spent) == 1


def test_handover_immediate_mode_moves_in_one_step_and_spends_budget() -> None:
    policy = a_policy(handover={"mode": "Immediate"}, budget={"maxMoves": 5})
    snapshot = settled(policy=policy)
    new_plan = plan(replace(snapshot, pods=(*snapshot.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    assert owned(new_plan.document) == {"m1": [0, 1], "m2": [3, 4], "m3": [2, 5]}
    assert new_plan.document
    assert new_plan.document.spent[0][1] == 2


def test_debounce_holds_moves_back_after_a_recent_assignment() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]}, age=0.2)
    pods = (*obeying(document), a_pod("m3", a_report("m3", 0)))
    new_plan = plan(settled(document=document, pods=pods), NOW)
    assert new_plan.document is None
    assert conditions(new_plan)["Progressing"][1] == "Debounce"
    assert new_plan.requeue_after == pytest.approx(0.3, abs=0.01)
    future_document = a_document(members={"m1": Q[:3], "m2": Q[3:6]}, age=-300)
    assert plan(settled(document=future_document, pods=pods), NOW).document, (
        "its time comes from a clock that was wrong"
    )


def test_rolling_update_waits_for_the_new_pod_and_moves_each_queue_once() -> None:
    snapshot = settled()
    starting = a_pod("m3", ready=False, age=3.0, stable_for=3.0)
    joined = replace(a_pod("m3", a_report("m3", 0)), age=4.0, stable_for=0.1)
    for pod in (starting, joined):
        new_plan = plan(replace(snapshot, pods=(*snapshot.pods, pod)), NOW)
        assert not new_plan.document or not new_plan.document.releasing
    drained = a_pod("m2", a_report("m2", 5, state="drained", final=True), terminating=True)
    after_drain = plan(replace(snapshot, pods=(snapshot.pods[0], drained, joined)), NOW)
    assert owned(after_drain.document) == {"m1": [0, 1, 2], "m2": [], "m3": [3, 4, 5]}
    unready_for_long = replace(starting, age=21.0)
    late = plan(replace(snapshot, pods=(*snapshot.pods, unready_for_long, a_pod("m4", a_report("m4", 0)))), NOW)
    assert late.document
    assert late.document.releasing


def test_handover_in_flight_delays_other_moves_but_not_forever() -> None:
    taken = {Q[5]: ("m2", "m1")}
    for age, moves in ((5.0, 0), (36.0, 1)):
        document = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken=taken, age=age)
        draining = {"report": a_report("m2", 5, Q[3:5], draining=[Q[5]])}
        pods = (*obeying(document, m2=draining), a_pod("m3", a_report("m3", 0)))
        new_plan = plan(settled(document=document, pods=pods), NOW)
        started = set(new_plan.document.releasing) - set(taken) if new_plan.document else set()
        assert len(started) == moves


def test_poke_backs_off_and_stops_once_the_member_reports_its_assignment() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
    outdated_report = a_report("m2", 4, Q[3:5])
    for poke, poked, expected in (
        (Poke(4, 2), 0.0, {"m2": Poke(5, 1)}),
        (Poke(5, 1), 0.5, {}),
        (Poke(5, 1), 1.0, {"m2": Poke(5, 2)}),
        (Poke(5, 4), 7.9, {}),
        (Poke(5, 9), 30.0, {"m2": Poke(5, 10)}),
    ):
        pods = obeying(document, m2={"report": outdated_report, "poke": poke, "poked_for": poked})
        assert plan(settled(document=document, pods=pods), NOW).pokes == expected
    updated_pods = obeying(document, m2={"report": a_report("m2", 4, Q[3:6])})
    assert plan(settled(document=document, pods=updated_pods), NOW).pokes == {}


def test_assignment_lost_is_refetched_then_rewritten_above_all_generations_seen() -> None:
    snapshot = settled()
    snapshot_without_document = replace(snapshot, document=None, refetched=False)
    assert plan(snapshot_without_document, NOW).refetch
    new_plan = plan(replace(snapshot_without_document, refetched=True), NOW)
    assert new_plan.document
    assert new_plan.document.generation == new_plan.document.barrier == int(NOW)
    assert owned(new_plan.document) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}
    assert Reason.ASSIGNMENT_LOST in [event.reason for event in new_plan.events]
    snapshot_with_status = replace(snapshot_without_document, refetched=True, status={"generation": int(NOW) + 50})
    document = plan(snapshot_with_status, NOW).document
    assert document
    assert document.generation == int(NOW) + 51


@pytest.mark.parametrize(
    "damage",
    [
        {"damage": "The assignment was modified or truncated: its checksum does not match", "document": None},
        {"document": a_document(3, members={"m1": Q[:3], "m2": Q[3:6]})},
        {"document": a_document(9, group="shop/payments")},
    ],
    ids=["torn", "an old copy", "another group's"],
)
def test_assignment_that_is_torn_stale_or_of_another_group_counts_as_lost(damage: dict[str, Any]) -> None:
    snapshot = settled()
    document = plan(replace(snapshot, **damage), NOW).document
    assert document
    assert document.barrier == document.generation > 9


def test_assignment_lost_leaves_free_queues_unowned_until_no_member_may_consume_them() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    m1, m2 = obeying(document)[0], a_pod("m2", a_report("m2", 4, Q[3:5]))
    first = plan(settled(document=document, pods=(m1, m2)), NOW)
    assert owned(first.document) == {"m1": [0, 1, 2], "m2": []}, "its entry, and no queue yet"
    assert first.pokes == {"m2": Poke(6, 1)}
    draining = a_pod("m2", a_report("m2", 5, draining=[Q[3]]))
    second = plan(settled(document=document, pods=(m1, draining)), NOW)
    assert owned(second.document) == {"m1": [0, 1, 2], "m2": [4, 5]}
    assert second.document
    assert second.document.barrier == 5
    last = plan(settled(document=second.document, pods=obeying(second.document)), NOW)
    assert owned(last.document) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}
    assert last.document
    assert last.document.barrier == 0


def test_assignment_lost_grants_no_free_queue_while_a_replaced_pod_may_run() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    snapshot = settled(document=document, pods=obeying(document))
    new_plan = plan(replace(snapshot, replaced_holders=frozenset({Holder("m1", "old")})), NOW)
    assert new_plan.document is None
    assert new_plan.status["unownedQueues"] == 3
    assert owned(plan(snapshot, NOW).document) == {"m1": [0, 1, 2, 3, 4, 5]}, "the replaced pod has ended"


def draining_pod(name: str, number: int, *, lost: bool = False) -> PodSnapshot:
    report = a_report(name, 5, draining=[Q[number]])
    return a_pod(name, report, ready=not lost, stable_for=LONG, unreachable_for=11.0 if lost else 0.0)


@pytest.mark.parametrize(
    ("other_pods", "forced", "granted"),
    [
        ((draining_pod("m2", 3, lost=True),), [3], [4, 5]),
        ((draining_pod("m2", 3, lost=True), a_pod("m3", a_report("m3", 4))), [], []),
        ((draining_pod("m2", 3, lost=True), draining_pod("m3", 3)), [], [4, 5]),
        ((draining_pod("m2", 3), draining_pod("m3", 3, lost=True)), [], [4, 5]),
    ],
    ids=[
        "a lost member drains it",
        "a member is behind the barrier",
        "a live member drains it, too",
        "the live member is first",
    ],
)
def test_forced_grant_after_assignment_loss_waits_if_another_member_may_consume(
    other_pods: tuple[PodSnapshot, ...], forced: list[int], granted: list[int]
) -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    rebuilt = plan(settled(document=document, pods=(*obeying(document), *other_pods)), NOW).document
    assert rebuilt
    assert rebuilt.forced == {Q[number]: 6 for number in forced}
    owners = {queue for share in rebuilt.members.values() for queue in share.queues}
    assert owners == {*Q[:3], *(Q[number] for number in (*forced, *granted))}


def test_assignment_barrier_is_not_kept_for_a_drain_that_is_recorded() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5, taken={Q[3]: ("m2", None)})
    pods = (*obeying(document)[:1], draining_pod("m2", 3))
    new_document = plan(settled(document=document, pods=pods), NOW).document
    assert new_document
    assert new_document.barrier == 0


def test_assignment_barrier_stays_for_an_unrecorded_drain_while_the_group_is_paused() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    pods = (obeying(document)[0], a_pod("m2", a_report("m2", 5, draining=[Q[3]])))
    paused = plan(settled(document=document, pods=pods, spec=a_spec(paused=True)), NOW).document
    assert paused
    assert paused.barrier == 5
    pods = (a_pod("m1", a_report("m1", 6)), a_pod("m2", a_report("m2", 6, draining=[Q[3]])))
    resumed = plan(settled(document=paused, pods=pods), NOW + 10).document
    assert resumed
    assert Q[3] not in {queue for share in resumed.members.values() for queue in share.queues}


def test_forced_grant_is_not_made_from_an_owner_seen_as_not_started() -> None:
    snapshot = settled()
    unstarted = a_pod("m2", ready=False, stable_for=LONG, started=False, unreachable_for=LONG)
    document = plan(replace(snapshot, pods=(snapshot.pods[0], unstarted)), NOW).document
    assert document
    assert set(document.releasing) == set(Q[3:6])
    assert document.forced == {}


def test_assignment_lost_waits_for_no_unstarted_pod_and_forces_from_a_lost_one() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    (m1,) = obeying(document)
    pending = a_pod("m2", ready=False, started=False)
    assert owned(plan(settled(document=document, pods=(m1, pending)), NOW).document) == {"m1": [0, 1, 2, 3, 4, 5]}
    silent = a_pod("m2", ready=False, stable_for=LONG, unreachable_for=11.0)
    forced = plan(settled(document=document, pods=(m1, silent)), NOW).document
    assert forced
    assert forced.forced == dict.fromkeys(Q[3:6], 6)
    assert forced.barrier == 5
    draining = a_pod("m2", a_report("m2", 5, draining=[Q[3]]), ready=False, stable_for=LONG, unreachable_for=11.0)
    drain_forced = plan(settled(document=document, pods=(m1, draining)), NOW).document
    assert drain_forced
    assert drain_forced.forced == {Q[3]: 6}, (
        "m2 was past the barrier at its last report: only the queue that it drained is in doubt"
    )


def test_unmanaged_consumer_present_limits_members_to_their_share() -> None:
    snapshot = settled(unmanaged_consumers=("10.0.0.9@old",))
    new_plan = plan(snapshot, NOW)
    assert new_plan.document
    assert new_plan.document.strategy == "Averagely"
    assert conditions(new_plan)["UnmanagedConsumers"] == ("True", "UnmanagedConsumers")
    assert conditions(new_plan)["Degraded"][0] == "False"
    assert {release.to for release in new_plan.document.releasing.values()} <= {None, "m1", "m2"}
    without_list = plan(settled(unmanaged_consumers=None, views={"orders": a_view(8)}), NOW)
    assert without_list.document is None, "an unmanaged consumer may own the free queues"
    assert conditions(without_list)["Degraded"] == ("True", "BrokerMetadataUnavailable")


def test_unmanaged_consumer_list_unavailable_returns_no_queue_in_release() -> None:
    taken = {Q[2]: ("m1", None), Q[5]: ("m2", None)}
    document = a_document(members={"m1": Q[:2], "m2": Q[3:5]}, taken=taken)
    after_release = plan(settled(document=document, pods=obeying(document), unmanaged_consumers=None), NOW).document
    assert owned(after_release) == {"m1": [0, 1], "m2": [3, 4]}, (
        "no member gets the free queues: an unmanaged consumer may own them"
    )
    still_drains = a_pod("m1", a_report("m1", 5, Q[:2], draining=[Q[2]]))
    unreleased_pods = (still_drains, a_pod("m2", a_report("m2", 4, Q[3:6])))
    waiting = plan(settled(document=document, pods=unreleased_pods, unmanaged_consumers=None), NOW)
    assert waiting.document is None
    assert conditions(waiting)["Degraded"] == ("True", "BrokerMetadataUnavailable")
    returned = plan(settled(document=document, pods=unreleased_pods, unmanaged_consumers=()), NOW).document
    assert owned(returned) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}, (
        "without unmanaged consumers, each member keeps its queues"
    )


def test_status_counts_queues_of_ended_but_not_of_unseen_members_as_unowned() -> None:
    after_deletion = plan(settled(pods=(), deleted_uids=frozenset({"uid-m1", "uid-m2"})), NOW)
    assert after_deletion.document is None
    assert after_deletion.status["unownedQueues"] == 6
    assert conditions(after_deletion)["Progressing"] == ("False", "NoMembers")
    assert conditions(after_deletion)["Ready"] == ("False", "NoMembers")
    while_missing = plan(settled(pods=()), NOW)
    assert while_missing.status["unownedQueues"] == 0, "members that are only missing may still own their queues"


def test_drain_not_ordered_by_the_operator_counts_released_queues_as_unowned() -> None:
    """The member was asked to drain, but not by the operator; its pod is Ready."""
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
    drained = settled(pods=obeying(document, m2={"report": a_report("m2", 5, state="drained")}))
    new_plan = plan(drained, NOW)
    assert (new_plan.document, new_plan.status["unownedQueues"]) == (None, 3)
    assert conditions(new_plan)["Ready"] == ("False", "QueuesUnowned")
    obeying_later_document = replace(drained, document=a_document(6, members={"m1": Q[:3], "m2": Q[3:6]}))
    assert plan(obeying_later_document, NOW).status["unownedQueues"] == 3, "whichever generation it has read"
    still_draining = replace(
        drained, pods=obeying(document, m2={"report": a_report("m2", 5, Q[3:4], state="draining")})
    )
    assert plan(still_draining, NOW).status["unownedQueues"] == 2
    final_drain = replace(
        drained, pods=obeying(document, m2={"report": a_report("m2", 5, Q[3:4], state="draining", final=True)})
    )
    assert plan(final_drain, NOW).status["unownedQueues"] == 0, "a final drain hands them over"
    draining = {"report": a_report("m2", 5, Q[3:4], state="draining"), "terminating": True}
    terminating = replace(drained, pods=obeying(document, m2=draining))
    assert plan(terminating, NOW).status["unownedQueues"] == 0, (
        "its preStop hook started the drain before the operator did"
    )


def test_unmanaged_consumer_queues_are_not_counted_as_unowned() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, strategy="Averagely")
    snapshot = settled(document=document, pods=obeying(document), unmanaged_consumers=("10.0.0.9@old",))
    new_plan = plan(snapshot, NOW)
    assert new_plan.document is None
    assert (new_plan.status["unownedQueues"], new_plan.unmanaged_queues) == (0, frozenset(Q[4:6]))
    assert conditions(new_plan)["Ready"] == ("True", "Settled")
    assert "QueuesUnowned" not in conditions(new_plan)
    without_members = plan(a_snapshot(document=a_document(), unmanaged_consumers=("10.0.0.9@old",)), NOW)
    assert (without_members.status["unownedQueues"], without_members.unmanaged_queues) == (
        0,
        frozenset(Q[:6]),
    )
    assert conditions(without_members)["Ready"] == ("False", "NoMembers")
    assert without_members.problems[0].message == "Only unmanaged consumers consume 6 queues"


def test_unmanaged_consumer_present_still_reports_unowned_queues_of_the_members_share() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:3]}, strategy="Averagely", barrier=6)
    new_plan = plan(settled(document=document, pods=obeying(document), unmanaged_consumers=("10.0.0.9@old",)), NOW)
    assert (new_plan.status["unownedQueues"], new_plan.unmanaged_queues) == (1, frozenset(Q[4:6]))
    assert conditions(new_plan)["Ready"] == ("False", "QueuesUnowned")


def test_strategy_failure_moves_nothing_and_grants_queues_of_ended_members() -> None:
    policy = a_policy(strategy="Custom", options={"custom": {"name": "nowhere"}})
    snapshot = settled(policy=policy, views={"orders": a_view(8)})
    new_plan = plan(snapshot, NOW)
    assert new_plan.document is None
    assert conditions(new_plan)["Degraded"] == ("True", "StrategyFailed")
    after_deletion = plan(replace(snapshot, pods=snapshot.pods[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    assert owned(after_deletion.document) == {"m1": [0, 1, 2, 3, 4, 5]}
    assert conditions(after_deletion)["Ready"] == ("False", "QueuesUnowned")


def test_queue_in_release_is_dropped_only_if_the_route_shows_its_removal() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken={Q[5]: ("m2", None)})
    views = {"orders": a_view(5, stable_for=0)}
    after_removal = plan(settled(document=document, pods=obeying(document), views=views), NOW)
    assert owned(after_removal.document) == {"m1": [0, 1, 2], "m2": [3, 4]}
    assert after_removal.document is not None
    assert not after_removal.document.releasing
    for view in (None, a_view(0)):
        without_route = plan(settled(document=document, pods=obeying(document), views={"orders": view}), NOW)
        assert without_route.document is not None
        assert without_route.document.members["m2"].queues == (Q[3], Q[4], Q[5]), (
            "a missing route or list proves no removal"
        )
    moving_document = a_document(members={"m1": Q[:2], "m2": Q[2:5]}, taken={Q[5]: ("m2", "m1")})
    moved = plan(settled(document=moving_document, pods=obeying(moving_document), views=views), NOW)
    assert owned(moved.document) == {"m1": [0, 1, 5], "m2": [2, 3, 4]}, "its next owner was already recorded"


def test_handover_from_one_member_can_move_and_remove_queues_in_one_assignment() -> None:
    document = a_document(members={"m1": Q[:5], "m2": Q[5:6]})
    new_plan = plan(settled(document=document, pods=obeying(document), views={"orders": a_view(4)}), NOW)
    assert new_plan.document is not None
    taken = {queue: release.to for queue, release in new_plan.document.releasing.items() if release.holder.name == "m1"}
    assert sorted(map(str, taken.values())) == ["None", "m2", "m2"]
    handovers = [line for line in new_plan.journal_records if line["kind"] == "handover"]
    assert sorted(str(line.get("to")) for line in handovers if line["from"] == "m1") == ["None", "m2"]


def test_topic_without_a_subscription_is_not_assigned() -> None:
    assert plan(settled(views={"orders": a_view(6), "others": a_view(2, "others")}), NOW).document is None


def test_unmanaged_consumer_message_distinguishes_one_from_several() -> None:
    with_one = plan(settled(unmanaged_consumers=("10.0.0.9@7",)), NOW)
    message = next(
        condition["message"] for condition in with_one.status["conditions"] if condition["type"] == "UnmanagedConsumers"
    )
    assert message.startswith("1 unmanaged consumer is in the group: 10.0.0.9@7;")
    with_two = plan(settled(unmanaged_consumers=("10.0.0.9@7", "10.0.0.9@8")), NOW)
    message = next(
        condition["message"] for condition in with_two.status["conditions"] if condition["type"] == "UnmanagedConsumers"
    )
    assert message.startswith("2 unmanaged consumers are in the group: ")


def test_retry_topic_of_another_group_without_a_route_degrades_like_any_topic() -> None:
    spec = a_spec(subscriptions=[{"topic": "orders"}, {"topic": "%RETRY%other"}])
    views = {"orders": a_view(), "%RETRY%other": None, "%RETRY%orders": None}
    assert conditions(plan(settled(spec=spec, views=views), NOW))["Degraded"] == ("True", "BrokerMetadataUnavailable")
    assert "BrokerMetadataUnavailable" not in conditions(
        plan(settled(views={"orders": a_view(), "%RETRY%orders": None}), NOW)
    )


def test_retry_topic_of_another_group_can_be_consumed() -> None:
    retries = "%RETRY%other"
    spec = a_spec(subscriptions=[{"topic": "orders"}, {"topic": retries}])
    views = {"orders": a_view(4), retries: a_view(1, retries), "%RETRY%orders": a_view(1, "%RETRY%orders")}
    new_plan = plan(settled(spec=spec, views=views), NOW)
    assert new_plan.document
    owned_queues = {queue for share in new_plan.document.members.values() for queue in share.queues}
    assert owned_queues | set(new_plan.document.releasing) >= {
        queue for view in views.values() for queue in view.queues
    }
    assert conditions(new_plan)["Degraded"][0] == "False"


def test_generation_at_the_highest_valid_value_is_believed() -> None:
    new_plan = plan(settled(status={"generation": MAX_PLAUSIBLE_GENERATION}), NOW)
    assert new_plan.document is not None
    assert new_plan.document.generation == MAX_PLAUSIBLE_GENERATION + 1


def test_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    old_time = "2020-01-01T00:00:00.000Z"
    old_conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": old_time} for kind in ("Ready", "Degraded")
    ]
    new_conditions = {
        condition["type"]: condition
        for condition in plan(settled(status={"conditions": old_conditions}), NOW).status["conditions"]
    }
    assert new_conditions["Ready"]["lastTransitionTime"] == old_time
    assert new_conditions["Degraded"]["lastTransitionTime"] == format_time(NOW)


@pytest.mark.parametrize("generation", [2**63, -1, "many", None, {"a": 1}])
def test_generation_in_the_status_that_is_invalid_is_ignored(generation: object) -> None:
    new_plan = plan(
        settled(status={"generation": generation, "conditions": [{"type": "Ready", "status": "True"}]}), NOW
    )
    assert new_plan.document is None
    assert new_plan.status["generation"] == 5


def test_event_for_two_problems_with_one_reason_has_the_first_message() -> None:
    problems = tuple(Finding(Reason.INVALID_SPEC, message) for message in ("spec.a", "spec.b"))
    new_plan = plan(settled(spec=None, problems=problems), NOW)
    assert [event.message for event in new_plan.events] == ["spec.a"]


def test_spec_that_is_invalid_is_reported_and_changes_no_assignment() -> None:
    problem = Finding(Reason.INVALID_SPEC, "spec.subscriptions: expected an array")
    new_plan = plan(settled(spec=None, problems=(problem,)), NOW)
    assert new_plan.document is None
    assert conditions(new_plan)["Ready"] == ("False", "InvalidSpec")
    assert conditions(new_plan)["Degraded"] == ("True", "InvalidSpec")


@pytest.mark.parametrize(
    "changed",
    [{"spec": None}, {"document": None, "problems": (Finding(Reason.UNSUPPORTED_ASSIGNMENT, "schema 2"),)}],
    ids=["not understood", "of a later version"],
)
def test_reconcile_of_an_unplannable_group_is_requeued_no_sooner_than_a_second(changed: dict[str, Any]) -> None:
    assert plan(settled(**changed), NOW).requeue_after >= 1


def test_policy_missing_freezes_the_assignment() -> None:
    new_plan = plan(settled(policy=None, views={"orders": a_view(6)}), NOW)
    assert new_plan.document is None


def test_policy_missing_forces_no_queue_sooner_than_any_policy_would() -> None:
    snapshot = settled(policy=None)
    silent = a_pod("m2", snapshot.pods[1].report, ready=False, stable_for=60.0, unreachable_for=60.0)
    new_plan = plan(replace(snapshot, pods=(snapshot.pods[0], silent)), NOW)
    assert new_plan.document is None
    assert conditions(new_plan)["Progressing"] == ("False", "InvalidPolicy")


def test_status_figures_are_kept_while_the_assignment_schema_is_too_new() -> None:
    problem = Finding(Reason.UNSUPPORTED_ASSIGNMENT, "The assignment has schema 2; this version reads schema 1")
    figures = {"queues": 6, "unownedQueues": 0, "members": 2, "generation": 5}
    status = {**figures, "observedGeneration": 1, "conditions": []}
    new_plan = plan(settled(document=None, problems=(problem,), status=status, observed_generation=2), NOW)
    assert {name: new_plan.status[name] for name in figures} == figures
    assert new_plan.status["observedGeneration"] == 2
    assert "QueuesUnowned" not in conditions(new_plan)
    assert conditions(new_plan)["Degraded"] == ("True", "UnsupportedAssignment")


def test_queue_listed_twice_by_a_broker_changes_nothing() -> None:
    views = {"orders": a_view(6)._replace(queues=(*Q[:6], Q[0]))}
    new_plan = plan(settled(views=views), NOW)
    assert new_plan.document is None
    assert conditions(new_plan)["Degraded"] == ("True", "StrategyFailed")


def test_policy_missing_still_shares_with_unmanaged_consumers_and_keeps_spent_budget() -> None:
    spent = ((format_time(NOW - 5), 3),)
    snapshot = settled(policy=None, unmanaged_consumers=("10.0.0.1@a",))
    new_plan = plan(replace(snapshot, document=replace(snapshot.document or a_document(), spent=spent)), NOW)
    assert new_plan.document
    assert [it.to for it in new_plan.document.releasing.values()] == [None, None]
    assert new_plan.document.spent == spent


def test_generation_in_the_status_is_kept_while_the_spec_is_invalid() -> None:
    new_plan = plan(a_snapshot(spec=None, status={"generation": 7}), NOW)
    assert new_plan.status["generation"] == 7, "otherwise the loss of the assignment would go unnoticed"


def test_assignment_of_a_later_schema_is_not_touched() -> None:
    problem = Finding(Reason.UNSUPPORTED_ASSIGNMENT, "The assignment has schema 2; this version reads schema 1")
    new_plan = plan(settled(document=None, problems=(problem,)), NOW)
    assert new_plan.document is None
    assert not new_plan.refetch
    assert conditions(new_plan)["Ready"] == ("False", "UnsupportedAssignment")


def test_assignment_does_not_change_while_the_group_has_too_many_members() -> None:
    problem = Finding(Reason.TOO_MANY_MEMBERS, "10,001 pods carry the group's label")
    new_plan = plan(settled(views={"orders": a_view(7)}, problems=(problem,)), NOW)
    assert (new_plan.document, [*new_plan.pokes], new_plan.members_to_drain) == (None, [], ())
    assert conditions(new_plan)["Degraded"] == ("True", "TooManyMembers")


def test_assignment_too_large_is_not_written() -> None:
    names = [hashlib.sha256(f"m{number}".encode()).hexdigest() for number in range(20_000)]
    queues = tuple(Queue("orders", hashlib.sha256(name.encode()).hexdigest(), 0) for name in names)
    pods = tuple(a_pod(name, a_report(name, 0)) for name in names)
    new_plan = plan(a_snapshot(pods=pods, views={"orders": a_view()._replace(queues=queues)}), NOW)
    assert new_plan.document is None
    assert conditions(new_plan)["Ready"] == ("False", "AssignmentTooLarge")


def test_settings_change_writes_a_new_generation_with_the_same_owners() -> None:
    snapshot = settled(settings="{}", desired_settings='{"model":"Clustering"}')
    new_plan = plan(snapshot, NOW)
    assert new_plan.document
    assert new_plan.document.generation == 6
    assert new_plan.document.members == (snapshot.document and snapshot.document.members)
    assert new_plan.pokes == {}


def test_broadcasting_assigns_every_queue_to_every_member() -> None:
    spec = a_spec(messageModel="Broadcasting")
    pods = tuple(a_pod(name, a_report(name, 0)) for name in ("m1", "m2"))
    new_plan = plan(a_snapshot(spec=spec, pods=pods), NOW)
    assert new_plan.document
    assert new_plan.document.everyone == tuple(Q[:6])
    assert owned(new_plan.document) == {"m1": [], "m2": []}
    obeying_pods = tuple(a_pod(name, a_report(name, 1, Q[:6])) for name in ("m1", "m2"))
    at_rest = plan(a_snapshot(spec=spec, pods=obeying_pods, document=new_plan.document), NOW + 60)
    assert at_rest.document is None
    assert conditions(at_rest)["Ready"] == ("True", "Settled")
    without_route = plan(
        a_snapshot(spec=spec, pods=obeying_pods, document=new_plan.document, views={"orders": None}), NOW + 60
    )
    assert without_route.document is None
    clustering = plan(a_snapshot(pods=obeying_pods, document=new_plan.document), NOW + 60)
    assert clustering.document
    assert clustering.document.everyone is None
    assert clustering.document.barrier == clustering.document.generation


def test_broker_unreachable_from_one_member_moves_its_queues_to_others() -> None:
    snapshot = settled()
    unheard_pods = [replace(pod, decoded_report=None) for pod in snapshot.pods]
    document = snapshot.document
    assert document
    m1 = a_pod("m1", a_report("m1", 5, Q[:3], brokers={"a": True}))
    cut_off = a_pod("m2", a_report("m2", 5, Q[3:6], brokers={"a": False}), cut_off_brokers={"a": 10.0})
    new_plan = plan(replace(snapshot, pods=(m1, cut_off)), NOW)
    assert new_plan.document
    assert set(new_plan.document.releasing) == set(Q[3:6])
    assert new_plan.status["lastRebalance"]["reason"] == "BrokerUnreachable"
    assert cut_off.decoded_report
    unreachable = replace(cut_off.decoded_report, report=a_report(brokers={"a": False}))
    m1_cut_off = replace(unheard_pods[0], decoded_report=unreachable)
    assert plan(replace(snapshot, pods=(m1_cut_off, cut_off)), NOW).document is None


def test_stateful_set_pod_recreated_by_name_waits_until_the_old_one_ended() -> None:
    snapshot = settled()
    recreated = replace(a_pod("m2", a_report("m2", 0, uid="new")), uid="new")
    waiting = plan(replace(snapshot, pods=(snapshot.pods[0], recreated)), NOW)
    assert [holder.uid for holder in waiting.verify_ended] == ["uid-m2"]
    assert waiting.document
    assert waiting.document.members["m2"].uid == "uid-m2"
    after_deletion = plan(
        replace(snapshot, pods=(snapshot.pods[0], recreated), deleted_uids=frozenset({"uid-m2"})), NOW
    )
    assert after_deletion.document
    assert after_deletion.document.members["m2"].uid == "new"
    assert owned(after_deletion.document) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}


SETTINGS = settings_digest("new")
OLD = settings_digest("old")


def with_settings(changed: dict[str, Any], **of_pods: Any) -> Snapshot:
    """Return a snapshot with new settings stored in generation 6: m2 obeys them, m1 does not yet."""
    document = a_document(generation=6, members={"m1": Q[:3], "m2": Q[3:6]})
    m1 = a_pod("m1", a_report("m1", 5, Q[:3], settings=OLD), **of_pods)
    m2 = a_pod("m2", a_report("m2", 6, Q[3:6], settings=SETTINGS))
    fields = {"document": document, "pods": (m1, m2), "settings": "new", "desired_settings": "new"}
    return a_snapshot(**fields | changed)


def test_settings_are_poked_like_an_assignment_and_group_is_progressing_until_they_are_obeyed() -> None:
    new_plan = plan(with_settings({}), NOW)
    assert new_plan.document is None
    assert new_plan.pokes == {"m1": Poke(6, 1)}
    assert new_plan.settings_only_pokes == {"m1"}
    assert conditions(new_plan)["Progressing"] == ("True", "SettingsNotObeyed")
    assert messages(new_plan)["Progressing"] == "m1 does not use the group's new settings yet"
    assert conditions(new_plan)["Ready"] == ("True", "Settled")
    assert conditions(new_plan)["Degraded"] == ("False", "Settled")


def test_settings_report_is_awaited_only_of_members_that_were_poked() -> None:
    assert "m1" not in plan(with_settings({}), NOW).members_to_poll
    assert "m1" in plan(with_settings({}, poke=Poke(6, 1), poked_for=0.5), NOW).members_to_poll


def test_settings_and_assignment_changed_together_are_poked_at_once() -> None:
    document = a_document(generation=6, members={"m1": Q[:2], "m2": Q[2:6]})
    new_plan = plan(with_settings({"document": document}), NOW)
    assert "m1" in new_plan.pokes
    assert "m1" not in new_plan.settings_only_pokes


def test_settings_not_obeyed_long_after_they_changed_are_a_problem_and_no_progress() -> None:
    in_time = plan(with_settings({"settings_age": 120.0}), NOW)
    assert conditions(in_time)["Progressing"][0] == "True"
    late = plan(with_settings({"settings_age": 121.0}), NOW)
    assert conditions(late)["Progressing"] == ("False", "Settled")
    assert conditions(late)["SettingsNotObeyed"] == ("True", "SettingsNotObeyed")
    assert conditions(late)["Degraded"][0] == "True"


def test_settings_that_change_now_are_not_late_however_old_the_previous_ones_were() -> None:
    new_plan = plan(with_settings({"desired_settings": "newest", "settings_age": 1000.0}), NOW)
    assert new_plan.document
    assert "SettingsNotObeyed" not in conditions(new_plan)


def test_settings_are_not_expected_of_members_whose_reports_do_not_name_them() -> None:
    snapshot = with_settings({})
    m1 = a_pod("m1", a_report("m1", 5, Q[:3]))
    new_plan = plan(replace(snapshot, pods=(m1, snapshot.pods[1])), NOW)
    assert conditions(new_plan)["Progressing"] == ("False", "Settled")
    assert new_plan.pokes == {}


def test_condition_no_members_gives_a_new_group_the_time_that_pods_need_to_start() -> None:
    first = plan(a_snapshot(), NOW)
    assert conditions(first)["Ready"] == ("False", "MembersStillJoining")
    assert conditions(first)["Degraded"] == ("False", "Settled")
    assert "NoMembers" not in conditions(first)
    assert first.events == ()
    assert first.requeue_after == 0, "no report of its own document will enqueue the group"
    waiting = a_snapshot(document=first.document, status=first.status)
    assert plan(waiting, NOW + 59).requeue_after <= 1
    late = plan(waiting, NOW + 60)
    assert conditions(late)["Ready"] == ("False", "NoMembers")
    assert [(event.reason, event.warning) for event in late.events] == [(Reason.NO_MEMBERS, True)]


def test_condition_no_members_comes_at_once_in_a_group_that_had_members() -> None:
    document = replace(settled().document or a_document(), begun={"orders": format_time(NOW - 600)})
    new_plan = plan(settled(document=document, pods=(), deleted_uids=frozenset({"uid-m1", "uid-m2"})), NOW)
    assert conditions(new_plan)["Ready"] == ("False", "NoMembers")


def test_condition_no_members_names_the_reason_why_a_pod_does_not_run() -> None:
    pods = tuple(
        a_pod(name, None, ready=False, started=False, obstacle=obstacle)
        for name, obstacle in (("m1", "ImagePullBackOff of container app"), ("m2", ""), ("m3", "Unschedulable, x"))
    )
    first = plan(a_snapshot(pods=pods), NOW)
    message = "6 queues wait for the group's first member: m1 does not run: ImagePullBackOff of container app"
    assert messages(first)["Ready"] == message
    late = plan(a_snapshot(pods=pods, document=first.document, status=first.status), NOW + 60)
    expected = "No member can consume 6 queues: m1 does not run: ImagePullBackOff of container app"
    assert messages(late)["NoMembers"] == expected


def test_condition_for_idle_members_is_published_once_no_handover_is_in_progress() -> None:
    moving = a_document(members={"m1": Q[:1], "m2": (), "m3": ()}, taken={Q[1]: ("m1", "m2")})
    draining_pods = obeying(moving, m1={"report": a_report("m1", 4, Q[:2])})
    during_handover = plan(settled(document=moving, pods=draining_pods, views={"orders": a_view(2)}), NOW)
    assert conditions(during_handover)["Progressing"] == ("True", "HandoverInFlight")
    assert "IdleMembers" not in conditions(during_handover)
    document = a_document(members={"m1": Q[:1], "m2": Q[1:2], "m3": ()})
    at_rest = plan(settled(document=document, pods=obeying(document), views={"orders": a_view(2)}), NOW)
    assert messages(at_rest)["IdleMembers"] == "3 members share 2 queues: 1 of them is idle"


def test_condition_for_idle_members_is_published() -> None:
    document = a_document(members={"m1": Q[:1], "m2": ()})
    new_plan = plan(settled(document=document, pods=obeying(document), views={"orders": a_view(1)}), NOW)
    assert new_plan.status["idleMembers"] == 1
    assert conditions(new_plan)["IdleMembers"][0] == "True"


def test_journal_records_from_and_to_of_each_handover() -> None:
    snapshot = settled()
    new_plan = plan(replace(snapshot, pods=(*snapshot.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    kinds = [line["kind"] for line in new_plan.journal_records]
    assert kinds[:2] == ["membership", "plan"]
    handovers = [line for line in new_plan.journal_records if line["kind"] == "handover"]
    assert [(line["act"], line["from"], line["to"], line["queues"]) for line in handovers] == [
        ("Revoke", "m1", "m3", {"orders": {"a": "2"}}),
        ("Revoke", "m2", "m3", {"orders": {"a": "5"}}),
    ]


def plan_reason(new_plan: Plan) -> tuple[str, str]:
    """Return the reason and the message of the plan's journal record."""
    (line,) = (line for line in new_plan.journal_records if line["kind"] == "plan")
    return line["reason"], line["message"]


@pytest.mark.parametrize("strategy", ["Averagely", "Sticky"])
def test_unmanaged_consumer_change_is_the_recorded_reason_of_each_assignment(strategy: str) -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]}, strategy=strategy)
    policy, client_ids = a_policy(strategy=strategy), ("10.0.0.9@old",)
    revoked = plan(settled(document=document, policy=policy, unmanaged_consumers=client_ids), NOW)
    assert revoked.document is not None
    assert plan_reason(revoked)[0] == "UnmanagedConsumers"
    after_revoke = {
        "policy": policy,
        "status": revoked.status,
        "document": revoked.document,
        "pods": obeying(revoked.document),
    }
    granted = plan(settled(**after_revoke, unmanaged_consumers=client_ids), NOW + 30)
    assert granted.document is not None
    assert plan_reason(granted)[0] == "UnmanagedConsumers"
    after_grant = {
        "policy": policy,
        "status": granted.status,
        "document": granted.document,
        "pods": obeying(granted.document),
    }
    without_list = plan(settled(**after_grant, unmanaged_consumers=None), NOW + 60)
    assert "any more" not in str(without_list.journal_records), "a missing route or list proves no removal"
    after_departure = plan(settled(**after_grant, unmanaged_consumers=()), NOW + 60)
    assert after_departure.document is not None
    assert plan_reason(after_departure) == (
        "UnmanagedConsumers",
        "No unmanaged consumer is in the group any more: the policy shares all queues again",
    )


def test_journal_keeps_the_reason_of_the_revocation_for_the_later_grant() -> None:
    snapshot = settled(policy=a_policy(strategy="AveragelyByCircle"))
    revoked = plan(snapshot, NOW)
    assert revoked.document is not None
    assert plan_reason(revoked)[0] == "PolicyChanged"
    after_revoke = {
        "policy": snapshot.policy,
        "document": revoked.document,
        "pods": obeying(revoked.document),
    }
    granted = plan(settled(**after_revoke, status=revoked.status), NOW + 30)
    assert plan_reason(granted) == ("PolicyChanged", "The rebalance that began with PolicyChanged continues")
    unknown_status = {"lastRebalance": {**revoked.status["lastRebalance"], "reason": "OfALaterOperator"}}
    assert plan_reason(plan(settled(**after_revoke, status=unknown_status), NOW + 30))[0] == "LoadShifted"
