"""The leases of a member's queues: their timers, and which of their changes the member's report shows."""

from rota.model import Queue
from rota.sidecar.member.lease_table import LeaseTable
from rota.sidecar.member.queue_lifecycle import LeaseAction, LeaseEvent, LeaseState

A, B = (Queue("orders", "broker-a", number) for number in range(2))


def a_table() -> LeaseTable:
    """Return a table in which A failed at 5 and B at 2, each to be retried after a second."""
    table = LeaseTable(drain_timeout=30.0)
    for queue, failed_at in ((A, 5.0), (B, 2.0)):
        commands = table.assign(queue, 0.0, orderly=False, needs_lock_hold=False)
        assert [command.action for command in commands] == [LeaseAction.FIND_START]
        table.apply_event(table.leases[queue], LeaseEvent.FAILED, failed_at)
    return table


def test_queue_lifecycle_timers_run_when_they_are_due_the_earliest_first() -> None:
    table = a_table()
    assert table.next_timer_at() == 3.0
    assert table.run_due_timers(2.5) == []
    assert [command.queue for command in table.run_due_timers(3.0)] == [B]
    assert table.next_timer_at() == 6.0
    assert [command.queue for command in table.run_due_timers(6.0)] == [A]
    assert table.next_timer_at() is None


def test_queue_lifecycle_timers_of_an_earlier_state_are_skipped() -> None:
    table = a_table()
    table.apply_event(table.leases[B], LeaseEvent.REVOKED, 2.5)
    assert table.next_timer_at() == 6.0, "the drain ends later, and the retry is outdated"
    table.run_due_timers(6.0)
    assert table.next_timer_at() == 2.5 + table.drain_timeout


def test_report_changes_when_a_queue_is_assigned_drains_or_is_released_only() -> None:
    table = LeaseTable(drain_timeout=30.0)
    changes = []
    table.assign(A, 0.0, orderly=False, needs_lock_hold=False)
    for event in (LeaseEvent.START_FOUND, LeaseEvent.READER_FAILED, LeaseEvent.REVOKED, LeaseEvent.DRAINED):
        changes.append((table.leases[A].state, table.reported_changes))
        table.apply_event(table.leases[A], event, 1.0)
    assert changes == [
        (LeaseState.STARTING, 1),
        (LeaseState.RUNNING, 1),
        (LeaseState.STUCK, 1),
        (LeaseState.DRAINING, 2),
    ]
    assert (table.leases, table.reported_changes) == ({}, 3)
