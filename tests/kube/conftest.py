"""Fixtures of tests on the API server: Rota's CRDs, and a namespace for each test."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

import pytest

from ground.api import Api, Object
from ground.cluster import Cluster
from ground.instance import Instance
from ground.ours import define
from ground.poll import soon
from kube.in_process_operator import Operator
from kube.members import GroupMembers, a_node
from kube.world import GROUP, OperatedNamespace, a_group
from rota.brokers.memory import BROKER, MemoryCluster
from rota.kube.policies import policy_status
from rota.kube.policies.policy_status import PolicyStatusWriter


@pytest.fixture(scope="session")
async def crds(api: Api, control_plane: Cluster) -> dict[str, Object]:
    """Apply the CRDs, wait until the API server accepts objects of their kinds, and return them by kind."""
    definitions = await define(api)
    for definition in definitions.values():

        async def explained(names: Object = definition["spec"]["names"]) -> str:
            return control_plane.kubectl("explain", names["shortNames"][0], check=False)  # it is available last

        await soon(explained)
    return definitions


@pytest.fixture(scope="session")
def addresses(instance: Instance) -> Callable[[], str]:
    """Return a factory of addresses for simulated pods, each another one."""
    numbers = count(1)

    def address() -> str:
        number = next(numbers)
        return f"{instance.block}.{100 + number // 250}.{number % 250 + 1}"

    return address


@pytest.fixture(scope="session")
async def node(api: Api) -> AsyncIterator[None]:
    async with a_node(api):
        yield


@pytest.fixture
async def memory() -> MemoryCluster:
    cluster = MemoryCluster()
    await cluster.create_topic("orders", BROKER, 8)
    return cluster


@pytest.fixture
async def operator(control_plane: Cluster, namespace: str, memory: MemoryCluster) -> AsyncIterator[Operator]:
    async with Operator(control_plane.kubeconfig, namespace, memory) as leading:
        yield leading


@pytest.fixture
async def world(
    api: Api, namespace: str, operator: Operator, addresses: Callable[[], str]
) -> AsyncIterator[OperatedNamespace]:
    async with GroupMembers(api, namespace, GROUP, addresses) as fleet:
        world = OperatedNamespace(api, namespace, fleet, operator)
        await api.create(world.path.rpartition("/")[0], a_group())
        yield world


@pytest.fixture
def policies(world: OperatedNamespace) -> str:
    return f"/apis/rota.dev/v1alpha1/namespaces/{world.namespace}/rebalancepolicies"


@pytest.fixture
async def statuses(world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PolicyStatusWriter]:
    """Have the operator of the world write the status of policies."""
    monkeypatch.setattr(policy_status, "WRITE_INTERVAL_SECONDS", 0.2)
    operator = world.operator
    controller = operator.controller
    groups_by_policy = operator.events.policies.groups_by_policy
    policies = controller.specs.policies
    writer = PolicyStatusWriter(operator.api, policies, groups_by_policy, lambda: controller.is_leading)
    running = asyncio.create_task(writer.run())
    yield writer
    running.cancel()
    await asyncio.wait([running])
