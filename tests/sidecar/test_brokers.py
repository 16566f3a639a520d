"""A topic on two brokers, one of which is killed: the other's queues are worked on, and nothing is lost."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ground.instance import temporary
from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.sidecar.agent import MONITOR_INTERVAL_SECONDS
from sidecar.fleet import SidecarFleet, a_fleet

LOST = "broker-1"


@pytest.fixture(scope="module")
def two() -> Iterator[RocketMQ]:
    with temporary("two-brokers") as instance:
        found = RocketMQ(instance, brokers=2)
        found.up()
        yield found
        found.down()


@pytest.mark.slow("a handover between whole sidecars while one of two brokers is down")
async def test_broker_failure_stops_only_the_queues_of_that_broker(two: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(two, tmp_path, queues=2) as fleet:
        left = [queue for queue in fleet.queues if queue.broker != LOST]
        for name, queues in (("a", fleet.queues[::2]), ("b", fleet.queues[1::2])):
            await fleet.add(name)
            await fleet.give(**{name: queues})
        await fleet.give(a=[fleet.retry])
        await fleet.send(40)
        await fleet.all_done()
        await fleet.all_committed()
        fleet.kill_broker(1)
        await soon(lambda: misses(fleet, "a"))
        sent = await fleet.send(40, left)
        await fleet.all_done(sent)
        await fleet.hand_over(b=[queue for queue in left if fleet.owners[queue] == "a"])
        sent = await fleet.send(40, left)
        await fleet.all_done(sent)
        report = await fleet.hear("a")
        assert report
        assert report.state == "serving"
        given_up = [queue for queue, name in fleet.owners.items() if name == "a" and queue.broker == LOST]
        await fleet.revoke(given_up)
        await fleet.released("a", given_up)
        await asyncio.sleep(2 * MONITOR_INTERVAL_SECONDS)  # it says so anew
        assert await misses(fleet, "a"), "so nobody gives it a queue there again"
        await asyncio.to_thread(two.start_broker, 1)
        await soon(lambda: speaks_of(fleet, "a", {"broker-0"}))
        await fleet.give(a=given_up)
        await fleet.send(40)
        await fleet.all_done()
        await fleet.all_committed()
        await fleet.check()


async def misses(fleet: SidecarFleet, name: str) -> bool:
    """Whether a member says that one broker is reached, and the other is not."""
    report = await fleet.hear(name)
    return bool(report and report.brokers == {"broker-0": True, LOST: False})


async def speaks_of(fleet: SidecarFleet, name: str, brokers: set[str]) -> bool:
    """Whether a member tells of just these brokers."""
    report = await fleet.hear(name)
    return bool(report and report.brokers.keys() == brokers)
