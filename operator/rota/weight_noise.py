"""Noise filter for queue weights: new weights are used only if they clearly show another load for some member."""

from collections.abc import Mapping
from math import sqrt

from rota.model import Queue

# A member's load counts as changed if it differs by more than both limits. Errors of 10 % in each weight cause less.
#
# First limit: this share of the root of the sum of squared weights of the member's queues. Errors of several queues
# partly cancel out, so they grow like this root, and not like the sum.
NOISE_SHARE = 0.3
# Second limit: this share of the mean load, for errors that do not cancel out. Balanced chooses queues by their
# measured weights, so one member may have got just the queues that looked too heavy. The next measurement then shows a
# load that is lower by up to 10 %, though no queue's rate has changed.
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
    changes: dict[str, float] = {}  # by owner; queues without an owner count as if one more member had them
    squares: dict[str, float] = {}
    for queue, weight in current.items():
        owner = owners.get(queue, "")
        # The previous weight, scaled to the present total: if all weights grow alike, no member's share changes.
        unchanged = previous[queue] * total / previous_total
        changes[owner] = changes.get(owner, 0.0) + weight - unchanged
        squares[owner] = squares.get(owner, 0.0) + weight * weight
    owner_count = len(changes.keys() - {""})
    mean_load = total / max(owner_count, 1)
    for owner, change in changes.items():
        if abs(change) > max(NOISE_SHARE * sqrt(squares[owner]), MIN_CHANGE_SHARE * mean_load):
            return current
    return previous
