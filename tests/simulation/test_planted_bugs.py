"""The simulation itself is tested: it finds each planted bug with a known seed."""

import pytest

from simulation import bugs
from simulation.bugs import BUGS, Plant, planted
from simulation.run import violation_of

# After a change that moves them: `python -m simulation --bugs` finds new seeds.
SEEDS = {
    "grant_without_acknowledgement": 0,
    "revoke_skipped": 0,
    "draining_counts_as_released": 0,
    "idle_counts_as_released": 45,
    "any_generation_acknowledges": 177,
    "unfinished_drain_is_enough": 4,
    "a_crash_is_an_end": 3,
    "lost_at_once": 0,
    "conflicts_ignored": 10,
    "barrier_ignored": 2,
    "recovery_below_what_was_seen": 1,
    "restored_copies_trusted": 770985,
    "budget_forgotten": 7,
    "shrinks_on_a_partial_view": 70,
    "no_view_is_no_queues": 23,
    "lower_generations_obeyed": 1,
    "member_forgets": 59,
    "sent_before_stored": 0,
    "sent_documents_always_obeyed": 1,
    "final_drain_forgotten": 404,
    "released_before_empty": 0,
    "namesakes_are_one": 21,
    "orphans_wait_for_gates": 9,
    "written_at_every_reconcile": 0,
    "requeued_all_the_time": 0,
    "locks_are_trusted_for_ever": 475,
}


def test_simulation_has_a_seed_for_every_planted_bug() -> None:
    assert set(SEEDS) == {bug.__name__ for bug in BUGS}


RARE = pytest.mark.slow("a planted bug that only a long simulated run finds")


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=RARE if bug is bugs.written_at_every_reconcile else []) for bug in BUGS],
    ids=lambda bug: bug.__name__,
)
def test_simulation_finds_each_planted_bug_and_passes_without_it(bug: Plant) -> None:
    seed = SEEDS[bug.__name__]
    with planted(bug):
        assert violation_of(seed), "no longer found: python -m simulation --bugs"
    assert violation_of(seed) is None, "the seed fails without the bug"
