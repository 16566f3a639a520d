"""What was seen of a topic's queues on one broker, look by look; columns, for a hundred thousand queues are many."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.lag import Judgement, Look, delay, judge
from rota.spec import StartFrom

LOOKS = 10  # by which a queue is judged
# Looks before these, of which only the ends are kept, and how far apart: they tell how long ago a message came.
OLDER, OLDER_SECONDS = 14, 240.0

_NEVER, _UNKNOWN = -1, -2  # in columns of offsets: the group never was there; it could not be asked

_Offsets = NDArray[np.int64]


class Seen(NamedTuple):
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
        committed = np.stack([it.committed for it in self._looks])
        steady = (now.committed == now.last) & (now.committed >= 0) & (committed.max(axis=0) == now.committed)
        steady &= (committed != _UNKNOWN).sum(axis=0) > 1
        seconds = now.at - self._looks[0].at
        found: dict[int, Judged] = {}
        for index, number in enumerate(self._ids):
            first, last, done = int(now.first[index]), int(now.last[index]), int(now.committed[index])
            rate, worked = self._rates(index, seconds)
            if steady[index]:
                found[number] = Judged(first, last, done, 0, 0.0, Judgement.KEEPING_UP, rate, worked)
                continue
            told = Judged(first, last, None if done < 0 else done, rate=rate, worked=worked)
            if done != _UNKNOWN:
                looks = self._of(index)
                waited = delay([*self._ends_of(index), *looks], begins)
                told = told._replace(lag=looks[-1].behind(begins), delay=waited, verdict=judge(looks, begins))
            found[number] = told
        return found

    def _rates(self, index: int, seconds: float) -> tuple[float | None, float | None]:
        then, now = self._looks[0], self._looks[-1]
        if not seconds:
            return None, None
        before, after = int(then.last[index]), int(now.last[index])
        done, done_now = int(then.committed[index]), int(now.committed[index])
        come = max(after - before, 0) / seconds if before >= 0 else None
        return come, max(done_now - done, 0) / seconds if done >= 0 and done_now >= 0 else None

    def _of(self, index: int) -> list[Look]:
        found = []
        for at, first, last, committed, worked in self._looks:
            done = int(committed[index])
            if done != _UNKNOWN:
                group = None if done == _NEVER else done
                found.append(Look(at, int(first[index]), int(last[index]), group, bool(worked[index])))
        return found

    def _ends_of(self, index: int) -> list[Look]:
        return [Look(at, 0, int(last[index]), None) for at, last in self._older if last[index] >= 0]
