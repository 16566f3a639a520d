"""Ships segments from the spool to the journal's folder or bucket, in a thread of its own."""

import errno
import gzip
import logging
import threading
import time
import zlib

from rota.kube.telemetry.journal.folder_retention import FolderRetention
from rota.kube.telemetry.journal.segment_rules import ClosedSegment, count_missing, retry_seconds
from rota.kube.telemetry.journal.spool import Spool
from rota.object_store import NotAnObjectError, ObjectStore, StoreError
from rota.object_store.segments import SegmentName
from rota.sentences import pluralize

ADOPT_SECONDS = 60.0  # between two searches for segments of processes that have ended
CLOSE_RETRY_SECONDS = (0.2, 0.5, 1.0)  # after failures while the operator ends
COMPRESSION_LEVEL = 6
OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # of the process, not of a file
_GZIP = 31  # zlib's number of a window of 32 KiB with a header of gzip

_log = logging.getLogger(__name__)


class SegmentShipper:
    """Stores closed segments, the oldest first. After each failure in sequence, the pause before a retry is longer."""

    def __init__(self, store: ObjectStore, spool: Spool, retention: FolderRetention | None) -> None:
        self.shipped_segments = 0
        self.failed_attempts = 0
        self._store = store
        self._spool = spool
        self._retention = retention  # of a folder; None: a bucket, whose lifecycle rules expire objects
        self._failures = 0  # since the last success
        self._failing_since = 0.0
        self._adopt_at = 0.0  # when to search for segments of ended processes
        self._deadline: float | None = None  # set when the operator ends
        self._close_failures = 0  # since `_deadline` was set
        self._thread = threading.Thread(target=self._run, name="journal shipper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Ship the remaining segments for at most `seconds`; the next process ships the rest."""
        self._deadline = time.monotonic() + seconds
        self._spool.notify()
        self._thread.join(max(self._deadline - time.monotonic(), 0.0))
        remaining = self._spool.remaining
        if remaining:
            segments = pluralize(remaining, "segment")
            _log.error("%s of the journal could not be stored; left in %s", segments, self._spool.root)

    def _run(self) -> None:
        self._ship_all()
        self._spool.close()

    def _ship_all(self) -> None:
        """Ship segments until the operator ends; then ship the remaining ones until the deadline."""
        while True:
            deadline = self._deadline  # read first: it is set after the last segment was closed, so then none is missed
            has_failed = False
            try:
                if self._ship_next():
                    continue
            except Exception as error:  # noqa: BLE001 - the thread must not end before the operator does
                self._spool.release_taken()
                self._note_failure(str(error) if isinstance(error, StoreError) else repr(error))
                has_failed = True
            if deadline is None:
                self._wait(has_failed=has_failed)
            elif not has_failed or not self._pause_until(deadline):
                return

    def _wait(self, *, has_failed: bool) -> None:
        """Wait for the end of the pause after a failure, or for a closed segment."""
        seconds = retry_seconds(self._failures) if has_failed else self._adopt_at - time.monotonic()
        with self._spool.changed:
            self._spool.changed.wait_for(
                lambda: self._deadline is not None or (not has_failed and self._spool.has_closed), max(seconds, 0.0)
            )

    def _pause_until(self, deadline: float) -> bool:
        """Wait for a moment after a failure while the operator ends; return False if no time is left."""
        seconds = CLOSE_RETRY_SECONDS[min(self._close_failures, len(CLOSE_RETRY_SECONDS) - 1)]
        self._close_failures += 1
        if time.monotonic() + seconds >= deadline:
            return False
        time.sleep(seconds)
        return True

    def _ship_next(self) -> bool:
        """Ship the oldest segment; return False without one, and raise StoreError if the store fails."""
        if time.monotonic() >= self._adopt_at:
            self._adopt_at = time.monotonic() + ADOPT_SECONDS
            self._spool.adopt()
        segment = self._spool.take()
        if segment is None:
            return False
        try:
            lines = self._spool.read(segment)
        except OSError as error:
            if error.errno in OUT_OF_RESOURCES:
                raise
            self._handle_unreadable(segment, error)
            return True
        if lines:
            self._store_lines(segment.name, lines)
        self._spool.remove(segment)
        self.shipped_segments += bool(lines)
        self._note_success()
        self._report_missing(segment, lines)
        return True

    def _handle_unreadable(self, segment: ClosedSegment, error: OSError) -> None:
        """Remove a segment because its file cannot be read; report its records as lost unless they are stored."""
        is_adopted = segment.records is None
        if isinstance(error, FileNotFoundError) and (is_adopted or self._is_in_store(segment.name.key)):
            self._spool.remove(segment)  # stored by an operator of another node, where the folder's lock is not seen
            return
        _log.error("A segment of the journal cannot be read; its records are lost: %s", error)
        self._spool.drop(segment)

    def _report_missing(self, segment: ClosedSegment, lines: bytes) -> None:
        missing = count_missing(segment, lines)
        if missing:
            reason = f": {segment.failure}" if segment.failure else ""
            _log.error("%s of the journal were not kept by the spool's disk%s", pluralize(missing, "record"), reason)
            self._spool.report_missing(segment, missing)

    def _is_in_store(self, key: str) -> bool:
        try:
            self._store.read(key)
        except (FileNotFoundError, StoreError):  # without the right to list, S3 answers 403 for a missing object
            return False
        return True

    def _store_lines(self, name: SegmentName, lines: bytes) -> None:
        data = gzip.compress(lines, COMPRESSION_LEVEL, mtime=0)
        if self._retention:
            self._retention.make_room(name.hour, len(data))
        while not self._store.create(name.key, data):
            if self._is_stored(name.key, lines):  # an earlier attempt has stored it, but its answer was lost
                return
            name = name._replace(sequence=name.sequence + 1)  # never overwrite another segment

    def _is_stored(self, key: str, lines: bytes) -> bool:
        try:
            stored = self._store.read(key)
        except FileNotFoundError:
            raise StoreError(f"{self._store.uri}: {key} was deleted while it was written") from None
        except NotAnObjectError:  # a user's folder or link
            return False
        try:
            # With a bound, since a user's object of this name could fill the memory.
            return zlib.decompressobj(_GZIP).decompress(stored, len(lines) + 1) == lines
        except zlib.error:
            return False

    def _note_failure(self, reason: str) -> None:
        self.failed_attempts += 1
        self._failures += 1
        if self._failures == 1:
            self._failing_since = time.monotonic()
            _log.error("The journal cannot be stored: %s; its segments wait in %s", reason, self._spool.root)

    def _note_success(self) -> None:
        if self._failures:
            seconds = time.monotonic() - self._failing_since
            _log.warning("The journal is stored in %s again, after %.0f s", self._store.uri, seconds)
            self._failures = 0
