"""Ingests a share of a run's segments: reads each segment once, and writes the rows of all kinds to files.

A share is the work of one task of Spark or, in a small run, of the driver. The files belong to no version of a table
until the driver commits them; a share that is repeated writes new files.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rota.garbage_collection import paused_garbage_collection
from rota.object_store import ObjectStore, open_store
from rota.object_store.segments import segment_hour
from rota.pipeline.ingest.rows import TABLES_BY_KIND, LineBatch
from rota.pipeline.ingest.segment_lines import SegmentLine, iterate_lines
from rota.pipeline.lake.data_files import DataFile, FileTarget, write_rows
from rota.pipeline.lake.runs import PlannedSegment

DATE_CHARACTERS = 10
DIGEST_BYTES = 16  # first bytes of SHA-256
SHORT_DIGEST_BYTES = 8  # first bytes of a digest: if these differ, two lines differ
BATCH_BYTES = 4 * 2**20  # size of lines that are converted at once
READERS = 16  # concurrent requests: to read a small segment from a bucket takes longer than to convert its lines
FLUSH_BYTES = 96 * 2**20  # rows in memory are written at this size; a process needs about five times as much memory


class SegmentCounts(NamedTuple):
    """Number of a segment's distinct lines, and the times of its first and last record; None without a record."""

    key: str
    size_bytes: int  # of the segment, as it was listed
    etag: str
    is_missing: bool = False
    lines: int = 0
    first_at: datetime | None = None
    last_at: datetime | None = None


@dataclass
class KindRows:
    """The rows of one kind that a share has written, and the times of the first and last one; None without times."""

    files: list[DataFile] = field(default_factory=list)
    short_digests: bytes = b""  # of each row, one after the other
    first_at: datetime | None = None
    last_at: datetime | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.short_digests) // SHORT_DIGEST_BYTES

    def extend(self, other: "KindRows") -> None:
        """Add the rows of another share."""
        self.files += other.files
        self.short_digests += other.short_digests
        self.first_at = min_time(self.first_at, other.first_at)
        self.last_at = max_time(self.last_at, other.last_at)


class ShareResult(NamedTuple):
    """What a share has read and written."""

    segments: list[SegmentCounts]
    rows: dict[str, KindRows]  # by kind


def min_time(first: datetime | None, second: datetime | None) -> datetime | None:
    """Return the earlier of two times; None is no time."""
    return min(first, second) if first and second else first or second


def max_time(first: datetime | None, second: datetime | None) -> datetime | None:
    """Return the later of two times; None is no time."""
    return max(first, second) if first and second else first or second


def divide_segments(segments: Sequence[PlannedSegment], count: int) -> list[list[PlannedSegment]]:
    """Divide segments into at most `count` shares of about the same size, each of consecutive segments.

    A share writes a file for each of its days and buckets. With segments in order of their hours, it has few days.
    """
    total_bytes = max(sum(segment.size_bytes for segment in segments), 1)
    shares: list[list[PlannedSegment]] = [[] for _ in range(count)]
    start = 0
    for segment in segments:
        middle = start + segment.size_bytes / 2
        shares[min(int(middle * count / total_bytes), count - 1)].append(segment)
        start += segment.size_bytes
    return list(filter(None, shares))


def ingest_share(segments: Sequence[PlannedSegment], *, journal_uri: str, lake_uri: str, label: str) -> ShareResult:
    """Write the rows of segments to files, whose names begin with a label, each line once."""
    share = ShareWriter(open_store(lake_uri), label)
    read = partial(_read_segment, open_store(journal_uri))
    # The collector would take two thirds of the time.
    with paused_garbage_collection(), ThreadPoolExecutor(READERS) as pool:
        counts = list(map(share.add, segments, pool.map(read, segments)))
        share.flush()
    return ShareResult(counts, share.written)


def _read_segment(journal: ObjectStore, segment: PlannedSegment) -> bytes | None:
    try:
        return journal.read(segment.key)
    except FileNotFoundError:
        return None


class ShareWriter:
    """Collects the rows of segments in memory, and writes them when there are many."""

    def __init__(self, lake: ObjectStore, label: str) -> None:
        self._lake = lake
        self._label = label
        self._last_segments: dict[bytes, str] = {}  # by digest of each line: the key of the last segment that has it
        self._rows: dict[str, list[pa.RecordBatch]] = {}  # not written yet, by kind
        self._row_bytes = 0
        self.written: dict[str, KindRows] = {}

    def add(self, segment: PlannedSegment, content: bytes | None) -> SegmentCounts:
        """Add rows of the lines that no earlier segment of the share has; count all distinct lines of the segment."""
        counts = SegmentCounts(segment.key, segment.size_bytes, segment.etag, is_missing=content is None)
        batch = LineBatch()
        for line in iterate_lines(content):
            digest = _digest(line, segment)
            last_segment = self._last_segments.get(digest)
            if last_segment == segment.key:  # the segment repeats the line
                continue
            self._last_segments[digest] = segment.key
            at = batch.add(line, digest, is_new=last_segment is None)
            counts = counts._replace(
                lines=counts.lines + 1,
                first_at=min_time(counts.first_at, at),
                last_at=max_time(counts.last_at, at),
            )
            if batch.size_bytes >= BATCH_BYTES:
                self._add_rows(segment, batch)
                batch = LineBatch()
        self._add_rows(segment, batch)
        return counts

    def _add_rows(self, segment: PlannedSegment, batch: LineBatch) -> None:
        for kind, rows in batch.to_rows(segment.key, segment_day(segment.key)).items():
            self._rows.setdefault(kind, []).append(rows)
            self._row_bytes += rows.nbytes
        if self._row_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are in memory."""
        for kind, batches in self._rows.items():
            rows = pa.Table.from_batches(batches)
            files = write_rows(rows, FileTarget(self._lake, TABLES_BY_KIND[kind], self._label))
            self.written.setdefault(kind, KindRows()).extend(_describe_rows(rows, files))
        self._rows = {}
        self._row_bytes = 0


def _describe_rows(rows: pa.Table, files: list[DataFile]) -> KindRows:
    digests = b"".join(digest[:SHORT_DIGEST_BYTES] for digest in rows["digest"].to_pylist())
    if "at" not in rows.column_names:
        return KindRows(files, digests)
    times = pc.min_max(rows["at"])
    return KindRows(files, digests, times["min"].as_py(), times["max"].as_py())


def segment_day(key: str) -> date:
    """Return the day in the key of a segment; raise ValueError for other keys, which no plan contains."""
    hour = segment_hour(key)
    if hour is None:
        raise ValueError(f"{key} is not the name of a segment, such as date=2026-11-21/08-NAME.jsonl.gz")
    return date.fromisoformat(hour[:DATE_CHARACTERS])


def _digest(line: SegmentLine, segment: PlannedSegment) -> bytes:
    """Return the digest of a line, or, at the end of a broken segment, that of the segment's key and ETag."""
    content = line.line
    if content is None:
        content = f"{segment.key} {segment.etag}".encode()
    return hashlib.sha256(content).digest()[:DIGEST_BYTES]
