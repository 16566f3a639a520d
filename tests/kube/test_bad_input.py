"""Mistakes of users, failures of brokers and members: each becomes a condition, and moves no queue."""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import builders
from builders import NOW
from ground.api import Api, Object
from ground.cluster import Cluster
from ground.fixtures import a_namespace
from ground.poll import soon
from kube.in_process_operator import Operator
from kube.members import GroupMembers, MemberPod, a_pod
from kube.world import GROUP, OperatedNamespace, a_group, add_two_members, assert_unaffected, billing_group, is_gone
from rota import planner
from rota.brokers.memory import BROKER, NAME_SERVER, MemoryCluster
from rota.documents import GZIP_KEY, PLAIN_KEY, Share, decode_assignment, encode_assignment
from rota.kube.brokers import registry, route_watcher
from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.reconcile import assignment_writer
from rota.kube.state.group import Group
from rota.planner import plan, subscribed_queues
from rota.planner.status import problems

pytestmark = pytest.mark.usefixtures("crds", "node")

OTHER = "other"  # a broker that stays up
NOWHERE = {"strategy": "Custom", "options": {"custom": {"name": "nowhere"}}}
ELSEWHERE = {"roomLabel": "room", "brokers": [{"broker": "elsewhere", "room": "east"}]}
NO_ROOM = {"strategy": "MachineRoomNearby", "options": {"machineRoomNearby": ELSEWHERE}}


def by_config(index: int, ids: str) -> Object:
    member = {"index": index, "queues": [{"topic": "orders", "broker": BROKER, "ids": ids}]}
    return {"strategy": "ByConfig", "options": {"byConfig": {"members": [member]}}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll brokers and Secrets more often than by default."""
    monkeypatch.setattr(route_watcher, "ROUTE_POLL_SECONDS", 0.5)
    monkeypatch.setattr(route_watcher, "MIN_CONSUMER_POLL_SECONDS", 0.5)
    monkeypatch.setattr(route_watcher, "MAX_CONSUMER_POLL_SECONDS", 0.5)
    monkeypatch.setattr(registry, "REREAD_SECRETS_SECONDS", 0.5)


@pytest.fixture
async def memory() -> MemoryCluster:
    cluster = MemoryCluster((BROKER, OTHER))
    await cluster.create_topic("orders", BROKER, 8)
    await cluster.create_topic("bills", OTHER, 6)
    return cluster


async def follows(world: OperatedNamespace, strategy: str, **spec: Any) -> str:
    """Create a policy, set it in the group, and return the policy's path."""
    policies = f"/apis/rota.dev/v1alpha1/namespaces/{world.namespace}/rebalancepolicies"
    policy = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "rules"}}
    await world.api.create(policies, policy | {"spec": {"strategy": strategy, **spec}})
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "rules"}}})
    return f"{policies}/rules"


# Policies.


@pytest.mark.parametrize(
    ("spec", "kind", "sentence"),
    [
        (NOWHERE, "StrategyFailed", "There is no custom strategy nowhere"),
        (NO_ROOM, "StrategyFailed", "has no room"),
        (
            by_config(0, "3-1"),
            "InvalidPolicy",
            "RebalancePolicy rules: spec.options.byConfig.members[0].queues[0].ids '3-1' is not valid",
        ),
    ],
)
async def test_policy_that_cannot_be_applied_moves_only_queues_of_terminated_members(
    world: OperatedNamespace, spec: Object, kind: str, sentence: str
) -> None:
    owners = await add_two_members(world)
    policy = await follows(world, **spec)
    assert sentence in (await world.wait_for_condition(kind))["message"]
    await world.fleet.add("orders-c")
    await soon(world.at_rest)
    assert world.fleet.owners() == owners
    await world.fleet.members.pop("orders-c").kill()
    await world.fleet.members.pop("orders-a").kill()
    await world.wait_for_shares(8)
    await world.fleet.add("orders-d")
    await world.api.patch(policy, {"spec": {"strategy": "Sticky", "options": dict.fromkeys(spec["options"])}})
    await world.wait_for_shares(4, 4)
    await world.wait_until_cleared(kind)


@pytest.mark.parametrize(
    ("spec", "shares"),
    [
        (by_config(0, "0-2"), (3, 0)),
        (by_config(7, "0-7"), (0, 0)),
        ({"strategy": "ByMachineRoom", "options": {"byMachineRoom": {"rooms": ["nowhere"]}}}, (0, 0)),
    ],
)
async def test_policy_leaves_queues_without_an_existing_member_unowned_and_counts_them(
    world: OperatedNamespace, spec: Object, shares: tuple[int, ...]
) -> None:
    await add_two_members(world)
    policy = await follows(world, **spec)
    await world.wait_for_shares(*shares)
    message = f"{8 - sum(shares)} queues without an owner"
    assert (await world.wait_for_condition("QueuesUnowned"))["message"] == message
    await world.api.delete(policy)  # without a policy, unowned queues stay unowned
    await world.wait_for_condition("MissingPolicy")
    await soon(world.at_rest)
    assert world.shares(*shares)
    await world.api.patch(world.path, {"spec": {"policyRef": None}})
    await world.wait_for_shares(4, 4)
    await world.wait_until_cleared("QueuesUnowned")


async def test_policy_that_is_deleted_while_in_use_moves_no_queue(world: OperatedNamespace) -> None:
    policy = await follows(world, "AveragelyByCircle")
    owners = await add_two_members(world)
    await world.api.delete(policy)
    assert (await world.wait_for_condition("MissingPolicy"))["message"].startswith(
        "RebalancePolicy rules, which spec.policyRef names"
    )
    await soon(world.at_rest)
    assert world.fleet.owners() == owners
    await follows(world, "AveragelyByCircle")
    await world.wait_until_cleared("MissingPolicy")
    assert world.fleet.owners() == owners


async def test_policy_change_of_strategy_moves_queues_and_is_the_rebalance_reason(world: OperatedNamespace) -> None:
    policy = await follows(world, "Averagely")
    await add_two_members(world)
    await world.api.patch(policy, {"spec": {"strategy": "AveragelyByCircle"}})

    async def dealt_around() -> bool:
        owners_now = world.fleet.owners()
        return (
            world.shares(4, 4) and [owners_now[queue] for queue in sorted(owners_now)] == ["orders-a", "orders-b"] * 4
        )

    await soon(dealt_around)
    await soon(world.settled)
    status = await world.status()
    assert status["strategy"] == "AveragelyByCircle"
    assert status["lastRebalance"]["reason"] == "PolicyChanged"


# Brokers.


@pytest.mark.parametrize(
    ("away", "kinds", "sentence"),
    [
        (NAME_SERVER, ("BrokerUnreachable", "BrokerMetadataUnavailable"), "cannot be reached"),
        (BROKER, ("BrokerMetadataUnavailable",), "no metadata of"),
    ],
)
async def test_broker_failure_moves_only_the_queues_of_terminated_members(
    world: OperatedNamespace, memory: MemoryCluster, away: str, kinds: tuple[str, ...], sentence: str
) -> None:
    await follows(world, "Sticky")
    owners = await add_two_members(world)
    memory.take_down(away)
    assert sentence in (await world.wait_for_condition(kinds[0]))["message"]
    await world.fleet.add("orders-c")
    await soon(world.at_rest)
    assert world.fleet.owners() == owners
    kept_owners = {queue: owner for queue, owner in owners.items() if owner == "orders-b"}
    await world.fleet.members.pop("orders-a").kill()
    await world.wait_for_shares(4, 4)
    assert {queue: owner for queue, owner in world.fleet.owners().items() if queue in kept_owners} == kept_owners
    memory.bring_up(away)
    for kind in kinds:
        await world.wait_until_cleared(kind)
    await world.fleet.add("orders-d")
    await world.wait_for_shares(3, 3, 2)


async def test_broker_failure_affects_only_groups_of_that_broker(
    world: OperatedNamespace, memory: MemoryCluster
) -> None:
    await add_two_members(world)
    async with billing_group(world) as billing:
        memory.take_down(BROKER)
        await world.wait_for_condition("BrokerMetadataUnavailable")
        await assert_unaffected(billing)


async def test_broker_failure_of_the_name_server_is_reported_and_moves_no_queue(
    world: OperatedNamespace,
) -> None:
    owners = await add_two_members(world)
    async with billing_group(world) as billing:
        with closing(socket.socket()) as bound:  # bound, but not listening
            bound.bind(("127.0.0.1", 0))
            closed_address = "{}:{}".format(*bound.getsockname())
        await world.api.patch(world.path, {"spec": {"broker": {"rocketmq": {"nameServers": [closed_address]}}}})
        assert closed_address in (await world.wait_for_condition("BrokerUnreachable"))["message"]
        await assert_unaffected(billing)
        assert world.fleet.owners() == owners
        await world.api.patch(world.path, {"spec": {"broker": {"rocketmq": {"nameServers": ["memory:9876"]}}}})
        await world.wait_until_cleared("BrokerUnreachable")
        assert world.fleet.owners() == owners


async def test_topic_deletion_takes_no_queue_away_but_recreation_with_fewer_queues_does(
    world: OperatedNamespace, memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (planner, subscribed_queues):  # queues of a missing topic are kept even without a grace period
        monkeypatch.setattr(module, "SHRINK_PATIENCE_SECONDS", 0.0)
    owners = await add_two_members(world)
    await memory.delete_topic("orders")
    assert (await world.wait_for_condition("UnknownTopic"))["message"].startswith(
        "There is no topic orders; create the topic"
    )
    await world.fleet.add("orders-c")
    await soon(world.at_rest)
    assert world.fleet.owners() == owners
    await memory.create_topic("orders", BROKER, 6)
    await world.wait_for_shares(2, 2, 2)
    await world.wait_until_cleared("UnknownTopic")
    await soon(world.settled)
    assert (await world.status())["queues"] == 6


async def test_credentials_secret_that_is_created_or_changed_is_picked_up(world: OperatedNamespace) -> None:
    owners = await add_two_members(world)
    secrets = f"/api/v1/namespaces/{world.namespace}/secrets"
    broker = {"nameServers": ["memory:9876"], "credentialsSecret": {"name": "acl"}}
    await world.api.patch(world.path, {"spec": {"broker": {"rocketmq": broker}}})
    await world.wait_for_condition("MissingSecret")
    keys = {"accessKey": "one", "secretKey": "two"}
    await world.api.create(secrets, {"metadata": {"name": "acl"}, "stringData": keys})
    await world.wait_until_cleared("MissingSecret")

    async def connects_with(secret: str) -> bool:
        last = world.operator.connections[-1].credentials
        return last is not None and last().secret_key == secret

    await soon(lambda: connects_with("two"))
    await world.api.patch(f"{secrets}/acl", {"stringData": {"secretKey": "three"}})
    await soon(lambda: connects_with("three"))
    await world.api.patch(f"{secrets}/acl", {"data": {"secretKey": None}})
    assert (await world.wait_for_condition("MissingSecret"))["message"] == "Secret acl has no key secretKey; add it"
    assert world.fleet.owners() == owners


# Members: none, many, and those of other groups.


async def test_condition_no_members_is_set_at_once_when_the_last_member_leaves(world: OperatedNamespace) -> None:
    no_members = "The group has no member to consume 8 queues"
    assert (await world.wait_for_condition("Ready"))["message"] == "8 queues wait for the group's first member"
    await world.fleet.add("orders-a")
    await world.wait_for_shares(8)
    await world.fleet.members.pop("orders-a").kill()
    assert (await world.wait_for_condition("NoMembers"))["message"] == no_members
    ready = await world.wait_for_condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NoMembers")
    await world.fleet.add("orders-b")
    await world.wait_for_shares(8)
    await world.wait_until_cleared("NoMembers")


async def test_condition_no_members_of_a_new_group_is_set_after_a_grace_period_and_says_why_its_pods_do_not_run(
    world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "FIRST_MEMBER_SECONDS", 3.0)
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, "image": "", "imageID": ""}
    container = {"name": "app", "ready": False, "restartCount": 0, **waiting}
    pods = f"/api/v1/namespaces/{world.namespace}/pods"
    await world.api.create(pods, a_pod("orders-x", GROUP))
    await world.api.patch(f"{pods}/orders-x/status", {"status": {"containerStatuses": [container]}})
    problem = await world.wait_for_condition("NoMembers")
    assert (
        problem["message"] == "No member can consume 8 queues: orders-x does not run: ImagePullBackOff of container app"
    )


@pytest.mark.slow("500 pods that never start")
async def test_membership_500_pods_that_never_start_do_not_block_running_members(world: OperatedNamespace) -> None:
    pods = f"/api/v1/namespaces/{world.namespace}/pods"
    limit = asyncio.Semaphore(20)

    async def make(number: int) -> None:
        async with limit:
            await world.api.create(pods, a_pod(f"never-{number}", GROUP))

    await asyncio.gather(*map(make, range(500)))
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    await world.wait_for_counts(2, 502)
    await world.api.delete(pods, {"gracePeriodSeconds": 0}, labelSelector=f"rota.dev/group={GROUP}")


async def test_config_map_of_5000_members_is_accepted_by_the_api_server(
    world: OperatedNamespace,
) -> None:
    names = [f"many-7d9f8c6b5d-{number:05}" for number in range(5000)]
    ready = tuple(builders.a_pod(name, builders.a_report(name, 0)) for name in names)
    full_name = f"{world.namespace}/many"
    queues = {"orders": builders.a_view(10_000)}
    first_plan = plan(builders.a_snapshot(group=full_name, pods=ready, views=queues), NOW)
    group = Group(world.namespace, "many")
    group.body = CustomResource(Metadata("many", uid="many", namespace=world.namespace))
    written = await assignment_writer.write_document(world.operator.api, group, first_plan)
    document = decode_assignment(written.data.get(PLAIN_KEY) or written.binary_data[GZIP_KEY])
    assert {len(share.queues) for share in document.members.values()} == {2}
    assert [*document.members] == names


@pytest.mark.parametrize("label", [None, "billing"])
async def test_membership_change_of_the_pod_label_releases_queues_before_others_own_them(
    world: OperatedNamespace, label: str | None
) -> None:
    await add_two_members(world)
    relabelled = world.fleet.members["orders-a"]
    await world.api.patch(relabelled.path, {"metadata": {"labels": {"rota.dev/group": label}}})
    await world.wait_for_shares(8, 0)  # the fleet records an overlap if two members consume one queue
    await world.fleet.members.pop("orders-b").kill()  # the relabelled pod does not count as a member
    await world.wait_for_condition("NoMembers")


async def test_membership_pod_labelled_for_another_group_than_its_sidecar_gets_no_queue_there(
    world: OperatedNamespace,
) -> None:
    await add_two_members(world)
    async with billing_group(world) as billing:
        relabelled = world.fleet.members["orders-a"]
        await world.api.patch(relabelled.path, {"metadata": {"labels": {"rota.dev/group": "billing"}}})
        await billing.fleet.add("billing-c")
        await billing.wait_for_shares(2, 2, 2)
        assert "such as orders-a" in (await billing.wait_for_condition("NoSidecar"))["message"]


async def test_api_path_of_a_forged_member_in_another_namespace_is_neither_read_nor_kept(
    world: OperatedNamespace,
) -> None:
    """A tenant may edit the assignment; the pod in the other namespace exists, so it never counts as ended."""
    await add_two_members(world)
    async with a_namespace(world.api) as victims:
        victim = await world.api.create(f"/api/v1/namespaces/{victims}/pods", a_pod("victim", "other"))
        path = f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"
        document = decode_assignment((await world.api.get(path))["data"][PLAIN_KEY])
        shares = {name: Share(share.uid, share.queues[1:]) for name, share in document.members.items()}
        names = [f"../../{victims}/pods/victim", f"%2e%2e/%2e%2e/{victims}/pods/victim"]
        stolen_queues = [share.queues[:1] for share in document.members.values()]
        ghosts = {
            name: Share(victim["metadata"]["uid"], queues) for name, queues in zip(names, stolen_queues, strict=True)
        }
        generation = document.generation + 1
        forged = replace(document, generation=generation, members=shares | ghosts)
        await world.api.patch(path, {"data": {**encode_assignment(forged)}})

        async def is_planned_again() -> bool:
            return bool(world.fleet.documents and world.fleet.documents[-1]["generation"] > generation)

        async def is_removed() -> bool:  # by a later assignment: removing an entry without queues is not urgent
            return bool(world.fleet.documents[-1]["members"].keys() == {"orders-a", "orders-b"})

        await soon(is_planned_again)
        await world.wait_for_shares(4, 4)
        await world.soon(is_removed)
        await soon(world.settled)
    assert not [path for path in world.operator.api.reads if "victim" in path]


# The life of a group.


def test_crd_rejects_a_name_of_70_characters_with_a_sentence(control_plane: Cluster, namespace: str) -> None:
    body = json.dumps(a_group("a" * 70))
    with pytest.raises(RuntimeError) as rejected:
        control_plane.kubectl("apply", "-n", namespace, "-f", "-", feed=body)
    assert "metadata.name may have at most 63 characters" in str(rejected.value)


async def test_handover_of_a_deleted_group_writes_nothing_more(
    world: OperatedNamespace,
) -> None:
    await add_two_members(world)
    for pod in world.fleet.members.values():
        pod.drain_seconds = 60  # so the handover stays open
    async with billing_group(world) as billing:
        await world.fleet.add("orders-c")

        async def is_open() -> bool:
            return bool(world.fleet.documents[-1]["releasing"])

        await soon(is_open)
        await world.api.delete(world.path)
        record = f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"
        await soon(lambda: is_gone(world.api, record))

        async def is_deleted_for_operator() -> bool:
            """The API server may delete the ConfigMap before the operator observes the deletion of the group."""
            group = world.operator.controller.groups.get((world.namespace, GROUP))
            return group is None or group.body is None

        async def have_writes_ended() -> bool:
            return not world.operator.api.open_writes  # sent before the operator knew of the deletion

        await soon(is_deleted_for_operator)
        await soon(have_writes_ended)
        writes = [write for write in world.operator.api.writes if GROUP in write]
        events = len(await world.events())
        await assert_unaffected(billing)
        assert [write for write in world.operator.api.writes if GROUP in write] == writes
        assert len(await world.events()) == events
        assert await is_gone(world.api, record)


async def test_assignment_keeps_its_owners_when_the_group_is_recreated_over_running_pods(
    world: OperatedNamespace,
) -> None:
    owners = await add_two_members(world)
    generation = world.fleet.documents[-1]["generation"]
    deleted_group = await world.api.get(world.path)
    await world.api.delete(world.path)
    recreated_group = await world.api.create(world.path.rpartition("/")[0], a_group())
    assert recreated_group["metadata"]["uid"] != deleted_group["metadata"]["uid"]

    async def all_obeyed() -> bool:
        return all(pod.member.obeyed_generation > generation for pod in world.fleet.members.values())

    await soon(all_obeyed)
    await world.wait_until_cleared("ResourceConflict")
    assert world.fleet.owners() == owners
    record = await world.api.get(f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota")
    assert [reference["uid"] for reference in record["metadata"]["ownerReferences"]] == [
        recreated_group["metadata"]["uid"]
    ]
    await world.fleet.add("orders-c")
    await world.wait_for_shares(3, 3, 2)


@pytest.mark.timeout(400)
async def test_namespace_deletion_completes_and_another_namespace_is_still_served(
    control_plane: Cluster, api: Api, namespace: str, memory: MemoryCluster, addresses: Callable[[], str]
) -> None:
    created = await api.create("/api/v1/namespaces", {"metadata": {"generateName": "rota-doomed-"}})
    doomed = created["metadata"]["name"]
    async with (
        Operator(control_plane.kubeconfig, namespace, memory, more_namespaces=[doomed]) as operator,
        GroupMembers(api, namespace, GROUP, addresses) as fleet,
    ):
        world = OperatedNamespace(api, namespace, fleet, operator)
        await api.create(world.path.rpartition("/")[0], a_group())
        owners = await add_two_members(world)
        async with billing_group(world, doomed) as billing:
            await api.delete(f"/api/v1/namespaces/{doomed}")
            for pod in billing.fleet.members.values():
                await soon(partial(has_drained, pod))
                await pod.kill()  # as the kubelet does
            billing.fleet.members.clear()
            await soon(lambda: is_gone(api, f"/api/v1/namespaces/{doomed}"))
        assert (doomed, "billing") not in operator.controller.groups
        assert world.fleet.owners() == owners
        await fleet.add("orders-c")
        await world.wait_for_shares(3, 3, 2)


async def has_drained(pod: MemberPod) -> bool:
    return pod.member.report().is_drained
