"""Memory of a sidecar and of an operator with a thousand groups while hostile HTTP clients use up all they can.

Both run in memory cgroups with the chart's limits; the figures are the kernel's peak. The benchmark has no peer: the
Java client does not listen for HTTP.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

from bench.bench_member import QUEUES, TOPIC, BenchMember
from bench.measure import Row, Sample
from bench.memory import MEBIBYTE, RUN_SECONDS, RUNS, format_peaks, memory_limit
from bench.scale import GROUPS, Scale, scaled
from ground.instance import temporary
from ground.poll import soon
from ground.rocketmq import RocketMQ
from http_attacks import ATTACKS, attacked, probed
from rota.brokers.port import queues_of

SIDECAR_BYTES = 256 * MEBIBYTE
OPERATOR_BYTES = 512 * MEBIBYTE
MEMBER_PORTS = (9911, 9913)
OPERATOR_PORTS = (8080, 8081)
PROBE_SECONDS = 1.0  # between two probes


def rows() -> Iterator[Row]:
    """Measure each attack for a minute, three times."""
    with temporary("bench-attacks") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        rocketmq.create_topic(TOPIC, QUEUES)
        for attack in ATTACKS:
            results = [asyncio.run(_measure_sidecar(rocketmq, attack, run)) for run in range(RUNS)]
            yield _format_row("a sidecar", attack, results, SIDECAR_BYTES)
    with scaled() as scale:
        yield from asyncio.run(_measure_operators(scale))


def _format_row(what: str, attack: str, results: Sequence[tuple[int, int]], limit: int) -> Row:
    peaks, failed_probes = zip(*results, strict=True)
    label = f"{what} attacked by {attack}: {format_peaks(peaks)}; {sum(failed_probes)} probes failed"
    return Row(label, Sample([0.0]), target=f"≤ {limit // MEBIBYTE} MiB, 0")


async def _measure_sidecar(rocketmq: RocketMQ, attack: str, run: int) -> tuple[int, int]:
    name = f"attacks-{[*ATTACKS].index(attack)}-{run}"
    with memory_limit(name, SIDECAR_BYTES) as limit:
        member = BenchMember(rocketmq, name, program=limit.program("-m", "rota.sidecar"))
        member.give(1, queues_of(TOPIC, {"broker-0": QUEUES}))
        failed = await _count_failed_probes(attack, member.address, MEMBER_PORTS, (9911, "/healthz"))
        peak = limit.peak_bytes
        member.end()
    return peak, failed


async def _measure_operators(scale: Scale) -> list[Row]:
    rows: list[Row] = []
    async with scale.prepared():
        for attack in ATTACKS:
            results = [await _measure_operator(scale, attack, run) for run in range(RUNS)]
            rows.append(_format_row(f"an operator with {GROUPS:,} groups", attack, results, OPERATOR_BYTES))
    return rows


async def _measure_operator(scale: Scale, attack: str, run: int) -> tuple[int, int]:
    with memory_limit(f"operator-{[*ATTACKS].index(attack)}-{run}", OPERATOR_BYTES) as limit:
        async with scale.operator("first", limit.program):
            await scale.until_all_known("first")
            failed = await _count_failed_probes(attack, scale.address("first"), OPERATOR_PORTS, (8081, "/healthz"))
            return limit.peak_bytes, failed


async def _count_failed_probes(attack: str, address: str, ports: Sequence[int], probe: tuple[int, str]) -> int:
    """Attack all ports for a minute; return the number of failed probes."""
    failed = 0
    loop = asyncio.get_running_loop()

    async def answers() -> bool:
        return await _is_answered(address, probe)

    await soon(answers)
    async with AsyncExitStack() as attacks:
        for port in ports:
            await attacks.enter_async_context(attacked(address, port, attack))
        deadline = loop.time() + RUN_SECONDS
        while loop.time() < deadline:
            failed += not await _is_answered(address, probe)
            await asyncio.sleep(PROBE_SECONDS)
    return failed


async def _is_answered(address: str, probe: tuple[int, str]) -> bool:
    try:
        return await probed(address, *probe) == 200
    except OSError:
        return False
