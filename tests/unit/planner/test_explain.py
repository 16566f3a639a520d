"""Tests the explanation of each queue's owner, as a sentence, in groups with members."""

from dataclasses import replace
from typing import Any

import pytest

from builders import LONG, NOW, a_document, a_pod, a_policy, a_report, a_snapshot, a_spec, a_view, obeying
from rota.model import Finding, Queue, Reason
from rota.planner import PodSnapshot, Snapshot, explain_owners, plan

Q = [Queue("orders", "a", number) for number in range(8)]


def settled(**changed: Any) -> Snapshot:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
    return a_snapshot(**({"document": document, "pods": obeying(document)} | changed))


def sentences_of(snapshot: Snapshot, *queues: Queue) -> list[str]:
    return [explanation.sentence for explanation in explain_owners(snapshot, NOW, queues)]


ROOMS = {"roomLabel": "topology.kubernetes.io/zone", "brokers": [{"broker": "a", "room": "east"}]}
NAMED_QUEUES = [{"index": 0, "queues": [{"topic": "orders", "broker": "a", "ids": "0-2"}]}]


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("Sticky", {}, "m1 keeps all of its 3 queues (an even share is 3)"),
        ("Averagely", {}, "m1 is member 1 of 2, whose block of orders is a/0 to a/2"),
        ("ByConfig", {"byConfig": {"members": NAMED_QUEUES}}, "the policy names it for m1"),
        (
            "MachineRoomNearby",
            {"machineRoomNearby": ROOMS},
            "its room east has 2 of 2 members; among them m1 is member 1 of 2, whose block of orders is a/0 to a/2",
        ),
    ],
)
def test_explain_gives_the_reason_of_the_strategy_for_a_settled_queue(
    strategy: str, options: dict[str, Any], sentence: str
) -> None:
    snapshot = settled(policy=a_policy(strategy=strategy, options=options))
    snapshot = replace(snapshot, pods=tuple(replace(pod, room="east") for pod in snapshot.pods))
    (explanation,) = explain_owners(snapshot, NOW, [Q[0]])
    assert explanation == (Q[0], "m1", f"orders/a/0 stays with m1: {sentence}")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("AveragelyByCircle", {}),
        ("ConsistentHash", {"consistentHash": {"virtualNodes": 20}}),
        ("Balanced", {}),
        ("Averagely", {}),
        ("Sticky", {}),
    ],
)
def test_explain_has_a_reason_for_every_queue(strategy: str, options: dict[str, Any]) -> None:
    policy = a_policy(strategy=strategy, options=options)
    first = plan(a_snapshot(policy=policy, pods=(a_pod("m1", a_report("m1", 0)), a_pod("m2", a_report("m2", 0)))), NOW)
    assert first.document
    snapshot = a_snapshot(policy=policy, document=first.document, pods=obeying(first.document))
    reasons = explain_owners(snapshot, NOW, Q[:6])
    owners = {queue: name for name, share in first.document.members.items() for queue in share.queues}
    assert {explanation.queue: explanation.owner for explanation in reasons} == owners
    for explanation in reasons:
        assert explanation.sentence.startswith(f"{explanation.queue} stays with {explanation.owner}: ")
        assert "not what" not in explanation.sentence


def test_explain_by_machine_room_names_the_room() -> None:
    rooms = [Queue("orders", "east@a", number) for number in range(2)]
    document = a_document(members={"m1": rooms}, strategy="ByMachineRoom")
    policy = a_policy(strategy="ByMachineRoom", options={"byMachineRoom": {"rooms": ["east"]}})
    views = {"orders": a_view(2, brokers=("east@a",))}
    snapshot = a_snapshot(policy=policy, document=document, pods=obeying(document), views=views)
    shares = "m1 is member 1 of the 1 that share its queues in blocks, topic by topic"
    assert sentences_of(snapshot, rooms[0]) == [
        f"orders/east@a/0 stays with m1: room east is in the policy, and {shares}"
    ]


def test_explain_without_a_queue_picks_one_queue_of_each_member() -> None:
    assert [(explanation.queue, explanation.owner) for explanation in explain_owners(settled(), NOW)] == [
        (Q[0], "m1"),
        (Q[3], "m2"),
    ]


def test_explain_compares_the_owner_with_the_strategy_of_the_policy() -> None:
    paused = settled(policy=a_policy(strategy="AveragelyByCircle", paused=True))
    assert sentences_of(paused, Q[1], Q[4]) == [
        "orders/a/1 stays with m1, which is not what AveragelyByCircle returns",
        "orders/a/4 stays with m2, which is not what AveragelyByCircle returns",
    ]


def test_explain_applies_the_strategy_to_the_present_members() -> None:
    snapshot = settled()
    (sentence,) = sentences_of(replace(snapshot, pods=(*snapshot.pods, a_pod("m3", a_report("m3", 0)))), Q[2])
    assert sentence == "orders/a/2 stays with m1, which is not what Sticky returns"


def test_explain_with_unmanaged_consumers_shares_by_client_id_and_shows_names() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, strategy="Averagely")
    snapshot = a_snapshot(document=document, pods=obeying(document), unmanaged_consumers=("10.0.0.9@old",))
    of_m1, of_m2, unmanaged = explain_owners(snapshot, NOW, [Q[0], Q[2], Q[5]])
    assert of_m1.owner == "m1"
    assert of_m1.sentence == "orders/a/0 stays with m1: m1 is member 1 of 3, whose block of orders is a/0 to a/1"
    assert (of_m2.owner, ": m2 is member 2 of 3" in of_m2.sentence) == ("m2", True)
    reason = "1 unmanaged consumer is in the group: 10.0.0.9@old; queues are shared by their strategy, Averagely"
    assert unmanaged == (Q[5], None, f"orders/a/5 has no owner among the members: {reason}")


def test_explain_with_unmanaged_consumers_separates_members_with_a_common_prefix() -> None:
    document = a_document(members={"m1": Q[:2], "m10": Q[2:4]}, strategy="Averagely")
    snapshot = a_snapshot(document=document, pods=obeying(document), unmanaged_consumers=("10.0.0.9@old",))
    assert ": m10 is member 2 of 3" in sentences_of(snapshot, Q[2])[0]


def test_explain_sticky_says_that_retry_queues_are_not_counted() -> None:
    retry = Queue("%RETRY%orders", "a", 0)
    document = a_document(members={"m1": [*Q[:3], retry], "m2": Q[3:6]})
    views = {"orders": a_view(6), retry.topic: a_view(1, retry.topic)}
    snapshot = a_snapshot(document=document, pods=obeying(document), views=views)
    assert sentences_of(snapshot, Q[0]) == [
        "orders/a/0 stays with m1: m1 keeps all of its 3 queues (an even share is 3, retries apart)"
    ]


def test_explain_with_unmanaged_consumers_ignores_a_missing_policy() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, strategy="Averagely")
    snapshot = a_snapshot(document=document, pods=obeying(document), unmanaged_consumers=("10.0.0.9@old",), policy=None)
    assert "is member 1 of 3" in sentences_of(snapshot, Q[0])[0]


def test_explain_names_giver_and_taker_of_a_queue_in_handover() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:4]}, taken={Q[4]: ("m1", "m2"), Q[5]: ("m2", None)})
    assert explain_owners(settled(document=document, pods=obeying(document)), NOW, [Q[4], Q[5]]) == [
        (Q[4], None, "orders/a/4 is being handed over: m1 releases it, m2 gets it next"),
        (Q[5], None, "orders/a/5 is being handed over: m2 releases it, no member gets it next"),
    ]


def test_explain_covers_a_queue_leaving_the_group_while_it_is_stored() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:7]}, taken={Q[7]: ("m2", None)})
    owned, leaving = explain_owners(settled(document=document, pods=obeying(document)), NOW, [Q[6], Q[7]])
    assert leaving.sentence == "orders/a/7 is being handed over: m2 releases it, no member gets it next"
    assert owned == (
        Q[6],
        "m2",
        "orders/a/6 is still with m2: the group no longer consumes it, so it is to be released",
    )


def test_explain_says_that_a_free_queue_has_no_owner() -> None:
    document = a_document(members={"m1": Q[:3]})
    assert explain_owners(settled(document=document, pods=obeying(document)), NOW, [Q[3]]) == [
        (Q[3], None, "orders/a/3 has no owner")
    ]
    assert sentences_of(a_snapshot(), Q[0]) == ["orders/a/0 has no owner"]


@pytest.mark.parametrize("queue", [Queue("orders", "a", 6), Queue("orders", "b", 0), Queue("payments", "a", 0)])
def test_explain_rejects_an_unknown_queue_with_a_sentence(queue: Queue) -> None:
    with pytest.raises(ValueError, match=f"^There is no queue {queue} among the group's 6$"):
        explain_owners(settled(), NOW, [Q[0], queue])


def test_explain_rejects_a_queue_of_an_unsubscribed_topic() -> None:
    snapshot = settled(views={"orders": a_view(6), "payments": a_view(1, "payments")})
    with pytest.raises(ValueError, match="There is no queue payments/a/0 among the group's 6"):
        explain_owners(snapshot, NOW, [Queue("payments", "a", 0)])


def test_explain_lists_example_queues_in_queue_order() -> None:
    document = a_document(members={"m1": Q[3:6], "m2": Q[:3]})
    assert [
        explanation.owner for explanation in explain_owners(settled(document=document, pods=obeying(document)), NOW)
    ] == [
        "m2",
        "m1",
    ]


def test_explain_with_unmanaged_consumers_excludes_lost_members_and_needs_no_client_id() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, strategy="Averagely")
    (m1, m2) = obeying(document)
    snapshot = a_snapshot(
        document=document, pods=(replace(m1, client_id=""), lost_pod(m2)), unmanaged_consumers=("old",)
    )
    assert sentences_of(snapshot, Q[0], Q[2]) == [
        "orders/a/0 stays with m1: m1 is member 1 of 2, whose block of orders is a/0 to a/2",
        "orders/a/2 is still with m2: that member is Lost and has not released it yet",
    ]


def lost_pod(pod: PodSnapshot) -> PodSnapshot:
    return replace(pod, ready=False, stable_for=LONG, decoded_report=None, unreachable_for=LONG)


def test_explain_keeps_owners_when_no_member_is_left() -> None:
    snapshot = settled()
    lost = replace(snapshot, pods=tuple(lost_pod(pod) for pod in snapshot.pods))
    assert sentences_of(lost, Q[0]) == ["orders/a/0 is still with m1: no member can take it over"]
    assert sentences_of(replace(snapshot, pods=()), Q[0]) == ["orders/a/0 is still with m1: no member can take it over"]


def test_explain_names_the_member_state_of_an_owner_that_has_not_released() -> None:
    snapshot = settled()
    (m1, m2) = snapshot.pods
    assert sentences_of(replace(snapshot, pods=(m1, lost_pod(m2))), Q[3]) == [
        "orders/a/3 is still with m2: that member is Lost and has not released it yet"
    ]
    assert sentences_of(replace(snapshot, pods=(m1, replace(m2, terminating=True))), Q[3]) == [
        "orders/a/3 is still with m2: that member is Leaving and has not released it yet"
    ]
    for pods in ((m1,), (m1, replace(m2, uid="another"))):
        assert sentences_of(replace(snapshot, pods=pods), Q[3]) == [
            "orders/a/3 is still with m2: that member is missing and has not released it yet"
        ]


def test_explain_says_that_the_group_is_paused() -> None:
    document = a_document(members={"m1": Q[:3]}, taken={Q[3]: ("m2", None)})
    snapshot = settled(document=document, pods=obeying(document), spec=a_spec(paused=True))
    assert sentences_of(snapshot, Q[0], Q[3], Q[4]) == [
        "orders/a/0 is still with m1: the group is paused, so m1 must release it",
        "orders/a/3 is being handed over: m2 releases it, no member gets it next",
        "orders/a/4 has no owner: the group is paused",
    ]
    assert explain_owners(snapshot, NOW) == [], "no member may own a queue of a paused group"
    with pytest.raises(ValueError, match="There is no queue orders/a/7"):
        explain_owners(snapshot, NOW, [Q[7]])
    without_route = replace(snapshot, views={"orders": None})
    assert sentences_of(without_route, Q[0]) == sentences_of(snapshot, Q[0])


def test_explain_broadcasting_says_that_every_member_reads_the_queue() -> None:
    document = a_document(members={"m1": (), "m2": ()}, everyone=tuple(Q[:6]), strategy="")
    snapshot = settled(document=document, pods=obeying(document), spec=a_spec(messageModel="Broadcasting"))
    expected = (Q[2], None, "orders/a/2 is read by every member: the group is Broadcasting")
    assert explain_owners(snapshot, NOW, [Q[2]]) == [expected]
    assert [explanation.queue for explanation in explain_owners(snapshot, NOW)] == [Q[0]]
    with pytest.raises(ValueError, match="There is no queue orders/a/7 among the group's 6"):
        explain_owners(snapshot, NOW, [Q[7]])
    assert explain_owners(replace(snapshot, views={"orders": a_view(2)}), NOW, [Q[2]]) == [expected], (
        "the stored document still has the queue"
    )


def test_explain_without_a_policy_says_that_the_assignment_stays() -> None:
    missing = (Finding(Reason.MISSING_POLICY, "RebalancePolicy steady does not exist"),)
    assert sentences_of(settled(policy=None, problems=missing), Q[0]) == [
        "orders/a/0 stays with m1: the policy is missing or invalid, so the present assignment stays in force"
    ]


def test_explain_gives_the_error_of_a_failed_strategy() -> None:
    policy = a_policy(strategy="Custom", options={"custom": {"name": "nowhere"}})
    (sentence,) = sentences_of(settled(policy=policy), Q[0])
    assert sentence.startswith("orders/a/0 stays with m1: There is no custom strategy nowhere")
    assert sentence.endswith("; every queue stays with its owner until that is corrected")


def test_explain_with_an_invalid_spec_still_covers_the_stored_assignment() -> None:
    snapshot = settled(spec=None)
    assert explain_owners(snapshot, NOW) == []
    assert sentences_of(snapshot, Q[0]) == [
        "orders/a/0 is still with m1: the group's spec is invalid, so the present assignment stays in force"
    ]


def test_explain_of_a_recreated_pod_says_that_the_old_owner_is_absent() -> None:
    snapshot = settled()
    (m1, m2) = snapshot.pods
    recreated = replace(snapshot, deleted_uids=frozenset({"uid-m1"}), pods=(replace(m1, uid="new"), m2))
    assert sentences_of(recreated, Q[0]) == [
        "orders/a/0 goes to m1: its owner m1 is no longer a member; m1 had 0 queues (an even share is 3)"
    ]


def test_explain_with_unmanaged_consumers_names_members_whose_ids_contain_each_other() -> None:
    """A shorter id is replaced last: it may be the beginning, the middle or the end of a longer one."""
    ids = {"m1": "20.0.0.1@a", "m2": "20.0.0.1@ab", "m3": "120.0.0.1@a"}
    document = a_document(members={name: Q[2 * at : 2 * at + 2] for at, name in enumerate(ids)}, strategy="Averagely")
    pods = tuple(replace(pod, client_id=ids[pod.name]) for pod in obeying(document))
    snapshot = a_snapshot(document=document, pods=pods, unmanaged_consumers=("9.9.9.9@old",))
    sentences = sentences_of(snapshot, *Q[:6])
    assert [name for sentence in sentences for name in ids if f"stays with {name}" in sentence] == [
        *("m1", "m1"),
        *("m2", "m2"),
        *("m3", "m3"),
    ]
    assert not [sentence for sentence in sentences if "@" in sentence.replace("9.9.9.9@old", "")]


def test_explain_says_that_a_duplicate_consumer_group_owns_no_queue() -> None:
    duplicate = (Finding(Reason.DUPLICATE_CONSUMER_GROUP, "shop/older has it"),)
    reason = "an older ConsumerGroup has the same consumer group"
    assert sentences_of(settled(problems=duplicate), Q[0]) == [
        f"orders/a/0 is still with m1: {reason}, so m1 must release it"
    ]
    free = replace(settled(problems=duplicate), document=a_document(members={"m1": Q[1:]}))
    assert sentences_of(free, Q[0]) == [f"orders/a/0 has no owner: {reason}"]
