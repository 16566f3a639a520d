"""Which lines are records: told by Spark where a line is plainly one, and by the official reader where it is not.

A journal is nearly all `offsets`, and to read one of them by `rota.records.read` costs as much again as Spark's own
parser. But that parser is lenient: it takes a number for a string, and what comes after the last brace for nothing.
So what looks just as the operator writes it, and has in every place what belongs there, is taken as it is; with the
least doubt a line goes to `rota.records.read`, and so does every other kind. Both agree, therefore, by construction:
`plain` says yes only to what the reader would take (tests/pipeline/test_ingest_judge.py holds the two together).

There are three exceptions, which the reader takes. JSON's integers have no end, but Spark's have: a record with one
beyond 64 bits (a queue's id: 32 bits) is refused here; no broker counts so far. So is one that tells of a year in which
there is no Rota: a clock was wrong, and what lasted from 1970 until today would be split into half a million hours. And
so is one whose queues cannot be read, or are more than there can be.
"""

import re
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import StringType, StructField, StructType

from rota.model import plain as legible
from rota.pipeline.common.schemas import JOURNAL
from rota.ranges import from_ranges
from rota.records import SCHEMA, AnyRecord, Handover, Obeyed, Offsets, Owners, Ranges, Redelivered, read

STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false", "columnNameOfCorruptRecord": "_corrupt"}
_CORRUPT = StructField("_corrupt", StringType())
_REST = StructType([JOURNAL["offsets"]["topics"], JOURNAL["offsets"]["verdicts"], _CORRUPT])

# How the operator begins and ends a line, and the time in it. The end has no place for anything after the last brace.
_START = f'{{"schema":{SCHEMA},"kind":"offsets","group":"'
_TIME = r"^20[2-9]\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\z"
_END = r'^,"topics":\{.*\},"verdicts":\{(?:"[A-Za-z]+":\d{1,18},?){0,20}\}\}\z'
_ONCE = ['"schema"', '"kind"', '"group"', '"at"']  # what stands before the topics must not stand behind them, too
_LAST = '"verdicts"'
_QUOTED = 15  # parts, when the line is cut at its first quotation marks: the group is the 10th, the time the 14th

_ANSWER = StructType(
    [StructField("kind", StringType()), StructField("line", StringType()), StructField("reason", StringType())]
)
_ARROW = pa.struct([("kind", pa.string()), ("line", pa.string()), ("reason", pa.string())])
_LONG = re.compile(rb"\d{19}")  # no shorter number is beyond 64 bits
_MOST, _MOST_ID = 2**63 - 1, 2**31 - 1
_YEARS = range(2020, 2100)
_encode = msgspec.json.Encoder().encode


def judged(lines: DataFrame) -> DataFrame:
    """Say of each `line` which `kind` of record it is, or for what `reason` it is none.

    Of plain offsets `group`, `at`, `topics` and `verdicts` are read already; of other records `text` is what the
    reader has understood, written anew: without what it passes over, so that Spark's parser can add nothing to it.
    """
    said = F.col("said")
    return (
        lines.transform(_with_parts)
        .withColumn("plain", F.coalesce(_plain(), F.lit(False)))  # noqa: FBT003 - a value, not a switch
        .withColumn("said", _asked(F.when(~F.col("plain"), F.col("line"))))
        .select(
            *lines.columns,
            F.when(F.col("plain"), F.lit("offsets")).otherwise(said["kind"]).alias("kind"),
            said["reason"].alias("reason"),
            said["line"].alias("text"),
            *[F.when(F.col("plain"), F.col(name)).alias(name) for name in ("group", "at", "topics", "verdicts")],
        )
    )


def _with_parts(lines: DataFrame) -> DataFrame:
    """Add what a line has if it is plain; where it is not, they mean nothing."""
    begins = F.when(F.col("line").startswith(_START), F.split("line", '"', _QUOTED))
    parts = lines.withColumn("parts", begins)
    behind = F.get("parts", F.lit(_QUOTED - 1))
    ends = parts.withColumn("behind", F.when(behind.rlike(_END), behind))
    rest = F.from_json(F.concat(F.lit("{"), F.substr("behind", F.lit(2))), _REST, STRICT)
    return ends.withColumn("rest", rest).select(
        *lines.columns,
        "parts",
        "behind",
        F.get("parts", F.lit(9)).alias("group"),
        F.get("parts", F.lit(13)).try_cast("timestamp").alias("at"),
        "rest.*",
    )


def _plain() -> Column:
    """Say whether a line is beyond doubt an `offsets` that the reader takes."""
    line, behind = F.col("line"), F.col("behind")
    clean = F.is_valid_utf8(line) & ~line.contains("\\") & ~F.col("group").rlike(r"[\x00-\x1f]")
    spelled = F.array_join(F.slice("parts", 11, 3), '"') == ',"at":'
    dated = F.get("parts", F.lit(13)).rlike(_TIME) & F.col("at").isNotNull()
    again = reduce(or_, [behind.contains(it) for it in _ONCE])
    before, after = (F.substring_index(behind, _LAST, end) for end in (1, -1))
    closed = F.concat(before, F.lit(_LAST), after) == behind  # by its last brace; were there two, by an earlier one
    whole = F.col("_corrupt").isNull() & F.forall(F.map_values("topics"), _brokers)
    counted = F.forall(F.map_values("verdicts"), _counts)
    return clean & spelled & dated & ~again & closed & whole & counted


def _brokers(topic: Column) -> Column:
    return F.forall(F.map_values(topic), _columns)


def _columns(it: Column) -> Column:
    """Say whether columns can be laid side by side, with a number wherever there must be one."""
    size = F.size(it["ids"])
    alike = (size == F.size(it["first"])) & (size == F.size(it["last"])) & (size == F.size(it["committed"]))
    numbers = F.forall(it["ids"], _counts) & F.forall(it["first"], _is_there) & F.forall(it["last"], _is_there)
    return alike & numbers


def _counts(it: Column) -> Column:
    return it >= 0


def _is_there(it: Column) -> Column:
    return it.isNotNull()


def _ask(lines: pa.Array) -> pa.Array:
    """Ask the official reader about lines; where there is none, nobody asks."""
    if lines.null_count == len(lines):
        return pa.nulls(len(lines), _ARROW)
    return pa.array([None if it is None else _answer(it) for it in lines.cast(pa.binary()).to_pylist()], _ARROW)


# No function of Spark's own, for the reader's word is the law. (The stubs want a type, of which Spark itself warns.)
_asked = arrow_udf(_ask, _ANSWER)  # type: ignore[call-overload]


def _answer(line: bytes) -> dict[str, str]:
    try:
        record = read(line)
        text = _encode(record)
        _check(record, text)
    except (ValueError, OverflowError) as error:
        return {"reason": legible(str(error))}
    return {"kind": str(record.__struct_config__.tag), "line": text.decode()}


def _check(record: AnyRecord, text: bytes) -> None:
    """Refuse integers that have no place in Spark's, and times that cannot be."""
    for at in (getattr(record, name) for name in ("at", "began", "since") if hasattr(record, name)):
        if at.year not in _YEARS:
            raise ValueError(f"The record cannot be kept: it tells of the year {at.year}, so its clock was wrong")
    for queues in _ranges(record):
        from_ranges(queues)
    if _LONG.search(text) and max(map(abs, _integers(msgspec.to_builtins(record))), default=0) > _MOST:
        raise ValueError("The record cannot be kept: it has an integer beyond 64 bits")
    if isinstance(record, Offsets):
        ids = [id_ for brokers in record.topics.values() for columns in brokers.values() for id_ in columns.ids]
        if max(ids, default=0) > _MOST_ID:
            raise ValueError("The record cannot be kept: it has a queue whose id is beyond 32 bits")


def _ranges(record: AnyRecord) -> Iterator[Ranges]:
    """Yield what a record says in ranges such as 0-3,7; the reader takes any text."""
    if isinstance(record, Handover | Obeyed | Redelivered):
        yield record.queues
    if isinstance(record, Owners):
        yield record.unowned
        yield from (it.queues for it in record.members.values())
        yield from (it.queues for it in record.releasing)


def _integers(it: Any) -> Iterator[int]:
    if isinstance(it, dict | list):
        for inner in it.values() if isinstance(it, dict) else it:
            yield from _integers(inner)
    elif isinstance(it, int):
        yield it
