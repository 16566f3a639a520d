"""The tester, tested: each bug that is planted on purpose is found by the run of a known seed."""

import pytest

from simulation.bugs import BUGS, Plant, planted
from simulation.run import broken

# `python -m simulation --bugs` finds these anew when a change has moved them.
SEEDS: dict[str, int] = {}


def test_every_bug_has_its_seed() -> None:
    assert set(SEEDS) == {bug.__name__ for bug in BUGS}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found_and_only_the_bug(bug: Plant) -> None:
    seed = SEEDS[bug.__name__]
    with planted(bug):
        assert broken(seed), "no longer found: python -m simulation --bugs"
    assert broken(seed) is None, "it is found without being planted"
