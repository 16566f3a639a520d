"""Sums of what members report of their deliveries, and when most of them fail."""

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

FIRST, SECOND = Queue("orders", "a", 0), Queue("orders", "a", 1)
TOPICS = frozenset({"orders"})


def reported(counts: dict[Queue, QueueCounts], age: float = 10.0, incarnation: str = "one", **given: Any) -> Any:
    return MemberDeliveries.from_page(DeliveriesPage(incarnation, age, [*counts.values()], **given))


def counts(queue: Queue = FIRST, done: int = 0, first: int = 0, seconds: float = 0.0, **failures: int) -> QueueCounts:
    named = {name.removeprefix("s"): number for name, number in failures.items()}
    return QueueCounts(*queue, first, done, named, seconds, seconds / 2, seconds / 4)


def take(deliveries: GroupDeliveries, *of_queues: QueueCounts, now: float = 0.0, uid: str = "m1", **given: Any) -> None:
    named = {Queue(it.topic, it.broker, it.id): it for it in of_queues}
    deliveries.record(uid, given.pop("revision", "r1"), reported(named, **given), TOPICS, now)


def test_delivery_totals_are_differences_whatever_the_interval_of_reads() -> None:
    deliveries = GroupDeliveries()
    take(deliveries, counts(done=3, first=4, seconds=8.0, s5xx=1))
    take(deliveries, counts(done=3, first=4, seconds=8.0, s5xx=1), now=15.0)
    take(deliveries, counts(done=10, first=14, seconds=20.0, s5xx=4, timeout=1), now=90.0)
    totals = deliveries.totals_by_topic["orders"]
    assert (totals.first_attempts, totals.done, totals.failures) == (14, 10, {"5xx": 4, "timeout": 1})
    assert (totals.active_seconds, totals.in_flight_seconds, totals.backlog_seconds) == (20.0, 10.0, 5.0)
    assert deliveries.recent_attempts(90.0) == (15, 5)


def test_delivery_totals_are_kept_by_queue_and_revision_of_the_pod() -> None:
    deliveries = GroupDeliveries()
    take(deliveries, counts(done=3), counts(SECOND, done=4))
    take(deliveries, counts(s5xx=2), uid="m2", revision="r2")
    assert {key: (it.done, it.failed_attempts) for key, it in deliveries.totals_by_queue.items()} == {
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
    take(deliveries, counts(done=100))
    take(deliveries, counts(done=7), incarnation="two", age=5.0)
    assert deliveries.totals_by_topic["orders"].done == 107


def test_delivery_totals_leave_out_what_an_old_process_counted_before_the_first_read() -> None:
    deliveries = GroupDeliveries()
    take(deliveries, counts(done=100, s5xx=900), age=WINDOW_SECONDS + 1)
    assert (deliveries.totals_by_topic, deliveries.recent_attempts(0.0)) == ({}, (0, 0))
    take(deliveries, counts(done=101, s5xx=902), age=WINDOW_SECONDS + 16, now=15.0)
    assert deliveries.recent_attempts(15.0) == (3, 2)


def test_delivery_totals_ignore_other_topics_and_counters_that_went_back() -> None:
    deliveries = GroupDeliveries()
    take(deliveries, counts(done=5), counts(Queue("bills", "a", 0), done=9))
    take(deliveries, counts(done=2), now=1.0)
    take(deliveries, counts(done=4), now=2.0)
    assert {topic: totals.done for topic, totals in deliveries.totals_by_topic.items()} == {"orders": 7}


def test_delivery_totals_of_queues_that_no_report_names_any_more_are_dropped() -> None:
    deliveries = GroupDeliveries()
    for number in range(100):
        take(deliveries, counts(Queue("orders", "a", number), done=1), now=float(number))
        deliveries.retain_only({"m1"}, TOPICS)
    assert deliveries.totals_by_queue.keys() == {(Queue("orders", "a", 99), "r1")}


def test_delivery_attempts_without_an_app_do_not_count_as_failed() -> None:
    deliveries = GroupDeliveries()
    take(deliveries, counts(done=1, refused=500, s404=500))
    assert deliveries.recent_attempts(0.0) == (1, 0)
    assert not deliveries.update_problem(0.0)
    assert deliveries.totals_by_topic["orders"].failures == {"refused": 500, "404": 500}, "metrics have them"


@dataclass
class App:
    """The counters of one member, read at each call, and what is judged then."""

    deliveries: GroupDeliveries = field(default_factory=GroupDeliveries)
    done: int = 0
    failed: int = 0

    def answers(self, now: float, done: int = 0, failed: int = 0, **given: Any) -> Finding | None:
        self.done, self.failed = self.done + done, self.failed + failed
        given = {"last_failure": LastFailure("5xx", 1.0, 500) if self.failed else None} | given
        take(self.deliveries, counts(done=self.done, s5xx=self.failed), now=now, **given)
        self.deliveries.update_problem(now)
        return self.deliveries.problem


def test_condition_of_failing_deliveries_has_share_count_and_last_answer() -> None:
    assert App().answers(0.0, done=29, failed=383) == Finding(
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
    assert (App().answers(0.0, done, failed) is not None) == is_failing


def test_condition_of_failing_deliveries_ends_when_less_than_a_quarter_fails() -> None:
    app = App()
    assert app.answers(0.0, failed=100)
    assert app.answers(100.0, done=200), "a third"
    assert app.answers(200.0, done=150) is None
    assert app.answers(210.0, failed=50) is None, "less than a half"


def test_condition_of_failing_deliveries_looks_at_the_last_five_minutes() -> None:
    app = App()
    assert app.answers(0.0, failed=100)
    assert app.answers(WINDOW_SECONDS + 1, done=20) is None


def test_condition_of_failing_deliveries_is_worded_anew_once_a_minute() -> None:
    app = App()
    told = app.answers(0.0, failed=100)
    assert app.answers(MESSAGE_INTERVAL_SECONDS - 1, failed=100) == told
    assert not app.deliveries.update_problem(MESSAGE_INTERVAL_SECONDS - 1)
    later = app.answers(MESSAGE_INTERVAL_SECONDS, failed=100)
    assert later
    assert later.message.startswith("100 % of 300 deliveries")


def test_condition_of_failing_deliveries_lasts_while_messages_wait_for_their_next_attempt() -> None:
    app = App()
    told = app.answers(0.0, failed=100, delayed=100)
    quiet = WINDOW_SECONDS + NEW_LEADER_GRACE_SECONDS
    assert app.answers(quiet, delayed=100) == told, "nothing was tried meanwhile"
    assert app.answers(quiet + 1, failed=1, delayed=99) == told
    assert app.answers(quiet + WINDOW_SECONDS + 2, done=1, delayed=98) is None, "it works again"
    other = App()
    assert other.answers(0.0, failed=100, delayed=100)
    assert other.answers(quiet, delayed=0) is None, "nothing is left"


def test_condition_of_failing_deliveries_survives_a_new_leader() -> None:
    published = Finding(Reason.DELIVERIES_FAILING, "93 % of 412 deliveries failed")
    app = App(GroupDeliveries(published.message))
    assert app.answers(0.0, failed=1000, age=WINDOW_SECONDS + 1) == published
    assert app.answers(15.0, failed=90, age=WINDOW_SECONDS + 16)
    assert app.deliveries.problem
    assert app.deliveries.problem.message.startswith("100 % of 90 ")
    idle = App(GroupDeliveries(published.message))
    assert idle.answers(0.0)
    assert idle.answers(NEW_LEADER_GRACE_SECONDS + 1) is None
    fixed = App(GroupDeliveries(published.message))
    assert fixed.answers(0.0, done=50) is None


def test_retry_estimate_is_the_sum_over_members_and_unknown_without_a_report() -> None:
    deliveries = GroupDeliveries()
    assert deliveries.delayed_messages is None
    take(deliveries, delayed=3)
    take(deliveries, delayed=4, uid="m2")
    assert deliveries.delayed_messages == 7
    deliveries.retain_only({"m2"}, TOPICS)
    assert deliveries.delayed_messages == 4


def test_message_that_fails_is_named_for_its_member_only() -> None:
    deliveries, message = GroupDeliveries(), FailingMessage("orders", "orders", "a", 0, 7, 4, 1.0, "5xx", 500)
    take(deliveries, failing=[message])
    assert deliveries.failing_messages_of("m1") == (message,)
    assert deliveries.failing_messages_of("m2") == ()
