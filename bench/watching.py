"""Observability of a thousand groups: polling their lag, rendering and scraping their metrics, loading the page.

The operator's own classes poll lag from a real broker and render the metrics, for groups with assignments of the
planner. Nothing else runs on the event loop: each figure comes with the longest time for which the loop was blocked.
"""

import asyncio
import os
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec
from aiohttp import web

from bench.measure import Row, Sample
from bench.scale import all_of
from ground.browser import Browser, a_browser, chromium
from ground.instance import Instance, temporary
from ground.prometheus import Prometheus
from ground.report import say
from ground.rocketmq import RocketMQ
from kube.live_page import LIVE, MANY, ServedGroups, a_detail, a_member
from kube.members import a_pod
from rota.brokers.port import BrokerOffsets, OffsetRange
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig, RoutingClient
from rota.brokers.rocketmq.wire import requests
from rota.http_server import listen
from rota.kube.brokers.lag.lag_poller import DEAD_LETTERS_EVERY_POLLS, LagPoller
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.brokers.topic_interest import TopicInterest
from rota.kube.client.objects import ConfigMap, CustomResource, Metadata, Pod, assignment_name
from rota.kube.http.operator_probes import metrics_route
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.state.group import Group
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.planner import plan
from rota.ranges import to_ranges
from rota.reports import Report

GROUPS = int(os.environ.get("SCALE", "1000"))
QUEUES, MEMBERS = 100, 10  # of each group
FULL = 9  # queues of each topic that have messages, two each; the others are empty
SAMPLES = 2 * DEAD_LETTERS_EVERY_POLLS
SCRAPES, LOADS = 7, 5
TICK = 0.005  # seconds
NOW = 1_763_712_000.0

Key = tuple[str, str]


class Samples(NamedTuple):
    """The costs of each of several lag polls."""

    seconds: list[float]
    cpu_seconds: list[float]
    blocked_seconds: list[float]  # the longest time for which the loop ran nothing else
    requests: list[int]


class _CountingClient(AdminClient):
    """An admin client that counts its requests and records when the first was sent."""

    requests = 0
    began = 0.0

    def _count(self) -> None:
        self.requests += 1
        self.began = self.began or time.perf_counter()

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        """Count the request."""
        self._count()
        return await super().group_offsets(group, broker, topics)

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        """Count the request."""
        self._count()
        return await super().offset_ranges(topic, broker)

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        """Count the request."""
        self._count()
        return await super().committed_offset(group, queue)


class _LoopMonitor:
    """Measures for how long the event loop is blocked: a task wakes every tick, and the delay of its wake-up counts."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        previous = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            self.longest = max(self.longest, now - previous - TICK)
            previous = now

    async def take_longest(self) -> float:
        """Return the longest delay since the last call, including a callback that still blocked the loop just now."""
        await asyncio.sleep(2 * TICK)
        longest, self.longest = self.longest, 0.0
        return longest


@asynccontextmanager
async def _monitor_loop() -> AsyncIterator[_LoopMonitor]:
    monitor = _LoopMonitor()
    task = asyncio.create_task(monitor.run())
    try:
        yield monitor
    finally:
        task.cancel()


def rows() -> Iterator[Row]:
    """Poll lag, scrape metrics, and load the page."""
    with temporary("bench-watching") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        yield from asyncio.run(_WatchBenchmark(instance, rocketmq).rows())
        rocketmq.down()
        yield from asyncio.run(_measure_page(instance))


class _WatchBenchmark:
    """Polls the lag of all groups and serves their metrics."""

    def __init__(self, instance: Instance, rocketmq: RocketMQ) -> None:
        self.instance = instance
        self.rocketmq = rocketmq
        self.broker = rocketmq.brokers[0].name
        self.names = list(map("group-{:04}".format, range(GROUPS)))
        self.groups: dict[Key, Group] = {}
        self.measures = OperatorMetrics(lambda: True, version="0.1.0")

    async def rows(self) -> list[Row]:
        """Run all measurements; report each as soon as it is done."""
        config = ConnectionConfig((self.rocketmq.name_server,))
        self.cluster = _CountingClient(config)
        self.client = RoutingClient(config, handle_request=lambda _: None)
        self.views = RouteWatcher(self.cluster, lambda _: None)
        rows = []
        async with _monitor_loop() as self.loop_monitor:
            async for row in self._measured():
                say(f"{row.what}: {row.ours}.")
                rows.append(row)
        self.client.close()
        await self.cluster.close()
        return rows

    async def _measured(self) -> AsyncIterator[Row]:
        await self._prepare()
        size = f"{GROUPS:,} groups of {QUEUES} queues"
        committed_in_few = await self._sample_lag()
        peer = await asyncio.to_thread(self._measure_mqadmin)
        yield Row(
            f"lag of {size} polled{_describe(committed_in_few)}", Sample(committed_in_few.seconds), peer, "≤ 15 s"
        )
        await self._commit(range(FULL - 1, QUEUES))
        committed_in_all = await self._sample_lag()
        yield Row(
            f"the same with a committed offset in each queue{_describe(committed_in_all)}",
            Sample(committed_in_all.seconds),
            None,
            "≤ 15 s",
        )
        async for row in self._measure_scrapes(size):
            yield row

    # Setup.

    async def _prepare(self) -> None:
        say(f"making {GROUPS} topics of {QUEUES} queues, and as many groups.")
        await all_of(self._create_group, self.names)
        await self.client.fetch_route(self.names[0])
        say("sending messages, and committing.")
        queues = (Queue(name, self.broker, number) for number in 2 * [*range(FULL)] for name in self.names)
        await all_of(self._send, queues)
        await self._commit(range(FULL - 1))
        for name in self.names:
            self.views.set_interest(("shop", name), TopicInterest(name, (name,), broadcasting=False))
        await all_of(self.views.poll_group, self.views.interests_within_quota)
        self.groups = {key: _build_group(*key, self.views, self.measures) for key in self.views.interests_within_quota}

    async def _send(self, queue: Queue) -> None:
        request = requests.send("bench", queue.topic, b"it", {}, broker=queue.broker, queue_id=queue.id, born_ms=0)
        await self.client.call_or_raise(queue.broker, request)

    async def _create_group(self, name: str) -> None:
        await self.cluster.create_topic(name, self.broker, QUEUES)
        await self.cluster.create_topic(RETRY_TOPIC_PREFIX + name, self.broker, 1)
        await self.cluster.update_group(name, self.broker)

    async def _commit(self, numbers: Iterable[int]) -> None:
        """Commit queue by queue: a broker sometimes loses one of a group's first commits if several are concurrent."""
        for number in numbers:
            offset = 1 + number % 2 if number < FULL else 0
            await all_of(partial(self._commit_offset, number=number, offset=offset), self.names)

    async def _commit_offset(self, name: str, number: int, offset: int) -> None:
        request = requests.commit(name, Queue(name, self.broker, number), offset)
        await self.client.call_or_raise(self.broker, request)

    # Lag.

    async def _sample_lag(self) -> Samples:
        """Poll lag several times; the first poll, which needs most requests, counts as well."""
        samples = Samples([], [], [], [])
        polled = asyncio.Event()
        self.lags = LagPoller(self.cluster, self.views, self._queues_of, lambda _: polled.set())
        self.lags.poll_seconds = 1.0
        await self.loop_monitor.take_longest()
        running = asyncio.create_task(self.lags.run())
        for _ in range(SAMPLES):
            self.cluster.requests = 0
            self.cluster.began = 0.0
            polled.clear()
            cpu_started = time.process_time()
            await self.loop_monitor.take_longest()
            await polled.wait()
            samples.seconds.append(time.perf_counter() - self.cluster.began)
            samples.cpu_seconds.append(time.process_time() - cpu_started)
            samples.requests.append(self.cluster.requests)
            samples.blocked_seconds.append(await self.loop_monitor.take_longest())
        running.cancel()
        await asyncio.wait([running])
        return samples

    def _queues_of(self, key: Key) -> list[Queue]:
        return list(chain.from_iterable(self.groups[key].stored_assignment.shares.values()))

    def _measure_mqadmin(self) -> Sample:
        """Return the seconds that `mqadmin` takes to print the progress of all groups, without its start-up."""
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            self.rocketmq.mqadmin("clusterList")
            started = time.perf_counter()
            printed = self.rocketmq.mqadmin("consumerProgress")
            seconds.append(time.perf_counter() - started - (started - began))
            if len(re.findall(r"^group-\d", printed, re.MULTILINE)) != GROUPS:
                raise RuntimeError(f"mqadmin tells of other groups than there are: {printed[:500]}")
        return Sample(seconds)

    # Scrapes.

    def keys(self) -> list[Key]:
        """Return all groups."""
        return list(self.groups)

    def facts_of(self, key: Key) -> GroupFacts:
        """Return a group's facts, for the metrics."""
        group = self.groups[key]
        now = asyncio.get_running_loop().time()
        broker = self.views.state_of(key, now, group.client_ids.suffixes(now))
        return GroupFacts(group, self.measures.trackers[key], broker, self.lags.lag_of(key))

    async def _measure_scrapes(self, size: str) -> AsyncIterator[Row]:
        seconds = []
        blocked_seconds = []
        text = b""
        for _ in range(SCRAPES):
            await self.loop_monitor.take_longest()
            began = time.perf_counter()
            text = await self.measures.render(self)
            seconds.append(time.perf_counter() - began)
            blocked_seconds.append(await self.loop_monitor.take_longest())
        samples = sum(not line.startswith(b"#") for line in text.splitlines())
        label = f"metrics of {size} rendered: {samples:,} samples, {len(text) / 1e6:.1f} MB"
        yield Row(f"{label}, loop blocked for {Sample(blocked_seconds)}", Sample(seconds), target="≤ 1 s, ≤ 30 MB")
        durations, sample_count, blocked = await self._measure_prometheus_scrapes()
        longest = f"loop blocked for at most {1000 * blocked:.0f} ms"
        yield Row(f"the same scraped by Prometheus: {sample_count:,.0f} samples, {longest}", durations, target="≤ 1 s")

    async def _measure_prometheus_scrapes(self) -> tuple[Sample, float, float]:
        """Return a real Prometheus' scrape durations, the samples per scrape, and the longest block of the loop."""
        app = web.Application()
        app.add_routes([metrics_route(self.measures, self)])
        port = self.instance.port("metrics", 8080)
        runner = await listen(app, self.instance.address(), port)
        prometheus = Prometheus(self.instance, [f"{self.instance.address()}:{port}"])
        await asyncio.to_thread(prometheus.up)
        self._set_scrape_interval(5)
        await self.loop_monitor.take_longest()
        await asyncio.sleep(5 * SCRAPES)
        blocked = await self.loop_monitor.take_longest()
        (durations,) = await asyncio.to_thread(prometheus.graph, "scrape_duration_seconds", 4 * SCRAPES)
        (samples,) = await asyncio.to_thread(prometheus.query, f"min_over_time(scrape_samples_scraped[{4 * SCRAPES}s])")
        await asyncio.to_thread(prometheus.down)
        await runner.cleanup()
        distinct = dict.fromkeys(float(value) for _, value in durations["values"])  # queried at every second
        return Sample([*distinct]), float(samples["value"][1]), blocked

    def _set_scrape_interval(self, seconds: int) -> None:
        """Set Prometheus' scrape interval, and its timeout with it."""
        path = self.instance.folder / "prometheus" / "prometheus.yml"
        path.write_text(path.read_text().replace('"scrape_interval": "1s"', f'"scrape_interval": "{seconds}s"'))
        if process := self.instance.process("prometheus"):
            process.signal(signal.SIGHUP)


def _describe(samples: Samples) -> str:
    requests_range = f"{min(samples.requests):,} to {max(samples.requests):,} requests"
    cpu_seconds = statistics.median(samples.cpu_seconds)
    blocked = Sample(samples.blocked_seconds)
    return f": {requests_range}, {cpu_seconds:.2f} s of CPU, loop blocked for {blocked}"


def _build_group(namespace: str, name: str, views: RouteWatcher, measures: OperatorMetrics) -> Group:
    """Return a settled group, whose members have obeyed the planner's assignment."""
    group = Group(namespace, name)
    key = (namespace, name)
    spec = {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": name}]}
    group.set_spec(CustomResource(Metadata(name, uid=name, namespace=namespace), spec), None)
    group.assignment.was_everything_refetched = True
    for number in range(MEMBERS):
        group.pods.upsert(_build_pod(namespace, f"{name}-7d9f8b6c5-{number:05}", name), 0.0)
    for version in range(1, 4):  # granted, obeyed, settled
        planned = plan(
            group.snapshot(1000.0, views.state_of(key, 1000.0, group.client_ids.suffixes(1000.0)), {}),
            NOW + 60 * version,
        )
        if planned.document:
            texts = {part: text for part, text in planned.config_map_data.items() if isinstance(text, str)}
            labels = {"rota.dev/group": name}
            group.set_assignment(
                ConfigMap(Metadata(assignment_name(name), resource_version=str(version), labels=labels), texts)
            )
        for holder, queues in group.stored_assignment.shares.items():
            report = Report(member=holder.name, uid=holder.uid, generation=version, held=to_ranges(queues))
            group.pods[holder.name].record_report(report, 1000.0, 1000.0)
        measures.record_reconcile(ReconcileResult(group, planned, 0.001, {}), 1000.0)
    return group


def _build_pod(namespace: str, name: str, group: str) -> Pod:
    body = a_pod(name, group)
    body["metadata"] |= {"namespace": namespace, "uid": f"0f8e1c5a-93b7-4d2f-8a61-{name[-5:]:>012}"}
    return msgspec.convert({**body, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}, Pod)


# The page.


async def _measure_page(instance: Instance) -> list[Row]:
    """Time the page of a group of 10,000 queues."""
    await asyncio.to_thread(chromium)
    served = ServedGroups(instance.address(), instance.port("page", 8080))
    served.put(a_detail(queues=MANY, members=[a_member(f"m{number}") for number in range(300)]))
    await served.start()
    async with a_browser(instance) as browser:
        await browser.size(1200, 800)
        loads = [await _load_page(browser, f"{served.url}#shop/orders") for _ in range(LOADS)]
    await served.stop()
    painted, drawn = zip(*loads, strict=True)
    return [
        Row("the page of a group of 10,000 queues, until the first paint", Sample(painted), target="≤ 1 s"),
        Row("the same, until the map of all queues is painted", Sample(drawn), target="≤ 1 s"),
    ]


async def _load_page(browser: Browser, url: str) -> tuple[float, float]:
    """Return the seconds until the first contentful paint, and until the map is painted."""
    await browser.call("Network.clearBrowserCache")
    await browser.open(url)
    await browser.wait_for(LIVE)
    painted = await browser.wait_for(_PAINTED)
    return painted[0] / 1000, painted[1] / 1000


_PAINTED = """(() => {
    const [first] = performance.getEntriesByName("first-contentful-paint");
    const [shown] = performance.getEntriesByName("shown");
    return first && shown && document.querySelectorAll(".cell").length === 10000 && [first.startTime, shown.startTime];
})()"""
