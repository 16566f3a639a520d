"""The number of messages sent to a group's retry topic."""

from typing import Any

from rota.kube.telemetry.retries import RetryTracker

TOPIC = "%RETRY%orders"


def offsets(group: str = "shop/orders", **ends: int) -> dict[str, Any]:
    """Return a journal record of offsets; `ends` has the end of the retry topic's queue 0 on each broker."""
    columns = {broker: {"ids": [0], "last": [end]} for broker, end in ends.items()}
    return {"group": group, "topics": {TOPIC: columns, "orders": {"a": {"ids": [0], "last": [99]}}}}


def test_retry_counts_new_messages_of_the_groups_retry_topic_since_the_last_record() -> None:
    tracker = RetryTracker()
    assert tracker.count_new_retries(offsets(a=5), TOPIC) == 0
    assert tracker.count_new_retries(offsets(a=7, b=4), TOPIC) == 2
    assert tracker.count_new_retries(offsets(a=7, b=5), TOPIC) == 1
    assert tracker.count_new_retries(offsets("shop/bills", a=9), TOPIC) == 0


def test_retry_counts_messages_that_arrived_while_a_broker_did_not_respond() -> None:
    tracker = RetryTracker()
    tracker.count_new_retries(offsets(a=5, b=5), TOPIC)
    assert tracker.count_new_retries(offsets(a=6), TOPIC) == 1
    assert tracker.count_new_retries({"group": "shop/orders", "topics": {}}, TOPIC) == 0
    assert tracker.count_new_retries(offsets(a=6, b=8), TOPIC) == 3


def test_retry_counts_nothing_after_a_topic_was_recreated() -> None:
    tracker = RetryTracker()
    tracker.count_new_retries(offsets(a=5), TOPIC)
    assert tracker.count_new_retries(offsets(a=1), TOPIC) == 0
    assert tracker.count_new_retries(offsets(a=3), TOPIC) == 2


def test_retry_ends_of_a_forgotten_group_do_not_count() -> None:
    tracker = RetryTracker()
    tracker.count_new_retries(offsets(a=5), TOPIC)
    tracker.forget("shop/orders")
    assert tracker.count_new_retries(offsets(a=9), TOPIC) == 0
