"""Tests which queues a group consumes, also while brokers report only some of them."""

from typing import Any

from builders import a_document, a_situation, a_spec, a_view
from rota.model import Queue

Q = [Queue("orders", "a", number) for number in range(6)]


def test_topic_of_retries_is_that_of_the_consumer_group() -> None:
    assert a_situation().subscribed.retry_topic == "%RETRY%orders"
    assert a_situation(spec=a_spec(group="GID_orders")).subscribed.retry_topic == "%RETRY%GID_orders"
    assert a_situation(spec=None).subscribed.retry_topic == "%RETRY%orders"


def test_queue_of_the_retry_topic_is_listed_once_although_the_topic_is_subscribed_to() -> None:
    subscriptions = [{"topic": "orders"}, {"topic": "%RETRY%orders"}]
    views = {"orders": a_view(2), "%RETRY%orders": a_view(1, "%RETRY%orders")}
    retry_queue = Queue("%RETRY%orders", "a", 0)
    for spec in (a_spec(), a_spec(subscriptions=subscriptions)):
        assert a_situation(spec=spec, views=views).queues == [*Q[:2], retry_queue]


def test_queue_of_the_retry_topic_is_listed_only_if_there_is_a_spec_and_a_view_of_the_topic() -> None:
    retry_queue = Queue("%RETRY%orders", "a", 0)
    document = a_document(members={"m1": [Q[0], retry_queue]})
    view = a_view(1, "%RETRY%orders")
    assert a_situation(document=document).subscribed.unsubscribed == [retry_queue]
    assert a_situation(document=document, views={"%RETRY%orders": None}).queues == [Q[0], retry_queue]
    assert a_situation(document=document, spec=None, views={"%RETRY%orders": view}).queues == []


def test_queue_list_has_recorded_queues_in_order_until_the_route_is_complete() -> None:
    document = a_document(members={"m1": Q[4:]}, taken={Q[3]: ("m1", "m2"), Q[2]: ("m1", None)})

    def listed(**views: Any) -> list[Queue]:
        return a_situation(document=document, views=views).queues

    assert listed(orders=a_view(2, stable_for=39.9)) == [Q[0], Q[1], Q[3], Q[4], Q[5]], "queue 2 is released for good"
    assert listed(orders=a_view(2, stable_for=40.0)) == Q[:2]
    assert listed() == listed(orders=a_view(0)) == Q[2:], "the brokers returned no route"


def test_queue_that_is_no_longer_routed_is_unsubscribed_also_while_others_are_released_or_new() -> None:
    views = {"orders": a_view(4)}
    releasing = a_document(members={"m1": [*Q[:3], *Q[4:]]}, taken={Q[3]: ("m1", "m2")})
    assert a_situation(document=releasing, views=views).subscribed.unsubscribed == Q[4:]
    with_new_queue = a_document(members={"m1": [*Q[:3], *Q[4:]]})
    assert a_situation(document=with_new_queue, views=views).subscribed.unsubscribed == Q[4:]
