"""`python -m fuzz`: read mutated frames, bodies and messages until told to stop, or show one again."""

import argparse
import itertools
import signal
import sys
import time
from types import FrameType

from fuzz.run import READERS, broken, made

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
    return fuzz(asked.first, asked.runs, asked.seconds)


def _too_long(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"not read within {PATIENCE} s")


def fuzz(first: int, runs: int | None, seconds: float | None) -> int:
    """Try seed after seed, and tell of each that fails."""
    began, failed, done = time.monotonic(), 0, 0
    try:
        for seed in itertools.islice(itertools.count(first), runs):
            if seconds is not None and time.monotonic() - began > seconds:
                break
            signal.alarm(PATIENCE)
            found = broken(seed)
            done += 1
            if found:
                failed += 1
                print(f"seed {seed}: {found}", flush=True)
            if done % 100_000 == 0:
                print(f"{done} tries, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    except KeyboardInterrupt:
        pass
    signal.alarm(0)
    print(f"{done} tries, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
