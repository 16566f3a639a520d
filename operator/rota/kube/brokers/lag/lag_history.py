"""History of offset samples of a topic's queues on one broker, in columns, as there may be 100,000 queues."""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rota.lag import MIN_HISTORY_SECONDS, LagState, OffsetSample, compute_delay, compute_lag_state
from rota.lag_columns import (
    LAG_STATES,
    NO_LAG,
    NOT_COMMITTED,
    OFFSET_UNKNOWN,
    START_CODES,
    START_UNKNOWN,
    OffsetColumns,
    Offsets,
    SampleWindow,
    compute_delays,
    compute_lag_states,
    compute_lags,
)
from rota.spec import StartFrom

MAX_SAMPLES = 10  # samples by which a queue is judged
# Of older samples only the end offsets are kept: they date a message's arrival, and give the rate over an hour.
MAX_OLDER_SAMPLES = 14
OLDER_INTERVAL_SECONDS = 240.0
VECTORIZE_FROM_QUEUES = 32  # from this number on, judging all queues at once is faster

_MAX_OFFSET = np.iinfo(np.int64).max


class QueueSample(Struct, frozen=True, gc=False):
    """One sample of one queue."""

    min_offset: int
    max_offset: int
    committed: int | None  # None: the group never committed
    is_known: bool = True  # whether `committed` is known


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
    """One sample of all queues."""

    at: float
    min_offsets: Offsets
    max_offsets: Offsets
    committed: Offsets
    has_consumer: NDArray[np.bool_]

    @staticmethod
    def of_ends(at: float, max_offsets: Offsets) -> "_SampleColumns":
        """Return an older sample, of which only the ends were kept."""
        committed = np.where(max_offsets < 0, OFFSET_UNKNOWN, NOT_COMMITTED)
        return _SampleColumns(at, max_offsets, max_offsets, committed, np.zeros(len(max_offsets), np.bool_))

    def select(self, rows: NDArray[np.intp]) -> "_SampleColumns":
        """Return the queues of these rows; the row behind the last one is a queue without this sample."""
        return _SampleColumns(
            self.at,
            _select(self.min_offsets, rows),
            _select(self.max_offsets, rows),
            _select(self.committed, rows),
            np.append(self.has_consumer, False)[rows],
        )


def _select(offsets: Offsets, rows: NDArray[np.intp]) -> Offsets:
    return np.append(offsets, OFFSET_UNKNOWN)[rows]


class _Judgement(NamedTuple):
    """What a queue's samples say; None: not known."""

    lag: int | None
    delay: float | None
    lag_state: LagState | None


_CAUGHT_UP = _Judgement(0, 0.0, LagState.KEEPING_UP)


class LagHistory:
    """The last samples of a topic's queues."""

    def __init__(self, vectorize_from: int = VECTORIZE_FROM_QUEUES) -> None:
        """Judge fewer than `vectorize_from` queues one by one, and more all at once."""
        self._vectorize_from = vectorize_from
        self._ids: tuple[int, ...] = ()
        self._samples: list[_SampleColumns] = []
        self._older_ends: list[tuple[float, Offsets]] = []

    def add_sample(self, at: float, samples: Mapping[int, QueueSample], consumed: frozenset[int]) -> None:
        """Add a sample of all current queues; `consumed` are the numbers of the queues that have a consumer."""
        ids = tuple(sorted(samples))
        if ids != self._ids:
            self._set_queues(ids)
        rows = [samples[number] for number in ids]
        committed = [NOT_COMMITTED if row.committed is None else row.committed for row in rows]
        sample = _SampleColumns(
            at,
            np.array([row.min_offset for row in rows], np.int64),
            np.array([row.max_offset for row in rows], np.int64),
            np.where([row.is_known for row in rows], np.array(committed, np.int64), OFFSET_UNKNOWN),
            np.array([number in consumed for number in ids], np.bool_),
        )
        self._samples.append(sample)
        if len(self._samples) > MAX_SAMPLES:
            self._keep_older(self._samples.pop(0))

    def _keep_older(self, sample: _SampleColumns) -> None:
        if not self._older_ends or sample.at - self._older_ends[-1][0] >= OLDER_INTERVAL_SECONDS:
            self._older_ends = [*self._older_ends, (sample.at, sample.max_offsets)][-MAX_OLDER_SAMPLES:]

    def _set_queues(self, ids: Sequence[int]) -> None:
        """Replace the set of queues: deleted queues are dropped, new ones have no past."""
        row_of = {number: index for index, number in enumerate(self._ids)}
        rows = np.array([row_of.get(number, len(row_of)) for number in ids], np.intp)
        self._samples = [sample.select(rows) for sample in self._samples]
        self._older_ends = [(at, _select(ends, rows)) for at, ends in self._older_ends]
        self._ids = tuple(ids)

    def judge_queues(self, start_from: StartFrom) -> dict[int, QueueLag]:
        """Judge each queue by its samples; most queues are at their end in all samples, which is checked first."""
        if not self._samples:
            return {}
        latest = self._samples[-1]
        rows = zip(
            self._ids,
            latest.min_offsets.tolist(),
            latest.max_offsets.tolist(),
            latest.committed.tolist(),
            *self._rates(),
            strict=True,
        )
        caught_up = self._caught_up()
        others = np.flatnonzero(~caught_up)
        judge = self._judge_each if len(others) < self._vectorize_from else self._judge_vectorized
        judgements = judge(others, start_from)
        results: dict[int, QueueLag] = {}
        for is_caught_up, (number, first, last, offset, incoming, consumed) in zip(
            caught_up.tolist(), rows, strict=True
        ):
            judgement = _CAUGHT_UP if is_caught_up else next(judgements)
            results[number] = QueueLag(first, last, None if offset < 0 else offset, *judgement, incoming, consumed)
        return results

    def _caught_up(self) -> NDArray[np.bool_]:
        """Return which queues are at their end, and were at each of at least two samples."""
        latest = self._samples[-1]
        committed = np.stack([sample.committed for sample in self._samples])
        at_end = (latest.committed == latest.max_offsets) & (committed.max(axis=0) == latest.committed)
        min_offsets = np.stack([sample.min_offsets for sample in self._samples])
        max_offsets = np.stack([sample.max_offsets for sample in self._samples])
        is_valid = (committed >= 0) & (committed <= max_offsets) & (min_offsets <= max_offsets)
        at_end &= is_valid[-1]
        caught_up: NDArray[np.bool_] = at_end & (is_valid.sum(axis=0) > 1)
        return caught_up

    def _rates(self) -> tuple[list[float | None], list[float | None]]:
        """Return the incoming and the consumed messages a second of each queue."""
        times = [sample.at for sample in self._samples]
        incoming = _growth_per_second(times, [sample.max_offsets for sample in self._samples])
        return incoming, _growth_per_second(times, [sample.committed for sample in self._samples])

    def incoming_rates(self) -> dict[int, float | None]:
        """Return the incoming messages a second of each queue over the sampled time, of up to an hour."""
        if not self._samples:
            return {}
        ends = [*self._older_ends, *((sample.at, sample.max_offsets) for sample in self._samples)]
        rates = _growth_per_second([at for at, _ in ends], [last for _, last in ends], MIN_HISTORY_SECONDS)
        return dict(zip(self._ids, rates, strict=True))

    def _judge_each(self, indexes: NDArray[np.intp], start_from: StartFrom) -> Iterator[_Judgement]:
        """Judge the queues at these indexes, one by one; nothing is known without a committed offset."""
        has_offset = self._samples[-1].committed[indexes] != OFFSET_UNKNOWN
        for is_known, (older, samples) in zip(has_offset.tolist(), self._samples_of(indexes), strict=True):
            if is_known:
                yield _Judgement(
                    samples[-1].lag(start_from),
                    compute_delay([*older, *samples], start_from),
                    compute_lag_state(samples, start_from),
                )
            else:
                yield _Judgement(None, None, None)

    def _samples_of(self, indexes: NDArray[np.intp]) -> Iterator[tuple[Iterator[OffsetSample], list[OffsetSample]]]:
        """Yield the samples of each queue: the older ends, and the last ones."""
        times = [sample.at for sample in self._samples]
        older_times = [at for at, _ in self._older_ends]
        # Converted to lists at once: one number at a time would take several times as long.
        samples_by_queue = np.array([sample[1:] for sample in self._samples])[:, :, indexes].transpose(2, 0, 1).tolist()
        older_ends = np.array([last[indexes] for _, last in self._older_ends]).T.tolist() or [[]] * len(indexes)
        for rows, ends in zip(samples_by_queue, older_ends, strict=True):
            older = (OffsetSample(at, 0, end, None) for at, end in zip(older_times, ends, strict=True) if end >= 0)
            samples: list[OffsetSample] = []
            for at, (first, last, committed, has_consumer) in zip(times, rows, strict=True):
                if committed != OFFSET_UNKNOWN:
                    offset = None if committed == NOT_COMMITTED else committed
                    samples.append(OffsetSample(at, first, last, offset, bool(has_consumer)))
            yield older, samples

    def _judge_vectorized(self, indexes: NDArray[np.intp], start_from: StartFrom) -> Iterator[_Judgement]:
        """Judge the same as `_judge_each`, for all queues at once: the columns have each sample's queues in turn."""
        count = len(indexes)
        rows = [*(_SampleColumns.of_ends(at, ends) for at, ends in self._older_ends), *self._samples]
        # A queue's previous sample is `count` rows before; -1 in the first sample, which has none.
        previous = np.maximum(np.arange(-count, (len(rows) - 1) * count), -1)
        columns = OffsetColumns(
            np.repeat([sample.at for sample in rows], count),
            np.concatenate([sample.min_offsets[indexes] for sample in rows]),
            np.concatenate([sample.max_offsets[indexes] for sample in rows]),
            np.concatenate([sample.committed[indexes] for sample in rows]),
            np.concatenate([sample.has_consumer[indexes] for sample in rows]),
            previous,
            np.full(len(previous), START_CODES.get(start_from.position, START_UNKNOWN), np.int8),
        )
        ends = np.arange(len(previous) - count, len(previous))
        lags = compute_lags(columns)
        states = compute_lag_states(columns, lags, ends, SampleWindow(len(self._samples)))
        has_offset = columns.committed_offset[ends] != OFFSET_UNKNOWN
        delays = compute_delays(columns, lags, ends)
        for lag, delay, state, is_known in zip(
            lags[ends].tolist(), delays.tolist(), states.tolist(), has_offset.tolist(), strict=True
        ):
            yield _Judgement(
                None if lag == NO_LAG else lag,
                None if isnan(delay) else delay,
                LAG_STATES[state] if is_known else None,
            )


def _growth_per_second(
    sampled_at: Sequence[float], columns: Sequence[Offsets], min_seconds: float = 0.0
) -> list[float | None]:
    """Return each offset's growth a second since it last fell; None if it is known for less than `min_seconds`.

    An offset falls if it is reset, or if the topic is recreated: earlier values say nothing about its growth.
    """
    times = np.array(sampled_at)
    offsets = np.stack(columns)
    has_offset = offsets >= 0
    # An offset above any later one was sampled before the last fall.
    lowest = np.minimum.accumulate(np.where(has_offset, offsets, _MAX_OFFSET)[::-1])[::-1]
    before_fall = has_offset & (offsets > lowest)
    since = len(times) - np.argmax(before_fall[::-1], axis=0)  # index after the newest such sample
    since = np.where(before_fall.any(axis=0), since, 0)
    counts = has_offset & (np.arange(len(times))[:, np.newaxis] >= since)
    first = np.argmax(counts, axis=0)
    grown = offsets[-1].astype(float) - offsets[first, np.arange(offsets.shape[1])]
    seconds = times[-1] - times[first]
    is_measured = has_offset[-1] & (seconds > 0) & (seconds >= min_seconds)
    rates = grown / np.where(seconds > 0, seconds, 1.0)
    return [rate if measured else None for rate, measured in zip(rates.tolist(), is_measured.tolist(), strict=True)]
