"""The end of a process whose output is not read."""

import asyncio
import sys
from asyncio.subprocess import PIPE

from ground.subprocesses import kill

WRITES = "import sys, time; sys.stderr.write('x' * 1_000_000); sys.stderr.flush()"


async def test_ground_process_that_has_filled_its_pipe_can_be_killed() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITES, stdout=PIPE, stderr=PIPE)
    assert process.stderr
    await process.stderr.readexactly(1)
    await asyncio.wait_for(kill(process), 60)
    assert process.returncode is not None
