"""Rebalances on a real API server and a real broker: the operator as a process, beside Java clients that decide alone.

Members are simulated in this process: their pods are real objects, and they answer and obey as sidecars do, at once.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.measure import Row, Sample
from ground import peers
from ground.api import Api, Object
from ground.cluster import Cluster
from ground.controlplane import ControlPlane
from ground.instance import Instance, temporary
from ground.ours import VERSION, define, made
from ground.peers import Peer
from ground.poll import eventually, soon
from ground.rocketmq import RocketMQ
from kube.members import GroupMembers, MemberPod, a_node

NAMESPACE, GROUP, TOPIC, THEIRS = "default", "orders", "orders", "theirs"
QUEUES, MEMBERS, TIMES = 12, 3, 20
DEBOUNCE = 0.5  # by default; it is not what is measured
PROBES = 4.0  # seconds until a kubelet finds a hung sidecar not ready: 1 s a probe, 1 s patience, twice
NEVER = 40.0  # seconds after which we do not wait any longer for the Java clients


def rows() -> Iterator[Row]:
    """Let members come, go, crash and hang, and queues be added."""
    with temporary("bench-rebalance") as instance:
        cluster, rocketmq = ControlPlane(instance), RocketMQ(instance)
        cluster.up()
        rocketmq.up()
        rocketmq.create_topic(TOPIC, QUEUES)
        rocketmq.create_topic(THEIRS, QUEUES)
        ours = asyncio.run(_ours(instance, cluster, rocketmq))
        left, added, hung = _java(rocketmq)
    written, obeyed = "p50 ≤ 100 ms, p99 ≤ 500 ms", "p50 ≤ 300 ms, p99 ≤ 2 s"
    yield Row("a pod is ready -> a document with its entry is written", ours["joined"], target=written)
    yield Row("a pod is gone -> a document that gives its queues to others is written", ours["granted"], target=written)
    yield Row("a pod is ready -> it works its queues, over the debounce", ours["works"], target=obeyed)
    yield Row("a pod is deleted -> its queues are at work elsewhere", ours["left"], left, obeyed)
    yield Row("a pod is gone -> its queues are at work elsewhere", ours["gone"], target=obeyed)
    yield Row("queues are added -> they are at work", ours["added"], added, "≤ 6 s")
    yield Row(
        f"a member hangs -> its queues are at work elsewhere (Java: not in {NEVER:g} s)", ours["hung"], hung, "≤ 15 s"
    )


async def _ours(instance: Instance, cluster: Cluster, rocketmq: RocketMQ) -> dict[str, Sample]:
    numbers = iter(range(1, 250))
    async with Api.connect(cluster.kubeconfig) as api:
        await _prepare(api, rocketmq)
        async with (
            a_node(api),
            GroupMembers(api, NAMESPACE, GROUP, lambda: f"{instance.block}.99.{next(numbers)}") as fleet,
            _operator(cluster.kubeconfig, instance),
        ):
            await fleet.add(*(f"first-{number}" for number in range(MEMBERS)))
            await _working(fleet, 60)
            found = await _come_and_go(fleet)
            added = [await _added(fleet, rocketmq, QUEUES + 4 * number) for number in range(1, 4)]
            hung = [await _hung(fleet, number) for number in range(2)]
    return {name: Sample(seconds) for name, seconds in {**found, "added": added, "hung": hung}.items()}


async def _prepare(api: Api, rocketmq: RocketMQ) -> None:
    await define(api)
    where = f"/apis/{VERSION}/namespaces/{NAMESPACE}"
    broker = {"rocketmq": {"nameServers": [rocketmq.name_server]}}
    wanted: Object = {"broker": broker, "subscriptions": [{"topic": TOPIC}], "policyRef": {"name": "sticky"}}
    await api.create(f"{where}/rebalancepolicies", made("RebalancePolicy", "sticky", strategy="Sticky"))
    await api.create(f"{where}/consumergroups", made("ConsumerGroup", GROUP, **wanted))

    async def account() -> bool:  # pods need it
        return bool(await api.list(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"))

    await soon(account)


@asynccontextmanager
async def _operator(kubeconfig: Path, instance: Instance) -> AsyncIterator[None]:
    argv = [sys.executable, "-m", "rota.cli", "operator", "--namespace", NAMESPACE, "--address", instance.address(98)]
    with (instance.folder / "operator.log").open("w") as log:
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        process = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def _working(fleet: GroupMembers, seconds: float = 30.0) -> None:
    """Wait until every queue of the topic is worked, evenly."""

    async def all_are() -> bool:
        shares = fleet.shares.values()
        return sum(shares) >= QUEUES and max(shares) - min(shares) <= 1

    await soon(all_are, seconds)


async def _seconds(began: float, true: Callable[[], bool], limit: float = 60.0) -> float:
    """Return the seconds from a moment until something is so."""
    while not true():
        if time.monotonic() - began > limit:
            raise TimeoutError
        await asyncio.sleep(0.002)
    return time.monotonic() - began


async def _come_and_go(fleet: GroupMembers) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ("joined", "works", "left", "granted", "gone")}
    for number in range(2 * TIMES):
        await asyncio.sleep(2 * DEBOUNCE)
        one = MemberPod(fleet, f"guest-{number}", fleet.addresses())
        fleet.members[one.name] = one
        await one.start(ready=False)
        await asyncio.sleep(2 * DEBOUNCE)
        began = time.monotonic()
        ready = asyncio.create_task(one.write_status(ready=True))
        documented = await _seconds(began, lambda: one.name in fleet.documents[-1]["members"])  # noqa: B023
        found["joined"].append(documented)
        found["works"].append(await _seconds(began, lambda: bool(fleet.shares[one.name])) - DEBOUNCE)  # noqa: B023
        await ready
        await _working(fleet)
        await asyncio.sleep(2 * DEBOUNCE)
        del fleet.members[one.name]
        every, began = sum(fleet.shares.values()), time.monotonic()
        if number % 2:
            fleet.members[one.name] = one
            leaving = asyncio.create_task(one.delete_pod())
            found["left"].append(await _seconds(began, lambda: _elsewhere(fleet, one, every)))  # noqa: B023
            await leaving
            del fleet.members[one.name]
            await one.kill()
        else:
            await (
                one.stop_server()
            )  # its process is dead before its pod is gone; how long our stand-in takes to die is not meant
            documents, began = len(fleet.documents), time.monotonic()
            ending = asyncio.create_task(one.kill())
            found["granted"].append(await _seconds(began, lambda: len(fleet.documents) > documents))  # noqa: B023
            found["gone"].append(await _seconds(began, lambda: _elsewhere(fleet, one, every)))  # noqa: B023
            await ending
    return found


def _elsewhere(fleet: GroupMembers, one: MemberPod, every: int) -> bool:
    return sum(share for name, share in fleet.shares.items() if name != one.name) >= every


async def _added(fleet: GroupMembers, rocketmq: RocketMQ, queues: int) -> float:
    before = sum(fleet.shares.values())
    await asyncio.to_thread(rocketmq.create_topic, TOPIC, queues)
    return await _seconds(time.monotonic(), lambda: sum(fleet.shares.values()) >= before + 4)


async def _hung(fleet: GroupMembers, number: int) -> float:
    one = MemberPod(fleet, f"hung-{number}", fleet.addresses())
    fleet.members[one.name] = one
    await one.start()
    await _working(fleet)
    await asyncio.sleep(5)  # nobody listens to it any more: that is the worst time to hang
    every = sum(fleet.shares.values())
    began = time.monotonic()
    del fleet.members[one.name]
    one.hang()
    fleet.mark_ended(one.name)
    await asyncio.sleep(PROBES)
    await one.write_status(ready=False)
    taken = await _seconds(began, lambda: sum(fleet.shares.values()) >= every)
    await one.stop_server()
    await one.kill()
    return taken


# The Java clients.


def _java(rocketmq: RocketMQ) -> tuple[Sample, Sample, Sample]:
    """Return their seconds for the same: one leaves, queues are added, one hangs."""
    left, added, hung = [], [], []
    stays = _consumer(rocketmq, "stays")
    queues = QUEUES
    for number in range(3):
        goes = _consumer(rocketmq, f"goes-{number}")
        eventually(lambda: 0 < _share(goes) < queues and _share(stays) + _share(goes) == queues, 90)  # noqa: B023
        began = time.monotonic()
        goes.stop()
        eventually(lambda: _share(stays) == queues, NEVER)
        left.append(time.monotonic() - began)
    for _ in range(2):
        queues += 4
        rocketmq.create_topic(THEIRS, queues)
        began = time.monotonic()
        eventually(lambda: _share(stays) == queues, 2 * NEVER)  # noqa: B023
        added.append(time.monotonic() - began)
    hangs = _consumer(rocketmq, "hangs")
    eventually(lambda: _share(hangs) > 0 and _share(stays) + _share(hangs) == queues)
    process = rocketmq.instance.process(hangs.program)
    assert process is not None  # noqa: S101 - it was there a moment ago
    began = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    while _share(stays) < queues and time.monotonic() - began < NEVER:
        time.sleep(0.1)
    hung.append(time.monotonic() - began)
    os.kill(process.pid, signal.SIGCONT)
    return Sample(left), Sample(added), Sample(hung)


def _consumer(rocketmq: RocketMQ, name: str) -> Peer:
    return peers.push_consumer(rocketmq, THEIRS, THEIRS, instance=name)


def _share(peer: Peer) -> int:
    told = [line["queues"] for line in peer.lines("rebalance") if line["topic"] == THEIRS]
    return len(" ".join(told[-1:]).split())
