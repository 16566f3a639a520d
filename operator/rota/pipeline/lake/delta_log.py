"""The log of a Delta table: loads versions, and commits added and removed files. Only this module writes a log.

The format stays readable for all tools: reader version 1, writer version 2, no deletion vectors, no column mapping.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import NamedTuple

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyspark.sql.types import StructType

from rota.object_store import ObjectStore
from rota.pipeline.lake.data_files import DataFile
from rota.pipeline.lake.reading.log_reader import LogReader, first_line
from rota.pipeline.lake.storage import storage_errors, storage_options

APP = "ingest"  # id of the log's application transactions (`txn`); their versions are the numbers of ingest runs
# Snapshots name old versions, so deltalake must not remove log files. `rota pipeline maintain` removes those that no
# snapshot needs.
_CONFIGURATION = {"delta.enableExpiredLogCleanup": "false"}


class FileChanges(NamedTuple):
    """Files that a commit adds and removes."""

    added: Sequence[DataFile]
    removed: Sequence[DataFile] = ()


class CommitResult(NamedTuple):
    """Newest version of a table after a commit, None if there is no table, and whether files were added or removed."""

    version: int | None
    is_changed: bool


# The argument is the newest version; None: the table does not exist.
PlanChanges = Callable[[DeltaTable | None], FileChanges | None]


class DeltaLog:
    """Log of the table below `name` in a lake's store."""

    def __init__(self, store: ObjectStore, name: str, schema: StructType, partitions: Sequence[str]) -> None:
        self._reader = LogReader(store, name)
        self.uri = self._reader.uri
        self.folder = self._reader.folder
        self.delta_schema = Schema.from_json(schema.json())  # both formats have the same JSON
        self._partitions = list(partitions)
        self._options = storage_options(store.uri)

    def load(self, version: int | None = None) -> DeltaTable | None:
        """Load a version, by default the newest; None if the table does not exist. See LogReader.load."""
        return self._reader.load(version)

    def paths_since(self, version: int) -> set[str]:
        """Return the paths of all files that a version or a later one has. See LogReader.paths_since."""
        return self._reader.paths_since(version)

    def commit(self, plan_changes: PlanChanges, run: int | None = None) -> CommitResult:
        """Commit planned changes, with the number of an ingest run; without changes, commit nothing.

        If another writer commits first, the changes are planned again with that writer's version.
        """
        while True:
            table = self.load()
            version = None if table is None else table.version()
            changes = plan_changes(table)
            if not changes or not (changes.added or changes.removed):
                return CommitResult(version, is_changed=False)
            try:
                with storage_errors(self.uri):
                    self._write(table, changes, run)
                break
            except DeltaError as error:  # more than CommitFailedError, because two writers may create the table
                newer = self.load()
                if newer is None or newer.version() == version:
                    raise ValueError(f"{self.uri} cannot be written: {first_line(error)}") from error
                if changes.added and _contains(newer, changes.added):  # the answer was lost, not the commit
                    break
        return CommitResult(0 if version is None else version + 1, is_changed=True)

    def add_columns(self, find_fields: Callable[[StructType], StructType]) -> None:
        """Add the fields that a function returns for the stored schema; a missing table has no columns to add."""
        while (table := self.load()) is not None:
            fields = find_fields(stored_schema(table))
            if not fields.fields:
                return
            try:
                properties = CommitProperties(max_commit_retries=0)
                with storage_errors(self.uri):
                    table.alter.add_columns(Schema.from_json(fields.json()).fields, commit_properties=properties)
            except CommitFailedError:
                continue  # find the fields that the other writer has not added

    def _write(self, table: DeltaTable | None, changes: FileChanges, run: int | None) -> None:
        """Commit the next version; raise DeltaError if it exists."""
        now = int(time.time() * 1000)
        added = [_add_action(file, now) for file in changes.added]
        transactions = [] if run is None else [Transaction(APP, run)]
        # A retry by deltalake would ignore the rows that another writer has added.
        properties = CommitProperties(max_commit_retries=0, app_transactions=transactions)
        if table is None:
            create_table_with_add_actions(
                self.uri,
                self.delta_schema,
                added,
                partition_by=self._partitions,
                configuration=_CONFIGURATION,
                storage_options=self._options,
                commit_properties=properties,
            )
            return
        removed = [_remove_action(file, now) for file in changes.removed]
        table.create_write_transaction(
            [*added, *removed], "append", self.delta_schema, self._partitions, commit_properties=properties
        )


def stored_schema(table: DeltaTable) -> StructType:
    """Return the columns of a version as Spark's schema."""
    return StructType.fromJson(json.loads(table.schema().to_json()))


def last_run(table: DeltaTable | None) -> int:
    """Return the number of the last ingest run in a version; -1 without an ingest run."""
    run = None if table is None else table.transaction_version(APP)
    return -1 if run is None else run


def list_files(table: DeltaTable | None, dates: Iterable[str | None] | None = None) -> list[DataFile]:
    """Return the files of a version, by default of all dates."""
    if table is None:
        return []
    selected_dates = None if dates is None else set(dates)
    files: list[DataFile] = []
    for row in pa.table(table.get_add_actions()).to_pylist():
        partition = _partition_texts(row.get("partition"))
        added_at = datetime.fromtimestamp(row["modification_time"] / 1000, UTC)
        file = DataFile(row["path"], row["size_bytes"], row.get("num_records"), partition, added_at)
        if selected_dates is None or file.date in selected_dates:
            files.append(file)
    return files


def _partition_texts(values: Mapping[str, date | int | None] | None) -> dict[str, str | None]:
    texts: dict[str, str | None] = {}
    for column, value in (values or {}).items():
        texts[column] = None if value is None else str(value)
    return texts


def _add_action(file: DataFile, now: int) -> AddAction:
    stats = json.dumps({"numRecords": file.rows})
    return AddAction(file.path, file.size_bytes, file.partition, now, data_change=True, stats=stats)


def _remove_action(file: DataFile, now: int) -> RemoveAction:
    values = dict(file.partition)
    return RemoveAction(
        file.path, data_change=True, deletion_timestamp=now, size=file.size_bytes, partition_values=values
    )


def _contains(table: DeltaTable, files: Iterable[DataFile]) -> bool:
    return _paths(files) <= _paths(list_files(table))


def _paths(files: Iterable[DataFile]) -> set[str]:
    return {file.path for file in files}
