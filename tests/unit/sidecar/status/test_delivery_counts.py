"""A sidecar's delivery counts, and the messages that it names."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import pytest

from rota.brokers.message import Message
from rota.brokers.port import PullResult
from rota.deliveries import AppResponse, DeliveriesPage, DeliveryOutcome, QueueCounts, bucket_index, response_of_status
from rota.kube.members.report_client import MAX_PAGE_BYTES
from rota.model import Queue
from rota.sidecar.member.window import QueueWindow
from rota.sidecar.status import delivery_counts
from rota.sidecar.status.delivery_counts import (
    DELIVERY_PAGE_QUEUES,
    DUE_STEP_SECONDS,
    FAILED_ATTEMPTS,
    FAILED_SECONDS,
    HANGING_SECONDS,
    MAX_FAILED_MESSAGES,
    MESSAGES_IN_PAGE,
    RETRY_DELAYS_SECONDS,
    TOPICS_IN_PAGE,
    DeliveryCounts,
)

Q, RETRIES = Queue("orders", "broker-a", 3), Queue("%RETRY%shop", "broker-a", 0)
DONE, FAILED = response_of_status(204), response_of_status(500)


@dataclass
class Reader:
    window: QueueWindow


def a_message(offset: int = 0, queue: Queue = Q, attempt: int = 0, name: str = "") -> Message:
    return Message(queue, offset, b"", {"UNIQ_KEY": name or f"id-{offset}", "RETRY_TOPIC": "orders"}, attempt)


def attempts(*numbers: int) -> list[tuple[Message, int]]:
    return [(a_message(offset, attempt=number - 1), number) for offset, number in enumerate(numbers)]


def page(counts: DeliveryCounts, now: float = 0.0, start: int = 0) -> DeliveriesPage:
    return counts.page(start, "process", {}, now)


def test_delivery_counts_are_kept_by_queue_and_outcome() -> None:
    counts = DeliveryCounts(0.0)
    counts.count(Q, attempts(1, 1, 2), DONE, 1.0)
    counts.count(Q, attempts(1, 4), FAILED, 2.0)
    counts.count(RETRIES, attempts(2), AppResponse(DeliveryOutcome.TIMEOUT), 3.0)
    deliveries = page(counts, 10.0)
    assert deliveries.queues == [QueueCounts(*Q, 3, 3, {"5xx": 2}), QueueCounts(*RETRIES, 0, 0, {"timeout": 1})]
    assert (deliveries.incarnation, deliveries.age, deliveries.next) == ("process", 10.0, None)
    assert deliveries.last_failure
    assert (deliveries.last_failure.outcome, deliveries.last_failure.status, deliveries.last_failure.age) == (
        "timeout",
        0,
        7.0,
    )


@pytest.mark.parametrize("outcome", [DeliveryOutcome.REFUSED, DeliveryOutcome.NOT_FOUND])
def test_delivery_without_an_app_is_no_attempt(outcome: DeliveryOutcome) -> None:
    counts = DeliveryCounts(0.0)
    counts.count(Q, attempts(1, 9), AppResponse(outcome), 1.0)
    assert page(counts).queues == [QueueCounts(*Q, 0, 0, {outcome.value: 2})]
    assert (page(counts).last_failure, page(counts).failing) == (None, [])


def test_delivery_handling_times_are_kept_by_topic() -> None:
    counts = DeliveryCounts(0.0)
    for seconds in (0.2, 0.2, 3.0):
        counts.count_time("orders", seconds)
    counts.count_time("bills", 0.2)
    assert {entry.topic: entry.buckets for entry in page(counts).times} == {
        "orders": {bucket_index(0.2): 2, bucket_index(3.0): 1},
        "bills": {bucket_index(0.2): 1},
    }


def failing_messages(counts: DeliveryCounts, now: float = 0.0) -> list[tuple[str, str, int, int, str]]:
    return [
        (message.topic, message.queue_topic, message.offset, message.attempts, message.outcome)
        for message in page(counts, now).failing
    ]


def test_message_that_fails_several_times_is_named_until_it_is_done() -> None:
    counts = DeliveryCounts(0.0)
    for number in range(1, FAILED_ATTEMPTS):
        counts.count(Q, [(a_message(), number)], FAILED, 1.0)
    assert failing_messages(counts) == []
    repeated = a_message(77, RETRIES, FAILED_ATTEMPTS - 1, "id-0")
    counts.count(RETRIES, [(repeated, FAILED_ATTEMPTS)], FAILED, 2.0)
    assert failing_messages(counts) == [("orders", "%RETRY%shop", 77, FAILED_ATTEMPTS, "5xx")]
    counts.count(RETRIES, [(a_message(99, RETRIES, name="id-0"), 4)], FAILED, 3.0)
    assert failing_messages(counts) == [("orders", "%RETRY%shop", 99, 4, "5xx")], "once, with its latest offset"
    counts.count(RETRIES, [(a_message(120, RETRIES, name="id-0"), 5)], DONE, 4.0)
    assert failing_messages(counts) == []


def test_message_that_failed_is_named_for_a_quarter_of_an_hour() -> None:
    counts = DeliveryCounts(0.0)
    counts.count(Q, attempts(5), FAILED, 1.0)
    assert failing_messages(counts, FAILED_SECONDS)
    assert failing_messages(counts, FAILED_SECONDS + 2) == []


def test_message_that_the_app_rejects_is_not_named_as_it_is_not_tried_again() -> None:
    counts = DeliveryCounts(0.0)
    counts.count(Q, attempts(5), FAILED, 1.0)
    counts.count(Q, attempts(6), response_of_status(422), 2.0)
    assert failing_messages(counts) == []
    assert page(counts).queues[0].failures == {"5xx": 1, "422": 1}


def test_message_names_are_those_with_the_most_attempts_of_a_bounded_number() -> None:
    counts = DeliveryCounts(0.0)
    for offset in range(3 * MAX_FAILED_MESSAGES):
        counts.count(Q, [(a_message(offset), 3 + offset % 5)], FAILED, 1.0)
    names = failing_messages(counts)
    assert [name[3] for name in names] == [7] * MESSAGES_IN_PAGE, "the attempts"
    assert min(name[2] for name in names) >= 2 * MAX_FAILED_MESSAGES, "the latest failures are remembered"


def a_window(number: int, queue: Queue = Q) -> QueueWindow:
    window = QueueWindow(next_offset=0, committed_offset=0)
    window.add_pull(0, PullResult(tuple(a_message(offset, queue) for offset in range(number)), number, 0, number))
    return window


def test_message_that_hangs_at_the_app_is_named_with_its_attempt() -> None:
    counts = DeliveryCounts(0.0)
    window = a_window(3)
    delivery = window.start_delivery(1, 0.0)
    assert delivery
    window.count_attempt(delivery, delivery.messages[0])
    window.start_delivery(1, 5.0)
    readers = {Q: Reader(window)}
    assert counts.page(0, "process", readers, HANGING_SECONDS - 1).failing == []
    (message,) = counts.page(0, "process", readers, HANGING_SECONDS + 1).failing
    assert (message.topic, message.offset, message.attempts, message.age, message.outcome) == ("orders", 0, 2, 31.0, "")


def test_message_topic_that_its_producer_chose_is_cut_in_its_name() -> None:
    counts = DeliveryCounts(0.0)
    message = Message(RETRIES, 0, b"", {"UNIQ_KEY": "k" * 30_000, "RETRY_TOPIC": "t" * 30_000}, 5)
    counts.count(RETRIES, [(message, 6)], FAILED, 1.0)
    (failing,) = page(counts).failing
    assert len(failing.topic) <= 201


def test_retry_estimate_counts_messages_until_their_next_attempt_is_due() -> None:
    counts = DeliveryCounts(0.0)
    for attempts_before in (-99, 0, 1, 99):  # a broker may send any number
        counts.count_returned(attempts_before, 0.0)
    assert page(counts).delayed == 4
    assert page(counts, RETRY_DELAYS_SECONDS[0] + DUE_STEP_SECONDS).delayed == 2
    assert page(counts, RETRY_DELAYS_SECONDS[1] + DUE_STEP_SECONDS).delayed == 1
    assert page(counts, RETRY_DELAYS_SECONDS[-1] + DUE_STEP_SECONDS).delayed == 0


def test_retry_estimate_takes_bounded_memory_without_requests_for_it() -> None:
    counts = DeliveryCounts(0.0)
    for second in range(0, 1_000_000, 5):
        counts.count_returned(0, float(second))
    assert len(counts._due) < 10


def test_delivery_samples_measure_messages_at_the_app_and_backlog() -> None:
    counts = DeliveryCounts(0.0)
    window = a_window(3)
    idle = QueueWindow(next_offset=0, committed_offset=0)
    readers = {Q: Reader(window), RETRIES: Reader(idle)}
    window.start_delivery(2, 0.0)
    counts.sample(readers, 2.0)
    window.start_delivery(1, 2.0)
    counts.sample(readers, 3.0)
    counts.sample(readers, 3.0 + delivery_counts.MAX_SAMPLE_SECONDS + 1)  # the process stalled
    (entry,) = page(counts).queues
    assert (entry.active_seconds, entry.in_flight_seconds, entry.backlog_seconds) == (3.0, 7.0, 2.0)


def all_pages(counts: DeliveryCounts) -> Iterable[DeliveriesPage]:
    start: int | None = 0
    while start is not None:
        deliveries = page(counts, start=start)
        yield deliveries
        start = deliveries.next


def test_report_pages_of_deliveries_have_each_queue_and_topic_once_in_less_than_their_limit() -> None:
    counts = DeliveryCounts(0.0)
    topic = "%RETRY%" + "t" * 120
    queues = [Queue(topic, "b" * 255, number) for number in range(3 * DELIVERY_PAGE_QUEUES + 1)]
    for queue in queues:
        for outcome in DeliveryOutcome:
            counts.count(queue, attempts(1), AppResponse(outcome), 1e9)
    for number in range(5 * TOPICS_IN_PAGE):
        for step in range(2000):
            counts.count_time(f"{number:0127d}", 0.001 * 1.01**step)
    pages = [*all_pages(counts)]
    assert [entry.id for deliveries in pages for entry in deliveries.queues] == [*range(len(queues))]
    assert len({entry.topic for deliveries in pages for entry in deliveries.times}) == 5 * TOPICS_IN_PAGE
    assert [len(deliveries.queues) for deliveries in pages] == [DELIVERY_PAGE_QUEUES] * 3 + [1, 0]
    assert max(len(msgspec.json.encode(deliveries)) for deliveries in pages) < MAX_PAGE_BYTES
    assert page(counts, start=10**18 - 1).queues == []
