"""Two that both believe to lead: what the deposed one writes late is refused, and the newer record stays."""

import pytest

from ground.cluster import Cluster
from ground.poll import soon
from kube.brains import Late, Operator
from kube.world import GROUP, OperatedNamespace, two_members
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
    await two_members(world)
    records = f"/api/v1/namespaces/{world.namespace}/configmaps"
    record = f"{records}/{GROUP}-rota"
    write = f"{method} {record if method == 'PUT' else records}"
    deposed, late = world.operator, Late()
    deposed.api.late[write] = late
    if method == "POST":  # a record that is not there is made, not replaced
        await world.api.delete(record)
    await world.fleet.add("orders-c")
    await late.sent.wait()
    async with Operator(control_plane.kubeconfig, world.namespace, memory) as leading:
        newer = OperatedNamespace(world.api, world.namespace, world.fleet, leading)
        await world.until(3, 3, 2)
        await world.fleet.members.pop("orders-a").end()
        await world.until(4, 4)
        await soon(newer.at_rest)
        before, pokes, rounds = await world.api.get(record), await world.pokes(), len(deposed.done)
        late.arrives.set()

        await deposed.looks_again(rounds)
        assert await world.api.get(record) == before
        assert (write, 409) in deposed.api.refused
        assert all(poke.generation >= pokes[name].generation for name, poke in (await world.pokes()).items())
        await world.fleet.add("orders-d")  # both go on, as it was never told: they do no harm
        await world.until(3, 3, 2)
