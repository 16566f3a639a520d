"""The RocketMQ client: messages out of a real broker beside the Java client, and how far a thousand groups are.

Figures of messages are of 100,000 of them, so that the ratio to the peer is one of seconds as everywhere else.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import product
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
QUEUES, MESSAGES, BATCH = 16, 300_000, 32  # the broker gives 32 messages at once by default, whoever asks for more
WARM_UPS, PASSES = 3, 5  # a new Java compiles for three passes; both sides have as many
PER = 100_000
GROUPS, GROUP_QUEUES, EACH = 1_000, 50, 10  # groups; queues on each of two brokers; messages in each
SIDE_BY_SIDE = 8  # requests to each broker
CHILDREN = 3

T = TypeVar("T")


def rows() -> Iterator[Row]:
    """Pull from one broker beside the Java client, then read the progress of many groups from two."""
    yield from _pulls()
    yield from _stats()


# Pulling.


def _pulls() -> Iterator[Row]:
    with temporary("bench-pull") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        rocketmq.create_topic(TOPIC, QUEUES)
        _done(peers.lite_pull(rocketmq, TOPIC, MESSAGES, fill=True))
        walls, works, bodies = asyncio.run(_passes(ConnectionConfig([rocketmq.name_server])))
        java = _done(peers.lite_pull(rocketmq, TOPIC, MESSAGES, passes=WARM_UPS + PASSES, batch=BATCH))
        passes = java.lines("pass")[WARM_UPS:]
    ours, theirs = _per(walls), _per(line["seconds"] for line in passes)
    yield Row(_what("100,000 messages of 1 KiB pulled, by the clock", ours, theirs), ours, theirs, "≤ 1.67 s")
    ours, theirs = _per(works), _per(line["cpu"] for line in passes)
    what = _what("100,000 messages of 1 KiB pulled, of processor time", ours, theirs)
    yield Row(what, ours, theirs, "ratio ≤ 2")
    yield _decoding(bodies)


def _decoding(bodies: list[bytes]) -> Row:
    """Time the decoder alone, of the processor, for that is all it takes."""
    seconds = []
    for _ in range(WARM_UPS + PASSES):
        began, found = time.process_time(), 0
        while found < PER:
            found += sum(len(decode(body, "broker-0")) for body in bodies)
        seconds.append((time.process_time() - began) / found * PER)
    sample = Sample(seconds[WARM_UPS:])
    return Row(_what("100,000 messages of 1 KiB decoded, of processor time", sample), sample, target="≤ 0.4 s")


def _done(peer: peers.Peer) -> peers.Peer:
    """Wait until a peer has done all; say so if it ended before."""

    def ended() -> bool:
        return peer.done or not peer.instance.process(peer.program)

    eventually(ended, 300)
    if not peer.done:
        raise Missing(f"the Java peer ended too soon: {peer.instance.log(peer.program).read_text()[-500:]}")
    return peer


def _per(seconds: Iterable[float]) -> Sample:
    return Sample([taken / MESSAGES * PER for taken in seconds])


def _what(what: str, *samples: Sample) -> str:
    """Name a row, and tell the rates that its times mean."""
    return f"{what}: {' / '.join(f'{PER / it.median:,.0f}' for it in samples)} messages a second"


async def _passes(site: ConnectionConfig) -> tuple[list[float], list[float], list[bytes]]:
    """Read all several times; return seconds by the clock and of the processor, and some bodies of pulls."""
    member = Membership(group="bench", client_id="bench", subscriptions=[Subscription(topic=TOPIC)])
    consumer, cluster = RocketMQConsumer(site, member), AdminClient(site)
    await consumer.join()
    queues = await cluster.queues(TOPIC)
    last = {queue: await consumer.max_offset(queue) for queue in queues}
    if sum(last.values()) != MESSAGES:
        raise Missing(f"the broker has {sum(last.values()):,} messages of {MESSAGES:,}")
    walls, works = [], []
    for _ in range(WARM_UPS + PASSES):
        began, worked = time.perf_counter(), time.process_time()
        got = sum(await asyncio.gather(*(_read(consumer, queue, last[queue]) for queue in queues)))
        walls.append(time.perf_counter() - began)
        works.append(time.process_time() - worked)
        if got != MESSAGES:
            raise Missing(f"{got:,} messages were read of {MESSAGES:,}")
    bodies = [await _body(site, queue) for queue in queues]
    await consumer.leave()
    await cluster.close()
    return walls[WARM_UPS:], works[WARM_UPS:], bodies


async def _read(consumer: RocketMQConsumer, queue: Queue, last: int) -> int:
    """Read a queue to its end, one pull after the other; return how many messages came."""
    offset = got = 0
    while offset < last:
        pulled = await consumer.pull(queue, offset, max_messages=BATCH)
        got, offset = got + len(pulled.messages), pulled.next_offset
    return got


async def _body(site: ConnectionConfig, queue: Queue) -> bytes:
    """Return a pull's body as it came."""
    client = RoutingClient(site, handle_request=lambda _: None)
    everything = requests.subscription(Subscription(topic=TOPIC), 0)
    ask = requests.pull("bench", queue, 0, everything, max_messages=BATCH, max_bytes=2**18, wait_seconds=0)
    await client.master_address(queue.broker)
    answer = await client.call_or_raise(queue.broker, ask)
    client.close()
    return answer.body


# Progress of many groups.


def _stats() -> Iterator[Row]:
    with temporary("bench-stats") as instance:
        # What fills the topic shall not be turned away where the machine is busy.
        rocketmq = RocketMQ(instance, brokers=2, settings={"waitTimeMillsInSendQueue": 10_000})
        rocketmq.up()
        rocketmq.create_topic(TOPIC, GROUP_QUEUES)
        asyncio.run(_commit(ConnectionConfig([rocketmq.name_server])))
        told = [_child(rocketmq.name_server) for _ in range(CHILDREN)]
    most = max(megabytes for _, megabytes in told)
    what = f"progress of 1,000 groups, 100 queues each, from two brokers, all of it kept: {most:.0f} MB resident"
    yield Row(what, Sample([seconds for seconds, _ in told]), target="≤ 15 s, ≤ 200 MB")


async def _commit(site: ConnectionConfig) -> None:
    """Send some messages, make the groups, and commit an offset for each of them and each queue."""
    cluster, client = AdminClient(site), RoutingClient(site, handle_request=lambda _: None)
    queues, brokers = await cluster.queues(TOPIC), await cluster.broker_names()
    await client.fetch_route(TOPIC)
    await _bounded(partial(cluster.send, TOPIC, b"x" * 1024, queue=queue) for queue in queues * EACH)
    await _bounded(partial(cluster.update_group, group, broker) for group, broker in product(_groups(), brokers))
    # Queue by queue: of a group's first commits that a broker takes side by side, it sometimes loses one.
    wanted = (requests.commit(group, queue, 1 + queue.id % EACH) for queue, group in product(queues, _groups()))
    await _bounded(partial(client.call_or_raise, request.fields["bname"], request) for request in wanted)
    client.close()
    await cluster.close()


def _groups() -> list[str]:
    return [f"group-{number:04d}" for number in range(GROUPS)]


async def _bounded(calls: Iterable[Callable[[], Awaitable[T]]], workers: int = 2 * SIDE_BY_SIDE) -> list[T]:
    """Make calls, so many at a time; return what came, in any order."""
    waiting, found = iter(calls), []

    async def work() -> None:
        for call in waiting:  # one for all workers
            answer = await call()
            found.append(answer)

    await asyncio.gather(*(work() for _ in range(workers)))
    return found


def _child(name_server: str) -> tuple[float, float]:
    """Read all progress in a process of its own; return its seconds and megabytes."""
    argv = [sys.executable, "-m", "bench.brokers", name_server]
    told = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    seconds, megabytes = json.loads(told.stdout)
    return seconds, megabytes


async def _read_progress(name_server: str) -> float:
    cluster = AdminClient(ConnectionConfig([name_server]))
    began = time.perf_counter()
    each = [_of_broker(cluster, broker) for broker in await cluster.broker_names()]
    found = [progress for told in await asyncio.gather(*each) for progress in told]
    seconds = time.perf_counter() - began
    each_queue = ((queue.id, it) for one in found for queue, it in one.items())
    whole = sum((it.committed_offset, it.max_offset) == (1 + number % EACH, EACH) for number, it in each_queue)
    if whole != GROUPS * 2 * GROUP_QUEUES:
        raise ValueError(f"only of {whole:,} queues what was told is what was committed")
    await cluster.close()
    return seconds


async def _of_broker(cluster: AdminClient, broker: str) -> list[dict[Queue, BrokerOffsets]]:
    return await _bounded((partial(cluster.group_offsets, group, broker) for group in _groups()), SIDE_BY_SIDE)


def _resident() -> float:
    """Return the most memory that this process ever had, in megabytes; getrusage counts who started it, too."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1000 if found else 0.0


if __name__ == "__main__":
    taken = asyncio.run(_read_progress(sys.argv[1]))
    print(json.dumps([taken, _resident()]))
