"""What the journal keeps besides what plans tell: a reader may begin with it."""

from dataclasses import replace
from typing import Any

import msgspec

from builders import LONG, NOW, a_document, a_pod, a_report, a_snapshot, a_spec, a_view, obeying
from rota import records
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.state.group import Group
from rota.kube.state.rebalance import Rebalance
from rota.kube.state.stored_assignment import StoredAssignment as Kept
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


def read(told: object) -> Any:
    return records.decode_record(msgspec.json.encode(told))


def whole(snapshot: Snapshot = SNAPSHOT) -> records.OwnersRecord:
    assert snapshot.document
    assert snapshot.spec
    found = read(owners_record(snapshot, plan(snapshot, NOW), snapshot.document, snapshot.spec, NOW))
    assert isinstance(found, records.OwnersRecord)
    return found


def test_journal_owners_record_is_complete() -> None:
    told = whole()
    assert (told.group, told.generation, told.at.timestamp()) == (SNAPSHOT.group, DOCUMENT.generation, NOW)
    assert {name: it.queues for name, it in told.members.items()} == {
        "m1": {"orders": {"a": "0-1"}},
        "m2": {"orders": {"a": "2-3"}},
        "m3": {},
    }
    assert {name: (it.standing, it.room) for name, it in told.members.items()} == {
        "m1": ("Ready", None),
        "m2": ("Ready", None),
        "m3": ("Ready", "east"),
    }
    assert [(it.holder, it.holder_uid, it.to, it.queues) for it in told.releasing] == [
        ("m2", "uid-m2", "m1", {"orders": {"a": "4"}}),
        ("m0", "uid-m0", None, {"orders": {"a": "5"}}),
    ]
    assert told.unowned == {"orders": {"a": "6"}}


def test_journal_owners_record_has_rules_that_restore_the_policy() -> None:
    assert parse_policy({"spec": whole().rules}) == SNAPSHOT.policy
    assert policy_body(PolicySpec()) == {"strategy": "Averagely"}
    assert whole(replace(SNAPSHOT, policy=None)).rules == {}


def test_journal_owners_record_lists_a_deleted_pod_of_the_stored_assignment() -> None:
    snapshot = replace(SNAPSHOT, pods=tuple(pod for pod in SNAPSHOT.pods if pod.name != "m2"))
    assert (whole(snapshot).members["m2"].standing, whole(snapshot).members["m2"].uid) == ("Ended", "uid-m2")


def test_journal_owners_record_has_nothing_of_the_namesake_of_a_deleted_pod() -> None:
    namesake = replace(a_pod("m2", a_report("m2", 5, (), uid="new"), uid="new"), room="west")
    snapshot = replace(SNAPSHOT, pods=(*(pod for pod in SNAPSHOT.pods if pod.name != "m2"), namesake))
    found = whole(snapshot)
    assert (found.members["m2"].standing, found.members["m2"].uid, found.members["m2"].room) == (
        "Ended",
        "uid-m2",
        None,
    )
    assert list(found.members) == ["m1", "m2", "m3"]


def test_journal_owners_record_of_a_pod_without_a_member_state_is_that_it_ended() -> None:
    assert SNAPSHOT.document
    assert SNAPSHOT.spec
    found = read(owners_record(SNAPSHOT, Plan(), SNAPSHOT.document, SNAPSHOT.spec, NOW))
    assert {member.standing for member in found.members.values()} == {"Ended"}


def test_journal_owners_record_has_no_unowned_queue_of_a_broadcasting_group_or_of_unmanaged_consumers() -> None:
    everyone = a_document(members={"m1": (), "m2": ()}, everyone=tuple(Q[:7]))
    spec = a_spec(messageModel="Broadcasting", policyRef={"name": "rules"})
    found = whole(replace(SNAPSHOT, spec=spec, document=everyone, pods=obeying(everyone)))
    assert (found.unowned, found.policy, found.model) == ({}, "rules", "Broadcasting")
    assert SNAPSHOT.document
    plan_with_unmanaged = Plan(unmanaged_queues=frozenset({Q[6]}))
    views = {**SNAPSHOT.views, "payments": None}
    snapshot = replace(SNAPSHOT, views=views)
    assert snapshot.spec
    shared = read(owners_record(snapshot, plan_with_unmanaged, SNAPSHOT.document, snapshot.spec, NOW))
    assert shared.unowned == {}, "a topic without metadata has no known queues"


def done(generation: int, *, barrier: int = 0) -> ReconcileResult:
    namespace, name = SNAPSHOT.group.split("/")
    group = Group(namespace, name)
    group.resolved_spec = replace(group.resolved_spec, spec=SNAPSHOT.spec, policy=SNAPSHOT.policy)
    group.stored_assignment = Kept(document=replace(DOCUMENT, generation=generation, barrier=barrier))
    return ReconcileResult(group, Plan(member_states=dict.fromkeys(("m1", "m2", "m3"), "Ready")), 0.0, {})


def kinds(
    notes: JournalRecorder,
    it: ReconcileResult,
    now: float = NOW,
    news: RebalanceChange = RebalanceChange(),  # noqa: B008 - a value
) -> list[str]:
    return [str(line["kind"]) for line in notes.build_records(it, news, now, lambda: SNAPSHOT)]


def test_journal_owners_record_is_written_first_and_then_hourly() -> None:
    notes = JournalRecorder()
    assert kinds(notes, done(5)) == ["owners"]
    assert kinds(notes, done(5)) == kinds(notes, done(6)) == []
    assert kinds(notes, done(6), NOW + 3600) == ["owners"]


def test_journal_owners_record_is_written_at_a_generation_gap() -> None:
    notes = JournalRecorder()
    assert kinds(notes, done(5)) == ["owners"]
    assert kinds(notes, done(7)) == ["owners"]
    assert kinds(notes, done(8, barrier=8)) == ["owners"]
    assert kinds(notes, done(8, barrier=8)) == []
    assert kinds(notes, done(1)) == ["owners"]


def test_journal_owners_record_is_written_again_by_a_new_leader() -> None:
    notes = JournalRecorder()
    assert kinds(notes, done(5)) == ["owners"]
    notes.forget_groups(lambda group: group == SNAPSHOT.group)
    assert kinds(notes, done(5)) == []
    notes.forget_groups(lambda _: False)
    assert kinds(notes, done(5)) == ["owners"]


def test_journal_has_no_record_for_a_group_without_valid_spec_or_assignment() -> None:
    one, other = done(5), done(5)
    one.group.resolved_spec = replace(one.group.resolved_spec, spec=None)
    other.group.stored_assignment = Kept()
    assert kinds(JournalRecorder(), one) == kinds(JournalRecorder(), other) == []


OBEYED = RebalanceChange(
    handovers=tuple(
        QueueHandover(
            queue, Holder("m2", "uid-m2"), Holder(name, f"uid-{name}"), 0.0, 1.0, 1.5, is_forced=False, generation=6
        )
        for queue, name in zip(Q, ["m1", "m1", "m3"], strict=False)
    )
)


def test_journal_obeyed_handovers_make_a_record_per_member() -> None:
    told = [read(line) for line in JournalRecorder().build_records(done(6), OBEYED, NOW, lambda: SNAPSHOT)]
    assert [(it.generation, it.member, it.uid, it.queues) for it in told[:2]] == [
        (6, "m1", "uid-m1", {"orders": {"a": "0-1"}}),
        (6, "m3", "uid-m3", {"orders": {"a": "2"}}),
    ]


def test_journal_completed_rebalance_makes_a_record() -> None:
    past = CompletedRebalance(Rebalance("MemberLeft", "m2 left", "2026-11-21T08:59:59.999Z", 6, 4, 1, 0.5), (), 4)
    [told, _] = [
        read(line)
        for line in JournalRecorder().build_records(done(6), RebalanceChange(completed=past), NOW, lambda: SNAPSHOT)
    ]
    assert (told.generation, told.reason, told.outcome, told.moved, told.forced, told.seconds) == (
        *(6, "MemberLeft", "Forced"),
        *(4, 1, 0.5),
    )
    for at in ("yesterday", "2026-11-21T08:59:59"):
        broken = RebalanceChange(completed=past._replace(rebalance=Rebalance("MemberLeft", "", at, 6, 4, 0, 0.5)))
        assert kinds(JournalRecorder(), done(6), NOW, broken) == ["owners"]


def test_journal_has_a_record_of_messages_that_came_again_for_each_cause_and_pair_of_members() -> None:
    one = ReaderProcess("m1", "uid-m1", "a")
    two = ReaderProcess("m2", "uid-m2", "b")
    restarted = ReaderProcess("m1", "uid-m1", "c")
    entries = [
        Redelivery(Q[0], 3, RedeliveryCause.CRASH, one, two, is_estimate=True),
        Redelivery(Q[1], 2, RedeliveryCause.CRASH, one, two, is_estimate=True),
        Redelivery(Q[2], 4, RedeliveryCause.HANDOVER, one, two, is_estimate=False),
        Redelivery(Q[3], 5, RedeliveryCause.CRASH, one, restarted, is_estimate=True),
    ]
    told = [read(it) for it in redelivered_records("shop/orders", NOW, entries)]
    assert [(it.cause, it.messages, it.estimate, it.holder, it.to, it.queues["orders"]["a"]) for it in told] == [
        ("crash", 5, True, "m1", "m1", "3"),
        ("crash", 5, True, "m1", "m2", "0-1"),
        ("handover", 4, False, "m1", "m2", "2"),
    ]
    assert {(it.group, it.at.timestamp(), it.holder_uid) for it in told} == {("shop/orders", NOW, "uid-m1")}
