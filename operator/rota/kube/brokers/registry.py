"""Registry of broker clusters: binds each group to its brokers; groups with the same access share connections.

Each ConsumerGroup claims the consumer group that it names. Several may claim the same one: its rivals are those that
also share brokers with it. The oldest rival that a common broker has accepted (it lists the group's consumers) owns the
consumer group; a younger one is a duplicate, which must release all queues. A group without an assignment waits until
every older rival was polled, with or without success: until then one of them may turn out to be the owner.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from rota.aio import supervise
from rota.brokers.errors import BrokerError
from rota.brokers.port import BrokerGroupSettings, Brokers, OnlineConsumer
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.kube.brokers.bindings import (
    Binding,
    BrokerCluster,
    awaits_older,
    duplicate_problems,
    owns_consumer_group,
    share_brokers,
)
from rota.kube.brokers.broker_access import (
    AccessConfig,
    BrokerAccessReader,
    ClusterAccess,
    MissingSecretError,
    qualify_name_servers,
)
from rota.kube.brokers.consumer_poller import ConsumerPoller
from rota.kube.brokers.lag.lag_poller import GroupLag, LagPoller
from rota.kube.brokers.route_watcher import RouteWatcher, interest_of, suffix_of
from rota.kube.client.api import Api
from rota.kube.client.objects import ObjectKey
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.state.queue_quota import QueueQuota
from rota.logs import group_fields
from rota.model import Finding, Queue, Reason
from rota.spec import RocketMQ

REREAD_SECRETS_SECONDS = 60.0  # interval at which Secrets are read again

_log = logging.getLogger(__name__)


class BrokerRegistry:
    """All broker clusters that groups use."""

    def __init__(
        self,
        api: Api,
        connect: Callable[[ConnectionConfig], Brokers] = AdminClient,
        *,
        quota: QueueQuota | None = None,
        address_policy: AddressPolicy | None = None,
        is_pod: bool = False,
    ) -> None:
        """With `is_pod`, qualify short host names: the operator's pod would resolve them in its own namespace."""
        self._connect = connect
        self._is_pod = is_pod
        self._quota = quota or QueueQuota()
        self._access = BrokerAccessReader(api, address_policy)
        self._clusters: dict[tuple[object, ...], BrokerCluster] = {}  # by the key of their access
        self._bindings: dict[ObjectKey, Binding] = {}
        self._claims: dict[str, set[ObjectKey]] = {}  # by consumer group: the ConsumerGroups that claim it
        self._is_leading = False  # whether this operator leads; otherwise it asks no broker
        self._tasks: set[asyncio.Task[None]] = set()
        # Called when a group's state at its brokers changes.
        self.on_change: Callable[[ObjectKey], None] = lambda _: None
        # Called after a poll of these groups' lag.
        self.on_lag_polled: Callable[[Collection[ObjectKey]], None] = lambda _: None
        # Returns the queues that have a consumer.
        self.consumed_queues: Callable[[ObjectKey], Collection[Queue]] = lambda _: ()

    async def close(self) -> None:
        """Forget all groups, and wait for requests under way."""
        for key in list(self._bindings):
            self.forget(key)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def update_group(self, group: Group) -> None:
        """Update a group's brokers and topics from its spec; an invalid spec changes nothing."""
        spec = group.resolved_spec.spec
        if spec is None:
            return
        key = (group.namespace, group.name)
        rocketmq = qualify_name_servers(group.namespace, spec.broker.rocketmq) if self._is_pod else spec.broker.rocketmq
        interest = interest_of(spec, group.name, is_weighed=group.needs_weights)
        binding = self._bindings.get(key)
        if binding is None:
            binding = Binding(group, interest, rocketmq)
            self._bindings[key] = binding
            self._claim(key, binding)
            return
        has_other_brokers = binding.rocketmq != rocketmq
        has_changed = has_other_brokers or binding.interest != interest
        self._unclaim(key, binding)
        binding.group = group
        binding.interest = interest
        binding.rocketmq = rocketmq
        self._claim(key, binding)
        if has_other_brokers:
            self._reset(key, binding)
        if has_changed and self._is_leading:
            self._start_task(self._refresh_binding(key, binding))

    def forget(self, key: ObjectKey) -> None:
        """Remove a group; its cluster is closed if no other group uses it."""
        if binding := self._bindings.pop(key, None):
            self._unclaim(key, binding)
            self._unbind(key, binding)

    def _reset(self, key: ObjectKey, binding: Binding) -> None:
        """Leave a group's cluster, and forget what its brokers said about the group's claim."""
        binding.was_polled = False
        binding.is_accepted = False
        self._unbind(key, binding)

    def _unbind(self, key: ObjectKey, binding: Binding) -> None:
        cluster = binding.cluster
        binding.cluster = None
        if cluster is None:
            return
        cluster.route_watcher.set_interest(key, None)
        if cluster.route_watcher.is_idle:
            del self._clusters[cluster.access.cluster_key]
            for task in cluster.tasks:
                task.cancel()
            self._start_task(cluster.brokers.close())

    def _claim(self, key: ObjectKey, binding: Binding) -> None:
        self._claims.setdefault(binding.interest.consumer_group, set()).add(key)
        self._notify_rivals(key, binding)

    def _unclaim(self, key: ObjectKey, binding: Binding) -> None:
        self._notify_rivals(key, binding)  # only enqueues them: they are reconciled after the claim is removed
        claims = self._claims[binding.interest.consumer_group]
        claims.discard(key)
        if not claims:
            del self._claims[binding.interest.consumer_group]

    def _rivals(self, key: ObjectKey, binding: Binding) -> list[ObjectKey]:
        """Return the other groups that claim this one's consumer group at the same brokers."""
        claimants = self._claims[binding.interest.consumer_group] - {key}
        return sorted(rival for rival in claimants if share_brokers(binding, self._bindings[rival]))

    def _notify_rivals(self, key: ObjectKey, binding: Binding) -> None:
        for rival in self._rivals(key, binding):
            self.on_change(rival)

    def _on_broker_change(self, key: ObjectKey) -> None:
        """Handle a change of a group at its brokers; unmanaged consumers that just joined are asked for settings."""
        self._update_acceptance(key)
        self.on_change(key)
        if cluster := self._cluster_of(key):
            self._start_task(cluster.consumer_poller.poll_group(key))

    def _update_acceptance(self, key: ObjectKey, *, was_polled: bool = False) -> None:
        """Record whether a group was polled and is accepted by its brokers; a change may decide its rivals' claims."""
        binding = self._bindings.get(key)
        if binding is None:
            return
        previous = binding.was_polled, binding.is_accepted
        if was_polled:
            binding.was_polled = True
        is_accepted = binding.cluster.route_watcher.is_accepted(key) if binding.cluster else None
        if is_accepted is not None:  # None: no response, which leaves the last one in force
            binding.is_accepted = is_accepted
        if (binding.was_polled, binding.is_accepted) != previous:
            self._notify_rivals(key, binding)

    def set_leading(self, *, is_leading: bool) -> None:
        """Allow requests to brokers while this operator leads; otherwise leave all clusters."""
        self._is_leading = is_leading
        if not is_leading:
            for key, binding in self._bindings.items():
                self._reset(key, binding)

    async def poll_group(self, group: Group) -> None:
        """Read a group's Secrets, bind it to its brokers, and ask these for routes and consumers, now."""
        key = (group.namespace, group.name)
        if binding := self._bindings.get(key):
            await self._refresh_binding(key, binding, notify=False)

    async def poll_consumers(self, key: ObjectKey) -> None:
        """Ask a group's brokers for its online consumers now."""
        if cluster := self._cluster_of(key):
            await cluster.route_watcher.poll_consumers(key)

    async def _refresh_binding(self, key: ObjectKey, binding: Binding, *, notify: bool = True) -> None:
        rocketmq: RocketMQ = binding.rocketmq
        access: AccessConfig | None = None
        problems: tuple[Finding, ...] = ()
        try:
            access = await self._access.read(key[0], rocketmq, known_keys=self._clusters)
            if binding.cluster and access.cluster_key not in self._clusters:
                await self._renew(binding.cluster, access)
        except MissingSecretError as error:
            problems = (Finding(Reason.MISSING_SECRET, str(error)),)
        # During the reads, the group may have been deleted or given other brokers, or leadership may have been lost.
        if self._bindings.get(key) is not binding or binding.rocketmq != rocketmq or not self._is_leading:
            return
        binding.problems = problems
        if access is not None:
            cluster = self._bind(key, binding, access)
            await cluster.route_watcher.poll_group(key)
            if binding.cluster is not cluster:  # lost by a change of leadership or brokers: its answers count no more
                return
            self._start_task(cluster.consumer_poller.poll_group(key))
        if self._bindings.get(key) is binding:
            # Also without a Secret or a response: a younger rival would otherwise wait for this group forever.
            self._update_acceptance(key, was_polled=True)
        if notify:
            self.on_change(key)

    def _bind(self, key: ObjectKey, binding: Binding, access: AccessConfig) -> BrokerCluster:
        if binding.cluster and binding.cluster.access.cluster_key != access.cluster_key:
            self._unbind(key, binding)
        if access.cluster_key not in self._clusters:
            cluster_access = ClusterAccess(access)
            brokers = self._connect(cluster_access.config)
            routes = RouteWatcher(brokers, self._on_broker_change, self._quota)
            lag = LagPoller(
                brokers,
                routes,
                self.consumed_queues,
                self.on_lag_polled,
                self._reported_offsets,
                on_known_change=self.on_change,
                topic_starts=self._topic_starts,
            )
            loop = asyncio.get_running_loop()
            consumers = ConsumerPoller(brokers, routes, self._unmanaged_ids, self.on_change)
            tasks = {"route watcher": routes.run, "lag poller": lag.run, "consumer poller": consumers.run}
            running = [loop.create_task(supervise(name, work), name=name) for name, work in tasks.items()]
            self._clusters[access.cluster_key] = BrokerCluster(cluster_access, brokers, routes, lag, consumers, running)
        cluster = self._clusters[access.cluster_key]
        binding.cluster = cluster
        cluster.route_watcher.set_interest(key, binding.interest)
        return cluster

    async def _renew(self, cluster: BrokerCluster, access: AccessConfig) -> None:
        """Replace a cluster's access if the Secrets of all its groups now give this one; routes and lag are kept.

        If another group of the cluster still has the previous access, do nothing: the caller then binds its group to a
        cluster of its own, since no group may use certificates or credentials of another one.
        """
        previous = cluster.access.cluster_key
        is_common = await self._all_groups_have(cluster, access)
        if is_common and self._clusters.get(previous) is cluster and access.cluster_key not in self._clusters:
            del self._clusters[previous]
            self._clusters[access.cluster_key] = cluster
            cluster.access.renew(access)
            cluster.brokers.reconnect()

    async def _all_groups_have(self, cluster: BrokerCluster, access: AccessConfig) -> bool:
        """Read the Secrets of a cluster's groups: whether all give this access, also groups bound during the reads."""
        checked: set[tuple[str, bytes]] = set()
        while True:
            members = [binding for binding in self._bindings.values() if binding.cluster is cluster]
            binding = next((binding for binding in members if binding.source not in checked), None)
            if binding is None:
                return True
            source = binding.source  # read before the await, which may change the binding
            if not await self._access.is_current(access.cluster_key, binding.group.namespace, binding.rocketmq):
                return False
            checked.add(source)

    async def run(self) -> None:
        """Read the Secrets periodically, so that a changed one takes effect."""
        while True:
            await asyncio.sleep(REREAD_SECRETS_SECONDS)
            if not self._is_leading:
                continue
            for key, binding in list(self._bindings.items()):
                may_change = binding.rocketmq.credentials_secret or binding.rocketmq.tls.enabled or binding.problems
                if not may_change:
                    continue
                try:
                    await self._refresh_binding(key, binding)
                except Exception as error:  # noqa: BLE001 - one group's error must not stop the others' refresh
                    _log.warning("The Secrets for the broker could not be read: %s", error, extra=group_fields(*key))

    def _cluster_of(self, key: ObjectKey) -> BrokerCluster | None:
        binding = self._bindings.get(key)
        return binding.cluster if binding else None

    def state_of(self, group: Group, now: float) -> BrokerState:
        """Return a group's state at its brokers."""
        key = (group.namespace, group.name)
        binding = self._bindings.get(key)
        cluster = self._cluster_of(key)
        if binding is None or cluster is None:
            return BrokerState(problems=binding.problems if binding else ())
        rivals = [self._bindings[rival] for rival in self._rivals(key, binding)]
        state = cluster.route_watcher.state_of(key, now, self._member_suffixes(binding, rivals, now))
        validity = cluster.access.client_validity
        if awaits_older(binding, rivals):
            # As if no broker had responded: the planner assigns nothing until the owner of the consumer group is known.
            return BrokerState(
                views=dict.fromkeys(state.views),
                unmanaged_ids=None,
                problems=(*binding.problems, *state.problems),
                client_validity=validity,
            )
        return BrokerState(
            views=state.views,
            unmanaged_ids=state.unmanaged_ids,
            problems=(*binding.problems, *duplicate_problems(binding, rivals), *state.problems),
            unmanaged_settings=cluster.consumer_poller.settings_of(key),
            client_validity=validity,
        )

    def _member_suffixes(self, binding: Binding, rivals: Sequence[Binding], now: float) -> Collection[str]:
        """Return the suffixes of the client ids of a group's members (see `suffix_of`)."""
        # Members of a duplicate group do not count as unmanaged: they have to leave, and own no queues.
        duplicates = [rival.group for rival in rivals if owns_consumer_group(binding, rival)]
        return {*binding.group.client_id_suffixes(now)}.union(
            *(duplicate.client_id_suffixes(now) for duplicate in duplicates)
        )

    def _unmanaged_ids(self, key: ObjectKey) -> Collection[str]:
        """Return the client ids last seen in a group that do not belong to its members."""
        binding = self._bindings.get(key)
        clients = self.consumers_of(key)
        if binding is None or not clients:
            return ()
        rivals = [self._bindings[rival] for rival in self._rivals(key, binding)]
        member_suffixes = self._member_suffixes(binding, rivals, asyncio.get_running_loop().time())
        return [client_id for client_id in clients if suffix_of(client_id) not in member_suffixes]

    def lag_of(self, key: ObjectKey) -> GroupLag:
        """Return a group's lag, as far as its brokers report it."""
        cluster = self._cluster_of(key)
        return cluster.lag_poller.lag_of(key) if cluster else GroupLag({})

    def _reported_offsets(self, key: ObjectKey) -> Mapping[Queue, int]:
        """Return the offsets of the slowest member of a Broadcasting group, as its members report them."""
        binding = self._bindings.get(key)
        return binding.group.reported_offsets if binding else {}

    def _topic_starts(self, key: ObjectKey) -> Mapping[str, float]:
        """Return since when a group consumes each topic."""
        binding = self._bindings.get(key)
        document = binding.group.stored_assignment.document if binding else None
        return document.topic_start_seconds if document else {}

    def consumers_of(self, key: ObjectKey) -> Mapping[str, OnlineConsumer]:
        """Return the consumers last seen in a group at its brokers, by client id."""
        cluster = self._cluster_of(key)
        return cluster.route_watcher.consumers_of(key) if cluster else {}

    def settings_of(self, key: ObjectKey) -> Mapping[str, BrokerGroupSettings]:
        """Return a group's settings at its brokers, by broker."""
        cluster = self._cluster_of(key)
        return cluster.route_watcher.settings_of(key) if cluster else {}

    async def unlock(self, group: Group, client_id: str, queues: Collection[Queue]) -> None:
        """Release the queue locks of an ended member; if that fails, they expire by themselves."""
        key = (group.namespace, group.name)
        binding = self._bindings.get(key)
        cluster = self._cluster_of(key)
        if binding and cluster:
            try:
                await cluster.brokers.unlock(binding.interest.consumer_group, client_id, queues)
            except BrokerError as error:
                _log.info("The queue locks of %s could not be released: %s", client_id, error)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.warning("A request to the brokers failed: %s", error)
