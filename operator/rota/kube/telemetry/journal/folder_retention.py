"""Keeps the journal's folder below its limit by removing the segments of the oldest hours.

It lists the folder whenever a fiftieth of the limit was written. Then it removes segments until there is room for all
segments that this operator and another one, such as the previous leader, may write before the next listing.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rota.object_store import FolderStore, StoreError
from rota.object_store.segments import segment_hour

SCANS_PER_LIMIT = 50  # the folder is listed whenever a fiftieth of its limit was written
DRAFT_SECONDS = 3600.0  # a draft of this age was left by a killed process

_DRAFT = re.compile(r"\.[0-9a-f]{16}\.draft")  # as FolderStore names them


class FolderRetention:
    """Makes room in a folder that several operators may share. It removes only segments and drafts of segments.

    `max_bytes` is the limit of the segments: nine tenths of the journal's, since one tenth is for the spool.
    """

    def __init__(self, store: FolderStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._unscanned_bytes = max_bytes  # written since the last listing; initially so many that a listing is due

    def make_room(self, hour: str, needed_bytes: int) -> None:
        """If a listing is due, remove old drafts and the oldest segments, those of `hour` last.

        Raise StoreError if a segment of `needed_bytes` does not fit even then.
        """
        interval_bytes = self._max_bytes // SCANS_PER_LIMIT
        if self._unscanned_bytes + needed_bytes > interval_bytes:
            dates = self._dates()
            self._remove_drafts(dates)
            bytes_by_hour = self._measure_hours(dates)
            surplus_bytes = sum(bytes_by_hour.values()) + needed_bytes - self._max_bytes
            margin_bytes = 2 * interval_bytes  # for this operator and another one, until their next listings
            oldest_first = sorted(bytes_by_hour, key=lambda stored_hour: (stored_hour == hour, stored_hour))
            for oldest in oldest_first:
                if surplus_bytes + margin_bytes > 0:
                    surplus_bytes -= self._remove(oldest, surplus_bytes + margin_bytes, hour)
            if surplus_bytes > 0:
                raise StoreError(f"a segment of {needed_bytes} bytes exceeds nine tenths of the journal's limit")
            self._unscanned_bytes = 0
        self._unscanned_bytes += needed_bytes

    def _measure_hours(self, dates: Iterable[str]) -> Counter[str]:
        """Return the size of each hour's segments in the folders of some dates."""
        bytes_by_hour: Counter[str] = Counter()
        for date in dates:
            for info in self._store.list_objects(date):
                hour = segment_hour(info.key)
                if hour:
                    bytes_by_hour[hour] += info.size_bytes
        return bytes_by_hour

    def _dates(self) -> list[str]:
        """Return the folders of dates. Other folders are not read, since the operator may lack the permission."""
        try:
            with os.scandir(self._store.uri) as entries:
                return [e.name for e in entries if e.name.startswith("date=") and e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self._store.uri} cannot be listed: {error.strerror}") from error

    def _remove(self, hour: str, wanted_bytes: int, current_hour: str) -> int:
        """Remove segments of an hour until `wanted_bytes` are freed; return the number of freed bytes.

        The folder of the date is removed, too, if it has become empty and is not that of the current date.
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

    def _remove_drafts(self, dates: Iterable[str]) -> None:
        """Remove the incomplete segments of killed processes from the folders of some dates."""
        for date in dates:
            for path in (Path(self._store.uri) / date).glob(".*.draft"):
                with suppress(OSError):  # removed by another operator
                    if _DRAFT.fullmatch(path.name) and path.lstat().st_mtime < time.time() - DRAFT_SECONDS:
                        path.unlink()
