"""Membership and its status: unready and replaced members, Broadcasting members, and unmanaged consumers."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from ground.api import Object
from ground.poll import soon
from kube.members import NODE
from kube.world import GROUP, OperatedNamespace, a_group, add_two_members
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Membership
from rota.kube.brokers import online_consumers, route_watcher
from rota.model import Queue
from rota.ranges import from_ranges
from rota.spec import Subscription

pytestmark = pytest.mark.usefixtures("crds", "node")


async def test_readiness_lost_and_regained_within_the_grace_moves_no_queue(world: OperatedNamespace) -> None:
    owners = await add_two_members(world)
    generation = world.fleet.documents[-1]["generation"]
    restarted = world.fleet.members["orders-a"]
    count = len(world.operator.reconciles)
    await restarted.write_status(ready=False)

    async def has_reconciled() -> bool:
        return len(world.operator.reconciles) > count

    await soon(has_reconciled)
    count = len(world.operator.reconciles)
    await restarted.write_status(ready=True)
    await soon(has_reconciled)
    assert world.fleet.owners() == owners
    assert world.fleet.documents[-1]["generation"] == generation


async def test_assignment_is_sent_to_members_whose_volumes_are_not_updated(world: OperatedNamespace) -> None:
    await add_two_members(world)
    for member in world.fleet.members.values():
        member.has_old_volume = True
    await world.fleet.add("orders-c")
    await world.wait_for_shares(3, 3, 2)


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
    await world.wait_for_shares(2, 2, 2, 2)
    await soon(world.settled)
    documents_before = len(world.fleet.documents)
    for letter in "abcd":
        await world.fleet.add(f"new-{letter}")
        leaving = world.fleet.members[f"old-{letter}"]
        await leaving.delete_pod()

        async def has_drained(name: str = leaving.name) -> bool:
            return world.fleet.members[name].member.report().is_drained

        await soon(has_drained)
        await leaving.kill()
        del world.fleet.members[leaving.name]
    await world.wait_for_shares(2, 2, 2, 2)
    await soon(world.settled)
    moves = count_moves(world.fleet.documents[documents_before - 1 :])
    assert set(moves.values()) <= {1, 2}, moves


def count_moves(documents: Iterable[Object]) -> dict[Queue, int]:
    """Count how often each queue moved to another member."""
    owners: dict[Queue, list[str]] = {}
    for document in documents:
        for name, share in document["members"].items():
            for queue in from_ranges(share["queues"]):
                if owners.setdefault(queue, [name])[-1] != name:
                    owners[queue].append(name)
    return {queue: sum(a != b for a, b in pairwise(names)) for queue, names in owners.items()}


async def test_broadcasting_gives_every_queue_to_every_member(world: OperatedNamespace) -> None:
    world.fleet.is_broadcasting = True
    await world.api.delete(world.path)  # spec.messageModel is immutable
    await world.api.create(world.path.rpartition("/")[0], a_group(messageModel="Broadcasting"))
    await world.fleet.add("orders-a", "orders-b")

    async def each_has_all() -> bool:
        return [len(pod.member.leases) for pod in world.fleet.members.values()] == [8, 8]

    await soon(each_has_all)
    await soon(world.settled)
    assert world.fleet.documents[-1]["everyone"] == {"orders": {"memory": "0-7"}}


@pytest.fixture
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_watcher, "MIN_CONSUMER_POLL_SECONDS", 0.2)
    monkeypatch.setattr(route_watcher, "MAX_CONSUMER_POLL_SECONDS", 0.2)


@pytest.mark.usefixtures("polls_often")
async def test_unmanaged_consumer_in_the_group_leaves_members_only_their_share(
    memory: MemoryCluster, world: OperatedNamespace
) -> None:
    await add_two_members(world)
    unmanaged = await join(memory, "10.0.0.1@77")
    condition = await world.wait_for_condition("UnmanagedConsumers")
    assert "10.0.0.1@77" in condition["message"]
    await world.wait_for_shares(3, 2)
    await unmanaged.leave()
    await world.wait_for_shares(4, 4)
    await world.wait_until_cleared("UnmanagedConsumers")


@pytest.mark.usefixtures("polls_often")
async def test_condition_consumption_disabled_is_set_and_no_queue_moves(
    memory: MemoryCluster, world: OperatedNamespace
) -> None:
    owners = await add_two_members(world)
    await memory.update_group(GROUP, BROKER, consume_enabled=False)
    condition = await world.wait_for_condition("ConsumptionDisabled")
    assert (
        condition["message"]
        == f"Consumption is disabled for the group at {BROKER}; enable it with mqadmin updateSubGroup -s true"
    )
    detail = world.operator.read_model.describe_group(world.namespace, GROUP)
    assert detail
    assert [(setting.broker, setting.enabled, setting.retries) for setting in detail.settings] == [(BROKER, False, 16)]
    assert await is_degraded_by(world, "ConsumptionDisabled")
    assert world.fleet.owners().items() >= owners.items()
    await memory.update_group(GROUP, BROKER, consume_enabled=True)
    await world.wait_until_cleared("ConsumptionDisabled")
    assert (await world.conditions())["Degraded"]["status"] == "False"
    assert world.fleet.owners().items() >= owners.items()


@pytest.mark.usefixtures("polls_often")
async def test_condition_duplicate_client_ids_is_set_and_no_queue_moves(
    memory: MemoryCluster, world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        online_consumers, "SILENT_CONNECTION_SECONDS", 0.5
    )  # the in-memory broker has no addresses, so a duplicate may be one silent connection
    owners = await add_two_members(world)
    used_twice, used_once = (world.fleet.members[name].client_id for name in ("orders-a", "orders-b"))
    await join(memory, used_once)
    await join(memory, used_twice)
    duplicate = await join(memory, used_twice)
    message = (await world.wait_for_condition("DuplicateClientIds"))["message"]
    assert message.startswith(f"Several consumers use the client ids {used_twice}, ")
    assert await is_degraded_by(world, "DuplicateClientIds")
    assert world.fleet.owners().items() >= owners.items()
    await duplicate.leave()
    await world.wait_until_cleared("DuplicateClientIds")
    assert world.fleet.owners().items() >= owners.items()


async def join(memory: MemoryCluster, client_id: str) -> MemoryConsumer:
    """Join the group at the broker, which creates the group's retry topic: one more queue."""
    membership = Membership(group=GROUP, client_id=client_id, subscriptions=[Subscription(topic="orders")])
    consumer = MemoryConsumer(memory, membership)
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
    await add_two_members(world)
    elsewhere = world.fleet.members["orders-b"]
    await world.api.patch(elsewhere.path, {"metadata": {"labels": {"zone": "west"}}})
    await world.wait_for_shares(8, 0)
    assert world.fleet.queues_of("orders-b") == []
