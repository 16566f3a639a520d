"""When segments are closed, retried and dropped, and their names in the spool: decisions without I/O."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec

from rota.object_store.segments import SUFFIX, SegmentName, parse_segment

SEGMENT_SECONDS = 60.0  # from a segment's first record until it is shipped
SEGMENT_BYTES = 16 * 2**20  # a segment that reaches this size is shipped at once
SEGMENTS_PER_LIMIT = 50  # with a small limit, a segment closes at a fiftieth of it instead of at SEGMENT_BYTES
MAX_OPEN_SEGMENTS = 4  # one for each hour; after a clock was changed, records of several hours are written
RETRY_SECONDS = 5.0  # pause after the first failure; it doubles with each further one
MAX_RETRY_SECONDS = 60.0  # longest pause
SPOOL_SUFFIX = ".jsonl"

_SPOOL_FILE = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d)-(\d{6,12})\.jsonl", re.ASCII)
_GAP = b'"kind":"gap"'  # in the lines of `gap` records, which report how many records were dropped


class _LineFields(msgspec.Struct):
    """The fields of a line from which losses are counted."""

    at: str = ""
    since: str = ""  # of a gap
    missing: Annotated[int, msgspec.Meta(ge=0)] | None = None  # of a gap


_decode = msgspec.json.Decoder(_LineFields).decode
_NO_FIELDS = _LineFields()


class OpenSegment(NamedTuple):
    """A segment that records are appended to."""

    name: SegmentName
    opened_at: float  # of the monotonic clock
    size_bytes: int
    records: int = 0
    since: str = ""  # time of the first record


class ClosedSegment(NamedTuple):
    """A segment in the spool that is complete."""

    name: SegmentName
    size_bytes: int
    records: int | None  # None: not known, since another process has written the segment
    since: str = ""  # time of the first record; empty: not known
    failure: str = ""  # error of the disk when the file was closed; empty: none

    @property
    def earliest(self) -> str:
        """A time that none of its records precedes."""
        return self.since or f"{self.name.hour}:00:00.000Z"


class LostRecords(NamedTuple):
    """Records that are dropped with a segment."""

    records: int
    since: str  # time of the first one
    reported: int = 0  # losses reported by `gap` records in the segment; already counted, so not in `records`


def segment_bytes(limit_bytes: int) -> int:
    """Return the size at which a segment is closed."""
    return min(SEGMENT_BYTES, limit_bytes // SEGMENTS_PER_LIMIT)


def segments_to_close(segments: Collection[OpenSegment], now: float, max_bytes: int) -> list[OpenSegment]:
    """Return the open segments that are old or large enough, and the oldest if more than MAX_OPEN_SEGMENTS are open."""
    by_age = sorted(segments, key=lambda segment: segment.opened_at)
    surplus_count = max(len(by_age) - MAX_OPEN_SEGMENTS, 0)
    surplus = by_age[:surplus_count]
    return [
        segment
        for segment in by_age
        if segment in surplus or segment.size_bytes >= max_bytes or now >= segment.opened_at + SEGMENT_SECONDS
    ]


def seconds_until_close(segments: Iterable[OpenSegment], now: float) -> float | None:
    """Return the seconds until the next open segment has to be closed; None if no segment is open."""
    remaining = [segment.opened_at + SEGMENT_SECONDS - now for segment in segments]
    return max(min(remaining), 0.0) if remaining else None


def segments_to_drop(closed: Sequence[ClosedSegment], spool_bytes: int, max_bytes: int) -> list[ClosedSegment]:
    """Return the oldest closed segments, as many as must be dropped so that the spool does not exceed its limit."""
    dropped: list[ClosedSegment] = []
    for segment in closed:
        if spool_bytes <= max_bytes:
            break
        dropped.append(segment)
        spool_bytes -= segment.size_bytes
    return dropped


def retry_seconds(failures: int) -> float:
    """Return the pause before the next attempt, after a number of failures in sequence."""
    return min(RETRY_SECONDS * 2.0 ** min(failures - 1, 10), MAX_RETRY_SECONDS)


def whole_lines(data: bytes) -> bytes:
    """Return data without incomplete lines: a last line that a full disk or a kill cut off, and lines with zeros."""
    whole = data[: data.rfind(b"\n") + 1]
    if b"\0" not in whole:
        return whole
    return b"".join(line + b"\n" for line in whole.split(b"\n")[:-1] if b"\0" not in line)


def first_time(lines: bytes) -> str:
    """Return the time of the first line; empty: it has none."""
    return _decode_fields(lines.partition(b"\n")[0]).at


def _decode_fields(line: bytes) -> _LineFields:
    try:
        return _decode(line)
    except (ValueError, RecursionError):  # not a line that an operator has written
        return _NO_FIELDS


def count_lost(segment: ClosedSegment, lines: bytes) -> LostRecords:
    """Return the records that are lost if a segment is dropped; a `gap` record counts as the losses that it reports."""
    records = count_missing(segment, lines)
    reported = 0
    times = [segment.since] if segment.since else []
    for line in lines.splitlines():
        # Decode only gaps, and lines until a time is known, since decoding all lines is slow.
        fields = _decode_fields(line) if _GAP in line or not times else _NO_FIELDS
        if fields.missing is None:
            records += 1
        else:
            reported += fields.missing
        times += filter(None, (fields.at, fields.since))
    return LostRecords(records, min(times, default=segment.earliest), reported)


def count_missing(segment: ClosedSegment, lines: bytes) -> int:
    """Return how many of the records written to a segment are missing in these lines."""
    return max((segment.records or 0) - lines.count(b"\n"), 0)


def spool_file(name: SegmentName) -> str:
    """Return the name of a segment's file in the spool, below the folder of its process."""
    return f"{name.hour}-{name.sequence:06}{SPOOL_SUFFIX}"


def spool_folder(name: SegmentName) -> str:
    """Return the name of a process' folder in the spool, such as rota-0-1a2b3c-20261121T075812Z."""
    key = name._replace(hour="2026-01-01T00", sequence=0).key  # any hour and sequence will do, since they are cut off
    return key.partition("/")[2][len("00-") : -len(f"-000000{SUFFIX}")]


def is_spool_folder(folder: str) -> bool:
    """Whether a folder has the name of a process' folder in the spool."""
    return parse_spool_path(folder, f"2026-01-01T00-000000{SPOOL_SUFFIX}") is not None


def parse_spool_path(folder: str, file: str) -> SegmentName | None:
    """Return the segment of a file in the spool; None if it is none."""
    match = _SPOOL_FILE.fullmatch(file)
    return parse_segment(f"date={match[1]}/{match[2]}-{folder}-{match[3]}{SUFFIX}") if match else None
