"""History of offset samples of a topic's queues on one broker, in columns, as there may be 100,000 queues."""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rota.lag import MIN_HISTORY_SECONDS, Judgement, OffsetSample, delay, judge
from rota.lag_columns import (
    BEGINS,
    NEVER,
    NO_LAG,
    START_UNKNOWN,
    UNKNOWN,
    VERDICTS,
    OffsetColumns,
    Offsets,
    Window,
    behind,
    delays,
    verdicts,
)
from rota.spec import StartFrom

LOOKS = 10  # samples by which a queue is judged
# Number and interval of the older samples, of which only the end offsets are kept: they show how long ago a message
# came, and how many come in an hour.
OLDER, OLDER_SECONDS = 14, 240.0

_MOST = np.iinfo(np.int64).max

FEW = 32  # queues; from this number on, judging all at once is faster


class QueueSample(Struct, frozen=True, gc=False):
    """One sample of one queue."""

    first: int
    last: int
    committed: int | None  # None: the group never committed
    asked: bool = True  # whether `committed` is known


class QueueLag(NamedTuple):
    """The state of one queue; None: not known."""

    first: int | None = None
    last: int | None = None
    committed: int | None = None
    lag: int | None = None
    delay: float | None = None
    verdict: Judgement | None = None
    rate: float | None = None  # incoming messages a second
    worked: float | None = None  # consumed messages a second


NOTHING = QueueLag()


class _Column(NamedTuple):
    """One sample of all queues."""

    at: float
    first: Offsets
    last: Offsets
    committed: Offsets
    worked: NDArray[np.bool_]


_Told = tuple[int | None, float | None, Judgement | None]


class LagHistory:
    """The last samples of a topic's queues."""

    def __init__(self, few: int = FEW) -> None:
        """Judge fewer than `few` queues one by one, and more all at once."""
        self._few = few
        self._ids: tuple[int, ...] = ()
        self._looks: list[_Column] = []
        self._older: list[tuple[float, Offsets]] = []

    def see(self, at: float, samples: Mapping[int, QueueSample], worked: frozenset[int]) -> None:
        """Add a sample of all current queues; `worked` are the numbers of the queues that have a consumer."""
        ids = tuple(sorted(samples))
        if ids != self._ids:
            self._follow(ids)
        rows = [samples[number] for number in ids]
        committed = [NEVER if row.committed is None else row.committed for row in rows]
        self._looks.append(
            _Column(
                at,
                np.array([row.first for row in rows], np.int64),
                np.array([row.last for row in rows], np.int64),
                np.where([row.asked for row in rows], np.array(committed, np.int64), UNKNOWN),
                np.array([number in worked for number in ids], np.bool_),
            )
        )
        if len(self._looks) > LOOKS:
            self._keep(self._looks.pop(0))

    def _keep(self, sample: _Column) -> None:
        if not self._older or sample.at - self._older[-1][0] >= OLDER_SECONDS:
            self._older = [*self._older, (sample.at, sample.last)][-OLDER:]

    def _follow(self, ids: Sequence[int]) -> None:
        """Replace the set of queues: deleted queues are dropped, new ones have no past."""
        row_of = {number: index for index, number in enumerate(self._ids)}
        rows = np.array([row_of.get(number, len(row_of)) for number in ids], np.intp)

        def moved(offsets: Offsets) -> Offsets:
            return np.append(offsets, UNKNOWN)[rows]

        self._looks = [
            _Column(old.at, moved(old.first), moved(old.last), moved(old.committed), np.append(old.worked, False)[rows])
            for old in self._looks
        ]
        self._older = [(at, moved(last)) for at, last in self._older]
        self._ids = tuple(ids)

    def judged(self, begins: StartFrom) -> dict[int, QueueLag]:
        """Judge each queue by its samples; most have been at their end at all of them, which is checked first."""
        if not self._looks:
            return {}
        now = self._looks[-1]
        rows = zip(
            self._ids, now.first.tolist(), now.last.tolist(), now.committed.tolist(), *self._rates(), strict=True
        )
        steady = self._steady()
        open_ = np.flatnonzero(~steady)
        judgements = (self._one_by_one if len(open_) < self._few else self._together)(open_, begins)
        results: dict[int, QueueLag] = {}
        for is_steady, (number, first, last, done, rate, worked) in zip(steady.tolist(), rows, strict=True):
            if is_steady:
                results[number] = QueueLag(first, last, done, 0, 0.0, Judgement.KEEPING_UP, rate, worked)
                continue
            judgement = next(judgements)
            results[number] = QueueLag(first, last, None if done < 0 else done, *judgement, rate, worked)
        return results

    def _steady(self) -> NDArray[np.bool_]:
        """Return which queues are at their end, and were at each of at least two samples."""
        now = self._looks[-1]
        committed = np.stack([sample.committed for sample in self._looks])
        at_end = (now.committed == now.last) & (now.committed >= 0) & (committed.max(axis=0) == now.committed)
        first, last = (np.stack(rows) for rows in zip(*((it.first, it.last) for it in self._looks), strict=True))
        is_valid = (committed >= 0) & (committed <= last) & (first <= last)
        at_end &= is_valid[-1]
        steady: NDArray[np.bool_] = at_end & (is_valid.sum(axis=0) > 1)
        return steady

    def _rates(self) -> tuple[list[float | None], list[float | None]]:
        """Return the incoming and the consumed messages a second of each queue."""
        times = [sample.at for sample in self._looks]
        return _growth(times, [it.last for it in self._looks]), _growth(times, [it.committed for it in self._looks])

    def flows(self) -> dict[int, float | None]:
        """Return the incoming messages a second of each queue over the sampled time, of up to an hour."""
        if not self._looks:
            return {}
        ends = [*self._older, *((sample.at, sample.last) for sample in self._looks)]
        rates = _growth([at for at, _ in ends], [last for _, last in ends], MIN_HISTORY_SECONDS)
        return dict(zip(self._ids, rates, strict=True))

    def _one_by_one(self, indexes: NDArray[np.intp], begins: StartFrom) -> Iterator[_Told]:
        """Yield lag, delay and verdict of some queues; None if the committed offset is unknown."""
        has_offset = self._looks[-1].committed[indexes] != UNKNOWN
        for is_known, (older, looks) in zip(has_offset.tolist(), self._looks_of(indexes), strict=True):
            if is_known:
                yield looks[-1].behind(begins), delay([*older, *looks], begins), judge(looks, begins)
            else:
                yield None, None, None

    def _looks_of(self, indexes: NDArray[np.intp]) -> Iterator[tuple[Iterator[OffsetSample], list[OffsetSample]]]:
        """Yield the samples of each queue: the older ends, and the last ones."""
        times, older_times = [sample.at for sample in self._looks], [at for at, _ in self._older]
        # Converted to lists at once: one number at a time would take several times as long.
        samples_by_queue = np.array([sample[1:] for sample in self._looks])[:, :, indexes].transpose(2, 0, 1).tolist()
        older_ends = np.array([last[indexes] for _, last in self._older]).T.tolist() or [[]] * len(indexes)
        for samples, ends in zip(samples_by_queue, older_ends, strict=True):
            looks = [
                OffsetSample(at, first, last, None if committed == NEVER else committed, bool(worked))
                for at, (first, last, committed, worked) in zip(times, samples, strict=True)
                if committed != UNKNOWN
            ]
            yield (
                (OffsetSample(at, 0, last, None) for at, last in zip(older_times, ends, strict=True) if last >= 0),
                looks,
            )

    def _together(self, indexes: NDArray[np.intp], begins: StartFrom) -> Iterator[_Told]:
        """Yield the same for many queues, faster."""
        count = len(indexes)
        older = [
            _Column(at, last, last, np.where(last < 0, UNKNOWN, NEVER), np.zeros(len(last), np.bool_))
            for at, last in self._older
        ]
        rows = [*older, *self._looks]
        previous = np.maximum(np.arange(-count, (len(rows) - 1) * count), -1)
        looks = OffsetColumns(
            np.repeat([sample.at for sample in rows], count),
            np.concatenate([sample.first[indexes] for sample in rows]),
            np.concatenate([sample.last[indexes] for sample in rows]),
            np.concatenate([sample.committed[indexes] for sample in rows]),
            np.concatenate([sample.worked[indexes] for sample in rows]),
            previous,
            np.full(len(previous), BEGINS.get(begins.position, START_UNKNOWN), np.int8),
        )
        ends = np.arange(len(previous) - count, len(previous))
        lags = behind(looks)
        judged = verdicts(looks, lags, ends, Window(len(self._looks)))
        has_offset = looks.committed[ends] != UNKNOWN
        waits = delays(looks, lags, ends)
        for lag, waited, verdict, is_known in zip(
            lags[ends].tolist(), waits.tolist(), judged.tolist(), has_offset.tolist(), strict=True
        ):
            yield (
                None if lag == NO_LAG else lag,
                None if isnan(waited) else waited,
                VERDICTS[verdict] if is_known else None,
            )


def _growth(sampled_at: Sequence[float], columns: Sequence[Offsets], least: float = 0.0) -> list[float | None]:
    """Return each offset's growth a second since it last fell; None if this is known for less than `least` seconds.

    An offset falls if it is reset, or if the topic is recreated: earlier values say nothing about its growth.
    """
    times, offsets = np.array(sampled_at), np.stack(columns)
    has_offset = offsets >= 0
    # An offset above any later one was sampled before the last fall.
    lowest = np.minimum.accumulate(np.where(has_offset, offsets, _MOST)[::-1])[::-1]
    before_fall = has_offset & (offsets > lowest)
    since = len(times) - np.argmax(before_fall[::-1], axis=0)  # index after the newest such sample
    since = np.where(before_fall.any(axis=0), since, 0)
    counts = has_offset & (np.arange(len(times))[:, np.newaxis] >= since)
    first = np.argmax(counts, axis=0)
    grown = offsets[-1].astype(float) - offsets[first, np.arange(offsets.shape[1])]
    seconds = times[-1] - times[first]
    is_measured = has_offset[-1] & (seconds > 0) & (seconds >= least)
    rates = grown / np.where(seconds > 0, seconds, 1.0)
    return [rate if measured else None for rate, measured in zip(rates.tolist(), is_measured.tolist(), strict=True)]
