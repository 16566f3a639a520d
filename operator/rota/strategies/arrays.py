"""Array arithmetic that several strategies share; owners are int32 arrays over `roster.queues`."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from rota.model import NOBODY, Roster, Run

Owners = NDArray[np.int32]
Indices = NDArray[np.int64]


def whole(option: object) -> bool:
    """Whether an option is a whole number from 0 up (True is none)."""
    return isinstance(option, int) and not isinstance(option, bool) and option >= 0


def nobody(count: int) -> Owners:
    """Return owners for queues that nobody owns."""
    return np.full(count, NOBODY, dtype=np.int32)


def present(roster: Roster) -> Owners:
    """Return the present owners as an array that cannot be written to: it is a view."""
    found: Owners = np.frombuffer(roster.owners, dtype=np.int32)
    found.flags.writeable = False
    return found


def blocks(queues: int, members: int) -> Indices:
    """Cut queues into contiguous blocks, one a member; the first ones get one more."""
    members = max(min(queues, members), 1)  # the others get nothing
    share, more = divmod(queues, members)
    sizes = np.full(members, share)
    sizes[:more] += 1
    return np.repeat(np.arange(members), sizes)


def circle(queues: int, members: int) -> Indices:
    """Deal queues out one by one, around and around."""
    return np.arange(queues) % members


def by_topic(roster: Roster, one: Callable[[int, int], Indices]) -> Owners:
    """Assign each topic by itself, as the reference does: `one(queues, members)`."""
    sizes = [stop - start for start, stop in roster.topics]
    shares = {size: one(size, len(roster.members)) for size in set(sizes)}  # topics of one size are shared alike
    return np.concatenate([shares[size] for size in sizes]).astype(np.int32)


def of_runs(runs: Iterable[Run]) -> Indices:
    """Return the indices of all queues in these runs."""
    spans = [np.arange(run.start, run.stop) for run in runs]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)


def ranks(groups: Indices) -> Indices:
    """Return for each element how many equal ones come before it."""
    order = np.argsort(groups, kind="stable")
    arranged = groups[order]
    first = np.searchsorted(arranged, arranged)
    result = np.empty(len(groups), dtype=np.int64)
    result[order] = np.arange(len(groups)) - first
    return result
