"""Spark job that simulates policies: replays the history of every group under each policy.

    journal ──> a history for each group ──> replays under all policies ──> results, series

A *history* is what a replay needs of one group. Both steps run in Python workers, one group at a time; nothing is
collected in the driver.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, StructField, StructType

from rota.pipeline.common.columns import arrow_schema
from rota.pipeline.common.schemas import COUNT, RECORDED_POLICY, RESULTS, SERIES, TEXT, table_schema
from rota.pipeline.history.reading.buckets import History, read_task, shuffle_records
from rota.pipeline.history.reading.group_rows import GroupRows
from rota.pipeline.history.reading.sample_files import SampleFiles
from rota.pipeline.history.samples import MICROSECONDS, Places, Samples, concatenate
from rota.pipeline.replay.group_history import REPLAYED_KINDS, STEP_SECONDS, GroupHistory, build_history, sort_facts
from rota.pipeline.replay.policy_replay import replay_policies
from rota.spec import PolicySpec

# Partitions are many and small, so that no core waits long for the last one.
MIN_PARTITIONS_PER_CORE = 8
GROUPS_PER_PARTITION = 16
# Queues times changes, see `history_size`. A replay of this size takes as long as those of about twenty usual groups.
HEAVY_REPLAY_SIZE = 20_000

_HISTORIES = table_schema(group=TEXT, size=COUNT, history=BinaryType(), problem=TEXT)
_SERIES_POINT = StructType([field for field in SERIES.fields if field.name not in {"group", "policy"}])
_RUNS = StructType([*RESULTS.fields, StructField("series", ArrayType(_SERIES_POINT))])
_NO_SAMPLES = Samples(*[np.zeros(0, np.int64)] * len(Samples._fields))

_STEP_MICROSECONDS = int(STEP_SECONDS) * MICROSECONDS

TriedPolicies = Mapping[str, PolicySpec | None]  # by name; None: the recorded policies


class Simulation(NamedTuple):
    """Result of a simulation: totals by group and policy, and points for plots."""

    results: DataFrame
    series: DataFrame


def persist_on_disk(rows: DataFrame) -> DataFrame:
    """Persist rows, so that they are computed only once; on disk, because memory may be too small for them."""
    return rows.persist(StorageLevel.DISK_ONLY)


def build_histories(history: History) -> DataFrame:
    """Return each group's history, pickled, or the problem that prevents it."""
    rows = shuffle_records(history, [*REPLAYED_KINDS])
    return rows.mapInArrow(partial(_build_history_rows, sample_files=history.sample_files), _HISTORIES)


def _build_history_rows(records: Iterator[pa.RecordBatch], *, sample_files: SampleFiles) -> Iterator[pa.RecordBatch]:
    """Yield a row for each group of a task."""
    for rows in read_task(records, sample_files):
        yield pa.RecordBatch.from_pylist([_build_history_row(rows)], schema=arrow_schema(_HISTORIES))


def _build_history_row(rows: GroupRows) -> dict[str, Any]:
    """Return the row with a group's history or problem."""
    places = Places()
    samples = _downsample(rows.samples(places))
    row: dict[str, Any] = {"group": rows.group, "size": 0}
    try:
        records = sort_facts(rows.records.of_kinds(REPLAYED_KINDS.values()))
        history = build_history(rows.group, records, samples, places)
        row |= {"size": history_size(history), "history": pickle.dumps(history)}
    except ValueError as error:
        row["problem"] = str(error)
    return row


def _downsample(parts: Iterable[Samples]) -> Samples:
    """Keep the first record of samples, and the last one of every step since 1970.

    That is enough, because a replay interpolates offsets at the edges of its steps. Each part is reduced before the
    next one is read: one part of the samples fits in memory, all parts may not.
    """
    kept = [part.downsample(_STEP_MICROSECONDS) for part in parts]
    return concatenate(kept).downsample(_STEP_MICROSECONDS) if kept else _NO_SAMPLES


def history_size(history: GroupHistory) -> int:
    """Return a measure of the time that a replay takes, comparable with HEAVY_REPLAY_SIZE."""
    return len(history.queues) * len(history.changes)


def replay_histories(histories: DataFrame, policies: Mapping[str, PolicySpec]) -> Simulation:
    """Replay every group's persisted history under each policy, and under the policies recorded in the journal."""
    tried: TriedPolicies = {RECORDED_POLICY: None, **policies}
    replays = divide_replays(histories, list(tried)).mapInArrow(partial(_replay_batches, policies=tried), _RUNS)
    runs = persist_on_disk(replays)
    points = runs.select("group", "policy", F.explode("series").alias("point"))
    return Simulation(runs.select(*RESULTS.fieldNames()), points.select("group", "policy", "point.*"))


def divide_replays(histories: DataFrame, policies: list[str]) -> DataFrame:
    """Divide the replays of persisted histories among partitions, as the column `policies` of each history.

    A group has one row for all its replays, which share work. Only a group whose history is heavy (HEAVY_REPLAY_SIZE)
    has a row for each policy, so that several cores replay it. Spark starts partitions in order, so heavy groups are
    first.
    """
    min_partitions = MIN_PARTITIONS_PER_CORE * histories.sparkSession.sparkContext.defaultParallelism
    is_heavy = F.col("size") > HEAVY_REPLAY_SIZE
    names = list(map(F.lit, policies))
    heavy = histories.where(is_heavy).withColumn("policies", F.explode(F.array(*map(F.array, names))))
    light = histories.where(~is_heavy).withColumn("policies", F.array(*names))
    partitions = max(min_partitions, histories.count() // GROUPS_PER_PARTITION)
    return heavy.repartition(min_partitions).unionByName(light.repartition(partitions, "group"))


def _replay_batches(batches: Iterator[pa.RecordBatch], *, policies: TriedPolicies) -> Iterator[pa.RecordBatch]:
    """Replay each history under the policies of its row."""
    schema = arrow_schema(_RUNS)
    for batch in batches:
        for row in batch.to_pylist():
            yield pa.RecordBatch.from_pylist(list(replay_row(row, policies)), schema=schema)


def replay_row(row: Mapping[str, Any], policies: TriedPolicies) -> Iterator[dict[str, Any]]:
    """Yield the results for a row of `divide_replays`: of its pickled history, or the problem of the group."""
    if row["problem"]:
        for name in row["policies"]:
            yield {"group": row["group"], "policy": name, "problem": row["problem"], "series": []}
        return
    history: GroupHistory = pickle.loads(row["history"])  # noqa: S301 - written by our previous step
    tried = {name: policies[name] for name in row["policies"]}
    for name, result in replay_policies(history, tried).items():
        yield {"group": row["group"], "policy": name} | result
