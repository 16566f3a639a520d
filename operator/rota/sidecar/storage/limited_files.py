"""Writes the sidecar's state files atomically, and keeps their total size within a quota.

The folder has `obeyed.json` (StateStore) and, in Broadcasting groups, `<group>/<topic>.json` (OffsetFiles). An offset
file that cannot be decoded is kept as `<topic>.json.torn`, for a user to look at. Files of the app do not count.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

import msgspec

QUOTA_BYTES = 240 * 2**20  # of all files: the volume of injected pods has 256 MiB


def check_quota(root: Path, added_bytes: int) -> None:
    """Raise OSError if the files would exceed the quota: a pod whose volume exceeds its limit is evicted."""
    used = 0  # includes the file that will be replaced: both exist for a moment
    for file in [*root.glob("*.json"), *root.glob("*/*.json"), *root.glob("*/*.json.torn")]:
        with suppress(FileNotFoundError):  # another thread has replaced it
            used += file.stat().st_size
    if used + added_bytes > QUOTA_BYTES:
        raise OSError(errno.EDQUOT, f"The state would take more than {QUOTA_BYTES // 2**20} MiB", str(root))


def replace_within_quota(root: Path, path: Path, content: msgspec.Struct) -> None:
    """Replace a file below `root` atomically by encoded content, on the disk when this returns.

    After an OSError the previous file is in place or, if only flushing its folder failed, already the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    encoded = msgspec.json.encode(content)
    check_quota(root, len(encoded))
    try:
        with new.open("wb") as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # without this, a crash of the node may undo the rename
    finally:
        os.close(folder)
