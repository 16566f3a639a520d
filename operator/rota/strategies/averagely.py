"""Averagely and AveragelyByCircle: each topic by itself, as evenly as counts allow.

The reference's AVG and AVG_BY_CIRCLE.
"""

from rota.model import Roster
from rota.strategies.arrays import Owners, blocks, by_topic, circle


def averagely(roster: Roster) -> Owners:
    """Give each member a contiguous block of each topic; the first members get one queue more."""
    return by_topic(roster, blocks)


def averagely_by_circle(roster: Roster) -> Owners:
    """Deal each topic's queues out one by one, around and around."""
    return by_topic(roster, circle)
