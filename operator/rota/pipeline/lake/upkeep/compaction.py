"""Compaction: joins the small data files of past days, in the table's order.

Deltalake's own compaction is not used, because two of them at once would both succeed, and repeat rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import NamedTuple

import pyarrow as pa
from deltalake import DeltaTable

from rota.object_store import ObjectStore
from rota.pipeline.lake.data_files import DataFile, FileTarget, TableSpec, read_file, write_file
from rota.pipeline.lake.delta_log import CommitResult, DeltaLog, FileChanges, list_files
from rota.pipeline.lake.reading.arrow_rows import data_file_errors

SMALL_FILE_BYTES = 16 * 2**20  # smaller files are joined
MAX_JOINED_BYTES = 32 * 2**20  # total of the files that become one: all their rows are in memory
_LABEL = "joined"


class _JoinedFile(NamedTuple):
    """A new file with the rows of several files, which are removed when the new file is added."""

    file: DataFile
    parts: Sequence[DataFile]


def join_small_files(store: ObjectStore, table: TableSpec, log: DeltaLog, end_day: date) -> CommitResult:
    """Join the small files of each partition of all days earlier than `end_day` in one commit; rows stay the same.

    Files that another command has removed meanwhile stay removed, and the other files of their group stay as they are.
    Raise ValueError or StoreError if a file is missing or damaged.
    """
    current = log.load()
    joined: list[_JoinedFile] = []
    for parts in select_files(list_files(current), end_day):
        joined.append(_join(store, table, parts))  # noqa: PERF401 - a loop that writes
    if not joined:
        return CommitResult(None if current is None else current.version(), is_changed=False)

    def plan_changes(newest: DeltaTable | None) -> FileChanges:
        present = {file.path for file in list_files(newest)}
        added: list[DataFile] = []
        removed: list[DataFile] = []
        for file, parts in joined:
            if all(part.path in present for part in parts):
                added.append(file)
                removed += parts
        return FileChanges(added, removed)

    return log.commit(plan_changes)


def select_files(files: Iterable[DataFile], end_day: date) -> Iterator[list[DataFile]]:
    """Yield groups of at least two small files, each of one partition of a day earlier than `end_day`."""
    by_partition: dict[tuple[str | None, ...], list[DataFile]] = {}
    for file in files:
        if file.date and file.date < end_day.isoformat() and file.size_bytes < SMALL_FILE_BYTES:
            by_partition.setdefault(tuple(file.partition.values()), []).append(file)
    for small_files in by_partition.values():
        group: list[DataFile] = []
        for file in sorted(small_files):
            if sum(part.size_bytes for part in group) + file.size_bytes > MAX_JOINED_BYTES:
                yield from _yield_if_several(group)
                group = []
            group.append(file)
        yield from _yield_if_several(group)


def _yield_if_several(group: list[DataFile]) -> Iterator[list[DataFile]]:
    if len(group) > 1:
        yield group


def _join(store: ObjectStore, table: TableSpec, parts: Sequence[DataFile]) -> _JoinedFile:
    tables: list[pa.Table] = []
    for part in parts:
        with data_file_errors(f"{store.uri}/{table.name}/{part.path}"):
            tables.append(read_file(store, table.name, part))
    rows = pa.concat_tables(tables, promote_options="default")  # older files may lack columns
    if table.order:
        rows = rows.sort_by([(name, "ascending") for name in table.order])
    return _JoinedFile(write_file(rows, parts[0].partition, FileTarget(store, table, _LABEL)), parts)
