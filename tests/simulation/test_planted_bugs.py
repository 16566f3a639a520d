"""The tester, tested: each bug that is planted on purpose is found by the run of a known seed."""

import pytest

from simulation import bugs
from simulation.bugs import BUGS, Plant, planted
from simulation.run import broken

# `python -m simulation --bugs` finds these anew when a change has moved them.
SEEDS = {
    "grant_without_acknowledgement": 0,
    "revoke_skipped": 0,
    "draining_counts_as_released": 0,
    "idle_counts_as_released": 0,
    "any_generation_acknowledges": 177,
    "unfinished_drain_is_enough": 4,
    "a_crash_is_an_end": 3,
    "lost_at_once": 0,
    "conflicts_ignored": 10,
    "barrier_ignored": 2,
    "recovery_below_what_was_seen": 1,
    "budget_forgotten": 10,
    "shrinks_on_a_partial_view": 70,
    "no_view_is_no_queues": 23,
    "lower_generations_obeyed": 8,
    "member_forgets": 59,
    "final_drain_forgotten": 168,
    "released_before_empty": 0,
    "namesakes_are_one": 80,
    "orphans_wait_for_gates": 10,
    "never_satisfied": 0,
    "looks_all_the_time": 0,
    "locks_are_trusted_for_ever": 97,
}


def test_simulation_has_a_seed_for_every_planted_bug() -> None:
    assert set(SEEDS) == {bug.__name__ for bug in BUGS}


RARE = pytest.mark.slow("a planted bug that only a long simulated run finds")


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=RARE if bug is bugs.never_satisfied else []) for bug in BUGS],
    ids=lambda bug: bug.__name__,
)
def test_simulation_finds_each_planted_bug_and_passes_without_it(bug: Plant) -> None:
    seed = SEEDS[bug.__name__]
    with planted(bug):
        assert broken(seed), "no longer found: python -m simulation --bugs"
    assert broken(seed) is None, "it is found without being planted"
