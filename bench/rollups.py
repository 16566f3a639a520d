"""A part of the pipeline's rollup by others, each a program of its own: `python -m bench.rollups duckdb|pandas LAKE`.

They make of the same files what is common to all: by group and hour how many rebalances there were, what they moved
and how long they took, and percentiles of the lag. What else a rollup has (who held what when, verdicts) they do not.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

# ruff: noqa: PLC0415 - each program loads what it is about

SQL = """
WITH rebalances AS (
  SELECT "group", date_trunc('hour', "at") AS hour, count(*) AS rebalances, sum(moved) AS moved,
         quantile_cont(seconds, 0.5) AS p50, quantile_cont(seconds, 0.99) AS p99
  FROM read_parquet('{lake}/rebalance/*/*/*.parquet') GROUP BY ALL
), looks AS (
  SELECT "group", date_trunc('hour', "at") AS hour,
    list_sum(flatten(list_transform(map_entries(topics), lambda topic:
      CASE WHEN topic.key LIKE '\\%RETRY\\%%' ESCAPE '\\' THEN [] ELSE
        flatten(list_transform(map_values(topic.value), lambda it:
          list_transform(list_zip(it.last, it.committed), lambda pair: greatest(pair[1] - pair[2], 0)))) END))) AS lag
  FROM read_parquet('{lake}/offsets/*/*/*.parquet')
), lags AS (
  SELECT "group", hour, quantile_cont(lag, 0.5) AS lag_p50, quantile_cont(lag, 0.99) AS lag_p99, max(lag) AS lag_max
  FROM looks GROUP BY ALL
)
SELECT count(*), sum(rebalances), sum(lag_max) FROM lags FULL JOIN rebalances USING ("group", hour)
"""


def by_duckdb(lake: str) -> tuple[Any, ...]:
    """Let DuckDB do it, with both cores and what memory it wants."""
    import duckdb

    found: tuple[Any, ...] = duckdb.connect().execute(SQL.format(lake=lake)).fetchone() or ()
    return found


def by_pandas(lake: str) -> tuple[Any, ...]:
    """Read both tables whole, as pandas does, and let it group them."""
    import pandas as pd

    def read(kind: str, *columns: str) -> Any:
        found = pd.read_parquet(Path(lake) / kind, columns=["group", "at", *columns])
        return found.assign(hour=found["at"].dt.floor("h"))

    keys = ["group", "hour"]
    by_hour = read("rebalance", "moved", "seconds").groupby(keys)
    counted = by_hour.agg(rebalances=("moved", "size"), moved=("moved", "sum"))
    counted[["p50", "p99"]] = by_hour["seconds"].quantile([0.5, 0.99]).unstack()  # noqa: PD010 - a Series has no other
    looks = read("offsets", "topics")
    lags = looks.assign(lag=looks["topics"].map(_lag)).groupby(keys)["lag"]
    behind = lags.quantile([0.5, 0.99]).unstack()  # noqa: PD010
    behind["lag_max"] = lags.max()
    whole = behind.join(counted, how="outer")
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
