"""Writes the sidecar's state files atomically, and keeps their total size within a quota."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import msgspec

QUOTA_BYTES = 240 * 2**20  # of all files: the volume of injected pods has 256 MiB


def check_quota(root: Path, added_bytes: int) -> None:
    """Raise OSError if the files would exceed the quota: a pod whose volume exceeds its limit is evicted."""
    used = 0
    for file in [*root.glob("*.json"), *root.glob("*/*.json"), *root.glob("*/*.json.torn")]:
        with suppress(FileNotFoundError):  # another thread has replaced it
            used += file.stat().st_size
    if used + added_bytes > QUOTA_BYTES:
        raise OSError(errno.EDQUOT, f"The state would take more than {QUOTA_BYTES // 2**20} MiB", str(root))


def write_file(root: Path, path: Path, body: msgspec.Struct) -> None:
    """Replace a file atomically; after an OSError the previous file is still in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    text = msgspec.json.encode(body)
    check_quota(root, len(text))
    try:
        with new.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
