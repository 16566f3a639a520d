"""Tests the sums of members' delivery counts, and the condition for failing deliveries."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rota.deliveries import DeliveriesPage, FailingMessage, LastFailure, QueueCounts
from rota.delivery_totals import (
    MESSAGE_INTERVAL_SECONDS,
    MIN_ATTEMPTS,
    NEW_LEADER_GRACE_SECONDS,
    WINDOW_SECONDS,
    GroupDeliveries,
    MemberDeliveries,
)
from rota.model import Finding, Queue, Reason

FIRST = Queue("orders", "a", 0)
SECOND = Queue("orders", "a", 1)
TOPICS = frozenset({"orders"})


def member_deliveries(
    counts: dict[Queue, QueueCounts], age: float = 10.0, incarnation: str = "one", **page_fields: Any
) -> Any:
    return MemberDeliveries.from_page(DeliveriesPage(incarnation, age, [*counts.values()], **page_fields))


def counts(queue: Queue = FIRST, done: int = 0, first: int = 0, seconds: float = 0.0, **failures: int) -> QueueCounts:
    failures_by_outcome = {name.removeprefix("s"): number for name, number in failures.items()}
    return QueueCounts(*queue, first, done, failures_by_outcome, seconds, seconds / 2, seconds / 4)


def record(
    deliveries: GroupDeliveries, *all_counts: QueueCounts, now: float = 0.0, uid: str = "m1", **page_fields: Any
) -> None:
    counts_by_queue = {
        Queue(queue_counts.topic, queue_counts.broker, queue_counts.id): queue_counts for queue_counts in all_counts
    }
    deliveries.record(
        uid, page_fields.pop("revision", "r1"), member_deliveries(counts_by_queue, **page_fields), TOPICS, now
    )


def test_delivery_totals_are_differences_whatever_the_interval_of_reads() -> None:
    deliveries = GroupDeliveries()
    record(deliveries, counts(done=3, first=4, seconds=8.0, s5xx=1))
    record(deliveries, counts(done=3, first=4, seconds=8.0, s5xx=1), now=15.0)
    record(deliveries, counts(done=10, first=14, seconds=20.0, s5xx=4, timeout=1), now=90.0)
    totals = deliveries.totals_by_topic["orders"]
    assert (totals.first_attempts, totals.done, totals.failures) == (14, 10, {"5xx": 4, "timeout": 1})
    assert (totals.active_seconds, totals.in_flight_seconds, totals.backlog_seconds) == (20.0, 10.0, 5.0)
    assert deliveries.recent_attempts(90.0) == (15, 5)


def test_delivery_totals_are_kept_by_queue_and_revision_of_the_pod() -> None:
    deliveries = GroupDeliveries()
    record(deliveries, counts(done=3), counts(SECOND, done=4))
    record(deliveries, counts(s5xx=2), uid="m2", revision="r2")
    assert {key: (totals.done, totals.failed_attempts) for key, totals in deliveries.totals_by_queue.items()} == {
        (FIRST, "r1"): (3, 0),
        (SECOND, "r1"): (4, 0),
        (FIRST, "r2"): (0, 2),
    }
    deliveries.retain_only({"m2"}, TOPICS)
    assert deliveries.totals_by_queue.keys() == {(FIRST, "r2")}
    assert deliveries.totals_by_topic["orders"].done == 7, "metrics never go back"
    deliveries.retain_only({"m2"}, {"bills"})
    assert deliveries.totals_by_topic == {}


def test_delivery_totals_of_a_restarted_process_begin_at_zero() -> None:
    deliveries = GroupDeliveries()
    record(deliveries, counts(done=100))
    record(deliveries, counts(done=7), incarnation="two", age=5.0)
    assert deliveries.totals_by_topic["orders"].done == 107


def test_delivery_totals_exclude_counts_of_an_old_process_before_the_first_read() -> None:
    deliveries = GroupDeliveries()
    record(deliveries, counts(done=100, s5xx=900), age=WINDOW_SECONDS + 1)
    assert (deliveries.totals_by_topic, deliveries.recent_attempts(0.0)) == ({}, (0, 0))
    record(deliveries, counts(done=101, s5xx=902), age=WINDOW_SECONDS + 16, now=15.0)
    assert deliveries.recent_attempts(15.0) == (3, 2)


def test_delivery_totals_ignore_other_topics_and_counters_that_went_back() -> None:
    deliveries = GroupDeliveries()
    record(deliveries, counts(done=5), counts(Queue("bills", "a", 0), done=9))
    record(deliveries, counts(done=2), now=1.0)
    record(deliveries, counts(done=4), now=2.0)
    assert {topic: totals.done for topic, totals in deliveries.totals_by_topic.items()} == {"orders": 7}


def test_delivery_totals_of_queues_that_no_report_names_any_more_are_dropped() -> None:
    deliveries = GroupDeliveries()
    for number in range(100):
        record(deliveries, counts(Queue("orders", "a", number), done=1), now=float(number))
        deliveries.retain_only({"m1"}, TOPICS)
    assert deliveries.totals_by_queue.keys() == {(Queue("orders", "a", 99), "r1")}


def test_delivery_attempts_without_an_app_do_not_count_as_failed() -> None:
    deliveries = GroupDeliveries()
    record(deliveries, counts(done=1, refused=500, s404=500))
    assert deliveries.recent_attempts(0.0) == (1, 0)
    assert not deliveries.update_problem(0.0)
    assert deliveries.totals_by_topic["orders"].failures == {"refused": 500, "404": 500}, "metrics have them"


@dataclass
class App:
    """The counters of one member; each call adds to them and evaluates the condition."""

    deliveries: GroupDeliveries = field(default_factory=GroupDeliveries)
    done: int = 0
    failed: int = 0

    def problem_after(self, now: float, done: int = 0, failed: int = 0, **page_fields: Any) -> Finding | None:
        self.done += done
        self.failed += failed
        page_fields = {"last_failure": LastFailure("5xx", 1.0, 500) if self.failed else None} | page_fields
        record(self.deliveries, counts(done=self.done, s5xx=self.failed), now=now, **page_fields)
        self.deliveries.update_problem(now)
        return self.deliveries.problem


def test_condition_of_failing_deliveries_has_share_count_and_last_response() -> None:
    assert App().problem_after(0.0, done=29, failed=383) == Finding(
        Reason.DELIVERIES_FAILING, "92 % of 412 deliveries in the last 5 min failed, the last with status 500"
    )


@pytest.mark.parametrize(
    ("done", "failed", "is_failing"),
    [(0, MIN_ATTEMPTS, True), (0, MIN_ATTEMPTS - 1, False), (50, 50, True), (51, 49, False), (0, 0, False)],
)
def test_condition_of_failing_deliveries_needs_half_of_at_least_ten(
    done: int,
    failed: int,
    is_failing: bool,  # noqa: FBT001 - a case
) -> None:
    assert (App().problem_after(0.0, done, failed) is not None) == is_failing


def test_condition_of_failing_deliveries_ends_when_less_than_a_quarter_fails() -> None:
    app = App()
    assert app.problem_after(0.0, failed=100)
    assert app.problem_after(100.0, done=200), "a third"
    assert app.problem_after(200.0, done=150) is None
    assert app.problem_after(210.0, failed=50) is None, "less than a half"


def test_condition_of_failing_deliveries_covers_the_last_five_minutes() -> None:
    app = App()
    assert app.problem_after(0.0, failed=100)
    assert app.problem_after(WINDOW_SECONDS + 1, done=20) is None


def test_condition_of_failing_deliveries_changes_its_message_once_a_minute() -> None:
    app = App()
    first_problem = app.problem_after(0.0, failed=100)
    assert app.problem_after(MESSAGE_INTERVAL_SECONDS - 1, failed=100) == first_problem
    assert not app.deliveries.update_problem(MESSAGE_INTERVAL_SECONDS - 1)
    second_problem = app.problem_after(MESSAGE_INTERVAL_SECONDS, failed=100)
    assert second_problem
    assert second_problem.message.startswith("100 % of 300 deliveries")


def test_condition_of_failing_deliveries_lasts_while_messages_wait_for_their_next_attempt() -> None:
    app = App()
    problem = app.problem_after(0.0, failed=100, delayed=100)
    after_pause = WINDOW_SECONDS + NEW_LEADER_GRACE_SECONDS
    assert app.problem_after(after_pause, delayed=100) == problem, "no message was tried meanwhile"
    assert app.problem_after(after_pause + 1, failed=1, delayed=99) == problem
    assert app.problem_after(after_pause + WINDOW_SECONDS + 2, done=1, delayed=98) is None, "deliveries succeed again"
    app_without_retries = App()
    assert app_without_retries.problem_after(0.0, failed=100, delayed=100)
    assert app_without_retries.problem_after(after_pause, delayed=0) is None, "no message waits any more"


def test_condition_of_failing_deliveries_survives_a_new_leader() -> None:
    published = Finding(Reason.DELIVERIES_FAILING, "93 % of 412 deliveries failed")
    app = App(GroupDeliveries(published.message))
    assert app.problem_after(0.0, failed=1000, age=WINDOW_SECONDS + 1) == published
    assert app.problem_after(15.0, failed=90, age=WINDOW_SECONDS + 16)
    assert app.deliveries.problem
    assert app.deliveries.problem.message.startswith("100 % of 90 ")
    idle_app = App(GroupDeliveries(published.message))
    assert idle_app.problem_after(0.0)
    assert idle_app.problem_after(NEW_LEADER_GRACE_SECONDS + 1) is None
    fixed_app = App(GroupDeliveries(published.message))
    assert fixed_app.problem_after(0.0, done=50) is None


def test_retry_estimate_is_the_sum_over_members_and_unknown_without_a_report() -> None:
    deliveries = GroupDeliveries()
    assert deliveries.delayed_messages is None
    record(deliveries, delayed=3)
    record(deliveries, delayed=4, uid="m2")
    assert deliveries.delayed_messages == 7
    deliveries.retain_only({"m2"}, TOPICS)
    assert deliveries.delayed_messages == 4


def test_message_that_fails_is_named_for_its_member_only() -> None:
    deliveries = GroupDeliveries()
    message = FailingMessage("orders", "orders", "a", 0, 7, 4, 1.0, "5xx", 500)
    record(deliveries, failing=[message])
    assert deliveries.failing_messages_of("m1") == (message,)
    assert deliveries.failing_messages_of("m2") == ()
