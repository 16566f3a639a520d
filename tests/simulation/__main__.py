"""`python -m simulation`: run seeds until told to stop, or show one again."""

import argparse
import itertools
import sys
import time

from simulation.bugs import BUGS, planted
from simulation.run import broken, failure, run


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="show this one run again")
    parser.add_argument("--only", help="with these of its troubles: 0,3; none")
    parser.add_argument("--bugs", action="store_true", help="find a seed for each planted bug")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="how many (default: until interrupted)")
    asked = parser.parse_args()
    if asked.seed is not None:
        kept = None if asked.only is None else [int(it) for it in asked.only.split(",") if it.isdigit()]
        world = run(asked.seed, kept)
        print(f"seed {asked.seed} holds: {world.judge.plans} plans, {world.judge.written} documents")
        return 0
    if asked.bugs:
        return hunt(asked.runs or 1000)
    return soak(asked.first, asked.runs)


def hunt(runs: int) -> int:
    """Print, for each planted bug, the first seed that finds it."""
    missed = 0
    for bug in BUGS:
        with planted(bug):
            found = next((seed for seed in range(runs) if broken(seed)), None)
        missed += found is None
        print(f"    {bug.__name__}: {found},", flush=True)
    return 1 if missed else 0


def soak(first: int, runs: int | None) -> int:
    """Run seed after seed, and tell of each that fails."""
    began, failed, done = time.monotonic(), 0, 0
    try:
        for seed in itertools.islice(itertools.count(first), runs):
            found = failure(seed)
            done += 1
            if found:
                failed += 1
                print(f"seed {seed}: {found}", flush=True)
            if done % 1000 == 0:
                print(f"{done} runs, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    except KeyboardInterrupt:
        pass
    print(f"{done} runs, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
