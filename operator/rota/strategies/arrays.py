"""Array arithmetic that several strategies share. Owners are int32 arrays over `roster.queues`: indices of members."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rota.model import NO_OWNER, RETRY_TOPIC_PREFIX, Roster, Run

T = TypeVar("T")
Owners = NDArray[np.int32]
Indices = NDArray[np.int64]


def is_whole_number(option: object) -> bool:
    """Whether an option is a whole number from 0 up; False for True and False, which Python counts as integers."""
    return isinstance(option, int) and not isinstance(option, bool) and option >= 0


def is_retry_topic(topic: str) -> bool:
    """Whether the topic holds the messages that a group's app rejected."""
    return topic.startswith(RETRY_TOPIC_PREFIX)


def index_by_item(items: Iterable[T]) -> dict[T, int]:
    """Return each item's index."""
    return {item: index for index, item in enumerate(items)}


def no_owners(count: int) -> Owners:
    """Return the owners of `count` queues that have none."""
    return np.full(count, NO_OWNER, dtype=np.int32)


def current_owners(roster: Roster) -> Owners:
    """Return the roster's owners as a read-only view."""
    owners: Owners = np.frombuffer(roster.owners, dtype=np.int32)
    owners.flags.writeable = False
    return owners


def blocks(queues: int, members: int) -> Indices:
    """Return each queue's member if every member gets a contiguous block; the first blocks have one queue more."""
    block_count = min(queues, members)  # with fewer queues than members, further members get nothing
    block_count = max(block_count, 1)  # without queues: one empty block, as divmod rejects 0
    size, larger_blocks = divmod(queues, block_count)
    sizes = np.full(block_count, size)
    sizes[:larger_blocks] += 1
    return np.repeat(np.arange(block_count), sizes)


def circle(queues: int, members: int) -> Indices:
    """Return each queue's member if queues are dealt out one by one, to each member in turn."""
    return np.arange(queues) % members


def assign_by_topic(roster: Roster, divide: Callable[[int, int], Indices]) -> Owners:
    """Assign each topic separately, as RocketMQ's Java client does.

    `divide` is `blocks` or `circle`: it returns each queue's member for a number of queues and of members.
    """
    divide_once = cache(divide)  # the result is the same for all topics of one size
    owners_by_topic = [divide_once(stop - start, len(roster.members)) for start, stop in roster.topics]
    return np.concatenate(owners_by_topic).astype(np.int32)


def indices_of_runs(runs: Iterable[Run]) -> Indices:
    """Return the indices of all queues in these runs; a run is the adjacent queues of one topic on one broker."""
    spans = [np.arange(run.start, run.stop) for run in runs]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)


def count_equal_before(values: Indices) -> Indices:
    """Return for each element how many equal elements precede it: [5, 7, 5, 5] gives [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first_equal = np.searchsorted(ordered, ordered)  # where the equal elements of each begin in `ordered`
    result = np.empty(len(values), dtype=np.int64)
    result[order] = np.arange(len(values)) - first_equal
    return result
