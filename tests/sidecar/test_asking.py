"""Apps that ask for messages, at a real broker: the same promises, under the same judge."""

import asyncio
import signal
from pathlib import Path
from typing import Any

from aiohttp import ClientConnectorError

from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.sidecar import pull
from sidecar.fleet import SidecarFleet, a_fleet
from sidecar.in_process import event

ASKING: dict[str, Any] = {"delivery": {"mode": "Pull", "pull": {"visibilityTimeout": "2s"}}}


async def a_busy_pair(fleet: SidecarFleet) -> None:
    for name, queues in (("a", [*fleet.queues[:2], fleet.retry]), ("b", fleet.queues[2:])):
        pod = await fleet.add(name)
        pod.rules({"seconds": 0.02})
        await fleet.give(**{name: queues})


async def test_pull_handover_under_load_loses_and_repeats_no_message(hurried: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(hurried, tmp_path, **ASKING) as fleet:
        await a_busy_pair(fleet)
        async with fleet.traffic():
            for _ in range(2):
                await fleet.more(100)
                await fleet.hand_over(b=fleet.queues[:2])
                await fleet.more(100)
                await fleet.hand_over(a=fleet.queues)
                await fleet.hand_over(b=fleet.queues[2:])
        await fleet.all_done()
        numbers = [it.number for it in fleet.delivered()]
        assert len(numbers) == len({*numbers})
        await fleet.all_committed()
        await fleet.check()


async def listens(fleet: SidecarFleet, url: str) -> bool:
    """Whether the sidecar can be asked for messages yet: a moment after its first report."""
    try:
        async with fleet.session.get(url):
            return True
    except ClientConnectorError:
        return False


async def test_pull_assignments_stream_reports_assigned_and_revoked_queues(hurried: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(hurried, tmp_path, **ASKING) as fleet:
        pod, _ = await fleet.add("a"), await fleet.add("b")
        await fleet.give(a=fleet.queues)
        url = f"http://{pod.address}:{pull.PORT}/v1/assignments"
        await soon(lambda: listens(fleet, url))
        async with fleet.session.get(url) as stream:
            broker = fleet.queues[0].broker
            assert await event(stream) == ("assigned", {"queues": {fleet.topic: {broker: "0-3"}}, "generation": 1})
            await fleet.hand_over(b=fleet.queues[2:])
            assert await event(stream) == ("revoked", {"queues": {fleet.topic: {broker: "2-3"}}, "generation": 2})


async def test_pull_nacked_or_unanswered_message_returns_by_the_retry_topic(hurried: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(hurried, tmp_path, **ASKING) as fleet:
        pod = await fleet.add("a")
        refused, silent = {"numbers": [5], "attempts": [1, 2], "status": 500}, {"numbers": [3], "attempts": [1]}
        pod.rules(refused, {**silent, "act": "hang"})
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(20)
        await fleet.all_done()
        attempts = {number: [it.attempt for it in fleet.delivered() if it.number == number] for number in range(20)}
        assert attempts == {it: [1] for it in range(20)} | {3: [1, 2], 5: [1, 2, 3]}
        await fleet.all_committed()
        await fleet.check()


async def test_pull_ack_that_arrived_in_time_at_a_stalled_sidecar_counts(hurried: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(hurried, tmp_path, **ASKING) as fleet:
        pod = await fleet.add("a")
        pod.rules({"seconds": 1})
        await fleet.give(a=[*fleet.queues, fleet.retry])
        await fleet.send(8)
        await fleet.until(fleet.delivered)
        pod.signal_sidecar(signal.SIGSTOP)
        await asyncio.sleep(4)  # longer than an answer may take
        pod.signal_sidecar(signal.SIGCONT)
        await fleet.all_done()
        await fleet.all_committed()
        assert [it.attempt for it in fleet.delivered()] == [1] * 8
        await fleet.check()


async def test_pull_crash_repeats_only_unacknowledged_or_uncommitted_messages(
    hurried: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(hurried, tmp_path, **ASKING) as fleet:
        await a_busy_pair(fleet)
        async with fleet.traffic():
            for what in (["app"], ["sidecar"], ["sidecar", "app"]):
                await fleet.more(100)
                await fleet.sample()
                fleet.kill("a", *what)
                if "sidecar" in what:
                    fleet.pods["a"].start_sidecar()
                    await fleet.pods["a"].heard(fleet.session)
                if "app" in what:
                    fleet.pods["a"].start_app()
        await fleet.all_done()
        await fleet.all_committed()
        await fleet.check()
