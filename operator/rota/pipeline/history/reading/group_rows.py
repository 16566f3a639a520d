"""Records and samples of one group from Arrow's columns, and the rows of its results in Arrow.

`rota.pipeline.history.tables` describes the rows: one column of structs for each kind of record, filled in its rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rota import lag_columns
from rota.model import Queue
from rota.pipeline.history.audit import Interval, Violation
from rota.pipeline.history.group_records import GroupRecords
from rota.pipeline.history.samples import Integers, Place, Places, Samples
from rota.records import KINDS, RECORD_SCHEMA, Fact

MAX_PART_SAMPLES = 250_000  # samples of queues that are flattened at once
MAX_BATCH_ROWS = 10_000
_FACTS: Mapping[str, type[Fact]] = {str(kind.__struct_config__.tag): kind for kind in KINDS if issubclass(kind, Fact)}
_OFFSETS = "offsets"


class GroupRows:
    """The rows of one group, in batches: all records, and then, in order of time, the samples.

    Memory holds the records and one batch of samples.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self.records = GroupRecords()
        self.places = Places()
        self._batches = iter(batches)
        self._first_samples: list[pa.RecordBatch] = []
        for batch in self._batches:
            count = _count_records(batch)
            _add_records(batch.slice(0, count), self.records)
            if count < batch.num_rows:
                self._first_samples.append(batch.slice(count))
                break

    def samples(self) -> Iterator[Samples]:
        """Yield the samples, in parts that fit in memory."""
        while self._first_samples:
            yield from _read_samples(self._first_samples.pop(), self.places)
        for batch in self._batches:
            yield from _read_samples(batch, self.places)


def _count_records(batch: pa.RecordBatch) -> int:
    """Return the number of rows before the first sample."""
    if _OFFSETS not in batch.schema.names:
        return int(batch.num_rows)
    return int(batch.num_rows - pc.sum(pc.equal(batch.column("kind"), _OFFSETS)).as_py())


def _add_records(rows: pa.RecordBatch, records: GroupRecords) -> None:
    """Add the records of some rows; of kinds without a column only the times."""
    kinds = rows.column("kind").dictionary_encode()
    for code, kind in enumerate(kinds.dictionary.to_pylist()):
        chosen = rows.filter(pc.equal(kinds.indices, code))
        times = chosen.column("at")
        if kind in rows.schema.names:
            structs = _to_values(chosen.column(kind))
            for at, fields in zip(times.to_pylist(), structs, strict=True):
                records.add(_to_fact(_FACTS[kind], fields | {"at": at}))
        else:
            records.add_state_times(_to_micros(times))


def _to_values(column: Any) -> list[Any]:
    """Return the values of a column that is no slice: structs and maps as dicts, and a null list or map as empty.

    Arrow's own `to_pylist` makes an object of each nested value before its Python value, and takes seven times as long.
    """
    if pa.types.is_struct(column.type):
        names = [field.name for field in column.type]
        fields = [_to_values(column.field(name)) for name in names]
        return [dict(zip(names, values, strict=True)) for values in zip(*fields, strict=True)]
    if pa.types.is_map(column.type):
        keys = _to_values(column.keys)
        values = _to_values(column.items)
        bounds = pairwise(column.offsets.to_pylist())
        return [dict(zip(keys[begin:end], values[begin:end], strict=True)) for begin, end in bounds]
    if pa.types.is_list(column.type):
        values = _to_values(column.values)
        return [values[begin:end] for begin, end in pairwise(column.offsets.to_pylist())]
    if pa.types.is_string(column.type):
        column = column.to_numpy(zero_copy_only=False)
        return list(column)
    return list(column.to_pylist())


def _to_fact(kind: type[Fact], fields: dict[str, Any]) -> Fact:
    if "rules" in fields:  # our tables store it as JSON text
        fields["rules"] = msgspec.json.decode(fields["rules"] or "{}")
    return msgspec.convert(fields | {"schema": RECORD_SCHEMA, "group": ""}, kind)


def _to_micros(times: Any) -> Integers:
    """Return times in microseconds since 1970."""
    return np.asarray(times.cast(pa.int64())).astype(np.int64)


def _read_samples(rows: pa.RecordBatch, places: Places) -> Iterator[Samples]:
    """Yield the samples of a batch's rows of `offsets`, in parts that fit in memory."""
    topics = rows.column(_OFFSETS).field("topics")
    count = len(topics.items.items.field("ids").values)
    step = max(1, rows.num_rows * MAX_PART_SAMPLES // max(count, 1))
    for start in range(0, rows.num_rows, step):
        # `take` copies the rows: nested lists of a slice would start at an offset in shared buffers.
        indices = pa.array(np.arange(start, min(start + step, rows.num_rows)))
        yield _flatten(rows.column("at").take(indices), topics.take(indices), places)


def _flatten(times: Any, topic_entries: Any, places: Places) -> Samples:
    """Flatten records: each has entries of topics, each topic entries of brokers, and each broker lists of samples."""
    broker_entries = topic_entries.items
    lists = {name: broker_entries.items.field(name) for name in ("ids", "first", "last", "committed")}
    record_of_topic = np.repeat(np.arange(len(topic_entries)), np.diff(np.asarray(topic_entries.offsets)))
    topic_of_broker = np.repeat(np.arange(len(record_of_topic)), np.diff(np.asarray(broker_entries.offsets)))
    broker_of_sample = np.repeat(np.arange(len(topic_of_broker)), np.diff(np.asarray(lists["ids"].offsets)))
    place_of_broker = _encode_places(topic_entries.keys.take(pa.array(topic_of_broker)), broker_entries.keys, places)
    return Samples(
        at=_to_micros(times),
        record=record_of_topic[topic_of_broker][broker_of_sample],
        place=place_of_broker[broker_of_sample],
        queue=np.asarray(lists["ids"].values).astype(np.int64),
        first=np.asarray(lists["first"].values).astype(np.int64),
        last=np.asarray(lists["last"].values).astype(np.int64),
        committed=np.asarray(pc.fill_null(lists["committed"].values, lag_columns.NOT_COMMITTED)).astype(np.int64),
    )


def _encode_places(topics: Any, brokers: Any, places: Places) -> Integers:
    """Return the code of each pair of topic and broker."""
    topic = topics.dictionary_encode()
    broker = brokers.dictionary_encode()
    broker_count = len(broker.dictionary)
    pairs = np.asarray(topic.indices).astype(np.int64) * broker_count + np.asarray(broker.indices)
    distinct, index = np.unique(pairs, return_inverse=True)
    codes = [
        places.encode(
            Place(topic.dictionary[pair // broker_count].as_py(), broker.dictionary[pair % broker_count].as_py())
        )
        for pair in distinct.tolist()
    ]
    return np.array(codes, np.int64)[index]


def to_batches(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches."""
    remaining = iter(rows)
    while batch := list(islice(remaining, MAX_BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist(batch, schema=schema)


def interval_row(group: str, interval: Interval) -> dict[str, Any]:
    """Return an interval by the names of schemas.INTERVALS."""
    return interval._asdict() | _queue_fields(group, interval.queue)


def violation_row(group: str, violation: Violation) -> dict[str, Any]:
    """Return a violation by the names of schemas.VIOLATIONS."""
    return violation._asdict() | _queue_fields(group, violation.queue)


def _queue_fields(group: str, queue: Queue) -> dict[str, Any]:
    return {"group": group, "topic": queue.topic, "broker": queue.broker, "queue": queue.id}
