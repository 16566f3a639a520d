"""Apps that pull messages, at a real broker: the same guarantees, verified by the same checker."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from ground.rocketmq import RocketMQ
from sidecar.fleet import SidecarFleet, a_fleet

PULL_SETTINGS: dict[str, Any] = {"delivery": {"mode": "Pull", "pull": {"visibilityTimeout": "2s"}}}


async def a_busy_pair(fleet: SidecarFleet) -> None:
    for name, queues in (("a", [*fleet.queues[:2], fleet.retry]), ("b", fleet.queues[2:])):
        pod = await fleet.add(name)
        pod.rules({"seconds": 0.02})
        await fleet.grant(**{name: queues})


async def test_pull_handover_under_load_loses_and_repeats_no_message(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **PULL_SETTINGS) as fleet:
        await a_busy_pair(fleet)
        async with fleet.traffic():
            await fleet.wait_for_deliveries(100)
            await fleet.hand_over(b=fleet.queues[:2])
            await fleet.wait_for_deliveries(100)
            await fleet.hand_over(a=fleet.queues)
            await fleet.hand_over(b=fleet.queues[2:])
        await fleet.wait_until_all_done()
        numbers = [delivery.number for delivery in fleet.delivered()]
        assert len(numbers) == len({*numbers})
        await fleet.wait_until_all_committed()
        await fleet.check()


@pytest.mark.slow("an acknowledgement waits in the socket of a stalled sidecar")
async def test_pull_ack_that_arrived_in_time_at_a_stalled_sidecar_counts(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **PULL_SETTINGS) as fleet:
        pod = await fleet.add("a")
        pod.rules({"seconds": 1})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(8)
        await fleet.wait_until(fleet.delivered)
        pod.signal_sidecar(signal.SIGSTOP)
        await asyncio.sleep(4)  # longer than the visibility timeout
        pod.signal_sidecar(signal.SIGCONT)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        assert [delivery.attempt for delivery in fleet.delivered()] == [1] * 8
        await fleet.check()


@pytest.mark.slow("apps that pull, and their sidecars, crash in turns")
async def test_pull_crash_repeats_only_unacknowledged_or_uncommitted_messages(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, **PULL_SETTINGS) as fleet:
        await a_busy_pair(fleet)
        async with fleet.traffic():
            for containers in (["app"], ["sidecar"], ["sidecar", "app"]):
                await fleet.wait_for_deliveries(100)
                await fleet.sample()
                fleet.kill("a", *containers)
                if "sidecar" in containers:
                    fleet.pods["a"].start_sidecar()
                    await fleet.pods["a"].wait_for_report(fleet.session)
                if "app" in containers:
                    fleet.pods["a"].start_app()
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()
