"""What Spark makes of the journal of an operator that rebalanced, beside what that operator counted itself."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody gives it

from kube.scraped import scraped
from kube.world import OperatedNamespace, two_members
from rota.kube.http.events import Broadcaster
from rota.kube.observers import Observers
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.trace_export import TraceExporter
from rota.pipeline.common.spark_session import create_session
from rota.pipeline.history.audit import intervals, violations
from rota.pipeline.history.rollup import compute_rollup
from rota.pipeline.ingest.facts import Facts, read_facts
from rota.pipeline.replay.job import simulate_policies

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
    made = create_session("rota-tests", SMALL)
    yield made
    made.stop()


@pytest.fixture
async def kept(world: OperatedNamespace, tmp_path: Path) -> AsyncIterator[Journal]:
    """Have the world's operator keep a journal."""
    operator = world.operator
    journal, traces = Journal(str(tmp_path), "a-test", "1Gi"), TraceExporter(None)
    outlets = Observers(journal, operator.sight, Broadcaster(), traces)

    def done(done_: object) -> None:
        operator.done.append(done_)  # type: ignore[arg-type]
        outlets.on_reconciled(done_)  # type: ignore[arg-type]

    operator.brain.on_reconciled, operator.places.on_lag_polled = done, outlets.on_lag_polled
    yield journal
    await traces.close()
    journal.close()


@pytest.mark.slow("figures of the journal, by Spark, equal the metrics of the operator that wrote it")
async def test_pipeline_figures_from_the_journal_equal_the_metrics_of_the_operator(
    world: OperatedNamespace, kept: Journal, spark: SparkSession, tmp_path: Path
) -> None:
    await world.begun()
    await two_members(world)
    await world.fleet.add("orders-c")
    await world.until(2, 3, 3)
    await world.soon(world.at_rest)
    await asyncio.sleep(2)  # members of a replay take longer to obey than those here
    await world.fleet.members.pop("orders-b").end()
    await world.until(4, 4)
    await world.soon(world.at_rest)

    async def counted() -> bool:  # which is done after people are told
        return len(await scraped(world, "rota_rebalances_total")) > 0 and not any(
            it.seconds is None for it in world.operator.measures.trackers[world.namespace, "orders"].rebalances
        )

    await world.soon(counted)
    moved = await scraped(world, "rota_queues_moved_total")
    handovers = await scraped(world, "rota_handover_duration_seconds_count")
    seconds = await scraped(world, "rota_handover_duration_seconds_sum")
    rebalances = sum(await scraped(world, "rota_rebalances_total"))
    lasted = await scraped(world, "rota_rebalance_duration_seconds_sum")
    kept.close()

    found = await asyncio.to_thread(made_of, read_facts(spark, str(tmp_path)))
    assert [found["moved"]] == moved
    assert [found["handovers"]] == handovers
    assert found["rebalances"] == rebalances
    assert [found["lasted"]] == pytest.approx(lasted, abs=0.01)
    # The journal has the time of the decision, the operator measures from when it is written: on a busy machine much
    # later, but within the rebalance.
    assert seconds[0] - 0.01 * handovers[0] <= found["seconds"] <= handovers[0] * found["lasted"]
    assert found["violations"] == []
    assert found["played"] == found["moved"]


def made_of(told: Facts) -> dict[str, Any]:
    hours = compute_rollup(told)
    sums = hours.select(
        F.sum("moved_queues").alias("moved"),
        F.sum("handovers").alias("handovers"),
        F.sum(F.aggregate(F.map_values("rebalances"), F.lit(0).cast("long"), lambda one, it: one + it)).alias(
            "rebalances"
        ),
    ).collect()[0]
    [lasted] = told.rebalance.agg(F.sum("seconds").alias("it")).collect()
    [handed] = intervals(told).agg(F.sum("seconds").alias("it")).collect()
    [played] = simulate_policies(told, {}).results.select("moves", "problem").collect()
    assert played["problem"] is None
    return {
        **sums.asDict(),
        "lasted": lasted["it"],
        "seconds": handed["it"],
        "violations": violations(told).collect(),
        "played": played["moves"],
    }
