"""How much memory the operator spends on what tenants send it: reports, offsets, ConfigMaps of groups not yet seen."""

import weakref

from rota.container import memory_limit

MAX_BYTES = 128 * 2**20  # where nothing limits the container's memory
_PART_OF_MEMORY = 0.25


class RetentionBudget:
    """Counts objects for as long as they exist; one namespace can take half of the room at most."""

    def __init__(self, total: float | None = None, free: int = 0) -> None:
        """`total`: bytes, by default a quarter of the container's memory; objects of up to `free` are not counted."""
        self._free = free
        self._total = min(MAX_BYTES, memory_limit() * _PART_OF_MEMORY) if total is None else total
        self._taken: dict[str, int] = {}

    @property
    def taken(self) -> int:
        """How many bytes all counted objects take."""
        return sum(self._taken.values())

    def admit(self, namespace: str, kept: object, size: int) -> bool:
        """Return whether an object of so many bytes may be kept; it is counted until nothing refers to it."""
        if size <= self._free:
            return True
        taken = self._taken.get(namespace, 0) + size
        if taken > self._total / 2 or self.taken + size > self._total:
            return False
        self._taken[namespace] = taken
        weakref.finalize(kept, self._release, namespace, size).atexit = False
        return True

    def _release(self, namespace: str, size: int) -> None:
        left = self._taken[namespace] - size
        if left:
            self._taken[namespace] = left
        else:
            del self._taken[namespace]
