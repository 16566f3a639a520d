"""Reads journal segments in Spark's Python tasks: each line with its digest, whatever state the file is in.

A segment is a gzip file of lines. A file that is cut off or damaged gives the lines before the damage, and one more row
without a line, whose `broken` says what is wrong.
"""

import hashlib
import heapq
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from math import ceil
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, DateType

from rota.object_store import ObjectStore, open_store
from rota.object_store.segments import segment_hour
from rota.pipeline.common.schemas import TEXT, table_schema
from rota.pipeline.lake.runs import PlannedSegment

DATE_CHARACTERS = 10
DIGEST_BYTES = 16  # of SHA-256
TASK_BYTES = 4 * 2**20  # of compressed segments per task: some 50 MB of lines
PIECE_BYTES = 4 * 2**20  # decompressed at once
BATCH_BYTES = 4 * 2**20  # of lines per Arrow batch
MAX_LINE_BYTES = 64 * 2**20
GZIP_START = b"\x1f\x8b"

MISSING_REASON = "The segment was removed from the journal before it was read"
EMPTY_REASON = "The segment is empty, so it is no gzip file"
FORMAT_REASON = "The segment is no gzip file"
DAMAGED_REASON = "The segment is damaged: the lines after the damage cannot be read"
TRUNCATED_REASON = "The segment is truncated: its last lines are missing"
LONG_LINE_REASON = f"The segment has a line of more than {MAX_LINE_BYTES // 2**20} MB: it was read up to that line"

SEGMENT_LINES = table_schema(line=BinaryType(), file=TEXT, date=DateType(), digest=BinaryType(), broken=TEXT)
_ARROW_SCHEMA = pa.schema(
    {"line": pa.binary(), "file": pa.string(), "date": pa.date32(), "digest": pa.binary(), "broken": pa.string()}
)


class BrokenSegmentError(Exception):
    """A segment cannot be read to its end; the text is the reason for the quarantine."""


class SegmentLine(NamedTuple):
    """A line of a segment, or the reason why the segment has no further lines."""

    line: bytes | None
    broken: str | None


def read_segment_lines(spark: SparkSession, journal_uri: str, segments: Sequence[PlannedSegment]) -> DataFrame:
    """Return the lines of segments (SEGMENT_LINES); `line` becomes a string that need not be valid UTF-8."""
    total_bytes = sum(segment.size_bytes for segment in segments)
    tasks = max(spark.sparkContext.defaultParallelism, ceil(total_bytes / TASK_BYTES))
    shares = share_segments(segments, min(tasks, len(segments)))
    read = partial(_read_shares, journal_uri=journal_uri, shares=shares)
    lines = spark.range(0, len(shares), numPartitions=len(shares)).mapInArrow(read, SEGMENT_LINES)
    return lines.withColumn("line", lines["line"].cast("string"))


def share_segments(segments: Sequence[PlannedSegment], count: int) -> list[list[PlannedSegment]]:
    """Divide segments into shares of about the same size: the largest first, each to the smallest share."""
    shares: list[list[PlannedSegment]] = [[] for _ in range(count)]
    sizes = [(0, index) for index in range(count)]
    for segment in sorted(segments, key=lambda segment: (-segment.size_bytes, segment.key)):
        size, index = heapq.heappop(sizes)
        shares[index].append(segment)
        heapq.heappush(sizes, (size + segment.size_bytes, index))
    return shares


def _read_shares(
    batches: Iterator[pa.RecordBatch], *, journal_uri: str, shares: Sequence[Sequence[PlannedSegment]]
) -> Iterator[pa.RecordBatch]:
    """Read the shares whose numbers a task gets."""
    journal = open_store(journal_uri)
    for batch in batches:
        for number in batch.column("id").to_pylist():
            for segment in shares[number]:
                yield from _read_segment(journal, segment)


def _read_segment(journal: ObjectStore, segment: PlannedSegment) -> Iterator[pa.RecordBatch]:
    """Yield the lines of a segment in batches, each line once."""
    batch: dict[bytes, SegmentLine] = {}  # by digest
    batch_bytes = 0
    yielded: set[bytes] = set()
    for line in iterate_lines(journal, segment.key):
        digest = _digest(line, segment)
        if digest not in yielded:
            batch[digest] = line
            batch_bytes += len(line.line or b"")
        if batch_bytes >= BATCH_BYTES:
            yield _to_record_batch(segment, batch)
            yielded.update(batch)
            batch = {}
            batch_bytes = 0
    if batch:
        yield _to_record_batch(segment, batch)


def iterate_lines(journal: ObjectStore, key: str) -> Iterator[SegmentLine]:
    """Yield the lines of a segment as far as it can be read, then the reason if that is not its end."""
    rest = b""
    reason: str | None = None
    try:
        for piece in _decompress(journal.read(key)):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield SegmentLine(line, None)
            if len(rest) > MAX_LINE_BYTES:
                reason = LONG_LINE_REASON
                rest = b""
                break
    except FileNotFoundError:
        reason = MISSING_REASON
    except BrokenSegmentError as error:
        reason = str(error)
    if rest:  # a last line without a line break, or the part of it that can be read
        yield SegmentLine(rest, None)
    if reason:
        yield SegmentLine(None, reason)


def _decompress(data: bytes) -> Iterator[bytes]:
    """Yield the content of a gzip file of one or more members piece by piece."""
    if not data.startswith(GZIP_START):
        raise BrokenSegmentError(FORMAT_REASON if data else EMPTY_REASON)
    while data.startswith(GZIP_START):
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        while not member.eof:
            try:
                piece = member.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise BrokenSegmentError(DAMAGED_REASON) from None
            data = member.unconsumed_tail
            if not piece and not data and not member.eof:
                raise BrokenSegmentError(TRUNCATED_REASON)
            yield piece
        data = member.unused_data
    if data.strip(b"\0"):  # some tools fill the last block with zeros
        raise BrokenSegmentError(DAMAGED_REASON)


def _to_record_batch(segment: PlannedSegment, lines: Mapping[bytes, SegmentLine]) -> pa.RecordBatch:
    hour = segment_hour(segment.key)
    day = date.fromisoformat(hour[:DATE_CHARACTERS]) if hour else None
    count = len(lines)
    columns = [
        pa.array([line.line for line in lines.values()], pa.binary()),
        pa.array([segment.key] * count, pa.string()),
        pa.array([day] * count, pa.date32()),
        pa.array(list(lines), pa.binary()),
        pa.array([line.broken for line in lines.values()], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_ARROW_SCHEMA)


def _digest(line: SegmentLine, segment: PlannedSegment) -> bytes:
    """Return the digest of a line; that of a broken segment is its own."""
    content = line.line
    if content is None:
        content = f"{segment.key} {segment.etag}".encode()
    return hashlib.sha256(content).digest()[:DIGEST_BYTES]
