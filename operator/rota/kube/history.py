"""What was seen of a topic's queues on one broker, look by look; columns, for a hundred thousand queues are many."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rota.lag import Judgement, Look, delay, judge
from rota.spec import StartFrom

LOOKS = 10  # by which a queue is judged
# Looks before these, of which only the ends are kept, and how far apart: they tell how long ago a message came.
OLDER, OLDER_SECONDS = 14, 240.0

_NEVER, _UNKNOWN = -1, -2  # in columns of offsets: the group never was there; it could not be asked

_Offsets = NDArray[np.int64]


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
    first: _Offsets
    last: _Offsets
    committed: _Offsets
    worked: NDArray[np.bool_]


class History:
    """The last looks."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._ids: tuple[int, ...] = ()
        self._looks: list[_Column] = []
        self._older: list[tuple[float, _Offsets]] = []

    def see(self, at: float, found: Mapping[int, Seen], worked: frozenset[int]) -> None:
        """Take a look at all queues that there are now."""
        ids = tuple(sorted(found))
        if ids != self._ids:
            self._follow(ids)
        rows = [found[number] for number in ids]
        committed = [_NEVER if it.committed is None else it.committed for it in rows]
        self._looks.append(
            _Column(
                at,
                np.array([it.first for it in rows], np.int64),
                np.array([it.last for it in rows], np.int64),
                np.where([it.asked for it in rows], np.array(committed, np.int64), _UNKNOWN),
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

        def moved(offsets: _Offsets) -> _Offsets:
            return np.append(offsets, _UNKNOWN)[taken]

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
        others = self._looks_of(np.flatnonzero(~steady))
        found: dict[int, Judged] = {}
        for always, (number, first, last, done, rate, worked) in zip(steady.tolist(), rows, strict=True):
            if always:
                found[number] = Judged(first, last, done, 0, 0.0, Judgement.KEEPING_UP, rate, worked)
                continue
            older, looks = next(others)
            told = Judged(first, last, None if done < 0 else done, rate=rate, worked=worked)
            if done != _UNKNOWN:
                waited = delay([*(older if 0 <= done < looks[0].last else ()), *looks], begins)
                told = told._replace(lag=looks[-1].behind(begins), delay=waited, verdict=judge(looks, begins))
            found[number] = told
        return found

    def _steady(self) -> NDArray[np.bool_]:
        """Return which queues are at their end, and were whenever they were looked at, more than once."""
        now = self._looks[-1]
        committed = np.stack([it.committed for it in self._looks])
        at_end = (now.committed == now.last) & (now.committed >= 0) & (committed.max(axis=0) == now.committed)
        steady: NDArray[np.bool_] = at_end & ((committed != _UNKNOWN).sum(axis=0) > 1)
        return steady

    def _rates(self) -> tuple[list[float | None], list[float | None]]:
        """Return how many messages a second came to each queue, and were worked."""
        then, now = self._looks[0], self._looks[-1]
        seconds = now.at - then.at
        return _rate(then.last, now.last, seconds), _rate(then.committed, now.committed, seconds)

    def _looks_of(self, indexes: NDArray[np.intp]) -> Iterator[tuple[Iterator[Look], list[Look]]]:
        """Yield for some queues what was seen of each of them: where it ended long ago, and the last looks."""
        if not len(indexes):
            return
        times, times_before = [it.at for it in self._looks], [at for at, _ in self._older]
        # As whole lists at once: number by number would take several times as long.
        seen = np.array([it[1:] for it in self._looks])[:, :, indexes].transpose(2, 0, 1).tolist()
        before = np.array([last[indexes] for _, last in self._older]).T.tolist() or [[]] * len(indexes)
        for told, ends in zip(seen, before, strict=True):
            looks = [
                Look(at, first, last, None if done == _NEVER else done, bool(worked))
                for at, (first, last, done, worked) in zip(times, told, strict=True)
                if done != _UNKNOWN
            ]
            yield (Look(at, 0, last, None) for at, last in zip(times_before, ends, strict=True) if last >= 0), looks


def _rate(before: _Offsets, after: _Offsets, seconds: float) -> list[float | None]:
    """Return by how much each grew a second; None where one of both is not known."""
    if not seconds:
        return [None] * len(after)
    grown = np.maximum(after.astype(float) - before, 0.0) / seconds
    known = (before >= 0) & (after >= 0)
    return [rate if it else None for rate, it in zip(grown.tolist(), known.tolist(), strict=True)]
