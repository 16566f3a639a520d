"""Tests details of a draft: which queues need a decision, and what the next document records about them."""

from dataclasses import replace

import pytest

from builders import LONG, NOW, a_document, a_pod, a_policy, a_report, a_situation, a_snapshot, a_spec, a_view, obeying
from rota.documents import Assignment, Share
from rota.handover import Act, Proof
from rota.model import Queue, Reason
from rota.planner import PodSnapshot, StrategyInputs, plan
from rota.planner.moves import decide, strategy_inputs_of, unmanaged_queues
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(7)]


def owned(document: Assignment | None) -> dict[str, list[int]]:
    assert document
    return {name: [queue.id for queue in share.queues] for name, share in document.members.items()}


def test_budget_message_says_how_many_queues_may_move_now() -> None:
    document = a_document(members={"m1": Q[:6], "m2": Q[6:]})
    pods = (*obeying(document), a_pod("m3", a_report("m3", 0)))
    policy = a_policy(budget={"maxMoves": 1})
    new_plan = plan(a_snapshot(document=document, pods=pods, policy=policy, views={"orders": a_view(7)}), NOW)
    assert new_plan.hold == (Reason.BUDGET_SPENT, "The budget lets 1 of 3 queues move now")


@pytest.mark.parametrize("to_m2", [0, 1])
def test_budget_counts_a_queue_for_nobody_like_one_for_a_member_without_queues(to_m2: int) -> None:
    """Of two such moves, the budget lets the one of the lower queue go first."""
    document = a_document(members={"m1": Q[:3], "m2": ()}, strategy="ByConfig")
    configured = [
        {"index": index, "queues": [{"topic": "orders", "broker": "a", "ids": ids}]}
        for index, ids in enumerate(("2", str(to_m2)))
    ]
    policy = a_policy(strategy="ByConfig", options={"byConfig": {"members": configured}}, budget={"maxMoves": 1})
    views = {"orders": a_view(3)}
    new_plan = plan(a_snapshot(document=document, pods=obeying(document), policy=policy, views=views), NOW)
    assert new_plan.hold == (Reason.BUDGET_SPENT, "The budget lets 1 of 2 queues move now")
    assert new_plan.document
    next_owners = {queue.id: release.to for queue, release in new_plan.document.releasing.items()}
    assert next_owners == {0: None if to_m2 else "m2"}


def test_forced_grant_of_queues_that_nobody_owned_records_the_start_time_of_their_topic() -> None:
    document = a_document(6, members={"m1": (), "m2": ()}, barrier=6, begun={})
    silent = a_pod("m2", a_report("m2", 4), ready=False, unreachable_for=LONG)
    snapshot = a_snapshot(document=document, pods=(a_pod("m1", a_report("m1", 6)), silent))
    forced = plan(snapshot, NOW).document
    assert forced
    assert (owned(forced), set(forced.forced)) == ({"m1": [0, 1, 2, 3, 4, 5], "m2": []}, {*Q[:6]})
    assert forced.begun == {"orders": format_time(NOW)}


def test_assignment_lists_start_times_in_the_order_of_topics() -> None:
    topics = ["e", "d", "c", "b", "a"]
    spec = a_spec(subscriptions=[{"topic": topic} for topic in topics])
    snapshot = a_snapshot(spec=spec, views={topic: a_view(1, topic) for topic in topics})
    document = plan(replace(snapshot, pods=(a_pod("m1", a_report("m1", 0)),)), NOW).document
    assert document
    assert list(document.begun) == sorted(topics)


def test_unmanaged_consumer_with_the_id_of_a_member_leaves_queues_with_their_owners() -> None:
    """The shares cannot be computed, so no queue counts as the share of an unmanaged consumer."""
    document = a_document(members={"m1": Q[:3], "m2": Q[3:5]})
    snapshot = a_snapshot(document=document, pods=obeying(document), unmanaged_consumers=("10.0.0.1@m1",))
    new_plan = plan(snapshot, NOW)
    assert Reason.STRATEGY_FAILED in {finding.reason for finding in new_plan.problems}
    assert (new_plan.document, new_plan.unmanaged_queues) == (None, frozenset())
    shared = plan(replace(snapshot, unmanaged_consumers=("10.0.0.1@m3",)), NOW)
    assert shared.unmanaged_queues == {Q[5]}, "the other one is its owner's until it is released"


def test_unmanaged_consumer_has_no_share_of_a_group_without_queues() -> None:
    document = a_document(members={"m1": ()})
    situation = a_situation(*obeying(document), document=document, views={}, unmanaged_consumers=("10.0.0.1@m3",))
    assert unmanaged_queues(situation) == frozenset()


def test_strategy_is_given_rooms_only_of_members_in_a_known_room() -> None:
    pods = (a_pod("m1", room="east"), a_pod("m2"), a_pod("m3", room=""))
    situation = a_situation(*pods, document=a_document(), member_weights={"m1": 2.0}, queue_weights=None)
    assert strategy_inputs_of(situation) == StrategyInputs({"m1": "east"}, None, {"m1": 2.0})


def test_restart_needs_a_decision_on_queues_that_the_next_process_has_not_inherited() -> None:
    shares = {"m1": Share("uid-m1", tuple(Q[:3]), 1), "m2": Share("uid-m2", tuple(Q[3:6]), 1)}
    document = replace(a_document(), members=shares, incarnations_since=3)

    def process(name: str, incarnation: int, *held: Queue) -> PodSnapshot:
        return a_pod(name, a_report(name, 5, held, reads=2, incarnation=str(incarnation)))

    other_pod = process("m2", 1, *Q[3:6])
    ended = decide(a_situation(process("m1", 2), other_pod, document=document))
    assert [(decision.queue, decision.act, decision.proof) for decision in ended.decisions] == [
        (queue, Act.GRANT, Proof.ENDED) for queue in Q[:3]
    ]
    inherited = decide(a_situation(process("m1", 2, *Q[:3]), other_pod, document=document))
    assert inherited.decisions == []


def test_queue_release_leads_to_a_grant_although_unmanaged_consumers_are_unknown() -> None:
    """While the broker does not respond, a queue stays ungranted only if it was released to no member."""
    members = {"m1": Q[:2], "m2": Q[3:6]}
    document = a_document(members=members, taken={Q[2]: ("m1", "m2")})
    snapshot = a_snapshot(document=document, pods=obeying(document), unmanaged_consumers=None)
    assert owned(plan(snapshot, NOW).document) == {"m1": [0, 1], "m2": [2, 3, 4, 5]}
    to_nobody = a_document(members=members, taken={Q[2]: ("m1", None)})
    dropped = plan(replace(snapshot, document=to_nobody), NOW).document
    assert owned(dropped) == {"m1": [0, 1], "m2": [3, 4, 5]}


def test_handover_names_the_new_next_owner_after_debounce_if_the_named_one_can_no_longer_take_the_queue() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:5], "m3": ()}, taken={Q[5]: ("m2", "m3")})
    unreleased = {"report": a_report("m2", 4, Q[2:6])}
    pods = obeying(document, m2=unreleased, m3={"ready": False})
    snapshot = a_snapshot(document=document, pods=pods, policy=a_policy(triggers={"debounce": "10s"}))
    new_document = plan(snapshot, NOW).document
    assert new_document
    release = document.releasing[Q[5]]
    assert new_document.releasing == {Q[5]: replace(release, to="m1")}
    assert owned(new_document) == owned(document)

    just_written = plan(replace(snapshot, document=replace(document, issued_at=format_time(NOW - 9.5))), NOW)
    assert (just_written.document, just_written.requeue_after) == (None, 0.5)
    unchanged = plan(replace(snapshot, document=new_document), NOW + LONG)
    assert unchanged.document is None


def test_handover_names_no_next_owner_after_an_unmanaged_consumer_gets_the_queue() -> None:
    """Without this, the queue would be granted to a member if the group's consumers were unknown at its release."""
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, strategy="Averagely", taken={Q[4]: ("m2", "m1")})
    pods = obeying(document, m2={"report": a_report("m2", 4, Q[2:5])})
    snapshot = a_snapshot(document=document, pods=pods, unmanaged_consumers=("m9",))
    new_document = plan(snapshot, NOW).document
    assert new_document
    assert new_document.releasing == {Q[4]: replace(document.releasing[Q[4]], to=None)}
    released = (pods[0], a_pod("m2", a_report("m2", 6, Q[2:4])))
    unknown = replace(snapshot, document=new_document, pods=released, unmanaged_consumers=None)
    assert owned(plan(unknown, NOW + LONG).document) == {"m1": [0, 1], "m2": [2, 3]}
