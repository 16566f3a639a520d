"""Merges rows of offsets in order of group and time, in memory that does not depend on the number of rows.

A *run* is a sequence of batches in that order. Ingest and compaction write sorted files, each of which is a run. A file
of another program may be unsorted: it is sorted in parts, and each part is a run in a local file.
"""

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

MAX_RUNS = 32  # runs that are merged at once: each has some megabytes in memory
_ORDER = [("group", "ascending"), ("at", "ascending")]

Batches = Iterator[pa.RecordBatch]


class RowKey(NamedTuple):
    """The place of a row in the order."""

    group: str
    at: int  # in microseconds since 1970


class _RunHead(NamedTuple):
    """The next rows of a run, at least one, and its later batches."""

    rows: pa.RecordBatch
    batches: Batches


class RunFolder:
    """A temporary folder for runs."""

    def __init__(self) -> None:
        # Spark passes its folders for temporary data to Python workers by this variable.
        spark_folder = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
        self._folder = tempfile.TemporaryDirectory(prefix="rota-runs-", dir=spark_folder or None)
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def write(self, batches: Iterable[pa.RecordBatch]) -> Batches:
        """Write a run to a file, and return its batches, which are read from the file when they are needed."""
        path = str(Path(self._folder.name) / str(self._count))
        self._count += 1
        writer: pa.RecordBatchFileWriter | None = None
        for batch in batches:
            writer = writer or pa.ipc.new_file(path, batch.schema)
            writer.write_batch(batch)
        if writer is None:
            return iter(())
        writer.close()
        return _read_run(path)


def _read_run(path: str) -> Batches:
    with pa.memory_map(path) as mapped, pa.ipc.open_file(mapped) as run:
        for index in range(run.num_record_batches):
            yield run.get_batch(index)


def is_sorted(batches: Iterable[pa.RecordBatch]) -> bool:
    """Return whether rows are in order of group and time."""
    previous: RowKey | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        first = _key_at(batch, 0)
        if (previous and first < previous) or not _is_batch_sorted(batch):
            return False
        previous = _key_at(batch, batch.num_rows - 1)
    return True


def _is_batch_sorted(batch: pa.RecordBatch) -> bool:
    groups = batch.column("group")
    times = batch.column("at")
    is_same_group = pc.equal(groups[1:], groups[:-1])
    is_later = pc.and_(is_same_group, pc.greater_equal(times[1:], times[:-1]))
    return bool(pc.all(pc.or_(is_later, pc.greater(groups[1:], groups[:-1])), min_count=0).as_py())


def sort_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows in order of group and time."""
    return rows.take(pc.sort_indices(rows, sort_keys=_ORDER))


def merge_runs(runs: Iterable[Batches], folder: RunFolder) -> Batches:
    """Yield the rows of all runs in order; if there are many runs, some are merged into one in the folder first."""
    remaining = list(runs)
    while len(remaining) > MAX_RUNS:
        merged = folder.write(_merge(remaining[:MAX_RUNS]))
        remaining = [*remaining[MAX_RUNS:], merged]
    return _merge(remaining)


def _merge(runs: Iterable[Batches]) -> Batches:
    """Yield the rows of all runs in order.

    Each step yields the rows up to `limit`, the lowest last row of the current batches, so that no later row is lower.
    """
    heads: list[_RunHead] = []
    for run in runs:
        heads += _next_head(run)
    while len(heads) > 1:
        limit = min(_key_at(head.rows, head.rows.num_rows - 1) for head in heads)
        parts: list[pa.RecordBatch] = []
        later_heads: list[_RunHead] = []
        for head in heads:
            count = bisect_right(range(head.rows.num_rows), limit, key=partial(_key_at, head.rows))
            if count:
                parts.append(head.rows.slice(0, count))
            if count < head.rows.num_rows:
                later_heads.append(_RunHead(head.rows.slice(count), head.batches))
            else:
                later_heads += _next_head(head.batches)
        heads = later_heads
        yield parts[0] if len(parts) == 1 else sort_rows(pa.concat_batches(parts))
    for head in heads:
        yield head.rows
        yield from head.batches


def _next_head(batches: Batches) -> list[_RunHead]:
    """Return the next rows of a run; none at its end."""
    for batch in batches:
        if batch.num_rows:
            return [_RunHead(batch, batches)]
    return []


def _key_at(rows: pa.RecordBatch, index: int) -> RowKey:
    return RowKey(rows.column("group")[index].as_py(), rows.column("at")[index].value)
