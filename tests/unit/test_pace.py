"""When people are told."""

import math

import pytest

from rota.kube.pace import Pace


def a_status(progressing: str = "False", **told: object) -> dict[str, object]:
    return {"conditions": [{"type": "Progressing", "status": progressing, "reason": "Settled"}], **told}


def test_a_condition_that_turns_is_told_at_once_and_figures_once_a_second() -> None:
    pace, moving = Pace(), a_status("True", members=1)
    assert pace.tell(moving, {}, now=10.0)
    more = a_status("True", members=2)
    assert not pace.tell(more, moving, now=10.4)
    assert pace.untold == more  # what follows goes on from there
    assert pace.seconds(moving, 10.4) == pytest.approx(0.6)
    assert pace.tell(a_status("False", members=2), moving, now=10.5)


def test_what_was_held_back_is_told_when_its_time_has_come_or_is_not_so_any_more() -> None:
    pace, written = Pace(), a_status(members=2)
    assert pace.tell(written, a_status(members=1), now=10.0)
    assert not pace.tell(a_status(members=3), written, now=10.5)
    assert not pace.tell(written, written, now=10.6)
    assert pace.seconds(written, 10.6) == math.inf
    assert not pace.tell(a_status(members=3), written, now=10.7)
    assert pace.tell(a_status(members=3), written, now=11.0)


def test_a_lag_alone_is_told_once_a_minute() -> None:
    pace, written = Pace(), a_status(lag=10)
    assert pace.tell(a_status(lag=20), written, now=0.0)
    assert not pace.tell(a_status(lag=20), written, now=59.9)
    assert pace.tell(a_status(lag=20), written, now=60.0)


def test_what_is_not_taken_is_tried_again_a_second_later() -> None:
    pace, wanted = Pace(), a_status("True")
    assert pace.tell(wanted, a_status(), now=10.0)
    pace.untaken(wanted, now=10.0)
    assert pace.seconds(a_status(), 10.2) == pytest.approx(0.8)
    assert not pace.tell(wanted, a_status(), now=10.9)
    assert pace.tell(wanted, a_status(), now=11.0)


def test_that_a_lag_is_not_known_any_more_or_is_again_is_told_soon() -> None:
    pace, written = Pace(), a_status(lag=10)
    assert pace.tell(a_status(lag=20), written, now=0.0)
    unknown = a_status(lag=None)
    assert not pace.tell(unknown, a_status(lag=20), now=4.9), "but not at each turn"
    assert pace.seconds(a_status(lag=20), 4.9) == pytest.approx(0.1)
    assert pace.tell(unknown, a_status(lag=20), now=5.0)
    assert not pace.tell(a_status(lag=20), a_status(), now=9.9), "a field that is null is not written"
    assert pace.tell(a_status(lag=20), a_status(), now=10.0)
