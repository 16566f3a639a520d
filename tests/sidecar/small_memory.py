"""A container of 256 MiB around one process: `python small_memory.py NAME ARGUMENT...` becomes `python ARGUMENT...`.

The process gets a memory cgroup of its own with that limit, and sees the cgroup as a container sees its own. So the
kernel kills a process that takes more.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LIMIT_BYTES = 256 * 2**20
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Container:
    """The cgroup, from before the process starts until after it ended."""

    def __init__(self, name: str) -> None:
        """Make it; an OSError where that is not allowed."""
        self._is_v1 = (V1 / "memory.limit_in_bytes").exists()
        self.root = V1 if self._is_v1 else V2
        self.folder = self.root / f"rota-{name}"
        if not self._is_v1:
            (V2 / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()
        limit = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self.folder / limit).write_text(str(LIMIT_BYTES))

    @property
    def program(self) -> Sequence[str]:
        """The arguments for Python that run the sidecar in it."""
        return (__file__, str(self.folder), str(self.root), "-m", "rota.sidecar")

    @property
    def peak_bytes(self) -> int:
        """The most memory that the processes in it had together, file caches included."""
        return int((self.folder / ("memory.max_usage_in_bytes" if self._is_v1 else "memory.peak")).read_text())

    def remove(self) -> None:
        """Remove it, once its processes have ended."""
        with suppress(OSError):
            self.folder.rmdir()


def main(folder: str, root: str, *arguments: str) -> None:
    """Enter the cgroup, show it where a container sees its own, and become the program."""
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    mount = ["mount", "--bind", folder, root]
    command = [sys.executable, *arguments]
    script = '"$1" "$2" "$3" "$4" && shift 4 && exec "$@"'
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", script, "sh", *mount, *command])  # noqa: S606 - fixed words


if __name__ == "__main__":
    main(*sys.argv[1:])
