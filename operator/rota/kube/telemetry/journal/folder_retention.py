"""Keeps the journal's folder below its limit by removing the segments of the oldest hours.

It lists the folder whenever a fiftieth of the limit was written, and then removes hours until there is room for what
may be written until the next time: by itself, and by another operator, such as the previous leader.
"""

from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from rota.object_store import FolderStore, StoreError
from rota.object_store.segments import segment_hour

SCANS_PER_LIMIT = 50  # listings of the folder while as much as its limit is written


class _StoredSegment(NamedTuple):
    hour: str
    key: str
    size_bytes: int


class FolderRetention:
    """Makes room in a folder that several operators may share. It never removes other files."""

    def __init__(self, store: FolderStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._unscanned_bytes = max_bytes  # written since the last listing; the first segment needs one
        self._hour = ""  # of the last segment

    def make_room(self, hour: str, needed_bytes: int) -> None:
        """Remove the oldest hours, never this one, if that is due; raise StoreError if it is not enough."""
        interval_bytes = self._max_bytes // SCANS_PER_LIMIT
        if hour != self._hour or self._unscanned_bytes + needed_bytes > interval_bytes:
            segments = sorted(self._segments(), key=attrgetter("hour", "key"))
            folder_bytes = sum(segment.size_bytes for segment in segments)
            wanted_free_bytes = 2 * interval_bytes + needed_bytes  # of this and another operator, until they list it
            for segment in segments:
                if folder_bytes + wanted_free_bytes > self._max_bytes and segment.hour != hour:
                    self._remove(segment, hour)
                    folder_bytes -= segment.size_bytes
            # The hour may use the other operator's margin, too: segments that fit must not wait.
            if folder_bytes + max(interval_bytes, needed_bytes) > self._max_bytes:
                raise StoreError(f"the hour {hour} alone fills nine tenths of the journal's limit")
            self._hour = hour
            self._unscanned_bytes = 0
        self._unscanned_bytes += needed_bytes

    def _segments(self) -> list[_StoredSegment]:
        listed = ((segment_hour(info.key), info) for info in self._store.list_objects())
        return [_StoredSegment(hour, info.key, info.size_bytes) for hour, info in listed if hour]

    def _remove(self, segment: _StoredSegment, current_hour: str) -> None:
        """Remove a segment, and the folder of its date if that is empty then; the current date's folder stays."""
        self._store.delete(segment.key)
        folder = segment.key.partition("/")[0]
        if not current_hour.startswith(folder.removeprefix("date=")):
            with suppress(OSError):  # the folder still has other files
                (Path(self._store.uri) / folder).rmdir()
