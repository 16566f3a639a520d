"""A lake as the commands of `rota pipeline` use it: they read one snapshot, write marts, and publish these together."""

from collections.abc import Collection
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rota.cli.commands.pipeline.output_paths import check_own_folder, check_writable
from rota.cli.commands.pipeline.progress import print_note
from rota.object_store import FOLDER_SCHEME, ObjectStore, is_missing_folder, open_store, parse_location
from rota.object_store.segments import segment_hour
from rota.pipeline.ingest import extent
from rota.pipeline.lake.snapshots import LakeSnapshot
from rota.pipeline.lake.tables import Lake
from rota.pipeline.report.outputs import cache_table
from rota.pipeline.synthetic.generate import check_empty

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


JOURNAL = "journal"  # the journal's default folder in a lake
GAP = "lake/gap"
EXAMPLE_SEGMENT = "date=2026-11-21/08-NAME.jsonl.gz"


class OpenedLake:
    """A lake and the snapshot that a command reads.

    Only a command that reads the newest snapshot writes marts (result tables). With an older snapshot, nothing is
    written, because newer results would be replaced by older ones.
    """

    def __init__(self, lake: Lake, snapshot: LakeSnapshot, *, is_newest: bool) -> None:
        self.lake = lake
        self.snapshot = snapshot
        self._is_newest = is_newest
        self._versions: dict[str, int] = {}  # by mart the version that was written and is not published yet
        self.rows: dict[str, int] = {}  # by mart the number of written rows

    def read(self, spark: "SparkSession", name: str) -> "DataFrame":
        """Return the rows of a table in the snapshot, without rows that this command has written since."""
        return self.lake.read(spark, self.snapshot, name)

    def written_at(self, name: str) -> datetime | None:
        """Return when the newest rows of a table in the snapshot were written; None if it has no rows."""
        return self.lake.table(name).written_at(self.snapshot.version(name))

    def first_day(self, days: int | None) -> date | None:
        """Return the first of the last `days` days of the history; None: use all days."""
        return extent.first_day(self.lake, self.snapshot, days) if days else None

    def days_since(self, since: date | None) -> Collection[date] | None:
        """Return the days of the history from a day on; None: all."""
        if since is None:
            return None
        return [day for day in extent.read_days(self.lake, self.snapshot) if day >= since]

    def write(self, name: str, rows: "DataFrame", dates: Collection[date] | None = None) -> "DataFrame":
        """Replace the rows of a mart, or those of some dates, and return the new rows.

        With an older snapshot, nothing is written, and `rows` are returned. Raise ValueError if the mart's log has lost
        commits.
        """
        if not self._is_newest:
            return cache_table(name, rows)
        self.lake.head(self.snapshot, name)  # called only because it raises if the log has lost commits
        table = self.lake.table(name)
        version, self.rows[name] = table.replace(rows, dates, base=self.snapshot.version(name))
        if version is not None:  # None: the mart never had a row; `read` then returns none
            self._versions[name] = version
        return table.read(rows.sparkSession, version)

    def count_gaps(self, days: int | None) -> int:
        """Return the number of `gap` records, which report lost records, in the last `days` days; None: in all days."""
        return self.lake.table(GAP).count(self.snapshot.version(GAP), self.first_day(days))

    def publish(self) -> LakeSnapshot:
        """Publish the marts that were written since the last call in one snapshot, and return that snapshot.

        If nothing was written, return the snapshot that the command reads.
        """
        if not self._is_newest:
            newer = "the marts are of the newest one, and stay as they are"
            print_note(f"nothing is written to the lake: snapshot {self.snapshot.number} is an older one; {newer}")
        elif self._versions:
            published = self.lake.snapshots.publish(self.snapshot, self._versions)
            self._versions = {}
            print_note(f"published snapshot {published.number} of {self.lake.uri}")
            return published
        return self.snapshot


class NothingToReadError(Exception):
    """Raised if there is no journal or no history yet; the text is a sentence for users."""


def open_lake(uri: str) -> Lake:
    """Return a lake; raise ValueError if an early version of Rota wrote it, or if its folder has other files."""
    lake = Lake(uri)  # raises if an early version wrote it
    location = parse_location(lake.uri)
    if location.scheme == FOLDER_SCHEME:
        check_own_folder(Path(location.path))
    return lake


def open_lake_to_write(uri: str) -> Lake:
    """Return a lake; raise ValueError if its folder cannot be created or written, or is not that of a lake."""
    _check_writable(uri)
    return open_lake(uri)


def _check_writable(uri: str) -> None:
    location = parse_location(uri)
    if location.scheme == FOLDER_SCHEME:
        check_writable("The lake", Path(location.path), uri)


def open_snapshot(lake: Lake, number: int | None, as_of: datetime | None) -> OpenedLake:
    """Choose the snapshot that a command reads, and print it.

    Raise NothingToReadError if there is no snapshot, ValueError if it has no records, or if it is the newest one and no
    marts can be written.
    """
    newest = lake.snapshots.latest()
    if not newest.number:
        raise NothingToReadError(lake.snapshots.explain_missing())
    # Use `newest` as it was read. A second read could return a snapshot that was published in between: it would not
    # count as the newest, and this command would write no marts.
    snapshot = newest if number is None and as_of is None else lake.snapshot(number, as_of)
    is_newest = snapshot.number == newest.number
    if is_newest:  # its marts are written
        _check_writable(lake.uri)
    extent.check_history(lake, snapshot)
    created_at = snapshot.created_at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    print_note(f"reading snapshot {snapshot.number} of {lake.uri}, published {created_at}")
    return OpenedLake(lake, snapshot, is_newest=is_newest)


def open_journal(lake: Lake, uri: str | None) -> ObjectStore:
    """Return the store of a journal, by default the one in the lake; raise NothingToReadError if it has no segment."""
    journal = open_store(uri or f"{lake.uri}/{JOURNAL}")
    if any(segment_hour(listed.key) for listed in journal.list_objects()):
        return journal
    has_none = f"contains no segment of a journal, such as {EXAMPLE_SEGMENT}"
    problem = "does not exist" if is_missing_folder(journal.uri) else has_none
    raise NothingToReadError(f"{journal.uri} {problem}; name the journal with --journal")


def open_journal_of_run(lake: Lake, uri: str | None) -> ObjectStore | None:
    """Return the journal for `rota pipeline run`; None if it is empty, but the lake has a history to compute from."""
    try:
        return open_journal(lake, uri)
    except NothingToReadError as error:
        if not lake.snapshots.numbers():
            raise
        print_note(f"nothing is ingested: {error}")
        return None


def open_new_journal(lake_uri: str) -> ObjectStore:
    """Return the store of a lake's journal, which is to be written; raise ValueError if it is not empty."""
    journal = open_store(f"{open_lake_to_write(lake_uri).uri}/{JOURNAL}")
    check_empty(journal)
    return journal
