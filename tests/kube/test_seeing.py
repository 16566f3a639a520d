"""What the operator shows of groups: lag, metrics, who owns what and why; on a real API server."""

import asyncio
from functools import partial

import pytest

from kube.scraped import scraped, series
from kube.world import OperatedNamespace, a_group, billing, two_members
from rota.brokers.memory import BROKER, MemoryCluster
from rota.kube.brokers.lag import lag_poller
from rota.kube.http.schema import Detail
from rota.kube.members import polling_schedule, report_poller
from rota.model import Queue

pytestmark = pytest.mark.usefixtures("crds", "node")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often than usual."""
    monkeypatch.setattr(lag_poller, "LAG_POLL_SECONDS", 0.1)
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.1)


def shown(world: OperatedNamespace) -> Detail:
    found = world.operator.sight.describe_group(world.namespace, world.fleet.group)
    assert found
    return found


async def sends(memory: MemoryCluster, queue: int, count: int) -> None:
    for _ in range(count):
        await memory.send("orders", b"it", queue=Queue("orders", BROKER, queue))


async def test_lag_is_reported_by_queue_by_topic_and_in_the_status(
    world: OperatedNamespace, memory: MemoryCluster
) -> None:
    await two_members(world)
    await sends(memory, 0, 120)
    await sends(memory, 1, 3)
    memory.committed_offsets["orders"] |= {Queue("orders", BROKER, number): 0 for number in range(8)}

    async def told() -> bool:
        return await scraped(world, "rota_group_lag", topic="orders") == [123]

    await world.soon(told)
    owner = world.fleet.as_value()[f"orders/{BROKER}/0"]
    assert await scraped(world, "rota_queue_lag", queue="0", member=owner) == [120]
    found = shown(world)
    assert (found.summary.lag, found.summary.estimate) == (123, False)
    assert [it.lag for it in found.queues if it.topic == "orders"] == [120, 3, 0, 0, 0, 0, 0, 0]

    async def written() -> bool:
        return (await world.status()).get("lag") == 120  # to two digits

    await world.soon(written)


async def test_broadcasting_lag_is_that_of_the_slowest_member(world: OperatedNamespace, memory: MemoryCluster) -> None:
    queues = [Queue("orders", BROKER, number) for number in range(8)]
    world.fleet.everyone = True
    await world.api.delete(world.path)  # the model of a group never changes
    await world.api.create(world.path.rpartition("/")[0], a_group(messageModel="Broadcasting"))
    await world.fleet.add("orders-a", "orders-b")
    await sends(memory, 0, 9)
    quick, slow = world.fleet.members.values()
    quick.offsets, slow.offsets = dict.fromkeys(queues, 0) | {queues[0]: 9}, dict.fromkeys(queues, 0) | {queues[0]: 2}
    brain = world.operator.brain
    hears = asyncio.create_task(report_poller.poll_reports(lambda: brain.groups, world.operator.reports, brain.enqueue))

    async def told(*lag: float) -> bool:
        return await scraped(world, "rota_group_lag", topic="orders") == [*lag]

    await world.soon(partial(told, 7))
    assert (shown(world).summary.lag, shown(world).summary.estimate, shown(world).summary.delay) == (7, True, None)
    slow.offsets = {}
    await world.soon(told)
    slow.offsets = dict.fromkeys(queues, 0) | {queues[0]: 8}
    await world.soon(partial(told, 1))
    hears.cancel()


async def test_metrics_and_api_show_a_rebalance_with_its_reason(world: OperatedNamespace) -> None:
    await two_members(world)
    await world.fleet.add("orders-c")
    await world.until(2, 3, 3)

    async def counted() -> bool:
        return sum(await scraped(world, "rota_rebalances_total", reason="MemberJoined", outcome="Settled")) >= 1

    await world.soon(counted)
    found = shown(world).rebalances[0]
    assert found.reason == "MemberJoined"
    assert "orders-c" in found.message
    assert [found.moved] == await scraped(world, "rota_queues_moved_total")
    assert found.seconds is not None
    assert found.longest is not None
    assert await scraped(world, "rota_queues_moved_total") >= [2]
    assert await scraped(world, "rota_handover_duration_seconds_count") == await scraped(
        world, "rota_queues_moved_total"
    )
    assert await scraped(world, "rota_members", state="Ready") == [3]
    assert await scraped(world, "rota_imbalance_ratio", by="queues") == [pytest.approx(3 / (8 / 3))]


async def test_metrics_of_a_deleted_group_are_removed(world: OperatedNamespace, memory: MemoryCluster) -> None:
    await memory.create_topic("bills", BROKER, 6)
    await two_members(world)
    async with billing(world) as other:
        await world.soon(partial(_is_shown, other))
        await world.api.delete(other.path)

        async def gone() -> bool:
            text = await world.operator.measures.render(world.operator.sight)
            return b"billing" not in text

        await world.soon(gone)
    assert await _is_shown(world)


async def _is_shown(world: OperatedNamespace) -> bool:
    return bool(await scraped(world, "rota_generation"))


async def test_metrics_of_a_standby_operator_have_no_groups(world: OperatedNamespace) -> None:
    await two_members(world)
    world.operator.brain.set_leading(is_leading=False)
    text = (await world.operator.measures.render(world.operator.sight)).decode()
    assert not [it for it in series(text) if "group" in it.labels]
    assert "rota_leader 0" in text.splitlines()
    assert shown(world).operator.leads is False
    assert {it.owner for it in shown(world).queues} == {"orders-a", "orders-b"}


async def test_explain_gives_the_reason_for_the_owner_of_a_queue(world: OperatedNamespace) -> None:
    await two_members(world)
    found = await world.operator.sight.explain(world.namespace, "orders", f"orders/{BROKER}/0")
    assert found
    assert [it.owner for it in found.queues] == ["orders-a"]
    assert "orders-a" in found.queues[0].why
    examples = await world.operator.sight.explain(world.namespace, "orders", None)
    assert examples
    assert {it.owner for it in examples.queues} == {"orders-a", "orders-b"}
    with pytest.raises(ValueError, match="TOPIC/BROKER/ID"):
        await world.operator.sight.explain(world.namespace, "orders", "orders-0")
    with pytest.raises(ValueError, match="no queue orders/memory/9"):
        await world.operator.sight.explain(world.namespace, "orders", f"orders/{BROKER}/9")
    assert await world.operator.sight.explain(world.namespace, "nobody", None) is None


async def test_condition_reports_a_problem_of_a_member_between_rebalances(world: OperatedNamespace) -> None:
    await two_members(world)
    await world.soon(world.at_rest)
    brain = world.operator.brain
    hears = asyncio.create_task(report_poller.poll_reports(lambda: brain.groups, world.operator.reports, brain.enqueue))
    said = "The app answers 404 to POST /; correct spec.delivery.push.path"
    world.fleet.members["orders-a"].troubles = {"AppPathNotFound": said}
    assert (await world.condition("AppPathNotFound"))["message"] == f"orders-a: {said}"
    assert (await world.condition("Degraded"))["reason"] == "AppPathNotFound"

    async def counted() -> bool:  # which is done after the status is written
        return await scraped(world, "rota_group_problem", reason="AppPathNotFound") == [1]

    await world.soon(counted)
    world.fleet.members["orders-a"].troubles = {}
    await world.well("AppPathNotFound")
    hears.cancel()
