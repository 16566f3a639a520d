"""When segments are closed, retried and dropped."""

import msgspec
import pytest

from rota.kube.telemetry.journal.segment_rules import (
    ClosedSegment,
    LostRecords,
    OpenSegment,
    count_lost,
    first_time,
    parse_spool_path,
    retry_seconds,
    seconds_until_close,
    segment_bytes,
    segments_to_close,
    segments_to_drop,
    spool_file,
    spool_folder,
    whole_lines,
)
from rota.object_store.segments import SegmentName

NAME = SegmentName("2026-11-21T08", "rota-6c8d-x2", "0f8e1c5a", "20261121T075812Z", 3)
AT = "2026-11-21T08:00:00.000Z"
SINCE = "2026-11-21T07:00:00.000Z"
GAP = {"schema": 1, "kind": "gap", "at": "2026-11-21T09:12:40.002Z", "since": SINCE, "missing": 41}
PLAN = {"schema": 1, "kind": "plan", "at": AT}


def opened(hour: int, opened_at: float, size_bytes: int = 10) -> OpenSegment:
    return OpenSegment(NAME._replace(hour=f"2026-11-21T{hour:02}"), opened_at, size_bytes)


def closed(sequence: int, size_bytes: int) -> ClosedSegment:
    return ClosedSegment(NAME._replace(sequence=sequence), size_bytes, 1)


def encode_lines(*lines: dict[str, object]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def test_journal_segment_is_closed_after_a_minute_or_when_it_is_large() -> None:
    segments = [opened(8, 40.0), opened(9, 41.0), opened(10, 99.0, 1000)]
    assert segments_to_close(segments, 100.5, 1000) == [segments[0], segments[2]]
    assert seconds_until_close(segments[1:2], 100.5) == 0.5
    assert seconds_until_close(segments, 200.0) == 0.0
    assert seconds_until_close([], 200.0) is None


def test_journal_clock_that_jumps_through_hours_keeps_four_segments_open() -> None:
    segments = [opened(hour, float(hour)) for hour in range(6)]
    assert segments_to_close(segments, 6.0, 1000) == segments[:2]


def test_journal_segments_are_small_where_the_limit_is() -> None:
    assert segment_bytes(2**40) == 16 * 2**20
    assert segment_bytes(2**20) == 20_971


def test_journal_spool_drops_the_oldest_segments_beyond_its_limit() -> None:
    segments = [closed(number, 100) for number in range(5)]
    assert segments_to_drop(segments, 500, 500) == []
    assert segments_to_drop(segments, 601, 500) == segments[:2]
    assert segments_to_drop([], 601, 500) == []


def test_journal_pause_after_failures_grows_to_a_minute() -> None:
    assert [retry_seconds(number) for number in (1, 2, 3, 4, 5, 10_000)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_journal_lost_segment_counts_the_gaps_that_it_reports() -> None:
    segment = ClosedSegment(NAME, 100, None)
    assert count_lost(segment, encode_lines(PLAN, PLAN)) == LostRecords(2, AT)
    assert count_lost(segment, encode_lines(PLAN, GAP, PLAN)) == LostRecords(2, SINCE, reported=41)
    assert count_lost(segment, b"") == LostRecords(0, AT)
    damaged = [b"{not json\n", b"123\n", b'{"at":5}\n', b'{"kind":"gap","missing":-1}\n', 100_000 * b"[" + b"\n"]
    assert count_lost(segment, encode_lines(GAP) + b"".join(damaged)) == LostRecords(5, SINCE, reported=41)


def test_journal_lost_segment_counts_the_records_that_its_file_lacks() -> None:
    segment = ClosedSegment(NAME, 100, 5, since=AT)
    assert count_lost(segment, encode_lines(PLAN, GAP)) == LostRecords(4, SINCE, reported=41)


def test_journal_incomplete_line_at_the_end_is_no_record() -> None:
    assert whole_lines(b'{"a":1}\n{"b"') == b'{"a":1}\n'
    assert whole_lines(b'{"b"') == b""
    assert whole_lines(b'{"a":1}\n\0\0\0"b"}\n{"c":1}\n') == b'{"a":1}\n{"c":1}\n'


def test_journal_time_of_the_first_line_is_known_where_it_has_one() -> None:
    assert first_time(encode_lines(PLAN, GAP)) == AT
    assert [first_time(line) for line in (b"", b"{", b"[]\n", b"{}\n")] == [""] * 4


def test_journal_spool_paths_are_read_back() -> None:
    assert (spool_folder(NAME), spool_file(NAME)) == (
        "rota-6c8d-x2-0f8e1c5a-20261121T075812Z",
        "2026-11-21T08-000003.jsonl",
    )
    assert spool_folder(NAME._replace(hour="")) == spool_folder(NAME)
    assert parse_spool_path(spool_folder(NAME), spool_file(NAME)) == NAME


@pytest.mark.parametrize("file", ["lock", "2026-11-21T08-000003.jsonl.gz", "2026-11-21T25-000003.jsonl", "notes.jsonl"])
def test_journal_other_files_in_the_spool_are_no_segments(file: str) -> None:
    assert parse_spool_path(spool_folder(NAME), file) is None
    assert parse_spool_path("a folder", spool_file(NAME)) is None
