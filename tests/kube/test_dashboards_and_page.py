"""Dashboards, mqadmin, the `rota` commands and a real browser, all on one real fleet.

One fleet serves all checks, because starting it takes long: it is paused and falls behind, catches up, hands over a
queue while a message is held, grows, loses a member, and at the end its operator is killed and another one leads.
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
from kube.live_page import LIVE, PICTURES, assert_handover_shown, has, label_of
from kube.operators import an_operator
from kube.panels import expressions
from kube.template_group import GROUP, QUEUES, TemplateGroup, a_template_group
from rota.kube.http.schema import GroupDetail
from rota.model import Queue

DRAWS = "ROTA_PICTURES" in os.environ
BOARDS = sorted((Path(__file__).parents[2] / "charts/rota/dashboards").glob("*.json"))

pytestmark = [
    pytest.mark.usefixtures("crds"),
    pytest.mark.timeout(900),
    pytest.mark.slow("a browser, Prometheus and kubectl show the same fleet"),
]


@dataclass
class Watched:
    """A fleet, its operator and the operator's URL, and a Prometheus that scrapes both."""

    fleet: TemplateGroup
    operator: str
    process: Process
    another: Callable[[], AbstractAsyncContextManager[Process]]  # starts another operator at the same address
    prometheus: Prometheus
    rocketmq: RocketMQ
    began: float = field(default_factory=time.time)

    async def detail(self) -> GroupDetail:
        """Return the group as the operator's API shows it."""
        url = f"{self.operator}/v1/groups/{self.fleet.namespace}/{GROUP}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return msgspec.json.decode(await response.read(), type=GroupDetail)

    async def scrape(self) -> None:
        """Scrape the operator and the sidecars that run now."""

        async def all_have_addresses() -> bool:
            return all("podIP" in pod["status"] for pod in await self.fleet.pods())

        await self.fleet.soon(all_have_addresses)
        groups = [self._target(self.operator.removeprefix("http://"), pod="rota-0")]
        for pod in await self.fleet.pods():  # with labels as a PodMonitor adds them
            labels = {"namespace": self.fleet.namespace, "group": GROUP, "pod": pod["metadata"]["name"]}
            groups.append(self._target(f"{pod['status']['podIP']}:9911", **labels))
        self.prometheus.instance.write("prometheus/targets.json", json.dumps(groups))

    @staticmethod
    def _target(address: str, **labels: str) -> Object:
        return {"targets": [address], "labels": labels}

    async def rota(self, *arguments: str) -> str:
        """Run a `rota` command, and return its output."""
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

    def run_operator(name: str) -> AbstractAsyncContextManager[Process]:
        return an_operator(control_plane.kubeconfig, namespace, address, tmp_path / f"{name}.log")

    async with (
        run_operator("rota-0") as process,
        a_template_group(api, namespace, rocketmq, local_node, tmp_path) as fleet,
    ):
        prometheus = Prometheus(instance, [])
        await asyncio.to_thread(prometheus.up)
        another = partial(run_operator, "rota-1")
        watched = Watched(fleet, f"http://{address}:8080", process, another, prometheus, rocketmq)
        await watched.scrape()
        yield watched
        prometheus.down()


@pytest.fixture
async def chrome(instance: Instance) -> AsyncIterator[Browser]:
    with skip_what_is_missing():
        await asyncio.to_thread(chromium)
    async with a_browser(instance) as browser:
        yield browser


async def test_page_cli_and_dashboards_show_the_state_of_a_real_fleet(watched: Watched, chrome: Browser) -> None:
    await watched.fleet.wait_for_members(2)
    await watched.scrape()
    await _lag_agrees_with_mqadmin(watched)
    await _commands_print_the_state(watched)
    await _the_page_shows_a_handover(watched, chrome)
    await _every_panel_has_data(watched)
    await _rebalance_costs_have_figures(watched)
    await _every_panel_is_drawn(watched, chrome)
    assert chrome.errors == []
    await _the_page_outlives_an_operator(watched, chrome)


async def _lag_agrees_with_mqadmin(watched: Watched) -> None:
    """Let the group fall behind by a different number of messages in each queue; all sources agree on the lag."""
    fleet = watched.fleet
    async with fleet.sending():
        pass

    async def has_retry_topic() -> bool:
        return any(queue.topic != GROUP for queue in (await watched.detail()).queues)

    await fleet.soon(has_retry_topic)  # the broker creates the retry topic for the first member
    await fleet.api.patch(fleet.path, {"spec": {"paused": True}})

    async def released() -> bool:
        return {queue.state for queue in (await watched.detail()).queues} == {"Free"}

    await fleet.soon(released)
    broker = watched.rocketmq.brokers[0].name
    for number in range(QUEUES):
        for _ in range(number + 1):
            await fleet.send(Queue(GROUP, broker, number))

    async def behind() -> bool:
        lags = {queue.id: queue.lag for queue in (await watched.detail()).queues if queue.topic == GROUP}
        return lags == {number: number + 1 for number in range(QUEUES)}

    await fleet.soon(behind)
    printed = await asyncio.to_thread(watched.rocketmq.mqadmin, "consumerProgress", "-g", GROUP)
    rows = [line.split() for line in printed.splitlines() if line.startswith(f"{GROUP} ")]
    expected = {int(row[2]): (int(row[3]), int(row[4]), int(row[5])) for row in rows}
    detail = await watched.detail()
    assert {
        queue.id: (queue.last, queue.committed, queue.lag) for queue in detail.queues if queue.topic == GROUP
    } == expected, printed
    assert detail.summary.lag == sum(range(QUEUES + 1))


async def _commands_print_the_state(watched: Watched) -> None:
    group = f"{watched.fleet.namespace}/{GROUP}"
    report = json.loads(await watched.rota("lag", group, "-o", "json"))
    assert sum(queue["lag"] for queue in report["queues"] if queue["topic"] == GROUP) == sum(range(QUEUES + 1))
    printed = await watched.rota("status", group)
    assert "GroupPaused" in printed
    assert str(sum(range(QUEUES + 1))) in printed
    await watched.fleet.api.patch(watched.fleet.path, {"spec": {"paused": False}})
    await watched.fleet.wait_for_members(2)
    await watched.fleet.soon(watched.fleet.has_delivered_all)
    pods = {pod["metadata"]["name"] for pod in await watched.fleet.pods()}
    members = json.loads(await watched.rota("members", group, "-o", "json"))["members"]
    assert {member["name"] for member in members} == pods
    assert {member["origin"] for member in members} == {"Rota"}
    assert {member["language"] for member in members} == {"PYTHON"}
    assert sum(member["queues"] for member in members) == QUEUES + 1  # with the retry queue
    explanation = await watched.rota("explain", group, f"{GROUP}/{watched.rocketmq.brokers[0].name}/0")
    assert any(name in explanation for name in pods)
    assert "GroupResumed" in explanation


async def _the_page_shows_a_handover(watched: Watched, chrome: Browser) -> None:
    """Revoke a queue while the app holds one of its messages; it is released only after that delivery."""
    fleet = watched.fleet
    first, second = sorted(pod["metadata"]["name"] for pod in await fleet.pods())
    held_queue = next(
        queue for queue in (await watched.detail()).queues if (queue.topic, queue.owner) == (GROUP, first)
    )
    fleet.rules.write_text('[{"act": "hold"}]')
    number = await fleet.send(Queue(held_queue.topic, held_queue.broker, held_queue.id))

    async def is_delivered() -> bool:
        return any(message["number"] == number for line in fleet.lines() for message in line.get("messages", ()))

    await fleet.soon(is_delivered)
    queue = f"{held_queue.topic}/{held_queue.broker}/{held_queue.id}"

    async def hand_over() -> None:
        every = {"topic": held_queue.topic, "broker": held_queue.broker, "ids": f"0-{QUEUES - 1}"}
        await fleet.set_policy("second-has-all", "ByConfig", byConfig={"members": [{"index": 1, "queues": [every]}]})
        await chrome.wait_for(f"{label_of(queue)}?.includes('being released')")
        assert number not in fleet.deliveries()
        fleet.rules.write_text("[]")

    page = f"{watched.operator}/#{fleet.namespace}/{GROUP}"
    await assert_handover_shown(chrome, page, queue, (first, second), hand_over)
    assert fleet.deliveries()[number] == 1
    await fleet.set_policy("sticky")
    await fleet.wait_for_members(2)


async def _every_panel_has_data(watched: Watched) -> None:
    """Rebalance under load, then run every query of every panel of every dashboard."""
    fleet = watched.fleet
    await fleet.scale(0)

    async def has_problem() -> list[dict[str, Any]]:
        return await asyncio.to_thread(watched.prometheus.query, 'rota_group_problem{reason="NoMembers"}')

    await fleet.soon(has_problem)
    await fleet.scale(2)
    await fleet.wait_for_members(2)
    await watched.scrape()
    async with fleet.sending():
        await fleet.scale(3)
        await fleet.wait_for_members(3)
        await watched.scrape()
        victim = (await fleet.pods())[0]["metadata"]["name"]
        await fleet.api.delete(f"{fleet.pods_path}/{victim}", {"gracePeriodSeconds": 0})
        await fleet.wait_for_members(3)
        await watched.scrape()
        variables = {"namespace": fleet.namespace, "group": GROUP, "topic": GROUP}
        values = {"datasource": "ground", "__rate_interval": board.RATE, **variables}
        queries = [(path.stem, *expression) for path in BOARDS for expression in expressions(path, values)]
        assert queries
        for name, title, expression in queries:

            async def has_data(expression: str = expression) -> bool:
                series = await asyncio.to_thread(watched.prometheus.graph, expression, 600)
                return any(value != "NaN" for metric in series for _, value in metric["values"])

            await _wait_for_data(has_data, 60, f"{name}: {title} has no data: {expression}")
        if DRAWS:
            await fleet.soon(partial(_scraped_for_a_while, watched))


async def _rebalance_costs_have_figures(watched: Watched) -> None:
    """Each expression of the metrics page for that has a figure for the minute of the handovers."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    section = page.partition("## Cost of a rebalance")[2]
    for expression in section.partition("```promql\n")[2].partition("```")[0].splitlines():

        async def has_figure(expression: str = expression) -> list[dict[str, Any]]:
            samples = await asyncio.to_thread(watched.prometheus.query, expression)
            return [
                sample for sample in samples if sample["metric"].get("group") == GROUP and float(sample["value"][1]) > 0
            ]

        # Its steps are at multiples of 15 s: the last seconds are in none of them yet.
        await _wait_for_data(has_figure, 30, f"This has no figure of {GROUP}'s: {expression}")


async def _wait_for_data(query: Callable[[], Awaitable[object]], seconds: float, note: str) -> None:
    """Wait until a query has a result; on timeout, add this note to the error."""
    try:
        await soon(query, seconds)
    except TimeoutError as error:
        error.add_note(note)
        raise


async def _scraped_for_a_while(watched: Watched) -> list[dict[str, Any]]:
    """Whether three members have been scraped for 40 s: a picture of a few seconds would show little."""
    query = "count(count_over_time(rota_sidecar_generation[1m]) >= 40) >= 3"
    return await asyncio.to_thread(watched.prometheus.query, query)


async def _every_panel_is_drawn(watched: Watched, chrome: Browser) -> None:
    """Draw every dashboard in the browser while the group has a problem: one table shows only problems."""
    fleet = watched.fleet
    await fleet.set_policy("forgotten")

    async def has_problem() -> list[dict[str, Any]]:
        return await asyncio.to_thread(watched.prometheus.query, 'rota_group_problem{reason="MissingPolicy"} == 1')

    await fleet.soon(has_problem)
    values = {"namespace": fleet.namespace, "group": GROUP, "topic": ".*"}
    source = board.Source(watched.prometheus, time.time() - watched.began, values)
    for path in BOARDS:
        assert await board.draw(chrome, path, source) == [], path
        if DRAWS:
            await chrome.screenshot(PICTURES / f"{path.stem}-board.png")
    await fleet.set_policy("sticky")


async def _the_page_outlives_an_operator(watched: Watched, chrome: Browser) -> None:
    """Kill the leading operator: an open page shows since when it is stale, and goes on with the next leader."""
    await chrome.open(f"{watched.operator}/#{watched.fleet.namespace}/{GROUP}")
    await chrome.wait_for(LIVE)
    watched.process.kill()
    await chrome.wait_for(has("#live", "Stale since 20"))
    assert await chrome.evaluate("document.querySelectorAll('.cell').length") >= QUEUES, "what was last known"
    await watched.process.wait()
    async with watched.another():
        await chrome.wait_for(LIVE)
        await chrome.wait_for(has("#operator", "operator rota-1, leader"))
    # The browser itself logs failed requests: to a dead operator, or to one that does not know the group yet.
    assert [
        error_line
        for error_line in chrome.errors
        if "ERR_" not in error_line and "Failed to load resource" not in error_line
    ] == []
