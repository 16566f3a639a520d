"""Segments of a journal as tables: lines that count once, quarantined lines, and segments that cannot be read."""

import gzip
from datetime import date
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.testing import assertSchemaEqual

from pipeline.lake_folders import count_records, ingest, reasons, table_rows, verdict_line, write_file, write_segment
from rota.pipeline.common.schemas import JOURNAL_SCHEMAS, QUARANTINE
from rota.pipeline.ingest import segment_lines
from rota.pipeline.ingest.extent import first_day
from rota.pipeline.ingest.segment_lines import iterate_lines
from rota.pipeline.ingest.shares import divide_segments
from rota.pipeline.lake.runs import PlannedSegment
from rota.pipeline.lake.tables import Lake
from rota.records import journal_record

LATER_SCHEMA = b'"schema":2'


def journal_line(kind: str, time: str, **fields: object) -> bytes:
    return msgspec.json.encode(journal_record(kind, "shop/orders", f"2026-11-21T{time}Z", **fields)) + b"\n"


def condition_line(time: str, status: str, reason: str) -> bytes:
    return journal_line("verdict", time, condition="Ready", status=status, reason=reason, message="")


# Lines that count once.


def test_ingest_counts_identical_lines_once_in_one_segment_and_across_segments(
    spark: SparkSession, tmp_path: Path
) -> None:
    repeated = journal_line("offsets", "08:00:00.000", topics={}, verdicts={})
    later_line = journal_line("offsets", "08:00:05.000", topics={}, verdicts={})
    write_segment(tmp_path, "08-a.jsonl.gz", repeated, repeated, later_line, b"torn\n", b"torn\n")
    write_segment(tmp_path, "08-b.jsonl.gz", repeated, b"torn\n")
    write_segment(tmp_path, "09-c.jsonl.gz", later_line)
    rows = ingest(spark, tmp_path).rows
    assert {kind: count for kind, count in rows.items() if count} == {"offsets": 2, "quarantine": 1}


# The tables.


def test_ingest_tables_have_the_documented_columns_and_a_digest(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    ingest(spark, tmp_path)
    lake = Lake(str(tmp_path))
    for kind, schema in (JOURNAL_SCHEMAS | {"quarantine": QUARANTINE}).items():
        rows = lake.read(spark, lake.snapshot(), f"lake/{kind}")
        assertSchemaEqual(rows.select(*schema.fieldNames()).schema, schema)
    [row] = table_rows(tmp_path, "verdict")
    assert set(row) == {*JOURNAL_SCHEMAS["verdict"].fieldNames(), "digest"}


def test_ingest_ledger_has_each_segment_with_its_lines_and_times(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1), verdict_line(3), b"torn\n")
    write_segment(tmp_path, "09-a.jsonl.gz")
    write_file(tmp_path, "notes.txt", b"no segment")
    assert ingest(spark, tmp_path).segments == 2
    rows = {str(row["key"]): row for row in table_rows(tmp_path, "files")}
    [first, empty] = [rows[f"date=2026-11-21/{hour}-a.jsonl.gz"] for hour in ("08", "09")]
    assert (first["lines"], first["run"], str(first["date"])) == (3, 1, "2026-11-21")
    times = [str(first[name])[11:19] for name in ("first_at", "last_at")]
    assert times == ["08:00:01", "08:00:03"]
    assert (empty["lines"], empty["first_at"]) == (0, None)


def test_ingest_spreads_groups_over_buckets_of_offsets(spark: SparkSession, tmp_path: Path) -> None:
    lines = [
        msgspec.json.encode(journal_record("offsets", f"shop/{number}", "2026-11-21T08:00:00Z", topics={}, verdicts={}))
        for number in range(9)
    ]
    write_segment(tmp_path, "08-a.jsonl.gz", b"\n".join(lines))
    ingest(spark, tmp_path)
    buckets = {row["group"]: row["bucket"] for row in table_rows(tmp_path, "offsets")}
    assert len(buckets) == 9
    assert len(set(buckets.values())) > 1
    assert count_records(tmp_path, "offsets") == 9


def test_lake_history_of_the_last_days_starts_on_the_first_of_them(spark: SparkSession, tmp_path: Path) -> None:
    for day in (20, 21, 22):
        line = verdict_line(day).replace(b"2026-11-21", f"2026-11-{day}".encode())
        write_segment(tmp_path, "08-a.jsonl.gz", line, day=f"date=2026-11-{day}")
    ingest(spark, tmp_path)
    lake = Lake(str(tmp_path))
    assert first_day(lake, lake.snapshot(), 2) == date(2026, 11, 21)
    assert first_day(lake, lake.snapshot(), 10**6) == date.min
    assert count_records(tmp_path, "verdict", date(2026, 11, 21)) == 2


# What goes to the quarantine.


def test_journal_lines_that_are_no_records_are_quarantined_with_a_reason(spark: SparkSession, tmp_path: Path) -> None:
    unknown_kind = journal_line("weather", "08:00:00")
    later_schema = journal_line("plan", "08:00:00").replace(b'"schema":1', LATER_SCHEMA)
    valid = verdict_line(1)
    write_segment(tmp_path, "08-a+b c.jsonl.gz", valid, unknown_kind, later_schema, b"\xff\n", valid[:30])
    ingest(spark, tmp_path)
    rows = sorted(table_rows(tmp_path, "quarantine"), key=lambda row: str(row["line"]))
    assert {(row["file"], str(row["date"])) for row in rows} == {("date=2026-11-21/08-a+b c.jsonl.gz", "2026-11-21")}
    assert [str(row["reason"]).partition(":")[0] for row in rows] == [
        "The line is incomplete, or not a journal record",
        "Record kind 'weather' is unknown to this version; skip the record",
        "The record has schema 2; this version reads 1",
        "The line is incomplete, or not a journal record",
    ]
    assert rows[-1]["line"] == "\N{REPLACEMENT CHARACTER}"
    assert reasons(tmp_path) == ["R1"]


WHOLE = gzip.compress(b"".join(verdict_line(number) for number in range(50)))
BROKEN_SEGMENTS = {
    "truncated": (WHOLE[:-4], segment_lines.TRUNCATED_REASON),
    "damaged": (WHOLE[:-8] + b"\0" * 8, segment_lines.DAMAGED_REASON),
    "followed": (WHOLE + b"more", segment_lines.DAMAGED_REASON),
    "plain": (verdict_line(1), segment_lines.FORMAT_REASON),
    "nothing": (b"", segment_lines.EMPTY_REASON),
}


def test_ingest_reads_a_broken_segment_up_to_the_damage_and_quarantines_the_reason(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name, (content, _) in BROKEN_SEGMENTS.items():
        write_file(tmp_path, f"08-{name}.jsonl.gz", content)
    ingest(spark, tmp_path)
    reasons_by_segment = {
        str(row["file"]).rpartition("-")[2]: row["reason"] for row in table_rows(tmp_path, "quarantine")
    }
    assert reasons_by_segment == {f"{name}.jsonl.gz": reason for name, (_, reason) in BROKEN_SEGMENTS.items()}
    assert len(reasons(tmp_path)) == 50
    assert ingest(spark, tmp_path).segments == 0


@pytest.mark.parametrize("size", [*range(0, len(WHOLE), 7), len(WHOLE)])
def test_ingest_reads_whole_lines_of_a_segment_that_is_truncated_anywhere(tmp_path: Path, size: int) -> None:
    path = write_file(tmp_path, "08-a.jsonl.gz", WHOLE[:size])
    lines = list(iterate_lines(path.read_bytes()))
    texts = [line.line for line in lines if line.line is not None]
    assert b"\n".join(texts) in gzip.decompress(WHOLE)
    expected = [segment_lines.EMPTY_REASON if not size else segment_lines.TRUNCATED_REASON]
    assert [line.reason for line in lines if line.reason] == ([] if size == len(WHOLE) else expected)


def test_ingest_reads_a_segment_of_several_gzip_members_and_zeros_at_its_end(tmp_path: Path) -> None:
    path = write_file(tmp_path, "08-a.jsonl.gz", gzip.compress(b"a\nb") + gzip.compress(b"c\n\nd") + bytes(512))
    lines = list(iterate_lines(path.read_bytes()))
    assert [(line.line, line.reason) for line in lines] == [(b"a", None), (b"bc", None), (b"", None), (b"d", None)]


def test_ingest_stops_reading_a_segment_at_a_line_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_lines, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(segment_lines, "PIECE_BYTES", 50)
    path = write_file(tmp_path, "08-a.jsonl.gz", gzip.compress(b"a\n" + b"x" * 1000 + b"\nb\n"))
    lines = list(iterate_lines(path.read_bytes()))
    assert [(line.line, line.reason) for line in lines] == [(b"a", None), (None, segment_lines.LONG_LINE_REASON)]


def test_ingest_tasks_get_segments_of_about_the_same_size() -> None:
    segments = [PlannedSegment(f"date=2026-11-21/08-{size}.jsonl.gz", size, "") for size in (9, 1, 5, 4, 1)]
    shares = divide_segments(segments, 2)
    assert sorted(sum(segment.size_bytes for segment in share) for share in shares) == [10, 10]


def test_ingest_tasks_get_consecutive_segments_of_few_days() -> None:
    segments = [
        PlannedSegment(f"date=2026-11-{day}/0{hour}-a.jsonl.gz", 100 + hour, "")
        for day in (21, 22, 23)
        for hour in range(4)
    ]
    shares = divide_segments(segments, 6)
    assert list(chain(*shares)) == segments
    assert [len({segment.key[:15] for segment in share}) for share in shares] == [1] * 6


def test_ingest_tasks_have_a_segment_each_though_one_has_nearly_all_bytes() -> None:
    sizes = (0, 0, 1000, 1)
    segments = [PlannedSegment(f"date=2026-11-21/0{hour}-a.jsonl.gz", size, "") for hour, size in enumerate(sizes)]
    for count in range(1, 5):
        shares = divide_segments(segments, count)
        assert all(shares)
        assert list(chain(*shares)) == segments
    assert divide_segments(segments[:2], 2) == [segments[:2]]
