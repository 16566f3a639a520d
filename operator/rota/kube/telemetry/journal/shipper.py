"""Ships segments from the spool to the journal's folder or bucket, in a thread of its own."""

import gzip
import logging
import threading
import time
import zlib

from rota.kube.telemetry.journal.folder_retention import FolderRetention
from rota.kube.telemetry.journal.segment_rules import ClosedSegment, retry_seconds
from rota.kube.telemetry.journal.spool import Spool
from rota.object_store import ObjectStore, StoreError
from rota.object_store.segments import SegmentName
from rota.sentences import pluralize

ADOPT_SECONDS = 60.0  # between two searches for segments of processes that have ended
COMPRESSION_LEVEL = 6
_GZIP = 31  # zlib's number of a window of 32 KiB with a header of gzip

_log = logging.getLogger(__name__)


class SegmentShipper:
    """Stores closed segments, the oldest first. A store that fails is tried again, after longer and longer pauses."""

    def __init__(self, store: ObjectStore, spool: Spool, retention: FolderRetention | None) -> None:
        self.shipped_segments = 0
        self.failed_attempts = 0
        self._store = store
        self._spool = spool
        self._retention = retention  # of a folder; buckets have rules of their own
        self._failures = 0  # since the last success
        self._failing_since = 0.0
        self._closing = False  # guarded by the spool's lock
        self._thread = threading.Thread(target=self._run, name="journal shipper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Ship what is left, for at most so many seconds; the next process ships the rest."""
        with self._spool.changed:
            self._closing = True
            self._spool.changed.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            _log.error("The journal was closed before all segments were shipped to %s", self._store.uri)
            return
        left = self._spool.close()
        if left:
            _log.error(
                "%s of the journal could not be shipped; left in %s", pluralize(left, "segment"), self._spool.root
            )

    def _run(self) -> None:
        adopt_at = 0.0
        while True:
            is_closing = self._closing  # read first: when it is set, all segments are closed
            if time.monotonic() >= adopt_at:
                self._spool.adopt()
                adopt_at = time.monotonic() + ADOPT_SECONDS
            segment = self._spool.take()
            if segment and self._ship(segment):
                continue
            if is_closing:
                return
            self._wait(retry_seconds(self._failures) if segment else adopt_at - time.monotonic(), segment)

    def _wait(self, seconds: float, failed: ClosedSegment | None) -> None:
        """Wait for the end of the pause after a failure, or for a closed segment."""
        with self._spool.changed:
            self._spool.changed.wait_for(
                lambda: self._closing or (failed is None and self._spool.has_closed), max(seconds, 0.0)
            )

    def _ship(self, segment: ClosedSegment) -> bool:
        """Store and remove a segment; return False if the store fails."""
        try:
            lines = self._spool.read(segment)
        except OSError as error:
            _log.error("A segment of the journal cannot be read; its records are lost: %s", error)
            self._spool.drop(segment)
            return True
        try:
            if lines:
                self._store_lines(segment.name, lines)
        except StoreError as error:
            self._note_failure(str(error))
            return False
        except Exception as error:  # noqa: BLE001 - the thread must not end before the operator does
            self._note_failure(repr(error))
            return False
        self._spool.remove(segment)
        self.shipped_segments += 1
        self._note_success()
        return True

    def _store_lines(self, name: SegmentName, lines: bytes) -> None:
        data = gzip.compress(lines, COMPRESSION_LEVEL, mtime=0)
        if self._retention:
            self._retention.make_room(name.hour, len(data))
        while not self._store.create(name.key, data):
            if self._is_stored(name.key, lines):  # by an attempt whose answer was lost
                return
            name = name._replace(sequence=name.sequence + 1)  # never overwrite another segment

    def _is_stored(self, key: str, lines: bytes) -> bool:
        try:
            stored = self._store.read(key)
        except FileNotFoundError:
            raise StoreError(f"{self._store.uri}: {key} was deleted while it was written") from None
        try:
            # With a bound, so that no foreign object of this name fills the memory.
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
