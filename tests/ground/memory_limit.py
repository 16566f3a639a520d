"""A container's memory limit for one process: a cgroup of its own, mounted where a container has its own.

The kernel kills the process if it takes more. `python -m ground.memory_limit FOLDER ROOT ARGUMENT...` enters the cgroup
of that folder and becomes `python ARGUMENT...`.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


class MemoryLimit:
    """The cgroup, from before the process starts until after it ended."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        """Create the cgroup; raises OSError where that is not allowed."""
        self._is_v1 = (V1 / "memory.limit_in_bytes").exists()
        self._root = V1 if self._is_v1 else V2
        self.folder = self._root / f"rota-{name}"
        if not self._is_v1:
            (V2 / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()
        file = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self.folder / file).write_text(str(limit_bytes))

    def program(self, *arguments: str) -> Sequence[str]:
        """Return the arguments for Python that run a program under the limit."""
        return ("-m", "ground.memory_limit", str(self.folder), str(self._root), *arguments)

    @property
    def peak_bytes(self) -> int:
        """The peak of the process' memory, with the kernel's cache of its files."""
        file = "memory.max_usage_in_bytes" if self._is_v1 else "memory.peak"
        return int((self.folder / file).read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the cgroup after its process has ended."""
        with suppress(OSError):
            self.folder.rmdir()


def peak_bytes(pid: int) -> int:
    """Return the peak of a process' memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(folder: str, root: str, *arguments: str) -> None:
    """Enter the cgroup, mount it where a container has its own, and become the program."""
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    mount = ["mount", "--bind", folder, root]
    command = [sys.executable, *arguments]
    script = '"$1" "$2" "$3" "$4" && shift 4 && exec "$@"'
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", script, "sh", *mount, *command])  # noqa: S606 - fixed words


if __name__ == "__main__":
    main(*sys.argv[1:])
