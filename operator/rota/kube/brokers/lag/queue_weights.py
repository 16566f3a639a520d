"""Queue weights, for policies that spread weight: each queue's incoming rate over the last hour."""

from collections.abc import Mapping

from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.model import RETRY, Queue
from rota.weight_smoothing import Weights, filter_noise


def of_group(group: Group, broker: BrokerState, lag: GroupLag) -> Weights | None:
    """Return the weights of the group's queues; None if not measured yet, empty if the policy needs none."""
    if not group.weighs_queues:
        return {}
    weights = measured(broker, lag.flows, RETRY + group.at_broker)
    if weights is not None:
        weights = group.weights = filter_noise(group.weights, weights, group.record.owners)
    return weights


def measured(broker: BrokerState, flows: Mapping[Queue, float | None], retries: str) -> Weights | None:
    """Return the incoming messages a second of each queue, None unless known for all; retry queues weigh nothing."""
    rates: dict[Queue, float] = {}
    for topic, view in broker.views.items():
        if topic == retries:
            continue
        for queue in view.queues if view else ():
            if (flow := flows.get(queue)) is None:
                return None
            rates[queue] = flow
    return rates or None
