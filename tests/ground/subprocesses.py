"""Processes of one test, as asyncio starts them."""

import asyncio
from asyncio.subprocess import Process
from contextlib import suppress


async def kill(process: Process) -> None:
    """Kill a process if it still runs, and wait for its end.

    asyncio reports the end of a process only after the ends of its pipes, and stops reading a pipe that holds more than
    128 KiB. So this reads the rest of both pipes.
    """
    if process.returncode is None:
        process.kill()
    await asyncio.gather(*(_discard(pipe) for pipe in (process.stdout, process.stderr) if pipe))
    await process.wait()


async def _discard(pipe: asyncio.StreamReader) -> None:
    with suppress(RuntimeError):  # a task of the test reads it
        while await pipe.read(65536):
            pass
