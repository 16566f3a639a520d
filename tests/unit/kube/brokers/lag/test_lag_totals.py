"""A group's lag by topic: sums, unknown values and estimates."""

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
    count_lag_states,
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
from rota.lag import LagState
from rota.model import Queue, TopicKind
from rota.planner import QueueView

RETRY = "%RETRY%orders"


def a_lag(*lags: int | None, topic: str = "orders", seconds_per_message: float | None = 1.0) -> dict[Queue, QueueLag]:
    """Return the lags of a topic's queues, in the order of their ids."""
    return {
        Queue(topic, "a", number): QueueLag(lag=lag, delay=None if lag is None else lag * (seconds_per_message or 0.0))
        for number, lag in enumerate(lags)
    }


def lag_topics(lags: dict[Queue, QueueLag], spec: Any = None, /, **views: QueueView | None) -> dict[str, TopicLag]:
    """Return the lag of each topic; by default orders has two queues and %RETRY%orders none."""
    all_views = {"orders": a_view(2), RETRY: a_view(0, RETRY)} | {
        name.replace("retry", RETRY): view for name, view in views.items()
    }
    return lag_by_topic(spec or a_spec(), BrokerState(all_views), GroupLag(lags), RETRY, {})


def test_lag_total_of_a_topic_sums_its_queues_and_takes_the_longest_delay() -> None:
    assert lag_topics(a_lag(3, 4)) == {
        "orders": TopicLag("Subscribed", a_view(2).queues, 7, 4.0, estimate=False),
    }


def test_lag_total_of_caught_up_queues_is_0() -> None:
    assert lag_topics(a_lag(0, 0))["orders"][2:4] == (0, 0.0)


@pytest.mark.parametrize("lags", [a_lag(3, None), a_lag(3), {}])
def test_lag_total_of_topic_and_group_is_unknown_if_one_queue_is(lags: dict[Queue, QueueLag]) -> None:
    lags_by_topic = lag_topics(lags | a_lag(5, topic="payments"), payments=a_view(1, "payments"))
    assert lags_by_topic["orders"][2:4] == (None, None)
    assert lags_by_topic["payments"][2:4] == (5, 5.0)
    assert (total_lag(lags_by_topic, "Subscribed"), max_delay(lags_by_topic)) == (None, None)


def test_lag_total_may_be_known_while_the_delay_is_not() -> None:
    lags = a_lag(3, 4) | {Queue("orders", "a", 1): QueueLag(lag=4)}
    assert lag_topics(lags)["orders"][2:4] == (7, None)
    assert max_delay(lag_topics(lags)) is None


def test_lag_total_of_a_group_sums_topics_and_takes_the_longest_delay() -> None:
    lags_by_topic = lag_topics(a_lag(3, 4) | a_lag(9, topic="payments"), payments=a_view(1, "payments"))
    assert (total_lag(lags_by_topic, "Subscribed"), max_delay(lags_by_topic)) == (16, 9.0)


def test_lag_total_counts_retries_separately() -> None:
    lags_by_topic = lag_topics(a_lag(3, 4) | a_lag(50, topic=RETRY), retry=a_view(1, RETRY))
    assert lags_by_topic[RETRY] == TopicLag("Retry", a_view(1, RETRY).queues, 50, 50.0, estimate=False)
    assert (total_lag(lags_by_topic, "Subscribed"), total_lag(lags_by_topic, "Retry"), max_delay(lags_by_topic)) == (
        7,
        50,
        4.0,
    )


@pytest.mark.parametrize("view", [None, a_view(0, RETRY)])
def test_lag_total_omits_a_retry_topic_that_does_not_exist_yet(view: QueueView | None) -> None:
    lags_by_topic = lag_topics(a_lag(3, 4), retry=view)
    assert [*lags_by_topic] == ["orders"]
    assert total_lag(lags_by_topic, "Retry") is None


def test_lag_total_is_known_while_that_of_the_retry_topic_is_not() -> None:
    lags_by_topic = lag_topics(a_lag(3, 4), retry=a_view(1, RETRY))
    assert (total_lag(lags_by_topic, "Subscribed"), max_delay(lags_by_topic)) == (7, 4.0)
    assert total_lag(lags_by_topic, "Retry") is None


@pytest.mark.parametrize("view", [None, a_view(0)])
def test_lag_total_of_a_topic_without_reported_queues_is_unknown(view: QueueView | None) -> None:
    lags_by_topic = lag_topics(a_lag(3, 4), orders=view)
    assert lags_by_topic == {"orders": TopicLag("Subscribed", (), None, None, estimate=False)}
    assert (total_lag(lags_by_topic, "Subscribed"), max_delay(lags_by_topic)) == (None, None)


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
    lags_by_topic = lag_topics(
        a_lag(3, 4) | a_lag(1, topic=RETRY), spec, retry=a_view(1, RETRY), payments=a_view(1, "payments")
    )
    assert {topic: lag.estimate for topic, lag in lags_by_topic.items()} == {
        "orders": estimate,
        RETRY: False,
        "payments": False,
    }


def test_lag_total_of_a_broadcasting_group_is_an_estimate() -> None:
    lags_by_topic = lag_topics(a_lag(3, 4), a_spec(messageModel="Broadcasting"))
    assert (lags_by_topic["orders"].lag, lags_by_topic["orders"].estimate) == (7, True)


def test_lag_total_counts_another_groups_retry_topic_as_subscribed() -> None:
    retry_topic = "%RETRY%others"
    lags_by_topic = lag_by_topic(
        a_spec(), BrokerState({retry_topic: a_view(1, retry_topic)}), GroupLag(a_lag(3, topic=retry_topic)), RETRY, {}
    )
    assert (total_lag(lags_by_topic, "Subscribed"), total_lag(lags_by_topic, "Retry")) == (3, None)
    assert (
        lag_by_topic(a_spec(), BrokerState({retry_topic: a_view(0, retry_topic)}), GroupLag({}), RETRY, {})[
            retry_topic
        ].lag
        is None
    )


def test_lag_total_is_unknown_after_the_route_lost_a_broker() -> None:
    payments = a_view(1, "payments")
    broker_state = BrokerState({"orders": a_view(2), "payments": payments})
    lags = a_lag(3, 4) | a_lag(5, topic="payments")
    lags_by_topic = lag_by_topic(
        a_spec(), broker_state, GroupLag(lags, incomplete_topics=frozenset({"orders"})), RETRY, {}
    )
    assert (lags_by_topic["orders"].lag, lags_by_topic["orders"].delay, lags_by_topic["payments"].lag) == (
        None,
        None,
        5,
    )
    assert lags_by_topic["orders"].queues == a_view(2).queues


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
    ids=["owned", "in handover", "everyone's", "released", "a queue less", "of another topic"],
)
def test_lag_total_is_unknown_while_a_missing_broker_has_assigned_queues(document: Assignment, lag: int | None) -> None:
    group = Group("shop", "orders")
    group.assignment.stored = StoredAssignment(document=document)
    assert group_lag_by_topic(group, BrokerState({"orders": a_view(2)}), GroupLag(a_lag(3, 4)))["orders"].lag == lag


def test_lag_total_of_a_group_without_valid_spec_is_reported() -> None:
    lags_by_topic = lag_by_topic(None, BrokerState({"orders": a_view(2)}), GroupLag(a_lag(3, 4)), RETRY, {})
    assert lags_by_topic["orders"][2:] == (7, 4.0, False)


def test_lag_states_are_counted_over_all_topics_where_they_are_known() -> None:
    states = (LagState.SLOW, None, LagState.SLOW, LagState.STALLED)
    queues = (*a_view(3).queues, *a_view(1, "payments").queues)
    lags = {queue: QueueLag(lag_state=state) for queue, state in zip(queues, states, strict=True)}
    lags_by_topic = lag_topics(lags, orders=a_view(3), payments=a_view(2, "payments"))
    assert count_lag_states(lags_by_topic, GroupLag(lags)) == {"Slow": 2, "Stalled": 1}


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


counts = st.none() | st.integers(0, 1000)


@given(st.lists(st.tuples(st.sampled_from(["Subscribed", "Retry"]), counts, counts)))
def test_lag_total_is_known_only_if_every_part_is(parts: list[tuple[TopicKind, int | None, float | None]]) -> None:
    topics = {
        str(number): TopicLag(kind, (), lag, delay, estimate=False) for number, (kind, lag, delay) in enumerate(parts)
    }
    for kind in ("Subscribed", "Retry"):
        lags = [lag for part_kind, lag, _ in parts if part_kind == kind]
        assert total_lag(topics, kind) == (sum(lag or 0 for lag in lags) if lags and None not in lags else None)
    delays = [delay for part_kind, _, delay in parts if part_kind == "Subscribed"]
    assert max_delay(topics) == (max(delay or 0 for delay in delays) if delays and None not in delays else None)


@pytest.mark.parametrize(
    ("lags", "sampled_at", "lag"), [({}, None, 70), (a_lag(1200, 34), 5.0, 1200), (a_lag(3, None), 5.0, None)]
)
def test_lag_in_the_status_is_kept_until_brokers_were_polled(
    lags: dict[Queue, QueueLag], sampled_at: float | None, lag: int | None
) -> None:
    group = Group("shop", "orders")
    group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop"), {}, {"lag": 70}), None)
    assert status_lag(group, BrokerState({"orders": a_view(2)}), GroupLag(lags, sampled_at=sampled_at)) == lag


def test_lag_in_the_status_of_a_new_group_is_unknown_before_the_first_poll() -> None:
    assert status_lag(Group("shop", "orders"), BrokerState(), GroupLag({})) is None
