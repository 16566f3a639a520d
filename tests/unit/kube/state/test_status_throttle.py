"""When people are told."""

import math

import pytest

from rota.kube.state.status_throttle import StatusThrottle


def a_status(progressing: str = "False", **told: object) -> dict[str, object]:
    return {"conditions": [{"type": "Progressing", "status": progressing, "reason": "Settled"}], **told}


def test_status_publishes_condition_changes_at_once_and_figures_once_a_second() -> None:
    pace, moving = StatusThrottle(), a_status("True", members=1)
    assert pace.offer(moving, {}, now=10.0)
    more = a_status("True", members=2)
    assert not pace.offer(more, moving, now=10.4)
    assert pace.newest(moving) == more  # what follows goes on from there
    assert pace.seconds_to_write(moving, 10.4) == pytest.approx(0.6)
    assert pace.offer(a_status("False", members=2), moving, now=10.5)


def test_status_held_back_is_published_when_due_unless_it_reverted() -> None:
    pace, written = StatusThrottle(), a_status(members=2)
    assert pace.offer(written, a_status(members=1), now=10.0)
    assert not pace.offer(a_status(members=3), written, now=10.5)
    assert not pace.offer(written, written, now=10.6)
    assert pace.seconds_to_write(written, 10.6) == math.inf
    assert not pace.offer(a_status(members=3), written, now=10.7)
    assert pace.offer(a_status(members=3), written, now=11.0)


def test_status_publishes_a_change_of_lag_alone_once_a_minute() -> None:
    pace, written = StatusThrottle(), a_status(lag=10)
    told = a_status(lag=20)
    assert pace.offer(told, written, now=0.0)
    pace.on_written(told)
    assert not pace.offer(a_status(lag=20), written, now=59.9)
    assert pace.offer(a_status(lag=20), written, now=60.0)


def test_status_write_that_failed_is_retried_a_second_later() -> None:
    pace, wanted = StatusThrottle(), a_status("True")
    assert pace.offer(wanted, a_status(), now=10.0)
    pace.on_write_failed(wanted, now=10.0)
    assert pace.seconds_to_write(a_status(), 10.2) == pytest.approx(0.8)
    assert not pace.offer(wanted, a_status(), now=10.9)
    assert pace.offer(wanted, a_status(), now=11.0)


def test_status_lag_becoming_unknown_or_known_is_published_within_five_seconds() -> None:
    pace, written = StatusThrottle(), a_status(lag=10)
    assert pace.offer(a_status(lag=20), written, now=0.0)
    unknown = a_status(lag=None)
    assert not pace.offer(unknown, a_status(lag=20), now=4.9), "but not at each turn"
    assert pace.seconds_to_write(a_status(lag=20), 4.9) == pytest.approx(0.1)
    assert pace.offer(unknown, a_status(lag=20), now=5.0)
    assert not pace.offer(a_status(lag=20), a_status(), now=9.9), "a field that is null is not written"
    assert pace.offer(a_status(lag=20), a_status(), now=10.0)


def test_status_write_in_flight_is_not_repeated_and_counts_as_published() -> None:
    pace, moving, settled = StatusThrottle(), a_status("True"), a_status("False")
    assert pace.offer(moving, settled, now=10.0)
    assert not pace.offer(moving, settled, now=10.1)
    assert pace.newest(settled) == moving
    assert pace.offer(settled, settled, now=10.2), "it is what is written, but not what will be"
    pace.on_written(moving)
    assert pace.newest(moving) == settled
    pace.on_written(settled)
    assert pace.newest(settled) == settled
    assert pace.seconds_to_write(settled, 10.3) == math.inf


def test_status_retries_only_the_newest_of_the_failed_writes() -> None:
    pace, written, newer = StatusThrottle(), a_status(members=1), a_status("True", members=3)
    older = a_status("True", members=2)
    assert pace.offer(older, written, now=10.0)
    assert pace.offer(newer, written, now=11.0)
    pace.on_write_failed(older, now=12.0)
    assert pace.seconds_to_write(written, 12.0) == math.inf, "the newer one is on its way"
    pace.on_write_failed(newer, now=13.0)
    assert pace.newest(written) == newer
    assert not pace.offer(newer, written, now=13.9)
    assert pace.offer(newer, written, now=14.0)
