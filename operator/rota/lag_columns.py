"""Vectorized `rota.lag`: the lags, lag states and delays of many queues at once, each as `rota.lag` computes it alone.

Samples of any number of queues are rows of columns; each row has the index of the same queue's previous sample. So
samples of one time need not be adjacent, and queues may come and go. All queues step back in time together, and one
with a known result drops out.

There are two kinds of indices. A *row* is the index of a sample in the columns. A *judged row* is one whose lag state
is wanted, such as each queue's newest; a *slot* is its index in `judged_rows`, in the results, and in each array with
one element per judged row.
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

    They are the last `max_samples` that are not older than `max_age_seconds`, and all within `always_within_seconds`.
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
    samples: OffsetColumns, lags: Offsets, judged_rows: RowIndices, window: SampleWindow
) -> NDArray[np.int8]:
    """Return the lag state at the judged rows, each from its own and earlier samples; `lags`: from `compute_lags`."""
    moved = _measure_movement(samples, lags, judged_rows, window)
    has_committed = moved.highest_offset >= 0
    is_still = ~has_committed | (moved.lowest_offset == moved.highest_offset)
    is_unknown = (moved.sample_count < 2) | (lags[judged_rows] == LAG_UNKNOWN)  # noqa: PLR2004 - a movement has two ends
    states = [  # the first condition that holds counts, as in `rota.lag.compute_lag_state`
        (is_unknown, NO_STATE),
        (moved.newest_offset < moved.highest_offset, _STATE_CODES[LagState.REWOUND]),
        (moved.was_at_end & (has_committed | moved.had_owner), _STATE_CODES[LagState.KEEPING_UP]),
        (moved.was_at_end, NO_STATE),
        (is_still & moved.had_owner, _STATE_CODES[LagState.STALLED]),
        (is_still, _STATE_CODES[LagState.STOPPED]),
        ((lags[judged_rows] > moved.oldest_lag) & ~moved.lag_fell, _STATE_CODES[LagState.SLOW]),
    ]
    conditions, codes = zip(*states, strict=True)
    lag_states: NDArray[np.int8] = np.select(conditions, codes, _STATE_CODES[LagState.KEEPING_UP]).astype(np.int8)
    return lag_states


def _measure_movement(
    samples: OffsetColumns, lags: Offsets, judged_rows: RowIndices, window: SampleWindow
) -> _Movement:
    """Go back from the judged rows, one sample at a time, as long as samples are in a queue's window."""
    count = len(judged_rows)
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
    rows = judged_rows  # of the same queues: the present sample
    samples_taken = 0
    while len(slots):
        age = samples.sampled_at[judged_rows[slots]] - samples.sampled_at[rows]
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
    """Add to each slot's movement the sample before those that were added."""
    lag = lags[rows]
    committed = samples.committed_offset[rows]
    has_committed = committed >= 0
    is_newest_offset = (moved.newest_offset[slots] < 0) & has_committed
    lowest = moved.lowest_offset[slots]
    moved.was_at_end[slots] |= lag == 0
    moved.had_owner[slots] |= samples.has_owner[rows]
    moved.lag_fell[slots] |= lag > moved.oldest_lag[slots]  # until now that is the lag of the next sample in time
    moved.oldest_lag[slots] = lag
    moved.newest_offset[slots[is_newest_offset]] = committed[is_newest_offset]
    moved.highest_offset[slots] = np.maximum(moved.highest_offset[slots], committed)
    moved.lowest_offset[slots] = np.where(has_committed, np.minimum(lowest, committed), lowest)
    moved.sample_count[slots] += 1


def compute_delays(
    samples: OffsetColumns, lags: Offsets, judged_rows: RowIndices, max_age_seconds: float = np.inf
) -> NDArray[np.float64]:
    """Return for how many seconds the oldest unread message has waited at the judged rows, or NaN.

    Samples older than `max_age_seconds` by then are ignored, so that the length of the history does not matter.
    """
    lag = lags[judged_rows]
    committed = samples.committed_offset[judged_rows]
    now = samples.sampled_at[judged_rows]
    next_offset = np.maximum(committed, samples.min_offset[judged_rows])
    # By slot: time and end offset of the sample that follows, in time, the one in `rows`.
    later_at = now.copy()
    later_end = samples.max_offset[judged_rows].copy()
    result = np.where(lag == 0, 0.0, np.nan)
    slots = np.flatnonzero((lag != LAG_UNKNOWN) & (lag != 0) & (committed >= 0))
    rows = samples.previous_row[judged_rows[slots]]
    while len(slots):
        # A queue's history starts at its first sample, or where the end fell: earlier samples are of a deleted topic.
        has_no_sample = rows < 0  # the next two conditions then read an unrelated sample, and do not matter
        is_too_old = now[slots] - samples.sampled_at[rows] > max_age_seconds
        end_fell = (samples.committed_offset[rows] != OFFSET_UNKNOWN) & (samples.max_offset[rows] > later_end[slots])
        is_finished = has_no_sample | is_too_old | end_fell
        finished = slots[is_finished]
        covered = now[finished] - later_at[finished]
        # The oldest sample has the message already, so it has waited at least since then.
        is_bounded = (next_offset[finished] < later_end[finished]) & (covered >= MIN_HISTORY_SECONDS)
        result[finished[is_bounded]] = covered[is_bounded]
        slots = slots[~is_finished]
        rows = rows[~is_finished]
        is_known = samples.committed_offset[rows] != OFFSET_UNKNOWN
        at = samples.sampled_at[rows]
        end = samples.max_offset[rows]
        target = next_offset[slots]
        has_arrived = is_known & (end <= target) & (target < later_end[slots])  # between this sample and the later one
        # Of the messages that arrived between the two, the one at offset `end` is number 1. The searched one, at
        # `target`, arrived after this part of the time:
        part = (target - end + 1)[has_arrived] / (later_end[slots] - end)[has_arrived]
        arrived_at = at[has_arrived] + part * (later_at[slots] - at)[has_arrived]
        result[slots[has_arrived]] = now[slots[has_arrived]] - arrived_at
        later_at[slots[is_known]] = at[is_known]
        later_end[slots[is_known]] = end[is_known]
        slots = slots[~has_arrived]
        rows = samples.previous_row[rows[~has_arrived]]
    return result
