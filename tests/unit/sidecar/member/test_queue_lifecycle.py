"""The state machine of one queue at the member: each row of its table, and its timers."""

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
)

Q = Queue("orders", "broker-a", 3)

ASSIGNED = LeaseEvent.ASSIGNED
REVOKED = LeaseEvent.REVOKED
REASSIGNED = LeaseEvent.REASSIGNED
RETRY = LeaseEvent.RETRY
DRAIN_TIMEOUT = LeaseEvent.DRAIN_TIMEOUT
LOCKED = LeaseEvent.LOCKED
REFUSED = LeaseEvent.REFUSED
RENEW = LeaseEvent.RENEW
EXPIRED = LeaseEvent.EXPIRED
START_FOUND = LeaseEvent.START_FOUND
START_HELD = LeaseEvent.START_HELD
HOLD_OVER = LeaseEvent.HOLD_OVER
FAILED = LeaseEvent.FAILED
READER_FAILED = LeaseEvent.READER_FAILED
RESUME = LeaseEvent.RESUME
DRAINED = LeaseEvent.DRAINED
UNLOCKED = LeaseEvent.UNLOCKED
CONCURRENT = LeaseEvent.CONCURRENT
ORDERLY = LeaseEvent.ORDERLY
LOCK = LeaseAction.LOCK
FIND_START = LeaseAction.FIND_START
FETCH = LeaseAction.FETCH
STOP = LeaseAction.STOP
ABORT = LeaseAction.ABORT
UNLOCK = LeaseAction.UNLOCK
WANTED = LeaseState.WANTED
LOCKING = LeaseState.LOCKING
STARTING = LeaseState.STARTING
RUNNING = LeaseState.RUNNING
STUCK = LeaseState.STUCK
DRAINING = LeaseState.DRAINING
RELEASED = LeaseState.RELEASED


def a_lease(*events: LeaseEvent, orderly: bool = False, needs_hold: bool = False) -> QueueLease:
    """Return a lease after these events, all of them at time 0."""
    lease = QueueLease(queue=Q, orderly=orderly, lease_numbers=count(1), needs_lock_hold=needs_hold)
    for event in events:
        lease.on_event(event, 0.0)
    return lease


def acts(commands: list[Command]) -> list[LeaseAction]:
    return [command.action for command in commands]


# Earlier events, the event, the rows that apply to it (state, resolved event), the next state, the actions.
Case = tuple[tuple[LeaseEvent, ...], LeaseEvent, list[tuple[LeaseState, LeaseEvent]], LeaseState, list[LeaseAction]]
CONCURRENT_CASES: list[Case] = [
    ((), ASSIGNED, [(RELEASED, ASSIGNED), (WANTED, CONCURRENT)], STARTING, [FIND_START]),
    ((ASSIGNED,), START_FOUND, [(STARTING, START_FOUND)], RUNNING, [FETCH]),
    ((ASSIGNED,), FAILED, [(STARTING, FAILED)], STUCK, []),
    ((ASSIGNED,), REVOKED, [(STARTING, REVOKED)], DRAINING, [STOP]),
    ((ASSIGNED, FAILED), RETRY, [(STUCK, RETRY), (WANTED, CONCURRENT)], STARTING, [FIND_START]),
    ((ASSIGNED, FAILED), REVOKED, [(STUCK, REVOKED)], DRAINING, [STOP]),
    ((ASSIGNED, START_FOUND), REVOKED, [(RUNNING, REVOKED)], DRAINING, [STOP]),
    ((ASSIGNED, START_FOUND), READER_FAILED, [(RUNNING, READER_FAILED)], STUCK, []),
    ((ASSIGNED, START_FOUND, READER_FAILED), RETRY, [(STUCK, RESUME)], RUNNING, [FETCH]),
    ((ASSIGNED, START_FOUND, READER_FAILED), REVOKED, [(STUCK, REVOKED)], DRAINING, [STOP]),
    ((ASSIGNED, START_FOUND, REVOKED), REVOKED, [(DRAINING, REVOKED)], DRAINING, []),
    ((ASSIGNED, START_FOUND, REVOKED), ASSIGNED, [(DRAINING, ASSIGNED)], RUNNING, [FETCH]),
    ((ASSIGNED, START_FOUND, REVOKED), DRAIN_TIMEOUT, [(DRAINING, DRAIN_TIMEOUT)], DRAINING, [ABORT]),
    ((ASSIGNED, START_FOUND, REVOKED), DRAINED, [(DRAINING, UNLOCKED)], RELEASED, []),
    ((ASSIGNED, START_FOUND, REVOKED, DRAIN_TIMEOUT), ASSIGNED, [(DRAINING, REASSIGNED)], DRAINING, []),
    (
        (ASSIGNED, START_FOUND, REVOKED, DRAIN_TIMEOUT, ASSIGNED),
        DRAINED,
        [(DRAINING, UNLOCKED), (RELEASED, ASSIGNED), (WANTED, CONCURRENT)],
        STARTING,
        [FIND_START],
    ),
]
TO_RUNNING = (ASSIGNED, LOCKED, START_FOUND)
ORDERLY_CASES: list[Case] = [
    ((), ASSIGNED, [(RELEASED, ASSIGNED), (WANTED, ORDERLY)], LOCKING, [LOCK]),
    ((ASSIGNED,), LOCKED, [(LOCKING, LOCKED)], STARTING, [FIND_START]),
    ((ASSIGNED,), REFUSED, [(LOCKING, REFUSED)], STUCK, []),
    ((ASSIGNED,), FAILED, [(LOCKING, FAILED)], STUCK, []),
    ((ASSIGNED,), REVOKED, [(LOCKING, REVOKED)], DRAINING, [STOP]),
    ((ASSIGNED, REFUSED), RETRY, [(STUCK, RETRY), (WANTED, ORDERLY)], LOCKING, [LOCK]),
    ((ASSIGNED, LOCKED), RENEW, [(STARTING, RENEW)], STARTING, [LOCK]),
    ((ASSIGNED, LOCKED), LOCKED, [(STARTING, LOCKED)], STARTING, []),
    ((ASSIGNED, LOCKED), REFUSED, [(STARTING, REFUSED)], STUCK, []),
    ((ASSIGNED, LOCKED), EXPIRED, [(STARTING, EXPIRED), (WANTED, ORDERLY)], LOCKING, [LOCK]),
    ((ASSIGNED, LOCKED), REVOKED, [(STARTING, REVOKED)], DRAINING, [STOP]),
    (TO_RUNNING, RENEW, [(RUNNING, RENEW)], RUNNING, [LOCK]),
    (TO_RUNNING, LOCKED, [(RUNNING, LOCKED)], RUNNING, []),
    (TO_RUNNING, REFUSED, [(RUNNING, REFUSED)], STUCK, [STOP]),
    (TO_RUNNING, EXPIRED, [(RUNNING, EXPIRED), (WANTED, ORDERLY)], LOCKING, [STOP, LOCK]),
    ((*TO_RUNNING, READER_FAILED), RETRY, [(STUCK, RESUME)], RUNNING, [FETCH]),
    ((*TO_RUNNING, READER_FAILED), EXPIRED, [(STUCK, EXPIRED), (WANTED, ORDERLY)], LOCKING, [STOP, LOCK]),
    ((*TO_RUNNING, READER_FAILED), REFUSED, [(STUCK, REFUSED)], STUCK, [STOP]),
    ((*TO_RUNNING, READER_FAILED, REFUSED), RETRY, [(STUCK, RETRY), (WANTED, ORDERLY)], LOCKING, [LOCK]),
    (TO_RUNNING, REVOKED, [(RUNNING, REVOKED)], DRAINING, [STOP]),
    ((*TO_RUNNING, REVOKED), ASSIGNED, [(DRAINING, ASSIGNED)], RUNNING, [FETCH]),
    ((*TO_RUNNING, REVOKED), REFUSED, [(DRAINING, REFUSED)], DRAINING, []),
    ((*TO_RUNNING, REVOKED, REFUSED), ASSIGNED, [(DRAINING, REASSIGNED)], DRAINING, []),
    ((*TO_RUNNING, REVOKED), DRAINED, [(DRAINING, DRAINED)], DRAINING, [UNLOCK]),
    ((*TO_RUNNING, REVOKED, DRAINED), ASSIGNED, [(DRAINING, REASSIGNED)], DRAINING, []),
    ((*TO_RUNNING, REVOKED, DRAINED), UNLOCKED, [(DRAINING, UNLOCKED)], RELEASED, []),
    (
        (*TO_RUNNING, REVOKED, DRAINED, ASSIGNED),
        UNLOCKED,
        [(DRAINING, UNLOCKED), (RELEASED, ASSIGNED), (WANTED, ORDERLY)],
        LOCKING,
        [LOCK],
    ),
]
HELD_CASES: list[Case] = [
    ((ASSIGNED, LOCKED), START_FOUND, [(STARTING, START_HELD)], STARTING, []),
    ((ASSIGNED, LOCKED, START_FOUND), HOLD_OVER, [(STARTING, HOLD_OVER)], STARTING, [FIND_START]),
]


def case_name(events: tuple[LeaseEvent, ...], event: LeaseEvent) -> str:
    return ", ".join([*events, f"then {event}"])


@pytest.mark.parametrize(
    ("story", "orderly", "needs_hold"),
    [
        pytest.param(
            story, orderly, needs_hold, id=f"{'Orderly' if orderly else 'Concurrent'}: {case_name(*story[:2])}"
        )
        for stories, orderly, needs_hold in (
            (CONCURRENT_CASES, False, False),
            (ORDERLY_CASES, True, False),
            (HELD_CASES, True, True),
        )
        for story in stories
    ],
)
def test_queue_lifecycle_rows_lead_to_their_states_and_commands(story: Case, orderly: bool, needs_hold: bool) -> None:  # noqa: FBT001 - a case
    events, event, rows, next_state, actions = story
    lease = a_lease(*events, orderly=orderly, needs_hold=needs_hold)
    assert acts(lease.on_event(event, 0.0)) == actions
    assert lease.state is next_state
    assert [act for row in rows for act in TRANSITIONS[row][1]] == actions
    assert TRANSITIONS[rows[-1]][0] is next_state


def test_queue_lifecycle_rows_are_all_covered_by_cases() -> None:
    assert {row for story in [*CONCURRENT_CASES, *ORDERLY_CASES, *HELD_CASES] for row in story[2]} == set(TRANSITIONS)


def test_queue_lifecycle_enters_running_with_a_fetch() -> None:
    transitions = {
        (state, event) for (state, event), (next_state, _) in TRANSITIONS.items() if next_state is RUNNING is not state
    }
    assert transitions == {(STARTING, START_FOUND), (DRAINING, ASSIGNED), (STUCK, RESUME)}
    fetching_transitions = {row for row, (_, actions) in TRANSITIONS.items() if FETCH in actions}
    assert fetching_transitions == transitions


def test_queue_lifecycle_leaves_running_with_a_stop_unless_its_reader_has_failed() -> None:
    transitions = [
        (event, actions)
        for (state, event), (next_state, actions) in TRANSITIONS.items()
        if state is RUNNING is not next_state
    ]
    assert [event for event, actions in transitions if STOP not in actions] == [READER_FAILED]


def test_queue_release_happens_only_from_draining() -> None:
    assert {row for row, (next_state, _) in TRANSITIONS.items() if next_state is RELEASED} == {(DRAINING, UNLOCKED)}


def test_queue_lifecycle_drains_a_revoked_queue_from_every_lasting_state() -> None:
    for state in (LOCKING, STARTING, RUNNING, STUCK, DRAINING):
        assert TRANSITIONS[state, REVOKED][0] is DRAINING


@pytest.mark.parametrize("end", [RUNNING, RELEASED])
def test_queue_lifecycle_reaches_running_and_released_from_every_state(end: LeaseState) -> None:
    reached = {end}
    pending = deque([end])
    while pending:
        target = pending.popleft()
        previous_states = {
            state for (state, _), (next_state, _) in TRANSITIONS.items() if next_state is target
        } - reached
        reached |= previous_states
        pending += previous_states
    assert reached == set(LeaseState)


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize(
    "event", [LOCKED, REFUSED, START_FOUND, FAILED, DRAINED, UNLOCKED, DRAIN_TIMEOUT, RETRY, HOLD_OVER, EXPIRED]
)
def test_queue_lifecycle_starts_only_by_an_assignment(event: LeaseEvent, orderly: bool) -> None:  # noqa: FBT001 - a case
    lease = a_lease(orderly=orderly)
    assert lease.on_event(event, 0.0) == []
    assert lease.state is RELEASED


@pytest.mark.parametrize("event", [LOCKED, START_FOUND, FAILED, UNLOCKED])
def test_drain_is_not_interrupted_by_a_response_to_an_earlier_request(event: LeaseEvent) -> None:
    for events in ((ASSIGNED, REVOKED), (ASSIGNED, LOCKED, REVOKED), (*TO_RUNNING, REVOKED)):
        lease = a_lease(*events, orderly=True)
        assert lease.on_event(event, 0.0) == []
        assert lease.state in {DRAINING, RELEASED}


def test_queue_lifecycle_number_never_fetches_after_its_stop() -> None:
    lease = a_lease(orderly=True)
    events = [
        *TO_RUNNING,
        REVOKED,
        ASSIGNED,
        EXPIRED,
        LOCKED,
        START_FOUND,
        READER_FAILED,
        RETRY,
        REFUSED,
        RETRY,
        LOCKED,
    ]
    events += [
        START_FOUND,
        READER_FAILED,
        REFUSED,
        RETRY,
        LOCKED,
        REVOKED,
        ASSIGNED,
        DRAINED,
        UNLOCKED,
        LOCKED,
        START_FOUND,
    ]
    commands = [command for event in events for command in lease.on_event(event, 0.0)]
    numbers = [command.lease_number for command in commands]
    assert numbers == sorted(numbers)
    for number in set(numbers):
        actions = [command.action for command in commands if command.lease_number == number]
        assert STOP not in actions or FETCH not in actions[actions.index(STOP) :]


def test_queue_whose_reader_failed_keeps_its_lease_number() -> None:
    lease = a_lease(ASSIGNED, START_FOUND, READER_FAILED)
    number = lease.number
    assert lease.next_timer() == (1.0, RETRY)
    assert lease.on_event(RETRY, 1.0) == [Command(FETCH, Q, number)]


def test_queue_whose_reader_keeps_failing_is_retried_less_and_less_often() -> None:
    lease = a_lease(ASSIGNED, START_FOUND)
    now = 100.0
    pauses = []
    for _ in range(7):
        lease.on_event(READER_FAILED, now)
        pauses.append(lease.retry_at - now)
        now = lease.retry_at
        lease.on_event(RETRY, now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    lease.on_event(READER_FAILED, now + 31)
    assert lease.retry_at == now + 32


def test_queue_whose_reader_failed_is_locked_again_if_its_lock_is_no_longer_trusted() -> None:
    lease = a_lease(*TO_RUNNING, orderly=True)
    lease.on_event(READER_FAILED, 29.5)
    assert acts(lease.on_event(RETRY, 30.5)) == [STOP, LOCK], (
        "another member may own the messages of its open deliveries by now"
    )
    lease.on_event(LOCKED, 30.6, sent_at=30.5)
    assert lease.deliver_after == 30.6 + LOCK_HOLD_SECONDS


def test_lock_is_trusted_for_30_seconds_from_sending_its_request() -> None:
    lease = a_lease(ASSIGNED, orderly=True)
    lease.on_event(LOCKED, 109.0, sent_at=100.0)
    lease.on_event(START_FOUND, 110.0)
    assert lease.is_lock_trusted(129.9)
    assert not lease.is_lock_trusted(130.0)
    assert lease.next_timer() == (120.0, RENEW)
    assert acts(lease.on_event(RENEW, 120.0)) == [LOCK]
    assert lease.next_timer() == (125.0, RENEW)
    lease.on_event(RENEW, 125.0)
    assert lease.next_timer() == (130.0, EXPIRED)
    lease.on_event(LOCKED, 126.0, sent_at=125.0)
    assert lease.next_timer() == (145.0, RENEW)
    lease.on_event(LOCKED, 127.0, sent_at=120.0)  # the answer to the first request, which the second overtook
    assert lease.next_timer() == (145.0, RENEW)


def test_lock_allows_only_pushes_that_end_while_the_broker_keeps_it() -> None:
    lease = a_lease(*TO_RUNNING, orderly=True)
    assert lease.is_lock_trusted(29.9, push_timeout=30.0)
    assert lease.is_lock_trusted(14.9, push_timeout=45.0)
    assert not lease.is_lock_trusted(15.0, push_timeout=45.0)
    assert a_lease(ASSIGNED, START_FOUND).is_lock_trusted(1e9, push_timeout=45.0)


def test_lock_is_kept_when_its_renewal_is_not_answered() -> None:
    lease = a_lease(*TO_RUNNING, RENEW, orderly=True)
    assert lease.on_event(FAILED, 21.0) == []
    assert lease.state is RUNNING
    assert lease.next_timer() == (20.0, RENEW)


def test_lock_acquired_for_the_first_time_is_used_without_waiting() -> None:
    lease = a_lease(ASSIGNED, REFUSED, RETRY, LOCKED, orderly=True)
    lease.on_event(START_FOUND, 1.0)
    assert lease.state is RUNNING


@pytest.mark.parametrize(
    "events",
    [
        (*TO_RUNNING, EXPIRED),
        (*TO_RUNNING, REFUSED, RETRY),
        (ASSIGNED, LOCKED, EXPIRED),
        (ASSIGNED, LOCKED, REFUSED, RETRY),
    ],
    ids=["Running, expired", "Running, refused", "Starting, expired", "Starting, refused"],
)
def test_lock_that_was_lost_is_held_for_a_minute_and_the_start_offset_read_again(
    events: tuple[LeaseEvent, ...],
) -> None:
    lease = a_lease(*events, orderly=True)
    lease.on_event(LOCKED, 40.0, sent_at=39.0)
    assert lease.on_event(START_FOUND, 41.0) == []
    assert lease.state is STARTING
    lease.on_event(RENEW, 59.0)
    lease.on_event(LOCKED, 60.0, sent_at=59.0)
    lease.on_event(RENEW, 79.0)
    lease.on_event(LOCKED, 80.0, sent_at=79.0)
    assert lease.next_timer() == (99.0, RENEW)
    lease.on_event(LOCKED, 100.0, sent_at=99.0)
    assert lease.next_timer() == (40.0 + LOCK_HOLD_SECONDS, HOLD_OVER)
    assert acts(lease.on_event(HOLD_OVER, 100.0)) == [FIND_START]
    assert acts(lease.on_event(START_FOUND, 101.0)) == [FETCH]
    assert lease.state is RUNNING


def test_forced_grant_delays_use_of_the_lock_however_often_it_was_refused() -> None:
    lease = a_lease(ASSIGNED, REFUSED, RETRY, REFUSED, RETRY, orderly=True, needs_hold=True)
    lease.on_event(LOCKED, 7.0, sent_at=7.0)
    assert lease.on_event(START_FOUND, 8.0) == []
    assert lease.deliver_after == 7.0 + LOCK_HOLD_SECONDS


def test_lock_wait_discards_the_start_offset_of_an_earlier_attempt() -> None:
    lease = a_lease(ASSIGNED, LOCKED, START_FOUND, FAILED, RETRY, orderly=True, needs_hold=True)
    lease.on_event(LOCKED, 50.0, sent_at=29.0)
    assert lease.deliver_after == LOCK_HOLD_SECONDS
    assert lease.next_timer() == (49.0, RENEW)
    lease.on_event(LOCKED, 58.0, sent_at=57.0)
    assert lease.next_timer() == (77.0, RENEW)  # reading the start offset again requires a first reading


def test_lock_that_was_released_in_order_is_used_without_waiting_when_acquired_again() -> None:
    lease = a_lease(*TO_RUNNING, REVOKED, DRAIN_TIMEOUT, ASSIGNED, DRAINED, orderly=True)
    assert acts(lease.on_event(UNLOCKED, 40.0)) == [LOCK]
    lease.on_event(LOCKED, 41.0, sent_at=40.0)
    lease.on_event(START_FOUND, 42.0)
    assert lease.state is RUNNING


def test_lock_whose_trust_expired_while_stuck_is_held_before_use() -> None:
    lease = a_lease(ASSIGNED, LOCKED, FAILED, orderly=True)
    lease.on_event(RETRY, 29.0)
    lease.on_event(LOCKED, 29.5, sent_at=29.4)
    assert lease.deliver_after == 0.0
    lease.on_event(FAILED, 30.0)
    lease.on_event(RETRY, 60.0)
    lease.on_event(LOCKED, 61.0, sent_at=60.0)
    assert lease.deliver_after == 61.0 + LOCK_HOLD_SECONDS


def test_lock_renewal_that_was_requested_too_late_loses_the_lock() -> None:
    lease = a_lease(*TO_RUNNING, orderly=True)
    assert acts(lease.on_event(LOCKED, 31.0, sent_at=30.0)) == [STOP, LOCK]
    lease.on_event(LOCKED, 33.0, sent_at=32.0)
    assert lease.deliver_after == 33.0 + LOCK_HOLD_SECONDS


def test_drain_with_an_expired_lock_does_not_return_to_running() -> None:
    lease = a_lease(*TO_RUNNING, REVOKED, orderly=True)
    assert lease.on_event(ASSIGNED, 30.0) == []
    assert lease.state is DRAINING


def test_drain_of_a_queue_that_was_never_fetched_ends_before_it_starts_again() -> None:
    for events in ((ASSIGNED,), (ASSIGNED, FAILED)):
        lease = a_lease(*events, REVOKED, ASSIGNED)
        assert lease.state is DRAINING
        assert acts(lease.on_event(DRAINED, 1.0)) == [FIND_START]


def test_drain_of_a_queue_that_is_revoked_again_ends_in_released() -> None:
    lease = a_lease(ASSIGNED, START_FOUND, REVOKED, DRAIN_TIMEOUT, ASSIGNED, REVOKED)
    assert lease.on_event(DRAINED, 1.0) == []
    assert lease.state is RELEASED


def test_drain_is_cut_once_and_in_time() -> None:
    lease = a_lease(ASSIGNED, START_FOUND)
    lease.on_event(REVOKED, 100.0)
    lease.on_event(REVOKED, 120.0)
    assert lease.next_timer() == (130.0, DRAIN_TIMEOUT)
    lease.on_event(DRAIN_TIMEOUT, 130.0)
    assert lease.next_timer() is None


def test_queue_lifecycle_retry_pauses_grow_to_30_seconds_and_end_with_a_start() -> None:
    lease = a_lease(ASSIGNED)
    now = 0.0
    pauses = []
    for _ in range(7):
        lease.on_event(FAILED, now)
        due = lease.next_timer()
        assert due is not None
        assert due[1] is RETRY
        pauses.append(due[0] - now)
        now = due[0]
        lease.on_event(RETRY, now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    lease.on_event(START_FOUND, now)
    assert lease.backoff_seconds == 0


def mermaid_diagram() -> str:
    """Return the table as a Mermaid state diagram, for docs/handover.md."""
    arrows: dict[tuple[LeaseState, LeaseState, tuple[LeaseAction, ...]], list[str]] = {}
    for (state, event), (next_state, actions) in TRANSITIONS.items():
        arrows.setdefault((state, next_state, actions), []).append(event.value)
    lines = [
        f"    {state} --> {next_state}: {'; '.join(events)}" + (f" ({', '.join(actions)})" if actions else "")
        for (state, next_state, actions), events in arrows.items()
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> Released", *lines]) + "\n"


def test_queue_lifecycle_diagram_and_events_are_in_the_docs() -> None:
    page = (Path(__file__).parents[4] / "docs" / "handover.md").read_text()
    assert mermaid_diagram() in page
    assert all(f"{event}" in page.partition("## The member's side")[2] for event in LeaseEvent)
