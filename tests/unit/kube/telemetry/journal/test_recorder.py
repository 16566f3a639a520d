"""Journal records that the planner does not write: owners, obeyed handovers, rebalances, redelivered messages."""

from dataclasses import replace
from typing import Any

import msgspec

from builders import LONG, NOW, a_document, a_pod, a_report, a_snapshot, a_spec, a_view, obeying
from rota import records
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.state.group import Group
from rota.kube.state.rebalance import Rebalance
from rota.kube.state.stored_assignment import StoredAssignment
from rota.kube.telemetry.journal.recorder import JournalRecorder, redelivered_records
from rota.kube.telemetry.rebalances import CompletedRebalance, QueueHandover, RebalanceChange
from rota.model import Holder, Queue
from rota.planner import Plan, Snapshot, owners_record, plan
from rota.redelivery import ReaderProcess, Redelivery, RedeliveryCause
from rota.spec import Budget, PolicySpec, Seconds, parse_policy, policy_body

Q = [Queue("orders", "a", number) for number in range(8)]
DOCUMENT = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, taken={Q[4]: ("m2", "m1"), Q[5]: ("m0", None)})
SNAPSHOT = a_snapshot(
    document=DOCUMENT,
    pods=(*obeying(DOCUMENT), replace(a_pod("m3", a_report("m3", 5, ()), stable_for=LONG), room="east")),
    views={"orders": a_view(7)},
    policy=PolicySpec(strategy="Sticky", budget=Budget(max_moves=5, per=Seconds(1.25))),
)


def decode_line(record: object) -> Any:
    return records.decode_record(msgspec.json.encode(record))


def an_owners_record(snapshot: Snapshot = SNAPSHOT) -> records.OwnersRecord:
    assert snapshot.document
    assert snapshot.spec
    record = decode_line(owners_record(snapshot, plan(snapshot, NOW), snapshot.document, snapshot.spec, NOW))
    assert isinstance(record, records.OwnersRecord)
    return record


def test_journal_owners_record_is_complete() -> None:
    record = an_owners_record()
    assert (record.group, record.generation, record.at.timestamp()) == (SNAPSHOT.group, DOCUMENT.generation, NOW)
    assert {name: member.queues for name, member in record.members.items()} == {
        "m1": {"orders": {"a": "0-1"}},
        "m2": {"orders": {"a": "2-3"}},
        "m3": {},
    }
    assert {name: (member.standing, member.room) for name, member in record.members.items()} == {
        "m1": ("Ready", None),
        "m2": ("Ready", None),
        "m3": ("Ready", "east"),
    }
    assert [(release.holder, release.holder_uid, release.to, release.queues) for release in record.releasing] == [
        ("m2", "uid-m2", "m1", {"orders": {"a": "4"}}),
        ("m0", "uid-m0", None, {"orders": {"a": "5"}}),
    ]
    assert record.unowned == {"orders": {"a": "6"}}


def test_journal_owners_record_has_rules_that_restore_the_policy() -> None:
    assert parse_policy({"spec": an_owners_record().rules}) == SNAPSHOT.policy
    assert policy_body(PolicySpec()) == {"strategy": "Averagely"}
    assert an_owners_record(replace(SNAPSHOT, policy=None)).rules == {}


def test_journal_owners_record_lists_a_deleted_pod_of_the_stored_assignment() -> None:
    snapshot = replace(SNAPSHOT, pods=tuple(pod for pod in SNAPSHOT.pods if pod.name != "m2"))
    member = an_owners_record(snapshot).members["m2"]
    assert (member.standing, member.uid) == ("Ended", "uid-m2")


def test_journal_owners_record_does_not_include_the_namesake_of_a_deleted_pod() -> None:
    namesake = replace(a_pod("m2", a_report("m2", 5, (), uid="new"), uid="new"), room="west")
    snapshot = replace(SNAPSHOT, pods=(*(pod for pod in SNAPSHOT.pods if pod.name != "m2"), namesake))
    record = an_owners_record(snapshot)
    member = record.members["m2"]
    assert (member.standing, member.uid, member.room) == ("Ended", "uid-m2", None)
    assert list(record.members) == ["m1", "m2", "m3"]


def test_journal_owners_record_reports_a_pod_without_a_member_state_as_ended() -> None:
    assert SNAPSHOT.document
    assert SNAPSHOT.spec
    record = decode_line(owners_record(SNAPSHOT, Plan(), SNAPSHOT.document, SNAPSHOT.spec, NOW))
    assert {member.standing for member in record.members.values()} == {"Ended"}


def test_journal_owners_record_has_no_unowned_queue_of_a_broadcasting_group_or_of_unmanaged_consumers() -> None:
    everyone = a_document(members={"m1": (), "m2": ()}, everyone=tuple(Q[:7]))
    spec = a_spec(messageModel="Broadcasting", policyRef={"name": "rules"})
    record = an_owners_record(replace(SNAPSHOT, spec=spec, document=everyone, pods=obeying(everyone)))
    assert (record.unowned, record.policy, record.model) == ({}, "rules", "Broadcasting")
    assert SNAPSHOT.document
    plan_with_unmanaged = Plan(unmanaged_queues=frozenset({Q[6]}))
    views = {**SNAPSHOT.views, "payments": None}
    snapshot = replace(SNAPSHOT, views=views)
    assert snapshot.spec
    record_with_unmanaged = decode_line(
        owners_record(snapshot, plan_with_unmanaged, SNAPSHOT.document, snapshot.spec, NOW)
    )
    assert record_with_unmanaged.unowned == {}, "a topic without metadata has no known queues"


def a_result(generation: int, *, barrier: int = 0) -> ReconcileResult:
    namespace, name = SNAPSHOT.group.split("/")
    group = Group(namespace, name)
    group.resolved_spec = replace(group.resolved_spec, spec=SNAPSHOT.spec, policy=SNAPSHOT.policy)
    group.assignment.stored = StoredAssignment(document=replace(DOCUMENT, generation=generation, barrier=barrier))
    return ReconcileResult(group, Plan(member_states=dict.fromkeys(("m1", "m2", "m3"), "Ready")), 0.0, {})


def record_kinds(
    recorder: JournalRecorder,
    result: ReconcileResult,
    now: float = NOW,
    change: RebalanceChange = RebalanceChange(),  # noqa: B008 - a value
) -> list[str]:
    return [str(record["kind"]) for record in recorder.build_records(result, change, now, lambda: SNAPSHOT)]


def test_journal_owners_record_is_written_first_and_then_hourly() -> None:
    recorder = JournalRecorder()
    assert record_kinds(recorder, a_result(5)) == ["owners"]
    assert record_kinds(recorder, a_result(5)) == record_kinds(recorder, a_result(6)) == []
    assert record_kinds(recorder, a_result(6), NOW + 3600) == ["owners"]


def test_journal_owners_record_is_written_at_a_generation_gap() -> None:
    recorder = JournalRecorder()
    assert record_kinds(recorder, a_result(5)) == ["owners"]
    assert record_kinds(recorder, a_result(7)) == ["owners"]
    assert record_kinds(recorder, a_result(8, barrier=8)) == ["owners"]
    assert record_kinds(recorder, a_result(8, barrier=8)) == []
    assert record_kinds(recorder, a_result(1)) == ["owners"]


def test_journal_owners_record_is_written_again_by_a_new_leader() -> None:
    recorder = JournalRecorder()
    assert record_kinds(recorder, a_result(5)) == ["owners"]
    recorder.forget("shop/other")
    assert record_kinds(recorder, a_result(5)) == []
    recorder.forget(SNAPSHOT.group)
    assert record_kinds(recorder, a_result(5)) == ["owners"]


def test_journal_has_no_record_for_a_group_without_valid_spec_or_assignment() -> None:
    without_spec, without_assignment = a_result(5), a_result(5)
    without_spec.group.resolved_spec = replace(without_spec.group.resolved_spec, spec=None)
    without_assignment.group.assignment.stored = StoredAssignment()
    assert record_kinds(JournalRecorder(), without_spec) == record_kinds(JournalRecorder(), without_assignment) == []


OBEYED_HANDOVERS = RebalanceChange(
    handovers=tuple(
        QueueHandover(
            queue, Holder("m2", "uid-m2"), Holder(name, f"uid-{name}"), 0.0, 1.0, 1.5, is_forced=False, generation=6
        )
        for queue, name in zip(Q, ["m1", "m1", "m3"], strict=False)
    )
)


def test_journal_obeyed_handovers_make_a_record_per_member() -> None:
    lines = JournalRecorder().build_records(a_result(6), OBEYED_HANDOVERS, NOW, lambda: SNAPSHOT)
    decoded = [decode_line(line) for line in lines]
    assert [(record.generation, record.member, record.uid, record.queues) for record in decoded[:2]] == [
        (6, "m1", "uid-m1", {"orders": {"a": "0-1"}}),
        (6, "m3", "uid-m3", {"orders": {"a": "2"}}),
    ]


def test_journal_completed_rebalance_makes_a_record() -> None:
    completed = CompletedRebalance(Rebalance("MemberLeft", "m2 left", "2026-11-21T08:59:59.999Z", 6, 4, 1, 0.5), (), 4)
    change = RebalanceChange(completed=completed)
    lines = JournalRecorder().build_records(a_result(6), change, NOW, lambda: SNAPSHOT)
    [record, _] = [decode_line(line) for line in lines]
    assert (record.generation, record.reason, record.outcome, record.moved, record.forced, record.seconds) == (
        *(6, "MemberLeft", "Forced"),
        *(4, 1, 0.5),
    )
    for at in ("yesterday", "2026-11-21T08:59:59"):
        invalid = RebalanceChange(completed=completed._replace(rebalance=Rebalance("MemberLeft", "", at, 6, 4, 0, 0.5)))
        assert record_kinds(JournalRecorder(), a_result(6), NOW, invalid) == ["owners"]


def test_journal_has_a_record_of_redelivered_messages_for_each_cause_and_pair_of_members() -> None:
    first = ReaderProcess("m1", "uid-m1", "a")
    second = ReaderProcess("m2", "uid-m2", "b")
    restarted = ReaderProcess("m1", "uid-m1", "c")
    entries = [
        Redelivery(Q[0], 3, RedeliveryCause.CRASH, first, second, is_estimate=True),
        Redelivery(Q[1], 2, RedeliveryCause.CRASH, first, second, is_estimate=True),
        Redelivery(Q[2], 4, RedeliveryCause.HANDOVER, first, second, is_estimate=False),
        Redelivery(Q[3], 5, RedeliveryCause.CRASH, first, restarted, is_estimate=True),
    ]
    redelivered = [decode_line(record) for record in redelivered_records("shop/orders", NOW, entries)]
    assert [
        (record.cause, record.messages, record.estimate, record.holder, record.to, record.queues["orders"]["a"])
        for record in redelivered
    ] == [
        ("crash", 5, True, "m1", "m1", "3"),
        ("crash", 5, True, "m1", "m2", "0-1"),
        ("handover", 4, False, "m1", "m2", "2"),
    ]
    assert {(record.group, record.at.timestamp(), record.holder_uid) for record in redelivered} == {
        ("shop/orders", NOW, "uid-m1")
    }
