"""Broker clusters in use: groups with the same access (name servers, credentials, certificates) share a cluster.

A cluster has one set of connections, and polls routes, consumers and lag for all its groups.
"""

from collections.abc import Callable, Collection, Coroutine
from typing import Any

from rota.kube.brokers.bindings import Binding, Bindings, BrokerCluster
from rota.kube.brokers.broker_access import AccessConfig, BrokerAccessReader


class BrokerClusters:
    """Joins groups to clusters: starts a cluster for its first group, closes it after its last one."""

    def __init__(
        self,
        bindings: Bindings,
        access_reader: BrokerAccessReader,
        start_cluster: Callable[[AccessConfig], BrokerCluster],
        start_task: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._bindings = bindings
        self._access_reader = access_reader
        self._start_cluster = start_cluster
        self._start_task = start_task
        self._clusters: dict[tuple[object, ...], BrokerCluster] = {}  # by `cluster_key` of their access

    async def read_access(self, binding: Binding) -> AccessConfig:
        """Read a group's Secrets and return its access, or raise MissingSecretError.

        If the access has changed, and all groups of the group's cluster have the new access, renew that cluster.
        """
        access = await self._access_reader.read(binding.group.namespace, binding.rocketmq, known_keys=self._clusters)
        if binding.cluster and access.cluster_key not in self._clusters:
            await self._renew(binding.cluster, access)
        return access

    def join(self, binding: Binding, access: AccessConfig) -> BrokerCluster:
        """Bind a group to the cluster of its access."""
        if binding.cluster and binding.cluster.access.cluster_key != access.cluster_key:
            self.leave(binding)
        if access.cluster_key not in self._clusters:
            self._clusters[access.cluster_key] = self._start_cluster(access)
        cluster = self._clusters[access.cluster_key]
        binding.cluster = cluster
        cluster.route_watcher.set_interest(binding.key, binding.interest)
        return cluster

    def leave(self, binding: Binding) -> None:
        """End a group's use of its cluster, which is closed if no other group uses it."""
        cluster = binding.cluster
        binding.cluster = None
        if cluster is None:
            return
        cluster.route_watcher.set_interest(binding.key, None)
        if cluster.route_watcher.is_idle:
            del self._clusters[cluster.access.cluster_key]
            for task in cluster.tasks:
                task.cancel()
            self._start_task(cluster.brokers.close())

    async def _renew(self, cluster: BrokerCluster, access: AccessConfig) -> None:
        """Replace a cluster's access if the Secrets of all its groups now give this access; routes and lag are kept.

        If another group of the cluster still has the previous access, do nothing: `join` then binds the caller's group
        to a new cluster, since no group may use the certificates or credentials of another group.
        """
        previous = cluster.access.cluster_key
        if not await self._all_groups_have(cluster, access):
            return
        # During the reads, the cluster may have been closed or renewed, or another cluster started with this access.
        if self._clusters.get(previous) is cluster and access.cluster_key not in self._clusters:
            del self._clusters[previous]
            self._clusters[access.cluster_key] = cluster
            cluster.access.renew(access)
            cluster.brokers.reconnect()

    async def _all_groups_have(self, cluster: BrokerCluster, access: AccessConfig) -> bool:
        """Whether the present Secrets of all groups of a cluster give this access, also of groups that join now."""
        checked_sources: set[tuple[str, bytes]] = set()
        while binding := self._find_unchecked(cluster, checked_sources):
            source = binding.source  # read before the await, which may change the binding
            if not await self._access_reader.is_current(access.cluster_key, binding.group.namespace, binding.rocketmq):
                return False
            checked_sources.add(source)
        return True

    def _find_unchecked(self, cluster: BrokerCluster, checked_sources: Collection[tuple[str, bytes]]) -> Binding | None:
        for binding in self._bindings:
            if binding.cluster is cluster and binding.source not in checked_sources:
                return binding
        return None
