"""Phrases that the reasons of several strategies contain."""

from rota.model import NO_OWNER, Roster
from rota.strategies.arrays import Owners

NO_PREVIOUS_OWNER = "it had no owner"


def describe_change(roster: Roster, owners: Owners, queue: int) -> str:
    """Describe a queue's change of owner, without the reason."""
    was = roster.owners[queue]
    now = int(owners[queue])
    owner = "no member" if now == NO_OWNER else roster.members[now]
    if was == now:
        return f"{roster.queues[queue]} {'belongs to' if now == NO_OWNER else 'stays with'} {owner}"
    origin = "" if was == NO_OWNER else f"from {roster.members[was]} "
    return f"{roster.queues[queue]} goes {origin}to {owner}"
