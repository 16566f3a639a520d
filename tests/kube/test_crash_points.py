"""The operator is killed before or after any write of a rebalance; the next operator completes the rebalance."""

from collections import Counter
from itertools import count
from random import Random

import pytest

from ground.cluster import Cluster
from ground.poll import soon
from kube.in_process_operator import Operator
from kube.world import GROUP, OperatedNamespace, add_two_members
from rota.brokers.memory import MemoryCluster
from rota.kube.client.api import ApiError, NoResponseError

pytestmark = pytest.mark.usefixtures("crds", "node")

FAILING_SHARE = 0.1  # the share of requests that fail


@pytest.mark.timeout(600)
async def test_crash_of_the_operator_at_any_write_is_recovered_by_the_next_operator(
    world: OperatedNamespace, control_plane: Cluster, memory: MemoryCluster
) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    await world.operator.controller.close()

    for point in count(1):
        # In turn a member joins and leaves: each is a rebalance from the first write to the last.
        if "orders-c" in world.fleet.members:
            await world.fleet.members.pop("orders-c").kill()
        else:
            await world.fleet.add("orders-c")
        shares = (3, 3, 2) if "orders-c" in world.fleet.members else (4, 4)

        async with Operator(control_plane.kubeconfig, world.namespace, memory, ends_at=point) as mortal:

            async def is_over(mortal: Operator = mortal, shares: tuple[int, ...] = shares) -> bool:
                return mortal.dead or (world.shares(*shares) and await world.settled())

            await world.soon(is_over)
        if not mortal.dead:
            break
        async with Operator(control_plane.kubeconfig, world.namespace, memory):
            await world.wait_for_shares(*shares)
            await soon(world.settled)
    assert point > 10  # a rebalance has more than five writes


async def test_api_client_sporadic_failures_do_not_stop_a_rebalance(world: OperatedNamespace) -> None:
    """Requests of every kind fail, in different ways; each reconcile that fails is repeated.

    Whether a request fails depends on its path and on how often it was sent, not on the order of all requests, which
    differs from machine to machine.
    """
    attempts: Counter[str] = Counter()
    faults = [
        NoResponseError("The API server did not answer"),
        ApiError(403, "Forbidden", "not today"),
        ApiError(409, "Conflict", "somebody was quicker"),
        ApiError(429, "TooManyRequests", "later"),
        ApiError(500, "InternalError", "etcd is away"),
    ]

    def fault(method: str, path: str) -> None:
        request = f"{method} {path.replace(world.namespace, '')}"
        attempts[request] += 1
        chance = Random(f"{request} {attempts[request]}")
        if chance.random() < FAILING_SHARE:
            raise chance.choice(faults)

    world.operator.api.fault = fault
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    await world.fleet.add("orders-c")
    await world.wait_for_shares(3, 3, 2)
    await world.fleet.members.pop("orders-a").kill()
    await world.wait_for_shares(4, 4)
    await soon(world.settled)


@pytest.mark.parametrize("fault", ["lost_responses", "duplicated"])
async def test_assignment_write_with_a_lost_response_or_a_repeat_is_in_the_journal_once(
    world: OperatedNamespace, fault: str
) -> None:
    """Otherwise the journal would lack the change of that write."""
    operator = world.operator
    await world.wait_for_document()
    await add_two_members(world)
    faulty_writes: set[str] = getattr(operator.api, fault)
    faulty_writes.add(f"PUT /api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota")
    await world.fleet.add("orders-c")
    await world.wait_for_shares(2, 3, 3)
    await world.soon(world.at_rest)
    assert not faulty_writes
    generations = [result.plan.document.generation for result in operator.reconciles if result.plan.document]
    assert generations == [*range(1, world.fleet.documents[-1]["generation"] + 1)]
    assert sum(result.write_counts["configmap"] for result in operator.reconciles) == len(generations)
