"""Registry of the brokers of all groups: the interface of this package for the controller, the page and the metrics.

It follows the groups' specs and Secrets, polls their brokers while this operator leads, and returns what the brokers
reported. Rivals are groups that name the same consumer group at the same brokers: see `bindings`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from rota.aio import supervise
from rota.brokers.errors import BrokerError
from rota.brokers.port import BrokerGroupSettings, Brokers, OnlineConsumer
from rota.brokers.rocketmq.brokers import RocketMQBrokers
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.kube.brokers.bindings import (
    Binding,
    Bindings,
    BrokerCluster,
    awaits_older,
    duplicate_problems,
    member_suffixes,
)
from rota.kube.brokers.broker_access import (
    AccessConfig,
    BrokerAccessReader,
    ClusterAccess,
    MissingSecretError,
    qualify_name_servers,
)
from rota.kube.brokers.broker_clusters import BrokerClusters
from rota.kube.brokers.consumer_poller import ConsumerPoller
from rota.kube.brokers.lag.lag_poller import GroupLag, LagPoller
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.brokers.topic_interest import interest_of
from rota.kube.client.api import Api
from rota.kube.client.objects import ObjectKey
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.state.queue_quota import QueueQuota
from rota.logs import group_fields
from rota.model import Finding, Queue, Reason

REREAD_SECRETS_SECONDS = 60.0  # interval at which Secrets are read again

_log = logging.getLogger(__name__)


class BackgroundRequests:
    """Requests to brokers that nothing waits for; their errors are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: Coroutine[Any, Any, None]) -> None:
        """Start a request."""
        task = asyncio.get_running_loop().create_task(request)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.warning("A request to the brokers failed: %s", error)

    async def wait(self) -> None:
        """Wait for the requests under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class BrokerRegistry:
    """The brokers of all groups: binds each group to its cluster while this operator leads."""

    def __init__(
        self,
        api: Api,
        connect: Callable[[ConnectionConfig], Brokers] = RocketMQBrokers,
        *,
        quota: QueueQuota | None = None,
        address_policy: AddressPolicy | None = None,
        is_pod: bool = False,
    ) -> None:
        """With `is_pod`, append the group's namespace to short host names: a pod's resolver would use its own."""
        self._connect = connect
        self._is_pod = is_pod
        self._quota = quota or QueueQuota()
        self._is_leading = False  # whether this operator leads; otherwise it asks no broker
        self._requests = BackgroundRequests()
        self._bindings = Bindings()
        access_reader = BrokerAccessReader(api, address_policy)
        self._clusters = BrokerClusters(self._bindings, access_reader, self._start_cluster, self._requests.start)
        # Called when a group's state at its brokers changes.
        self.on_change: Callable[[ObjectKey], None] = lambda _: None
        # Called after a poll of these groups' lag.
        self.on_lag_polled: Callable[[Collection[ObjectKey]], None] = lambda _: None
        # Returns the queues of a group that have a consumer.
        self.consumed_queues: Callable[[ObjectKey], Collection[Queue]] = lambda _: ()

    async def close(self) -> None:
        """Forget all groups, and wait for requests under way."""
        for binding in self._bindings:  # iterates over a copy
            self.forget(binding.key)
        await self._requests.wait()

    def update_group(self, group: Group) -> None:
        """Update a group's brokers and topics from its spec; an invalid spec changes nothing."""
        spec = group.resolved_spec.spec
        if spec is None:
            return
        rocketmq = qualify_name_servers(group.namespace, spec.broker.rocketmq) if self._is_pod else spec.broker.rocketmq
        interest = interest_of(spec, group.name, needs_weights=group.resolved_spec.needs_weights)
        binding = self._bindings.of(group)
        if binding is None:
            binding = Binding(group, interest, rocketmq)
            self._bindings.add(binding)
            self._notify_rivals(binding)
            return  # its first reconcile polls its brokers (`poll_group`)
        has_other_brokers = binding.rocketmq != rocketmq
        has_changed = has_other_brokers or binding.interest != interest
        self._notify_rivals(binding)  # the rivals for the consumer group that it claimed before
        self._bindings.update(binding, group, interest, rocketmq)
        self._notify_rivals(binding)  # the rivals for the one that it claims now
        if has_other_brokers:
            self._reset(binding)
        if has_changed and self._is_leading:
            self._requests.start(self._refresh(binding))

    def forget(self, key: ObjectKey) -> None:
        """Remove a group; its cluster is closed if no other group uses it."""
        if binding := self._bindings.get(key):
            self._notify_rivals(binding)  # only enqueues the rivals: they are reconciled after the claim is removed
            self._bindings.remove(binding)
            self._clusters.leave(binding)

    def _reset(self, binding: Binding) -> None:
        """Leave a group's cluster, and forget whether the group was polled and accepted there (see `bindings`)."""
        binding.was_polled = False
        binding.is_accepted = False
        self._clusters.leave(binding)

    def _notify_rivals(self, binding: Binding) -> None:
        for rival in self._bindings.rivals_of(binding):
            self.on_change(rival.key)

    def _on_broker_change(self, key: ObjectKey) -> None:
        """Handle a change of a group at its brokers; ask unmanaged consumers that just joined for their settings."""
        binding = self._bindings.get(key)
        if binding:
            self._update_acceptance(binding)
        self.on_change(key)
        if binding and binding.cluster:
            self._requests.start(binding.cluster.consumer_poller.poll_settings(key))

    def _update_acceptance(self, binding: Binding, *, was_polled: bool = False) -> None:
        """Record whether a group was polled and is accepted; that may decide which rival owns the consumer group."""
        if binding.update_acceptance(was_polled=was_polled):
            self._notify_rivals(binding)

    def set_leading(self, *, is_leading: bool) -> None:
        """Allow requests to brokers while this operator leads; otherwise leave all clusters."""
        self._is_leading = is_leading
        if not is_leading:
            for binding in self._bindings:
                self._reset(binding)

    async def poll_group(self, group: Group) -> None:
        """Read a group's Secrets, bind it to its brokers and poll them; the caller reconciles the group afterwards."""
        if binding := self._bindings.of(group):
            await self._refresh(binding, notify=False)

    async def poll_consumers(self, key: ObjectKey) -> None:
        """Ask a group's brokers for its online consumers now."""
        if cluster := self._bindings.cluster_of(key):
            await cluster.route_watcher.poll_consumers(key)

    async def _refresh(self, binding: Binding, *, notify: bool = True) -> None:
        """Read a group's Secrets, join its cluster and poll it; with `notify`, call `on_change` afterwards."""
        key = binding.key
        rocketmq = binding.rocketmq
        access: AccessConfig | None = None
        problems: tuple[Finding, ...] = ()
        try:
            access = await self._clusters.read_access(binding)
        except MissingSecretError as error:
            problems = (Finding(Reason.MISSING_SECRET, str(error)),)
        # During the reads, the group may have been deleted or given other brokers, or leadership may have been lost.
        if binding not in self._bindings or binding.rocketmq != rocketmq or not self._is_leading:
            return
        binding.problems = problems
        if access is not None:
            cluster = self._clusters.join(binding, access)
            await cluster.route_watcher.poll_group(key)
            if binding.cluster is not cluster:  # leadership or the group's brokers changed: the responses do not count
                return
            self._requests.start(cluster.consumer_poller.poll_settings(key))
        if binding in self._bindings:
            # Record the poll even without a Secret or a response: a younger rival would otherwise wait forever.
            self._update_acceptance(binding, was_polled=True)
        if notify:
            self.on_change(key)

    def _start_cluster(self, access: AccessConfig) -> BrokerCluster:
        cluster_access = ClusterAccess(access)
        brokers = self._connect(cluster_access.config)
        routes = RouteWatcher(brokers, self._on_broker_change, self._quota)
        lag = LagPoller(
            brokers,
            routes,
            self.consumed_queues,
            self.on_lag_polled,
            self._bindings.reported_offsets,
            on_known_change=self.on_change,  # lag became known or unknown
            topic_starts=self._bindings.topic_starts,
        )
        consumers = ConsumerPoller(brokers, routes, self._bindings.unmanaged_ids, self.on_change)
        loop = asyncio.get_running_loop()
        pollers = {"route watcher": routes.run, "lag poller": lag.run, "consumer poller": consumers.run}
        tasks = [loop.create_task(supervise(name, run), name=name) for name, run in pollers.items()]
        return BrokerCluster(cluster_access, brokers, routes, lag, consumers, tasks)

    async def run(self) -> None:
        """Read the Secrets periodically, so that a changed one takes effect (`BrokerClusters._renew`)."""
        while True:
            await asyncio.sleep(REREAD_SECRETS_SECONDS)
            if not self._is_leading:
                continue
            for binding in self._bindings:
                if not binding.needs_secret_reads:
                    continue
                try:
                    await self._refresh(binding)
                except Exception as error:  # noqa: BLE001 - one group's error must not stop the others' refresh
                    fields = group_fields(*binding.key)
                    _log.warning("The Secrets for the broker could not be read: %s", error, extra=fields)

    def state_of(self, group: Group, now: float) -> BrokerState:
        """Return a group's state at its brokers."""
        binding = self._bindings.of(group)
        if binding is None or binding.cluster is None:
            return BrokerState(problems=binding.problems if binding else ())
        cluster = binding.cluster
        rivals = self._bindings.rivals_of(binding)
        suffixes = member_suffixes(binding, rivals, now)  # consumers whose client ids have other suffixes are unmanaged
        state = cluster.route_watcher.state_of(binding.key, now, suffixes)
        state = replace(state, client_validity=cluster.access.client_validity)
        if awaits_older(binding, rivals):
            # As if no broker had responded, so no topic has a view: the planner assigns nothing until the owner of the
            # consumer group is known.
            problems = (*binding.problems, *state.problems)
            return replace(state, views=dict.fromkeys(state.views), unmanaged_ids=None, problems=problems)
        problems = (*binding.problems, *duplicate_problems(binding, rivals), *state.problems)
        return replace(state, problems=problems, unmanaged_settings=cluster.consumer_poller.settings_of(binding.key))

    def lag_of(self, key: ObjectKey) -> GroupLag:
        """Return a group's lag, as far as its brokers reported it."""
        cluster = self._bindings.cluster_of(key)
        return cluster.lag_poller.lag_of(key) if cluster else GroupLag({})

    def consumers_of(self, key: ObjectKey) -> Mapping[str, OnlineConsumer]:
        """Return the consumers last seen in a group at its brokers, by client id."""
        cluster = self._bindings.cluster_of(key)
        return cluster.route_watcher.online_of(key).consumers if cluster else {}

    def settings_of(self, key: ObjectKey) -> Mapping[str, BrokerGroupSettings]:
        """Return a group's settings at its brokers, by broker."""
        cluster = self._bindings.cluster_of(key)
        return cluster.route_watcher.online_of(key).settings if cluster else {}

    async def unlock(self, group: Group, client_id: str, queues: Collection[Queue]) -> None:
        """Release the queue locks of an ended member; if that fails, they expire by themselves."""
        binding = self._bindings.of(group)
        if binding is None or binding.cluster is None:
            return
        try:
            await binding.cluster.brokers.unlock(binding.interest.consumer_group, client_id, queues)
        except BrokerError as error:
            _log.info("The queue locks of %s could not be released: %s", client_id, error)
