"""A real fleet, watched: what dashboards, mqadmin, our commands and a real browser show of it.

One fleet serves all of it, for it takes a while to stand up: it is paused and falls behind, catches up, hands over a
queue of which a message is held, grows, loses a member, and in the end its operator is killed and another one leads.
"""

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ground.api import Api, Object
from ground.browser import Browser, a_browser, chromium
from ground.cluster import Cluster
from ground.fixtures import skip_what_is_missing
from ground.instance import Instance
from ground.local import LocalNode
from ground.poll import soon
from ground.prometheus import Prometheus
from ground.rocketmq import RocketMQ
from kube import board
from kube.live_page import LIVE, PICTURES, a_handover_is_seen, has, label_of
from kube.operators import an_operator
from kube.panels import expressions
from kube.shop import GROUP, QUEUES, TemplateGroup, a_shop
from rota.kube.http.schema import Detail
from rota.model import Queue

DRAWS = "ROTA_PICTURES" in os.environ
BOARDS = sorted((Path(__file__).parents[2] / "charts/rota/dashboards").glob("*.json"))

pytestmark = [
    pytest.mark.usefixtures("crds"),
    pytest.mark.timeout(900),
    pytest.mark.slow("what a browser, Prometheus and kubectl show of one fleet, side by side"),
]


@dataclass
class Watched:
    """A fleet, its operator and where that answers, and a Prometheus that scrapes both."""

    shop: TemplateGroup
    operator: str
    process: Process
    another: Callable[[], AbstractAsyncContextManager[Process]]  # operator, at the same address
    prometheus: Prometheus
    rocketmq: RocketMQ
    began: float = field(default_factory=time.time)

    async def detail(self) -> Detail:
        """Return what the operator shows of the group."""
        where = f"{self.operator}/v1/groups/{self.shop.namespace}/{GROUP}"
        async with aiohttp.ClientSession() as session, session.get(where) as answer:
            return msgspec.json.decode(await answer.read(), type=Detail)

    async def scrape(self) -> None:
        """Scrape the operator and the sidecars that there are now."""

        async def all_have_addresses() -> bool:
            return all("podIP" in it["status"] for it in await self.shop.pods())

        await self.shop.soon(all_have_addresses)
        groups = [self._target(self.operator.removeprefix("http://"), pod="rota-0")]
        for it in await self.shop.pods():  # with labels as a PodMonitor adds them
            labels = {"namespace": self.shop.namespace, "group": GROUP, "pod": it["metadata"]["name"]}
            groups.append(self._target(f"{it['status']['podIP']}:9911", **labels))
        self.prometheus.instance.write("prometheus/targets.json", json.dumps(groups))

    @staticmethod
    def _target(address: str, **labels: str) -> Object:
        return {"targets": [address], "labels": labels}

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

    def an_operator_there(name: str) -> AbstractAsyncContextManager[Process]:
        return an_operator(control_plane.kubeconfig, namespace, address, tmp_path / f"{name}.log")

    async with (
        an_operator_there("rota-0") as process,
        a_shop(api, namespace, rocketmq, local_node, tmp_path) as shop,
    ):
        prometheus = Prometheus(instance, [])
        await asyncio.to_thread(prometheus.up)
        another = partial(an_operator_there, "rota-1")
        found = Watched(shop, f"http://{address}:8080", process, another, prometheus, rocketmq)
        await found.scrape()
        yield found
        prometheus.down()


@pytest.fixture
async def chrome(instance: Instance) -> AsyncIterator[Browser]:
    with skip_what_is_missing():
        await asyncio.to_thread(chromium)
    async with a_browser(instance) as started:
        yield started


async def test_page_cli_and_dashboards_show_the_state_of_a_real_fleet(watched: Watched, chrome: Browser) -> None:
    await watched.shop.works(2)
    await watched.scrape()
    await _lag_agrees_with_mqadmin(watched)
    await _commands_print_it(watched)
    await _the_page_shows_a_handover(watched, chrome)
    await _every_panel_has_data(watched)
    await _what_a_rebalance_costs_is_told(watched)
    await _every_panel_draws_it(watched, chrome)
    assert chrome.errors == []
    await _the_page_outlives_an_operator(watched, chrome)


async def _lag_agrees_with_mqadmin(watched: Watched) -> None:
    """Let a group fall behind, by another number of messages in each queue; and see that all say the same."""
    shop = watched.shop
    async with shop.sending():
        pass

    async def retries_known() -> bool:
        return any(it.topic != GROUP for it in (await watched.detail()).queues)

    await shop.soon(retries_known)  # the broker makes their topic for the first member that it hears
    await shop.api.patch(shop.path, {"spec": {"paused": True}})

    async def released() -> bool:
        return {it.state for it in (await watched.detail()).queues} == {"Free"}

    await shop.soon(released)
    broker = watched.rocketmq.brokers[0].name
    for number in range(QUEUES):
        for _ in range(number + 1):
            await shop.send(Queue(GROUP, broker, number))

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
    await watched.shop.soon(watched.shop.delivered_all)
    pods = {it["metadata"]["name"] for it in await watched.shop.pods()}
    members = json.loads(await watched.rota("members", group, "-o", "json"))["members"]
    assert {it["name"] for it in members} == pods
    assert {it["origin"] for it in members} == {"Rota"}
    assert {it["language"] for it in members} == {"PYTHON"}
    assert sum(it["queues"] for it in members) == QUEUES + 1  # with the one for retries
    why = await watched.rota("explain", group, f"{GROUP}/{watched.rocketmq.brokers[0].name}/0")
    assert any(name in why for name in pods)
    assert "GroupResumed" in why


async def _the_page_shows_a_handover(watched: Watched, chrome: Browser) -> None:
    """Take a queue from a member whose app has a message of it, and see that it is released only after that."""
    shop = watched.shop
    first, second = sorted(it["metadata"]["name"] for it in await shop.pods())
    its = next(it for it in (await watched.detail()).queues if (it.topic, it.owner) == (GROUP, first))
    shop.rules.write_text('[{"act": "hold"}]')
    number = await shop.send(Queue(its.topic, its.broker, its.id))

    async def at_the_app() -> bool:
        return any(it["number"] == number for line in shop.lines() for it in line.get("messages", ()))

    await shop.soon(at_the_app)
    queue = f"{its.topic}/{its.broker}/{its.id}"

    async def hand_over() -> None:
        every = {"topic": its.topic, "broker": its.broker, "ids": f"0-{QUEUES - 1}"}
        await shop.follow("second-has-all", "ByConfig", byConfig={"members": [{"index": 1, "queues": [every]}]})
        await chrome.wait_for(f"{label_of(queue)}?.includes('being released')")
        assert number not in shop.deliveries()
        shop.rules.write_text("[]")

    page = f"{watched.operator}/#{shop.namespace}/{GROUP}"
    await a_handover_is_seen(chrome, page, queue, (first, second), hand_over)
    assert shop.deliveries()[number] == 1
    await shop.follow("sticky")
    await shop.works(2)


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
        variables = {"namespace": shop.namespace, "group": GROUP, "topic": GROUP}
        values = {"datasource": "ground", "__rate_interval": board.RATE, **variables}
        asked = [(path.stem, *it) for path in BOARDS for it in expressions(path, values)]
        assert asked
        for name, title, expression in asked:

            async def answered(expression: str = expression) -> bool:
                told = await asyncio.to_thread(watched.prometheus.graph, expression, 600)
                return any(value != "NaN" for one in told for _, value in one["values"])

            await _data(answered, 60, f"{name}: {title} has no data: {expression}")
        if DRAWS:
            await shop.soon(partial(_scraped_for_a_while, watched))


async def _what_a_rebalance_costs_is_told(watched: Watched) -> None:
    """Have the expressions of the page about metrics answered with figures, for the minute of its handovers."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    for expression in page.partition("```promql\n")[2].partition("```")[0].splitlines():

        async def told(expression: str = expression) -> list[dict[str, Any]]:
            found = await asyncio.to_thread(watched.prometheus.query, expression)
            return [it for it in found if it["metric"].get("group") == GROUP and float(it["value"][1]) > 0]

        # Its steps are at multiples of 15 s: what has just been is in none of them yet.
        await _data(told, 30, f"This has no figure of {GROUP}'s: {expression}")


async def _data(ask: Callable[[], Awaitable[object]], seconds: float, missing: str) -> None:
    """Wait until something is answered; if it never is, tell what is missing."""
    try:
        await soon(ask, seconds)
    except TimeoutError as error:
        error.add_note(missing)
        raise


async def _scraped_for_a_while(watched: Watched) -> list[dict[str, Any]]:
    """Say whether three members have been: a picture of a few seconds would show little."""
    asked = "count(count_over_time(rota_sidecar_generation[1m]) >= 40) >= 3"
    return await asyncio.to_thread(watched.prometheus.query, asked)


async def _every_panel_draws_it(watched: Watched, chrome: Browser) -> None:
    """Draw every board in the browser, while something is wrong: one table is about nothing else."""
    shop = watched.shop
    await shop.follow("forgotten")

    async def wrong() -> list[dict[str, Any]]:
        return await asyncio.to_thread(watched.prometheus.query, 'rota_group_problem{reason="MissingPolicy"} == 1')

    await shop.soon(wrong)
    values = {"namespace": shop.namespace, "group": GROUP, "topic": ".*"}
    source = board.Source(watched.prometheus, time.time() - watched.began, values)
    for path in BOARDS:
        assert await board.draw(chrome, path, source) == [], path
        if DRAWS:
            await chrome.screenshot(PICTURES / f"{path.stem}-board.png")
    await shop.follow("sticky")


async def _the_page_outlives_an_operator(watched: Watched, chrome: Browser) -> None:
    """Kill the operator that leads: an open page says since when it is stale, and goes on with the next one."""
    await chrome.open(f"{watched.operator}/#{watched.shop.namespace}/{GROUP}")
    await chrome.wait_for(LIVE)
    watched.process.kill()
    await chrome.wait_for(has("#live", "Stale since 20"))
    assert await chrome.evaluate("document.querySelectorAll('.cell').length") >= QUEUES, "what was last known"
    await watched.process.wait()
    async with watched.another():
        await chrome.wait_for(LIVE)
        await chrome.wait_for(has("#operator", "operator rota-1, leader"))
    # The browser logs requests that fail by itself: to a dead operator, or to one that does not know the group yet.
    assert [it for it in chrome.errors if "ERR_" not in it and "Failed to load resource" not in it] == []
