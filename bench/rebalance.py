"""Rebalances on a real API server and a real broker: the operator compared with Java clients, which assign themselves.

The operator is a process of its own. Members are simulated in this process: their pods are real objects, and they
report and obey as sidecars do, without delay.
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

NAMESPACE = "default"
GROUP = "orders"
TOPIC = "orders"
THEIRS = "theirs"
QUEUES, MEMBERS = 12, 3
TIMES = 20  # joins and leaves of each kind
DEBOUNCE = 0.5  # seconds, the default; subtracted from the figures
PROBES = 4.0  # seconds until a kubelet marks a hung sidecar as not ready: 1 s a probe, 1 s timeout, twice
NEVER = 40.0  # seconds after which the wait for the Java clients ends

Durations = dict[str, list[float]]


def rows() -> Iterator[Row]:
    """Measure joins, leaves, crashes and hangs of members, and added queues."""
    with temporary("bench-rebalance") as instance:
        cluster, rocketmq = ControlPlane(instance), RocketMQ(instance)
        cluster.up()
        rocketmq.up()
        rocketmq.create_topic(TOPIC, QUEUES)
        rocketmq.create_topic(THEIRS, QUEUES)
        ours = asyncio.run(_measure_ours(instance, cluster, rocketmq))
        java_leave, java_added, java_hang = _measure_java(rocketmq)
    written = "p50 ≤ 100 ms, p99 ≤ 500 ms"
    obeyed = "p50 ≤ 300 ms, p99 ≤ 2 s"
    yield Row("a pod is ready -> a document with its entry is written", ours["joined"], target=written)
    yield Row("a pod is gone -> a document that gives its queues to others is written", ours["granted"], target=written)
    yield Row("a pod is ready -> it consumes its queues, less the debounce", ours["works"], target=obeyed)
    yield Row("a pod is deleted -> its queues are consumed elsewhere", ours["left"], java_leave, obeyed)
    yield Row("a pod is gone -> its queues are consumed elsewhere", ours["gone"], target=obeyed)
    yield Row("queues are added -> they are consumed", ours["added"], java_added, "≤ 6 s")
    yield Row(
        f"a member hangs -> its queues are consumed elsewhere (Java: not in {NEVER:g} s)",
        ours["hung"],
        java_hang,
        "≤ 15 s",
    )


async def _measure_ours(instance: Instance, cluster: Cluster, rocketmq: RocketMQ) -> dict[str, Sample]:
    numbers = iter(range(1, 250))
    async with Api.connect(cluster.kubeconfig) as api:
        await _prepare(api, rocketmq)
        async with (
            a_node(api),
            GroupMembers(api, NAMESPACE, GROUP, lambda: f"{instance.block}.99.{next(numbers)}") as fleet,
            _operator(cluster.kubeconfig, instance),
        ):
            await fleet.add(*map("first-{}".format, range(MEMBERS)))
            await _wait_until_balanced(fleet, 60)
            durations = await _measure_joins_and_leaves(fleet)
            added = [await _measure_added_queues(fleet, rocketmq, QUEUES + 4 * number) for number in range(1, 4)]
            hung = [await _measure_hang(fleet, number) for number in range(2)]
    return {name: Sample(seconds) for name, seconds in {**durations, "added": added, "hung": hung}.items()}


async def _prepare(api: Api, rocketmq: RocketMQ) -> None:
    await define(api)
    namespace_path = f"/apis/{VERSION}/namespaces/{NAMESPACE}"
    broker = {"rocketmq": {"nameServers": [rocketmq.name_server]}}
    spec: Object = {"broker": broker, "subscriptions": [{"topic": TOPIC}], "policyRef": {"name": "sticky"}}
    await api.create(f"{namespace_path}/rebalancepolicies", made("RebalancePolicy", "sticky", strategy="Sticky"))
    await api.create(f"{namespace_path}/consumergroups", made("ConsumerGroup", GROUP, **spec))

    async def account() -> bool:  # pods need a service account
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


async def _wait_until_balanced(fleet: GroupMembers, seconds: float = 30.0) -> None:
    """Wait until every queue of the topic has an owner, and the shares are even."""

    async def all_are() -> bool:
        shares = fleet.shares.values()
        return sum(shares) >= QUEUES and max(shares) - min(shares) <= 1

    await soon(all_are, seconds)


async def _time_until(began: float, is_true: Callable[[], bool], limit: float = 60.0) -> float:
    """Return the seconds from `began` until the condition holds."""
    while not is_true():
        if time.monotonic() - began > limit:
            raise TimeoutError
        await asyncio.sleep(0.002)
    return time.monotonic() - began


async def _measure_joins_and_leaves(fleet: GroupMembers) -> Durations:
    durations: Durations = {name: [] for name in ("joined", "works", "left", "granted", "gone")}
    for number in range(2 * TIMES):
        await asyncio.sleep(2 * DEBOUNCE)
        member = MemberPod(fleet, f"guest-{number}", fleet.addresses())
        fleet.members[member.name] = member
        await member.start(ready=False)
        await asyncio.sleep(2 * DEBOUNCE)
        await _measure_join(fleet, member, durations)
        await _wait_until_balanced(fleet)
        await asyncio.sleep(2 * DEBOUNCE)
        measure_end = _measure_leave if number % 2 else _measure_crash
        await measure_end(fleet, member, durations)
    return durations


async def _measure_join(fleet: GroupMembers, member: MemberPod, durations: Durations) -> None:
    began = time.monotonic()
    ready = asyncio.create_task(member.write_status(ready=True))
    durations["joined"].append(await _time_until(began, lambda: member.name in fleet.documents[-1]["members"]))
    durations["works"].append(await _time_until(began, lambda: bool(fleet.shares[member.name])) - DEBOUNCE)
    await ready


async def _measure_leave(fleet: GroupMembers, member: MemberPod, durations: Durations) -> None:
    owned = sum(fleet.shares.values())
    began = time.monotonic()
    leaving = asyncio.create_task(member.delete_pod())
    durations["left"].append(await _time_until(began, lambda: _is_taken_over(fleet, member, owned)))
    await leaving
    del fleet.members[member.name]
    await member.kill()


async def _measure_crash(fleet: GroupMembers, member: MemberPod, durations: Durations) -> None:
    del fleet.members[member.name]
    owned = sum(fleet.shares.values())
    # A process is dead before its pod is deleted: do not measure how long the simulated member takes to end.
    await member.stop_server()
    documents = len(fleet.documents)
    began = time.monotonic()
    ending = asyncio.create_task(member.kill())
    durations["granted"].append(await _time_until(began, lambda: len(fleet.documents) > documents))
    durations["gone"].append(await _time_until(began, lambda: _is_taken_over(fleet, member, owned)))
    await ending


def _is_taken_over(fleet: GroupMembers, member: MemberPod, owned: int) -> bool:
    return sum(share for name, share in fleet.shares.items() if name != member.name) >= owned


async def _measure_added_queues(fleet: GroupMembers, rocketmq: RocketMQ, queues: int) -> float:
    owned = sum(fleet.shares.values())
    await asyncio.to_thread(rocketmq.create_topic, TOPIC, queues)
    return await _time_until(time.monotonic(), lambda: sum(fleet.shares.values()) >= owned + 4)


async def _measure_hang(fleet: GroupMembers, number: int) -> float:
    member = MemberPod(fleet, f"hung-{number}", fleet.addresses())
    fleet.members[member.name] = member
    await member.start()
    await _wait_until_balanced(fleet)
    await asyncio.sleep(5)  # the operator holds no long poll at it by then: the worst time to hang
    owned = sum(fleet.shares.values())
    began = time.monotonic()
    del fleet.members[member.name]
    member.hang()
    fleet.mark_ended(member.name)
    await asyncio.sleep(PROBES)
    await member.write_status(ready=False)
    seconds = await _time_until(began, lambda: sum(fleet.shares.values()) >= owned)
    await member.stop_server()
    await member.kill()
    return seconds


# The Java clients.


def _measure_java(rocketmq: RocketMQ) -> tuple[Sample, Sample, Sample]:
    """Return the seconds of the Java clients for a leave, added queues, and a hang."""
    leave_seconds = []
    add_seconds = []
    hang_seconds = []
    staying = _consumer(rocketmq, "stays")
    queues = QUEUES
    for number in range(3):
        leaving = _consumer(rocketmq, f"goes-{number}")
        eventually(lambda: 0 < _share(leaving) < queues and _share(staying) + _share(leaving) == queues, 90)  # noqa: B023
        began = time.monotonic()
        leaving.stop()
        eventually(lambda: _share(staying) == queues, NEVER)
        leave_seconds.append(time.monotonic() - began)
    for _ in range(2):
        queues += 4
        rocketmq.create_topic(THEIRS, queues)
        began = time.monotonic()
        eventually(lambda: _share(staying) == queues, 2 * NEVER)  # noqa: B023
        add_seconds.append(time.monotonic() - began)
    hanging = _consumer(rocketmq, "hangs")
    eventually(lambda: _share(hanging) > 0 and _share(staying) + _share(hanging) == queues)
    process = rocketmq.instance.process(hanging.program)
    assert process is not None  # noqa: S101 - it was running just before
    began = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    while _share(staying) < queues and time.monotonic() - began < NEVER:
        time.sleep(0.1)
    hang_seconds.append(time.monotonic() - began)
    os.kill(process.pid, signal.SIGCONT)
    return Sample(leave_seconds), Sample(add_seconds), Sample(hang_seconds)


def _consumer(rocketmq: RocketMQ, name: str) -> Peer:
    return peers.push_consumer(rocketmq, THEIRS, THEIRS, instance=name)


def _share(peer: Peer) -> int:
    assignments = [line["queues"] for line in peer.lines("rebalance") if line["topic"] == THEIRS]
    return len(" ".join(assignments[-1:]).split())
