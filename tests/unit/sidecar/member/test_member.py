"""The whole member: what it obeys, what it says of itself, and that it never works what is not its."""

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import msgspec
import pytest

from rota.documents import Assignment, Share, encode_assignment
from rota.model import Queue
from rota.ranges import from_ranges
from rota.reports import decode_report
from rota.sidecar.member.member import RESUME_SECONDS, Effects, Member
from rota.sidecar.member.queue_lifecycle import LOCK_HOLD_SECONDS, Command, LeaseAction, LeaseEvent, LeaseState

A, B, C = (Queue("orders", "broker-a", number) for number in range(3))
NAME, UID, GROUP = "m1", "uid-1", "shop/orders"


def an_assignment(generation: int, *queues: Queue, uid: str = UID, name: str = NAME, **changed: Any) -> str:
    fields = {"group": GROUP, "issued_at": "2026-11-21T08:00:00.000Z", "members": {name: Share(uid, queues)}} | changed
    text = encode_assignment(Assignment(generation=generation, **fields))["assignment.json"]
    assert isinstance(text, str)
    return text


def a_member(*queues: Queue, generation: int = 5, **settled: Any) -> Member:
    """Return a member that runs these queues, all since 0."""
    member = Member(NAME, UID, **settled)
    answer(member, member.apply_assignment(an_assignment(generation, *queues), 0.0), 0.0)
    assert states(member) == dict.fromkeys(queues, LeaseState.RUNNING)
    return member


GOOD = {
    LeaseAction.LOCK: LeaseEvent.LOCKED,
    LeaseAction.FIND_START: LeaseEvent.START_FOUND,
    LeaseAction.STOP: LeaseEvent.DRAINED,
    LeaseAction.ABORT: LeaseEvent.DRAINED,
    LeaseAction.UNLOCK: LeaseEvent.UNLOCKED,
}


def answer(member: Member, effects: Effects, now: float) -> list[Command]:
    """Answer all of it well, and what follows; return every command there was."""
    commands = list(effects.commands)
    for command in commands:
        if command.action in GOOD:
            sent = now if command.action is LeaseAction.LOCK else None
            commands += member.on_event(GOOD[command.action], command.queue, command.lease_number, now, sent).commands
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
    ("text", "why"),
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
    ids=["gone", "empty", "torn", "changed", "older", "two texts", "foreign", "schema", "the same"],
)
def test_assignment_that_is_not_applicable_changes_nothing(text: str | bytes | None, why: str | None) -> None:
    member = a_member(A)
    before = member.report()
    effects = member.apply_assignment(text, 1.0)
    assert (effects.store_generation, effects.commands) == (None, ())
    assert effects.rejection == why or why is None
    assert member.report() is before
    assert states(member) == {A: LeaseState.RUNNING}


def test_assignment_that_is_read_again_unchanged_does_nothing() -> None:
    assert a_member(A).apply_assignment(an_assignment(5, A), 1.0) == Effects()


def test_assignment_of_another_group_is_rejected_from_the_start_if_the_group_is_known() -> None:
    member = Member(NAME, UID, group="shop/bills")
    assert member.apply_assignment(an_assignment(9, A), 0.0).rejection is not None
    assert member.obeyed_generation == 0
    assert member.leases == {}


@pytest.mark.parametrize(
    "text",
    [an_assignment(6, A, B, name="m2"), an_assignment(6, A, B, uid="uid-2"), an_assignment(6)],
    ids=["not named", "another pod's", "nothing for it"],
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
    again = member.apply_assignment(an_assignment(8), 4.0).commands[0]
    assert member.on_event(LeaseEvent.DRAINED, A, stop.lease_number, 5.0) == Effects()  # of the first drain
    assert releasing(member) == [A]
    member.on_event(LeaseEvent.DRAINED, A, again.lease_number, 6.0)
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
    before = states(member)
    for event in (LeaseEvent.LOCKED, LeaseEvent.START_FOUND, LeaseEvent.REFUSED, LeaseEvent.FAILED, LeaseEvent.DRAINED):
        assert member.on_event(event, A, old.lease_number, 4.0, 0.5) == Effects()
    assert states(member) == before


def test_member_reports_stuck_queues_as_held_and_retries_them() -> None:
    member = Member(NAME, UID, orderly=True)
    locks = {
        command.queue: command.lease_number for command in member.apply_assignment(an_assignment(5, A, B), 0.0).commands
    }
    member.on_event(LeaseEvent.REFUSED, A, locks[A], 0.0)
    place = member.on_event(LeaseEvent.LOCKED, B, locks[B], 0.0, 0.0).commands[0]
    member.on_event(LeaseEvent.FAILED, B, place.lease_number, 0.5)
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


def fetched(member: Member, effects: Effects) -> float:
    """Return when a member whose broker answers well fetches first."""
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
    assert fetched(member, member.apply_assignment(an_assignment(5, A, forced=forced), 0.0)) == waits


@pytest.mark.parametrize(("orderly", "waits"), [(False, 0.0), (True, LOCK_HOLD_SECONDS)])
def test_forced_grant_in_a_missed_generation_restarts_the_queue(
    orderly: bool,  # noqa: FBT001 - a case
    waits: float,
) -> None:
    member = a_member(A, B, orderly=orderly)
    effects = member.apply_assignment(an_assignment(9, A, B, forced={A: 7, B: 5}), 0.0)
    assert acts(effects) == [(LeaseAction.STOP, A)]
    assert releasing(member) == [A]
    assert fetched(member, effects) == waits
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
    for again in (member, Member(NAME, UID, obeyed_generation=5, final=True)):
        assert again.end_drain(3.0) == Effects()
        assert (again.apply_assignment(an_assignment(6, A), 3.0).store_generation, again.leases) == (6, {})
        assert again.report().is_drained


def test_drain_for_a_restart_can_become_final() -> None:
    member = a_member(A)
    member.drain(final=False, now=1.0)
    before = member.report().revision
    assert member.drain(final=True, now=2.0) == Effects(store_final=True)
    assert member.report().revision > before
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
    before = member.report()
    renewal = member.run_due_timers(20.0).commands[0]
    member.on_event(LeaseEvent.LOCKED, A, renewal.lease_number, 21.0, 20.0)
    member.apply_assignment("torn", 22.0)
    member.on_event(LeaseEvent.START_FOUND, A, 99, 22.0)
    assert member.report() is before
    member.apply_assignment(an_assignment(6, A), 23.0)
    assert member.report().revision == before.revision + 1
    assert member.report().held == before.held
    member.apply_assignment(an_assignment(7), 23.0)
    assert member.report().revision == before.revision + 2


def test_report_revision_grows_only_when_broker_reachability_changes() -> None:
    member = a_member(A)
    assert member.report().brokers == {}
    before = member.report().revision
    for grown, reached in ((1, {"a": True}), (1, {"a": True}), (2, {"b": False, "a": True}), (3, {"a": True}), (4, {})):
        member.set_broker_reachability(reached)
        assert (member.report().revision, member.report().brokers) == (before + grown, reached)
    member.set_broker_reachability({})
    assert member.report().revision == before + 4


def test_report_copies_broker_reachability_when_it_is_set() -> None:
    member, reached = a_member(A), {"a": True}
    member.set_broker_reachability(reached)
    reached["a"] = False
    assert member.report().brokers == {"a": True}
    member.set_broker_reachability(reached)
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


class Walk:
    """A member, and a shell that carries out what it says and answers in any order, late and again."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.now, self.disk = 0.0, (0, False)
        self.orderly = chance.random() < 0.5
        self.newest, self.texts = 0, dict[int, tuple[str, frozenset[Queue]]]()
        self.restart()

    def restart(self) -> None:
        obeyed, final = self.disk
        self.member = Member(NAME, UID, orderly=self.orderly, drain_timeout=15.0, obeyed_generation=obeyed, final=final)
        self.asked: list[Command] = []  # answered ones, too
        self.answered = 0
        self.fetching: set[Queue] = set()
        self.working: dict[Queue, int] = {}  # what may have deliveries open, since which command
        self.given, self.drains = frozenset[Queue](), final
        self.seen: tuple[int, object] = (-1, None)

    def carry_out(self, effects: Effects) -> None:
        self.disk = (
            self.disk[0] if effects.store_generation is None else effects.store_generation,
            self.disk[1] or effects.store_final,
        )
        for command in effects.commands:
            if command.action is LeaseAction.FETCH:
                assert command.queue in self.given
                assert not self.drains
                self.fetching.add(command.queue)
                self.working[command.queue] = len(self.asked)
            if command.action is LeaseAction.STOP:
                self.fetching.discard(command.queue)
            self.asked.append(command)

    def read(self, text: str | None, generation: int = 0, given: Iterable[Queue] = ()) -> None:
        before = self.member.obeyed_generation
        effects = self.member.apply_assignment(text, self.now)
        assert self.member.obeyed_generation >= before
        if effects.store_generation is not None:
            assert effects.store_generation == generation >= self.disk[0]
            self.given = frozenset(given)
        self.carry_out(effects)

    def next_document(self) -> None:
        self.newest += self.chance.randint(1, 3)
        share = frozenset(queue for queue in QUEUES if self.chance.random() < 0.6)
        forced = {queue: self.newest for queue in QUEUES if self.chance.random() < 0.1}
        uid, given = (UID, share) if self.chance.random() < 0.9 else ("uid-2", frozenset[Queue]())
        text = an_assignment(self.newest, *sorted(share), uid=uid, forced=forced)
        self.texts[self.newest] = text, given
        self.read(text, self.newest, given)

    def any_document_again(self) -> None:
        if self.texts:
            generation = self.chance.choice(sorted(self.texts))
            self.read(self.texts[generation][0], generation, self.texts[generation][1])

    def torn_document(self) -> None:
        text = an_assignment(self.newest + 5, *QUEUES)
        torn = [None, text[: self.chance.randrange(len(text))], text.replace("orders", "ordres")]
        self.read(self.chance.choice(torn))

    def next_answer(self) -> None:
        if self.answered < len(self.asked):
            self.reply(self.answered, fails=self.chance.random() < 0.2)
            self.answered += 1

    def late_answer(self) -> None:
        if self.asked:
            oldest = len(self.asked) - self.chance.choice([4, len(self.asked)])
            self.reply(self.chance.randrange(max(0, oldest), len(self.asked)))

    def reply(self, number: int, *, fails: bool = False) -> None:
        command = self.asked[number]
        event = GOOD.get(command.action)
        if event is None:
            return
        if fails and command.action in {LeaseAction.LOCK, LeaseAction.FIND_START}:
            refused = command.action is LeaseAction.LOCK and self.chance.random() < 0.5
            event = LeaseEvent.REFUSED if refused else LeaseEvent.FAILED
        if event is LeaseEvent.DRAINED and self.working.get(command.queue, number) <= number:
            self.working.pop(command.queue, None)  # else it is an answer from before it was fetched again
        lease, before = self.member.leases.get(command.queue), states(self.member)
        late = lease is None or lease.number != command.lease_number
        self.carry_out(self.member.on_event(event, command.queue, command.lease_number, self.now, self.now))
        assert not late or states(self.member) == before

    def time_passes(self) -> None:
        self.now += self.chance.choice([0.1, 1.0, 5.0, 20.0, 70.0])
        self.carry_out(self.member.run_due_timers(self.now))

    def drain(self) -> None:
        self.drains = True
        self.carry_out(self.member.drain(final=self.chance.random() < 0.1, now=self.now))

    def the_app_is_back(self) -> None:
        self.drains = self.disk[1]
        self.carry_out(self.member.end_drain(self.now))

    def stand_still(self) -> None:
        self.member.mark_stalled()
        assert not any(self.member.may_deliver(it, self.now, 1.0) or self.member.may_commit(it) for it in QUEUES)
        self.read(None)

    def it_works_what_it_reports_and_delivers_what_it_was_given(self) -> None:
        report = self.member.report()
        assert report.generation == self.disk[0] == self.member.obeyed_generation
        assert self.working.keys() <= report.active_queues
        for queue in QUEUES:
            if queue not in report.active_queues:
                assert not self.member.may_commit(queue)
            if self.member.may_deliver(queue, self.now, 1.0):
                assert queue in self.given & self.fetching
                assert not self.drains
        content = (report.generation, report.state, report.final, report.held, report.releasing)
        revision, before = self.seen
        assert (content == before) == (report.revision == revision)
        assert report.revision >= revision
        self.seen = report.revision, content

    def every_queue_ends_running_or_released_when_answers_keep_coming(self) -> None:
        for _ in range(200):
            while self.answered < len(self.asked):
                self.reply(self.answered)
                self.answered += 1
            self.it_works_what_it_reports_and_delivers_what_it_was_given()
            if set(states(self.member).values()) <= {LeaseState.RUNNING}:
                break
            self.now = max(self.now, self.member.next_timer_at() or 0.0)
            self.carry_out(self.member.run_due_timers(self.now))
        assert states(self.member) == dict.fromkeys([] if self.drains else self.given, LeaseState.RUNNING)


STEPS = {
    Walk.next_document: 8,
    Walk.any_document_again: 3,
    Walk.torn_document: 2,
    Walk.next_answer: 24,
    Walk.late_answer: 10,
    Walk.time_passes: 5,
    Walk.drain: 1,
    Walk.the_app_is_back: 3,
    Walk.stand_still: 1,
    Walk.restart: 0.5,
}


@pytest.mark.parametrize("seed", range(60))
def test_member_never_consumes_unassigned_queues_in_random_orders_of_events(seed: int) -> None:
    walk = Walk(Random(seed))
    for effects in walk.chance.choices(list(STEPS), list(STEPS.values()), k=250):
        effects(walk)
        walk.it_works_what_it_reports_and_delivers_what_it_was_given()
    walk.every_queue_ends_running_or_released_when_answers_keep_coming()


# Restarts.

MINE, BEFORE = 2, 1


def a_share(incarnation: int, *queues: Queue) -> dict[str, Any]:
    """Return the fields of a document that gives queues to one process of the pod."""
    return {"members": {NAME: Share(UID, queues, incarnation)}, "incarnations_since": 3}


def a_restarted_member() -> Member:
    member = Member(NAME, UID, obeyed_generation=5)
    member.set_incarnation(MINE, 1763712000.5)
    return member


def test_restart_consumes_only_what_a_document_gives_to_this_process() -> None:
    member = a_restarted_member()
    effects = member.apply_assignment(an_assignment(5, **a_share(BEFORE, A)), 0.0)
    assert (acts(effects), member.leases, effects.store_generation) == ([], {}, 5)
    report = member.report()
    assert (report.incarnation_number, report.started, report.reads, report.held) == (MINE, 1763712000.5, 2, {})
    effects = member.apply_assignment(an_assignment(6, **a_share(MINE, A)), 1.0)
    assert acts(effects) == [(LeaseAction.FIND_START, A)]
    effects = member.apply_assignment(an_assignment(7, **a_share(MINE + 1, A)), 2.0)
    assert acts(effects) == [(LeaseAction.STOP, A)], (
        "a document for a later process: this one has no business with the queue"
    )


def test_restart_consumes_what_a_document_of_schema_1_gives_to_the_pod() -> None:
    member = a_restarted_member()
    assert acts(member.apply_assignment(an_assignment(5, A), 0.0)) == [(LeaseAction.FIND_START, A)]


def test_restart_is_resumed_by_the_member_itself_only_where_nobody_asks_for_its_report() -> None:
    member = a_restarted_member()
    member.apply_assignment(an_assignment(5, **a_share(BEFORE, A)), 10.0)
    assert member.next_timer_at() == 10.0 + RESUME_SECONDS
    member.note_report_request(100.0)
    assert member.next_timer_at() == 100.0 + RESUME_SECONDS
    due = 100.0 + RESUME_SECONDS
    assert acts(member.run_due_timers(due - 0.1)) == []
    member.mark_stalled()
    assert acts(member.run_due_timers(due)) == [], "the document may be an old one"
    member.apply_assignment(an_assignment(5, **a_share(BEFORE, A)), due)
    assert acts(member.run_due_timers(due)) == [(LeaseAction.FIND_START, A)]
    assert member.next_timer_at() is None
    assert from_ranges(member.report().held) == [A]
    effects = member.apply_assignment(an_assignment(6, **a_share(BEFORE, A, B)), due + 1.0)
    assert acts(effects) == [(LeaseAction.FIND_START, B)], "the operator does not know of this process yet"
    assert acts(member.apply_assignment(an_assignment(7, **a_share(MINE, B)), due + 2.0)) == [(LeaseAction.STOP, A)]


def test_restart_of_a_drained_member_resumes_nothing() -> None:
    member = a_restarted_member()
    member.apply_assignment(an_assignment(5, **a_share(BEFORE, A)), 0.0)
    member.drain(final=True, now=1.0)
    assert acts(member.run_due_timers(1.0 + RESUME_SECONDS)) == []


def test_restart_is_counted_in_the_report_once_its_number_is_on_the_disk() -> None:
    member = Member(NAME, UID)
    before = member.report()
    assert before.incarnation_number == 0
    member.set_incarnation(1, 7.0)
    assert (member.report().incarnation_number, member.report().revision) == (1, before.revision + 1)
