"""A Java consumer joins and leaves the group of a Rota fleet, and the cost of detecting that at once.

Ours: a member reports the change to the operator's standing long poll. Peer: the same operator without standing polls,
which requests the group's consumers from the broker every 5 s.
"""

import asyncio
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web

from bench.compare import QUEUES
from bench.fleets import LocalGround, Rota, standing
from bench.measure import Row, Sample
from bench.reckoning import Span, count_repeats, shared_of, total_seconds, united
from ground import peers
from ground.deliveries import Came, by_queue
from ground.poll import eventually
from ground.report import say
from kube.members import a_pod, running_status
from rota.http_server import AdmissionLimit, ServerLimits, listen
from rota.kube.client.objects import REPORT_PORT, Pod
from rota.kube.members.report_client import ReportClient
from rota.kube.members.report_watchers import ReportWatchers, WatcherEvents
from rota.kube.state.group import Group
from rota.reports import FullReport

MEMBERS = 2
VISITS = int(os.environ.get("VISITS", "8"))
RATE = 500  # messages a second
STAY_SECONDS = 8.0  # of a visit, and between two visits
PATIENCE = 120.0
SLOW_START_SECONDS = 60.0  # of a JVM on a busy machine
GROUPS = int(os.environ.get("GROUPS", "1000"))
MEASURED_SECONDS = 60.0
ADDRESS = "127.0.0.9"

WITHOUT_STANDING_POLLS = """
from rota.kube.reconcile import controller
controller.MAX_STANDING_POLLS = 0
from rota.cli import main
main(prog_name="rota")
"""


class Polling(LocalGround):
    """The same ground with an operator that holds no standing polls."""

    program = ("-c", WITHOUT_STANDING_POLLS)


@dataclass(frozen=True)
class Visits:
    """The effects of several visits of a Java consumer."""

    twice: int
    overlaps: list[float]  # of each visit, the seconds for which two members consumed one queue


def rows() -> Iterator[Row]:
    """Let Java consumers join and leave; then hold the standing polls of a thousand groups."""
    ours, without_polls = (_measure_visits(kind) for kind in (LocalGround, Polling))
    what = f"a Java consumer joins and leaves {VISITS} times in a group of {MEMBERS} members, {RATE} messages a second"
    twice = f"{ours.twice:,} duplicates (without standing polls: {without_polls.twice:,})"
    yield Row(f"{what}: {twice}; both consume a queue", Sample(ours.overlaps), Sample(without_polls.overlaps))
    seconds, mebibytes = asyncio.run(_measure_cost())
    label = f"{GROUPS:,} standing polls: CPU of the operator a minute; {mebibytes:.0f} MiB"
    yield Row(label, Sample([seconds * 60.0 / MEASURED_SECONDS]), target="≤ 3 s")


def _measure_visits(kind: type[LocalGround]) -> Visits:
    with standing("bench-joins", kind) as ground:
        fleet = Rota(ground, "joins", QUEUES)
        fleet.make(MEMBERS)
        seconds = (
            VISITS * (2 * STAY_SECONDS + SLOW_START_SECONDS) + SLOW_START_SECONDS
        )  # the producer must outlast the visits
        producer = peers.producer(ground.rocketmq, fleet.topic, int(RATE * seconds), rate=RATE, poll=1000)
        eventually(lambda: producer.lines("sent"), PATIENCE)
        begin_times: list[float] = []
        visitors: list[peers.Peer] = []
        for number in range(VISITS):
            time.sleep(STAY_SECONDS)
            begin_times.append(time.time())
            visitor = peers.push_consumer(ground.rocketmq, fleet.topic, fleet.topic, instance=f"java-{number}")
            visitors.append(visitor)
            eventually(partial(visitor.lines, "message"), PATIENCE)
            time.sleep(STAY_SECONDS)
            visitor.stop()
        time.sleep(STAY_SECONDS)
        deliveries = fleet.came()
        for visitor in visitors:
            deliveries += _deliveries_to(visitor)
        fleet.end()
    visits = Visits(count_repeats(deliveries), [*_overlaps(deliveries, begin_times)])
    say(f"{kind.__name__}: {visits}")
    return visits


def _deliveries_to(peer: peers.Peer) -> Iterator[Came]:
    for line in peer.lines("message"):
        if not line["reconsumeTimes"]:
            yield Came(line["at"] / 1e6, line["number"], line["queue"], peer.program, line["born"] / 1e3)


def _overlaps(deliveries: list[Came], begin_times: list[float]) -> Iterator[float]:
    for begin, end in zip(begin_times, [*begin_times[1:], time.time()], strict=True):
        queues = by_queue(delivery for delivery in deliveries if begin <= delivery.at < end)
        shared: list[Span] = []
        for messages in queues.values():
            shared += shared_of(messages)
        yield total_seconds(united(shared))


# The cost of standing polls.


async def _measure_cost() -> tuple[float, float]:
    """Return the CPU seconds and the memory of standing polls at members in a process of their own."""
    members = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.joins", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert members.stdout  # noqa: S101 - a pipe was requested
    await members.stdout.readline()
    reports = ReportClient()
    limit = AdmissionLimit(GROUPS)
    memory_before = _mebibytes()
    watchers = []
    for number in range(GROUPS):
        group = _group(f"orders-{number}")
        watchers.append(ReportWatchers(group, reports, WatcherEvents(lambda _: None, lambda: None), limit))
        watchers[-1].update_polls()
    await asyncio.sleep(10.0)  # until all polls are held
    began = time.process_time()
    await asyncio.sleep(MEASURED_SECONDS)
    seconds = time.process_time() - began
    memory = _mebibytes() - memory_before
    for watcher in watchers:
        watcher.stop()
    await reports.close()
    members.kill()
    await members.wait()
    return seconds, memory


def _group(name: str) -> Group:
    """Return a group of one Ready member."""
    body = a_pod("m", name, signs=False)
    body["metadata"] |= {"uid": "uid-m", "namespace": "shop", "resourceVersion": "1"}
    group = Group("shop", name)
    group.pods.upsert(msgspec.convert({**body, "status": running_status(ADDRESS, ready=True)}, Pod), 0.0)
    group.pods["m"].record_report(_report(), 1.0, 1.0)
    return group


def _report() -> FullReport:
    return FullReport(member="m", uid="uid-m", generation=1, consumers_changed=0)


def _mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def _serve_members() -> None:
    """Serve the reports of all members as they do: the first one at once, later ones when the long poll times out."""

    async def report(request: web.Request) -> web.Response:
        if "after" in request.query:
            await asyncio.sleep(float(request.query["wait"].removesuffix("s")))
        return web.Response(body=msgspec.json.encode(_report()), content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/report", report)
    await listen(app, ADDRESS, REPORT_PORT, limits=ServerLimits(4 * GROUPS))
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_members())
