"""`python -m fuzz`: read mutated frames, bodies and messages until told to stop, or show one again."""

import argparse
import signal
import sys
from types import FrameType

from fuzz.run import READERS, broken, made
from soaking import soak

PATIENCE = 60  # seconds for one; most take less than a thousandth of one


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="show this one again")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="how many (default: until interrupted)")
    parser.add_argument("--seconds", type=float, help="how long (default: until interrupted)")
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_long)
    if asked.seed is not None:
        name, data = made(asked.seed)
        print(f"{name}: {data!r}", flush=True)
        READERS[name](data)
        print(f"seed {asked.seed} holds")
        return 0
    found = soak(_within_patience, asked.first, asked.runs, seconds=asked.seconds, what="tries", every=100_000)
    signal.alarm(0)
    return found


def _too_long(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"not read within {PATIENCE} s")


def _within_patience(seed: int) -> object:
    signal.alarm(PATIENCE)
    return broken(seed)


if __name__ == "__main__":
    sys.exit(main())
