"""Sticky: the most even spread over all topics together, and among such spreads one with the fewest moves.

Let n queues be spread over m members, and let member i own c(i) of them now. In the most even spread each member owns b
= n div m queues, and n mod m members own one more. A member with quota q(i) can keep at most min(c(i), q(i)) of its
queues, and the algorithm lets it keep exactly that many: K = sum of min(c(i), q(i)) queues stay. Raising a member's
quota from b to b + 1 adds 1 to K if c(i) > b and nothing otherwise; so giving the larger quotas to members with c(i) >
b first makes K as large as any such spread can have it. Every queue that does not stay either had no owner or has to
leave one, so no most even spread moves fewer.

Retry queues are spread after the others, to the members that own least; so neither the spread of the others nor the
whole becomes uneven by more than one. The fewest moves are then those of the other queues alone, and those of the retry
queues after them: the assignment of the others ignores retry queues, so a retry queue may move that could stay if both
were assigned together. A group has only one retry queue at a broker.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rota.model import NO_OWNER, RETRY_TOPIC_PREFIX, Roster
from rota.sentences import pluralize
from rota.strategies.arrays import Indices, Owners, of_runs, present, ranks
from rota.strategies.phrases import NO_PREVIOUS_OWNER


def sticky(roster: Roster) -> Owners:
    """Spread all queues as evenly as possible, with the fewest moves that allow it."""
    retry = [run for run in roster.runs if run.topic.startswith(RETRY_TOPIC_PREFIX)]
    if not retry:
        return _spread(present(roster), np.zeros(len(roster.members), dtype=np.int64))
    ordinary = [run for run in roster.runs if not run.topic.startswith(RETRY_TOPIC_PREFIX)]
    owners = present(roster).copy()
    load = np.zeros(len(roster.members), dtype=np.int64)
    for part in (of_runs(ordinary), of_runs(retry)):
        if len(part):
            owners[part] = _spread(owners[part], load)
            load += np.bincount(owners[part], minlength=len(load))
    return owners


def why_sticky(roster: Roster, owners: Owners, queues: Sequence[int]) -> Iterator[str]:
    """Yield how many queues the owner keeps in the even spread."""
    ordinary = np.array([not queue.topic.startswith(RETRY_TOPIC_PREFIX) for queue in roster.queues])
    had = _count_by_member(roster, present(roster)[ordinary])
    keeps = _count_by_member(roster, owners[ordinary & (present(roster) == owners)])
    even = _even_share(roster, int(ordinary.sum()))
    even_with_retry = _even_share(roster, len(ordinary))
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


def _even_share(roster: Roster, queues: int) -> str:
    each, more = divmod(queues, len(roster.members))
    return f"an even share is {f'{each} or {each + 1}' if more else each}"


def _spread(current: Owners, load: Indices) -> Owners:
    """Assign these queues on top of a load that is even, so that the sum is even, too."""
    counts = np.bincount(current[current != NO_OWNER], minlength=len(load))
    quota = _quotas(counts, load, len(current))
    owners = current.copy()
    _unassign_excess(owners, counts, quota)
    free = np.flatnonzero(owners == NO_OWNER)
    owners[free] = _deal(quota - np.minimum(counts, quota))
    return owners


def _quotas(counts: Indices, load: Indices, queues: int) -> Indices:
    """Return how many queues each member is to own: an equal number, and one more where that avoids a move."""
    level, extra = divmod(int(load.sum()) + queues, len(load))
    quota = np.maximum(level - load, 0)
    extra = queues - int(quota.sum())
    if extra:
        above_already = load + quota > level
        # lexsort is stable, its last key counts most: members not above the level, then members that would lose one.
        order = np.lexsort((counts <= quota, above_already))
        quota[order[:extra]] += 1
    return quota


def _unassign_excess(owners: Owners, counts: Indices, quota: Indices) -> None:
    """Take from each member its last queues, as many as are above its quota."""
    above = counts > quota
    if above.any():
        candidates = np.flatnonzero((owners != NO_OWNER) & above[owners])
        holders = owners[candidates].astype(np.int64)
        owners[candidates[ranks(holders) >= quota[holders]]] = NO_OWNER


def _deal(missing: Indices) -> Owners:
    """Deal queues in turn to members below quota, so that adjacent queues (of one topic) go to different members."""
    takers = np.flatnonzero(missing)
    counts = missing[takers]
    rounds = int(counts.max(initial=0))
    if rounds * len(takers) <= 4 * int(counts.sum()) + 1024:  # a table of rounds by takers is quicker than sorting
        _, dealt = np.nonzero(np.arange(rounds)[:, None] < counts)
        return takers[dealt].astype(np.int32)
    repeated = np.repeat(np.arange(len(takers)), counts)
    return takers[repeated[np.argsort(ranks(repeated), kind="stable")]].astype(np.int32)
