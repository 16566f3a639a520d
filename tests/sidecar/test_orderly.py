"""Orderly groups at a real broker: one message at a time, under a lock, also when members join, leave or stall.

All lock intervals of sidecar and broker are divided by ten.
"""

import asyncio
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ground.rocketmq import RocketMQ
from sidecar.fleet import FAST_CLOCKS, SidecarFleet, a_fleet

# The same, with a wall clock that is wrong by the number of seconds in a file.
WRONG_CLOCK = f"""
import os, time
right = time.time
def wrong():
    with open(os.environ["WRONG_BY"]) as file:
        return right() + float(file.read())
time.time = wrong
{FAST_CLOCKS}"""
STOPPED_SECONDS = 10  # longer than the broker keeps a lock
ORDERLY: dict[str, Any] = {"ordering": "Orderly", "push": {"timeout": "2s"}}


async def an_orderly_pair(fleet: SidecarFleet, program: str = FAST_CLOCKS) -> None:
    fleet.program = ("-c", program)
    for name, queues in (("a", fleet.queues[:2]), ("b", fleet.queues[2:])):
        pod = await fleet.add(name)
        pod.rules({"seconds": 0.01})
        await fleet.grant(**{name: queues})


async def test_orderly_handover_under_load_keeps_the_order(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        async with fleet.traffic():
            await fleet.wait_until(lambda: len(fleet.done()) > 100)
            report = await fleet.wait_until_obeyed("a")
            assert [queue.locked for queue in report.queues] == [True, True]
            await fleet.hand_over(b=fleet.queues[:2])
            await fleet.hand_over(a=fleet.queues)
            await fleet.hand_over(b=fleet.queues[2:])
        await fleet.wait_until_all_done()
        assert {delivery.attempt for delivery in fleet.delivered()} == {1}
        assert {*Counter(delivery.number for delivery in fleet.delivered()).values()} == {1}
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_orderly_queue_is_released_while_its_message_is_retried_in_place(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        stuck = fleet.queues[0]
        fleet.pods["a"].rules({"queues": [stuck.id], "status": 500})
        await fleet.send(40)
        await fleet.wait_until(
            lambda: [delivery for delivery in fleet.delivered() if delivery.queue == stuck and delivery.attempt == 2]
        )
        await fleet.hand_over(b=[stuck])
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_orderly_locks_of_a_terminated_pod_are_released_on_its_behalf(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        async with fleet.traffic():
            await fleet.wait_until(lambda: len(fleet.done()) > 100)
            await fleet.sample()
            fleet.kill_pod("a")
            await fleet.cluster.unlock(fleet.group, fleet.pods["a"].client_id, fleet.queues[:2])
            for queue in fleet.queues[:2]:
                del fleet.owners[queue]
            await fleet.grant(b=fleet.queues[:2])
            delivered = len(fleet.pods["b"].deliveries(fleet.group, orderly=True))
            await fleet.wait_until(
                lambda: len(fleet.pods["b"].deliveries(fleet.group, orderly=True)) > delivered + 100, seconds=60
            )
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_orderly_crash_and_restart_of_the_sidecar_keeps_the_order(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        async with fleet.traffic():
            await fleet.wait_until(lambda: len(fleet.done()) > 100)
            await fleet.sample()
            fleet.kill("a", "sidecar")
            fleet.pods["a"].start_sidecar(fleet.program)
            await fleet.wait_for_deliveries(100)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()


@pytest.mark.slow("a forced grant in an Orderly group, with whole sidecars")
async def test_orderly_forced_grant_never_lets_two_members_consume_a_queue(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        stopped, heir = fleet.pods["a"], fleet.pods["b"]
        async with fleet.traffic(pause=0.1):
            await fleet.wait_until(lambda: len(fleet.done()) > 100)
            await fleet.sample()
            stopped.signal_sidecar(signal.SIGSTOP)
            await fleet.force_grant("a", "b", fleet.queues[:2])
            await asyncio.sleep(STOPPED_SECONDS)
            delivered = len(stopped.deliveries(fleet.group, orderly=True))
            stopped.signal_sidecar(signal.SIGCONT)
            await fleet.wait_until_settled("a")
            taken = {*fleet.queues[:2]}
            await fleet.wait_until(
                lambda: taken <= {delivery.queue for delivery in heir.deliveries(fleet.group, orderly=True)}
            )
        await fleet.wait_until_all_done()
        assert len(stopped.deliveries(fleet.group, orderly=True)) == delivered
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_orderly_consumption_is_unaffected_by_wall_clock_jumps(rocketmq: RocketMQ, tmp_path: Path) -> None:
    offset_file = tmp_path / "wrong-by"
    offset_file.write_text("0")
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        fleet.variables = {"WRONG_BY": str(offset_file)}
        await an_orderly_pair(fleet, WRONG_CLOCK)
        async with fleet.traffic():
            for wrong in (3600, -3600, 0):
                await fleet.wait_for_deliveries(100)
                offset_file.with_suffix(".new").write_text(f"{wrong}")
                offset_file.with_suffix(".new").rename(offset_file)
                await fleet.wait_for_deliveries(100)
                await fleet.hand_over(b=fleet.queues[:2])
                await fleet.hand_over(a=fleet.queues[:2])
        await fleet.wait_until_all_done()
        assert {*Counter(delivery.number for delivery in fleet.delivered()).values()} == {1}
        stalls = re.findall(r"was stalled for (\d+)", fleet.pods["a"].log.read_text())
        assert all(int(seconds) < 60 for seconds in stalls), "only the wall clock jumps by an hour"
        await fleet.wait_until_all_committed()
        await fleet.check()


@pytest.mark.slow("an Orderly group whose broker crashes and forgets its locks")
async def test_orderly_broker_crash_that_loses_the_locks_keeps_the_order(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        async with fleet.traffic():
            await fleet.wait_until(lambda: len(fleet.done()) > 100)
            rocketmq.kill_broker(0)
            await asyncio.to_thread(rocketmq.start_broker, 0)
            await fleet.wait_for_deliveries(100)
        await fleet.wait_until_all_done()
        fleet.commits.clear()
        await fleet.wait_until_all_committed()
        await fleet.check()
