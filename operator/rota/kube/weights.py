"""What queues weigh for a policy that spreads weight: what came to each over the last hour, without the noise in it."""

from collections.abc import Mapping
from math import sqrt

from rota.kube.group import AtBroker, Group
from rota.kube.lags import Lag
from rota.model import RETRY, Queue

# What is measured twice may differ by so much of a queue's weight, and by so much of what members carry on average:
# more than a noise of 10 % makes, also where the strategy has given all that looked heavy to one member.
NOISE, LEAST = 0.3, 0.12

Weights = Mapping[Queue, float]


def of_group(group: Group, broker: AtBroker, lag: Lag) -> Weights | None:
    """Return what the group's queues weigh; None where that could not be measured, nothing where nobody asks for it."""
    if not group.weighs_queues:
        return {}
    found = measured(broker, lag.flows, RETRY + group.at_broker)
    if found is not None:
        found = group.weights = settled(group.weights, found, group.owners)
    return found


def measured(broker: AtBroker, flows: Mapping[Queue, float | None], retries: str) -> Weights | None:
    """Return the messages a second of each queue, if that is known of all; retry queues weigh nothing anyway."""
    found: dict[Queue, float] = {}
    for topic, view in broker.views.items():
        if topic == retries:
            continue
        for queue in view.queues if view else ():
            if (flow := flows.get(queue)) is None:
                return None
            found[queue] = flow
    return found or None


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
