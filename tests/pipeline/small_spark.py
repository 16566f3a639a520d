"""Spark as a process of its own in tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ground.poll import eventually
from rota.object_store import open_store
from rota.pipeline.ingest.lease import FOLDER

LONGEST = 900  # seconds: an ingest, or until Java has started, on a busy machine
SMALL = {"ROTA_SPARK_MEMORY": "1g", "ROTA_SPARK_CORES": "2"}


@contextmanager
def run_ingest(lake: str, logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run an ingest, with its output in a folder; its remaining processes are killed in the end."""
    arguments = ["pipeline", "ingest", lake, "-o", "json"]
    with (logs / "stdout").open("wb") as stdout, (logs / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "rota.cli", *arguments],
            stdout=stdout,
            stderr=stderr,
            env=os.environ | SMALL,
            start_new_session=True,  # its process group has its Java, and nothing else
        )
    with killed_at_the_end(process):
        yield process


@contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process that leads a process group, with what remains of the group, in the end."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_when(process: subprocess.Popen[bytes], is_reached: Callable[[], bool]) -> None:
    """Wait until a condition is met; the caller's block then ends the process, which still has to run."""
    eventually(lambda: is_reached() or process.poll() is not None, LONGEST)
    assert process.poll() is None, "the process ended before"


def delete_lease(lake: str) -> None:
    """Delete the lease of a killed ingest, as its refusal says, so that the next ingest need not wait."""
    store = open_store(lake)
    for info in list(store.list_objects(FOLDER)):
        store.delete(info.key)
