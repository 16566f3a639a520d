"""What an operator does not do: repeat queries, poll without need, poke unaffected members, or block other groups."""

import asyncio
from functools import partial

import pytest

from ground.api import Object
from ground.cluster import Cluster
from ground.poll import soon
from kube.in_process_operator import DelayedWrite, Operator
from kube.members import NODE
from kube.world import GROUP, OperatedNamespace, a_group, add_two_members, assert_unaffected, billing_group
from rota import planner
from rota.brokers.memory import BROKER, MemoryCluster
from rota.kube.brokers import route_watcher
from rota.kube.members import report_client
from rota.kube.reconcile import observe
from rota.kube.state import status_throttle
from rota.model import RETRY_TOPIC_PREFIX, Poke, Queue
from rota.planner import subscribed_queues

pytestmark = pytest.mark.usefixtures("crds", "node")

OTHER = "other"
HERE = {
    "containers": [{"name": "app", "image": "app"}],
    "nodeName": NODE,  # the simulated node, whose pods members can adopt
    "tolerations": [{"operator": "Exists"}],
}


class RecordingCluster(MemoryCluster):
    """A cluster that records queried topics, hides some brokers, and does not respond about some topics."""

    def __init__(self) -> None:
        super().__init__((BROKER, OTHER))
        self.queried_topics: list[str] = []
        self.hidden_brokers: set[str] = set()
        self.silent: set[str] = set()
        self.responds = asyncio.Event()

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        self.queried_topics.append(topic)
        if topic in self.silent:
            await self.responds.wait()
        return tuple(queue for queue in await super().queues(topic) if queue.broker not in self.hidden_brokers)

    async def wait_for_route_polls(self, number: int, topic: str = GROUP) -> None:
        """Wait until this number of further route polls has completed."""
        until = self.queried_topics.count(topic) + number + 1

        async def are_over() -> bool:
            return self.queried_topics.count(topic) >= until

        await soon(are_over)


@pytest.fixture
async def memory() -> RecordingCluster:
    cluster = RecordingCluster()
    await cluster.create_topic("orders", BROKER, 8)
    await cluster.create_topic("bills", BROKER, 6)
    return cluster


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll routes more often than by default."""
    monkeypatch.setattr(route_watcher, "ROUTE_POLL_SECONDS", 0.1)


# Queries.


async def test_topic_of_three_groups_is_queried_once_per_route_poll(
    world: OperatedNamespace, memory: RecordingCluster
) -> None:
    groups = world.path.rpartition("/")[0]
    await world.api.create(groups, a_group("east", subscriptions=[{"topic": "orders"}, {"topic": "bills"}]))
    await world.api.create(groups, a_group("west"))

    async def all_planned() -> bool:
        counts = {done.group.name: done.plan.status["queues"] for done in world.operator.reconciles}
        return counts == {GROUP: 8, "east": 14, "west": 8}

    await world.soon(all_planned)
    memory.queried_topics.clear()
    await memory.wait_for_route_polls(8)
    queried = [topic for topic in memory.queried_topics if not topic.startswith(RETRY_TOPIC_PREFIX)]
    polls = [sorted(queried[at : at + 2]) for at in range(0, len(queried), 2)]
    assert polls == [["bills", "orders"]] * len(polls)


async def test_report_polling_runs_only_while_a_change_is_awaited(
    world: OperatedNamespace, memory: RecordingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        report_client, "LONG_POLL_SECONDS", 0.1
    )  # a long poll that continued would be repeated within a route poll
    await add_two_members(world)
    await world.soon(world.at_rest)
    await memory.wait_for_route_polls(2)  # running polls have ended
    reads = world.fleet.reads
    await memory.wait_for_route_polls(10)
    assert world.fleet.reads == reads
    await world.fleet.add("orders-c")
    await world.wait_for_shares(3, 3, 2)
    assert world.fleet.reads > reads


# Pokes.


async def test_poke_is_repeated_to_the_member_that_ignores_it_and_to_no_other(world: OperatedNamespace) -> None:
    await add_two_members(world)
    ignoring = world.fleet.members["orders-b"]
    ignoring.ignores_pokes = True
    await world.fleet.add("orders-c")

    async def poked_again(times: int) -> dict[str, Poke]:
        pokes = await world.pokes()
        return pokes if pokes[ignoring.name].attempts >= times else {}

    second = await soon(partial(poked_again, 2))
    third = await soon(partial(poked_again, 3))
    assert third[ignoring.name].generation == second[ignoring.name].generation > ignoring.member.obeyed_generation
    assert {**third, ignoring.name: None} == {**second, ignoring.name: None}
    ignoring.ignores_pokes = False
    ignoring.apply_document()
    await world.wait_for_shares(3, 3, 2)


# Removed queues.


async def test_route_that_loses_a_broker_removes_its_queues_only_when_that_lasts(
    world: OperatedNamespace, memory: RecordingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await memory.create_topic("orders", OTHER, 4)
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(6, 6)
    await world.soon(world.at_rest)
    owners = world.fleet.owners()
    reconciles = len(world.operator.reconciles)
    memory.hidden_brokers.add(OTHER)
    await world.operator.wait_for_reconcile(reconciles)
    await world.soon(world.at_rest)
    assert world.fleet.owners() == owners
    for module in (planner, subscribed_queues):
        monkeypatch.setattr(module, "SHRINK_PATIENCE_SECONDS", 0.0)
    world.operator.controller.queue.enqueue((world.namespace, GROUP))
    await world.wait_for_shares(4, 4)
    assert {queue.split("/")[1] for queue in world.fleet.owners()} == {BROKER}
    assert not {"BrokerMetadataUnavailable", "UnknownTopic", "BrokerUnreachable"} & {*await world.conditions()}


# Blocked groups.


async def test_broker_failure_holds_up_no_other_group_of_a_new_leader(
    world: OperatedNamespace, control_plane: Cluster, memory: RecordingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "MAX_CONCURRENT_POLLS", 1)
    await add_two_members(world)
    await world.operator.controller.close()
    silent = ["hushed-1", "hushed-2", "hushed-3"]
    for name in silent:
        broker = {"rocketmq": {"nameServers": [f"{name}:9876"]}}
        group = a_group(name, broker=broker, subscriptions=[{"topic": name}])
        await world.api.create(world.path.rpartition("/")[0], group)
    memory.silent = {*silent}
    async with Operator(control_plane.kubeconfig, world.namespace, memory) as leading:

        async def is_querying() -> bool:
            return bool(memory.silent & {*memory.queried_topics})

        async def all_observed() -> bool:
            return all(group.was_observed for group in leading.controller.groups.values())

        await world.soon(is_querying)  # one of them has its turn now, the others precede the group that is created next
        async with billing_group(OperatedNamespace(world.api, world.namespace, world.fleet, leading)) as billing:
            await assert_unaffected(billing)
            await world.fleet.add("orders-c")
            await world.wait_for_shares(3, 3, 2)
            waiting = [group.name for group in leading.controller.groups.values() if not group.was_observed]
            assert sorted(waiting) == silent
            memory.silent = set()
            memory.responds.set()
            await world.soon(all_observed)


# A group with a template.


@pytest.fixture
async def fleet(world: OperatedNamespace) -> OperatedNamespace:
    """Let the group run two pods itself."""
    await world.api.patch(world.path, {"spec": {"replicas": 2, "template": {"spec": HERE}}})
    pods = f"/api/v1/namespaces/{world.namespace}/pods"

    async def created_pods() -> list[str]:
        names = [pod["metadata"]["name"] for pod in await world.api.list(pods)]
        return names if len(names) == 2 else []

    await world.fleet.adopt_pods(*await soon(created_pods, 60))
    await world.wait_for_shares(4, 4)
    await world.soon(world.at_rest)
    return world


def deployment(world: OperatedNamespace) -> str:
    return f"/apis/apps/v1/namespaces/{world.namespace}/deployments/{GROUP}"


async def is_rolled_out(world: OperatedNamespace, replicas: int) -> bool:
    """Whether Kubernetes has completed the rollout of the Deployment."""
    body = await world.api.get(deployment(world))
    status, generation = body.get("status") or {}, body["metadata"]["generation"]
    reasons = {condition["type"]: condition["reason"] for condition in status.get("conditions") or []}
    state = status.get("observedGeneration"), status.get("availableReplicas"), reasons.get("Progressing")
    return state == (generation, replicas, "NewReplicaSetAvailable")


async def versions(world: OperatedNamespace) -> dict[str, str]:
    """Return the resourceVersion of each of the group's objects."""
    listed: list[Object] = [
        *await world.api.list(f"/api/v1/namespaces/{world.namespace}/pods"),
        await world.api.get(deployment(world)),
        await world.api.get(f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"),
        await world.api.get(world.path),
    ]
    by_uid = {resource["metadata"]["uid"]: resource["metadata"]["resourceVersion"] for resource in listed}
    assert len(by_uid) == 5
    return by_uid


async def _has_lag(world: OperatedNamespace) -> bool:
    return "lag" in await world.status()


async def test_restart_of_the_operator_changes_nothing_of_a_settled_group_with_a_deployment(
    fleet: OperatedNamespace, control_plane: Cluster, memory: RecordingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_throttle, "LAG_INTERVAL_SECONDS", 0.1)
    await fleet.soon(partial(is_rolled_out, fleet, 2))
    await fleet.soon(fleet.at_rest)
    await fleet.soon(partial(_has_lag, fleet))
    await fleet.operator.controller.close()
    versions_before = await versions(fleet)
    async with Operator(control_plane.kubeconfig, fleet.namespace, memory) as another:

        async def has_reconciled(times: int) -> bool:
            return len(another.reconciles) >= times

        for times in (1, 2, 3):
            await fleet.soon(partial(has_reconciled, times))
            another.controller.queue.enqueue((fleet.namespace, GROUP))
        assert all(group.was_observed for group in another.controller.groups.values())
        assert await versions(fleet) == versions_before


async def test_conflict_rejects_a_late_deployment_of_a_deposed_leader_and_keeps_the_newer(
    fleet: OperatedNamespace, control_plane: Cluster, memory: RecordingCluster
) -> None:
    write = f"PATCH {deployment(fleet)}"
    deposed = fleet.operator
    late = DelayedWrite()
    deposed.api.delayed[write] = late
    await fleet.api.patch(fleet.path, {"spec": {"replicas": 1}})
    await late.sent.wait()
    await fleet.api.patch(fleet.path, {"spec": {"replicas": 3}})

    async def grown() -> bool:
        body = await fleet.api.get(deployment(fleet))
        return bool(body["spec"]["replicas"] == 3 and body["status"].get("replicas") == 3)

    async with Operator(control_plane.kubeconfig, fleet.namespace, memory):
        await fleet.soon(grown)
        deployment_before = await fleet.api.get(deployment(fleet))
        reconciles = len(deposed.reconciles)
        late.may_arrive.set()

        await deposed.wait_for_reconcile(reconciles)
        deployment_after = await fleet.api.get(deployment(fleet))
        assert (write, 409) in deposed.api.rejected
        assert (deployment_after["spec"], deployment_after["metadata"]["generation"]) == (
            deployment_before["spec"],
            deployment_before["metadata"]["generation"],
        )
