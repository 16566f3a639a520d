"""Memory budget for data from tenants: reports, offsets, and ConfigMaps of groups that were not seen yet."""

import weakref

from rota.container import memory_limit

MAX_BYTES = 128 * 2**20  # upper bound, and the budget if the container's memory is unlimited
_PART_OF_MEMORY = 0.25


class RetentionBudget:
    """Counts the bytes of objects while they exist; one namespace can take at most half of the budget."""

    def __init__(self, total: float | None = None, free: int = 0) -> None:
        """`total`: bytes, by default a quarter of the container's memory; objects of up to `free` are not counted."""
        self._free = free
        self._total = min(MAX_BYTES, memory_limit() * _PART_OF_MEMORY) if total is None else total
        self._taken: dict[str, int] = {}

    @property
    def taken(self) -> int:
        """Bytes of all counted objects."""
        return sum(self._taken.values())

    def admit(self, namespace: str, item: object, size: int) -> bool:
        """Return whether an object of `size` bytes may be kept; it is then counted until nothing refers to it."""
        if size <= self._free:
            return True
        taken = self._taken.get(namespace, 0) + size
        if taken > self._total / 2 or self.taken + size > self._total:
            return False
        self._taken[namespace] = taken
        weakref.finalize(item, self._release, namespace, size).atexit = False
        return True

    def _release(self, namespace: str, size: int) -> None:
        remaining = self._taken[namespace] - size
        if remaining:
            self._taken[namespace] = remaining
        else:
            del self._taken[namespace]
