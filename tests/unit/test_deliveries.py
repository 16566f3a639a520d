"""Tests pages of delivery counts: outcomes, buckets of handling times, and rejected pages."""

import msgspec
import pytest

from rota.deliveries import (
    FIRST_BUCKET_SECONDS,
    LAST_BUCKET,
    DeliveriesPage,
    DeliveryOutcome,
    FailingMessage,
    QueueCounts,
    bucket_end,
    bucket_index,
    decode_deliveries,
    describe_message,
    known_outcome,
    response_of_status,
)

COUNTS = QueueCounts("orders", "broker-a", 3, 5, 2, {"5xx": 3})


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, "done"),
        (204, "done"),
        (302, "3xx"),
        (400, "4xx"),
        (404, "404"),
        (422, "422"),
        (503, "5xx"),
        (999, "other"),
    ],
)
def test_delivery_outcome_is_the_class_of_the_status_or_one_with_a_meaning(status: int, outcome: str) -> None:
    assert response_of_status(status) == (outcome, status)


def test_delivery_outcome_of_a_later_version_counts_as_other() -> None:
    assert known_outcome("teapot") is DeliveryOutcome.OTHER
    assert known_outcome("5xx") is DeliveryOutcome.SERVER_ERROR


def test_delivery_handling_time_is_in_a_bucket_of_at_most_ten_percent() -> None:
    for hundredth in range(1, 2000):
        seconds = FIRST_BUCKET_SECONDS * 1.009**hundredth
        index = bucket_index(seconds)
        assert 0 < index <= LAST_BUCKET
        assert bucket_end(index - 1) * 0.999 < seconds < bucket_end(index) * 1.001
        assert bucket_end(index) / bucket_end(index - 1) <= 1.1 + 1e-9
    assert bucket_index(0.0) == bucket_index(-1.0) == bucket_index(FIRST_BUCKET_SECONDS) == 0
    assert bucket_index(1e9) == LAST_BUCKET


def test_report_page_of_deliveries_survives_encoding_and_unknown_fields() -> None:
    page = DeliveriesPage("process", 12.5, [COUNTS], delayed=4, next=200)
    text = msgspec.json.encode(page)
    assert decode_deliveries(text) == page
    assert decode_deliveries(text[:-1] + b',"later":{"a":1}}') == page


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"404: Not Found",
        b"{}",
        b'{"incarnation":"a"}',
        b'{"incarnation":"a","age":-1}',
        b'{"incarnation":"a","age":1,"delayed":-1}',
        b'{"incarnation":"a","age":1,"queues":[{"topic":"a","broker":"b","id":0,"done":1e99}]}',
        b'{"incarnation":"a","age":1,"queues":[{"broker":"b","id":0,"topic":"' + b"x" * 256 + b'"}]}',
        b'{"incarnation":"a","age":1,"failing":[' + b",".join([b"{}"] * 21) + b"]}",
        b"[" * 100_000,
    ],
    ids=lambda text: text[:50].decode(),
)
def test_report_page_of_deliveries_that_is_invalid_or_too_large_is_none(text: bytes) -> None:
    assert decode_deliveries(text) is None


def test_message_that_fails_or_hangs_is_described_without_its_key() -> None:
    failed = FailingMessage("orders", "%RETRY%shop", "broker-a", 0, 17, 4, 12.0, "5xx", 503)
    assert describe_message(failed) == (
        "%RETRY%shop/broker-a/0, offset 17 (sent to orders): failed 4 times, most recently with status 503"
    )
    late = msgspec.structs.replace(failed, outcome="timeout", status=0)
    assert describe_message(late).endswith(": failed 4 times, most recently with a timeout")
    hanging = FailingMessage("orders", "orders", "broker-a", 3, 18, 1, 44.6)
    assert describe_message(hanging) == "orders/broker-a/3, offset 18: has been at the app for 45 s, in attempt 1"
