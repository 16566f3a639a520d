"""Inbox of a lake: selects the journal's complete hours for the stream.

Spark reads a file once, but a file of the journal grows for an hour. So the stream reads a folder in the lake. When a
file's hour is over, the inbox links the file into that folder; when its lines are in the lake, the inbox replaces the
link by an empty file, which marks it as ingested. A link takes no space, and keeps a file that the journal removes.
After a crash files that are not empty go through the stream again; its checkpoint knows those that it has read.

Names are `EVENT.SIZE.HOUR-<identity>.jsonl`. A file that grew after it was linked (clocks jump) has another size and is
linked again; the stream drops the lines it has seen. EVENT is the file's hour, unless the stream has already forgotten
the lines of that hour: then EVENT is the newest hour that was linked, and the stream sends the lines to the quarantine.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from rota.pipeline.common.paths import ANY_DATE_GLOB, HOUR_FILE_PATTERN

HOUR = timedelta(hours=1)
LATEST_HOUR = datetime.max.replace(tzinfo=UTC) - HOUR  # of clocks that jumped: Python has no later end of an hour
MAX_BATCH_BYTES = 512 * 2**20  # maximal bytes of files in one batch, unless a single file is larger


class HourFile(NamedTuple):
    """A file of the journal, with one writer's records of one hour."""

    hour: str  # 2026-11-21T08
    name: str  # 2026-11-21T08-<identity>.jsonl
    path: Path
    size: int

    @property
    def link_key(self) -> str:
        """The part of its name in the inbox by which a linked file is recognized."""
        return f"{self.size}.{self.name}"


class Inbox:
    """The folder of links that the stream reads."""

    def __init__(self, folder: Path, journal: Path, lateness: timedelta) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._journal = journal
        self._lateness = lateness

    def mark_ingested(self) -> None:
        """Mark all pending files as ingested."""
        for path in self._pending_files():
            empty = self._folder / f".{path.name}"  # hidden from Spark
            empty.touch()
            empty.replace(path)  # never truncate: a link is the journal's own file

    def has_pending_files(self) -> bool:
        """Return whether files are pending; the stream may have ingested them just before a crash."""
        return next(self._pending_files(), None) is not None

    def _pending_files(self) -> Iterator[Path]:
        return (path for path in self._folder.glob("[!.]*") if path.stat().st_size)

    def link_complete_files(self, now: datetime, settle: timedelta | None) -> bool:
        """Link the oldest complete files, up to one batch; return whether files are pending.

        A file is complete if it has not grown for `settle` after the end of its hour. With None every file is.
        """
        linked: set[str] = set()
        newest = ""
        for path in self._folder.glob("[!.]*"):
            event, _, key = path.name.partition(".")
            linked.add(key)
            newest = max(newest, event)
        batch_bytes = 0
        for file in sorted(_complete_files(self._journal, now, settle)):
            if file.link_key not in linked and file.size:
                if batch_bytes and batch_bytes + file.size > MAX_BATCH_BYTES:  # a batch has at least one file
                    break
                batch_bytes += file.size
                self._link(file, file.hour if self._is_remembered(file.hour, newest) else newest)
        return self.has_pending_files()

    def _is_remembered(self, hour: str, newest: str) -> bool:
        """Return whether the stream still remembers an hour's lines, and so can detect their copies."""
        return not newest or _hour_start(hour) > _hour_start(newest) - self._lateness

    def _link(self, file: HourFile, event: str) -> None:
        target = self._folder / f"{event}.{file.link_key}"
        partial = self._folder / ".part"
        partial.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # the journal has removed an old file
            try:
                os.link(file.path, partial)
            except OSError:  # another file system, or no permission to link; a removed file cannot be copied either
                shutil.copyfile(file.path, partial)
            partial.replace(target)


def _complete_files(journal: Path, now: datetime, settle: timedelta | None) -> Iterator[HourFile]:
    """Yield the files that have not changed for `settle`; a file may change until its hour is over."""
    for path in journal.glob(f"{ANY_DATE_GLOB}/*.jsonl"):
        match = HOUR_FILE_PATTERN.fullmatch(f"{path.parent.name}/{path.name}")
        if match:
            with suppress(FileNotFoundError, ValueError):  # the journal has removed the file; no valid day
                stat = path.stat()
                hour = f"{match[1]}T{match[3]}"
                hour_end = min(_hour_start(hour), LATEST_HOUR) + HOUR
                changed_at = max(datetime.fromtimestamp(stat.st_mtime, UTC), hour_end)
                if settle is None or changed_at <= now - settle:
                    yield HourFile(hour, f"{match[1]}T{match[2]}", path, stat.st_size)


def _hour_start(hour: str) -> datetime:
    return datetime.strptime(hour, "%Y-%m-%dT%H").replace(tzinfo=UTC)
