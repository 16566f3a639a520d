"""Arrivals of messages as the apps noted them: repeated messages, and pauses of queues that moved.

`bench/app.py` writes such notes. A queue has moved when another member continues it; its pause is the time between two
messages at that moment. Messages from the group's retry topic count as repeated, but do not identify their queue.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ASIDE = -1  # in place of a queue id: the message was retried, and came from the group's retry topic


class Came(NamedTuple):
    """One arrival of a message at a member."""

    at: float
    number: int
    queue: int
    member: str
    born: float = 0.0


class Move(NamedTuple):
    """The continuation of a queue by another member."""

    at: float  # the time of its first message at the new member
    seconds: float  # since the last message at the previous member
    queue: int
    member: str  # the previous member


def whole_lines(notes: Path) -> list[bytes]:
    """Read the complete lines; a line without its newline is still being written."""
    return notes.read_bytes().rpartition(b"\n")[0].splitlines()


def noted(member: str, notes: Path) -> Iterator[Came]:
    """Read the arrivals that a member's app has noted so far."""
    for at, number, queue, born in (line.decode().split() for line in whole_lines(notes)):
        yield Came(int(at) / 1e6, int(number), int(queue), member, datetime.fromisoformat(born).timestamp())


def by_queue(came: Iterable[Came]) -> dict[int, list[Came]]:
    """Return each queue's arrivals in order of time."""
    queues: dict[int, list[Came]] = defaultdict(list)
    for arrival in sorted(came):
        if arrival.queue != ASIDE:
            queues[arrival.queue].append(arrival)
    return queues


def queue_moves(came: Iterable[Came]) -> list[Move]:
    """Return every move of a queue. Its pause includes the usual time between two messages."""
    return [
        Move(current.at, current.at - previous.at, queue, previous.member)
        for queue, arrivals in by_queue(came).items()
        for previous, current in pairwise(arrivals)
        if previous.member != current.member
    ]


def repeated_arrivals(came: Iterable[Came]) -> list[Came]:
    """Return every arrival of a message that had arrived before.

    A message that the producer sent again, because it got no response, has the same number but is another message: its
    birth is later.
    """
    arrived: set[tuple[int, float]] = set()
    repeated = []
    for arrival in sorted(came):
        message = (arrival.number, arrival.born)
        if message in arrived:
            repeated.append(arrival)
        arrived.add(message)
    return repeated
