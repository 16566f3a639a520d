"""The RocketMQ client: pulls from a real broker compared with the Java client, and progress reads of 1,000 groups.

Figures are per 100,000 messages, so that the ratio to the peer is one of seconds as in all other benchmarks.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench.measure import Row, Sample
from ground import peers
from ground.instance import temporary
from ground.poll import eventually
from ground.report import Missing
from ground.rocketmq import RocketMQ
from rota.brokers.port import BrokerOffsets, Membership
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig, RoutingClient
from rota.brokers.rocketmq.wire import requests
from rota.brokers.rocketmq.wire.messages import decode
from rota.model import Queue
from rota.spec import Subscription

TOPIC = "bench"
QUEUES = 16
MESSAGES = 300_000
BATCH = 32  # by default the broker returns at most 32 messages, even if a client requests more
WARM_UPS, PASSES = 3, 5  # a new JVM compiles for three passes; both sides have as many
PER = 100_000  # messages
GROUPS = 1_000
GROUP_QUEUES = 50  # on each of two brokers
EACH = 10  # messages in each queue
CONCURRENT_REQUESTS = 8  # requests to each broker
CHILDREN = 3

A = TypeVar("A")
T = TypeVar("T")


def rows() -> Iterator[Row]:
    """Compare pulls from one broker with the Java client's, then read the progress of many groups from two brokers."""
    yield from _measure_pulls()
    yield from _measure_progress_reads()


# Pulling.


def _measure_pulls() -> Iterator[Row]:
    with temporary("bench-pull") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        rocketmq.create_topic(TOPIC, QUEUES)
        _wait_until_done(peers.lite_pull(rocketmq, TOPIC, MESSAGES, fill=True))
        wall_seconds, cpu_seconds, bodies = asyncio.run(_run_passes(ConnectionConfig([rocketmq.name_server])))
        java = _wait_until_done(peers.lite_pull(rocketmq, TOPIC, MESSAGES, passes=WARM_UPS + PASSES, batch=BATCH))
        passes = java.lines("pass")[WARM_UPS:]
    ours, theirs = _per_100k(wall_seconds), _per_100k(line["seconds"] for line in passes)
    yield Row(_with_rates("100,000 messages of 1 KiB pulled, wall time", ours, theirs), ours, theirs, "≤ 1.67 s")
    ours, theirs = _per_100k(cpu_seconds), _per_100k(line["cpu"] for line in passes)
    what = _with_rates("100,000 messages of 1 KiB pulled, CPU time", ours, theirs)
    yield Row(what, ours, theirs, "ratio ≤ 2")
    yield _measure_decoding(bodies)


def _measure_decoding(bodies: list[bytes]) -> Row:
    """Measure the CPU time of the decoder alone."""
    seconds = []
    for _ in range(WARM_UPS + PASSES):
        started = time.process_time()
        decoded = 0
        while decoded < PER:
            decoded += sum(len(decode(body, "broker-0")) for body in bodies)
        seconds.append((time.process_time() - started) / decoded * PER)
    sample = Sample(seconds[WARM_UPS:])
    return Row(_with_rates("100,000 messages of 1 KiB decoded, CPU time", sample), sample, target="≤ 0.4 s")


def _wait_until_done(peer: peers.Peer) -> peers.Peer:
    """Wait until a peer is done; raise `Missing` if it ended too soon."""

    def ended() -> bool:
        return peer.done or not peer.instance.process(peer.program)

    eventually(ended, 300)
    if not peer.done:
        raise Missing(f"the Java peer ended too soon: {peer.instance.log(peer.program).read_text()[-500:]}")
    return peer


def _per_100k(seconds: Iterable[float]) -> Sample:
    return Sample([taken / MESSAGES * PER for taken in seconds])


def _with_rates(what: str, *samples: Sample) -> str:
    """Return a row's label with the rates that correspond to its times."""
    return f"{what}: {' / '.join(f'{PER / sample.median:,.0f}' for sample in samples)} messages a second"


async def _run_passes(config: ConnectionConfig) -> tuple[list[float], list[float], list[bytes]]:
    """Read the topic several times; return wall-clock and CPU seconds of each pass, and one pull's body per queue."""
    member = Membership(group="bench", client_id="bench", subscriptions=[Subscription(topic=TOPIC)])
    consumer = RocketMQConsumer(config, member)
    cluster = AdminClient(config)
    await consumer.join()
    queues = await cluster.queues(TOPIC)
    end_offsets = {queue: await consumer.max_offset(queue) for queue in queues}
    if sum(end_offsets.values()) != MESSAGES:
        raise Missing(f"the broker has {sum(end_offsets.values()):,} messages of {MESSAGES:,}")
    wall_seconds = []
    cpu_seconds = []
    for _ in range(WARM_UPS + PASSES):
        started = time.perf_counter()
        cpu_started = time.process_time()
        received = sum(await asyncio.gather(*(_drain_queue(consumer, queue, end_offsets[queue]) for queue in queues)))
        wall_seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        if received != MESSAGES:
            raise Missing(f"{received:,} messages were read of {MESSAGES:,}")
    bodies = [await _pull_raw(config, queue) for queue in queues]
    await consumer.leave()
    await cluster.close()
    return wall_seconds[WARM_UPS:], cpu_seconds[WARM_UPS:], bodies


async def _drain_queue(consumer: RocketMQConsumer, queue: Queue, end_offset: int) -> int:
    """Read a queue to its end, one pull after the other; return the number of messages."""
    offset = received = 0
    while offset < end_offset:
        pulled = await consumer.pull(queue, offset, max_messages=BATCH)
        received += len(pulled.messages)
        offset = pulled.next_offset
    return received


async def _pull_raw(config: ConnectionConfig, queue: Queue) -> bytes:
    """Return the body of a pull response, not decoded."""
    client = RoutingClient(config, handle_request=lambda _: None)
    everything = requests.subscription(Subscription(topic=TOPIC), 0)
    request = requests.pull("bench", queue, 0, everything, max_messages=BATCH, max_bytes=2**18, wait_seconds=0)
    await client.master_address(queue.broker)
    response = await client.call_or_raise(queue.broker, request)
    client.close()
    return response.body


# Progress of many groups.


def _measure_progress_reads() -> Iterator[Row]:
    with temporary("bench-stats") as instance:
        # Let sends wait longer in the broker's queue: on a busy machine it would reject some of them.
        rocketmq = RocketMQ(instance, brokers=2, settings={"waitTimeMillsInSendQueue": 10_000})
        rocketmq.up()
        rocketmq.create_topic(TOPIC, GROUP_QUEUES)
        asyncio.run(_prepare_groups(ConnectionConfig([rocketmq.name_server])))
        children = [_run_child(rocketmq.name_server) for _ in range(CHILDREN)]
    seconds, megabytes = zip(*children, strict=True)
    resident = f"{max(megabytes):.0f} MB resident"
    what = f"progress of 1,000 groups, 100 queues each, from two brokers, all kept in memory: {resident}"
    yield Row(what, Sample(seconds), target="≤ 15 s, ≤ 200 MB")


async def _prepare_groups(config: ConnectionConfig) -> None:
    """Send messages, create the groups, and commit an offset of each group in each queue."""
    cluster = AdminClient(config)
    client = RoutingClient(config, handle_request=lambda _: None)
    queues = await cluster.queues(TOPIC)
    brokers = await cluster.broker_names()
    await client.fetch_route(TOPIC)
    await _bounded(lambda queue: cluster.send(TOPIC, b"x" * 1024, queue=queue), queues * EACH)
    for broker in brokers:
        await _bounded(partial(cluster.update_group, broker=broker), _groups())
    # Queue by queue: a broker sometimes loses one of a group's first commits if it handles several concurrently.
    for queue in queues:
        await _bounded(partial(_commit, client, queue), _groups())
    client.close()
    await cluster.close()


async def _commit(client: RoutingClient, queue: Queue, group: str) -> None:
    await client.call_or_raise(queue.broker, requests.commit(group, queue, 1 + queue.id % EACH))


def _groups() -> list[str]:
    return list(map("group-{:04d}".format, range(GROUPS)))


async def _bounded(
    call: Callable[[A], Awaitable[T]], arguments: Iterable[A], workers: int = 2 * CONCURRENT_REQUESTS
) -> list[T]:
    """Make a call for each argument, at most `workers` of them concurrently; return the responses in any order."""
    pending = iter(arguments)
    responses = []

    async def work() -> None:
        for argument in pending:  # the workers share one iterator
            response = await call(argument)
            responses.append(response)

    await asyncio.gather(*(work() for _ in range(workers)))
    return responses


def _run_child(name_server: str) -> tuple[float, float]:
    """Read the progress of all groups in a new process; return its seconds and peak megabytes."""
    argv = [sys.executable, "-m", "bench.brokers", name_server]
    child = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    seconds, megabytes = json.loads(child.stdout)
    return seconds, megabytes


async def _read_progress(name_server: str) -> float:
    cluster = AdminClient(ConnectionConfig([name_server]))
    began = time.perf_counter()
    reads = [_read_groups_of(cluster, broker) for broker in await cluster.broker_names()]
    groups = [progress for of_broker in await asyncio.gather(*reads) for progress in of_broker]
    seconds = time.perf_counter() - began
    correct = 0
    for group in groups:
        for queue, offsets in group.items():
            correct += (offsets.committed_offset, offsets.max_offset) == (1 + queue.id % EACH, EACH)
    if correct != GROUPS * 2 * GROUP_QUEUES:
        raise ValueError(f"only of {correct:,} queues what was told is what was committed")
    await cluster.close()
    return seconds


async def _read_groups_of(cluster: AdminClient, broker: str) -> list[dict[Queue, BrokerOffsets]]:
    return await _bounded(partial(cluster.group_offsets, broker=broker), _groups(), CONCURRENT_REQUESTS)


def _peak_memory() -> float:
    """Return the peak memory of this process in megabytes; getrusage would include the parent process."""
    line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line[1]) / 1000 if line else 0.0


if __name__ == "__main__":
    taken = asyncio.run(_read_progress(sys.argv[1]))
    print(json.dumps([taken, _peak_memory()]))
