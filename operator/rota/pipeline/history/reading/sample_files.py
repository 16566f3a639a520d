"""Reads the files of a bucket of `lake/offsets`, which has a part of the groups, with pyarrow in Python workers.

Samples are nearly all data of a lake. Spark would turn their nested columns into rows, shuffle and sort these, and turn
them into Arrow's columns again, which takes several times as long as all other steps of a rollup together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from rota.object_store import StoreError
from rota.pipeline.history.reading.sorted_rows import (
    MAX_RUNS,
    Batches,
    RunFolder,
    is_sorted,
    merge_runs,
    sort_rows,
)
from rota.pipeline.lake.reading.arrow_rows import data_file_errors
from rota.pipeline.lake.snapshots import LakeSnapshot
from rota.pipeline.lake.storage import native_filesystem, open_filesystem
from rota.pipeline.lake.tables import RECORD_TABLES, Lake

KEY_COLUMNS = ("group", "at")
# A sample is of a single queue; a row has one of each queue of a group.
MAX_BUFFERED_SAMPLES = 500_000  # samples in the batches of all sorted runs that are merged
MAX_SORTED_SAMPLES = 2_000_000  # samples in each part of an unsorted file; a part is sorted in memory
_MAX_BATCH_SAMPLES = 250_000
_MAX_BATCH_ROWS = 65_536
_MAX_DECODED_ROWS = 128  # rows decoded at once: one may have ten thousand samples, though most of its file have few
_SAMPLE_BYTES = 40  # memory of a sample, with its part of the row
_READ_BUFFER_BYTES = 512 * 1024  # buffer of each column of an open file


@dataclass(frozen=True)
class SampleFiles:
    """Files of offsets: for each bucket, sizes by path below `uri`."""

    uri: str
    sizes_by_bucket: dict[int, dict[str, int]]

    def read(self, bucket: int, columns: Sequence[str], since: datetime | None = None) -> Batches:
        """Yield rows of a bucket in order of group and time, or only those of the time `since` and later.

        `columns`: KEY_COLUMNS, with or without `topics`.
        """
        sizes = self.sizes_by_bucket.get(bucket, {})
        filesystem = native_filesystem(self.uri) or open_filesystem(self.uri, sizes)
        merged_runs = max(min(len(sizes), MAX_RUNS), 1)  # runs that are merged at once, if all files are sorted
        max_samples = min(_MAX_BATCH_SAMPLES, MAX_BUFFERED_SAMPLES // merged_runs) or 1
        with RunFolder() as folder:
            runs: list[Batches] = []
            for path in sorted(sizes):
                file = _OffsetsFile(self.uri, path, filesystem, since)
                if is_sorted(file.read(KEY_COLUMNS, MAX_SORTED_SAMPLES)):
                    runs.append(file.read(columns, max_samples))
                else:
                    for rows in file.read(columns, MAX_SORTED_SAMPLES):
                        sorted_batches = _split(sort_rows(rows), MAX_SORTED_SAMPLES // max_samples)
                        runs.append(folder.write(sorted_batches))
            yield from merge_runs(runs, folder)


def list_sample_files(lake: Lake, snapshot: LakeSnapshot, since: date | None = None) -> SampleFiles:
    """Return the files of a snapshot, or those of the day `since` and later days."""
    table = lake.table(RECORD_TABLES["offsets"].name)
    sizes_by_bucket: dict[int, dict[str, int]] = {}
    for file in table.files(snapshot.version(table.name), since):
        bucket = int(file.partition["bucket"] or 0)
        sizes_by_bucket.setdefault(bucket, {})[file.path] = file.size_bytes
    return SampleFiles(table.uri, sizes_by_bucket)


def _split(rows: pa.RecordBatch, parts: int) -> Batches:
    step = -(-rows.num_rows // parts)  # rounded up
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)


def _drop_earlier(rows: pa.RecordBatch, since: datetime) -> pa.RecordBatch:
    is_late = pc.greater_equal(rows.column("at"), since)
    return rows if pc.all(is_late).as_py() else rows.filter(is_late)


def _join(batches: Batches, max_rows: int, max_bytes: int) -> Batches:
    """Join batches until they have `max_rows` rows or `max_bytes` bytes; leave out batches without rows."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    size_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
        if rows >= max_rows or size_bytes >= max_bytes:
            yield pa.concat_batches(waiting)
            waiting = []
            rows = 0
            size_bytes = 0
    if waiting:
        yield pa.concat_batches(waiting)


class _OffsetsFile:
    """A file of offsets."""

    def __init__(self, uri: str, path: str, filesystem: pa_fs.FileSystem, since: datetime | None) -> None:
        self._uri = uri
        self._path = path
        self._filesystem = filesystem
        self._since = since

    def read(self, columns: Sequence[str], max_samples: int) -> Batches:
        """Yield the rows in the file's order, in batches of about `max_samples` samples of single queues."""
        with self._errors():
            file = pq.ParquetFile(
                self._path, filesystem=self._filesystem, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False
            )
        with file, self._errors():
            batch_rows = file.metadata.num_rows * max_samples // max(_count_samples(file.metadata), 1)
            batch_size = max(1, min(_MAX_BATCH_ROWS, batch_rows))
            decoded_rows = batch_size if columns == KEY_COLUMNS else min(batch_size, _MAX_DECODED_ROWS)
            decoded = file.iter_batches(decoded_rows, columns=list(columns), use_threads=False)
            if self._since:
                decoded = map(partial(_drop_earlier, since=self._since), decoded)
            yield from _join(decoded, batch_size, max_samples * _SAMPLE_BYTES)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of a file into StoreError, the only error of a Python worker that the command line explains."""
        try:
            with data_file_errors(f"{self._uri}/{self._path}"):
                yield
        except ValueError as error:
            raise StoreError(str(error)) from error


def _count_samples(metadata: pq.FileMetaData) -> int:
    """Return the number of samples of single queues: the length of the longest columns, which are lists of samples."""
    count = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        count += max(group.column(column).num_values for column in range(metadata.num_columns))
    return count
