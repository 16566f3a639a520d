"""Averagely and AveragelyByCircle: each topic's queues are divided separately, as evenly as their number allows.

They are AVG and AVG_BY_CIRCLE of RocketMQ's Java client.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np

from rota.model import Roster
from rota.strategies.arrays import Owners, assign_by_topic, blocks, circle


def averagely(roster: Roster) -> Owners:
    """Give each member a contiguous block of each topic; the first members get one queue more."""
    return assign_by_topic(roster, blocks)


def averagely_by_circle(roster: Roster) -> Owners:
    """Deal each topic's queues out one by one, to each member in turn."""
    return assign_by_topic(roster, circle)


def why_averagely(roster: Roster, owners: Owners, queues: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each queue (an index) on why its owner has it: the owner's block of the topic."""
    topics = roster.topics
    for queue in queues:
        start, stop = _topic_of(queue, topics)
        block = start + np.flatnonzero(owners[start:stop] == owners[queue])
        first, last = roster.queues[block[0]], roster.queues[block[-1]]
        ends = f"{first.broker}/{first.id}" + (f" to {last.broker}/{last.id}" if last != first else "")
        yield f"{_describe_member(roster, owners, queue)}, whose block of {first.topic} is {ends}"


def why_averagely_by_circle(roster: Roster, owners: Owners, queues: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each queue (an index) on why its owner has it: the queue's position in the topic."""
    topics = roster.topics
    for queue in queues:
        start, stop = _topic_of(queue, topics)
        place = f"queue {queue - start + 1} of {stop - start} of {roster.queues[queue].topic}"
        yield f"{_describe_member(roster, owners, queue)}, and {place} goes to it when queues are dealt in turn"


def _topic_of(queue: int, topics: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the start and stop of the queue's topic: the first topic that stops behind the queue."""
    return topics[bisect_right(topics, queue, key=itemgetter(1))]


def _describe_member(roster: Roster, owners: Owners, queue: int) -> str:
    return f"{roster.members[owners[queue]]} is member {owners[queue] + 1} of {len(roster.members)}"
