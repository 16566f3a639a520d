"""A disk of a pod's own, so small that it can be filled."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def fill(folder: Path) -> None:
    """Leave no room at all; it comes back with the end of the file `filler`."""
    disk = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(disk.f_bavail * disk.f_bsize))


@contextmanager
def a_small_disk(folder: Path) -> Iterator[None]:
    """Put a disk of 64 KiB there; what lay there comes back afterwards."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "rota", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only who may mount can have a disk that is full")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
