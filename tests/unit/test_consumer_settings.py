"""Tests how settings of unmanaged consumers are compared with those of their group."""

from typing import Any

import pytest

from builders import a_spec
from rota.model import Reason
from rota.spec import Subscription
from rota.spec.consumer_settings import ConsumerSettings, describe_differences, find_mismatches, settings_of

ORDERS = Subscription("orders", "paid || open")
BILLS = Subscription("bills", "price > 3", "SQL92")
GROUP = ConsumerSettings((ORDERS, BILLS), "Clustering", "Latest")


@pytest.mark.parametrize(
    ("consumer_settings", "differences"),
    [
        (GROUP, []),
        (GROUP._replace(subscriptions=(BILLS, Subscription("orders", " open||paid ||open"))), []),
        (GROUP._replace(subscriptions=(*GROUP.subscriptions, Subscription("%RETRY%shop"))), []),
        (GROUP._replace(message_model="", start_position=""), []),  # it does not report them
        (GROUP._replace(subscriptions=(ORDERS,)), ["it does not read bills"]),
        (
            GROUP._replace(subscriptions=(*GROUP.subscriptions, Subscription("z"), Subscription("a"))),
            ["it also reads a, z"],
        ),
        (GROUP._replace(subscriptions=(BILLS, Subscription("orders", "paid"))), ["its filter of orders is paid"]),
        (
            GROUP._replace(subscriptions=(ORDERS, Subscription("bills", "price  >  4", "SQL92"))),
            ["its filter of bills is price > 4"],
        ),
        (GROUP._replace(subscriptions=(ORDERS, Subscription("bills"))), ["its filter of bills is *"]),
        (
            GROUP._replace(message_model="Broadcasting", start_position="Earliest"),
            ["its message model is Broadcasting", "it starts from Earliest"],
        ),
    ],
)
def test_unmanaged_consumer_differs_by_topics_filters_model_and_start(
    consumer_settings: ConsumerSettings, differences: list[str]
) -> None:
    assert describe_differences(GROUP, consumer_settings) == differences


def test_unmanaged_consumer_mismatches_are_one_problem_that_names_the_first_three() -> None:
    spec = a_spec(startFrom={"position": "Earliest"})
    equal_settings = settings_of(spec)
    assert find_mismatches(spec, {}) == find_mismatches(spec, {"10.0.0.9@1": equal_settings}) == []
    assert find_mismatches(None, {"10.0.0.9@1": GROUP}) == [], "an invalid spec has nothing to compare with"
    differing: dict[str, Any] = {
        f"10.0.0.9@{number}": equal_settings._replace(start_position="Latest") for number in range(5)
    }
    (problem,) = find_mismatches(spec, {**differing, "10.0.0.1@same": equal_settings})
    assert problem.reason is Reason.SUBSCRIPTION_MISMATCH
    assert problem.message == (
        "Unmanaged consumers have other settings than the group: 10.0.0.9@0: it starts from Latest; "
        "10.0.0.9@1: it starts from Latest; 10.0.0.9@2: it starts from Latest; and 2 more"
    )


def test_unmanaged_consumer_cannot_make_the_message_long() -> None:
    consumers = {"@" * 10_000: ConsumerSettings((Subscription("orders", "x" * 10_000), Subscription("y" * 10_000)))}
    (problem,) = find_mismatches(a_spec(), consumers)
    assert len(problem.message) < 500
