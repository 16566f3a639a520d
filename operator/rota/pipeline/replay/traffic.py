"""Messages as a fluid: what comes to queues, what members work of it, what is left.

A member works what comes to its queues, and what waits there, up to its capacity, and gives each queue of it the same
part of what it wants. A queue that nobody works fills. That is all; there are no messages, batches or time-outs.
"""

import numpy as np
from numpy.typing import NDArray

from rota.pipeline.replay.group_history import STEP, Rates

Places = NDArray[np.intp]
ROUNDING = 1e-6  # of a step: times since 1970 are no more exact than that
BACK = 12  # steps over which a rate is measured, as the operator does: an hour


class Fluid:
    """The queues of one group."""

    def __init__(self, arrivals: Rates, lag: Rates, begins: float, capacity: float) -> None:
        """Begin with what waits in each queue; `capacity`: messages a second that one member can work."""
        self._arrivals, self._begins, self._capacity = arrivals, begins, capacity
        self.lag = lag.astype(float)
        self.now = begins
        self.peak = float(lag.sum())
        self.waited = 0.0  # messages times seconds
        self._there = np.ones(arrivals.shape[1])  # 1 for each queue that there is
        self._since = np.zeros(arrivals.shape[1], dtype=np.intp)  # the first step that is known of it
        self._before = np.cumsum(np.vstack([np.zeros_like(arrivals[:1]), arrivals]), axis=0)

    def step(self, at: float) -> int:
        """Return the number of the step that a time lies in."""
        return min(max(int((at - self._begins) / STEP + ROUNDING), 0), len(self._arrivals) - 1)

    @property
    def edge(self) -> float:
        """When the present step ends; the last one does not."""
        edge = self._begins + STEP * (self.step(self.now) + 1)
        return edge if edge > self.now else float("inf")

    def rates(self, at: float) -> Rates:
        """Return what comes to each queue at a time."""
        rates: Rates = self._arrivals[self.step(at)] * self._there
        return rates

    def keep(self, there: NDArray[np.bool_]) -> None:
        """Have only these queues from now on; what waits in others is nobody's any more."""
        self._since[there & (self._there == 0)] = int(np.ceil((self.now - self._begins) / STEP))
        self._there = there.astype(float)
        self.lag *= self._there

    def measured(self, at: float) -> Rates:
        """Return what came to each queue over the last hour, or since it came; NaN before a whole step is known."""
        until = self.step(at)
        since = np.maximum(self._since, until - BACK)
        came = self._before[until] - self._before[since, np.arange(len(since))]
        rates: Rates = np.divide(came, until - since, out=np.full(len(since), np.nan), where=until > since)
        return rates

    def flow(self, until: float, workers: Places, members: int) -> None:
        """Let time pass; `workers`: by queue the number of the member that works it, or -1."""
        while self.now < until:
            end = min(until, self.edge)
            self._within(end - self.now, self.rates(self.now), workers, members)
            self.now = end

    def _within(self, seconds: float, rates: Rates, workers: Places, members: int) -> None:
        before = float(self.lag.sum())
        wanted = self.lag + rates * seconds
        places = np.where(workers < 0, members, workers)  # the last place is nobody's, who works nothing
        of_each = np.bincount(places, weights=wanted, minlength=members + 1)
        room = np.full(members + 1, self._capacity * seconds)
        room[members] = 0.0
        part = np.minimum(1.0, np.divide(room, of_each, out=np.ones_like(room), where=of_each > 0))
        self.lag = wanted * (1.0 - part[places])
        after = float(self.lag.sum())
        self.peak = max(self.peak, after)
        self.waited += seconds * (before + after) / 2
