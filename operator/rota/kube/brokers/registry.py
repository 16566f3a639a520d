"""Registry of broker clusters: binds each group to its brokers; groups with the same access share connections."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rota.aio import supervise
from rota.brokers.errors import BrokerError
from rota.brokers.port import BrokerGroupSettings, Brokers, OnlineConsumer
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.kube.brokers.broker_access import (
    Access,
    BrokerAccess,
    ClusterAccess,
    MissingSecretError,
    qualify_name_servers,
)
from rota.kube.brokers.consumer_poller import ConsumerPoller
from rota.kube.brokers.lag.lag_poller import GroupLag, LagPoller
from rota.kube.brokers.route_watcher import RouteWatcher, TopicInterest, interest_of
from rota.kube.client.api import Api
from rota.kube.client.objects import Key
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.state.queue_quota import QueueQuota
from rota.logs import of_group
from rota.model import Queue, Reason, Verdict
from rota.spec import RocketMQ

SECRETS_SECONDS = 60.0  # interval at which Secrets are read again

_NEWEST = "~"  # sorts after every timestamp

_log = logging.getLogger(__name__)


@dataclass
class _BrokerCluster:
    """One broker cluster, reached with one access, and its pollers."""

    access: ClusterAccess
    brokers: Brokers
    views: RouteWatcher
    lags: LagPoller
    consumers: ConsumerPoller
    running: Sequence[asyncio.Task[None]]


@dataclass
class _Binding:
    """The binding of a group to its broker cluster."""

    group: Group
    wanted: TopicInterest
    reached: RocketMQ
    cluster: _BrokerCluster | None = None
    problems: tuple[Verdict, ...] = ()
    was_looked_at: bool = False  # whether its brokers were asked since this operator leads
    is_accepted: bool = False  # whether they have accepted the group since then

    @property
    def source(self) -> tuple[str, bytes]:
        """Where its access comes from: its namespace, and the name servers and Secrets that it names."""
        return self.group.namespace, msgspec.json.encode(self.reached)

    @property
    def creation_order(self) -> tuple[str, str]:
        """Sort key: creation time, then uid; the oldest group first."""
        metadata = self.group.body.metadata if self.group.body else None
        return (metadata.creation_timestamp or _NEWEST, metadata.uid) if metadata else (_NEWEST, "")


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
        self._connect, self._is_pod = connect, is_pod
        self._quota = quota or QueueQuota()
        self._access = BrokerAccess(api, address_policy)
        self._places: dict[tuple[object, ...], _BrokerCluster] = {}  # by the mark of their access
        self._stays: dict[Key, _Binding] = {}
        self._claims: dict[str, set[Key]] = {}  # the ConsumerGroups that name each consumer group
        self._awake = False  # whether this operator leads; otherwise it asks no broker
        self._asking: set[asyncio.Task[None]] = set()
        self.news: Callable[[Key], None] = lambda _: None  # called when a group's state at its brokers changes
        self.looked: Callable[[Collection[Key]], None] = lambda _: None  # called after a poll of these groups' lag
        self.worked: Callable[[Key], Collection[Queue]] = lambda _: ()  # returns the queues that have a consumer

    async def close(self) -> None:
        """Forget all groups, and wait for requests under way."""
        for key in list(self._stays):
            self.forget(key)
        await asyncio.gather(*self._asking, return_exceptions=True)

    def want(self, group: Group) -> None:
        """Update a group's brokers and topics from its spec; an invalid spec changes nothing."""
        spec, key = group.wish.spec, (group.namespace, group.name)
        if spec is None:
            return
        rocketmq = qualify_name_servers(group.namespace, spec.broker.rocketmq) if self._is_pod else spec.broker.rocketmq
        interest, binding = interest_of(spec, group.name, is_weighed=group.weighs_queues), self._stays.get(key)
        if binding is None:
            binding = self._stays[key] = _Binding(group, interest, rocketmq)
            self._claim(key, binding)
            return
        moved = binding.reached != rocketmq
        changed = moved or binding.wanted != interest
        self._unclaim(key, binding)
        binding.group, binding.wanted, binding.reached = group, interest, rocketmq
        self._claim(key, binding)
        if moved:
            binding.was_looked_at = binding.is_accepted = False
            self._leave(key, binding)
        if changed and self._awake:
            self._background(self._look(key, binding))

    def forget(self, key: Key) -> None:
        """Remove a group; its cluster is closed if no other group uses it."""
        if binding := self._stays.pop(key, None):
            self._unclaim(key, binding)
            self._leave(key, binding)

    def _leave(self, key: Key, binding: _Binding) -> None:
        cluster, binding.cluster = binding.cluster, None
        if cluster is None:
            return
        cluster.views.want(key, None)
        if cluster.views.idle:
            del self._places[cluster.access.mark]
            for task in cluster.running:
                task.cancel()
            self._background(cluster.brokers.close())

    def _claim(self, key: Key, binding: _Binding) -> None:
        self._claims.setdefault(binding.wanted.group, set()).add(key)
        for rival in self._rivals(key, binding):
            self.news(rival)

    def _unclaim(self, key: Key, binding: _Binding) -> None:
        for rival in self._rivals(key, binding):
            self.news(rival)
        claims = self._claims[binding.wanted.group]
        claims.discard(key)
        if not claims:
            del self._claims[binding.wanted.group]

    def _rivals(self, key: Key, binding: _Binding) -> list[Key]:
        """Return the other groups that share this one's consumer group at the same brokers."""
        named = self._claims[binding.wanted.group] - {key}
        return sorted(rival for rival in named if self._share_brokers(binding, self._stays[rival]))

    def _share_brokers(self, binding: _Binding, rival: _Binding) -> bool:
        """Whether two groups name a common name server, or name servers that lead to a common broker."""
        if not {*binding.reached.name_servers}.isdisjoint(rival.reached.name_servers):
            return True
        return not self._addresses(binding).isdisjoint(self._addresses(rival))

    def _addresses(self, binding: _Binding) -> frozenset[str]:
        """Return the addresses of the brokers of a group's topics; these list the group's consumers."""
        cluster = binding.cluster
        return cluster.brokers.addresses(cluster.views.where(binding.wanted)) if cluster else frozenset()

    def _owns(self, binding: _Binding, rival: _Binding) -> bool:
        """Whether the consumer group of both belongs to the first: it is older, and a broker of both has accepted it.

        Naming the same name server is no proof, nor is a route that lists a broker which was not asked.
        """
        is_older = binding.creation_order < rival.creation_order
        return is_older and binding.is_accepted and not self._addresses(binding).isdisjoint(self._addresses(rival))

    def _awaits_older(self, binding: _Binding, rivals: Sequence[_Binding]) -> bool:
        """Whether a group without assignment has to wait: an older one may turn out to own its consumer group."""
        if binding.group.record.document is not None:
            return False
        return any(not rival.was_looked_at and rival.creation_order < binding.creation_order for rival in rivals)

    def _duplicates(self, binding: _Binding, rivals: Sequence[_Binding]) -> list[Verdict]:
        """Return ClaimedTwice if an older group owns this one's consumer group."""
        owner = next((rival.group for rival in rivals if self._owns(rival, binding)), None)
        if owner is None:
            return []
        # Tenants of this namespace must not learn the names of groups in others.
        older_group = "An older ConsumerGroup of another namespace"
        if owner.namespace == binding.group.namespace:
            older_group = f"The older ConsumerGroup {owner.name}"
        message = (
            f"{older_group} manages the consumer group {binding.wanted.group} at the same brokers;"
            " give this one its own spec.group, or delete one of them"
        )
        return [Verdict(Reason.CLAIMED_TWICE, message)]

    def _on_broker_change(self, key: Key) -> None:
        """After a change of a group's state at its brokers: update its claim, report it, ask its new consumers."""
        self._update_claim(key)
        self.news(key)
        if cluster := self._place(key):
            self._background(cluster.consumers.ask(key))

    def _update_claim(self, key: Key, *, was_looked_at: bool = False) -> None:
        """Record whether a group's brokers accept it; if that changed, its rivals are reconciled again."""
        binding, cluster = self._stays.get(key), self._place(key)
        if binding is None:
            return
        previous = binding.was_looked_at, binding.is_accepted
        binding.was_looked_at |= was_looked_at
        is_accepted = cluster.views.is_accepted(key) if cluster else None
        if is_accepted is not None:
            binding.is_accepted = is_accepted
        if (binding.was_looked_at, binding.is_accepted) != previous:
            for rival in self._rivals(key, binding):
                self.news(rival)

    def lead(self, *, leads: bool) -> None:
        """Allow requests to brokers while this operator leads; otherwise leave all clusters."""
        self._awake = leads
        for key, binding in self._stays.items() if not leads else ():
            binding.was_looked_at = binding.is_accepted = False
            self._leave(key, binding)

    async def look(self, group: Group) -> None:
        """Read a group's Secrets, and ask its brokers for routes and consumers, now."""
        key = (group.namespace, group.name)
        if binding := self._stays.get(key):
            await self._look(key, binding, tell=False)

    async def look_who_is_there(self, key: Key) -> None:
        """Ask a group's brokers for its online consumers now."""
        if cluster := self._place(key):
            await cluster.views.look_who_is_there(key)

    async def _look(self, key: Key, binding: _Binding, *, tell: bool = True) -> None:
        rocketmq: RocketMQ = binding.reached
        problems: tuple[Verdict, ...] = ()
        try:
            access = await self._access.read(key[0], rocketmq, self._places)
            if binding.cluster and access.mark not in self._places:
                await self._renew(binding.cluster, access)
        except MissingSecretError as error:
            problems = (Verdict(Reason.MISSING_SECRET, str(error)),)
        if self._stays.get(key) is not binding or binding.reached != rocketmq:  # deleted or moved meanwhile
            return
        if not self._awake:  # another operator leads now
            return
        binding.problems = problems
        if not problems:
            cluster = self._enter(key, binding, access)
            await cluster.views.look(key)
            self._background(cluster.consumers.ask(key))
        if self._stays.get(key) is binding:
            self._update_claim(key, was_looked_at=True)
        if tell:
            self.news(key)

    def _enter(self, key: Key, binding: _Binding, access: Access) -> _BrokerCluster:
        if binding.cluster and binding.cluster.access.mark != access.mark:
            self._leave(key, binding)
        if access.mark not in self._places:
            cluster_access = ClusterAccess(access)
            brokers = self._connect(cluster_access.config)
            views = RouteWatcher(brokers, self._on_broker_change, self._quota)
            lags = LagPoller(
                brokers, views, self.worked, self.looked, self._reported, turned=self.news, begun=self._begun
            )
            loop = asyncio.get_running_loop()
            consumers = ConsumerPoller(brokers, views, self._unmanaged, self.news)
            tasks = {"route watcher": views.run, "lag poller": lags.run, "consumer poller": consumers.run}
            running = [loop.create_task(supervise(name, work), name=name) for name, work in tasks.items()]
            self._places[access.mark] = _BrokerCluster(cluster_access, brokers, views, lags, consumers, running)
        cluster = binding.cluster = self._places[access.mark]
        cluster.views.want(key, binding.wanted)
        return cluster

    async def _renew(self, cluster: _BrokerCluster, access: Access) -> None:
        """Give a cluster a renewed access, so that its views and lag stay, if all of its groups have that access now.

        Otherwise the group has to leave the others: no group may use certificates or credentials of another one.
        """
        previous = cluster.access.mark
        is_shared = await self._is_shared(cluster, access)
        if is_shared and self._places.get(previous) is cluster and access.mark not in self._places:
            del self._places[previous]
            self._places[access.mark] = cluster
            cluster.access.renew(access)
            cluster.brokers.reconnect()

    async def _is_shared(self, cluster: _BrokerCluster, access: Access) -> bool:
        """Whether the Secrets of all groups of a cluster lead to this access; groups that enter meanwhile count."""
        read: set[tuple[str, bytes]] = set()
        while unread := [
            binding for binding in self._stays.values() if binding.cluster is cluster and binding.source not in read
        ]:
            source, reached = unread[0].source, unread[0].reached
            if not await self._access.leads_to(access.mark, source[0], reached):
                return False
            read.add(source)
        return True

    async def run(self) -> None:
        """Read the Secrets periodically, so that a changed one takes effect."""
        while True:
            await asyncio.sleep(SECRETS_SECONDS)
            for key, binding in list(self._stays.items()) if self._awake else ():
                if binding.reached.credentials_secret or binding.reached.tls.enabled or binding.problems:
                    try:
                        await self._look(key, binding)
                    except Exception as error:  # noqa: BLE001 - one group's error must not stop the others' refresh
                        _log.warning("The Secrets for the broker could not be read: %s", error, extra=of_group(*key))

    def _place(self, key: Key) -> _BrokerCluster | None:
        binding = self._stays.get(key)
        return binding.cluster if binding else None

    def of(self, group: Group, now: float) -> BrokerState:
        """Return a group's state at its brokers."""
        key = (group.namespace, group.name)
        binding, cluster = self._stays.get(key), self._place(key)
        if binding is None or cluster is None:
            return BrokerState(problems=binding.problems if binding else ())
        rivals = [self._stays[rival] for rival in self._rivals(key, binding)]
        state = cluster.views.of(key, now, self._own_names(binding, rivals, now))
        validity = cluster.access.client_validity
        if self._awaits_older(binding, rivals):
            problems = (*binding.problems, *state.problems)
            return BrokerState(dict.fromkeys(state.views), None, problems, client_validity=validity)
        problems = (*binding.problems, *self._duplicates(binding, rivals), *state.problems)
        return BrokerState(state.views, state.foreigners, problems, cluster.consumers.of(key), validity)

    def _own_names(self, binding: _Binding, rivals: Sequence[_Binding], now: float) -> Collection[str]:
        """Return the suffixes of the client ids of a group's members."""
        # Members of a duplicate group do not count as unmanaged: they have to leave, and own no queues.
        duplicates = [rival.group for rival in rivals if self._owns(binding, rival)]
        return {*binding.group.names(now)}.union(*(duplicate.names(now) for duplicate in duplicates))

    def _unmanaged(self, key: Key) -> Collection[str]:
        """Return the client ids last seen in a group that do not belong to its members."""
        binding, clients = self._stays.get(key), self.clients(key)
        if binding is None or not clients:
            return ()
        rivals = [self._stays[rival] for rival in self._rivals(key, binding)]
        member_suffixes = self._own_names(binding, rivals, asyncio.get_running_loop().time())
        return [client_id for client_id in clients if client_id.partition("@")[2] not in member_suffixes]

    def lag(self, key: Key) -> GroupLag:
        """Return a group's lag, as far as its brokers report it."""
        cluster = self._place(key)
        return cluster.lags.of(key) if cluster else GroupLag({})

    def _reported(self, key: Key) -> Mapping[Queue, int]:
        """Return the offsets of the slowest member of a Broadcasting group, as its members report them."""
        binding = self._stays.get(key)
        return binding.group.reported if binding else {}

    def _begun(self, key: Key) -> Mapping[str, float]:
        """Return since when a group consumes each topic."""
        binding = self._stays.get(key)
        document = binding.group.record.document if binding else None
        return document.begun_at if document else {}

    def clients(self, key: Key) -> Mapping[str, OnlineConsumer]:
        """Return the consumers last seen in a group at its brokers, by client id."""
        cluster = self._place(key)
        return cluster.views.clients(key) if cluster else {}

    def settings(self, key: Key) -> Mapping[str, BrokerGroupSettings]:
        """Return a group's settings at its brokers, by broker."""
        cluster = self._place(key)
        return cluster.views.settings(key) if cluster else {}

    async def unlock(self, group: Group, client: str, queues: Collection[Queue]) -> None:
        """Release the queue locks of an ended member; if that fails, they expire by themselves."""
        key = (group.namespace, group.name)
        binding, cluster = self._stays.get(key), self._place(key)
        if binding and cluster:
            try:
                await cluster.brokers.unlock(binding.wanted.group, client, queues)
            except BrokerError as error:
                _log.info("The locks of %s were not given back: %s", client, error)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._asking.add(task)
        task.add_done_callback(self._asked)

    def _asked(self, task: "asyncio.Task[None]") -> None:
        self._asking.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.warning("Brokers could not be asked: %s", error)
