"""What comes again when another process reads a queue: counted with values."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from builders import a_document
from rota import redelivery
from rota.model import Queue
from rota.queue_offsets import QueueProgress
from rota.ranges import to_ranges
from rota.redelivery import (
    FORGET_AFTER_SECONDS,
    FREQUENT_POLL_SECONDS,
    DeliveryTracker,
    ReaderProcess,
    Redelivery,
    RedeliveryCause,
    RedeliveryRules,
    UncommittedDelivery,
    count_redelivered,
)
from rota.reports import Report, Uncommitted

Q, R = Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1)
OLD, NEW = ReaderProcess("m1", "uid-m1", "one"), ReaderProcess("m2", "uid-m2", "two")
RESTARTED = OLD._replace(incarnation="three")
TO_BE_TAKEN = a_document(taken={Q: ("m1", "m2"), R: ("m1", "m2")})


def running(_: ReaderProcess) -> bool:
    return False


def ended(reader: ReaderProcess) -> bool:
    return reader == OLD


def read(
    given: DeliveryTracker,
    reader: ReaderProcess,
    *progress: int | None,
    queue: Queue = Q,
    forced: Iterable[Queue] = (),
    has_ended: Callable[[ReaderProcess], bool] = running,
    most: int = 100,
) -> list[tuple[int, RedeliveryCause, bool]]:
    """Take a page with start, given and committed of one queue; return what came again."""
    rules = RedeliveryRules(frozenset(forced), has_ended)
    redelivered = given.record_page(reader, {queue: QueueProgress(*progress)}, rules, 0.0, max_queues=most)
    assert all((it.queue, it.next_reader) == (queue, reader) for it in redelivered)
    return [(it.messages, it.cause, it.is_estimate) for it in redelivered]


def a_report(
    held: Iterable[Queue] = (), releasing: Iterable[Queue] = (), uncommitted: Iterable[Uncommitted] = (), **changed: Any
) -> Report:
    fields: dict[str, Any] = {"member": "m1", "uid": "uid-m1", "generation": 5, "incarnation": "one"} | changed
    return Report(held=to_ranges(held), releasing=to_ranges(releasing), uncommitted=list(uncommitted), **fields)


def not_committed(offset: int, start: int = 0, queue: Queue = Q) -> Uncommitted:
    return Uncommitted(*queue, offset, start)


@pytest.mark.parametrize(
    ("offset", "committed", "is_last", "start", "messages"),
    [
        (9, 5, False, 5, 5),
        (9, 5, False, 10, 5),  # it went on after it last said so: as much as a crash would have repeated then
        (9, 5, False, 3, 7),  # the broker has lost a commit
        (9, None, False, 7, 3),
        (9, None, False, 12, 0),
        (9, 5, True, 8, 2),  # it gave up the queue and committed some more
        (9, 5, True, 10, 0),
        (9, None, True, 9, 1),
    ],
)
def test_offset_overlap_of_what_the_app_was_given_and_the_next_readers_start(
    offset: int, committed: int | None, *, is_last: bool, start: int, messages: int
) -> None:
    assert count_redelivered(UncommittedDelivery(OLD, 0, offset, committed, 0.0, is_last), start) == messages


def test_crash_of_a_member_counts_what_it_had_given_and_not_committed() -> None:
    given = DeliveryTracker()
    assert read(given, OLD, 0, 9, 5) == []
    assert given.uncommitted_messages == 5
    assert read(given, NEW, 5, 5, 5, has_ended=ended) == [(5, RedeliveryCause.CRASH, True)]
    assert given.by_queue[Q].reader == NEW
    assert read(given, NEW, 5, 9, 10) == [], "it is counted once"
    assert given.uncommitted_messages == 0


def test_crash_is_not_counted_while_the_reader_before_may_still_release_the_queue() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    assert read(given, NEW, 5, 9, 5) == []
    assert given.by_queue[Q].reader == OLD
    assert read(given, NEW, 5, 9, 5, has_ended=ended) == [(5, RedeliveryCause.CRASH, True)]


def test_crash_of_a_process_in_the_same_pod_counts_when_the_next_process_begins() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    assert read(given, RESTARTED, None, None, None) == [], "it has not begun"
    assert read(given, RESTARTED, 5, None, 5) == [(5, RedeliveryCause.CRASH, True)]
    assert given.by_queue == {}


def test_crash_with_everything_committed_counts_nothing() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    read(given, OLD, 0, 9, 10)
    assert given.by_queue == {}
    assert read(given, NEW, 10, None, 10, has_ended=ended) == []


def test_forced_grant_counts_what_the_former_owner_had_given() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    assert read(given, NEW, 5, 6, 5, forced=[Q]) == [(5, RedeliveryCause.FORCED, True)]


def test_forced_grant_counts_although_the_former_owner_obeys_first() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    forced = a_document(members={"m2": [Q]}, forced={Q: 5})
    given.record_report(a_report([Q]), a_report(), forced, 1.0)
    given.record_report(a_report([R]), a_report(), a_document(members={"m2": [Q]}), 1.0)
    assert given.queues_awaiting_reader(running, 2.0) == {Q}
    assert read(given, NEW, 5, 6, 5) == [(5, RedeliveryCause.FORCED, True)]


def test_handover_with_everything_committed_counts_nothing() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    given.record_report(a_report([Q]), a_report(), TO_BE_TAKEN, 1.0)
    assert given.by_queue == {}
    assert read(given, NEW, 10, None, 10) == []


def test_handover_whose_drain_timed_out_counts_what_was_not_committed() -> None:
    given, draining = DeliveryTracker(), a_report(releasing=[Q], uncommitted=[not_committed(12)])
    given.record_report(a_report([Q]), draining, TO_BE_TAKEN, 1.0)
    assert given.queues_awaiting_reader(running, 1.0) == set()
    given.record_report(draining, a_report(uncommitted=[not_committed(12)]), TO_BE_TAKEN, 2.0)
    assert given.queues_awaiting_reader(running, 2.0) == {Q}
    assert read(given, NEW, 10, None, 10) == [(3, RedeliveryCause.HANDOVER, False)]
    assert given.queues_awaiting_reader(running, 2.0) == set()


def test_handover_back_to_the_same_member_counts_what_was_not_committed() -> None:
    given = DeliveryTracker()
    given.record_report(a_report([Q]), a_report(uncommitted=[not_committed(12)]), TO_BE_TAKEN, 1.0)
    assert read(given, OLD, 10, None, 10) == [(3, RedeliveryCause.HANDOVER, False)]


def test_handover_after_which_the_member_ends_counts_its_last_report() -> None:
    """It had committed more when it ended: what its page said is out of date."""
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    draining = a_report(releasing=[Q], uncommitted=[not_committed(9)])
    given.record_report(a_report([Q]), draining, TO_BE_TAKEN, 1.0)
    assert read(given, NEW, 10, None, 10, has_ended=ended) == []
    assert given.by_queue == {}


def test_handover_ignores_reports_about_queues_that_the_member_does_not_own() -> None:
    given = DeliveryTracker()
    another = a_document(members={"m2": [Q]})
    given.record_report(a_report([Q]), a_report(uncommitted=[not_committed(12)]), another, 1.0)
    given.record_report(a_report([R]), a_report(uncommitted=[not_committed(12)]), TO_BE_TAKEN, 1.0)
    given.record_report(a_report([Q]), a_report(uncommitted=[not_committed(12)]), None, 1.0)
    assert given.by_queue == {}


def test_handover_is_not_what_a_report_of_another_process_says() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    given.record_report(a_report([Q]), a_report(incarnation="three"), TO_BE_TAKEN, 1.0)
    assert given.by_queue[Q].reader == OLD


def test_sidecar_of_an_earlier_version_that_does_not_say_where_it_began_counts_nothing() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    assert read(given, NEW, None, None, 7, has_ended=ended) == []
    assert given.by_queue == {}
    assert read(given, NEW, None, None, 7) == []
    given.record_report(a_report([Q], incarnation=""), a_report(incarnation=""), TO_BE_TAKEN, 1.0)
    assert given.by_queue == {}


def test_offset_of_no_more_queues_than_allowed_is_kept() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5, most=1)
    read(given, OLD, 0, 9, 5, queue=R, most=1)
    assert [*given.by_queue] == [Q]
    read(given, OLD, 0, 11, 5, most=1)
    assert given.by_queue[Q].delivered_offset == 11


def test_offset_of_no_more_queues_than_the_groups_limit_is_kept_from_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redelivery, "MAX_TRACKED_QUEUES", 1)
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5, queue=R)
    given.record_report(a_report([Q, R]), a_report([R], uncommitted=[not_committed(12)]), TO_BE_TAKEN, 1.0)
    assert [*given.by_queue] == [R]
    given.clear()
    given.record_report(a_report([Q, R]), a_report([R], uncommitted=[not_committed(12)]), TO_BE_TAKEN, 1.0)
    assert [*given.by_queue] == [Q]


def test_offset_of_a_queue_that_nobody_takes_over_is_forgotten() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    assert given.queues_awaiting_reader(running, FORGET_AFTER_SECONDS + 1) == set()
    assert given.queues_awaiting_reader(ended, FREQUENT_POLL_SECONDS) == {Q}
    assert given.queues_awaiting_reader(ended, FORGET_AFTER_SECONDS) == set(), (
        "its next reader is not read more often than others"
    )
    assert [*given.by_queue] == [Q]
    assert given.queues_awaiting_reader(ended, FORGET_AFTER_SECONDS + 1) == set()
    assert given.by_queue == {}


def test_leader_election_makes_the_new_leader_count_from_what_it_reads_itself() -> None:
    given = DeliveryTracker()
    read(given, OLD, 0, 9, 5)
    given.clear()
    assert read(given, NEW, 5, 9, 5, has_ended=ended) == []


def test_handover_names_both_readers() -> None:
    given = DeliveryTracker()
    given.record_report(a_report([Q]), a_report(uncommitted=[not_committed(12)]), TO_BE_TAKEN, 1.0)
    rules = RedeliveryRules(frozenset(), running)
    redelivered = given.record_page(NEW, {Q: QueueProgress(10, None, 10)}, rules, 3.0, max_queues=1)
    assert redelivered == [Redelivery(Q, 3, RedeliveryCause.HANDOVER, OLD, NEW, is_estimate=False)]
