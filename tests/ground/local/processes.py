"""A container's processes: started as a group, ended without remainder.

What left its group is known by a mark in its environment. Run as a program, this file waits until the agent that
started it is gone, however it went, and ends what it left behind.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

VARIABLE = "ROTA_CONTAINER"


class Process:
    """A process with a session of its own, so that its whole group can be signalled."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: BinaryIO | int) -> None:
        self._process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        self._handle = os.pidfd_open(self._process.pid)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._handle, self._reap)

    async def wait(self) -> int:
        """Return how it ended, a signal as a negative number."""
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        """Signal the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        code = self._process.wait()
        self.signal(signal.SIGKILL)  # what is left of its group
        self._ended.set_result(code)


async def first(*waits: Coroutine[Any, Any, Any] | asyncio.Task[None]) -> None:
    """Wait for whatever comes first; what was given as a coroutine is given up then."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    own = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)


def kill(mark: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Kill every process whose mark begins so, or send another signal; return how many there were."""
    wanted = b"\0" + f"{VARIABLE}={mark}".encode()
    return sum(_kill(int(entry.name), wanted, number) for entry in Path("/proc").iterdir() if entry.name.isdigit())


async def clear(mark: str) -> None:
    """Kill until there is nothing left."""
    while kill(mark):  # noqa: ASYNC110 - no process tells us that it is gone
        await asyncio.sleep(0.01)


def _kill(pid: int, wanted: bytes, number: signal.Signals) -> bool:
    if pid == os.getpid():
        return False
    try:
        handle = os.pidfd_open(pid)  # first: a number that is given out anew meanwhile must not be hit
    except OSError:
        return False
    try:
        found = wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        if found:
            signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    else:
        return found
    finally:
        os.close(handle)


def main() -> None:
    """Wait for the end of standard input, then kill whatever carries the mark given as argument."""
    sys.stdin.buffer.read()
    while kill(sys.argv[1]):
        time.sleep(0.02)


if __name__ == "__main__":
    main()
