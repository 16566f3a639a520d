"""The conditions of a group that outlive a problem, and those that GitOps tools read."""

from collections.abc import Mapping
from typing import Any

import pytest

from builders import NOW, a_document, a_policy, a_snapshot, a_spec, obeying
from rota.model import Finding, Queue, Reason, ReasonKind, reasons_of_kind
from rota.planner import Plan, plan
from rota.planner.status.conditions import MAX_PAST_PROBLEMS, STALL_SECONDS
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(6)]
DOCUMENT = a_document(members={"m1": Q[:3], "m2": Q[3:6]})
UNKNOWN = Finding(Reason.UNKNOWN_TOPIC, "No topic orders")
FOREIGNERS = ("10.0.0.9@1",)


def planned(status: Mapping[str, Any] | None = None, now: float = NOW, **changed: Any) -> Plan:
    snapshot = {"document": DOCUMENT, "pods": obeying(DOCUMENT), "policy": a_policy(), **changed}
    return plan(a_snapshot(status=status or {}, **snapshot), now)


def condition(found: Plan, kind: str) -> dict[str, Any]:
    return next((it for it in found.status["conditions"] if it["type"] == kind), {})


def test_condition_of_a_problem_that_is_over_stays_with_status_false() -> None:
    first = planned(problems=(UNKNOWN,))
    assert condition(first, "UnknownTopic")["status"] == "True"
    over = planned(first.status, NOW + 5)
    assert condition(over, "UnknownTopic") == {
        "type": "UnknownTopic",
        "status": "False",
        "reason": "Settled",
        "message": "Resolved. The last message was: No topic orders",
        "lastTransitionTime": format_time(NOW + 5),
        "observedGeneration": over.status["observedGeneration"],
    }
    assert [event.reason for event in over.events] == []
    later = planned(over.status, NOW + 60)
    assert later.status == over.status, "an unchanged status is not written"


def test_condition_of_a_problem_that_returns_is_true_again_and_gives_an_event() -> None:
    over = planned(planned(problems=(UNKNOWN,)).status, NOW + 5)
    again = planned(over.status, NOW + 9, problems=(Finding(Reason.UNKNOWN_TOPIC, "No topic orders again"),))
    found = condition(again, "UnknownTopic")
    assert (found["status"], found["message"]) == ("True", "No topic orders again")
    assert found["lastTransitionTime"] == format_time(NOW + 9)
    assert [(event.reason, event.warning) for event in again.events] == [(Reason.UNKNOWN_TOPIC, True)]


def test_condition_list_keeps_the_latest_past_problems_only() -> None:
    status: Mapping[str, Any] = {}
    kinds = reasons_of_kind(ReasonKind.STALLS)[: MAX_PAST_PROBLEMS + 2]
    for number, reason in enumerate(kinds):
        status = planned(status, NOW + number, problems=(Finding(reason, "wrong"),)).status
    status = planned(status, NOW + 100).status
    assert [it["type"] for it in status["conditions"][5:]] == [str(reason) for reason in reversed(kinds)][
        :MAX_PAST_PROBLEMS
    ]


def test_condition_unmanaged_consumers_that_is_over_does_not_hide_that_they_come_again() -> None:
    shared = {**planned(unmanaged_consumers=FOREIGNERS).status, "generation": DOCUMENT.generation}
    alone = planned(shared, NOW + 5)
    assert condition(alone, "UnmanagedConsumers")["status"] == "False"
    found = planned(alone.status, NOW + 9, unmanaged_consumers=FOREIGNERS)
    assert found.document
    assert next(line["reason"] for line in found.journal_records if line["kind"] == "plan") == "UnmanagedConsumers"


def test_condition_stalled_is_true_when_a_problem_that_only_a_user_can_mend_lasts() -> None:
    first = planned(problems=(UNKNOWN,))
    assert condition(first, "Stalled")["status"] == "False"
    reconciling = condition(first, "Reconciling")
    assert (reconciling["status"], reconciling["reason"], reconciling["message"]) == ("True", *UNKNOWN)
    soon = planned(first.status, NOW + STALL_SECONDS - 0.5, problems=(UNKNOWN,))
    assert condition(soon, "Stalled")["status"] == "False"
    assert condition(soon, "Reconciling")["status"] == "True"
    assert soon.requeue_after == pytest.approx(0.5), "the group is planned again when the time is over"
    stalled = planned(soon.status, NOW + STALL_SECONDS, problems=(UNKNOWN,))
    found = condition(stalled, "Stalled")
    assert (found["status"], found["reason"], found["message"]) == ("True", *UNKNOWN)
    assert condition(stalled, "Reconciling")["status"] == "False"
    assert [event.reason for event in stalled.events] == []
    mended = planned(stalled.status, NOW + STALL_SECONDS + 1)
    assert condition(mended, "Stalled")["status"] == "False"


def test_condition_stalled_is_false_while_a_problem_may_end_by_itself() -> None:
    first = planned(views={})
    assert condition(first, "Reconciling")["status"] == "True"
    later = planned(first.status, NOW + 10 * STALL_SECONDS, views={})
    assert condition(later, "BrokerMetadataUnavailable")["status"] == "True"
    assert condition(later, "Stalled")["status"] == "False"
    assert condition(later, "Reconciling")["status"] == "False"


def test_condition_of_a_problem_that_a_plan_did_not_look_for_is_not_over() -> None:
    first = planned(problems=(UNKNOWN,))
    refused = Finding(Reason.WRITE_REJECTED, "The ConfigMap is refused")
    partial = planned(first.status, NOW + 5, spec=None, problems=(refused,))
    assert condition(partial, "UnknownTopic") == condition(first, "UnknownTopic")
    assert condition(partial, "WriteRejected")["status"] == "True"
    assert condition(partial, "Degraded")["message"] == "The ConfigMap is refused; No topic orders"
    assert [event.reason for event in partial.events] == [Reason.WRITE_REJECTED]
    stalled = planned(partial.status, NOW + STALL_SECONDS, spec=None, problems=(refused,))
    assert condition(stalled, "Stalled")["reason"] == "UnknownTopic"
    whole = planned(partial.status, NOW + 9, problems=(UNKNOWN,))
    assert condition(whole, "WriteRejected")["status"] == "False"
    assert [event.reason for event in whole.events] == []


def test_condition_reconciling_follows_progressing() -> None:
    found = planned(document=None, pods=obeying(DOCUMENT, m1={"report": None}, m2={"report": None}))
    assert condition(found, "Progressing")["status"] == "True"
    reconciling = condition(found, "Reconciling")
    assert reconciling["status"] == "True"
    assert reconciling["reason"] == condition(found, "Progressing")["reason"]


def test_condition_reconciling_is_true_while_the_deployment_is_rolled_out() -> None:
    found = condition(planned(rolling_out=True), "Reconciling")
    assert (found["status"], found["reason"]) == ("True", "RollingOut")
    assert found["message"] == "The group's Deployment is being rolled out"
    stalled: dict[str, Any] = {"status": planned(problems=(UNKNOWN,)).status, "now": NOW + STALL_SECONDS}
    assert condition(planned(**stalled, problems=(UNKNOWN,), rolling_out=True), "Reconciling")["status"] == "False"


def test_condition_reconciling_is_true_from_a_new_template_until_its_deployment_was_applied() -> None:
    before = planned(observed_generation=1)
    assert condition(before, "Reconciling")["status"] == "False"
    unapplied = planned(before.status, observed_generation=2, rolling_out=None)
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
    found = planned(document=document, pods=obeying(document), policy=policy)
    assert condition(found, "Progressing")["reason"] == "BudgetSpent"
    assert condition(found, "Progressing")["status"] == "True"
    assert condition(found, "Reconciling")["status"] == "False"


@pytest.mark.parametrize("state", ["owned", "releasing", "everyone"])
def test_condition_ready_is_true_once_a_pause_is_complete(state: str) -> None:
    documents = {
        "owned": DOCUMENT,
        "releasing": a_document(members={"m1": (), "m2": ()}, taken={Q[0]: ("m1", None)}),
        "everyone": a_document(members={"m1": (), "m2": ()}, everyone=tuple(Q)),
    }
    spec = a_spec(paused=True, messageModel="Broadcasting" if state == "everyone" else "Clustering")
    before = planned(document=documents[state], pods=obeying(DOCUMENT), spec=spec)
    assert condition(before, "Ready")["status"] == "False"
    complete = a_document(members={"m1": (), "m2": ()}, everyone=() if state == "everyone" else None)
    after = planned(document=complete, pods=obeying(complete), spec=spec)
    found = condition(after, "Ready")
    assert (found["status"], found["reason"]) == ("True", "GroupPaused")
    assert condition(after, "Reconciling")["status"] == "False"


def test_journal_has_the_end_of_a_problem_and_no_derived_condition() -> None:
    first = planned(problems=(UNKNOWN,), spec=a_spec())
    later = planned(first.status, NOW + STALL_SECONDS, problems=(UNKNOWN,))
    assert condition(later, "Stalled")["status"] == "True"
    assert later.journal_records == ()
    over = planned(later.status, NOW + STALL_SECONDS + 1)
    assert [(line["condition"], line["status"]) for line in over.journal_records] == [
        ("Degraded", "False"),
        ("UnknownTopic", "False"),
    ]
