"""Bindings of groups to broker clusters, and which of several ConsumerGroups owns a consumer group.

A *binding* is the broker cluster that a group uses, and what the operator polls there for the group. Each ConsumerGroup
claims the consumer group that it names in spec.group. Among ConsumerGroups that claim the same one:

- *Rivals* share a name server or a broker.
- A group is *accepted* if its brokers return its consumers instead of rejecting the request.
- The oldest rival that is accepted at common brokers owns the consumer group; a younger one is a duplicate, which must
  release all queues.
- A group without an assignment waits until every older rival was polled, with or without success: until then an older
  rival may turn out to be the owner.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rota.aio import loop_time
from rota.brokers.port import Brokers
from rota.kube.brokers.broker_access import ClusterAccess
from rota.kube.brokers.consumer_poller import ConsumerPoller
from rota.kube.brokers.lag.lag_poller import LagPoller
from rota.kube.brokers.online_consumers import suffix_of
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.brokers.topic_interest import TopicInterest
from rota.kube.client.objects import ObjectKey
from rota.kube.state.group import Group
from rota.model import Finding, Queue, Reason
from rota.spec import RocketMQ

_AFTER_ANY_TIME = "~"  # sorts after every timestamp


@dataclass
class BrokerCluster:
    """One broker cluster, reached by the same name servers and credentials, and its pollers."""

    access: ClusterAccess
    brokers: Brokers
    route_watcher: RouteWatcher  # also polls the online consumers
    lag_poller: LagPoller
    consumer_poller: ConsumerPoller  # asks unmanaged consumers for their settings
    tasks: Sequence[asyncio.Task[None]]


@dataclass
class Binding:
    """The binding of a group to its broker cluster."""

    group: Group
    interest: TopicInterest
    rocketmq: RocketMQ
    cluster: BrokerCluster | None = None  # None while the operator does not lead, or a Secret is missing
    problems: tuple[Finding, ...] = ()  # problems found by the last read of its Secrets
    # Whether a poll was tried since this operator leads, also if the Secret was missing or no broker responded.
    was_polled: bool = False
    is_accepted: bool = False  # whether the brokers accepted the group by their last response

    @property
    def key(self) -> ObjectKey:
        """The group's namespace and name."""
        return self.group.namespace, self.group.name

    @property
    def source(self) -> tuple[str, bytes]:
        """Identifies the group's access: its namespace, and the name servers and Secrets that its spec names."""
        return self.group.namespace, msgspec.json.encode(self.rocketmq)

    @property
    def needs_secret_reads(self) -> bool:
        """Whether its Secrets are read again periodically: credentials or TLS are in use, or the last read failed."""
        return bool(self.rocketmq.credentials_secret or self.rocketmq.tls.enabled or self.problems)

    @property
    def creation_order(self) -> tuple[str, str]:
        """Sort key: creation time, then uid; the oldest group first, a group whose object is not known last."""
        if self.group.body is None:
            return _AFTER_ANY_TIME, ""
        metadata = self.group.body.metadata
        return metadata.creation_timestamp or _AFTER_ANY_TIME, metadata.uid

    def is_older_than(self, rival: "Binding") -> bool:
        """Whether the group was created before the rival."""
        return self.creation_order < rival.creation_order

    @property
    def broker_addresses(self) -> frozenset[str]:
        """The addresses of the brokers that have the group's topics; empty while they are not known."""
        if self.cluster is None:
            return frozenset()
        brokers = self.cluster.route_watcher.routes.brokers_of(self.interest.consumed_topics)
        return self.cluster.brokers.addresses(brokers)

    def has_common_broker(self, rival: "Binding") -> bool:
        """Whether the topics of two groups are known to be on a common broker."""
        return not self.broker_addresses.isdisjoint(rival.broker_addresses)

    def update_acceptance(self, *, was_polled: bool = False) -> bool:
        """Record whether the group was polled and is accepted by its brokers; return whether either has changed."""
        previous = self.was_polled, self.is_accepted
        self.was_polled = self.was_polled or was_polled
        is_accepted = self.cluster.route_watcher.online_of(self.key).is_accepted if self.cluster else None
        if is_accepted is not None:  # None: the brokers did not respond, so their last response still counts
            self.is_accepted = is_accepted
        return (self.was_polled, self.is_accepted) != previous


class Bindings:
    """The bindings of all groups, and which groups claim the same consumer group."""

    def __init__(self) -> None:
        self._bindings: dict[ObjectKey, Binding] = {}
        self._claims: dict[str, set[ObjectKey]] = {}  # by consumer group: the ConsumerGroups that claim it

    def __iter__(self) -> Iterator[Binding]:
        """Iterate over a copy: groups may come and go meanwhile."""
        return iter(list(self._bindings.values()))

    def __contains__(self, binding: Binding) -> bool:
        """Whether this is still the binding of its group, which may have been deleted."""
        return self._bindings.get(binding.key) is binding

    def get(self, key: ObjectKey) -> Binding | None:
        """Return the binding of the group with this key."""
        return self._bindings.get(key)

    def of(self, group: Group) -> Binding | None:
        """Return the binding of a group."""
        return self._bindings.get((group.namespace, group.name))

    def cluster_of(self, key: ObjectKey) -> BrokerCluster | None:
        """Return the cluster that a group is bound to."""
        binding = self._bindings.get(key)
        return binding.cluster if binding else None

    def add(self, binding: Binding) -> None:
        """Add a group, which claims its consumer group."""
        self._bindings[binding.key] = binding
        self._claims.setdefault(binding.interest.consumer_group, set()).add(binding.key)

    def update(self, binding: Binding, group: Group, interest: TopicInterest, rocketmq: RocketMQ) -> None:
        """Change a binding, and the claim of its group."""
        self._remove_claim(binding)
        binding.group = group
        binding.interest = interest
        binding.rocketmq = rocketmq
        self.add(binding)

    def remove(self, binding: Binding) -> None:
        """Remove a group and its claim."""
        del self._bindings[binding.key]
        self._remove_claim(binding)

    def _remove_claim(self, binding: Binding) -> None:
        claimants = self._claims[binding.interest.consumer_group]
        claimants.discard(binding.key)
        if not claimants:
            del self._claims[binding.interest.consumer_group]

    def rivals_of(self, binding: Binding) -> list[Binding]:
        """Return the other groups that claim this one's consumer group at the same brokers."""
        claimants = sorted(self._claims[binding.interest.consumer_group] - {binding.key})
        rivals = map(self._bindings.__getitem__, claimants)
        return [rival for rival in rivals if share_brokers(binding, rival)]

    def unmanaged_ids(self, key: ObjectKey) -> Collection[str]:
        """Return the client ids of a group's unmanaged consumers, as its brokers last listed them."""
        binding = self._bindings.get(key)
        if binding is None or binding.cluster is None:
            return ()
        client_ids = binding.cluster.route_watcher.online_of(key).consumers
        if not client_ids:
            return ()
        suffixes = member_suffixes(binding, self.rivals_of(binding), loop_time())
        return [client_id for client_id in client_ids if suffix_of(client_id) not in suffixes]

    def reported_offsets(self, key: ObjectKey) -> Mapping[Queue, int]:
        """Return each queue's lowest offset over the members of a Broadcasting group, as they report it."""
        binding = self._bindings.get(key)
        return binding.group.reported_offsets if binding else {}

    def topic_starts(self, key: ObjectKey) -> Mapping[str, float]:
        """Return since when a group consumes each topic, in seconds since 1970."""
        binding = self._bindings.get(key)
        document = binding.group.stored_assignment.document if binding else None
        return document.topic_start_seconds if document else {}


def share_brokers(binding: Binding, rival: Binding) -> bool:
    """Whether two groups name a common name server, or their topics are known to be on a common broker."""
    have_common_server = not {*binding.rocketmq.name_servers}.isdisjoint(rival.rocketmq.name_servers)
    return have_common_server or binding.has_common_broker(rival)


def owns_consumer_group(binding: Binding, rival: Binding) -> bool:
    """Whether `binding` owns the consumer group, and not `rival`: it is older, and accepted by brokers that both use.

    Acceptance is recorded for all brokers of a group together. So it counts only if both groups have topics on a common
    broker, which a common name server does not prove.
    """
    return binding.is_older_than(rival) and binding.is_accepted and binding.has_common_broker(rival)


def member_suffixes(binding: Binding, rivals: Iterable[Binding], now: float) -> Collection[str]:
    """Return the suffixes of the client ids of a group's members (see `suffix_of`)."""
    suffixes = {*binding.group.client_ids.suffixes(now)}
    for rival in rivals:
        # The members of a duplicate count as members of this group, not as unmanaged: they must release all queues.
        if owns_consumer_group(binding, rival):
            suffixes.update(rival.group.client_ids.suffixes(now))
    return suffixes


def awaits_older(binding: Binding, rivals: Iterable[Binding]) -> bool:
    """Whether a group without an assignment has to wait: an older rival may turn out to own its consumer group."""
    if binding.group.stored_assignment.document is not None:
        return False
    return any(rival.is_older_than(binding) and not rival.was_polled for rival in rivals)


def duplicate_problems(binding: Binding, rivals: Iterable[Binding]) -> list[Finding]:
    """Return the finding DuplicateConsumerGroup if an older rival owns the group's consumer group."""
    for rival in rivals:
        if owns_consumer_group(rival, binding):
            return [_duplicate_finding(binding, rival.group)]
    return []


def _duplicate_finding(binding: Binding, owner: Group) -> Finding:
    # Tenants of this namespace must not learn the names of groups in other namespaces.
    older_group = "An older ConsumerGroup of another namespace"
    if owner.namespace == binding.group.namespace:
        older_group = f"The older ConsumerGroup {owner.name}"
    message = (
        f"{older_group} manages the consumer group {binding.interest.consumer_group} at the same brokers;"
        " give this one its own spec.group, or delete one of them"
    )
    return Finding(Reason.DUPLICATE_CONSUMER_GROUP, message)
