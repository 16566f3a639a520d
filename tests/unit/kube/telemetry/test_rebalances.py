"""The rebalance tracker on real plans: a group goes through changes, and the tracker records each plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from builders import LONG, NOW, a_document, a_pod, a_policy, a_report, a_snapshot, a_spec, a_view
from rota.documents import Assignment
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry.rebalances import QueueHandover, RebalanceChange, RebalanceTracker
from rota.model import Finding, Holder, Queue, Reason
from rota.planner import Plan, PodSnapshot, plan

Q = [Queue("orders", "a", number) for number in range(6)]


def holder(name: str) -> Holder:
    return Holder(name, f"uid-{name}")


class PlannedGroup:
    """A group in virtual time: the planner plans for it; its members obey when a test lets them."""

    def __init__(self, *members: str, **snapshot_fields: Any) -> None:
        self.tracker = RebalanceTracker()
        self.at = 100.0
        self.snapshot_fields: dict[str, Any] = {**snapshot_fields}
        self.document: Assignment | None = None
        self.status: dict[str, Any] = {}
        self.pods: dict[str, PodSnapshot] = {}
        self.deleted_uids: set[str] = set()
        self.changes: list[RebalanceChange] = []
        self.last_plan = Plan()
        self.add_members(*members)

    def add_members(self, *names: str) -> None:
        for name in names:
            self.deleted_uids.discard(f"uid-{name}")
            self.pods[name] = a_pod(name, a_report(name, 0))

    def delete_pod(self, name: str) -> None:
        """Delete a member's pod."""
        del self.pods[name]
        self.deleted_uids.add(f"uid-{name}")

    def make_unreachable(self, name: str) -> None:
        self.pods[name] = replace(self.pods[name], ready=False, unreachable_for=LONG)

    def make_reachable(self, name: str) -> None:
        self.pods[name] = replace(self.pods[name], ready=True, unreachable_for=0.0)

    def obey(self, *names: str) -> None:
        """Let these members, by default all reachable ones, obey the present document."""
        assert self.document
        for name in names or [name for name, pod in self.pods.items() if not pod.unreachable_for]:
            share = self.document.members.get(name)
            report = a_report(name, self.document.generation, share.queues if share else ())
            self.pods[name] = a_pod(name, report, ready=self.pods[name].ready)

    def run_plan(self, seconds: float = 1.0) -> RebalanceChange:
        """Let time pass, plan, and return what the tracker recorded."""
        self.at += seconds
        state = {"document": self.document, "status": self.status, "deleted_uids": frozenset(self.deleted_uids)}
        pods = tuple(self.pods.values())
        self.last_plan = plan(a_snapshot(**{**self.snapshot_fields, **state, "pods": pods}), NOW + self.at)
        self.document, self.status = self.last_plan.document or self.document, dict(self.last_plan.status)
        obeyed_generations = {pod.holder: pod.report.generation for pod in pods if pod.report}
        self.changes.append(self.tracker.record_plan(self.last_plan, self.document, obeyed_generations, self.at))
        return self.changes[-1]

    def settle(self) -> list[RebalanceChange]:
        """Let all members obey and plan again until the rebalance has ended; return the recorded changes."""
        previous_count = len(self.changes)
        self.run_plan()
        for _ in range(20):
            self.obey()
            self.run_plan()
            if self.last_plan.document is None and "seconds" in self.status.get("lastRebalance", {"seconds": 0}):
                return self.changes[previous_count:]
        raise AssertionError("the rebalance does not end")

    def change_leader(self) -> None:
        """Let a new leader take over: its tracker is empty."""
        self.tracker = RebalanceTracker()


def a_settled_group(*members: str, **snapshot_fields: Any) -> PlannedGroup:
    fleet = PlannedGroup(*members, **snapshot_fields)
    fleet.settle()
    return fleet


def moved_queues(changes: list[RebalanceChange]) -> int:
    return sum(change.moved_queues for change in changes)


def ended_rebalances(changes: list[RebalanceChange]) -> list[Rebalance]:
    return [change.ended_rebalance for change in changes if change.ended_rebalance]


def handovers(changes: list[RebalanceChange]) -> list[QueueHandover]:
    return [handover for change in changes for handover in change.handovers if handover.previous_owner]


def test_rebalance_of_the_first_assignment_counts_no_handover() -> None:
    fleet = PlannedGroup()
    fleet.run_plan()
    fleet.add_members("m1", "m2")
    changes = fleet.settle()
    assert (moved_queues(changes), handovers(changes)) == (0, [])
    assert [handover.previous_owner for change in changes for handover in change.handovers] == [None] * 6
    (ended,) = ended_rebalances(changes)
    assert (ended.reason, ended.moved, ended.forced, ended.seconds) == ("FirstAssignment", 6, 0, 1.0)
    assert ended.longest is None, "no queue changed hands"
    assert [*fleet.tracker.rebalances] == [ended]


def test_rebalance_to_members_older_than_the_group_counts_no_handover() -> None:
    changes = PlannedGroup("m1", "m2").settle()
    assert (moved_queues(changes), handovers(changes)) == (0, [])
    assert [rebalance.reason for rebalance in ended_rebalances(changes)] == ["FirstAssignment"]


def test_handover_to_a_new_member_is_counted_when_its_report_confirms() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    assert fleet.run_plan(10.0) == RebalanceChange(), "revoked, not granted yet"
    fleet.obey("m1", "m2")
    assert fleet.run_plan(2.0) == RebalanceChange(moved_queues=2), "granted, not obeyed yet"
    assert fleet.run_plan(3.0) == RebalanceChange()
    fleet.obey()
    change = fleet.run_plan(0.5)
    assert [(handover.previous_owner, handover.next_owner) for handover in change.handovers] == [
        (holder("m1"), holder("m3")),
        (holder("m2"), holder("m3")),
    ]
    revoked_at = 112.0
    for handover in change.handovers:
        assert (handover.revoked_at, handover.granted_at, handover.obeyed_at) == (
            revoked_at,
            revoked_at + 2.0,
            revoked_at + 5.5,
        )
        assert (handover.seconds, handover.is_forced) == (5.5, False)
    assert change.ended_rebalance == fleet.tracker.rebalances[0]
    assert change.ended_rebalance is not None
    assert (change.ended_rebalance.reason, change.ended_rebalance.message) == ("MemberJoined", "m3 joined")
    assert (change.ended_rebalance.moved, change.ended_rebalance.forced) == (2, 0)
    assert (change.ended_rebalance.seconds, change.ended_rebalance.longest) == (5.5, 5.5)
    assert change.ended_rebalance.generation == 2, "the generation of its first document"
    assert fleet.run_plan() == RebalanceChange(), "its end is reported once"


def test_handover_is_timed_per_queue_and_the_longest_is_reported() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.obey("m1")
    fleet.run_plan(1.0)
    fleet.obey("m3")
    first = fleet.run_plan(1.0)
    assert [handover.seconds for handover in first.handovers] == [2.0]
    assert fleet.tracker.rebalances[0].longest is None, "it has not ended"
    fleet.obey("m2")
    fleet.run_plan(4.0)
    changes = fleet.settle()
    assert [handover.seconds for handover in handovers(changes)] == [7.0 + 1.0]
    assert fleet.tracker.rebalances[0].longest == 8.0


def test_rebalance_under_way_is_listed_without_its_end() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    assert (fleet.tracker.rebalances[0].reason, fleet.tracker.rebalances[0].seconds) == ("MemberJoined", None)
    assert fleet.tracker.rebalances[0].longest is None
    assert len(fleet.tracker.rebalances) == 2


def test_handover_that_returns_to_its_owner_is_not_counted() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    assert fleet.tracker.oldest_handover_seconds(fleet.at) == 0.0
    fleet.delete_pod("m3")
    fleet.run_plan(5.0)
    assert fleet.document is not None
    assert not fleet.document.releasing
    assert fleet.tracker.oldest_handover_seconds(fleet.at + 1) == 0.0, "nothing is under way"
    assert (moved_queues(fleet.settle()), handovers(fleet.changes)) == (0, [])


def test_handover_from_a_terminated_member_is_granted_at_once() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.delete_pod("m2")
    assert fleet.run_plan().moved_queues == 3
    fleet.obey()
    change = fleet.run_plan(0.5)
    assert [
        (handover.previous_owner, handover.granted_at - handover.revoked_at, handover.seconds)
        for handover in change.handovers
    ] == [(holder("m2"), 0.0, 0.5)] * 3
    assert not any(handover.is_forced for handover in change.handovers)


def test_handover_passed_on_before_confirmation_counts_once_from_the_first_owner() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.obey("m1", "m2")
    fleet.run_plan()
    fleet.delete_pod("m3")
    passed_on = fleet.run_plan()
    assert passed_on.moved_queues == 2
    fleet.obey()
    change = fleet.run_plan()
    assert {
        (handover.previous_owner and handover.previous_owner.name, handover.seconds) for handover in change.handovers
    } == {
        ("m1", 3.0),
        ("m2", 3.0),
    }


def test_forced_grant_is_counted_and_contested_until_resolved() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.make_unreachable("m2")
    assert fleet.run_plan().moved_queues == 3
    assert fleet.tracker.rebalances[0].forced == 3
    fleet.obey()
    change = fleet.run_plan(2.0)
    assert [handover.is_forced for handover in change.handovers] == [True] * 3
    assert change.ended_rebalance is not None
    assert (change.ended_rebalance.reason, change.ended_rebalance.forced) == ("MemberLost", 3)
    assert fleet.tracker.contested_seconds == 3 * 2.0
    fleet.run_plan(10.0)
    assert fleet.tracker.contested_seconds == 3 * 12.0
    fleet.make_reachable("m2")
    fleet.run_plan()
    fleet.obey("m1")
    fleet.run_plan()
    assert fleet.document is not None
    assert fleet.document.forced, "m2 is granted queues again, and has not reported yet what it obeys"
    fleet.settle()
    contested_seconds = fleet.tracker.contested_seconds
    fleet.run_plan(LONG)
    assert fleet.tracker.contested_seconds == contested_seconds
    assert fleet.document.forced == {}


def test_forced_grant_is_not_contested_by_a_terminated_member() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.make_unreachable("m2")
    fleet.settle()
    fleet.delete_pod("m2")
    fleet.settle()
    contested_seconds = fleet.tracker.contested_seconds
    fleet.run_plan(LONG)
    assert fleet.tracker.contested_seconds == contested_seconds > 0
    assert fleet.tracker.rebalances[0].forced == 3, "once"


def test_queue_without_owner_is_counted_in_queue_seconds() -> None:
    fleet = PlannedGroup()
    fleet.run_plan()
    assert fleet.tracker.unowned_seconds == 0.0, "the first plan has no interval before it"
    fleet.run_plan(10.0)
    assert fleet.tracker.unowned_seconds == 60.0
    fleet.add_members("m1")
    fleet.run_plan(5.0)
    assert fleet.tracker.unowned_seconds == 90.0
    fleet.obey()
    fleet.run_plan(LONG)
    assert fleet.tracker.unowned_seconds == 90.0, "m1 consumes them"


def test_unmanaged_consumer_queues_do_not_count_as_unowned_but_unconsumed_ones_do() -> None:
    fleet = a_settled_group("m1", unmanaged_consumers=("10.0.0.9@old",))
    unowned_seconds = fleet.tracker.unowned_seconds
    fleet.run_plan(LONG)
    assert fleet.tracker.unowned_seconds == unowned_seconds, "three of six belong to the unmanaged consumer"
    unmanaged_plan = Plan(
        status={"unownedQueues": 2},
        problems=(Finding(Reason.UNMANAGED_CONSUMERS, ""), Finding(Reason.QUEUES_UNOWNED, "")),
    )
    tracker = RebalanceTracker()
    for now in (100.0, 110.0):
        tracker.record_plan(unmanaged_plan, None, {}, now)
    assert tracker.unowned_seconds == 20.0


def test_handover_in_progress_does_not_count_as_unowned() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.run_plan(10.0)
    assert fleet.tracker.unowned_seconds == 0.0


def test_queue_without_owner_is_counted_between_plans_too() -> None:
    fleet = PlannedGroup()
    fleet.run_plan()
    fleet.tracker.count_seconds(fleet.at + 2.0)
    assert fleet.tracker.unowned_seconds == 12.0
    fleet.run_plan(3.0)
    assert fleet.tracker.unowned_seconds == 18.0, "no second counts twice"


def test_handover_is_not_counted_by_a_leader_that_did_not_see_it_start() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.change_leader()
    assert fleet.run_plan(5.0) == RebalanceChange()
    assert fleet.tracker.oldest_handover_seconds(fleet.at) == 0.0, "its start is unknown"
    (listed,) = fleet.tracker.rebalances
    assert (listed.reason, listed.seconds, listed.message) == ("MemberJoined", None, "")
    changes = fleet.settle()
    assert moved_queues(changes) == 2, "this leader granted them"
    assert handovers(changes) == []
    assert ended_rebalances(changes) == []
    assert (fleet.tracker.rebalances[0].moved, fleet.tracker.rebalances[0].longest) == (2, None)
    assert fleet.tracker.rebalances[0].seconds is not None


def test_rebalance_after_a_leader_change_is_counted_in_full() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.change_leader()
    fleet.run_plan()
    fleet.add_members("m3")
    changes = fleet.settle()
    assert (moved_queues(changes), len(handovers(changes))) == (2, 2)
    assert [rebalance.reason for rebalance in ended_rebalances(changes)] == ["MemberJoined"]


def test_rebalance_that_ended_before_a_leader_change_is_listed_but_not_counted() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.change_leader()
    assert fleet.run_plan(3600.0) == RebalanceChange()
    (listed,) = fleet.tracker.rebalances
    assert (listed.reason, listed.moved, listed.forced, listed.seconds) == ("FirstAssignment", 6, 0, 1.0)
    assert (listed.message, listed.longest, listed.generation) == ("", None, 1)
    assert fleet.run_plan() == RebalanceChange()
    assert len(fleet.tracker.rebalances) == 1


def test_rebalance_figures_are_separate_for_consecutive_rebalances() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan(1.0)
    fleet.run_plan(20.0)
    fleet.settle()
    fleet.delete_pod("m3")
    fleet.settle()
    terminated, joined, first = fleet.tracker.rebalances
    assert [rebalance.reason for rebalance in (first, joined, terminated)] == [
        "FirstAssignment",
        "MemberJoined",
        "MemberTerminated",
    ]
    assert (joined.moved, terminated.moved) == (2, 2)
    assert (joined.longest, terminated.longest) == (23.0, 1.0)
    assert ended_rebalances(fleet.changes) == [
        first,
        joined,
        terminated,
    ]


def test_rebalance_history_keeps_only_the_last_20() -> None:
    fleet = a_settled_group("m1", "m2")
    for _ in range(20):
        fleet.add_members("m3")
        fleet.settle()
        fleet.delete_pod("m3")
        fleet.settle()
    assert len(fleet.tracker.rebalances) == 20
    assert fleet.tracker.rebalances[0].reason == "MemberTerminated"


def test_rebalance_history_starts_over_for_a_recreated_group() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    for name in ("m1", "m2", "m3"):
        fleet.delete_pod(name)
    fleet.document = None
    fleet.status = {}
    fleet.add_members("n1")
    changes = fleet.settle()
    assert (moved_queues(changes), handovers(changes)) == (0, [])
    assert [rebalance.reason for rebalance in fleet.tracker.rebalances] == ["FirstAssignment"]
    assert fleet.tracker.oldest_handover_seconds(fleet.at) == 0.0


def test_rebalance_after_a_lost_assignment_counts_no_moves() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.obey("m1", "m2")
    fleet.run_plan()
    fleet.document = None  # before m3 has seen its grant
    changes = fleet.settle()
    assert fleet.document is not None
    assert fleet.document.generation >= NOW
    assert (moved_queues(changes), handovers(changes)) == (0, [])
    assert {rebalance.forced for rebalance in fleet.tracker.rebalances} == {0}


def test_broadcasting_switch_and_back_counts_no_handover() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.snapshot_fields["spec"] = a_spec(messageModel="Broadcasting")
    changes = fleet.settle()
    assert fleet.tracker.oldest_handover_seconds(fleet.at) == 0.0
    fleet.snapshot_fields["spec"] = a_spec()
    changes += fleet.settle()
    assert (moved_queues(changes), handovers(changes)) == (0, [])


def test_handover_age_includes_a_removed_queue_that_is_not_counted() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.snapshot_fields["views"] = {"orders": a_view(5)}
    fleet.run_plan()
    fleet.run_plan(4.0)
    assert fleet.tracker.oldest_handover_seconds(fleet.at) == 4.0
    changes = fleet.settle()
    assert (moved_queues(changes), handovers(changes), fleet.tracker.oldest_handover_seconds(fleet.at)) == (0, [], 0.0)


def test_gate_is_counted_once_each_time_it_starts_to_hold() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.snapshot_fields["policy"] = a_policy(paused=True)
    fleet.add_members("m3")
    assert fleet.run_plan().gate_reason is Reason.PAUSED
    assert fleet.run_plan().gate_reason is None, "it is still paused"
    fleet.snapshot_fields["policy"] = a_policy(budget={"maxMoves": 1, "per": "1m"})
    assert fleet.run_plan().gate_reason is Reason.BUDGET_SPENT
    fleet.snapshot_fields["policy"] = a_policy(paused=True)
    assert fleet.run_plan().gate_reason is Reason.PAUSED


def test_gate_is_not_counted_when_nothing_would_change() -> None:
    fleet = a_settled_group("m1", "m2")
    assert fleet.last_plan.hold is not None
    assert fleet.last_plan.hold.reason is Reason.NOTHING_WOULD_CHANGE
    assert [change.gate_reason for change in fleet.changes if change.gate_reason] == []
    fleet.snapshot_fields["policy"] = a_policy(paused=True)
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.snapshot_fields["policy"] = a_policy()
    fleet.settle()
    assert [change.gate_reason for change in fleet.changes if change.gate_reason] == [Reason.PAUSED]


def test_gate_that_held_before_a_leader_change_is_not_counted() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.snapshot_fields["policy"] = a_policy(paused=True)
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.change_leader()
    assert fleet.run_plan() == RebalanceChange()


def test_handover_age_is_that_of_the_oldest_one() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    assert fleet.tracker.oldest_handover_seconds(fleet.at + 7.0) == 7.0
    fleet.obey("m1")
    fleet.run_plan(2.0)
    fleet.obey("m3")
    fleet.run_plan(2.0)
    assert fleet.tracker.oldest_handover_seconds(fleet.at) == 4.0, "the queue of m2 is still in handover"
    fleet.settle()
    assert fleet.tracker.oldest_handover_seconds(fleet.at + LONG) == 0.0


def test_rebalance_tracker_counts_nothing_for_a_plan_without_assignment() -> None:
    tracker = RebalanceTracker()
    empty_plan = plan(a_snapshot(spec=None), NOW)
    assert tracker.record_plan(empty_plan, None, {}, 1.0) == RebalanceChange()
    assert tracker.record_plan(empty_plan, a_document(members={"m1": Q}), {holder("m1"): 5}, 2.0) == RebalanceChange()
    assert tracker.last_plan.status == empty_plan.status
    assert tracker.record_plan(empty_plan, None, {}, 9.0) == RebalanceChange()
    assert (tracker.unowned_seconds, tracker.contested_seconds) == (0.0, 0.0), "no queue is known"


def test_forced_grant_count_is_0_without_a_stored_assignment() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.tracker.record_plan(fleet.last_plan, None, {}, fleet.at)
    assert fleet.tracker.rebalances[0].forced == 0


def test_rebalance_tracker_copy_has_the_totals_so_far_and_does_not_change() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.make_unreachable("m2")
    fleet.run_plan()
    copied = fleet.tracker.copy_at(fleet.at + 2.0)
    assert copied == fleet.tracker
    assert copied.contested_seconds == fleet.tracker.contested_seconds == 3 * 2.0
    rebalances = list(copied.rebalances)
    assert copied.oldest_handover_seconds(fleet.at + 2.0) == 2.0
    fleet.settle()
    assert list(copied.rebalances) == rebalances != list(fleet.tracker.rebalances)
    assert copied.oldest_handover_seconds(fleet.at) > 0.0


def test_rebalance_tracker_keeps_no_large_parts_of_a_plan() -> None:
    fleet = PlannedGroup("m1")
    fleet.run_plan()
    assert (
        fleet.last_plan.document is None,
        bool(fleet.last_plan.config_map_data),
        bool(fleet.last_plan.journal_records),
    ) == (
        False,
        True,
        True,
    )
    tracked_plan = fleet.tracker.last_plan
    assert (tracked_plan.document, tracked_plan.config_map_data, tracked_plan.journal_records) == (None, {}, ())
    assert tracked_plan.status == fleet.last_plan.status


def test_rebalance_continued_by_a_new_leader_is_not_reported_as_ended() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.obey("m1", "m2")
    fleet.change_leader()
    fleet.run_plan()
    assert fleet.last_plan.document is not None
    assert ended_rebalances(fleet.settle()) == []
    assert fleet.tracker.rebalances[0].message == ""


def test_rebalance_under_another_leader_is_listed_before_earlier_ones() -> None:
    fleet = a_settled_group("m1", "m2")
    first_tracker = fleet.tracker
    fleet.change_leader()
    fleet.add_members("m3")
    fleet.settle()
    fleet.tracker = first_tracker
    assert fleet.run_plan() == RebalanceChange(), "no part of it is counted"
    first = first_tracker.rebalances[-1]
    assert [(rebalance.reason, rebalance.generation) for rebalance in first_tracker.rebalances] == [
        ("MemberJoined", 3),
        ("FirstAssignment", 1),
    ]
    assert (first.message, first.seconds, first.moved) == ("A new group", 1.0, 6)


def test_handover_longest_time_is_rounded_to_milliseconds() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.delete_pod("m2")
    fleet.run_plan()
    fleet.obey()
    fleet.run_plan(1.23456)
    assert fleet.tracker.rebalances[0].longest == 1.235


def test_handover_age_is_that_of_the_first_started_of_two() -> None:
    fleet = a_settled_group("m1", "m2")
    fleet.add_members("m3")
    fleet.run_plan()
    fleet.snapshot_fields["views"] = {"orders": a_view(5)}
    fleet.run_plan(3.0)
    fleet.snapshot_fields["views"] = {"orders": a_view(3)}
    fleet.run_plan(3.0)
    assert fleet.document is not None
    assert len({release.since for release in fleet.document.releasing.values()}) > 1
    assert fleet.tracker.oldest_handover_seconds(fleet.at) == 6.0


def test_handover_age_excludes_queues_without_previous_owner() -> None:
    fleet = PlannedGroup()
    fleet.run_plan()
    fleet.add_members("m1")
    fleet.run_plan()
    assert fleet.tracker.oldest_handover_seconds(fleet.at + LONG) == 0.0


MEMBERS = ("m1", "m2", "m3", "m4")
EVENTS = st.one_of(
    st.tuples(st.sampled_from(["join", "delete", "unreachable", "reachable", "obey"]), st.sampled_from(MEMBERS)),
    st.tuples(st.just("queues"), st.integers(1, 6)),
    st.tuples(st.just("policy"), st.sampled_from(["Sticky", "Averagely", "ConsistentHash"])),
    st.tuples(st.sampled_from(["wait", "all obey", "change leader", "lose assignment", "pause"]), st.integers(1, 60)),
)


def apply_to_member(fleet: PlannedGroup, event: str, name: str) -> None:
    """Apply an event to a member, if the member is in a state for it."""
    if name not in fleet.pods:
        if event == "join":
            fleet.add_members(name)
        return
    is_reachable = fleet.document is not None and not fleet.pods[name].unreachable_for
    if event == "obey" and is_reachable:
        fleet.obey(name)
    actions: dict[str, Callable[[str], None]] = {
        "delete": fleet.delete_pod,
        "unreachable": fleet.make_unreachable,
        "reachable": fleet.make_reachable,
    }
    if event in actions:
        actions[event](name)


def apply_event(fleet: PlannedGroup, event: str, value: Any) -> float:
    """Apply an event to a group; return its duration in seconds."""
    match event:
        case "all obey" if fleet.document:
            fleet.obey()
        case "queues":
            fleet.snapshot_fields["views"] = {"orders": a_view(value)}
        case "policy":
            fleet.snapshot_fields["policy"] = a_policy(strategy=value)
        case "change leader":
            fleet.change_leader()
        case "lose assignment":
            fleet.document = None
        case "pause":
            fleet.snapshot_fields["spec"] = a_spec(paused=value > 30)
        case _:
            apply_to_member(fleet, event, value)
    return float(value) if event == "wait" else 0.5


@given(st.lists(EVENTS, max_size=25))
def test_handover_count_never_exceeds_moves_in_any_sequence_of_events(events: list[tuple[str, Any]]) -> None:
    fleet = PlannedGroup("m1", "m2")
    leader_start = 0  # index of the present leader's first change
    for event, value in (*events, ("all obey", 1), ("all obey", 1)):
        seconds = apply_event(fleet, event, value)
        leader_start = len(fleet.changes) if event == "change leader" else leader_start
        unowned_seconds = fleet.tracker.unowned_seconds
        contested_seconds = fleet.tracker.contested_seconds
        change = fleet.run_plan(seconds)
        assert fleet.tracker.unowned_seconds >= unowned_seconds
        assert fleet.tracker.contested_seconds >= contested_seconds
        assert fleet.tracker.oldest_handover_seconds(fleet.at) >= 0
        for handover in change.handovers:
            assert handover.revoked_at <= handover.granted_at <= handover.obeyed_at == fleet.at
        assert moved_queues(fleet.changes[leader_start:]) >= len(handovers(fleet.changes[leader_start:]))
        assert change.ended_rebalance is None or change.ended_rebalance == fleet.tracker.rebalances[0]
        assert all(
            (rebalance.seconds or 0) >= 0 and (rebalance.longest or 0) >= 0 for rebalance in fleet.tracker.rebalances
        )
        assert len({rebalance.at for rebalance in fleet.tracker.rebalances}) == len(fleet.tracker.rebalances)


def test_rebalance_lists_its_handovers_at_the_end_forced_first_then_slowest() -> None:
    fleet = a_settled_group("m1", "m2", "m3")
    fleet.delete_pod("m3")
    fleet.run_plan()
    fleet.obey("m1")
    fleet.run_plan(1.0)
    fleet.obey("m2")
    fleet.make_unreachable("m2")
    fleet.run_plan(4.0)
    (completed,) = [change.completed for change in fleet.settle() if change.completed]
    listed = [(handover.is_forced, handover.seconds) for handover in completed.slowest_handovers]
    assert listed == sorted(listed, reverse=True)
    assert len({forced for forced, _ in listed}) == 2
    assert len({seconds for _, seconds in listed}) > 1
    assert completed.handover_count == len(listed) == len(handovers(fleet.changes))
