"""Spark's figures from the journal of an operator that rebalanced, compared with that operator's metrics."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody gives it

from kube.scraped import metric_values
from kube.world import OperatedNamespace, add_two_members
from pipeline.lake_folders import history_of_lake, ingest
from rota.kube.http.broadcaster import Broadcaster
from rota.kube.observers import Observers
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.trace_export import TraceExporter
from rota.pipeline.common.spark_session import create_session
from rota.pipeline.history.reading.buckets import History
from rota.pipeline.history.tables import (
    HistoryReport,
    compute_history,
    select_intervals,
    select_rollup,
    select_violations,
)
from rota.pipeline.replay.job import build_histories, persist_on_disk, replay_histories

pytestmark = pytest.mark.usefixtures("crds", "node")

SMALL = {
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = create_session("rota-tests", SMALL)
    yield session
    session.stop()


@pytest.fixture
async def journal(world: OperatedNamespace, tmp_path: Path) -> AsyncIterator[Journal]:
    """Have the world's operator write a journal."""
    operator = world.operator
    writer = Journal(str(tmp_path / "journal"), "a-test", "1Gi")
    traces = TraceExporter(None)
    observers = Observers(
        operator.controller,
        operator.metrics,
        operator.registry.lag_of,
        journal=writer,
        broadcaster=Broadcaster(),
        trace_exporter=traces,
    )

    def record(result: object) -> None:
        operator.reconciles.append(result)  # type: ignore[arg-type]
        observers.on_reconciled(result)  # type: ignore[arg-type]

    operator.controller.reconciler.on_reconciled = record
    operator.registry.on_lag_polled = observers.on_lag_polled
    yield writer
    await traces.close()
    writer.close()


@pytest.mark.slow("figures of the journal, by Spark, equal the metrics of the operator that wrote it")
async def test_pipeline_figures_from_the_journal_equal_the_metrics_of_the_operator(
    world: OperatedNamespace, journal: Journal, spark: SparkSession, tmp_path: Path
) -> None:
    await world.wait_for_document()
    await add_two_members(world)
    await world.fleet.add("orders-c")
    await world.wait_for_shares(2, 3, 3)
    await world.soon(world.at_rest)
    await asyncio.sleep(2)  # simulated members of a replay apply assignments more slowly than those here
    await world.fleet.members.pop("orders-b").kill()
    await world.wait_for_shares(4, 4)
    await world.soon(world.at_rest)

    async def counted() -> bool:  # metrics follow the status
        return len(await metric_values(world, "rota_rebalances_total")) > 0 and not any(
            rebalance.seconds is None
            for rebalance in world.operator.metrics.trackers[world.namespace, "orders"].rebalances
        )

    await world.soon(counted)
    moved = await metric_values(world, "rota_queues_moved_total")
    handovers = await metric_values(world, "rota_handover_duration_seconds_count")
    seconds = await metric_values(world, "rota_handover_duration_seconds_sum")
    rebalances = sum(await metric_values(world, "rota_rebalances_total"))
    lasted = await metric_values(world, "rota_rebalance_duration_seconds_sum")
    journal.close()

    figures = await asyncio.to_thread(ingested_figures, spark, tmp_path)
    assert [figures["moved"]] == moved
    assert [figures["handovers"]] == handovers
    assert figures["rebalances"] == rebalances
    assert [figures["lasted"]] == pytest.approx(lasted, abs=0.01)
    # The journal has the time of the plan, the operator measures from its write: on a busy machine much
    # later, but within the rebalance.
    assert seconds[0] - 0.01 * handovers[0] <= figures["seconds"] <= handovers[0] * figures["lasted"]
    assert figures["violations"] == []
    assert figures["played"] == figures["moved"]


def ingested_figures(spark: SparkSession, lake: Path) -> dict[str, Any]:
    ingest(spark, lake)
    return figures_of(history_of_lake(spark, lake))


def figures_of(history: History) -> dict[str, Any]:
    hours = select_rollup(compute_history(history, [HistoryReport.ROLLUP]))
    sums = hours.select(
        F.sum("moved_queues").alias("moved"),
        F.sum("handovers").alias("handovers"),
        F.sum(F.aggregate(F.map_values("rebalances"), F.lit(0).cast("long"), lambda total, count: total + count)).alias(
            "rebalances"
        ),
    ).collect()[0]
    [lasted] = history.records["rebalance"].agg(F.sum("seconds").alias("it")).collect()
    audit = compute_history(history, [HistoryReport.AUDIT])
    [handed] = select_intervals(audit).agg(F.sum("seconds").alias("it")).collect()
    histories = persist_on_disk(build_histories(history))
    [played] = replay_histories(histories, {}).results.select("moves", "problem").collect()
    assert played["problem"] is None
    return {
        **sums.asDict(),
        "lasted": lasted["it"],
        "seconds": handed["it"],
        "violations": select_violations(audit).collect(),
        "played": played["moves"],
    }
