"""What members say keeps them from working, told to people as the group's problems."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from builders import LONG, NOW, a_document, a_pod, a_snapshot, a_view, obeying
from rota.model import Finding, Queue, Reason
from rota.planner import DecodedReport, Plan, PodSnapshot, plan
from rota.planner.status.problems import FIRST_MEMBER_SECONDS
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(6)]
DOCUMENT = a_document(members={"m1": Q[:3], "m2": Q[3:6], "m3": (), "m4": (), "m5": ()})
DEAF = "Nothing listens on port 8080"


def pods(**troubles: dict[str, str]) -> tuple[PodSnapshot, ...]:
    """Return the members that obey, some of them with troubles."""
    found = []
    for pod in obeying(DOCUMENT):
        assert pod.report is not None
        report = structs.replace(pod.report, troubles=troubles.get(pod.name, {}))
        found.append(replace(pod, decoded_report=DecodedReport(report)))
    return tuple(found)


def planned(*members: PodSnapshot, **world: Any) -> Plan:
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
    former = {
        "StateNotWritten": Reason.STATE_WRITE_FAILED,
        "PullNotAnswered": Reason.PULL_PORT_UNAVAILABLE,
        "MessageNotTakenBack": Reason.RETRY_REJECTED,
        "QueuesNotTakenUp": Reason.QUEUE_START_FAILED,
        "SettingsNotRead": Reason.UNSUPPORTED_SETTINGS,
    }
    found = troubles(planned(*pods(m1=dict.fromkeys(former, "As the sidecar says"))))
    assert found == [Finding(reason, "m1: As the sidecar says") for reason in former.values()]


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


def settings_problem(*late: str) -> str:
    """Return the sentence about members that have used other settings for a long time."""
    members = [
        replace(pod, decoded_report=DecodedReport(structs.replace(pod.report, settings="other")))
        if pod.report and pod.name in late
        else pod
        for pod in pods()
    ]
    found = planned(*members, settings="{}", desired_settings="{}", settings_age=LONG)
    return next(it.message for it in found.problems if it.reason is Reason.SETTINGS_NOT_OBEYED)


def test_condition_sentences_agree_with_the_number_of_members() -> None:
    assert settings_problem("m1") == "m1 still uses old settings, long after the change"
    assert settings_problem("m1", "m2") == "m1, m2 still use old settings, long after the change"
    few = a_document(members={"m1": Q[:1], "m2": Q[1:2], "m3": (), "m4": ()})
    found = plan(a_snapshot(document=few, pods=obeying(few), views={"orders": a_view(2)}), NOW)
    [idle] = found.problems
    assert idle.message == "4 members share 2 queues: 2 of them are idle"


def no_members(*members: PodSnapshot, **world: Any) -> str:
    return next(it.message for it in planned(*members, **world).problems if it.reason is Reason.NO_MEMBERS)


def without_member(**changed: Any) -> tuple[PodSnapshot, ...]:
    """Return m1 and m2, which count as members no more."""
    return tuple(replace(pod, ready=False, **changed) for pod in pods()[:2])


def test_condition_no_members_names_pods_that_are_not_ready_or_cannot_reach_a_broker() -> None:
    out = without_member()
    gone = frozenset({"uid-m2", "uid-m3", "uid-m4", "uid-m5"})
    sentence = "No member can consume 6 queues: {}; the present assignment stays in force"
    assert no_members(out[0], deleted_uids=gone) == sentence.format("m1 is not ready")
    assert no_members(*out, deleted_uids=gone - {"uid-m2"}) == sentence.format("m1, m2 are not ready")
    assert no_members(replace(out[0], decoded_report=None), deleted_uids=gone) == sentence.format("m1 is not ready")
    assert out[0].report
    unreached = structs.replace(out[0].report, brokers={"c": False, "b": False, "a": True, "d": False})
    cannot_reach = replace(out[0], decoded_report=DecodedReport(unreached))
    assert no_members(cannot_reach, deleted_uids=gone) == sentence.format("m1 cannot reach b, c, d")


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
def test_condition_of_a_group_that_starts_has_what_keeps_its_pods_from_running(
    obstacles: dict[str, str], sentence: str
) -> None:
    starting = [
        a_pod(name, started=False, ready=False, obstacle=obstacle, ended=name == "ended")
        for name, obstacle in obstacles.items()
    ]
    found = plan(a_snapshot(document=a_document(begun={}), pods=tuple(starting)), NOW)
    [ready] = [it for it in found.status["conditions"] if it["type"] == "Ready"]
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
    world: dict[str, Any] = {"document": a_document(begun={}), "status": {"conditions": [condition | since]}}
    reasons = {it.reason for it in plan(a_snapshot(**world), NOW).problems}
    assert (Reason.NO_MEMBERS in reasons) is is_over


def test_condition_no_members_does_not_wait_where_unmanaged_consumers_work() -> None:
    found = plan(a_snapshot(document=a_document(begun={}), unmanaged_consumers=("10.0.0.9@1",)), NOW)
    assert Reason.NO_MEMBERS in {it.reason for it in found.problems}
