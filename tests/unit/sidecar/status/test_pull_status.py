"""What a queue's pulls show: an obstacle, a pull that hangs, and a broker that answers none."""

from rota.reports import QueueState
from rota.sidecar.status.pull_status import HANGING_PULL_SECONDS, UNREAD_SECONDS, PullStatus


def test_pull_hangs_once_it_has_been_open_for_idle_seconds_without_a_stall() -> None:
    status = PullStatus()
    assert status.hanging_seconds(1000.0, 0.0) is None
    status.on_sent(10.0)
    assert status.hanging_seconds(9.0 + HANGING_PULL_SECONDS, 0.0) is None
    assert status.hanging_seconds(10.0 + HANGING_PULL_SECONDS, 0.0) == HANGING_PULL_SECONDS
    assert status.hanging_seconds(10.0 + HANGING_PULL_SECONDS, awake_since=11.0) is None
    status.on_unanswered()
    assert status.hanging_seconds(1000.0, 0.0) is None


def test_queue_is_unread_from_the_first_pull_without_an_answer() -> None:
    status = PullStatus()
    status.on_sent(10.0)
    status.on_unanswered()
    status.on_sent(20.0)
    assert not status.is_unread(10.0 + UNREAD_SECONDS, 0.0)
    assert status.is_unread(11.0 + UNREAD_SECONDS, 0.0)
    assert not status.is_unread(11.0 + UNREAD_SECONDS, awake_since=12.0)
    status.on_answered(30.0)
    assert (status.answered_at, status.is_unread(1000.0, 0.0)) == (30.0, False)


def test_pull_obstacle_lasts_until_an_answer_and_that_of_a_full_queue_until_the_next_pull() -> None:
    assert obstacle_after_sending("failing") == "failing"
    assert obstacle_after_sending("full") == ""
    status = PullStatus()
    status.reset("failing")
    status.on_answered(11.0)
    assert status.obstacle == ""


def obstacle_after_sending(obstacle: QueueState) -> QueueState:
    status = PullStatus()
    status.reset(obstacle)
    status.on_sent(10.0)
    return status.obstacle
