"""How many messages came to a group's retry topic."""

from typing import Any

from rota.kube.telemetry.retries import RetryTracker

TOPIC = "%RETRY%orders"


def offsets(group: str = "shop/orders", **ends: int) -> dict[str, Any]:
    """Return a record of the journal; queue 0 of the retry topic ends there on each broker."""
    columns = {broker: {"ids": [0], "last": [end]} for broker, end in ends.items()}
    return {"group": group, "topics": {TOPIC: columns, "orders": {"a": {"ids": [0], "last": [99]}}}}


def test_retry_counts_what_came_to_the_groups_retry_topic_since_the_last_record() -> None:
    retries = RetryTracker()
    assert retries.count_new_retries(offsets(a=5), TOPIC) == 0
    assert retries.count_new_retries(offsets(a=7, b=4), TOPIC) == 2
    assert retries.count_new_retries(offsets(a=7, b=5), TOPIC) == 1
    assert retries.count_new_retries(offsets("shop/bills", a=9), TOPIC) == 0


def test_retry_counts_what_came_while_a_broker_did_not_answer() -> None:
    retries = RetryTracker()
    retries.count_new_retries(offsets(a=5, b=5), TOPIC)
    assert retries.count_new_retries(offsets(a=6), TOPIC) == 1
    assert retries.count_new_retries({"group": "shop/orders", "topics": {}}, TOPIC) == 0
    assert retries.count_new_retries(offsets(a=6, b=8), TOPIC) == 3


def test_retry_counts_nothing_where_a_topic_was_created_again() -> None:
    retries = RetryTracker()
    retries.count_new_retries(offsets(a=5), TOPIC)
    assert retries.count_new_retries(offsets(a=1), TOPIC) == 0
    assert retries.count_new_retries(offsets(a=3), TOPIC) == 2


def test_retry_ends_of_a_forgotten_group_do_not_count() -> None:
    retries = RetryTracker()
    retries.count_new_retries(offsets(a=5), TOPIC)
    retries.forget_groups(lambda group: group != "shop/orders")
    assert retries.count_new_retries(offsets(a=9), TOPIC) == 0
