"""The sidecar compared with Java's push consumer: the same messages from the same broker, in one run.

Ours are processes as in a pod: a sidecar, and a small app on the other core. One peer is the reference client with a
listener that only counts, in one process, without an app: the least that a consumer can do. Other peers do the
sidecar's work: a Java push consumer that posts each message to the same app, and Dapr's sidecar, if there is one. Rates
count from the first message to the last.
"""

import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.bench_member import QUEUES, TOPIC, BenchMember, Delivered, HttpBridge
from bench.dapr import DaprSidecar, find_daprd
from bench.measure import Row, Sample
from ground import peers
from ground.instance import Process, temporary
from ground.poll import eventually
from ground.report import Missing
from ground.rocketmq import RocketMQ
from rota.brokers.port import queues_of
from rota.model import Queue

MESSAGES = 300_000
PASSES = 3
MILLION = 1_000_000
RATE = 1000  # messages a second
LATENCY_MESSAGES = 20_000
DAPR_PAUSES_MS = (100, 1)  # between two pulls of a queue: Dapr's default, and the fastest
END_RATES = (400, 1000)
END_SECONDS = 8
TICKS = os.sysconf("SC_CLK_TCK")


class _Consumed(NamedTuple):
    """One pass over the topic: wall-clock and CPU seconds for a million messages, and the peak memory in MB."""

    seconds: float
    work: float
    loaded: int


Runs = Sequence[_Consumed]


def rows() -> Iterator[Row]:
    """Measure throughput and its cost, memory, and latency."""
    with temporary("bench-sidecar") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        for topic in (TOPIC, "idle"):
            rocketmq.create_topic(topic, QUEUES)
        filler = peers.lite_pull(rocketmq, TOPIC, MESSAGES, fill=True)
        eventually(lambda: filler.done, 300)
        yield from _measure_throughput(rocketmq)
        yield from _measure_latency(rocketmq)
        yield from _measure_queue_end(rocketmq)


# Throughput.


def _measure_throughput(rocketmq: RocketMQ) -> Iterator[Row]:
    passes = _measure_passes(rocketmq)
    single = passes["single"]
    java = passes["java"]
    bridge = passes["bridge"]
    yield from _throughput_rows("pushed to an app, 32 at a time", passes["batch"], java, "≥ 10,000/s")
    yield from _throughput_rows("pushed to an app, one at a time", single, java, "≥ 3,000/s")
    yield from _throughput_rows("pushed to an app, one at a time, without compiled modules", passes["pure"], java)
    yield from _throughput_rows("polled by an app, 32 at a time", passes["asked"], java, "≥ 15,000/s")
    yield from _throughput_rows("pushed to an app, both by HTTP, one at a time", single, bridge)
    loaded = f"{_peak([*passes['batch'], *single, *passes['asked']])} MB; Java {_peak(java)} MB"
    idle = _measure_idle_memory(rocketmq)
    what = f"resident memory, idle with {QUEUES} queues: {idle} MB; at most in the runs above: {loaded}"
    yield Row(what, Sample([0.0]), target="≤ 60 MB; ≤ 200 MB")
    loaded = f"{_peak(single)} MB; Java {_peak(bridge)} MB"
    idle_java = _measure_idle_bridge(rocketmq)
    what = f"resident memory, both by HTTP, one at a time: at most {loaded}; Java idle: {idle_java} MB"
    yield Row(what, Sample([0.0]))
    for pause_ms in _dapr_pauses():
        yield from _dapr_throughput_rows(rocketmq, pause_ms, single, passes[_dapr_name(pause_ms)])


def _measure_passes(rocketmq: RocketMQ) -> dict[str, list[_Consumed]]:
    """Return all passes of each program; programs take turns, so that a busy machine does not favor one of them."""
    measures: dict[str, Callable[[str], _Consumed]] = {
        "batch": lambda group: _measure_member(rocketmq, group, maxBatch=32),
        "single": lambda group: _measure_member(rocketmq, group, messages=MESSAGES // 4),
        "pure": lambda group: _measure_member(rocketmq, group, messages=MESSAGES // 4, compiled=False),
        "asked": lambda group: _measure_member(rocketmq, group, mode="Pull"),
        "java": partial(_measure_java, rocketmq),
        "bridge": partial(_measure_bridge, rocketmq),
    }
    for pause_ms in _dapr_pauses():
        measures[_dapr_name(pause_ms)] = partial(_measure_dapr, rocketmq, pause_ms)
    passes: dict[str, list[_Consumed]] = {name: [] for name in measures}
    for number in range(PASSES):
        for name, measure in measures.items():
            passes[name].append(measure(f"{name}-{number}"))
    return passes


def _dapr_pauses() -> Sequence[int]:
    return DAPR_PAUSES_MS if find_daprd() else ()


def _dapr_name(pause_ms: int) -> str:
    return f"dapr-{pause_ms}"


def _dapr_throughput_rows(rocketmq: RocketMQ, pause_ms: int, ours: Runs, dapr: Runs) -> Iterator[Row]:
    what = f"pushed to an app, both by HTTP, one at a time, Dapr pulls every {pause_ms} ms"
    yield from _throughput_rows(what, ours, dapr)
    idle = _measure_idle_dapr(rocketmq, pause_ms)
    what = f"resident memory of Dapr that pulls every {pause_ms} ms: at most {_peak(dapr)} MB; idle: {idle} MB"
    yield Row(what, Sample([0.0]))


def _throughput_rows(what: str, ours: Runs, peer: Runs, target: str = "") -> Iterator[Row]:
    seconds = Sample([run.seconds for run in ours])
    peer_seconds = Sample([run.seconds for run in peer])
    rates = f"{MILLION / seconds.median:,.0f} / {MILLION / peer_seconds.median:,.0f} messages a second"
    yield Row(f"a million messages of 1 KiB {what}: {rates}", seconds, peer_seconds, target)
    cpu_seconds = Sample([run.work for run in ours])
    yield Row("the same, CPU time (without the app's)", cpu_seconds, Sample([run.work for run in peer]))


def _peak(runs: Runs) -> int:
    return max(run.loaded for run in runs)


def _measure_member(rocketmq: RocketMQ, group: str, messages: int = MESSAGES, **push: Any) -> _Consumed:
    member = BenchMember(rocketmq, group, **push)
    member.give(1, _queues(TOPIC))
    result = _measure_rate(member.done, messages, member.process)
    member.end()
    return result


def _measure_idle_memory(rocketmq: RocketMQ) -> int:
    """Return the resident memory in MB of a sidecar that owns queues without new messages."""
    member = BenchMember(rocketmq, "idle", startFrom={"position": "Latest"})
    member.give(1, _queues(TOPIC))
    reads_all = f'"held":{{"{TOPIC}":{{"broker-0":"0-{QUEUES - 1}"}}}}', '"states":{}'  # no queue waits for anything
    eventually(lambda: all(part in member.get("v1/report") for part in reads_all))
    time.sleep(5)
    result = _megabytes(member.process.pid, "VmRSS")
    member.end()
    return result


def _queues(topic: str) -> tuple[Queue, ...]:
    return queues_of(topic, {"broker-0": QUEUES})


def _measure_java(rocketmq: RocketMQ, group: str) -> _Consumed:
    peer = peers.push_consumer(rocketmq, group, TOPIC, quiet=True, batch=32)
    process = rocketmq.instance.process(peer.program)
    assert process  # noqa: S101 - it was just started
    result = _measure_rate(lambda: peer.count, MESSAGES, process)
    peer.stop()
    return result


def _measure_bridge(rocketmq: RocketMQ, group: str) -> _Consumed:
    bridge = HttpBridge(rocketmq, group)
    result = _measure_rate(bridge.done, MESSAGES, bridge.process, warm_up=MESSAGES // 3)  # the JVM compiles for so long
    bridge.end()
    return result


def _measure_idle_bridge(rocketmq: RocketMQ) -> int:
    """Return the resident memory in MB of a Java consumer that owns queues without messages."""
    bridge = HttpBridge(rocketmq, "idle-bridge", "idle")
    bridge.wait_for_queues()
    time.sleep(5)
    result = _megabytes(bridge.process.pid, "VmRSS")
    bridge.end()
    return result


def _measure_dapr(rocketmq: RocketMQ, pause_ms: int, group: str) -> _Consumed:
    dapr = DaprSidecar(rocketmq, group, pull_pause_ms=pause_ms)
    result = _measure_rate(dapr.done, MESSAGES // 4, dapr.process)
    dapr.end()
    return result


def _measure_idle_dapr(rocketmq: RocketMQ, pause_ms: int) -> int:
    """Return the resident memory in MB of a daprd that owns queues without messages."""
    dapr = DaprSidecar(rocketmq, f"idle-dapr-{pause_ms}", "idle", pull_pause_ms=pause_ms)
    time.sleep(10)  # it starts to consume after a second
    result = _megabytes(dapr.process.pid, "VmRSS")
    dapr.end()
    return result


def _measure_rate(count: Callable[[], int], messages: int, process: Process, *, warm_up: int = 0) -> _Consumed:
    first_messages = warm_up or messages // 10
    eventually(lambda: count() > first_messages)
    first_count = count()
    started = time.monotonic()
    cpu_started = _cpu_seconds(process.pid)
    eventually(lambda: count() >= messages, 300)
    last_count = count()
    seconds = time.monotonic() - started
    factor = MILLION / (last_count - first_count)
    cpu_seconds = _cpu_seconds(process.pid) - cpu_started
    return _Consumed(seconds * factor, cpu_seconds * factor, _megabytes(process.pid, "VmHWM"))


# Latency.


def _measure_latency(rocketmq: RocketMQ) -> Iterator[Row]:
    for topic in ("ours", "java", "bridge", *map(_dapr_name, _dapr_pauses())):
        rocketmq.create_topic(topic, QUEUES)
    ours = _sidecar_latencies(rocketmq)
    yield from _latency_rows("", ours, _java_latencies(rocketmq), ("≤ 5 ms", "≤ 50 ms"))
    yield from _latency_rows(", both by HTTP", ours, _bridge_latencies(rocketmq))
    for pause_ms in _dapr_pauses():
        what = f", both by HTTP, Dapr pulls every {pause_ms} ms"
        yield from _latency_rows(what, ours, _dapr_latencies(rocketmq, pause_ms))


def _latency_rows(
    what: str, ours: list[float], peer: list[float], targets: tuple[str, str] = ("", "")
) -> Iterator[Row]:
    for share, target in zip((50, 99), targets, strict=True):
        label = f"from sending to the app, {RATE:,} messages a second{what}: p{share}"
        yield Row(label, _percentile(ours, share), _percentile(peer, share), target)


def _sidecar_latencies(rocketmq: RocketMQ) -> list[float]:
    member = BenchMember(rocketmq, "latency-ours", topic="ours", log=True, startFrom={"position": "Latest"})
    member.give(1, _queues("ours"))
    _send_messages(rocketmq, "ours")
    member.end()
    return _latencies(member.deliveries())


def _java_latencies(rocketmq: RocketMQ) -> list[float]:
    java = peers.push_consumer(rocketmq, "latency-java", "java")
    eventually(lambda: java.lines("rebalance"), 60)  # usually at once, otherwise after 20 s
    _send_messages(rocketmq, "java")
    java.stop()
    return [line["at"] / 1e6 - line["born"] / 1000 for line in java.lines("message")]


def _bridge_latencies(rocketmq: RocketMQ) -> list[float]:
    bridge = HttpBridge(rocketmq, "latency-bridge", "bridge", log=True)
    bridge.wait_for_queues()
    _send_messages(rocketmq, "bridge")
    bridge.end()
    return _latencies(bridge.deliveries())


def _dapr_latencies(rocketmq: RocketMQ, pause_ms: int) -> list[float]:
    topic = _dapr_name(pause_ms)
    dapr = DaprSidecar(rocketmq, f"latency-{topic}", topic, pull_pause_ms=pause_ms, log=True)
    _send_messages(rocketmq, topic)
    dapr.end()
    return _latencies(dapr.deliveries())


def _latencies(deliveries: Iterable[Delivered]) -> list[float]:
    return [delivery.at - delivery.sent for delivery in deliveries]


def _send_messages(rocketmq: RocketMQ, topic: str) -> None:
    time.sleep(5)  # the consumer owns its queues by now; give it time to start pulling
    producer = peers.producer(rocketmq, topic, LATENCY_MESSAGES, rate=RATE, size=1024, stamped=True)
    eventually(lambda: producer.done)
    time.sleep(2)


def _percentile(seconds: list[float], share: int) -> Sample:
    """Return one percentile of each fifth of the run except the first, in which the JVM still compiles."""
    fifth = len(seconds) // 5
    parts = [seconds[number * fifth : (number + 1) * fifth] for number in range(1, 5)]
    return Sample([statistics.quantiles(part, n=100)[share - 1] for part in parts])


# A queue's end: each message is pulled alone.


def _measure_queue_end(rocketmq: RocketMQ) -> Iterator[Row]:
    rocketmq.create_topic("end", QUEUES)
    member = BenchMember(rocketmq, "end-ours", topic="end", startFrom={"position": "Latest"})
    member.give(1, _queues("end"))
    java = peers.push_consumer(rocketmq, "end-java", "end", quiet=True)
    process = rocketmq.instance.process(java.program)
    assert process  # noqa: S101 - it was just started
    eventually(lambda: java.lines("rebalance"), 60)
    for rate in END_RATES:
        ours, peer = _measure_end_cpu(rocketmq, rate, [(member.process, member.done), (process, lambda: java.count)])
        what = f"CPU time of a message at a queue's end, {rate:,} messages a second, each pulled alone"
        yield Row(what, ours, peer, "≤ 200 µs")
    member.end()
    java.stop()


def _measure_end_cpu(
    rocketmq: RocketMQ, rate: int, consumers: Sequence[tuple[Process, Callable[[], int]]]
) -> list[Sample]:
    """Return each consumer's CPU seconds for a message, in intervals of a few seconds; both read all messages."""
    producer = peers.producer(rocketmq, "end", rate * END_SECONDS * (PASSES + 1), rate=rate, size=1024, stamped=True)
    time.sleep(END_SECONDS / 2)  # the producer has started, and the JVM has compiled something
    costs: list[list[float]] = [[] for _ in consumers]
    for _ in range(PASSES):
        before = [(_cpu_seconds(process.pid), count()) for process, count in consumers]
        time.sleep(END_SECONDS)
        for (process, count), (cpu_before, count_before), samples in zip(consumers, before, costs, strict=True):
            cpu_seconds = _cpu_seconds(process.pid) - cpu_before
            samples.append(cpu_seconds / (count() - count_before))
    eventually(lambda: producer.done)
    return [Sample(samples) for samples in costs]


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def _megabytes(pid: int, field: str) -> int:
    line = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if not line:
        raise Missing(f"process {pid} tells no {field}")
    return int(line[1]) * 1024 // 1_000_000
