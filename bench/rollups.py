"""A part of the pipeline's rollup in DuckDB and in polars: `python -m bench.rollups duckdb|polars LAKE`.

Both compute from the same files, by group and hour: the number, moves and durations of rebalances, and percentiles of
the lag. They leave out the other parts of a rollup, such as ownership over time and lag states.
"""

import sys
from typing import Any

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


def by_polars(lake: str) -> tuple[Any, ...]:
    """Compute the rollup in polars, lazily and streaming."""
    import polars as pl

    def scan(kind: str) -> pl.LazyFrame:
        rows = pl.scan_parquet(f"{lake}/lake/{kind}/**/*.parquet")
        return rows.with_columns(pl.col("at").dt.truncate("1h").alias("hour"))

    seconds = [pl.col("seconds").quantile(share, "linear").alias(f"p{share}") for share in (0.5, 0.99)]
    rebalances = (
        scan("rebalance").group_by("group", "hour").agg(pl.len().alias("rebalances"), pl.sum("moved"), *seconds)
    )
    keys = ("group", "at", "hour")
    topics = scan("offsets").select(*keys, pl.col("topics").map.entries()).explode("topics").unnest("topics")
    brokers = topics.filter(~pl.col("key").str.starts_with("%RETRY%")).select(*keys, pl.col("value").map.values())
    queues = brokers.explode("value").unnest("value")
    behind = (pl.col("last") - pl.col("committed")).clip(lower_bound=0)
    queues = queues.select(*keys, "last", "committed").explode("last", "committed")
    samples = queues.group_by(keys).agg(behind.sum().alias("lag"))
    quantiles = [pl.col("lag").quantile(share, "linear").alias(f"lag{share}") for share in (0.5, 0.99)]
    lags = samples.group_by("group", "hour").agg(*quantiles, pl.max("lag").alias("lag_max"))
    whole = lags.join(rebalances, on=["group", "hour"], how="full")
    totals = whole.select(pl.len(), pl.sum("rebalances"), pl.sum("lag_max")).collect(engine="streaming")
    return totals.row(0)


if __name__ == "__main__":
    print(*{"duckdb": by_duckdb, "polars": by_polars}[sys.argv[1]](sys.argv[2]))
