"""Background work of a publisher: one run at a time, once more after a request meanwhile, also after a failure."""

import asyncio

import pytest

from ground.poll import soon
from rota.aio import BackgroundTasks
from rota.kube.reconcile.status_publisher import CoalescingTask


async def test_status_writes_that_are_requested_together_are_one_run_and_one_more() -> None:
    runs = 0

    async def write() -> None:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0)

    task = CoalescingTask(BackgroundTasks())
    task.request(write)
    await asyncio.sleep(0)  # it begins
    for _ in range(3):
        task.request(write)
    assert task._task
    await task._task
    assert runs == 2


async def test_status_is_written_again_after_an_unexpected_failure() -> None:
    outcomes = iter([RuntimeError("unexpected"), None])
    written = asyncio.Event()

    async def write() -> None:
        if error := next(outcomes):
            raise error
        written.set()

    task = CoalescingTask(BackgroundTasks())
    task.request(write)
    failed = task._task
    assert failed
    with pytest.raises(RuntimeError, match="unexpected"):
        await failed
    task.request(write)

    async def is_written() -> bool:
        return written.is_set()

    await soon(is_written)
