"""Sticky: the most even spread over all topics together, and among such spreads one with the fewest moves.

In the most even spread of n queues over m members each member owns b = n div m queues, and n mod m members own one
more: that number is a member's *quota*. A member that owns c queues now can keep at most min(c, quota) of them, and the
algorithm lets it keep exactly that many; every other queue has to change its owner, or has none. So the moves are
fewest if as many queues as possible are kept. A quota of b + 1 instead of b lets a member keep one queue more if it
owns more than b now, and makes no difference otherwise. So the larger quotas go to such members first.

Retry queues are spread in a second step, to the members that own least; so neither the spread of the others nor the
whole becomes uneven by more than one. Each step makes the fewest moves for its own queues, not for both together: a
retry queue may move that could have stayed. A group has only one retry queue at a broker.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rota.model import NO_OWNER, Roster
from rota.sentences import pluralize
from rota.strategies.arrays import Indices, Owners, count_equal_before, current_owners, indices_of_runs, is_retry_topic
from rota.strategies.phrases import NO_PREVIOUS_OWNER

# `_deal` uses a table up to this size, which takes a quarter of the time of sorting: 76 µs against 314 µs for 10,000
# queues. From some 16 cells a queue on, sorting is faster. Small tables take 10 µs, as does sorting.
MAX_TABLE_CELLS_PER_QUEUE = 4
SMALL_TABLE_CELLS = 1024


def sticky(roster: Roster) -> Owners:
    """Spread all queues as evenly as possible, with the fewest moves that allow it."""
    load = np.zeros(len(roster.members), dtype=np.int64)
    retry_queues = indices_of_runs(run for run in roster.runs if is_retry_topic(run.topic))
    if not len(retry_queues):
        return _spread(current_owners(roster), load)
    other_queues = indices_of_runs(run for run in roster.runs if not is_retry_topic(run.topic))
    owners = current_owners(roster).copy()
    for part in (other_queues, retry_queues):
        if len(part):
            owners[part] = _spread(owners[part], load)
            load += np.bincount(owners[part], minlength=len(load))
    return owners


def why_sticky(roster: Roster, owners: Owners, queues: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each queue (an index): how many queues the members had and keep, and the even share."""
    ordinary = np.array([not is_retry_topic(queue.topic) for queue in roster.queues])
    current = current_owners(roster)
    had = _count_by_member(roster, current[ordinary])
    keeps = _count_by_member(roster, owners[ordinary & (current == owners)])
    even = _describe_even_share(roster, int(ordinary.sum()))
    even_with_retry = _describe_even_share(roster, len(ordinary))
    even += "" if ordinary.all() else ", retries apart"  # `had` and `keeps` leave retry queues out
    for queue in queues:
        was = roster.owners[queue]
        now = owners[queue]
        name = roster.members[now]
        if not ordinary[queue]:
            yield f"retry queues are spread after the others, to members that then own fewest ({even_with_retry})"
        elif was == NO_OWNER:
            yield f"{NO_PREVIOUS_OWNER}; {name} had {pluralize(had[now], 'queue')} ({even})"
        elif was == now:
            number = "all" if keeps[now] == had[now] else keeps[now]
            yield f"{name} keeps {number} of its {pluralize(had[now], 'queue')} ({even})"
        else:
            giver = f"{roster.members[was]} had {pluralize(had[was], 'queue')} and keeps {keeps[was]}"
            yield f"{giver}, {name} had {had[now]} ({even})"


def _count_by_member(roster: Roster, owners: Owners) -> list[int]:
    return list(map(int, np.bincount(owners[owners != NO_OWNER], minlength=len(roster.members))))


def _describe_even_share(roster: Roster, queues: int) -> str:
    each, more = divmod(queues, len(roster.members))
    return f"an even share is {f'{each} or {each + 1}' if more else each}"


def _spread(current: Owners, load: Indices) -> Owners:
    """Return new owners of the queues that `current` has.

    `load` is the number of other queues that each member owns. If it is even, the members' totals are even again.
    """
    counts = np.bincount(current[current != NO_OWNER], minlength=len(load))
    quotas = _compute_quotas(counts, load, len(current))
    owners = current.copy()
    _unassign_excess(owners, counts, quotas)
    unassigned = np.flatnonzero(owners == NO_OWNER)
    kept_counts = np.minimum(counts, quotas)
    owners[unassigned] = _deal(quotas - kept_counts)
    return owners


def _compute_quotas(counts: Indices, load: Indices, queues: int) -> Indices:
    """Return each member's quota, so that loads with quotas are even; the larger quotas go where they avoid a move."""
    level = (int(load.sum()) + queues) // len(load)
    quotas = np.maximum(level - load, 0)
    remaining = queues - int(quotas.sum())
    if remaining:
        # One more queue goes first to members at the level that would otherwise lose one, next to other members at the
        # level, last to members above it. np.lexsort sorts by its last key first, and is stable.
        is_above_level = load + quotas > level
        loses_none = counts <= quotas
        order = np.lexsort((loses_none, is_above_level))
        quotas[order[:remaining]] += 1
    return quotas


def _unassign_excess(owners: Owners, counts: Indices, quotas: Indices) -> None:
    """Take each member's excess over its quota from it: the last of its queues. Changes `owners`."""
    has_excess = counts > quotas
    if has_excess.any():
        candidates = np.flatnonzero((owners != NO_OWNER) & has_excess[owners])  # queues of members with excess
        givers = owners[candidates].astype(np.int64)
        is_excess = count_equal_before(givers) >= quotas[givers]
        owners[candidates[is_excess]] = NO_OWNER


def _deal(missing: Indices) -> Owners:
    """Deal queues in turn to members below quota, so that adjacent queues (of one topic) go to different members.

    `missing` is the number of queues that each member lacks. Table and sorting give the same result.
    """
    takers = np.flatnonzero(missing)
    counts = missing[takers]
    rounds = int(counts.max(initial=0))
    if rounds * len(takers) <= MAX_TABLE_CELLS_PER_QUEUE * int(counts.sum()) + SMALL_TABLE_CELLS:
        takes_part = np.arange(rounds)[:, None] < counts  # a row for each round, a column for each taker
        _, dealt = np.nonzero(takes_part)  # the column of each queue's taker, row by row
        return takers[dealt].astype(np.int32)
    repeated = np.repeat(np.arange(len(takers)), counts)
    by_round = np.argsort(count_equal_before(repeated), kind="stable")
    return takers[repeated[by_round]].astype(np.int32)
