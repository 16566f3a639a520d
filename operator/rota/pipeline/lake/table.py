"""A table of the lake: Parquet files that Spark's tasks or pyarrow write, in versions that deltalake commits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from rota.object_store import ObjectStore
from rota.pipeline.lake.columns import compare_columns, find_missing_fields
from rota.pipeline.lake.data_files import DataFile, TableSpec, count_rows
from rota.pipeline.lake.delta_log import (
    CommitResult,
    DeltaLog,
    FileChanges,
    last_run,
    list_files,
    stored_schema,
)
from rota.pipeline.lake.parquet_files import FileBatch, ParquetFiles
from rota.pipeline.lake.reading.arrow_rows import collect_rows
from rota.pipeline.lake.storage import native_filesystem
from rota.pipeline.lake.upkeep.compaction import join_small_files
from rota.pipeline.lake.upkeep.vacuum import RemovedFiles, remove_unused_files, trim_log

_MAX_BROADCAST_ROWS = 500_000  # digests of 16 bytes
_MAX_LOADED_VERSIONS = 4  # each has the list of its files in memory; an ingest of many runs reads as many versions


class TableCommit(NamedTuple):
    """Result of a write."""

    version: int | None  # of the table after the write; None: the table does not exist, as there were no rows
    rows: int  # number of rows that this call has added; 0 if the run was in the table already


class TableHead(NamedTuple):
    """The newest version of a table, None if nothing was ever written, and the last ingest run in it, -1 if none."""

    version: int | None
    run: int


class Table:
    """A Delta table. Rows have the columns of the schema; reading a version that is None gives no rows."""

    def __init__(self, store: ObjectStore, spec: TableSpec) -> None:
        self.name = spec.name
        self.schema = spec.schema
        self.partitions = spec.partitions
        self.uri = f"{store.uri}/{spec.name}"
        self._store = store
        self._spec = spec
        self._log = DeltaLog(store, spec.name, spec.schema, spec.partitions)
        self._files = ParquetFiles(store, spec)
        self._readable: dict[int, DeltaTable] = {}  # the newest of the loaded versions, which never change

    def head(self) -> TableHead:
        """Return the newest version, and the last ingest run in it."""
        table = self._log.load()
        return TableHead(None if table is None else table.version(), last_run(table))

    def version(self) -> int | None:
        """Return the newest version; None if nothing was ever written."""
        return self.head().version

    def transaction(self) -> int:
        """Return the number of the last ingest run that has committed to the table; -1 if none has."""
        return self.head().run

    def read(self, spark: SparkSession, version: int | None, since: date | None = None) -> DataFrame:
        """Return the rows of a version, or only those of the day `since` and later days, with the schema's columns.

        Columns that older files lack are null. Raise ValueError if the log is damaged, or a file is missing.
        """
        return self._files.read(spark, _files_since(self._load_readable(version), since))

    def count(self, version: int | None, since: date | None = None) -> int:
        """Return the number of rows of a version, by the log alone."""
        return count_rows(_files_since(self._load_readable(version), since))

    def files(self, version: int | None, since: date | None = None) -> list[DataFile]:
        """Return the files of a version, for readers without Spark."""
        return _files_since(self._load_readable(version), since)

    def written_at(self, version: int | None) -> datetime | None:
        """Return when the newest file of a version was committed; None if the version has no files."""
        newest: datetime | None = None
        for file in list_files(self._load_readable(version)):
            if file.added_at and (newest is None or file.added_at > newest):
                newest = file.added_at
        return newest

    def dataset(self, version: int | None, since: date | None = None) -> ds.Dataset:
        """Return the rows of a version as a dataset of pyarrow, for readers without Spark."""
        table = self._load_readable(version)
        schema = pa.schema(self._log.delta_schema.to_arrow())
        if table is None:
            return ds.dataset(schema.empty_table())
        predicate = None if since is None else f"date >= '{since.isoformat()}'"
        return table.to_pyarrow_dataset(
            schema=schema, file_pruning_predicate=predicate, filesystem=native_filesystem(self.uri)
        )

    def to_arrow(
        self, version: int | None, columns: Sequence[str] | None = None, where: ds.Expression | None = None
    ) -> pa.Table:
        """Return the rows of a version that match an expression of pyarrow.dataset; all columns by default."""
        return collect_rows(self.dataset(version), self.uri, columns, where)

    def append(self, rows: DataFrame, run: int) -> TableCommit:
        """Append the rows of an ingest run; a run that is in the table already is skipped. `rows` is evaluated once."""
        return self._add_run(lambda: self._files.write(rows, f"run{run}"), run, lambda _, batch: batch)

    def append_files(self, files: Sequence[DataFile], run: int) -> TableCommit:
        """Append the rows of an ingest run that are in files below the table's folder already."""
        return self._add_run(lambda: FileBatch(files), run, lambda _, batch: batch)

    def read_files(self, spark: SparkSession, files: Sequence[DataFile]) -> DataFrame:
        """Return the rows of files below the table's folder, which no version needs to have."""
        return self._files.read(spark, files)

    def merge(self, rows: DataFrame, run: int) -> TableCommit:
        """Append the rows of an ingest run, except rows with a date and `digest` that the table has already.

        `rows` is evaluated once. If no date of `rows` is in the table yet, this is as quick as `append`. Equal rows
        within `rows` are all kept.
        """
        return self._merge(lambda: self._files.write(rows, f"run{run}"), run, lambda: rows.sparkSession)

    def merge_files(self, files: Sequence[DataFile], run: int, start_spark: Callable[[], SparkSession]) -> TableCommit:
        """Merge the rows of an ingest run that are in files already; starts Spark only to compare rows."""
        return self._merge(lambda: FileBatch(files), run, start_spark)

    def _merge(self, write: Callable[[], FileBatch], run: int, start_spark: Callable[[], SparkSession]) -> TableCommit:
        compared: set[str] = set()  # paths of files whose rows are no longer in the batch

        def drop_present(table: DeltaTable, batch: FileBatch) -> FileBatch:
            unread: list[DataFile] = []
            for file in list_files(table, batch.dates):
                if file.path not in compared:
                    compared.add(file.path)
                    unread.append(file)
            return self._drop_rows_of(unread, batch, start_spark(), run) if unread else batch

        return self._add_run(write, run, drop_present)

    def replace(self, rows: DataFrame, dates: Collection[date] | None, *, base: int | None) -> TableCommit:
        """Replace all rows of these dates, or of the whole table if `dates` is None, in one commit.

        All other dates get the rows of the published version `base`, since a later version belongs to a command that
        has not published it. Dates without new rows become empty. Raise ValueError if `rows` has other dates.
        """
        self._check_writable(self._log.load())
        batch = self._files.write(rows, "replace")
        replaced = None if dates is None else _date_texts(dates)
        if replaced is not None and not batch.dates <= replaced:
            unexpected_dates = sorted(map(str, batch.dates - replaced))
            raise ValueError(
                f"{self.name}: rows of {', '.join(unexpected_dates)} are not of the days that are to be replaced"
            )

        retained: dict[str, DataFile] = {}
        if replaced is not None:
            for file in list_files(self._load_readable(base)):
                if file.date not in replaced:
                    retained[file.path] = file

        def plan_changes(table: DeltaTable | None) -> FileChanges:
            self._check_writable(table)
            present = {file.path: file for file in list_files(table)}
            restored = _without_paths(retained, present)
            removed = _without_paths(present, retained)
            return FileChanges([*batch.files, *restored], removed)

        result = self._log.commit(plan_changes)
        return TableCommit(result.version, batch.rows)

    def compact(self, end_day: date) -> CommitResult:
        """Join the small files of each partition of all days earlier than `end_day`; rows stay the same."""
        return join_small_files(self._store, self._spec, self._log, end_day)

    def dates(self, version: int | None) -> set[date]:
        """Return the days of which a version has rows."""
        days: set[date] = set()
        for file in list_files(self._load_readable(version)):
            if file.date:
                days.add(date.fromisoformat(file.date))
        return days

    def delete(self, dates: Collection[date]) -> CommitResult:
        """Remove all rows of these days in one commit."""
        deleted = _date_texts(dates)
        return self._log.commit(lambda table: FileChanges((), list_files(table, deleted)))

    def vacuum(self, oldest_version: int, modified_before: datetime) -> RemovedFiles:
        """Remove files that `oldest_version` and all later versions lack, if they were modified before a time.

        Remove the log files of older versions, too.
        """
        needed = self._log.paths_since(oldest_version)
        removed = remove_unused_files(self._store, self.name, needed, modified_before)
        trim_log(self._store, self._log.folder, oldest_version)
        return removed

    def add_missing_columns(self) -> None:
        """Add the columns of the schema that the table lacks; only ingest does so, before its first write."""
        self._log.add_columns(lambda stored: StructType(find_missing_fields(self.schema, stored)))

    def _add_run(
        self, write: Callable[[], FileBatch], run: int, drop_present: Callable[[DeltaTable, FileBatch], FileBatch]
    ) -> TableCommit:
        """Write and commit the rows of a run, without rows that `drop_present` finds in a version of the table."""
        current = self._log.load()
        if current is not None and last_run(current) >= run:
            return TableCommit(current.version(), 0)
        self._check_writable(current)
        batch = write()

        def plan_changes(table: DeltaTable | None) -> FileChanges | None:
            nonlocal batch
            if table is not None:
                self._check_writable(table)
                if last_run(table) >= run:  # another process has committed the same run meanwhile
                    return None
                batch = drop_present(table, batch)
            return FileChanges(batch.files)

        result = self._log.commit(plan_changes, run)
        return TableCommit(result.version, batch.rows if result.is_changed else 0)

    def _drop_rows_of(self, files: Sequence[DataFile], batch: FileBatch, spark: SparkSession, run: int) -> FileBatch:
        """Return a batch without rows that `files` have, by digest; the same batch if `files` have none of its rows."""
        written = self._files.read(spark, batch.files)
        digests = written.select("digest").transform(_broadcast_small, batch.rows)
        present = self._files.read(spark, files).select("digest").join(digests, "digest", "left_semi").distinct()
        if present.isEmpty():
            return batch
        absent = written.join(present.transform(_broadcast_small, batch.rows), "digest", "left_anti")
        return self._files.write(absent, f"run{run}")

    def _load_readable(self, version: int | None) -> DeltaTable | None:
        if version is None:
            return None
        if version not in self._readable:
            table = self._log.load(version)
            assert table is not None  # noqa: S101 - only a table without a version may be missing
            compare_columns(self.schema, stored_schema(table)).check_readable(self.uri)
            if len(self._readable) == _MAX_LOADED_VERSIONS:
                del self._readable[min(self._readable)]
            self._readable[version] = table
        return self._readable[version]

    def _check_writable(self, table: DeltaTable | None) -> None:
        if table is not None:
            compare_columns(self.schema, stored_schema(table)).check_writable(self.uri)


def _files_since(table: DeltaTable | None, since: date | None) -> list[DataFile]:
    files = list_files(table)
    if since is None:
        return files
    first_date = since.isoformat()
    return [file for file in files if file.date and file.date >= first_date]


def _date_texts(dates: Iterable[date]) -> set[str]:
    return {day.isoformat() for day in dates}


def _without_paths(files: Mapping[str, DataFile], paths: Collection[str]) -> list[DataFile]:
    return [file for path, file in files.items() if path not in paths]


def _broadcast_small(rows: DataFrame, max_rows: int) -> DataFrame:
    """Let Spark send rows to all tasks, unless there may be too many of them."""
    return F.broadcast(rows) if max_rows <= _MAX_BROADCAST_ROWS else rows
