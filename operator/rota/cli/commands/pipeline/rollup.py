"""`rota pipeline rollup` and `timeline`: what they print, and what they write; imported only when they are run."""

import json
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pyspark.sql.functions import col, lit, to_date

from rota.cli.commands.pipeline.progress import Progress
from rota.cli.console.formatting import say
from rota.cli.console.output import show, table
from rota.pipeline.history.audit import SERIOUS, intervals, violations
from rota.pipeline.history.ownership import account
from rota.pipeline.history.rollup import rollup as rolled
from rota.pipeline.ingest.facts import last, opened
from rota.pipeline.report.formatting import figure

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SHORT = ("group", "hour", "moved_queues", "forced_queues", "unowned_queue_seconds", "lag_p99", "delay_p99", "complete")
MOST = 10_000  # rows that are printed; more are for --to


def rollup(
    spark: "SparkSession", progress: Progress, *, source: str, to: str | None, days: int | None, output: str
) -> None:
    """Print or write a group's hours."""
    progress(f"reading {source}")
    since = days and last(source, days)
    # With the day before, by which it is known who held what when the first of them began.
    frame = rolled(opened(spark, source, days and days + 1))
    frame = frame.where(col("hour") >= lit(since)) if since else frame
    progress("rolling up, and writing" if to else "rolling up")
    if to:
        mode = "dynamic" if since else "static"  # only those days are replaced, or all
        dated = frame.withColumn("date", to_date("hour"))
        dated.write.mode("overwrite").option("partitionOverwriteMode", mode).partitionBy("date").parquet(to)
        return
    rows = _rows(frame.orderBy("group", "hour"))
    show(rows, output, lambda: table([{name: figure(row[name]) for name in _SHORT} for row in rows]))


def timeline(
    spark: "SparkSession", progress: Progress, *, source: str, to: str | None, days: int | None, output: str
) -> None:
    """Print what should not be, and write all of it; end with 1 if the operator was wrong."""
    progress(f"reading {source}")
    facts = opened(spark, source, days)
    it = account(facts)
    wrong = violations(facts, it)
    progress("finding who held what" + (", and writing" if to else ""))
    if to:
        _write(intervals(facts, it), str(Path(to) / "intervals"))
        _write(wrong, str(Path(to) / "violations"))
    worst = col("kind").isin(*SERIOUS).desc()
    rows = _rows(wrong.orderBy(worst, "group", "since", "topic", "broker", "queue"))
    show(rows, output, lambda: table(rows) if rows else say("Nothing is wrong in who held what"))
    if rows and rows[0]["kind"] in SERIOUS:
        raise click.exceptions.Exit(1)


def _write(frame: "DataFrame", to: str) -> None:
    frame.write.mode("overwrite").parquet(
        to
    )  # what is there is ours: rota.cli.commands.pipeline.output_paths has looked


def _rows(frame: "DataFrame") -> list[dict[str, Any]]:
    """Return rows as JSON has them, with times in UTC."""
    rows = frame.limit(MOST + 1).collect()
    if len(rows) > MOST:
        raise ValueError(f"There are more than {MOST:,} rows, too many to print; write them into a folder by --to")
    return [{name: _plain(value) for name, value in row.asDict(recursive=True).items()} for row in rows]


def _plain(value: Any) -> Any:
    if hasattr(value, "astimezone"):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return json.loads(json.dumps(value))
