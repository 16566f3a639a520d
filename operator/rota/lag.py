"""How far a group is behind on a queue, and what its history says of that: the same for operator and pipeline.

**What is not known is no number.** A group that never was at a queue is not behind by all that lies there if it is to
begin at the end; an offset above the end is of a topic that was made anew, or of two brokers' answers that do not go
together; what was deleted before it was read is nobody's lag any more.

**Trends, not thresholds.** A queue is judged by how offsets moved over the last looks, so that nothing has to be set.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from rota.model import Queue
from rota.spec import StartFrom

LOOKED_LONG = 120.0  # seconds


class Look(NamedTuple):
    """What was seen of a queue at one time; the group's offset is asked for before the end, so that it is not above."""

    at: float
    first: int
    last: int  # the offset that the next message will have
    committed: int | None  # None: the group never was there
    worked: bool = True  # whether some member had the queue

    def behind(self, begins: StartFrom) -> int | None:
        """Return how many messages the group is behind; None where nobody knows."""
        there = self.last - self.first
        if there < 0:  # no queue ends before it begins: a broker that says so says nothing
            return None
        if self.committed is None:  # what is empty has nothing to be behind, wherever it is to begin
            return {"Latest": 0, "Earliest": there}.get(begins.position, None if there else 0)
        if self.committed > self.last:
            return None
        return self.last - max(self.committed, self.first)


class Judgement(StrEnum):
    """What a queue's history says."""

    KEEPING_UP = "KeepingUp"
    SLOW = "Slow"  # it is worked, and falls behind
    STALLED = "Stalled"  # somebody has it, and nothing is worked
    STOPPED = "Stopped"  # nobody has it, nothing is worked, and something is left
    REWOUND = "Rewound"  # its offset went back, and is not yet where it was


def judge(looks: Sequence[Look], begins: StartFrom) -> Judgement | None:
    """Judge by looks in the order of their times; None where too few of them say anything, or the last one does not."""
    known = [(look, lag) for look in looks if (lag := look.behind(begins)) is not None]
    if len(known) < 2 or known[-1][0] is not looks[-1]:  # noqa: PLR2004 - a movement has two ends
        return None
    behind = [lag for _, lag in known]
    offsets = [look.committed for look, _ in known if look.committed is not None]
    if _rewound(offsets):
        return Judgement.REWOUND
    worked = any(look.worked for look, _ in known)
    if 0 in behind:  # where nobody ever was and nobody is, nobody keeps up either
        return Judgement.KEEPING_UP if offsets or worked else None
    if len({*offsets}) <= 1:
        return Judgement.STALLED if worked else Judgement.STOPPED
    return Judgement.SLOW if _grows(behind) else Judgement.KEEPING_UP


def delay(looks: Sequence[Look], begins: StartFrom) -> float | None:
    """Return for how many seconds the oldest message that is left has waited; None where that is not known.

    It came after the last look at which the end was not above the group's present offset, and before the next one:
    between the two, messages are taken to have come evenly. What was there at the first look has waited for at least
    as long as we have looked; who has only begun to look does not know. Ends never fall: where one did, the topic was
    made anew, and what was seen before is another one's.
    """
    looks = looks[_anew(looks) :]
    if not looks or (behind := looks[-1].behind(begins)) is None:
        return None
    now = looks[-1]
    if not behind or now.committed is None:
        return None if behind else 0.0
    next_one = max(now.committed, now.first)
    for earlier, later in reversed([*pairwise(looks)]):
        if earlier.last <= next_one < later.last:
            part = (next_one - earlier.last + 1) / (later.last - earlier.last)
            return now.at - (earlier.at + part * (later.at - earlier.at))
    looked = now.at - looks[0].at
    return looked if next_one < looks[0].last and looked >= LOOKED_LONG else None


def slowest(members: Sequence[Mapping[Queue, int | None] | None]) -> dict[Queue, int]:
    """Return where the last of those is who all work every queue; only of queues of which each of them tells it."""
    known = [it for it in members if it is not None]
    if not known or len(known) < len(members):
        return {}
    first, *others = known
    told = {queue: [offset, *(it.get(queue) for it in others)] for queue, offset in first.items()}
    return {
        queue: min(it for it in each if it is not None) for queue, each in told.items() if each and None not in each
    }


def _anew(looks: Sequence[Look]) -> int:
    """Return the place of the first look at the topic that there is now."""
    return max((place for place in range(1, len(looks)) if looks[place].last < looks[place - 1].last), default=0)


def _rewound(offsets: Sequence[int]) -> bool:
    """Whether the last offset lies below an earlier one: it went back, and has not come so far again."""
    return bool(offsets) and offsets[-1] < max(offsets)


def _grows(behind: Sequence[int]) -> bool:
    """Whether it got more behind, and at no time less."""
    return behind[-1] > behind[0] and all(one <= other for one, other in pairwise(behind))
