"""Tests stalls of the process, limited calls, and the supervision of tasks, which restarts them after pauses."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rota import aio
from rota.aio import STALL_SECONDS, RateLimitedCall, StallDetector, supervise


class Task:
    """Work that fails `failures` times, and then runs until it is cancelled."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.starts = 0
        self.runs = asyncio.Event()

    async def run(self) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise ZeroDivisionError(self.starts)
        self.runs.set()
        await asyncio.Event().wait()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds of each sleep of the supervisor, which does not really sleep."""
    slept = list[float]()

    class Asyncio:
        """The module asyncio with another `sleep`."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    monkeypatch.setattr(aio, "asyncio", Asyncio())
    return slept


async def run_supervised(
    work: Callable[[], Coroutine[Any, Any, object]], until: asyncio.Event
) -> list[tuple[str, Exception | None]]:
    reported = list[tuple[str, Exception | None]]()
    task = asyncio.create_task(supervise("work", work, lambda *failure: reported.append(failure)))
    await until.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return reported


async def test_supervision_restarts_a_task_that_fails_and_reports_each_failure(pauses: list[float]) -> None:
    task = Task(failures=8)
    reported = await run_supervised(task.run, task.runs)
    assert [(name, repr(error)) for name, error in reported] == [
        ("work", f"ZeroDivisionError({number})") for number in range(1, 9)
    ]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]


async def test_supervision_reports_that_a_task_runs_steadily_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "RECOVERED_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(aio, "MIN_RESTART_PAUSE_SECONDS", 0.0)
    steady = asyncio.Event()
    task = Task(failures=1)
    reported = list[Exception | None]()

    def note(_: str, error: Exception | None) -> None:
        reported.append(error)
        if error is None and task.runs.is_set():
            steady.set()

    supervisor = asyncio.create_task(supervise("work", task.run, note))
    await steady.wait()
    supervisor.cancel()
    assert isinstance(reported[0], ZeroDivisionError)
    assert reported[-1] is None


async def test_supervision_ends_with_a_task_that_returns_and_reports_that_it_recovered(pauses: list[float]) -> None:
    reported = list[Exception | None]()
    starts = list[int]()

    async def work() -> None:
        starts.append(1)
        if len(starts) == 1:
            raise ZeroDivisionError

    await supervise("work", work, lambda _, error: reported.append(error))
    assert [type(error) for error in reported] == [ZeroDivisionError, type(None)]
    assert pauses == [0.5]


async def test_unmanaged_consumer_notices_within_an_interval_become_one_call() -> None:
    calls = list[int]()
    called = asyncio.Event()
    requested = 0

    def call() -> None:
        calls.append(requested)
        called.set()

    limited = RateLimitedCall(call, 0.05)
    for _ in range(3):
        called.clear()
        for _ in range(4):
            requested += 1
            limited.request()
        await called.wait()
    assert calls == [4, 8, 12]


async def test_unmanaged_consumer_notice_waits_until_the_interval_is_over() -> None:
    calls = list[None]()
    called = asyncio.Event()

    def call() -> None:
        calls.append(None)
        called.set()

    limited = RateLimitedCall(call, 3600.0)
    limited.request()
    await called.wait()
    limited.request()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(calls) == 1


def test_stall_is_a_pause_between_two_observations_of_more_than_the_limit() -> None:
    detector = StallDetector(100.0)
    assert detector.observe(100.0 + STALL_SECONDS) == 0
    assert detector.awake_since == 100.0
    assert detector.observe(110.5) == 5.5
    assert detector.awake_since == 110.5
    assert detector.observe(111.0) == 0, "one stall is found once"
    assert detector.awake_since == 110.5


def test_stall_is_overdue_until_it_is_observed_however_often_it_is_asked_for() -> None:
    detector = StallDetector(0.0)
    assert not detector.is_overdue(STALL_SECONDS)
    assert [detector.is_overdue(6.0), detector.is_overdue(6.0)] == [True, True]
    assert detector.observe(6.0) == 6.0
    assert not detector.is_overdue(6.0)


def test_stall_is_measured_from_the_last_observation_not_from_the_last_question() -> None:
    detector = StallDetector(0.0)
    for seconds in range(int(STALL_SECONDS) + 1):
        assert not detector.is_overdue(float(seconds))
    assert detector.observe(STALL_SECONDS + 1) == STALL_SECONDS + 1
