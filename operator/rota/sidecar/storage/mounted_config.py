"""The mounted folder of documents: read as one generation, and watched.

The kubelet writes each generation into a folder of its own, `..2026_11_22_03_43_24.1`, swaps the link `..data` by a
rename, and then removes the generation before. So the link is followed once, and what it leads to is held open:
whatever is read from there is of one generation, however often the link is swapped meanwhile. What is missing there
may have been removed under the reader's eyes; so it counts only if the link still leads there afterwards.
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

from rota.documents import PACKED, PLAIN

SETTINGS = "group.json"
DATA = "..data"
TRIES = 100  # the kubelet swaps once in seconds; who swaps without end is not waited for

_IN_CLOSE_WRITE, _IN_MOVED_FROM, _IN_MOVED_TO, _IN_DELETE = 0x8, 0x40, 0x80, 0x200
_IN_MOVE_SELF, _IN_ONLYDIR = 0x800, 0x1000000
# No IN_CREATE: a file that was just made is empty still, and links are swapped by renames. No IN_DELETE_SELF: that a
# watch ended with its folder is told unasked.
_CHANGES = _IN_CLOSE_WRITE | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_DELETE | _IN_MOVE_SELF | _IN_ONLYDIR
_EVENT = struct.Struct("iIII")  # watch, what, cookie, length of the name that follows
_LOST = -1  # the watch of the event that says that events were lost
_NAMES = {b"", *map(os.fsencode, (DATA, SETTINGS, PLAIN, PACKED))}  # an event without a name is about the folder itself

_log = logging.getLogger(__name__)


class Files(NamedTuple):
    """What lies in the folder, of one generation; an assignment may be packed."""

    settings: bytes | None = None
    assignment: bytes | None = None


class Volume:
    """A folder of documents, a mounted ConfigMap or a plain one; it need not be there, and may be made anew."""

    def __init__(self, folder: Path, *, alone: float = 1.0, besides: float = 10.0) -> None:
        """Look every `alone` seconds where inotify cannot be had, and every `besides` where it can."""
        self._folder, self._alone, self._besides = folder, alone, besides
        self._told = ""

    def read(self) -> Files | None:
        """Return the files, both of one generation; None if there is no folder, or nothing can be read from it now."""
        files, why = None, ""
        try:
            for _ in range(TRIES):
                if (files := self._read()) is not None:
                    break
            else:
                why = f"{DATA} leads nowhere, or is swapped too often"
        except OSError as error:
            why = "" if isinstance(error, FileNotFoundError) else str(error)
        if why and why != self._told:
            _log.warning("The documents in %s cannot be read: %s", self._folder, why)
        self._told = why
        return files

    def _read(self) -> Files | None:
        """Read from what is there at this moment; None if it has gone meanwhile."""
        place = self._place()
        try:
            found = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if place == self._folder:
                raise
            return None
        try:
            files = Files(_content(found, SETTINGS), _content(found, PLAIN) or _content(found, PACKED))
            return files if self._leads_to(found) else None
        finally:
            os.close(found)

    def _place(self) -> Path:
        """Return where the files are: behind the link, and only where there is none in the folder itself."""
        link = self._folder / DATA
        return link if os.path.lexists(link) else self._folder

    def _leads_to(self, found: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(found), self._place().stat())
        return False

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield at the start and whenever the folder has changed; what changes until the next turn is one change.

        Nothing rests on inotify alone: some mounts do not tell, and a folder may be swapped by its parents.
        """
        ears, seen = _Ears(self._folder), None
        try:
            while True:
                hears = ears.listen()  # before the look, so that nothing falls in between
                heard = ears.heard()
                looked = self._look()
                if heard or looked != seen:
                    seen = looked
                    yield
                await ears.wait(self._besides if hears else self._alone)
        finally:
            ears.close()

    def _look(self) -> tuple[object, ...]:
        """Return what changes with the folder."""
        link = None
        with suppress(OSError):
            link = (self._folder / DATA).readlink()
        place = self._place()
        return link, _identity(self._folder), *(_shape(place / name) for name in (SETTINGS, PLAIN, PACKED))


def _content(folder: int, name: str) -> bytes | None:
    def opened(path: str, flags: int) -> int:
        return os.open(path, flags, dir_fd=folder)

    try:
        with open(name, "rb", opener=opened) as file:
            return file.read()
    except FileNotFoundError:
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _shape(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class _Ears:
    """What inotify tells of one folder, as far as it can be had."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._file = self._watch = -1
        self._told = False

    def listen(self) -> bool:
        """Listen to the folder that has this name now, be it another one than before; say if that is possible."""
        try:
            if self._file < 0:
                self._file = _call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
                self._loop.add_reader(self._file, self._hear)
            watch = _call("inotify_add_watch", self._file, os.fsencode(self._folder), _CHANGES)
        except OSError as error:
            if not (self._told or isinstance(error, FileNotFoundError | NotADirectoryError)):
                _log.warning("inotify cannot be had for %s (%s); it is looked at instead", self._folder, error)
                self._told = True
            watch = -1
        if self._watch not in (watch, -1):
            with suppress(OSError):  # it ended with its folder
                _call("inotify_rm_watch", self._file, self._watch)
        self._watch = watch
        return watch >= 0

    def heard(self) -> bool:
        """Say whether the folder told of a change since this was last asked."""
        heard = self._woken.is_set()
        self._woken.clear()
        return heard

    async def wait(self, seconds: float) -> None:
        """Wait for a change, but no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    def close(self) -> None:
        """Hear no more."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _hear(self) -> None:
        told, at = os.read(self._file, 65536), 0
        while at < len(told):
            watch, _, _, length = _EVENT.unpack_from(told, at)
            at += _EVENT.size
            if watch in (self._watch, _LOST) and told[at : at + length].rstrip(b"\0") in _NAMES:
                self._woken.set()
            at += length


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int | bytes) -> int:
    """Call what Python does not bring; an OSError also where the system has no such thing."""
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    answer = int(function(*arguments))
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
