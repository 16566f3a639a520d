"""Members that sign with their group's key, those that do not though they should, and those of earlier versions."""

import pytest

from ground.api import Object
from kube.world import OperatedNamespace

pytestmark = pytest.mark.usefixtures("crds", "node")


async def degraded(world: OperatedNamespace) -> str:
    """Return the reasons and the message of the condition that tells what is wrong."""
    found = (await world.conditions()).get("Degraded", {})
    return f"{found.get('reason')}: {found.get('message')}" if found.get("status") == "True" else ""


async def test_signature_that_is_missing_releases_no_queue_and_makes_nobody_lost(world: OperatedNamespace) -> None:
    """Somebody at the address of a member says that it has released everything, or nothing at all."""
    policy: Object = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "brisk"}}
    policy["spec"] = {"triggers": {"unreadyGrace": "1s"}, "handover": {"lostAfter": "1s"}}
    await world.api.create(f"{world.path.partition('/consumergroups')[0]}/rebalancepolicies", policy)
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "brisk"}}})
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    forger = world.fleet.members["orders-a"]
    forger.takes = 1e6  # it goes on working, whatever the answers say
    forger.forged = True

    async def is_told() -> bool:
        return "MemberNotAuthenticated: 1 members, such as orders-a," in await degraded(world)

    await world.soon(is_told)
    await forger.becomes(ready=False)
    await world.fleet.add("orders-c")

    async def is_awaited() -> bool:
        newest = world.fleet.documents[-1]
        return bool(newest["releasing"]) and not newest["members"].get("orders-a", {}).get("queues")

    await world.soon(is_awaited)
    reads = world.fleet.reads

    async def was_asked_often() -> bool:
        return world.fleet.reads > reads + 8

    await world.soon(was_asked_often)
    assert len(world.fleet.worked_by("orders-a")) == 4
    assert not any(document["forced"] for document in world.fleet.documents)
    forger.forged = False
    forger.finish()
    await world.until(0, 4, 4)

    async def is_well() -> bool:
        return "MemberNotAuthenticated" not in await degraded(world)

    await world.soon(is_well)


async def test_signature_is_not_required_of_members_of_earlier_versions(world: OperatedNamespace) -> None:
    world.fleet.signs = False
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    world.fleet.signs = True
    await world.fleet.add("orders-c")
    await world.until(3, 3, 2)

    async def names_them() -> bool:
        message = str((await world.conditions()).get("UnsignedMembers", {}).get("message", ""))
        return message.startswith("2 members, such as orders-a, orders-b, do not mount the group's key")

    await world.soon(names_them)
    earlier = world.fleet.members["orders-a"]
    await earlier.leave()
    await world.until(4, 4, 0)
    assert earlier.member.report().final, "it was asked to drain, by its pod's uid"
    await earlier.end()
    world.fleet.members.pop("orders-a")
    await world.until(4, 4)
    assert await degraded(world) == ""
