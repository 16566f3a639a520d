"""When a group is reconciled: once for concurrent changes, and again after a failure."""

import asyncio
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rota.aio import RETRY_PAUSES_SECONDS, BackgroundTasks
from rota.kube.client.api import ConflictError, NoResponseError
from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.reconcile.controller import COALESCE_SECONDS, WorkQueue
from rota.kube.reconcile.reconciler import QueuedGroup
from rota.kube.state.group import Group

KEY = ("shop", "orders")


class Reconciles:
    """A stand-in for the controller: returns or raises the given results one after another."""

    is_leading = True

    def __init__(self, *results: float | Exception) -> None:
        self._results = list(results)
        self.count = 0
        self.started = asyncio.Event()
        self.released = asyncio.Event()
        self.released.set()

    async def reconcile(self, _: QueuedGroup) -> float:
        self.count += 1
        self.started.set()
        await self.released.wait()
        result = self._results.pop(0) if self._results else inf
        if isinstance(result, Exception):
            raise result
        return result

    async def finish_next(self) -> None:
        """Wait until a reconcile has started, and let it end."""
        await self.started.wait()
        self.started.clear()
        await asyncio.sleep(0)


def a_queue(
    reconciles: Reconciles, *, leads: bool = True, tasks: BackgroundTasks | None = None
) -> tuple[WorkQueue, QueuedGroup]:
    group = Group(*KEY)
    group.body = CustomResource(Metadata("orders", uid="1", namespace="shop"))
    unused = cast("Any", SimpleNamespace(stop=lambda: None))
    queue = WorkQueue(cast("Any", reconciles), tasks or BackgroundTasks())
    queued = QueuedGroup(group, unused, unused, unused, unused)
    queue.groups[KEY] = queued
    reconciles.is_leading = leads
    return queue, queued


async def test_reconcile_runs_once_for_concurrent_changes() -> None:
    reconciles = Reconciles()
    queue, queued = a_queue(reconciles)
    for seconds in (30.0, 0.0, 5.0):
        queue.enqueue(KEY, seconds)
    await reconciles.finish_next()
    assert (reconciles.count, queued.is_running, queued.timer) == (1, False, None)


async def test_reconcile_during_which_a_group_changes_is_followed_by_one_more() -> None:
    reconciles = Reconciles()
    queue, _ = a_queue(reconciles)
    reconciles.released.clear()
    queue.enqueue(KEY)
    await reconciles.finish_next()
    for seconds in (5.0, 0.0, 0.0):
        queue.enqueue(KEY, seconds)
    assert reconciles.count == 1
    reconciles.released.set()
    await reconciles.finish_next()
    assert reconciles.count == 2


@pytest.mark.parametrize("awaited", [["m1"], ["m1", "m2"], ["m2"], []], ids=" ".join)
async def test_reconcile_follows_a_report_at_once_if_no_other_one_is_awaited(awaited: list[str]) -> None:
    queue, queued = a_queue(Reconciles())
    queued.group.members_to_poll = frozenset(awaited)
    loop = asyncio.get_running_loop()
    before = loop.time()
    queue.enqueue_for_report(KEY, "m1")
    assert queued.timer
    if awaited == ["m1"]:
        assert queued.timer.when() <= loop.time()
    else:
        assert queued.timer.when() >= before + COALESCE_SECONDS


async def test_reconcile_follows_at_once_if_the_only_awaited_report_arrives_during_a_reconcile() -> None:
    reconciles = Reconciles()
    queue, queued = a_queue(reconciles)
    queued.group.members_to_poll = frozenset({"m1"})
    reconciles.released.clear()
    queue.enqueue(KEY)
    await reconciles.finish_next()
    queue.enqueue(KEY)
    queue.enqueue_for_report(KEY, "m1")
    reconciles.released.set()
    await asyncio.sleep(0)
    assert queued.timer
    assert queued.timer.when() <= asyncio.get_running_loop().time()


@pytest.mark.parametrize("case", ["another operator leads", "it has no object", "it is unknown", "nothing will change"])
async def test_reconcile_is_not_planned_without_need(case: str) -> None:
    queue, queued = a_queue(Reconciles(), leads=case != "another operator leads")
    if case == "it has no object":
        queued.group.body = None
    queue.enqueue(("shop", "bills") if case == "it is unknown" else KEY, inf if case == "nothing will change" else 0.0)
    assert queued.timer is None


async def test_reconcile_that_fails_is_repeated_after_longer_and_longer_pauses() -> None:
    failures = [NoResponseError("no answer"), ValueError("a defect"), NoResponseError("no answer")]
    reconciles = Reconciles(*failures, 20.0, NoResponseError("no answer"))
    queue, queued = a_queue(reconciles)
    loop = asyncio.get_running_loop()
    for pause in (*RETRY_PAUSES_SECONDS[:3], 20.0, RETRY_PAUSES_SECONDS[0]):
        started_at = loop.time()
        queue.enqueue(KEY, 0.0)
        await reconciles.started.wait()
        await reconciles.finish_next()
        assert queued.timer
        assert started_at + pause <= queued.timer.when() <= loop.time() + pause


async def test_reconcile_of_a_stale_group_is_repeated_at_once_and_then_after_a_pause() -> None:
    reconciles = Reconciles(ConflictError(), ConflictError())
    queue, queued = a_queue(reconciles)
    queue.enqueue(KEY)
    await reconciles.finish_next()
    await reconciles.started.wait()
    started_at = asyncio.get_running_loop().time()
    await reconciles.finish_next()
    assert (reconciles.count, queued.failures) == (2, 2)
    assert queued.timer
    assert queued.timer.when() >= started_at + RETRY_PAUSES_SECONDS[1] - 1e-3
    queued.stop()
    assert queued.timer is None


async def test_reconcile_is_cancelled_when_the_tasks_are_closed() -> None:
    reconciles = Reconciles()
    tasks = BackgroundTasks()
    queue, queued = a_queue(reconciles, tasks=tasks)
    reconciles.released.clear()
    queue.enqueue(KEY)
    await reconciles.started.wait()
    reconciles.is_leading = False
    await tasks.close()
    assert (reconciles.count, queued.is_running, queued.timer) == (1, False, None)
