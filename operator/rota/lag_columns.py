"""Vectorized `rota.lag`: the lags, lag states and delays of many queues at once, each as `rota.lag` computes it alone.

Samples of any number of queues are rows of columns; each row has the index of the same queue's previous sample. So
samples of one time need not be adjacent, and queues may come and go. All queues step back in time together, and a queue
with a known result drops out.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.lag import MIN_HISTORY_SECONDS, Judgement

NEVER, UNKNOWN = -1, -2  # in columns of offsets: nothing is committed; the offset could not be read
LATEST, EARLIEST, START_UNKNOWN = 0, 1, 2  # start of a queue without a committed offset
BEGINS = {"Latest": LATEST, "Earliest": EARLIEST}  # other positions: unknown
NO_LAG = np.iinfo(np.int64).min  # the lag is unknown
VERDICTS = (None, *Judgement)  # lag states are indices into this tuple
_PLACE = {verdict: place for place, verdict in enumerate(VERDICTS)}
_MOST, _LEAST = np.iinfo(np.int64).max, np.iinfo(np.int64).min

Offsets = NDArray[np.int64]
Places = NDArray[np.intp]


class OffsetColumns(NamedTuple):
    """Samples of queues, in columns."""

    at: NDArray[np.float64]
    first: Offsets
    last: Offsets
    committed: Offsets  # or `NEVER`, or `UNKNOWN`: the row does not count as a sample
    worked: NDArray[np.bool_]
    before: Places  # index of the same queue's previous sample; -1: none
    begins: NDArray[np.int8]


class Window(NamedTuple):
    """The samples that judge a queue: the last `looks` that are not older than `old`, and all up to the age `young`."""

    looks: int
    old: float = np.inf  # seconds
    young: float = 0.0


def behind(rows: OffsetColumns) -> Offsets:
    """Return by how many messages the group is behind at each sample, or `NO_LAG`."""
    stored = rows.last - rows.first
    lag = np.where(rows.committed > rows.last, NO_LAG, rows.last - np.maximum(rows.committed, rows.first))
    initial = np.where((rows.begins == LATEST) | (stored == 0), 0, np.where(rows.begins == EARLIEST, stored, NO_LAG))
    result = np.where(rows.committed >= 0, lag, np.where(rows.committed == NEVER, initial, NO_LAG))
    return np.where(stored < 0, NO_LAG, result)


def verdicts(samples: OffsetColumns, lags: Offsets, ends: Places, window: Window) -> NDArray[np.int8]:
    """Return the lag state at the samples `ends`, each from it and earlier samples; `lags` comes from `behind`."""
    count, newest = np.zeros(len(ends), np.int64), np.full(len(ends), -1)
    highest, lowest = np.full(len(ends), -1), np.full(len(ends), _MOST)
    newest_lag, oldest_lag = np.full(len(ends), NO_LAG), np.full(len(ends), _MOST)
    at_end, worked, falls = (np.zeros(len(ends), np.bool_) for _ in range(3))
    rows, places, taken = np.arange(len(ends)), ends, 0
    while len(rows):
        age = samples.at[ends[rows]] - samples.at[places]
        inside = (age <= window.young) | ((age <= window.old) & (taken < window.looks))
        rows, places = rows[inside], places[inside]
        has_lag = lags[places] != NO_LAG
        queues, points = rows[has_lag], places[has_lag]
        lag, committed = lags[points], samples.committed[points]
        at_end[queues] |= lag == 0
        worked[queues] |= samples.worked[points]
        falls[queues] |= lag > oldest_lag[queues]
        oldest_lag[queues] = lag
        newest_lag[queues] = np.where(count[queues] == 0, lag, newest_lag[queues])
        newest[queues] = np.where((newest[queues] < 0) & (committed >= 0), committed, newest[queues])
        highest[queues] = np.maximum(highest[queues], committed)
        lowest[queues] = np.where(committed >= 0, np.minimum(lowest[queues], committed), lowest[queues])
        count[queues] += 1
        taken += 1
        places = samples.before[places]
        rows, places = rows[places >= 0], places[places >= 0]
    still = np.where(worked, _PLACE[Judgement.STALLED], _PLACE[Judgement.STOPPED])
    moving = np.where((newest_lag > oldest_lag) & ~falls, _PLACE[Judgement.SLOW], _PLACE[Judgement.KEEPING_UP])
    result = np.where(lowest >= highest, still, moving)
    result = np.where(at_end, np.where(worked | (highest >= 0), _PLACE[Judgement.KEEPING_UP], 0), result)
    result = np.where(newest < highest, _PLACE[Judgement.REWOUND], result)
    unknown = (count < 2) | (lags[ends] == NO_LAG)  # noqa: PLR2004 - a movement has two ends
    return np.where(unknown, 0, result).astype(np.int8)


def delays(samples: OffsetColumns, lags: Offsets, ends: Places, old: float = np.inf) -> NDArray[np.float64]:
    """Return for how many seconds the oldest unread message has waited at the samples `ends`, or NaN.

    Samples that are older than `old` seconds by then are ignored, so that the length of the history does not matter.
    """
    lag, committed = lags[ends], samples.committed[ends]
    result = np.where(lag == 0, 0.0, np.nan)
    rows = np.flatnonzero((lag != NO_LAG) & (lag != 0) & (committed >= 0))
    now = samples.at[ends]
    next_offset = np.maximum(committed, samples.first[ends])
    later_at, later_last = now.copy(), samples.last[ends].copy()
    places = samples.before[ends[rows]]
    while len(rows):
        # A queue's history starts at its first sample, or where the end fell: earlier samples are of a deleted topic.
        over = (places < 0) | (now[rows] - samples.at[places] > old)
        over |= (samples.committed[places] != UNKNOWN) & (samples.last[places] > later_last[rows])
        finished = rows[over]
        covered = now[finished] - later_at[finished]
        bounded = (next_offset[finished] < later_last[finished]) & (covered >= MIN_HISTORY_SECONDS)
        result[finished[bounded]] = covered[bounded]
        rows, places = rows[~over], places[~over]
        sampled = samples.committed[places] != UNKNOWN
        at, last, target, later = samples.at[places], samples.last[places], next_offset[rows], later_last[rows]
        crossed = sampled & (last <= target) & (target < later)
        part = (target[crossed] - last[crossed] + 1) / (later[crossed] - last[crossed])
        result[rows[crossed]] = now[rows[crossed]] - (at[crossed] + part * (later_at[rows[crossed]] - at[crossed]))
        later_at[rows[sampled]], later_last[rows[sampled]] = at[sampled], last[sampled]
        rows, places = rows[~crossed], samples.before[places[~crossed]]
    return result
