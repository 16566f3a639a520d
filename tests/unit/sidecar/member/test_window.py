"""One queue's window: which messages it delivers, which offsets may be committed, and when it is full."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.brokers.message import MEBIBYTE, MESSAGE_OVERHEAD_BYTES, Message, extra_properties_bytes
from rota.brokers.port import OffsetCorrection, PullResult
from rota.model import Queue
from rota.sidecar.member.window import OpenDelivery, QueueLimits, QueueWindow
from rota.spec import Buffer

Q = Queue("orders", "broker-a", 3)


def a_message(offset: int, size: int = 10) -> Message:
    return Message(Q, offset, b"x" * size, {})


def with_properties(offset: int, number: int) -> Message:
    """Return a message without a body, with that many properties of 5 characters."""
    properties = {f"{index:04}": "v" for index in range(number)}
    return Message(Q, offset, b"", properties, properties_bytes=extra_properties_bytes(number, 5 * number))


def a_pull(*offsets: int, next_offset: int | None = None, correction: OffsetCorrection | None = None) -> PullResult:
    result_offset = next_offset if next_offset is not None else max(offsets) + 1
    return PullResult(tuple(a_message(offset) for offset in offsets), result_offset, 0, 1000, correction)


def a_window(*offsets: int, orderly: bool = False, next_offset: int | None = None) -> QueueWindow:
    """Return a window that started at offset 0, the committed one, and fetched these offsets."""
    window = QueueWindow(next_offset=0, orderly=orderly, committed_offset=0)
    if offsets or next_offset:
        window.add_pull(0, a_pull(*offsets, next_offset=next_offset))
    return window


def a_delivery(window: QueueWindow, max_messages: int = 32, now: float = 0.0) -> OpenDelivery:
    delivery = window.start_delivery(max_messages, now)
    assert delivery is not None
    return delivery


def offsets_of(delivery: OpenDelivery | None) -> list[int]:
    return [message.offset for message in delivery.messages] if delivery else []


def finish(window: QueueWindow, delivery: OpenDelivery, *offsets: int) -> None:
    """Finish the messages at these offsets, or all of them if none is named."""
    for message in delivery.messages:
        if not offsets or message.offset in offsets:
            window.finish_message(delivery, message)


def return_messages(window: QueueWindow, delivery: OpenDelivery, *offsets: int, until: float = 0.0) -> None:
    for message in delivery.messages:
        if message.offset in offsets:
            window.return_message(delivery, message, until)


def offset_to_commit(window: QueueWindow) -> int | None:
    commit = window.next_commit()
    return commit.offset if commit else None


# Delivering


def test_window_delivers_messages_in_order_and_each_once() -> None:
    window = a_window(0, 1, 2, 3, 4)
    assert [offsets_of(window.start_delivery(2, 0.0)) for _ in range(4)] == [[0, 1], [2, 3], [4], []]


def test_window_without_messages_starts_no_delivery() -> None:
    window = a_window()
    assert window.start_delivery(32, 0.0) is None
    assert window.is_idle


def test_window_ignores_messages_that_were_fetched_before() -> None:
    window = a_window(0, 1, 2)
    window.add_pull(3, a_pull(1, 2, 3, 4))
    assert offsets_of(window.start_delivery(32, 0.0)) == [0, 1, 2, 3, 4]


def test_window_next_offset_never_goes_back_with_a_pull() -> None:
    window = a_window(0, 1, 2)
    window.add_pull(3, a_pull(next_offset=2))
    assert window.next_offset == 3
    window.add_pull(3, a_pull(3, 4, next_offset=4))
    assert window.next_offset == 5


def test_window_is_concurrent_by_default() -> None:
    window = QueueWindow(next_offset=0)
    window.add_pull(0, a_pull(0, 1))
    assert [offsets_of(window.start_delivery(1, 0.0)) for _ in range(2)] == [[0], [1]]


def test_orderly_queue_has_one_open_delivery_at_a_time() -> None:
    window = a_window(0, 1, 2, 3, orderly=True)
    delivery = a_delivery(window, 2)
    assert window.start_delivery(2, 0.0) is None
    finish(window, delivery, 0)
    assert window.start_delivery(2, 0.0) is None
    finish(window, delivery, 1)
    assert offsets_of(window.start_delivery(2, 0.0)) == [2, 3]


def test_orderly_queue_repeats_returned_messages_first_in_order_and_one_by_one() -> None:
    window = a_window(0, 1, 2, 3, 4, orderly=True)
    delivery = a_delivery(window, 4)
    finish(window, delivery, 0, 2)
    for message in reversed(delivery.messages):
        window.return_message(delivery, message, 0.0)
    for offset in (1, 3):
        repeated = a_delivery(window)
        assert offsets_of(repeated) == [offset]
        finish(window, repeated)
    assert offsets_of(window.start_delivery(32, 0.0)) == [4]


def test_window_delivers_returned_messages_one_by_one_and_new_ones_together() -> None:
    window = a_window(0, 1, 2, 3)
    return_messages(window, a_delivery(window, 2), 0, 1)
    assert [offsets_of(window.start_delivery(2, 0.0)) for _ in range(3)] == [[0], [1], [2, 3]]


def test_orderly_queue_waits_until_all_returned_messages_may_be_retried() -> None:
    window = a_window(0, 1, 2, orderly=True)
    delivery = a_delivery(window, 2)
    return_messages(window, delivery, 0, until=5.0)
    assert window.start_delivery(32, 5.0) is None
    return_messages(window, delivery, 1, until=4.0)
    assert window.start_delivery(32, 4.9) is None
    assert offsets_of(window.start_delivery(1, 5.0)) == [0]


def test_window_of_a_concurrent_queue_is_not_blocked_by_messages_awaiting_retry() -> None:
    window = a_window(0, 1, 2, 3)
    return_messages(window, a_delivery(window, 2), 0, 1, until=5.0)
    assert offsets_of(window.start_delivery(1, 4.9)) == [2]
    assert offsets_of(window.start_delivery(1, 5.0)) == [0]
    assert offsets_of(window.start_delivery(9, 5.0)) == [1]
    assert offsets_of(window.start_delivery(9, 5.0)) == [3]


def test_window_delivers_first_the_message_that_may_be_retried_first() -> None:
    window = a_window(0, 1)
    delivery = a_delivery(window)
    return_messages(window, delivery, 0, until=7.0)
    return_messages(window, delivery, 1, until=5.0)
    assert offsets_of(window.start_delivery(9, 5.0)) == [1]


def test_window_keeps_the_attempt_of_a_returned_message() -> None:
    window = a_window(0, orderly=True)
    window.return_message(a_delivery(window), Message(Q, 0, b"x" * 10, {}, reconsume_times=1), 0.0)
    assert [message.reconsume_times for message in a_delivery(window).messages] == [1]


def test_window_counts_repeated_ends_of_a_message_once() -> None:
    window = a_window(0, 1)
    first = a_delivery(window)
    return_messages(window, first, 0)
    second = a_delivery(window)
    finish(window, first, 0)
    return_messages(window, first, 0)
    assert (window.committable_offset, window.in_flight) == (0, 2)
    assert window.start_delivery(32, 0.0) is None
    finish(window, second, 0)
    assert (window.committable_offset, window.in_flight) == (1, 1)


# Committing


def test_offset_commit_includes_a_start_that_the_broker_does_not_have() -> None:
    assert offset_to_commit(QueueWindow(next_offset=7)) == 7
    assert offset_to_commit(QueueWindow(next_offset=7, committed_offset=7)) is None
    assert offset_to_commit(QueueWindow(next_offset=7, committed_offset=3)) == 7


def test_offset_commit_is_the_lowest_unfinished_offset_whatever_ends_first() -> None:
    window = a_window(0, 1, 2, 3)
    first = a_delivery(window, 2)
    second = a_delivery(window, 2)
    commits = []
    for delivery, offset in ((second, 3), (first, 1), (first, 0), (second, 2)):
        finish(window, delivery, offset)
        commits.append(offset_to_commit(window))
    assert commits == [None, None, 2, 4]


def test_offset_commit_passes_a_gap_once_the_messages_before_it_are_finished() -> None:
    window = a_window(5, 9, next_offset=40)
    assert offset_to_commit(window) == 5
    delivery = a_delivery(window)
    finish(window, delivery, 5)
    assert offset_to_commit(window) == 9
    finish(window, delivery, 9)
    assert offset_to_commit(window) == 40


def test_offset_commit_is_the_next_offset_where_every_message_was_filtered_out() -> None:
    assert offset_to_commit(a_window(next_offset=64)) == 64


def test_offset_commit_does_not_pass_a_returned_message() -> None:
    window = a_window(0, 1, 2)
    delivery = a_delivery(window)
    return_messages(window, delivery, 1)
    finish(window, delivery)
    assert offset_to_commit(window) == 1
    finish(window, a_delivery(window))
    assert offset_to_commit(window) == 3


def test_offset_commit_that_was_answered_is_not_repeated() -> None:
    window = a_window(0, 1)
    delivery = a_delivery(window)
    finish(window, delivery, 0)
    commit = window.next_commit()
    assert commit is not None
    finish(window, delivery, 1)
    window.mark_committed(commit)
    assert window.committed_offset == 1
    assert offset_to_commit(window) == 2


# Stopping


def test_window_that_is_stopped_starts_no_delivery_and_is_empty_after_its_last_one() -> None:
    window = a_window(0, 1, 2, 3)
    delivery = a_delivery(window, 2)
    window.stop()
    assert window.start_delivery(2, 0.0) is None
    assert not window.is_idle
    finish(window, delivery)
    assert window.is_idle


def test_window_that_is_stopped_discards_undelivered_messages_without_committing() -> None:
    window = a_window(0, 1, 5, 6, next_offset=9)
    delivery = a_delivery(window, 2)
    window.stop()
    assert (window.unfinished_count, window.unfinished_bytes, window.next_offset) == (2, 20, 5)
    finish(window, delivery)
    assert (window.unfinished_count, window.unfinished_bytes, offset_to_commit(window)) == (0, 0, 5)


def test_offset_commit_of_a_stopped_window_passes_filtered_messages() -> None:
    window = a_window(0, next_offset=9)
    delivery = a_delivery(window)
    window.stop()
    finish(window, delivery)
    assert offset_to_commit(window) == 9


def test_offset_commit_does_not_pass_messages_of_a_cut_delivery() -> None:
    window = a_window(0, 1, 2)
    delivery = a_delivery(window)
    window.stop()
    finish(window, delivery, 0)
    return_messages(window, delivery, 1, 2)
    assert (window.is_idle, offset_to_commit(window)) == (True, 1)
    assert window.start_delivery(32, 0.0) is None
    finish(window, delivery)  # the app's answer comes after all
    assert offset_to_commit(window) == 1


def test_window_that_was_stopped_has_no_gap_after_a_late_pull() -> None:
    window = a_window(0, 1, 2)
    a_delivery(window, 1)
    window.stop()
    window.add_pull(3, a_pull(3, 4))
    window.add_pull(1, a_pull(1, 2))
    assert (window.next_offset, window.unfinished_count) == (1, 1)
    window.resume()
    window.add_pull(3, a_pull(3, 4))
    assert (window.next_offset, window.unfinished_count) == (1, 1)
    window.add_pull(1, a_pull(1, 2, 3))
    assert offsets_of(window.start_delivery(32, 0.0)) == [1, 2, 3]


def test_window_that_is_resumed_continues_its_open_delivery() -> None:
    window = a_window(0, 1, orderly=True)
    delivery = a_delivery(window, 1)
    window.stop()
    window.resume()
    window.add_pull(1, a_pull(1))
    assert window.start_delivery(1, 0.0) is None
    return_messages(window, delivery, 0)
    repeated = a_delivery(window, 1)
    assert offsets_of(repeated) == [0]
    finish(window, repeated)
    assert offsets_of(window.start_delivery(1, 0.0)) == [1]


# Resetting


def test_window_reset_discards_everything_and_commits_the_new_offset() -> None:
    window = a_window(0, 1, 2, 3)
    return_messages(window, a_delivery(window, 2), 0, 1, until=9.0)
    window.reset(100)
    assert (window.unfinished_count, window.unfinished_bytes, window.next_offset, offset_to_commit(window)) == (
        0,
        0,
        100,
        100,
    )
    assert window.start_delivery(32, 9.0) is None


def test_window_that_the_group_has_passed_continues_at_the_groups_offset() -> None:
    window = a_window(0, 1, 2)
    delivery = a_delivery(window, 1)
    finish(window, delivery)
    open_delivery = a_delivery(window, 1)
    commit = window.next_commit()
    assert commit
    assert not window.skip_if_passed(commit, 1)
    assert window.skip_if_passed(commit, 7)
    finish(window, open_delivery)
    assert (window.next_offset, window.committed_offset, offset_to_commit(window), window.is_idle) == (7, 7, None, True)


def test_window_reset_voids_the_groups_offset_read_after_an_earlier_commit() -> None:
    window = a_window(0, 1, 2)
    finish(window, a_delivery(window))
    commit = window.next_commit()
    assert commit
    window.reset(1)
    assert not window.skip_if_passed(commit, 7)
    assert window.next_offset == 1


def test_window_adds_an_unanswered_commit_to_a_known_offset_unless_it_was_reset_since() -> None:
    window = a_window(0, 1, 2)
    finish(window, a_delivery(window))
    commit = window.next_commit()
    assert commit
    window.committed_offset = 1
    assert (window.committed_with(None), window.committed_with(commit), window.committed_offset) == (1, 3, 1)
    window.committed_offset = 4
    assert window.committed_with(commit) == 4
    window.committed_offset = None
    assert window.committed_with(commit) is None
    window.reset(1, committed=1)
    assert window.committed_with(commit) == 1


def test_window_forgets_attempts_with_the_message_and_with_a_reset() -> None:
    window = a_window(0, 1)
    window.extra_attempts |= {0: 3, 1: 2}
    finish(window, a_delivery(window, 1))
    assert window.extra_attempts == {1: 2}
    window.reset(0)
    assert window.extra_attempts == {}


def test_memory_limit_of_a_queue_is_at_most_its_share() -> None:
    buffer = Buffer(mebibytes_per_queue=100, mebibytes_per_topic=50)
    assert QueueLimits.for_queue(buffer, 5).max_bytes == 10 * MEBIBYTE
    assert QueueLimits.for_queue(buffer, 5, 3.5 * MEBIBYTE).max_bytes == 3.5 * MEBIBYTE


def test_window_fits_the_next_messages_up_to_a_total_body_size_but_at_least_one() -> None:
    window = QueueWindow(next_offset=0)
    assert window.count_fitting(32, 100) == 1
    window.add_pull(0, PullResult((a_message(0, 60), a_message(1, 40), a_message(2, 1)), 3, 0, 3))
    assert [window.count_fitting(32, size) for size in (0, 59, 60, 99, 100, 101)] == [1, 1, 1, 1, 2, 3]
    assert [window.count_fitting(max_messages, 101) for max_messages in (1, 2, 3)] == [1, 2, 3]
    a_delivery(window, 1)
    assert window.count_fitting(32, 40) == 1
    assert window.count_fitting(32, 41) == 2


def test_memory_is_bodies_and_an_overhead_for_each_message_until_it_is_finished() -> None:
    window = a_window(0, 1, 2)
    assert window.memory_bytes == 30 + 3 * MESSAGE_OVERHEAD_BYTES
    delivery = a_delivery(window, 2)
    assert window.memory_bytes == 30 + 3 * MESSAGE_OVERHEAD_BYTES
    finish(window, delivery, 0)
    assert window.memory_bytes == 20 + 2 * MESSAGE_OVERHEAD_BYTES
    window.stop()
    assert window.memory_bytes == 10 + MESSAGE_OVERHEAD_BYTES


def test_memory_of_a_delivery_from_before_a_reset_counts_until_it_ends() -> None:
    window = a_window(0, 1, 2)
    earlier_delivery = a_delivery(window, 2)
    finish(window, earlier_delivery, 0)
    for _ in range(2):
        window.reset(0)
        assert (window.unfinished_count, window.memory_bytes) == (0, 10 + MESSAGE_OVERHEAD_BYTES)
    window.add_pull(0, a_pull(0))
    assert window.memory_bytes == 20 + 2 * MESSAGE_OVERHEAD_BYTES
    return_messages(window, earlier_delivery, 1)
    assert window.memory_bytes == 10 + MESSAGE_OVERHEAD_BYTES


def test_memory_of_a_finished_message_is_free_while_others_of_its_delivery_are_open() -> None:
    window = a_window(0, 1)
    delivery = a_delivery(window, 2)
    finish(window, delivery, 0)
    assert offsets_of(delivery) == [1]


def test_window_reset_makes_finished_messages_unfinished() -> None:
    window = a_window(0, 1, 2)
    finish(window, a_delivery(window), 1)
    window.reset(0)
    window.add_pull(0, a_pull(0, 1, 2))
    finish(window, a_delivery(window), 0)
    assert (window.committable_offset, window.unfinished_count) == (1, 2)


def test_offset_commit_omits_a_start_that_was_read_from_the_broker() -> None:
    window = a_window(0)
    window.reset(100, committed=100)
    assert offset_to_commit(window) is None


def test_orderly_queue_does_not_wait_for_retries_from_before_a_reset() -> None:
    window = a_window(0, orderly=True)
    return_messages(window, a_delivery(window), 0, until=9.0)
    window.reset(0)
    window.add_pull(0, a_pull(0))
    assert offsets_of(window.start_delivery(1, 1.0)) == [0]


def test_window_reset_can_come_with_a_pull() -> None:
    window = a_window(0, 1)
    window.add_pull(2, a_pull(next_offset=50, correction=OffsetCorrection.RESET))
    assert (window.unfinished_count, window.next_offset, offset_to_commit(window)) == (0, 50, 50)


def test_window_finishes_its_messages_before_it_passes_a_range_deleted_by_the_broker() -> None:
    window = a_window(0, 1)
    delivery = a_delivery(window, 1)
    window.add_pull(2, a_pull(next_offset=50, correction=OffsetCorrection.OUT_OF_RANGE))
    assert (window.unfinished_count, window.next_offset, window.committable_offset) == (2, 50, 0)
    return_messages(window, delivery, 0)
    finish(window, a_delivery(window, 1))
    finish(window, a_delivery(window, 1))
    assert (window.unfinished_count, offset_to_commit(window)) == (0, 50)


@pytest.mark.parametrize(("end_offset", "new_offset"), [(90, 50), (50, 50), (7, 7)])
def test_window_passes_no_unfinished_message_where_the_queue_lost_its_end(end_offset: int, new_offset: int) -> None:
    window = a_window(*range(50, 100))
    return_messages(window, a_delivery(window, 1), 50)
    window.add_pull(100, a_pull(next_offset=end_offset, correction=OffsetCorrection.OUT_OF_RANGE))
    assert (window.unfinished_count, window.next_offset, window.committable_offset) == (0, new_offset, new_offset)


def test_window_without_messages_passes_a_range_deleted_by_the_broker_at_once() -> None:
    window = a_window()
    window.add_pull(window.next_offset, a_pull(next_offset=50, correction=OffsetCorrection.OUT_OF_RANGE))
    assert (window.next_offset, offset_to_commit(window)) == (50, 50)


@pytest.mark.parametrize(
    ("correction", "following"), [(OffsetCorrection.OUT_OF_RANGE, 1), (OffsetCorrection.RESET, 50)]
)
def test_window_that_is_stopped_moves_with_a_reset_only(correction: OffsetCorrection, following: int) -> None:
    window = a_window(0, 1)
    a_delivery(window, 1)
    window.stop()
    window.add_pull(2, a_pull(next_offset=50, correction=correction))
    assert window.next_offset == following


def test_window_ignores_an_outside_response_for_another_offset() -> None:
    window = a_window(0, 1)
    window.reset(7)
    window.add_pull(2, a_pull(next_offset=50, correction=OffsetCorrection.OUT_OF_RANGE))
    assert window.next_offset == 7


@pytest.mark.parametrize("orderly", [False, True])
def test_window_reset_voids_the_ends_of_earlier_deliveries(orderly: bool) -> None:  # noqa: FBT001 - a case
    window = a_window(0, 1, orderly=orderly)
    earlier_delivery = a_delivery(window)
    window.reset(0)
    window.add_pull(0, a_pull(0, 1))
    finish(window, earlier_delivery, 0)
    return_messages(window, earlier_delivery, 1)
    assert (window.committable_offset, window.unfinished_count, window.unfinished_bytes) == (0, 2, 20)
    assert offsets_of(window.start_delivery(32, 0.0)) == [0, 1]


def test_window_reset_leaves_earlier_deliveries_open_until_they_end() -> None:
    window = a_window(0, 1, orderly=True)
    earlier_delivery = a_delivery(window, now=3.0)
    window.reset(0)
    window.add_pull(0, a_pull(0, 1))
    assert (window.is_idle, window.in_flight) == (False, 2)
    assert window.start_delivery(1, 4.0) is None
    finish(window, earlier_delivery)
    assert (window.is_idle, window.in_flight) == (True, 0)
    assert offsets_of(window.start_delivery(1, 4.0)) == [0]


def test_window_reset_voids_the_response_to_an_earlier_commit() -> None:
    window = a_window(next_offset=8)
    commit = window.next_commit()
    assert commit is not None
    window.reset(8)  # the same offset again; the broker may have applied either commit last
    window.mark_committed(commit)
    assert (window.committed_offset, offset_to_commit(window)) == (None, 8)


# Limits


@pytest.mark.parametrize(
    ("limits", "is_full"),
    [
        (QueueLimits(max_messages=4), False),
        (QueueLimits(max_messages=3), True),
        (QueueLimits(max_bytes=2 * MEBIBYTE + 3 * MESSAGE_OVERHEAD_BYTES), True),
        (QueueLimits(max_bytes=2 * MEBIBYTE + 3 * MESSAGE_OVERHEAD_BYTES + 1), False),
        (QueueLimits(max_offset_span=19), True),
        (QueueLimits(max_offset_span=20), False),
    ],
)
def test_window_is_full_at_each_of_its_limits(limits: QueueLimits, *, is_full: bool) -> None:
    sizes = {10: MEBIBYTE, 11: MEBIBYTE - 7, 30: 7}
    for orderly in (False, True):
        window = QueueWindow(next_offset=10, orderly=orderly)
        window.add_pull(10, PullResult(tuple(a_message(*item) for item in sizes.items()), 99, 0, 99))
        is_limited = is_full and not (orderly and limits.max_offset_span < 2000)
        assert window.is_full(limits) == is_limited
        a_delivery(window)  # the limits count messages whether they are being delivered or not
        assert window.is_full(limits) == is_limited


def test_window_without_messages_is_never_full() -> None:
    window = a_window(next_offset=5000)
    assert not window.is_full(QueueLimits(max_messages=1, max_bytes=1, max_offset_span=0))


def test_window_limits_default_to_those_of_the_reference() -> None:
    assert (
        QueueLimits()
        == QueueLimits(max_messages=1000, max_bytes=104857600, max_offset_span=2000)
        == QueueLimits.for_queue(Buffer(), 3)
    )


@pytest.mark.parametrize(("queues", "share"), [(1, 1024), (2, 512), (3, 341), (2000, 1)])
def test_window_limits_of_a_topic_are_shared_among_its_queues(queues: int, share: int) -> None:
    assert QueueLimits.for_queue(Buffer(messages_per_queue=7, messages_per_topic=1024), queues) == QueueLimits(
        max_messages=share
    )
    assert QueueLimits.for_queue(Buffer(mebibytes_per_queue=7, mebibytes_per_topic=1024), queues) == QueueLimits(
        max_bytes=share << 20
    )


def test_window_limits_include_the_size_of_a_decompressed_body() -> None:
    assert QueueLimits.for_queue(Buffer(mebibytes_per_message=7), 3).max_body_bytes == 7 * MEBIBYTE


def test_window_limits_of_a_queue_apply_where_its_topic_has_none() -> None:
    buffer = Buffer(messages_per_queue=7, mebibytes_per_queue=8)
    assert QueueLimits.for_queue(buffer, 3) == QueueLimits(max_messages=7, max_bytes=8 * MEBIBYTE)


# Reporting


def test_window_reports_its_messages_memory_deliveries_and_offsets() -> None:
    window = a_window(3, 4, 7, next_offset=9)

    def figures() -> tuple[Any, ...]:
        return (
            window.unfinished_count,
            window.unfinished_bytes,
            window.in_flight,
            window.committable_offset,
            window.last_offset,
        )

    assert figures() == (3, 30, 0, 3, 7)
    first = a_delivery(window, 1, now=1.0)
    second = a_delivery(window, 1, now=2.0)
    assert figures() == (3, 30, 2, 3, 7)
    finish(window, first)
    assert figures() == (2, 20, 1, 4, 7)
    third = a_delivery(window, 1, now=3.0)
    assert figures() == (2, 20, 2, 4, 7)
    finish(window, second)
    finish(window, third)
    assert figures() == (0, 0, 0, 9, None)


# The whole window, against a plain model


@dataclass
class ModelDelivery:
    """A delivery that the model started: its open offsets, and whether their ends count, as they do until a reset."""

    delivery: OpenDelivery
    open_offsets: set[int]
    is_counted: bool = True


class WindowModel:
    """Every fetched message, and its state: waiting, open, done, or the time from which it may be retried."""

    def __init__(self, *, orderly: bool) -> None:
        self.orderly = orderly
        self.stopped = False
        self.next_offset = 0
        self.states: dict[int, str | float] = {}
        self.sizes: dict[int, int] = {}
        self.deliveries: list[ModelDelivery] = []

    def reset(self, start: int) -> None:
        self.states = {}
        self.next_offset = start
        for delivery in self.deliveries:
            delivery.is_counted = False

    def stop(self) -> None:
        self.stopped = True
        waiting = [offset for offset, state in self.states.items() if state == "waiting"]
        self.next_offset = min(waiting, default=self.next_offset)
        self.states = {offset: state for offset, state in self.states.items() if state != "waiting"}

    def add_pull(self, requested: int, pull: PullResult) -> None:
        if pull.correction is OffsetCorrection.RESET:
            self.reset(pull.next_offset)
        if pull.correction is OffsetCorrection.RESET or self.stopped or requested != self.next_offset:
            return
        if pull.correction is OffsetCorrection.OUT_OF_RANGE and pull.next_offset >= self.next_offset:
            self.next_offset = pull.next_offset
        elif pull.correction is OffsetCorrection.OUT_OF_RANGE:
            self.reset(min([pull.next_offset, *self.unfinished]))
        if pull.correction:
            return
        for message in pull.messages:
            self.states[message.offset] = "waiting"
            self.sizes[message.offset] = len(message.body)
        self.next_offset = max([self.next_offset, pull.next_offset, *(message.offset + 1 for message in pull.messages)])

    def startable_offsets(self, max_messages: int, now: float) -> list[int]:
        if self.stopped or (self.orderly and self.deliveries):
            return []
        returned = {offset: state for offset, state in self.states.items() if isinstance(state, float)}
        if self.orderly:
            ready = sorted(returned)
            if max(returned.values(), default=now) > now:
                return []
        else:
            ready = sorted(
                (offset for offset in returned if returned[offset] <= now),
                key=lambda offset: (returned[offset], offset),
            )
        waiting = sorted(offset for offset, state in self.states.items() if state == "waiting")
        return ready[:1] or waiting[:max_messages]

    def end_message(self, index: int, offset: int, state: str | float) -> None:
        delivery = self.deliveries[index]
        if offset in delivery.open_offsets and delivery.is_counted:
            self.states[offset] = state
        delivery.open_offsets.discard(offset)
        self.deliveries = [delivery for delivery in self.deliveries if delivery.open_offsets]

    @property
    def unfinished(self) -> list[int]:
        return sorted(offset for offset, state in self.states.items() if state != "done")

    def full(self, limits: QueueLimits) -> bool:
        unfinished = self.unfinished
        # A finished message counts for the span as long as a lower one is unfinished.
        span = max(self.states, default=0) - min(unfinished, default=0) if unfinished and not self.orderly else 0
        size = sum(self.sizes[offset] + MESSAGE_OVERHEAD_BYTES for offset in unfinished)
        return len(unfinished) >= limits.max_messages or size >= limits.max_bytes or span > limits.max_offset_span


class RandomWalk:
    """Random steps on a window and on its model; each step has two random numbers for arguments."""

    def __init__(self, *, orderly: bool) -> None:
        self.window, self.model = QueueWindow(next_offset=0, orderly=orderly), WindowModel(orderly=orderly)
        self.orderly = orderly
        self.now = 0.0
        self.committed = 0
        self.requests = [0]
        self.delivered_messages: dict[OpenDelivery, tuple[Message, ...]] = {}

    def pull(self, count: int, gap: int) -> None:
        requested = self.window.next_offset
        offsets = [requested + gap // 2 + number * (1 + gap % 2) for number in range(count)]
        self._add_pull(
            requested, {offset: (offset * 7 + gap) % 5 for offset in offsets}, max(offsets, default=requested) + gap
        )

    def pull_late(self, choice: int, count: int) -> None:
        requested = self.requests[-1 - choice % len(self.requests)]
        self._add_pull(requested, dict.fromkeys(range(requested, requested + count), 1), requested + count)

    def pull_corrected(self, corrected_to: int, choice: int) -> None:
        requested = self.requests[-1 - choice // 2 % len(self.requests)]
        self._add_pull(requested, {}, corrected_to * 3, correction=list(OffsetCorrection)[choice % 2])

    def _add_pull(
        self, requested: int, sizes: dict[int, int], next_offset: int, *, correction: OffsetCorrection | None = None
    ) -> None:
        self.requests.append(requested)
        pull = PullResult(tuple(a_message(*item) for item in sizes.items()), next_offset, 0, 1000, correction)
        if correction:
            self.committed = 0
        self.window.add_pull(requested, pull)
        self.model.add_pull(requested, pull)

    def start_delivery(self, max_messages: int, seconds: int) -> None:
        self.now += seconds
        expected = self.model.startable_offsets(max_messages + 1, self.now)
        open_offsets: set[int] = set()
        for model_delivery in self.model.deliveries:
            if model_delivery.is_counted:
                open_offsets |= model_delivery.open_offsets
        open_before = self.window.open_deliveries.copy()
        unfinished = self.model.unfinished
        delivery = self.window.start_delivery(max_messages + 1, self.now)
        assert offsets_of(delivery) == expected
        assert not open_offsets & set(expected)
        if self.orderly:
            assert expected == unfinished[: len(expected)]
            assert not (delivery and open_before)
        if delivery:
            self.delivered_messages[delivery] = delivery.messages
            self.model.deliveries.append(ModelDelivery(delivery, set(expected)))
            self.model.states.update(dict.fromkeys(expected, "open"))

    def finish_message(self, choice: int, message: int) -> None:
        self._end_message(choice, message, None)

    def return_message(self, choice: int, message: int) -> None:
        self._end_message(choice, message, self.now + message % 3)

    def _end_message(self, choice: int, message: int, until: float | None) -> None:
        if self.model.deliveries:
            index = choice % len(self.model.deliveries)
            delivery = self.model.deliveries[index].delivery
            messages = self.delivered_messages[delivery]
            ended_message = messages[message % len(messages)]
            if until is None:
                self.window.finish_message(delivery, ended_message)
            else:
                self.window.return_message(delivery, ended_message, until)
            self.model.end_message(index, ended_message.offset, "done" if until is None else until)

    def stop(self, *_: int) -> None:
        self.window.stop()
        self.model.stop()

    def resume(self, *_: int) -> None:
        self.window.resume()
        self.model.stopped = False

    def reset(self, start: int, _: int) -> None:
        self.committed = 0
        self.window.reset(start)
        self.model.reset(start)

    def commit(self, *_: int) -> None:
        commit = self.window.next_commit()
        assert (commit is None) == (self.window.committed_offset == self.window.committable_offset)
        if commit:
            assert commit.offset == self.window.committable_offset
            self.window.mark_committed(commit)
            assert self.window.committed_offset == commit.offset

    def check(self) -> None:
        window = self.window
        model = self.model
        unfinished = model.unfinished
        assert window.committable_offset == min(unfinished, default=model.next_offset)
        assert window.committable_offset >= self.committed  # it never decreases
        self.committed = window.committable_offset
        assert (window.next_offset, window.unfinished_count) == (model.next_offset, len(unfinished))
        assert window.unfinished_bytes == sum(model.sizes[offset] for offset in unfinished)
        orphaned_bytes = 0
        for model_delivery in model.deliveries:
            if not model_delivery.is_counted:
                orphaned_bytes += sum(message.memory_bytes for message in model_delivery.delivery.messages)
        assert (
            window.memory_bytes == window.unfinished_bytes + MESSAGE_OVERHEAD_BYTES * len(unfinished) + orphaned_bytes
        )
        assert window.in_flight == sum(len(delivery.open_offsets) for delivery in model.deliveries)
        assert window.is_idle == (not model.deliveries)
        for limits in (
            QueueLimits(max_messages=4),
            QueueLimits(max_bytes=3 * MESSAGE_OVERHEAD_BYTES + 9),
            QueueLimits(max_offset_span=5),
        ):
            assert window.is_full(limits) == model.full(limits)


STEPS = [*["pull"] * 2, *["start_delivery"] * 2, *["finish_message"] * 3, "return_message", "commit"]
RARE_STEPS = ["pull_late", "pull_corrected", "stop", "resume", "resume", "reset"]
NUMBERS = st.integers(0, 6)


@pytest.mark.parametrize("orderly", [False, True])
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS + RARE_STEPS), NUMBERS, NUMBERS), max_size=80))
def test_window_behaves_like_its_model(*, orderly: bool, steps: Iterable[tuple[str, int, int]]) -> None:
    walk = RandomWalk(orderly=orderly)
    for step, first, second in steps:
        getattr(walk, step)(first, second)
        walk.check()


@given(ends=st.permutations(range(24)), size=st.integers(1, 9))
def test_offset_commit_covers_all_messages_in_any_order_of_delivery_ends(ends: list[int], size: int) -> None:
    window = a_window(*range(24))
    deliveries = [a_delivery(window, size) for _ in range(0, 24, size)]
    unfinished = set(range(24))
    for offset in ends:
        finish(window, deliveries[offset // size], offset)
        unfinished.remove(offset)
        assert window.committable_offset == min(unfinished, default=24)
    assert (window.is_idle, window.unfinished_count, window.unfinished_bytes) == (True, 0, 0)


# Properties.


def a_window_with_properties() -> QueueWindow:
    window = QueueWindow(next_offset=0, committed_offset=0)
    window.add_pull(0, PullResult(tuple(with_properties(offset, 1008) for offset in range(4)), 4, 0, 4))
    return window


PROPERTIES_MEMORY = 1000 * 176 + 5 * 1008 - 512 + MESSAGE_OVERHEAD_BYTES


def test_memory_of_properties_is_counted_until_each_message_is_finished_or_forgotten() -> None:
    window = a_window_with_properties()
    assert window.memory_bytes == 4 * PROPERTIES_MEMORY
    delivery = a_delivery(window, 2)
    finish(window, delivery, 0)
    assert window.memory_bytes == 3 * PROPERTIES_MEMORY
    window.stop()
    assert window.memory_bytes == PROPERTIES_MEMORY
    window.reset(50)
    assert window.memory_bytes == PROPERTIES_MEMORY  # of the open delivery
    finish(window, delivery)
    assert window.memory_bytes == 0


def test_memory_of_properties_makes_a_window_full() -> None:
    window = a_window_with_properties()
    assert window.is_full(QueueLimits(max_bytes=4 * PROPERTIES_MEMORY))
    assert not window.is_full(QueueLimits(max_bytes=4 * PROPERTIES_MEMORY + 1))


def test_window_fits_messages_by_their_bodies_and_encoded_properties() -> None:
    window = a_window_with_properties()
    encoded_bytes = 12 * 5 * 1008
    assert window.count_fitting(9, 3 * encoded_bytes) == 3
    assert window.count_fitting(9, 3 * encoded_bytes - 1) == 2
    assert window.count_fitting(9, 1) == 1


# Messages that a crash would repeat

# What a crash would repeat


def test_window_start_is_the_offset_where_the_member_started_to_read() -> None:
    window = QueueWindow(next_offset=0, committed_offset=0)
    assert window.start_offset is None
    window.reset(7, 7)
    window.add_pull(7, a_pull(7, 8))
    window.reset(8, 8)  # as after a lost lock
    assert window.start_offset == 7


def test_window_would_repeat_sent_messages_until_they_are_committed() -> None:
    window = a_window(0, 1, 2, 3, next_offset=9)
    assert (window.max_sent_offset, window.would_repeat) == (None, False)
    delivery = a_delivery(window, 2)
    assert (window.max_sent_offset, window.would_repeat) == (None, False), "the app may not have received the messages"
    window.mark_sent(delivery)
    assert (window.max_sent_offset, window.would_repeat) == (1, True)
    return_messages(window, delivery, 0)
    finish(window, delivery)
    window.mark_sent(a_delivery(window))
    assert window.max_sent_offset == 1, "a repeated message has a lower offset"
    last = a_delivery(window)
    window.mark_sent(last)
    finish(window, last)
    assert window.max_sent_offset == 3
    finish(window, next(iter(window.open_deliveries)))
    assert window.would_repeat, "the message is finished, but not committed"
    commit = window.next_commit()
    assert commit is not None
    window.mark_committed(commit)
    assert (window.committed_offset, window.would_repeat) == (9, False)
    window.committed_offset = None  # the broker was unreachable, and may have lost the offset
    assert window.would_repeat


@pytest.mark.parametrize("correction", [OffsetCorrection.RESET, None])
def test_window_would_repeat_nothing_after_the_groups_offset_was_set(correction: OffsetCorrection | None) -> None:
    window = a_window(0, 1, 2)
    delivery = a_delivery(window)
    window.mark_sent(delivery)
    if correction:
        window.add_pull(3, a_pull(next_offset=1, correction=correction))
    else:
        window.rewind(1)
    window.mark_sent(delivery)
    assert (window.next_offset, window.max_sent_offset, window.would_repeat) == (1, None, False)
