"""Keeps the journal's folder below its limit by removing the segments of the oldest hours.

It lists the folder whenever a fiftieth of the limit was written, and then removes segments until the folder has room
for those before the next listing: its own, and those of another operator, such as the previous leader.
"""

import os
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from rota.object_store import FolderStore, StoreError
from rota.object_store.segments import segment_hour

SCANS_PER_LIMIT = 50  # listings of the folder while as much as its limit is written
DRAFT_SECONDS = 3600.0  # the age at which the draft of a segment belongs to a killed process

_DRAFT = re.compile(r"\.[0-9a-f]{16}\.draft")  # as FolderStore names them


class FolderRetention:
    """Makes room in a folder that several operators may share. It never removes other files."""

    def __init__(self, store: FolderStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._unscanned_bytes = max_bytes  # written since the last listing; the first segment needs one

    def make_room(self, hour: str, needed_bytes: int) -> None:
        """Remove the oldest segments if that is due, those of this hour last; raise StoreError if it is not enough."""
        interval_bytes = self._max_bytes // SCANS_PER_LIMIT
        if self._unscanned_bytes + needed_bytes > interval_bytes:
            bytes_by_hour = self._measure_hours()
            surplus_bytes = sum(bytes_by_hour.values()) + needed_bytes - self._max_bytes
            margin_bytes = 2 * interval_bytes  # of this and another operator, until they list it
            for oldest in sorted(bytes_by_hour, key=lambda stored: (stored == hour, stored)):
                if surplus_bytes + margin_bytes > 0:
                    surplus_bytes -= self._remove(oldest, surplus_bytes + margin_bytes, hour)
            if surplus_bytes > 0:
                raise StoreError(f"a segment of {needed_bytes} bytes exceeds nine tenths of the journal's limit")
            self._unscanned_bytes = 0
        self._unscanned_bytes += needed_bytes

    def _measure_hours(self) -> Counter[str]:
        """Return the size of each hour. Other folders are not read: the operator may not have the right to."""
        bytes_by_hour: Counter[str] = Counter()
        for date in self._dates():
            for info in self._store.list_objects(date):
                hour = segment_hour(info.key)
                if hour:
                    bytes_by_hour[hour] += info.size_bytes
            self._remove_drafts(date)
        return bytes_by_hour

    def _dates(self) -> list[str]:
        try:
            with os.scandir(self._store.uri) as entries:
                return [e.name for e in entries if e.name.startswith("date=") and e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self._store.uri} cannot be listed: {error.strerror}") from error

    def _remove(self, hour: str, wanted_bytes: int, current_hour: str) -> int:
        """Remove segments of an hour until so many bytes are free, and the date's folder if it is empty then.

        Returns the number of freed bytes. The folder of the current date stays.
        """
        freed_bytes = 0
        date = f"date={hour.partition('T')[0]}"
        for info in sorted(self._store.list_objects(date), key=lambda info: info.key):
            if segment_hour(info.key) == hour and freed_bytes < wanted_bytes:
                self._store.delete(info.key)
                freed_bytes += info.size_bytes
        if not current_hour.startswith(date.removeprefix("date=")):
            with suppress(OSError):  # the folder still has other files
                (Path(self._store.uri) / date).rmdir()
        return freed_bytes

    def _remove_drafts(self, date: str) -> None:
        """Remove the incomplete segments of killed processes."""
        for path in (Path(self._store.uri) / date).glob(".*.draft"):
            with suppress(OSError):  # removed by another operator
                if _DRAFT.fullmatch(path.name) and path.lstat().st_mtime < time.time() - DRAFT_SECONDS:
                    path.unlink()
