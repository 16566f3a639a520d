"""A part of the pipeline's rollup in DuckDB and in pandas: `python -m bench.rollups duckdb|pandas LAKE`.

Both compute from the same files, by group and hour: the number, moves and durations of rebalances, and percentiles of
the lag. They leave out the other parts of a rollup, such as ownership over time and lag states.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

# ruff: noqa: PLC0415 - each peer loads only its own library

SQL = """
WITH rebalances AS (
  SELECT "group", date_trunc('hour', "at") AS hour, count(*) AS rebalances, sum(moved) AS moved,
         quantile_cont(seconds, 0.5) AS p50, quantile_cont(seconds, 0.99) AS p99
  FROM read_parquet('{lake}/lake/rebalance/**/*.parquet') GROUP BY ALL
), looks AS (
  SELECT "group", date_trunc('hour', "at") AS hour,
    list_sum(flatten(list_transform(map_entries(topics), lambda topic:
      CASE WHEN topic.key LIKE '\\%RETRY\\%%' ESCAPE '\\' THEN [] ELSE
        flatten(list_transform(map_values(topic.value), lambda it:
          list_transform(list_zip(it.last, it.committed), lambda pair: greatest(pair[1] - pair[2], 0)))) END))) AS lag
  FROM read_parquet('{lake}/lake/offsets/**/*.parquet')
), lags AS (
  SELECT "group", hour, quantile_cont(lag, 0.5) AS lag_p50, quantile_cont(lag, 0.99) AS lag_p99, max(lag) AS lag_max
  FROM looks GROUP BY ALL
)
SELECT count(*), sum(rebalances), sum(lag_max) FROM lags FULL JOIN rebalances USING ("group", hour)
"""


def by_duckdb(lake: str) -> tuple[Any, ...]:
    """Compute the rollup in DuckDB, with both cores and no memory limit."""
    import duckdb

    totals: tuple[Any, ...] = duckdb.connect().execute(SQL.format(lake=lake)).fetchone() or ()
    return totals


def by_pandas(lake: str) -> tuple[Any, ...]:
    """Compute the rollup in pandas, which reads both tables completely into memory."""
    import pandas as pd

    def read(kind: str, *columns: str) -> Any:
        table = pd.read_parquet(Path(lake) / "lake" / kind, columns=["group", "at", *columns])
        return table.assign(hour=table["at"].dt.floor("h"))

    keys = ["group", "hour"]
    by_hour = read("rebalance", "moved", "seconds").groupby(keys)
    rebalances = by_hour.agg(rebalances=("moved", "size"), moved=("moved", "sum"))
    rebalances[["p50", "p99"]] = by_hour["seconds"].quantile([0.5, 0.99]).unstack()  # noqa: PD010 - a Series has no other
    samples = read("offsets", "topics")
    lags = samples.assign(lag=samples["topics"].map(_lag)).groupby(keys)["lag"]
    lag_stats = lags.quantile([0.5, 0.99]).unstack()  # noqa: PD010
    lag_stats["lag_max"] = lags.max()
    whole = lag_stats.join(rebalances, how="outer")
    return len(whole), int(whole["rebalances"].sum()), int(whole["lag_max"].sum())


def _lag(topics: Any) -> int:
    return sum(
        int(np.nansum(np.maximum(np.asarray(columns["last"]) - np.asarray(columns["committed"]), 0)))
        for topic, brokers in topics
        if not topic.startswith("%RETRY%")
        for _, columns in brokers
    )


if __name__ == "__main__":
    print(*{"duckdb": by_duckdb, "pandas": by_pandas}[sys.argv[1]](sys.argv[2]))
