"""Clients of the sidecar's port that exhaust it: its probes are answered meanwhile, and its memory stays small."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ground.memory_limit import peak_bytes
from ground.rocketmq import RocketMQ
from http_attacks import ATTACKS, MEBIBYTE, attacked, probed
from sidecar.fleet import a_fleet
from sidecar.pods import PORT, Pod

LIMIT_BYTES = 64 * MEBIBYTE  # that an attack may add to the sidecar's memory
PROBES = 30  # that must be answered while the attack goes on


@pytest.fixture
async def pod(rocketmq: RocketMQ, tmp_path: Path) -> AsyncIterator[Pod]:
    """Start a sidecar that consumes four queues."""
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        await fleet.give(a=fleet.queues)
        yield pod


@pytest.mark.parametrize("attack", ATTACKS)
async def test_http_server_of_a_sidecar_under_attack_fails_no_probe_and_takes_little_memory(
    pod: Pod, attack: str
) -> None:
    assert pod.sidecar
    before = peak_bytes(pod.sidecar.pid)
    async with attacked(pod.address, PORT, attack):
        for number in range(PROBES):
            path = ("/healthz", "/readyz", "/metrics")[number % 3]
            assert await probed(pod.address, PORT, path) == 200
            await asyncio.sleep(0.1)
    assert pod.sidecar.poll() is None
    added = peak_bytes(pod.sidecar.pid) - before
    print(f"{attack}: {added / MEBIBYTE:.0f} MiB added")
    assert added < LIMIT_BYTES
    assert not pod.complaints()
