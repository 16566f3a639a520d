"""Tests conditions that outlive their problem, and the conditions that GitOps tools read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from builders import NOW, a_document, a_pod, a_policy, a_report, a_snapshot, a_spec, a_view, obeying
from rota.model import Finding, Queue, Reason, ReasonKind, reasons_of_kind
from rota.planner import Plan, plan
from rota.planner.status.conditions import MAX_PAST_PROBLEMS, STALL_SECONDS
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(6)]
DOCUMENT = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
NO_TOPIC = Finding(Reason.UNKNOWN_TOPIC, "No topic orders")
UNMANAGED_CONSUMERS = ("10.0.0.9@1",)


def planned(status: Mapping[str, Any] | None = None, now: float = NOW, **changed: Any) -> Plan:
    snapshot = {"document": DOCUMENT, "pods": obeying(DOCUMENT), "policy": a_policy(), **changed}
    return plan(a_snapshot(status=status or {}, **snapshot), now)


def condition(new_plan: Plan, kind: str) -> dict[str, Any]:
    return next((entry for entry in new_plan.status["conditions"] if entry["type"] == kind), {})


def test_condition_of_a_problem_that_is_over_stays_with_status_false() -> None:
    first = planned(problems=(NO_TOPIC,))
    assert condition(first, "UnknownTopic")["status"] == "True"
    resolved = planned(first.status, NOW + 5)
    assert condition(resolved, "UnknownTopic") == {
        "type": "UnknownTopic",
        "status": "False",
        "reason": "Settled",
        "message": "Resolved. The last message was: No topic orders",
        "lastTransitionTime": format_time(NOW + 5),
        "observedGeneration": resolved.status["observedGeneration"],
    }
    assert [event.reason for event in resolved.events] == []
    later = planned(resolved.status, NOW + 60)
    assert later.status == resolved.status, "an unchanged status is not written"


def test_condition_of_a_problem_that_returns_is_true_again_and_gives_an_event() -> None:
    resolved = planned(planned(problems=(NO_TOPIC,)).status, NOW + 5)
    recurring = planned(resolved.status, NOW + 9, problems=(Finding(Reason.UNKNOWN_TOPIC, "No topic orders again"),))
    unknown_topic = condition(recurring, "UnknownTopic")
    assert (unknown_topic["status"], unknown_topic["message"]) == ("True", "No topic orders again")
    assert unknown_topic["lastTransitionTime"] == format_time(NOW + 9)
    assert [(event.reason, event.warning) for event in recurring.events] == [(Reason.UNKNOWN_TOPIC, True)]


def test_condition_list_keeps_the_latest_past_problems_only() -> None:
    status: Mapping[str, Any] = {}
    kinds = reasons_of_kind(ReasonKind.STALLS)[: MAX_PAST_PROBLEMS + 2]
    for number, reason in enumerate(kinds):
        status = planned(status, NOW + number, problems=(Finding(reason, "wrong"),)).status
    status = planned(status, NOW + 100).status
    assert [entry["type"] for entry in status["conditions"][5:]] == [str(reason) for reason in reversed(kinds)][
        :MAX_PAST_PROBLEMS
    ]


def test_condition_past_problems_are_sorted_by_time_then_name_and_follow_the_generation() -> None:
    missing = Finding(Reason.MISSING_POLICY, "No policy rules")
    status = planned(planned(problems=(missing,)).status, NOW + 5, problems=(NO_TOPIC,)).status
    # Both get the same transition time: the first ends when the second is published as ended.
    resolved = planned(status, NOW + 5, observed_generation=2)
    past = resolved.status["conditions"][5:]
    assert [entry["type"] for entry in past] == ["MissingPolicy", "UnknownTopic"]
    assert {entry["observedGeneration"] for entry in past} == {2}
    reverse = planned(planned(problems=(NO_TOPIC,)).status, NOW + 5, problems=(missing,)).status
    past = planned(reverse, NOW + 5, observed_generation=2).status["conditions"][5:]
    assert [entry["type"] for entry in past] == ["MissingPolicy", "UnknownTopic"]


def test_condition_unmanaged_consumers_that_ended_does_not_hide_their_return() -> None:
    shared = {**planned(unmanaged_consumers=UNMANAGED_CONSUMERS).status, "generation": DOCUMENT.generation}
    alone = planned(shared, NOW + 5)
    assert condition(alone, "UnmanagedConsumers")["status"] == "False"
    new_plan = planned(alone.status, NOW + 9, unmanaged_consumers=UNMANAGED_CONSUMERS)
    assert new_plan.document
    assert next(line["reason"] for line in new_plan.journal_records if line["kind"] == "plan") == "UnmanagedConsumers"


def test_condition_stalled_is_true_when_a_problem_that_only_a_user_can_fix_lasts() -> None:
    first = planned(problems=(NO_TOPIC,))
    assert condition(first, "Stalled")["status"] == "False"
    reconciling = condition(first, "Reconciling")
    assert (reconciling["status"], reconciling["reason"], reconciling["message"]) == ("True", *NO_TOPIC)
    soon = planned(first.status, NOW + STALL_SECONDS - 0.5, problems=(NO_TOPIC,))
    assert condition(soon, "Stalled")["status"] == "False"
    assert condition(soon, "Reconciling")["status"] == "True"
    assert soon.requeue_after == pytest.approx(0.5), "the group is planned again when the time is over"
    stalled = planned(soon.status, NOW + STALL_SECONDS, problems=(NO_TOPIC,))
    stalled_condition = condition(stalled, "Stalled")
    assert (stalled_condition["status"], stalled_condition["reason"], stalled_condition["message"]) == (
        "True",
        *NO_TOPIC,
    )
    assert condition(stalled, "Reconciling")["status"] == "False"
    assert [event.reason for event in stalled.events] == []
    resolved = planned(stalled.status, NOW + STALL_SECONDS + 1)
    assert condition(resolved, "Stalled")["status"] == "False"


def test_condition_reconciling_has_the_first_problem_that_is_new_and_settled_without_one() -> None:
    missing = Finding(Reason.MISSING_POLICY, "No policy rules")
    assert condition(planned(problems=(NO_TOPIC, missing)), "Reconciling")["reason"] == "UnknownTopic"
    assert condition(planned(), "Reconciling")["reason"] == "Settled"
    first = planned(problems=(NO_TOPIC,))
    stalled = planned(first.status, NOW + STALL_SECONDS, problems=(NO_TOPIC,))
    assert condition(stalled, "Reconciling")["reason"] == "Settled"


def test_reconcile_is_requeued_when_the_next_problem_stalls_the_group() -> None:
    missing = Finding(Reason.MISSING_POLICY, "No policy rules")
    harmless = Finding(Reason.UNSIGNED_MEMBERS, "m1 signs nothing")
    lasting = planned(problems=(NO_TOPIC, harmless))
    with_both = planned(lasting.status, NOW + 40, problems=(missing, NO_TOPIC, harmless))
    later = planned(with_both.status, NOW + 50, problems=(missing, NO_TOPIC, harmless))
    assert later.requeue_after == pytest.approx(10.0)
    stalled = planned(with_both.status, NOW + 85, problems=(missing, NO_TOPIC, harmless))
    assert stalled.requeue_after == pytest.approx(15.0), "the other problem stalls later"
    at_ten = planned(lasting.status, NOW + 10, problems=(missing, NO_TOPIC))
    stalls_now = planned(at_ten.status, NOW + STALL_SECONDS, problems=(missing, NO_TOPIC))
    assert stalls_now.requeue_after == pytest.approx(10.0), "a problem that stalls now is not waited for any more"
    assert planned(lasting.status, NOW + 59, problems=(harmless,)).requeue_after == pytest.approx(20.0)


def test_condition_ready_names_the_problem_that_stops_a_group_without_queues() -> None:
    disabled = Finding(Reason.CONSUMPTION_DISABLED, "Consumption is disabled")
    new_plan = planned(
        document=a_document(begun={}), pods=(), views={"orders": a_view(0)}, problems=(NO_TOPIC, disabled)
    )
    assert condition(new_plan, "Ready")["reason"] == "ConsumptionDisabled"


def test_condition_stalled_is_false_while_a_problem_may_end_by_itself() -> None:
    first = planned(views={})
    assert condition(first, "Reconciling")["status"] == "True"
    later = planned(first.status, NOW + STALL_SECONDS, views={})
    assert condition(later, "BrokerMetadataUnavailable")["status"] == "True"
    assert condition(later, "Stalled")["status"] == "False"
    assert condition(later, "Reconciling")["status"] == "False"


def test_condition_of_a_problem_that_a_plan_did_not_check_stays_true() -> None:
    first = planned(problems=(NO_TOPIC,))
    rejected = Finding(Reason.WRITE_REJECTED, "The ConfigMap is refused")
    partial = planned(first.status, NOW + 5, spec=None, problems=(rejected,))
    assert condition(partial, "UnknownTopic") == condition(first, "UnknownTopic")
    assert condition(partial, "WriteRejected")["status"] == "True"
    assert condition(partial, "Degraded")["message"] == "The ConfigMap is refused; No topic orders"
    assert [event.reason for event in partial.events] == [Reason.WRITE_REJECTED]
    stalled = planned(partial.status, NOW + STALL_SECONDS, spec=None, problems=(rejected,))
    assert condition(stalled, "Stalled")["reason"] == "UnknownTopic"
    repeated = planned(partial.status, NOW + 6, spec=None, problems=(NO_TOPIC,))
    assert condition(repeated, "Degraded")["message"] == "No topic orders; The ConfigMap is refused", "each only once"
    resolved = planned(planned(first.status, NOW + 5).status, NOW + 6, spec=None, problems=(rejected,))
    assert condition(resolved, "UnknownTopic")["status"] == "False", "the problem was resolved earlier"
    complete = planned(partial.status, NOW + 9, problems=(NO_TOPIC,))
    assert condition(complete, "WriteRejected")["status"] == "False"
    assert [event.reason for event in complete.events] == []


JOINING = a_pod("m3", ready=False, stable_for=1.0, age=1.0)
JOINED = a_pod("m3", a_report("m3", 5))
SETTINGS = a_report("m1", 5, Q[:3], settings="other")
NEW_GROUP: dict[str, Any] = {"document": a_document(begun={}), "pods": ()}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"document": a_document(taken={Q[0]: ("m1", "m2")}, members={"m1": Q[1:3], "m2": Q[3:]})}, "HandoverInFlight"),
        ({"pods": (*obeying(DOCUMENT), JOINED, replace(JOINING, name="m4", uid="m4"))}, "MembersStillJoining"),
        (NEW_GROUP, "MembersStillJoining"),
        (
            {"pods": obeying(DOCUMENT, m1={"report": SETTINGS}), "settings": "{}", "desired_settings": "{}"},
            "SettingsNotObeyed",
        ),
        (
            {"document": replace(DOCUMENT, issued_at=format_time(NOW - 1)), "pods": (*obeying(DOCUMENT), JOINED)}
            | {"policy": a_policy(triggers={"debounce": "10s"})},
            "Debounce",
        ),
    ],
)
def test_condition_reconciling_follows_progressing(changed: dict[str, Any], reason: str) -> None:
    new_plan = planned(**changed)
    assert (condition(new_plan, "Progressing")["status"], condition(new_plan, "Progressing")["reason"]) == (
        "True",
        reason,
    )
    assert (condition(new_plan, "Reconciling")["status"], condition(new_plan, "Reconciling")["reason"]) == (
        "True",
        reason,
    )


@pytest.mark.parametrize(
    ("late_members", "sentence"),
    [(("m1",), "m1 does not use"), (("m1", "m2"), "m1, m2 do not use")],
)
def test_condition_progressing_names_members_with_old_settings(late_members: tuple[str, ...], sentence: str) -> None:
    shares = {"m1": Q[:3], "m2": Q[3:6]}
    reports = {name: {"report": a_report(name, 5, shares[name], settings="other")} for name in late_members}
    new_plan = planned(pods=obeying(DOCUMENT, **reports), settings="{}", desired_settings="{}")
    assert condition(new_plan, "Progressing")["message"] == f"{sentence} the group's new settings yet"


@pytest.mark.parametrize(("waited", "is_starting"), [(59.5, True), (60.0, False)])
def test_condition_of_a_new_group_waits_a_minute_for_its_first_member(
    waited: float,
    is_starting: bool,  # noqa: FBT001 - a row
) -> None:
    first = planned(**NEW_GROUP)
    assert condition(first, "Ready")["message"] == "6 queues wait for the group's first member"
    later = planned(first.status, NOW + waited, **NEW_GROUP)
    reason = "MembersStillJoining" if is_starting else "NoMembers"
    assert (condition(later, "Ready")["reason"], condition(later, "Progressing")["reason"]) == (reason, reason)
    assert condition(later, "Progressing")["status"] == str(is_starting)


def test_condition_reconciling_is_true_while_the_deployment_is_rolled_out() -> None:
    reconciling = condition(planned(rolling_out=True), "Reconciling")
    assert (reconciling["status"], reconciling["reason"]) == ("True", "RollingOut")
    assert reconciling["message"] == "The group's Deployment is being rolled out"
    stalled: dict[str, Any] = {"status": planned(problems=(NO_TOPIC,)).status, "now": NOW + STALL_SECONDS}
    assert condition(planned(**stalled, problems=(NO_TOPIC,), rolling_out=True), "Reconciling")["status"] == "False"


def test_condition_reconciling_is_true_from_a_new_template_until_its_deployment_was_applied() -> None:
    initial = planned(observed_generation=1)
    assert condition(initial, "Reconciling")["status"] == "False"
    unapplied = planned(initial.status, observed_generation=2, rolling_out=None)
    assert condition(unapplied, "Reconciling")["reason"] == "RollingOut"
    assert (
        condition(planned(unapplied.status, observed_generation=2, rolling_out=None), "Reconciling")["reason"]
        == "RollingOut"
    )
    applied = planned(unapplied.status, observed_generation=2, rolling_out=False)
    assert condition(applied, "Reconciling")["status"] == "False"
    by_new_leader = planned(applied.status, observed_generation=2, rolling_out=None)
    assert by_new_leader.status == applied.status, "a new leader has applied nothing yet, and writes no status for that"


def test_condition_reconciling_is_false_while_moves_wait_for_the_budget() -> None:
    document = a_document(members={"m1": Q[:6], "m2": ()}, spent=((format_time(NOW - 1), 1),))
    policy = a_policy(budget={"maxMoves": 1, "per": "1h"})
    new_plan = planned(document=document, pods=obeying(document), policy=policy)
    assert condition(new_plan, "Progressing")["reason"] == "BudgetSpent"
    assert condition(new_plan, "Progressing")["status"] == "True"
    assert condition(new_plan, "Reconciling")["status"] == "False"


@pytest.mark.parametrize("state", ["owned", "releasing", "everyone"])
def test_condition_ready_is_true_once_a_pause_is_complete(state: str) -> None:
    documents = {
        "owned": DOCUMENT,
        "releasing": a_document(members={"m1": (), "m2": ()}, taken={Q[0]: ("m1", None)}),
        "everyone": a_document(members={"m1": (), "m2": ()}, everyone=tuple(Q)),
    }
    spec = a_spec(paused=True, messageModel="Broadcasting" if state == "everyone" else "Clustering")
    incomplete = planned(document=documents[state], pods=obeying(DOCUMENT), spec=spec)
    assert condition(incomplete, "Ready")["status"] == "False"
    released = a_document(members={"m1": (), "m2": ()}, everyone=() if state == "everyone" else None)
    complete = planned(document=released, pods=obeying(released), spec=spec)
    ready = condition(complete, "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "GroupPaused")
    assert condition(complete, "Reconciling")["status"] == "False"


def test_journal_has_the_end_of_a_problem_and_no_derived_condition() -> None:
    first = planned(problems=(NO_TOPIC,), spec=a_spec())
    later = planned(first.status, NOW + STALL_SECONDS, problems=(NO_TOPIC,))
    assert condition(later, "Stalled")["status"] == "True"
    assert later.journal_records == ()
    resolved = planned(later.status, NOW + STALL_SECONDS + 1)
    assert [(line["condition"], line["status"]) for line in resolved.journal_records] == [
        ("Degraded", "False"),
        ("UnknownTopic", "False"),
    ]
