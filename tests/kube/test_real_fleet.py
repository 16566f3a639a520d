"""The whole of it: a real API server, operator, broker, sidecars and apps; only containers are processes."""

import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ground.api import Api
from ground.controlplane import Cluster
from ground.local import LocalNode
from ground.rocketmq import RocketMQ
from kube.shop import GROUP, Shop, a_shop
from kube.test_operator import an_operator

IN_FLIGHT = 16  # messages that are at an app at most, as long as its group does not say otherwise

pytestmark = [pytest.mark.usefixtures("crds", "operator"), pytest.mark.timeout(600)]


@pytest.fixture
async def operator(
    control_plane: Cluster, namespace: str, addresses: Callable[[], str], tmp_path: Path
) -> AsyncIterator[None]:
    async with an_operator(control_plane.kubeconfig, namespace, addresses(), tmp_path / "operator.log"):
        yield


@pytest.fixture
async def shop(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> AsyncIterator[Shop]:
    async with a_shop(api, namespace, rocketmq, local_node, tmp_path) as made:
        yield made


async def test_nothing_is_lost_and_nothing_comes_twice_while_a_fleet_grows_is_replaced_and_shrinks(shop: Shop) -> None:
    await shop.works(2)
    async with shop.sending():
        await shop.scale(3)
        await shop.works(3)
        before = {it["metadata"]["name"] for it in await shop.pods()}
        restart = {"spec": {"template": {"metadata": {"annotations": {"restarted": "now"}}}}}
        await shop.api.patch(shop.path, restart)

        async def replaced() -> bool:
            return before.isdisjoint({it["metadata"]["name"] for it in await shop.pods()})

        await shop.soon(replaced, 120)
        await shop.works(3)
        await shop.scale(1)
        await shop.works(1)
    assert {number for number, times in shop.deliveries().items() if times > 1} == set()


async def test_what_befalls_brokers_and_members_is_told_as_the_cause(
    shop: Shop, rocketmq: RocketMQ, local_node: LocalNode
) -> None:
    await shop.works(2)
    async with shop.sending():
        rocketmq.create_topic("refunds", 4)
        await shop.api.patch(shop.path, {"spec": {"subscriptions": [{"topic": GROUP}, {"topic": "refunds"}]}})
        await shop.moved_for("SubscriptionChanged")
        rocketmq.create_topic("refunds", 8)
        await shop.moved_for("QueuesAdded")
        rocketmq.create_topic("refunds", 2)
        await shop.moved_for("QueuesRemoved")
        hung = min(it["metadata"]["name"] for it in await shop.pods())
        local_node.signal(shop.namespace, hung, signal.SIGSTOP)
        try:
            await shop.moved_for("MemberUnready", "MemberLost")  # for it is neither ready nor heard: either is so first
            await shop.soon(lambda: shop.has_event("QueuesForced"))
        finally:
            local_node.signal(shop.namespace, hung, signal.SIGCONT)
        await shop.moved_for("MemberJoined")
        await shop.works(2)
    assert sum(times > 1 for times in shop.deliveries().values()) <= IN_FLIGHT
