"""What an operator leaves alone: it asks once, listens only while it waits, pokes whom it must, and holds up nobody."""

import asyncio
from functools import partial

import pytest

from ground.api import Object
from ground.cluster import Cluster
from ground.poll import soon
from kube.brains import Late, Operator
from kube.members import NODE
from kube.world import GROUP, OperatedNamespace, a_group, billing, goes_on, two_members
from rota import planner
from rota.brokers.memory import BROKER, MemoryCluster
from rota.kube.brokers import route_watcher
from rota.kube.members import report_client
from rota.kube.reconcile import observe
from rota.kube.state import status_throttle
from rota.model import RETRY_TOPIC_PREFIX, Poke, Queue
from rota.planner import situation

pytestmark = pytest.mark.usefixtures("crds", "node")

OTHER = "other"
HERE = {
    "containers": [{"name": "app", "image": "app"}],
    "nodeName": NODE,  # where members can move in
    "tolerations": [{"operator": "Exists"}],
}


class Asked(MemoryCluster):
    """A cluster that knows what it was asked for, leaves out some brokers, and is silent about some topics."""

    def __init__(self) -> None:
        super().__init__((BROKER, OTHER))
        self.asked: list[str] = []  # topics
        self.left_out: set[str] = set()
        self.silent: set[str] = set()
        self.speaks = asyncio.Event()

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        self.asked.append(topic)
        if topic in self.silent:
            await self.speaks.wait()
        return tuple(queue for queue in await super().queues(topic) if queue.broker not in self.left_out)

    async def looks(self, number: int, topic: str = GROUP) -> None:
        """Wait until so many more looks at the routes are over."""
        until = self.asked.count(topic) + number + 1

        async def seen() -> bool:
            return self.asked.count(topic) >= until

        await soon(seen)


@pytest.fixture
async def memory() -> Asked:
    found = Asked()
    await found.create_topic("orders", BROKER, 8)
    await found.create_topic("bills", BROKER, 6)
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at brokers more often than usual."""
    monkeypatch.setattr(route_watcher, "ROUTE_POLL_SECONDS", 0.1)


# Who is asked.


async def test_topic_of_three_groups_is_queried_once_per_route_poll(world: OperatedNamespace, memory: Asked) -> None:
    groups = world.path.rpartition("/")[0]
    await world.api.create(groups, a_group("east", subscriptions=[{"topic": "orders"}, {"topic": "bills"}]))
    await world.api.create(groups, a_group("west"))

    async def known() -> bool:
        seen = {done.group.name: done.plan.status["queues"] for done in world.operator.done}
        return seen == {GROUP: 8, "east": 14, "west": 8}

    await world.soon(known)
    memory.asked.clear()
    await memory.looks(8)
    looks = [topic for topic in memory.asked if not topic.startswith(RETRY_TOPIC_PREFIX)]
    each = [sorted(looks[at : at + 2]) for at in range(0, len(looks), 2)]
    assert each == [["bills", "orders"]] * len(each)


async def test_report_polling_runs_only_while_a_change_is_awaited(
    world: OperatedNamespace, memory: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_client, "LONG_POLL_SECONDS", 0.1)  # who listened on would ask again within a look
    await two_members(world)
    await world.soon(world.at_rest)
    await memory.looks(2)  # polls that were under way are over
    reads = world.fleet.reads
    await memory.looks(10)
    assert world.fleet.reads == reads
    await world.fleet.add("orders-c")
    await world.until(3, 3, 2)
    assert world.fleet.reads > reads


# Who is poked.


async def test_poke_is_repeated_to_the_member_that_ignores_it_and_to_no_other(world: OperatedNamespace) -> None:
    await two_members(world)
    deaf = world.fleet.members["orders-b"]
    deaf.deaf = True
    await world.fleet.add("orders-c")

    async def poked(times: int) -> dict[str, Poke]:
        found = await world.pokes()
        return found if found[deaf.name].attempts >= times else {}

    again = await soon(partial(poked, 2))
    oftener = await soon(partial(poked, 3))
    assert oftener[deaf.name].generation == again[deaf.name].generation > deaf.member.obeyed_generation
    assert {**oftener, deaf.name: None} == {**again, deaf.name: None}
    deaf.deaf = False
    deaf.look()
    await world.until(3, 3, 2)


# What is let go.


async def test_route_that_loses_a_broker_removes_its_queues_only_when_that_lasts(
    world: OperatedNamespace, memory: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    await memory.create_topic("orders", OTHER, 4)
    await world.fleet.add("orders-a", "orders-b")
    await world.until(6, 6)
    await world.soon(world.at_rest)
    before, rounds = world.fleet.as_value(), len(world.operator.done)
    memory.left_out.add(OTHER)
    await world.operator.looks_again(rounds)
    await world.soon(world.at_rest)
    assert world.fleet.as_value() == before
    for room in (planner, situation):
        monkeypatch.setattr(room, "SHRINK_PATIENCE_SECONDS", 0.0)
    world.operator.brain.enqueue((world.namespace, GROUP))
    await world.until(4, 4)
    assert {queue.split("/")[1] for queue in world.fleet.as_value()} == {BROKER}
    assert not {"BrokerMetadataUnavailable", "UnknownTopic", "BrokerUnreachable"} & {*await world.conditions()}


# Who is held up.


async def test_broker_failure_holds_up_no_other_group_of_a_new_leader(
    world: OperatedNamespace, control_plane: Cluster, memory: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "MAX_CONCURRENT_POLLS", 1)
    await two_members(world)
    await world.operator.brain.close()
    silent = ["hushed-1", "hushed-2", "hushed-3"]
    for name in silent:
        away = {"rocketmq": {"nameServers": [f"{name}:9876"]}}
        group = a_group(name, broker=away, subscriptions=[{"topic": name}])
        await world.api.create(world.path.rpartition("/")[0], group)
    memory.silent = {*silent}
    async with Operator(control_plane.kubeconfig, world.namespace, memory) as leading:

        async def begun() -> bool:
            return bool(memory.silent & {*memory.asked})

        async def all_looked() -> bool:
            return all(group.was_observed for group in leading.brain.groups.values())

        await world.soon(begun)  # so one of them has its turn, and the others are before whoever comes now
        async with billing(OperatedNamespace(world.api, world.namespace, world.fleet, leading)) as other:
            await goes_on(other)
            await world.fleet.add("orders-c")
            await world.until(3, 3, 2)
            waiting = [group.name for group in leading.brain.groups.values() if not group.was_observed]
            assert sorted(waiting) == silent
            memory.silent = set()
            memory.speaks.set()
            await world.soon(all_looked)


# What a fleet of one's own is.


@pytest.fixture
async def fleet(world: OperatedNamespace) -> OperatedNamespace:
    """Let the group run two pods itself."""
    await world.api.patch(world.path, {"spec": {"replicas": 2, "template": {"spec": HERE}}})
    pods = f"/api/v1/namespaces/{world.namespace}/pods"

    async def made() -> list[str]:
        names = [it["metadata"]["name"] for it in await world.api.list(pods)]
        return names if len(names) == 2 else []

    await world.fleet.move_in(*await soon(made, 60))
    await world.until(4, 4)
    await world.soon(world.at_rest)
    return world


def deployment(world: OperatedNamespace) -> str:
    return f"/apis/apps/v1/namespaces/{world.namespace}/deployments/{GROUP}"


async def all_there(world: OperatedNamespace, replicas: int) -> bool:
    """Whether Kubernetes has nothing more to say of a fleet."""
    found = await world.api.get(deployment(world))
    status, generation = found.get("status") or {}, found["metadata"]["generation"]
    rolled = {it["type"]: it["reason"] for it in status.get("conditions") or []}
    told = status.get("observedGeneration"), status.get("availableReplicas"), rolled.get("Progressing")
    return told == (generation, replicas, "NewReplicaSetAvailable")


async def versions(world: OperatedNamespace) -> dict[str, str]:
    """Return which version of each of the group's objects is there."""
    listed: list[Object] = [
        *await world.api.list(f"/api/v1/namespaces/{world.namespace}/pods"),
        await world.api.get(deployment(world)),
        await world.api.get(f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"),
        await world.api.get(world.path),
    ]
    found = {it["metadata"]["uid"]: it["metadata"]["resourceVersion"] for it in listed}
    assert len(found) == 5
    return found


async def _tells_lag(world: OperatedNamespace) -> bool:
    return "lag" in await world.status()


async def test_restart_of_the_operator_changes_nothing_of_a_settled_group_with_a_deployment(
    fleet: OperatedNamespace, control_plane: Cluster, memory: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_throttle, "LAG_INTERVAL_SECONDS", 0.1)
    await fleet.soon(partial(all_there, fleet, 2))
    await fleet.soon(fleet.at_rest)
    await fleet.soon(partial(_tells_lag, fleet))
    await fleet.operator.brain.close()
    before = await versions(fleet)
    async with Operator(control_plane.kubeconfig, fleet.namespace, memory) as another:

        async def looked(times: int) -> bool:
            return len(another.done) >= times

        for times in (1, 2, 3):
            await fleet.soon(partial(looked, times))
            another.brain.enqueue((fleet.namespace, GROUP))
        assert all(group.was_observed for group in another.brain.groups.values())
        assert await versions(fleet) == before


async def test_conflict_rejects_a_late_deployment_of_a_deposed_leader_and_keeps_the_newer(
    fleet: OperatedNamespace, control_plane: Cluster, memory: Asked
) -> None:
    write = f"PATCH {deployment(fleet)}"
    deposed, late = fleet.operator, Late()
    deposed.api.late[write] = late
    await fleet.api.patch(fleet.path, {"spec": {"replicas": 1}})
    await late.sent.wait()
    await fleet.api.patch(fleet.path, {"spec": {"replicas": 3}})

    async def grown() -> bool:
        found = await fleet.api.get(deployment(fleet))
        return bool(found["spec"]["replicas"] == 3 and found["status"].get("replicas") == 3)

    async with Operator(control_plane.kubeconfig, fleet.namespace, memory):
        await fleet.soon(grown)
        before, rounds = await fleet.api.get(deployment(fleet)), len(deposed.done)
        late.arrives.set()

        await deposed.looks_again(rounds)
        after = await fleet.api.get(deployment(fleet))
        assert (write, 409) in deposed.api.refused
        assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], before["metadata"]["generation"])
