"""Seed after seed, until told to stop: what simulation and fuzzing share."""

import itertools
import time
from collections.abc import Callable


def soak(
    find: Callable[[int], object], first: int, runs: int | None, *, seconds: float | None = None, what: str, every: int
) -> int:
    """Try each seed and tell of those that fail, and every so many how far it is; return an exit code."""
    began, failed, done = time.monotonic(), 0, 0
    try:
        for seed in itertools.islice(itertools.count(first), runs):
            if seconds is not None and time.monotonic() - began > seconds:
                break
            found = find(seed)
            done += 1
            if found:
                failed += 1
                print(f"seed {seed}: {found}", flush=True)
            if done % every == 0:
                print(f"{done} {what}, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    except KeyboardInterrupt:
        pass
    print(f"{done} {what}, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0
