"""A pod's state on a disk so small that a test can fill it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def fill(folder: Path) -> None:
    """Fill the disk with the file `filler`; deleting it frees the disk."""
    disk = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(disk.f_bavail * disk.f_bsize))


@contextmanager
def a_small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of 64 KiB on the folder; skip the test where mounts are not permitted."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "rota", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a full disk requires the permission to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
