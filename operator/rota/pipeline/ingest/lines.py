"""Validator of the journal's lines: Spark itself accepts plain `offsets` lines, `decode_record` judges all others.

Nearly all lines are `offsets`, and `rota.records.decode_record` costs as much again as Spark's own parser. But that
parser is lenient: it accepts a number for a string, and ignores text after the last brace. So a line is *plain* only if
it looks exactly as the operator writes it, no key is repeated and every value has the right type; `decode_record`
judges every other line. So both agree: only lines that the reader accepts are plain (tests/pipeline/test_lines.py
compares the two).

Three kinds of records are rejected here, although the reader accepts them: records with an integer beyond 64 bits (a
queue's id: 32 bits), since Spark's integers are limited and no broker counts that far; records with a year in which
Rota did not exist, since a clock was wrong, and a period from 1970 until today would be split into half a million
hours; and records whose ranges of queues cannot be parsed, or name more queues than possible.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import StructField, StructType

from rota.model import single_line
from rota.pipeline.common.columns import false_if_null
from rota.pipeline.common.schemas import JOURNAL_SCHEMAS, TEXT, TIME, table_schema
from rota.ranges import RangesByTopic, from_ranges
from rota.records import (
    RECORD_SCHEMA,
    AnyRecord,
    HandoverRecord,
    ObeyedRecord,
    OffsetsRecord,
    OwnersRecord,
    RedeliveredRecord,
    decode_record,
)

JSON_OPTIONS = {
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
    "columnNameOfCorruptRecord": "_corrupt",
}
_CORRUPT = StructField("_corrupt", TEXT)
_REST_SCHEMA = StructType([JOURNAL_SCHEMAS["offsets"]["topics"], JOURNAL_SCHEMAS["offsets"]["verdicts"], _CORRUPT])

# A plain line, as the operator writes it, and the parts of it when it is split at its first 14 quotation marks:
#   line:  {"schema":1,"kind":"offsets","group":"shop/orders","at":"2026-11-21T08:00:00.000Z","topics":...
#   parts: 0 1      2  3    4 5       6 7     8 9          10 11 12 13                      14: all the rest
# A line with a backslash is not plain: it may escape a quotation mark, so the parts would be others.
# The pattern of the end allows no text after the last brace.
_START = f'{{"schema":{RECORD_SCHEMA},"kind":"offsets","group":"'
_TIME = r"^20[2-9]\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\z"
_END = r'^,"topics":\{.*\},"verdicts":\{(?:"[A-Za-z]+":\d{1,18},?){0,20}\}\}\z'
_KEY_END = '":'  # of each key; a plain line has no other such text, since there is no string besides the keys
_TOP_LEVEL_KEYS = 2  # from the topics on
_BROKER_KEYS = 5  # the broker's name and its four lists
_GROUP_PART = 9
_TIME_PART = 13
_MAX_PARTS = 15

_JUDGEMENT_SCHEMA = table_schema(kind=TEXT, at=TIME, line=TEXT, reason=TEXT)
_JUDGEMENT_ARROW = pa.struct(
    {"kind": pa.string(), "at": pa.timestamp("us", "UTC"), "line": pa.string(), "reason": pa.string()}
)
_LONG_NUMBER = re.compile(rb"\d{19}")  # digits of the shortest number beyond 64 bits
_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1
_VALID_YEARS = range(2020, 2100)
_encode = msgspec.json.Encoder().encode


def judge_lines(lines: DataFrame) -> DataFrame:
    """Add to each `line` the `kind` and time `at` of its record, or the `reason` why it is rejected; to null nothing.

    For plain offsets `group`, `topics` and `verdicts` are parsed already. For other records `text` is the record
    as the reader understood it, encoded again: it lacks fields that the reader ignores, so Spark's parser cannot see
    them either.
    """
    judgement = F.col("judgement")
    return (
        lines.transform(_with_parts)
        .withColumn("plain", false_if_null(_is_plain()))
        .withColumn("judgement", _judge_udf(F.when(~F.col("plain"), F.col("line"))))
        .select(
            *lines.columns,
            F.when(F.col("plain"), F.lit("offsets")).otherwise(judgement["kind"]).alias("kind"),
            judgement["reason"].alias("reason"),
            judgement["line"].alias("text"),
            F.when(F.col("plain"), F.col("at")).otherwise(judgement["at"]).alias("at"),
            *[F.when(F.col("plain"), F.col(name)).alias(name) for name in ("group", "topics", "verdicts")],
        )
    )


def _with_parts(lines: DataFrame) -> DataFrame:
    """Add the fields of plain lines; for other lines the new columns have no meaning."""
    parts_if_plain = F.when(F.col("line").startswith(_START), F.split("line", '"', _MAX_PARTS))
    split = lines.withColumn("parts", parts_if_plain)
    tail = F.get("parts", F.lit(_MAX_PARTS - 1))
    with_tail = split.withColumn("tail", F.when(tail.rlike(_END), tail))
    topics_and_verdicts = F.concat(F.lit("{"), F.substr("tail", F.lit(2)))
    parsed = F.from_json(topics_and_verdicts, _REST_SCHEMA, JSON_OPTIONS)
    return with_tail.withColumn("parsed", parsed).select(
        *lines.columns,
        "parts",
        "tail",
        F.get("parts", F.lit(_GROUP_PART)).alias("group"),
        F.get("parts", F.lit(_TIME_PART)).try_cast("timestamp").alias("at"),
        "parsed.*",
    )


def _is_plain() -> Column:
    """Return whether a line is certainly an `offsets` record that the reader accepts."""
    line = F.col("line")
    tail = F.col("tail")
    is_clean = F.is_valid_utf8(line) & ~line.contains("\\") & ~F.col("group").rlike(r"[\x00-\x1f]")
    # `slice` counts from 1: these are parts 10 to 12.
    has_time_key = F.array_join(F.slice("parts", 11, 3), '"') == ',"at":'
    has_time = F.get("parts", F.lit(_TIME_PART)).rlike(_TIME) & F.col("at").isNotNull()
    # Of a repeated key Spark keeps one value, and the other one is not checked: so the text may have no more keys than
    # were parsed.
    has_parsed_keys_only = _count_key_ends(tail) == _count_parsed_keys()
    has_valid_topics = F.col("_corrupt").isNull() & F.forall(F.map_values("topics"), _has_valid_brokers)
    has_valid_counts = F.forall(F.map_values("verdicts"), _is_count)
    has_valid_keys = has_time_key & has_parsed_keys_only
    return is_clean & has_valid_keys & has_time & has_valid_topics & has_valid_counts


def _count_key_ends(text: Column) -> Column:
    without = F.replace(text, F.lit(_KEY_END), F.lit(""))
    return (F.length(text) - F.length(without)) / len(_KEY_END)


def _count_parsed_keys() -> Column:
    """Return the number of keys in the parsed topics and verdicts; null if a topic is null, which is not valid."""
    brokers_by_topic = F.transform(F.map_values("topics"), F.size)
    brokers = F.aggregate(brokers_by_topic, F.lit(0), lambda total, count: total + count)
    return _TOP_LEVEL_KEYS + F.size("topics") + _BROKER_KEYS * brokers + F.size("verdicts")


def _has_valid_brokers(topic: Column) -> Column:
    return F.forall(F.map_values(topic), _has_valid_columns)


def _has_valid_columns(lists: Column) -> Column:
    """Return whether columns have the same length, and a number wherever one is required."""
    size = F.size(lists["ids"])
    alike = (size == F.size(lists["first"])) & (size == F.size(lists["last"])) & (size == F.size(lists["committed"]))
    counts = F.forall(lists["ids"], _is_count)
    return alike & (counts & F.forall(lists["first"], _is_present) & F.forall(lists["last"], _is_present))


def _is_count(number: Column) -> Column:
    return number >= 0


def _is_present(value: Column) -> Column:
    return value.isNotNull()


def _judge_batch(lines: pa.Array) -> pa.Array:
    """Judge lines with `decode_record`; null lines stay null."""
    if lines.null_count == len(lines):
        return pa.nulls(len(lines), _JUDGEMENT_ARROW)
    judgements = [None if line is None else _judge_line(line) for line in lines.cast(pa.binary()).to_pylist()]
    return pa.array(judgements, _JUDGEMENT_ARROW)


# A UDF, since only `decode_record` decides. (Spark's stubs require a type argument that Spark itself warns about.)
_judge_udf = arrow_udf(_judge_batch, _JUDGEMENT_SCHEMA)  # type: ignore[call-overload]


def _judge_line(line: bytes) -> dict[str, Any]:
    try:
        record = decode_record(line)
        text = _encode(record)
        _check_limits(record, text)
    except (ValueError, OverflowError) as error:
        return {"reason": single_line(str(error))}
    return {"kind": str(record.__struct_config__.tag), "at": record.at, "line": text.decode()}


def _check_limits(record: AnyRecord, text: bytes) -> None:
    """Raise ValueError for integers that do not fit into Spark's, impossible times, and unreadable ranges of queues."""
    for name in ("at", "began", "since"):
        at = getattr(record, name, None)
        if at and at.year not in _VALID_YEARS:
            raise ValueError(f"The record cannot be kept: its year is {at.year}, so its clock was wrong")
    for queues in _queue_ranges(record):
        from_ranges(queues)
    # The pattern is quick, and nearly all records have no number of so many digits.
    if _LONG_NUMBER.search(text) and max(map(abs, _integers(msgspec.to_builtins(record))), default=0) > _MAX_INT64:
        raise ValueError("The record cannot be kept: it has an integer beyond 64 bits")
    if isinstance(record, OffsetsRecord):
        for brokers in record.topics.values():
            if any(max(columns.ids, default=0) > _MAX_INT32 for columns in brokers.values()):
                raise ValueError("The record cannot be kept: it has a queue whose id is beyond 32 bits")


def _queue_ranges(record: AnyRecord) -> Iterator[RangesByTopic]:
    """Yield a record's ranges of queues such as 0-3,7; the reader accepts any text in them."""
    if isinstance(record, HandoverRecord | ObeyedRecord | RedeliveredRecord):
        yield record.queues
    if isinstance(record, OwnersRecord):
        yield record.unowned
        yield from (member.queues for member in record.members.values())
        yield from (handover.queues for handover in record.releasing)


def _integers(value: Any) -> Iterator[int]:
    """Yield all integers in a decoded JSON value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)
    elif isinstance(value, int):
        yield value
