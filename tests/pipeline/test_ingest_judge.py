"""A line is put aside exactly when the official reader refuses it, and what is kept is what that reader has read."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from rota.pipeline.common.schemas import JOURNAL_SCHEMAS
from rota.pipeline.ingest.facts import records_of_kind
from rota.pipeline.ingest.lines import judge_lines
from rota.ranges import from_ranges
from rota.records import decode_record, journal_record

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
EXAMPLES = [block.encode() for block in re.findall(r"^```json\n(.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)]
OFFSETS = EXAMPLES[6]
VALUES: list[Any] = [None, True, -1, 0, 1.5, "", "1", "2026-11-21T09:00:00", "2026-13-21T09:00:00Z", [], [None], {}]
SPELLINGS = {  # of offsets
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
}


def lines() -> Iterator[bytes]:
    yield from (b"", b"null", b"[]", b"{}", b"[" * 3000, b"\xef\xbb\xbf" + OFFSETS, b"[" + OFFSETS + b"]")
    for line in EXAMPLES:
        yield line
        yield from (line + it for it in (b" ", b"\r", b"\xe2\x80\xa8", b"}", b"x", b"//", b"{}", line, b"\0"))
        yield from (line[:cut] for cut in range(0, len(line), 7))
        yield from (line[:at] + b"\0" + line[at + 1 :] for at in range(0, len(line), 23))
        yield line.replace(b'":', b'" : ').replace(b",", b" , ")
        yield from changed(msgspec.json.decode(line))
    for old, others in SPELLINGS.items():
        assert old in OFFSETS
        yield from (OFFSETS.replace(old, new, 1) for new in others.split(b"|"))
    yield OFFSETS.replace(b"orders", b"verdicts")
    yield OFFSETS.replace(b'"orders"', b'"at"')
    yield from hit(Random(7))


def changed(record: dict[str, Any]) -> Iterator[bytes]:
    """Yield a record with each value, on every level, left out or another."""
    for path in paths(record):
        yield msgspec.json.encode(put(record, path, leave_out=True))
        yield from (msgspec.json.encode(put(record, path, value)) for value in VALUES)
    yield msgspec.json.encode({**record, "weather": {"rain": [1]}})
    yield msgspec.json.encode(dict(reversed(record.items())))


def paths(it: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = it.items() if isinstance(it, dict) else enumerate(it[:1]) if isinstance(it, list) else ()
    for name, value in inner:
        yield (*path, name)
        yield from paths(value, (*path, name))


def put(it: Any, path: tuple[Any, ...], value: Any = None, *, leave_out: bool = False) -> Any:
    copy = dict(it) if isinstance(it, dict) else list(it)
    name, *rest = path
    if rest:
        copy[name] = put(copy[name], tuple(rest), value, leave_out=leave_out)
    elif leave_out:
        del copy[name]
    else:
        copy[name] = value
    return copy


def hit(chance: Random) -> Iterator[bytes]:
    """Yield offsets in which some bytes are others, or twice there, or gone."""
    for _ in range(1500):
        line = bytearray(OFFSETS)
        for _ in range(chance.randint(1, 2)):
            start = chance.randrange(len(line))
            end = min(start + chance.choice([0, 1, 1, 5]), len(line))
            line[start:end] = chance.choice(
                [b"", b"0", b'"', b"}", b",", b"[", b"\\", b"\n", bytes(line[start:end]) * 2]
            )
        yield bytes(line)


def refusal(line: bytes) -> str | None:
    """Say why a line is none: by the reader, or because what it tells of cannot be."""
    try:
        record = decode_record(line)
        for queues in ranges(msgspec.to_builtins(record)):
            from_ranges(queues)
    except ValueError as error:
        return str(error)
    times = [getattr(record, name, record.at) for name in ("at", "began", "since")]
    return None if all(2020 <= time.year < 2100 for time in times) else "There was no Rota then"


def ranges(it: Any) -> Iterator[dict[str, dict[str, str]]]:
    """Return all queues that a record names as ranges."""
    if isinstance(it, dict):
        for name, inner in it.items():
            if name in {"queues", "unowned"} and isinstance(inner, dict):
                yield inner
            else:
                yield from ranges(inner)
    elif isinstance(it, list):
        for inner in it:
            yield from ranges(inner)


@pytest.fixture(scope="module")
def tried(spark: SparkSession) -> DataFrame:
    made = spark.createDataFrame([(number, line) for number, line in enumerate(all_lines)], "number int, line binary")
    with_text = made.select("number", F.col("line").cast("string").alias("line"))
    return with_text.transform(judge_lines).persist()


all_lines = [*dict.fromkeys(lines())]


def test_ingest_quarantines_exactly_the_lines_the_official_reader_rejects(tried: DataFrame) -> None:
    told = {row.number: (row.kind, row.reason) for row in tried.select("number", "kind", "reason").collect()}
    assert len(told) == len(all_lines)
    wrong = [
        (line, told[number])
        for number, line in enumerate(all_lines)
        if (refusal(line) is None) != (told[number][1] is None)
        or (told[number][0] is None) == (told[number][1] is None)
    ]
    assert wrong == []
    assert sum(reason is None for _, reason in told.values()) > 300
    assert sum(reason is not None for _, reason in told.values()) > 2000


@pytest.mark.parametrize("kind", JOURNAL_SCHEMAS)
def test_ingest_rows_equal_the_records_of_the_official_reader(tried: DataFrame, kind: str) -> None:
    rows = tried.where(F.col("kind") == kind).select("number").collect()
    wanted = [values(decode_record(all_lines[row.number]), kind) for row in rows]
    got = [row.asDict(recursive=True) for row in tried.transform(records_of_kind, kind).collect()]
    assert len(got) == len(wanted) > 0
    for mine, theirs in zip(got, wanted, strict=True):
        assert str(mine.pop("date")) == f"{mine['at']:%Y-%m-%d}"
        assert {name: mine[name] for name in theirs} == theirs


def values(record: Any, kind: str) -> dict[str, Any]:
    """Return what a record says, as Python has it of a row."""
    told = msgspec.json.decode(msgspec.json.encode(record))
    for name in ("at", "began", "since"):
        if name in told:
            told[name] = datetime.fromisoformat(told[name]).astimezone().replace(tzinfo=None)
    if kind == "owners":
        told["rules"] = msgspec.json.encode(told["rules"]).decode()
    if kind == "membership":
        told["members"] = {name: {**it, "room": it.get("room")} for name, it in told["members"].items()}
    return {name: it for name, it in told.items() if name not in {"schema", "kind"}}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"1500", b"9223372036854775808", "it has an integer beyond 64 bits"),
        (b"1500", b"-" + b"9" * 30, "it has an integer beyond 64 bits"),
        (b"[0,1,2,3]", b"[0,1,2,2147483648]", "it has a queue whose id is beyond 32 bits"),
        (b'"at":"2026', b'"at":"1970', "its year is 1970, so its clock was wrong"),
        (b'"at":"2026', b'"at":"9999', "its year is 9999, so its clock was wrong"),
    ],
)
def test_ingest_rejects_oversized_integers_and_impossible_years(
    spark: SparkSession, old: bytes, new: bytes, why: str
) -> None:
    line = OFFSETS.replace(old, new, 1)
    decode_record(line)
    row = spark.createDataFrame([(line.decode(),)], "line string").transform(judge_lines).first()
    assert row
    assert (row.kind, row.reason) == (None, f"The record cannot be kept: {why}")


def test_ingest_rejects_unreadable_queue_ranges(spark: SparkSession) -> None:
    told = {"act": "Drop", "proof": "Ended", "state": "Owned"}
    lines = [
        msgspec.json.encode(
            journal_record("handover", "g", "2026-11-21T08:00:00Z", generation=1, queues={"t": {"a": ids}}, **told)
        )
        for ids in ("0-3", "nonsense", "0-2147483646")
    ]
    for line in lines:
        decode_record(line)
    rows = spark.createDataFrame([(it.decode(),) for it in lines], "line string").transform(judge_lines).collect()
    assert [row.reason for row in rows] == [
        None,
        "Invalid queue ids 'nonsense': write them as 0-3,7",
        "Invalid queue ids '0-2147483646': write them as 0-3,7",
    ]


def test_ingest_bypasses_the_official_reader_for_plain_offsets_only(spark: SparkSession) -> None:
    """Or twenty million would take as long again."""
    made = spark.createDataFrame([(it.decode(),) for it in EXAMPLES], "line string").transform(judge_lines)
    assert [row.kind for row in made.where(F.col("text").isNull()).collect()] == ["offsets"]
