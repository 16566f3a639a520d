"""The operator ends before or after any write of a rebalance; whoever comes after it brings the fleet to rest."""

from collections import Counter
from itertools import count
from random import Random

import pytest

from ground.cluster import Cluster
from ground.poll import soon
from kube.brains import Operator
from kube.world import GROUP, OperatedNamespace, two_members
from rota.brokers.memory import MemoryCluster
from rota.kube.client.api import ApiError, NoResponseError

pytestmark = pytest.mark.usefixtures("crds", "node")

FAILING_SHARE = 0.1  # of all requests


@pytest.mark.timeout(600)
async def test_crash_of_the_operator_at_any_write_is_recovered_by_the_next_operator(
    world: OperatedNamespace, control_plane: Cluster, memory: MemoryCluster
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

            await world.soon(over)
        if not mortal.dead:
            break
        async with Operator(control_plane.kubeconfig, world.namespace, memory):
            await world.until(*wanted)
            await soon(world.settled)
    assert point > 10  # a rebalance has more than five writes


async def test_api_client_sporadic_failures_do_not_stop_a_rebalance(world: OperatedNamespace) -> None:
    """Requests of every kind fail, each in another way; whatever round they break, another one goes on.

    Whether a request fails depends on what it asks for and how often that was asked before, not on the order of all
    requests, which differs from machine to machine.
    """
    asked: Counter[str] = Counter()
    faults = [
        NoResponseError("The API server did not answer"),
        ApiError(403, "Forbidden", "not today"),
        ApiError(409, "Conflict", "somebody was quicker"),
        ApiError(429, "TooManyRequests", "later"),
        ApiError(500, "InternalError", "etcd is away"),
    ]

    def fault(method: str, path: str) -> None:
        request = f"{method} {path.replace(world.namespace, '')}"
        asked[request] += 1
        chance = Random(f"{request} {asked[request]}")
        if chance.random() < FAILING_SHARE:
            raise chance.choice(faults)

    world.operator.api.fault = fault
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await world.fleet.add("orders-c")
    await world.until(3, 3, 2)
    await world.fleet.members.pop("orders-a").end()
    await world.until(4, 4)
    await soon(world.settled)


@pytest.mark.parametrize("how", ["lost", "repeated"])
async def test_assignment_write_with_a_lost_response_or_a_repeat_is_noted_exactly_once(
    world: OperatedNamespace, how: str
) -> None:
    """Else nobody would know from the journal what it changed."""
    operator = world.operator
    await world.begun()
    await two_members(world)
    unlucky: set[str] = getattr(operator.api, how)
    unlucky.add(f"PUT /api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota")
    await world.fleet.add("orders-c")
    await world.until(2, 3, 3)
    await world.soon(world.at_rest)
    assert not unlucky
    noted = [it.plan.document.generation for it in operator.done if it.plan.document]
    assert noted == [*range(1, world.fleet.documents[-1]["generation"] + 1)]
    assert sum(it.write_counts["configmap"] for it in operator.done) == len(noted)
