"""`rota.lag` over many queues at once, in columns: the answer for each is that of `rota.lag` for its looks alone.

Looks of any number of queues stand in one column after the other; each knows where the same queue's look before it is.
So looks of one time need not stand together, and queues may come and go. All queues take the same step back in time at
once, and who has its answer drops out.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.lag import LOOKED_LONG, Judgement

NEVER, UNKNOWN = -1, -2  # in columns of offsets: the group never was there; it could not be asked
LATEST, EARLIEST, NOBODY_KNOWS = 0, 1, 2  # where a queue begins that the group never was at
BEGINS = {"Latest": LATEST, "Earliest": EARLIEST}  # of others it is not known
NO_LAG = np.iinfo(np.int64).min  # nobody knows it
VERDICTS = (None, *Judgement)  # what is told of each queue is a place in here
_PLACE = {verdict: place for place, verdict in enumerate(VERDICTS)}
_MOST, _LEAST = np.iinfo(np.int64).max, np.iinfo(np.int64).min

Offsets = NDArray[np.int64]
Places = NDArray[np.intp]


class Looks(NamedTuple):
    """Looks at queues, in columns."""

    at: NDArray[np.float64]
    first: Offsets
    last: Offsets
    committed: Offsets  # or `NEVER`, or `UNKNOWN`: then it was no look
    worked: NDArray[np.bool_]
    before: Places  # where the same queue's look before stands; -1: there is none
    begins: NDArray[np.int8]


class Window(NamedTuple):
    """By which looks a queue is judged: by at least so many if they are not too old, and by all that are young."""

    looks: int
    old: float = np.inf  # seconds
    young: float = 0.0


def behind(it: Looks) -> Offsets:
    """Return by how many messages the group is behind at each look, or `NO_LAG`."""
    there = it.last - it.first
    known = np.where(it.committed > it.last, NO_LAG, it.last - np.maximum(it.committed, it.first))
    never = np.where((it.begins == LATEST) | (there == 0), 0, np.where(it.begins == EARLIEST, there, NO_LAG))
    found = np.where(it.committed >= 0, known, np.where(it.committed == NEVER, never, NO_LAG))
    return np.where(there < 0, NO_LAG, found)


def verdicts(it: Looks, lags: Offsets, ends: Places, window: Window) -> NDArray[np.int8]:
    """Judge queues at some of their looks, each by those before; `lags` is what `behind` says."""
    count, newest = np.zeros(len(ends), np.int64), np.full(len(ends), -1)
    highest, lowest = np.full(len(ends), -1), np.full(len(ends), _MOST)
    now, then = np.full(len(ends), NO_LAG), np.full(len(ends), _MOST)
    at_end, worked, falls = (np.zeros(len(ends), np.bool_) for _ in range(3))
    rows, places, taken = np.arange(len(ends)), ends, 0
    while len(rows):
        age = it.at[ends[rows]] - it.at[places]
        inside = (age <= window.young) | ((age <= window.old) & (taken < window.looks))
        rows, places = rows[inside], places[inside]
        known = lags[places] != NO_LAG
        here, there = rows[known], places[known]
        lag, done = lags[there], it.committed[there]
        at_end[here] |= lag == 0
        worked[here] |= it.worked[there]
        falls[here] |= lag > then[here]
        then[here] = lag
        now[here] = np.where(count[here] == 0, lag, now[here])
        newest[here] = np.where((newest[here] < 0) & (done >= 0), done, newest[here])
        highest[here] = np.maximum(highest[here], done)
        lowest[here] = np.where(done >= 0, np.minimum(lowest[here], done), lowest[here])
        count[here] += 1
        taken += 1
        places = it.before[places]
        rows, places = rows[places >= 0], places[places >= 0]
    still = np.where(worked, _PLACE[Judgement.STALLED], _PLACE[Judgement.STOPPED])
    moving = np.where((now > then) & ~falls, _PLACE[Judgement.SLOW], _PLACE[Judgement.KEEPING_UP])
    found = np.where(lowest >= highest, still, moving)
    found = np.where(at_end, np.where(worked | (highest >= 0), _PLACE[Judgement.KEEPING_UP], 0), found)
    found = np.where(newest < highest, _PLACE[Judgement.REWOUND], found)
    unknown = (count < 2) | (lags[ends] == NO_LAG)  # noqa: PLR2004 - a movement has two ends
    return np.where(unknown, 0, found).astype(np.int8)


def delays(it: Looks, lags: Offsets, ends: Places, old: float = np.inf) -> NDArray[np.float64]:
    """Return for how long the oldest message has waited that is left of each queue at such a look, or NaN.

    Looks that were `old` by then, in seconds, are left out, so that it does not matter where they happen to begin.
    """
    lag, done = lags[ends], it.committed[ends]
    found = np.where(lag == 0, 0.0, np.nan)
    rows = np.flatnonzero((lag != NO_LAG) & (lag != 0) & (done >= 0))
    now = it.at[ends]
    next_one = np.maximum(done, it.first[ends])
    later_at, later_last = now.copy(), it.last[ends].copy()
    places = it.before[ends[rows]]
    while len(rows):
        # A queue's looks begin where there is none before, or where the end fell since: what was before is another's.
        over = (places < 0) | (now[rows] - it.at[places] > old)
        over |= (it.committed[places] != UNKNOWN) & (it.last[places] > later_last[rows])
        gone = rows[over]
        looked = now[gone] - later_at[gone]
        told = (next_one[gone] < later_last[gone]) & (looked >= LOOKED_LONG)
        found[gone[told]] = looked[told]
        rows, places = rows[~over], places[~over]
        asked = it.committed[places] != UNKNOWN
        at, last, wanted, later = it.at[places], it.last[places], next_one[rows], later_last[rows]
        here = asked & (last <= wanted) & (wanted < later)
        part = (wanted[here] - last[here] + 1) / (later[here] - last[here])
        found[rows[here]] = now[rows[here]] - (at[here] + part * (later_at[rows[here]] - at[here]))
        later_at[rows[asked]], later_last[rows[asked]] = at[asked], last[asked]
        rows, places = rows[~here], it.before[places[~here]]
    return found
