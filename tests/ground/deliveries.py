"""What apps noted of the messages that came to them: which came again, and how long a queue that moved was silent.

`bench/app.py` makes such notes. A queue has moved where another member goes on with it; its pause is the time between
two messages there. What comes out of the group's retry topic comes again, but says nothing of its queue.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ASIDE = -1  # in the place of a queue: it had been tried before, and came out of the group's retry topic


class Came(NamedTuple):
    """A message as it came to a member."""

    at: float
    number: int
    queue: int
    member: str
    born: float = 0.0


class Move(NamedTuple):
    """A queue that another member went on with."""

    at: float  # when its first message came there
    seconds: float  # since the last one that came to the member before
    queue: int
    member: str  # the one before


def whole_lines(notes: Path) -> list[bytes]:
    """Read what was noted so far; a line without its end is still being written."""
    return notes.read_bytes().rpartition(b"\n")[0].splitlines()


def noted(member: str, notes: Path) -> Iterator[Came]:
    """Read what a member's app has noted so far."""
    for at, number, queue, born in (line.decode().split() for line in whole_lines(notes)):
        yield Came(int(at) / 1e6, int(number), int(queue), member, datetime.fromisoformat(born).timestamp())


def by_queue(came: Iterable[Came]) -> dict[int, list[Came]]:
    """Return each queue's messages in the order in which they came."""
    queues: dict[int, list[Came]] = defaultdict(list)
    for it in sorted(came):
        if it.queue != ASIDE:
            queues[it.queue].append(it)
    return queues


def moves(came: Iterable[Came]) -> list[Move]:
    """Return every time that a queue moved. The time that lies between two messages anyway is left in."""
    return [
        Move(after.at, after.at - before.at, queue, before.member)
        for queue, its in by_queue(came).items()
        for before, after in pairwise(its)
        if before.member != after.member
    ]


def again(came: Iterable[Came]) -> list[Came]:
    """Return every delivery of a message that had come before.

    What a producer sent anew, since nobody had answered it, has the same number and is another message: born later.
    """
    seen: set[tuple[int, float]] = set()
    repeated = []
    for it in sorted(came):
        if (it.number, it.born) in seen:
            repeated.append(it)
        seen.add((it.number, it.born))
    return repeated
