"""Broadcasting at a real broker: each member gets every message, and stores its own offsets."""

import json
from collections import Counter
from pathlib import Path

import pytest

from ground.rocketmq import RocketMQ
from sidecar.fleet import BROKER, SidecarFleet, a_fleet
from sidecar.pods import Pod
from sidecar.small_disk import a_small_disk, fill


async def test_broadcasting_member_gets_every_message_once_and_resumes_after_a_crash(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, messageModel="Broadcasting") as fleet:
        first, second = await fleet.add("a"), await fleet.add("b")
        fleet.publish()
        for name in fleet.pods:
            await fleet.wait_until_obeyed(name)
        await fleet.send(40)
        await all_taken(fleet, first, second)
        await all_kept(fleet, first)
        fleet.kill("a", "sidecar")
        await fleet.send(20)
        await all_taken(fleet, second)
        first.start_sidecar()
        await all_taken(fleet, first)
        assert {*taken(fleet, first).values(), *taken(fleet, second).values()} == {1}
        assert not any((await fleet.sample()).values()), "the broker keeps no offsets of such a group"
        assert [pod.complaints() for pod in (first, second)] == [[], []]


@pytest.mark.slow("a Broadcasting member whose disk is full")
async def test_broadcasting_on_a_full_disk_still_delivers_and_keeps_stored_offsets(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, messageModel="Broadcasting") as fleet:
        pod = await fleet.add("a")
        pod.kill_sidecar()
        with a_small_disk(pod.state):
            pod.start_sidecar()
            await pod.wait_for_report(fleet.session)
            fleet.publish()
            await fleet.wait_until_obeyed("a")
            await fleet.send(40)
            await all_taken(fleet, pod)
            stored = await all_kept(fleet, pod)
            once = taken(fleet, pod)
            fill(pod.state)
            await fleet.send(20)
            await all_taken(fleet, pod)
            await fleet.wait_for_log("a", "No space left")
            assert kept(fleet, pod) == stored
            twice = taken(fleet, pod) - once
            assert {*once.values(), *twice.values()} == {1}
            fleet.kill("a", "sidecar")
            pod.start_sidecar()
            (pod.state / "filler").unlink()
            await fleet.wait_until(lambda: taken(fleet, pod) == once + twice + twice)
            await all_kept(fleet, pod)


async def all_taken(fleet: SidecarFleet, *pods: Pod) -> None:
    """Wait until each pod's app is done with all acknowledged messages."""

    def unfinished() -> dict[str, list[int]]:
        sent = {message.number for message in fleet.sent if message.acked}
        missing = {pod.name: sorted(sent - taken(fleet, pod).keys()) for pod in pods}
        return {name: numbers for name, numbers in missing.items() if numbers}

    try:
        await fleet.wait_until(lambda: not unfinished())
    except TimeoutError:
        raise TimeoutError(f"of {len(fleet.sent)} messages these are not done: {unfinished()}") from None


async def all_kept(fleet: SidecarFleet, pod: Pod) -> int:
    """Wait until a member's own offsets are at the ends of its queues; return the number of stored messages."""
    ends = await fleet.cluster.offset_ranges(fleet.topic, BROKER)
    stored = sum(offset_range.max_offset for offset_range in ends.values())  # may include unacknowledged messages
    await fleet.wait_until(lambda: kept(fleet, pod) == stored)
    return stored


def taken(fleet: SidecarFleet, pod: Pod) -> Counter[int]:
    """Return how often a pod's app accepted each message."""
    return Counter(delivery.number for delivery in pod.deliveries(fleet.group, orderly=False) if delivery.done)


def kept(fleet: SidecarFleet, pod: Pod) -> int:
    """Return how many messages a member's own offsets have passed."""
    path = pod.state / fleet.group / f"{fleet.topic}.json"
    offsets = json.loads(path.read_text())["offsets"] if path.exists() else {}
    return sum(offset for queues in offsets.values() for offset in queues.values())
