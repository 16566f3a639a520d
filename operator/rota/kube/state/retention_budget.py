"""Memory budget for data from tenants: reports, offsets, and ConfigMaps of groups that were not seen yet."""

import weakref

from rota.container import memory_limit_bytes

MAX_BYTES = 128 * 2**20  # upper bound, and the budget if the container's memory is unlimited
_MEMORY_FRACTION = 0.25


class RetentionBudget:
    """Counts the bytes of objects while they exist; one namespace gets at most half, so that others can keep theirs."""

    def __init__(self, total_bytes: float | None = None, uncounted_bytes: int = 0) -> None:
        """`total_bytes` defaults to a quarter of the container's memory; objects up to `uncounted_bytes` are free."""
        self._uncounted_bytes = uncounted_bytes
        default_bytes = min(MAX_BYTES, memory_limit_bytes() * _MEMORY_FRACTION)
        self._total_bytes = default_bytes if total_bytes is None else total_bytes
        self._used_by_namespace: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all counted objects."""
        return sum(self._used_by_namespace.values())

    def admit(self, namespace: str, item: object, size_bytes: int) -> bool:
        """Return whether an object of `size_bytes` may be kept; it is then counted until nothing refers to it."""
        if size_bytes <= self._uncounted_bytes:
            return True
        namespace_bytes = self._used_by_namespace.get(namespace, 0) + size_bytes
        if namespace_bytes > self._total_bytes / 2 or self.used_bytes + size_bytes > self._total_bytes:
            return False
        self._used_by_namespace[namespace] = namespace_bytes
        finalizer = weakref.finalize(item, self._release, namespace, size_bytes)
        finalizer.atexit = False  # the end of the process needs no counts
        return True

    def _release(self, namespace: str, size_bytes: int) -> None:
        remaining = self._used_by_namespace[namespace] - size_bytes
        if remaining:
            self._used_by_namespace[namespace] = remaining
        else:
            del self._used_by_namespace[namespace]
