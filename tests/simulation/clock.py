"""Virtual time: scheduled callbacks in order; and processes that can be killed, frozen and thawed."""

import heapq
from collections.abc import Callable, Generator
from typing import Any

Callback = Callable[[], object]
Routine = Generator[float, None, None]  # yields seconds to wait


class Clock:
    """The clock of a run, with its scheduled callbacks."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callback]] = []
        self._number = 0

    def after(self, seconds: float, callback: Callback) -> None:
        """Run a callback after so many seconds."""
        self._number += 1
        heapq.heappush(self._due, (self.now + max(seconds, 0.0), self._number, callback))

    def run(self, until: float) -> None:
        """Run all callbacks that are due until then."""
        while self._due and self._due[0][0] <= until:
            self.now, _, callback = heapq.heappop(self._due)
            callback()
        self.now = until


class Process:
    """A process. Its callbacks are dropped after its end, and postponed while it is frozen."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.alive = True
        self.frozen = False
        self._backlog: list[Callback] = []

    def after(self, seconds: float, callback: Callback) -> None:
        """Run a callback of this process after so many seconds."""
        self.clock.after(seconds, lambda: self._run(callback))

    def spawn(self, routine: Routine) -> None:
        """Run a routine that yields the seconds to wait between its steps."""

        def resume() -> None:
            seconds = next(routine, None)
            if seconds is not None:
                self.after(seconds, resume)

        resume()

    def kill(self) -> None:
        """End the process at once."""
        self.alive = False

    def freeze(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Resume the process; callbacks that were due meanwhile run now."""
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for callback in backlog:
            self._run(callback)

    def _run(self, callback: Callback) -> Any:
        if self.frozen and self.alive:
            self._backlog.append(callback)
        elif self.alive:
            callback()
