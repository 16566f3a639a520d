"""Processes of one test, as asyncio starts them."""

from asyncio.subprocess import Process


async def kill(process: Process) -> None:
    """Kill a process if it still runs, and wait for its end."""
    if process.returncode is None:
        process.kill()
    await process.wait()
