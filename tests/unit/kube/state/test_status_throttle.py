"""When a status is written."""

import math

import pytest

from rota.kube.state.status_throttle import StatusThrottle


def a_status(progressing: str = "False", **figures: object) -> dict[str, object]:
    return {"conditions": [{"type": "Progressing", "status": progressing, "reason": "Settled"}], **figures}


def test_status_publishes_condition_changes_at_once_and_figures_once_a_second() -> None:
    throttle = StatusThrottle()
    moving = a_status("True", members=1)
    assert throttle.offer(moving, {}, now=10.0)
    newer = a_status("True", members=2)
    assert not throttle.offer(newer, moving, now=10.4)
    assert throttle.newest(moving) == newer  # later offers are compared with it
    assert throttle.seconds_to_write(moving, 10.4) == pytest.approx(0.6)
    assert throttle.offer(a_status("False", members=2), moving, now=10.5)


def test_status_held_back_is_published_when_due_unless_it_reverted() -> None:
    throttle = StatusThrottle()
    written = a_status(members=2)
    assert throttle.offer(written, a_status(members=1), now=10.0)
    assert not throttle.offer(a_status(members=3), written, now=10.5)
    assert not throttle.offer(written, written, now=10.6)
    assert throttle.seconds_to_write(written, 10.6) == math.inf
    assert not throttle.offer(a_status(members=3), written, now=10.7)
    assert throttle.offer(a_status(members=3), written, now=11.0)


def test_status_publishes_a_change_of_lag_alone_once_a_minute() -> None:
    throttle = StatusThrottle()
    written = a_status(lag=10)
    status = a_status(lag=20)
    assert throttle.offer(status, written, now=0.0)
    throttle.on_written(status)
    assert not throttle.offer(a_status(lag=20), written, now=59.9)
    assert throttle.offer(a_status(lag=20), written, now=60.0)


def test_status_write_that_failed_is_retried_a_second_later() -> None:
    throttle = StatusThrottle()
    status = a_status("True")
    assert throttle.offer(status, a_status(), now=10.0)
    throttle.on_write_failed(status, now=10.0)
    assert throttle.seconds_to_write(a_status(), 10.2) == pytest.approx(0.8)
    assert not throttle.offer(status, a_status(), now=10.9)
    assert throttle.offer(status, a_status(), now=11.0)


def test_status_lag_becoming_unknown_or_known_is_published_within_five_seconds() -> None:
    throttle = StatusThrottle()
    written = a_status(lag=10)
    assert throttle.offer(a_status(lag=20), written, now=0.0)
    unknown = a_status(lag=None)
    assert not throttle.offer(unknown, a_status(lag=20), now=4.9), "not with each offer"
    assert throttle.seconds_to_write(a_status(lag=20), 4.9) == pytest.approx(0.1)
    assert throttle.offer(unknown, a_status(lag=20), now=5.0)
    assert not throttle.offer(a_status(lag=20), a_status(), now=9.9), "a field that is null is not written"
    assert throttle.offer(a_status(lag=20), a_status(), now=10.0)


def test_status_write_in_flight_is_not_repeated_and_counts_as_published() -> None:
    throttle = StatusThrottle()
    moving, settled = a_status("True"), a_status("False")
    assert throttle.offer(moving, settled, now=10.0)
    assert not throttle.offer(moving, settled, now=10.1)
    assert throttle.newest(settled) == moving
    assert throttle.offer(settled, settled, now=10.2), "it equals the written status, but not the write in flight"
    throttle.on_written(moving)
    assert throttle.newest(moving) == settled
    throttle.on_written(settled)
    assert throttle.newest(settled) == settled
    assert throttle.seconds_to_write(settled, 10.3) == math.inf


def test_status_retries_only_the_newest_of_the_failed_writes() -> None:
    throttle = StatusThrottle()
    written = a_status(members=1)
    older, newer = a_status("True", members=2), a_status("True", members=3)
    assert throttle.offer(older, written, now=10.0)
    assert throttle.offer(newer, written, now=11.0)
    throttle.on_write_failed(older, now=12.0)
    assert throttle.seconds_to_write(written, 12.0) == math.inf, "the newer write is in flight"
    throttle.on_write_failed(newer, now=13.0)
    assert throttle.newest(written) == newer
    assert not throttle.offer(newer, written, now=13.9)
    assert throttle.offer(newer, written, now=14.0)
