"""A problem of one group is reported for that group, and affects no other group."""

import sys
import threading
from datetime import UTC, datetime

import pytest

from ground.poll import soon
from kube.world import GROUP, OperatedNamespace, a_group, add_two_members, assert_unaffected, billing_group, is_gone
from rota.brokers.memory import BROKER, MemoryCluster
from rota.kube.reconcile import planning
from rota.model import Roster

pytestmark = pytest.mark.usefixtures("crds", "node")

CUSTOM = {"strategy": "Custom", "options": {"custom": {"name": "slow"}}}
CRASHED = {
    "name": "rota-sidecar",
    "image": "rota",
    "imageID": "",
    "ready": False,
    "started": False,
    "restartCount": 3,
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1}},
}


_KIND = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy"}


class _EntryPoint:
    """An entry point that offers a strategy."""

    name = "slow"

    def __init__(self, strategy: object) -> None:
        self._strategy = strategy

    def load(self) -> object:
        return self._strategy


async def enforce_quota(world: OperatedNamespace, **hard: str) -> str:
    """Create a quota, wait until it is in force, and return its path."""
    quotas = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    await world.api.create(quotas, {"metadata": {"name": "none"}, "spec": {"hard": hard}})

    async def in_force() -> bool:
        return bool((await world.api.get(f"{quotas}/none")).get("status", {}).get("used"))

    await soon(in_force)
    return f"{quotas}/none"


@pytest.mark.slow("a sidecar in a crash loop, as a process")
async def test_crash_loop_of_a_sidecar_moves_its_queues_to_another_member(world: OperatedNamespace) -> None:
    await add_two_members(world)
    crashed = world.fleet.members["orders-a"]
    await crashed.stop_server()
    status = {"initContainerStatuses": [CRASHED], "conditions": [{"type": "Ready", "status": "False"}]}
    await world.api.patch(f"{crashed.path}/status", {"status": status}, "strategic")
    world.fleet.mark_ended("orders-a")  # its process has ended: no member consumes its queues

    async def has_moved() -> bool:
        return world.fleet.shares["orders-b"] == 8

    await world.soon(has_moved)


async def test_config_map_rejected_by_a_quota_is_reported_and_written_once_allowed(world: OperatedNamespace) -> None:
    await world.api.delete(world.path)
    await soon(lambda: is_gone(world.api, f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"))
    quota = await enforce_quota(
        world, **{"count/configmaps": "1"}
    )  # one exists already: the CA certificate of the cluster
    await world.api.create(world.path.rpartition("/")[0], a_group())
    condition = await world.wait_for_condition("WriteRejected")
    assert "exceeded quota" in condition["message"]
    assert (await world.conditions())["Ready"]["reason"] == "WriteRejected"
    await world.api.delete(quota)
    await world.wait_until_cleared("WriteRejected")
    await add_two_members(world)


async def test_deployment_rejected_by_a_quota_holds_up_no_queue(world: OperatedNamespace) -> None:
    await enforce_quota(world, **{"count/deployments.apps": "0"})
    template = {"spec": {"containers": [{"name": "app", "image": "app"}]}}
    await world.api.patch(world.path, {"spec": {"template": template, "replicas": 1}})
    assert "exceeded quota" in (await world.wait_for_condition("TemplateRejected"))["message"]
    await add_two_members(world)


def _all_to_first(roster: Roster) -> list[int]:
    return [0] * len(roster.queues)


async def use_custom_strategy(world: OperatedNamespace) -> None:
    policies = world.path.rpartition("/")[0].replace("consumergroups", "rebalancepolicies")
    await world.api.create(policies, {"metadata": {"name": "own"}, "spec": CUSTOM, **_KIND})
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "own"}}})


async def test_custom_strategy_decides_which_member_owns_which_queue(
    world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["rota.strategies.custom"], "entry_points", lambda **_: [_EntryPoint(_all_to_first)])
    await add_two_members(world)
    await use_custom_strategy(world)
    await world.wait_for_shares(8, 0)
    assert world.fleet.shares["orders-a"] == 8


async def test_reconcile_of_one_group_does_not_rewrite_the_assignment_of_another(
    world: OperatedNamespace, memory: MemoryCluster
) -> None:
    await memory.create_topic("bills", BROKER, 6)
    async with billing_group(world) as billing:
        await add_two_members(world)
        await soon(billing.at_rest)
        path = f"/api/v1/namespaces/{world.namespace}/configmaps/billing-rota"
        version = (await world.api.get(path))["metadata"]["resourceVersion"]
        await world.fleet.add("orders-c")
        await world.wait_for_shares(3, 3, 2)
        await soon(world.at_rest)
        assert (await world.api.get(path))["metadata"]["resourceVersion"] == version


async def test_custom_strategy_that_hangs_stops_only_its_own_group(
    world: OperatedNamespace, memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def slow(*_: object, **__: object) -> object:
        released.wait(120)
        raise ValueError("too late")

    monkeypatch.setattr(planning, "CUSTOM_STRATEGY_SECONDS", 0.2)
    monkeypatch.setattr(sys.modules["rota.strategies.custom"], "entry_points", lambda **_: [_EntryPoint(slow)])
    await memory.create_topic("bills", BROKER, 6)
    try:
        async with billing_group(world) as billing:
            owners = await add_two_members(world)
            await use_custom_strategy(world)
            assert "has not returned" in (await world.wait_for_condition("StrategyFailed"))["message"]
            await assert_unaffected(billing)
            assert world.fleet.owners() == owners
            await world.api.patch(world.path, {"spec": {"policyRef": None}})
            await world.wait_until_cleared("StrategyFailed")
            fixed = [_EntryPoint(_all_to_first)]
            monkeypatch.setattr(sys.modules["rota.strategies.custom"], "entry_points", lambda **_: fixed)
            await world.api.patch(world.path, {"spec": {"policyRef": {"name": "own"}}})
            await world.wait_for_shares(8, 0)  # although the first call still hangs
    finally:
        released.set()


@pytest.mark.parametrize("servers", [["memory:9876", "other:9876"], ["other:9876"]])
async def test_duplicate_consumer_group_gets_no_queue_until_the_older_group_is_deleted(
    world: OperatedNamespace, servers: list[str]
) -> None:
    """The second name server has another name, and the same brokers."""
    await add_two_members(world)
    await wait_until_younger(world)
    rival = a_group("rival", group=GROUP, broker={"rocketmq": {"nameServers": servers}})
    collection = world.path.rpartition("/")[0]
    await world.api.create(collection, rival)
    rival_group = OperatedNamespace(world.api, world.namespace, world.fleet, world.operator)
    rival_group.path = f"{collection}/rival"
    assert GROUP in (await rival_group.wait_for_condition("DuplicateConsumerGroup"))["message"]
    assert "rival-rota" not in await config_map_names(world)
    await world.wait_until_cleared("DuplicateConsumerGroup")
    await world.api.delete(world.path)
    await rival_group.wait_until_cleared("DuplicateConsumerGroup")

    async def has_assignment() -> bool:
        return "rival-rota" in await config_map_names(world)

    await soon(has_assignment)


async def wait_until_younger(world: OperatedNamespace) -> None:
    """Wait until a new group would be younger than this one: Kubernetes stores whole seconds."""
    created: str = (await world.api.get(world.path))["metadata"]["creationTimestamp"]

    async def has_passed() -> bool:
        return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}" > created

    await soon(has_passed)


async def config_map_names(world: OperatedNamespace) -> set[str]:
    """Return the names of the namespace's ConfigMaps."""
    return {
        entry["metadata"]["name"] for entry in await world.api.list(f"/api/v1/namespaces/{world.namespace}/configmaps")
    }
