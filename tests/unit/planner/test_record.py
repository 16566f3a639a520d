"""Tests which generations are believed, and that a lost assignment is noticed without a plausible one."""

import pytest

from builders import a_pod, a_report, a_snapshot
from rota.planner import PodSnapshot
from rota.planner.record import find_damage, highest_generation, plausible_generation


@pytest.mark.parametrize(
    ("generation", "believed"),
    [(0, 0), (1, 1), (2**52, 2**52), (2**52 + 1, 0), (-1, 0), (None, 0), ("7", 0), (7.0, 0)],
)
def test_generation_is_believed_within_bounds(generation: object, believed: int) -> None:
    assert plausible_generation(generation) == believed
    assert highest_generation(a_snapshot(status={"generation": generation})) == believed
    assert highest_generation(a_snapshot(highest_stored_generation=7, status={"generation": generation})) >= 7


@pytest.mark.parametrize(
    ("pod", "is_lost"),
    [
        (a_pod("m1", a_report("m1", 0)), False),  # it obeys none
        (a_pod("m1", a_report("m1", 1)), True),
        (a_pod("m1", a_report("m1", 2**53)), True),  # its generation is not believed, but it may consume
        (a_pod("m1"), True),
        (a_pod("m1", started=False), False),
        (a_pod("m1", ended=True), False),
        (a_pod("m1", uid="uid-deleted"), False),
    ],
)
def test_assignment_missing_is_a_loss_if_a_pod_may_consume(pod: PodSnapshot, *, is_lost: bool) -> None:
    snapshot = a_snapshot(pods=(pod,), deleted_uids=frozenset({"uid-deleted"}))
    assert bool(find_damage(snapshot)) is is_lost
