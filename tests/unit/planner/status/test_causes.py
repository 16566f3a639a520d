"""Tests the reason of a rebalance where several are possible, and its sentences and Events."""

from dataclasses import replace
from typing import Any

import pytest

from builders import NOW, a_document, a_pod, a_policy, a_report, a_snapshot, a_view, obeying
from rota.documents import Assignment, Release, Share
from rota.model import Holder, Queue, Reason
from rota.planner import Plan, plan
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(6)]
RETRY = "%RETRY%orders"
THREE_MEMBERS = a_document(members={"m1": Q[:2], "m2": Q[2:4], "m3": Q[4:6]})
WITH_IDLE = a_document(members={"m1": Q[:1], "m2": Q[1:2], "m3": Q[2:3], "m4": []}, strategy="Sticky")
JOINER = a_pod("m4", a_report("m4", 5))
CONSUMERS = ("10.0.0.9@1",)


def planned(document: Assignment = THREE_MEMBERS, **changed: Any) -> Plan:
    return plan(a_snapshot(**{"document": document, "pods": obeying(document), **changed}), NOW)


def reason_of(new_plan: Plan) -> tuple[str, str]:
    line = next(line for line in new_plan.journal_records if line["kind"] == "plan")
    return line["reason"], line["message"]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"terminating": True, "final": True}, "m1, m2 are leaving"),
        ({"ready": False}, "m1, m2 have not been ready for longer than their grace"),
    ],
)
def test_rebalance_reason_names_several_members_in_the_plural(changed: dict[str, Any], sentence: str) -> None:
    fields = {key: value for key, value in changed.items() if key != "final"}
    pods: dict[str, dict[str, Any]] = {"m1": dict(fields), "m2": dict(fields)}
    if "final" in changed:
        for name, pod in pods.items():
            pod["report"] = a_report(name, 5, state="drained", final=True)
    assert reason_of(planned(pods=obeying(THREE_MEMBERS, **pods)))[1] == sentence


def test_rebalance_reason_of_a_restarted_member_that_leaves_is_member_left() -> None:
    shares = {"m1": Share("uid-m1", tuple(Q[:3]), 1), "m2": Share("uid-m2", tuple(Q[3:]), 1)}
    document = replace(a_document(), members=shares, incarnations_since=3)
    leaver = a_pod("m1", a_report("m1", 5, reads=2, incarnation="2"), terminating=True, restarts=1)
    other_pod = a_pod("m2", a_report("m2", 5, Q[3:], reads=2, incarnation="1"))
    joiner = a_pod("m3", a_report("m3", 5, reads=2, incarnation="1"))
    assert reason_of(planned(document, pods=(leaver, other_pod, joiner)))[0] == "MemberLeft"


def test_rebalance_reason_is_added_queues_when_each_topic_has_more() -> None:
    views = {"orders": a_view(7), RETRY: a_view(1, topic=RETRY)}
    assert reason_of(planned(views=views)) == ("QueuesAdded", f"2 queues added: {RETRY}/a/0, orders/a/6")


def reason_with_unmanaged(document: Assignment, **changed: Any) -> tuple[str, str]:
    """Return the reason in a group that already had the same unmanaged consumer: its arrival is not the reason."""
    condition = {"type": "UnmanagedConsumers", "status": "True", "lastTransitionTime": format_time(NOW - 50)}
    status = {"conditions": [condition | {"reason": "UnmanagedConsumers", "message": "1 consumer"}]}
    return reason_of(planned(document, unmanaged_consumers=CONSUMERS, status=status, **changed))


# By its client id the consumer is the last of three, so it owns the last two queues.
SHARED = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, strategy="Averagely")


@pytest.mark.parametrize(
    ("document", "changed", "reason"),
    [
        (SHARED, {"pods": (*obeying(SHARED), JOINER)}, "MemberJoined"),  # not QueuesAdded for the unrecorded queues
        (a_document(members={"m1": Q[:1], "m2": Q[1:4]}, strategy="Averagely"), {}, "UnmanagedConsumers"),
        (replace(SHARED, strategy="Sticky"), {}, "UnmanagedConsumers"),
        (SHARED, {"desired_settings": '{"a": 1}'}, "SettingsChanged"),
    ],
    ids=["a member joined", "queues move", "another strategy", "settings"],
)
def test_rebalance_reason_while_unmanaged_consumers_are_present(
    document: Assignment, changed: dict[str, Any], reason: str
) -> None:
    assert reason_with_unmanaged(document, **changed)[0] == reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"policy": a_policy(strategy="Balanced")}, "PolicyChanged"),
        ({"desired_settings": '{"a": 1}'}, "SettingsChanged"),
        ({"pods": (*obeying(WITH_IDLE), a_pod("m5", a_report("m5", 5)))}, "MemberJoined"),
    ],
    ids=["strategy", "settings", "another member"],
)
def test_rebalance_reason_is_not_a_member_that_was_idle_before(changed: dict[str, Any], reason: str) -> None:
    snapshot = {"views": {"orders": a_view(3)}, "policy": a_policy(strategy="Sticky")}
    new_plan = planned(WITH_IDLE, **snapshot | changed)
    assert reason_of(new_plan)[0] == reason


def test_rebalance_reason_is_a_member_that_was_idle_before_and_gets_queues_now() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:], "m3": []})  # m3 joined while the policy was paused
    assert reason_of(planned(document)) == ("MemberJoined", "m3 joined")
    other_strategy = planned(document, policy=a_policy(strategy="Balanced"))
    assert reason_of(other_strategy) == ("PolicyChanged", "The strategy is now Balanced")


@pytest.mark.parametrize(("heavier", "reason"), [((), "MemberJoined"), ((Q[1],), "LoadShifted")])
def test_rebalance_reason_goes_on_for_queues_revoked_earlier_only(heavier: tuple[Queue, ...], reason: str) -> None:
    """Queues that became heavier move now, too: that is another rebalance."""
    taken = {Q[0]: Release(Holder("m1", "uid-m1"), "m2", 5, format_time(NOW - 5))}
    document = a_document(members={"m1": Q[1:4], "m2": Q[4:]}, releasing=taken, strategy="Balanced")
    status = {"lastRebalance": {"at": format_time(NOW - 5), "reason": "MemberJoined", "moved": 1}}
    weights = dict.fromkeys(Q, 1.0) | dict.fromkeys(heavier, 9.0)
    new_plan = planned(document, policy=a_policy(strategy="Balanced"), queue_weights=weights, status=status)
    assert reason_of(new_plan)[0] == reason


def test_rebalance_reason_is_changed_settings_while_moves_wait() -> None:
    policy = a_policy(strategy="Balanced", paused=True)
    weights = dict.fromkeys(Q, 1.0) | {Q[0]: 9.0}
    new_plan = planned(
        replace(THREE_MEMBERS, strategy="Balanced"), policy=policy, queue_weights=weights, desired_settings='{"a": 1}'
    )
    assert new_plan.hold
    assert reason_of(new_plan)[0] == "SettingsChanged"


@pytest.mark.parametrize(("queues", "sentence"), [(7, "1 queue changes hands"), (8, "2 queues change hands")])
def test_event_of_a_rebalance_counts_its_queues(queues: int, sentence: str) -> None:
    [event] = [event for event in planned(views={"orders": a_view(queues)}).events if not event.warning]
    assert event.reason is Reason.QUEUES_ADDED
    assert event.message.endswith(f"; {sentence}")
