"""The sidecar's memory under compressed bombs: a producer sends messages that are small, but large when unpacked.

The sidecar runs in a memory cgroup with a container's limit; the figures are the kernel's peak for that cgroup. The
benchmark has no peer: the Java client unpacks bodies of any size.
"""

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from bench.bench_member import QUEUES, BenchMember
from bench.measure import Row, Sample
from ground.instance import temporary
from ground.memory_limit import MemoryLimit
from ground.report import Missing
from ground.rocketmq import RocketMQ
from rota.brokers.errors import BrokerError
from rota.brokers.port import queues_of
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.brokers import PRODUCER_GROUP
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.wire import requests
from rota.model import Queue

MEBIBYTE = 2**20
LIMIT_BYTES = 256 * MEBIBYTE
RUNS = 3
RUN_SECONDS = 60.0
ZLIB = 0x301  # system flag: the body is compressed, by ZLIB


@lru_cache
def _bomb() -> bytes:
    return zlib.compress(bytes(31 * MEBIBYTE))


@lru_cache
def _large() -> bytes:
    return zlib.compress(bytes(4 * MEBIBYTE - 100))


def rows() -> Iterator[Row]:
    """Measure the peak under bodies over the limit, and under bodies just below it."""
    with temporary("bench-memory") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        attacks: tuple[tuple[str, Callable[[], bytes], Mapping[str, Any]], ...] = (
            ("bodies of 31 MiB, pushed", _bomb, {}),
            ("bodies of just under 4 MiB, pushed", _large, {}),
            ("bodies of just under 4 MiB, pushed 32 at a time", _large, {"maxBatch": 32}),
            ("bodies of just under 4 MiB, polled by an app", _large, {"mode": "Pull"}),
        )
        for what, body, settings in attacks:
            peaks = [_measure_peak(rocketmq, body, settings) for _ in range(RUNS)]
            label = f"memory under compressed bombs, {what}: {format_peaks(peaks)}"
            yield Row(label, Sample([0.0]), target="≤ 256 MiB")


def format_peaks(peaks: Iterable[int]) -> str:
    """Format the peak memory of each run, the worst first."""
    mebibytes = sorted(peak / MEBIBYTE for peak in peaks)
    each = ", ".join(map("{:.0f}".format, mebibytes))
    return f"peak over {RUN_SECONDS:.0f} s, worst of {RUNS} runs: {mebibytes[-1]:.0f} MiB ({each})"


def _measure_peak(rocketmq: RocketMQ, body: Callable[[], bytes], settings: Mapping[str, Any]) -> int:
    """Return the peak memory of a sidecar while a producer sends such bodies, with good messages between them."""
    name = f"bombs-{time.monotonic_ns()}"
    rocketmq.create_topic(name, QUEUES)
    limit = memory_limit(name, LIMIT_BYTES)
    member = BenchMember(rocketmq, name, topic=name, program=limit.program("-m", "rota.sidecar"), **settings)
    queues = queues_of(name, {"broker-0": QUEUES})
    member.give(1, queues)
    accepted = asyncio.run(_attack(rocketmq, queues, body()))
    done = member.done()
    peak = limit.peak_bytes
    alive = bool(member.get("healthz"))
    member.end()
    limit.remove()
    if not alive or not done:
        raise Missing(
            f"the sidecar was killed: {done} of {accepted} messages were done, peak {peak / MEBIBYTE:.0f} MiB"
        )
    return peak


def memory_limit(name: str, limit_bytes: int) -> MemoryLimit:
    """Return a new cgroup; raise `Missing`, which skips the benchmark, without the right to create one."""
    try:
        return MemoryLimit(name, limit_bytes)
    except OSError as error:
        raise Missing(f"a cgroup cannot be made ({error.strerror}), which only root may") from None


async def _attack(rocketmq: RocketMQ, queues: Sequence[Queue], body: bytes) -> int:
    """Send at most 64 bombs and 64 good messages a second; return how many messages the broker accepted."""
    cluster = AdminClient(ConnectionConfig([rocketmq.name_server]))
    good = zlib.compress(b"good")
    until = time.monotonic() + RUN_SECONDS
    accepted = 0
    while time.monotonic() < until:
        for _ in range(4):
            for packed_body in (body, good):
                accepted += sum(await asyncio.gather(*(_is_accepted(cluster, queue, packed_body) for queue in queues)))
        await asyncio.sleep(1)
    await cluster.close()
    return accepted


async def _is_accepted(cluster: AdminClient, queue: Queue, body: bytes) -> bool:
    """Send a compressed message; return False if the broker rejects it because it is busy."""
    born_ms = int(time.time() * 1000)
    request = requests.send(
        PRODUCER_GROUP, queue.topic, body, {}, broker=queue.broker, queue_id=queue.id, born_ms=born_ms
    )
    packed = msgspec.structs.replace(request, fields={**request.fields, "f": ZLIB})
    try:
        await cluster._client.call_or_raise(queue.broker, packed)  # noqa: SLF001 - producers of ours do not pack
    except BrokerError:
        return False
    return True
