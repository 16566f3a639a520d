"""A group's life on a real API server: members come, go, crash and hang, and no queue is worked by two."""

import asyncio
from dataclasses import replace

import pytest

from ground.api import Object
from ground.controlplane import Cluster
from ground.poll import soon
from kube.brains import Late, Operator
from kube.members import One, a_pod
from kube.world import GROUP, World, a_group, is_gone
from rota.brokers import Membership
from rota.brokers.memory import BROKER, Memory, MemoryConsumer
from rota.kube.objects import GROUP_LABEL
from rota.spec import Subscription

pytestmark = pytest.mark.usefixtures("crds", "node")


async def test_members_that_come_share_the_queues_and_status_tells(world: World) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await world.fleet.add("orders-c")
    await world.until(3, 3, 2)
    await soon(world.settled, 60)
    status = await world.status()
    assert status["queues"] == 8 + 0
    assert status["lastRebalance"]["reason"] == "MemberJoined"


async def test_a_crashed_members_queues_are_at_work_elsewhere_and_a_leaving_one_drains(world: World) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.until(3, 3, 2)
    await world.fleet.members.pop("orders-a").end()
    await world.until(4, 4)
    leaving = world.fleet.members["orders-b"]
    await leaving.leave()
    await world.until(8, 0)
    assert leaving.member.report().drained
    await leaving.end()


async def test_a_pod_deleted_by_force_that_still_works_is_asked_to_drain_and_then_its_queues_move(world: World) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.until(3, 3, 2)
    vanished = world.fleet.members["orders-a"]
    vanished.takes = 1.0
    await vanished.vanish()
    await world.until(0, 4, 4)  # nobody works beside it what it still drains: the fleet would say so in the end
    assert vanished.member.report().drained
    assert not any(document["forced"] for document in world.fleet.documents)
    world.fleet.members.pop("orders-a")
    await vanished.hush()
    await soon(world.settled, 60)


async def test_a_pod_made_anew_under_the_name_of_one_deleted_by_force_waits_until_that_has_drained(
    world: World,
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
        return len(new.member.lives) == 4

    await world.soon(works)
    assert vanished.member.report().drained
    assert not any(document["forced"] for document in world.fleet.documents)
    await vanished.hush()
    await soon(world.settled, 60)


async def test_a_pod_deleted_by_force_that_is_not_heard_once_is_asked_again(world: World) -> None:
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
    await soon(world.settled, 60)


async def drains(one: One) -> bool:
    return one.member.state == "draining"


async def test_a_pod_deleted_by_force_that_does_not_answer_is_taken_to_have_ended(world: World) -> None:
    await world.fleet.add("orders-a", "orders-b", "orders-c")
    await world.until(3, 3, 2)
    vanished = world.fleet.members.pop("orders-a")
    vanished.hang()
    world.fleet.ended(vanished.name)  # who deletes by force says so
    await vanished.vanish()
    await world.until(4, 4)
    assert not any(document["forced"] for document in world.fleet.documents)
    await vanished.hush()


async def test_an_api_server_that_takes_its_time_with_what_people_read_holds_up_no_queue(world: World) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    status = world.operator.api.late[f"PATCH {world.path}/status"] = Late()
    await world.fleet.add("orders-c")
    await status.sent.wait()
    await world.until(3, 3, 2)
    await world.fleet.members.pop("orders-a").end()
    await world.until(4, 4)
    status.arrives.set()
    await soon(world.settled, 60)


async def test_a_hung_members_queues_are_forced_and_said_to_be(world: World) -> None:
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

    await soon(told, 60)
    await hung.end()


async def test_queues_that_are_added_are_taken_up(world: World, memory: Memory) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await memory.create_topic("orders", BROKER, 12)
    await world.until(6, 6)


@pytest.mark.parametrize("spoiled", ["deleted", "edited", "restored", "unlabelled"])
async def test_a_record_that_somebody_spoils_is_written_anew_with_the_same_owners(world: World, spoiled: str) -> None:
    await world.fleet.add("orders-a")
    await world.until(8)
    record = f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"
    old = await world.api.get(record)
    await world.fleet.add("orders-b")
    await world.until(4, 4)
    before, generation = world.fleet.as_value(), world.fleet.documents[-1]["generation"]
    if spoiled == "deleted":
        await world.api.delete(record)
    elif spoiled == "edited":
        await world.api.patch(record, {"data": {"assignment.json": "{}"}})
    elif spoiled == "unlabelled":
        await world.api.patch(record, {"metadata": {"labels": {GROUP_LABEL: None}}})
    else:
        await world.api.patch(record, {"data": old["data"]})

    async def written() -> bool:
        obeyed = {one.member.obeyed for one in world.fleet.members.values()}
        return bool(min(obeyed) > max(generation, 1_000_000_000))  # no lower than the time

    await soon(written, 60)
    assert world.fleet.as_value() == before
    assert (await world.api.get(record))["metadata"]["labels"][GROUP_LABEL] == GROUP


async def test_a_group_that_is_paused_works_nothing_and_goes_on(world: World) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await world.api.patch(world.path, {"spec": {"paused": True}})
    await world.until(0, 0)
    await world.api.patch(world.path, {"spec": {"paused": False}})
    await world.until(4, 4)


async def test_an_operator_that_comes_to_a_settled_group_writes_nothing(
    world: World, control_plane: Cluster, memory: Memory
) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)

    async def quiet() -> bool:
        before = len(world.operator.api.writes)
        await asyncio.sleep(2)  # four times what its writes are apart at most
        return len(world.operator.api.writes) == before

    await soon(quiet, 60)
    await world.operator.brain.close()
    async with Operator(control_plane.kubeconfig, world.namespace, memory) as another:
        await soon(lambda: _true(len(another.done) > 2), 60)
        assert another.api.writes == []


async def _true(value: bool) -> bool:  # noqa: FBT001 - it is what is asked
    return value


@pytest.mark.parametrize(
    ("spec", "kind", "sentence"),
    [
        ({"policyRef": {"name": "nowhere"}}, "MissingPolicy", "There is no RebalancePolicy nowhere"),
        ({"subscriptions": [{"topic": "orders"}, {"topic": "nowhere"}]}, "UnknownTopic", "There is no topic nowhere"),
        (
            {"broker": {"rocketmq": {"nameServers": ["memory:9876"], "credentialsSecret": {"name": "acl"}}}},
            "MissingSecret",
            "Secret acl, which spec.broker names, does not exist",
        ),
    ],
)
async def test_what_only_the_operator_can_see_is_a_condition_and_nothing_moves(
    world: World, spec: Object, kind: str, sentence: str
) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    before = world.fleet.as_value()
    await world.api.patch(world.path, {"spec": spec})
    assert (await world.condition(kind))["message"].startswith(sentence)
    assert world.fleet.as_value() == before
    assert (await world.condition("Degraded"))["status"] == "True"


async def test_pods_that_carry_the_label_and_no_sidecar_are_told(world: World) -> None:
    await world.fleet.add("orders-a")
    await world.api.create(f"/api/v1/namespaces/{world.namespace}/pods", a_pod("stranger", GROUP, sidecar=False))
    assert "such as stranger" in (await world.condition("NoSidecar"))["message"]
    await world.until(8)
    await world.api.delete(f"/api/v1/namespaces/{world.namespace}/pods/stranger", {"gracePeriodSeconds": 0})


async def test_a_record_of_that_name_that_is_somebody_elses_is_left_alone(world: World) -> None:
    theirs = f"/api/v1/namespaces/{world.namespace}/configmaps"
    await world.api.delete(world.path)
    await soon(lambda: is_gone(world.api, f"{theirs}/{GROUP}-rota"))
    await world.api.create(theirs, {"metadata": {"name": f"{GROUP}-rota"}, "data": {"mine": "1"}})
    await world.api.create(world.path.rpartition("/")[0], a_group())
    assert "is somebody else's" in (await world.condition("NameTaken"))["message"]
    assert (await world.api.get(f"{theirs}/{GROUP}-rota"))["data"] == {"mine": "1"}


async def test_the_locks_of_a_member_that_ended_are_given_back_in_its_name(world: World, memory: Memory) -> None:
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


async def test_two_groups_that_claim_one_group_of_the_brokers_are_told_and_share_as_strangers_do(world: World) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    rival = a_group("rival", group=GROUP)
    await world.api.create(world.path.rpartition("/")[0], rival)
    assert "is also that of" in (await world.condition("ClaimedTwice"))["message"]
