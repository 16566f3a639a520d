"""The operator shows groups, on a real API server: lag, metrics, owners and their reasons."""

import asyncio
from functools import partial

import pytest

from kube.scraped import metric_values, parse_series
from kube.world import OperatedNamespace, a_group, add_two_members, billing_group
from rota.brokers.memory import BROKER, MemoryCluster
from rota.kube.brokers.lag import lag_poller
from rota.kube.http.schema import GroupDetail
from rota.kube.members import polling_schedule, report_poller
from rota.model import Queue

pytestmark = pytest.mark.usefixtures("crds", "node")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll more often than by default."""
    monkeypatch.setattr(lag_poller, "LAG_POLL_SECONDS", 0.1)
    monkeypatch.setattr(polling_schedule, "STEP_SECONDS", 0.1)


def group_detail(world: OperatedNamespace) -> GroupDetail:
    detail = world.operator.read_model.describe_group(world.namespace, world.fleet.group)
    assert detail
    return detail


async def send_messages(memory: MemoryCluster, queue: int, count: int) -> None:
    for _ in range(count):
        await memory.send("orders", b"it", queue=Queue("orders", BROKER, queue))


async def test_lag_is_reported_by_queue_by_topic_and_in_the_status(
    world: OperatedNamespace, memory: MemoryCluster
) -> None:
    await add_two_members(world)
    await send_messages(memory, 0, 120)
    await send_messages(memory, 1, 3)
    memory.groups.committed_offsets["orders"] |= {Queue("orders", BROKER, number): 0 for number in range(8)}

    async def has_metric() -> bool:
        return await metric_values(world, "rota_group_lag", topic="orders") == [123]

    await world.soon(has_metric)
    owner = world.fleet.owners()[f"orders/{BROKER}/0"]
    assert await metric_values(world, "rota_queue_lag", queue="0", member=owner) == [120]
    detail = group_detail(world)
    assert (detail.summary.lag, detail.summary.estimate) == (123, False)
    assert [queue.lag for queue in detail.queues if queue.topic == "orders"] == [120, 3, 0, 0, 0, 0, 0, 0]

    async def written() -> bool:
        return (await world.status()).get("lag") == 120  # rounded to two digits

    await world.soon(written)


async def test_broadcasting_lag_is_that_of_the_slowest_member(world: OperatedNamespace, memory: MemoryCluster) -> None:
    queues = [Queue("orders", BROKER, number) for number in range(8)]
    world.fleet.is_broadcasting = True
    await world.api.delete(world.path)  # spec.messageModel is immutable
    await world.api.create(world.path.rpartition("/")[0], a_group(messageModel="Broadcasting"))
    await world.fleet.add("orders-a", "orders-b")
    await send_messages(memory, 0, 9)
    quick, slow = world.fleet.members.values()
    quick.offsets = dict.fromkeys(queues, 0) | {queues[0]: 9}
    slow.offsets = dict.fromkeys(queues, 0) | {queues[0]: 2}
    controller = world.operator.controller
    polling = asyncio.create_task(
        report_poller.poll_reports(lambda: controller.groups, world.operator.reports, controller.queue.enqueue)
    )

    async def has_lag(*lag: float) -> bool:
        return await metric_values(world, "rota_group_lag", topic="orders") == [*lag]

    await world.soon(partial(has_lag, 7))
    summary = group_detail(world).summary
    assert (summary.lag, summary.estimate, summary.delay) == (7, True, None)
    slow.offsets = {}
    await world.soon(has_lag)
    slow.offsets = dict.fromkeys(queues, 0) | {queues[0]: 8}
    await world.soon(partial(has_lag, 1))
    polling.cancel()


async def test_metrics_and_api_show_a_rebalance_with_its_reason(world: OperatedNamespace) -> None:
    await add_two_members(world)
    await world.fleet.add("orders-c")
    await world.wait_for_shares(2, 3, 3)

    async def counted() -> bool:
        return sum(await metric_values(world, "rota_rebalances_total", reason="MemberJoined", outcome="Settled")) >= 1

    await world.soon(counted)
    rebalance = group_detail(world).rebalances[0]
    assert rebalance.reason == "MemberJoined"
    assert "orders-c" in rebalance.message
    assert [rebalance.moved] == await metric_values(world, "rota_queues_moved_total")
    assert rebalance.seconds is not None
    assert rebalance.longest is not None
    assert await metric_values(world, "rota_queues_moved_total") >= [2]
    assert await metric_values(world, "rota_handover_duration_seconds_count") == await metric_values(
        world, "rota_queues_moved_total"
    )
    assert await metric_values(world, "rota_members", state="Ready") == [3]
    assert await metric_values(world, "rota_imbalance_ratio", by="queues") == [pytest.approx(3 / (8 / 3))]


async def test_metrics_of_a_deleted_group_are_removed(world: OperatedNamespace, memory: MemoryCluster) -> None:
    await memory.create_topic("bills", BROKER, 6)
    await add_two_members(world)
    async with billing_group(world) as billing:
        await world.soon(partial(_is_shown, billing))
        await world.api.delete(billing.path)

        async def is_removed() -> bool:
            text = await world.operator.metrics.render(world.operator.read_model)
            return b"billing" not in text

        await world.soon(is_removed)
    assert await _is_shown(world)


async def _is_shown(world: OperatedNamespace) -> bool:
    return bool(await metric_values(world, "rota_generation"))


async def test_metrics_of_a_standby_operator_have_no_groups(world: OperatedNamespace) -> None:
    await add_two_members(world)
    world.operator.controller.set_leading(is_leading=False)
    text = (await world.operator.metrics.render(world.operator.read_model)).decode()
    assert not [series for series in parse_series(text) if "group" in series.labels]
    assert "rota_leader 0" in text.splitlines()
    assert group_detail(world).operator.leads is False
    assert {queue.owner for queue in group_detail(world).queues} == {"orders-a", "orders-b"}


async def test_explain_gives_the_reason_for_the_owner_of_a_queue(world: OperatedNamespace) -> None:
    await add_two_members(world)
    explanations = await world.operator.read_model.explain(world.namespace, "orders", f"orders/{BROKER}/0")
    assert explanations
    assert [queue.owner for queue in explanations.queues] == ["orders-a"]
    assert "orders-a" in explanations.queues[0].why
    examples = await world.operator.read_model.explain(world.namespace, "orders", None)
    assert examples
    assert {queue.owner for queue in examples.queues} == {"orders-a", "orders-b"}
    with pytest.raises(ValueError, match="TOPIC/BROKER/ID"):
        await world.operator.read_model.explain(world.namespace, "orders", "orders-0")
    with pytest.raises(ValueError, match="no queue orders/memory/9"):
        await world.operator.read_model.explain(world.namespace, "orders", f"orders/{BROKER}/9")
    assert await world.operator.read_model.explain(world.namespace, "nobody", None) is None


async def test_condition_reports_a_problem_of_a_member_between_rebalances(world: OperatedNamespace) -> None:
    await add_two_members(world)
    await world.soon(world.at_rest)
    controller = world.operator.controller
    polling = asyncio.create_task(
        report_poller.poll_reports(lambda: controller.groups, world.operator.reports, controller.queue.enqueue)
    )
    sentence = "The app answers 404 to POST /; correct spec.delivery.push.path"
    world.fleet.members["orders-a"].troubles = {"AppPathNotFound": sentence}
    assert (await world.wait_for_condition("AppPathNotFound"))["message"] == f"orders-a: {sentence}"
    assert (await world.wait_for_condition("Degraded"))["reason"] == "AppPathNotFound"

    async def counted() -> bool:  # metrics follow the status
        return await metric_values(world, "rota_group_problem", reason="AppPathNotFound") == [1]

    await world.soon(counted)
    world.fleet.members["orders-a"].troubles = {}
    await world.wait_until_cleared("AppPathNotFound")
    polling.cancel()
