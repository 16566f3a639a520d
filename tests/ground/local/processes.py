"""A container's processes: started as a group, ended without remainder.

Processes that left the group are found by a mark in their environment. Run as a program, this file waits until the
agent that started it has ended, for any reason, and kills the agent's remaining processes.
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
        """Return the exit code, a signal as a negative number."""
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        """Signal the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        code = self._process.wait()
        self.signal(signal.SIGKILL)  # the remaining processes of its group
        self._ended.set_result(code)


async def wait_for_first(*waits: Coroutine[Any, Any, Any] | asyncio.Task[None]) -> None:
    """Wait for the first of them to finish; those passed as coroutines are then cancelled."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    own = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)


def kill(mark: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to every process whose mark begins with `mark`; return the number of processes."""
    variable = b"\0" + f"{VARIABLE}={mark}".encode()
    return sum(_kill(int(entry.name), variable, number) for entry in Path("/proc").iterdir() if entry.name.isdigit())


async def kill_all(mark: str) -> None:
    """Kill until no process is left."""
    while kill(mark):  # noqa: ASYNC110 - the end of a process that is not a child sets no event
        await asyncio.sleep(0.01)


def _kill(pid: int, variable: bytes, number: signal.Signals) -> bool:
    if pid == os.getpid():
        return False
    try:
        handle = os.pidfd_open(pid)  # before the check: a pid that is reused meanwhile must not be hit
    except OSError:
        return False
    try:
        matches = variable in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        if matches:
            signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    else:
        return matches
    finally:
        os.close(handle)


def main() -> None:
    """Wait for the end of standard input, then kill every process that carries the mark given as argument."""
    sys.stdin.buffer.read()
    while kill(sys.argv[1]):
        time.sleep(0.02)


if __name__ == "__main__":
    main()
