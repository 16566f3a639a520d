"""Limits for all groups together: concurrent observations, and pokes for settings a second.

A group in the middle of a handover is observed first.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rota.kube.state.group import Group


class PriorityLimiter:
    """Semaphore with a queue: groups wait first come, first served, but a group in a handover goes first."""

    def __init__(self, slots: int) -> None:
        self._free_slots = slots
        self._waiting: OrderedDict[Group, asyncio.Future[None]] = OrderedDict()

    @asynccontextmanager
    async def hold_slot(self, group: Group) -> AsyncIterator[None]:
        """Wait for a free slot, and hold it for the group."""
        if self._free_slots:
            self._free_slots -= 1
        else:
            turn = self._waiting[group] = asyncio.get_running_loop().create_future()
            if not group.is_at_rest:
                self.prioritize(group)
            try:
                await turn
            except asyncio.CancelledError:
                self._waiting.pop(group, None)
                if not turn.cancelled():  # the slot was granted already
                    self._release_slot()
                raise
        try:
            yield
        finally:
            self._release_slot()

    def prioritize(self, group: Group) -> None:
        """Move a waiting group to the front."""
        if group in self._waiting:
            self._waiting.move_to_end(group, last=False)

    def _release_slot(self) -> None:
        while self._waiting:
            _, turn = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self._free_slots += 1


class TokenBucket:
    """Allows `per_second` actions a second, and up to `burst` at once after a pause."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at = 0.0

    def take(self, requested: int, now: float) -> int:
        """Return how many of the requested actions are allowed now."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        allowed = min(requested, int(self._tokens))
        self._tokens -= allowed
        return allowed
