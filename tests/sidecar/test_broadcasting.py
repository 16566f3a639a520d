"""Broadcasting at a real broker: everybody gets everything, and each member keeps its own place."""

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
        one, other = await fleet.add("a"), await fleet.add("b")
        fleet.show()
        for name in fleet.pods:
            await fleet.obeys(name)
        await fleet.send(40)
        await all_taken(fleet, one, other)
        await all_kept(fleet, one)
        fleet.kill("a", "sidecar")
        await fleet.send(20)
        await all_taken(fleet, other)
        one.start_sidecar()
        await all_taken(fleet, one)
        assert {*taken(fleet, one).values(), *taken(fleet, other).values()} == {1}
        assert not any((await fleet.sample()).values()), "the broker keeps no offsets of such a group"
        assert [pod.complaints() for pod in (one, other)] == [[], []]


@pytest.mark.slow("a Broadcasting member whose disk is full")
async def test_broadcasting_on_a_full_disk_still_delivers_and_keeps_stored_offsets(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path, messageModel="Broadcasting") as fleet:
        pod = await fleet.add("a")
        pod.kill_sidecar()
        with a_small_disk(pod.state):
            pod.start_sidecar()
            await pod.heard(fleet.session)
            fleet.show()
            await fleet.obeys("a")
            await fleet.send(40)
            await all_taken(fleet, pod)
            before = await all_kept(fleet, pod)
            once = taken(fleet, pod)
            fill(pod.state)
            await fleet.send(20)
            await all_taken(fleet, pod)
            await fleet.logged("a", "No space left")
            assert kept(fleet, pod) == before
            twice = taken(fleet, pod) - once
            assert {*once.values(), *twice.values()} == {1}
            fleet.kill("a", "sidecar")
            pod.start_sidecar()
            (pod.state / "filler").unlink()
            await fleet.until(lambda: taken(fleet, pod) == once + twice + twice)
            await all_kept(fleet, pod)


async def all_taken(fleet: SidecarFleet, *pods: Pod) -> None:
    """Wait until each pod's app was done with all that the broker took."""

    def left() -> dict[str, list[int]]:
        sent = {it.number for it in fleet.sent if it.acked}
        missing = {pod.name: sorted(sent - taken(fleet, pod).keys()) for pod in pods}
        return {name: numbers for name, numbers in missing.items() if numbers}

    try:
        await fleet.until(lambda: not left())
    except TimeoutError:
        raise TimeoutError(f"of {len(fleet.sent)} messages these are not done: {left()}") from None


async def all_kept(fleet: SidecarFleet, pod: Pod) -> int:
    """Wait until a member's own offsets have everything behind them that its broker stored; return how many."""
    ends = await fleet.cluster.offset_ranges(fleet.topic, BROKER)
    stored = sum(it.max_offset for it in ends.values())  # a send that failed may be among it, or not
    await fleet.until(lambda: kept(fleet, pod) == stored)
    return stored


def taken(fleet: SidecarFleet, pod: Pod) -> Counter[int]:
    """Return how often a pod's app was done with each message."""
    return Counter(it.number for it in pod.deliveries(fleet.group, orderly=False) if it.done)


def kept(fleet: SidecarFleet, pod: Pod) -> int:
    """Return how many messages a member's own offsets have behind them."""
    path = pod.state / fleet.group / f"{fleet.topic}.json"
    found = json.loads(path.read_text())["offsets"] if path.exists() else {}
    return sum(offset for queues in found.values() for offset in queues.values())
