"""Lag states of groups, sample by sample, by the operator's own rules (`rota.lag_columns`).

The journal has one sample a minute; the operator judges by ten samples that are 15 s apart. So a queue is judged by
samples that cover the same time: those of the last 155 s, and the last three if they are at most five minutes old.

Spark judges stretches of three hours in parallel. A stretch comes with context from the hour before it: all records of
its last five minutes, and one every four minutes before. The latter show when the oldest unread message arrived.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota import lag_columns
from rota.lag import LagState
from rota.model import RETRY_TOPIC_PREFIX
from rota.pipeline.common.schemas import COUNT, NUMBER, TEXT, TIME, table_schema
from rota.pipeline.history.audit import unowned_periods
from rota.pipeline.history.ownership import OwnershipAccount, build_account
from rota.pipeline.ingest.facts import Facts

SAMPLE_WINDOW = lag_columns.SampleWindow(max_samples=3, max_age_seconds=300.0, always_within_seconds=155.0)
MAX_SAMPLE_SECONDS = 120.0  # longest time before a sample for which it stands
_STRETCH_SECONDS = 3 * 3600  # a group of 10,000 queues has two million samples in a stretch, which must fit in memory
_CONTEXT_SECONDS = 3600  # length of the context before a stretch
_FULL_CONTEXT_SECONDS = 300  # length of the last part of the context, with all samples
_THINNED_CONTEXT_MINUTES = 4  # minutes per sample in the thinned context

# One sample of a group; lag and delay cover subscribed topics, `back` and `retries` all topics.
SAMPLES_SCHEMA = table_schema(
    group=TEXT,
    hour=TIME,
    at=TIME,
    seconds=NUMBER,  # that the sample stands for
    lag=COUNT,  # null: the lag of some queue is unknown
    delay=NUMBER,  # null: the delay of some queue is unknown
    back=COUNT,  # messages by which committed offsets went back
    retries=COUNT,  # messages that arrived in the retry topic
    **{str(lag_state): COUNT for lag_state in LagState},  # number of queues
)


def offset_samples(facts: Facts, account: OwnershipAccount | None = None) -> DataFrame:
    """Return a row for each sample of a group (SAMPLES_SCHEMA)."""
    second = F.unix_seconds("at")
    start = _stretch_start(second)
    remaining = start + _STRETCH_SECONDS - second
    is_thinned_sample = F.floor(second / 60) % _THINNED_CONTEXT_MINUTES == 0
    is_context_of_next = (remaining <= _FULL_CONTEXT_SECONDS) | ((remaining <= _CONTEXT_SECONDS) & is_thinned_sample)
    stretches = F.when(is_context_of_next, F.array(start, start + _STRETCH_SECONDS)).otherwise(F.array(start))
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
    begins = F.col("stretch") - _CONTEXT_SECONDS
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
        ends = np.flatnonzero(_ends_stretch(batch))
        if len(ends):
            cut = int(ends[-1]) + 1
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
    for column in (rows.column("group"), rows.column("stretch")) if count > 1 else ():
        changed |= np.asarray(pc.not_equal(column.slice(0, count - 1), column.slice(1)))
    return changed


class _Records(NamedTuple):
    """Records by stretch and time, and the samples of queues in them; a stretch's note comes first, without samples."""

    # By record.
    at: NDArray[np.float64]  # in seconds; NaN: a note
    stretch_start: NDArray[np.float64]  # in seconds
    stretch: NDArray[np.int64]  # index of the record's stretch
    # By sample.
    record_of_sample: NDArray[np.int64]  # index of the record
    topic: NDArray[np.int64]  # as an index into `topics`
    broker: NDArray[np.int64]  # as an index into `brokers`
    queue: NDArray[np.int64]
    # Names.
    topics: list[str]
    brokers: list[str]


def _judge_stretches(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches(batches).combine_chunks()
    if not table.num_rows:
        return
    records, offsets = _flatten_records(table)
    start_codes, has_owner, is_broadcasting = _apply_notes(table, records)
    samples = lag_columns.OffsetColumns(
        sampled_at=records.at[records.record_of_sample],
        min_offset=offsets["first"],
        max_offset=offsets["last"],
        committed_offset=offsets["committed"],
        has_owner=has_owner,
        previous_row=_previous_samples(records),
        start_code=start_codes,
    )
    lags = lag_columns.compute_lags(samples)
    # Records before the start of their stretch are only context.
    is_judged = ((records.at >= records.stretch_start) & ~is_broadcasting[records.stretch])[records.record_of_sample]
    is_steady = is_judged & _surely_keeps_up(records, samples, lags)
    others = np.flatnonzero(is_judged & ~is_steady)
    keeping_up = lag_columns.LAG_STATES.index(LagState.KEEPING_UP)
    lag_states = np.where(is_steady, keeping_up, lag_columns.NO_STATE).astype(np.int8)
    delays = np.where(is_steady, 0.0, np.nan)
    lag_states[others] = lag_columns.compute_lag_states(samples, lags, others, SAMPLE_WINDOW)
    delays[others] = lag_columns.compute_delays(samples, lags, others, _CONTEXT_SECONDS)
    yield from _aggregate(table, records, samples, lags, (delays, lag_states))


def _surely_keeps_up(
    records: _Records, samples: lag_columns.OffsetColumns, lags: lag_columns.Offsets
) -> NDArray[np.bool_]:
    """Return which samples certainly keep up: a lag of 0, a known previous lag, and a stretch without rewound offsets.

    Nearly all samples are of this kind, and this test is cheap; the slow path judges the others by all their samples.
    """
    stretch_of_sample = records.stretch[records.record_of_sample]
    has_previous = samples.previous_row >= 0
    previous = np.maximum(samples.previous_row, 0)  # of no meaning without a previous sample
    is_rewound = has_previous & (samples.committed_offset < samples.committed_offset[previous])
    rewound_count = np.bincount(stretch_of_sample[is_rewound], minlength=int(records.stretch[-1]) + 1)
    is_at_end = (lags == 0) & (samples.committed_offset >= 0)
    is_recent = samples.sampled_at - samples.sampled_at[previous] <= SAMPLE_WINDOW.max_age_seconds
    is_comparable = has_previous & (lags[previous] != lag_columns.LAG_UNKNOWN) & is_recent
    is_steady: NDArray[np.bool_] = is_at_end & is_comparable & (rewound_count == 0)[stretch_of_sample]
    return is_steady


def _flatten_records(table: pa.Table) -> tuple[_Records, dict[str, lag_columns.Offsets]]:
    """Flatten the records of a table, and their offsets by name.

    In Arrow each record has entries of topics, each topic entries of brokers, and each broker lists of samples.
    """
    topic_entries = _single_chunk(table.column("topics"))
    broker_entries = topic_entries.items
    lists = {name: broker_entries.items.field(name) for name in ("ids", "first", "last", "committed")}
    record_of_topic = np.repeat(np.arange(table.num_rows), np.diff(np.asarray(topic_entries.offsets)))
    topic_of_broker = np.repeat(np.arange(len(record_of_topic)), np.diff(np.asarray(broker_entries.offsets)))
    broker_of_sample = np.repeat(np.arange(len(topic_of_broker)), np.diff(np.asarray(lists["ids"].offsets)))
    topic, topic_names = _encode_names(topic_entries.keys)
    broker, broker_names = _encode_names(broker_entries.keys)
    records = _Records(
        at=_to_seconds(table.column("at")),
        stretch_start=np.asarray(table.column("stretch"), np.float64),
        stretch=np.concatenate([[0], np.cumsum(_ends_stretch(table))]).astype(np.int64),
        record_of_sample=record_of_topic[topic_of_broker][broker_of_sample],
        topic=topic[topic_of_broker][broker_of_sample],
        broker=broker[broker_of_sample],
        queue=np.asarray(lists["ids"].values).astype(np.int64),
        topics=topic_names,
        brokers=broker_names,
    )
    offsets = {name: np.asarray(lists[name].values) for name in ("first", "last")}
    offsets["committed"] = np.asarray(pc.fill_null(lists["committed"].values, lag_columns.NOT_COMMITTED))
    return records, offsets


def _single_chunk(column: Any) -> Any:
    """Return a column's only chunk without the rows before and after it in the buffers that it may share.

    `concat_arrays` cuts off later rows; values of nested lists before an offset remain, so `take` copies such a chunk.
    """
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
    start_of_stretch = np.full(count, lag_columns.START_UNKNOWN, np.int8)
    is_broadcasting = np.zeros(count, np.bool_)
    has_owner = np.ones(len(records.record_of_sample), np.bool_)
    stretch_of_sample = records.stretch[records.record_of_sample]
    bounds = np.searchsorted(stretch_of_sample, np.arange(count + 1))  # stretch n has samples bounds[n]:bounds[n + 1]
    for row in np.flatnonzero(np.isnan(records.at)).tolist():
        stretch = int(records.stretch[row])
        position = table.column("startFrom")[row].as_py()
        start_of_stretch[stretch] = lag_columns.START_CODES.get(position, lag_columns.START_UNKNOWN)
        is_broadcasting[stretch] = table.column("model")[row].as_py() == "Broadcasting"
        sample_slice = slice(*bounds[stretch : stretch + 2].tolist())
        for period in table.column("free")[row].as_py() or ():
            has_owner[sample_slice] &= ~_is_in_period(records, sample_slice, period)
    # The operator starts retry topics at their beginning, whatever the group's start position.
    start_codes = np.where(_is_retry(records), lag_columns.START_EARLIEST, start_of_stretch[stretch_of_sample])
    return start_codes.astype(np.int8), has_owner, is_broadcasting


def _is_retry(records: _Records) -> NDArray[np.bool_]:
    """Return which samples are of retry queues."""
    by_topic = np.array([name.startswith(RETRY_TOPIC_PREFIX) for name in records.topics], np.bool_)
    is_retry: NDArray[np.bool_] = by_topic[records.topic]
    return is_retry


def _is_in_period(records: _Records, sample_slice: slice, period: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which samples in a slice fall into a period in which their queue had no owner."""
    if period["topic"] not in records.topics or period["broker"] not in records.brokers:
        return np.zeros(sample_slice.stop - sample_slice.start, np.bool_)
    at = records.at[records.record_of_sample[sample_slice]]
    until = period["until"].timestamp() if period["until"] else np.inf
    inside: NDArray[np.bool_] = (at >= period["since"].timestamp()) & (at < until)
    inside &= records.topic[sample_slice] == records.topics.index(period["topic"])
    inside &= records.broker[sample_slice] == records.brokers.index(period["broker"])
    return inside & np.isin(records.queue[sample_slice], period["ids"])


def _previous_samples(records: _Records) -> lag_columns.RowIndices:
    """Return the index of the queue's sample in the previous record, or -1; a queue that was absent counts as new."""
    # A number for each stretch and queue.
    key = records.stretch[records.record_of_sample] * (len(records.topics) + 1) + records.topic
    key = key * (len(records.brokers) + 1) + records.broker
    key = key * (int(records.queue.max(initial=0)) + 1) + records.queue
    order = np.argsort(key, kind="stable")
    earlier = order[:-1]
    later = order[1:]
    is_next_record = records.record_of_sample[later] == records.record_of_sample[earlier] + 1
    is_same_queue = (key[earlier] == key[later]) & is_next_record
    previous = np.full(len(key), -1, np.intp)
    previous[later[is_same_queue]] = earlier[is_same_queue]
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
    delays, lag_states = results
    is_retry = _is_retry(records)
    is_subscribed = ~is_retry
    previous = np.maximum(samples.previous_row, 0)
    age_seconds = samples.sampled_at - samples.sampled_at[previous]
    # Older context is thinned out.
    is_recent = (samples.previous_row >= 0) & (age_seconds <= SAMPLE_WINDOW.max_age_seconds)
    is_comparable = is_recent & (samples.committed_offset >= 0) & (samples.committed_offset[previous] >= 0)
    went_back = np.maximum(samples.committed_offset[previous] - samples.committed_offset, 0)
    back = np.where(is_comparable, went_back, 0)
    arrived = np.where(is_retry & is_recent, np.maximum(samples.max_offset - samples.max_offset[previous], 0), 0)
    record_of_subscribed = records.record_of_sample[is_subscribed]
    is_lag_unknown = lags == lag_columns.LAG_UNKNOWN
    unknown_count = _sum_by_record(records.record_of_sample[is_subscribed & is_lag_unknown], count)
    # Lag and delay are unknown if the lag of any subscribed queue is, or if the record has no such queue.
    is_unknown = (unknown_count > 0) | (_sum_by_record(record_of_subscribed, count) == 0)
    lag = _sum_by_record(record_of_subscribed, count, np.where(is_lag_unknown, 0, lags)[is_subscribed])
    delay = np.zeros(count)
    np.maximum.at(delay, record_of_subscribed, np.where(np.isnan(delays), np.inf, delays)[is_subscribed])
    rows = np.flatnonzero(records.at >= records.stretch_start)
    step_seconds = np.diff(records.at, prepend=np.nan)
    is_same_stretch = np.diff(records.stretch, prepend=-1) == 0
    is_covered = is_same_stretch & (step_seconds <= SAMPLE_WINDOW.max_age_seconds)
    at = table.column("at").take(pa.array(rows))
    seconds = np.where(is_covered, np.minimum(step_seconds, MAX_SAMPLE_SECONDS), 0.0)
    columns = {
        "group": table.column("group").take(pa.array(rows)),
        "hour": pc.floor_temporal(at, unit="hour"),
        "at": at,
        "seconds": pa.array(seconds[rows]),
        "lag": pa.array(lag[rows], mask=is_unknown[rows]),
        "delay": pa.array(delay[rows], mask=is_unknown[rows] | np.isinf(delay[rows])),
        "back": pa.array(_sum_by_record(records.record_of_sample, count, back)[rows]),
        "retries": pa.array(_sum_by_record(records.record_of_sample, count, arrived)[rows]),
    }
    for code, lag_state in enumerate(lag_columns.LAG_STATES):
        if lag_state:  # the code NO_STATE has none
            queues = _sum_by_record(records.record_of_sample[lag_states == code], count)
            columns[str(lag_state)] = pa.array(queues[rows])
    yield from pa.table(columns).to_batches()


def _sum_by_record(
    record_of_sample: NDArray[np.int64], size: int, weights: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    counts = np.zeros(size, np.int64)
    np.add.at(counts, record_of_sample, 1 if weights is None else weights)
    return counts
