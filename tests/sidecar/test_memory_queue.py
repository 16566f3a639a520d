"""The memory budget of a member with several queues: which queues wait for memory, and when they continue."""

from pathlib import Path

import pytest

from ground.poll import soon
from rota.brokers.memory import BROKER
from rota.brokers.message import MESSAGE_OVERHEAD_BYTES
from rota.model import Queue
from rota.sidecar import agent, member_host
from sidecar.in_memory import TOPIC, Event, Latch, MemoryMember, a_member

FIRST, SECOND, THIRD = (Queue(TOPIC, BROKER, number) for number in range(3))
BUDGET_BYTES = 400_000
LARGE = "l" * 300_000
MIDDLE = "m" * 150_000
SMALL = "s" * 1000


@pytest.fixture(autouse=True)
def _small_container(monkeypatch: pytest.MonkeyPatch) -> None:
    share = member_host.MESSAGE_MEMORY_FRACTION
    monkeypatch.setattr(member_host, "memory_limit_bytes", lambda: BUDGET_BYTES / share)
    monkeypatch.setattr(agent, "MONITOR_INTERVAL_SECONDS", 0.05)


class HangingApp:
    """An app that responds to a large message once the latch is opened."""

    def __init__(self) -> None:
        self.latch = Latch()

    async def __call__(self, event: Event) -> int:
        return await self.latch(event) if event.body == LARGE else 204


async def wait_for_refused_pulls(member: MemoryMember, number: int) -> None:
    """Wait until `number` pulls found no memory for their first message."""

    async def are_refused() -> bool:
        return await refused_pulls(member) == number

    await soon(are_refused)


async def refused_pulls(member: MemoryMember) -> int:
    lines = (await member.request("/metrics"))[1].splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if 'outcome="no_memory"' in line)


async def hang_at_a_large_message(member: MemoryMember) -> HangingApp:
    """Return an app that hangs at a large message of the first queue."""
    member.app.answer = app = HangingApp()
    await member.assign([FIRST, SECOND, THIRD])
    await member.send(LARGE, queue=0)
    await member.wait_until(lambda report: report.inflight == 1)
    return app


async def test_memory_freed_by_a_delivery_lets_a_waiting_queue_continue(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        app = await hang_at_a_large_message(member)
        await member.send(MIDDLE, queue=1)
        await wait_for_refused_pulls(member, 1)
        assert member.app.done == []
        app.latch.opened.set()
        await member.wait_until_done(LARGE, MIDDLE)
        assert await refused_pulls(member) == 1  # the queue waits without further pulls


async def test_memory_freed_by_a_released_queue_lets_a_waiting_queue_continue(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.drain_timeout = 0.1
        await hang_at_a_large_message(member)
        await member.send(MIDDLE, queue=1)
        await wait_for_refused_pulls(member, 1)
        await member.assign([SECOND, THIRD])
        await member.wait_until_done(MIDDLE)


async def test_memory_reserved_for_a_released_queue_lets_another_queue_continue(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        app = await hang_at_a_large_message(member)
        await member.send(LARGE, queue=1)
        await wait_for_refused_pulls(member, 1)
        await member.send(SMALL, queue=2)  # it would fit, but follows the large message
        await wait_for_refused_pulls(member, 2)
        await member.assign([FIRST, THIRD])
        await member.wait_until_done(SMALL)
        app.latch.opened.set()
        await member.wait_until_done(LARGE, SMALL)


async def test_memory_is_given_to_a_large_message_before_later_ones(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        app = await hang_at_a_large_message(member)
        await member.send(LARGE, queue=1)
        await wait_for_refused_pulls(member, 1)
        later = [f"{number}{MIDDLE}" for number in range(5)]
        for body in later:
            await member.send(body, queue=2)
        await wait_for_refused_pulls(member, 2)
        assert member.app.done == []
        app.latch.opened.set()
        await member.wait_until_done(LARGE, LARGE, *later)
        assert member.app.done == [LARGE, LARGE, *later]


async def test_memory_held_by_unfinished_large_messages_does_not_delay_small_ones(tmp_path: Path) -> None:
    large = "l" * 180_000  # two of them and a share of 66,666 exceed the budget

    async def hangs(event: Event) -> int:
        return await latch(event) if event.body == large else 204

    async with a_member(tmp_path) as member:
        member.app.answer = hangs
        latch = Latch()
        await member.assign([FIRST, SECOND, THIRD])
        for queue in range(2):
            await member.send(large, queue=queue)
        await wait_for_refused_pulls(member, 1)
        small = [f"{number}{SMALL}" for number in range(5)]
        for body in small:
            await member.send(body, queue=2)
        await member.wait_until_done(*small)
        latch.opened.set()
        await member.wait_until_done(*small, large, large)


async def test_memory_of_all_queues_together_stays_within_the_budget(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        member.app.answer = latch = Latch()
        bodies = [f"{number}{MIDDLE}" for number in range(20)]
        for number, body in enumerate(bodies):
            await member.send(body, queue=number % 3)
        await member.assign([FIRST, SECOND, THIRD])
        await member.wait_until(lambda report: report.inflight == 2)
        held = sum(reader.window.memory_bytes for reader in member.sidecar.readers.values())
        assert held == 2 * (len(bodies[0]) + MESSAGE_OVERHEAD_BYTES) <= BUDGET_BYTES
        latch.opened.set()
        await member.wait_until_done(*bodies)

        async def is_released() -> bool:  # only after the sidecar has read the app's last response
            return member.sidecar.host.memory_budget.used_bytes == 0

        await soon(is_released)


async def test_memory_admits_a_message_larger_than_the_budget_once_nothing_is_held(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST, SECOND])
        bodies = [f"{number}" + "x" * 2 * BUDGET_BYTES for number in range(4)]
        for number, body in enumerate(bodies):
            await member.send(body, SMALL + str(number), queue=number % 2)
        await member.wait_until_done(*bodies, *(SMALL + str(number) for number in range(4)))


async def test_memory_limit_per_message_changes_with_the_settings_at_runtime(tmp_path: Path) -> None:
    async with a_member(tmp_path) as member:
        await member.assign([FIRST])
        member.settings["delivery"] = {"buffer": {"mebibytesPerMessage": 1}}
        await member.assign([FIRST])
        assert [reader.limits.max_body_bytes for reader in member.sidecar.readers.values()] == [2**20]
