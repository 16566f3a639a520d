"""Runs one input: a seed chooses a target and makes its input; the target's check must hold."""

import resource
import sys
from collections.abc import Callable, Mapping
from random import Random

from fuzz import certificates, documents, http, rocketmq, traces

_MODULES = (rocketmq, documents, http, traces, certificates)
TARGETS = {target.name: target for module in _MODULES for target in module.TARGETS}
MOST_MEMORY_BYTES = 2**27  # more than before: messages may have 16 MiB, an assignment 48, twice while they are decoded

Check = Callable[[bytes], None]


def choose(seed: int, names: tuple[str, ...] = tuple(TARGETS)) -> tuple[str, bytes]:
    """Return the name of the target that a seed chooses, and the input that it makes."""
    chance = Random(f"{seed}/try")
    name = chance.choice(names)
    return name, chance.choice(TARGETS[name].makers)(chance)


def peak_bytes() -> int:
    """Return the peak memory of this process; macOS reports bytes, Linux KiB."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


CHECKS: Mapping[str, Check] = {name: target.check for name, target in TARGETS.items()}


def failure(seed: int, checks: Mapping[str, Check] = CHECKS) -> str | None:
    """Try a seed; return the failure with the command that tries the seed again, or None."""
    name, data = choose(seed)
    before_bytes = peak_bytes()
    try:
        checks[name](data)
    except Exception as error:  # noqa: BLE001 - any exception is the finding
        finding = f"{type(error).__name__}: {error}"
    else:
        more_bytes = peak_bytes() - before_bytes
        if more_bytes <= MOST_MEMORY_BYTES:
            return None
        finding = f"took {more_bytes:,} bytes"
    return f"{name} of {len(data):,} bytes: {finding}\n  again: python -m fuzz --seed {seed}"
