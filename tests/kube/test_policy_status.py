"""The status of RebalancePolicies, on a real API server."""

import pytest

from ground.api import Object
from ground.ours import conditions, made
from ground.poll import soon
from kube.world import OperatedNamespace, add_two_members
from rota.kube.policies.policy_status import PolicyStatusWriter

pytestmark = pytest.mark.usefixtures("crds", "node")


async def wait_for_status(world: OperatedNamespace, path: str, **expected: object) -> Object:
    async def has_status() -> Object | None:
        policy = await world.api.get(path)
        status = policy.get("status", {})
        values = {name: status.get(name) for name in expected}
        is_current = status.get("observedGeneration") == policy["metadata"]["generation"]
        return policy if is_current and values == expected else None

    policy = await soon(has_status)
    assert policy
    return policy


@pytest.mark.usefixtures("statuses")
async def test_policy_status_follows_spec_and_groups(world: OperatedNamespace, policies: str) -> None:
    path = f"{policies}/rules"
    await world.api.create(policies, made("RebalancePolicy", "rules", strategy="Sticky"))
    policy = await wait_for_status(world, path, groups=0, usedBy=[])
    assert conditions(policy)["Accepted"]["status"] == "True"

    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "rules"}}})
    await wait_for_status(world, path, groups=1, usedBy=["orders"])

    await world.api.delete(world.path)
    await wait_for_status(world, path, groups=0, usedBy=[])


@pytest.mark.usefixtures("statuses")
async def test_policy_status_reports_a_mistake_that_only_the_operator_rejects(
    world: OperatedNamespace, policies: str
) -> None:
    member = {"index": 0, "queues": [{"topic": "orders", "broker": "broker-a", "ids": "4-2"}]}
    spec = {"strategy": "ByConfig", "options": {"byConfig": {"members": [member]}}}
    await world.api.create(policies, made("RebalancePolicy", "rules", **spec))
    policy = await wait_for_status(world, f"{policies}/rules", groups=0)
    condition = conditions(policy)["Accepted"]
    assert (condition["status"], condition["reason"]) == ("False", "InvalidPolicy")
    assert condition["message"].startswith("spec.options.byConfig")


async def test_policy_status_write_reconciles_no_group(
    world: OperatedNamespace, policies: str, statuses: PolicyStatusWriter
) -> None:
    path = f"{policies}/rules"
    await world.api.create(policies, made("RebalancePolicy", "rules", strategy="Sticky", triggers={"resync": "1h"}))
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "rules"}}})
    await add_two_members(world)
    await soon(world.at_rest)
    await wait_for_status(world, path, groups=1)
    reconciles = len(world.operator.reconciles)
    writes = len(world.operator.api.writes)

    version = (await world.api.patch(f"{path}/status", {"status": {"groups": 7}}))["metadata"]["resourceVersion"]
    policy = await wait_for_status(world, path, groups=1)
    assert policy["metadata"]["resourceVersion"] != version

    async def is_observed() -> bool:
        informed = world.operator.controller.specs.policies[(world.namespace, "rules")]
        return bool(informed.metadata.resource_version == policy["metadata"]["resourceVersion"])

    await soon(is_observed)
    await statuses.write_due()
    assert len(world.operator.reconciles) == reconciles
    assert len(world.operator.api.writes) == writes + 1
