"""The memory limit of the container that this process runs in."""

from contextlib import suppress
from math import inf
from pathlib import Path


def memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many bytes the container may use; infinity if nothing limits it."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        with suppress(OSError, ValueError):  # ValueError: the text "max", for no limit
            return float(int((root / name).read_text()))
    return inf
