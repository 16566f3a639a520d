"""Two operators that both believe to lead: late writes of the deposed one are rejected; the newer assignment stays."""

import pytest

from ground.cluster import Cluster
from ground.poll import soon
from kube.in_process_operator import DelayedWrite, Operator
from kube.world import GROUP, OperatedNamespace, add_two_members
from rota.brokers.memory import MemoryCluster

pytestmark = pytest.mark.usefixtures("crds", "node")


@pytest.mark.parametrize(
    "method",
    [
        "PUT",
        pytest.param("POST", marks=pytest.mark.slow("a deposed leader creates an assignment that has been deleted")),
    ],
)
async def test_conflict_rejects_a_late_assignment_of_a_deposed_leader_and_keeps_the_newer(
    world: OperatedNamespace, control_plane: Cluster, memory: MemoryCluster, method: str
) -> None:
    await add_two_members(world)
    config_maps = f"/api/v1/namespaces/{world.namespace}/configmaps"
    path = f"{config_maps}/{GROUP}-rota"
    write = f"{method} {path if method == 'PUT' else config_maps}"
    deposed = world.operator
    late = DelayedWrite()
    deposed.api.delayed[write] = late
    if method == "POST":  # without a ConfigMap the assignment is created, not replaced
        await world.api.delete(path)
    await world.fleet.add("orders-c")
    await late.sent.wait()
    async with Operator(control_plane.kubeconfig, world.namespace, memory) as leading:
        newer = OperatedNamespace(world.api, world.namespace, world.fleet, leading)
        await world.wait_for_shares(3, 3, 2)
        await world.fleet.members.pop("orders-a").kill()
        await world.wait_for_shares(4, 4)
        await soon(newer.at_rest)
        assignment = await world.api.get(path)
        pokes = await world.pokes()
        reconciles = len(deposed.reconciles)
        late.may_arrive.set()

        await deposed.wait_for_reconcile(reconciles)
        assert await world.api.get(path) == assignment
        assert (write, 409) in deposed.api.rejected
        assert all(poke.generation >= pokes[name].generation for name, poke in (await world.pokes()).items())
        await world.fleet.add(
            "orders-d"
        )  # both operators continue, as the deposed one still believes to lead; that does no harm
        await world.wait_for_shares(3, 3, 2)
