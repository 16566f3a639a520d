"""Spark job that tests advice (recommended policies) on the histories of all groups; `backtest` judges each group.

    histories ──cut──> halves ──x policies──> a replay for each pair ──by group──> BACKTEST ──> a summary

All steps run in Python workers; the driver receives one summary for each partition.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, BooleanType, StructType

from rota.pipeline.common.columns import arrow_schema, map_groups
from rota.pipeline.common.schemas import BACKTEST, COUNT, RECORDED_POLICY, RESULTS, TEXT, TIME, table_schema
from rota.pipeline.recommend.backtest import BacktestSummary, add_summaries, judge_advice, summarize
from rota.pipeline.recommend.cost_weights import CostWeights
from rota.pipeline.recommend.history_halves import cut_history
from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.replay.job import TriedPolicies, divide_replays, history_size, persist_on_disk, replay_row
from rota.spec import PolicySpec

_HALF_FIELDS = {"is_second": BooleanType(), "cut": TIME}  # `cut`: the time at which the second half starts
_HALVES = table_schema(group=TEXT, size=COUNT, history=BinaryType(), problem=TEXT, **_HALF_FIELDS)
_HALF_RESULTS = StructType([*RESULTS.fields, *table_schema(**_HALF_FIELDS).fields])
_SUMMARY = table_schema(summary=TEXT)  # a BacktestSummary as JSON


def backtest_histories(
    histories: DataFrame, policies: Mapping[str, PolicySpec], weights: CostWeights, min_gain: float
) -> DataFrame:
    """Return BACKTEST: for each history how good advice from its first half would have been in the second half."""
    halves = persist_on_disk(histories.mapInArrow(_cut_batches, _HALVES))
    tried: TriedPolicies = {RECORDED_POLICY: None, **policies}
    replays = divide_replays(halves, list(tried))
    results = replays.mapInArrow(partial(_replay_batches, policies=tried), _HALF_RESULTS)
    return map_groups(results, partial(_judge_group, weights=weights, min_gain=min_gain), BACKTEST)


def summarize_backtest(backtest: DataFrame, policies: Sequence[str]) -> BacktestSummary:
    """Return the sums of BACKTEST over all groups; `policies` are the names of the tested policies."""

    def summarize_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        summary = BacktestSummary()
        for batch in batches:
            summary = add_summaries(summary, summarize(_rows(batch), policies))
        text = msgspec.json.encode(summary).decode()
        yield pa.RecordBatch.from_pylist([{"summary": text}], schema=arrow_schema(_SUMMARY))

    total = BacktestSummary()
    for row in backtest.mapInArrow(summarize_batches, _SUMMARY).collect():
        total = add_summaries(total, msgspec.json.decode(row["summary"], type=BacktestSummary))
    return total


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch; pyarrow returns the map `costs` as pairs."""
    return [row | {"costs": dict(row["costs"] or ())} for row in batch.to_pylist()]


def _cut_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Cut each history into two rows; a group without one, or with one that is too short, has one row: the problem."""
    schema = arrow_schema(_HALVES)
    for batch in batches:
        for row in batch.to_pylist():
            yield pa.RecordBatch.from_pylist(_cut_row(row), schema=schema)


def _cut_row(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    problem = row["problem"]
    if not problem:
        history: GroupHistory = pickle.loads(row["history"])  # noqa: S301 - written by our previous step
        try:
            halves = cut_history(history)
        except ValueError as error:
            problem = str(error)
    if problem:
        return [{"group": row["group"], "size": 0, "is_second": False, "problem": problem}]
    cut = datetime.fromtimestamp(halves.second.begins, UTC)
    return [
        {
            "group": row["group"],
            "size": history_size(half),
            "history": pickle.dumps(half),
            "is_second": half is halves.second,
            "cut": cut,
        }
        for half in halves
    ]


def _replay_batches(batches: Iterator[pa.RecordBatch], *, policies: TriedPolicies) -> Iterator[pa.RecordBatch]:
    schema = arrow_schema(_HALF_RESULTS)
    for batch in batches:
        for row in batch.to_pylist():
            half = {"is_second": row["is_second"], "cut": row["cut"]}
            for result in replay_row(row, policies):
                yield pa.RecordBatch.from_pylist([result | half], schema=schema)


def _judge_group(results: list[dict[str, Any]], *, weights: CostWeights, min_gain: float) -> list[dict[str, Any]]:
    first_half: list[dict[str, Any]] = []
    second_half: list[dict[str, Any]] = []
    for row in results:
        (second_half if row["is_second"] else first_half).append(row)
    return [{"cut": results[0]["cut"]} | judge_advice(first_half, second_half, weights, min_gain)]
