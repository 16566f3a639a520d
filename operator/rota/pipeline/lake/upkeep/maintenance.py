"""Maintenance of a lake: compaction of past days, retention by days, and removal of expired snapshots.

Concurrent commands are harmless. Tables that another command is writing are skipped, and a table that is written
meanwhile is not published: the snapshot of the other command contains the table's compaction. If a maintenance is
killed after it has committed versions, the next maintenance publishes these versions.
"""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa

from rota.object_store import ObjectStore
from rota.object_store.segments import segment_hour
from rota.pipeline.lake.delta_log import CommitResult
from rota.pipeline.lake.snapshots import LakeSnapshot, SnapshotConflictError
from rota.pipeline.lake.table import Table
from rota.pipeline.lake.tables import FILES_TABLE, INGESTED_TABLES, TABLES, Lake

_PROBE_FOLDER = "_rota/clock"  # for empty objects, whose times show the clock of the store
_PROBE_BYTES = 8
_MAX_CLOCK_DIFFERENCE = timedelta(hours=1)
_DATE_CHARACTERS = len("2026-11-21")


@dataclass
class TableUpkeep:
    """Changes that the maintenance has made to a table."""

    compacted: bool = False
    deleted_days: int = 0
    removed_files: int = 0
    freed_bytes: int = 0

    @property
    def is_changed(self) -> bool:
        """Whether the maintenance has changed the table."""
        return self != TableUpkeep()


@dataclass
class MaintenanceSummary:
    """Changes that a maintenance has made to a lake."""

    snapshot: int = 0  # number of the newest snapshot afterwards
    deleted_segments: int = 0
    removed_snapshots: int = 0
    tables: dict[str, TableUpkeep] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)  # tables that another command is writing


def check_clock(store: ObjectStore, now: datetime) -> None:
    """Raise ValueError if a time differs from the store's: files of running commands could look old, and be removed.

    Remove the probes of killed maintenances.
    """
    probe = f"{_PROBE_FOLDER}/{secrets.token_hex(_PROBE_BYTES)}"
    store.create(probe, b"")
    try:
        times = {info.key: info.modified for info in store.list_objects(_PROBE_FOLDER)}
    finally:
        store.delete(probe)
    stored_at = times[probe]
    for key, time in times.items():
        if stored_at - time > _MAX_CLOCK_DIFFERENCE:
            store.delete(key)
    if abs(stored_at - now) > _MAX_CLOCK_DIFFERENCE:
        raise ValueError(
            f"the clock shows {now.isoformat(timespec='seconds')}, but an object stored in {store.uri} just now is of "
            f"{stored_at.isoformat(timespec='seconds')}; correct the clock, or files in use could be removed"
        )


class Maintenance:
    """One maintenance of a lake. Without `keep_days`, rows and segments of all days stay."""

    def __init__(
        self, lake: Lake, journal: ObjectStore, now: datetime, *, keep_days: int | None, snapshot_days: int
    ) -> None:
        if keep_days is not None and keep_days <= snapshot_days:
            raise ValueError(
                f"Rows would be kept for {keep_days} days, snapshots with them for {snapshot_days}: "
                "keep rows for more days than snapshots"
            )
        self._lake = lake
        self._journal = journal
        self._today = now.astimezone(UTC).date()
        self._first_kept_day = None if keep_days is None else self._today - timedelta(days=keep_days)
        self._expiry = now - timedelta(days=snapshot_days)
        self._summary = MaintenanceSummary()

    def run(self) -> MaintenanceSummary:
        """Maintain all tables, publish their new versions in one snapshot, and remove expired snapshots and files."""
        base = self._lake.snapshot()
        segment_days = self._delete_segments(base) if self._first_kept_day else set()
        versions: dict[str, int] = {}
        for name in TABLES:
            version = self._maintain(base, name, segment_days)
            if version is not None:
                versions[name] = version
        self._publish(base, versions)
        self._remove_expired()
        self._summary.snapshot = self._lake.snapshots.latest().number
        return self._summary

    def _delete_segments(self, snapshot: LakeSnapshot) -> set[date]:
        """Delete old segments of the journal that the snapshot has ingested; return the remaining segments' days."""
        ledger = self._lake.table(FILES_TABLE.name).to_arrow(snapshot.version(FILES_TABLE.name), ["key", "etag"])
        ingested = _ingested_segments(ledger)
        days: set[date] = set()
        for info in list(self._journal.list_objects()):
            day = _segment_day(info.key)
            if day is None:
                continue
            if self._is_old(day) and (info.key, info.etag) in ingested:
                self._journal.delete(info.key)
                self._summary.deleted_segments += 1
            else:
                days.add(day)
        return days

    def _maintain(self, base: LakeSnapshot, name: str, segment_days: Collection[date]) -> int | None:
        """Compact a table and delete its old days; return the version to publish, None without a new version."""
        table = self._lake.table(name)
        head = self._lake.head(base, name)
        version = head.version
        upkeep = self._summary.tables.setdefault(name, TableUpkeep())
        if version is None or "date" not in table.partitions:  # commands replace undated tables as a whole
            return None
        # Unpublished versions without rows of a later run are of a killed maintenance; they are published now. Marts
        # have no runs, so that their unpublished versions may be of any command.
        is_published = version == base.version(name)
        if not is_published and (name not in INGESTED_TABLES or head.run > base.run):
            self._summary.skipped.append(name)
            return None
        old_days = self._old_days(table, version, segment_days)
        result = table.delete(old_days) if old_days else CommitResult(version, is_changed=False)
        upkeep.deleted_days = len(old_days)
        compacted = table.compact(self._today)
        upkeep.compacted = compacted.is_changed
        # The version after the commits of this maintenance, if no other command has committed meanwhile.
        own_version = version + result.is_changed + compacted.is_changed
        if own_version == base.version(name):
            return None
        if compacted.version != own_version:
            self._summary.skipped.append(name)
            return None
        return own_version

    def _old_days(self, table: Table, version: int, segment_days: Collection[date]) -> set[date]:
        """Return the days to delete. The ledger keeps the days of existing segments, or ingest would repeat them."""
        days = {day for day in table.dates(version) if self._is_old(day)}
        if table.name != FILES_TABLE.name:
            return days
        return days - set(segment_days) if segment_days else set()  # without segments, the journal may be elsewhere

    def _is_old(self, day: date) -> bool:
        return self._first_kept_day is not None and day < self._first_kept_day

    def _publish(self, base: LakeSnapshot, versions: dict[str, int]) -> None:
        """Publish tables that no other command has published meanwhile."""
        while versions:
            newest = self._lake.snapshots.latest()
            unchanged: dict[str, int] = {}
            for name, version in versions.items():
                if newest.version(name) == base.version(name):
                    unchanged[name] = version
                else:
                    self._summary.skipped.append(name)
            versions = unchanged
            try:
                self._lake.snapshots.publish(newest, versions)
            except SnapshotConflictError:
                continue
            return

    def _remove_expired(self) -> None:
        """Remove expired snapshots, then the files and run plans that only these snapshots needed."""
        numbers = self._lake.snapshots.numbers()
        oldest = self._lake.snapshots.expire(self._expiry)
        for number in numbers:
            if number < oldest.number:
                self._summary.removed_snapshots += 1
        for name in TABLES:
            table = self._lake.table(name)
            if table.version() is not None:
                removed = table.vacuum(oldest.version(name) or 0, self._expiry)
                upkeep = self._summary.tables[name]
                upkeep.removed_files = removed.files
                upkeep.freed_bytes = removed.size_bytes
        self._lake.runs.delete_before(oldest.run)


def _ingested_segments(ledger: pa.Table) -> set[tuple[str, str]]:
    """Return the key and ETag of each segment."""
    return set(zip(ledger["key"].to_pylist(), ledger["etag"].to_pylist(), strict=True))


def _segment_day(key: str) -> date | None:
    hour = segment_hour(key)
    return None if hour is None else date.fromisoformat(hour[:_DATE_CHARACTERS])
