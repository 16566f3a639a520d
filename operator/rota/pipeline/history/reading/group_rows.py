"""Reads records and samples from Arrow batches in order of the group, and yields them group by group.

The batches of records, which `rota.pipeline.history.reading.buckets` makes, have a column of structs for each kind of
record. In each row only the column of its own kind is set. `Fact` is the base class of records about a group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rota import lag_columns
from rota.pipeline.history.group_records import GroupRecords
from rota.pipeline.history.samples import Integers, Place, Places, Samples
from rota.records import KINDS, RECORD_SCHEMA, Fact

_FACTS: Mapping[str, type[Fact]] = {str(kind.__struct_config__.tag): kind for kind in KINDS if issubclass(kind, Fact)}


class GroupRows(NamedTuple):
    """A group's records, and its samples: batches of `lake/offsets` in order of time, which can be read only once."""

    group: str
    records: GroupRecords
    offsets: Iterator[pa.RecordBatch]

    def samples(self, places: Places) -> Iterator[Samples]:
        """Yield the samples, in parts that fit in memory."""
        for batch in self.offsets:
            yield _read_samples(batch, places)

    def add_sample_times(self) -> None:
        """Add only the times of all samples, which show until when the operator has recorded the group."""
        for batch in self.offsets:
            self.records.add_state_times(_to_micros(batch.column("at")))


def read_groups(
    records: Iterable[pa.RecordBatch], offsets: Iterable[pa.RecordBatch], has_group: Callable[[str], bool]
) -> Iterator[GroupRows]:
    """Yield the groups of this task that have records or offsets.

    `records` and `offsets` are in order of the group, and so is the result. `records` are only of groups of this task;
    `offsets` may have other groups, too (`has_group`). The caller must read the offsets of a group before the next one.
    """
    recorded_groups = _read_records(records)
    sampled_groups = filter(lambda rows: has_group(rows.group), _split_offsets(offsets))
    recorded = next(recorded_groups, None)
    sampled = next(sampled_groups, None)
    while recorded or sampled:
        if recorded and sampled and recorded.group == sampled.group:
            yield recorded._replace(offsets=sampled.offsets)
            recorded = next(recorded_groups, None)
            sampled = next(sampled_groups, None)
        elif recorded and (sampled is None or recorded.group < sampled.group):
            yield recorded
            recorded = next(recorded_groups, None)
        elif sampled:
            yield sampled
            sampled = next(sampled_groups, None)


def _read_records(batches: Iterable[pa.RecordBatch]) -> Iterator[GroupRows]:
    """Yield the records of each group; memory holds the records of one batch's groups."""
    by_group: dict[str, GroupRecords] = {}
    for batch in batches:
        for group in pc.unique(batch.column("group")).to_pylist():
            by_group.setdefault(group, GroupRecords())
        _add_records(batch, by_group)
        for group in list(by_group)[:-1]:  # the next batch may have more records of the last group
            yield GroupRows(group, by_group.pop(group), iter(()))
    for group, records in by_group.items():
        yield GroupRows(group, records, iter(()))


def _split_offsets(batches: Iterable[pa.RecordBatch]) -> Iterator[GroupRows]:
    """Yield the rows of offsets of each group. The caller must read them before it takes the next group."""
    for group, parts in groupby(_group_parts(batches), key=itemgetter(0)):
        yield GroupRows(group, GroupRecords(), map(itemgetter(1), parts))


def _group_parts(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield each batch's rows of one group after the other."""
    for batch in batches:
        groups = pc.run_end_encode(batch.column("group"))
        begin = 0
        for group, end in zip(groups.values.to_pylist(), groups.run_ends.to_pylist(), strict=True):
            yield group, batch.slice(begin, end - begin)
            begin = end


def _add_records(rows: pa.RecordBatch, by_group: Mapping[str, GroupRecords]) -> None:
    """Add the records of some rows to their groups. A kind without a column is one of which only times are needed."""
    kinds = rows.column("kind").dictionary_encode()
    for code, kind in enumerate(kinds.dictionary.to_pylist()):
        rows_of_kind = rows.filter(pc.equal(kinds.indices, code))
        if kind in rows.schema.names:
            columns = (
                rows_of_kind.column("group").to_pylist(),
                rows_of_kind.column("at").to_pylist(),
                _to_values(rows_of_kind.column(kind)),
            )
            for group, at, fields in zip(*columns, strict=True):
                by_group[group].add(_to_fact(_FACTS[kind], fields | {"at": at}))
        else:
            for group, part in _group_parts([rows_of_kind]):
                by_group[group].add_state_times(_to_micros(part.column("at")))


def _to_values(column: Any) -> list[Any]:
    """Return the values of a column (not of a slice): structs and maps as dicts, and a null list or map as empty.

    Arrow's own `to_pylist` makes an object of each nested value before its Python value, and takes seven times as long.
    """
    if pa.types.is_struct(column.type):
        fields = {field.name: _to_values(column.field(field.name)) for field in column.type}
        return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
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
    if "rules" in fields:  # a column of JSON text
        fields["rules"] = msgspec.json.decode(fields["rules"] or "{}")
    return msgspec.convert(fields | {"schema": RECORD_SCHEMA, "group": ""}, kind)  # GroupRows has the group


def _to_micros(times: Any) -> Integers:
    """Return times in microseconds since 1970."""
    return np.asarray(times.cast(pa.int64())).astype(np.int64)


def _read_samples(rows: pa.RecordBatch, places: Places) -> Samples:
    # `take` copies the rows, because nested lists of a slice start at an offset in shared buffers.
    indices = pa.array(np.arange(rows.num_rows))
    return _flatten(rows.column("at").take(indices), rows.column("topics").take(indices), places)


def _flatten(times: Any, topic_entries: Any, places: Places) -> Samples:
    """Flatten records: {topic: {broker: {ids, first, last, committed}}}, four lists with an item a queue."""
    broker_entries = topic_entries.items
    lists = {name: broker_entries.items.field(name) for name in ("ids", "first", "last", "committed")}
    record_of_topic = _parent_indices(topic_entries.offsets)
    topic_of_broker = _parent_indices(broker_entries.offsets)
    broker_of_sample = _parent_indices(lists["ids"].offsets)
    record_of_broker = record_of_topic[topic_of_broker]
    place_of_broker = _encode_places(topic_entries.keys.take(pa.array(topic_of_broker)), broker_entries.keys, places)
    return Samples(
        at=_to_micros(times),
        record=record_of_broker[broker_of_sample],
        place=place_of_broker[broker_of_sample],
        queue=np.asarray(lists["ids"].values).astype(np.int64),
        first=np.asarray(lists["first"].values).astype(np.int64),
        last=np.asarray(lists["last"].values).astype(np.int64),
        committed=np.asarray(pc.fill_null(lists["committed"].values, lag_columns.NOT_COMMITTED)).astype(np.int64),
    )


def _parent_indices(offsets: Any) -> Integers:
    """Return for each child of nested values the index of its parent: 0 0 1 for the Arrow offsets 0 2 3."""
    counts = np.diff(np.asarray(offsets))
    return np.repeat(np.arange(len(counts)), counts)


def _encode_places(topics: Any, brokers: Any, places: Places) -> Integers:
    """Return for each pair of topic and broker its code in `places`."""
    topic = topics.dictionary_encode()
    broker = brokers.dictionary_encode()
    broker_count = len(broker.dictionary)
    pairs = np.asarray(topic.indices).astype(np.int64) * broker_count + np.asarray(broker.indices)
    distinct, index = np.unique(pairs, return_inverse=True)
    codes: list[int] = []
    for pair in distinct.tolist():
        place = Place(topic.dictionary[pair // broker_count].as_py(), broker.dictionary[pair % broker_count].as_py())
        codes.append(places.encode(place))
    return np.array(codes, np.int64)[index]
