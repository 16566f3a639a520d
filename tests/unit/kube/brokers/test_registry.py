"""Ownership of a consumer group that several ConsumerGroups name, and access to its brokers."""

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ground.keys import Authority
from ground.poll import soon
from group_secrets import GroupSecrets, pair_data
from rota import aio
from rota.brokers.memory import BROKER, NAME_SERVER, MemoryCluster
from rota.brokers.port import Brokers
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.documents import Assignment
from rota.kube.brokers.consumer_poller import ConsumerPoller
from rota.kube.brokers.lag.lag_poller import LagPoller
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.client.api import Api
from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.model import Reason
from slow_cluster import SlowCluster

NO_API: Any = None  # the API server is not used


class Clusters:
    """Clusters of brokers, by the first name server of a group's spec."""

    def __init__(self, clusters: Mapping[str, MemoryCluster], api: Any = NO_API) -> None:
        self.clusters = clusters
        self.registry = BrokerRegistry(api, self.connect)
        self.registry.set_leading(is_leading=True)
        self.changed_keys: list[tuple[str, str]] = []
        self.registry.on_change = self.changed_keys.append

    def connect(self, config: ConnectionConfig) -> Brokers:
        return self.clusters[config.name_servers[0]]

    def group(self, name: str, created: str, *name_servers: str, **access: Any) -> Group:
        """Create a group with the consumer group `billing`."""
        spec = {
            "group": "billing",
            "broker": {"rocketmq": {"nameServers": list(name_servers), **access}},
            "subscriptions": [{"topic": "orders"}],
        }
        group = Group("shop", name)
        metadata = Metadata(name, uid=name, namespace="shop", creation_timestamp=created, generation=1)
        group.set_spec(CustomResource(metadata, spec), None)
        self.registry.update_group(group)
        return group

    async def poll(self, group: Group) -> BrokerState:
        await self.registry.poll_group(group)
        return self.state_of(group)

    def state_of(self, group: Group) -> BrokerState:
        return self.registry.state_of(group, 0.0)


def problem_reasons(state: BrokerState) -> list[Reason]:
    return [problem.reason for problem in state.problems]


@pytest.fixture
async def clusters() -> AsyncIterator[Clusters]:
    created = Clusters({"ours:9876": MemoryCluster(), "evil:9876": MemoryCluster()})
    for memory in created.clusters.values():
        await memory.create_topic("orders", BROKER, 4)
    yield created
    await created.registry.close()


async def test_duplicate_consumer_group_belongs_to_the_older_group(clusters: Clusters) -> None:
    older = clusters.group("older", "2026-11-27T08:00:00Z", "ours:9876")
    newer = clusters.group("newer", "2026-11-27T08:00:01Z", "ours:9876")
    for group in (newer, older):
        await clusters.poll(group)
    assert problem_reasons(clusters.state_of(older)) == []
    (problem,) = clusters.state_of(newer).problems
    assert problem.reason is Reason.DUPLICATE_CONSUMER_GROUP
    assert problem.message.startswith("The older ConsumerGroup older manages the consumer group billing at the same")
    clusters.changed_keys.clear()
    clusters.registry.forget(("shop", "older"))
    assert clusters.changed_keys == [("shop", "newer")]
    assert problem_reasons(clusters.state_of(newer)) == []


async def test_duplicate_consumer_group_is_not_owned_without_access_to_its_brokers(clusters: Clusters) -> None:
    """The older group is served by its own name server, although its spec also names the other group's."""
    older = clusters.group("older", "2026-11-27T08:00:00Z", "evil:9876", "ours:9876")
    newer = clusters.group("newer", "2026-11-27T08:00:01Z", "ours:9876")
    for group in (older, newer):
        await clusters.poll(group)
    assert problem_reasons(clusters.state_of(newer)) == []
    assert clusters.state_of(newer).views["orders"]


async def test_duplicate_consumer_group_waits_for_an_older_one_only_before_its_first_assignment(
    clusters: Clusters,
) -> None:
    clusters.group("older", "2026-11-27T08:00:00Z", "ours:9876")
    newer = clusters.group("newer", "2026-11-27T08:00:01Z", "ours:9876")
    state = await clusters.poll(newer)
    assert (state.views["orders"], state.unmanaged_ids, problem_reasons(state)) == (None, None, [])
    document = Assignment(group="shop/newer", generation=1, issued_at="")
    newer.assignment.stored = replace(newer.stored_assignment, document=document)
    state = clusters.state_of(newer)
    assert state.views["orders"], "it keeps its queues until the older group is known to have access"
    assert problem_reasons(state) == []


async def test_duplicate_consumer_group_waits_if_the_poll_of_the_older_one_began_in_an_earlier_leadership() -> None:
    """Otherwise members of both groups would consume the same queues until the older group is polled again."""
    slow = SlowCluster()
    await slow.create_topic("orders", BROKER, 4)
    clusters = Clusters({"ours:9876": slow})
    older = clusters.group("older", "2026-11-27T08:00:00Z", "ours:9876")
    newer = clusters.group("newer", "2026-11-27T08:00:01Z", "ours:9876")
    poll = asyncio.create_task(clusters.poll(older))
    await slow.asked.wait()
    clusters.registry.set_leading(is_leading=False)
    slow.released.set()
    await poll
    clusters.registry.set_leading(is_leading=True)
    state = await clusters.poll(newer)
    assert state.views["orders"] is None
    await clusters.poll(older)
    assert problem_reasons(clusters.state_of(newer)) == [Reason.DUPLICATE_CONSUMER_GROUP]
    await clusters.registry.close()


@pytest.mark.parametrize("task", ["route watcher", "lag poller", "consumer poller"])
async def test_supervision_restarts_the_pollers_of_brokers(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    poller_class: Any = {"route watcher": RouteWatcher, "lag poller": LagPoller, "consumer poller": ConsumerPoller}[
        task
    ]
    real_run = poller_class.run
    starts: list[object] = []
    restarted = asyncio.Event()

    async def fail_first(poller: Any) -> None:
        starts.append(poller)
        if len(starts) == 1:
            raise ZeroDivisionError
        restarted.set()
        await real_run(poller)

    monkeypatch.setattr(aio, "MIN_RESTART_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(poller_class, "run", fail_first)
    await clusters.poll(clusters.group("orders", "2026-11-27T08:00:00Z", "ours:9876"))
    await restarted.wait()
    assert len(starts) == 2


class RenewedCluster(MemoryCluster):
    """Brokers that record each replacement of their connections."""

    def __init__(self) -> None:
        super().__init__()
        self.reconnected: list[None] = []

    def reconnect(self) -> None:
        self.reconnected.append(None)


class SecuredGroups:
    """Groups that connect with a user and a client certificate from the Secrets of their namespaces."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "authority")
        self.secrets = GroupSecrets()
        self.memory = RenewedCluster()
        self.configs: list[ConnectionConfig] = []
        self.registry = BrokerRegistry(cast("Api", self.secrets), self._connect)
        self.registry.set_leading(is_leading=True)

    def _connect(self, config: ConnectionConfig) -> Brokers:
        self.configs.append(config)
        return self.memory

    def renew(self, namespace: str, name: str) -> None:
        """Store the credentials and the certificate of a name in a namespace's Secrets."""
        self.secrets.put(namespace, "acl", {"accessKey": name, "secretKey": "12345678"})
        self.secrets.put(namespace, "client", pair_data(self.authority.issue(name, name)))

    def group(self, namespace: str) -> Group:
        """Create the group `orders` of a namespace."""
        tls = {"enabled": True, "clientSecret": {"name": "client"}}
        rocketmq = {"nameServers": ["ns:9876"], "credentialsSecret": {"name": "acl"}, "tls": tls}
        spec = {"group": namespace, "broker": {"rocketmq": rocketmq}, "subscriptions": [{"topic": "orders"}]}
        group = Group(namespace, "orders")
        group.set_spec(CustomResource(Metadata("orders", uid=namespace, namespace=namespace, generation=1), spec), None)
        self.registry.update_group(group)
        return group

    def users(self) -> list[str]:
        """Return the user of each client of the brokers."""
        return [config.credentials().access_key for config in self.configs if config.credentials]

    def state(self, group: Group) -> BrokerState:
        return self.registry.state_of(group, asyncio.get_running_loop().time())

    async def has_lag(self, group: Group) -> bool:
        return bool(self.registry.lag_of((group.namespace, group.name)).queues)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[SecuredGroups]:
    created = SecuredGroups(tmp_path)
    await created.memory.create_topic("orders", BROKER, 4)
    yield created
    await created.registry.close()


async def test_tls_certificate_and_credentials_renewed_keep_routes_and_lag_of_their_groups(
    secured: SecuredGroups,
) -> None:
    secured.renew("shop", "one")
    group = secured.group("shop")
    await secured.registry.poll_group(group)
    await soon(lambda: secured.has_lag(group))
    lag = secured.registry.lag_of(("shop", "orders"))
    (config,) = secured.configs
    assert config.tls
    first = config.tls()
    secured.memory.take_down(NAME_SERVER)  # no route can be read again
    secured.renew("shop", "two")
    poll = asyncio.create_task(secured.registry.poll_group(group))
    while not secured.memory.reconnected:
        await asyncio.sleep(0)
        assert secured.state(group).views["orders"]
    assert secured.registry.lag_of(("shop", "orders")).queues.keys() == lag.queues.keys()
    assert config.tls() is not first
    assert secured.users() == ["two"], "the same client uses the new credentials"
    secured.memory.bring_up(NAME_SERVER)
    await poll
    assert secured.state(group).views["orders"]
    await secured.registry.poll_group(group)
    assert len(secured.memory.reconnected) == 1, "nothing has changed since"


async def test_tls_certificate_renewed_by_an_unusable_one_stays_in_use_and_the_problem_is_reported(
    secured: SecuredGroups,
) -> None:
    secured.renew("shop", "one")
    group = secured.group("shop")
    await secured.registry.poll_group(group)
    (config,) = secured.configs
    assert config.tls
    first = config.tls()
    secured.secrets.put("shop", "client", {"tls.crt": "nonsense", "tls.key": "nonsense"})
    await secured.registry.poll_group(group)
    assert problem_reasons(secured.state(group)) == [Reason.MISSING_SECRET]
    assert secured.state(group).views["orders"]
    assert (config.tls(), secured.users(), secured.memory.reconnected) == (first, ["one"], [])
    secured.renew("shop", "two")
    await secured.registry.poll_group(group)
    assert problem_reasons(secured.state(group)) == []
    assert (secured.users(), len(secured.memory.reconnected)) == (["two"], 1)


async def test_credentials_renewed_in_all_namespaces_that_share_them_keep_their_connections(
    secured: SecuredGroups,
) -> None:
    namespaces = ("bills", "shop")
    for namespace in namespaces:
        secured.renew(namespace, "one")
    groups = [secured.group(namespace) for namespace in namespaces]
    for group in groups:
        await secured.registry.poll_group(group)
    for namespace in namespaces:
        secured.renew(namespace, "two")
    for group in groups:
        await secured.registry.poll_group(group)
    assert (secured.users(), len(secured.memory.reconnected)) == (["two"], 1)


async def test_credentials_renewed_in_one_namespace_are_not_used_for_groups_of_another(secured: SecuredGroups) -> None:
    for namespace in ("bills", "shop"):
        secured.renew(namespace, "one")
    bills, shop = secured.group("bills"), secured.group("shop")
    for group in (bills, shop):
        await secured.registry.poll_group(group)
    assert secured.users() == ["one"]
    secured.renew("shop", "two")
    await secured.registry.poll_group(shop)
    assert secured.users() == ["one", "two"]
    secured.renew("shop", "three")
    await secured.registry.poll_group(shop)
    assert secured.users() == ["one", "three"]
    assert all(secured.state(group).views["orders"] for group in (bills, shop))


class ClientSecret:
    """An API server that returns one client certificate for any Secret."""

    def __init__(self, folder: Path) -> None:
        pair = Authority(folder, "authority").issue("client", "client")
        texts = {"tls.crt": pair.certificate.read_bytes(), "tls.key": pair.key.read_bytes()}
        self.data = {name: base64.b64encode(text).decode() for name, text in texts.items()}

    async def get(self, _: str, kind: type[Any]) -> Any:
        return msgspec.convert({"data": self.data}, kind)


async def test_tls_validity_of_a_groups_client_certificate_is_known_while_its_brokers_are_polled(
    tmp_path: Path,
) -> None:
    clusters = Clusters({"ours:9876": MemoryCluster()}, ClientSecret(tmp_path))
    await clusters.clusters["ours:9876"].create_topic("orders", BROKER, 4)
    tls = {"enabled": True, "clientSecret": {"name": "client"}}
    group = clusters.group("orders", "2026-11-27T08:00:00Z", "ours:9876", tls=tls)
    assert clusters.state_of(group).client_validity is None
    validity = (await clusters.poll(group)).client_validity
    assert validity
    assert validity.not_before < validity.not_after
    clusters.registry.set_leading(is_leading=False)
    assert clusters.state_of(group).client_validity is None
    await clusters.registry.close()
