"""A line is quarantined exactly when the official reader rejects it; kept rows equal the records of that reader."""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from pipeline.lake_folders import write_segment
from rota.object_store import open_store
from rota.pipeline.common.schemas import JOURNAL_SCHEMAS
from rota.pipeline.ingest.batch import ingest_journal
from rota.pipeline.ingest.rows import TABLES_BY_KIND, LineBatch
from rota.pipeline.ingest.segment_lines import SegmentLine
from rota.pipeline.lake.data_files import FileTarget, write_rows
from rota.pipeline.lake.tables import Lake
from rota.ranges import from_ranges
from rota.records import decode_record, journal_record

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
EXAMPLES = [block.encode() for block in re.findall(r"^```json\n(.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)]
OFFSETS = EXAMPLES[6]
DAY = date(2026, 11, 21)
VALUES: list[Any] = [None, True, -1, 0, 1.5, "", "1", "2026-11-21T09:00:00", "2026-13-21T09:00:00Z", [], [None], {}]
SPELLINGS = {  # spellings of parts of an offsets record
    b"1500": rb"01500|1500.0|15e2|+1500|NaN|-0|'1500'|1500,|1 500|9223372036854775807",
    b"5.012Z": rb"5Z|5.012z|5.012+08:00|5.012+0800|5.012|65.012Z|5.0123456789Z|5.012Z\n|5.012Z ",
    b'"schema":1': rb'"schema":0|"schema":2|"schema": 1|"schema":1.0|"schema":"1"|"schema":1,"schema":2',
    b"shop/orders": b'shop\\u002forders|shop\torders|shop\xff|a\\"b|\xe3\x82\xb7|\\ud800||a\x7fb',
    b'"Slow":1': rb'"Slow":1,|"Slow":1,"Slow":-1|"Slow":-1|"Slow":1.0|"Slow":null|"Slow":99999999999999999',
    b"null]": rb'null,null]|null,]|]|null]]|null],"ids":[1]|null],"more":[{"a":{}}]|"1"]',
    b"]}}}": b"|".join(
        [
            rb']}},|]}},"broker-b":null}}|]}},"broker-b":{}}}|]}}},"topics":null|]}}},"at":null|]}}},"kind":"plan"',
            rb']}}},"verdicts":{}} junk{"a":{"b":{}}}|]}}},"weather":{"at":1}|]}},"orders":{}}|]}},"orders":[]}',
        ]
    ),
    # A repeated key: the reader checks each of its values, though it keeps only the last.
    b'"topics":': b"|".join(
        [
            rb'"topics":{},"topics":|"topics":null,"topics":|"topics":{"a":null},"topics":|"topics":{"a":{}},"topics":',
            rb'"topics":{"a":{"b":{"ids":[1],"first":[],"last":[],"committed":[]}}},"topics":',
            rb'"topics":{},"verdicts":{"Slow":-1},"topics":',
        ]
    ),
    b'"orders":': b"|".join(
        [
            rb'"orders":{},"orders":|"orders":null,"orders":|"orders":{"b":null},"orders":',
            rb'"orders":{"b":{"ids":[-1],"first":[0],"last":[0],"committed":[0]}},"orders":',
        ]
    ),
    b'"broker-a":': b"|".join(
        [
            rb'"broker-a":null,"broker-a":|"broker-a":{"ids":[],"first":[],"last":[],"committed":[]},"broker-a":',
            rb'"broker-a":{"ids":[-1],"first":[0],"last":[0],"committed":[0]},"broker-a":',
        ]
    ),
    b'"ids":': rb'"ids":[],"ids":|"ids":[-1],"ids":|"ids":null,"ids":',
    b'"first":': rb'"first":[],"first":|"first":[null],"first":|"first":null,"first":',
    b'"committed":': rb'"committed":[null],"committed":|"committed":null,"committed":',
    b'"KeepingUp":': rb'"KeepingUp":1,"KeepingUp":|"KeepingUp":null,"KeepingUp":',
}


def lines() -> Iterator[bytes]:
    yield from (b"", b"null", b"[]", b"{}", b"[" * 3000, b"\xef\xbb\xbf" + OFFSETS, b"[" + OFFSETS + b"]")
    for line in EXAMPLES:
        yield line
        yield from (line + suffix for suffix in (b" ", b"\r", b"\xe2\x80\xa8", b"}", b"x", b"//", b"{}", line, b"\0"))
        yield from (line[:end] for end in range(0, len(line), 7))
        yield from (line[:position] + b"\0" + line[position + 1 :] for position in range(0, len(line), 23))
        yield line.replace(b'":', b'" : ').replace(b",", b" , ")
        yield from mutated_records(msgspec.json.decode(line))
    for old, replacements in SPELLINGS.items():
        assert old in OFFSETS
        yield from (OFFSETS.replace(old, new, 1) for new in replacements.split(b"|"))
    yield OFFSETS.replace(b"orders", b"verdicts")
    yield OFFSETS.replace(b'"orders"', b'"at"')
    yield from damaged_lines(Random(7))


def mutated_records(record: dict[str, Any]) -> Iterator[bytes]:
    """Yield a record in which a value, on any level, is missing or replaced."""
    for path in value_paths(record):
        yield msgspec.json.encode(replace_value(record, path, leave_out=True))
        yield from (msgspec.json.encode(replace_value(record, path, value)) for value in VALUES)
    yield msgspec.json.encode({**record, "weather": {"rain": [1]}})
    yield msgspec.json.encode(dict(reversed(record.items())))


def value_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, child in children:
        yield (*path, name)
        yield from value_paths(child, (*path, name))


def replace_value(container: Any, path: tuple[Any, ...], value: Any = None, *, leave_out: bool = False) -> Any:
    copy = dict(container) if isinstance(container, dict) else list(container)
    name, *inner_path = path
    if inner_path:
        copy[name] = replace_value(copy[name], tuple(inner_path), value, leave_out=leave_out)
    elif leave_out:
        del copy[name]
    else:
        copy[name] = value
    return copy


def damaged_lines(random: Random) -> Iterator[bytes]:
    """Yield offsets records in which some bytes are replaced, repeated or missing."""
    for _ in range(1500):
        line = bytearray(OFFSETS)
        for _ in range(random.randint(1, 2)):
            start = random.randrange(len(line))
            end = min(start + random.choice([0, 1, 1, 5]), len(line))
            line[start:end] = random.choice(
                [b"", b"0", b'"', b"}", b",", b"[", b"\\", b"\n", bytes(line[start:end]) * 2]
            )
        yield bytes(line)


def rejection_of(line: bytes) -> str | None:
    """Return why a line is rejected: by the reader, or for an impossible time."""
    try:
        record = decode_record(line)
        for queues in queue_ranges(msgspec.to_builtins(record)):
            from_ranges(queues)
    except ValueError as error:
        return str(error)
    times = [getattr(record, name, record.at) for name in ("at", "began", "since")]
    return None if all(2020 <= time.year < 2100 for time in times) else "Rota did not exist at that time"


def queue_ranges(value: Any) -> Iterator[dict[str, dict[str, str]]]:
    """Return all queues that a record names as ranges."""
    if isinstance(value, dict):
        for name, child in value.items():
            if name in {"queues", "unowned"} and isinstance(child, dict):
                yield child
            else:
                yield from queue_ranges(child)
    elif isinstance(value, list):
        for child in value:
            yield from queue_ranges(child)


def rows_of(lines: Iterable[bytes]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a segment's lines by kind; each row's digest is its line."""
    batch = LineBatch()
    for line in lines:
        batch.add(SegmentLine(line, None), line, is_new=True)
    rows = batch.to_rows("a.jsonl.gz", DAY)
    return {kind: kind_rows.to_pylist(maps_as_pydicts="strict") for kind, kind_rows in rows.items()}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    return rows_of(all_lines)


all_lines = [*dict.fromkeys(lines())]


def test_ingest_quarantines_exactly_the_lines_the_official_reader_rejects(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    rejected = {row["digest"]: row["reason"] for row in rows["quarantine"]}
    row_digests = {row["digest"] for kind in JOURNAL_SCHEMAS for row in rows[kind]}
    assert rejected.keys() == {line for line in all_lines if rejection_of(line) is not None}
    assert row_digests == {line for line in all_lines if rejection_of(line) is None}
    assert sum(map(len, rows.values())) == len(all_lines)
    assert all(rejected.values())
    assert len(row_digests) > 300
    assert len(rejected) > 2000


@pytest.mark.parametrize("kind", JOURNAL_SCHEMAS)
def test_ingest_rows_equal_the_records_of_the_official_reader(rows: dict[str, list[dict[str, Any]]], kind: str) -> None:
    assert rows[kind]
    for row in rows[kind]:
        record = decode_record(row["digest"])
        expected = expected_row(record, kind)
        assert row["date"] == record.at.astimezone(UTC).date()
        assert {name: row[name] for name in expected} == expected
        assert row.keys() - expected.keys() <= {"date", "digest", "bucket", "from", "fromUid", "to", "toUid"}


def expected_row(record: Any, kind: str) -> dict[str, Any]:
    """Return a record's fields as the rows of tables have them."""
    fields = msgspec.json.decode(msgspec.json.encode(record))
    for name in ("at", "began", "since"):
        if name in fields:
            fields[name] = datetime.fromisoformat(fields[name])
    if kind == "owners":
        fields["rules"] = msgspec.json.encode(fields["rules"]).decode()
    if kind in {"membership", "owners"}:
        fields["members"] = {name: {**pod, "room": pod.get("room")} for name, pod in fields["members"].items()}
    return {name: value for name, value in fields.items() if name not in {"schema", "kind"}}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"1500", b"9223372036854775808", "it has an integer beyond 64 bits"),
        (b"1500", b"-" + b"9" * 30, "it has an integer beyond 64 bits"),
        (b"[0,1,2,3]", b"[0,1,2,2147483648]", "it has a queue whose id is beyond 32 bits"),
        (b'"at":"2026', b'"at":"1970', "its year is 1970, so its clock was wrong"),
        (b'"at":"2026', b'"at":"9999', "its year is 9999, so its clock was wrong"),
    ],
)
def test_ingest_rejects_oversized_integers_and_impossible_years(old: bytes, new: bytes, reason: str) -> None:
    line = OFFSETS.replace(old, new, 1)
    decode_record(line)
    rows = rows_of([OFFSETS, line])
    assert [row["digest"] for row in rows["offsets"]] == [OFFSETS]
    assert [row["reason"] for row in rows["quarantine"]] == [f"The record cannot be kept: {reason}"]


def test_ingest_of_only_oversized_records_writes_no_rows_of_their_kind(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    journal = open_store(str(tmp_path / "journal"))
    for number, end_offset in enumerate((b"1500", b"9223372036854775808")):
        write_segment(tmp_path, f"08-{number}.jsonl.gz", OFFSETS.replace(b"1500", end_offset, 1) + b"\n")
        rows = ingest_journal(start_no_spark, lake, journal).rows
        assert (rows["offsets"], rows["quarantine"]) == (1 - number, number)


def start_no_spark() -> SparkSession:
    raise AssertionError("a small run needs no Spark")


@pytest.mark.parametrize("line", [EXAMPLES[1], EXAMPLES[5]])
def test_ingest_rejects_oversized_integers_of_other_records(line: bytes) -> None:
    record = msgspec.json.decode(line)
    record["generation"] = 2**63
    [row] = rows_of([msgspec.json.encode(record)])["quarantine"]
    assert row["reason"] == "The record cannot be kept: it has an integer beyond 64 bits"


def test_ingest_rejects_unreadable_queue_ranges() -> None:
    fields = {"act": "Drop", "proof": "Ended", "state": "Owned"}
    lines = [
        msgspec.json.encode(
            journal_record("handover", "g", "2026-11-21T08:00:00Z", generation=1, queues={"t": {"a": ids}}, **fields)
        )
        for ids in ("0-3", "nonsense", "0-2147483646")
    ]
    for line in lines:
        decode_record(line)
    rows = rows_of(lines)
    assert [row["digest"] for row in rows["handover"]] == lines[:1]
    assert [row["reason"] for row in rows["quarantine"]] == [
        "Invalid queue ids 'nonsense': write them as 0-3,7",
        "Invalid queue ids '0-2147483646': write them as 0-3,7",
    ]


def test_ingest_rows_have_the_columns_of_their_tables_and_are_equal_when_spark_reads_them(
    spark: SparkSession, tmp_path: Path, rows: dict[str, list[dict[str, Any]]]
) -> None:
    batch = LineBatch()
    for line in all_lines:
        batch.add(SegmentLine(line, None), line, is_new=True)
    lake = Lake(str(tmp_path))
    for kind, kind_rows in batch.to_rows("a.jsonl.gz", DAY).items():
        spec = TABLES_BY_KIND[kind]
        files = write_rows(pa.Table.from_batches([kind_rows]), FileTarget(lake.store, spec, "run1"))
        frame = lake.table(spec.name).read_files(spark, files)
        assert frame.schema == spec.schema
        read = {bytes(row["digest"]): row for row in frame.collect()}
        assert read.keys() == {row["digest"] for row in rows[kind]}
        for row in rows[kind]:
            assert to_utc(read[row["digest"]].asDict(recursive=True)) == row


def to_utc(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of Spark with times in UTC, which Spark gives in the zone of this machine."""
    for name, value in row.items():
        if isinstance(value, datetime):
            row[name] = value.astimezone(UTC)
        if isinstance(value, bytearray):
            row[name] = bytes(value)
    return row
