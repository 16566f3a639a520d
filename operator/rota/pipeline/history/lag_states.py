"""Lag states of groups, sample by sample, by the operator's own rules (`rota.lag_columns`).

The journal has one sample a minute; the operator judges by ten samples that are 15 s apart. So a queue is judged by
samples that cover the same time: those of the last 155 s, and the last three if they are at most five minutes old.

Spark judges stretches of three hours in parallel. A stretch comes with context from the hour before it: all records of
its last five minutes, and one of every four minutes before. The latter show when the oldest unread message arrived.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType, TimestampType

from rota import lag_columns
from rota.lag import LagState
from rota.model import RETRY_TOPIC_PREFIX
from rota.pipeline.history.audit import unowned_periods
from rota.pipeline.history.ownership import OwnershipAccount, build_account
from rota.pipeline.ingest.facts import Facts

SAMPLE_WINDOW = lag_columns.SampleWindow(max_samples=3, max_age_seconds=300.0, always_within_seconds=155.0)
MAX_SAMPLE_SECONDS = 120.0  # seconds: the longest time before it that a sample stands for
_STRETCH_SECONDS = 3 * 3600  # seconds; a group of 10,000 queues has two million samples in it, which must fit in memory
_HOUR_SECONDS = 3600  # context before a stretch
_FULL_CONTEXT_SECONDS = 300  # the last part of the context, with all samples
_THINNED_CONTEXT_MINUTES = 4  # minutes per sample in the thinned context

# One sample of a group; lag and delay cover subscribed topics, `back` and `retries` all topics.
SAMPLES_SCHEMA = StructType(
    [
        StructField("group", StringType()),
        StructField("hour", TimestampType()),
        StructField("at", TimestampType()),
        StructField("seconds", DoubleType()),  # that the sample stands for
        StructField("lag", LongType()),  # null: the lag of some queue is unknown
        StructField("delay", DoubleType()),  # null: the delay of some queue is unknown
        StructField("back", LongType()),  # messages by which committed offsets went back
        StructField("retries", LongType()),  # messages that arrived in the retry topic
        *(StructField(str(lag_state), LongType()) for lag_state in LagState),  # queues
    ]
)


def offset_samples(facts: Facts, account: OwnershipAccount | None = None) -> DataFrame:
    """Return a row for each sample of a group (SAMPLES_SCHEMA)."""
    second = F.unix_seconds("at")
    start = _stretch_start(second)
    remaining = start + _STRETCH_SECONDS - second
    context = (remaining <= _FULL_CONTEXT_SECONDS) | (
        (remaining <= _HOUR_SECONDS) & (F.floor(second / 60) % _THINNED_CONTEXT_MINUTES == 0)
    )
    stretches = F.when(context, F.array(start, start + _STRETCH_SECONDS)).otherwise(F.array(start))
    records = facts.offsets.select("group", F.explode(stretches).alias("stretch"), "at", "topics")
    notes = _stretch_notes(facts, account or build_account(facts))
    return (
        records.unionByName(notes, allowMissingColumns=True)
        .select("group", "stretch", "at", "topics", "startFrom", "model", "free")
        .repartition("group", "stretch")
        .sortWithinPartitions("group", "stretch", F.col("at").asc_nulls_first())
        .mapInArrow(_judge_batches, SAMPLES_SCHEMA)
    )


def _stretch_start(second: Column) -> Column:
    """Return the start of the stretch that contains a time."""
    return F.floor(second / _STRETCH_SECONDS) * _STRETCH_SECONDS


def _stretch_notes(facts: Facts, account: OwnershipAccount) -> DataFrame:
    """Return a row per group and stretch with data that samples lack: start position, model, queues without owner."""
    stretch = _stretch_start(F.unix_seconds("at")).alias("stretch")
    stretches = account.hours.select("group", _stretch_start(F.unix_seconds("hour")).alias("stretch")).distinct()
    rules = facts.owners.groupBy("group", stretch).agg(F.max_by(F.struct("startFrom", "model"), "at").alias("_rules"))
    order = Window.partitionBy("group").orderBy("stretch")
    earlier = F.last("_rules", ignorenulls=True).over(order.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    later = F.first("_rules", ignorenulls=True).over(order.rowsBetween(Window.currentRow, Window.unboundedFollowing))
    spans = unowned_periods(account.holdings).groupBy("group", "topic", "broker", "since", "until")
    free = spans.agg(F.collect_list("queue").alias("ids"))
    begins = F.col("stretch") - _HOUR_SECONDS
    ends = F.col("stretch") + _STRETCH_SECONDS
    overlaps = (F.unix_seconds("since") < ends) & (F.col("until").isNull() | (F.unix_seconds("until") >= begins))
    span = F.struct("topic", "broker", "since", "until", "ids")
    of_stretches = stretches.join(free, "group", how="inner").filter(overlaps).groupBy("group", "stretch")
    return (
        stretches.join(rules, ["group", "stretch"], how="left")
        .withColumn("_rules", F.coalesce(earlier, later))
        .join(of_stretches.agg(F.collect_list(span).alias("free")), ["group", "stretch"], how="left")
        .select("group", "stretch", "_rules.startFrom", "_rules.model", "free")
    )


def _judge_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Judge all complete stretches; a batch's last stretch waits for the next batch, which may continue it."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        begins = np.flatnonzero(_ends_stretch(batch))
        if len(begins):
            cut = int(begins[-1]) + 1
            yield from _judge_stretches([*waiting, batch.slice(0, cut)])
            waiting = []
            batch = batch.slice(cut)  # noqa: PLW2901 - its remaining rows
        waiting.append(batch)
    if waiting:
        yield from _judge_stretches(waiting)


def _ends_stretch(rows: pa.RecordBatch | pa.Table) -> NDArray[np.bool_]:
    """Return for each row but the last whether another stretch or group starts after it."""
    count = rows.num_rows
    changed = np.zeros(max(count - 1, 0), np.bool_)
    for name in ("group", "stretch"):
        column = rows.column(name)
        differs = pc.not_equal(column.slice(0, count - 1), column.slice(1)) if count > 1 else None
        if differs is not None:
            changed |= np.asarray(differs)
    return changed


class _Records(NamedTuple):
    """Records by stretch and time; the note of a stretch comes first, and has no samples."""

    at: NDArray[np.float64]  # of each record, in seconds; NaN: a note
    stretch_start: NDArray[np.float64]  # start of the record's stretch, in seconds
    stretch: NDArray[np.int64]  # index of the record's stretch
    record_of_sample: NDArray[np.int64]  # index of the record of each sample of a queue
    topic: NDArray[np.int64]  # of each sample, as an index into `topics`
    broker: NDArray[np.int64]
    queue: NDArray[np.int64]
    topics: list[str]
    brokers: list[str]


def _judge_stretches(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches(batches).combine_chunks()
    if not table.num_rows:
        return
    records, offsets = _flatten_records(table)
    begins, worked, broadcasting = _apply_notes(table, records)
    previous = _previous_samples(records)
    samples = lag_columns.OffsetColumns(records.at[records.record_of_sample], *offsets, worked, previous, begins)
    lags = lag_columns.compute_lags(samples)
    to_judge = ((records.at >= records.stretch_start) & ~broadcasting[records.stretch])[records.record_of_sample]
    steady = to_judge & _surely_keeps_up(records, samples, lags)
    undecided = np.flatnonzero(to_judge & ~steady)
    lag_states = np.where(steady, lag_columns.LAG_STATES.index(LagState.KEEPING_UP), 0).astype(np.int8)
    delays = np.where(steady, 0.0, np.nan)
    lag_states[undecided] = lag_columns.compute_lag_states(samples, lags, undecided, SAMPLE_WINDOW)
    delays[undecided] = lag_columns.compute_delays(samples, lags, undecided, _HOUR_SECONDS)
    yield from _aggregate(table, records, samples, lags, (delays, lag_states))


def _surely_keeps_up(
    records: _Records, samples: lag_columns.OffsetColumns, lags: lag_columns.Offsets
) -> NDArray[np.bool_]:
    """Return which samples certainly keep up: no lag, a known previous lag, and a stretch without rewound offsets.

    Nearly all samples are of this kind, and this test is cheap; the slow path judges the others by all their samples.
    """
    earlier = np.maximum(samples.previous_row, 0)
    rewound = (samples.previous_row >= 0) & (samples.committed_offset < samples.committed_offset[earlier])
    has_rewound = (
        np.bincount(records.stretch[records.record_of_sample[rewound]], minlength=int(records.stretch[-1]) + 1) > 0
    )
    at_end = (lags == 0) & (samples.committed_offset >= 0)
    comparable = (
        (samples.previous_row >= 0)
        & (lags[earlier] != lag_columns.NO_LAG)
        & (samples.sampled_at - samples.sampled_at[earlier] <= SAMPLE_WINDOW.max_age_seconds)
    )
    steady: NDArray[np.bool_] = at_end & comparable & ~has_rewound[records.stretch][records.record_of_sample]
    return steady


def _flatten_records(
    table: pa.Table,
) -> tuple[_Records, tuple[lag_columns.Offsets, lag_columns.Offsets, lag_columns.Offsets]]:
    """Flatten the samples of all records into columns."""
    topics = _single_chunk(table.column("topics"))
    inner = topics.items
    columns = inner.items
    lists = {name: columns.field(name) for name in ("ids", "first", "last", "committed")}
    of_topic = np.repeat(np.arange(table.num_rows), np.diff(np.asarray(topics.offsets)))
    brokers_of = np.diff(np.asarray(inner.offsets))
    samples_per_broker = np.diff(np.asarray(lists["ids"].offsets))
    topic, names = _encode_names(topics.keys)
    broker, places = _encode_names(inner.keys)
    per_broker = np.repeat(np.arange(len(of_topic)), brokers_of)
    per_sample = np.repeat(np.arange(len(per_broker)), samples_per_broker)
    number = np.concatenate([[0], np.cumsum(_ends_stretch(table))]).astype(np.int64)
    committed = pc.fill_null(lists["committed"].values, lag_columns.NOT_COMMITTED)
    values = {name: np.asarray(lists[name].values) for name in ("ids", "first", "last")}
    records = _Records(
        _to_seconds(table.column("at")),
        np.asarray(table.column("stretch"), np.float64),
        number,
        of_topic[per_broker][per_sample],
        topic[per_broker][per_sample],
        broker[per_sample],
        values["ids"].astype(np.int64),
        names,
        places,
    )
    return records, (values["first"], values["last"], np.asarray(committed))


def _single_chunk(column: Any) -> Any:
    """Return a column's only chunk, copied if it is a slice of a larger array."""
    chunk = column.chunk(0)
    return pa.concat_arrays([chunk]) if not chunk.offset else chunk.take(pa.array(np.arange(len(chunk))))


def _encode_names(names: Any) -> tuple[NDArray[np.int64], list[str]]:
    coded = names.dictionary_encode()
    return np.asarray(coded.indices).astype(np.int64), coded.dictionary.to_pylist()


def _to_seconds(column: Any) -> NDArray[np.float64]:
    micros = column.cast(pa.int64())
    return np.asarray(pc.divide(micros.cast(pa.float64()), 1e6).to_numpy(), np.float64)


def _apply_notes(table: pa.Table, records: _Records) -> tuple[NDArray[np.int8], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return by sample the start position and whether its queue had an owner; by stretch whether it is Broadcasting."""
    count = int(records.stretch[-1]) + 1
    starts = np.full(count, lag_columns.START_UNKNOWN, np.int8)
    broadcasting = np.zeros(count, np.bool_)
    worked = np.ones(len(records.record_of_sample), np.bool_)
    bounds = np.searchsorted(records.stretch[records.record_of_sample], np.arange(count + 1))
    for row in np.flatnonzero(np.isnan(records.at)).tolist():
        number = int(records.stretch[row])
        starts[number] = lag_columns.START_CODES.get(table.column("startFrom")[row].as_py(), lag_columns.START_UNKNOWN)
        broadcasting[number] = table.column("model")[row].as_py() == "Broadcasting"
        rows = slice(*bounds[number : number + 2].tolist())
        for span in table.column("free")[row].as_py() or ():
            worked[rows] &= ~_is_in_period(records, rows, span)
    retries = np.array([name.startswith(RETRY_TOPIC_PREFIX) for name in records.topics] or [False])
    begins = np.where(
        retries[records.topic], lag_columns.START_EARLIEST, starts[records.stretch[records.record_of_sample]]
    ).astype(np.int8)
    return begins, worked, broadcasting


def _is_in_period(records: _Records, sample_slice: slice, period: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which samples in a slice fall into a period in which their queue had no owner."""
    lookups = (records.topics, period["topic"]), (records.brokers, period["broker"])
    if any(name not in all_names for all_names, name in lookups):
        return np.zeros(sample_slice.stop - sample_slice.start, np.bool_)
    at = records.at[records.record_of_sample[sample_slice]]
    until = period["until"].timestamp() if period["until"] else np.inf
    inside: NDArray[np.bool_] = (at >= period["since"].timestamp()) & (at < until)
    inside &= records.topic[sample_slice] == records.topics.index(period["topic"])
    inside &= records.broker[sample_slice] == records.brokers.index(period["broker"])
    return inside & np.isin(records.queue[sample_slice], period["ids"])


def _previous_samples(records: _Records) -> lag_columns.RowIndices:
    """Return the index of the queue's sample in the previous record, or -1; a queue that was absent counts as new."""
    count = len(records.record_of_sample)
    key = (records.stretch[records.record_of_sample] * (len(records.topics) + 1) + records.topic) * (
        len(records.brokers) + 1
    )
    key = (key + records.broker) * (int(records.queue.max(initial=0)) + 1) + records.queue
    order = np.argsort(key, kind="stable")
    earlier, later = order[:-1], order[1:]
    same = (key[earlier] == key[later]) & (records.record_of_sample[later] == records.record_of_sample[earlier] + 1)
    previous = np.full(count, -1, np.intp)
    previous[later[same]] = earlier[same]
    return previous


def _aggregate(
    table: pa.Table,
    records: _Records,
    samples: lag_columns.OffsetColumns,
    lags: lag_columns.Offsets,
    results: tuple[NDArray[np.float64], NDArray[np.int8]],
) -> Iterator[pa.RecordBatch]:
    """Aggregate the samples of all queues to one row per record (SAMPLES_SCHEMA)."""
    count = table.num_rows
    (delays, lag_states) = results
    retries = np.array([name.startswith(RETRY_TOPIC_PREFIX) for name in records.topics] or [False])[records.topic]
    own = ~retries
    earlier = np.maximum(samples.previous_row, 0)
    recent = (samples.previous_row >= 0) & (
        samples.sampled_at - samples.sampled_at[earlier] <= SAMPLE_WINDOW.max_age_seconds
    )  # older context is thinned out
    comparable = recent & (samples.committed_offset >= 0) & (samples.committed_offset[earlier] >= 0)
    back = np.where(comparable, np.maximum(samples.committed_offset[earlier] - samples.committed_offset, 0), 0)
    arrived = np.where(retries & recent, np.maximum(samples.max_offset - samples.max_offset[earlier], 0), 0)
    unknown = _sum_by_record(records.record_of_sample[own & (lags == lag_columns.NO_LAG)], count) + (
        _sum_by_record(records.record_of_sample[own], count) == 0
    )
    lag = np.zeros(count, np.int64)
    delay = np.zeros(count)
    np.add.at(lag, records.record_of_sample[own], np.where(lags == lag_columns.NO_LAG, 0, lags)[own])
    np.maximum.at(delay, records.record_of_sample[own], np.where(np.isnan(delays), np.inf, delays)[own])
    rows = np.flatnonzero(records.at >= records.stretch_start)
    step = np.diff(records.at, prepend=np.nan)
    same = np.diff(records.stretch, prepend=-1) == 0
    at = table.column("at").take(pa.array(rows))
    seconds = np.where(same & (step <= SAMPLE_WINDOW.max_age_seconds), np.minimum(step, MAX_SAMPLE_SECONDS), 0.0)
    columns = {
        "group": table.column("group").take(pa.array(rows)),
        "hour": pc.floor_temporal(at, unit="hour"),
        "at": at,
        "seconds": pa.array(seconds[rows]),
        "lag": pa.array(lag[rows], mask=unknown[rows] > 0),
        "delay": pa.array(delay[rows], mask=(unknown[rows] > 0) | np.isinf(delay[rows])),
        "back": pa.array(_sum_by_record(records.record_of_sample, count, back)[rows]),
        "retries": pa.array(_sum_by_record(records.record_of_sample, count, arrived)[rows]),
    }
    for place, lag_state in enumerate(lag_columns.LAG_STATES):
        if lag_state:
            columns[str(lag_state)] = pa.array(
                _sum_by_record(records.record_of_sample[lag_states == place], count)[rows]
            )
    yield from pa.table(columns).to_batches()


def _sum_by_record(
    record_of_sample: NDArray[np.int64], size: int, weights: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    counts = np.zeros(size, np.int64)
    np.add.at(counts, record_of_sample, 1 if weights is None else weights)
    return counts
