"""When people are told."""

import math

import pytest

from rota.kube.state.status_throttle import StatusThrottle


def a_status(progressing: str = "False", **told: object) -> dict[str, object]:
    return {"conditions": [{"type": "Progressing", "status": progressing, "reason": "Settled"}], **told}


def test_status_publishes_condition_changes_at_once_and_figures_once_a_second() -> None:
    pace, moving = StatusThrottle(), a_status("True", members=1)
    assert pace.tell(moving, {}, now=10.0)
    more = a_status("True", members=2)
    assert not pace.tell(more, moving, now=10.4)
    assert pace.newest(moving) == more  # what follows goes on from there
    assert pace.seconds(moving, 10.4) == pytest.approx(0.6)
    assert pace.tell(a_status("False", members=2), moving, now=10.5)


def test_status_held_back_is_published_when_due_unless_it_reverted() -> None:
    pace, written = StatusThrottle(), a_status(members=2)
    assert pace.tell(written, a_status(members=1), now=10.0)
    assert not pace.tell(a_status(members=3), written, now=10.5)
    assert not pace.tell(written, written, now=10.6)
    assert pace.seconds(written, 10.6) == math.inf
    assert not pace.tell(a_status(members=3), written, now=10.7)
    assert pace.tell(a_status(members=3), written, now=11.0)


def test_status_publishes_a_change_of_lag_alone_once_a_minute() -> None:
    pace, written = StatusThrottle(), a_status(lag=10)
    told = a_status(lag=20)
    assert pace.tell(told, written, now=0.0)
    pace.taken(told)
    assert not pace.tell(a_status(lag=20), written, now=59.9)
    assert pace.tell(a_status(lag=20), written, now=60.0)


def test_status_write_that_failed_is_retried_a_second_later() -> None:
    pace, wanted = StatusThrottle(), a_status("True")
    assert pace.tell(wanted, a_status(), now=10.0)
    pace.untaken(wanted, now=10.0)
    assert pace.seconds(a_status(), 10.2) == pytest.approx(0.8)
    assert not pace.tell(wanted, a_status(), now=10.9)
    assert pace.tell(wanted, a_status(), now=11.0)


def test_status_lag_becoming_unknown_or_known_is_published_within_five_seconds() -> None:
    pace, written = StatusThrottle(), a_status(lag=10)
    assert pace.tell(a_status(lag=20), written, now=0.0)
    unknown = a_status(lag=None)
    assert not pace.tell(unknown, a_status(lag=20), now=4.9), "but not at each turn"
    assert pace.seconds(a_status(lag=20), 4.9) == pytest.approx(0.1)
    assert pace.tell(unknown, a_status(lag=20), now=5.0)
    assert not pace.tell(a_status(lag=20), a_status(), now=9.9), "a field that is null is not written"
    assert pace.tell(a_status(lag=20), a_status(), now=10.0)


def test_status_write_in_flight_is_not_repeated_and_counts_as_published() -> None:
    pace, moving, settled = StatusThrottle(), a_status("True"), a_status("False")
    assert pace.tell(moving, settled, now=10.0)
    assert not pace.tell(moving, settled, now=10.1)
    assert pace.newest(settled) == moving
    assert pace.tell(settled, settled, now=10.2), "it is what is written, but not what will be"
    pace.taken(moving)
    assert pace.newest(moving) == settled
    pace.taken(settled)
    assert pace.newest(settled) == settled
    assert pace.seconds(settled, 10.3) == math.inf


def test_status_retries_only_the_newest_of_the_failed_writes() -> None:
    pace, written, newer = StatusThrottle(), a_status(members=1), a_status("True", members=3)
    older = a_status("True", members=2)
    assert pace.tell(older, written, now=10.0)
    assert pace.tell(newer, written, now=11.0)
    pace.untaken(older, now=12.0)
    assert pace.seconds(written, 12.0) == math.inf, "the newer one is on its way"
    pace.untaken(newer, now=13.0)
    assert pace.newest(written) == newer
    assert not pace.tell(newer, written, now=13.9)
    assert pace.tell(newer, written, now=14.0)
