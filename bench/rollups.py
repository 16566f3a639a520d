"""A part of the pipeline's rollup by others, each a program of its own: `python -m bench.rollups duckdb|pandas FOLDER`.

They make of the same files what is common to all: by group and hour how many rebalances there were, what they moved
and how long they took, and percentiles of the lag. What else a rollup has (who held what when, verdicts) they do not.
"""

import json
import sys
from pathlib import Path
from typing import Any

# ruff: noqa: PLC0415 - each program loads what it is about

SQL = """
WITH lines AS (
  SELECT * FROM read_json('{folder}/*/*.jsonl', format = 'newline_delimited', columns = {{
    kind: 'VARCHAR', "group": 'VARCHAR', "at": 'TIMESTAMP', moved: 'BIGINT', seconds: 'DOUBLE',
    topics: 'MAP(VARCHAR, MAP(VARCHAR, STRUCT(ids INTEGER[], first BIGINT[], last BIGINT[], committed BIGINT[])))'
  }})
), rebalances AS (
  SELECT "group", date_trunc('hour', "at") AS hour, count(*) AS rebalances, sum(moved) AS moved,
         quantile_cont(seconds, 0.5) AS p50, quantile_cont(seconds, 0.99) AS p99
  FROM lines WHERE kind = 'rebalance' GROUP BY ALL
), looks AS (
  SELECT "group", date_trunc('hour', "at") AS hour,
    list_sum(flatten(list_transform(map_entries(topics), lambda topic:
      CASE WHEN topic.key LIKE '\\%RETRY\\%%' ESCAPE '\\' THEN [] ELSE
        flatten(list_transform(map_values(topic.value), lambda it:
          list_transform(list_zip(it.last, it.committed), lambda pair: greatest(pair[1] - pair[2], 0)))) END))) AS lag
  FROM lines WHERE kind = 'offsets'
), lags AS (
  SELECT "group", hour, quantile_cont(lag, 0.5) AS lag_p50, quantile_cont(lag, 0.99) AS lag_p99, max(lag) AS lag_max
  FROM looks GROUP BY ALL
)
SELECT count(*), sum(rebalances), sum(lag_max) FROM lags FULL JOIN rebalances USING ("group", hour)
"""


def by_duckdb(folder: str) -> tuple[Any, ...]:
    """Let DuckDB do it, with both cores and what memory it wants."""
    import duckdb

    found: tuple[Any, ...] = duckdb.connect().execute(SQL.format(folder=folder)).fetchone() or ()
    return found


def by_pandas(folder: str) -> tuple[Any, ...]:
    """Read the lines with the standard library, and let pandas group them."""
    import pandas as pd

    rebalances, looks = [], []
    for path in Path(folder).glob("*/*.jsonl"):
        with path.open("rb") as lines:
            for line in lines:
                told = json.loads(line)
                hour = told["at"][:13]
                if told["kind"] == "rebalance":
                    rebalances.append((told["group"], hour, told["moved"], told["seconds"]))
                elif told["kind"] == "offsets":
                    looks.append((told["group"], hour, _lag(told["topics"])))
    keys = ["group", "hour"]
    by_hour = pd.DataFrame(rebalances, columns=[*keys, "moved", "seconds"]).groupby(keys)
    counted = by_hour.agg(rebalances=("moved", "size"), moved=("moved", "sum"))
    counted[["p50", "p99"]] = by_hour["seconds"].quantile([0.5, 0.99]).unstack()  # noqa: PD010 - a Series has no other
    lags = pd.DataFrame(looks, columns=[*keys, "lag"]).groupby(keys)["lag"]
    behind = lags.quantile([0.5, 0.99]).unstack()  # noqa: PD010
    behind["lag_max"] = lags.max()
    whole = behind.join(counted, how="outer")
    return len(whole), int(whole["rebalances"].sum()), int(whole["lag_max"].sum())


def _lag(topics: dict[str, Any]) -> int:
    return sum(
        max(last - done, 0)
        for topic, brokers in topics.items()
        if not topic.startswith("%RETRY%")
        for columns in brokers.values()
        for last, done in zip(columns["last"], columns["committed"], strict=True)
        if done is not None
    )


if __name__ == "__main__":
    print(*{"duckdb": by_duckdb, "pandas": by_pandas}[sys.argv[1]](sys.argv[2]))
