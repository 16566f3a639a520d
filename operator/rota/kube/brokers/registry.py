"""Where each group's brokers are, how to be let in, and what they tell; groups of one cluster of brokers share it."""

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rota.aio import supervise
from rota.brokers.errors import BrokerError
from rota.brokers.port import Brokers, Client, Settings
from rota.brokers.rocketmq.admin import Cluster
from rota.brokers.rocketmq.routing import Site
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.kube.brokers.broker_access import Access, BrokerAccess, MissingSecretError
from rota.kube.brokers.consumer_poller import ConsumerPoller
from rota.kube.brokers.lag.lag_poller import Lag, Lags
from rota.kube.brokers.route_watcher import Interest, Views
from rota.kube.client.api import Api
from rota.kube.client.objects import Key
from rota.kube.state.broker_state import AtBroker
from rota.kube.state.group import Group
from rota.kube.state.queue_quota import QueueQuota
from rota.logs import of_group
from rota.model import Queue, Reason, Verdict
from rota.spec import GroupSpec, RocketMQ

SECRETS_SECONDS = 60.0  # how old a Secret's content may be


_NEWEST = "~"  # sorts after every timestamp

_SERVICE = re.compile(r"^(?!localhost:)[^.:\[\]]+(?=:)")

_log = logging.getLogger(__name__)


@dataclass
class _Place:
    """One cluster of brokers, reached in one way."""

    brokers: Brokers
    views: Views
    lags: Lags
    consumers: ConsumerPoller
    running: Sequence[asyncio.Task[None]]


@dataclass
class _Stay:
    """Where a group is."""

    group: Group
    wanted: Interest
    reached: RocketMQ
    place: tuple[object, ...] | None = None
    problems: tuple[Verdict, ...] = ()
    was_looked_at: bool = False  # whether its brokers were asked since this operator leads
    is_accepted: bool = False  # whether they have answered since then

    @property
    def creation_order(self) -> tuple[str, str]:
        """Sort key: creation time, then uid; the oldest group first."""
        metadata = self.group.body.metadata if self.group.body else None
        return (metadata.creation_timestamp or _NEWEST, metadata.uid) if metadata else (_NEWEST, "")


class Places:
    """All clusters of brokers that groups use."""

    def __init__(
        self,
        api: Api,
        connect: Callable[[Site], Brokers] = Cluster,
        *,
        quota: QueueQuota | None = None,
        address_policy: AddressPolicy | None = None,
        is_pod: bool = False,
    ) -> None:
        """Connect to none yet; in a pod names are looked up in its own namespace, which is not that of groups."""
        self._connect, self._is_pod = connect, is_pod
        self._quota = quota or QueueQuota()
        self._access = BrokerAccess(api, address_policy)
        self._places: dict[tuple[object, ...], _Place] = {}
        self._stays: dict[Key, _Stay] = {}
        self._claims: dict[str, set[Key]] = {}  # who names each of the brokers' groups
        self._awake = False  # whether it is worth asking
        self._asking: set[asyncio.Task[None]] = set()
        self.news: Callable[[Key], None] = lambda _: None
        self.looked: Callable[[Collection[Key]], None] = lambda _: None  # told of how far these groups are behind
        self.worked: Callable[[Key], Collection[Queue]] = lambda _: ()  # which queues of a group somebody works

    async def close(self) -> None:
        """Leave all."""
        for key in list(self._stays):
            self.forget(key)
        await asyncio.gather(*self._asking, return_exceptions=True)

    def want(self, group: Group) -> None:
        """Take where a group's brokers are now, and which topics it reads; what cannot be read stays as it was."""
        spec, key = group.wish.spec, (group.namespace, group.name)
        if spec is None:
            return
        reached = _as_members_do(group.namespace, spec.broker.rocketmq) if self._is_pod else spec.broker.rocketmq
        interest, stay = _interest(group, spec), self._stays.get(key)
        if stay is None:
            stay = self._stays[key] = _Stay(group, interest, reached)
            self._claim(key, stay)
            return
        moved = stay.reached != reached
        changed = moved or stay.wanted != interest
        self._unclaim(key, stay)
        stay.group, stay.wanted, stay.reached = group, interest, reached
        self._claim(key, stay)
        if moved:
            stay.was_looked_at = stay.is_accepted = False
            self._leave(key, stay)
        if changed and self._awake:
            self._background(self._look(key, stay))

    def forget(self, key: Key) -> None:
        """Ask nothing for this group any more."""
        if stay := self._stays.pop(key, None):
            self._unclaim(key, stay)
            self._leave(key, stay)

    def _leave(self, key: Key, stay: _Stay) -> None:
        place = self._places.get(stay.place) if stay.place else None
        stay.place = None
        if place is None:
            return
        place.views.want(key, None)
        if place.views.idle:
            self._places = {at: it for at, it in self._places.items() if it is not place}
            for task in place.running:
                task.cancel()
            self._background(place.brokers.close())

    def _claim(self, key: Key, stay: _Stay) -> None:
        self._claims.setdefault(stay.wanted.group, set()).add(key)
        for rival in self._rivals(key, stay):
            self.news(rival)

    def _unclaim(self, key: Key, stay: _Stay) -> None:
        for rival in self._rivals(key, stay):
            self.news(rival)
        claims = self._claims[stay.wanted.group]
        claims.discard(key)
        if not claims:
            del self._claims[stay.wanted.group]

    def _rivals(self, key: Key, stay: _Stay) -> list[Key]:
        """Return the other groups that share this one's consumer group at the same brokers."""
        named = self._claims[stay.wanted.group] - {key}
        return sorted(other for other in named if self._share_brokers(stay, self._stays[other]))

    def _share_brokers(self, stay: _Stay, other: _Stay) -> bool:
        """Whether two groups name a common name server, or name servers that lead to a common broker."""
        if not {*stay.reached.name_servers}.isdisjoint(other.reached.name_servers):
            return True
        return not self._addresses(stay).isdisjoint(self._addresses(other))

    def _addresses(self, stay: _Stay) -> frozenset[str]:
        """Return the addresses of the brokers of a group's topics, which are asked who is in it."""
        place = self._places.get(stay.place) if stay.place else None
        return place.brokers.addresses(place.views.where(stay.wanted)) if place else frozenset()

    def _owns(self, stay: _Stay, other: _Stay) -> bool:
        """Whether the consumer group of both belongs to the first: it is older, and a broker of both has let it in.

        To name the same name server, or to be told of the broker without asking it, is no proof.
        """
        is_older = stay.creation_order < other.creation_order
        return is_older and stay.is_accepted and not self._addresses(stay).isdisjoint(self._addresses(other))

    def _awaits_older(self, stay: _Stay, rivals: Sequence[_Stay]) -> bool:
        """Whether a group without assignment has to wait: an older one may turn out to own its consumer group."""
        if stay.group.record.document is not None:
            return False
        return any(not rival.was_looked_at and rival.creation_order < stay.creation_order for rival in rivals)

    def _duplicates(self, stay: _Stay, rivals: Sequence[_Stay]) -> list[Verdict]:
        """Return ClaimedTwice if an older group owns this one's consumer group."""
        owner = next((rival.group for rival in rivals if self._owns(rival, stay)), None)
        if owner is None:
            return []
        # Tenants of this namespace may not know what there is in others.
        older_group = "An older ConsumerGroup of another namespace"
        if owner.namespace == stay.group.namespace:
            older_group = f"The older ConsumerGroup {owner.name}"
        message = (
            f"{older_group} manages the consumer group {stay.wanted.group} at the same brokers;"
            " give this one its own spec.group, or delete one of them"
        )
        return [Verdict(Reason.CLAIMED_TWICE, message)]

    def _on_broker_change(self, key: Key) -> None:
        """Update a group's claim, and publish that its brokers tell something else than before."""
        self._update_claim(key)
        self.news(key)
        if place := self._place(key):
            self._background(place.consumers.ask(key))

    def _update_claim(self, key: Key, *, was_looked_at: bool = False) -> None:
        """Note whether a group's brokers let it in; if that has changed, its rivals are decided on again."""
        stay, place = self._stays.get(key), self._place(key)
        if stay is None:
            return
        before = stay.was_looked_at, stay.is_accepted
        stay.was_looked_at |= was_looked_at
        is_accepted = place.views.is_accepted(key) if place else None
        if is_accepted is not None:
            stay.is_accepted = is_accepted
        if (stay.was_looked_at, stay.is_accepted) != before:
            for rival in self._rivals(key, stay):
                self.news(rival)

    def lead(self, *, leads: bool) -> None:
        """Ask from now on for what is looked at, or ask nobody any more."""
        self._awake = leads
        for key, stay in self._stays.items() if not leads else ():
            stay.was_looked_at = stay.is_accepted = False
            self._leave(key, stay)

    async def look(self, group: Group) -> None:
        """Ask everything about a group's brokers now."""
        key = (group.namespace, group.name)
        if stay := self._stays.get(key):
            await self._look(key, stay, tell=False)

    async def look_who_is_there(self, key: Key) -> None:
        """Ask a group's brokers now who is online in it."""
        if place := self._place(key):
            await place.views.look_who_is_there(key)

    async def _look(self, key: Key, stay: _Stay, *, tell: bool = True) -> None:
        reached: RocketMQ = stay.reached
        problems: tuple[Verdict, ...] = ()
        try:
            access = await self._access.read(key[0], reached, self._places)
        except MissingSecretError as missing:
            problems = (Verdict(Reason.MISSING_SECRET, str(missing)),)
        if self._stays.get(key) is not stay or stay.reached != reached:  # it went, or moved, meanwhile
            return
        if not self._awake:  # somebody else leads now
            return
        stay.problems = problems
        if not problems:
            place = self._enter(key, stay, access)
            await place.views.look(key)
            self._background(place.consumers.ask(key))
        if self._stays.get(key) is stay:
            self._update_claim(key, was_looked_at=True)
        if tell:
            self.news(key)

    def _enter(self, key: Key, stay: _Stay, access: Access) -> _Place:
        if stay.place != access.mark:
            self._leave(key, stay)
        stay.place = access.mark
        if access.mark not in self._places:
            brokers = self._connect(access.site)
            views = Views(brokers, self._on_broker_change, self._quota)
            lags = Lags(brokers, views, self.worked, self.looked, self._reported, turned=self.news, begun=self._begun)
            loop = asyncio.get_running_loop()
            consumers = ConsumerPoller(brokers, views, self._unmanaged, self.news)
            tasks = {"route watcher": views.run, "lag poller": lags.run, "consumer poller": consumers.run}
            running = [loop.create_task(supervise(name, work), name=name) for name, work in tasks.items()]
            self._places[access.mark] = _Place(brokers, views, lags, consumers, running)
        place = self._places[access.mark]
        place.views.want(key, stay.wanted)
        return place

    async def run(self) -> None:
        """Look after Secrets for ever: who changes one means it."""
        while True:
            await asyncio.sleep(SECRETS_SECONDS)
            for key, stay in list(self._stays.items()) if self._awake else ():
                if stay.reached.credentials_secret or stay.reached.tls.enabled or stay.problems:
                    try:
                        await self._look(key, stay)
                    except Exception as error:  # noqa: BLE001 - of one group; the others are looked after all the same
                        _log.warning("The Secrets for the broker could not be read: %s", error, extra=of_group(*key))

    def _place(self, key: Key) -> _Place | None:
        stay = self._stays.get(key)
        return self._places.get(stay.place) if stay and stay.place else None

    def of(self, group: Group, now: float) -> AtBroker:
        """Return what is known of a group at its brokers."""
        key = (group.namespace, group.name)
        stay, place = self._stays.get(key), self._place(key)
        if stay is None or place is None:
            return AtBroker(problems=stay.problems if stay else ())
        rivals = [self._stays[rival] for rival in self._rivals(key, stay)]
        found = place.views.of(key, now, self._own_names(stay, rivals, now))
        if self._awaits_older(stay, rivals):
            return AtBroker(dict.fromkeys(found.views), None, (*stay.problems, *found.problems))
        problems = (*stay.problems, *self._duplicates(stay, rivals), *found.problems)
        return AtBroker(found.views, found.foreigners, problems, place.consumers.of(key))

    def _own_names(self, stay: _Stay, rivals: Sequence[_Stay], now: float) -> Collection[str]:
        """Return how client ids of a group's members end."""
        # Members of groups that have to leave this one's consumer group take no share of it.
        duplicates = [rival.group for rival in rivals if self._owns(stay, rival)]
        return {*stay.group.names(now)}.union(*(duplicate.names(now) for duplicate in duplicates))

    def _unmanaged(self, key: Key) -> Collection[str]:
        """Return the client ids that were last seen in a group and are not its members'."""
        stay, clients = self._stays.get(key), self.clients(key)
        if stay is None or not clients:
            return ()
        rivals = [self._stays[rival] for rival in self._rivals(key, stay)]
        ours = self._own_names(stay, rivals, asyncio.get_running_loop().time())
        return [client_id for client_id in clients if client_id.partition("@")[2] not in ours]

    def lag(self, key: Key) -> Lag:
        """Return how far a group is behind, as far as its brokers tell."""
        place = self._place(key)
        return place.lags.of(key) if place else Lag({})

    def _reported(self, key: Key) -> Mapping[Queue, int]:
        """Return where the slowest member of a Broadcasting group is."""
        stay = self._stays.get(key)
        return stay.group.reported if stay else {}

    def _begun(self, key: Key) -> Mapping[str, float]:
        """Return since when a group works its topics."""
        stay = self._stays.get(key)
        document = stay.group.record.document if stay else None
        return document.begun_at if document else {}

    def clients(self, key: Key) -> Mapping[str, Client]:
        """Return who was last seen in a group at its brokers, by id."""
        place = self._place(key)
        return place.views.clients(key) if place else {}

    def settings(self, key: Key) -> Mapping[str, Settings]:
        """Return what its brokers have for a group, by broker."""
        place = self._place(key)
        return place.views.settings(key) if place else {}

    async def unlock(self, group: Group, client: str, queues: Collection[Queue]) -> None:
        """Give back the locks of a member that has ended; where that fails they run out by themselves."""
        key = (group.namespace, group.name)
        stay, place = self._stays.get(key), self._place(key)
        if stay and place:
            try:
                await place.brokers.unlock(stay.wanted.group, client, queues)
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


def _as_members_do(namespace: str, reached: RocketMQ) -> RocketMQ:
    """Name the servers that members mean: in their pods a name without a dot is a Service of their namespace."""
    return msgspec.structs.replace(
        reached, name_servers=[_SERVICE.sub(rf"\g<0>.{namespace}", it) for it in reached.name_servers]
    )


def _interest(group: Group, spec: GroupSpec) -> Interest:
    topics = tuple(it.topic for it in spec.subscriptions)
    return Interest(
        spec.group or group.name, topics, spec.message_model == "Broadcasting", spec.start_from, group.weighs_queues
    )
