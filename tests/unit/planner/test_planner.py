"""The planner, case by case: a world in, everything to do about it out."""

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


def conditions(found: Plan) -> dict[str, tuple[str, str]]:
    return {it["type"]: (it["status"], it["reason"]) for it in found.status["conditions"]}


def messages(found: Plan) -> dict[str, str]:
    return {it["type"]: it["message"] for it in found.status["conditions"]}


def owned(document: Assignment | None) -> dict[str, list[int]]:
    assert document
    return {name: [queue.id for queue in share.queues] for name, share in document.members.items()}


def settled(**changed: Any) -> Snapshot:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
    return a_snapshot(**({"document": document, "pods": obeying(document)} | changed))


def test_assignment_of_a_new_group_is_written_before_it_has_pods() -> None:
    found = plan(a_snapshot(), NOW)
    assert found.document
    assert (found.document.generation, found.document.barrier) == (1, 0)
    assert conditions(found)["Ready"] == ("False", "MembersStillJoining")


def test_assignment_gives_the_first_members_all_queues_at_once() -> None:
    pods = [a_pod(name, a_report(name, 0)) for name in ("m1", "m2")]
    found = plan(a_snapshot(pods=tuple(pods)), NOW)
    assert owned(found.document) == {"m1": [0, 2, 4], "m2": [1, 3, 5]}
    assert found.pokes == {"m1": Poke(1, 1), "m2": Poke(1, 1)}
    assert conditions(found)["Ready"] == ("True", "Settled")
    assert conditions(found)["Progressing"] == ("True", "HandoverInFlight")
    assert [event.reason for event in found.events] == [Reason.FIRST_ASSIGNMENT]
    assert found.document
    assert decode_assignment(found.config_map_data["assignment.json"]) == found.document


def test_reconcile_of_a_settled_group_changes_nothing() -> None:
    found = plan(settled(), NOW)
    assert found.document is None
    assert (found.pokes, found.members_to_drain, found.members_to_poll, found.events) == ({}, (), frozenset(), ())
    assert {kind: holds for kind, (holds, _) in conditions(found).items()} == {
        "Ready": "True",
        "Progressing": "False",
        "Degraded": "False",
        "Reconciling": "False",
        "Stalled": "False",
    }
    again = plan(settled(status=found.status), NOW + 7)
    assert again.status == found.status, "an unchanged status is not written"
    assert again.journal_records == ()


def test_scale_up_gives_the_new_member_queues_in_two_steps() -> None:
    before = settled()
    joined = a_pod("m3", a_report("m3", 0))
    first = plan(replace(before, pods=(*before.pods, joined)), NOW)
    assert first.document
    assert owned(first.document) == {"m1": [0, 1], "m2": [3, 4], "m3": []}
    assert {queue.id: (it.holder.name, it.to) for queue, it in first.document.releasing.items()} == {
        2: ("m1", "m3"),
        5: ("m2", "m3"),
    }
    assert first.pokes == {"m1": Poke(6, 1), "m2": Poke(6, 1)}
    assert first.members_to_poll == {"m1", "m2"}
    assert first.status["lastRebalance"] == {"reason": "MemberJoined", "at": first.document.issued_at, "moved": 0}

    one_obeys = obeying(first.document, m2={"report": a_report("m2", 5, Q[3:6])})
    second = plan(settled(document=first.document, pods=one_obeys, status=first.status), NOW + 1)
    assert owned(second.document) == {"m1": [0, 1], "m2": [3, 4], "m3": [2]}
    assert second.pokes == {"m2": Poke(7, 1), "m3": Poke(7, 1)}, "m1 has nothing new to see"

    assert second.document
    third = plan(settled(document=second.document, pods=obeying(second.document), status=second.status), NOW + 2)
    assert owned(third.document)["m3"] == [2, 5]
    assert third.document
    last = plan(settled(document=third.document, pods=obeying(third.document), status=third.status), NOW + 3)
    assert last.document is None
    assert last.status["lastRebalance"] == {**first.status["lastRebalance"], "moved": 2, "seconds": 3.0}
    assert [event.reason for event in last.events] == [Reason.SETTLED]


def test_failover_grants_queues_once_the_pod_ended_not_while_it_is_only_unseen() -> None:
    before = settled()
    unseen = plan(replace(before, pods=before.pods[:1]), NOW)
    assert [holder.name for holder in unseen.verify_ended] == ["m2"]
    assert owned(unseen.document) == {"m1": [0, 1, 2], "m2": []}, "it may still work them"
    assert set(unseen.document.releasing) == set(Q[3:6]) if unseen.document else False
    ended = plan(replace(before, pods=before.pods[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    assert owned(ended.document) == {"m1": [0, 1, 2, 3, 4, 5]}
    assert ended.status["lastRebalance"]["reason"] == "MemberTerminated"
    phase = plan(replace(before, pods=(before.pods[0], replace(before.pods[1], ended=True, ready=False))), NOW)
    assert owned(phase.document) == {"m1": [0, 1, 2, 3, 4, 5]}


def test_scale_down_drains_the_terminating_member_and_then_moves_its_queues() -> None:
    before = settled()
    leaving = replace(before.pods[1], terminating=True)
    first = plan(replace(before, pods=(before.pods[0], leaving)), NOW)
    assert [holder.name for holder in first.members_to_drain] == ["m2"]
    assert first.document is None, "it is shown no document any more, so none is written"
    assert conditions(first)["Progressing"] == ("True", "HandoverInFlight")
    busy = a_pod("m2", a_report("m2", 5, draining=Q[3:6], state="draining", final=True), terminating=True)
    still = plan(replace(before, pods=(before.pods[0], busy)), NOW)
    assert (still.document, still.members_to_drain) == (None, ())
    drained = a_pod("m2", a_report("m2", 5, state="drained", final=True), terminating=True)
    second = plan(replace(before, pods=(before.pods[0], drained)), NOW + 1)
    assert owned(second.document) == {"m1": [0, 1, 2, 3, 4, 5], "m2": []}, "the entry stays until the pod has ended"
    assert second.status["lastRebalance"]["reason"] == "MemberLeft"


def test_forced_grant_moves_and_marks_the_queues_of_a_lost_member() -> None:
    before = settled()
    silent = replace(before.pods[1], ready=False, stable_for=12.0, unreachable_for=10.0)
    found = plan(replace(before, pods=(before.pods[0], silent)), NOW)
    assert found.document
    assert owned(found.document) == {"m1": [0, 1, 2, 3, 4, 5], "m2": []}
    assert found.document.forced == dict.fromkeys(Q[3:6], 6)
    assert [event.reason for event in found.events if event.warning] == [Reason.QUEUES_FORCED]
    assert found.status["lastRebalance"]["reason"] == "MemberLost"


def test_forced_grant_from_a_silent_ready_member_comes_two_minutes_after_termination() -> None:
    before = settled()
    leaving = a_pod("m1", before.pods[0].report, terminating=True, unreachable_for=LONG)
    waits = plan(replace(before, pods=(replace(leaving, terminating_for=119.0), before.pods[1])), NOW)
    assert waits.document is None
    lost = plan(replace(before, pods=(replace(leaving, terminating_for=120.0), before.pods[1])), NOW).document
    assert lost
    assert lost.forced == dict.fromkeys(Q[:3], 6)


def test_readiness_grace_keeps_queues_of_an_unready_member_and_admits_no_idle_one() -> None:
    before = settled()
    within = plan(replace(before, pods=(before.pods[0], replace(before.pods[1], ready=False, stable_for=9.0))), NOW)
    assert within.document is None
    assert within.requeue_after == pytest.approx(1.0)
    beyond = plan(replace(before, pods=(before.pods[0], replace(before.pods[1], ready=False, stable_for=10.0))), NOW)
    assert beyond.document
    assert set(beyond.document.releasing) == set(Q[3:6])
    idle = a_pod("m3", a_report("m3", 0), ready=False, stable_for=1.0)
    assert plan(replace(before, pods=(*before.pods, idle)), NOW).document is None


def test_assignment_is_kept_when_no_member_can_own_queues() -> None:
    before = settled()
    unready = tuple(replace(pod, ready=False, stable_for=60.0) for pod in before.pods)
    found = plan(replace(before, pods=unready), NOW)
    assert found.document is None
    assert conditions(found)["Ready"] == ("False", "NoMembers")
    gone = plan(replace(before, pods=(), deleted_uids=frozenset({"uid-m1", "uid-m2"})), NOW)
    assert gone.document is None


def test_queue_additions_apply_at_once_and_removals_after_a_delay() -> None:
    before = settled()
    more = plan(replace(before, views={"orders": a_view(8, stable_for=0)}), NOW)
    assert owned(more.document) == {"m1": [0, 1, 2, 6], "m2": [3, 4, 5, 7]}
    assert more.status["lastRebalance"]["reason"] == "QueuesAdded"
    fewer = replace(before, views={"orders": a_view(4, stable_for=39)})
    assert plan(fewer, NOW).document is None
    assert plan(fewer, NOW).requeue_after == pytest.approx(1.0)
    believed = plan(replace(before, views={"orders": a_view(4, stable_for=40)}), NOW)
    assert believed.document
    assert {queue: it.to for queue, it in believed.document.releasing.items()} == {Q[2]: "m2", Q[4]: None, Q[5]: None}


@pytest.mark.parametrize("views", [{}, {"orders": None}, {"orders": a_view(0)}], ids=["unknown", "failed", "empty"])
def test_route_that_is_unknown_or_empty_moves_no_queue_but_orphans_are_granted(views: dict[str, Any]) -> None:
    before = settled(views=views)
    quiet = plan(before, NOW)
    assert quiet.document is None
    assert conditions(quiet)["Degraded"] == ("True", "BrokerMetadataUnavailable")
    joined = plan(replace(before, pods=(*before.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    assert owned(joined.document) == {"m1": [0, 1, 2], "m2": [3, 4, 5], "m3": []}
    assert conditions(joined)["Progressing"][1] == "BrokerMetadataUnavailable"
    ended = plan(replace(before, pods=before.pods[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    assert owned(ended.document) == {"m1": [0, 1, 2, 3, 4, 5]}


def test_retry_topic_without_a_route_holds_no_move_back() -> None:
    before = settled(views={"orders": a_view(), "%RETRY%orders": None})
    joined = plan(replace(before, pods=(*before.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    assert joined.document
    assert joined.document.releasing


DUPLICATE = Finding(Reason.DUPLICATE_CONSUMER_GROUP, "The consumer group orders belongs to an older ConsumerGroup")


def test_duplicate_consumer_group_gets_no_document() -> None:
    pods = tuple(a_pod(name, a_report(name, 0)) for name in ("m1", "m2"))
    found = plan(a_snapshot(pods=pods, problems=(DUPLICATE,)), NOW)
    assert (found.document, found.pokes, found.members_to_drain) == (None, {}, ())
    assert conditions(found)["Ready"] == ("False", "DuplicateConsumerGroup")
    assert conditions(found)["DuplicateConsumerGroup"] == ("True", "DuplicateConsumerGroup")


def test_duplicate_consumer_group_releases_its_queues_and_gets_them_back_once_it_is_the_only_one() -> None:
    found = plan(settled(problems=(DUPLICATE,)), NOW)
    assert found.document
    assert owned(found.document) == {"m1": [], "m2": []}
    assert {release.to for release in found.document.releasing.values()} == {None}
    assert conditions(found)["Ready"] == ("False", "DuplicateConsumerGroup")
    assert {event.reason for event in found.events} == {Reason.DUPLICATE_CONSUMER_GROUP}
    released = plan(settled(problems=(DUPLICATE,), document=found.document, pods=obeying(found.document)), NOW + 1)
    assert released.document
    assert released.document.releasing == {}
    alone = plan(settled(document=released.document, pods=obeying(released.document)), NOW + 60)
    assert owned(alone.document) == {"m1": [0, 2, 4], "m2": [1, 3, 5]}


def test_pause_of_a_group_releases_all_queues_and_resume_reassigns_them() -> None:
    paused = plan(settled(spec=a_spec(paused=True)), NOW)
    assert paused.document
    assert owned(paused.document) == {"m1": [], "m2": []}
    assert conditions(paused)["Ready"] == ("False", "GroupPaused")
    released = plan(settled(spec=a_spec(paused=True), document=paused.document, pods=obeying(paused.document)), NOW + 1)
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
    before = settled(policy=a_policy(paused=True))
    joined = plan(replace(before, pods=(*before.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    assert joined.document
    assert not joined.document.releasing
    assert conditions(joined)["Progressing"] == ("False", "Paused")
    ended = plan(replace(before, pods=before.pods[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    assert owned(ended.document) == {"m1": [0, 1, 2, 3, 4, 5]}


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
    found = plan(settled(policy=a_policy(**NOWHERE, **policy), **changed), NOW)
    assert found.document is None or not found.document.releasing
    assert conditions(found)["Progressing"][1] == reason


def test_policy_that_assigns_queues_to_no_member_revokes_them_within_the_budget() -> None:
    found = plan(settled(policy=a_policy(**NOWHERE, budget={"maxMoves": 4, "per": "1m"})), NOW).document
    assert found
    assert [release.to for release in found.releasing.values()] == [None] * 4
    assert [count for _, count in found.spent] == [4]


def test_budget_limits_moves_and_refills_when_its_window_ends() -> None:
    policy = a_policy(budget={"maxMoves": 1, "per": "1m"})
    before = settled(policy=policy)
    pods = (*before.pods, a_pod("m3", a_report("m3", 0)))
    first = plan(replace(before, pods=pods), NOW)
    assert first.document
    assert list(first.document.releasing) == [Q[2]]
    assert first.document.spent == ((first.document.issued_at, 1),)
    granted = plan(settled(policy=policy, document=first.document, pods=obeying(first.document)), NOW + 1)
    assert granted.document
    inside = plan(settled(policy=policy, document=granted.document, pods=obeying(granted.document)), NOW + 59)
    assert inside.document is None
    assert conditions(inside)["Progressing"] == ("True", "BudgetSpent")
    assert inside.requeue_after == pytest.approx(1.0)
    over = plan(settled(policy=policy, document=granted.document, pods=obeying(granted.document)), NOW + 60)
    assert over.document
    assert list(over.document.releasing) == [Q[5]]
    assert len(over.document.spent) == 1


def test_handover_immediate_mode_moves_in_one_step_and_spends_budget() -> None:
    policy = a_policy(handover={"mode": "Immediate"}, budget={"maxMoves": 5})
    before = settled(policy=policy)
    found = plan(replace(before, pods=(*before.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    assert owned(found.document) == {"m1": [0, 1], "m2": [3, 4], "m3": [2, 5]}
    assert found.document
    assert found.document.spent[0][1] == 2


def test_debounce_holds_moves_back_after_a_recent_assignment() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]}, age=0.2)
    pods = (*obeying(document), a_pod("m3", a_report("m3", 0)))
    found = plan(settled(document=document, pods=pods), NOW)
    assert found.document is None
    assert conditions(found)["Progressing"][1] == "Debounce"
    assert found.requeue_after == pytest.approx(0.3, abs=0.01)
    ahead = a_document(members={"m1": Q[:3], "m2": Q[3:6]}, age=-300)
    assert plan(settled(document=ahead, pods=pods), NOW).document, "told by a clock that was wrong"


def test_rolling_update_waits_for_the_new_pod_and_moves_each_queue_once() -> None:
    before = settled()
    starting = a_pod("m3", ready=False, age=3.0, stable_for=3.0)
    joined = replace(a_pod("m3", a_report("m3", 0)), age=4.0, stable_for=0.1)
    for pod in (starting, joined):
        found = plan(replace(before, pods=(*before.pods, pod)), NOW)
        assert not found.document or not found.document.releasing
    drained = a_pod("m2", a_report("m2", 5, state="drained", final=True), terminating=True)
    swapped = plan(replace(before, pods=(before.pods[0], drained, joined)), NOW)
    assert owned(swapped.document) == {"m1": [0, 1, 2], "m2": [], "m3": [3, 4, 5]}
    stuck = replace(starting, age=21.0)
    late = plan(replace(before, pods=(*before.pods, stuck, a_pod("m4", a_report("m4", 0)))), NOW)
    assert late.document
    assert late.document.releasing


def test_handover_in_flight_delays_other_moves_but_not_forever() -> None:
    taken = {Q[5]: ("m2", "m1")}
    for age, moves in ((5.0, 0), (36.0, 1)):
        document = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken=taken, age=age)
        slow = {"report": a_report("m2", 5, Q[3:5], draining=[Q[5]])}
        pods = (*obeying(document, m2=slow), a_pod("m3", a_report("m3", 0)))
        found = plan(settled(document=document, pods=pods), NOW)
        started = set(found.document.releasing) - set(taken) if found.document else set()
        assert len(started) == moves


def test_poke_backs_off_and_stops_once_the_member_reports_its_assignment() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
    old = a_report("m2", 4, Q[3:5])
    for poke, poked, expected in (
        (Poke(4, 2), 0.0, {"m2": Poke(5, 1)}),
        (Poke(5, 1), 0.5, {}),
        (Poke(5, 1), 1.0, {"m2": Poke(5, 2)}),
        (Poke(5, 4), 7.9, {}),
        (Poke(5, 9), 30.0, {"m2": Poke(5, 10)}),
    ):
        pods = obeying(document, m2={"report": old, "poke": poke, "poked_for": poked})
        assert plan(settled(document=document, pods=pods), NOW).pokes == expected
    shown = obeying(document, m2={"report": a_report("m2", 4, Q[3:6])})
    assert plan(settled(document=document, pods=shown), NOW).pokes == {}


def test_assignment_lost_is_refetched_then_rewritten_above_all_generations_seen() -> None:
    before = settled()
    lost = replace(before, document=None, revalidated=False)
    assert plan(lost, NOW).refetch
    found = plan(replace(lost, revalidated=True), NOW)
    assert found.document
    assert found.document.generation == found.document.barrier == int(NOW)
    assert owned(found.document) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}
    assert Reason.ASSIGNMENT_LOST in [event.reason for event in found.events]
    later = replace(lost, revalidated=True, status={"generation": int(NOW) + 50})
    recovered = plan(later, NOW).document
    assert recovered
    assert recovered.generation == int(NOW) + 51


@pytest.mark.parametrize(
    "wrong",
    [
        {"damage": "The assignment was modified or truncated: its checksum does not match", "document": None},
        {"document": a_document(3, members={"m1": Q[:3], "m2": Q[3:6]})},
        {"document": a_document(9, group="shop/payments")},
    ],
    ids=["torn", "an old copy", "another group's"],
)
def test_assignment_that_is_torn_stale_or_of_another_group_counts_as_lost(wrong: dict[str, Any]) -> None:
    before = settled()
    found = plan(replace(before, **wrong), NOW).document
    assert found
    assert found.barrier == found.generation > 9


def test_assignment_lost_leaves_free_queues_unowned_until_no_member_may_consume_them() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    m1, m2 = obeying(document)[0], a_pod("m2", a_report("m2", 4, Q[3:5]))
    behind = plan(settled(document=document, pods=(m1, m2)), NOW)
    assert owned(behind.document) == {"m1": [0, 1, 2], "m2": []}, "its entry, and no queue yet"
    assert behind.pokes == {"m2": Poke(6, 1)}
    draining = a_pod("m2", a_report("m2", 5, draining=[Q[3]]))
    some = plan(settled(document=document, pods=(m1, draining)), NOW)
    assert owned(some.document) == {"m1": [0, 1, 2], "m2": [4, 5]}
    assert some.document
    assert some.document.barrier == 5
    done = plan(settled(document=some.document, pods=obeying(some.document)), NOW)
    assert owned(done.document) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}
    assert done.document
    assert done.document.barrier == 0


def test_assignment_lost_grants_no_free_queue_while_a_replaced_pod_may_run() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    seen = settled(document=document, pods=obeying(document))
    doubtful = plan(replace(seen, replaced_holders=frozenset({Holder("m1", "old")})), NOW)
    assert doubtful.document is None
    assert doubtful.status["unownedQueues"] == 3
    assert owned(plan(seen, NOW).document) == {"m1": [0, 1, 2, 3, 4, 5]}, "it has ended"


def drains(name: str, number: int, *, lost: bool = False) -> PodSnapshot:
    report = a_report(name, 5, draining=[Q[number]])
    return a_pod(name, report, ready=not lost, stable_for=LONG, unreachable_for=11.0 if lost else 0.0)


@pytest.mark.parametrize(
    ("others", "forced", "granted"),
    [
        ((drains("m2", 3, lost=True),), [3], [4, 5]),
        ((drains("m2", 3, lost=True), a_pod("m3", a_report("m3", 4))), [], []),
        ((drains("m2", 3, lost=True), drains("m3", 3)), [], [4, 5]),
        ((drains("m2", 3), drains("m3", 3, lost=True)), [], [4, 5]),
    ],
    ids=["it is lost", "another may know of more", "another drains it, too", "and the other way around"],
)
def test_forced_grant_after_assignment_loss_waits_if_another_member_may_consume(
    others: tuple[PodSnapshot, ...], forced: list[int], granted: list[int]
) -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5)
    found = plan(settled(document=document, pods=(*obeying(document), *others)), NOW).document
    assert found
    assert found.forced == {Q[number]: 6 for number in forced}
    owners = {queue for share in found.members.values() for queue in share.queues}
    assert owners == {*Q[:3], *(Q[number] for number in (*forced, *granted))}


def test_assignment_barrier_is_not_kept_for_a_drain_that_is_recorded() -> None:
    document = a_document(members={"m1": Q[:3]}, barrier=5, taken={Q[3]: ("m2", None)})
    pods = (*obeying(document)[:1], drains("m2", 3))
    found = plan(settled(document=document, pods=pods), NOW).document
    assert found
    assert found.barrier == 0


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
    before = settled()
    unseen = a_pod("m2", ready=False, stable_for=LONG, started=False, unreachable_for=LONG)
    found = plan(replace(before, pods=(before.pods[0], unseen)), NOW).document
    assert found
    assert set(found.releasing) == set(Q[3:6])
    assert found.forced == {}


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
    drains = a_pod("m2", a_report("m2", 5, draining=[Q[3]]), ready=False, stable_for=LONG, unreachable_for=11.0)
    taken = plan(settled(document=document, pods=(m1, drains)), NOW).document
    assert taken
    assert taken.forced == {Q[3]: 6}, "it was past the loss when it was last heard: only what it drained is in doubt"


def test_unmanaged_consumer_present_limits_members_to_their_share() -> None:
    before = settled(unmanaged_consumers=("10.0.0.9@old",))
    found = plan(before, NOW)
    assert found.document
    assert found.document.strategy == "Averagely"
    assert conditions(found)["UnmanagedConsumers"] == ("True", "UnmanagedConsumers")
    assert conditions(found)["Degraded"][0] == "False"
    assert {it.to for it in found.document.releasing.values()} <= {None, "m1", "m2"}
    unknown = plan(settled(unmanaged_consumers=None, views={"orders": a_view(8)}), NOW)
    assert unknown.document is None, "free queues may be a foreigner's"
    assert conditions(unknown)["Degraded"] == ("True", "BrokerMetadataUnavailable")


def test_unmanaged_consumer_list_unavailable_returns_no_queue_in_release() -> None:
    taken = {Q[2]: ("m1", None), Q[5]: ("m2", None)}
    document = a_document(members={"m1": Q[:2], "m2": Q[3:5]}, taken=taken)
    released = plan(settled(document=document, pods=obeying(document), unmanaged_consumers=None), NOW).document
    assert owned(released) == {"m1": [0, 1], "m2": [3, 4]}, "nobody is asked to take it, for a foreigner may"
    still_drains = a_pod("m1", a_report("m1", 5, Q[:2], draining=[Q[2]]))
    both = (still_drains, a_pod("m2", a_report("m2", 4, Q[3:6])))
    waits = plan(settled(document=document, pods=both, unmanaged_consumers=None), NOW)
    assert waits.document is None
    assert conditions(waits)["Degraded"] == ("True", "BrokerMetadataUnavailable")
    back = plan(settled(document=document, pods=both, unmanaged_consumers=()), NOW).document
    assert owned(back) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}, "seen to be gone, they are asked for nothing any more"


def test_status_counts_queues_of_ended_but_not_of_unseen_members_as_unowned() -> None:
    gone = plan(settled(pods=(), deleted_uids=frozenset({"uid-m1", "uid-m2"})), NOW)
    assert gone.document is None
    assert gone.status["unownedQueues"] == 6
    assert conditions(gone)["Progressing"] == ("False", "NoMembers")
    assert conditions(gone)["Ready"] == ("False", "NoMembers")
    unseen = plan(settled(pods=()), NOW)
    assert unseen.status["unownedQueues"] == 0, "of who is only out of sight nobody knows that"


def test_drain_not_ordered_by_the_operator_counts_released_queues_as_unowned() -> None:
    """It was told to drain, and not by us; its pod is Ready."""
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
    drained = settled(pods=obeying(document, m2={"report": a_report("m2", 5, state="drained")}))
    found = plan(drained, NOW)
    assert (found.document, found.status["unownedQueues"]) == (None, 3)
    assert conditions(found)["Ready"] == ("False", "QueuesUnowned")
    again = replace(drained, document=a_document(6, members={"m1": Q[:3], "m2": Q[3:6]}))
    assert plan(again, NOW).status["unownedQueues"] == 3, "whatever it has read"
    still = replace(drained, pods=obeying(document, m2={"report": a_report("m2", 5, Q[3:4], state="draining")}))
    assert plan(still, NOW).status["unownedQueues"] == 2
    leaves = replace(
        drained, pods=obeying(document, m2={"report": a_report("m2", 5, Q[3:4], state="draining", final=True)})
    )
    assert plan(leaves, NOW).status["unownedQueues"] == 0, "they are on their way"
    told = {"report": a_report("m2", 5, Q[3:4], state="draining"), "terminating": True}
    ends = replace(drained, pods=obeying(document, m2=told))
    assert plan(ends, NOW).status["unownedQueues"] == 0, "its preStop was quicker than we are"


def test_unmanaged_consumer_queues_are_not_counted_as_unowned() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, strategy="Averagely")
    before = settled(document=document, pods=obeying(document), unmanaged_consumers=("10.0.0.9@old",))
    found = plan(before, NOW)
    assert found.document is None
    assert (found.status["unownedQueues"], found.unmanaged_queues) == (0, frozenset(Q[4:6]))
    assert conditions(found)["Ready"] == ("True", "Settled")
    assert "QueuesUnowned" not in conditions(found)
    alone = plan(a_snapshot(document=a_document(), unmanaged_consumers=("10.0.0.9@old",)), NOW)
    assert (alone.status["unownedQueues"], alone.unmanaged_queues) == (0, frozenset(Q[:6]))
    assert conditions(alone)["Ready"] == ("False", "NoMembers")
    assert alone.problems[0].message == "Only unmanaged consumers consume 6 queues"


def test_unmanaged_consumer_present_still_reports_unowned_queues_of_the_members_share() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:3]}, strategy="Averagely", barrier=6)
    found = plan(settled(document=document, pods=obeying(document), unmanaged_consumers=("10.0.0.9@old",)), NOW)
    assert (found.status["unownedQueues"], found.unmanaged_queues) == (1, frozenset(Q[4:6]))
    assert conditions(found)["Ready"] == ("False", "QueuesUnowned")


def test_strategy_failure_moves_nothing_and_grants_queues_of_ended_members() -> None:
    policy = a_policy(strategy="Custom", options={"custom": {"name": "nowhere"}})
    before = settled(policy=policy, views={"orders": a_view(8)})
    found = plan(before, NOW)
    assert found.document is None
    assert conditions(found)["Degraded"] == ("True", "StrategyFailed")
    ended = plan(replace(before, pods=before.pods[:1], deleted_uids=frozenset({"uid-m2"})), NOW)
    assert owned(ended.document) == {"m1": [0, 1, 2, 3, 4, 5]}
    assert conditions(ended)["Ready"] == ("False", "QueuesUnowned")


def test_queue_in_release_is_dropped_only_if_the_route_shows_its_removal() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:5]}, taken={Q[5]: ("m2", None)})
    views = {"orders": a_view(5, stable_for=0)}
    gone = plan(settled(document=document, pods=obeying(document), views=views), NOW)
    assert owned(gone.document) == {"m1": [0, 1, 2], "m2": [3, 4]}
    assert gone.document is not None
    assert not gone.document.releasing
    for nothing in (None, a_view(0)):
        unseen = plan(settled(document=document, pods=obeying(document), views={"orders": nothing}), NOW)
        assert unseen.document is not None
        assert unseen.document.members["m2"].queues == (Q[3], Q[4], Q[5]), "not seen is not gone"
    moving = a_document(members={"m1": Q[:2], "m2": Q[2:5]}, taken={Q[5]: ("m2", "m1")})
    moved = plan(settled(document=moving, pods=obeying(moving), views=views), NOW)
    assert owned(moved.document) == {"m1": [0, 1, 5], "m2": [2, 3, 4]}, "who gets it is decided"


def test_handover_from_one_member_can_move_and_remove_queues_in_one_assignment() -> None:
    document = a_document(members={"m1": Q[:5], "m2": Q[5:6]})
    found = plan(settled(document=document, pods=obeying(document), views={"orders": a_view(4)}), NOW)
    assert found.document is not None
    taken = {queue: it.to for queue, it in found.document.releasing.items() if it.holder.name == "m1"}
    assert sorted(map(str, taken.values())) == ["None", "m2", "m2"]
    told = [line for line in found.journal_records if line["kind"] == "handover"]
    assert sorted(str(line.get("to")) for line in told if line["from"] == "m1") == ["None", "m2"]


def test_topic_without_a_subscription_is_not_assigned() -> None:
    assert plan(settled(views={"orders": a_view(6), "others": a_view(2, "others")}), NOW).document is None


def test_unmanaged_consumer_message_distinguishes_one_from_several() -> None:
    found = plan(settled(unmanaged_consumers=("10.0.0.9@7",)), NOW)
    told = next(one["message"] for one in found.status["conditions"] if one["type"] == "UnmanagedConsumers")
    assert told.startswith("1 unmanaged consumer is in the group: 10.0.0.9@7;")
    both = plan(settled(unmanaged_consumers=("10.0.0.9@7", "10.0.0.9@8")), NOW)
    told = next(one["message"] for one in both.status["conditions"] if one["type"] == "UnmanagedConsumers")
    assert told.startswith("2 unmanaged consumers are in the group: ")


def test_retry_topic_of_another_group_without_a_route_degrades_like_any_topic() -> None:
    spec = a_spec(subscriptions=[{"topic": "orders"}, {"topic": "%RETRY%other"}])
    unseen = {"orders": a_view(), "%RETRY%other": None, "%RETRY%orders": None}
    assert conditions(plan(settled(spec=spec, views=unseen), NOW))["Degraded"] == ("True", "BrokerMetadataUnavailable")
    assert "BrokerMetadataUnavailable" not in conditions(
        plan(settled(views={"orders": a_view(), "%RETRY%orders": None}), NOW)
    )


def test_retry_topic_of_another_group_can_be_consumed() -> None:
    retries = "%RETRY%other"
    spec = a_spec(subscriptions=[{"topic": "orders"}, {"topic": retries}])
    views = {"orders": a_view(4), retries: a_view(1, retries), "%RETRY%orders": a_view(1, "%RETRY%orders")}
    found = plan(settled(spec=spec, views=views), NOW)
    assert found.document
    given = {queue for share in found.document.members.values() for queue in share.queues}
    assert given | set(found.document.releasing) >= {queue for view in views.values() for queue in view.queues}
    assert conditions(found)["Degraded"][0] == "False"


def test_generation_at_the_highest_valid_value_is_believed() -> None:
    found = plan(settled(status={"generation": MAX_PLAUSIBLE_GENERATION}), NOW)
    assert found.document is not None
    assert found.document.generation == MAX_PLAUSIBLE_GENERATION + 1


def test_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    old = "2020-01-01T00:00:00.000Z"
    before = [{"type": kind, "status": "True", "lastTransitionTime": old} for kind in ("Ready", "Degraded")]
    now = {one["type"]: one for one in plan(settled(status={"conditions": before}), NOW).status["conditions"]}
    assert now["Ready"]["lastTransitionTime"] == old
    assert now["Degraded"]["lastTransitionTime"] == format_time(NOW)


@pytest.mark.parametrize("generation", [2**63, -1, "many", None, {"a": 1}])
def test_generation_in_the_status_that_is_invalid_is_ignored(generation: object) -> None:
    found = plan(settled(status={"generation": generation, "conditions": [{"type": "Ready", "status": "True"}]}), NOW)
    assert found.document is None
    assert found.status["generation"] == 5


def test_event_for_two_problems_with_one_reason_has_the_first_message() -> None:
    wrong = tuple(Finding(Reason.INVALID_SPEC, told) for told in ("spec.a", "spec.b"))
    found = plan(settled(spec=None, problems=wrong), NOW)
    assert [event.message for event in found.events] == ["spec.a"]


def test_spec_that_is_invalid_is_reported_and_changes_no_assignment() -> None:
    wrong = Finding(Reason.INVALID_SPEC, "spec.subscriptions: expected an array")
    found = plan(settled(spec=None, problems=(wrong,)), NOW)
    assert found.document is None
    assert conditions(found)["Ready"] == ("False", "InvalidSpec")
    assert conditions(found)["Degraded"] == ("True", "InvalidSpec")


@pytest.mark.parametrize(
    "changed",
    [{"spec": None}, {"document": None, "problems": (Finding(Reason.UNSUPPORTED_ASSIGNMENT, "schema 2"),)}],
    ids=["not understood", "of a later version"],
)
def test_reconcile_of_an_unplannable_group_is_requeued_no_sooner_than_a_second(changed: dict[str, Any]) -> None:
    assert plan(settled(**changed), NOW).requeue_after >= 1


def test_policy_missing_freezes_the_assignment() -> None:
    found = plan(settled(policy=None, views={"orders": a_view(6)}), NOW)
    assert found.document is None


def test_policy_missing_forces_no_queue_sooner_than_any_policy_would() -> None:
    before = settled(policy=None)
    silent = a_pod("m2", before.pods[1].report, ready=False, stable_for=60.0, unreachable_for=60.0)
    found = plan(replace(before, pods=(before.pods[0], silent)), NOW)
    assert found.document is None
    assert conditions(found)["Progressing"] == ("False", "InvalidPolicy")


def test_status_figures_are_kept_while_the_assignment_schema_is_too_new() -> None:
    newer = Finding(Reason.UNSUPPORTED_ASSIGNMENT, "The assignment has schema 2; this version reads schema 1")
    before = {"queues": 6, "unownedQueues": 0, "members": 2, "generation": 5}
    status = {**before, "observedGeneration": 1, "conditions": []}
    found = plan(settled(document=None, problems=(newer,), status=status, observed_generation=2), NOW)
    assert {name: found.status[name] for name in before} == before
    assert found.status["observedGeneration"] == 2
    assert "QueuesUnowned" not in conditions(found)
    assert conditions(found)["Degraded"] == ("True", "UnsupportedAssignment")


def test_queue_listed_twice_by_a_broker_changes_nothing() -> None:
    twice = {"orders": a_view(6)._replace(queues=(*Q[:6], Q[0]))}
    found = plan(settled(views=twice), NOW)
    assert found.document is None
    assert conditions(found)["Degraded"] == ("True", "StrategyFailed")


def test_policy_missing_still_shares_with_unmanaged_consumers_and_keeps_spent_budget() -> None:
    spent = ((format_time(NOW - 5), 3),)
    before = settled(policy=None, unmanaged_consumers=("10.0.0.1@a",))
    found = plan(replace(before, document=replace(before.document or a_document(), spent=spent)), NOW)
    assert found.document
    assert [it.to for it in found.document.releasing.values()] == [None, None]
    assert found.document.spent == spent


def test_generation_in_the_status_is_kept_while_the_spec_is_invalid() -> None:
    found = plan(a_snapshot(spec=None, status={"generation": 7}), NOW)
    assert found.status["generation"] == 7, "else nothing would tell that the record is lost"


def test_assignment_of_a_later_schema_is_not_touched() -> None:
    newer = Finding(Reason.UNSUPPORTED_ASSIGNMENT, "The assignment has schema 2; this version reads schema 1")
    found = plan(settled(document=None, problems=(newer,)), NOW)
    assert found.document is None
    assert not found.refetch
    assert conditions(found)["Ready"] == ("False", "UnsupportedAssignment")


def test_assignment_does_not_change_while_the_group_has_too_many_members() -> None:
    crowded = Finding(Reason.TOO_MANY_MEMBERS, "10,001 pods carry the group's label")
    found = plan(settled(views={"orders": a_view(7)}, problems=(crowded,)), NOW)
    assert (found.document, [*found.pokes], found.members_to_drain) == (None, [], ())
    assert conditions(found)["Degraded"] == ("True", "TooManyMembers")


def test_assignment_too_large_is_not_written() -> None:
    names = [hashlib.sha256(f"m{number}".encode()).hexdigest() for number in range(20_000)]
    queues = tuple(Queue("orders", hashlib.sha256(name.encode()).hexdigest(), 0) for name in names)
    pods = tuple(a_pod(name, a_report(name, 0)) for name in names)
    found = plan(a_snapshot(pods=pods, views={"orders": a_view()._replace(queues=queues)}), NOW)
    assert found.document is None
    assert conditions(found)["Ready"] == ("False", "AssignmentTooLarge")


def test_settings_change_writes_a_new_generation_with_the_same_owners() -> None:
    before = settled(settings="{}", desired_settings='{"model":"Clustering"}')
    found = plan(before, NOW)
    assert found.document
    assert found.document.generation == 6
    assert found.document.members == (before.document and before.document.members)
    assert found.pokes == {}


def test_broadcasting_assigns_every_queue_to_every_member() -> None:
    spec = a_spec(messageModel="Broadcasting")
    pods = tuple(a_pod(name, a_report(name, 0)) for name in ("m1", "m2"))
    found = plan(a_snapshot(spec=spec, pods=pods), NOW)
    assert found.document
    assert found.document.everyone == tuple(Q[:6])
    assert owned(found.document) == {"m1": [], "m2": []}
    obey = tuple(a_pod(name, a_report(name, 1, Q[:6])) for name in ("m1", "m2"))
    quiet = plan(a_snapshot(spec=spec, pods=obey, document=found.document), NOW + 60)
    assert quiet.document is None
    assert conditions(quiet)["Ready"] == ("True", "Settled")
    unseen = plan(a_snapshot(spec=spec, pods=obey, document=found.document, views={"orders": None}), NOW + 60)
    assert unseen.document is None
    back = plan(a_snapshot(pods=obey, document=found.document), NOW + 60)
    assert back.document
    assert back.document.everyone is None
    assert back.document.barrier == back.document.generation


def test_broker_unreachable_from_one_member_moves_its_queues_to_others() -> None:
    before = settled()
    reach = [replace(pod, decoded_report=None) for pod in before.pods]
    document = before.document
    assert document
    m1 = a_pod("m1", a_report("m1", 5, Q[:3], brokers={"a": True}))
    cut = a_pod("m2", a_report("m2", 5, Q[3:6], brokers={"a": False}), cut_off_brokers={"a": 10.0})
    found = plan(replace(before, pods=(m1, cut)), NOW)
    assert found.document
    assert set(found.document.releasing) == set(Q[3:6])
    assert found.status["lastRebalance"]["reason"] == "BrokerUnreachable"
    assert cut.decoded_report
    unreachable = replace(cut.decoded_report, report=a_report(brokers={"a": False}))
    nobody_reaches = replace(reach[0], decoded_report=unreachable)
    assert plan(replace(before, pods=(nobody_reaches, cut)), NOW).document is None


def test_stateful_set_pod_recreated_by_name_waits_until_the_old_one_ended() -> None:
    before = settled()
    anew = replace(a_pod("m2", a_report("m2", 0, uid="new")), uid="new")
    waiting = plan(replace(before, pods=(before.pods[0], anew)), NOW)
    assert [holder.uid for holder in waiting.verify_ended] == ["uid-m2"]
    assert waiting.document
    assert waiting.document.members["m2"].uid == "uid-m2"
    known = plan(replace(before, pods=(before.pods[0], anew), deleted_uids=frozenset({"uid-m2"})), NOW)
    assert known.document
    assert known.document.members["m2"].uid == "new"
    assert owned(known.document) == {"m1": [0, 1, 2], "m2": [3, 4, 5]}


SETTINGS = settings_digest("new")
OLD = settings_digest("old")


def with_settings(changed: dict[str, Any], **of_pods: Any) -> Snapshot:
    """Return a group whose new settings are stored in generation 6, which m2 obeys, and m1 does not yet."""
    document = a_document(generation=6, members={"m1": Q[:3], "m2": Q[3:6]})
    m1 = a_pod("m1", a_report("m1", 5, Q[:3], settings=OLD), **of_pods)
    m2 = a_pod("m2", a_report("m2", 6, Q[3:6], settings=SETTINGS))
    fields = {"document": document, "pods": (m1, m2), "settings": "new", "desired_settings": "new"}
    return a_snapshot(**fields | changed)


def test_settings_are_poked_like_an_assignment_and_group_is_progressing_until_they_are_obeyed() -> None:
    found = plan(with_settings({}), NOW)
    assert found.document is None
    assert found.pokes == {"m1": Poke(6, 1)}
    assert found.settings_only_pokes == {"m1"}
    assert conditions(found)["Progressing"] == ("True", "SettingsNotObeyed")
    assert messages(found)["Progressing"] == "m1 does not use the group's new settings yet"
    assert conditions(found)["Ready"] == ("True", "Settled")
    assert conditions(found)["Degraded"] == ("False", "Settled")


def test_settings_report_is_awaited_only_of_members_that_were_poked() -> None:
    assert "m1" not in plan(with_settings({}), NOW).members_to_poll
    assert "m1" in plan(with_settings({}, poke=Poke(6, 1), poked_for=0.5), NOW).members_to_poll


def test_settings_and_assignment_changed_together_are_poked_at_once() -> None:
    document = a_document(generation=6, members={"m1": Q[:2], "m2": Q[2:6]})
    found = plan(with_settings({"document": document}), NOW)
    assert "m1" in found.pokes
    assert "m1" not in found.settings_only_pokes


def test_settings_not_obeyed_long_after_they_changed_are_a_problem_and_no_progress() -> None:
    found = plan(with_settings({"settings_age": 120.0}), NOW)
    assert conditions(found)["Progressing"][0] == "True"
    found = plan(with_settings({"settings_age": 121.0}), NOW)
    assert conditions(found)["Progressing"] == ("False", "Settled")
    assert conditions(found)["SettingsNotObeyed"] == ("True", "SettingsNotObeyed")
    assert conditions(found)["Degraded"][0] == "True"


def test_settings_that_change_now_are_not_late_however_old_those_before_were() -> None:
    found = plan(with_settings({"desired_settings": "newest", "settings_age": 1000.0}), NOW)
    assert found.document
    assert "SettingsNotObeyed" not in conditions(found)


def test_settings_are_not_expected_of_members_whose_reports_do_not_name_them() -> None:
    snapshot = with_settings({})
    m1 = a_pod("m1", a_report("m1", 5, Q[:3]))
    found = plan(replace(snapshot, pods=(m1, snapshot.pods[1])), NOW)
    assert conditions(found)["Progressing"] == ("False", "Settled")
    assert found.pokes == {}


def test_condition_no_members_gives_a_new_group_the_time_that_pods_need_to_start() -> None:
    new = plan(a_snapshot(), NOW)
    assert conditions(new)["Ready"] == ("False", "MembersStillJoining")
    assert conditions(new)["Degraded"] == ("False", "Settled")
    assert "NoMembers" not in conditions(new)
    assert new.events == ()
    assert new.requeue_after == 0, "its own document wakes nobody"
    waiting = a_snapshot(document=new.document, status=new.status)
    assert plan(waiting, NOW + 59).requeue_after <= 1
    late = plan(waiting, NOW + 60)
    assert conditions(late)["Ready"] == ("False", "NoMembers")
    assert [(event.reason, event.warning) for event in late.events] == [(Reason.NO_MEMBERS, True)]


def test_condition_no_members_comes_at_once_in_a_group_that_had_members() -> None:
    document = replace(settled().document or a_document(), begun={"orders": format_time(NOW - 600)})
    found = plan(settled(document=document, pods=(), deleted_uids=frozenset({"uid-m1", "uid-m2"})), NOW)
    assert conditions(found)["Ready"] == ("False", "NoMembers")


def test_condition_no_members_says_what_keeps_pods_from_running() -> None:
    pods = tuple(
        a_pod(name, None, ready=False, started=False, obstacle=obstacle)
        for name, obstacle in (("m1", "ImagePullBackOff of container app"), ("m2", ""), ("m3", "Unschedulable, x"))
    )
    new = plan(a_snapshot(pods=pods), NOW)
    message = "6 queues wait for the group's first member: m1 does not run: ImagePullBackOff of container app"
    assert messages(new)["Ready"] == message
    late = plan(a_snapshot(pods=pods, document=new.document, status=new.status), NOW + 60)
    expected = "No member can consume 6 queues: m1 does not run: ImagePullBackOff of container app"
    assert messages(late)["NoMembers"] == expected


def test_condition_for_idle_members_is_published_once_no_handover_is_in_progress() -> None:
    taken = a_document(members={"m1": Q[:1], "m2": (), "m3": ()}, taken={Q[1]: ("m1", "m2")})
    late = obeying(taken, m1={"report": a_report("m1", 4, Q[:2])})
    found = plan(settled(document=taken, pods=late, views={"orders": a_view(2)}), NOW)
    assert conditions(found)["Progressing"] == ("True", "HandoverInFlight")
    assert "IdleMembers" not in conditions(found)
    document = a_document(members={"m1": Q[:1], "m2": Q[1:2], "m3": ()})
    at_rest = plan(settled(document=document, pods=obeying(document), views={"orders": a_view(2)}), NOW)
    assert messages(at_rest)["IdleMembers"] == "3 members share 2 queues: 1 of them is idle"


def test_condition_for_idle_members_is_published() -> None:
    document = a_document(members={"m1": Q[:1], "m2": ()})
    found = plan(settled(document=document, pods=obeying(document), views={"orders": a_view(1)}), NOW)
    assert found.status["idleMembers"] == 1
    assert conditions(found)["IdleMembers"][0] == "True"


def test_journal_records_from_and_to_of_each_handover() -> None:
    before = settled()
    found = plan(replace(before, pods=(*before.pods, a_pod("m3", a_report("m3", 0)))), NOW)
    kinds = [line["kind"] for line in found.journal_records]
    assert kinds[:2] == ["membership", "plan"]
    handovers = [line for line in found.journal_records if line["kind"] == "handover"]
    assert [(line["act"], line["from"], line["to"], line["queues"]) for line in handovers] == [
        ("Revoke", "m1", "m3", {"orders": {"a": "2"}}),
        ("Revoke", "m2", "m3", {"orders": {"a": "5"}}),
    ]


def told_of(found: Plan) -> tuple[str, str]:
    """Return why the journal says that queues change hands."""
    (line,) = (line for line in found.journal_records if line["kind"] == "plan")
    return line["reason"], line["message"]


@pytest.mark.parametrize("strategy", ["Averagely", "Sticky"])
def test_unmanaged_consumer_change_is_the_recorded_reason_of_each_assignment(strategy: str) -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]}, strategy=strategy)
    policy, foreigners = a_policy(strategy=strategy), ("10.0.0.9@old",)
    came = plan(settled(document=document, policy=policy, unmanaged_consumers=foreigners), NOW)
    assert came.document is not None
    assert told_of(came)[0] == "UnmanagedConsumers"
    world = {"policy": policy, "status": came.status, "document": came.document, "pods": obeying(came.document)}
    given = plan(settled(**world, unmanaged_consumers=foreigners), NOW + 30)
    assert given.document is not None
    assert told_of(given)[0] == "UnmanagedConsumers"
    there = {"policy": policy, "status": given.status, "document": given.document, "pods": obeying(given.document)}
    unseen = plan(settled(**there, unmanaged_consumers=None), NOW + 60)
    assert "any more" not in str(unseen.journal_records), "not seen is not gone"
    left = plan(settled(**there, unmanaged_consumers=()), NOW + 60)
    assert left.document is not None
    assert told_of(left) == (
        "UnmanagedConsumers",
        "No unmanaged consumer is in the group any more: the policy shares all queues again",
    )


def test_journal_keeps_the_reason_of_the_revocation_for_the_later_grant() -> None:
    before = settled(policy=a_policy(strategy="AveragelyByCircle"))
    taken = plan(before, NOW)
    assert taken.document is not None
    assert told_of(taken)[0] == "PolicyChanged"
    world = {"policy": before.policy, "document": taken.document, "pods": obeying(taken.document)}
    given = plan(settled(**world, status=taken.status), NOW + 30)
    assert told_of(given) == ("PolicyChanged", "The rebalance that began with PolicyChanged continues")
    unknown = {"lastRebalance": {**taken.status["lastRebalance"], "reason": "OfALaterOperator"}}
    assert told_of(plan(settled(**world, status=unknown), NOW + 30))[0] == "LoadShifted"
