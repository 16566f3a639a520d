"""Waiting for changes of a queue."""

import asyncio

from rota.sidecar.consume.source import ChangeSignal


async def test_queue_change_wakes_only_tasks_whose_condition_holds() -> None:
    changed = ChangeSignal()
    room = 0
    checks: list[int] = []

    def has_room() -> bool:
        checks.append(room)
        return room >= 2

    waiting = asyncio.create_task(changed.wait_until(has_room))
    await asyncio.sleep(0)
    room = 1
    changed.notify()
    room = 2
    changed.notify()
    await asyncio.wait_for(waiting, 10)
    assert checks == [0, 1, 2, 2], "checked before waiting, at each change, and once more when woken"


async def test_queue_change_that_is_over_again_when_its_task_runs_does_not_end_the_wait() -> None:
    changed = ChangeSignal()
    is_idle = False
    waiting = asyncio.create_task(changed.wait_until(lambda: is_idle))
    await asyncio.sleep(0)
    is_idle = True
    changed.notify()
    is_idle = False
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    is_idle = True
    changed.notify()
    await asyncio.wait_for(waiting, 10)


async def test_queue_change_ends_a_brief_wait_before_its_time() -> None:
    changed = ChangeSignal()
    waiting = asyncio.create_task(changed.wait_briefly(3600))
    await asyncio.sleep(0)
    changed.notify()
    await asyncio.wait_for(waiting, 10)


async def test_queue_change_that_never_comes_ends_a_brief_wait_at_its_time() -> None:
    await asyncio.wait_for(ChangeSignal().wait_briefly(0.01), 10)
