"""Tests names of queues as users write them."""

import pytest

from rota.model import Queue, parse_queue


@pytest.mark.parametrize(
    ("text", "queue"),
    [
        ("orders/broker-a/3", Queue("orders", "broker-a", 3)),
        ("%RETRY%orders/b/0", Queue("%RETRY%orders", "b", 0)),
        ("orders/room/broker/12", Queue("orders", "room/broker", 12)),
        ("orders/a/007", Queue("orders", "a", 7)),
    ],
)
def test_queue_name_is_parsed_as_topic_broker_and_id(text: str, queue: Queue) -> None:
    assert parse_queue(text) == queue


@pytest.mark.parametrize(
    "text", ["", "orders", "orders/3", "/a/3", "orders//3", "orders/a/", "orders/a/-1", "orders/a/x", "orders/a/\u0663"]
)
def test_queue_name_that_is_invalid_is_rejected_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=": write it as TOPIC/BROKER/ID, such as orders/broker-a/3") as caught:
        parse_queue(text)
    assert str(caught.value).startswith(f"Invalid queue {text!r}: ")


def test_queue_id_that_is_too_large_is_rejected() -> None:
    with pytest.raises(ValueError, match="Invalid queue"):
        parse_queue(f"orders/a/{10**7}")
