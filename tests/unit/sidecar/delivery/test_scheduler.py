"""Which queue delivers next: queues take turns, and each has a share of the slots."""

from collections.abc import Collection

import pytest

from rota.brokers.message import Message
from rota.brokers.port import PullResult
from rota.model import Queue
from rota.sidecar.delivery.scheduler import Batch, DeliveryScheduler
from rota.sidecar.member.window import QueueWindow

A, B, C, D = (Queue("orders", "broker-a", number) for number in range(4))


def a_window(queue: Queue, messages: int = 100, *, orderly: bool = False) -> QueueWindow:
    """Return a window that has fetched that many messages."""
    window = QueueWindow(next_offset=0, orderly=orderly)
    window.add_pull(
        0, PullResult(tuple(Message(queue, offset, b"x", {}) for offset in range(messages)), messages, 0, messages)
    )
    return window


def a_scheduler(
    *queues: Queue, messages: int = 100, orderly: bool = False, allowed: Collection[Queue] | None = None
) -> DeliveryScheduler:
    """Return a scheduler with these queues offered; without `allowed`, each may deliver."""
    deliveries = DeliveryScheduler(lambda queue: allowed is None or queue in allowed)
    for queue in queues:
        deliveries.offer(queue, a_window(queue, messages, orderly=orderly))
    return deliveries


def one_message(_: Queue) -> int:
    return 1


def turns(
    deliveries: DeliveryScheduler, slots: float = float("inf"), max_turns: int = 1000, max_slots: int = 0
) -> list[Queue]:
    """Start deliveries until none is due or no slot is free, and end none; return the queue of each."""
    queues: list[Queue] = []
    while len(queues) < max_turns and (
        batch := deliveries.start_next(0.0, one_message, slots - len(queues), max_slots)
    ):
        queues.append(batch.queue)
    return queues


def finish(batch: Batch) -> None:
    for message in batch.delivery.messages:
        batch.window.finish_message(batch.delivery, message)


def test_delivery_turns_follow_the_order_in_which_queues_were_offered() -> None:
    assert turns(a_scheduler(B, A, C, messages=2)) == [B, A, C, B, A, C]


def test_delivery_turn_is_kept_by_a_queue_that_is_offered_again() -> None:
    deliveries = a_scheduler(A, B)
    deliveries.offer(A, a_window(A))
    assert turns(deliveries, max_turns=3) == [A, B, A]


def test_delivery_skips_an_empty_queue_until_it_is_offered_again() -> None:
    deliveries = a_scheduler(A, B, messages=1)
    window = a_window(C, 0)
    deliveries.offer(C, window)
    assert turns(deliveries) == [A, B]
    window.add_pull(0, PullResult((Message(C, 0, b"x", {}),), 1, 0, 1))
    assert turns(deliveries) == []
    deliveries.offer(C, window)
    assert turns(deliveries) == [C]


def test_delivery_has_at_most_the_batch_size_of_its_queue() -> None:
    deliveries = a_scheduler(A, B, messages=5)
    batches = [deliveries.start_next(0.0, lambda queue: 3 if queue == A else 1) for _ in range(4)]
    assert [len(batch.delivery.messages) for batch in batches if batch] == [3, 1, 2, 1]


def test_orderly_queue_has_its_next_turn_when_it_is_offered_after_its_delivery_ends() -> None:
    deliveries = a_scheduler(A, orderly=True)
    batch = deliveries.start_next(0.0, one_message)
    assert batch
    assert deliveries.start_next(0.0, one_message) is None
    finish(batch)
    assert deliveries.start_next(0.0, one_message) is None
    deliveries.offer(A, batch.window)
    assert turns(deliveries) == [A]


@pytest.mark.parametrize("free_slots", [0, -3])
def test_delivery_does_not_start_without_a_free_slot(free_slots: int) -> None:
    deliveries = a_scheduler(A)
    assert deliveries.start_next(0.0, one_message, free_slots) is None
    assert turns(deliveries, 1) == [A]


# Shares.


@pytest.mark.parametrize(
    ("slots", "share"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (10, 8), (16, 12), (100, 75), (1000, 750)]
)
def test_delivery_share_of_a_single_queue_is_three_quarters_of_the_slots(slots: int, share: int) -> None:
    assert len(turns(a_scheduler(A, messages=2000), slots, max_slots=slots)) == share


@pytest.mark.parametrize(("slots", "hanging_queues"), [(4, 1), (16, 1), (16, 4), (64, 15), (500, 7), (500, 124)])
def test_delivery_slots_remain_for_the_next_queue_after_others_hang_in_turn(slots: int, hanging_queues: int) -> None:
    deliveries = a_scheduler()
    delivered: list[Queue] = []
    for number in range(hanging_queues):
        queue = Queue("hangs", "broker-a", number)
        deliveries.offer(queue, a_window(queue, 500))
        delivered += turns(deliveries, slots - len(delivered), max_slots=slots)
    assert len(delivered) < slots
    deliveries.offer(D, a_window(D))
    assert turns(deliveries, slots - len(delivered), max_slots=slots)[:1] == [D]


def test_delivery_slots_are_shared_equally_by_two_queues_that_hang() -> None:
    delivered = turns(a_scheduler(A, B), 80, max_slots=80)
    assert (delivered.count(A), delivered.count(B)) == (30, 30)


def test_delivery_turn_returns_to_a_queue_at_its_share_when_a_delivery_ends() -> None:
    deliveries = a_scheduler(A)
    batches = [
        batch for batch in (deliveries.start_next(0.0, one_message, 4 - number, 4) for number in range(4)) if batch
    ]
    assert len(batches) == 3
    finish(batches[0])
    assert turns(deliveries, 2, max_slots=4) == [A]


def test_delivery_share_is_unlimited_without_a_slot_limit() -> None:
    assert len(turns(a_scheduler(A, messages=500))) == 500


def test_delivery_uses_the_latest_window_of_a_queue() -> None:
    deliveries = a_scheduler()
    previous = a_window(A, 0)
    latest = a_window(A, 1)
    deliveries.offer(A, previous)
    deliveries.offer(A, latest)
    batch = deliveries.start_next(0.0, one_message)
    assert batch
    assert batch.window is latest


# Queues that may not deliver.


def test_delivery_skips_a_forbidden_queue_until_it_is_offered_again() -> None:
    allowed = {B}
    deliveries = a_scheduler(B, messages=1, allowed=allowed)
    window = a_window(A)
    deliveries.offer(A, window)
    assert turns(deliveries) == [B]
    allowed.add(A)
    assert turns(deliveries) == []
    assert window.is_idle
    deliveries.offer(A, window)
    assert turns(deliveries, max_turns=2) == [A, A]


def test_delivery_permission_is_not_checked_for_a_queue_at_its_share() -> None:
    checked: list[Queue] = []

    def may_deliver(queue: Queue) -> bool:
        checked.append(queue)
        return True

    deliveries = DeliveryScheduler(may_deliver)
    deliveries.offer(A, a_window(A))
    turns(deliveries, 4, max_slots=4)
    checks = len(checked)
    assert deliveries.start_next(0.0, one_message, 1, 4) is None
    assert len(checked) == checks


def test_delivery_skips_a_withdrawn_queue() -> None:
    deliveries = a_scheduler(A, B, messages=1)
    deliveries.withdraw(A)
    deliveries.withdraw(C)
    assert turns(deliveries) == [B]


def test_delivery_is_none_without_queues() -> None:
    assert a_scheduler().start_next(0.0, one_message) is None


def test_delivery_permission_check_may_withdraw_all_queues() -> None:
    def may_deliver(_: Queue) -> bool:
        for queue in (A, B, C):
            deliveries.withdraw(queue)
        return False

    deliveries = DeliveryScheduler(may_deliver)
    for queue in (A, B, C):
        deliveries.offer(queue, a_window(queue))
    assert deliveries.start_next(0.0, one_message) is None
