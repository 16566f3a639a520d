"""`python -m simulation`: run seeds until interrupted, or repeat one seed."""

import argparse
import logging
import sys

from simulation.bugs import BUGS, planted
from simulation.run import find_failure, run, violation_of
from soaking import soak


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat this run")
    parser.add_argument("--only", help="with these of its faults only: 0,3; none")
    parser.add_argument("--bugs", action="store_true", help="find a seed for each planted bug")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="how many (default: until interrupted)")
    parser.add_argument("--seconds", type=float, help="how long (default: until interrupted)")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # simulated operators log every fault
    if options.seed is not None:
        faults = (
            None if options.only is None else [int(number) for number in options.only.split(",") if number.isdigit()]
        )
        world = run(options.seed, faults)
        print(f"seed {options.seed} holds: {world.judge.plans} plans, {world.judge.written} documents")
        return 0
    if options.bugs:
        return find_bugs(options.runs or 1000)
    return soak(find_failure, options.first, options.runs, seconds=options.seconds, what="runs", every=1000)


def find_bugs(runs: int) -> int:
    """Print, for each planted bug, the first seed that finds it."""
    missed = 0
    for bug in BUGS:
        with planted(bug):
            first_seed = next((seed for seed in range(runs) if violation_of(seed)), None)
        missed += first_seed is None
        print(f"    {bug.__name__}: {first_seed},", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
