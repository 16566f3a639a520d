"""Noise filter for queue weights: a new measurement counts only if some member's load differs clearly by it."""

from collections.abc import Mapping
from math import sqrt

from rota.model import Queue

# A member's load has changed if it differs by more than both of these; a noise of 10 % in each weight causes less.
# A share of the root of the sum of squared weights of a member's queues, since their noise partly cancels out.
NOISE_SHARE = 0.3
# A share of the mean load. A member that was given queues because of noise in their weights has another load at the
# next measurement, even if it got all queues that looked heavy.
MIN_CHANGE_SHARE = 0.12

Weights = Mapping[Queue, float]


def filter_noise(previous: Weights, current: Weights, owners: Mapping[Queue, str]) -> Weights:
    """Return the previous weights, unless the current ones show a member's load as clearly changed.

    Measured rates always vary, and a strategy that evens out small differences would move queues for ever.
    """
    total = sum(current.values())
    previous_total = sum(previous.values())
    if previous.keys() != current.keys() or not previous_total:
        return current
    changes: dict[str, float] = {}  # by owner; queues without an owner count as those of one more member
    squares: dict[str, float] = {}
    for queue, weight in current.items():
        owner = owners.get(queue, "")
        unchanged = previous[queue] * total / previous_total  # only shares count: all weights may grow alike
        changes[owner] = changes.get(owner, 0.0) + weight - unchanged
        squares[owner] = squares.get(owner, 0.0) + weight * weight
    owner_count = len(changes.keys() - {""})
    mean_load = total / max(owner_count, 1)
    for owner, change in changes.items():
        if abs(change) > max(NOISE_SHARE * sqrt(squares[owner]), MIN_CHANGE_SHARE * mean_load):
            return current
    return previous
