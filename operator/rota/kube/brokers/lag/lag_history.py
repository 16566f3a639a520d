"""History of a group's offset samples on the queues of one topic and broker, and the lag computed from them.

Samples are kept in columns, as there may be 100,000 queues. The *end* of a queue is its max_offset.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rota.lag import MIN_HISTORY_SECONDS, LagState, OffsetSample, compute_delay, compute_lag_state
from rota.lag_columns import (
    LAG_STATES,
    LAG_UNKNOWN,
    NOT_COMMITTED,
    OFFSET_UNKNOWN,
    START_CODES,
    START_UNKNOWN,
    OffsetColumns,
    Offsets,
    RowIndices,
    SampleWindow,
    compute_delays,
    compute_lag_states,
    compute_lags,
)
from rota.spec import StartFrom

MAX_SAMPLES = 10  # newest samples, which determine a queue's lag state
# Of older samples only the ends are kept: they date a message's arrival, and give the incoming rate over an hour.
MAX_OLDER_SAMPLES = 14
OLDER_INTERVAL_SECONDS = 240.0  # between two older samples; the samples in between are dropped
VECTORIZE_FROM_QUEUES = 32  # from this number on, computing all queues at once with numpy is faster

_MAX_OFFSET = np.iinfo(np.int64).max


class QueueSample(Struct, frozen=True, gc=False):
    """One sample of one queue."""

    min_offset: int
    max_offset: int
    committed: int | None  # None: the group never committed
    is_known: bool = True  # whether `committed` is known

    @property
    def is_empty(self) -> bool:
        """Whether the queue holds no message."""
        return self.min_offset == self.max_offset

    @property
    def committed_code(self) -> int:
        """The committed offset as a column of offsets has it: NOT_COMMITTED or OFFSET_UNKNOWN instead of None."""
        if not self.is_known:
            return OFFSET_UNKNOWN
        return NOT_COMMITTED if self.committed is None else self.committed


class QueueLag(NamedTuple):
    """The state of one queue; None: not known."""

    min_offset: int | None = None
    max_offset: int | None = None
    committed: int | None = None
    lag: int | None = None
    delay: float | None = None
    lag_state: LagState | None = None
    incoming_rate: float | None = None  # incoming messages a second
    consumed_rate: float | None = None  # consumed messages a second


UNKNOWN_QUEUE_LAG = QueueLag()


class _SampleColumns(NamedTuple):
    """One sample of all queues: each column has one element per queue."""

    at: float  # on the loop's clock
    min_offsets: Offsets
    max_offsets: Offsets
    committed: Offsets
    has_consumer: NDArray[np.bool_]

    @staticmethod
    def of_ends(at: float, max_offsets: Offsets) -> "_SampleColumns":
        """Return an older sample, of which only the ends were kept; only delays are computed from it.

        The other columns are placeholders: NOT_COMMITTED, because samples with OFFSET_UNKNOWN are left out.
        """
        committed = np.where(max_offsets < 0, OFFSET_UNKNOWN, NOT_COMMITTED)
        return _SampleColumns(at, max_offsets, max_offsets, committed, np.zeros(len(max_offsets), np.bool_))

    def select(self, indexes: RowIndices) -> "_SampleColumns":
        """Return the sample of the queues at these indexes.

        An index equal to the number of queues stands for a new queue: its offsets are OFFSET_UNKNOWN.
        """
        return _SampleColumns(
            self.at,
            _select(self.min_offsets, indexes),
            _select(self.max_offsets, indexes),
            _select(self.committed, indexes),
            np.append(self.has_consumer, False)[indexes],
        )


def _select(offsets: Offsets, indexes: RowIndices) -> Offsets:
    return np.append(offsets, OFFSET_UNKNOWN)[indexes]


class _SampleTable(NamedTuple):
    """Samples in order of time: in each array but `at`, a row is a sample and a column is a queue."""

    at: NDArray[np.float64]
    min_offsets: Offsets
    max_offsets: Offsets
    committed: Offsets
    has_consumer: NDArray[np.bool_]

    @staticmethod
    def of(samples: Sequence[_SampleColumns]) -> "_SampleTable":
        return _SampleTable(*map(np.array, zip(*samples, strict=True)))


class _ComputedLag(NamedTuple):
    """What a queue's samples show; None: not known."""

    lag: int | None
    delay: float | None
    lag_state: LagState | None


_CAUGHT_UP = _ComputedLag(0, 0.0, LagState.KEEPING_UP)
_UNKNOWN = _ComputedLag(None, None, None)


class LagHistory:
    """The last samples of a topic's queues."""

    def __init__(self, vectorize_from: int = VECTORIZE_FROM_QUEUES) -> None:
        """Compute the lag of fewer than `vectorize_from` queues one by one, of more queues all at once."""
        self._vectorize_from = vectorize_from
        self._ids: tuple[int, ...] = ()
        self._samples: list[_SampleColumns] = []
        self._older_ends: list[tuple[float, Offsets]] = []  # time and end offsets of each older sample

    def add_sample(self, at: float, samples: Mapping[int, QueueSample], consumed: frozenset[int]) -> None:
        """Add a sample of all current queues; `consumed` are the numbers of the queues that have a consumer."""
        ids = tuple(sorted(samples))
        if ids != self._ids:
            self._set_queues(ids)
        rows = [samples[number] for number in ids]
        sample = _SampleColumns(
            at,
            np.array([row.min_offset for row in rows], np.int64),
            np.array([row.max_offset for row in rows], np.int64),
            np.array([row.committed_code for row in rows], np.int64),
            np.array([*map(consumed.__contains__, ids)], np.bool_),
        )
        self._samples.append(sample)
        if len(self._samples) > MAX_SAMPLES:
            self._keep_older(self._samples.pop(0))

    def _keep_older(self, sample: _SampleColumns) -> None:
        if not self._older_ends or sample.at - self._older_ends[-1][0] >= OLDER_INTERVAL_SECONDS:
            self._older_ends = [*self._older_ends, (sample.at, sample.max_offsets)][-MAX_OLDER_SAMPLES:]

    def _set_queues(self, ids: Sequence[int]) -> None:
        """Replace the set of queues: deleted queues are dropped, new ones have no earlier samples."""
        count = len(self._ids)
        # A new queue gets the index `count`, for which `select` and `_select` return an unknown offset.
        index_of = dict(zip(self._ids, range(count), strict=True))
        indexes = np.array([index_of.get(number, count) for number in ids], np.intp)
        self._samples = [sample.select(indexes) for sample in self._samples]
        self._older_ends = [(at, _select(ends, indexes)) for at, ends in self._older_ends]
        self._ids = tuple(ids)

    def compute_queue_lags(self, start_from: StartFrom) -> dict[int, QueueLag]:
        """Return the state of each queue. Most queues have no lag; checking this first saves the computation."""
        if not self._samples:
            return {}
        table = _SampleTable.of(self._samples)
        caught_up = _find_caught_up(table)
        others = np.flatnonzero(~caught_up)
        compute = self._compute_each if len(others) < self._vectorize_from else self._compute_vectorized
        computed = compute(others, start_from)  # of the queues that are not caught up, in the order of `_ids`
        rows = zip(
            self._ids,
            caught_up.tolist(),
            table.min_offsets[-1].tolist(),
            table.max_offsets[-1].tolist(),
            table.committed[-1].tolist(),
            _growth_per_second(table.at, table.max_offsets),
            _growth_per_second(table.at, table.committed),
            strict=True,
        )
        results: dict[int, QueueLag] = {}
        for number, is_caught_up, min_offset, max_offset, committed, incoming_rate, consumed_rate in rows:
            lag = _CAUGHT_UP if is_caught_up else next(computed)
            offset = None if committed < 0 else committed
            results[number] = QueueLag(min_offset, max_offset, offset, *lag, incoming_rate, consumed_rate)
        return results

    def incoming_rates(self) -> dict[int, float | None]:
        """Return each queue's incoming messages a second over the sampled hour; None below MIN_HISTORY_SECONDS."""
        if not self._samples:
            return {}
        recent_ends = [(sample.at, sample.max_offsets) for sample in self._samples]
        times, ends = zip(*self._older_ends, *recent_ends, strict=True)
        rates = _growth_per_second(np.array(times), np.array(ends), MIN_HISTORY_SECONDS)
        return dict(zip(self._ids, rates, strict=True))

    def _table_of(self, indexes: RowIndices) -> _SampleTable:
        """Return all samples of the queues at these indexes: first the older ends, then the last samples."""
        older = [_SampleColumns.of_ends(at, ends[indexes]) for at, ends in self._older_ends]
        return _SampleTable.of(older + [sample.select(indexes) for sample in self._samples])

    def _compute_each(self, indexes: RowIndices, start_from: StartFrom) -> Iterator[_ComputedLag]:
        """Yield the lag of the queues at these indexes, computed one by one.

        Lag, delay and lag state are unknown if the newest committed offset is unknown.
        """
        table = self._table_of(indexes)
        # Converted to lists at once: one number at a time would take several times as long.
        times = table.at.tolist()
        # Of each queue, of each sample: min_offset, max_offset, committed offset, has_consumer.
        rows_by_queue = np.stack(table[1:], axis=-1).swapaxes(0, 1).tolist()
        is_known_by_queue = (table.committed[-1] != OFFSET_UNKNOWN).tolist()
        older_count = len(self._older_ends)
        for rows, is_known in zip(rows_by_queue, is_known_by_queue, strict=True):
            if not is_known:
                yield _UNKNOWN
                continue
            older = _known_samples(times[:older_count], rows[:older_count])
            samples = _known_samples(times[older_count:], rows[older_count:])
            delay = compute_delay([*older, *samples], start_from)
            yield _ComputedLag(samples[-1].lag(start_from), delay, compute_lag_state(samples, start_from))

    def _compute_vectorized(self, indexes: RowIndices, start_from: StartFrom) -> Iterator[_ComputedLag]:
        """Yield the same as `_compute_each`, computed for all queues at once.

        The columns have the rows of all queues in the oldest sample, then those in the next sample, and so on.
        """
        table = self._table_of(indexes)
        count = len(indexes)
        # A queue's previous sample is `count` rows before; -1 in the first sample, which has none.
        previous = np.maximum(np.arange(-count, (len(table.at) - 1) * count), -1)
        columns = OffsetColumns(
            np.repeat(table.at, count),
            table.min_offsets.ravel(),
            table.max_offsets.ravel(),
            table.committed.ravel(),
            table.has_consumer.ravel(),
            previous,
            np.full(len(previous), START_CODES.get(start_from.position, START_UNKNOWN), np.int8),
        )
        newest_rows = np.arange(len(previous) - count, len(previous))
        lags = compute_lags(columns)
        # The window leaves out older samples, of which only the ends are known.
        states = compute_lag_states(columns, lags, newest_rows, SampleWindow(len(self._samples)))
        is_offset_known = columns.committed_offset[newest_rows] != OFFSET_UNKNOWN
        delays = compute_delays(columns, lags, newest_rows)
        for lag, delay, state, is_known in zip(
            lags[newest_rows].tolist(), delays.tolist(), states.tolist(), is_offset_known.tolist(), strict=True
        ):
            yield _ComputedLag(
                None if lag == LAG_UNKNOWN else lag,
                None if isnan(delay) else delay,
                LAG_STATES[state] if is_known else None,
            )


def _known_samples(times: list[float], rows: list[list[int]]) -> list[OffsetSample]:
    """Return the samples of one queue whose committed offset is known."""
    samples: list[OffsetSample] = []
    for at, (min_offset, max_offset, committed, has_consumer) in zip(times, rows, strict=True):
        if committed != OFFSET_UNKNOWN:
            offset = None if committed == NOT_COMMITTED else committed
            samples.append(OffsetSample(at, min_offset, max_offset, offset, bool(has_consumer)))
    return samples


def _find_caught_up(table: _SampleTable) -> NDArray[np.bool_]:
    """Return which queues certainly have no lag and keep up: all of the following holds.

    - the newest committed offset is the end of the queue;
    - no earlier committed offset was higher (the group was not rewound);
    - the newest sample and at least one earlier sample are valid.
    """
    latest = table.committed[-1]
    at_end = (latest == table.max_offsets[-1]) & (table.committed.max(axis=0) == latest)
    is_valid = (
        (table.committed >= 0) & (table.committed <= table.max_offsets) & (table.min_offsets <= table.max_offsets)
    )
    caught_up: NDArray[np.bool_] = at_end & is_valid[-1] & (is_valid.sum(axis=0) > 1)
    return caught_up


def _growth_per_second(times: NDArray[np.float64], offsets: Offsets, min_seconds: float = 0.0) -> list[float | None]:
    """Return by how much each queue's offset grew a second since it last fell.

    `offsets` has a row for each time, and a column for each queue. An offset falls if it is reset, or if the topic is
    recreated: earlier values say nothing about its growth.
    None: the newest offset is unknown, or the growth was observed for less than `min_seconds`.
    """
    has_offset = offsets >= 0
    # A sample whose offset is above any later one was taken before the last fall. For 5, 7, 3, 6 these are 5 and 7.
    known_or_max = np.where(has_offset, offsets, _MAX_OFFSET)
    lowest_from_here = np.minimum.accumulate(known_or_max[::-1])[::-1]
    before_fall = has_offset & (offsets > lowest_from_here)
    after_fall = len(times) - np.argmax(before_fall[::-1], axis=0)  # index of the first sample after the last fall
    after_fall = np.where(before_fall.any(axis=0), after_fall, 0)
    is_after_fall = np.arange(len(times))[:, np.newaxis] >= after_fall
    first = np.argmax(has_offset & is_after_fall, axis=0)  # index of the first known offset after the fall
    grown = offsets[-1].astype(float) - offsets[first, np.arange(offsets.shape[1])]
    seconds = times[-1] - times[first]
    is_measured = has_offset[-1] & (seconds > 0) & (seconds >= min_seconds)
    rates = grown / np.where(seconds > 0, seconds, 1.0)
    return [rate if measured else None for rate, measured in zip(rates.tolist(), is_measured.tolist(), strict=True)]
