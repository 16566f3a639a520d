"""Noise filter for queue weights: a new measurement counts only if some member's load differs clearly by it."""

from collections.abc import Mapping
from math import sqrt

from rota.model import Queue

# A member's load has changed if it differs by more than both of these. A noise of 10 % in the weights causes less, even
# if one member was given all queues that looked heavy.
NOISE_SHARE = 0.3  # of the root of its queues' squared weights
MIN_CHANGE_SHARE = 0.12  # of the mean load

Weights = Mapping[Queue, float]


def filter_noise(previous: Weights, current: Weights, owners: Mapping[Queue, str]) -> Weights:
    """Return the previous weights, unless the current ones show a member's load as clearly changed.

    Measured rates always vary, and a strategy that evens out small differences would move queues for ever. The noise of
    a member's queues partly cancels out: it grows with the root of the sum of their squared weights. But not wholly: a
    member that was given queues because of noise in their weights carries another load by the next measurement.
    """
    total = sum(current.values())
    previous_total = sum(previous.values())
    if previous.keys() != current.keys() or not previous_total:
        return current
    change: dict[str, float] = {}
    squares: dict[str, float] = {}
    for queue, weight in current.items():  # only shares are compared: an equal growth of all weights moves nothing
        owner = owners.get(queue, "")
        change[owner] = change.get(owner, 0.0) + weight - previous[queue] * total / previous_total
        squares[owner] = squares.get(owner, 0.0) + weight * weight
    mean = total / (len(change.keys() - {""}) or 1)
    has_changed = any(
        abs(delta) > max(NOISE_SHARE * sqrt(squares[owner]), MIN_CHANGE_SHARE * mean) for owner, delta in change.items()
    )
    return current if has_changed else previous
