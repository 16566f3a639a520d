"""Words that the strategies' reasons share."""

from rota.model import NOBODY, Roster
from rota.strategies.arrays import Owners

NOBODY_OWNED_IT = "nobody owned it"


def what_happens(roster: Roster, owners: Owners, queue: int) -> str:
    """Say what becomes of a queue, without saying why."""
    was, now = roster.owners[queue], int(owners[queue])
    before, after = ("nobody" if member == NOBODY else roster.members[member] for member in (was, now))
    if was != now:
        return f"{roster.queues[queue]} goes {'' if was == NOBODY else f'from {before} '}to {after}"
    return f"{roster.queues[queue]} {'belongs to' if now == NOBODY else 'stays with'} {after}"
