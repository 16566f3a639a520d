"""The operator ends before or after any write of a rebalance; whoever comes after it brings the fleet to rest."""

from itertools import count

import pytest

from ground.controlplane import Cluster
from ground.poll import soon
from kube.brains import Operator
from kube.world import World
from rota.brokers.memory import Memory

pytestmark = pytest.mark.usefixtures("crds", "node")


@pytest.mark.timeout(600)
async def test_whoever_comes_after_an_operator_that_ended_at_any_write_goes_on(
    world: World, control_plane: Cluster, memory: Memory
) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await world.operator.brain.close()

    for point in count(1):
        # Every other time somebody comes, and then he goes: both are rebalances from the first write to the last.
        if "orders-c" in world.fleet.members:
            await world.fleet.members.pop("orders-c").end()
        else:
            await world.fleet.add("orders-c")
        wanted = (3, 3, 2) if "orders-c" in world.fleet.members else (4, 4)

        async with Operator(control_plane.kubeconfig, world.namespace, memory, ends_at=point) as mortal:

            async def over(mortal: Operator = mortal, wanted: tuple[int, ...] = wanted) -> bool:
                return mortal.dead or (world.shares(*wanted) and await world.settled())

            try:
                await soon(over, 90)
            except TimeoutError as error:
                error.add_note(await world.story())
                raise
        if not mortal.dead:
            break
        async with Operator(control_plane.kubeconfig, world.namespace, memory):
            await world.until(*wanted)
            await soon(world.settled, 60)
    assert point > 10  # a rebalance has more than five writes
