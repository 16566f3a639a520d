"""A thousand groups, ten thousand pods, a hundred thousand queues: one operator on a real API server and broker.

The pods are kwok's; bench/crowd.py answers for them. The operator runs as a process: what it writes the API server
counts, what it keeps the kernel says.
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

GROUPS, MEMBERS, QUEUES = int(os.environ.get("SCALE", "1000")), 10, 100
NODES = 10
AT_ONCE = 16
QUIET = 60.0  # seconds for which nothing may be written
CHANGED = min(100, GROUPS // 4)
FOLLOWED = 3  # times
OPERATORS = ("first", "second", *(f"standby-{number}" for number in range(2 * FOLLOWED)))
POKES = 16  # that a member's end makes where the strategy is Averagely

PODS = "/api/v1/namespaces/default/pods"


def rows() -> Iterator[Row]:
    """Settle, start again, stand still, change, change a hundred at once, and fail over."""
    with scaled() as scale:
        yield from asyncio.run(scale.rows())


@contextmanager
def scaled() -> Iterator["Scale"]:
    """Stand up a cluster with simulated nodes, and a broker."""
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
        self.instance, self.cluster, self.rocketmq = instance, cluster, rocketmq
        self.groups = [f"group-{number:04}" for number in range(GROUPS)]

    async def rows(self) -> list[Row]:
        """Return what was measured."""
        async with self.prepared():
            found = []
            async for row in self._measured():
                say(f"{row.what}: {row.ours}.")
                found.append(row)
            return found

    @asynccontextmanager
    async def prepared(self) -> AsyncIterator[None]:
        """Make all groups, topics and pods, and answer for the pods."""
        async with Api.connect(self.cluster.kubeconfig) as self.api, Crowd(self.api) as self.crowd:
            await self._prepare()
            yield

    async def _prepare(self) -> None:
        await define(self.api)
        say(f"making {GROUPS} topics of {QUEUES} queues.")
        broker = self.rocketmq.brokers[0].name
        client = AdminClient(ConnectionConfig((self.rocketmq.name_server,)))
        await all_of(partial(client.create_topic, name, broker, QUEUES) for name in self.groups)
        await client.close()
        say(f"making {GROUPS} groups and {GROUPS * MEMBERS} pods.")
        await soon(partial(self._made, self.groups[0]))
        await all_of(partial(self._made, name) for name in self.groups[1:])
        await all_of(partial(self._pod, group, number) for group in self.groups for number in range(MEMBERS))

        await self._until(lambda: self.crowd.addressed == GROUPS * MEMBERS, 600)

    async def _made(self, group: str) -> bool:
        spec = {
            "broker": {"rocketmq": {"nameServers": [self.rocketmq.name_server]}},
            "subscriptions": [{"topic": group}],
        }
        body = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": group}, "spec": spec}
        try:
            await self.api.create("/apis/rota.dev/v1alpha1/namespaces/default/consumergroups", body)
        except ApiError as error:  # just after its definition, a kind is not there yet
            if error.status not in {404, 429, 503}:
                raise
            return False
        return True

    async def _pod(self, group: str, number: int) -> None:
        pod = a_pod(f"{group}-{number}", group)
        pod["spec"]["nodeName"] = f"kwok-{number % NODES}"
        await self.api.create(PODS, pod)

    # What is measured.

    async def _measured(self) -> AsyncIterator[Row]:
        everything = f"{GROUPS:,} groups, {GROUPS * MEMBERS:,} pods, {GROUPS * QUEUES:,} queues"
        async with self.operator("first"):
            took = await _seconds(self._until(lambda: self.crowd.obey(self.groups), 600))
            yield Row(f"{everything}: all of it new, until everybody obeys", Sample([took]))
            await soon(self._lag_told, 180)  # the last thing that a new group is told
            await self._quiet()
        before = await self._writes()
        async with self.operator("second") as second:
            took = await _seconds(self._until(partial(self._knows_all, "second"), 300))
            await asyncio.sleep(QUIET)
            told = f"then {await self._written(before)} writes in {QUIET:g} s, {_resident(second.pid)} MiB resident"
            yield Row(
                f"the same: a cold start, until all is known; {told}", Sample([took]), target="≤ 60 s, 0, 400 MiB"
            )
            costs = [await self._cost(group) for group in self.groups[:5]]
            work = _processor(second.pid)
            seconds = [await self._changes(number) for number in range(3)]
            work = (_processor(second.pid) - work) / 3
            told = (
                f"{work:.1f} s of the operator's processor; one alone takes {sorted(costs)[2]} writes besides the pokes"
            )
            what = f"{CHANGED} members end at once, in as many groups, until all works elsewhere; {told}"
            yield Row(what, Sample(seconds), target="≤ 5 s, 5")
            await self._follow_sticky()
            seconds = [await self._changes(number) for number in range(3, 6)]
            yield Row("the same where the policy is Sticky, which moves what it must", Sample(seconds), target="≤ 5 s")
            yield Row(
                f"{POKES * CHANGED:,} pokes alone, by somebody who does nothing else", Sample([await self._pokes()])
            )
            found = await self._follow(second)
            for how, target in (("killed", "≤ 17 s"), ("ended", "≤ 3 s")):
                yield Row(f"the leader is {how}, until a change is worked", Sample(found[how]), target=target)

    async def _lag_told(self) -> bool:
        groups = await self.api.list("/apis/rota.dev/v1alpha1/namespaces/default/consumergroups")
        return all("lag" in it.get("status", {}) for it in groups)

    async def _follow(self, leader: asyncio.subprocess.Process) -> dict[str, list[float]]:
        """Return the seconds until a change is worked that is made as the leader is killed, or ends."""
        found: dict[str, list[float]] = {"killed": [], "ended": []}
        async with AsyncExitStack() as operators:
            for number, how in enumerate([*found] * FOLLOWED):
                name = OPERATORS[2 + number]
                standby = await operators.enter_async_context(self.operator(name))
                await self._standing_by(name)
                leader.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
                found[how].append(await self._over(self.groups[GROUPS // 2 + number]))
                await self._until(partial(self._knows_all, name), 300)
                leader = standby
        return found

    @asynccontextmanager
    async def operator(
        self, name: str, program: Callable[..., Sequence[str]] = lambda *arguments: arguments
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run an operator; `program` returns the arguments for Python that run it under a limit."""
        options = ("operator", "--address", self.address(name), "--identity", name)
        argv = [sys.executable, *program("-m", "rota.cli", *options)]
        with self._path(name).open("w") as log:
            environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
            process = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=log)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()

    def address(self, name: str) -> str:
        """Return where an operator answers."""
        return self.instance.address(90 + OPERATORS.index(name))

    async def until_all_known(self, name: str) -> None:
        """Wait until an operator knows all groups; the first one writes everything that is new."""
        await self._until(partial(self._knows_all, name), 900)

    def _knows_all(self, name: str) -> bool:
        return "groups were observed" in self._path(name).read_text()

    def _path(self, name: str) -> Path:
        return self.instance.folder / f"{name}.log"

    async def _until(self, true: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        while not true():
            self.crowd.check()
            if time.monotonic() - began > seconds:
                raise TimeoutError
            await asyncio.sleep(0.1)

    async def _quiet(self) -> None:
        """Wait until nothing is written any more."""
        before: dict[str, int] = {}
        while (now := await self._writes()) != before:
            before = now
            await asyncio.sleep(5)

    async def _standing_by(self, name: str) -> None:
        """Wait until an operator sees all that there is."""
        address = self.address(name)
        await asyncio.to_thread(eventually, partial(answers, f"http://{address}:8080/readyz"), 60)

    async def _written(self, before: Mapping[str, int]) -> int:
        return sum((await self._writes()).values()) - sum(before.values())

    async def _writes(self) -> dict[str, int]:
        """Return how often objects were written that only the operator writes, by verb and kind."""
        text = await asyncio.to_thread(self.cluster.kubectl, "get", "--raw", "/metrics")
        found: Counter[str] = Counter()
        for labels, count in re.findall(r"^apiserver_request_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            what = f"{told['verb']} {told['resource']}/{told['subresource']}"
            if re.fullmatch(_OURS, what):
                found[what] += round(float(count))
        return found

    async def _cost(self, group: str) -> int:
        """End a member; return how many writes besides pokes that made."""
        before = await self._writes()
        await self._end(group)
        await self._until(lambda: self._whole(group, MEMBERS - 1), 60)
        await self._quiet()
        now = await self._writes()
        return sum(count - before.get(what, 0) for what, count in now.items() if what != "PATCH pods/")

    async def _changes(self, number: int) -> float:
        groups = self.groups[-CHANGED:]
        began = time.monotonic()
        await all_of(partial(self._end, group) for group in groups)
        await self._until(lambda: all(self._whole(group, MEMBERS - 1 - number) for group in groups), 120)
        took = time.monotonic() - began
        await self._quiet()
        return took

    async def _pokes(self) -> float:
        """Return the seconds that the API server takes for as many changes of pods as a hundred changes make."""
        pods = [name for group in self.groups[:CHANGED] for name in self.crowd.groups[group]]
        changes = [
            partial(
                self.api.patch,
                f"{PODS}/{pods[number % len(pods)]}",
                {"metadata": {"annotations": {"bench": f"{number}"}}},
            )
            for number in range(POKES * CHANGED)
        ]
        return await _seconds(all_of(changes))

    async def _follow_sticky(self) -> None:
        where = "/apis/rota.dev/v1alpha1/namespaces/default"
        policy = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "sticky"}}
        await self.api.create(f"{where}/rebalancepolicies", {**policy, "spec": {"strategy": "Sticky"}})
        wish = {"spec": {"policyRef": {"name": "sticky"}}}
        groups = [f"{where}/consumergroups/{group}" for group in self.groups[-CHANGED:]]
        await all_of(partial(self.api.patch, group, wish) for group in groups)
        await self._quiet()

    async def _over(self, group: str) -> float:
        """Return the seconds until a change that is made now is worked."""
        began = time.monotonic()
        await self._end(group)
        await self._until(lambda: self._whole(group, MEMBERS - 1), 60)
        return time.monotonic() - began

    async def _end(self, group: str) -> None:
        name = next(iter(self.crowd.groups[group]))
        await self.api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def _whole(self, group: str, members: int) -> bool:
        there = self.crowd.groups[group].values()
        return len(there) == members and sum(len(one.member.leases) for one in there) == QUEUES


_OURS = r"(POST|PUT|PATCH|APPLY) (configmaps|consumergroups|events|deployments|secrets)/.*|PATCH pods/"


async def _seconds(work: Awaitable[object]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


async def all_of(work: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Do all of it, a few at once."""
    waiting = iter(work)

    async def one() -> None:
        for it in waiting:
            await it()

    await asyncio.gather(*(one() for _ in range(AT_ONCE)))


def _processor(pid: int) -> float:
    """Return the seconds that a process has worked."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS"))
