"""A thousand groups, ten thousand pods, a hundred thousand queues: one operator on a real API server and broker.

The pods are kwok's; bench/crowd.py answers for them. The operator runs as a process: what it writes the API server
counts, what it keeps the kernel says.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import yaml

from bench.crowd import LABEL, Crowd
from bench.measure import Row, Sample
from ground.api import Api, ApiError
from ground.controlplane import ControlPlane
from ground.instance import Instance, temporary
from ground.kwok import Kwok
from ground.poll import soon
from ground.report import say
from ground.rocketmq import RocketMQ
from rota.brokers.rocketmq.client import Site
from rota.brokers.rocketmq.cluster import Cluster

CRDS = Path(__file__).parents[1] / "crds"
GROUPS, MEMBERS, QUEUES = int(os.environ.get("SCALE", "1000")), 10, 100
NODES = 10
AT_ONCE = 16
QUIET = 60.0  # seconds for which nothing may be written
CHANGED = min(100, GROUPS // 2)

PODS = "/api/v1/namespaces/default/pods"


def rows() -> Iterator[Row]:
    """Settle, start again, stand still, change, change a hundred at once, and fail over."""
    with temporary("bench-scale") as instance:
        cluster, rocketmq = ControlPlane(instance), RocketMQ(instance)
        cluster.up()
        rocketmq.up()
        kwok = Kwok(instance, cluster, f"{instance.block}.0.1/16")
        kwok.up()
        kwok.nodes(NODES)
        yield from asyncio.run(_Scale(instance, cluster, rocketmq).rows())


class _Scale:
    """One run."""

    def __init__(self, instance: Instance, cluster: ControlPlane, rocketmq: RocketMQ) -> None:
        self.instance, self.cluster, self.rocketmq = instance, cluster, rocketmq
        self.groups = [f"group-{number:04}" for number in range(GROUPS)]

    async def rows(self) -> list[Row]:
        async with Api.connect(self.cluster.kubeconfig) as self.api, Crowd(self.api) as self.crowd:
            await self._prepare()
            return [row async for row in self._measured()]
        raise AssertionError

    async def _prepare(self) -> None:
        for path in sorted(CRDS.glob("*.yaml")):
            body = yaml.safe_load(path.read_text())
            where = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
            await self.api.patch(where, body, "apply")
        say(f"making {GROUPS} topics of {QUEUES} queues.")
        broker = self.rocketmq.brokers[0].name
        client = Cluster(Site((self.rocketmq.name_server,)))
        await _all(partial(client.create_topic, name, broker, QUEUES) for name in self.groups)
        await client.close()
        say(f"making {GROUPS} groups and {GROUPS * MEMBERS} pods.")
        await soon(partial(self._made, self.groups[0]), 60)
        await _all(partial(self._made, name) for name in self.groups[1:])
        await _all(partial(self._pod, group, number) for group in self.groups for number in range(MEMBERS))

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
        mount = {"name": "documents", "mountPath": "/etc/rota"}
        sidecar = {"name": "rota-sidecar", "image": "rota", "restartPolicy": "Always", "volumeMounts": [mount]}
        spec = {
            "nodeSelector": Kwok.selector,
            "tolerations": Kwok.tolerations,
            "nodeName": f"kwok-{number % NODES}",
            "initContainers": [sidecar],
            "containers": [{"name": "app", "image": "app"}],
            "volumes": [{"name": "documents", "configMap": {"name": f"{group}-rota", "optional": True}}],
        }
        await self.api.create(PODS, {"metadata": {"name": f"{group}-{number}", "labels": {LABEL: group}}, "spec": spec})

    # What is measured.

    async def _measured(self) -> AsyncIterator[Row]:
        everything = f"{GROUPS:,} groups, {GROUPS * MEMBERS:,} pods, {GROUPS * QUEUES:,} queues"
        async with self._operator("first") as first:
            began = time.monotonic()
            await self._until(lambda: self.crowd.obey(self.groups), 600)
            yield Row(f"{everything}: all that is new is assigned and obeyed", Sample([time.monotonic() - began]))
            await self._quiet()
            print(f"{_resident(first.pid)} MiB after the first assignment", file=sys.stderr)
        async with self._operator("second", verbose=True) as second:
            began = time.monotonic()
            before = await self._writes()
            await self._until(lambda: "groups are known" in self._log("second"), 300)
            yield Row(
                f"{everything}: from a cold start to all settled", Sample([time.monotonic() - began]), target="≤ 60 s"
            )
            await asyncio.sleep(QUIET)
            written = sum((await self._writes()).values()) - sum(before.values())
            print(f"{written} writes in {QUIET:g} s after a cold start", file=sys.stderr)
            print(f"{_resident(second.pid)} MiB", file=sys.stderr)
            cost = [await self._change(self.groups[number]) for number in range(5)]
            print(f"writes for one member's change: {cost}", file=sys.stderr)
            seconds = [await self._changes(number) for number in range(3)]
            yield Row(f"{CHANGED} members end in as many groups: all settled", Sample(seconds), target="≤ 5 s")
            print(f"{_resident(second.pid)} MiB at most {_resident(second.pid, 'VmHWM')}", file=sys.stderr)
            async with self._operator("third") as third:
                await self._stands_by()
                second.kill()
                yield Row("the leader is killed: another writes", Sample([await self._over()]), target="≤ 17 s")
                async with self._operator("fourth"):
                    await self._stands_by()
                    third.send_signal(signal.SIGTERM)
                    yield Row("the leader ends: another writes", Sample([await self._over()]), target="≤ 3 s")

    @asynccontextmanager
    async def _operator(self, name: str, *, verbose: bool = False) -> AsyncIterator[asyncio.subprocess.Process]:
        address = self.instance.address(90 + len(name))
        argv = [sys.executable, "-m", "rota.cli", "operator", "--address", address, "--identity", name]
        with self._path(name).open("w") as log:
            environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
            process = await asyncio.create_subprocess_exec(
                *argv, *(["--verbose"] if verbose else []), env=environment, stderr=log
            )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()

    def _path(self, name: str) -> Path:
        return self.instance.folder / f"{name}.log"

    def _log(self, name: str) -> str:
        return self._path(name).read_text()

    async def _until(self, true: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        while not true():
            self.crowd.check()
            if time.monotonic() - began > seconds:
                raise TimeoutError
            await asyncio.sleep(0.1)

    async def _quiet(self) -> None:
        """Wait until nothing is written any more."""
        before: dict[str, float] = {}
        while (now := await self._writes()) != before:
            before = now
            await asyncio.sleep(5)

    async def _stands_by(self) -> None:
        await asyncio.sleep(10)

    async def _writes(self) -> dict[str, float]:
        """Return how often objects that the operator writes were written, by verb and kind."""
        found: dict[str, float] = {}
        text = await asyncio.to_thread(self.cluster.kubectl, "get", "--raw", "/metrics")
        for line in text.splitlines():
            if not line.startswith("apiserver_request_total{"):
                continue
            labels, _, value = line.removeprefix("apiserver_request_total{").rpartition("} ")
            told = dict(pair.split("=", 1) for pair in labels.replace('"', "").split(",") if "=" in pair)
            ours = told["resource"] in {"configmaps", "consumergroups", "events", "deployments"}
            if (ours or (told["resource"], told["subresource"]) == ("pods", "")) and told["verb"] in _WRITES:
                if told["resource"] == "pods" and told["verb"] != "PATCH":
                    continue
                found[f"{told['verb']} {told['resource']}"] = found.get(
                    f"{told['verb']} {told['resource']}", 0.0
                ) + float(value)
        return found

    async def _change(self, group: str) -> dict[str, float]:
        """End a member and let another come; return what that made the operator write."""
        before = await self._writes()
        await self._end(group)
        await self._until(lambda: self._whole(group, MEMBERS - 1), 60)
        await self._quiet()
        now = await self._writes()
        return {name: value - before.get(name, 0.0) for name, value in now.items() if value != before.get(name)}

    async def _changes(self, number: int) -> float:
        groups = self.groups[-CHANGED:]
        began = time.monotonic()
        await _all(partial(self._end, group) for group in groups)
        await self._until(lambda: all(self._whole(group, MEMBERS - 1 - number) for group in groups), 120)
        taken = time.monotonic() - began
        await self._quiet()
        return taken

    async def _over(self) -> float:
        """Return the seconds until a change that was made now is worked."""
        began = time.monotonic()
        group = self.groups[GROUPS // 2]
        there = sum(one.group == group for one in self.crowd.members.values())
        await self._end(group)
        await self._until(lambda: self._whole(group, there - 1), 60)
        return time.monotonic() - began

    async def _end(self, group: str) -> None:
        name = next(name for name, one in self.crowd.members.items() if one.group == group)
        await self.api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def _whole(self, group: str, members: int) -> bool:
        there = [one for one in self.crowd.members.values() if one.group == group]
        return len(there) == members and sum(len(one.member.lives) for one in there) == QUEUES


_WRITES = frozenset({"POST", "PUT", "PATCH", "APPLY"})


async def _all(work: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Do all of it, a few at once."""
    waiting = iter(work)

    async def one() -> None:
        for it in waiting:
            await it()

    await asyncio.gather(*(one() for _ in range(AT_ONCE)))


def _resident(pid: int, what: str = "VmRSS") -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith(what))
