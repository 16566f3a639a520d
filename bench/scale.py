"""A thousand groups, ten thousand pods, a hundred thousand queues: one operator on a real API server and broker.

The pods are kwok's; bench/crowd.py answers for them. The operator runs as a process: its writes are read from the API
server's metrics, its memory and CPU from /proc.
"""

import asyncio
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench.crowd import Crowd
from bench.measure import Row, Sample
from ground.api import Api, ApiError
from ground.controlplane import ControlPlane
from ground.instance import Instance, temporary
from ground.kwok import Kwok
from ground.ours import define
from ground.poll import answers, eventually, soon
from ground.report import say
from ground.rocketmq import RocketMQ
from kube.members import a_pod
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig

GROUPS = int(os.environ.get("SCALE", "1000"))
MEMBERS, QUEUES = 10, 100  # of each group
NODES = 10
AT_ONCE = 16
QUIET = 60.0  # seconds in which the operator may write nothing
CHANGED = min(100, GROUPS // 4)
FOLLOWED = 3  # times
OPERATORS = ("first", "second", *(f"standby-{number}" for number in range(2 * FOLLOWED)))
POKES = 16  # caused by the end of one member with the strategy Averagely

PODS = "/api/v1/namespaces/default/pods"

T = TypeVar("T")


def rows() -> Iterator[Row]:
    """Measure a first start, a restart, an idle minute, single and simultaneous changes, and failovers."""
    with scaled() as scale:
        yield from asyncio.run(scale.rows())


@contextmanager
def scaled() -> Iterator["Scale"]:
    """Start a cluster with simulated nodes, and a broker."""
    with temporary("bench-scale") as instance:
        cluster, rocketmq = ControlPlane(instance), RocketMQ(instance)
        cluster.up()
        rocketmq.up()
        kwok = Kwok(instance, cluster, f"{instance.block}.0.1/16")
        kwok.up()
        kwok.nodes(NODES)
        yield Scale(instance, cluster, rocketmq)


class Scale:
    """One run."""

    def __init__(self, instance: Instance, cluster: ControlPlane, rocketmq: RocketMQ) -> None:
        self.instance = instance
        self.cluster = cluster
        self.rocketmq = rocketmq
        self.groups = list(map("group-{:04}".format, range(GROUPS)))

    async def rows(self) -> list[Row]:
        """Run all measurements; report each as soon as it is done."""
        async with self.prepared():
            rows = []
            async for row in self._measured():
                say(f"{row.what}: {row.ours}.")
                rows.append(row)
            return rows

    @asynccontextmanager
    async def prepared(self) -> AsyncIterator[None]:
        """Create all topics, groups and pods, and answer for the pods."""
        async with Api.connect(self.cluster.kubeconfig) as self.api, Crowd(self.api) as self.crowd:
            await self._prepare()
            yield

    async def _prepare(self) -> None:
        await define(self.api)
        say(f"making {GROUPS} topics of {QUEUES} queues.")
        broker = self.rocketmq.brokers[0].name
        client = AdminClient(ConnectionConfig((self.rocketmq.name_server,)))
        await all_of(partial(client.create_topic, broker=broker, queues=QUEUES), self.groups)
        await client.close()
        say(f"making {GROUPS} groups and {GROUPS * MEMBERS} pods.")
        await soon(partial(self._create_group, self.groups[0]))
        await all_of(self._create_group, self.groups[1:])
        await all_of(self._create_pods, self.groups)

        await self._wait_until(lambda: self.crowd.address_count == GROUPS * MEMBERS, 600)

    async def _create_group(self, group: str) -> bool:
        spec = {
            "broker": {"rocketmq": {"nameServers": [self.rocketmq.name_server]}},
            "subscriptions": [{"topic": group}],
        }
        body = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": group}, "spec": spec}
        try:
            await self.api.create("/apis/rota.dev/v1alpha1/namespaces/default/consumergroups", body)
        except ApiError as error:  # just after its definition, a kind is not served yet
            if error.status not in {404, 429, 503}:
                raise
            return False
        return True

    async def _create_pods(self, group: str) -> None:
        for number in range(MEMBERS):
            await self._create_pod(group, number)

    async def _create_pod(self, group: str, number: int) -> None:
        pod = a_pod(f"{group}-{number}", group)
        pod["spec"]["nodeName"] = f"kwok-{number % NODES}"
        await self.api.create(PODS, pod)

    # Measurements.

    async def _measured(self) -> AsyncIterator[Row]:
        everything = f"{GROUPS:,} groups, {GROUPS * MEMBERS:,} pods, {GROUPS * QUEUES:,} queues"
        async with self.operator("first"):
            seconds = await _measure_seconds(self._wait_until(lambda: self.crowd.all_obey(self.groups), 600))
            yield Row(f"{everything}: all new, until every member obeys", Sample([seconds]))
            await soon(self._all_have_lag, 180)  # the last field that the operator fills in for a new group
            await self._wait_until_quiet()
        writes_before = await self._read_write_counts()
        async with self.operator("second") as second:
            seconds = await _measure_seconds(self._wait_until(partial(self._knows_all_groups, "second"), 300))
            await asyncio.sleep(QUIET)
            writes = await self._count_writes(writes_before)
            details = f"then {writes} writes in {QUIET:g} s, {_resident(second.pid)} MiB resident"
            what = f"the same: a cold start, until the operator knows all groups; {details}"
            yield Row(what, Sample([seconds]), target="≤ 60 s, 0, 400 MiB")
            costs = [await self._count_writes_of_change(group) for group in self.groups[:5]]
            cpu_before = _processor(second.pid)
            durations = [await self._end_members_at_once(number) for number in range(3)]
            cpu_seconds = (_processor(second.pid) - cpu_before) / 3
            writes = sorted(costs)[2]
            details = f"{cpu_seconds:.1f} s of CPU of the operator; one alone takes {writes} writes besides the pokes"
            what = (
                f"{CHANGED} members end at once, in as many groups, until all queues are consumed elsewhere; {details}"
            )
            yield Row(what, Sample(durations), target="≤ 12 s")
            await self._follow_sticky()
            durations = [await self._end_members_at_once(number) for number in range(3, 6)]
            yield Row("the same with Sticky", Sample(durations), target="≤ 5 s")
            yield Row(
                f"{POKES * CHANGED:,} pokes alone, sent by a client that does nothing else",
                Sample([await self._measure_pokes()]),
            )
            failovers = await self._measure_failovers(second)
            for way, target in (("killed", "≤ 17 s"), ("ended", "≤ 3 s")):
                yield Row(
                    f"the leader is {way}, until a change made then is applied", Sample(failovers[way]), target=target
                )

    async def _all_have_lag(self) -> bool:
        groups = await self.api.list("/apis/rota.dev/v1alpha1/namespaces/default/consumergroups")
        return all("lag" in group.get("status", {}) for group in groups)

    async def _measure_failovers(self, leader: asyncio.subprocess.Process) -> dict[str, list[float]]:
        """Return the seconds until a change takes effect that is made just after the leader was killed, or ended."""
        durations: dict[str, list[float]] = {"killed": [], "ended": []}
        async with AsyncExitStack() as operators:
            for number, way in enumerate([*durations] * FOLLOWED):
                name = OPERATORS[2 + number]
                standby = await operators.enter_async_context(self.operator(name))
                await self._wait_for_standby(name)
                leader.send_signal(signal.SIGKILL if way == "killed" else signal.SIGTERM)
                durations[way].append(await self._measure_change(self.groups[GROUPS // 2 + number]))
                await self._wait_until(partial(self._knows_all_groups, name), 300)
                leader = standby
        return durations

    @asynccontextmanager
    async def operator(
        self, name: str, wrap: Callable[..., Sequence[str]] = lambda *arguments: arguments
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run an operator; `wrap` adds to the arguments for Python those that run it under a limit."""
        options = ("operator", "--address", self.address(name), "--identity", name)
        argv = [sys.executable, *wrap("-m", "rota.cli", *options)]
        with self._log_path(name).open("w") as log:
            environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
            process = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=log)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()

    def address(self, name: str) -> str:
        """Return the address at which an operator listens."""
        return self.instance.address(90 + OPERATORS.index(name))

    async def until_all_known(self, name: str) -> None:
        """Wait until an operator has read all groups; the first operator also writes all assignments meanwhile."""
        await self._wait_until(partial(self._knows_all_groups, name), 900)

    def _knows_all_groups(self, name: str) -> bool:
        return "groups were observed" in self._log_path(name).read_text()

    def _log_path(self, name: str) -> Path:
        return self.instance.folder / f"{name}.log"

    async def _wait_until(self, is_true: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        while not is_true():
            self.crowd.raise_watch_error()
            if time.monotonic() - began > seconds:
                raise TimeoutError
            await asyncio.sleep(0.1)

    async def _wait_until_quiet(self) -> None:
        """Wait until the operator writes nothing for five seconds."""
        previous: dict[str, int] = {}
        while (now := await self._read_write_counts()) != previous:
            previous = now
            await asyncio.sleep(5)

    async def _wait_for_standby(self, name: str) -> None:
        """Wait until a standby has read all objects."""
        address = self.address(name)
        await asyncio.to_thread(eventually, partial(answers, f"http://{address}:8080/readyz"), 60)

    async def _count_writes(self, previous: Mapping[str, int]) -> int:
        return sum((await self._read_write_counts()).values()) - sum(previous.values())

    async def _read_write_counts(self) -> dict[str, int]:
        """Return the number of writes, by verb and kind, of objects that only the operator writes."""
        text = await asyncio.to_thread(self.cluster.kubectl, "get", "--raw", "/metrics")
        counts: Counter[str] = Counter()
        for labels, count in re.findall(r"^apiserver_request_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            names = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            request = f"{names['verb']} {names['resource']}/{names['subresource']}"
            if re.fullmatch(_OPERATOR_WRITES, request):
                counts[request] += round(float(count))
        return counts

    async def _count_writes_of_change(self, group: str) -> int:
        """End a member; return the number of writes that followed, without the pokes."""
        writes_before = await self._read_write_counts()
        await self._end_member(group)
        await self._wait_until(lambda: self._is_settled(group, MEMBERS - 1), 60)
        await self._wait_until_quiet()
        writes_after = await self._read_write_counts()
        return sum(
            count - writes_before.get(request, 0) for request, count in writes_after.items() if request != "PATCH pods/"
        )

    async def _end_members_at_once(self, number: int) -> float:
        groups = self.groups[-CHANGED:]
        began = time.monotonic()
        await all_of(self._end_member, groups)
        await self._wait_until(lambda: all(self._is_settled(group, MEMBERS - 1 - number) for group in groups), 120)
        seconds = time.monotonic() - began
        await self._wait_until_quiet()
        return seconds

    async def _measure_pokes(self) -> float:
        """Return the seconds that the API server takes for as many pokes as `CHANGED` ended members cause."""
        pods = [name for group in self.groups[:CHANGED] for name in self.crowd.groups[group]]

        async def poke(number: int) -> None:
            patch = {"metadata": {"annotations": {"bench": f"{number}"}}}
            await self.api.patch(f"{PODS}/{pods[number % len(pods)]}", patch)

        return await _measure_seconds(all_of(poke, range(POKES * CHANGED)))

    async def _follow_sticky(self) -> None:
        namespace_path = "/apis/rota.dev/v1alpha1/namespaces/default"
        policy = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "sticky"}}
        await self.api.create(f"{namespace_path}/rebalancepolicies", {**policy, "spec": {"strategy": "Sticky"}})
        patch = {"spec": {"policyRef": {"name": "sticky"}}}
        groups = [f"{namespace_path}/consumergroups/{group}" for group in self.groups[-CHANGED:]]
        await all_of(partial(self.api.patch, body=patch), groups)
        await self._wait_until_quiet()

    async def _measure_change(self, group: str) -> float:
        """End a member now; return the seconds until the remaining members own all queues."""
        began = time.monotonic()
        await self._end_member(group)
        await self._wait_until(lambda: self._is_settled(group, MEMBERS - 1), 60)
        return time.monotonic() - began

    async def _end_member(self, group: str) -> None:
        name = next(iter(self.crowd.groups[group]))
        await self.api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def _is_settled(self, group: str, expected: int) -> bool:
        members = self.crowd.groups[group].values()
        return len(members) == expected and sum(len(member.logic.leases) for member in members) == QUEUES


_OPERATOR_WRITES = r"(POST|PUT|PATCH|APPLY) (configmaps|consumergroups|events|deployments|secrets)/.*|PATCH pods/"


async def _measure_seconds(work: Awaitable[object]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


async def all_of(call: Callable[[T], Awaitable[object]], arguments: Iterable[T]) -> None:
    """Make a call for each argument, `AT_ONCE` of them concurrently."""
    pending = iter(arguments)

    async def call_in_turn() -> None:
        for argument in pending:
            await call(argument)

    await asyncio.gather(*(call_in_turn() for _ in range(AT_ONCE)))


def _processor(pid: int) -> float:
    """Return the CPU seconds of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS"))
