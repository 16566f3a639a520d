"""A group's life on a real API server: members come, go, crash and hang, and no queue is worked by two."""

import asyncio
from dataclasses import replace

import pytest

from ground.api import Object
from ground.poll import soon
from kube.brains import Late
from kube.members import One, a_pod
from kube.world import GROUP, OperatedNamespace, a_group, is_gone
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Membership
from rota.kube.client.objects import GROUP_LABEL
from rota.spec import Subscription

pytestmark = pytest.mark.usefixtures("crds", "node")


async def test_scale_up_shares_the_queues_and_status_reports_the_reason(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await world.fleet.add("orders-c")
    await world.until(3, 3, 2)
    await soon(world.settled)
    status = await world.status()
    assert status["queues"] == 8 + 0
    assert status["lastRebalance"]["reason"] == "MemberJoined"


async def test_failover_of_a_crashed_member_and_drain_of_a_leaving_one_move_their_queues(
    world: OperatedNamespace,
) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.until(3, 3, 2)
    await world.fleet.members.pop("orders-a").end()
    await world.until(4, 4)
    leaving = world.fleet.members["orders-b"]
    await leaving.leave()
    await world.until(8, 0)
    assert leaving.member.report().is_drained
    await leaving.end()


async def test_force_delete_of_a_running_pod_drains_it_before_its_queues_move(
    world: OperatedNamespace,
) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.until(3, 3, 2)
    vanished = world.fleet.members["orders-a"]
    vanished.takes = 1.0
    await vanished.vanish()
    await world.until(0, 4, 4)  # nobody works beside it what it still drains: the fleet would say so in the end
    assert vanished.member.report().is_drained
    assert not any(document["forced"] for document in world.fleet.documents)
    world.fleet.members.pop("orders-a")
    await vanished.hush()
    await soon(world.settled)


async def test_force_delete_and_recreation_under_the_same_name_wait_for_the_drain(
    world: OperatedNamespace,
) -> None:
    """As a StatefulSet does, which never waits for a pod that is not there any more."""
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    vanished = world.fleet.members["orders-a"]
    vanished.takes = 1.0
    await vanished.vanish()
    await world.fleet.add("orders-a")
    new = world.fleet.members["orders-a"]

    async def works() -> bool:
        return len(new.member.leases) == 4

    await world.soon(works)
    assert vanished.member.report().is_drained
    assert not any(document["forced"] for document in world.fleet.documents)
    await vanished.hush()
    await soon(world.settled)


async def test_force_delete_of_a_briefly_unreachable_pod_still_waits_for_its_drain(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.until(3, 3, 2)
    vanished = world.fleet.members["orders-a"]
    vanished.takes = 8.0  # so long nobody else may work what it drains
    await vanished.vanish()
    await world.soon(lambda: drains(vanished))
    vanished.silent = True
    await asyncio.sleep(1.5)
    vanished.silent = False
    await world.until(0, 4, 4)
    assert not any(document["forced"] for document in world.fleet.documents)
    world.fleet.members.pop("orders-a")
    await vanished.hush()
    await soon(world.settled)


async def drains(one: One) -> bool:
    return one.member.state == "draining"


async def test_force_delete_of_a_pod_that_does_not_respond_counts_as_terminated(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.until(3, 3, 2)
    vanished = world.fleet.members.pop("orders-a")
    vanished.hang()
    world.fleet.ended(vanished.name)  # who deletes by force says so
    await vanished.vanish()
    await world.until(4, 4)
    assert not any(document["forced"] for document in world.fleet.documents)
    await vanished.hush()


async def test_status_write_that_is_slow_holds_up_no_queue(
    world: OperatedNamespace,
) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    status = world.operator.api.late[f"PATCH {world.path}/status"] = Late()
    await world.fleet.add("orders-c")
    await status.sent.wait()
    await world.until(3, 3, 2)
    await world.fleet.members.pop("orders-a").end()
    await world.until(4, 4)
    status.arrives.set()
    await soon(world.settled)


async def test_forced_grant_of_the_queues_of_a_hung_member_is_reported(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    hung = world.fleet.members.pop("orders-a")
    await hung.hush()
    world.fleet.ended(hung.name)  # what it may still do is contested, and marked so
    await hung.becomes(ready=False)
    await world.until(8)
    assert world.fleet.documents[-1]["forced"]

    async def told() -> bool:  # people are told last
        events = await world.api.list(f"/api/v1/namespaces/{world.namespace}/events")
        return "QueuesForced" in {event["reason"] for event in events}

    await soon(told)
    await hung.end()


async def test_queue_added_to_a_topic_gets_an_owner(world: OperatedNamespace, memory: MemoryCluster) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await memory.create_topic("orders", BROKER, 12)
    await world.until(6, 6)


@pytest.mark.parametrize("spoiled", ["deleted", "never reported", "edited", "restored", "unlabelled"])
async def test_assignment_deleted_or_edited_is_rewritten_with_the_same_owners(
    world: OperatedNamespace, spoiled: str
) -> None:
    records = f"/api/v1/namespaces/{world.namespace}/configmaps"
    record = f"{records}/{GROUP}-rota"
    if spoiled == "never reported":  # the watch is interrupted before it is written, until it is deleted
        world.operator.api.silent.add(records)
    await world.fleet.add("orders-a")
    await world.until(8)
    old = await world.api.get(record)
    await world.fleet.add("orders-b")
    await world.until(4, 4)
    before, generation = world.fleet.as_value(), world.fleet.documents[-1]["generation"]
    if spoiled == "deleted":
        await world.api.delete(record)
    elif spoiled == "never reported":
        await world.api.delete(record)
        await world.operator.lists_again(records)
    elif spoiled == "edited":
        await world.api.patch(record, {"data": {"assignment.json": "{}"}})
    elif spoiled == "unlabelled":
        await world.api.patch(record, {"metadata": {"labels": {GROUP_LABEL: None}}})
    else:
        await world.api.patch(record, {"data": old["data"]})

    async def written() -> bool:
        obeyed = {one.member.obeyed_generation for one in world.fleet.members.values()}
        return bool(min(obeyed) > max(generation, 1_000_000_000))  # no lower than the time

    await soon(written)
    assert world.fleet.as_value() == before
    assert (await world.api.get(record))["metadata"]["labels"][GROUP_LABEL] == GROUP


async def test_pause_releases_all_queues_and_resume_grants_them_again(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await world.api.patch(world.path, {"spec": {"paused": True}})
    await world.until(0, 0)
    await world.api.patch(world.path, {"spec": {"paused": False}})
    await world.until(4, 4)


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
    await world.until(4, 4)
    before = world.fleet.as_value()
    await world.api.patch(world.path, {"spec": spec})
    assert (await world.condition(kind))["message"].startswith(sentence)
    assert world.fleet.as_value() == before
    assert (await world.condition("Degraded"))["status"] == "True"


async def test_condition_no_sidecar_names_a_labelled_pod_without_a_sidecar(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a")
    await world.api.create(f"/api/v1/namespaces/{world.namespace}/pods", a_pod("stranger", GROUP, sidecar=False))
    assert "such as stranger" in (await world.condition("NoSidecar"))["message"]
    await world.until(8)
    await world.api.delete(f"/api/v1/namespaces/{world.namespace}/pods/stranger", {"gracePeriodSeconds": 0})


async def test_config_map_of_the_same_name_from_another_owner_is_left_alone(world: OperatedNamespace) -> None:
    theirs = f"/api/v1/namespaces/{world.namespace}/configmaps"
    await world.api.delete(world.path)
    await soon(lambda: is_gone(world.api, f"{theirs}/{GROUP}-rota"))
    await world.api.create(theirs, {"metadata": {"name": f"{GROUP}-rota"}, "data": {"mine": "1"}})
    await world.api.create(world.path.rpartition("/")[0], a_group())
    assert "is not owned by this group" in (await world.condition("ResourceConflict"))["message"]
    assert (await world.api.get(f"{theirs}/{GROUP}-rota"))["data"] == {"mine": "1"}


async def test_lock_of_a_terminated_member_is_released_in_its_name(
    world: OperatedNamespace, memory: MemoryCluster
) -> None:
    await world.api.patch(world.path, {"spec": {"ordering": "Orderly"}})
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    ended = world.fleet.members.pop("orders-a")
    wanted = Membership(group=GROUP, client_id=ended.client_id, subscriptions=[Subscription(topic="orders")])
    theirs = world.fleet.worked_by("orders-a")
    await MemoryConsumer(memory, wanted).lock(theirs)
    await ended.end()
    await world.until(8)
    other = replace(wanted, client_id="another")

    async def free() -> bool:
        return await MemoryConsumer(memory, other).lock(theirs) == set(theirs)

    await soon(free)
