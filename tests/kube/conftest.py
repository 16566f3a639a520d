"""What tests on the API server share: Rota's CRDs, and a namespace of one's own."""

from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

import pytest
import yaml

from ground.api import Api, ApiError, Object
from ground.controlplane import Cluster
from ground.instance import Instance
from ground.poll import soon
from kube.brains import Operator
from kube.members import Fleet, a_node
from kube.world import GROUP, World, a_group
from rota.brokers.memory import BROKER, Memory

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
async def crds(api: Api, control_plane: Cluster) -> dict[str, Object]:
    """Apply the CRDs, wait until the API server takes objects of their kinds, and return them by kind."""
    made = {}
    for path in sorted(CRDS.glob("*.yaml")):
        body = yaml.safe_load(path.read_text())
        where = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
        await api.patch(where, body, "apply")

        async def established(where: str = where) -> bool:
            conditions = (await api.get(where)).get("status", {}).get("conditions") or []
            return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

        async def served(names: Object = body["spec"]["names"]) -> bool:
            try:  # for a moment after that its paths are unknown, then busy
                await api.get(f"/apis/rota.dev/v1alpha1/{names['plural']}")
            except ApiError as error:
                if error.status not in {404, 429, 503}:
                    raise
                return False
            return True

        async def explained(names: Object = body["spec"]["names"]) -> str:
            return control_plane.kubectl("explain", names["shortNames"][0], check=False)  # it knows it last

        await soon(established)
        await soon(served)
        await soon(explained)
        made[body["spec"]["names"]["kind"]] = await api.get(where)
    return made


@pytest.fixture(scope="session")
def addresses(instance: Instance) -> Callable[[], str]:
    """Return addresses for simulated pods, each another one."""
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
async def memory() -> Memory:
    found = Memory()
    await found.create_topic("orders", BROKER, 8)
    return found


@pytest.fixture
async def operator(control_plane: Cluster, namespace: str, memory: Memory) -> AsyncIterator[Operator]:
    async with Operator(control_plane.kubeconfig, namespace, memory) as leading:
        yield leading


@pytest.fixture
async def world(api: Api, namespace: str, operator: Operator, addresses: Callable[[], str]) -> AsyncIterator[World]:
    async with Fleet(api, namespace, GROUP, addresses) as fleet:
        found = World(api, namespace, fleet, operator)
        await api.create(found.path.rpartition("/")[0], a_group())
        yield found
