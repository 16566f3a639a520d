"""A group's life on a real API server: members join, leave, crash and hang, and no queue has two consumers."""

import asyncio
from dataclasses import replace

import pytest

from ground.api import Object
from ground.poll import soon
from kube.in_process_operator import DelayedWrite
from kube.members import MemberPod, a_pod
from kube.world import GROUP, OperatedNamespace, a_group, is_gone
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Membership
from rota.kube.client.objects import GROUP_LABEL
from rota.spec import Subscription

pytestmark = pytest.mark.usefixtures("crds", "node")


async def test_scale_up_shares_the_queues_and_status_reports_the_reason(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    await world.fleet.add("orders-c")
    await world.wait_for_shares(3, 3, 2)
    await soon(world.settled)
    status = await world.status()
    assert status["queues"] == 8 + 0
    assert status["lastRebalance"]["reason"] == "MemberJoined"


async def test_failover_of_a_crashed_member_and_drain_of_a_leaving_one_move_their_queues(
    world: OperatedNamespace,
) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.wait_for_shares(3, 3, 2)
    await world.fleet.members.pop("orders-a").kill()
    await world.wait_for_shares(4, 4)
    leaving = world.fleet.members["orders-b"]
    await leaving.delete_pod()
    await world.wait_for_shares(8, 0)
    assert leaving.member.report().is_drained
    await leaving.kill()


async def test_force_delete_of_a_running_pod_drains_it_before_its_queues_move(
    world: OperatedNamespace,
) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.wait_for_shares(3, 3, 2)
    vanished = world.fleet.members["orders-a"]
    vanished.drain_seconds = 1.0
    await vanished.force_delete()
    await world.wait_for_shares(
        0, 4, 4
    )  # the fleet records an overlap if another member consumes a queue that is still draining
    assert vanished.member.report().is_drained
    assert not any(document["forced"] for document in world.fleet.documents)
    world.fleet.members.pop("orders-a")
    await vanished.stop_server()
    await soon(world.settled)


async def test_force_delete_and_recreation_under_the_same_name_wait_for_the_drain(
    world: OperatedNamespace,
) -> None:
    """A StatefulSet does this: it recreates the pod as soon as the API server has deleted it."""
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    vanished = world.fleet.members["orders-a"]
    vanished.drain_seconds = 1.0
    await vanished.force_delete()
    await world.fleet.add("orders-a")
    new = world.fleet.members["orders-a"]

    async def has_queues() -> bool:
        return len(new.member.leases) == 4

    await world.soon(has_queues)
    assert vanished.member.report().is_drained
    assert not any(document["forced"] for document in world.fleet.documents)
    await vanished.stop_server()
    await soon(world.settled)


async def test_force_delete_of_a_briefly_unreachable_pod_still_waits_for_its_drain(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.wait_for_shares(3, 3, 2)
    vanished = world.fleet.members["orders-a"]
    vanished.drain_seconds = 8.0  # until then no other member may consume its queues
    await vanished.force_delete()
    await world.soon(lambda: is_draining(vanished))
    vanished.silent = True
    await asyncio.sleep(1.5)
    vanished.silent = False
    await world.wait_for_shares(0, 4, 4)
    assert not any(document["forced"] for document in world.fleet.documents)
    world.fleet.members.pop("orders-a")
    await vanished.stop_server()
    await soon(world.settled)


async def is_draining(pod: MemberPod) -> bool:
    return pod.member.state == "draining"


async def test_force_delete_of_a_pod_that_does_not_respond_counts_as_terminated(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.wait_for_shares(3, 3, 2)
    vanished = world.fleet.members.pop("orders-a")
    vanished.hang()
    world.fleet.mark_ended(vanished.name)  # a forced deletion asserts that the process has ended
    await vanished.force_delete()
    await world.wait_for_shares(4, 4)
    assert not any(document["forced"] for document in world.fleet.documents)
    await vanished.stop_server()


async def test_status_write_that_is_slow_holds_up_no_queue(
    world: OperatedNamespace,
) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    status = world.operator.api.delayed[f"PATCH {world.path}/status"] = DelayedWrite()
    await world.fleet.add("orders-c")
    await status.sent.wait()
    await world.wait_for_shares(3, 3, 2)
    await world.fleet.members.pop("orders-a").kill()
    await world.wait_for_shares(4, 4)
    status.may_arrive.set()
    await soon(world.settled)


async def test_forced_grant_of_the_queues_of_a_hung_member_is_reported(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    hung = world.fleet.members.pop("orders-a")
    await hung.stop_server()
    world.fleet.mark_ended(hung.name)  # the operator gives its queues away although it may still consume them
    await hung.write_status(ready=False)
    await world.wait_for_shares(8)
    assert world.fleet.documents[-1]["forced"]

    async def has_event() -> bool:  # the Event is recorded last
        events = await world.api.list(f"/api/v1/namespaces/{world.namespace}/events")
        return "QueuesForced" in {event["reason"] for event in events}

    await soon(has_event)
    await hung.kill()


async def test_queue_added_to_a_topic_gets_an_owner(world: OperatedNamespace, memory: MemoryCluster) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    await memory.create_topic("orders", BROKER, 12)
    await world.wait_for_shares(6, 6)


@pytest.mark.parametrize("damage", ["deleted", "never reported", "edited", "restored", "unlabelled"])
async def test_assignment_deleted_or_edited_is_rewritten_with_the_same_owners(
    world: OperatedNamespace, damage: str
) -> None:
    config_maps = f"/api/v1/namespaces/{world.namespace}/configmaps"
    path = f"{config_maps}/{GROUP}-rota"
    if damage == "never reported":  # the watch is interrupted from before the write until after the deletion
        world.operator.api.muted_watches.add(config_maps)
    await world.fleet.add("orders-a")
    await world.wait_for_shares(8)
    first = await world.api.get(path)
    await world.fleet.add("orders-b")
    await world.wait_for_shares(4, 4)
    owners = world.fleet.owners()
    generation = world.fleet.documents[-1]["generation"]
    if damage == "deleted":
        await world.api.delete(path)
    elif damage == "never reported":
        await world.api.delete(path)
        await world.operator.relist(config_maps)
    elif damage == "edited":
        await world.api.patch(path, {"data": {"assignment.json": "{}"}})
    elif damage == "unlabelled":
        await world.api.patch(path, {"metadata": {"labels": {GROUP_LABEL: None}}})
    else:
        await world.api.patch(path, {"data": first["data"]})

    async def is_rewritten() -> bool:
        obeyed = {pod.member.obeyed_generation for pod in world.fleet.members.values()}
        return bool(
            min(obeyed) > max(generation, 1_000_000_000)
        )  # rebuilt generations are at least the time in seconds

    await soon(is_rewritten)
    assert world.fleet.owners() == owners
    assert (await world.api.get(path))["metadata"]["labels"][GROUP_LABEL] == GROUP


async def test_pause_releases_all_queues_and_resume_grants_them_again(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    await world.api.patch(world.path, {"spec": {"paused": True}})
    await world.wait_for_shares(0, 0)
    await world.api.patch(world.path, {"spec": {"paused": False}})
    await world.wait_for_shares(4, 4)


@pytest.mark.parametrize(
    ("spec", "kind", "sentence"),
    [
        (
            {"policyRef": {"name": "nowhere"}},
            "MissingPolicy",
            "RebalancePolicy nowhere, which spec.policyRef names, does not exist",
        ),
        ({"subscriptions": [{"topic": "orders"}, {"topic": "nowhere"}]}, "UnknownTopic", "There is no topic nowhere"),
        (
            {"broker": {"rocketmq": {"nameServers": ["memory:9876"], "credentialsSecret": {"name": "acl"}}}},
            "MissingSecret",
            "Secret acl, which spec.broker names, does not exist",
        ),
    ],
)
async def test_condition_reports_missing_policy_topic_or_secret_and_no_queue_moves(
    world: OperatedNamespace, spec: Object, kind: str, sentence: str
) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    owners = world.fleet.owners()
    await world.api.patch(world.path, {"spec": spec})
    assert (await world.wait_for_condition(kind))["message"].startswith(sentence)
    assert world.fleet.owners() == owners
    assert (await world.wait_for_condition("Degraded"))["status"] == "True"


async def test_condition_no_sidecar_names_a_labelled_pod_without_a_sidecar(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a")
    await world.api.create(f"/api/v1/namespaces/{world.namespace}/pods", a_pod("stranger", GROUP, sidecar=False))
    assert "such as stranger" in (await world.wait_for_condition("NoSidecar"))["message"]
    await world.wait_for_shares(8)
    await world.api.delete(f"/api/v1/namespaces/{world.namespace}/pods/stranger", {"gracePeriodSeconds": 0})


async def test_config_map_of_the_same_name_from_another_owner_is_left_alone(world: OperatedNamespace) -> None:
    config_maps = f"/api/v1/namespaces/{world.namespace}/configmaps"
    await world.api.delete(world.path)
    await soon(lambda: is_gone(world.api, f"{config_maps}/{GROUP}-rota"))
    await world.api.create(config_maps, {"metadata": {"name": f"{GROUP}-rota"}, "data": {"mine": "1"}})
    await world.api.create(world.path.rpartition("/")[0], a_group())
    assert "is not owned by this group" in (await world.wait_for_condition("ResourceConflict"))["message"]
    assert (await world.api.get(f"{config_maps}/{GROUP}-rota"))["data"] == {"mine": "1"}


async def test_lock_of_a_terminated_member_is_released_in_its_name(
    world: OperatedNamespace, memory: MemoryCluster
) -> None:
    await world.api.patch(world.path, {"spec": {"ordering": "Orderly"}})
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    ended = world.fleet.members.pop("orders-a")
    membership = Membership(group=GROUP, client_id=ended.client_id, subscriptions=[Subscription(topic="orders")])
    locked_queues = world.fleet.queues_of("orders-a")
    await MemoryConsumer(memory, membership).lock(locked_queues)
    await ended.kill()
    await world.wait_for_shares(8)
    another_client = replace(membership, client_id="another")

    async def is_unlocked() -> bool:
        return await MemoryConsumer(memory, another_client).lock(locked_queues) == set(locked_queues)

    await soon(is_unlocked)
