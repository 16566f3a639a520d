"""A test that leaves a task, a thread or a process behind fails: what it left would disturb the tests after it."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

GRACE_SECONDS = 10.0  # for what is ending
RECHECK_SECONDS = 0.01
EXECUTOR_THREADS = "asyncio_"  # a loop keeps them for its next call of to_thread


@pytest.fixture(scope="session", autouse=True)
async def session_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all tests."""
    return asyncio.get_running_loop()


@pytest.fixture(autouse=True)
def no_leaks(session_loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Compare what runs before a test and after it; fixtures of wider scopes are set up before, so theirs may stay."""
    before = _running(session_loop)
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while left := _running(session_loop) - before:
        if time.monotonic() > deadline:
            pytest.fail("the test left behind: " + "; ".join(sorted(left)), pytrace=False)
        session_loop.run_until_complete(asyncio.sleep(RECHECK_SECONDS))


def _running(loop: asyncio.AbstractEventLoop) -> set[str]:
    tasks = {f"task {task.get_name()} {task.get_coro()}" for task in asyncio.all_tasks(loop)}
    threads = {
        f"thread {thread.name} {thread.ident}"
        for thread in threading.enumerate()
        if not thread.name.startswith(EXECUTOR_THREADS)
    }
    return tasks | threads | _child_processes()


def _child_processes() -> set[str]:
    """Return children that run; one that has ended and was not waited for is none."""
    children: set[str] = set()
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(FileNotFoundError):  # the thread has just ended
            for pid in (thread / "children").read_text().split():
                children |= _described(Path("/proc") / pid)
    return children


def _described(process: Path) -> set[str]:
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it has just ended
        return set()
    return {f"process {process.name}: {command[:200]}"} if command else set()
