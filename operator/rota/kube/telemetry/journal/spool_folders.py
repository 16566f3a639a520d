"""The folders of the spool, which holds the journal's segments until they are stored at the journal's destination.

Each process of the operator has a folder, with a lock (flock) that it holds while it runs. A process adopts the folders
of processes that have ended. Since a file system may not show locks of other nodes, the folder of another pod is
adopted only after it has not changed for IDLE_SECONDS.
"""

import calendar
import fcntl
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from rota.kube.telemetry.journal.segment_rules import (
    ClosedSegment,
    is_spool_folder,
    parse_spool_path,
    spool_folder,
)
from rota.object_store.segments import SegmentName

IDLE_SECONDS = 600.0  # since the last change in the folder of another pod
_LOCK = "lock"
_START = "%Y%m%dT%H%M%SZ"


class SpoolFolders:
    """The folders that this process has locked: its own one, and adopted ones."""

    def __init__(self, root: Path, own_name: SegmentName) -> None:
        """Start without folders. Pod, uid and start of `own_name` identify this process; other fields are unused."""
        self.root = root
        self.own_name = own_name
        self._has_created = False
        self._locks: dict[str, int] = {}  # descriptors of the locks, by the names of folders

    def create_own(self) -> None:
        """Create the folder of this process, unless it exists; raise OSError if it fails, and leave no folder then.

        If the name of the folder was used by another process, `own_name` gets a later start.
        """
        if self._is_own_locked():
            return
        self._has_created = False
        while True:
            folder = self.root / spool_folder(self.own_name)
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if not folder.is_dir():  # the spool itself is a file
                    raise
            else:
                self._has_created = self._lock_new(folder)
                if self._has_created:
                    return
            start = calendar.timegm(time.strptime(self.own_name.start, _START)) + 1
            self.own_name = self.own_name._replace(start=time.strftime(_START, time.gmtime(start)))

    def _is_own_locked(self) -> bool:
        """Whether this process has its folder; false if its lock was deleted, so that others may adopt it."""
        if not self._has_created:  # `_locks` may have an adopted folder of the same name, from an earlier process
            return False
        try:
            return os.fstat(self._locks[spool_folder(self.own_name)]).st_nlink > 0
        except OSError:  # deleted by another node
            return False

    def adopt(self) -> list[ClosedSegment]:
        """Lock the folders of processes that have ended, and return their segments."""
        adopted: list[ClosedSegment] = []
        for folder in self._other_folders():
            with suppress(OSError):  # deleted, or not readable; the next call tries again
                if self._may_adopt(folder) and self._lock(folder.name):
                    adopted += self._segments_in(folder)
        return adopted

    def release_except(self, needed: Collection[str]) -> None:
        """Remove and unlock all locked folders except the needed ones."""
        for folder in [name for name in self._locks if name not in needed]:
            with suppress(OSError):  # a user has put other files there
                (self.root / folder / _LOCK).unlink(missing_ok=True)
                (self.root / folder).rmdir()
            os.close(self._locks.pop(folder))

    def unlock(self) -> None:
        """Leave all folders to the next process; after that, `create_own` creates a new folder."""
        self._has_created = False
        for folder in [*self._locks]:
            os.close(self._locks.pop(folder))

    def _other_folders(self) -> list[Path]:
        """Return the folders of other processes; folders of users are recognized by their names, and left out."""
        try:
            return sorted(path for path in self.root.iterdir() if path.name not in self._locks and _is_spool(path))
        except OSError:  # deleted, or its disk fails; the next call tries again
            return []

    def _may_adopt(self, folder: Path) -> bool:
        # A folder of this pod is on this node, where `_lock` sees the lock of another process.
        own_pod = spool_folder(self.own_name).rpartition("-")[0]  # the name without the process' start
        if folder.name.rpartition("-")[0] == own_pod:
            return True
        try:
            newest = folder.lstat().st_mtime
            for path in folder.iterdir():
                newest = max(newest, path.lstat().st_mtime)
            # Ask for the file system's time, which may differ from this node's; this works on a full disk, too.
            os.utime(self.root)
            now = self.root.stat().st_mtime
        except OSError:  # another process is removing it
            return False
        return now > newest + IDLE_SECONDS

    def _segments_in(self, folder: Path) -> Iterator[ClosedSegment]:
        with suppress(OSError):
            for path in folder.iterdir():
                name = parse_spool_path(folder.name, path.name)
                if name and path.is_file() and not path.is_symlink():
                    yield ClosedSegment(name, path.stat().st_size, records=None)  # not known: counted by its writer

    def _lock_new(self, folder: Path) -> bool:
        """Lock a folder that was just made; remove it and raise OSError if it cannot be locked."""
        try:
            return self._lock(folder.name)
        except OSError:
            with suppress(OSError):
                (folder / _LOCK).unlink(missing_ok=True)
                folder.rmdir()
            raise

    def _lock(self, folder: str) -> bool:
        """Lock a folder; return False if another process has locked it; raise OSError if locks are not possible."""
        descriptor = os.open(self.root / folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        former = self._locks.pop(folder, None)
        if former is not None:  # of a deleted folder with the same name
            os.close(former)
        self._locks[folder] = descriptor
        return True


def _is_spool(path: Path) -> bool:
    return is_spool_folder(path.name) and path.is_dir() and not path.is_symlink()
