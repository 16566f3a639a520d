"""A topic on two brokers, one of which is killed: the other broker's queues are consumed, and no message is lost."""

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
        rocketmq = RocketMQ(instance, brokers=2)
        rocketmq.up()
        yield rocketmq
        rocketmq.down()


@pytest.mark.slow("a handover between whole sidecars while one of two brokers is down")
async def test_broker_failure_stops_only_the_queues_of_that_broker(two: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(two, tmp_path, queues=2) as fleet:
        reachable = [queue for queue in fleet.queues if queue.broker != LOST]
        for name, queues in (("a", fleet.queues[::2]), ("b", fleet.queues[1::2])):
            await fleet.add(name)
            await fleet.grant(**{name: queues})
        await fleet.grant(a=[fleet.retry])
        await fleet.send(40)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        fleet.kill_broker(1)
        await soon(lambda: reports_unreachable(fleet, "a"))
        sent = await fleet.send(40, reachable)
        await fleet.wait_until_all_done(sent)
        await fleet.hand_over(b=[queue for queue in reachable if fleet.owners[queue] == "a"])
        sent = await fleet.send(40, reachable)
        await fleet.wait_until_all_done(sent)
        report = await fleet.read_report("a")
        assert report
        assert report.state == "serving"
        given_up = [queue for queue, name in fleet.owners.items() if name == "a" and queue.broker == LOST]
        await fleet.revoke(given_up)
        await fleet.wait_until_released("a", given_up)
        await asyncio.sleep(2 * MONITOR_INTERVAL_SECONDS)  # until the next report
        assert await reports_unreachable(fleet, "a"), "so the operator grants it no queue of that broker"
        await asyncio.to_thread(two.start_broker, 1)
        await soon(lambda: reports_only(fleet, "a", {"broker-0"}))
        await fleet.grant(a=given_up)
        await fleet.send(40)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()


async def reports_unreachable(fleet: SidecarFleet, name: str) -> bool:
    """Whether a member reports one broker as reachable, and the other as unreachable."""
    report = await fleet.read_report(name)
    return bool(report and report.brokers == {"broker-0": True, LOST: False})


async def reports_only(fleet: SidecarFleet, name: str, brokers: set[str]) -> bool:
    """Whether a member's report names exactly these brokers."""
    report = await fleet.read_report(name)
    return bool(report and report.brokers.keys() == brokers)
