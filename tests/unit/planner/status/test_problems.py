"""What members say keeps them from working, told to people as the group's problems."""

from dataclasses import replace
from typing import Any

from msgspec import structs

from builders import NOW, a_document, a_snapshot, obeying
from rota.model import Finding, Queue, Reason
from rota.planner import DecodedReport, Plan, Pod, plan

Q = [Queue("orders", "a", number) for number in range(6)]
DOCUMENT = a_document(members={"m1": Q[:3], "m2": Q[3:6], "m3": (), "m4": (), "m5": ()})
DEAF = "Nothing listens on port 8080"


def pods(**troubles: dict[str, str]) -> tuple[Pod, ...]:
    """Return the members that obey, some of them with troubles."""
    found = []
    for pod in obeying(DOCUMENT):
        assert pod.report is not None
        report = structs.replace(pod.report, troubles=troubles.get(pod.name, {}))
        found.append(replace(pod, decoded_report=DecodedReport(report)))
    return tuple(found)


def planned(*members: Pod, **world: Any) -> Plan:
    return plan(a_snapshot(document=DOCUMENT, pods=members, **world), NOW)


def troubles(found: Plan) -> list[Finding]:
    """Return what is wrong besides that some own nothing."""
    return [it for it in found.problems if it.reason is not Reason.IDLE_MEMBERS]


def test_condition_reports_a_members_problem_with_its_message_and_name() -> None:
    found = planned(*pods(m1={"AppNotListening": DEAF}))
    assert troubles(found) == [Finding(Reason.APP_NOT_LISTENING, f"m1: {DEAF}")]
    conditions = {it["type"]: (it["status"], it["message"]) for it in found.status["conditions"]}
    assert conditions["AppNotListening"] == ("True", f"m1: {DEAF}")
    assert conditions["Degraded"] == ("True", f"m1: {DEAF}")
    assert conditions["Ready"][0] == "True"
    assert [(it.reason, it.warning) for it in found.events if it.warning] == [(Reason.APP_NOT_LISTENING, True)]


def test_condition_names_a_problem_as_today_if_the_sidecar_is_of_an_earlier_version() -> None:
    former = {"StateNotWritten": "The disk is full", "PullNotAnswered": "The port is in use"}
    assert troubles(planned(*pods(m1=former))) == [
        Finding(Reason.STATE_WRITE_FAILED, "m1: The disk is full"),
        Finding(Reason.PULL_PORT_UNAVAILABLE, "m1: The port is in use"),
    ]


def test_condition_reports_a_problem_of_several_members_once_with_their_names() -> None:
    said = {"AppNotListening": DEAF}
    assert troubles(planned(*pods(m1=said, m2={"AppNotListening": "another sentence"}))) == [
        Finding(Reason.APP_NOT_LISTENING, f"m1, m2: {DEAF}")
    ]
    assert troubles(planned(*pods(m1=said, m2=said, m3=said, m4=said, m5=said))) == [
        Finding(Reason.APP_NOT_LISTENING, f"m1, m2, m3 and 2 more: {DEAF}")
    ]


def test_condition_is_separate_for_each_problem_reason() -> None:
    found = troubles(
        planned(*pods(m1={"AppNotListening": DEAF, "StateWriteFailed": "Full"}, m2={"StateWriteFailed": "No"}))
    )
    assert found == [
        Finding(Reason.APP_NOT_LISTENING, f"m1: {DEAF}"),
        Finding(Reason.STATE_WRITE_FAILED, "m1, m2: Full"),
    ]


def test_condition_member_problem_has_the_message_of_a_problem_that_only_a_later_sidecar_knows() -> None:
    found = planned(*pods(m1={"NotInvented": "It is wrong", "AppNotListening": DEAF}))
    assert troubles(found) == [
        Finding(Reason.MEMBER_PROBLEM, "m1: It is wrong"),
        Finding(Reason.APP_NOT_LISTENING, f"m1: {DEAF}"),
    ]


def test_condition_known_to_the_operator_is_not_repeated_for_members() -> None:
    ours = Finding(Reason.UNKNOWN_TOPIC, "There is no topic orders")
    said = {"UnknownTopic": "topic orders is not there", "AppNotListening": DEAF}
    found = planned(*pods(m1=said), problems=(ours,))
    assert troubles(found) == [ours, Finding(Reason.APP_NOT_LISTENING, f"m1: {DEAF}")]
    assert troubles(planned(*pods(m1=said)))[0] == Finding(Reason.UNKNOWN_TOPIC, "m1: topic orders is not there")


def test_condition_omits_problems_of_members_that_ended_or_never_reported() -> None:
    m1, m2, *rest = pods(m1={"AppNotListening": DEAF}, m2={"StateWriteFailed": "Full"})
    found = planned(replace(m1, ended=True, ready=False), replace(m2, decoded_report=None), *rest)
    assert [it for it in found.problems if it.reason in {Reason.APP_NOT_LISTENING, Reason.STATE_WRITE_FAILED}] == []


def test_condition_of_a_member_problem_is_false_when_the_member_recovers() -> None:
    first = planned(*pods(m1={"AppNotListening": DEAF}))
    after = planned(*pods(), status=first.status)
    assert troubles(after) == []
    conditions = {it["type"]: it["status"] for it in after.status["conditions"]}
    assert conditions["AppNotListening"] == "False"
