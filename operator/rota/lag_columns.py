"""Vectorized `rota.lag`: the lags, lag states and delays of many queues at once, each as `rota.lag` computes it alone.

Samples of any number of queues are rows of columns; each row has the index of the same queue's previous sample. So
samples of one time need not be adjacent, and queues may come and go. All queues step back in time together, and a queue
with a known result drops out.
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
NO_LAG = np.iinfo(np.int64).min  # the lag is unknown
LAG_STATES = (None, *LagState)  # lag states are indices into this tuple
_STATE_CODES = {state: code for code, state in enumerate(LAG_STATES)}
_MAX_INT64 = np.iinfo(np.int64).max

Offsets = NDArray[np.int64]
RowIndices = NDArray[np.intp]


class OffsetColumns(NamedTuple):
    """Samples of queues, in columns."""

    sampled_at: NDArray[np.float64]
    min_offset: Offsets
    max_offset: Offsets
    committed_offset: Offsets  # or NOT_COMMITTED, or OFFSET_UNKNOWN: the row does not count as a sample
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
    """Return by how many messages the group is behind at each sample, or `NO_LAG`."""
    stored = samples.max_offset - samples.min_offset
    lag = np.where(
        samples.committed_offset > samples.max_offset,
        NO_LAG,
        samples.max_offset - np.maximum(samples.committed_offset, samples.min_offset),
    )
    initial = np.where(
        (samples.start_code == START_LATEST) | (stored == 0),
        0,
        np.where(samples.start_code == START_EARLIEST, stored, NO_LAG),
    )
    result = np.where(
        samples.committed_offset >= 0, lag, np.where(samples.committed_offset == NOT_COMMITTED, initial, NO_LAG)
    )
    return np.where(stored < 0, NO_LAG, result)


def compute_lag_states(
    samples: OffsetColumns, lags: Offsets, judged_rows: RowIndices, window: SampleWindow
) -> NDArray[np.int8]:
    """Return the lag state at the judged rows, each from its own and earlier samples; `lags`: from `compute_lags`."""
    count = np.zeros(len(judged_rows), np.int64)
    newest = np.full(len(judged_rows), -1)
    highest = np.full(len(judged_rows), -1)
    lowest = np.full(len(judged_rows), _MAX_INT64)
    newest_lag = np.full(len(judged_rows), NO_LAG)
    oldest_lag = np.full(len(judged_rows), _MAX_INT64)
    at_end, had_owner, falls = (np.zeros(len(judged_rows), np.bool_) for _ in range(3))
    rows = np.arange(len(judged_rows))
    sample_rows = judged_rows
    samples_taken = 0
    while len(rows):
        age = samples.sampled_at[judged_rows[rows]] - samples.sampled_at[sample_rows]
        inside = (age <= window.always_within_seconds) | (
            (age <= window.max_age_seconds) & (samples_taken < window.max_samples)
        )
        rows = rows[inside]
        sample_rows = sample_rows[inside]
        has_lag = lags[sample_rows] != NO_LAG
        queues = rows[has_lag]
        lag_rows = sample_rows[has_lag]
        lag = lags[lag_rows]
        committed = samples.committed_offset[lag_rows]
        at_end[queues] |= lag == 0
        had_owner[queues] |= samples.has_owner[lag_rows]
        falls[queues] |= lag > oldest_lag[queues]
        oldest_lag[queues] = lag
        newest_lag[queues] = np.where(count[queues] == 0, lag, newest_lag[queues])
        newest[queues] = np.where((newest[queues] < 0) & (committed >= 0), committed, newest[queues])
        highest[queues] = np.maximum(highest[queues], committed)
        lowest[queues] = np.where(committed >= 0, np.minimum(lowest[queues], committed), lowest[queues])
        count[queues] += 1
        samples_taken += 1
        sample_rows = samples.previous_row[sample_rows]
        rows = rows[sample_rows >= 0]
        sample_rows = sample_rows[sample_rows >= 0]
    still = np.where(had_owner, _STATE_CODES[LagState.STALLED], _STATE_CODES[LagState.STOPPED])
    moving = np.where(
        (newest_lag > oldest_lag) & ~falls, _STATE_CODES[LagState.SLOW], _STATE_CODES[LagState.KEEPING_UP]
    )
    result = np.where(lowest >= highest, still, moving)
    result = np.where(at_end, np.where(had_owner | (highest >= 0), _STATE_CODES[LagState.KEEPING_UP], 0), result)
    result = np.where(newest < highest, _STATE_CODES[LagState.REWOUND], result)
    unknown = (count < 2) | (lags[judged_rows] == NO_LAG)  # noqa: PLR2004 - a movement has two ends
    return np.where(unknown, 0, result).astype(np.int8)


def compute_delays(
    samples: OffsetColumns, lags: Offsets, judged_rows: RowIndices, max_age_seconds: float = np.inf
) -> NDArray[np.float64]:
    """Return for how many seconds the oldest unread message has waited at the judged rows, or NaN.

    Samples older than `max_age_seconds` by then are ignored, so that the length of the history does not matter.
    """
    lag = lags[judged_rows]
    committed = samples.committed_offset[judged_rows]
    result = np.where(lag == 0, 0.0, np.nan)
    rows = np.flatnonzero((lag != NO_LAG) & (lag != 0) & (committed >= 0))
    now = samples.sampled_at[judged_rows]
    next_offset = np.maximum(committed, samples.min_offset[judged_rows])
    later_at = now.copy()
    later_last = samples.max_offset[judged_rows].copy()
    sample_rows = samples.previous_row[judged_rows[rows]]
    while len(rows):
        # A queue's history starts at its first sample, or where the end fell: earlier samples are of a deleted topic.
        over = (sample_rows < 0) | (now[rows] - samples.sampled_at[sample_rows] > max_age_seconds)
        over |= (samples.committed_offset[sample_rows] != OFFSET_UNKNOWN) & (
            samples.max_offset[sample_rows] > later_last[rows]
        )
        finished = rows[over]
        covered = now[finished] - later_at[finished]
        bounded = (next_offset[finished] < later_last[finished]) & (covered >= MIN_HISTORY_SECONDS)
        result[finished[bounded]] = covered[bounded]
        rows = rows[~over]
        sample_rows = sample_rows[~over]
        sampled = samples.committed_offset[sample_rows] != OFFSET_UNKNOWN
        at = samples.sampled_at[sample_rows]
        last = samples.max_offset[sample_rows]
        target = next_offset[rows]
        later = later_last[rows]
        crossed = sampled & (last <= target) & (target < later)
        part = (target[crossed] - last[crossed] + 1) / (later[crossed] - last[crossed])
        result[rows[crossed]] = now[rows[crossed]] - (at[crossed] + part * (later_at[rows[crossed]] - at[crossed]))
        later_at[rows[sampled]] = at[sampled]
        later_last[rows[sampled]] = last[sampled]
        rows = rows[~crossed]
        sample_rows = samples.previous_row[sample_rows[~crossed]]
    return result
