"""What was seen of a topic's queues on one broker, look by look; columns, for a hundred thousand queues are many."""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rota.lag import LOOKED_LONG, Judgement, Look, delay, judge
from rota.lag_columns import (
    BEGINS,
    NEVER,
    NO_LAG,
    NOBODY_KNOWS,
    UNKNOWN,
    VERDICTS,
    Looks,
    Offsets,
    Window,
    behind,
    delays,
    verdicts,
)
from rota.spec import StartFrom

LOOKS = 10  # by which a queue is judged
# Looks before these, of which only the ends are kept, and how far apart: they tell how long ago a message came, and how
# many come in an hour.
OLDER, OLDER_SECONDS = 14, 240.0

_MOST = np.iinfo(np.int64).max

FEW = 32  # queues; more are sooner judged all at once


class Seen(Struct, frozen=True, gc=False):
    """What was seen of one queue."""

    first: int
    last: int
    committed: int | None  # None: the group never was there
    asked: bool = True  # whether that is known


class Judged(NamedTuple):
    """What is known of one queue; None: nobody knows."""

    first: int | None = None
    last: int | None = None
    committed: int | None = None
    lag: int | None = None
    delay: float | None = None
    verdict: Judgement | None = None
    rate: float | None = None  # messages a second that come
    worked: float | None = None  # messages a second that are worked


NOTHING = Judged()


class _Column(NamedTuple):
    """One look."""

    at: float
    first: Offsets
    last: Offsets
    committed: Offsets
    worked: NDArray[np.bool_]


_Told = tuple[int | None, float | None, Judgement | None]


class History:
    """The last looks."""

    def __init__(self, few: int = FEW) -> None:
        """Nothing was seen yet; `few`: queues that are sooner judged one by one."""
        self._few = few
        self._ids: tuple[int, ...] = ()
        self._looks: list[_Column] = []
        self._older: list[tuple[float, Offsets]] = []

    def see(self, at: float, found: Mapping[int, Seen], worked: frozenset[int]) -> None:
        """Take a look at all queues that there are now."""
        ids = tuple(sorted(found))
        if ids != self._ids:
            self._follow(ids)
        rows = [found[number] for number in ids]
        committed = [NEVER if it.committed is None else it.committed for it in rows]
        self._looks.append(
            _Column(
                at,
                np.array([it.first for it in rows], np.int64),
                np.array([it.last for it in rows], np.int64),
                np.where([it.asked for it in rows], np.array(committed, np.int64), UNKNOWN),
                np.array([number in worked for number in ids], np.bool_),
            )
        )
        if len(self._looks) > LOOKS:
            self._keep(self._looks.pop(0))

    def _keep(self, gone: _Column) -> None:
        if not self._older or gone.at - self._older[-1][0] >= OLDER_SECONDS:
            self._older = [*self._older, (gone.at, gone.last)][-OLDER:]

    def _follow(self, ids: Sequence[int]) -> None:
        """Know of other queues from now on: what is not a queue any more is forgotten."""
        place = {number: index for index, number in enumerate(self._ids)}
        taken = np.array([place.get(number, len(place)) for number in ids], np.intp)

        def moved(offsets: Offsets) -> Offsets:
            return np.append(offsets, UNKNOWN)[taken]

        self._looks = [
            _Column(it.at, moved(it.first), moved(it.last), moved(it.committed), np.append(it.worked, False)[taken])
            for it in self._looks
        ]
        self._older = [(at, moved(last)) for at, last in self._older]
        self._ids = tuple(ids)

    def judged(self, begins: StartFrom) -> dict[int, Judged]:
        """Say of each queue what its looks say; most are at their end and always were, which is quickly seen."""
        if not self._looks:
            return {}
        now = self._looks[-1]
        rows = zip(
            self._ids, now.first.tolist(), now.last.tolist(), now.committed.tolist(), *self._rates(), strict=True
        )
        steady = self._steady()
        open_ = np.flatnonzero(~steady)
        others = (self._one_by_one if len(open_) < self._few else self._together)(open_, begins)
        found: dict[int, Judged] = {}
        for always, (number, first, last, done, rate, worked) in zip(steady.tolist(), rows, strict=True):
            if always:
                found[number] = Judged(first, last, done, 0, 0.0, Judgement.KEEPING_UP, rate, worked)
                continue
            told = next(others)
            found[number] = Judged(first, last, None if done < 0 else done, *told, rate, worked)
        return found

    def _steady(self) -> NDArray[np.bool_]:
        """Return which queues are at their end, and were whenever they were looked at, more than once."""
        now = self._looks[-1]
        committed = np.stack([it.committed for it in self._looks])
        at_end = (now.committed == now.last) & (now.committed >= 0) & (committed.max(axis=0) == now.committed)
        first, last = (np.stack(rows) for rows in zip(*((it.first, it.last) for it in self._looks), strict=True))
        known = (committed >= 0) & (committed <= last) & (first <= last)
        at_end &= known[-1]
        steady: NDArray[np.bool_] = at_end & (known.sum(axis=0) > 1)
        return steady

    def _rates(self) -> tuple[list[float | None], list[float | None]]:
        """Return how many messages a second came to each queue, and were worked."""
        at = [it.at for it in self._looks]
        return _growth(at, [it.last for it in self._looks]), _growth(at, [it.committed for it in self._looks])

    def flows(self) -> dict[int, float | None]:
        """Return how many messages a second came to each queue in the time that is known, of up to an hour."""
        if not self._looks:
            return {}
        ends = [*self._older, *((it.at, it.last) for it in self._looks)]
        found = _growth([at for at, _ in ends], [last for _, last in ends], LOOKED_LONG)
        return dict(zip(self._ids, found, strict=True))

    def _one_by_one(self, indexes: NDArray[np.intp], begins: StartFrom) -> Iterator[_Told]:
        """Yield lag, delay and verdict of some queues; of one that could not be asked nothing is known."""
        asked = self._looks[-1].committed[indexes] != UNKNOWN
        for known, (older, looks) in zip(asked.tolist(), self._looks_of(indexes), strict=True):
            if known:
                yield looks[-1].behind(begins), delay([*older, *looks], begins), judge(looks, begins)
            else:
                yield None, None, None

    def _looks_of(self, indexes: NDArray[np.intp]) -> Iterator[tuple[Iterator[Look], list[Look]]]:
        """Yield what was seen of each: where it ended long ago, and the last looks."""
        times, times_before = [it.at for it in self._looks], [at for at, _ in self._older]
        # As whole lists at once: number by number would take several times as long.
        seen = np.array([it[1:] for it in self._looks])[:, :, indexes].transpose(2, 0, 1).tolist()
        before = np.array([last[indexes] for _, last in self._older]).T.tolist() or [[]] * len(indexes)
        for told, ends in zip(seen, before, strict=True):
            looks = [
                Look(at, first, last, None if done == NEVER else done, bool(worked))
                for at, (first, last, done, worked) in zip(times, told, strict=True)
                if done != UNKNOWN
            ]
            yield (Look(at, 0, last, None) for at, last in zip(times_before, ends, strict=True) if last >= 0), looks

    def _together(self, indexes: NDArray[np.intp], begins: StartFrom) -> Iterator[_Told]:
        """Yield the same of many, sooner."""
        many = len(indexes)
        older = [
            _Column(at, last, last, np.where(last < 0, UNKNOWN, NEVER), np.zeros(len(last), np.bool_))
            for at, last in self._older
        ]
        rows = [*older, *self._looks]
        before = np.maximum(np.arange(-many, (len(rows) - 1) * many), -1)
        looks = Looks(
            np.repeat([it.at for it in rows], many),
            np.concatenate([it.first[indexes] for it in rows]),
            np.concatenate([it.last[indexes] for it in rows]),
            np.concatenate([it.committed[indexes] for it in rows]),
            np.concatenate([it.worked[indexes] for it in rows]),
            before,
            np.full(len(before), BEGINS.get(begins.position, NOBODY_KNOWS), np.int8),
        )
        ends = np.arange(len(before) - many, len(before))
        lags = behind(looks)
        judged = verdicts(looks, lags, ends, Window(len(self._looks)))
        asked = looks.committed[ends] != UNKNOWN
        waits = delays(looks, lags, ends)
        for lag, waited, verdict, known in zip(
            lags[ends].tolist(), waits.tolist(), judged.tolist(), asked.tolist(), strict=True
        ):
            yield (
                None if lag == NO_LAG else lag,
                None if isnan(waited) else waited,
                VERDICTS[verdict] if known else None,
            )


def _growth(at: Sequence[float], seen: Sequence[Offsets], least: float = 0.0) -> list[float | None]:
    """Return by how much each grew a second since it last fell; None where that is not known for so long, or longer.

    What falls was set back, or is of a topic that was made anew: what it was before says nothing of how fast it grows.
    """
    times, offsets = np.array(at), np.stack(seen)
    known = offsets >= 0
    # By going back: what is above anything that came after it is of the time before.
    lowest = np.minimum.accumulate(np.where(known, offsets, _MOST)[::-1])[::-1]
    old = known & (offsets > lowest)
    since = len(times) - np.argmax(old[::-1], axis=0)  # after the newest that is old
    since = np.where(old.any(axis=0), since, 0)
    counts = known & (np.arange(len(times))[:, np.newaxis] >= since)
    first = np.argmax(counts, axis=0)
    grown = offsets[-1].astype(float) - offsets[first, np.arange(offsets.shape[1])]
    seconds = times[-1] - times[first]
    told = known[-1] & (seconds > 0) & (seconds >= least)
    rates = grown / np.where(seconds > 0, seconds, 1.0)
    return [rate if it else None for rate, it in zip(rates.tolist(), told.tolist(), strict=True)]
