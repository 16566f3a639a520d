"""Spark tests advice on every group; the rows equal those of a test in one process."""

import pickle
from datetime import UTC, datetime

import pytest
from pyspark.sql import SparkSession
from pyspark.testing import assertSchemaEqual

from rota.pipeline.common.schemas import BACKTEST
from rota.pipeline.recommend.backtest import backtest_history, summarize
from rota.pipeline.recommend.backtest_job import backtest_histories, summarize_backtest
from rota.pipeline.recommend.cost_weights import MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.synthetic.histories import START_SECONDS, generate_history
from rota.spec import parse_policy

HOURS = 4
POLICIES = {
    "even": parse_policy({"spec": {"strategy": "AveragelyByCircle"}}),
    "steady": parse_policy({"spec": {"strategy": "Sticky"}}),
    "missing": parse_policy({"spec": {"strategy": "Custom", "options": {"custom": {"name": "missing-strategy"}}}}),
}


def test_spark_backtest_of_every_group_equals_that_of_one_process(spark: SparkSession) -> None:
    histories = [generate_history(number, 7, HOURS) for number in range(3)]
    rows: list[tuple[str, int, bytes | None, str | None]] = [
        (history.group, 1, pickle.dumps(history), None) for history in histories
    ]
    rows += [
        ("shop/new", 1, pickle.dumps(generate_history(4, 7, 1)), None),
        ("shop/mail", 0, None, "Group shop/mail is Broadcasting: its queues have no owner"),
    ]
    frame = spark.createDataFrame(rows, "group string, size long, history binary, problem string")
    tested = backtest_histories(frame, POLICIES, CostWeights(), MIN_GAIN_FRACTION)
    assertSchemaEqual(tested.schema, BACKTEST, ignoreNullable=True)
    by_group = {row["group"]: row.asDict() for row in tested.collect()}
    assert by_group.pop("shop/mail")["problem"] == "Group shop/mail is Broadcasting: its queues have no owner"
    assert by_group.pop("shop/new")["problem"].endswith("has 1.0 hours of history; to test advice it needs two hours")
    expected = [backtest_history(history, POLICIES, CostWeights(), MIN_GAIN_FRACTION) for history in histories]
    for row in expected:
        found = by_group.pop(row["group"])
        assert found["cut"].astimezone(UTC) == datetime.fromtimestamp(START_SECONDS + HOURS * 1800, UTC)
        assert {name: found[name] for name in row} == row
        assert "missing" not in found["costs"]
    assert by_group == {}
    summary = summarize_backtest(tested, [*POLICIES])
    assert (summary.groups, summary.untested) == (3, 2)
    assert summary.usable == {"even": 3, "steady": 3}
    assert summary.costs == pytest.approx(summarize(expected, [*POLICIES]).costs)
