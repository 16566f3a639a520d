"""Each reason in every place where users look for it: the status, Events, metrics and the journal."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pytest

from ground.api import Object
from kube.scraped import metric_values
from kube.world import GROUP, OperatedNamespace, add_two_members
from rota import documents, planner
from rota.brokers.errors import RejectedError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Membership
from rota.documents import PLAIN_KEY, _checksum, encode_assignment
from rota.kube.brokers import route_watcher
from rota.model import Queue
from rota.planner import subscribed_queues
from rota.spec import Subscription

pytestmark = pytest.mark.usefixtures("crds", "node")

# Short times, so that tests need not wait; a member without a broker has time to become ready again.
QUICK = {"handover": {"lostAfter": "1s"}, "triggers": {"debounce": "10ms", "unreadyGrace": "3s"}}

Step = Callable[[OperatedNamespace], Awaitable[None]]
Place = Callable[[OperatedNamespace, str], Awaitable[bool]]


class RejectingCluster(MemoryCluster):
    """A cluster that may reject requests."""

    rejection = ""

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        if self.rejection:
            raise RejectedError(self.rejection)
        return await super().queues(topic)


@pytest.fixture
async def memory() -> RejectingCluster:
    cluster = RejectingCluster()
    await cluster.create_topic("orders", BROKER, 8)
    await cluster.create_topic("few", BROKER, 1)
    return cluster


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll routes more often than by default, and accept fewer queues at once."""
    monkeypatch.setattr(route_watcher, "ROUTE_POLL_SECONDS", 0.2)
    for module in (planner, subscribed_queues):
        monkeypatch.setattr(module, "SHRINK_PATIENCE_SECONDS", 0.0)


# Places of a reason.


async def as_last_rebalance(world: OperatedNamespace, reason: str) -> bool:
    """Whether the last rebalance has this reason and has completed."""
    last = (await world.status()).get("lastRebalance") or {}
    return last.get("reason") == reason and "seconds" in last


async def as_condition(world: OperatedNamespace, reason: str) -> bool:
    return (await world.conditions()).get(reason, {}).get("status") == "True"


async def as_progress(world: OperatedNamespace, reason: str) -> bool:
    """Whether the condition Progressing has this reason."""
    return (await world.conditions()).get("Progressing", {}).get("reason") == reason


async def as_event(world: OperatedNamespace, reason: str) -> bool:
    return any(event["reason"] == reason and event["message"] for event in await world.events())


async def in_plan(world: OperatedNamespace, reason: str) -> bool:
    """Whether the journal has an assignment with this reason."""
    return any(line["kind"] == "plan" and line["reason"] == reason for line in journal(world))


async def in_verdict(world: OperatedNamespace, reason: str) -> bool:
    """Whether the journal has a change of a condition with this reason."""
    return any(line["kind"] == "verdict" and line["reason"] == reason for line in journal(world))


async def as_counted(world: OperatedNamespace, reason: str) -> bool:
    """Whether the metrics count a rebalance with this reason."""
    return sum(await metric_values(world, "rota_rebalances_total", reason=reason)) > 0


async def as_problem(world: OperatedNamespace, reason: str) -> bool:
    """Whether the metrics show this problem."""
    return await metric_values(world, "rota_group_problem", reason=reason) == [1]


async def as_held(world: OperatedNamespace, reason: str) -> bool:
    """Whether the metrics count queues that were held back for this reason."""
    return sum(await metric_values(world, "rota_gate_held_total", reason=reason)) > 0


def journal(world: OperatedNamespace) -> list[Object]:
    """Return the group's journal records, decoded from their JSON."""
    records = [line for result in world.operator.reconciles for line in result.plan.journal_records]
    decoded: list[Object] = [msgspec.json.decode(msgspec.json.encode(line)) for line in records]
    return [line for line in decoded if line["group"] == f"{world.namespace}/{GROUP}"]


CAUSE = (as_last_rebalance, as_event, in_plan, as_counted)
WRONG = (as_condition, as_event, in_verdict, as_problem)
HELD = (as_progress, in_verdict, as_held)


class Row(NamedTuple):
    reason: str
    cause: Step
    places: Sequence[Place]
    repair: Step | None = None  # leaves the group healthy for the next row


async def check_row(world: OperatedNamespace, row: Row) -> None:
    """Cause the reason, and wait until it is in each place; before, it must be in none."""
    early = [place.__name__ for place in row.places if await place(world, row.reason)]
    assert not early, (row.reason, early)
    await row.cause(world)
    for place in row.places:
        try:
            await world.soon(partial(place, world, row.reason))
        except TimeoutError as error:
            error.add_note(f"{row.reason} is missing {place.__name__}: {journal(world)[-5:]}")
            raise
    if row.repair:
        await row.repair(world)


# Causes.


async def set_policy(world: OperatedNamespace, **spec: Any) -> None:
    """Create or change the policy, and set it in the group."""
    path = f"/apis/rota.dev/v1alpha1/namespaces/{world.namespace}/rebalancepolicies/rules"
    policy = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "rules"}}
    await world.api.patch(path, policy | {"spec": {"strategy": "Averagely", **QUICK, **spec}}, "apply")
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "rules"}}})


async def wait_and_set_policy(world: OperatedNamespace, **spec: Any) -> None:
    """Set the policy, after the first assignment was written: pods of a group without one cause no MemberJoined."""
    await world.wait_for_condition("Ready")
    await set_policy(world, **spec)


def policy(**spec: Any) -> Step:
    return lambda world: set_policy(world, **spec)


def group(**spec: Any) -> Step:
    async def step(world: OperatedNamespace) -> None:
        await world.api.patch(world.path, {"spec": spec})

    return step


def add_member(name: str) -> Step:
    """Add a member that reaches the broker."""

    async def step(world: OperatedNamespace) -> None:
        await world.fleet.add(name)
        world.fleet.members[name].set_broker_reachability(memory=True)

    return step


async def wait_for_member(world: OperatedNamespace, name: str) -> None:
    """Wait until a member has its queues and all is settled again."""
    await world.wait_for_shares(4, 4)
    await world.soon(partial(as_last_rebalance, world, "MemberJoined"))
    await world.soon(world.at_rest)
    assert len(world.fleet.queues_of(name)) == 4


async def delete_member_pod(world: OperatedNamespace) -> None:
    await world.fleet.members["orders-b"].delete_pod()


async def replace_deleted_member(world: OperatedNamespace) -> None:
    await world.fleet.members.pop("orders-b").kill()
    await world.fleet.add("orders-c")
    await wait_for_member(world, "orders-c")


async def kill_member(world: OperatedNamespace) -> None:
    await world.fleet.members.pop("orders-c").kill()


async def replace_killed_member(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-d")
    await wait_for_member(world, "orders-d")


async def become_unready(world: OperatedNamespace) -> None:
    await world.fleet.members["orders-d"].write_status(ready=False)


async def become_ready(world: OperatedNamespace) -> None:
    await world.fleet.members["orders-d"].write_status(ready=True)
    await wait_for_member(world, "orders-d")


async def lose_broker(world: OperatedNamespace) -> None:
    """Let a member report that it cannot reach the broker; the report arrives while the member is unready."""
    lonely = world.fleet.members["orders-d"]
    lonely.set_broker_reachability(memory=False)
    await lonely.write_status(ready=False)
    pod_state = world.operator.controller.groups[world.namespace, GROUP].pods[lonely.name]

    async def is_reported() -> bool:
        return BROKER in pod_state.cut_off_since

    await world.soon(is_reported)
    await lonely.write_status(ready=True)


async def reach_broker_again(world: OperatedNamespace) -> None:
    lonely = world.fleet.members["orders-d"]
    lonely.set_broker_reachability(memory=True)
    await wait_for_member(world, lonely.name)


async def hang(world: OperatedNamespace) -> None:
    """Let a member be unreachable until its queues are moved; it stays unreachable while its pod exists."""
    hung = world.fleet.members.pop("orders-d")
    await hung.stop_server()
    world.fleet.mark_ended(hung.name)
    await hung.write_status(ready=False)
    await world.wait_for_shares(8)
    await hung.kill()


def resize_topic(number: int) -> Step:
    async def step(world: OperatedNamespace) -> None:
        memory = world.operator._memory
        await memory.delete_topic("orders")
        await memory.create_topic("orders", BROKER, number)

    return step


async def delete_assignment(world: OperatedNamespace) -> None:
    await world.api.delete(assignment_path(world))


def assignment_path(world: OperatedNamespace) -> str:
    return f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"


def reject_queries(message: str) -> Step:
    async def step(world: OperatedNamespace) -> None:
        memory = world.operator._memory
        assert isinstance(memory, RejectingCluster)
        memory.rejection = message

    return step


def set_schema(number: int) -> Step:
    """Rewrite the stored assignment with the schema number of another version."""

    async def step(world: OperatedNamespace) -> None:
        body = msgspec.json.decode((await world.api.get(assignment_path(world)))["data"][PLAIN_KEY])
        body |= {"schema": number}
        del body["sum"]
        text = msgspec.json.encode(body | {"sum": _checksum(body)}).decode()
        await world.api.patch(assignment_path(world), {"data": {PLAIN_KEY: text}})

    return step


def cleared_by(kind: str, step: Step) -> Step:
    """Repair the group, and wait until the condition is cleared."""

    async def repair(world: OperatedNamespace) -> None:
        await step(world)
        await world.wait_until_cleared(kind)

    return repair


ORDERS, FEW, LOST = ([{"topic": topic}] for topic in ("orders", "few", "lost"))
NOWHERE = {"strategy": "Custom", "options": {"custom": {"name": "nowhere"}}}
SINCE_YEAR_ZERO = {"position": "Timestamp", "timestamp": "0000-01-01T00:00:00Z"}  # a year that Python does not support


async def wait_for_releases(world: OperatedNamespace) -> None:
    """Wait until no queue is being released, and the status of that assignment says that the rebalance is over."""

    async def is_over() -> bool:
        newest, status = world.fleet.documents[-1], await world.status()
        is_current = status.get("generation") == newest["generation"]
        return is_current and not newest["releasing"] and "seconds" in status["lastRebalance"]

    await world.soon(is_over)


async def check_rows(world: OperatedNamespace, *rows: Row) -> None:
    for row in rows:
        await check_row(world, row)


async def test_membership_changes_are_the_reason_in_status_event_and_journal(world: OperatedNamespace) -> None:
    await wait_and_set_policy(world)
    await check_rows(
        world,
        # The journal and metrics have this reason already: the first assignment was written for it.
        Row("FirstAssignment", add_member("orders-a"), (as_last_rebalance, as_event)),
        Row("MemberJoined", add_member("orders-b"), CAUSE),
        Row("MemberLeft", delete_member_pod, CAUSE, replace_deleted_member),
        Row("MemberTerminated", kill_member, CAUSE, replace_killed_member),
        Row("MemberUnready", become_unready, CAUSE, become_ready),
        Row("BrokerUnreachable", lose_broker, CAUSE, reach_broker_again),
        Row("MemberLost", hang, CAUSE),
    )
    assert await as_event(world, "QueuesForced")


async def test_queue_and_subscription_changes_are_the_reason_in_status_event_and_journal(
    world: OperatedNamespace,
) -> None:
    await wait_and_set_policy(world)
    await add_two_members(world)
    await check_rows(
        world,
        Row("QueuesAdded", resize_topic(12), CAUSE),
        Row("QueuesRemoved", resize_topic(6), CAUSE),
        Row("SubscriptionChanged", group(subscriptions=[*ORDERS, *FEW]), CAUSE),
        Row("IdleMembers", group(subscriptions=FEW), WRONG, cleared_by("IdleMembers", group(subscriptions=ORDERS))),
    )
    await world.wait_for_shares(3, 3)


async def test_spec_policy_and_assignment_changes_by_a_user_are_reported_as_the_reason(
    world: OperatedNamespace,
) -> None:
    await wait_and_set_policy(world)
    await add_two_members(world)
    await check_rows(
        world,
        # The releases must be complete: otherwise GroupResumed would be part of the same rebalance.
        Row("GroupPaused", group(paused=True), CAUSE, wait_for_releases),
        Row("GroupResumed", group(paused=False), CAUSE),
        Row("PolicyChanged", policy(strategy="AveragelyByCircle"), CAUSE),
        Row("SettingsChanged", group(delivery={"push": {"port": 9090}}), (in_plan,)),  # no queue moves
        Row("AssignmentLost", delete_assignment, (as_event, in_plan)),
    )
    assert world.shares(4, 4)


async def test_condition_event_and_journal_report_each_problem_and_no_queue_moves(
    world: OperatedNamespace,
) -> None:
    await wait_and_set_policy(world)
    owners = await add_two_members(world)
    await check_rows(
        world,
        Row("MissingPolicy", group(policyRef={"name": "nowhere"}), WRONG, cleared_by("MissingPolicy", policy())),
        Row("StrategyFailed", policy(**NOWHERE), WRONG, cleared_by("StrategyFailed", policy())),
        Row("UnknownTopic", group(subscriptions=LOST), WRONG, cleared_by("UnknownTopic", group(subscriptions=ORDERS))),
        Row(
            "BrokerRefuses", reject_queries("no right to read"), WRONG, cleared_by("BrokerRefuses", reject_queries(""))
        ),
        Row("InvalidSpec", group(startFrom=SINCE_YEAR_ZERO), WRONG, cleared_by("InvalidSpec", group(startFrom=None))),
        Row("UnsupportedAssignment", set_schema(3), WRONG, cleared_by("UnsupportedAssignment", set_schema(1))),
    )
    assert world.fleet.owners() == owners


async def test_gate_that_holds_queues_is_reported_as_progress_and_in_the_journal(world: OperatedNamespace) -> None:
    await wait_and_set_policy(world)
    owners = await add_two_members(world)
    await set_policy(world, budget={"maxMoves": 0, "per": "1h"})  # not earlier: the second member would have no queue

    async def has_budget() -> bool:
        policy = world.operator.controller.groups[world.namespace, GROUP].resolved_spec.policy
        return policy is not None and policy.budget is not None

    await world.soon(has_budget)
    await check_rows(world, Row("BudgetSpent", add_member("orders-c"), HELD), Row("Paused", policy(paused=True), HELD))
    assert world.fleet.owners() == owners
    await set_policy(world)
    await world.wait_for_shares(3, 3, 2)


async def test_condition_assignment_too_large_is_reported_and_no_queue_moves(
    world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = await add_two_members(world)
    monkeypatch.setattr(documents, "MAX_PLAIN_BYTES", 0)  # each assignment is compressed, and each is too large
    monkeypatch.setattr(planner, "encode_assignment", partial(encode_assignment, max_compressed_bytes=1))
    await check_row(world, Row("AssignmentTooLarge", add_member("orders-c"), WRONG))
    assert world.fleet.owners() == owners
    monkeypatch.setattr(planner, "encode_assignment", encode_assignment)
    world.operator.controller.queue.enqueue((world.namespace, GROUP))
    await world.wait_for_shares(3, 3, 2)
    await world.wait_until_cleared("AssignmentTooLarge")


async def test_unmanaged_consumer_with_another_filter_is_reported_until_it_leaves(
    world: OperatedNamespace, memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_watcher, "MIN_CONSUMER_POLL_SECONDS", 0.2)
    monkeypatch.setattr(route_watcher, "MAX_CONSUMER_POLL_SECONDS", 0.2)
    await wait_and_set_policy(world)
    await add_two_members(world)
    subscriptions = [Subscription("orders", "paid")]
    java = MemoryConsumer(memory, Membership(group=GROUP, client_id="10.0.0.9@java", subscriptions=subscriptions))

    async def joins(_: OperatedNamespace) -> None:
        await java.join()

    async def java_leaves(_: OperatedNamespace) -> None:
        await java.leave()

    reason = "SubscriptionMismatch"
    await check_row(world, Row(reason, joins, WRONG))
    message = (await world.conditions())[reason]["message"]
    assert message.endswith("10.0.0.9@java: its filter of orders is paid")
    await cleared_by(reason, java_leaves)(world)
