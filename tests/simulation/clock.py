"""Virtual time: what shall happen later, in order; and processes that can be killed, frozen and thawed."""

import heapq
from collections.abc import Callable, Generator
from typing import Any

Later = Callable[[], object]
Work = Generator[float, None, None]  # yields seconds to wait


class Clock:
    """The one clock of a run, and the list of what is to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Later]] = []
        self._number = 0

    def after(self, seconds: float, what: Later) -> None:
        """Let something happen so many seconds from now."""
        self._number += 1
        heapq.heappush(self._due, (self.now + max(seconds, 0.0), self._number, what))

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        while self._due and self._due[0][0] <= until:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = until


class Process:
    """Something that runs: what it does later does not happen once it is dead, and waits while it is frozen."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.alive = True
        self.frozen = False
        self._backlog: list[Later] = []

    def after(self, seconds: float, what: Later) -> None:
        """Do something so many seconds from now."""
        self.clock.after(seconds, lambda: self._do(what))

    def spawn(self, work: Work) -> None:
        """Go through work that waits in between."""

        def go_on() -> None:
            seconds = next(work, None)
            if seconds is not None:
                self.after(seconds, go_on)

        go_on()

    def kill(self) -> None:
        """End it at once."""
        self.alive = False

    def freeze(self) -> None:
        """Stop it as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Let it go on; what was due meanwhile happens now."""
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for what in backlog:
            self._do(what)

    def _do(self, what: Later) -> Any:
        if self.frozen and self.alive:
            self._backlog.append(what)
        elif self.alive:
            what()
