"""Tracks which member of a replay consumes each queue, and what the changes cost: pauses and duplicates.

The consumer of a queue may differ from its owner: a member consumes only when it has obeyed the assignment.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from rota.model import Queue
from rota.pipeline.replay.group_history import QueueMask, index_queues
from rota.pipeline.replay.simulated_members import SimulatedMember
from rota.pipeline.replay.traffic import TrafficModel

# Messages of this many last seconds are in flight: their member has started, but not committed them.
IN_FLIGHT_SECONDS = 1.0


class ConsumerTracker:
    """The consumer of each queue, the pauses between two consumers, and the duplicates of unclean takeovers."""

    def __init__(self, queues: Sequence[Queue], traffic: TrafficModel) -> None:
        self.consumers = np.full(len(queues), -1)  # by queue the number of the member that consumes it; -1: none
        self.exists = np.zeros(len(queues), dtype=bool)
        self.duplicates = 0.0
        self._traffic = traffic
        self._index_of_queue = index_queues(queues)
        self._paused_since = np.full(len(queues), np.nan)  # start of each queue's present pause; NaN: no pause
        self._ended_pause_seconds: list[float] = []

    def update_consumer(self, member: SimulatedMember) -> None:
        """Let a member consume exactly the queues that it holds; count pauses that end and duplicates."""
        is_held = np.zeros(len(self.consumers), dtype=bool)
        is_held[self._indexes_of(member.held)] = True
        is_consumed = self.consumers == member.index
        if np.array_equal(is_held, is_consumed):
            return
        self._pause_queues(is_consumed & ~is_held)
        is_new = is_held & ~is_consumed
        # Another member still consumes the queue. Since it does not drain, its messages in flight are delivered again.
        is_taken_over = is_new & (self.consumers >= 0)
        self._count_duplicates(is_taken_over)
        is_resumed = is_new & ~np.isnan(self._paused_since)  # a queue that is taken over has no pause
        self._ended_pause_seconds += self._seconds_paused(is_resumed)
        self._paused_since[is_new] = np.nan
        self.consumers[is_new] = member.index

    def _indexes_of(self, queues: Iterable[Queue]) -> list[int]:
        return [self._index_of_queue[queue] for queue in queues if queue in self._index_of_queue]

    def stop_consumer(self, member: SimulatedMember, *, suddenly: bool = False) -> None:
        """Let a member stop consuming; if it stops suddenly, its messages in flight count as duplicates."""
        is_consumed = self.consumers == member.index
        if suddenly:
            self._count_duplicates(is_consumed)
        self._pause_queues(is_consumed)

    def _pause_queues(self, mask: QueueMask) -> None:
        self.consumers[mask] = -1
        self._paused_since[mask] = self._traffic.now

    def _count_duplicates(self, mask: QueueMask) -> None:
        self.duplicates += float(self._traffic.arrival_rates(self._traffic.now)[mask].sum()) * IN_FLIGHT_SECONDS

    def set_queues(self, queues: Iterable[Queue]) -> None:
        """Set the queues that exist; pauses of all other queues are dropped."""
        self.exists[:] = False
        self.exists[self._indexes_of(queues)] = True
        self._paused_since[~self.exists] = np.nan
        is_new = self.exists & (self.consumers < 0) & np.isnan(self._paused_since)
        self._paused_since[is_new] = self._traffic.now

    def pause_seconds(self) -> list[float]:
        """Return the length of each pause up to now."""
        is_paused = self.exists & ~np.isnan(self._paused_since)
        return self._ended_pause_seconds + self._seconds_paused(is_paused)

    def _seconds_paused(self, mask: QueueMask) -> list[float]:
        seconds: list[float] = (self._traffic.now - self._paused_since[mask]).tolist()
        return seconds
