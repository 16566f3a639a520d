"""Queue weights, for policies that spread weight: each queue's incoming rate over the last hour."""

from collections.abc import Mapping

from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.weight_noise import Weights, filter_noise


def group_weights(group: Group, broker: BrokerState, lag: GroupLag) -> Weights | None:
    """Update and return the weights of the group's queues; None: not measured yet; empty: the policy needs none."""
    if not group.resolved_spec.needs_weights:
        return {}
    weights = measure_weights(broker, lag.incoming_rates, RETRY_TOPIC_PREFIX + group.consumer_group)
    if weights is not None:
        # Weights change only if a member's load changed clearly, so the filter needs the queues' owners.
        weights = filter_noise(group.queue_weights, weights, group.stored_assignment.owners)
        group.queue_weights = weights
    return weights


def measure_weights(
    broker: BrokerState, incoming_rates: Mapping[Queue, float | None], retry_topic: str
) -> Weights | None:
    """Return the incoming messages a second of each queue; None if there is no queue, or a queue's rate is unknown.

    Queues of `retry_topic`, and topics without a known route, have no weight.
    """
    rates: dict[Queue, float] = {}
    for topic, view in broker.views.items():
        if topic == retry_topic or view is None:
            continue
        for queue in view.queues:
            rate = incoming_rates.get(queue)
            if rate is None:
                return None
            rates[queue] = rate
    return rates or None
