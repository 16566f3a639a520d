"""The whole of it: a real API server, operator, broker, sidecars and apps; only containers are processes."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ground.api import Api
from ground.controlplane import Cluster
from ground.local import LocalNode
from ground.rocketmq import RocketMQ
from kube.shop import Shop, a_shop
from kube.test_operator import an_operator

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
