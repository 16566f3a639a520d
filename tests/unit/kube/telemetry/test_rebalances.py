"""What a tally makes of real plans: a fleet goes through its changes, and each plan of it is taken."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from builders import LONG, NOW, a_document, a_pod, a_policy, a_report, a_snapshot, a_spec, a_view
from rota.documents import Assignment
from rota.kube.telemetry.rebalances import QueueHandover, RebalanceChange, RebalanceTracker
from rota.model import Finding, Holder, Queue, Reason
from rota.planner import Plan, PodSnapshot, plan

Q = [Queue("orders", "a", number) for number in range(6)]


def holder(name: str) -> Holder:
    return Holder(name, f"uid-{name}")


class PlannedGroup:
    """A group in virtual time: it is planned for, and its members obey as soon as they are told to."""

    def __init__(self, *members: str, **world: Any) -> None:
        self.tally, self.at = RebalanceTracker(), 100.0
        self.world: dict[str, Any] = {**world}
        self.document: Assignment | None = None
        self.status: dict[str, Any] = {}
        self.pods: dict[str, PodSnapshot] = {}
        self.gone: set[str] = set()
        self.news: list[RebalanceChange] = []
        self.last = Plan()
        self.joins(*members)

    def joins(self, *names: str) -> None:
        for name in names:
            self.gone.discard(f"uid-{name}")
            self.pods[name] = a_pod(name, a_report(name, 0))

    def ends(self, name: str) -> None:
        """Know that a pod is no more."""
        del self.pods[name]
        self.gone.add(f"uid-{name}")

    def falls_silent(self, name: str) -> None:
        self.pods[name] = replace(self.pods[name], ready=False, unreachable_for=LONG)

    def is_heard(self, name: str) -> None:
        self.pods[name] = replace(self.pods[name], ready=True, unreachable_for=0.0)

    def obeys(self, *names: str) -> None:
        """Let members, or all that are heard, obey the document that stands."""
        assert self.document
        for name in names or [name for name, pod in self.pods.items() if not pod.unreachable_for]:
            share = self.document.members.get(name)
            report = a_report(name, self.document.generation, share.queues if share else ())
            self.pods[name] = a_pod(name, report, ready=self.pods[name].ready)

    def plans(self, seconds: float = 1.0) -> RebalanceChange:
        """Let time pass, and look at the group."""
        self.at += seconds
        known = {"document": self.document, "status": self.status, "deleted_uids": frozenset(self.gone)}
        pods = tuple(self.pods.values())
        self.last = plan(a_snapshot(**{**self.world, **known, "pods": pods}), NOW + self.at)
        self.document, self.status = self.last.document or self.document, dict(self.last.status)
        told = {pod.holder: pod.report.generation for pod in pods if pod.report}
        self.news.append(self.tally.record_plan(self.last, self.document, told, self.at))
        return self.news[-1]

    def settles(self) -> list[RebalanceChange]:
        """Let everybody obey and look again, until nothing is to be done; return what was news."""
        before = len(self.news)
        self.plans()
        for _ in range(20):
            self.obeys()
            self.plans()
            if self.last.document is None and "seconds" in self.status.get("lastRebalance", {"seconds": 0}):
                return self.news[before:]
        raise AssertionError("it does not settle")

    def leader_changes(self) -> None:
        """Let another operator go on, which remembers nothing."""
        self.tally = RebalanceTracker()


def settled(*members: str, **world: Any) -> PlannedGroup:
    fleet = PlannedGroup(*members, **world)
    fleet.settles()
    return fleet


def moved(news: list[RebalanceChange]) -> int:
    return sum(it.moved_queues for it in news)


def handovers(news: list[RebalanceChange]) -> list[QueueHandover]:
    return [handover for it in news for handover in it.handovers if handover.previous_owner]


def test_rebalance_of_the_first_assignment_counts_no_handover() -> None:
    fleet = PlannedGroup()
    fleet.plans()
    fleet.joins("m1", "m2")
    news = fleet.settles()
    assert (moved(news), handovers(news)) == (0, [])
    assert [handover.previous_owner for it in news for handover in it.handovers] == [None] * 6
    (ended,) = [it.ended_rebalance for it in news if it.ended_rebalance]
    assert (ended.reason, ended.moved, ended.forced, ended.seconds) == ("FirstAssignment", 6, 0, 1.0)
    assert ended.longest is None, "no queue changed hands"
    assert [*fleet.tally.rebalances] == [ended]


def test_rebalance_to_members_older_than_the_group_counts_no_handover() -> None:
    news = PlannedGroup("m1", "m2").settles()
    assert (moved(news), handovers(news)) == (0, [])
    assert [it.ended_rebalance.reason for it in news if it.ended_rebalance] == ["FirstAssignment"]


def test_handover_to_a_new_member_is_counted_when_its_report_confirms() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    assert fleet.plans(10.0) == RebalanceChange(), "taken, and given to nobody yet"
    fleet.obeys("m1", "m2")
    assert fleet.plans(2.0) == RebalanceChange(moved_queues=2), "given, and not yet obeyed"
    assert fleet.plans(3.0) == RebalanceChange()
    fleet.obeys()
    news = fleet.plans(0.5)
    assert [(it.previous_owner, it.next_owner) for it in news.handovers] == [
        (holder("m1"), holder("m3")),
        (holder("m2"), holder("m3")),
    ]
    began = 112.0
    for it in news.handovers:
        assert (it.revoked_at, it.granted_at, it.obeyed_at) == (began, began + 2.0, began + 5.5)
        assert (it.seconds, it.is_forced) == (5.5, False)
    assert news.ended_rebalance == fleet.tally.rebalances[0]
    assert news.ended_rebalance is not None
    assert (news.ended_rebalance.reason, news.ended_rebalance.message) == ("MemberJoined", "m3 joined")
    assert (news.ended_rebalance.moved, news.ended_rebalance.forced) == (2, 0)
    assert (news.ended_rebalance.seconds, news.ended_rebalance.longest) == (5.5, 5.5)
    assert news.ended_rebalance.generation == 2, "that of its first document"
    assert fleet.plans() == RebalanceChange(), "it is told once"


def test_handover_is_timed_per_queue_and_the_longest_is_reported() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    fleet.obeys("m1")
    fleet.plans(1.0)
    fleet.obeys("m3")
    first = fleet.plans(1.0)
    assert [it.seconds for it in first.handovers] == [2.0]
    assert fleet.tally.rebalances[0].longest is None, "it is not over"
    fleet.obeys("m2")
    fleet.plans(4.0)
    news = fleet.settles()
    assert [it.seconds for it in handovers(news)] == [7.0 + 1.0]
    assert fleet.tally.rebalances[0].longest == 8.0


def test_rebalance_under_way_is_listed_without_its_end() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    assert (fleet.tally.rebalances[0].reason, fleet.tally.rebalances[0].seconds) == ("MemberJoined", None)
    assert fleet.tally.rebalances[0].longest is None
    assert len(fleet.tally.rebalances) == 2


def test_handover_that_returns_to_its_owner_is_not_counted() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    assert fleet.tally.oldest_handover_seconds(fleet.at) == 0.0
    fleet.ends("m3")
    fleet.plans(5.0)
    assert fleet.document is not None
    assert not fleet.document.releasing
    assert fleet.tally.oldest_handover_seconds(fleet.at + 1) == 0.0, "nothing is under way"
    assert (moved(fleet.settles()), handovers(fleet.news)) == (0, [])


def test_handover_from_a_terminated_member_is_granted_at_once() -> None:
    fleet = settled("m1", "m2")
    fleet.ends("m2")
    assert fleet.plans().moved_queues == 3
    fleet.obeys()
    news = fleet.plans(0.5)
    assert [(it.previous_owner, it.granted_at - it.revoked_at, it.seconds) for it in news.handovers] == [
        (holder("m2"), 0.0, 0.5)
    ] * 3
    assert not any(it.is_forced for it in news.handovers)


def test_handover_passed_on_before_confirmation_counts_once_from_the_first_owner() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    fleet.obeys("m1", "m2")
    fleet.plans()
    fleet.ends("m3")
    given_on = fleet.plans()
    assert given_on.moved_queues == 2
    fleet.obeys()
    news = fleet.plans()
    assert {(it.previous_owner and it.previous_owner.name, it.seconds) for it in news.handovers} == {
        ("m1", 3.0),
        ("m2", 3.0),
    }


def test_forced_grant_is_counted_and_contested_until_resolved() -> None:
    fleet = settled("m1", "m2")
    fleet.falls_silent("m2")
    assert fleet.plans().moved_queues == 3
    assert fleet.tally.rebalances[0].forced == 3
    fleet.obeys()
    news = fleet.plans(2.0)
    assert [it.is_forced for it in news.handovers] == [True] * 3
    assert news.ended_rebalance is not None
    assert (news.ended_rebalance.reason, news.ended_rebalance.forced) == ("MemberLost", 3)
    assert fleet.tally.contested_seconds == 3 * 2.0
    fleet.plans(10.0)
    assert fleet.tally.contested_seconds == 3 * 12.0
    fleet.is_heard("m2")
    fleet.plans()
    fleet.obeys("m1")
    fleet.plans()
    assert fleet.document is not None
    assert fleet.document.forced, "m2 is given queues again, and has not said yet what it obeys"
    fleet.settles()
    until = fleet.tally.contested_seconds
    fleet.plans(LONG)
    assert fleet.tally.contested_seconds == until
    assert fleet.document.forced == {}


def test_forced_grant_is_not_contested_by_a_terminated_member() -> None:
    fleet = settled("m1", "m2")
    fleet.falls_silent("m2")
    fleet.settles()
    fleet.ends("m2")
    fleet.settles()
    until = fleet.tally.contested_seconds
    fleet.plans(LONG)
    assert fleet.tally.contested_seconds == until > 0
    assert fleet.tally.rebalances[0].forced == 3, "once"


def test_queue_without_owner_is_counted_in_queue_seconds() -> None:
    fleet = PlannedGroup()
    fleet.plans()
    assert fleet.tally.unowned_seconds == 0.0, "nobody has looked before"
    fleet.plans(10.0)
    assert fleet.tally.unowned_seconds == 60.0
    fleet.joins("m1")
    fleet.plans(5.0)
    assert fleet.tally.unowned_seconds == 90.0
    fleet.obeys()
    fleet.plans(LONG)
    assert fleet.tally.unowned_seconds == 90.0, "somebody works them"


def test_unmanaged_consumer_queues_do_not_count_as_unowned_but_unconsumed_ones_do() -> None:
    fleet = settled("m1", unmanaged_consumers=("10.0.0.9@old",))
    until = fleet.tally.unowned_seconds
    fleet.plans(LONG)
    assert fleet.tally.unowned_seconds == until, "three of six are the foreigner's"
    told = Plan(
        status={"unownedQueues": 2},
        problems=(Finding(Reason.UNMANAGED_CONSUMERS, ""), Finding(Reason.QUEUES_UNOWNED, "")),
    )
    tally = RebalanceTracker()
    for at in (100.0, 110.0):
        tally.record_plan(told, None, {}, at)
    assert tally.unowned_seconds == 20.0


def test_handover_in_progress_does_not_count_as_unowned() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    fleet.plans(10.0)
    assert fleet.tally.unowned_seconds == 0.0


def test_queue_without_owner_is_counted_between_plans_too() -> None:
    fleet = PlannedGroup()
    fleet.plans()
    fleet.tally.count_seconds(fleet.at + 2.0)
    assert fleet.tally.unowned_seconds == 12.0
    fleet.plans(3.0)
    assert fleet.tally.unowned_seconds == 18.0, "no second counts twice"


def test_handover_is_not_counted_by_a_leader_that_did_not_see_it_start() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    fleet.leader_changes()
    assert fleet.plans(5.0) == RebalanceChange()
    assert fleet.tally.oldest_handover_seconds(fleet.at) == 0.0, "nobody knows since when"
    (listed,) = fleet.tally.rebalances
    assert (listed.reason, listed.seconds, listed.message) == ("MemberJoined", None, "")
    news = fleet.settles()
    assert moved(news) == 2, "that they are given, it has seen"
    assert handovers(news) == []
    assert [it.ended_rebalance for it in news if it.ended_rebalance] == []
    assert (fleet.tally.rebalances[0].moved, fleet.tally.rebalances[0].longest) == (2, None)
    assert fleet.tally.rebalances[0].seconds is not None


def test_rebalance_after_a_leader_change_is_counted_in_full() -> None:
    fleet = settled("m1", "m2")
    fleet.leader_changes()
    fleet.plans()
    fleet.joins("m3")
    news = fleet.settles()
    assert (moved(news), len(handovers(news))) == (2, 2)
    assert [it.ended_rebalance.reason for it in news if it.ended_rebalance] == ["MemberJoined"]


def test_rebalance_that_ended_before_a_leader_change_is_listed_but_not_counted() -> None:
    fleet = settled("m1", "m2")
    fleet.leader_changes()
    assert fleet.plans(3600.0) == RebalanceChange()
    (listed,) = fleet.tally.rebalances
    assert (listed.reason, listed.moved, listed.forced, listed.seconds) == ("FirstAssignment", 6, 0, 1.0)
    assert (listed.message, listed.longest, listed.generation) == ("", None, 1)
    assert fleet.plans() == RebalanceChange()
    assert len(fleet.tally.rebalances) == 1


def test_rebalance_figures_are_separate_for_consecutive_rebalances() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans(1.0)
    fleet.plans(20.0)
    fleet.settles()
    fleet.ends("m3")
    fleet.settles()
    ended, joined, first = fleet.tally.rebalances
    assert [it.reason for it in (first, joined, ended)] == ["FirstAssignment", "MemberJoined", "MemberTerminated"]
    assert (joined.moved, ended.moved) == (2, 2)
    assert (joined.longest, ended.longest) == (23.0, 1.0)
    assert [it.ended_rebalance for it in fleet.news if it.ended_rebalance] == [first, joined, ended]


def test_rebalance_history_keeps_only_the_last_20() -> None:
    fleet = settled("m1", "m2")
    for _ in range(20):
        fleet.joins("m3")
        fleet.settles()
        fleet.ends("m3")
        fleet.settles()
    assert len(fleet.tally.rebalances) == 20
    assert fleet.tally.rebalances[0].reason == "MemberTerminated"


def test_rebalance_history_starts_over_for_a_recreated_group() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    for name in ("m1", "m2", "m3"):
        fleet.ends(name)
    fleet.document, fleet.status = None, {}
    fleet.joins("n1")
    news = fleet.settles()
    assert (moved(news), handovers(news)) == (0, [])
    assert [it.reason for it in fleet.tally.rebalances] == ["FirstAssignment"]
    assert fleet.tally.oldest_handover_seconds(fleet.at) == 0.0


def test_rebalance_after_a_lost_assignment_counts_no_moves() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    fleet.obeys("m1", "m2")
    fleet.plans()
    fleet.document = None  # what m3 was given it has not seen yet
    news = fleet.settles()
    assert fleet.document is not None
    assert fleet.document.generation >= NOW
    assert (moved(news), handovers(news)) == (0, [])
    assert {it.forced for it in fleet.tally.rebalances} == {0}


def test_broadcasting_switch_and_back_counts_no_handover() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    fleet.world["spec"] = a_spec(messageModel="Broadcasting")
    news = fleet.settles()
    assert fleet.tally.oldest_handover_seconds(fleet.at) == 0.0
    fleet.world["spec"] = a_spec()
    news += fleet.settles()
    assert (moved(news), handovers(news)) == (0, [])


def test_handover_age_includes_a_removed_queue_that_is_not_counted() -> None:
    fleet = settled("m1", "m2")
    fleet.world["views"] = {"orders": a_view(5)}
    fleet.plans()
    fleet.plans(4.0)
    assert fleet.tally.oldest_handover_seconds(fleet.at) == 4.0
    news = fleet.settles()
    assert (moved(news), handovers(news), fleet.tally.oldest_handover_seconds(fleet.at)) == (0, [], 0.0)


def test_gate_is_counted_once_each_time_it_starts_to_hold() -> None:
    fleet = settled("m1", "m2")
    fleet.world["policy"] = a_policy(paused=True)
    fleet.joins("m3")
    assert fleet.plans().gate_reason is Reason.PAUSED
    assert fleet.plans().gate_reason is None, "it still does"
    fleet.world["policy"] = a_policy(budget={"maxMoves": 1, "per": "1m"})
    assert fleet.plans().gate_reason is Reason.BUDGET_SPENT
    fleet.world["policy"] = a_policy(paused=True)
    assert fleet.plans().gate_reason is Reason.PAUSED


def test_gate_is_not_counted_when_nothing_would_change() -> None:
    fleet = settled("m1", "m2")
    assert fleet.last.hold is not None
    assert fleet.last.hold.reason is Reason.NOTHING_WOULD_CHANGE
    assert [it.gate_reason for it in fleet.news if it.gate_reason] == []
    fleet.world["policy"] = a_policy(paused=True)
    fleet.joins("m3")
    fleet.plans()
    fleet.world["policy"] = a_policy()
    fleet.settles()
    assert [it.gate_reason for it in fleet.news if it.gate_reason] == [Reason.PAUSED]


def test_gate_that_held_before_a_leader_change_is_not_counted() -> None:
    fleet = settled("m1", "m2")
    fleet.world["policy"] = a_policy(paused=True)
    fleet.joins("m3")
    fleet.plans()
    fleet.leader_changes()
    assert fleet.plans() == RebalanceChange()


def test_handover_age_is_that_of_the_oldest_one() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    assert fleet.tally.oldest_handover_seconds(fleet.at + 7.0) == 7.0
    fleet.obeys("m1")
    fleet.plans(2.0)
    fleet.obeys("m3")
    fleet.plans(2.0)
    assert fleet.tally.oldest_handover_seconds(fleet.at) == 4.0, "m2 still has one"
    fleet.settles()
    assert fleet.tally.oldest_handover_seconds(fleet.at + LONG) == 0.0


def test_rebalance_tracker_counts_nothing_for_a_plan_without_assignment() -> None:
    tally = RebalanceTracker()
    found = plan(a_snapshot(spec=None), NOW)
    assert tally.record_plan(found, None, {}, 1.0) == RebalanceChange()
    assert tally.record_plan(found, a_document(members={"m1": Q}), {holder("m1"): 5}, 2.0) == RebalanceChange()
    assert tally.last_plan.status == found.status
    assert tally.record_plan(found, None, {}, 9.0) == RebalanceChange()
    assert (tally.unowned_seconds, tally.contested_seconds) == (0.0, 0.0), "nobody knows of a queue"


def test_forced_grant_count_is_0_without_a_stored_assignment() -> None:
    fleet = settled("m1", "m2")
    fleet.tally.record_plan(fleet.last, None, {}, fleet.at)
    assert fleet.tally.rebalances[0].forced == 0


def test_rebalance_tracker_keeps_no_large_parts_of_a_plan() -> None:
    fleet = PlannedGroup("m1")
    fleet.plans()
    assert (fleet.last.document is None, bool(fleet.last.config_map_data), bool(fleet.last.journal_records)) == (
        False,
        True,
        True,
    )
    kept = fleet.tally.last_plan
    assert (kept.document, kept.config_map_data, kept.journal_records) == (None, {}, ())
    assert kept.status == fleet.last.status


def test_rebalance_continued_by_a_new_leader_is_not_reported_as_ended() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    fleet.obeys("m1", "m2")
    fleet.leader_changes()
    fleet.plans()
    assert fleet.last.document is not None
    assert [it.ended_rebalance for it in fleet.settles() if it.ended_rebalance] == []
    assert fleet.tally.rebalances[0].message == ""


def test_rebalance_under_another_leader_is_listed_before_earlier_ones() -> None:
    fleet = settled("m1", "m2")
    mine = fleet.tally
    fleet.leader_changes()
    fleet.joins("m3")
    fleet.settles()
    fleet.tally = mine
    assert fleet.plans() == RebalanceChange(), "nothing of it is counted"
    first = mine.rebalances[-1]
    assert [(it.reason, it.generation) for it in mine.rebalances] == [("MemberJoined", 3), ("FirstAssignment", 1)]
    assert (first.message, first.seconds, first.moved) == ("A new group", 1.0, 6)


def test_handover_longest_time_is_rounded_to_milliseconds() -> None:
    fleet = settled("m1", "m2")
    fleet.ends("m2")
    fleet.plans()
    fleet.obeys()
    fleet.plans(1.23456)
    assert fleet.tally.rebalances[0].longest == 1.235


def test_handover_age_is_that_of_the_first_started_of_two() -> None:
    fleet = settled("m1", "m2")
    fleet.joins("m3")
    fleet.plans()
    fleet.world["views"] = {"orders": a_view(5)}
    fleet.plans(3.0)
    fleet.world["views"] = {"orders": a_view(3)}
    fleet.plans(3.0)
    assert fleet.document is not None
    assert len({it.since for it in fleet.document.releasing.values()}) > 1
    assert fleet.tally.oldest_handover_seconds(fleet.at) == 6.0


def test_handover_age_excludes_queues_without_previous_owner() -> None:
    fleet = PlannedGroup()
    fleet.plans()
    fleet.joins("m1")
    fleet.plans()
    assert fleet.tally.oldest_handover_seconds(fleet.at + LONG) == 0.0


MEMBERS = ("m1", "m2", "m3", "m4")
happenings = st.one_of(
    st.tuples(st.sampled_from(["join", "end", "silent", "heard", "obey"]), st.sampled_from(MEMBERS)),
    st.tuples(st.just("queues"), st.integers(1, 6)),
    st.tuples(st.just("policy"), st.sampled_from(["Sticky", "Averagely", "ConsistentHash"])),
    st.tuples(st.sampled_from(["pass", "all", "leader", "lose the record", "pause"]), st.integers(1, 60)),
)


def to_one(fleet: PlannedGroup, what: str, name: str) -> None:
    """Let something happen to a member, if it can."""
    if name not in fleet.pods:
        if what == "join":
            fleet.joins(name)
        return
    told = fleet.document is not None and not fleet.pods[name].unreachable_for
    if what == "obey" and told:
        fleet.obeys(name)
    does: dict[str, Callable[[str], None]] = {
        "end": fleet.ends,
        "silent": fleet.falls_silent,
        "decoded_report": fleet.is_heard,
    }
    if what in does:
        does[what](name)


def happen(fleet: PlannedGroup, what: str, given: Any) -> float:
    """Let something happen to a fleet, and return how long it took."""
    match what:
        case "all" if fleet.document:
            fleet.obeys()
        case "queues":
            fleet.world["views"] = {"orders": a_view(given)}
        case "policy":
            fleet.world["policy"] = a_policy(strategy=given)
        case "leader":
            fleet.leader_changes()
        case "lose the record":
            fleet.document = None
        case "pause":
            fleet.world["spec"] = a_spec(paused=given > 30)
        case _:
            to_one(fleet, what, given)
    return float(given) if what == "pass" else 0.5


@given(st.lists(happenings, max_size=25))
def test_handover_count_never_exceeds_moves_in_any_sequence_of_events(story: list[tuple[str, Any]]) -> None:
    fleet = PlannedGroup("m1", "m2")
    since = 0  # when the one who leads began
    for what, given_ in (*story, ("all", 1), ("all", 1)):
        seconds = happen(fleet, what, given_)
        since = len(fleet.news) if what == "leader" else since
        before = fleet.tally.unowned_seconds, fleet.tally.contested_seconds
        news = fleet.plans(seconds)
        assert fleet.tally.unowned_seconds >= before[0]
        assert fleet.tally.contested_seconds >= before[1]
        assert fleet.tally.oldest_handover_seconds(fleet.at) >= 0
        assert all(it.revoked_at <= it.granted_at <= it.obeyed_at == fleet.at for it in news.handovers)
        assert moved(fleet.news[since:]) >= len(handovers(fleet.news[since:]))
        assert news.ended_rebalance is None or news.ended_rebalance == fleet.tally.rebalances[0]
        assert all((it.seconds or 0) >= 0 and (it.longest or 0) >= 0 for it in fleet.tally.rebalances)
        assert len({it.at for it in fleet.tally.rebalances}) == len(fleet.tally.rebalances)


def test_rebalance_lists_its_handovers_at_the_end_forced_first_then_slowest() -> None:
    fleet = settled("m1", "m2", "m3")
    fleet.ends("m3")
    fleet.plans()
    fleet.obeys("m1")
    fleet.plans(1.0)
    fleet.obeys("m2")
    fleet.falls_silent("m2")
    fleet.plans(4.0)
    (past,) = [it.completed for it in fleet.settles() if it.completed]
    told = [(it.is_forced, it.seconds) for it in past.slowest_handovers]
    assert told == sorted(told, reverse=True)
    assert len({forced for forced, _ in told}) == 2
    assert len({seconds for _, seconds in told}) > 1
    assert past.handover_count == len(told) == len(handovers(fleet.news))
