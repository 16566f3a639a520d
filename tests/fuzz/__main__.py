"""`python -m fuzz`: try parsers with mutated input until interrupted, or try one seed again."""

import argparse
import signal
import sys
from types import FrameType

from fuzz.run import TARGETS, choose, failure
from soaking import soak

PATIENCE_SECONDS = 60  # for one input; most take less than a thousandth of it


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="try this one again")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="how many (default: until interrupted)")
    parser.add_argument("--seconds", type=float, help="how long (default: until interrupted)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, _raise_timeout)
    if arguments.seed is not None:
        name, data = choose(arguments.seed)
        print(f"{name}: {data!r}", flush=True)
        TARGETS[name].check(data)
        print(f"seed {arguments.seed} holds")
        return 0
    exit_code = soak(
        _failure_in_time, arguments.first, arguments.runs, seconds=arguments.seconds, what="tries", every=100_000
    )
    signal.alarm(0)
    return exit_code


def _raise_timeout(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"not read within {PATIENCE_SECONDS} s")


def _failure_in_time(seed: int) -> object:
    signal.alarm(PATIENCE_SECONDS)
    return failure(seed)


if __name__ == "__main__":
    sys.exit(main())
