"""What goes wrong with one group is told of it, and stays with it; what ran once is not forgotten."""

import sys
import threading
from datetime import UTC, datetime

import pytest

from ground.poll import soon
from kube.world import GROUP, OperatedNamespace, a_group, billing, goes_on, is_gone, two_members
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


class _Point:
    """An entry point that offers a strategy."""

    name = "slow"

    def __init__(self, strategy: object) -> None:
        self._strategy = strategy

    def load(self) -> object:
        return self._strategy


async def counted(world: OperatedNamespace, **hard: str) -> str:
    """Make a quota; return where it is once it is in force."""
    quotas = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    await world.api.create(quotas, {"metadata": {"name": "none"}, "spec": {"hard": hard}})

    async def in_force() -> bool:
        return bool((await world.api.get(f"{quotas}/none")).get("status", {}).get("used"))

    await soon(in_force)
    return f"{quotas}/none"


@pytest.mark.slow("a sidecar in a crash loop, as a process")
async def test_crash_loop_of_a_sidecar_moves_its_queues_to_another_member(world: OperatedNamespace) -> None:
    await two_members(world)
    one = world.fleet.members["orders-a"]
    await one.hush()
    status = {"initContainerStatuses": [CRASHED], "conditions": [{"type": "Ready", "status": "False"}]}
    await world.api.patch(f"{one.path}/status", {"status": status}, "strategic")
    world.fleet.ended("orders-a")  # its process is: what it worked is worked by nobody

    async def all_elsewhere() -> bool:
        return world.fleet.shares["orders-b"] == 8

    await world.soon(all_elsewhere)


async def test_config_map_rejected_by_a_quota_is_reported_and_written_once_allowed(world: OperatedNamespace) -> None:
    await world.api.delete(world.path)
    await soon(lambda: is_gone(world.api, f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"))
    quota = await counted(world, **{"count/configmaps": "1"})  # there is one already: that of the cluster's root
    await world.api.create(world.path.rpartition("/")[0], a_group())
    told = await world.condition("WriteRejected")
    assert "exceeded quota" in told["message"]
    assert (await world.conditions())["Ready"]["reason"] == "WriteRejected"
    await world.api.delete(quota)
    await world.well("WriteRejected")
    await two_members(world)


async def test_deployment_rejected_by_a_quota_holds_up_no_queue(world: OperatedNamespace) -> None:
    await counted(world, **{"count/deployments.apps": "0"})
    template = {"spec": {"containers": [{"name": "app", "image": "app"}]}}
    await world.api.patch(world.path, {"spec": {"template": template, "replicas": 1}})
    assert "exceeded quota" in (await world.condition("TemplateRejected"))["message"]
    await two_members(world)


def _first_alone(roster: Roster) -> list[int]:
    return [0] * len(roster.queues)


async def has_a_strategy_of_its_own(world: OperatedNamespace) -> None:
    policies = world.path.rpartition("/")[0].replace("consumergroups", "rebalancepolicies")
    await world.api.create(policies, {"metadata": {"name": "own"}, "spec": CUSTOM, **_KIND})
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "own"}}})


async def test_custom_strategy_decides_which_member_owns_which_queue(
    world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["rota.strategies.custom"], "entry_points", lambda **_: [_Point(_first_alone)])
    await two_members(world)
    await has_a_strategy_of_its_own(world)
    await world.until(8, 0)
    assert world.fleet.shares["orders-a"] == 8


async def test_reconcile_of_one_group_does_not_rewrite_the_assignment_of_another(
    world: OperatedNamespace, memory: MemoryCluster
) -> None:
    await memory.create_topic("bills", BROKER, 6)
    async with billing(world) as other:
        await two_members(world)
        await soon(other.at_rest)
        record = f"/api/v1/namespaces/{world.namespace}/configmaps/billing-rota"
        written = (await world.api.get(record))["metadata"]["resourceVersion"]
        await world.fleet.add("orders-c")
        await world.until(3, 3, 2)
        await soon(world.at_rest)
        assert (await world.api.get(record))["metadata"]["resourceVersion"] == written


async def test_custom_strategy_that_hangs_stops_only_its_own_group(
    world: OperatedNamespace, memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = threading.Event()

    def slow(*_: object, **__: object) -> object:
        freed.wait(120)
        raise ValueError("too late")

    monkeypatch.setattr(planning, "CUSTOM_STRATEGY_SECONDS", 0.2)
    monkeypatch.setattr(sys.modules["rota.strategies.custom"], "entry_points", lambda **_: [_Point(slow)])
    await memory.create_topic("bills", BROKER, 6)
    try:
        async with billing(world) as other:
            before = await two_members(world)
            await has_a_strategy_of_its_own(world)
            assert "has not returned" in (await world.condition("StrategyFailed"))["message"]
            await goes_on(other)
            assert world.fleet.as_value() == before
            await world.api.patch(world.path, {"spec": {"policyRef": None}})
            await world.well("StrategyFailed")
            mended = [_Point(_first_alone)]
            monkeypatch.setattr(sys.modules["rota.strategies.custom"], "entry_points", lambda **_: mended)
            await world.api.patch(world.path, {"spec": {"policyRef": {"name": "own"}}})
            await world.until(8, 0)  # though the first one hangs yet
    finally:
        freed.set()


@pytest.mark.parametrize("servers", [["memory:9876", "other:9876"], ["other:9876"]])
async def test_duplicate_consumer_group_gets_no_queue_until_the_older_group_is_deleted(
    world: OperatedNamespace, servers: list[str]
) -> None:
    """The second name server has a name of its own, and leads to the same brokers."""
    await two_members(world)
    await a_second_after(world)
    rival = a_group("rival", group=GROUP, broker={"rocketmq": {"nameServers": servers}})
    collection = world.path.rpartition("/")[0]
    await world.api.create(collection, rival)
    other = OperatedNamespace(world.api, world.namespace, world.fleet, world.operator)
    other.path = f"{collection}/rival"
    assert GROUP in (await other.condition("DuplicateConsumerGroup"))["message"]
    assert "rival-rota" not in await documents(world)
    await world.well("DuplicateConsumerGroup")
    await world.api.delete(world.path)
    await other.well("DuplicateConsumerGroup")

    async def has_a_document() -> bool:
        return "rival-rota" in await documents(world)

    await soon(has_a_document)


async def a_second_after(world: OperatedNamespace) -> None:
    """Wait until the next group is younger than this one: Kubernetes keeps whole seconds."""
    created: str = (await world.api.get(world.path))["metadata"]["creationTimestamp"]

    async def has_passed() -> bool:
        return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}" > created

    await soon(has_passed)


async def documents(world: OperatedNamespace) -> set[str]:
    """Return the names of the namespace's ConfigMaps."""
    return {
        entry["metadata"]["name"] for entry in await world.api.list(f"/api/v1/namespaces/{world.namespace}/configmaps")
    }
