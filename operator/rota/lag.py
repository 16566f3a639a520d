"""Lag, delay and lag state of one queue, computed alike by operator and pipeline.

The *end* of a queue is the offset that its next message will have (`max_offset`).

- An unknown lag is None, and never 0. For example, if the committed offset is above the end: the topic was recreated,
  or two broker responses do not match.
- A group that has committed nothing has the lag 0 if it is to start at the end, however many messages the queue holds.
- A message that was deleted before it was read no longer counts as lag.
- A lag state depends on how a queue's offsets moved over the last samples (a trend), so it needs no threshold.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from rota.model import Queue
from rota.spec import StartFrom

MIN_HISTORY_SECONDS = 120.0  # a history of this length or longer is used as a lower bound of the delay


class OffsetSample(NamedTuple):
    """One sample of a queue. The committed offset is requested before the end, so that it is not above the end."""

    sampled_at: float
    min_offset: int
    max_offset: int  # the offset that the next message will have
    committed_offset: int | None  # None: the group has committed nothing
    has_owner: bool = True  # whether some member owned the queue

    def lag(self, start_from: StartFrom) -> int | None:
        """Return by how many messages the group is behind; None if that is unknown."""
        stored = self.max_offset - self.min_offset
        if stored < 0:  # the end is before the beginning: the broker's response is inconsistent
            return None
        if self.committed_offset is None:
            if not stored or start_from.position == "Latest":  # an empty queue has no lag, whatever the start position
                return 0
            return stored if start_from.position == "Earliest" else None
        if self.committed_offset > self.max_offset:
            return None
        return self.max_offset - max(self.committed_offset, self.min_offset)


class LagState(StrEnum):
    """The lag state of a queue, as its history shows it."""

    KEEPING_UP = "KeepingUp"
    SLOW = "Slow"  # a member consumes it, and the lag grows
    STALLED = "Stalled"  # a member owns it, and the offset does not move
    STOPPED = "Stopped"  # no member owns it, the offset does not move, and messages remain
    REWOUND = "Rewound"  # its offset went back, and has not reached its previous value


def compute_lag_state(samples: Sequence[OffsetSample], start_from: StartFrom) -> LagState | None:
    """Return the lag state from samples in order of time.

    None if fewer than two samples have a known lag, or if the lag of the last sample is unknown.
    """
    measured = [(sample, lag) for sample in samples if (lag := sample.lag(start_from)) is not None]
    if len(measured) < 2 or measured[-1][0] is not samples[-1]:  # noqa: PLR2004 - a movement has two ends
        return None
    lags = [lag for _, lag in measured]
    offsets = [sample.committed_offset for sample, _ in measured if sample.committed_offset is not None]
    if offsets and offsets[-1] < max(offsets):
        return LagState.REWOUND
    had_owner = any(sample.has_owner for sample, _ in measured)
    if 0 in lags:
        # None: the lag was 0 only because the group never committed and no member owned the queue.
        return LagState.KEEPING_UP if offsets or had_owner else None
    if len({*offsets}) <= 1:
        return LagState.STALLED if had_owner else LagState.STOPPED
    return LagState.SLOW if _is_growing(lags) else LagState.KEEPING_UP


def compute_delay(samples: Sequence[OffsetSample], start_from: StartFrom) -> float | None:
    """Return for how many seconds the oldest unread message has waited; None if that is unknown.

    - The message arrived between two samples: the last one whose end is at or below the group's offset, and the next
      one. Arrivals between the two are taken to be even.
    - A message that is in the first sample already has waited at least since then: this time is returned if it is
      MIN_HISTORY_SECONDS or more.
    - An end that is lower than the one before shows a recreated topic: earlier samples are ignored.
    """
    samples = samples[_first_after_recreation(samples) :]
    if not samples or (lag := samples[-1].lag(start_from)) is None:
        return None
    now = samples[-1]
    if not lag:
        return 0.0
    if now.committed_offset is None:
        return None
    next_offset = max(now.committed_offset, now.min_offset)
    for earlier, later in reversed([*pairwise(samples)]):
        if earlier.max_offset <= next_offset < later.max_offset:
            # The messages from offset `earlier.max_offset` on arrived between the two samples. The one at `next_offset`
            # arrived after this part of the time:
            part = (next_offset - earlier.max_offset + 1) / (later.max_offset - earlier.max_offset)
            return now.sampled_at - (earlier.sampled_at + part * (later.sampled_at - earlier.sampled_at))
    covered = now.sampled_at - samples[0].sampled_at
    return covered if next_offset < samples[0].max_offset and covered >= MIN_HISTORY_SECONDS else None


def lowest_offsets(member_offsets: Sequence[Mapping[Queue, int | None] | None]) -> dict[Queue, int]:
    """Return each queue's lowest offset over the members of a broadcasting group, if all of them report that queue."""
    reported = [member for member in member_offsets if member is not None]
    if not reported or len(reported) < len(member_offsets):
        return {}
    lowest: dict[Queue, int] = {}
    for queue in reported[0]:
        offsets = [offset for member in reported if (offset := member.get(queue)) is not None]
        if len(offsets) == len(reported):
            lowest[queue] = min(offsets)
    return lowest


def _first_after_recreation(samples: Sequence[OffsetSample]) -> int:
    """Return the index of the first sample of the present topic, which may have been recreated."""
    first = 0
    for index, (earlier, later) in enumerate(pairwise(samples), 1):
        if later.max_offset < earlier.max_offset:
            first = index
    return first


def _is_growing(lags: Sequence[int]) -> bool:
    """Whether the lag grew, and never shrank."""
    return lags[-1] > lags[0] and all(earlier <= later for earlier, later in pairwise(lags))
