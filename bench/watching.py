"""Watching: how far a thousand groups are behind, the scrape that tells of all of them, and the page.

Lag is read from a real broker by what the operator reads it with, and rendered by what it renders with, for groups that
the planner has planned. Nothing else runs on that loop: for how long nobody else could go on is told beside it.
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
from rota.kube.brokers.route_watcher import RouteWatcher, TopicInterest
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

GROUPS, QUEUES, MEMBERS = int(os.environ.get("SCALE", "1000")), 100, 10
FULL = 9  # queues of each topic that have messages, two each; the others are empty
LOOKS, SCRAPES, LOADS = 2 * DEAD_LETTERS_EVERY_POLLS, 7, 5
TICK = 0.005  # seconds
NOW = 1_763_712_000.0

Key = tuple[str, str]


class Looks(NamedTuple):
    """What several of the same took."""

    seconds: list[float]
    work: list[float]  # seconds of the processor
    silent: list[float]  # the longest time for which the loop did nothing else
    requests: list[int]


class _Asked(AdminClient):
    """A cluster that counts what it is asked, and knows since when."""

    requests, began = 0, 0.0

    def _count(self) -> None:
        self.requests += 1
        self.began = self.began or time.perf_counter()

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        """Return how far a group is."""
        self._count()
        return await super().group_offsets(group, broker, topics)

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        """Return where a topic's queues begin and end."""
        self._count()
        return await super().offset_ranges(topic, broker)

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        """Return where a group is with a queue."""
        self._count()
        return await super().committed_offset(group, queue)


class _Ticking:
    """A task that is always ready: how late it comes is for how long the loop was kept."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def tick(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            self.longest, before = max(self.longest, now - before - TICK), now

    async def take(self) -> float:
        """Return the longest time since this was asked last; what has kept the loop until now counts."""
        await asyncio.sleep(2 * TICK)
        longest, self.longest = self.longest, 0.0
        return longest


@asynccontextmanager
async def _ticking() -> AsyncIterator[_Ticking]:
    found = _Ticking()
    task = asyncio.create_task(found.tick())
    try:
        yield found
    finally:
        task.cancel()


def rows() -> Iterator[Row]:
    """Look, scrape, and load the page."""
    with temporary("bench-watching") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        yield from asyncio.run(_Watching(instance, rocketmq).rows())
        rocketmq.down()
        yield from asyncio.run(_page(instance))


class _Watching:
    """Groups whose lag is read, and told to who scrapes."""

    def __init__(self, instance: Instance, rocketmq: RocketMQ) -> None:
        self.instance, self.rocketmq = instance, rocketmq
        self.broker = rocketmq.brokers[0].name
        self.names = [f"group-{number:04}" for number in range(GROUPS)]
        self.groups: dict[Key, Group] = {}
        self.measures = OperatorMetrics(lambda: True, version="0.1.0")

    async def rows(self) -> list[Row]:
        """Return what was measured."""
        site = ConnectionConfig((self.rocketmq.name_server,))
        self.cluster, self.client = _Asked(site), RoutingClient(site, handle_request=lambda _: None)
        self.views = RouteWatcher(self.cluster, lambda _: None)
        found = []
        async with _ticking() as self.ticking:
            async for row in self._measured():
                say(f"{row.what}: {row.ours}.")
                found.append(row)
        self.client.close()
        await self.cluster.close()
        return found

    async def _measured(self) -> AsyncIterator[Row]:
        await self._prepare()
        size = f"{GROUPS:,} groups of {QUEUES} queues"
        some = await self._looked()
        peer = await asyncio.to_thread(self._mqadmin)
        yield Row(f"lag of {size} read anew{_told(some)}", Sample(some.seconds), peer, "≤ 15 s")
        await self._commit(range(FULL - 1, QUEUES))
        every = await self._looked()
        yield Row(f"the same where each queue was committed{_told(every)}", Sample(every.seconds), None, "≤ 15 s")
        async for row in self._scraped(size):
            yield row

    # What there is.

    async def _prepare(self) -> None:
        say(f"making {GROUPS} topics of {QUEUES} queues, and as many groups.")
        make = self.cluster.create_topic
        await all_of(partial(make, name, self.broker, QUEUES) for name in self.names)
        await all_of(partial(make, RETRY_TOPIC_PREFIX + name, self.broker, 1) for name in self.names)
        await all_of(partial(self.cluster.update_group, name, self.broker) for name in self.names)
        await self.client.fetch_route(self.names[0])
        say("sending messages, and committing.")
        wanted = (Queue(name, self.broker, number) for number in 2 * [*range(FULL)] for name in self.names)
        await all_of(partial(self._send, queue) for queue in wanted)
        await self._commit(range(FULL - 1))
        for name in self.names:
            self.views.set_interest(("shop", name), TopicInterest(name, (name,), broadcasting=False))
        await all_of(partial(self.views.poll_group, key) for key in self.views.interests)
        self.groups = {key: _planned(*key, self.views, self.measures) for key in self.views.interests}

    async def _send(self, queue: Queue) -> None:
        request = requests.send("bench", queue.topic, b"it", {}, broker=queue.broker, queue_id=queue.id, born_ms=0)
        await self.client.call_or_raise(queue.broker, request)

    async def _commit(self, numbers: Iterable[int]) -> None:
        """Commit, queue by queue: of a group's first commits made side by side a broker sometimes loses one."""
        for number in numbers:
            offset = 1 + number % 2 if number < FULL else 0
            wanted = (requests.commit(name, Queue(name, self.broker, number), offset) for name in self.names)
            await all_of(partial(self.client.call_or_raise, self.broker, request) for request in wanted)

    # Lag.

    async def _looked(self) -> Looks:
        """Look several times, from the first time on, which asks for most."""
        found = Looks([], [], [], [])
        looked = asyncio.Event()
        self.lags = LagPoller(self.cluster, self.views, self._worked, lambda _: looked.set())
        self.lags.poll_seconds = 1.0
        await self.ticking.take()
        running = asyncio.create_task(self.lags.run())
        for _ in range(LOOKS):
            self.cluster.requests, self.cluster.began = 0, 0.0
            looked.clear()
            work = time.process_time()
            await self.ticking.take()
            await looked.wait()
            found.seconds.append(time.perf_counter() - self.cluster.began)
            found.work.append(time.process_time() - work)
            found.requests.append(self.cluster.requests)
            found.silent.append(await self.ticking.take())
        running.cancel()
        await asyncio.wait([running])
        return found

    def _worked(self, key: Key) -> list[Queue]:
        return [queue for queues in self.groups[key].stored_assignment.shares.values() for queue in queues]

    def _mqadmin(self) -> Sample:
        """Return what RocketMQ's own tool takes to print how far each group is, less what its start takes."""
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
        """Return what is known of a group."""
        group, now = self.groups[key], asyncio.get_running_loop().time()
        broker = self.views.state_of(key, now, group.client_id_suffixes(now))
        return GroupFacts(group, self.measures.trackers[key], broker, self.lags.lag_of(key))

    async def _scraped(self, size: str) -> AsyncIterator[Row]:
        seconds, silent, text = [], [], b""
        for _ in range(SCRAPES):
            await self.ticking.take()
            began = time.perf_counter()
            text = await self.measures.render(self)
            seconds.append(time.perf_counter() - began)
            silent.append(await self.ticking.take())
        samples = sum(not line.startswith(b"#") for line in text.splitlines())
        what = f"metrics of {size} rendered: {samples:,} samples, {len(text) / 1e6:.1f} MB"
        yield Row(f"{what}, the loop kept for {Sample(silent)}", Sample(seconds), target="≤ 1 s, ≤ 30 MB")
        took, found, kept = await self._prometheus()
        what = f"the same scraped by Prometheus: {found:,.0f} samples, the loop kept for at most {1000 * kept:.0f} ms"
        yield Row(what, took, target="≤ 1 s")

    async def _prometheus(self) -> tuple[Sample, float, float]:
        """Return what a real Prometheus takes, how many samples it gets, and for how long the loop is kept."""
        app = web.Application()
        app.add_routes([metrics_route(self.measures, self)])
        port = self.instance.port("metrics", 8080)
        runner = await listen(app, self.instance.address(), port)
        prometheus = Prometheus(self.instance, [f"{self.instance.address()}:{port}"])
        await asyncio.to_thread(prometheus.up)
        self._scrape_every(5)
        await self.ticking.take()
        await asyncio.sleep(5 * SCRAPES)
        kept = await self.ticking.take()
        (took,) = await asyncio.to_thread(prometheus.graph, "scrape_duration_seconds", 4 * SCRAPES)
        (samples,) = await asyncio.to_thread(prometheus.query, f"min_over_time(scrape_samples_scraped[{4 * SCRAPES}s])")
        await asyncio.to_thread(prometheus.down)
        await runner.cleanup()
        each = dict.fromkeys(float(value) for _, value in took["values"])  # it is asked of every second
        return Sample([*each]), float(samples["value"][1]), kept

    def _scrape_every(self, seconds: int) -> None:
        """Have Prometheus scrape as often as that, with as much patience."""
        path = self.instance.folder / "prometheus" / "prometheus.yml"
        path.write_text(path.read_text().replace('"scrape_interval": "1s"', f'"scrape_interval": "{seconds}s"'))
        if process := self.instance.process("prometheus"):
            process.signal(signal.SIGHUP)


def _told(found: Looks) -> str:
    return (
        f": {min(found.requests):,} to {max(found.requests):,} requests, {statistics.median(found.work):.2f} s of the"
        f" processor, the loop kept for {Sample(found.silent)}"
    )


def _planned(namespace: str, name: str, views: RouteWatcher, measures: OperatorMetrics) -> Group:
    """Return a group at rest, of members that obey what the planner has decided."""
    group, key = Group(namespace, name), (namespace, name)
    spec = {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": name}]}
    group.set_spec(CustomResource(Metadata(name, uid=name, namespace=namespace), spec), None)
    group.revalidated = True
    for number in range(MEMBERS):
        group.pods.upsert(_pod(namespace, f"{name}-7d9f8b6c5-{number:05}", name), 0.0)
    for version in range(1, 4):  # granted, obeyed, settled
        found = plan(
            group.snapshot(1000.0, views.state_of(key, 1000.0, group.client_id_suffixes(1000.0)), {}),
            NOW + 60 * version,
        )
        if found.document:
            texts = {part: text for part, text in found.config_map_data.items() if isinstance(text, str)}
            labels = {"rota.dev/group": name}
            group.set_assignment(
                ConfigMap(Metadata(assignment_name(name), resource_version=str(version), labels=labels), texts)
            )
        for holder, queues in group.stored_assignment.shares.items():
            report = Report(member=holder.name, uid=holder.uid, generation=version, held=to_ranges(queues))
            group.pods[holder.name].record_report(report, 1000.0, 1000.0)
        measures.record_reconcile(ReconcileResult(group, found, 0.001, {}), 1000.0)
    return group


def _pod(namespace: str, name: str, group: str) -> Pod:
    body = a_pod(name, group)
    body["metadata"] |= {"namespace": namespace, "uid": f"0f8e1c5a-93b7-4d2f-8a61-{name[-5:]:>012}"}
    return msgspec.convert({**body, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}, Pod)


# The page.


async def _page(instance: Instance) -> list[Row]:
    """Load the page of a group of 10,000 queues, several times."""
    await asyncio.to_thread(chromium)
    served = ServedGroups(instance.address(), instance.port("page", 8080))
    served.put(a_detail(queues=MANY, members=[a_member(f"m{number}") for number in range(300)]))
    await served.start()
    async with a_browser(instance) as browser:
        await browser.size(1200, 800)
        loads = [await _load(browser, f"{served.url}#shop/orders") for _ in range(LOADS)]
    await served.stop()
    painted, drawn = zip(*loads, strict=True)
    return [
        Row("the page of a group of 10,000 queues, until something is painted", Sample(painted), target="≤ 1 s"),
        Row("the same, until the map of all queues is painted", Sample(drawn), target="≤ 1 s"),
    ]


async def _load(browser: Browser, url: str) -> tuple[float, float]:
    """Return the seconds until the first contentful paint, and until the map is painted."""
    await browser.call("Network.clearBrowserCache")
    await browser.open(url)
    await browser.wait_for(LIVE)
    found = await browser.wait_for(_PAINTED)
    return found[0] / 1000, found[1] / 1000


_PAINTED = """(() => {
    const [first] = performance.getEntriesByName("first-contentful-paint");
    const [shown] = performance.getEntriesByName("shown");
    return first && shown && document.querySelectorAll(".cell").length === 10000 && [first.startTime, shown.startTime];
})()"""
