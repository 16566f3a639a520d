"""The policy's `triggers.resync` reconciles a group periodically, without a change."""

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
    await world.wait_for_shares(8)
    await soon(world.settled)
    writes = len(world.operator.api.writes)
    reconciles = len(world.operator.reconciles)

    async def has_reconciled_three_times() -> bool:
        return len(world.operator.reconciles) >= reconciles + 3

    await soon(has_reconciled_three_times)
    assert {result.plan.document for result in world.operator.reconciles[-3:]} == {None}
    assert [write for write in world.operator.api.writes[writes:] if "configmaps" in write] == []
