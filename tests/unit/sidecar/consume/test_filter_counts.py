"""A subscription with an expression that matches no message is reported, with counts."""

from pathlib import Path

import yaml

from rota.sidecar.consume.filter_counts import MIN_FILTERED_MESSAGES, QUIET_SECONDS, FilterCounts
from rota.spec import Subscription

EXAMPLES = Path(__file__).parents[4] / "docs" / "examples"
PAID = [Subscription("orders", "paid")]


def test_filter_that_matches_nothing_for_minutes_is_reported_with_counts() -> None:
    counts = FilterCounts()
    counts.count_pull("orders", filtered=MIN_FILTERED_MESSAGES - 1, matched=0, now=0.0)
    assert counts.find_problem(PAID, QUIET_SECONDS) == ""
    counts.count_pull("orders", filtered=1, matched=0, now=1.0)
    assert counts.find_problem(PAID, QUIET_SECONDS - 1) == ""
    problem = counts.find_problem(PAID, QUIET_SECONDS)
    assert problem.startswith(
        f"None of the last {MIN_FILTERED_MESSAGES} messages of orders matches the expression 'paid'"
    )
    counts.count_pull("orders", filtered=100, matched=0, now=QUIET_SECONDS)
    assert counts.find_problem(PAID, QUIET_SECONDS + 1) == problem, "the report does not change with each message"
    counts.count_pull("orders", filtered=0, matched=1, now=QUIET_SECONDS + 2)
    assert counts.find_problem(PAID, 10 * QUIET_SECONDS) == ""


def test_filter_that_was_corrected_is_reported_no_more() -> None:
    counts = FilterCounts()
    counts.find_problem(PAID, 0.0)
    counts.count_pull("orders", filtered=100, matched=0, now=0.0)
    counts.find_problem(PAID, 0.0)
    counts.count_pull("orders", filtered=100, matched=0, now=0.0)
    assert "'paid'" in counts.find_problem(PAID, QUIET_SECONDS)
    corrected = [Subscription("orders", "created")]
    assert counts.find_problem(corrected, QUIET_SECONDS + 1) == ""
    counts.count_pull("orders", filtered=100, matched=0, now=QUIET_SECONDS + 2)
    assert "'created'" in counts.find_problem(corrected, 3 * QUIET_SECONDS)


def test_filter_that_is_changed_while_another_one_is_reported_starts_with_new_counts() -> None:
    counts = FilterCounts()
    for topic in ("bills", "orders"):
        counts.count_pull(topic, filtered=100, matched=0, now=0.0)
    bills = Subscription("bills", "paid")
    assert "bills" in counts.find_problem([bills, *PAID], QUIET_SECONDS)
    corrected = Subscription("orders", "created")
    assert "bills" in counts.find_problem([bills, corrected], QUIET_SECONDS)
    assert counts.find_problem([Subscription("bills"), corrected], QUIET_SECONDS + 1) == ""


def test_filter_is_not_reported_for_a_subscription_to_all_messages_or_another_topic() -> None:
    counts = FilterCounts()
    counts.count_pull("orders", filtered=1000, matched=0, now=0.0)  # compaction skips messages, too
    assert counts.find_problem([Subscription("orders"), Subscription("bills", "paid")], QUIET_SECONDS) == ""


def test_filter_of_the_example_fleet_matches_the_messages_that_the_example_sends() -> None:
    fleet = yaml.safe_load((EXAMPLES / "fleet.yaml").read_text())
    assert "tag" not in (EXAMPLES / "ground" / "send.py").read_text()
    assert fleet["spec"]["subscriptions"] == [{"topic": "orders"}]
