"""Each reason in every place where people look for it: the group's status, its Events, and the journal."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pytest

from ground.api import Object
from kube.scraped import scraped
from kube.world import GROUP, OperatedNamespace, two_members
from rota import documents, planner
from rota.brokers.errors import RejectedError
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Membership
from rota.documents import PLAIN_KEY, _checksum, encode_assignment
from rota.kube.brokers import route_watcher
from rota.model import Queue
from rota.planner import situation
from rota.spec import Subscription

pytestmark = pytest.mark.usefixtures("crds", "node")

# Soon lost and soon out, so that a test need not wait; who cannot reach a broker has time to be ready again.
QUICK = {"handover": {"lostAfter": "1s"}, "triggers": {"debounce": "10ms", "unreadyGrace": "3s"}}

Step = Callable[[OperatedNamespace], Awaitable[None]]
Place = Callable[[OperatedNamespace, str], Awaitable[bool]]


class Refusing(MemoryCluster):
    """A cluster that may say no."""

    refuses = ""

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        if self.refuses:
            raise RejectedError(self.refuses)
        return await super().queues(topic)


@pytest.fixture
async def memory() -> Refusing:
    found = Refusing()
    await found.create_topic("orders", BROKER, 8)
    await found.create_topic("few", BROKER, 1)
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at brokers more often than usual, and believe at once that they have fewer queues."""
    monkeypatch.setattr(route_watcher, "ROUTE_POLL_SECONDS", 0.2)
    for room in (planner, situation):
        monkeypatch.setattr(room, "SHRINK_PATIENCE_SECONDS", 0.0)


# Where a reason is told.


async def as_last_rebalance(world: OperatedNamespace, reason: str) -> bool:
    """Whether the last rebalance was for it, and is over."""
    last = (await world.status()).get("lastRebalance") or {}
    return last.get("reason") == reason and "seconds" in last


async def as_condition(world: OperatedNamespace, reason: str) -> bool:
    return (await world.conditions()).get(reason, {}).get("status") == "True"


async def as_progress(world: OperatedNamespace, reason: str) -> bool:
    """Whether it is why nothing goes on, or why it goes on."""
    return (await world.conditions()).get("Progressing", {}).get("reason") == reason


async def as_event(world: OperatedNamespace, reason: str) -> bool:
    return any(one["reason"] == reason and one["message"] for one in await world.events())


async def in_plan(world: OperatedNamespace, reason: str) -> bool:
    """Whether the journal has a document that was written for it."""
    return any(line["kind"] == "plan" and line["reason"] == reason for line in journal(world))


async def in_verdict(world: OperatedNamespace, reason: str) -> bool:
    """Whether the journal has a condition that turned for it."""
    return any(line["kind"] == "verdict" and line["reason"] == reason for line in journal(world))


async def as_counted(world: OperatedNamespace, reason: str) -> bool:
    """Whether the metrics have a rebalance for it."""
    return sum(await scraped(world, "rota_rebalances_total", reason=reason)) > 0


async def as_problem(world: OperatedNamespace, reason: str) -> bool:
    """Whether the metrics have it among what is wrong."""
    return await scraped(world, "rota_group_problem", reason=reason) == [1]


async def as_held(world: OperatedNamespace, reason: str) -> bool:
    """Whether the metrics have it among what held queues back."""
    return sum(await scraped(world, "rota_gate_held_total", reason=reason)) > 0


def journal(world: OperatedNamespace) -> list[Object]:
    """Return what the operator has written down of the group, read as a file of it is read."""
    told = [line for done in world.operator.done for line in done.plan.journal_records]
    lines: list[Object] = [msgspec.json.decode(msgspec.json.encode(line)) for line in told]
    return [line for line in lines if line["group"] == f"{world.namespace}/{GROUP}"]


CAUSE = (as_last_rebalance, as_event, in_plan, as_counted)
WRONG = (as_condition, as_event, in_verdict, as_problem)
HELD = (as_progress, in_verdict, as_held)


class Row(NamedTuple):
    reason: str
    happens: Step
    told: Sequence[Place]
    mended: Step | None = None  # so that the next one finds the group well


async def told(world: OperatedNamespace, row: Row) -> None:
    """Let something happen, and wait until its reason is told in each place, where it was not before."""
    early = [place.__name__ for place in row.told if await place(world, row.reason)]
    assert not early, (row.reason, early)
    await row.happens(world)
    for place in row.told:
        try:
            await world.soon(partial(place, world, row.reason))
        except TimeoutError as error:
            error.add_note(f"{row.reason} is not told {place.__name__}: {journal(world)[-5:]}")
            raise
    if row.mended:
        await row.mended(world)


# What happens.


async def follows(world: OperatedNamespace, **spec: Any) -> None:
    """Make a policy what is said, and let the group follow it."""
    where = f"/apis/rota.dev/v1alpha1/namespaces/{world.namespace}/rebalancepolicies/rules"
    policy = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "rules"}}
    await world.api.patch(where, policy | {"spec": {"strategy": "Averagely", **QUICK, **spec}}, "apply")
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "rules"}}})


async def begins(world: OperatedNamespace, **spec: Any) -> None:
    """Let the group follow a policy, and have its first document written: pods that come before it are no news."""
    await world.condition("Ready")
    await follows(world, **spec)


def policy(**spec: Any) -> Step:
    return lambda world: follows(world, **spec)


def group(**spec: Any) -> Step:
    async def step(world: OperatedNamespace) -> None:
        await world.api.patch(world.path, {"spec": spec})

    return step


def comes(name: str) -> Step:
    """Let somebody come who reaches the broker."""

    async def step(world: OperatedNamespace) -> None:
        await world.fleet.add(name)
        world.fleet.members[name].reaches(memory=True)

    return step


async def comes_in(world: OperatedNamespace, name: str) -> None:
    """Wait until somebody has come and all is settled again."""
    await world.until(4, 4)
    await world.soon(partial(as_last_rebalance, world, "MemberJoined"))
    await world.soon(world.at_rest)
    assert len(world.fleet.worked_by(name)) == 4


async def leaves(world: OperatedNamespace) -> None:
    await world.fleet.members["orders-b"].leave()


async def has_left(world: OperatedNamespace) -> None:
    await world.fleet.members.pop("orders-b").end()
    await world.fleet.add("orders-c")
    await comes_in(world, "orders-c")


async def ends(world: OperatedNamespace) -> None:
    await world.fleet.members.pop("orders-c").end()


async def another(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-d")
    await comes_in(world, "orders-d")


async def is_unready(world: OperatedNamespace) -> None:
    await world.fleet.members["orders-d"].becomes(ready=False)


async def is_ready(world: OperatedNamespace) -> None:
    await world.fleet.members["orders-d"].becomes(ready=True)
    await comes_in(world, "orders-d")


async def reaches_nobody(world: OperatedNamespace) -> None:
    """Let somebody be heard who cannot reach a broker: it is heard while it is not ready."""
    lonely = world.fleet.members["orders-d"]
    lonely.reaches(memory=False)
    await lonely.becomes(ready=False)
    known = world.operator.brain.groups[world.namespace, GROUP].pods[lonely.name]

    async def heard() -> bool:
        return BROKER in known.cut_off_since

    await world.soon(heard)
    await lonely.becomes(ready=True)


async def reaches_all(world: OperatedNamespace) -> None:
    lonely = world.fleet.members["orders-d"]
    lonely.reaches(memory=True)
    await comes_in(world, lonely.name)


async def hangs(world: OperatedNamespace) -> None:
    """Let somebody be silent until its queues are taken; while its pod is there that is not over."""
    hung = world.fleet.members.pop("orders-d")
    await hung.hush()
    world.fleet.ended(hung.name)
    await hung.becomes(ready=False)
    await world.until(8)
    await hung.end()


def queues(number: int) -> Step:
    async def step(world: OperatedNamespace) -> None:
        memory = world.operator._memory
        await memory.delete_topic("orders")
        await memory.create_topic("orders", BROKER, number)

    return step


async def loses_its_record(world: OperatedNamespace) -> None:
    await world.api.delete(record(world))


def record(world: OperatedNamespace) -> str:
    return f"/api/v1/namespaces/{world.namespace}/configmaps/{GROUP}-rota"


def refuses(why: str) -> Step:
    async def step(world: OperatedNamespace) -> None:
        memory = world.operator._memory
        assert isinstance(memory, Refusing)
        memory.refuses = why

    return step


def schema(number: int) -> Step:
    """Let a record be one that another version has written."""

    async def step(world: OperatedNamespace) -> None:
        body = msgspec.json.decode((await world.api.get(record(world)))["data"][PLAIN_KEY])
        body |= {"schema": number}
        del body["sum"]
        text = msgspec.json.encode(body | {"sum": _checksum(body)}).decode()
        await world.api.patch(record(world), {"data": {PLAIN_KEY: text}})

    return step


def well(kind: str, step: Step) -> Step:
    """Mend something, and wait until it is told no more."""

    async def mended(world: OperatedNamespace) -> None:
        await step(world)
        await world.well(kind)

    return mended


ORDERS, FEW, LOST = ([{"topic": topic}] for topic in ("orders", "few", "lost"))
NOWHERE = {"strategy": "Custom", "options": {"custom": {"name": "nowhere"}}}
SINCE_YEAR_ZERO = {"position": "Timestamp", "timestamp": "0000-01-01T00:00:00Z"}  # a year that Python has not


async def nobody_releases(world: OperatedNamespace) -> None:
    async def so() -> bool:
        return not world.fleet.documents[-1]["releasing"]

    await world.soon(so)
    await world.soon(world.settled)


async def all_told(world: OperatedNamespace, *rows: Row) -> None:
    for row in rows:
        await told(world, row)


async def test_membership_changes_are_the_reason_in_status_event_and_journal(world: OperatedNamespace) -> None:
    await begins(world)
    await all_told(
        world,
        Row("FirstAssignment", comes("orders-a"), (as_last_rebalance, as_event)),  # of its first document, too
        Row("MemberJoined", comes("orders-b"), CAUSE),
        Row("MemberLeft", leaves, CAUSE, has_left),
        Row("MemberTerminated", ends, CAUSE, another),
        Row("MemberUnready", is_unready, CAUSE, is_ready),
        Row("BrokerUnreachable", reaches_nobody, CAUSE, reaches_all),
        Row("MemberLost", hangs, CAUSE),
    )
    assert await as_event(world, "QueuesForced")


async def test_queue_and_subscription_changes_are_the_reason_in_status_event_and_journal(
    world: OperatedNamespace,
) -> None:
    await begins(world)
    await two_members(world)
    await all_told(
        world,
        Row("QueuesAdded", queues(12), CAUSE),
        Row("QueuesRemoved", queues(6), CAUSE),
        Row("SubscriptionChanged", group(subscriptions=[*ORDERS, *FEW]), CAUSE),
        Row("IdleMembers", group(subscriptions=FEW), WRONG, well("IdleMembers", group(subscriptions=ORDERS))),
    )
    await world.until(3, 3)


async def test_spec_policy_and_assignment_changes_by_a_user_are_reported_as_the_reason(
    world: OperatedNamespace,
) -> None:
    await begins(world)
    await two_members(world)
    await all_told(
        world,
        Row("GroupPaused", group(paused=True), CAUSE, nobody_releases),  # else the next one is a part of it
        Row("GroupResumed", group(paused=False), CAUSE),
        Row("PolicyChanged", policy(strategy="AveragelyByCircle"), CAUSE),
        Row("SettingsChanged", group(delivery={"push": {"port": 9090}}), (in_plan,)),  # no queue moves
        Row("AssignmentLost", loses_its_record, (as_event, in_plan)),
    )
    assert world.shares(4, 4)


async def test_condition_event_and_journal_report_each_problem_and_no_queue_moves(
    world: OperatedNamespace,
) -> None:
    await begins(world)
    before = await two_members(world)
    await all_told(
        world,
        Row("MissingPolicy", group(policyRef={"name": "nowhere"}), WRONG, well("MissingPolicy", policy())),
        Row("StrategyFailed", policy(**NOWHERE), WRONG, well("StrategyFailed", policy())),
        Row("UnknownTopic", group(subscriptions=LOST), WRONG, well("UnknownTopic", group(subscriptions=ORDERS))),
        Row("BrokerRefuses", refuses("no right to read"), WRONG, well("BrokerRefuses", refuses(""))),
        Row("InvalidSpec", group(startFrom=SINCE_YEAR_ZERO), WRONG, well("InvalidSpec", group(startFrom=None))),
        Row("UnsupportedAssignment", schema(3), WRONG, well("UnsupportedAssignment", schema(1))),
    )
    assert world.fleet.as_value() == before


async def test_gate_that_holds_queues_is_reported_as_progress_and_in_the_journal(world: OperatedNamespace) -> None:
    await begins(world)
    before = await two_members(world)
    await follows(world, budget={"maxMoves": 0, "per": "1h"})  # not before: the second member would have no queue

    async def known() -> bool:
        policy = world.operator.brain.groups[world.namespace, GROUP].resolved_spec.policy
        return policy is not None and policy.budget is not None

    await world.soon(known)
    await all_told(world, Row("BudgetSpent", comes("orders-c"), HELD), Row("Paused", policy(paused=True), HELD))
    assert world.fleet.as_value() == before
    await follows(world)
    await world.until(3, 3, 2)


async def test_condition_assignment_too_large_is_reported_and_no_queue_moves(
    world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await two_members(world)
    monkeypatch.setattr(documents, "MAX_PLAIN_BYTES", 0)  # so that each is packed, and each is too long
    monkeypatch.setattr(planner, "encode_assignment", partial(encode_assignment, max_compressed_bytes=1))
    await told(world, Row("AssignmentTooLarge", comes("orders-c"), WRONG))
    assert world.fleet.as_value() == before
    monkeypatch.setattr(planner, "encode_assignment", encode_assignment)
    world.operator.brain.enqueue((world.namespace, GROUP))
    await world.until(3, 3, 2)
    await world.well("AssignmentTooLarge")


async def test_unmanaged_consumer_with_another_filter_is_reported_until_it_leaves(
    world: OperatedNamespace, memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_watcher, "MIN_CONSUMER_POLL_SECONDS", 0.2)
    monkeypatch.setattr(route_watcher, "MAX_CONSUMER_POLL_SECONDS", 0.2)
    await begins(world)
    await two_members(world)
    subscriptions = [Subscription("orders", "paid")]
    java = MemoryConsumer(memory, Membership(group=GROUP, client_id="10.0.0.9@java", subscriptions=subscriptions))

    async def joins(_: OperatedNamespace) -> None:
        await java.join()

    async def leaves_again(_: OperatedNamespace) -> None:
        await java.leave()

    reason = "SubscriptionMismatch"
    await told(world, Row(reason, joins, WRONG))
    found = (await world.conditions())[reason]["message"]
    assert found.endswith("10.0.0.9@java: its filter of orders is paid")
    await well(reason, leaves_again)(world)
