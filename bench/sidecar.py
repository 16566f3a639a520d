"""The sidecar compared with the Java push consumer: the same messages from the same broker, in one run.

Ours are processes as in a pod: a sidecar, and a small app on the other core. The peer is the reference client with a
listener that only counts, in one process, without an app. Rates count from the first message to the last.
"""

import os
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import Row, Sample
from ground import peers
from ground.instance import Process, temporary
from ground.poll import eventually
from ground.report import Missing
from ground.rocketmq import RocketMQ
from rota.brokers.port import queues_of
from rota.documents import Assignment, Share, encode_assignment
from rota.model import Queue
from rota.signing import KEY_BYTES
from rota.spec import parse_group
from rota.spec.resolved import encode_settings

TOPIC = "bench"
QUEUES = 16
MESSAGES = 300_000
PASSES = 3
MILLION = 1_000_000
RATE = 1000  # messages a second
LATENCY_MESSAGES = 20_000
TICKS = os.sysconf("SC_CLK_TCK")


def rows() -> Iterator[Row]:
    """Measure throughput and its cost, memory, and latency."""
    with temporary("bench-sidecar") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        rocketmq.create_topic(TOPIC, QUEUES)
        filler = peers.lite_pull(rocketmq, TOPIC, MESSAGES, fill=True)
        eventually(lambda: filler.done, 300)
        yield from _measure_throughput(rocketmq)
        yield from _measure_latency(rocketmq)


# Throughput.


def _measure_throughput(rocketmq: RocketMQ) -> Iterator[Row]:
    batch = [_measure_member(rocketmq, f"batch-{number}", maxBatch=32) for number in range(PASSES)]
    single = [_measure_member(rocketmq, f"single-{number}", messages=MESSAGES // 4) for number in range(PASSES)]
    pulled = [_measure_member(rocketmq, f"asked-{number}", mode="Pull") for number in range(PASSES)]
    java = [_measure_java(rocketmq, f"java-{number}") for number in range(PASSES)]
    java_seconds, java_cpu_seconds, java_peaks = zip(*java, strict=True)
    peaks: list[int] = []
    for what, runs, target in (
        ("pushed to an app, 32 at a time", batch, "≥ 10,000/s"),
        ("pushed to an app, one at a time", single, "≥ 3,000/s"),
        ("polled by an app, 32 at a time", pulled, "≥ 15,000/s"),
    ):
        seconds, cpu_seconds, run_peaks = zip(*runs, strict=True)
        peaks += run_peaks
        ours = Sample(seconds)
        theirs = Sample(java_seconds)
        rates = f"{MILLION / ours.median:,.0f} / {MILLION / theirs.median:,.0f} messages a second"
        yield Row(f"a million messages of 1 KiB {what}: {rates}", ours, theirs, target)
        label = "the same, CPU time (without the app's)"
        yield Row(label, Sample(cpu_seconds), Sample(java_cpu_seconds))
    loaded = f"{max(peaks)} MB; Java {max(java_peaks)} MB"
    idle = _measure_idle_memory(rocketmq)
    what = f"resident memory, idle with {QUEUES} queues: {idle} MB; at most in the runs above: {loaded}"
    yield Row(what, Sample([0.0]), target="≤ 60 MB; ≤ 200 MB")


class _Consumed(NamedTuple):
    """One pass over the topic: wall-clock and CPU seconds for a million messages, and the peak memory in MB."""

    seconds: float
    work: float
    loaded: int


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

    def count() -> int:
        counts = peer.lines("count")
        return int(counts[-1]["count"]) if counts else 0

    result = _measure_rate(count, MESSAGES, process)
    peer.stop()
    return result


def _measure_rate(count: Callable[[], int], messages: int, process: Process) -> _Consumed:
    eventually(lambda: count() > messages // 10)
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
    for topic in ("ours", "java"):
        rocketmq.create_topic(topic, QUEUES)
    member = BenchMember(rocketmq, "latency-ours", topic="ours", log=True, startFrom={"position": "Latest"})
    member.give(1, _queues("ours"))
    _send_messages(rocketmq, "ours")
    member.end()
    ours = [delivery.at - delivery.sent for delivery in member.deliveries()]
    java = peers.push_consumer(rocketmq, "latency-java", "java")
    eventually(lambda: java.lines("rebalance"), 60)  # usually at once, otherwise after 20 s
    _send_messages(rocketmq, "java")
    java.stop()
    theirs = [line["at"] / 1e6 - line["born"] / 1000 for line in java.lines("message")]
    for what, share, target in (("p50", 50, "≤ 5 ms"), ("p99", 99, "≤ 50 ms")):
        label = f"from sending to the app, {RATE:,} messages a second: {what}"
        yield Row(label, _percentile(ours, share), _percentile(theirs, share), target)


def _send_messages(rocketmq: RocketMQ, topic: str) -> None:
    time.sleep(5)  # the consumer owns its queues by now; give it time to start pulling
    producer = peers.producer(rocketmq, topic, LATENCY_MESSAGES, rate=RATE, size=1024)
    eventually(lambda: producer.done)
    time.sleep(2)


def _percentile(seconds: list[float], share: int) -> Sample:
    """Return one percentile of each fifth of the run except the first, in which the JVM still compiles."""
    fifth = len(seconds) // 5
    parts = [seconds[number * fifth : (number + 1) * fifth] for number in range(1, 5)]
    return Sample([statistics.quantiles(part, n=100)[share - 1] for part in parts])


# A member as processes.


class Delivered:
    """A delivery as the app logged it."""

    def __init__(self, line: str) -> None:
        """Parse a line of the app's log."""
        at, self.number, queue, sent = line.split()
        self.at = int(at) / 1e6
        self.queue = int(queue)
        self.sent = datetime.fromisoformat(sent).astimezone(UTC).timestamp()


class BenchMember:
    """A sidecar and its app; a folder stands for the pod's mounted ConfigMap."""

    _count = 0

    def __init__(
        self, rocketmq: RocketMQ, group: str, *, topic: str = TOPIC, log: bool = False, **options: Any
    ) -> None:
        """Start both; the member owns no queues yet."""
        BenchMember._count += 1
        self.name = f"member-{BenchMember._count}"
        self.instance = rocketmq.instance
        self.address = self.instance.address(100 + BenchMember._count)
        self.folder = self.instance.folder / self.name
        self._log = self.folder / "deliveries"
        start = options.pop("startFrom", {"position": "Earliest"})
        mode = options.pop("mode", "Push")
        program = options.pop("program", ("-m", "rota.sidecar"))
        spec = {
            "broker": {"rocketmq": {"nameServers": [rocketmq.name_server]}},
            "subscriptions": [{"topic": topic}],
            "group": group,
            "startFrom": start,
            "delivery": {"mode": mode, "push": options},
        }
        for folder in ("documents", "state", "key"):
            (self.folder / folder).mkdir(parents=True)
        (self.folder / "key/current").write_bytes(os.urandom(KEY_BYTES))
        settings = encode_settings(group, parse_group({"metadata": {"name": group}, "spec": spec}), 30, None)
        (self.folder / "documents/group.json").write_text(settings)
        root = Path(__file__).parent.parent
        app = [sys.executable, "-m", "bench.app", self.address, "8080", *([str(self._log)] if log else [])]
        env = {
            "POD_NAME": self.name,
            "POD_NAMESPACE": "bench",
            "POD_UID": f"uid-{self.name}",
            "POD_IP": self.address,
            "ROTA_LOCAL": self.address,
            "ROTA_DOCUMENTS": str(self.folder / "documents"),
            "ROTA_STATE": str(self.folder / "state"),
            "ROTA_KEY": str(self.folder / "key"),
        }
        self.process = self.instance.start(self.name, [sys.executable, *program], env=env)
        self.instance.wait(self.name, lambda: bool(self.get("healthz")), 30, "the sidecar")
        if mode == "Pull":
            app = [sys.executable, "-m", "bench.asker", self.address]
        self.instance.start(f"{self.name}-app", app, cwd=root)

    def give(self, generation: int, queues: Sequence[Queue]) -> None:
        """Write an assignment that gives these queues to the member."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        members = {self.name: Share(f"uid-{self.name}", tuple(queues))}
        document = Assignment(group="bench/bench", generation=generation, issued_at=now, members=members)
        for name, text in encode_assignment(document).items():
            new = self.folder / f"documents/{name}.new"
            new.write_text(text) if isinstance(text, str) else new.write_bytes(text)
            new.rename(self.folder / "documents" / name)

    def get(self, path: str) -> str:
        """Return a response of the sidecar, or an empty text if it does not respond."""
        try:
            with urllib.request.urlopen(f"http://{self.address}:9911/{path}", timeout=5) as response:
                text: str = response.read().decode()
        except OSError:
            return ""
        return text

    def done(self) -> int:
        """Return how many messages the sidecar has delivered."""
        counts = re.findall(
            r'^rota_sidecar_messages_total\{[^}]*outcome="done"[^}]*\} (\S+)$', self.get("metrics"), re.MULTILINE
        )
        return round(sum(map(float, counts)))

    def deliveries(self) -> list[Delivered]:
        """Return the app's log; it is complete once both processes have ended."""
        return list(map(Delivered, self._log.read_text().splitlines()))

    def end(self) -> None:
        """Stop the sidecar gracefully, then the app."""
        self.instance.stop(self.name, grace=30)
        self.instance.stop(f"{self.name}-app")


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def _megabytes(pid: int, field: str) -> int:
    line = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if not line:
        raise Missing(f"process {pid} tells no {field}")
    return int(line[1]) * 1024 // 1_000_000
