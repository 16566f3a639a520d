"""What a group's queues weigh for a policy that spreads weight: what came to each over the last hour."""

from collections.abc import Mapping

from rota.kube.brokers.lag.lag_poller import Lag
from rota.kube.state.broker_state import AtBroker
from rota.kube.state.group import Group
from rota.model import RETRY, Queue
from rota.weight_smoothing import Weights, settled


def of_group(group: Group, broker: AtBroker, lag: Lag) -> Weights | None:
    """Return what the group's queues weigh; None where that could not be measured, nothing where nobody asks for it."""
    if not group.weighs_queues:
        return {}
    found = measured(broker, lag.flows, RETRY + group.at_broker)
    if found is not None:
        found = group.weights = settled(group.weights, found, group.record.owners)
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
