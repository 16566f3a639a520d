"""The status of RebalancePolicies, on a real API server."""

import pytest

from ground.api import Object
from ground.ours import conditions, made
from ground.poll import soon
from kube.world import OperatedNamespace, two_members
from rota.kube.policies.policy_status import PolicyStatusWriter

pytestmark = pytest.mark.usefixtures("crds", "node")


async def until_status(world: OperatedNamespace, path: str, **expected: object) -> Object:
    async def has_it() -> Object | None:
        policy = await world.api.get(path)
        status = policy.get("status", {})
        found = {name: status.get(name) for name in expected}
        is_current = status.get("observedGeneration") == policy["metadata"]["generation"]
        return policy if is_current and found == expected else None

    policy = await soon(has_it)
    assert policy
    return policy


@pytest.mark.usefixtures("statuses")
async def test_policy_status_follows_spec_and_groups(world: OperatedNamespace, policies: str) -> None:
    path = f"{policies}/rules"
    await world.api.create(policies, made("RebalancePolicy", "rules", strategy="Sticky"))
    policy = await until_status(world, path, groups=0, usedBy=[])
    assert conditions(policy)["Accepted"]["status"] == "True"

    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "rules"}}})
    await until_status(world, path, groups=1, usedBy=["orders"])

    await world.api.delete(world.path)
    await until_status(world, path, groups=0, usedBy=[])


@pytest.mark.usefixtures("statuses")
async def test_policy_status_names_what_only_the_operator_rejects(world: OperatedNamespace, policies: str) -> None:
    member = {"index": 0, "queues": [{"topic": "orders", "broker": "broker-a", "ids": "4-2"}]}
    spec = {"strategy": "ByConfig", "options": {"byConfig": {"members": [member]}}}
    await world.api.create(policies, made("RebalancePolicy", "rules", **spec))
    policy = await until_status(world, f"{policies}/rules", groups=0)
    condition = conditions(policy)["Accepted"]
    assert (condition["status"], condition["reason"]) == ("False", "InvalidPolicy")
    assert condition["message"].startswith("spec.options.byConfig")


async def test_policy_status_write_reconciles_no_group(
    world: OperatedNamespace, policies: str, statuses: PolicyStatusWriter
) -> None:
    path = f"{policies}/rules"
    await world.api.create(policies, made("RebalancePolicy", "rules", strategy="Sticky", triggers={"resync": "1h"}))
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "rules"}}})
    await two_members(world)
    await soon(world.at_rest)
    await until_status(world, path, groups=1)
    rounds, writes = len(world.operator.done), len(world.operator.api.writes)

    version = (await world.api.patch(f"{path}/status", {"status": {"groups": 7}}))["metadata"]["resourceVersion"]
    policy = await until_status(world, path, groups=1)
    assert policy["metadata"]["resourceVersion"] != version

    async def is_known() -> bool:
        known = world.operator.brain.events.policies[(world.namespace, "rules")]
        return bool(known.metadata.resource_version == policy["metadata"]["resourceVersion"])

    await soon(is_known)
    await statuses.write_due()
    assert len(world.operator.done) == rounds
    assert len(world.operator.api.writes) == writes + 1
