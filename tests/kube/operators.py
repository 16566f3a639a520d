"""The operator as a process."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ground.subprocesses import kill

ROTA = ("-m", "rota.cli")


@asynccontextmanager
async def an_operator(
    kubeconfig: Path, namespace: str, address: str, log: Path, *options: str, program: Sequence[str] = ROTA
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an operator for one namespace; kill it at the end if it still runs."""
    name = log.stem
    argv = [sys.executable, *program, "operator", "--namespace", namespace, "--own-namespace", namespace]
    with log.open("w") as log_file:
        process = await asyncio.create_subprocess_exec(
            *argv,
            "--identity",
            name,
            "--address",
            address,
            "--journal",
            str(log.with_suffix("")),
            *options,
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stderr=log_file,
        )
    try:
        yield process
    finally:
        await kill(process)
