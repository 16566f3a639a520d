"""Tests the problems in members' reports as conditions of the group."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from builders import LONG, NOW, a_document, a_pod, a_snapshot, a_view, obeying
from rota.model import Finding, Queue, Reason
from rota.planner import DecodedReport, Plan, PodSnapshot, plan
from rota.planner.members.member_states import MemberState
from rota.planner.situation import Situation
from rota.planner.status.problems import FIRST_MEMBER_SECONDS, start_seconds_left
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(6)]
DOCUMENT = a_document(members={"m1": Q[:3], "m2": Q[3:6], "m3": (), "m4": (), "m5": ()})
NO_LISTENER = "Nothing listens on port 8080"


def pods(**troubles: dict[str, str]) -> tuple[PodSnapshot, ...]:
    """Return the obeying members; `troubles`: the reported problems of each member."""
    members = []
    for pod in obeying(DOCUMENT):
        assert pod.report is not None
        report = structs.replace(pod.report, troubles=troubles.get(pod.name, {}))
        members.append(replace(pod, decoded_report=DecodedReport(report)))
    return tuple(members)


def planned(*members: PodSnapshot, **changed: Any) -> Plan:
    return plan(a_snapshot(document=DOCUMENT, pods=members, **changed), NOW)


def troubles(new_plan: Plan) -> list[Finding]:
    """Return the problems of the plan, without idle members."""
    return [finding for finding in new_plan.problems if finding.reason is not Reason.IDLE_MEMBERS]


def test_condition_reports_a_members_problem_with_its_message_and_name() -> None:
    new_plan = planned(*pods(m1={"AppNotListening": NO_LISTENER}))
    assert troubles(new_plan) == [Finding(Reason.APP_NOT_LISTENING, f"m1: {NO_LISTENER}")]
    conditions = {
        condition["type"]: (condition["status"], condition["message"]) for condition in new_plan.status["conditions"]
    }
    assert conditions["AppNotListening"] == ("True", f"m1: {NO_LISTENER}")
    assert conditions["Degraded"] == ("True", f"m1: {NO_LISTENER}")
    assert conditions["Ready"][0] == "True"
    assert [(event.reason, event.warning) for event in new_plan.events if event.warning] == [
        (Reason.APP_NOT_LISTENING, True)
    ]


def test_condition_has_the_present_reason_for_a_problem_of_an_earlier_sidecar() -> None:
    reasons = {
        "StateNotWritten": Reason.STATE_WRITE_FAILED,
        "PullNotAnswered": Reason.PULL_PORT_UNAVAILABLE,
        "MessageNotTakenBack": Reason.RETRY_REJECTED,
        "QueuesNotTakenUp": Reason.QUEUE_START_FAILED,
        "SettingsNotRead": Reason.UNSUPPORTED_SETTINGS,
    }
    findings = troubles(planned(*pods(m1=dict.fromkeys(reasons, "As the sidecar says"))))
    assert findings == [Finding(reason, "m1: As the sidecar says") for reason in reasons.values()]


def test_condition_names_missing_metadata_before_the_problems_of_members() -> None:
    new_plan = planned(*pods(m1={"AppNotListening": NO_LISTENER}), views={"orders": None})
    reasons = [finding.reason for finding in troubles(new_plan)]
    assert reasons == [Reason.BROKER_METADATA_UNAVAILABLE, Reason.APP_NOT_LISTENING]
    degraded = next(condition for condition in new_plan.status["conditions"] if condition["type"] == "Degraded")
    assert degraded["reason"] == "BrokerMetadataUnavailable"


def test_condition_reports_a_problem_of_several_members_once_with_their_names() -> None:
    member_problems = {"AppNotListening": NO_LISTENER}
    assert troubles(planned(*pods(m1=member_problems, m2={"AppNotListening": "another sentence"}))) == [
        Finding(Reason.APP_NOT_LISTENING, f"m1, m2: {NO_LISTENER}")
    ]
    assert troubles(
        planned(
            *pods(m1=member_problems, m2=member_problems, m3=member_problems, m4=member_problems, m5=member_problems)
        )
    ) == [Finding(Reason.APP_NOT_LISTENING, f"m1, m2, m3 and 2 more: {NO_LISTENER}")]


def test_condition_is_separate_for_each_problem_reason() -> None:
    findings = troubles(
        planned(*pods(m1={"AppNotListening": NO_LISTENER, "StateWriteFailed": "Full"}, m2={"StateWriteFailed": "No"}))
    )
    assert findings == [
        Finding(Reason.APP_NOT_LISTENING, f"m1: {NO_LISTENER}"),
        Finding(Reason.STATE_WRITE_FAILED, "m1, m2: Full"),
    ]


def test_condition_member_problem_has_the_message_of_a_problem_that_only_a_later_sidecar_knows() -> None:
    new_plan = planned(*pods(m1={"NotInvented": "It is wrong", "AppNotListening": NO_LISTENER}))
    assert troubles(new_plan) == [
        Finding(Reason.MEMBER_PROBLEM, "m1: It is wrong"),
        Finding(Reason.APP_NOT_LISTENING, f"m1: {NO_LISTENER}"),
    ]


def test_condition_known_to_the_operator_is_not_repeated_for_members() -> None:
    operator_finding = Finding(Reason.UNKNOWN_TOPIC, "There is no topic orders")
    member_problems = {"UnknownTopic": "topic orders is not there", "AppNotListening": NO_LISTENER}
    new_plan = planned(*pods(m1=member_problems), problems=(operator_finding,))
    assert troubles(new_plan) == [operator_finding, Finding(Reason.APP_NOT_LISTENING, f"m1: {NO_LISTENER}")]
    assert troubles(planned(*pods(m1=member_problems)))[0] == Finding(
        Reason.UNKNOWN_TOPIC, "m1: topic orders is not there"
    )


def test_condition_omits_problems_of_members_that_ended_or_never_reported() -> None:
    m1, m2, *other_pods = pods(m1={"AppNotListening": NO_LISTENER}, m2={"StateWriteFailed": "Full"})
    new_plan = planned(replace(m1, ended=True, ready=False), replace(m2, decoded_report=None), *other_pods)
    assert [
        finding
        for finding in new_plan.problems
        if finding.reason in {Reason.APP_NOT_LISTENING, Reason.STATE_WRITE_FAILED}
    ] == []


def test_condition_of_a_member_problem_is_false_when_the_member_recovers() -> None:
    first = planned(*pods(m1={"AppNotListening": NO_LISTENER}))
    recovered = planned(*pods(), status=first.status)
    assert troubles(recovered) == []
    conditions = {condition["type"]: condition["status"] for condition in recovered.status["conditions"]}
    assert conditions["AppNotListening"] == "False"


def settings_problem(*late_members: str) -> str:
    """Return the sentence about members that have used other settings for a long time."""
    members = [
        replace(pod, decoded_report=DecodedReport(structs.replace(pod.report, settings="other")))
        if pod.report and pod.name in late_members
        else pod
        for pod in pods()
    ]
    new_plan = planned(*members, settings="{}", desired_settings="{}", settings_age=LONG)
    return next(finding.message for finding in new_plan.problems if finding.reason is Reason.SETTINGS_NOT_OBEYED)


def test_condition_sentences_agree_with_the_number_of_members() -> None:
    assert settings_problem("m1") == "m1 still uses old settings, long after the change"
    assert settings_problem("m1", "m2") == "m1, m2 still use old settings, long after the change"
    document = a_document(members={"m1": Q[:1], "m2": Q[1:2], "m3": (), "m4": ()})
    new_plan = plan(a_snapshot(document=document, pods=obeying(document), views={"orders": a_view(2)}), NOW)
    [idle] = new_plan.problems
    assert idle.message == "4 members share 2 queues: 2 of them are idle"


def no_members(*members: PodSnapshot, **changed: Any) -> str:
    return next(
        finding.message for finding in planned(*members, **changed).problems if finding.reason is Reason.NO_MEMBERS
    )


def without_member(**changed: Any) -> tuple[PodSnapshot, ...]:
    """Return m1 and m2, unready, so that they do not count as members."""
    return tuple(replace(pod, ready=False, **changed) for pod in pods()[:2])


def test_condition_no_members_names_pods_that_are_not_ready_or_cannot_reach_a_broker() -> None:
    unready = without_member()
    deleted_uids = frozenset({"uid-m2", "uid-m3", "uid-m4", "uid-m5"})
    sentence = "No member can consume 6 queues: {}; the present assignment stays in force"
    assert no_members(unready[0], deleted_uids=deleted_uids) == sentence.format("m1 is not ready")
    assert no_members(*unready, deleted_uids=deleted_uids - {"uid-m2"}) == sentence.format("m1, m2 are not ready")
    assert no_members(replace(unready[0], decoded_report=None), deleted_uids=deleted_uids) == sentence.format(
        "m1 is not ready"
    )
    assert unready[0].report
    unreached = structs.replace(unready[0].report, brokers={"c": False, "b": False, "a": True, "d": False})
    cannot_reach = replace(unready[0], decoded_report=DecodedReport(unreached))
    assert no_members(cannot_reach, deleted_uids=deleted_uids) == sentence.format("m1 cannot reach b, c, d")


@pytest.mark.parametrize(
    ("obstacles", "sentence"),
    [
        ({"p1": ""}, ""),
        ({"p1": "ErrImagePull"}, ": p1 does not run: ErrImagePull"),
        ({"p1": "ErrImagePull", "p2": "ErrImagePull", "p3": ""}, ": p1, p2 do not run: ErrImagePull"),
        ({"p1": "", "p2": "ErrImagePull", "p3": "Unschedulable"}, ": p2 does not run: ErrImagePull"),
        ({"ended": "ErrImagePull", "p2": "Unschedulable"}, ": p2 does not run: Unschedulable"),
    ],
)
def test_condition_of_a_starting_group_names_the_reason_why_its_pods_do_not_run(
    obstacles: dict[str, str], sentence: str
) -> None:
    starting = [
        a_pod(name, started=False, ready=False, obstacle=obstacle, ended=name == "ended")
        for name, obstacle in obstacles.items()
    ]
    new_plan = plan(a_snapshot(document=a_document(begun={}), pods=tuple(starting)), NOW)
    [ready] = [condition for condition in new_plan.status["conditions"] if condition["type"] == "Ready"]
    assert ready["message"] == f"6 queues wait for the group's first member{sentence}"


@pytest.mark.parametrize(
    ("kind", "status", "is_over"), [("Ready", "False", True), ("Ready", "True", False), ("Progressing", "False", False)]
)
def test_condition_no_members_waits_for_a_new_group_since_it_was_not_ready(
    kind: str,
    status: str,
    is_over: bool,  # noqa: FBT001 - a row
) -> None:
    condition = {"type": kind, "status": status, "reason": "BrokerMetadataUnavailable", "message": ""}
    since = {"lastTransitionTime": format_time(NOW - FIRST_MEMBER_SECONDS - 1)}
    changed: dict[str, Any] = {"document": a_document(begun={}), "status": {"conditions": [condition | since]}}
    reasons = {finding.reason for finding in plan(a_snapshot(**changed), NOW).problems}
    assert (Reason.NO_MEMBERS in reasons) is is_over


def test_condition_no_members_does_not_wait_if_unmanaged_consumers_consume() -> None:
    new_plan = plan(a_snapshot(document=a_document(begun={}), unmanaged_consumers=("10.0.0.9@1",)), NOW)
    assert Reason.NO_MEMBERS in {finding.reason for finding in new_plan.problems}


def test_condition_of_a_new_group_waits_a_full_minute_for_its_first_member() -> None:
    def seconds_left(*conditions: dict[str, str], **changed: Any) -> float:
        snapshot = a_snapshot(status={"conditions": list(conditions)}, document=a_document(begun={}), **changed)
        states = dict.fromkeys(snapshot.pods_by_name, MemberState.JOINING)
        return start_seconds_left(Situation(snapshot, states, snapshot.document or DOCUMENT, NOW))

    since = {"type": "Ready", "lastTransitionTime": format_time(NOW - 45.0)}
    assert seconds_left() == 60.0
    assert seconds_left(since | {"status": "True"}) == 60.0
    assert seconds_left(since | {"status": "False"}) == 15.0
    assert seconds_left(since | {"status": "False", "lastTransitionTime": format_time(NOW - 61.0)}) == 0.0
    assert seconds_left(unmanaged_consumers=("10.0.0.1@old",)) == 0.0


def test_condition_ignores_ended_members_but_not_the_members_after_them() -> None:
    first, *others = pods(m1={"AppNotListening": NO_LISTENER}, m2={"AppNotListening": NO_LISTENER})
    new_plan = planned(replace(first, ended=True, ready=False), *others)
    [problem] = [finding for finding in new_plan.problems if finding.reason is Reason.APP_NOT_LISTENING]
    assert problem.message == f"m2: {NO_LISTENER}"
