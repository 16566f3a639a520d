"""Sticky: the evenest spread over all topics together, and among those the fewest moves.

Let n queues fall on m members, and let c(i) be what member i owns now. In the evenest spread each member owns b = n
div m queues, and n mod m members own one more. A member with quota q(i) can keep at most min(c(i), q(i)) of its
queues, and we let it keep exactly that many: K = sum of min(c(i), q(i)) queues stay. Raising a member's quota from b
to b + 1 adds 1 to K if c(i) > b and nothing otherwise; so giving the larger quotas to members with c(i) > b first
makes K as large as any evenest spread can have it. Every queue that does not stay either had no owner or has to leave
one, so no evenest spread moves fewer.

Retry queues are spread after the others, onto members in the order in which they own least; so neither the spread of
the others nor the whole becomes uneven by more than one. The fewest moves are then those of the others by themselves,
and of the retry queues given where the others went: who gets which of the others does not look at retry queues, so a
retry queue may move that need not have, had both been chosen together. One at a broker is all that a group has.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rota.model import NOBODY, RETRY, Roster
from rota.sentences import count
from rota.strategies.arrays import Indices, Owners, of_runs, present, ranks
from rota.strategies.words import NOBODY_OWNED_IT


def sticky(roster: Roster) -> Owners:
    """Spread all queues as evenly as can be, moving as few as that allows."""
    retry = [run for run in roster.runs if run.topic.startswith(RETRY)]
    if not retry:
        return _spread(present(roster), np.zeros(len(roster.members), dtype=np.int64))
    others = [run for run in roster.runs if not run.topic.startswith(RETRY)]
    owners = present(roster).copy()
    load = np.zeros(len(roster.members), dtype=np.int64)
    for part in (of_runs(others), of_runs(retry)):
        if len(part):
            owners[part] = _spread(owners[part], load)
            load += np.bincount(owners[part], minlength=len(load))
    return owners


def why_sticky(roster: Roster, owners: Owners, queues: Sequence[int]) -> Iterator[str]:
    """Say how many queues each keeps in the even spread."""
    others = np.array([not queue.topic.startswith(RETRY) for queue in roster.queues])
    had = _counted(roster, present(roster)[others])
    keeps = _counted(roster, owners[others & (present(roster) == owners)])
    even, even_with_retry = _even_share(roster, int(others.sum())), _even_share(roster, len(others))
    even += "" if others.all() else ", retries apart"  # a member that is asked for all that it owns has those, too
    for queue in queues:
        was, now = roster.owners[queue], owners[queue]
        name = roster.members[now]
        if not others[queue]:
            yield f"retry queues are spread after the others, to members that then own fewest ({even_with_retry})"
        elif was == NOBODY:
            yield f"{NOBODY_OWNED_IT}; {name} had {count(had[now], 'queue')} ({even})"
        elif was == now:
            kept = "all" if keeps[now] == had[now] else keeps[now]
            yield f"{name} keeps {kept} of its {count(had[now], 'queue')} ({even})"
        else:
            giver = f"{roster.members[was]} had {count(had[was], 'queue')} and keeps {keeps[was]}"
            yield f"{giver}, {name} had {had[now]} ({even})"


def _counted(roster: Roster, owners: Owners) -> list[int]:
    return list(map(int, np.bincount(owners[owners != NOBODY], minlength=len(roster.members))))


def _even_share(roster: Roster, queues: int) -> str:
    each, more = divmod(queues, len(roster.members))
    return f"an even share is {f'{each} or {each + 1}' if more else each}"


def _spread(current: Owners, load: Indices) -> Owners:
    """Assign these queues on top of a load that is itself even, so that the sum is."""
    counts = np.bincount(current[current != NOBODY], minlength=len(load))
    quota = _quotas(counts, load, len(current))
    owners = current.copy()
    _let_go(owners, counts, quota)
    free = np.flatnonzero(owners == NOBODY)
    owners[free] = _deal(quota - np.minimum(counts, quota))
    return owners


def _quotas(counts: Indices, load: Indices, queues: int) -> Indices:
    """Return how many queues each member shall own: level, and the ones left over where they need not move."""
    level, left = divmod(int(load.sum()) + queues, len(load))
    quota = np.maximum(level - load, 0)
    left = queues - int(quota.sum())
    if left:
        above_already = load + quota > level
        # lexsort is stable and its last key counts most: members not above the level, then those that need not move.
        order = np.lexsort((counts <= quota, above_already))
        quota[order[:left]] += 1
    return quota


def _let_go(owners: Owners, counts: Indices, quota: Indices) -> None:
    """Take from each member what is above its quota: its last queues."""
    above = counts > quota
    if above.any():
        candidates = np.flatnonzero((owners != NOBODY) & above[owners])
        holders = owners[candidates].astype(np.int64)
        owners[candidates[ranks(holders) >= quota[holders]]] = NOBODY


def _deal(wanted: Indices) -> Owners:
    """Deal queues around among those who want some, so that neighbours (one topic's) go to different members."""
    takers = np.flatnonzero(wanted)
    wants = wanted[takers]
    rounds = int(wants.max(initial=0))
    if rounds * len(takers) <= 4 * int(wants.sum()) + 1024:  # a table of rounds by takers is quicker than sorting
        _, dealt = np.nonzero(np.arange(rounds)[:, None] < wants)
        return takers[dealt].astype(np.int32)
    repeated = np.repeat(np.arange(len(takers)), wants)
    return takers[repeated[np.argsort(ranks(repeated), kind="stable")]].astype(np.int32)
