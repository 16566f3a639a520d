"""The life of one queue at the member, row by row and point by point."""

from collections import deque
from itertools import count
from pathlib import Path

import pytest

from rota.model import Queue
from rota.sidecar.member.queue_lifecycle import (
    LOCK_HOLD_SECONDS,
    TRANSITIONS,
    Command,
    LeaseAction,
    LeaseEvent,
    LeaseState,
    QueueLease,
    mermaid_diagram,
)

Q = Queue("orders", "broker-a", 3)

GIVEN = LeaseEvent.ASSIGNED
TAKEN = LeaseEvent.REVOKED
AGAIN = LeaseEvent.REASSIGNED
RETRY = LeaseEvent.RETRY
LATE = LeaseEvent.DRAIN_TIMEOUT
LOCKED, REFUSED, RENEW, EXPIRED = LeaseEvent.LOCKED, LeaseEvent.REFUSED, LeaseEvent.RENEW, LeaseEvent.EXPIRED
PLACED, EARLY, HELD, FAILED = LeaseEvent.START_FOUND, LeaseEvent.START_HELD, LeaseEvent.HOLD_OVER, LeaseEvent.FAILED
READER_FAILED, RESUME = LeaseEvent.READER_FAILED, LeaseEvent.RESUME
EMPTY = LeaseEvent.DRAINED
UNLOCKED = LeaseEvent.UNLOCKED
CONCURRENT = LeaseEvent.CONCURRENT
ORDERLY = LeaseEvent.ORDERLY
LOCK = LeaseAction.LOCK
PLACE = LeaseAction.FIND_START
FETCH = LeaseAction.FETCH
STOP = LeaseAction.STOP
CUT = LeaseAction.ABORT
UNLOCK = LeaseAction.UNLOCK
WANTED, LOCKING, STARTING, RUNNING = LeaseState.WANTED, LeaseState.LOCKING, LeaseState.STARTING, LeaseState.RUNNING
STUCK, DRAINING, RELEASED = LeaseState.STUCK, LeaseState.DRAINING, LeaseState.RELEASED


def a_life(*events: LeaseEvent, orderly: bool = False, wary: bool = False) -> QueueLease:
    """Return a life to which this happened, all of it at 0."""
    life = QueueLease(queue=Q, orderly=orderly, lease_numbers=count(1), needs_lock_hold=wary)
    for event in events:
        life.on_event(event, 0.0)
    return life


def acts(commands: list[Command]) -> list[LeaseAction]:
    return [command.action for command in commands]


# What happened before, what happens, by which rows it goes (its state, what the event means to it), where it ends.
Story = tuple[tuple[LeaseEvent, ...], LeaseEvent, list[tuple[LeaseState, LeaseEvent]], LeaseState, list[LeaseAction]]
CONCURRENTLY: list[Story] = [
    ((), GIVEN, [(RELEASED, GIVEN), (WANTED, CONCURRENT)], STARTING, [PLACE]),
    ((GIVEN,), PLACED, [(STARTING, PLACED)], RUNNING, [FETCH]),
    ((GIVEN,), FAILED, [(STARTING, FAILED)], STUCK, []),
    ((GIVEN,), TAKEN, [(STARTING, TAKEN)], DRAINING, [STOP]),
    ((GIVEN, FAILED), RETRY, [(STUCK, RETRY), (WANTED, CONCURRENT)], STARTING, [PLACE]),
    ((GIVEN, FAILED), TAKEN, [(STUCK, TAKEN)], DRAINING, [STOP]),
    ((GIVEN, PLACED), TAKEN, [(RUNNING, TAKEN)], DRAINING, [STOP]),
    ((GIVEN, PLACED), READER_FAILED, [(RUNNING, READER_FAILED)], STUCK, []),
    ((GIVEN, PLACED, READER_FAILED), RETRY, [(STUCK, RESUME)], RUNNING, [FETCH]),
    ((GIVEN, PLACED, READER_FAILED), TAKEN, [(STUCK, TAKEN)], DRAINING, [STOP]),
    ((GIVEN, PLACED, TAKEN), TAKEN, [(DRAINING, TAKEN)], DRAINING, []),
    ((GIVEN, PLACED, TAKEN), GIVEN, [(DRAINING, GIVEN)], RUNNING, [FETCH]),
    ((GIVEN, PLACED, TAKEN), LATE, [(DRAINING, LATE)], DRAINING, [CUT]),
    ((GIVEN, PLACED, TAKEN), EMPTY, [(DRAINING, UNLOCKED)], RELEASED, []),
    ((GIVEN, PLACED, TAKEN, LATE), GIVEN, [(DRAINING, AGAIN)], DRAINING, []),
    (
        (GIVEN, PLACED, TAKEN, LATE, GIVEN),
        EMPTY,
        [(DRAINING, UNLOCKED), (RELEASED, GIVEN), (WANTED, CONCURRENT)],
        STARTING,
        [PLACE],
    ),
]
UP = (GIVEN, LOCKED, PLACED)
ORDERED: list[Story] = [
    ((), GIVEN, [(RELEASED, GIVEN), (WANTED, ORDERLY)], LOCKING, [LOCK]),
    ((GIVEN,), LOCKED, [(LOCKING, LOCKED)], STARTING, [PLACE]),
    ((GIVEN,), REFUSED, [(LOCKING, REFUSED)], STUCK, []),
    ((GIVEN,), FAILED, [(LOCKING, FAILED)], STUCK, []),
    ((GIVEN,), TAKEN, [(LOCKING, TAKEN)], DRAINING, [STOP]),
    ((GIVEN, REFUSED), RETRY, [(STUCK, RETRY), (WANTED, ORDERLY)], LOCKING, [LOCK]),
    ((GIVEN, LOCKED), RENEW, [(STARTING, RENEW)], STARTING, [LOCK]),
    ((GIVEN, LOCKED), LOCKED, [(STARTING, LOCKED)], STARTING, []),
    ((GIVEN, LOCKED), REFUSED, [(STARTING, REFUSED)], STUCK, []),
    ((GIVEN, LOCKED), EXPIRED, [(STARTING, EXPIRED), (WANTED, ORDERLY)], LOCKING, [LOCK]),
    ((GIVEN, LOCKED), TAKEN, [(STARTING, TAKEN)], DRAINING, [STOP]),
    (UP, RENEW, [(RUNNING, RENEW)], RUNNING, [LOCK]),
    (UP, LOCKED, [(RUNNING, LOCKED)], RUNNING, []),
    (UP, REFUSED, [(RUNNING, REFUSED)], STUCK, [STOP]),
    (UP, EXPIRED, [(RUNNING, EXPIRED), (WANTED, ORDERLY)], LOCKING, [STOP, LOCK]),
    ((*UP, READER_FAILED), RETRY, [(STUCK, RESUME)], RUNNING, [FETCH]),
    ((*UP, READER_FAILED), EXPIRED, [(STUCK, EXPIRED), (WANTED, ORDERLY)], LOCKING, [STOP, LOCK]),
    ((*UP, READER_FAILED), REFUSED, [(STUCK, REFUSED)], STUCK, [STOP]),
    ((*UP, READER_FAILED, REFUSED), RETRY, [(STUCK, RETRY), (WANTED, ORDERLY)], LOCKING, [LOCK]),
    (UP, TAKEN, [(RUNNING, TAKEN)], DRAINING, [STOP]),
    ((*UP, TAKEN), GIVEN, [(DRAINING, GIVEN)], RUNNING, [FETCH]),
    ((*UP, TAKEN), REFUSED, [(DRAINING, REFUSED)], DRAINING, []),
    ((*UP, TAKEN, REFUSED), GIVEN, [(DRAINING, AGAIN)], DRAINING, []),
    ((*UP, TAKEN), EMPTY, [(DRAINING, EMPTY)], DRAINING, [UNLOCK]),
    ((*UP, TAKEN, EMPTY), GIVEN, [(DRAINING, AGAIN)], DRAINING, []),
    ((*UP, TAKEN, EMPTY), UNLOCKED, [(DRAINING, UNLOCKED)], RELEASED, []),
    (
        (*UP, TAKEN, EMPTY, GIVEN),
        UNLOCKED,
        [(DRAINING, UNLOCKED), (RELEASED, GIVEN), (WANTED, ORDERLY)],
        LOCKING,
        [LOCK],
    ),
]
WARILY: list[Story] = [
    ((GIVEN, LOCKED), PLACED, [(STARTING, EARLY)], STARTING, []),
    ((GIVEN, LOCKED, PLACED), HELD, [(STARTING, HELD)], STARTING, [PLACE]),
]


def told(before: tuple[LeaseEvent, ...], event: LeaseEvent) -> str:
    return ", ".join([*before, f"then {event}"])


@pytest.mark.parametrize(
    ("story", "orderly", "wary"),
    [
        pytest.param(story, orderly, wary, id=f"{'Orderly' if orderly else 'Concurrent'}: {told(*story[:2])}")
        for stories, orderly, wary in ((CONCURRENTLY, False, False), (ORDERED, True, False), (WARILY, True, True))
        for story in stories
    ],
)
def test_queue_lifecycle_rows_lead_to_their_states_and_commands(story: Story, orderly: bool, wary: bool) -> None:  # noqa: FBT001 - a case
    before, event, rows, after, commanded = story
    life = a_life(*before, orderly=orderly, wary=wary)
    assert acts(life.on_event(event, 0.0)) == commanded
    assert life.state is after
    assert [act for row in rows for act in TRANSITIONS[row][1]] == commanded
    assert TRANSITIONS[rows[-1]][0] is after


def test_queue_lifecycle_rows_are_all_covered_by_cases() -> None:
    assert {row for story in [*CONCURRENTLY, *ORDERED, *WARILY] for row in story[2]} == set(TRANSITIONS)


def test_queue_lifecycle_enters_running_with_a_fetch() -> None:
    into = {(state, event) for (state, event), (after, _) in TRANSITIONS.items() if after is RUNNING is not state}
    assert into == {(STARTING, PLACED), (DRAINING, GIVEN), (STUCK, RESUME)}
    fetching = {row for row, (_, commanded) in TRANSITIONS.items() if FETCH in commanded}
    assert fetching == into


def test_queue_lifecycle_leaves_running_with_a_stop_unless_its_reader_has_failed() -> None:
    out = [
        (event, commanded)
        for (state, event), (after, commanded) in TRANSITIONS.items()
        if state is RUNNING is not after
    ]
    assert [event for event, commanded in out if STOP not in commanded] == [READER_FAILED]


def test_queue_release_happens_only_from_draining() -> None:
    assert {row for row, (after, _) in TRANSITIONS.items() if after is RELEASED} == {(DRAINING, UNLOCKED)}


def test_queue_lifecycle_drains_a_revoked_queue_from_every_lasting_state() -> None:
    for state in (LOCKING, STARTING, RUNNING, STUCK, DRAINING):
        assert TRANSITIONS[state, TAKEN][0] is DRAINING


@pytest.mark.parametrize("end", [RUNNING, RELEASED])
def test_queue_lifecycle_reaches_running_and_released_from_every_state(end: LeaseState) -> None:
    reached, look = {end}, deque([end])
    while look:
        goal = look.popleft()
        new = {state for (state, _), (after, _) in TRANSITIONS.items() if after is goal} - reached
        reached |= new
        look += new
    assert reached == set(LeaseState)


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("event", [LOCKED, REFUSED, PLACED, FAILED, EMPTY, UNLOCKED, LATE, RETRY, HELD, EXPIRED])
def test_queue_lifecycle_starts_only_by_an_assignment(event: LeaseEvent, orderly: bool) -> None:  # noqa: FBT001 - a case
    life = a_life(orderly=orderly)
    assert life.on_event(event, 0.0) == []
    assert life.state is RELEASED


@pytest.mark.parametrize("event", [LOCKED, PLACED, FAILED, UNLOCKED])
def test_drain_is_not_interrupted_by_a_response_to_an_earlier_request(event: LeaseEvent) -> None:
    for before in ((GIVEN, TAKEN), (GIVEN, LOCKED, TAKEN), (*UP, TAKEN)):
        life = a_life(*before, orderly=True)
        assert life.on_event(event, 0.0) == []
        assert life.state in {DRAINING, RELEASED}


def test_queue_lifecycle_number_never_fetches_after_its_stop() -> None:
    life = a_life(orderly=True)
    events = [*UP, TAKEN, GIVEN, EXPIRED, LOCKED, PLACED, READER_FAILED, RETRY, REFUSED, RETRY, LOCKED]
    events += [PLACED, READER_FAILED, REFUSED, RETRY, LOCKED, TAKEN, GIVEN, EMPTY, UNLOCKED, LOCKED, PLACED]
    commands = [command for event in events for command in life.on_event(event, 0.0)]
    numbers = [command.lease_number for command in commands]
    assert numbers == sorted(numbers)
    for number in set(numbers):
        mine = [command.action for command in commands if command.lease_number == number]
        assert STOP not in mine or FETCH not in mine[mine.index(STOP) :]


def test_queue_whose_reader_failed_keeps_its_life_number() -> None:
    life = a_life(GIVEN, PLACED, READER_FAILED)
    number = life.number
    assert life.next_timer() == (1.0, RETRY)
    assert life.on_event(RETRY, 1.0) == [Command(FETCH, Q, number)]


def test_queue_whose_reader_fails_again_and_again_is_retried_less_and_less_often() -> None:
    life, now, pauses = a_life(GIVEN, PLACED), 100.0, []
    for _ in range(7):
        life.on_event(READER_FAILED, now)
        pauses.append(life.retry_at - now)
        now = life.retry_at
        life.on_event(RETRY, now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    life.on_event(READER_FAILED, now + 31)
    assert life.retry_at == now + 32


def test_queue_whose_reader_failed_is_locked_anew_where_trust_in_its_lock_ran_out() -> None:
    life = a_life(*UP, orderly=True)
    life.on_event(READER_FAILED, 29.5)
    assert acts(life.on_event(RETRY, 30.5)) == [STOP, LOCK], "its open deliveries may be another member's by now"
    life.on_event(LOCKED, 30.6, sent_at=30.5)
    assert life.deliver_after == 30.6 + LOCK_HOLD_SECONDS


def test_lock_is_trusted_for_30_seconds_from_sending_its_request() -> None:
    life = a_life(GIVEN, orderly=True)
    life.on_event(LOCKED, 109.0, sent_at=100.0)
    life.on_event(PLACED, 110.0)
    assert life.is_lock_trusted(129.9)
    assert not life.is_lock_trusted(130.0)
    assert life.next_timer() == (120.0, RENEW)
    assert acts(life.on_event(RENEW, 120.0)) == [LOCK]
    assert life.next_timer() == (125.0, RENEW)
    life.on_event(RENEW, 125.0)
    assert life.next_timer() == (130.0, EXPIRED)
    life.on_event(LOCKED, 126.0, sent_at=125.0)
    assert life.next_timer() == (145.0, RENEW)
    life.on_event(LOCKED, 127.0, sent_at=120.0)  # the answer to the first request, overtaken
    assert life.next_timer() == (145.0, RENEW)


def test_lock_allows_only_pushes_that_end_while_the_broker_keeps_it() -> None:
    life = a_life(*UP, orderly=True)
    assert life.is_lock_trusted(29.9, push_timeout=30.0)
    assert life.is_lock_trusted(14.9, push_timeout=45.0)
    assert not life.is_lock_trusted(15.0, push_timeout=45.0)
    assert a_life(GIVEN, PLACED).is_lock_trusted(1e9, push_timeout=45.0)


def test_lock_is_kept_when_its_renewal_is_not_answered() -> None:
    life = a_life(*UP, RENEW, orderly=True)
    assert life.on_event(FAILED, 21.0) == []
    assert life.state is RUNNING
    assert life.next_timer() == (20.0, RENEW)


def test_lock_acquired_for_the_first_time_is_used_without_waiting() -> None:
    life = a_life(GIVEN, REFUSED, RETRY, LOCKED, orderly=True)
    life.on_event(PLACED, 1.0)
    assert life.state is RUNNING


@pytest.mark.parametrize(
    "lost",
    [(*UP, EXPIRED), (*UP, REFUSED, RETRY), (GIVEN, LOCKED, EXPIRED), (GIVEN, LOCKED, REFUSED, RETRY)],
    ids=["Running, expired", "Running, refused", "Starting, expired", "Starting, refused"],
)
def test_lock_that_was_lost_is_held_for_a_minute_and_the_start_offset_read_again(lost: tuple[LeaseEvent, ...]) -> None:
    life = a_life(*lost, orderly=True)
    life.on_event(LOCKED, 40.0, sent_at=39.0)
    assert life.on_event(PLACED, 41.0) == []
    assert life.state is STARTING
    life.on_event(RENEW, 59.0)
    life.on_event(LOCKED, 60.0, sent_at=59.0)
    life.on_event(RENEW, 79.0)
    life.on_event(LOCKED, 80.0, sent_at=79.0)
    assert life.next_timer() == (99.0, RENEW)
    life.on_event(LOCKED, 100.0, sent_at=99.0)
    assert life.next_timer() == (40.0 + LOCK_HOLD_SECONDS, HELD)
    assert acts(life.on_event(HELD, 100.0)) == [PLACE]
    assert acts(life.on_event(PLACED, 101.0)) == [FETCH]
    assert life.state is RUNNING


def test_forced_grant_delays_use_of_the_lock_however_often_it_was_refused() -> None:
    life = a_life(GIVEN, REFUSED, RETRY, REFUSED, RETRY, orderly=True, wary=True)
    life.on_event(LOCKED, 7.0, sent_at=7.0)
    assert life.on_event(PLACED, 8.0) == []
    assert life.deliver_after == 7.0 + LOCK_HOLD_SECONDS


def test_lock_wait_discards_the_start_offset_of_an_earlier_attempt() -> None:
    life = a_life(GIVEN, LOCKED, PLACED, FAILED, RETRY, orderly=True, wary=True)
    life.on_event(LOCKED, 50.0, sent_at=29.0)
    assert life.deliver_after == LOCK_HOLD_SECONDS
    assert life.next_timer() == (49.0, RENEW)
    life.on_event(LOCKED, 58.0, sent_at=57.0)
    assert life.next_timer() == (77.0, RENEW)  # and no start to look up again before one was found


def test_lock_that_was_released_in_order_is_used_without_waiting_when_acquired_again() -> None:
    life = a_life(*UP, TAKEN, LATE, GIVEN, EMPTY, orderly=True)
    assert acts(life.on_event(UNLOCKED, 40.0)) == [LOCK]
    life.on_event(LOCKED, 41.0, sent_at=40.0)
    life.on_event(PLACED, 42.0)
    assert life.state is RUNNING


def test_lock_whose_trust_expired_while_stuck_is_held_before_use() -> None:
    life = a_life(GIVEN, LOCKED, FAILED, orderly=True)
    life.on_event(RETRY, 29.0)
    life.on_event(LOCKED, 29.5, sent_at=29.4)
    assert life.deliver_after == 0.0
    life.on_event(FAILED, 30.0)
    life.on_event(RETRY, 60.0)
    life.on_event(LOCKED, 61.0, sent_at=60.0)
    assert life.deliver_after == 61.0 + LOCK_HOLD_SECONDS


def test_lock_renewal_that_was_requested_too_late_loses_the_lock() -> None:
    life = a_life(*UP, orderly=True)
    assert acts(life.on_event(LOCKED, 31.0, sent_at=30.0)) == [STOP, LOCK]
    life.on_event(LOCKED, 33.0, sent_at=32.0)
    assert life.deliver_after == 33.0 + LOCK_HOLD_SECONDS


def test_drain_with_an_expired_lock_does_not_return_to_running() -> None:
    life = a_life(*UP, TAKEN, orderly=True)
    assert life.on_event(GIVEN, 30.0) == []
    assert life.state is DRAINING


def test_drain_of_a_queue_that_was_never_fetched_ends_before_it_starts_again() -> None:
    for before in ((GIVEN,), (GIVEN, FAILED)):
        life = a_life(*before, TAKEN, GIVEN)
        assert life.state is DRAINING
        assert acts(life.on_event(EMPTY, 1.0)) == [PLACE]


def test_drain_of_a_queue_that_is_revoked_again_ends_in_released() -> None:
    life = a_life(GIVEN, PLACED, TAKEN, LATE, GIVEN, TAKEN)
    assert life.on_event(EMPTY, 1.0) == []
    assert life.state is RELEASED


def test_drain_is_cut_once_and_in_time() -> None:
    life = a_life(GIVEN, PLACED)
    life.on_event(TAKEN, 100.0)
    life.on_event(TAKEN, 120.0)
    assert life.next_timer() == (130.0, LATE)
    life.on_event(LATE, 130.0)
    assert life.next_timer() is None


def test_queue_lifecycle_retry_pauses_grow_to_30_seconds_and_end_with_a_start() -> None:
    life, now, pauses = a_life(GIVEN), 0.0, []
    for _ in range(7):
        life.on_event(FAILED, now)
        due = life.next_timer()
        assert due is not None
        assert due[1] is RETRY
        pauses.append(due[0] - now)
        now = due[0]
        life.on_event(RETRY, now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    life.on_event(PLACED, now)
    assert life.backoff_seconds == 0


def test_queue_lifecycle_diagram_and_events_are_in_the_docs() -> None:
    page = (Path(__file__).parents[4] / "docs" / "handover.md").read_text()
    assert mermaid_diagram() in page
    assert all(f"{event}" in page.partition("## The member's side")[2] for event in LeaseEvent)
