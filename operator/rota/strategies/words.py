"""Phrases that the strategies' reasons share."""

from rota.model import NOBODY, Roster
from rota.strategies.arrays import Owners

NOBODY_OWNED_IT = "nobody owned it"


def what_happens(roster: Roster, owners: Owners, queue: int) -> str:
    """Describe a queue's change of owner, without the reason."""
    was, now = roster.owners[queue], int(owners[queue])
    giver, taker = ("nobody" if member == NOBODY else roster.members[member] for member in (was, now))
    if was != now:
        return f"{roster.queues[queue]} goes {'' if was == NOBODY else f'from {giver} '}to {taker}"
    return f"{roster.queues[queue]} {'belongs to' if now == NOBODY else 'stays with'} {taker}"
