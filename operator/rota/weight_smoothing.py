"""What queues weigh for a policy that spreads weight: which measurement stands, without the noise in it."""

from collections.abc import Mapping
from math import sqrt

from rota.model import Queue

# What is measured twice may differ by so much of a queue's weight, and by so much of what members carry on average:
# more than a noise of 10 % makes, also where the strategy has given all that looked heavy to one member.
NOISE, LEAST = 0.3, 0.12

Weights = Mapping[Queue, float]


def settled(before: Weights, now: Weights, owners: Mapping[Queue, str]) -> Weights:
    """Return what was measured before, unless somebody carries clearly more or less by what is measured now.

    Rates never are the same twice, and a strategy that evens out what differs by little would move queues for ever.
    The more queues somebody has, the more their noise cancels out: it grows as the root of the sum of squares does. But
    not wholly: who was given queues for what was noise in their weights carries something else by the next measurement.
    """
    total, formerly = sum(now.values()), sum(before.values())
    if before.keys() != now.keys() or not formerly:
        return now
    change: dict[str, float] = {}
    squares: dict[str, float] = {}
    for queue, weight in now.items():  # shares are compared: that there is more of everything moves nothing
        owner = owners.get(queue, "")
        change[owner] = change.get(owner, 0.0) + weight - before[queue] * total / formerly
        squares[owner] = squares.get(owner, 0.0) + weight * weight
    mean = total / (len(change.keys() - {""}) or 1)
    clearly = any(abs(it) > max(NOISE * sqrt(squares[owner]), LEAST * mean) for owner, it in change.items())
    return now if clearly else before
