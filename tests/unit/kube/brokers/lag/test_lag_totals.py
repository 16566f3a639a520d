"""A group's lag, topic by topic: what is added up, what is not known, what is an estimate."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import a_document, a_spec, a_view
from rota.documents import Assignment
from rota.kube.brokers.lag.lag_history import QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.brokers.lag.lag_totals import (
    TopicLag,
    group_lag_by_topic,
    lag_by_topic,
    max_delay,
    round_lag,
    status_lag,
    total_lag,
)
from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.state.stored_assignment import StoredAssignment
from rota.model import Queue, TopicKind
from rota.planner import QueueView

RETRY = "%RETRY%orders"


def a_lag(*lags: int | None, topic: str = "orders", waited: float | None = 1.0) -> dict[Queue, QueueLag]:
    """Return how far a group is behind on the queues of a topic, in the order of their ids."""
    return {
        Queue(topic, "a", number): QueueLag(lag=lag, delay=None if lag is None else lag * (waited or 0.0))
        for number, lag in enumerate(lags)
    }


def seen(lags: dict[Queue, QueueLag], spec: Any = None, /, **views: QueueView | None) -> dict[str, TopicLag]:
    """Add up lags of the topics orders and %RETRY%orders, which have two queues and none unless said."""
    every = {"orders": a_view(2), RETRY: a_view(0, RETRY)} | {
        name.replace("retry", RETRY): it for name, it in views.items()
    }
    return lag_by_topic(spec or a_spec(), BrokerState(every), GroupLag(lags), RETRY, {})


def test_lag_total_of_a_topic_sums_its_queues_and_takes_the_longest_delay() -> None:
    assert seen(a_lag(3, 4)) == {
        "orders": TopicLag("Subscribed", a_view(2).queues, 7, 4.0, estimate=False),
    }


def test_lag_total_of_caught_up_queues_is_0() -> None:
    assert seen(a_lag(0, 0))["orders"][2:4] == (0, 0.0)


@pytest.mark.parametrize("lags", [a_lag(3, None), a_lag(3), {}])
def test_lag_total_of_topic_and_group_is_unknown_if_one_queue_is(lags: dict[Queue, QueueLag]) -> None:
    found = seen(lags | a_lag(5, topic="payments"), payments=a_view(1, "payments"))
    assert found["orders"][2:4] == (None, None)
    assert found["payments"][2:4] == (5, 5.0)
    assert (total_lag(found, "Subscribed"), max_delay(found)) == (None, None)


def test_lag_total_may_be_known_while_the_delay_is_not() -> None:
    lags = a_lag(3, 4) | {Queue("orders", "a", 1): QueueLag(lag=4)}
    assert seen(lags)["orders"][2:4] == (7, None)
    assert max_delay(seen(lags)) is None


def test_lag_total_of_a_group_sums_topics_and_takes_the_longest_delay() -> None:
    found = seen(a_lag(3, 4) | a_lag(9, topic="payments"), payments=a_view(1, "payments"))
    assert (total_lag(found, "Subscribed"), max_delay(found)) == (16, 9.0)


def test_lag_total_counts_retries_separately() -> None:
    found = seen(a_lag(3, 4) | a_lag(50, topic=RETRY), retry=a_view(1, RETRY))
    assert found[RETRY] == TopicLag("Retry", a_view(1, RETRY).queues, 50, 50.0, estimate=False)
    assert (total_lag(found, "Subscribed"), total_lag(found, "Retry"), max_delay(found)) == (7, 50, 4.0)


@pytest.mark.parametrize("view", [None, a_view(0, RETRY)])
def test_lag_total_omits_a_retry_topic_that_does_not_exist_yet(view: QueueView | None) -> None:
    found = seen(a_lag(3, 4), retry=view)
    assert [*found] == ["orders"]
    assert total_lag(found, "Retry") is None


def test_lag_total_is_known_while_that_of_the_retry_topic_is_not() -> None:
    found = seen(a_lag(3, 4), retry=a_view(1, RETRY))
    assert (total_lag(found, "Subscribed"), max_delay(found)) == (7, 4.0)
    assert total_lag(found, "Retry") is None


@pytest.mark.parametrize("view", [None, a_view(0)])
def test_lag_total_of_a_topic_without_reported_queues_is_unknown(view: QueueView | None) -> None:
    found = seen(a_lag(3, 4), orders=view)
    assert found == {"orders": TopicLag("Subscribed", (), None, None, estimate=False)}
    assert (total_lag(found, "Subscribed"), max_delay(found)) == (None, None)


def test_lag_total_of_a_group_without_known_topics_is_unknown() -> None:
    assert lag_by_topic(a_spec(), BrokerState(), GroupLag({}), RETRY, {}) == {}
    assert (total_lag({}, "Subscribed"), total_lag({}, "Retry"), max_delay({})) == (None, None, None)


@pytest.mark.parametrize(
    ("subscription", "estimate"),
    [
        ({}, False),
        ({"expression": "*"}, False),
        ({"expression": " * "}, False),
        ({"expression": "created || paid"}, True),
        ({"expression": "a > 5", "type": "SQL92"}, True),
        ({"expression": "*", "type": "SQL92"}, True),
    ],
)
def test_lag_total_of_a_filtered_topic_is_an_estimate(subscription: dict[str, str], estimate: bool) -> None:  # noqa: FBT001 - a row of the table
    spec = a_spec(subscriptions=[{"topic": "orders", **subscription}, {"topic": "payments"}])
    found = seen(a_lag(3, 4) | a_lag(1, topic=RETRY), spec, retry=a_view(1, RETRY), payments=a_view(1, "payments"))
    assert {topic: it.estimate for topic, it in found.items()} == {"orders": estimate, RETRY: False, "payments": False}


def test_lag_total_of_a_broadcasting_group_is_an_estimate() -> None:
    found = seen(a_lag(3, 4), a_spec(messageModel="Broadcasting"))
    assert (found["orders"].lag, found["orders"].estimate) == (7, True)


def test_lag_total_counts_another_groups_retry_topic_as_subscribed() -> None:
    others = "%RETRY%others"
    found = lag_by_topic(
        a_spec(), BrokerState({others: a_view(1, others)}), GroupLag(a_lag(3, topic=others)), RETRY, {}
    )
    assert (total_lag(found, "Subscribed"), total_lag(found, "Retry")) == (3, None)
    assert lag_by_topic(a_spec(), BrokerState({others: a_view(0, others)}), GroupLag({}), RETRY, {})[others].lag is None


def test_lag_total_is_unknown_after_the_route_lost_a_broker() -> None:
    payments = a_view(1, "payments")
    views, lags = BrokerState({"orders": a_view(2), "payments": payments}), a_lag(3, 4) | a_lag(5, topic="payments")
    found = lag_by_topic(a_spec(), views, GroupLag(lags, incomplete_topics=frozenset({"orders"})), RETRY, {})
    assert (found["orders"].lag, found["orders"].delay, found["payments"].lag) == (None, None, 5)
    assert found["orders"].queues == a_view(2).queues


@pytest.mark.parametrize(
    ("document", "lag"),
    [
        (a_document(members={"m1": a_view(2, brokers=("a", "b")).queues}), None),
        (a_document(members={"m1": a_view(2).queues}, taken={Queue("orders", "b", 0): ("m1", "m2")}), None),
        (a_document(everyone=a_view(2, brokers=("a", "b")).queues), None),
        (a_document(members={"m1": a_view(2).queues}, taken={Queue("orders", "b", 0): ("m1", None)}), 7),
        (a_document(members={"m1": a_view(8).queues}), 7),
        (a_document(members={"m1": [Queue("others", "b", 0)]}), 7),
    ],
    ids=["owned", "on its way", "everyone's", "on its way out", "a queue less", "of another topic"],
)
def test_lag_total_is_unknown_while_a_missing_broker_has_assigned_queues(document: Assignment, lag: int | None) -> None:
    group = Group("shop", "orders")
    group.stored_assignment = StoredAssignment(document=document)
    assert group_lag_by_topic(group, BrokerState({"orders": a_view(2)}), GroupLag(a_lag(3, 4)))["orders"].lag == lag


def test_lag_total_of_a_group_without_valid_spec_is_reported() -> None:
    found = lag_by_topic(None, BrokerState({"orders": a_view(2)}), GroupLag(a_lag(3, 4)), RETRY, {})
    assert found["orders"][2:] == (7, 4.0, False)


@pytest.mark.parametrize(
    ("lag", "rounded"),
    [
        (None, None),
        (0, 0),
        (7, 7),
        (99, 99),
        (100, 100),
        (104, 100),
        (106, 110),
        (12_345, 12_000),
        (12_600, 13_000),
        (999, 1000),
        (123_456_789_012, 120_000_000_000),
        (2**63 - 1, 9_200_000_000_000_000_000),
    ],
)
def test_lag_is_rounded_to_two_digits(lag: int | None, rounded: int | None) -> None:
    assert round_lag(lag) == rounded


@given(st.integers(0, 2**63 - 1))
def test_lag_rounding_is_within_5_percent_and_idempotent(lag: int) -> None:
    rounded = round_lag(lag)
    assert rounded is not None
    assert abs(rounded - lag) <= lag * 0.05
    assert round_lag(rounded) == rounded
    assert set(str(rounded)[2:]) <= {"0"}


known = st.none() | st.integers(0, 1000)


@given(st.lists(st.tuples(st.sampled_from(["Subscribed", "Retry"]), known, known)))
def test_lag_total_is_known_only_if_every_part_is(parts: list[tuple[TopicKind, int | None, float | None]]) -> None:
    topics = {
        str(number): TopicLag(kind, (), lag, waited, estimate=False) for number, (kind, lag, waited) in enumerate(parts)
    }
    for kind in ("Subscribed", "Retry"):
        lags = [lag for each, lag, _ in parts if each == kind]
        assert total_lag(topics, kind) == (sum(lag or 0 for lag in lags) if lags and None not in lags else None)
    delays = [waited for each, _, waited in parts if each == "Subscribed"]
    assert max_delay(topics) == (max(it or 0 for it in delays) if delays and None not in delays else None)


@pytest.mark.parametrize(
    ("lags", "at", "lag"), [({}, None, 70), (a_lag(1200, 34), 5.0, 1200), (a_lag(3, None), 5.0, None)]
)
def test_lag_in_the_status_is_kept_until_brokers_were_polled(
    lags: dict[Queue, QueueLag], at: float | None, lag: int | None
) -> None:
    group = Group("shop", "orders")
    group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop"), {}, {"lag": 70}), None)
    assert status_lag(group, BrokerState({"orders": a_view(2)}), GroupLag(lags, sampled_at=at)) == lag


def test_lag_in_the_status_of_a_new_group_is_unknown_before_the_first_poll() -> None:
    assert status_lag(Group("shop", "orders"), BrokerState(), GroupLag({})) is None
