"""`rota pipeline rollup` and `timeline`: their tables and output files."""

import json
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pyspark.sql.functions import col, lit, to_date

from rota.cli.commands.pipeline.progress import Progress
from rota.cli.console.formatting import print_line
from rota.cli.console.output import print_table, print_value
from rota.pipeline.history.audit import OPERATOR_ERRORS, intervals, violations
from rota.pipeline.history.ownership import build_account
from rota.pipeline.history.rollup import compute_rollup
from rota.pipeline.ingest.facts import first_day, load_source
from rota.pipeline.report.formatting import format_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_PRINTED_COLUMNS = (
    "group",
    "hour",
    "moved_queues",
    "forced_queues",
    "unowned_queue_seconds",
    "lag_p99",
    "delay_p99",
    "complete",
)
MAX_PRINTED_ROWS = 10_000  # maximum number of printed rows; more need --to


def rollup(
    spark: "SparkSession", progress: Progress, *, source: str, to: str | None, days: int | None, output: str
) -> None:
    """Print or write the hourly metrics of each group."""
    progress(f"reading {source}")
    since = first_day(source, days) if days else None
    # Include the day before: it shows the owners at the start of the first hour.
    frame = compute_rollup(load_source(spark, source, days + 1 if days else None))
    if since:
        frame = frame.where(col("hour") >= lit(since))
    progress("rolling up, and writing" if to else "rolling up")
    if to:
        overwrite_mode = "dynamic" if since else "static"  # replace only those days, or all
        writer = frame.withColumn("date", to_date("hour")).write.mode("overwrite")
        writer.option("partitionOverwriteMode", overwrite_mode).partitionBy("date").parquet(to)
        return
    rows = _collect_rows(frame.orderBy("group", "hour"))
    print_value(rows, output, lambda: print_table(list(map(_printed_columns, rows))))


def _printed_columns(row: dict[str, Any]) -> dict[str, Any]:
    return {name: format_value(row[name]) for name in _PRINTED_COLUMNS}


def timeline(
    spark: "SparkSession", progress: Progress, *, source: str, to: str | None, days: int | None, output: str
) -> None:
    """Print violations of ownership, write all intervals with --to, and exit with 1 if the operator was wrong."""
    progress(f"reading {source}")
    facts = load_source(spark, source, days)
    ownership = build_account(facts)
    found_violations = violations(facts, ownership)
    progress("computing owners" + (", and writing" if to else ""))
    if to:
        _write_table(intervals(facts, ownership), str(Path(to) / "intervals"))
        _write_table(found_violations, str(Path(to) / "violations"))
    worst = col("kind").isin(*OPERATOR_ERRORS).desc()
    rows = _collect_rows(found_violations.orderBy(worst, "group", "since", "topic", "broker", "queue"))
    print_value(rows, output, lambda: print_table(rows) if rows else print_line("No violations of queue ownership"))
    if rows and rows[0]["kind"] in OPERATOR_ERRORS:
        raise click.exceptions.Exit(1)


def _write_table(frame: "DataFrame", to: str) -> None:
    frame.write.mode("overwrite").parquet(to)  # output_paths has checked the existing files


def _collect_rows(frame: "DataFrame") -> list[dict[str, Any]]:
    """Return rows as JSON values, with times in UTC; raise ValueError if there are too many to print."""
    rows = frame.limit(MAX_PRINTED_ROWS + 1).collect()
    if len(rows) > MAX_PRINTED_ROWS:
        problem = f"There are more than {MAX_PRINTED_ROWS:,} rows, too many to print"
        raise ValueError(f"{problem}; use --to to write them to a folder")
    return list(map(_to_json_values, rows))


def _to_json_values(row: "Row") -> dict[str, Any]:
    return {name: _to_json_value(value) for name, value in row.asDict(recursive=True).items()}


def _to_json_value(value: Any) -> Any:
    if hasattr(value, "astimezone"):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return json.loads(json.dumps(value))
