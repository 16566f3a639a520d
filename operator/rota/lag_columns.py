"""Vectorized `rota.lag`: the lags, lag states and delays of many queues at once, each as `rota.lag` computes it alone.

Samples of any number of queues are rows of columns; each row has the index of the same queue's previous sample. So
samples of one time need not be adjacent, and queues may come and go. The loops below go back one sample at a time for
all queues at once; a queue with a result is removed from the loop.

There are two kinds of indices. A *row* is the index of a sample in the columns. `wanted_rows` are the rows with wanted
results, such as the newest of each queue; a *slot* is an index in `wanted_rows`, and so in the results and in each
array with one element per wanted row. With `wanted_rows = [7, 9]`, slot 0 is for the queue of row 7, at its time.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.lag import MIN_HISTORY_SECONDS, LagState

NOT_COMMITTED = -1  # in a column of offsets: the group has committed nothing
OFFSET_UNKNOWN = -2  # in a column of offsets: the offset could not be read
# The start of a queue without a committed offset.
START_LATEST = 0
START_EARLIEST = 1
START_UNKNOWN = 2
START_CODES = {"Latest": START_LATEST, "Earliest": START_EARLIEST}  # other positions: unknown
LAG_UNKNOWN = np.iinfo(np.int64).min
LAG_STATES = (None, *LagState)  # a lag state's code is its index in this tuple
NO_STATE = 0  # the code of None
_STATE_CODES = {state: code for code, state in enumerate(LAG_STATES)}
_MAX_INT64 = np.iinfo(np.int64).max

Offsets = NDArray[np.int64]
RowIndices = NDArray[np.intp]


class OffsetColumns(NamedTuple):
    """Samples of queues, in columns."""

    sampled_at: NDArray[np.float64]
    min_offset: Offsets
    max_offset: Offsets
    committed_offset: Offsets  # or NOT_COMMITTED, or OFFSET_UNKNOWN: the row's lag is unknown
    has_owner: NDArray[np.bool_]
    previous_row: RowIndices  # index of the same queue's previous sample; -1: none
    start_code: NDArray[np.int8]


class SampleWindow(NamedTuple):
    """The samples from which a lag state is computed.

    A sample counts if it is at most `always_within_seconds` old, or if it is one of the last `max_samples` and at most
    `max_age_seconds` old.
    """

    max_samples: int
    max_age_seconds: float = np.inf
    always_within_seconds: float = 0.0


def compute_lags(samples: OffsetColumns) -> Offsets:
    """Return by how many messages the group is behind at each sample, or `LAG_UNKNOWN`."""
    committed = samples.committed_offset
    stored = samples.max_offset - samples.min_offset
    is_uncommitted = committed == NOT_COMMITTED
    is_within_queue = (committed >= 0) & (committed <= samples.max_offset)
    cases: list[tuple[NDArray[np.bool_], Offsets | int]] = [  # the first condition that holds counts
        (stored < 0, LAG_UNKNOWN),
        (is_within_queue, samples.max_offset - np.maximum(committed, samples.min_offset)),
        (is_uncommitted & ((samples.start_code == START_LATEST) | (stored == 0)), 0),
        (is_uncommitted & (samples.start_code == START_EARLIEST), stored),
    ]
    conditions, values = zip(*cases, strict=True)
    return np.select(conditions, values, LAG_UNKNOWN)


class _Movement(NamedTuple):
    """How the queues' offsets and lags moved over the samples in their windows: one element per slot.

    Samples without a lag show no movement.
    """

    sample_count: NDArray[np.int64]
    newest_offset: Offsets  # the last committed offset; -1: none
    highest_offset: Offsets  # of the committed offsets; -1: none
    lowest_offset: Offsets  # of the committed offsets; _MAX_INT64: none
    oldest_lag: Offsets
    lag_fell: NDArray[np.bool_]  # from one sample to the next
    was_at_end: NDArray[np.bool_]  # without lag in some sample
    had_owner: NDArray[np.bool_]  # in some sample


def compute_lag_states(
    samples: OffsetColumns, lags: Offsets, wanted_rows: RowIndices, window: SampleWindow
) -> NDArray[np.int8]:
    """Return the lag state at the wanted rows, each from its own and earlier samples; `lags`: from `compute_lags`."""
    moved = _measure_movement(samples, lags, wanted_rows, window)
    has_committed = moved.highest_offset >= 0
    is_still = ~has_committed | (moved.lowest_offset == moved.highest_offset)
    is_unknown = (moved.sample_count < 2) | (lags[wanted_rows] == LAG_UNKNOWN)  # noqa: PLR2004 - a movement has two ends
    states = [  # the first condition that holds counts, as in `rota.lag.compute_lag_state`
        (is_unknown, NO_STATE),
        (moved.newest_offset < moved.highest_offset, _STATE_CODES[LagState.REWOUND]),
        (moved.was_at_end & (has_committed | moved.had_owner), _STATE_CODES[LagState.KEEPING_UP]),
        (moved.was_at_end, NO_STATE),
        (is_still & moved.had_owner, _STATE_CODES[LagState.STALLED]),
        (is_still, _STATE_CODES[LagState.STOPPED]),
        ((lags[wanted_rows] > moved.oldest_lag) & ~moved.lag_fell, _STATE_CODES[LagState.SLOW]),
    ]
    conditions, codes = zip(*states, strict=True)
    lag_states: NDArray[np.int8] = np.select(conditions, codes, _STATE_CODES[LagState.KEEPING_UP]).astype(np.int8)
    return lag_states


def _measure_movement(
    samples: OffsetColumns, lags: Offsets, wanted_rows: RowIndices, window: SampleWindow
) -> _Movement:
    """Go back from the wanted rows, one sample at a time, as long as samples are in a queue's window."""
    count = len(wanted_rows)
    moved = _Movement(
        sample_count=np.zeros(count, np.int64),
        newest_offset=np.full(count, -1),
        highest_offset=np.full(count, -1),
        lowest_offset=np.full(count, _MAX_INT64),
        oldest_lag=np.full(count, _MAX_INT64),
        lag_fell=np.zeros(count, np.bool_),
        was_at_end=np.zeros(count, np.bool_),
        had_owner=np.zeros(count, np.bool_),
    )
    slots = np.arange(count)  # of the queues whose windows have not ended
    rows = wanted_rows  # of the same queues: the present sample
    samples_taken = 0
    while len(slots):
        age = samples.sampled_at[wanted_rows[slots]] - samples.sampled_at[rows]
        is_inside = (age <= window.always_within_seconds) | (
            (age <= window.max_age_seconds) & (samples_taken < window.max_samples)
        )
        slots = slots[is_inside]
        rows = rows[is_inside]
        has_lag = lags[rows] != LAG_UNKNOWN
        _add_earlier_samples(moved, slots[has_lag], rows[has_lag], samples, lags)
        samples_taken += 1
        rows = samples.previous_row[rows]
        slots = slots[rows >= 0]
        rows = rows[rows >= 0]
    return moved


def _add_earlier_samples(
    moved: _Movement, slots: RowIndices, rows: RowIndices, samples: OffsetColumns, lags: Offsets
) -> None:
    """Extend each slot's movement by its next older sample, which is in `rows`."""
    lag = lags[rows]
    committed = samples.committed_offset[rows]
    has_committed = committed >= 0
    is_newest_offset = (moved.newest_offset[slots] < 0) & has_committed
    lowest = moved.lowest_offset[slots]
    moved.was_at_end[slots] |= lag == 0
    moved.had_owner[slots] |= samples.has_owner[rows]
    moved.lag_fell[slots] |= lag > moved.oldest_lag[slots]  # `oldest_lag` is still that of the sample after this one
    moved.oldest_lag[slots] = lag
    moved.newest_offset[slots[is_newest_offset]] = committed[is_newest_offset]
    moved.highest_offset[slots] = np.maximum(moved.highest_offset[slots], committed)
    moved.lowest_offset[slots] = np.where(has_committed, np.minimum(lowest, committed), lowest)
    moved.sample_count[slots] += 1


def compute_delays(
    samples: OffsetColumns, lags: Offsets, wanted_rows: RowIndices, max_age_seconds: float = np.inf
) -> NDArray[np.float64]:
    """Return for how many seconds the oldest unread message has waited at the wanted rows, or NaN.

    Samples that are then older than `max_age_seconds` are ignored, so that the length of the history does not matter.
    A queue is finished at the first sample whose end is at or below its next offset (the message arrived right after
    it), or where its history ends.
    """
    lag = lags[wanted_rows]
    committed = samples.committed_offset[wanted_rows]
    now = samples.sampled_at[wanted_rows]
    next_offset = np.maximum(committed, samples.min_offset[wanted_rows])
    # By slot: time and end offset of the sample that follows, in time, the one in `rows`.
    later_at = now.copy()
    later_end = samples.max_offset[wanted_rows].copy()
    result = np.where(lag == 0, 0.0, np.nan)
    slots = np.flatnonzero((lag != LAG_UNKNOWN) & (lag != 0) & (committed >= 0))
    rows = samples.previous_row[wanted_rows[slots]]
    while len(slots):
        # 1. Queues whose history ends: at their first sample, at the maximum age, or at a sample of a deleted topic,
        # which has a higher end than the later sample.
        has_no_sample = rows < 0  # row -1 reads an unrelated sample below, but then this condition holds already
        is_too_old = now[slots] - samples.sampled_at[rows] > max_age_seconds
        is_readable = samples.committed_offset[rows] != OFFSET_UNKNOWN
        is_before_recreation = is_readable & (samples.max_offset[rows] > later_end[slots])
        is_finished = has_no_sample | is_too_old | is_before_recreation
        finished = slots[is_finished]
        covered = now[finished] - later_at[finished]
        # The message was in the queue at the oldest sample already, so it has waited at least for the history's length.
        is_bounded = (next_offset[finished] < later_end[finished]) & (covered >= MIN_HISTORY_SECONDS)
        result[finished[is_bounded]] = covered[is_bounded]
        slots = slots[~is_finished]
        rows = rows[~is_finished]
        # 2. Queues whose message arrived between this sample and the later one.
        is_known = samples.committed_offset[rows] != OFFSET_UNKNOWN
        at = samples.sampled_at[rows]
        end = samples.max_offset[rows]
        target = next_offset[slots]
        has_arrived = is_known & (end <= target) & (target < later_end[slots])
        # The messages from offset `end` on arrived between the two samples, evenly. The one at `target` arrived after
        # this part of the time:
        part = (target - end + 1)[has_arrived] / (later_end[slots] - end)[has_arrived]
        arrived_at = at[has_arrived] + part * (later_at[slots] - at)[has_arrived]
        result[slots[has_arrived]] = now[slots[has_arrived]] - arrived_at
        later_at[slots[is_known]] = at[is_known]
        later_end[slots[is_known]] = end[is_known]
        slots = slots[~has_arrived]
        rows = samples.previous_row[rows[~has_arrived]]
    return result
