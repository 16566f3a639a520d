"""The whole member: assignments that it applies, its report, and that it consumes no queue of another member."""

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import msgspec
import pytest

from rota.documents import Assignment, Share, encode_assignment
from rota.model import Queue
from rota.ranges import from_ranges
from rota.reports import decode_report
from rota.sidecar.member.member import MAX_GENERATIONS_AHEAD, RESUME_SECONDS, Effects, Member
from rota.sidecar.member.queue_lifecycle import LOCK_HOLD_SECONDS, Command, LeaseAction, LeaseEvent, LeaseState

A, B, C = (Queue("orders", "broker-a", number) for number in range(3))
NAME, UID, GROUP = "m1", "uid-1", "shop/orders"


def an_assignment(generation: int, *queues: Queue, uid: str = UID, name: str = NAME, **changes: Any) -> str:
    fields = {"group": GROUP, "issued_at": "2026-11-21T08:00:00.000Z", "members": {name: Share(uid, queues)}} | changes
    text = encode_assignment(Assignment(generation=generation, **fields))["assignment.json"]
    assert isinstance(text, str)
    return text


def a_member(*queues: Queue, generation: int = 5, **options: Any) -> Member:
    """Return a member that runs these queues, all since 0."""
    member = Member(NAME, UID, **options)
    answer(member, member.apply_assignment(an_assignment(generation, *queues), 0.0), 0.0)
    assert states(member) == dict.fromkeys(queues, LeaseState.RUNNING)
    return member


SUCCESS_EVENTS = {
    LeaseAction.LOCK: LeaseEvent.LOCKED,
    LeaseAction.FIND_START: LeaseEvent.START_FOUND,
    LeaseAction.STOP: LeaseEvent.DRAINED,
    LeaseAction.ABORT: LeaseEvent.DRAINED,
    LeaseAction.UNLOCK: LeaseEvent.UNLOCKED,
}


def answer(member: Member, effects: Effects, now: float) -> list[Command]:
    """Answer every command successfully, and the commands that follow; return all of them."""
    commands = list(effects.commands)
    for command in commands:
        if command.action in SUCCESS_EVENTS:
            sent = now if command.action is LeaseAction.LOCK else None
            commands += member.on_event(
                SUCCESS_EVENTS[command.action], command.queue, command.lease_number, now, sent
            ).commands
    return commands


def states(member: Member) -> dict[Queue, LeaseState]:
    return {queue: lease.state for queue, lease in member.leases.items()}


def acts(effects: Effects) -> list[tuple[LeaseAction, Queue]]:
    return [(command.action, command.queue) for command in effects.commands]


def held(member: Member) -> list[Queue]:
    return from_ranges(member.report().held)


def releasing(member: Member) -> list[Queue]:
    return from_ranges(member.report().releasing)


def test_member_starts_the_queues_of_its_first_assignment_and_stores_the_generation() -> None:
    member = Member(NAME, UID)
    effects = member.apply_assignment(an_assignment(5, B, A), 0.0)
    assert effects.store_generation == 5
    assert acts(effects) == [(LeaseAction.FIND_START, A), (LeaseAction.FIND_START, B)]
    assert held(member) == [A, B]
    assert member.report().generation == 5
    assert {command.action for command in answer(member, effects, 0.0)} == {LeaseAction.FIND_START, LeaseAction.FETCH}
    assert set(states(member).values()) == {LeaseState.RUNNING}


def test_generation_that_is_higher_stops_queues_before_it_starts_others() -> None:
    member = a_member(A, B)
    effects = member.apply_assignment(an_assignment(7, B, C), 10.0)
    assert effects.store_generation == 7
    assert acts(effects) == [(LeaseAction.STOP, A), (LeaseAction.FIND_START, C)]
    assert (held(member), releasing(member)) == ([B, C], [A])


@pytest.mark.parametrize(
    ("text", "rejection"),
    [
        (None, "There is no assignment; generation 5 stays in force"),
        (b"", "The assignment is not a complete JSON object"),
        (an_assignment(9, A)[:-9], "The assignment is not a complete JSON object"),
        (an_assignment(9).replace("9", "8"), "The assignment was modified or truncated: its checksum does not match"),
        (an_assignment(4), "The assignment has generation 4; generation 5 is already in force"),
        (an_assignment(5), "The assignment differs from the assignment of the same generation 5 that is in force"),
        (an_assignment(9, group="a/b"), "The assignment is of group a/b, this member belongs to group shop/orders"),
        (an_assignment(9).replace('"schema":1', '"schema":2'), None),
        (an_assignment(5, A), None),
    ],
    ids=["missing", "empty", "torn", "changed", "older", "two texts", "another group", "schema", "the same"],
)
def test_assignment_that_is_not_applicable_changes_nothing(text: str | bytes | None, rejection: str | None) -> None:
    member = a_member(A)
    previous_report = member.report()
    effects = member.apply_assignment(text, 1.0)
    assert (effects.store_generation, effects.commands) == (None, ())
    assert effects.rejection == rejection or rejection is None
    assert member.report() is previous_report
    assert states(member) == {A: LeaseState.RUNNING}


def test_assignment_that_is_read_again_unchanged_does_nothing() -> None:
    assert a_member(A).apply_assignment(an_assignment(5, A), 1.0) == Effects()


def test_assignment_that_is_sent_is_obeyed_if_it_is_newer_and_stays_in_force_while_older_ones_are_read() -> None:
    member = a_member(A)
    effects = member.apply_sent_assignment(an_assignment(6, B), 1.0)
    assert effects.store_generation == 6
    assert acts(effects) == [(LeaseAction.STOP, A), (LeaseAction.FIND_START, B)]
    effects = member.apply_assignment(an_assignment(5, A), 2.0)
    assert (effects.commands, effects.is_older) == ((), True), "the volume does not show it yet"
    assert member.apply_assignment(an_assignment(6, B), 3.0) == Effects()
    for generation in (5, 6):
        late = member.apply_sent_assignment(an_assignment(generation, A), 4.0)
        assert (late.commands, late.is_older) == ((), generation == 5)
        assert late.rejection
    assert (member.obeyed_generation, held(member)) == (6, [B])


def test_assignment_that_is_sent_after_a_stall_waits_for_a_read() -> None:
    member = a_member(A)
    member.mark_stalled()
    effects = member.apply_sent_assignment(an_assignment(6, A, B), 1.0)
    assert effects == Effects(rejection="An assignment was sent after a stall: the mounted one must be read first")
    assert not member.may_deliver(A, 1.0, 1.0)
    member.apply_assignment(an_assignment(7, A), 2.0)
    assert member.apply_sent_assignment(an_assignment(6, A, B), 3.0).is_older
    assert held(member) == [A]


def test_assignment_that_is_sent_may_be_only_so_many_generations_newer() -> None:
    member = a_member(A)
    highest = 5 + MAX_GENERATIONS_AHEAD
    rejection = "The sent assignment is 1001 generations newer than the obeyed one (5): too many"
    assert member.apply_sent_assignment(an_assignment(highest + 1, B), 1.0) == Effects(rejection=rejection)
    assert member.apply_assignment(an_assignment(5, A), 1.0) == Effects()
    assert member.apply_sent_assignment(an_assignment(highest, B), 2.0).store_generation == highest
    assert member.apply_assignment(an_assignment(10**9, A), 3.0).store_generation == 10**9


def test_assignment_of_another_group_is_rejected_from_the_start_if_the_group_is_known() -> None:
    member = Member(NAME, UID, group="shop/bills")
    assert member.apply_assignment(an_assignment(9, A), 0.0).rejection is not None
    assert member.obeyed_generation == 0
    assert member.leases == {}


@pytest.mark.parametrize(
    "text",
    [an_assignment(6, A, B, name="m2"), an_assignment(6, A, B, uid="uid-2"), an_assignment(6)],
    ids=["not named", "another pod's", "no queues"],
)
def test_assignment_without_queues_for_the_member_is_applied(text: str) -> None:
    member = a_member(A, B)
    effects = member.apply_assignment(text, 1.0)
    assert effects.store_generation == 6
    assert acts(effects) == [(LeaseAction.STOP, A), (LeaseAction.STOP, B)]
    answer(member, effects, 1.0)
    assert (member.report().generation, member.report().active_queues) == (6, frozenset())


def test_restart_of_a_member_applies_the_stored_generation_but_no_lower_one() -> None:
    member = Member(NAME, UID, obeyed_generation=5)
    assert member.report().generation == 5
    assert member.apply_assignment(an_assignment(4, A), 0.0).store_generation is None
    assert member.apply_assignment(None, 0.0).store_generation is None
    effects = member.apply_assignment(an_assignment(5, A), 0.0)
    assert (effects.store_generation, acts(effects)) == (5, [(LeaseAction.FIND_START, A)])
    assert member.apply_assignment(an_assignment(5, B), 0.0).rejection == (
        "The assignment differs from the assignment of the same generation 5 that is in force"
    )


def test_broadcasting_assigns_every_queue_to_a_listed_member_only() -> None:
    member = Member(NAME, UID)
    member.apply_assignment(an_assignment(1, everyone=(A, B, C)), 0.0)
    assert sorted(member.leases) == [A, B, C]
    effects = member.apply_assignment(an_assignment(2, uid="uid-2", everyone=(A, B, C)), 0.0)
    assert {act for act, _ in acts(effects)} == {LeaseAction.STOP}


def test_member_keeps_consuming_without_an_assignment() -> None:
    member = a_member(A)
    assert member.apply_assignment(None, 1e6).commands == ()
    assert member.may_deliver(A, 1e6, 30.0)


def test_queue_release_waits_for_the_last_commit_and_the_unlock() -> None:
    member = a_member(A, orderly=True)
    stop = member.apply_assignment(an_assignment(6), 1.0).commands[0]
    assert not member.may_deliver(A, 1.0, 30.0)
    assert member.may_commit(A)
    unlock = member.on_event(LeaseEvent.DRAINED, A, stop.lease_number, 2.0).commands[0]
    assert unlock.action is LeaseAction.UNLOCK
    assert (held(member), releasing(member)) == ([], [A])
    member.on_event(LeaseEvent.UNLOCKED, A, unlock.lease_number, 3.0)
    assert member.report().active_queues == frozenset()
    assert not member.may_commit(A)


def test_drain_is_cut_after_its_timeout_since_the_assignment_was_applied() -> None:
    member = a_member(A, drain_timeout=20.0)
    stop = member.apply_assignment(an_assignment(6), 100.0).commands[0]
    member.apply_assignment(an_assignment(7), 110.0)
    assert member.next_timer_at() == 120.0
    assert member.run_due_timers(119.9) == Effects()
    assert acts(member.run_due_timers(120.0)) == [(LeaseAction.ABORT, A)]
    assert member.next_timer_at() is None
    assert releasing(member) == [A]
    member.on_event(LeaseEvent.DRAINED, A, stop.lease_number, 121.0)
    assert releasing(member) == []


def test_drain_is_cancelled_when_the_queue_is_assigned_again() -> None:
    member = a_member(A)
    stop = member.apply_assignment(an_assignment(6), 1.0).commands[0]
    assert acts(member.apply_assignment(an_assignment(7, A), 2.0)) == [(LeaseAction.FETCH, A)]
    assert member.on_event(LeaseEvent.DRAINED, A, stop.lease_number, 3.0) == Effects()
    assert states(member) == {A: LeaseState.RUNNING}
    assert member.next_timer_at() is None
    second_stop = member.apply_assignment(an_assignment(8), 4.0).commands[0]
    assert member.on_event(LeaseEvent.DRAINED, A, stop.lease_number, 5.0) == Effects()  # of the first drain
    assert releasing(member) == [A]
    member.on_event(LeaseEvent.DRAINED, A, second_stop.lease_number, 6.0)
    assert member.leases == {}


def test_drain_that_was_cut_ends_before_the_queue_starts_again() -> None:
    member = a_member(A)
    member.apply_assignment(an_assignment(6), 1.0)
    cut = member.run_due_timers(31.0).commands[0]
    assert member.apply_assignment(an_assignment(7, A), 32.0).commands == ()
    assert releasing(member) == [A]
    assert acts(member.on_event(LeaseEvent.DRAINED, A, cut.lease_number, 33.0)) == [(LeaseAction.FIND_START, A)]
    assert held(member) == [A]


@pytest.mark.parametrize("orderly", [False, True])
def test_queue_lifecycle_ignores_responses_of_an_earlier_number(orderly: bool) -> None:  # noqa: FBT001 - a case
    member = Member(NAME, UID, orderly=orderly)
    old = member.apply_assignment(an_assignment(5, A), 0.0).commands[0]
    answer(member, member.apply_assignment(an_assignment(6), 1.0), 1.0)
    assert member.leases == {}
    for event in (LeaseEvent.LOCKED, LeaseEvent.START_FOUND):
        assert member.on_event(event, A, old.lease_number, 2.0, 0.5) == Effects()
    member.apply_assignment(an_assignment(7, A), 3.0)
    states_before = states(member)
    for event in (LeaseEvent.LOCKED, LeaseEvent.START_FOUND, LeaseEvent.REFUSED, LeaseEvent.FAILED, LeaseEvent.DRAINED):
        assert member.on_event(event, A, old.lease_number, 4.0, 0.5) == Effects()
    assert states(member) == states_before


def test_member_reports_stuck_queues_as_held_and_retries_them() -> None:
    member = Member(NAME, UID, orderly=True)
    locks = {
        command.queue: command.lease_number for command in member.apply_assignment(an_assignment(5, A, B), 0.0).commands
    }
    member.on_event(LeaseEvent.REFUSED, A, locks[A], 0.0)
    find_start = member.on_event(LeaseEvent.LOCKED, B, locks[B], 0.0, 0.0).commands[0]
    member.on_event(LeaseEvent.FAILED, B, find_start.lease_number, 0.5)
    assert member.stuck_queues == {A: LeaseEvent.REFUSED, B: LeaseEvent.FAILED}
    assert held(member) == [A, B]
    assert member.next_timer_at() == 1.0
    assert acts(member.run_due_timers(1.0)) == [(LeaseAction.LOCK, A)]
    assert acts(member.run_due_timers(1.5)) == [(LeaseAction.LOCK, B)]
    assert member.stuck_queues == {}


def test_lock_event_requires_the_time_of_its_request() -> None:
    member = Member(NAME, UID, orderly=True)
    lock = member.apply_assignment(an_assignment(5, A), 0.0).commands[0]
    with pytest.raises(ValueError, match="needs the time"):
        member.on_event(LeaseEvent.LOCKED, A, lock.lease_number, 1.0)


def test_lock_trust_counts_from_sending_the_request() -> None:
    member = a_member(A, orderly=True)
    renewal = member.run_due_timers(20.0).commands[0]
    member.on_event(LeaseEvent.LOCKED, A, renewal.lease_number, 24.0, 21.0)
    assert member.may_deliver(A, 50.9, 1.0)
    assert not member.may_deliver(A, 51.0, 1.0)


def test_lock_in_use_is_renewed_and_given_up_without_a_response() -> None:
    member = a_member(A, orderly=True)
    assert member.may_deliver(A, 29.9, 30.0)
    assert not member.may_deliver(A, 29.9, 30.1)
    assert acts(member.run_due_timers(20.0)) == [(LeaseAction.LOCK, A)]
    assert not member.may_deliver(A, 30.0, 1.0)
    assert acts(member.run_due_timers(30.0)) == [(LeaseAction.LOCK, A), (LeaseAction.STOP, A), (LeaseAction.LOCK, A)]
    assert member.next_timer_at() is None
    assert states(member) == {A: LeaseState.LOCKING}


def time_of_first_fetch(member: Member, effects: Effects) -> float:
    """Return when a member first fetches if its broker answers every request successfully."""
    now = 0.0
    for _ in range(100):
        if any(command.action is LeaseAction.FETCH for command in answer(member, effects, now)):
            return now
        now = member.next_timer_at() or now
        effects = member.run_due_timers(now)
    raise AssertionError("It never fetches")


@pytest.mark.parametrize(
    ("orderly", "forced", "obeyed", "waits"),
    [
        (True, {}, 0, 0.0),
        (True, {B: 5}, 0, 0.0),
        (True, {A: 5}, 0, LOCK_HOLD_SECONDS),
        (True, {A: 3}, 4, LOCK_HOLD_SECONDS),
        (False, {A: 5}, 0, 0.0),
    ],
    ids=["graceful", "another queue", "forced", "forced before the restart", "Concurrent"],
)
def test_forced_grant_of_an_orderly_queue_waits_a_minute_under_its_lock(
    orderly: bool,  # noqa: FBT001 - a case
    forced: Mapping[Queue, int],
    obeyed: int,
    waits: float,
) -> None:
    member = Member(NAME, UID, orderly=orderly, obeyed_generation=obeyed)
    assert time_of_first_fetch(member, member.apply_assignment(an_assignment(5, A, forced=forced), 0.0)) == waits


@pytest.mark.parametrize(("orderly", "waits"), [(False, 0.0), (True, LOCK_HOLD_SECONDS)])
def test_forced_grant_in_a_missed_generation_restarts_the_queue(
    orderly: bool,  # noqa: FBT001 - a case
    waits: float,
) -> None:
    member = a_member(A, B, orderly=orderly)
    effects = member.apply_assignment(an_assignment(9, A, B, forced={A: 7, B: 5}), 0.0)
    assert acts(effects) == [(LeaseAction.STOP, A)]
    assert releasing(member) == [A]
    assert time_of_first_fetch(member, effects) == waits
    assert acts(member.apply_assignment(an_assignment(10, A, B, forced={A: 7, B: 5}), 61.0)) == []


def test_forced_grant_during_a_drain_prevents_its_cancellation() -> None:
    member = a_member(A)
    member.apply_assignment(an_assignment(7, forced={A: 6}), 0.0)
    assert member.apply_assignment(an_assignment(8, A), 1.0).commands == ()
    assert releasing(member) == [A]


def test_drain_releases_every_queue_and_its_end_starts_those_still_assigned() -> None:
    member = a_member(A, B)
    effects = member.drain(final=False, now=1.0)
    assert acts(effects) == [(LeaseAction.STOP, A), (LeaseAction.STOP, B)]
    assert not effects.store_final
    assert member.report().state == "draining"
    assert member.drain(final=False, now=2.0) == Effects()
    assert member.next_timer_at() == 31.0
    answer(member, effects, 3.0)
    assert (member.report().state, member.report().final) == ("drained", False)
    assert member.apply_assignment(an_assignment(6, B, C), 4.0).commands == ()
    assert member.report().generation == 6
    assert acts(member.end_drain(5.0)) == [(LeaseAction.FIND_START, B), (LeaseAction.FIND_START, C)]
    assert member.report().state == "serving"
    assert member.end_drain(6.0) == Effects()


def test_drain_that_is_reverted_early_ends_before_a_queue_restarts() -> None:
    member = a_member(A, B)
    stops = {command.queue: command.lease_number for command in member.drain(final=False, now=1.0).commands}
    member.on_event(LeaseEvent.DRAINED, A, stops[A], 1.5)
    assert acts(member.end_drain(2.0)) == [(LeaseAction.FIND_START, A)]
    assert (held(member), releasing(member), member.state) == ([A], [B], "serving")
    assert acts(member.on_event(LeaseEvent.DRAINED, B, stops[B], 3.0)) == [(LeaseAction.FIND_START, B)]


def test_drain_delays_a_new_assignment_until_the_app_is_back() -> None:
    member = a_member(A)
    member.apply_assignment(an_assignment(6), 0.5)
    member.drain(final=False, now=1.0)
    assert member.apply_assignment(an_assignment(7, A), 2.0).commands == ()
    assert member.end_drain(3.0).commands == ()
    answer(member, Effects(commands=(Command(LeaseAction.STOP, A, member.leases[A].number),)), 4.0)
    assert states(member) == {A: LeaseState.RUNNING}


def test_drain_that_is_final_cannot_be_reverted_even_by_a_restart() -> None:
    member = a_member(A)
    effects = member.drain(final=True, now=1.0)
    assert effects.store_final
    assert not member.drain(final=True, now=1.0).store_final
    assert (member.report().state, member.report().final) == ("draining", True)
    answer(member, effects, 2.0)
    assert member.report().is_drained
    for drained_member in (member, Member(NAME, UID, obeyed_generation=5, final=True)):
        assert drained_member.end_drain(3.0) == Effects()
        assert (drained_member.apply_assignment(an_assignment(6, A), 3.0).store_generation, drained_member.leases) == (
            6,
            {},
        )
        assert drained_member.report().is_drained


def test_restart_with_an_assignment_older_than_the_obeyed_one_does_not_call_any_in_force() -> None:
    """The newer one was sent to the previous process, and the volume does not show it yet."""
    member = Member(NAME, UID, obeyed_generation=5)
    effects = member.apply_assignment(an_assignment(4, A), 0.0)
    reason = "The assignment has generation 4; generation 5 was obeyed before the restart, so this one is not"
    assert effects == Effects(rejection=reason, is_older=True)
    assert acts(member.apply_assignment(an_assignment(5, A), 0.0)) == [(LeaseAction.FIND_START, A)]


def test_drain_for_a_restart_can_become_final() -> None:
    member = a_member(A)
    member.drain(final=False, now=1.0)
    previous_revision = member.report().revision
    assert member.drain(final=True, now=2.0) == Effects(store_final=True)
    assert member.report().revision > previous_revision
    assert not member.drain(final=False, now=3.0).store_final
    assert member.final


def test_drain_of_a_member_without_queues_ends_at_once() -> None:
    member = Member(NAME, UID)
    member.drain(final=False, now=0.0)
    assert member.report().state == "drained"


def test_member_that_stalled_reads_the_assignment_before_it_delivers_or_commits() -> None:
    member = a_member(A)
    member.mark_stalled()
    assert not member.may_deliver(A, 1.0, 1.0)
    assert not member.may_commit(A)
    member.apply_assignment(an_assignment(5, A), 1.0)
    assert member.may_deliver(A, 1.0, 1.0)
    assert member.may_commit(A)


def test_report_revision_grows_only_when_its_queues_or_generation_change() -> None:
    member = a_member(A, orderly=True)
    previous_report = member.report()
    renewal = member.run_due_timers(20.0).commands[0]
    member.on_event(LeaseEvent.LOCKED, A, renewal.lease_number, 21.0, 20.0)
    member.apply_assignment("torn", 22.0)
    member.on_event(LeaseEvent.START_FOUND, A, 99, 22.0)
    assert member.report() is previous_report
    member.apply_assignment(an_assignment(6, A), 23.0)
    assert member.report().revision == previous_report.revision + 1
    assert member.report().held == previous_report.held
    member.apply_assignment(an_assignment(7), 23.0)
    assert member.report().revision == previous_report.revision + 2


def test_report_revision_grows_only_when_broker_reachability_changes() -> None:
    member = a_member(A)
    assert member.report().brokers == {}
    initial_revision = member.report().revision
    for growth, reachability in (
        (1, {"a": True}),
        (1, {"a": True}),
        (2, {"b": False, "a": True}),
        (3, {"a": True}),
        (4, {}),
    ):
        member.set_broker_reachability(reachability)
        assert (member.report().revision, member.report().brokers) == (initial_revision + growth, reachability)
    member.set_broker_reachability({})
    assert member.report().revision == initial_revision + 4


def test_report_copies_broker_reachability_when_it_is_set() -> None:
    member = a_member(A)
    reachability = {"a": True}
    member.set_broker_reachability(reachability)
    reachability["a"] = False
    assert member.report().brokers == {"a": True}
    member.set_broker_reachability(reachability)
    assert member.report().brokers == {"a": False}


def test_member_keeps_its_queues_when_a_broker_is_unreachable() -> None:
    member = a_member(A)
    member.set_broker_reachability({"broker-a": False})
    assert (held(member), states(member)) == ([A], {A: LeaseState.RUNNING})
    assert member.may_deliver(A, 1.0, 30.0)
    assert member.may_commit(A)


def test_report_of_a_member_can_be_read_by_the_operator() -> None:
    report = a_member(A, B, C).report()
    assert decode_report(msgspec.json.encode(report)).active_queues == {A, B, C}


QUEUES = (A, B, C)


class RandomWalk:
    """A member, and an agent that runs its commands and answers them in any order, late and repeatedly."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self.stored_state = (0, False)
        self.orderly = random.random() < 0.5
        self.newest_generation = 0
        self.assignments: dict[int, tuple[str, frozenset[Queue]]] = {}
        self.restart()

    def restart(self) -> None:
        obeyed, final = self.stored_state
        self.member = Member(NAME, UID, orderly=self.orderly, drain_timeout=15.0, obeyed_generation=obeyed, final=final)
        self.commands: list[Command] = []  # with answered ones
        self.answered_count = 0
        self.fetching: set[Queue] = set()
        self.deliveries_since: dict[
            Queue, int
        ] = {}  # queues that may have open deliveries: number of the FETCH command
        self.assigned: frozenset[Queue] = frozenset()
        self.is_draining = final
        self.last_report: tuple[int, object] = (-1, None)

    def run_effects(self, effects: Effects) -> None:
        self.stored_state = (
            self.stored_state[0] if effects.store_generation is None else effects.store_generation,
            self.stored_state[1] or effects.store_final,
        )
        for command in effects.commands:
            if command.action is LeaseAction.FETCH:
                assert command.queue in self.assigned
                assert not self.is_draining
                self.fetching.add(command.queue)
                self.deliveries_since[command.queue] = len(self.commands)
            if command.action is LeaseAction.STOP:
                self.fetching.discard(command.queue)
            self.commands.append(command)

    def read(self, text: str | None, generation: int = 0, assigned: Iterable[Queue] = ()) -> None:
        previous_generation = self.member.obeyed_generation
        if text is not None and self.random.random() < 0.3:
            effects = self.member.apply_sent_assignment(text, self.now)
        else:
            effects = self.member.apply_assignment(text, self.now)
        assert self.member.obeyed_generation >= previous_generation
        if effects.store_generation is not None:
            assert effects.store_generation == generation >= self.stored_state[0]
            self.assigned = frozenset(assigned)
        self.run_effects(effects)

    def apply_next_assignment(self) -> None:
        self.newest_generation += self.random.randint(1, 3)
        share = frozenset(queue for queue in QUEUES if self.random.random() < 0.6)
        forced = {queue: self.newest_generation for queue in QUEUES if self.random.random() < 0.1}
        uid, assigned = (UID, share) if self.random.random() < 0.9 else ("uid-2", frozenset[Queue]())
        text = an_assignment(self.newest_generation, *sorted(share), uid=uid, forced=forced)
        self.assignments[self.newest_generation] = text, assigned
        self.read(text, self.newest_generation, assigned)

    def repeat_an_assignment(self) -> None:
        if self.assignments:
            generation = self.random.choice(sorted(self.assignments))
            self.read(self.assignments[generation][0], generation, self.assignments[generation][1])

    def apply_torn_assignment(self) -> None:
        text = an_assignment(self.newest_generation + 5, *QUEUES)
        torn = [None, text[: self.random.randrange(len(text))], text.replace("orders", "ordres")]
        self.read(self.random.choice(torn))

    def answer_next_command(self) -> None:
        if self.answered_count < len(self.commands):
            self.reply(self.answered_count, may_fail=self.random.random() < 0.2)
            self.answered_count += 1

    def answer_late(self) -> None:
        if self.commands:
            oldest = len(self.commands) - self.random.choice([4, len(self.commands)])
            self.reply(self.random.randrange(max(0, oldest), len(self.commands)))

    def reply(self, number: int, *, may_fail: bool = False) -> None:
        command = self.commands[number]
        event = SUCCESS_EVENTS.get(command.action)
        if event is None:
            return
        if may_fail and command.action in {LeaseAction.LOCK, LeaseAction.FIND_START}:
            refused = command.action is LeaseAction.LOCK and self.random.random() < 0.5
            event = LeaseEvent.REFUSED if refused else LeaseEvent.FAILED
        if event is LeaseEvent.DRAINED and self.deliveries_since.get(command.queue, number) <= number:
            self.deliveries_since.pop(command.queue, None)  # otherwise the answer is older than the latest fetch
        lease = self.member.leases.get(command.queue)
        states_before = states(self.member)
        late = lease is None or lease.number != command.lease_number
        self.run_effects(self.member.on_event(event, command.queue, command.lease_number, self.now, self.now))
        assert not late or states(self.member) == states_before

    def advance_time(self) -> None:
        self.now += self.random.choice([0.1, 1.0, 5.0, 20.0, 70.0])
        self.run_effects(self.member.run_due_timers(self.now))

    def drain(self) -> None:
        self.is_draining = True
        self.run_effects(self.member.drain(final=self.random.random() < 0.1, now=self.now))

    def end_drain(self) -> None:
        self.is_draining = self.stored_state[1]
        self.run_effects(self.member.end_drain(self.now))

    def stall(self) -> None:
        self.member.mark_stalled()
        assert not any(
            self.member.may_deliver(queue, self.now, 1.0) or self.member.may_commit(queue) for queue in QUEUES
        )
        self.read(None)

    def check_report_and_deliveries(self) -> None:
        report = self.member.report()
        assert report.generation == self.stored_state[0] == self.member.obeyed_generation
        assert self.deliveries_since.keys() <= report.active_queues
        for queue in QUEUES:
            if queue not in report.active_queues:
                assert not self.member.may_commit(queue)
            if self.member.may_deliver(queue, self.now, 1.0):
                assert queue in self.assigned & self.fetching
                assert not self.is_draining
        content = (report.generation, report.state, report.final, report.held, report.releasing)
        revision, previous_content = self.last_report
        assert (content == previous_content) == (report.revision == revision)
        assert report.revision >= revision
        self.last_report = report.revision, content

    def check_queues_settle(self) -> None:
        for _ in range(200):
            while self.answered_count < len(self.commands):
                self.reply(self.answered_count)
                self.answered_count += 1
            self.check_report_and_deliveries()
            if set(states(self.member).values()) <= {LeaseState.RUNNING}:
                break
            self.now = max(self.now, self.member.next_timer_at() or 0.0)
            self.run_effects(self.member.run_due_timers(self.now))
        assert states(self.member) == dict.fromkeys([] if self.is_draining else self.assigned, LeaseState.RUNNING)


STEPS = {
    RandomWalk.apply_next_assignment: 8,
    RandomWalk.repeat_an_assignment: 3,
    RandomWalk.apply_torn_assignment: 2,
    RandomWalk.answer_next_command: 24,
    RandomWalk.answer_late: 10,
    RandomWalk.advance_time: 5,
    RandomWalk.drain: 1,
    RandomWalk.end_drain: 3,
    RandomWalk.stall: 1,
    RandomWalk.restart: 0.5,
}


@pytest.mark.parametrize("seed", range(60))
def test_member_never_consumes_unassigned_queues_in_random_orders_of_events(seed: int) -> None:
    walk = RandomWalk(Random(seed))
    for step in walk.random.choices(list(STEPS), list(STEPS.values()), k=250):
        step(walk)
        walk.check_report_and_deliveries()
    walk.check_queues_settle()


# Restarts.

CURRENT, PREVIOUS = 2, 1


def share_of_incarnation(incarnation: int, *queues: Queue) -> dict[str, Any]:
    """Return the fields of an assignment that gives queues to one process of the pod."""
    return {"members": {NAME: Share(UID, queues, incarnation)}, "incarnations_since": 3}


def a_restarted_member() -> Member:
    member = Member(NAME, UID, obeyed_generation=5)
    member.set_incarnation(CURRENT, 1763712000.5)
    return member


def test_restart_consumes_only_queues_assigned_to_this_process() -> None:
    member = a_restarted_member()
    effects = member.apply_assignment(an_assignment(5, **share_of_incarnation(PREVIOUS, A)), 0.0)
    assert (acts(effects), member.leases, effects.store_generation) == ([], {}, 5)
    report = member.report()
    assert (report.incarnation_number, report.started, report.reads, report.held) == (CURRENT, 1763712000.5, 2, {})
    effects = member.apply_assignment(an_assignment(6, **share_of_incarnation(CURRENT, A)), 1.0)
    assert acts(effects) == [(LeaseAction.FIND_START, A)]
    effects = member.apply_assignment(an_assignment(7, **share_of_incarnation(CURRENT + 1, A)), 2.0)
    assert acts(effects) == [(LeaseAction.STOP, A)], (
        "the assignment names a later process: this one does not own the queue"
    )


def test_restart_consumes_queues_that_an_assignment_of_schema_1_gives_to_the_pod() -> None:
    member = a_restarted_member()
    assert acts(member.apply_assignment(an_assignment(5, A), 0.0)) == [(LeaseAction.FIND_START, A)]


def test_restart_is_resumed_by_the_member_itself_only_without_requests_for_its_report() -> None:
    member = a_restarted_member()
    member.apply_assignment(an_assignment(5, **share_of_incarnation(PREVIOUS, A)), 10.0)
    assert member.next_timer_at() == 10.0 + RESUME_SECONDS
    member.note_report_request(100.0)
    assert member.next_timer_at() == 100.0 + RESUME_SECONDS
    due = 100.0 + RESUME_SECONDS
    assert acts(member.run_due_timers(due - 0.1)) == []
    member.mark_stalled()
    assert acts(member.run_due_timers(due)) == [], "the mounted assignment may be outdated"
    member.apply_assignment(an_assignment(5, **share_of_incarnation(PREVIOUS, A)), due)
    assert acts(member.run_due_timers(due)) == [(LeaseAction.FIND_START, A)]
    assert member.next_timer_at() is None
    assert from_ranges(member.report().held) == [A]
    effects = member.apply_assignment(an_assignment(6, **share_of_incarnation(PREVIOUS, A, B)), due + 1.0)
    assert acts(effects) == [(LeaseAction.FIND_START, B)], "the operator does not know of this process yet"
    assert acts(member.apply_assignment(an_assignment(7, **share_of_incarnation(CURRENT, B)), due + 2.0)) == [
        (LeaseAction.STOP, A)
    ]


def test_restart_of_a_drained_member_resumes_nothing() -> None:
    member = a_restarted_member()
    member.apply_assignment(an_assignment(5, **share_of_incarnation(PREVIOUS, A)), 0.0)
    member.drain(final=True, now=1.0)
    assert acts(member.run_due_timers(1.0 + RESUME_SECONDS)) == []


def test_restart_is_counted_in_the_report_once_its_number_is_on_the_disk() -> None:
    member = Member(NAME, UID)
    previous_report = member.report()
    assert previous_report.incarnation_number == 0
    member.set_incarnation(1, 7.0)
    assert (member.report().incarnation_number, member.report().revision) == (1, previous_report.revision + 1)
