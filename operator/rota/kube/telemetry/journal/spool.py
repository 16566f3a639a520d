"""The spool: a folder with the journal's segments until `SegmentShipper` has stored them at the journal's destination.

A restart loses none of them: the next process adopts what an ended one has left.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rota.kube.telemetry.journal.line_appender import LineAppender, WriteFailedError
from rota.kube.telemetry.journal.segment_rules import (
    ClosedSegment,
    LostRecords,
    OpenSegment,
    count_lost,
    first_time,
    seconds_until_close,
    segment_bytes,
    segments_to_close,
    segments_to_drop,
    spool_file,
    spool_folder,
    whole_lines,
)
from rota.kube.telemetry.journal.spool_folders import SpoolFolders
from rota.object_store.segments import SegmentName

LOCK_SECONDS = 1.0  # to wait for the lock when the operator ends; a thread that waits for a disk may hold it


class Spool:
    """The segments of this process, and of ended ones. One thread appends, another one ships.

    When the spool exceeds its maximum size, it drops its oldest segments and calls `on_dropped`.
    """

    def __init__(
        self, root: Path, own_name: SegmentName, max_bytes: int, on_dropped: Callable[[LostRecords], None]
    ) -> None:
        """Use the folder `root`. Pod, uid and start of `own_name` identify this process; the rest is unused."""
        self.root = root
        self.size_bytes = 0  # of all segments; read without the lock, which a thread that waits for a disk may hold
        self.changed = threading.Condition()  # also the lock of the fields below; notified when a segment is closed
        self._max_bytes = max_bytes
        self._on_dropped = on_dropped
        self._folders = SpoolFolders(root, own_name)
        self._sequence = 0  # of the newest segment
        self._open: dict[str, _SegmentFile] = {}  # by hour
        self._closed: list[ClosedSegment] = []  # the oldest first
        self._taken: ClosedSegment | None = None  # the segment that is being shipped

    def append(self, hour: str, lines: bytes) -> None:
        """Append lines to the segment of an hour; raise WriteFailedError with the failed lines."""
        with self.changed:
            try:
                self._file_of(hour).append(lines)
            except OSError as error:
                raise WriteFailedError(error.strerror or str(error), lines) from None
            except WriteFailedError:
                self._close(hour)  # the file may end within a line
                raise
            finally:
                self._update_size()
        self.close_due()
        self._drop_surplus()

    def close_due(self) -> float | None:
        """Close segments that are old or large enough; return the seconds until the next is due; None: none is open."""
        with self.changed:
            now = time.monotonic()
            for segment in segments_to_close(self._open_segments(), now, segment_bytes(self._max_bytes)):
                self._close(segment.name.hour)
            return seconds_until_close(self._open_segments(), now)

    def close_all(self) -> None:
        """Close all segments."""
        with self.changed:
            for hour in [*self._open]:
                self._close(hour)

    def adopt(self) -> None:
        """Add the segments of processes that have ended; they come before those of this process."""
        with self.changed:
            self._closed = sorted([*self._folders.adopt(), *self._closed], key=_age)
            self._update_size()
            self._release_folders()

    def take(self) -> ClosedSegment | None:
        """Return the oldest closed segment, for shipping. It is not dropped until `remove` or `release_taken`."""
        with self.changed:
            self._taken = self._closed[0] if self._closed else None
            return self._taken

    def release_taken(self) -> None:
        """Let a full spool drop the taken segment, whose shipping failed.

        A segment that can never be shipped must not make the spool drop newer ones.
        """
        with self.changed:
            self._taken = None

    @property
    def has_closed(self) -> bool:
        """Whether a segment can be shipped; for holders of the lock."""
        return bool(self._closed)

    def read(self, segment: ClosedSegment) -> bytes:
        """Return a segment's whole lines; raise OSError if they cannot be read."""
        return whole_lines(self._path(segment.name).read_bytes())

    def remove(self, segment: ClosedSegment) -> None:
        """Remove a closed segment."""
        with self.changed:
            self._closed.remove(segment)
            self._taken = None if segment == self._taken else self._taken
            with suppress(OSError):  # if the file stays, a later process adopts it, and stores it again
                self._path(segment.name).unlink()
            self._update_size()
            self._release_folders()

    def drop(self, segment: ClosedSegment) -> None:
        """Remove a closed segment because its file cannot be read, and report its records as lost."""
        self._on_dropped(self._discard(segment))

    def report_missing(self, segment: ClosedSegment, records: int) -> None:
        """Report records that are missing in the file of a segment as lost."""
        self._on_dropped(LostRecords(records, segment.earliest))

    @property
    def remaining(self) -> int:
        """Number of segments in the spool; read without the lock, as `size_bytes` is."""
        return len(self._closed) + len(self._open)

    def notify(self) -> None:
        """Wake the shipping thread; give up after LOCK_SECONDS if a thread that waits for a disk holds the lock."""
        if self.changed.acquire(timeout=LOCK_SECONDS):
            self.changed.notify_all()
            self.changed.release()

    def close(self) -> None:
        """Unlock the folders, so that the next process adopts the remaining segments.

        If a thread that waits for a disk holds the lock, only the end of the process unlocks them.
        """
        if self.changed.acquire(timeout=LOCK_SECONDS):
            self._folders.release_except(self._folders_in_use())
            self._folders.unlock()
            self.changed.release()

    def _file_of(self, hour: str) -> "_SegmentFile":
        file = self._open.get(hour)
        if file and not file.is_deleted:
            return file
        if file:
            # A user deleted the file, or an operator on another node took this process for ended, and shipped it.
            self._close(hour)
        self._folders.create_own()
        self._sequence += 1
        name = self._folders.own_name._replace(hour=hour, sequence=self._sequence)
        self._open[hour] = file = _SegmentFile(name, self._path(name))
        return file

    def _close(self, hour: str) -> None:
        segment = self._open.pop(hour).close()
        if segment.size_bytes:
            self._closed.append(segment)
            self.changed.notify_all()
        else:
            with suppress(OSError):
                self._path(segment.name).unlink()

    def _drop_surplus(self) -> None:
        while True:
            with self.changed:  # held until the segment is removed, so that it is not shipped meanwhile
                waiting = [segment for segment in self._closed if segment != self._taken]
                surplus = segments_to_drop(waiting, self.size_bytes, self._max_bytes)
                if not surplus:
                    return
                lost = self._discard(surplus[0])
            self._on_dropped(lost)

    def _discard(self, segment: ClosedSegment) -> LostRecords:
        try:
            lost = count_lost(segment, self.read(segment))
        except OSError:  # a missing or unreadable file
            lost = LostRecords(segment.records or 1, segment.earliest)
        self.remove(segment)
        return lost

    def _update_size(self) -> None:
        self.size_bytes = sum(segment.size_bytes for segment in self._segments())

    def _release_folders(self) -> None:
        self._folders.release_except({spool_folder(self._folders.own_name), *self._folders_in_use()})

    def _folders_in_use(self) -> set[str]:
        return {spool_folder(segment.name) for segment in self._segments()}

    def _segments(self) -> list[OpenSegment | ClosedSegment]:
        return [*self._open_segments(), *self._closed]

    def _open_segments(self) -> list[OpenSegment]:
        return [file.segment for file in self._open.values()]

    def _path(self, name: SegmentName) -> Path:
        return self.root / spool_folder(name) / spool_file(name)


class _SegmentFile:
    """The file of an open segment."""

    def __init__(self, name: SegmentName, path: Path) -> None:
        """Create the file, never opening what another process has put there."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._appender = LineAppender(os.open(path, flags, 0o644))
        self.segment = OpenSegment(name, time.monotonic(), 0)

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name any more."""
        try:
            return os.fstat(self._appender.file_descriptor).st_nlink == 0
        except OSError as error:
            if error.errno == errno.ESTALE:  # deleted by another node
                return True
            raise

    def append(self, lines: bytes) -> None:
        """Append lines; raise WriteFailedError with the failed lines."""
        written = lines
        try:
            self._appender.append(lines)
        except WriteFailedError as error:
            written = lines[: len(lines) - len(error.missing_lines)]
            raise
        finally:
            segment = self.segment
            self.segment = segment._replace(
                size_bytes=segment.size_bytes + len(written),
                records=segment.records + written.count(b"\n"),
                since=segment.since or first_time(written),
            )

    def close(self) -> ClosedSegment:
        """Close the file, and return what it should contain: NFS reports only now that a disk was full."""
        failure = ""
        for finish in (os.fsync, os.close):
            try:
                finish(self._appender.file_descriptor)
            except OSError as error:
                failure = failure or error.strerror or str(error)
        segment = self.segment
        return ClosedSegment(segment.name, segment.size_bytes, segment.records, segment.since, failure)


def _age(segment: ClosedSegment) -> tuple[str, str, int]:
    return segment.name.start, spool_folder(segment.name), segment.name.sequence
