"""Array arithmetic that several strategies share; owners are int32 arrays over `roster.queues`."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from rota.model import NO_OWNER, Roster, Run

Owners = NDArray[np.int32]
Indices = NDArray[np.int64]


def whole(option: object) -> bool:
    """Whether an option is a whole number from 0 up (True does not count as one)."""
    return isinstance(option, int) and not isinstance(option, bool) and option >= 0


def nobody(count: int) -> Owners:
    """Return an array for `count` queues without owners."""
    return np.full(count, NO_OWNER, dtype=np.int32)


def present(roster: Roster) -> Owners:
    """Return the present owners as a read-only view."""
    owners: Owners = np.frombuffer(roster.owners, dtype=np.int32)
    owners.flags.writeable = False
    return owners


def blocks(queues: int, members: int) -> Indices:
    """Divide queues into contiguous blocks, one for each member; the first blocks have one queue more."""
    members = max(min(queues, members), 1)  # further members get nothing
    share, more = divmod(queues, members)
    sizes = np.full(members, share)
    sizes[:more] += 1
    return np.repeat(np.arange(members), sizes)


def circle(queues: int, members: int) -> Indices:
    """Deal queues out one by one, to each member in turn."""
    return np.arange(queues) % members


def by_topic(roster: Roster, divide: Callable[[int, int], Indices]) -> Owners:
    """Assign each topic separately, as the reference does; `divide(queues, members)` returns indices of members."""
    sizes = [stop - start for start, stop in roster.topics]
    shares = {size: divide(size, len(roster.members)) for size in set(sizes)}  # topics of one size have one result
    return np.concatenate([shares[size] for size in sizes]).astype(np.int32)


def of_runs(runs: Iterable[Run]) -> Indices:
    """Return the indices of all queues in these runs."""
    spans = [np.arange(run.start, run.stop) for run in runs]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)


def ranks(groups: Indices) -> Indices:
    """Return for each element how many equal elements precede it."""
    order = np.argsort(groups, kind="stable")
    arranged = groups[order]
    first = np.searchsorted(arranged, arranged)
    result = np.empty(len(groups), dtype=np.int64)
    result[order] = np.arange(len(groups)) - first
    return result
