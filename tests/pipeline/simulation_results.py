"""Simulation results that tests make up: policies that perform differently in different groups."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from math import sin
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

from rota.pipeline.common.schemas import RESULTS, SERIES
from rota.spec import parse_policy

MIDNIGHT = datetime(2026, 11, 21, tzinfo=UTC)
POLICIES = {
    "steady": parse_policy({"spec": {"strategy": "Sticky"}}),
    "even": parse_policy({"spec": {"strategy": "Balanced", "budget": {"maxMoves": 20, "per": "5m"}}}),
}


def a_result(group: str = "shop/orders", policy: str = "recorded", **changes: Any) -> Row:
    """Return the result of a day without moves, pauses or lag."""
    defaults: dict[str, Any] = {
        "strategy": {"steady": "Sticky", "even": "Balanced"}.get(policy, "Averagely"),
        "hours": 24.0,
        "changes": 20,
        "rebalances": 10,
        "moves": 0,
        "forced": 0,
        "pause_seconds": 0.0,
        "pause_p99": 0.0,
        "imbalance": 1.0,
        "imbalance_max": 1.0,
        "idle_member_hours": 0.0,
        "unowned_queue_seconds": 0.0,
        "duplicates": 0.0,
        "lag_mean": 0.0,
        "lag_peak": 0.0,
        "problem": None,
    }
    fields = {"group": group, "policy": policy, **defaults, **changes}
    return Row(**{name: fields[name] for name in RESULTS.names})


def rolled_out_group(group: str = "shop/orders", scale: int = 1) -> list[Row]:
    """Return a group that is rolled out all day under even load: the policy with the fewest moves is best."""
    lags: dict[str, Any] = {"lag_mean": 900.0 * scale, "imbalance": 1.05}
    return [
        a_result(group, moves=310 * scale, pause_seconds=720.0, duplicates=45.0, lag_peak=5200.0 * scale, **lags),
        a_result(
            group, "steady", moves=62 * scale, pause_seconds=140.0, duplicates=9.0, lag_peak=2100.0 * scale, **lags
        ),
        a_result(
            group,
            "even",
            moves=140 * scale,
            pause_seconds=330.0,
            duplicates=20.0,
            lag_peak=2900.0 * scale,
            lag_mean=870.0 * scale,
            imbalance=1.02,
        ),
    ]


def skewed_group(group: str = "shop/payments", scale: int = 1) -> list[Row]:
    """Return a group with few changes, in which a few queues have most of the messages."""
    return [
        a_result(group, moves=12, pause_seconds=20.0, imbalance=2.4, lag_mean=31_000.0 * scale, lag_peak=182_000.0),
        a_result(group, "steady", moves=8, pause_seconds=14.0, imbalance=2.3, lag_mean=29_000.0, lag_peak=175_000.0),
        a_result(group, "even", moves=44, pause_seconds=75.0, imbalance=1.15, lag_mean=2_100.0, lag_peak=9_400.0),
    ]


def satisfied_group(group: str = "shop/mail") -> list[Row]:
    """Return a group that already has its best policy."""
    return [a_result(group, moves=10), a_result(group, "steady", moves=10), a_result(group, "even", moves=14)]


def results(spark: SparkSession, rows: Iterable[Row]) -> DataFrame:
    return spark.createDataFrame(list(rows), RESULTS)


def series(spark: SparkSession, rows: Iterable[Row], steps: int = 96) -> DataFrame:
    """Return series that match results, with 15 minutes a step."""
    return spark.createDataFrame([point for row in rows for point in _points(row, steps)], SERIES)


def _points(row: Row, steps: int) -> Iterable[Row]:
    spread = row.lag_peak - row.lag_mean
    for step in range(steps):
        wave = max(0.0, sin(step / 7)) ** 6 + max(0.0, sin(step / 3.1)) ** 14 / 3
        yield Row(
            group=row.group,
            policy=row.policy,
            at=MIDNIGHT + timedelta(minutes=15 * step),
            lag=row.lag_mean * 0.6 + spread * min(wave, 1.0),
            imbalance=row.imbalance + 0.08 * sin(step / 5) ** 2,
            moves=int(row.moves * (step // 8) / max((steps - 1) // 8, 1)),
        )
