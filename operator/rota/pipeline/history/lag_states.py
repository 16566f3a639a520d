"""Lag states of groups, sample by sample, judged as the operator does it: by `rota.lag_columns`.

The journal has a look a minute, the operator judges by ten that are 15 s apart. So a queue is judged by the looks of
the same stretch of time: those of the last 155 s, and the last three if they are of the last five minutes.

They are judged by stretches of some hours, side by side. With a stretch's records stand some of the hour before it: all
of its last five minutes, and one in four minutes, which tell when a message came that still waits.
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
from rota.lag import Judgement
from rota.model import RETRY
from rota.pipeline.history.audit import nobodys
from rota.pipeline.history.ownership import Account, account
from rota.pipeline.ingest.facts import Facts

WINDOW = lag_columns.Window(looks=3, old=300.0, young=155.0)
STANDS = 120.0  # seconds: longer than that after the look before it a look says nothing of what was
_STRETCH = 3 * 3600  # seconds: a group of 10,000 queues has two million looks in it, which must fit in memory
_HOUR, _CONTEXT = 3600, 300  # seconds before a stretch of which some looks are taken, and of which all are
_THIN = 4  # minutes of which one is some

# One look at a group; lag and delay are those of what it subscribes to, `back` and `retries` of all.
LOOKS = StructType(
    [
        StructField("group", StringType()),
        StructField("hour", TimestampType()),
        StructField("at", TimestampType()),
        StructField("seconds", DoubleType()),  # since the look before
        StructField("lag", LongType()),  # null: of some queue nobody knows
        StructField("delay", DoubleType()),  # the same
        StructField("back", LongType()),  # messages by which committed offsets went back
        StructField("retries", LongType()),  # messages that came to the retry topic
        *(StructField(str(verdict), LongType()) for verdict in Judgement),  # queues
    ]
)


def looks(facts: Facts, it: Account | None = None) -> DataFrame:
    """Return what each look at a group says."""
    second = F.unix_seconds("at")
    own = _stretch(second)
    left = own + _STRETCH - second
    context = (left <= _CONTEXT) | ((left <= _HOUR) & (F.floor(second / 60) % _THIN == 0))
    stretches = F.when(context, F.array(own, own + _STRETCH)).otherwise(F.array(own))
    records = facts.offsets.select("group", F.explode(stretches).alias("stretch"), "at", "topics")
    notes = _notes(facts, it or account(facts))
    return (
        records.unionByName(notes, allowMissingColumns=True)
        .select("group", "stretch", "at", "topics", "startFrom", "model", "free")
        .repartition("group", "stretch")
        .sortWithinPartitions("group", "stretch", F.col("at").asc_nulls_first())
        .mapInArrow(_judged, LOOKS)
    )


def _stretch(second: Column) -> Column:
    """Return when the stretch of a time begins."""
    return F.floor(second / _STRETCH) * _STRETCH


def _notes(facts: Facts, it: Account) -> DataFrame:
    """Return a row for a group's stretch with what looks alone do not tell: where it begins, and what nobody had."""
    stretch = _stretch(F.unix_seconds("at")).alias("stretch")
    stretches = it.seen.select("group", _stretch(F.unix_seconds("hour")).alias("stretch")).distinct()
    rules = facts.owners.groupBy("group", stretch).agg(F.max_by(F.struct("startFrom", "model"), "at").alias("_rules"))
    order = Window.partitionBy("group").orderBy("stretch")
    before = F.last("_rules", ignorenulls=True).over(order.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    after = F.first("_rules", ignorenulls=True).over(order.rowsBetween(Window.currentRow, Window.unboundedFollowing))
    spans = nobodys(it.held).groupBy("group", "topic", "broker", "since", "until")
    free = spans.agg(F.collect_list("queue").alias("ids"))
    begins, ends = F.col("stretch") - _HOUR, F.col("stretch") + _STRETCH
    some = (F.unix_seconds("since") < ends) & (F.col("until").isNull() | (F.unix_seconds("until") >= begins))
    span = F.struct("topic", "broker", "since", "until", "ids")
    of_stretches = stretches.join(free, "group", how="inner").filter(some).groupBy("group", "stretch")
    return (
        stretches.join(rules, ["group", "stretch"], how="left")
        .withColumn("_rules", F.coalesce(before, after))
        .join(of_stretches.agg(F.collect_list(span).alias("free")), ["group", "stretch"], how="left")
        .select("group", "stretch", "_rules.startFrom", "_rules.model", "free")
    )


def _judged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Judge all stretches of groups that are whole; what a batch has of the last one waits for the next."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        begins = np.flatnonzero(_changes(batch))
        if len(begins):
            cut = int(begins[-1]) + 1
            yield from _stretches([*waiting, batch.slice(0, cut)])
            waiting = []
            batch = batch.slice(cut)  # noqa: PLW2901 - the rest of it
        waiting.append(batch)
    if waiting:
        yield from _stretches(waiting)


def _changes(rows: pa.RecordBatch | pa.Table) -> NDArray[np.bool_]:
    """Return after which rows another stretch, or another group, begins."""
    many = rows.num_rows
    found = np.zeros(max(many - 1, 0), np.bool_)
    for name in ("group", "stretch"):
        column = rows.column(name)
        differs = pc.not_equal(column.slice(0, many - 1), column.slice(1)) if many > 1 else None
        if differs is not None:
            found |= np.asarray(differs)
    return found


class _Records(NamedTuple):
    """Records in their order; notes are among them, without a look."""

    at: NDArray[np.float64]  # seconds; NaN: a note
    begins: NDArray[np.float64]  # the stretch
    number: NDArray[np.int64]  # of the group's stretch
    of: NDArray[np.int64]  # the record that each look at a queue is of
    topic: NDArray[np.int64]  # of each look, by its number
    broker: NDArray[np.int64]
    queue: NDArray[np.int64]
    topics: list[str]
    brokers: list[str]


def _stretches(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches(batches).combine_chunks()
    if not table.num_rows:
        return
    records, offsets = _records(table)
    begins, worked, everyones = _noted(table, records)
    before = _before(records)
    it = lag_columns.Looks(records.at[records.of], *offsets, worked, before, begins)
    lags = lag_columns.behind(it)
    asked = ((records.at >= records.begins) & ~everyones[records.number])[records.of]
    steady = asked & _steady(records, it, lags)
    open_ = np.flatnonzero(asked & ~steady)
    verdicts = np.where(steady, lag_columns.VERDICTS.index(Judgement.KEEPING_UP), 0).astype(np.int8)
    delays = np.where(steady, 0.0, np.nan)
    verdicts[open_] = lag_columns.verdicts(it, lags, open_, WINDOW)
    delays[open_] = lag_columns.delays(it, lags, open_, _HOUR)
    yield from _summed(table, records, it, lags, (delays, verdicts))


def _steady(records: _Records, it: lag_columns.Looks, lags: lag_columns.Offsets) -> NDArray[np.bool_]:
    """Return which queues are at their end, and were before, in a stretch in which nothing goes back.

    That is nearly all, and quickly seen; the others have to be looked at in all of their looks.
    """
    earlier = np.maximum(it.before, 0)
    fell = (it.before >= 0) & (it.committed < it.committed[earlier])
    restless = np.bincount(records.number[records.of[fell]], minlength=int(records.number[-1]) + 1) > 0
    at_end = (lags == 0) & (it.committed >= 0)
    known = (it.before >= 0) & (lags[earlier] != lag_columns.NO_LAG) & (it.at - it.at[earlier] <= WINDOW.old)
    steady: NDArray[np.bool_] = at_end & known & ~restless[records.number][records.of]
    return steady


def _records(table: pa.Table) -> tuple[_Records, tuple[lag_columns.Offsets, lag_columns.Offsets, lag_columns.Offsets]]:
    """Lay all looks of all records into columns."""
    topics = _one(table.column("topics"))
    inner = topics.items
    columns = inner.items
    lists = {name: columns.field(name) for name in ("ids", "first", "last", "committed")}
    of_topic = np.repeat(np.arange(table.num_rows), np.diff(np.asarray(topics.offsets)))
    brokers_of = np.diff(np.asarray(inner.offsets))
    looks_of = np.diff(np.asarray(lists["ids"].offsets))
    topic, names = _numbers(topics.keys)
    broker, places = _numbers(inner.keys)
    per_broker = np.repeat(np.arange(len(of_topic)), brokers_of)
    per_look = np.repeat(np.arange(len(per_broker)), looks_of)
    number = np.concatenate([[0], np.cumsum(_changes(table))]).astype(np.int64)
    committed = pc.fill_null(lists["committed"].values, lag_columns.NEVER)
    values = {name: np.asarray(lists[name].values) for name in ("ids", "first", "last")}
    records = _Records(
        _seconds(table.column("at")),
        np.asarray(table.column("stretch"), np.float64),
        number,
        of_topic[per_broker][per_look],
        topic[per_broker][per_look],
        broker[per_look],
        values["ids"].astype(np.int64),
        names,
        places,
    )
    return records, (values["first"], values["last"], np.asarray(committed))


def _one(column: Any) -> Any:
    """Return a column's only chunk, without what other slices have of it."""
    chunk = column.chunk(0)
    return pa.concat_arrays([chunk]) if not chunk.offset else chunk.take(pa.array(np.arange(len(chunk))))


def _numbers(names: Any) -> tuple[NDArray[np.int64], list[str]]:
    coded = names.dictionary_encode()
    return np.asarray(coded.indices).astype(np.int64), coded.dictionary.to_pylist()


def _seconds(column: Any) -> NDArray[np.float64]:
    micros = column.cast(pa.int64())
    return np.asarray(pc.divide(micros.cast(pa.float64()), 1e6).to_numpy(), np.float64)


def _noted(table: pa.Table, records: _Records) -> tuple[NDArray[np.int8], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return of looks where the queue begins and whether somebody had it, and which stretches are of Broadcasting."""
    many = int(records.number[-1]) + 1
    starts, everyones = np.full(many, lag_columns.NOBODY_KNOWS, np.int8), np.zeros(many, np.bool_)
    worked = np.ones(len(records.of), np.bool_)
    bounds = np.searchsorted(records.number[records.of], np.arange(many + 1))
    for row in np.flatnonzero(np.isnan(records.at)).tolist():
        number = int(records.number[row])
        starts[number] = lag_columns.BEGINS.get(table.column("startFrom")[row].as_py(), lag_columns.NOBODY_KNOWS)
        everyones[number] = table.column("model")[row].as_py() == "Broadcasting"
        here = slice(*bounds[number : number + 2].tolist())
        for span in table.column("free")[row].as_py() or ():
            worked[here] &= ~_inside(records, here, span)
    retries = np.array([name.startswith(RETRY) for name in records.topics] or [False])
    begins = np.where(retries[records.topic], lag_columns.EARLIEST, starts[records.number[records.of]]).astype(np.int8)
    return begins, worked, everyones


def _inside(records: _Records, here: slice, span: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which looks were taken while nobody had the queue."""
    names = (records.topics, span["topic"]), (records.brokers, span["broker"])
    if any(name not in known for known, name in names):
        return np.zeros(here.stop - here.start, np.bool_)
    at = records.at[records.of[here]]
    until = span["until"].timestamp() if span["until"] else np.inf
    found: NDArray[np.bool_] = (at >= span["since"].timestamp()) & (at < until)
    found &= records.topic[here] == records.topics.index(span["topic"])
    found &= records.broker[here] == records.brokers.index(span["broker"])
    return found & np.isin(records.queue[here], span["ids"])


def _before(records: _Records) -> lag_columns.Places:
    """Return where the look at the same queue in the record before stands; a queue that went and came again is new."""
    many = len(records.of)
    key = (records.number[records.of] * (len(records.topics) + 1) + records.topic) * (len(records.brokers) + 1)
    key = (key + records.broker) * (int(records.queue.max(initial=0)) + 1) + records.queue
    order = np.argsort(key, kind="stable")
    earlier, later = order[:-1], order[1:]
    same = (key[earlier] == key[later]) & (records.of[later] == records.of[earlier] + 1)
    found = np.full(many, -1, np.intp)
    found[later[same]] = earlier[same]
    return found


def _summed(
    table: pa.Table,
    records: _Records,
    it: lag_columns.Looks,
    lags: lag_columns.Offsets,
    told_of: tuple[NDArray[np.float64], NDArray[np.int8]],
) -> Iterator[pa.RecordBatch]:
    """Put together what all queues of a record say."""
    many, (delays, verdicts) = table.num_rows, told_of
    retries = np.array([name.startswith(RETRY) for name in records.topics] or [False])[records.topic]
    own = ~retries
    earlier = np.maximum(it.before, 0)
    soon = (it.before >= 0) & (it.at - it.at[earlier] <= WINDOW.old)  # further back not every look stands here
    both = soon & (it.committed >= 0) & (it.committed[earlier] >= 0)
    back = np.where(both, np.maximum(it.committed[earlier] - it.committed, 0), 0)
    came = np.where(retries & soon, np.maximum(it.last - it.last[earlier], 0), 0)
    unknown = _counted(records.of[own & (lags == lag_columns.NO_LAG)], many) + (_counted(records.of[own], many) == 0)
    lag, delay = np.zeros(many, np.int64), np.zeros(many)
    np.add.at(lag, records.of[own], np.where(lags == lag_columns.NO_LAG, 0, lags)[own])
    np.maximum.at(delay, records.of[own], np.where(np.isnan(delays), np.inf, delays)[own])
    told = np.flatnonzero(records.at >= records.begins)
    step = np.diff(records.at, prepend=np.nan)
    same = np.diff(records.number, prepend=-1) == 0
    at = table.column("at").take(pa.array(told))
    seconds = np.where(same & (step <= WINDOW.old), np.minimum(step, STANDS), 0.0)
    columns = {
        "group": table.column("group").take(pa.array(told)),
        "hour": pc.floor_temporal(at, unit="hour"),
        "at": at,
        "seconds": pa.array(seconds[told]),
        "lag": pa.array(lag[told], mask=unknown[told] > 0),
        "delay": pa.array(delay[told], mask=(unknown[told] > 0) | np.isinf(delay[told])),
        "back": pa.array(_counted(records.of, many, back)[told]),
        "retries": pa.array(_counted(records.of, many, came)[told]),
    }
    for place, verdict in enumerate(lag_columns.VERDICTS):
        if verdict:
            columns[str(verdict)] = pa.array(_counted(records.of[verdicts == place], many)[told])
    yield from pa.table(columns).to_batches()


def _counted(of: NDArray[np.int64], many: int, weights: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    found = np.zeros(many, np.int64)
    np.add.at(found, of, 1 if weights is None else weights)
    return found
