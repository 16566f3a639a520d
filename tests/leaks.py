"""Fails a test that leaves a task, a thread or a process running, which would disturb later tests."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ground.instance import TAG

GRACE_SECONDS = 10.0  # for tasks, threads and processes that are ending
RECHECK_SECONDS = 0.01
# Threads and processes that libraries reuse for their next call.
EXECUTOR_THREADS = "asyncio_"
SPARK_MODULES = "py4j"
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


@pytest.fixture(scope="session", autouse=True)
async def session_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all tests."""
    return asyncio.get_running_loop()


@pytest.fixture(autouse=True)
def no_leaks(session_loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Compare running tasks before and after a test; fixtures of wider scopes start earlier, so theirs may stay."""
    before_test = _running(session_loop)
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while leaks := _running(session_loop) - before_test:
        if time.monotonic() > deadline:
            pytest.fail("the test left behind: " + "; ".join(sorted(leaks)), pytrace=False)
        session_loop.run_until_complete(asyncio.sleep(RECHECK_SECONDS))


def _running(loop: asyncio.AbstractEventLoop) -> set[str]:
    tasks = {f"task {task.get_name()} {task.get_coro()}" for task in asyncio.all_tasks(loop)}
    # By name, which is unique by default: a test may restart a fixture's thread under the same explicit name.
    threads = {f"thread {thread.name}" for thread in threading.enumerate() if not _is_kept_by_library(thread)}
    return tasks | threads | _child_processes()


def _is_kept_by_library(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return thread.name.startswith(EXECUTOR_THREADS) or getattr(target, "__module__", "").startswith(SPARK_MODULES)


def _child_processes() -> set[str]:
    """Describe the running child processes; zombies are left out."""
    children: set[str] = set()
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(FileNotFoundError):  # the thread has just ended
            for pid in (thread / "children").read_text().split():
                children |= _describe(Path("/proc") / pid)
    return children


def _describe(process: Path) -> set[str]:
    """Describe a process; one of the ground by its name there, because a test may restart a fixture's server."""
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # the process has just ended
        return set()
    if not command or RESOURCE_TRACKER in command:
        return set()
    name = next((variable.decode() for variable in variables if variable.startswith(f"{TAG}=".encode())), "")
    return {f"process {name}" if name else f"process {process.name}: {command[:200]}"}
