"""Spark job that simulates policies: replays the history of every group under each policy.

    journal ──> a history for each group ──x policies──> a replay for each pair ──> results, series

Both steps run in Python workers, one group or pair at a time; nothing is collected in the driver.
"""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, StructField, StructType

from rota import records
from rota.pipeline.common.columns import arrow_schema
from rota.pipeline.common.schemas import COUNT, RECORDED_POLICY, RESULTS, SERIES, TEXT, table_schema
from rota.pipeline.ingest.facts import Facts
from rota.pipeline.replay.group_history import STEP_SECONDS, GroupHistory, build_history, sort_facts
from rota.pipeline.replay.policy_replay import replay_policy
from rota.records import Fact
from rota.spec import PolicySpec, parse_policy, policy_body

PARTITIONS_PER_CORE = 8  # partitions for each core: many small ones, so that no core waits long for a slow partition
# Queues times changes: a replay of that size takes as long as those of a hundred usual groups.
HEAVY_REPLAY_SIZE = 100_000

_HISTORIES = table_schema(group=TEXT, size=COUNT, history=BinaryType(), problem=TEXT)
_POLICIES = table_schema(policy=TEXT, rules=TEXT)  # the JSON of a RebalancePolicy's spec; null: as recorded
_SERIES_POINT = StructType([field for field in SERIES.fields if field.name not in {"group", "policy"}])
_RUNS = StructType([*RESULTS.fields, StructField("series", ArrayType(_SERIES_POINT))])


class Simulation(NamedTuple):
    """Result of a simulation: totals by group and policy, and points for plots."""

    results: DataFrame
    series: DataFrame


def persist_on_disk(rows: DataFrame) -> DataFrame:
    """Persist rows, so that they are computed only once; on disk, because memory may be too small for them."""
    return rows.persist(StorageLevel.DISK_ONLY)


def replay_histories(histories: DataFrame, policies: Mapping[str, PolicySpec]) -> Simulation:
    """Replay every group's persisted history under each policy, and under the policies recorded in the journal."""
    pairs = pair_policies(histories, policy_table(histories.sparkSession, policies))
    runs = persist_on_disk(pairs.mapInArrow(_replay_batches, _RUNS))
    points = runs.select("group", "policy", F.explode("series").alias("point"))
    return Simulation(runs.select(*RESULTS.fieldNames()), points.select("group", "policy", "point.*"))


def policy_table(spark: SparkSession, policies: Mapping[str, PolicySpec]) -> DataFrame:
    """Return the rows of all policies to replay, with the recorded policies first."""
    rules = [(name, msgspec.json.encode(policy_body(policy)).decode()) for name, policy in policies.items()]
    return spark.createDataFrame([(RECORDED_POLICY, None), *rules], _POLICIES)


def pair_policies(histories: DataFrame, policies: DataFrame) -> DataFrame:
    """Return all pairs of history and policy; Spark starts partitions in order, so the heavy ones come first."""
    parts = PARTITIONS_PER_CORE * histories.sparkSession.sparkContext.defaultParallelism
    pairs = histories.crossJoin(F.broadcast(policies))
    heavy = pairs.where(F.col("size") > HEAVY_REPLAY_SIZE).repartition(parts)  # round robin: spreads the few
    return heavy.unionByName(pairs.where(F.col("size") <= HEAVY_REPLAY_SIZE).repartition(parts, "group", "policy"))


def build_histories(facts: Facts) -> DataFrame:
    """Return each group's history, pickled, or the problem that prevents it."""
    lines = _to_journal_lines(facts.owners, "owners").unionByName(_to_journal_lines(facts.membership, "membership"))
    lines = lines.unionByName(_to_journal_lines(facts.handover, "handover"))
    lines = lines.unionByName(_to_journal_lines(facts.offsets.transform(_last_sample_per_step), "offsets"))
    return lines.groupBy("group").applyInArrow(_build_history_row, _HISTORIES)


def _last_sample_per_step(offsets: DataFrame) -> DataFrame:
    """Keep the last sample of each step: rates are constant within a step."""
    step = F.floor(F.unix_timestamp("at") / STEP_SECONDS)
    last = F.max_by(F.struct(*offsets.columns), "at").alias("last")
    return offsets.groupBy("group", step.alias("step")).agg(last).select("last.*")


def _to_journal_lines(table: DataFrame, kind: str) -> DataFrame:
    """Return a table's records as journal lines, for the reader in `rota.records`."""
    fields = [name for name in table.columns if name != "date"]
    record = F.struct(F.lit(records.RECORD_SCHEMA).alias("schema"), F.lit(kind).alias("kind"), *fields)
    options = {"ignoreNullFields": "false", "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSXXX"}
    return table.select("group", F.lit(kind).alias("kind"), F.to_json(record, options).alias("line"))


def _build_history_row(table: pa.Table) -> pa.Table:
    """Return the row with a group's history or problem, from its journal lines."""
    group = table.column("group")[0].as_py()
    kinds = table.column("kind").to_pylist()
    lines = table.column("line").to_pylist()
    size = 0
    pickled = None
    problem = None
    try:
        history = build_history(group, sort_facts(map(_read_fact, kinds, lines)))
        size = history_size(history)
        pickled = pickle.dumps(history)
    except ValueError as error:
        problem = str(error)
    columns = {"group": [group], "size": [size], "history": [pickled], "problem": [problem]}
    return pa.table(columns, schema=arrow_schema(_HISTORIES))


def history_size(history: GroupHistory) -> int:
    """Return a measure of the time that a replay takes, comparable with HEAVY_REPLAY_SIZE."""
    return len(history.queues) * len(history.changes)


def _read_fact(kind: str, line: str) -> Fact:
    if kind == "owners":  # our tables store its rules as JSON text
        body = msgspec.json.decode(line)
        line = msgspec.json.encode(body | {"rules": msgspec.json.decode(body["rules"] or "{}")}).decode()
    fact = records.decode_record(line.encode())
    assert isinstance(fact, Fact)  # noqa: S101 - gap records are in another table
    return fact


def _replay_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Replay each history under the policy of its row."""
    schema = arrow_schema(_RUNS)
    for batch in batches:
        for row in batch.to_pylist():
            result = dict.fromkeys(schema.names) | replay_pair(row) | {"group": row["group"], "policy": row["policy"]}
            yield pa.RecordBatch.from_pylist([result], schema=schema)


def replay_pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replay the pickled history of a row under its policy; return the result, or the problem of the group."""
    if row["problem"]:
        return {"problem": row["problem"], "series": []}
    history: GroupHistory = pickle.loads(row["history"])  # noqa: S301 - written by our previous step
    return replay_policy(history, parse_policy({"spec": msgspec.json.decode(row["rules"])}) if row["rules"] else None)
