"""A group's journal lines as the values that the history's fold takes, without Spark."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rota.lag_columns import NOT_COMMITTED
from rota.pipeline.history.group_records import GroupRecords
from rota.pipeline.history.ordering import Gap, Gaps
from rota.pipeline.history.samples import Place, Places, Samples
from rota.records import AnyRecord, Fact, GapRecord, OffsetsRecord, decode_record


def decode_lines(lines: Iterable[Mapping[str, Any]]) -> list[AnyRecord]:
    """Return the records of lines, as the journal's reader understands them."""
    return [decode_record(msgspec.json.encode(line)) for line in lines]


def group_records(lines: Iterable[Mapping[str, Any]]) -> GroupRecords:
    """Return a group's records without its samples."""
    return GroupRecords(
        record for record in decode_lines(lines) if isinstance(record, Fact) and not isinstance(record, OffsetsRecord)
    )


def gaps_in(lines: Iterable[Mapping[str, Any]]) -> Gaps:
    """Return the gaps among lines."""
    return Gaps(Gap(record.since, record.at) for record in decode_lines(lines) if isinstance(record, GapRecord))


def samples_in(lines: Iterable[Mapping[str, Any]], places: Places) -> Samples:
    """Return the samples among lines, which are in order of time."""
    return samples_of([record for record in decode_lines(lines) if isinstance(record, OffsetsRecord)], places)


def samples_of(records: Sequence[OffsetsRecord], places: Places) -> Samples:
    """Return the samples of records, which are in order of time."""
    rows: list[tuple[int, ...]] = []
    for index, record in enumerate(records):
        for topic, brokers in record.topics.items():
            for broker, columns in brokers.items():
                place = places.encode(Place(topic, broker))
                committed = [NOT_COMMITTED if offset is None else offset for offset in columns.committed]
                queues = zip(columns.ids, columns.first, columns.last, committed, strict=True)
                rows += [(index, place, *queue) for queue in queues]
    at = np.array([round(record.at.timestamp() * 1e6) for record in records], np.int64)
    return Samples(at, *np.array(rows, np.int64).reshape(-1, 6).T)
