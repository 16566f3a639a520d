"""A pod's files on a disk so small that a test can fill it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest


def fill(folder: Path) -> None:
    """Fill the disk with the file `filler`; deleting it frees the disk."""
    disk = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(disk.f_bavail * disk.f_bsize))


def fill_inodes(folder: Path) -> None:
    """Take all inodes of the disk by empty files in the folder `filler`; deleting it frees them."""
    (folder / "filler").mkdir()
    with suppress(OSError):
        for number in count():
            (folder / "filler" / str(number)).touch()


@contextmanager
def a_small_disk(folder: Path, max_inodes: int = 0) -> Iterator[None]:
    """Mount a disk of 64 KiB on the folder, if not limited with any number of inodes; skip without the permission."""
    options = f"size=64k,nr_inodes={max_inodes}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "rota", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a full disk requires the permission to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
