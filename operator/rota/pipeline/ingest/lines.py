"""Decides which lines of the journal ingest keeps: those that `rota.records.decode_record` accepts as records.

Records are also rejected here if

- an integer exceeds signed 64 bits, or a queue's id 32 bits: columns of tables have this size, and no broker counts
  that far;
- a year is outside 2020 to 2099: the writer's clock was wrong. A period from 1970 until today would be split into half
  a million hours, and the rollup has a row for each hour;
- ranges of queues cannot be parsed, or name more queues than possible.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from rota.ranges import RangesByTopic, from_ranges
from rota.records import (
    AnyRecord,
    HandoverRecord,
    ObeyedRecord,
    OffsetsRecord,
    OwnersRecord,
    RedeliveredRecord,
    decode_record,
)

_LONG_NUMBER = re.compile(rb"\d{19}")  # the shortest numbers beyond signed 64 bits have 19 digits
_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1
_VALID_YEARS = range(2020, 2100)
_TIMES = ("at", "began", "since")
_encode = msgspec.json.Encoder().encode


def read_line(line: bytes) -> AnyRecord:
    """Return the record of a line; raise ValueError with the reason if it is rejected.

    The integers of `offsets` records are not checked here, since that is slow: if their conversion to columns fails,
    the caller finds the bad record with `check_offsets`.
    """
    record = decode_record(line)
    for name in _TIMES:
        time = getattr(record, name, None)
        if time and time.year not in _VALID_YEARS:
            raise ValueError(f"The record cannot be kept: its year is {time.year}, so its clock was wrong")
    if not isinstance(record, OffsetsRecord):
        for queues in _queue_ranges(record):
            from_ranges(queues)  # raises ValueError if they cannot be parsed, or are too many
        _check_integers(record)
    return record


def check_offsets(record: OffsetsRecord) -> None:
    """Raise ValueError if an `offsets` record has integers that do not fit into the columns of its table."""
    _check_integers(record)
    for brokers in record.topics.values():
        for columns in brokers.values():
            if max(columns.ids, default=0) > _MAX_INT32:
                raise ValueError("The record cannot be kept: it has a queue whose id is beyond 32 bits")


def _check_integers(record: AnyRecord) -> None:
    # A quick check first, since nearly all records have no number of 19 digits.
    if not _LONG_NUMBER.search(_encode(record)):
        return
    for number in _integers(msgspec.to_builtins(record)):
        if abs(number) > _MAX_INT64:
            raise ValueError("The record cannot be kept: it has an integer beyond 64 bits")


def _queue_ranges(record: AnyRecord) -> Iterator[RangesByTopic]:
    """Yield a record's ranges of queues such as 0-3,7; `decode_record` accepts any text in them."""
    if isinstance(record, HandoverRecord | ObeyedRecord | RedeliveredRecord):
        yield record.queues
    if isinstance(record, OwnersRecord):
        yield record.unowned
        for member in record.members.values():
            yield member.queues
        for handover in record.releasing:
            yield handover.queues


def _integers(value: Any) -> Iterator[int]:
    """Yield all integers in a decoded JSON value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)
    elif isinstance(value, int):
        yield value
