"""Virtual time of a replay: a clock that jumps from one scheduled callback to the next."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class VirtualClock:
    """Runs callbacks at virtual times; callbacks of the same time run in the order in which they were scheduled."""

    def __init__(self, begins: float, on_advance: Callable[[float], None]) -> None:
        self.begins = begins
        self.now = begins
        self._on_advance = on_advance  # called with the new time before `now` changes
        # A heap of time, number and callback; the number keeps callbacks of the same time in order.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_numbers = count()

    def schedule(self, at: float, callback: Callable[[], None]) -> None:
        """Schedule a callback at a virtual time."""
        heappush(self._events, (at, next(self._event_numbers), callback))

    def run_until(self, end: float) -> None:
        """Run all callbacks up to a time, also those that they schedule."""
        while self._events and self._events[0][0] <= end:
            at, _, callback = heappop(self._events)
            self._advance_to(at)
            callback()
        self._advance_to(end)

    def _advance_to(self, at: float) -> None:
        if at > self.now:
            self._on_advance(at)
            self.now = at
