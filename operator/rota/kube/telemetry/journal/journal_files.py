"""Hourly files of the journal: one file per hour and writer, whole lines only, within the folder's size limit.

A writer scans the folder whenever it has written a fiftieth of the limit, and removes the oldest hours until there is
room for what may be written until the next scan: by itself, and by another writer, such as the previous leader.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_DATE = re.compile(r"date=\d{4}-\d\d-\d\d", re.ASCII)
_FILE = re.compile(r"\d\d-.+\.jsonl", re.ASCII)
SCANS_PER_LIMIT = 50  # scans of the folder while as much as its limit is written


class WriteFailedError(Exception):
    """Lines could not be written; `missing_lines` has those that are missing in the file."""

    def __init__(self, reason: str, missing_lines: bytes) -> None:
        super().__init__(reason)
        self.missing_lines = missing_lines


class LineAppender:
    """Appends whole lines to a file. If it `is_torn`, so ends within a line, the next append first ends that line."""

    def __init__(self, file_descriptor: int, *, is_torn: bool = False) -> None:
        self.file_descriptor = file_descriptor
        self._is_torn = is_torn

    def append(self, lines: bytes) -> None:
        """Write lines, by one system call if that accepts all bytes; raise WriteFailedError with the failed lines."""
        prefix = b"\n" if self._is_torn else b""  # ends the torn line first
        data = prefix + lines
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[os.write(self.file_descriptor, remaining) :]
        except OSError as error:
            written = data[: len(data) - len(remaining)]
            if written:
                self._is_torn = not written.endswith(b"\n")
            whole_line_bytes = max(written.rfind(b"\n") + 1 - len(prefix), 0)
            raise WriteFailedError(error.strerror or str(error), lines[whole_line_bytes:]) from None
        self._is_torn = False


class _JournalFile(NamedTuple):
    hour: str  # such as 2026-11-21T08; first, so that files sort by age
    path: Path
    size_bytes: int


class RotatingFiles:
    """The journal's folder for one writer: appends to hourly files and removes old ones."""

    def __init__(self, folder: Path, writer: str, max_bytes: int) -> None:
        """Keep the folder below `max_bytes`; several writers may share it."""
        self._folder = folder
        self._writer = writer
        self._max_bytes = max_bytes
        self._hour = ""
        self._appender: LineAppender | None = None
        self._unscanned_bytes = 0  # bytes written since the last scan of the folder

    def append(self, hour: str, lines: bytes) -> None:
        """Append lines to the file of an hour, such as 2026-11-21T08; raise WriteFailedError with the failed lines."""
        try:
            appender = self._open_hour(hour)
            self._make_room(len(lines))
            appender.append(lines)
        except OSError as error:
            self.close()
            raise WriteFailedError(error.strerror or str(error), lines) from None
        except WriteFailedError:
            self.close()  # opening it again detects an incomplete last line, and a removed file
            raise

    def close(self) -> None:
        """Close the present file, if one is open."""
        appender = self._appender
        self._appender = None
        if appender:
            with suppress(OSError):
                os.close(appender.file_descriptor)

    def _open_hour(self, hour: str) -> LineAppender:
        if self._appender and self._hour == hour and os.fstat(self._appender.file_descriptor).st_nlink:
            return self._appender
        self.close()  # the hour is over, or the file was removed
        date, _, number = hour.partition("T")
        folder = self._folder / f"date={date}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}-{self._writer}.jsonl"
        # O_NONBLOCK: if another process has put a pipe without a reader there, opening must not block.
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        self._appender = LineAppender(file)  # at once: if a check below fails, `append` closes the file
        attributes = os.fstat(file)
        if not stat.S_ISREG(attributes.st_mode):
            raise OSError(None, f"{path} is not a regular file")
        size = attributes.st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            self._appender = LineAppender(file, is_torn=True)
        self._hour = hour
        self._unscanned_bytes = self._max_bytes  # scan the folder at each new hour
        return self._appender

    def _make_room(self, needed_bytes: int) -> None:
        """If a scan is due, remove the oldest hours, never the present one; raise OSError if that is not enough."""
        scan_interval_bytes = self._max_bytes // SCANS_PER_LIMIT
        if self._unscanned_bytes + needed_bytes > scan_interval_bytes:
            files = sorted(_journal_files(self._folder))
            folder_bytes = sum(file.size_bytes for file in files)
            wanted_free_bytes = 2 * scan_interval_bytes + needed_bytes  # of this and another writer, until they scan
            for file in files:
                if folder_bytes + wanted_free_bytes > self._max_bytes and file.hour != self._hour:
                    _remove(file.path, self._hour)
                    folder_bytes -= file.size_bytes
            # The present hour may use the other writer's margin, too: records that fit must not be dropped.
            required_free_bytes = max(scan_interval_bytes, needed_bytes)  # of this writer alone
            if folder_bytes + required_free_bytes > self._max_bytes:
                raise OSError(None, f"the current hour alone fills the limit of {self._max_bytes} bytes")
            self._unscanned_bytes = 0
        self._unscanned_bytes += needed_bytes


def _journal_files(folder: Path) -> Iterator[_JournalFile]:
    """Yield the journal's own files, ignoring all others in the folder."""
    for date in _list_matching(folder, _DATE):
        for path in _list_matching(date, _FILE):
            with suppress(FileNotFoundError):  # another writer has removed it
                attributes = path.lstat()
                if stat.S_ISREG(attributes.st_mode):
                    yield _JournalFile(f"{date.name.removeprefix('date=')}T{path.name[:2]}", path, attributes.st_size)


def _list_matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):  # removed by another writer, or not a folder
        return []


def _remove(path: Path, current_hour: str) -> None:
    """Remove a file, and its date's folder if that is empty then; the current date's folder stays."""
    path.unlink(missing_ok=True)
    if not current_hour.startswith(path.parent.name.removeprefix("date=")):
        with suppress(OSError):  # the folder still holds other files
            path.parent.rmdir()
