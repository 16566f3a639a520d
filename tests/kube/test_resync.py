"""A group is reconciled again after the policy's `triggers.resync`, though nothing has changed."""

import pytest

from ground.poll import soon
from kube.world import OperatedNamespace

pytestmark = pytest.mark.usefixtures("crds", "node")


async def test_resync_timer_alone_reconciles_a_group(world: OperatedNamespace) -> None:
    policies = f"/apis/rota.dev/v1alpha1/namespaces/{world.namespace}/rebalancepolicies"
    policy = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "often"}}
    await world.api.create(policies, policy | {"spec": {"strategy": "Averagely", "triggers": {"resync": "1s"}}})
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "often"}}})
    await world.fleet.add("orders-a")
    await world.until(8)
    await soon(world.settled)
    writes, rounds = len(world.operator.api.writes), len(world.operator.done)

    async def has_reconciled_three_times() -> bool:
        return len(world.operator.done) >= rounds + 3

    await soon(has_reconciled_three_times)
    assert {done.plan.document for done in world.operator.done[-3:]} == {None}
    assert [write for write in world.operator.api.writes[writes:] if "configmaps" in write] == []
