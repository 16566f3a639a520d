"""`python -m simulation`: run seeds until told to stop, or show one again."""

import argparse
import logging
import sys

from simulation.bugs import BUGS, planted
from simulation.run import broken, failure, run
from soaking import soak


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="show this one run again")
    parser.add_argument("--only", help="with these of its troubles: 0,3; none")
    parser.add_argument("--bugs", action="store_true", help="find a seed for each planted bug")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="how many (default: until interrupted)")
    parser.add_argument("--seconds", type=float, help="how long (default: until interrupted)")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)  # operators of simulated worlds log every fault
    if asked.seed is not None:
        kept = None if asked.only is None else [int(it) for it in asked.only.split(",") if it.isdigit()]
        world = run(asked.seed, kept)
        print(f"seed {asked.seed} holds: {world.judge.plans} plans, {world.judge.written} documents")
        return 0
    if asked.bugs:
        return hunt(asked.runs or 1000)
    return soak(failure, asked.first, asked.runs, seconds=asked.seconds, what="runs", every=1000)


def hunt(runs: int) -> int:
    """Print, for each planted bug, the first seed that finds it."""
    missed = 0
    for bug in BUGS:
        with planted(bug):
            found = next((seed for seed in range(runs) if broken(seed)), None)
        missed += found is None
        print(f"    {bug.__name__}: {found},", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
