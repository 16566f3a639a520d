"""Reports that are signed with the group's key, reports that lack a signature, and members of earlier versions."""

import pytest

from ground.api import Object
from kube.world import OperatedNamespace

pytestmark = pytest.mark.usefixtures("crds", "node")


async def degraded(world: OperatedNamespace) -> str:
    """Return reason and message of the condition Degraded, empty if it is not set."""
    condition = (await world.conditions()).get("Degraded", {})
    return f"{condition.get('reason')}: {condition.get('message')}" if condition.get("status") == "True" else ""


async def test_signature_that_is_missing_releases_no_queue_and_loses_no_member(world: OperatedNamespace) -> None:
    """Another server at a member's address reports that everything is released, or does not report at all."""
    policy: Object = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "brisk"}}
    policy["spec"] = {"triggers": {"unreadyGrace": "1s"}, "handover": {"lostAfter": "1s"}}
    await world.api.create(f"{world.path.partition('/consumergroups')[0]}/rebalancepolicies", policy)
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "brisk"}}})
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    forger = world.fleet.members["orders-a"]
    forger.drain_seconds = 1e6  # it continues to consume, whatever the reports claim
    forger.forged = True

    async def is_reported() -> bool:
        return "MemberNotAuthenticated: 1 members, such as orders-a," in await degraded(world)

    await world.soon(is_reported)
    await forger.write_status(ready=False)
    await world.fleet.add("orders-c")

    async def is_being_revoked() -> bool:
        newest = world.fleet.documents[-1]
        return bool(newest["releasing"]) and not newest["members"].get("orders-a", {}).get("queues")

    await world.soon(is_being_revoked)
    reads = world.fleet.reads

    async def was_polled_often() -> bool:
        return world.fleet.reads > reads + 8

    await world.soon(was_polled_often)
    assert len(world.fleet.queues_of("orders-a")) == 4
    assert not any(document["forced"] for document in world.fleet.documents)
    forger.forged = False
    forger.finish_drains()
    await world.wait_for_shares(0, 4, 4)

    async def is_cleared() -> bool:
        return "MemberNotAuthenticated" not in await degraded(world)

    await world.soon(is_cleared)


async def test_signature_is_not_required_of_members_of_earlier_versions(world: OperatedNamespace) -> None:
    world.fleet.signs = False
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    world.fleet.signs = True
    await world.fleet.add("orders-c")
    await world.wait_for_shares(3, 3, 2)

    async def names_both() -> bool:
        message = str((await world.conditions()).get("UnsignedMembers", {}).get("message", ""))
        return message.startswith("2 members, such as orders-a, orders-b, do not mount the group's key")

    await world.soon(names_both)
    earlier = world.fleet.members["orders-a"]
    await earlier.delete_pod()
    await world.wait_for_shares(4, 4, 0)
    assert earlier.member.report().final, "it was asked to drain, by its pod's uid"
    await earlier.kill()
    world.fleet.members.pop("orders-a")
    await world.wait_for_shares(4, 4)
    assert await degraded(world) == ""
