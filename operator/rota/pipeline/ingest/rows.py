"""Converts records of the journal to rows of the lake's tables, as Arrow columns."""

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rota.model import single_line
from rota.pipeline.common.columns import arrow_schema
from rota.pipeline.ingest.lines import check_offsets, read_line
from rota.pipeline.ingest.segment_lines import SegmentLine
from rota.pipeline.lake.data_files import TableSpec
from rota.pipeline.lake.tables import OFFSET_BUCKETS, QUARANTINE_TABLE, RECORD_TABLES
from rota.records import AnyRecord, Columns, OffsetsRecord

T = TypeVar("T")

QUARANTINE_KIND = "quarantine"
TABLES_BY_KIND = {**RECORD_TABLES, QUARANTINE_KIND: QUARANTINE_TABLE}
KINDS = tuple(TABLES_BY_KIND)
OFFSETS_KIND = "offsets"


class RecordLine(NamedTuple):
    """A line of the journal that is a record."""

    record: AnyRecord
    digest: bytes  # digest of the line
    line: bytes


class RejectedLine(NamedTuple):
    """A line that is not a record. For a segment that cannot be read to its end, the line is empty."""

    reason: str
    digest: bytes
    line: bytes


class LineBatch:
    """Lines of one segment that become rows at once."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._records: dict[str, list[RecordLine]] = {}  # by kind
        self._rejected: list[RejectedLine] = []

    def add(self, line: SegmentLine, digest: bytes, *, is_new: bool) -> datetime | None:
        """Add a line if no earlier segment has it (`is_new`); return the time of its record, None if it is rejected.

        The time of a line that is not new counts, too: the ledger (the table `lake/files`) has the first and last time
        of a segment's lines.
        """
        text = line.line or b""
        if line.reason is not None:  # the end of a broken segment, which is always new
            self._rejected.append(RejectedLine(line.reason, digest, text))
            return None
        self.size_bytes += len(text)
        try:
            record = read_line(text)
        except (ValueError, OverflowError) as error:
            if is_new:
                self._rejected.append(RejectedLine(single_line(str(error)), digest, text))
            return None
        if is_new:
            kind = str(record.__struct_config__.tag)
            self._records.setdefault(kind, []).append(RecordLine(record, digest, text))
        return record.at

    def to_rows(self, file: str, day: date) -> dict[str, pa.RecordBatch]:
        """Return the rows by kind; `file` and `day` are those of the segment."""
        rows: dict[str, pa.RecordBatch] = {}
        rejected = list(self._rejected)
        for kind, lines in self._records.items():
            try:
                rows[kind] = record_rows(kind, lines)
            except (OverflowError, pa.ArrowInvalid):
                fitting, oversized = split_oversized(lines)
                if fitting:
                    rows[kind] = record_rows(kind, fitting)
                rejected += oversized
        if rejected:
            rows[QUARANTINE_KIND] = rejected_rows(rejected, file, day)
        return rows


@cache
def table_columns(table: TableSpec) -> pa.Schema:
    """Return the columns of a table as Arrow's schema."""
    return arrow_schema(table.schema)


def record_rows(kind: str, lines: Sequence[RecordLine]) -> pa.RecordBatch:
    """Return the rows of records of one kind; raise OverflowError or ArrowInvalid if integers do not fit."""
    schema = table_columns(RECORD_TABLES[kind])
    records: list[AnyRecord] = _values(lines, "record")
    columns = _offsets_columns(records, schema) if kind == OFFSETS_KIND else _record_columns(records, schema)
    columns["date"] = pc.cast(columns["at"], pa.date32())
    columns["digest"] = pa.array(_values(lines, "digest"), pa.binary())
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def rejected_rows(lines: Sequence[RejectedLine], file: str, day: date) -> pa.RecordBatch:
    """Return the rows of rejected lines of a segment."""
    schema = table_columns(QUARANTINE_TABLE)
    rows: list[dict[str, Any]] = []
    for line in lines:
        text = line.line.decode(errors="replace")  # readers of the table may accept only valid UTF-8
        rows.append({"file": file, "line": text, "reason": line.reason, "date": day, "digest": line.digest})
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def split_oversized(lines: Sequence[RecordLine]) -> tuple[list[RecordLine], list[RejectedLine]]:
    """Return the lines whose integers fit into columns, and the other lines as rejected."""
    kept: list[RecordLine] = []
    rejected: list[RejectedLine] = []
    for line in lines:
        try:
            if isinstance(line.record, OffsetsRecord):  # `read_line` has checked all other records
                check_offsets(line.record)
            kept.append(line)
        except ValueError as error:
            rejected.append(RejectedLine(str(error), line.digest, line.line))
    return kept, rejected


def _record_columns(records: Sequence[AnyRecord], schema: pa.Schema) -> dict[str, pa.Array]:
    rows: list[dict[str, Any]] = []
    for record in records:
        row = msgspec.to_builtins(record, builtin_types=(datetime,))
        if "rules" in row:  # the policy in an `owners` record: its fields depend on the strategy, so it becomes JSON
            row["rules"] = msgspec.json.encode(row["rules"]).decode()
        rows.append(row)
    record_type = pa.struct([field for field in schema if field.name not in {"date", "digest"}])
    structs = pa.array(rows, record_type)
    return dict(zip(record_type.names, structs.flatten(), strict=True))


def _offsets_columns(records: Sequence[Any], schema: pa.Schema) -> dict[str, pa.Array]:
    """Return the columns of `offsets`, from flat lists of values, which are ten times as fast as rows."""
    groups: list[str] = _values(records, "group")
    return {
        "group": pa.array(groups, pa.string()),
        "at": pa.array(_values(records, "at"), schema.field("at").type),
        "topics": _topics_column(_values(records, "topics"), schema.field("topics").type),
        "verdicts": pa.array(_values(records, "verdicts"), schema.field("verdicts").type),
        "bucket": pa.array(map(offset_bucket, groups), pa.int32()),
    }


def offset_bucket(group: str) -> int:
    """Return the partition of a day of `offsets` that has a group's rows."""
    return crc32(group.encode()) % OFFSET_BUCKETS


def _topics_column(topics: Sequence[dict[str, dict[str, Columns]]], map_type: pa.MapType) -> pa.Array:
    """Return maps {topic: {broker: struct}}; a struct has a list for each field of `Columns`, with an item a queue."""
    brokers = _flatten(topics)
    columns = _flatten(brokers)
    struct = map_type.item_type.item_type
    lists: list[pa.Array] = []
    for field in struct:
        values = _values(columns, field.name)
        flat = pa.array(list(chain.from_iterable(values)), field.type.value_type)
        lists.append(pa.ListArray.from_arrays(_starts(values), flat, type=field.type))
    queues = pa.StructArray.from_arrays(lists, fields=list(struct))
    by_broker = _map_column(brokers, queues)
    return _map_column(topics, by_broker).cast(map_type)


def _values(rows: Sequence[Any], name: str) -> list[Any]:
    return [getattr(row, name) for row in rows]


def _flatten(maps: Sequence[Mapping[str, T]]) -> list[T]:
    """Return the values of all maps, one map after the other."""
    return list(chain.from_iterable(inner.values() for inner in maps))


def _map_column(maps: Sequence[dict[str, Any]], items: pa.Array) -> pa.MapArray:
    keys = pa.array(list(chain.from_iterable(maps)), pa.string())
    return pa.MapArray.from_arrays(_starts(maps), keys, items)


def _starts(values: Sequence[Any]) -> pa.Array:
    """Return where each value starts in a flat list of all values, and where the last one ends."""
    starts = np.zeros(len(values) + 1, np.int32)
    np.cumsum(list(map(len, values)), out=starts[1:])
    return pa.array(starts)
