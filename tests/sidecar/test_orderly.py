"""Orderly groups at a real broker: one message after another, under a lock, whoever comes, goes or stands still.

Sidecar and broker are in a hurry: all that has to do with locks takes a tenth of its time.
"""

import asyncio
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ground.rocketmq import RocketMQ
from sidecar.fleet import HURRIED, SidecarFleet, a_fleet

# The same, and the wall clock goes by what a file says: so many seconds wrong.
MISLED = f"""
import os, time
right = time.time
def wrong():
    with open(os.environ["WRONG_BY"]) as said:
        return right() + float(said.read())
time.time = wrong
{HURRIED}"""
STOPPED_SECONDS = 10  # longer than the broker keeps a lock
ORDERLY: dict[str, Any] = {"ordering": "Orderly", "push": {"timeout": "2s"}}


async def an_orderly_pair(fleet: SidecarFleet, program: str = HURRIED) -> None:
    fleet.program = ("-c", program)
    for name, queues in (("a", fleet.queues[:2]), ("b", fleet.queues[2:])):
        pod = await fleet.add(name)
        pod.rules({"seconds": 0.01})
        await fleet.give(**{name: queues})


async def test_orderly_handover_under_load_keeps_the_order(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        async with fleet.traffic():
            await fleet.until(lambda: len(fleet.done()) > 100)
            report = await fleet.obeys("a")
            assert [it.locked for it in report.queues] == [True, True]
            await fleet.hand_over(b=fleet.queues[:2])
            await fleet.hand_over(a=fleet.queues)
            await fleet.hand_over(b=fleet.queues[2:])
        await fleet.all_done()
        assert {it.attempt for it in fleet.delivered()} == {1}
        assert {*Counter(it.number for it in fleet.delivered()).values()} == {1}
        await fleet.all_committed()
        await fleet.check()


async def test_orderly_queue_is_released_while_its_message_is_retried_in_place(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        stuck = fleet.queues[0]
        fleet.pods["a"].rules({"queues": [stuck.id], "status": 500})
        await fleet.send(40)
        await fleet.until(lambda: [it for it in fleet.delivered() if it.queue == stuck and it.attempt == 2])
        await fleet.hand_over(b=[stuck])
        await fleet.all_done()
        await fleet.all_committed()
        await fleet.check()


async def test_orderly_locks_of_a_terminated_pod_are_released_on_its_behalf(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        async with fleet.traffic():
            await fleet.until(lambda: len(fleet.done()) > 100)
            await fleet.sample()
            fleet.end("a")
            await fleet.cluster.unlock(fleet.group, fleet.pods["a"].client_id, fleet.queues[:2])
            for queue in fleet.queues[:2]:
                del fleet.owners[queue]
            await fleet.give(b=fleet.queues[:2])
            delivered = len(fleet.pods["b"].deliveries(fleet.group, orderly=True))
            await fleet.until(
                lambda: len(fleet.pods["b"].deliveries(fleet.group, orderly=True)) > delivered + 100, seconds=60
            )
        await fleet.all_done()
        await fleet.all_committed()
        await fleet.check()


async def test_orderly_crash_and_restart_of_the_sidecar_keeps_the_order(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        async with fleet.traffic():
            await fleet.until(lambda: len(fleet.done()) > 100)
            await fleet.sample()
            fleet.kill("a", "sidecar")
            fleet.pods["a"].start_sidecar(fleet.program)
            await fleet.more(100)
        await fleet.all_done()
        await fleet.all_committed()
        await fleet.check()


@pytest.mark.slow("a forced grant in an Orderly group, with whole sidecars")
async def test_orderly_forced_grant_never_lets_two_members_consume_a_queue(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        one, other = fleet.pods["a"], fleet.pods["b"]
        async with fleet.traffic(pause=0.1):
            await fleet.until(lambda: len(fleet.done()) > 100)
            await fleet.sample()
            one.signal_sidecar(signal.SIGSTOP)
            await fleet.force("a", "b", fleet.queues[:2])
            await asyncio.sleep(STOPPED_SECONDS)
            stood = len(one.deliveries(fleet.group, orderly=True))
            one.signal_sidecar(signal.SIGCONT)
            await fleet.forgiven("a")
            taken = {*fleet.queues[:2]}
            await fleet.until(lambda: taken <= {it.queue for it in other.deliveries(fleet.group, orderly=True)})
        await fleet.all_done()
        assert len(one.deliveries(fleet.group, orderly=True)) == stood
        await fleet.all_committed()
        await fleet.check()


async def test_orderly_consumption_is_unaffected_by_wall_clock_jumps(rocketmq: RocketMQ, tmp_path: Path) -> None:
    said = tmp_path / "wrong-by"
    said.write_text("0")
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        fleet.variables = {"WRONG_BY": str(said)}
        await an_orderly_pair(fleet, MISLED)
        async with fleet.traffic():
            for wrong in (3600, -3600, 0):
                await fleet.more(100)
                said.with_suffix(".new").write_text(f"{wrong}")
                said.with_suffix(".new").rename(said)
                await fleet.more(100)
                await fleet.hand_over(b=fleet.queues[:2])
                await fleet.hand_over(a=fleet.queues[:2])
        await fleet.all_done()
        assert {*Counter(it.number for it in fleet.delivered()).values()} == {1}
        stood = re.findall(r"was stalled for (\d+)", fleet.pods["a"].log.read_text())
        assert all(int(it) < 60 for it in stood), "an hour went by for the clock, and for nothing else"
        await fleet.all_committed()
        await fleet.check()


@pytest.mark.slow("an Orderly group whose broker crashes and forgets its locks")
async def test_orderly_broker_crash_that_loses_the_locks_keeps_the_order(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path, **ORDERLY) as fleet:
        await an_orderly_pair(fleet)
        async with fleet.traffic():
            await fleet.until(lambda: len(fleet.done()) > 100)
            rocketmq.kill_broker(0)
            await asyncio.to_thread(rocketmq.start_broker, 0)
            await fleet.more(100)
        await fleet.all_done()
        fleet.commits.clear()
        await fleet.all_committed()
        await fleet.check()
