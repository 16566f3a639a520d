"""Bindings of groups to broker clusters, and which of several ConsumerGroups owns a consumer group."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rota.brokers.port import Brokers
from rota.kube.brokers.broker_access import ClusterAccess
from rota.kube.brokers.consumer_poller import ConsumerPoller
from rota.kube.brokers.lag.lag_poller import LagPoller
from rota.kube.brokers.route_watcher import RouteWatcher, TopicInterest
from rota.kube.state.group import Group
from rota.model import Finding, Reason
from rota.spec import RocketMQ

_AFTER_ANY_TIME = "~"  # sorts after every timestamp


@dataclass
class BrokerCluster:
    """One broker cluster, reached with one access, and its pollers."""

    access: ClusterAccess
    brokers: Brokers
    route_watcher: RouteWatcher
    lag_poller: LagPoller
    consumer_poller: ConsumerPoller
    tasks: Sequence[asyncio.Task[None]]


@dataclass
class Binding:
    """The binding of a group to its broker cluster."""

    group: Group
    interest: TopicInterest
    rocketmq: RocketMQ
    cluster: BrokerCluster | None = None
    problems: tuple[Finding, ...] = ()
    was_polled: bool = False  # since this operator leads; also without success: no Secret, or no response
    is_accepted: bool = False  # whether the brokers list the group's consumers; the last response counts

    @property
    def source(self) -> tuple[str, bytes]:
        """What determines the group's access: its namespace, and the name servers and Secrets that it names."""
        return self.group.namespace, msgspec.json.encode(self.rocketmq)

    @property
    def creation_order(self) -> tuple[str, str]:
        """Sort key: creation time, then uid; the oldest group first."""
        metadata = self.group.body.metadata if self.group.body else None
        return (metadata.creation_timestamp or _AFTER_ANY_TIME, metadata.uid) if metadata else (_AFTER_ANY_TIME, "")


def share_brokers(binding: Binding, rival: Binding) -> bool:
    """Whether two groups name a common name server, or name servers that lead to a common broker."""
    if not {*binding.rocketmq.name_servers}.isdisjoint(rival.rocketmq.name_servers):
        return True
    return not broker_addresses(binding).isdisjoint(broker_addresses(rival))


def broker_addresses(binding: Binding) -> frozenset[str]:
    """Return the addresses of the brokers of a group's topics; these list the group's consumers."""
    cluster = binding.cluster
    return cluster.brokers.addresses(cluster.route_watcher.brokers_of(binding.interest)) if cluster else frozenset()


def owns_consumer_group(binding: Binding, rival: Binding) -> bool:
    """Whether `binding` owns the consumer group of both: it is older, and accepted by brokers that both use.

    A common name server is no proof, nor is a route that lists a broker which was not asked.
    """
    is_older = binding.creation_order < rival.creation_order
    have_common_broker = not broker_addresses(binding).isdisjoint(broker_addresses(rival))
    return is_older and binding.is_accepted and have_common_broker


def awaits_older(binding: Binding, rivals: Sequence[Binding]) -> bool:
    """Whether a group without assignment has to wait: an older one may turn out to own its consumer group."""
    if binding.group.stored_assignment.document is not None:
        return False
    return any(not rival.was_polled and rival.creation_order < binding.creation_order for rival in rivals)


def duplicate_problems(binding: Binding, rivals: Sequence[Binding]) -> list[Finding]:
    """Return DuplicateConsumerGroup if an older group owns this one's consumer group."""
    owner = next((rival.group for rival in rivals if owns_consumer_group(rival, binding)), None)
    if owner is None:
        return []
    # Tenants of this namespace must not learn the names of groups in others.
    older_group = "An older ConsumerGroup of another namespace"
    if owner.namespace == binding.group.namespace:
        older_group = f"The older ConsumerGroup {owner.name}"
    message = (
        f"{older_group} manages the consumer group {binding.interest.consumer_group} at the same brokers;"
        " give this one its own spec.group, or delete one of them"
    )
    return [Finding(Reason.DUPLICATE_CONSUMER_GROUP, message)]
