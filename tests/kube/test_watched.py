"""A real fleet, watched: what dashboards ask of a real Prometheus, what mqadmin says of lag, what the commands print.

One fleet serves all of it, for it takes a while to stand up: it is paused and falls behind, catches up, grows, and
loses a member.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ground.api import Api
from ground.controlplane import Cluster
from ground.instance import Instance
from ground.local import LocalNode
from ground.poll import soon
from ground.prometheus import Prometheus
from ground.rocketmq import RocketMQ
from kube.panels import expressions
from kube.shop import GROUP, QUEUES, Shop, a_shop
from kube.test_operator import an_operator
from rota.kube.shown import Detail
from rota.model import Queue

BOARDS = sorted((Path(__file__).parents[2] / "charts/rota/dashboards").glob("*.json"))

pytestmark = [pytest.mark.usefixtures("crds"), pytest.mark.timeout(900)]


@dataclass
class Watched:
    """A fleet, its operator's address, and a Prometheus that scrapes both."""

    shop: Shop
    operator: str
    prometheus: Prometheus
    rocketmq: RocketMQ

    async def detail(self) -> Detail:
        """Return what the operator shows of the group."""
        where = f"{self.operator}/v1/groups/{self.shop.namespace}/{GROUP}"
        async with aiohttp.ClientSession() as session, session.get(where) as answer:
            return msgspec.json.decode(await answer.read(), type=Detail)

    async def scrape(self) -> None:
        """Scrape the operator and the sidecars that there are now."""
        pods = [f"{address}:9911" for it in await self.shop.pods() if (address := it["status"].get("podIP"))]
        ours = [self.operator.removeprefix("http://")]
        self.prometheus.scrape(ours, pods, namespace=self.shop.namespace, group=GROUP)  # as a PodMonitor adds them

    async def rota(self, *arguments: str) -> str:
        """Run a command of ours."""
        argv = [sys.executable, "-m", "rota.cli", *arguments, "--operator", self.operator]
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
        assert process.returncode == 0
        return printed.decode()


@pytest.fixture
async def watched(  # noqa: PLR0917 - fixtures have names
    api: Api,
    instance: Instance,
    control_plane: Cluster,
    namespace: str,
    rocketmq: RocketMQ,
    local_node: LocalNode,
    addresses: Callable[[], str],
    tmp_path: Path,
) -> AsyncIterator[Watched]:
    address = addresses()
    async with (
        an_operator(control_plane.kubeconfig, namespace, address, tmp_path / "operator.log"),
        a_shop(api, namespace, rocketmq, local_node, tmp_path) as shop,
    ):
        prometheus = Prometheus(instance, [f"{address}:8080"])
        await asyncio.to_thread(prometheus.up)
        yield Watched(shop, f"http://{address}:8080", prometheus, rocketmq)
        prometheus.down()


async def test_a_fleet_is_seen_as_it_is(watched: Watched) -> None:
    await watched.shop.works(2)
    await _lag_agrees_with_mqadmin(watched)
    await _commands_print_it(watched)
    await _every_panel_has_data(watched)


async def _lag_agrees_with_mqadmin(watched: Watched) -> None:
    """Let a group fall behind, by another number of messages in each queue; and see that all say the same."""
    shop = watched.shop
    async with shop.sending():
        pass
    await shop.api.patch(shop.path, {"spec": {"paused": True}})

    async def released() -> bool:
        return {it.state for it in (await watched.detail()).queues} == {"Free"}

    await shop.soon(released)
    broker = watched.rocketmq.brokers[0].name
    for number in range(QUEUES):
        for _ in range(number + 1):
            shop.sent += 1
            await shop.brokers.send(GROUP, b"%d" % shop.sent, queue=Queue(GROUP, broker, number))

    async def behind() -> bool:
        found = {it.id: it.lag for it in (await watched.detail()).queues if it.topic == GROUP}
        return found == {number: number + 1 for number in range(QUEUES)}

    await shop.soon(behind)
    printed = await asyncio.to_thread(watched.rocketmq.mqadmin, "consumerProgress", "-g", GROUP)
    rows = [line.split() for line in printed.splitlines() if line.startswith(f"{GROUP} ")]
    theirs = {int(row[2]): (int(row[3]), int(row[4]), int(row[5])) for row in rows}
    found = await watched.detail()
    assert {it.id: (it.last, it.committed, it.lag) for it in found.queues if it.topic == GROUP} == theirs, printed
    assert found.summary.lag == sum(range(QUEUES + 1))


async def _commands_print_it(watched: Watched) -> None:
    group = f"{watched.shop.namespace}/{GROUP}"
    told = json.loads(await watched.rota("lag", group, "-o", "json"))
    assert sum(it["lag"] for it in told["queues"] if it["topic"] == GROUP) == sum(range(QUEUES + 1))
    printed = await watched.rota("status", group)
    assert "GroupPaused" in printed
    assert str(sum(range(QUEUES + 1))) in printed
    await watched.shop.api.patch(watched.shop.path, {"spec": {"paused": False}})
    await watched.shop.works(2)
    await watched.shop.soon(watched.shop.delivered_all, 90)
    pods = {it["metadata"]["name"] for it in await watched.shop.pods()}
    members = json.loads(await watched.rota("members", group, "-o", "json"))["members"]
    assert {it["name"] for it in members} == pods
    assert {it["origin"] for it in members} == {"Rota"}
    assert {it["language"] for it in members} == {"PYTHON"}
    assert sum(it["queues"] for it in members) == QUEUES + 1  # with the one for retries
    why = await watched.rota("explain", group, f"{GROUP}/{watched.rocketmq.brokers[0].name}/0")
    assert any(name in why for name in pods)
    assert "GroupResumed" in why


async def _every_panel_has_data(watched: Watched) -> None:
    """Rebalance under load, and ask Prometheus everything that any panel of any board asks."""
    shop = watched.shop
    await shop.scale(0)

    async def wrong() -> list[dict[str, Any]]:
        return await asyncio.to_thread(watched.prometheus.query, 'rota_group_problem{reason="NoMembers"}')

    await shop.soon(wrong)
    await shop.scale(2)
    await shop.works(2)
    await watched.scrape()
    async with shop.sending():
        await shop.scale(3)
        await shop.works(3)
        await watched.scrape()
        victim = (await shop.pods())[0]["metadata"]["name"]
        await shop.api.delete(f"{shop.pods_path}/{victim}", {"gracePeriodSeconds": 0})
        await shop.works(3)
        await watched.scrape()
        values = {"datasource": "ground", "namespace": shop.namespace, "group": GROUP, "topic": GROUP}
        asked = [(board.stem, *it) for board in BOARDS for it in expressions(board, values)]
        assert asked
        for board, title, expression in asked:

            async def answered(expression: str = expression) -> list[dict[str, Any]]:
                return await asyncio.to_thread(watched.prometheus.graph, expression, 600)

            try:
                await soon(answered, 60)
            except TimeoutError as error:
                error.add_note(f"{board}: {title} has no data: {expression}")
                raise
