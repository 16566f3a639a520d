"""Hourly files of the journal: one file per hour and writer, whole lines only, within the folder's size limit."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_DATE = re.compile(r"date=\d{4}-\d\d-\d\d", re.ASCII)
_FILE = re.compile(r"\d\d-.+\.jsonl", re.ASCII)
SHARE = 50  # the folder is scanned whenever 1/SHARE of its limit has been written


class WriteFailedError(Exception):
    """Lines could not be written; `lines` has the ones that are missing in the file."""

    def __init__(self, why: str, lines: bytes) -> None:
        super().__init__(why)
        self.lines = lines


class LineAppender:
    """Appends whole lines to a file. After an incomplete line (`torn`), the next append starts with a line break."""

    def __init__(self, file: int, *, torn: bool = False) -> None:
        self.file, self._torn = file, torn

    def append(self, lines: bytes) -> None:
        """Write lines, by one system call if that accepts all bytes; raise WriteFailedError with the failed lines."""
        start = b"\n" * self._torn
        remaining = memoryview(start + lines)
        try:
            while remaining:
                remaining = remaining[os.write(self.file, remaining) :]
        except OSError as error:
            done = lines[: max(len(lines) - len(remaining), 0)]
            whole = done.rfind(b"\n") + 1
            self._torn = whole < len(done) or (self._torn and len(remaining) > len(lines))
            raise WriteFailedError(error.strerror or str(error), lines[whole:]) from None
        self._torn = False


class _JournalFile(NamedTuple):
    hour: str
    path: Path
    size: int


class RotatingFiles:
    """The journal's folder for one writer: appends to hourly files and removes old ones."""

    def __init__(self, folder: Path, writer: str, limit: int) -> None:
        """Keep the folder below `limit` bytes; several writers may share it."""
        self._folder, self._writer, self._limit = folder, writer, limit
        self._hour = ""
        self._ending: LineAppender | None = None
        self._unchecked = 0  # bytes written since the last scan of the folder

    def append(self, hour: str, lines: bytes) -> None:
        """Append lines to the file of an hour, such as 2026-11-21T08; raise WriteFailedError with the failed lines."""
        try:
            ending = self._opened(hour)
            self._make_room(len(lines))
            ending.append(lines)
        except OSError as error:
            self.close()
            raise WriteFailedError(error.strerror or str(error), lines) from None
        except WriteFailedError:
            self.close()  # opening it again detects an incomplete last line, and a removed file
            raise

    def close(self) -> None:
        """Close the present file, if one is open."""
        ending, self._ending = self._ending, None
        if ending:
            with suppress(OSError):
                os.close(ending.file)

    def _opened(self, hour: str) -> LineAppender:
        if self._ending and self._hour == hour and os.fstat(self._ending.file).st_nlink:
            return self._ending
        self.close()  # the hour is over, or the file was removed
        date, _, number = hour.partition("T")
        folder = self._folder / f"date={date}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}-{self._writer}.jsonl"
        # O_NONBLOCK: if another process has put a pipe without a reader there, opening must not block.
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        self._ending = LineAppender(file)
        attributes = os.fstat(file)
        if not stat.S_ISREG(attributes.st_mode):
            raise OSError(None, f"{path} is no file")
        size = attributes.st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            self._ending = LineAppender(file, torn=True)
        self._hour, self._unchecked = hour, self._limit  # scan the folder at each new hour
        return self._ending

    def _make_room(self, needed: int) -> None:
        """Remove the oldest hours, never the present one, so that space is left until the next scan."""
        share = self._limit // SHARE
        if self._unchecked + needed > share:
            files = sorted(_journal_files(self._folder))
            held = sum(file.size for file in files)
            for file in files:
                if held + 2 * share + needed > self._limit and file.hour != self._hour:  # others may add as much
                    _remove(file.path, self._hour)
                    held -= file.size
            if held + max(share, needed) > self._limit:
                raise OSError(None, f"this hour alone takes the {self._limit} bytes that the journal may hold")
            self._unchecked = 0
        self._unchecked += needed


def _journal_files(folder: Path) -> Iterator[_JournalFile]:
    """Yield the journal's own files, ignoring all others in the folder."""
    for date in filter(lambda path: _DATE.fullmatch(path.name), _entries(folder)):
        for path in filter(lambda path: _FILE.fullmatch(path.name), _entries(date)):
            with suppress(FileNotFoundError):  # another writer has removed it
                attributes = path.lstat()
                if stat.S_ISREG(attributes.st_mode):
                    yield _JournalFile(f"{date.name.removeprefix('date=')}T{path.name[:2]}", path, attributes.st_size)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # removed by another writer, or not a folder
        return []


def _remove(path: Path, present: str) -> None:
    path.unlink(missing_ok=True)
    if not present.startswith(path.parent.name.removeprefix("date=")):
        with suppress(OSError):  # it still holds other files
            path.parent.rmdir()
