"""Tests the count of redelivered messages when another process starts to read a queue."""

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

Q = Queue("orders", "broker-a", 0)
R = Queue("orders", "broker-a", 1)
OLD = ReaderProcess("m1", "uid-m1", "one")
NEW = ReaderProcess("m2", "uid-m2", "two")
RESTARTED = OLD._replace(incarnation="three")
IN_HANDOVER = a_document(taken={Q: ("m1", "m2"), R: ("m1", "m2")})


def none_has_ended(_: ReaderProcess) -> bool:
    return False


def old_has_ended(reader: ReaderProcess) -> bool:
    return reader == OLD


def record_page(
    tracker: DeliveryTracker,
    reader: ReaderProcess,
    *progress: int | None,
    queue: Queue = Q,
    forced: Iterable[Queue] = (),
    has_ended: Callable[[ReaderProcess], bool] = none_has_ended,
    max_queues: int = 100,
) -> list[tuple[int, RedeliveryCause, bool]]:
    """Record a page with start, delivered and committed offset of one queue; return the redeliveries."""
    rules = RedeliveryRules(frozenset(forced), has_ended)
    redelivered = tracker.record_page(reader, {queue: QueueProgress(*progress)}, rules, 0.0, max_queues=max_queues)
    assert all((redelivery.queue, redelivery.next_reader) == (queue, reader) for redelivery in redelivered)
    return [(redelivery.messages, redelivery.cause, redelivery.is_estimate) for redelivery in redelivered]


def a_report(
    held: Iterable[Queue] = (), releasing: Iterable[Queue] = (), uncommitted: Iterable[Uncommitted] = (), **changed: Any
) -> Report:
    fields: dict[str, Any] = {"member": "m1", "uid": "uid-m1", "generation": 5, "incarnation": "one"} | changed
    return Report(held=to_ranges(held), releasing=to_ranges(releasing), uncommitted=list(uncommitted), **fields)


def uncommitted_offset(offset: int, start: int = 0, queue: Queue = Q) -> Uncommitted:
    return Uncommitted(*queue, offset, start)


@pytest.mark.parametrize(
    ("offset", "committed", "is_last", "start", "messages"),
    [
        (9, 5, False, 5, 5),
        (9, 5, False, 10, 5),  # delivered more after its last page: counts as if it had crashed at that page
        (9, 5, False, 3, 7),  # the broker has lost a commit
        (9, None, False, 7, 3),
        (9, None, False, 12, 0),
        (9, 5, True, 8, 2),  # released the queue and committed more
        (9, 5, True, 10, 0),
        (9, None, True, 9, 1),
    ],
)
def test_offset_overlap_of_delivered_messages_and_the_next_readers_start(
    offset: int, committed: int | None, *, is_last: bool, start: int, messages: int
) -> None:
    assert count_redelivered(UncommittedDelivery(OLD, 0, offset, committed, 0.0, is_last), start) == messages


def test_crash_of_a_member_counts_its_uncommitted_messages() -> None:
    tracker = DeliveryTracker()
    assert record_page(tracker, OLD, 0, 9, 5) == []
    assert tracker.uncommitted_messages == 5
    assert record_page(tracker, NEW, 5, 5, 5, has_ended=old_has_ended) == [(5, RedeliveryCause.CRASH, True)]
    assert tracker.by_queue[Q].reader == NEW
    assert record_page(tracker, NEW, 5, 9, 10) == [], "redelivered messages are counted once"
    assert tracker.uncommitted_messages == 0


def test_crash_is_not_counted_while_the_previous_reader_may_still_release_the_queue() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    assert record_page(tracker, NEW, 5, 9, 5) == []
    assert tracker.by_queue[Q].reader == OLD
    assert record_page(tracker, NEW, 5, 9, 5, has_ended=old_has_ended) == [(5, RedeliveryCause.CRASH, True)]


def test_crash_of_a_process_in_the_same_pod_counts_when_the_next_process_starts_to_read() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    assert record_page(tracker, RESTARTED, None, None, None) == [], "the next process has not started to read"
    assert record_page(tracker, RESTARTED, 5, None, 5) == [(5, RedeliveryCause.CRASH, True)]
    assert tracker.by_queue == {}


def test_crash_with_everything_committed_counts_nothing() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    record_page(tracker, OLD, 0, 9, 10)
    assert tracker.by_queue == {}
    assert record_page(tracker, NEW, 10, None, 10, has_ended=old_has_ended) == []


def test_forced_grant_counts_messages_that_the_former_owner_delivered() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    assert record_page(tracker, NEW, 5, 6, 5, forced=[Q]) == [(5, RedeliveryCause.FORCED, True)]


def test_forced_grant_counts_although_the_former_owner_obeys_first() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    forced = a_document(members={"m2": [Q]}, forced={Q: 5})
    tracker.record_report(a_report([Q]), a_report(), forced, 1.0)
    tracker.record_report(a_report([R]), a_report(), a_document(members={"m2": [Q]}), 1.0)
    assert tracker.queues_awaiting_reader(none_has_ended, 2.0) == {Q}
    assert record_page(tracker, NEW, 5, 6, 5) == [(5, RedeliveryCause.FORCED, True)]


def test_handover_with_everything_committed_counts_nothing() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    tracker.record_report(a_report([Q]), a_report(), IN_HANDOVER, 1.0)
    assert tracker.by_queue == {}
    assert record_page(tracker, NEW, 10, None, 10) == []


def test_handover_after_a_drain_timeout_counts_uncommitted_messages() -> None:
    tracker = DeliveryTracker()
    draining = a_report(releasing=[Q], uncommitted=[uncommitted_offset(12)])
    tracker.record_report(a_report([Q]), draining, IN_HANDOVER, 1.0)
    assert tracker.queues_awaiting_reader(none_has_ended, 1.0) == set()
    tracker.record_report(draining, a_report(uncommitted=[uncommitted_offset(12)]), IN_HANDOVER, 2.0)
    assert tracker.queues_awaiting_reader(none_has_ended, 2.0) == {Q}
    assert record_page(tracker, NEW, 10, None, 10) == [(3, RedeliveryCause.HANDOVER, False)]
    assert tracker.queues_awaiting_reader(none_has_ended, 2.0) == set()


def test_handover_back_to_the_same_member_counts_uncommitted_messages() -> None:
    tracker = DeliveryTracker()
    tracker.record_report(a_report([Q]), a_report(uncommitted=[uncommitted_offset(12)]), IN_HANDOVER, 1.0)
    assert record_page(tracker, OLD, 10, None, 10) == [(3, RedeliveryCause.HANDOVER, False)]


def test_handover_after_which_the_member_ends_counts_its_last_report() -> None:
    """The member committed more before it old_has_ended, so its last page is out of date."""
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    draining = a_report(releasing=[Q], uncommitted=[uncommitted_offset(9)])
    tracker.record_report(a_report([Q]), draining, IN_HANDOVER, 1.0)
    assert record_page(tracker, NEW, 10, None, 10, has_ended=old_has_ended) == []
    assert tracker.by_queue == {}


def test_handover_ignores_reports_about_queues_that_the_member_does_not_own() -> None:
    tracker = DeliveryTracker()
    document_of_m2 = a_document(members={"m2": [Q]})
    tracker.record_report(a_report([Q]), a_report(uncommitted=[uncommitted_offset(12)]), document_of_m2, 1.0)
    tracker.record_report(a_report([R]), a_report(uncommitted=[uncommitted_offset(12)]), IN_HANDOVER, 1.0)
    tracker.record_report(a_report([Q]), a_report(uncommitted=[uncommitted_offset(12)]), None, 1.0)
    assert tracker.by_queue == {}


def test_handover_is_not_recorded_from_a_report_of_another_process() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    tracker.record_report(a_report([Q]), a_report(incarnation="three"), IN_HANDOVER, 1.0)
    assert tracker.by_queue[Q].reader == OLD


def test_sidecar_of_an_earlier_version_without_start_offsets_counts_nothing() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    assert record_page(tracker, NEW, None, None, 7, has_ended=old_has_ended) == []
    assert tracker.by_queue == {}
    assert record_page(tracker, NEW, None, None, 7) == []
    tracker.record_report(a_report([Q], incarnation=""), a_report(incarnation=""), IN_HANDOVER, 1.0)
    assert tracker.by_queue == {}


def test_offset_of_no_more_queues_than_allowed_is_kept() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5, max_queues=1)
    record_page(tracker, OLD, 0, 9, 5, queue=R, max_queues=1)
    assert [*tracker.by_queue] == [Q]
    record_page(tracker, OLD, 0, 11, 5, max_queues=1)
    assert tracker.by_queue[Q].delivered_offset == 11


def test_offset_of_no_more_queues_than_the_groups_limit_is_kept_from_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redelivery, "MAX_TRACKED_QUEUES", 1)
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5, queue=R)
    tracker.record_report(a_report([Q, R]), a_report([R], uncommitted=[uncommitted_offset(12)]), IN_HANDOVER, 1.0)
    assert [*tracker.by_queue] == [R]
    tracker.clear()
    tracker.record_report(a_report([Q, R]), a_report([R], uncommitted=[uncommitted_offset(12)]), IN_HANDOVER, 1.0)
    assert [*tracker.by_queue] == [Q]


def test_offset_of_a_queue_without_a_next_reader_is_forgotten() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    assert tracker.queues_awaiting_reader(none_has_ended, FORGET_AFTER_SECONDS + 1) == set()
    assert tracker.queues_awaiting_reader(old_has_ended, FREQUENT_POLL_SECONDS) == {Q}
    assert tracker.queues_awaiting_reader(old_has_ended, FORGET_AFTER_SECONDS) == set(), (
        "its next reader is not polled more often than others"
    )
    assert [*tracker.by_queue] == [Q]
    assert tracker.queues_awaiting_reader(old_has_ended, FORGET_AFTER_SECONDS + 1) == set()
    assert tracker.by_queue == {}


def test_leader_election_makes_the_new_leader_count_only_from_its_own_reads() -> None:
    tracker = DeliveryTracker()
    record_page(tracker, OLD, 0, 9, 5)
    tracker.clear()
    assert record_page(tracker, NEW, 5, 9, 5, has_ended=old_has_ended) == []


def test_handover_names_both_readers() -> None:
    tracker = DeliveryTracker()
    tracker.record_report(a_report([Q]), a_report(uncommitted=[uncommitted_offset(12)]), IN_HANDOVER, 1.0)
    rules = RedeliveryRules(frozenset(), none_has_ended)
    redelivered = tracker.record_page(NEW, {Q: QueueProgress(10, None, 10)}, rules, 3.0, max_queues=1)
    assert redelivered == [Redelivery(Q, 3, RedeliveryCause.HANDOVER, OLD, NEW, is_estimate=False)]
