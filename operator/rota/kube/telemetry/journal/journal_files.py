"""The journal's folder: a file for each hour and writer, whole lines in it, and no more than the folder may hold."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_DATE = re.compile(r"date=\d{4}-\d\d-\d\d", re.ASCII)
_FILE = re.compile(r"\d\d-.+\.jsonl", re.ASCII)
SHARE = 50  # the folder is looked through each time that one such part of what it may hold was written


class Unwritten(Exception):  # noqa: N818 - it says what the lines are
    """Why lines could not be written, and which ones."""

    def __init__(self, why: str, lines: bytes) -> None:
        super().__init__(why)
        self.lines = lines


class Ending:
    """Where whole lines are appended. One that was torn is ended first: it must not become a part of the next."""

    def __init__(self, file: int, *, torn: bool = False) -> None:
        self.file, self._torn = file, torn

    def append(self, lines: bytes) -> None:
        """Write lines, with one write if the system takes it."""
        start = b"\n" * self._torn
        rest = memoryview(start + lines)
        try:
            while rest:
                rest = rest[os.write(self.file, rest) :]
        except OSError as error:
            done = lines[: max(len(lines) - len(rest), 0)]
            whole = done.rfind(b"\n") + 1
            self._torn = whole < len(done) or (self._torn and len(rest) > len(lines))
            raise Unwritten(error.strerror or str(error), lines[whole:]) from None
        self._torn = False


class _Kept(NamedTuple):
    hour: str
    path: Path
    size: int


class Hours:
    """The folder, as one writer sees it."""

    def __init__(self, folder: Path, writer: str, limit: int) -> None:
        """Keep the folder below `limit` bytes; a few may write to it at once."""
        self._folder, self._writer, self._limit = folder, writer, limit
        self._hour = ""
        self._ending: Ending | None = None
        self._unchecked = 0  # bytes that were written since the folder was looked through

    def append(self, hour: str, lines: bytes) -> None:
        """Write lines to the file of an hour, such as 2026-11-21T08."""
        try:
            ending = self._opened(hour)
            self._make_room(len(lines))
            ending.append(lines)
        except OSError as error:
            self.close()
            raise Unwritten(error.strerror or str(error), lines) from None
        except Unwritten:
            self.close()  # opened anew, it shows how its last line ends, and whether it is still there
            raise

    def close(self) -> None:
        """Let go of the file."""
        ending, self._ending = self._ending, None
        if ending:
            with suppress(OSError):
                os.close(ending.file)

    def _opened(self, hour: str) -> Ending:
        if self._ending and self._hour == hour and os.fstat(self._ending.file).st_nlink:
            return self._ending
        self.close()  # the hour is over, or somebody has removed the file
        date, _, number = hour.partition("T")
        folder = self._folder / f"date={date}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}-{self._writer}.jsonl"
        # Without waiting: whoever else writes to the folder may have put a pipe there, which nobody reads.
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        self._ending = Ending(file)
        told = os.fstat(file)
        if not stat.S_ISREG(told.st_mode):
            raise OSError(None, f"{path} is no file")
        size = told.st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            self._ending = Ending(file, torn=True)
        self._hour, self._unchecked = hour, self._limit  # a new hour is a new look through the folder
        return self._ending

    def _make_room(self, wanted: int) -> None:
        """Remove the oldest hours, never the present one, so that there is room until the next look."""
        share = self._limit // SHARE
        if self._unchecked + wanted > share:
            kept = sorted(_kept(self._folder))
            held = sum(it.size for it in kept)
            for it in kept:
                if held + 2 * share + wanted > self._limit and it.hour != self._hour:  # another may write as much
                    _remove(it.path, self._hour)
                    held -= it.size
            if held + max(share, wanted) > self._limit:
                raise OSError(None, f"this hour alone takes the {self._limit} bytes that the journal may hold")
            self._unchecked = 0
        self._unchecked += wanted


def _kept(folder: Path) -> Iterator[_Kept]:
    """Yield the journal's files, and nothing else that lies there."""
    for date in filter(lambda it: _DATE.fullmatch(it.name), _inside(folder)):
        for path in filter(lambda it: _FILE.fullmatch(it.name), _inside(date)):
            with suppress(FileNotFoundError):  # another writer made room, too
                told = path.lstat()
                if stat.S_ISREG(told.st_mode):
                    yield _Kept(f"{date.name.removeprefix('date=')}T{path.name[:2]}", path, told.st_size)


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # the same, or it is none
        return []


def _remove(path: Path, present: str) -> None:
    path.unlink(missing_ok=True)
    if not present.startswith(path.parent.name.removeprefix("date=")):
        with suppress(OSError):  # others lie in it
            path.parent.rmdir()
