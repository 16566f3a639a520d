"""Watches and reads a mounted ConfigMap, always files of one generation.

The kubelet writes each generation into a folder of its own, `..2026_11_22_03_43_24.1`, swaps the symlink `..data` by a
rename, and then removes the previous generation. So the reader follows the symlink once and keeps the target folder
open: all files come from one generation, however often the symlink is swapped meanwhile. A file that is missing there
may have been removed during the read; so the read counts only if the symlink still points to that folder afterwards.
"""

import asyncio
import ctypes
import errno
import logging
import os
import struct
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rota.documents import GZIP_KEY, PLAIN_KEY

SETTINGS_FILE = "group.json"
DATA_LINK = "..data"
MAX_TRIES = 100  # the kubelet's swaps are seconds apart: give up on a folder that is swapped without end

_IN_CLOSE_WRITE = 0x8
_IN_MOVED_FROM = 0x40
_IN_MOVED_TO = 0x80
_IN_DELETE = 0x200
_IN_MOVE_SELF = 0x800
_IN_ONLYDIR = 0x1000000
# No IN_CREATE: a new file is still empty, and symlinks are swapped by renames. No IN_DELETE_SELF: inotify always
# reports that a watch ended with its folder.
_CHANGES = _IN_CLOSE_WRITE | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_DELETE | _IN_MOVE_SELF | _IN_ONLYDIR
_EVENT = struct.Struct("iIII")  # watch number, mask, cookie, length of the name that follows
_OVERFLOW = -1  # watch number of the overflow event: events were lost
# An event without a name is about the folder itself.
_WATCHED_NAMES = {b"", *map(os.fsencode, (DATA_LINK, SETTINGS_FILE, PLAIN_KEY, GZIP_KEY))}

_log = logging.getLogger(__name__)


class MountedFiles(NamedTuple):
    """The files of one generation; the assignment may be compressed."""

    settings: bytes | None = None
    assignment: bytes | None = None


class MountedConfig:
    """A folder with settings and assignment, a mounted ConfigMap or plain; it may be missing, or recreated."""

    def __init__(self, folder: Path, *, poll_seconds: float = 1.0, backup_poll_seconds: float = 10.0) -> None:
        """Poll every `backup_poll_seconds` where inotify works, and every `poll_seconds` where it does not."""
        self._folder = folder
        self._poll_seconds = poll_seconds
        self._backup_poll_seconds = backup_poll_seconds
        self._logged_reason = ""  # what was logged for the last read; empty: nothing

    def read(self) -> MountedFiles | None:
        """Return both files of one generation; None if the folder is missing or cannot be read now."""
        reason = ""  # a missing folder has none: it may be mounted later
        try:
            for _ in range(MAX_TRIES):
                if (files := self._read_generation()) is not None:
                    self._logged_reason = ""
                    return files
            reason = f"{DATA_LINK} points to a missing folder, or changes too often"
        except FileNotFoundError:
            pass
        except OSError as error:
            reason = str(error)
        if reason and reason != self._logged_reason:
            _log.warning("The configuration in %s cannot be read: %s", self._folder, reason)
        self._logged_reason = reason
        return None

    def _read_generation(self) -> MountedFiles | None:
        """Read from the current generation; None if it was removed during the read."""
        folder_path = self._files_path()
        try:
            folder = os.open(folder_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if folder_path == self._folder:  # no symlink: the folder itself is missing
                raise
            return None
        try:
            assignment = _read_file(folder, PLAIN_KEY) or _read_file(folder, GZIP_KEY)  # the writer sets one of them
            files = MountedFiles(_read_file(folder, SETTINGS_FILE), assignment)
            return files if self._is_current(folder) else None
        finally:
            os.close(folder)

    def _files_path(self) -> Path:
        """Return the path of the files: the symlink's target, or the folder itself if it has no symlink."""
        link = self._folder / DATA_LINK
        return link if os.path.lexists(link) else self._folder

    def _is_current(self, folder: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(folder), self._files_path().stat())
        return False

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield at the start and whenever the folder has changed; changes until the next iteration count as one.

        Polling backs inotify up: some mounts report no events, and a parent folder may be replaced.
        """
        watcher = _InotifyWatch(self._folder)
        last_state = None
        try:
            while True:
                has_inotify = watcher.add_watch()  # before the folder is compared, so that no change is missed
                was_notified = watcher.take_notification()
                state = self._fingerprint()
                if was_notified or state != last_state:
                    last_state = state
                    yield
                await watcher.wait(self._backup_poll_seconds if has_inotify else self._poll_seconds)
        finally:
            watcher.close()

    def _fingerprint(self) -> tuple[object, ...]:
        """Return a value that changes whenever the folder changes."""
        link = None
        with suppress(OSError):
            link = (self._folder / DATA_LINK).readlink()
        files = map(self._files_path().joinpath, (SETTINGS_FILE, PLAIN_KEY, GZIP_KEY))
        folder_identity = _version(self._folder)[:2]  # device and inode
        return (link, folder_identity, *map(_version, files))


def _read_file(folder: int, name: str) -> bytes | None:
    def open_in_folder(path: str, flags: int) -> int:
        return os.open(path, flags, dir_fd=folder)

    try:
        with open(name, "rb", opener=open_in_folder) as file:
            return file.read()
    except FileNotFoundError:
        return None


def _version(path: Path) -> tuple[int, ...]:
    """Return a value that changes with a file, and begins with the file's identity; empty if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class _InotifyWatch:
    """An inotify watch of one folder, if inotify is available."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._change_event = asyncio.Event()
        self._descriptor = -1  # of the inotify instance; -1: none yet
        self._watch = -1  # number of the watch; -1: none
        self._is_failure_logged = False

    def add_watch(self) -> bool:
        """Watch the folder that now has this path, also after it was replaced; return whether that is possible."""
        try:
            if self._descriptor < 0:
                self._descriptor = _call_libc("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
                self._loop.add_reader(self._descriptor, self._on_events)
            watch = _call_libc("inotify_add_watch", self._descriptor, os.fsencode(self._folder), _CHANGES)
        except OSError as error:
            if not (self._is_failure_logged or isinstance(error, FileNotFoundError | NotADirectoryError)):
                _log.warning("inotify is not available for %s (%s); the folder is polled instead", self._folder, error)
                self._is_failure_logged = True
            watch = -1
        if self._watch not in (watch, -1):  # another folder: for the same one, libc returns the same number
            with suppress(OSError):  # the previous watch may have ended with its folder
                _call_libc("inotify_rm_watch", self._descriptor, self._watch)
        self._watch = watch
        return watch >= 0

    def take_notification(self) -> bool:
        """Return whether the folder has reported a change since the last call."""
        was_notified = self._change_event.is_set()
        self._change_event.clear()
        return was_notified

    async def wait(self, seconds: float) -> None:
        """Wait for a change, for at most this many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change_event.wait()

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _on_events(self) -> None:
        events = os.read(self._descriptor, 65536)
        position = 0
        while position < len(events):
            watch, _, _, length = _EVENT.unpack_from(events, position)
            position += _EVENT.size
            name = events[position : position + length].rstrip(b"\0")
            if watch in (self._watch, _OVERFLOW) and name in _WATCHED_NAMES:
                self._change_event.set()
            position += length


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call_libc(name: str, *arguments: int | bytes) -> int:
    """Call a libc function that Python does not wrap; raise OSError if it fails or does not exist."""
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    result = int(function(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
