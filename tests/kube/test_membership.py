"""Who counts, and what of it is told: members that come back, are rolled, work everything, or are not Rota's."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from ground.api import Object
from ground.poll import soon
from kube.members import NODE
from kube.world import GROUP, OperatedNamespace, a_group, two_members
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Membership
from rota.kube.brokers import route_watcher
from rota.model import Queue
from rota.ranges import from_ranges
from rota.spec import Subscription

pytestmark = pytest.mark.usefixtures("crds", "node")


async def test_readiness_lost_and_regained_within_the_grace_moves_no_queue(world: OperatedNamespace) -> None:
    before = await two_members(world)
    generation = world.fleet.documents[-1]["generation"]
    restarted = world.fleet.members["orders-a"]
    rounds = len(world.operator.done)
    await restarted.becomes(ready=False)

    async def noticed() -> bool:
        return len(world.operator.done) > rounds

    await soon(noticed)
    rounds = len(world.operator.done)
    await restarted.becomes(ready=True)
    await soon(noticed)
    assert world.fleet.as_value() == before
    assert world.fleet.documents[-1]["generation"] == generation


@pytest.mark.slow("moves of a rolling update on a real API server")
async def test_rolling_update_moves_each_queue_at_most_twice(world: OperatedNamespace) -> None:
    await world.api.create(
        f"/apis/rota.dev/v1alpha1/namespaces/{world.namespace}/rebalancepolicies",
        {
            "apiVersion": "rota.dev/v1alpha1",
            "kind": "RebalancePolicy",
            "metadata": {"name": "steady"},
            "spec": {"strategy": "Sticky"},
        },
    )
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "steady"}}})
    await world.fleet.add("old-a", "old-b", "old-c", "old-d")
    await world.until(2, 2, 2, 2)
    await soon(world.settled)
    before = len(world.fleet.documents)
    for letter in "abcd":
        await world.fleet.add(f"new-{letter}")
        leaving = world.fleet.members[f"old-{letter}"]
        await leaving.leave()

        async def drained(one: str = leaving.name) -> bool:
            return world.fleet.members[one].member.report().is_drained

        await soon(drained)
        await leaving.end()
        del world.fleet.members[leaving.name]
    await world.until(2, 2, 2, 2)
    await soon(world.settled)
    moves = moved(world.fleet.documents[before - 1 :])
    assert set(moves.values()) <= {1, 2}, moves


def moved(documents: Iterable[Object]) -> dict[Queue, int]:
    """Count how often each queue came to another member."""
    owners: dict[Queue, list[str]] = {}
    for document in documents:
        for name, share in document["members"].items():
            for queue in from_ranges(share["queues"]):
                if owners.setdefault(queue, [name])[-1] != name:
                    owners[queue].append(name)
    return {queue: sum(a != b for a, b in pairwise(names)) for queue, names in owners.items()}


async def test_broadcasting_gives_every_queue_to_every_member(world: OperatedNamespace) -> None:
    world.fleet.everyone = True
    await world.api.delete(world.path)  # the model of a group never changes
    await world.api.create(world.path.rpartition("/")[0], a_group(messageModel="Broadcasting"))
    await world.fleet.add("orders-a", "orders-b")

    async def all_of_it() -> bool:
        return [len(one.member.leases) for one in world.fleet.members.values()] == [8, 8]

    await soon(all_of_it)
    await soon(world.settled)
    assert world.fleet.documents[-1]["everyone"] == {"orders": {"memory": "0-7"}}


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_watcher, "MIN_CONSUMER_POLL_SECONDS", 0.2)
    monkeypatch.setattr(route_watcher, "MAX_CONSUMER_POLL_SECONDS", 0.2)


@pytest.mark.usefixtures("looks_often")
async def test_unmanaged_consumer_in_the_group_leaves_members_only_their_share(
    memory: MemoryCluster, world: OperatedNamespace
) -> None:
    await two_members(world)
    theirs = await joins(memory, "10.0.0.1@77")
    told = await world.condition("UnmanagedConsumers")
    assert "10.0.0.1@77" in told["message"]
    await world.until(3, 2)
    await theirs.leave()
    await world.until(4, 4)
    await world.well("UnmanagedConsumers")


@pytest.mark.usefixtures("looks_often")
async def test_condition_consumption_disabled_is_set_and_no_queue_moves(
    memory: MemoryCluster, world: OperatedNamespace
) -> None:
    before = await two_members(world)
    await memory.update_group(GROUP, BROKER, consume_enabled=False)
    told = await world.condition("ConsumptionDisabled")
    assert (
        told["message"]
        == f"Consumption is disabled for the group at {BROKER}; enable it with mqadmin updateSubGroup -s true"
    )
    shown = world.operator.sight.describe_group(world.namespace, GROUP)
    assert shown
    assert [(it.broker, it.enabled, it.retries) for it in shown.settings] == [(BROKER, False, 16)]
    assert await is_degraded_by(world, "ConsumptionDisabled")
    assert world.fleet.as_value().items() >= before.items()
    await memory.update_group(GROUP, BROKER, consume_enabled=True)
    await world.well("ConsumptionDisabled")
    assert (await world.conditions())["Degraded"]["status"] == "False"
    assert world.fleet.as_value().items() >= before.items()


@pytest.mark.usefixtures("looks_often")
async def test_condition_duplicate_client_ids_is_set_and_no_queue_moves(
    memory: MemoryCluster, world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        route_watcher, "SILENT_CONNECTION_SECONDS", 0.5
    )  # a broker in memory tells of no addresses: it may be one
    before = await two_members(world)
    worn_twice, worn_once = (world.fleet.members[name].client_id for name in ("orders-a", "orders-b"))
    await joins(memory, worn_once)
    await joins(memory, worn_twice)
    other = await joins(memory, worn_twice)
    told = (await world.condition("DuplicateClientIds"))["message"]
    assert told.startswith(f"Several consumers use the client ids {worn_twice}, ")
    assert await is_degraded_by(world, "DuplicateClientIds")
    assert world.fleet.as_value().items() >= before.items()
    await other.leave()
    await world.well("DuplicateClientIds")
    assert world.fleet.as_value().items() >= before.items()


async def joins(memory: MemoryCluster, client_id: str) -> MemoryConsumer:
    """Let somebody join the group at the broker; that makes the group's retry topic, one more queue."""
    wanted = Membership(group=GROUP, client_id=client_id, subscriptions=[Subscription(topic="orders")])
    consumer = MemoryConsumer(memory, wanted)
    await consumer.join()
    return consumer


async def is_degraded_by(world: OperatedNamespace, reason: str) -> bool:
    degraded = (await world.conditions())["Degraded"]
    return (degraded["status"], degraded["reason"]) == ("True", reason)


async def test_machine_room_nearby_takes_the_room_of_the_node_unless_the_pod_label_differs(
    world: OperatedNamespace,
) -> None:
    await world.api.patch(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {"zone": "east"}}})
    nearby = {"roomLabel": "zone", "brokers": [{"broker": "memory", "room": "east"}]}
    await world.api.create(
        f"/apis/rota.dev/v1alpha1/namespaces/{world.namespace}/rebalancepolicies",
        {
            "apiVersion": "rota.dev/v1alpha1",
            "kind": "RebalancePolicy",
            "metadata": {"name": "near"},
            "spec": {"strategy": "MachineRoomNearby", "options": {"machineRoomNearby": nearby}},
        },
    )
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "near"}}})
    await two_members(world)
    elsewhere = world.fleet.members["orders-b"]
    await world.api.patch(elsewhere.path, {"metadata": {"labels": {"zone": "west"}}})
    await world.until(8, 0)
    assert world.fleet.worked_by("orders-b") == []
