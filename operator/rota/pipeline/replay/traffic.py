"""Fluid traffic model of one group: arrivals, consumption and lag of its queues, as continuous rates.

A replay uses it to estimate the lag that a group would have under another policy. A member consumes the arrivals and
lag of its queues, up to its capacity; beyond that, each queue gets the same fraction of its demand. The lag of a queue
without a consumer grows. The model has no messages, batches or timeouts.
"""

import numpy as np
from numpy.typing import NDArray

from rota.pipeline.replay.group_history import STEP_SECONDS, Rates

Indexes = NDArray[np.intp]
# Added before a time is rounded down to a step: a float just below the start of a step still belongs to that step.
ROUNDING_STEPS = 1e-6
RATE_STEPS = 12  # steps over which a rate is measured: one hour, as in the operator


class TrafficModel:
    """The lag of each queue of one group, advanced from step to step; a step is STEP_SECONDS of constant rates."""

    def __init__(self, arrivals: Rates, lag: Rates, begins: float, capacity: float) -> None:
        """Start with the given lag of each queue; `capacity`: messages a second that one member can consume."""
        self._arrivals = arrivals
        self._begins = begins
        self._capacity = capacity
        self.lag = lag.astype(float)
        self.total_lag = float(lag.sum())
        self.now = begins
        self.peak_lag = self.total_lag
        self.lag_seconds = 0.0  # integral of the lag over time: messages times seconds
        self._exists = np.ones(arrivals.shape[1])  # 1 for each queue that exists
        self._first_step = np.zeros(arrivals.shape[1], dtype=np.intp)  # the first full step of each queue
        # By step and queue: the sum of the rates of all steps before it.
        self._rate_sums = np.cumsum(np.vstack([np.zeros_like(arrivals[:1]), arrivals]), axis=0)

    def step_at(self, at: float) -> int:
        """Return the number of the step that contains a time; times outside the history get the nearest step."""
        return min(max(int((at - self._begins) / STEP_SECONDS + ROUNDING_STEPS), 0), len(self._arrivals) - 1)

    @property
    def step_end(self) -> float:
        """The end of the present step; infinite after the history's end, where the rates of the last step remain."""
        end = self._begins + STEP_SECONDS * (self.step_at(self.now) + 1)
        return end if end > self.now else float("inf")

    def arrival_rates(self, at: float) -> Rates:
        """Return the arrivals of each queue at a time, in messages a second."""
        rates: Rates = self._arrivals[self.step_at(at)] * self._exists
        return rates

    def set_queues(self, present: NDArray[np.bool_]) -> None:
        """Set the queues that exist from now on; the lag of all other queues is dropped."""
        self._first_step[present & (self._exists == 0)] = int(np.ceil((self.now - self._begins) / STEP_SECONDS))
        self._exists = present.astype(float)
        self.lag *= self._exists
        self.total_lag = float(self.lag.sum())

    def mean_rates(self, at: float) -> Rates:
        """Return each queue's mean rate in the last hour, or since it was added; NaN until its first full step ends."""
        until = self.step_at(at)
        since = np.maximum(self._first_step, until - RATE_STEPS)
        # `since` differs between queues, so each queue has a row of its own in the second term.
        summed_rates = self._rate_sums[until] - self._rate_sums[since, np.arange(len(since))]
        rates: Rates = np.divide(summed_rates, until - since, out=np.full(len(since), np.nan), where=until > since)
        return rates

    def advance_to(self, until: float, consumers: Indexes, member_count: int) -> None:
        """Advance to `until`; `consumers`: by queue the number of the member that consumes it, or -1."""
        while self.now < until:
            end = min(until, self.step_end)
            self._advance_in_step(end - self.now, self.arrival_rates(self.now), consumers, member_count)
            self.now = end

    def _advance_in_step(self, seconds: float, rates: Rates, consumers: Indexes, member_count: int) -> None:
        demand = self.lag + rates * seconds
        # By member; index 0 collects the queues without a consumer (-1), which have no capacity.
        member_demand = np.bincount(consumers + 1, weights=demand, minlength=member_count + 1)
        capacity = self._capacity * seconds
        if member_demand[1:].max(initial=0.0) <= capacity:  # every member consumes all of its demand
            self.lag = np.where(consumers < 0, demand, 0.0)
        else:
            consumed_fraction = capacity / np.maximum(member_demand, capacity)
            consumed_fraction[0] = 0.0
            self.lag = demand * (1.0 - consumed_fraction[consumers + 1])
        lag_at_start = self.total_lag
        self.total_lag = float(self.lag.sum())
        self.peak_lag = max(self.peak_lag, self.total_lag)
        self.lag_seconds += seconds * (lag_at_start + self.total_lag) / 2
