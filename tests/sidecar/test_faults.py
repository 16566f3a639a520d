"""Real sidecars, apps, brokers and name servers that are killed, stopped or moved."""

import asyncio
import signal
import socket
from collections import Counter
from pathlib import Path

import pytest

from ground.poll import soon
from ground.rocketmq import RocketMQ
from sidecar.fleet import SidecarFleet, a_fleet

STOPPED_SECONDS = 10  # longer than STALL_SECONDS, after which the sidecar re-reads its assignment


async def a_busy_pair(fleet: SidecarFleet) -> None:
    """Start two pods with two queues each; their apps need 50 ms for a message."""
    for name, queues in (("a", [*fleet.queues[:2], fleet.retry]), ("b", fleet.queues[2:])):
        pod = await fleet.add(name)
        pod.rules({"seconds": 0.05})
        await fleet.grant(**{name: queues})


async def test_crash_of_the_sidecar_repeats_only_uncommitted_messages(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        await a_busy_pair(fleet)
        async with fleet.traffic():
            for _ in range(2):
                await fleet.wait_for_deliveries(100)
                await fleet.sample()
                fleet.kill("a", "sidecar")
                fleet.pods["a"].start_sidecar()
                await fleet.pods["a"].wait_for_report(fleet.session)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_crash_of_the_app_repeats_only_unanswered_messages(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        await a_busy_pair(fleet)
        async with fleet.traffic():
            for _ in range(2):
                await fleet.wait_for_deliveries(100)
                fleet.kill("a", "app")
                await asyncio.sleep(1)
                fleet.pods["a"].start_app()
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_crash_of_the_app_on_a_message_returns_it_by_the_retry_topic(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        pod = await fleet.add("a")
        pod.rules({"numbers": [7], "attempts": [1], "act": "die"})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(40)
        assert pod.app
        await asyncio.to_thread(pod.app.wait, 60)
        fleet.note("app", "a")
        pod.start_app()
        await fleet.wait_until_all_done()
        assert [delivery.attempt for delivery in fleet.delivered() if delivery.number == 7] == [1, 2]
        await fleet.wait_until_all_committed()
        await fleet.check()


async def test_failover_after_ten_deliveries_and_eight_committed_repeats_two(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, queues=1) as fleet:
        pod, _ = await fleet.add("a"), await fleet.add("b")
        numbers = await fleet.send(10)
        pod.rules({"numbers": numbers[8:], "act": "hold"})
        await fleet.grant(a=fleet.queues)
        await fleet.wait_until(lambda: len(fleet.delivered()) == 10)

        async def eight_are_committed() -> bool:
            return (await fleet.sample())[fleet.queues[0]] == 8

        await soon(eight_are_committed)
        fleet.kill_pod("a")
        fleet.owners.clear()
        await fleet.grant(b=fleet.queues)
        await fleet.wait_until_all_done()
        counted = Counter(delivery.number for delivery in fleet.delivered())
        assert counted == dict.fromkeys(numbers[:8], 1) | dict.fromkeys(numbers[8:], 2)
        await fleet.check()


async def test_forced_grant_makes_a_stalled_sidecar_reread_its_document_before_delivering(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        await a_busy_pair(fleet)
        pod = fleet.pods["a"]
        async with fleet.traffic(pause=0.3):
            await fleet.wait_until(lambda: len(fleet.delivered()) > 50)
            await fleet.sample()
            pod.signal_sidecar(signal.SIGSTOP)
            await fleet.force_grant("a", "b", [*fleet.queues[:2], fleet.retry])
            await asyncio.sleep(STOPPED_SECONDS)
            await fleet.sample()
            delivered = len(pod.deliveries(fleet.group, orderly=False))
            pod.signal_sidecar(signal.SIGCONT)
            await fleet.wait_until_settled("a")
            await fleet.wait_until_released("a", fleet.queues[:2])
        await fleet.wait_until_all_done()
        assert len(pod.deliveries(fleet.group, orderly=False)) == delivered, "it delivers nothing after the stall"
        assert "it re-reads its assignment" in pod.log.read_text()
        await fleet.wait_until_all_committed()
        await fleet.check()


@pytest.mark.slow("a response waits in the socket of a stalled sidecar")
async def test_push_response_that_arrived_in_time_at_a_stalled_sidecar_counts(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, push={"timeout": "2s"}) as fleet:
        pod = await fleet.add("a")
        pod.rules({"seconds": 1})
        await fleet.grant(a=[*fleet.queues, fleet.retry])
        await fleet.send(40)
        await fleet.wait_until(lambda: len(fleet.delivered()) >= 8)
        pod.signal_sidecar(signal.SIGSTOP)
        await asyncio.sleep(4)  # longer than the timeout of a push
        pod.signal_sidecar(signal.SIGCONT)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        assert [delivery.attempt for delivery in fleet.delivered()] == [1] * 40
        await fleet.check()


async def test_broker_failure_and_restart_elsewhere_recommits_the_lost_offsets(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        await a_busy_pair(fleet)
        async with fleet.traffic():
            await fleet.wait_until(lambda: len(fleet.delivered()) > 100)
            rocketmq.kill_broker(0)
            await soon(lambda: unreachable(fleet))
            await asyncio.to_thread(rocketmq.start_broker, 0, a_free_port(rocketmq.address))
            await fleet.wait_for_deliveries(100)
        await fleet.wait_until_all_done()
        fleet.commits.clear()  # a killed broker loses its latest commits
        await fleet.wait_until_all_committed()
        rocketmq.kill_broker(0)  # now no member has a new offset to commit
        await asyncio.to_thread(rocketmq.start_broker, 0)
        fleet.commits.clear()
        await fleet.wait_until_all_committed()
        await fleet.hand_over(a=fleet.queues[2:], b=fleet.queues[:2])
        await fleet.send(40)
        await fleet.wait_until_all_done()  # of acknowledged messages: the restarting broker may reject some
        assert {*Counter(delivery.number for delivery in fleet.delivered()).values()} == {1}
        ids = {consumer.client_id for consumer in await fleet.cluster.online_consumers(fleet.group, "broker-0")}
        assert ids == {pod.client_id for pod in fleet.pods.values()}
        await fleet.check()


async def unreachable(fleet: SidecarFleet) -> bool:
    report = await fleet.read_report("a")
    return bool(report and report.brokers.get("broker-0") is False)


@pytest.mark.slow("a handover between whole sidecars while the name server is down")
async def test_name_server_outage_does_not_stop_consumption(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        await a_busy_pair(fleet)
        async with fleet.traffic():
            await fleet.wait_until(lambda: len(fleet.delivered()) > 50)
            rocketmq.stop_name_server()
            try:
                await fleet.wait_for_deliveries(100)
                await fleet.hand_over(a=fleet.queues[2:], b=fleet.queues[:2])
                await fleet.wait_for_deliveries(100)
            finally:
                await asyncio.to_thread(rocketmq.start_name_server)
        await fleet.wait_until_all_done()
        await asyncio.to_thread(rocketmq.up)
        await fleet.wait_until_all_committed()
        await fleet.check()


def a_free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
