"""Runs seed after seed until interrupted; shared by simulation and fuzzing."""

import itertools
import time
from collections.abc import Callable


def soak(
    find: Callable[[int], object], first: int, runs: int | None, *, seconds: float | None = None, what: str, every: int
) -> int:
    """Try at most `runs` seeds, from `first` on, for at most so many seconds; return 1 if any failed.

    `find` returns the failure of a seed, or an empty value. Failures are printed, and the progress after every `every`
    seeds; `what` is the output's word for seeds.
    """
    began = time.monotonic()
    failed = 0
    done = 0
    try:
        for seed in itertools.islice(itertools.count(first), runs):
            if seconds is not None and time.monotonic() - began > seconds:
                break
            failure = find(seed)
            done += 1
            if failure:
                failed += 1
                print(f"seed {seed}: {failure}", flush=True)
            if done % every == 0:
                print(f"{done} {what}, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    except KeyboardInterrupt:
        pass
    print(f"{done} {what}, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0
