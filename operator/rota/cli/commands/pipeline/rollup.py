"""`rota pipeline rollup` and `timeline`: their marts, and what they print."""

import json
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any

import click
from pyspark.sql.functions import col, lit, to_date

from rota.cli.commands.history import ROLLUP, printed_row
from rota.cli.commands.pipeline.opened_lake import OpenedLake
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.console.formatting import print_line
from rota.cli.console.output import print_table, print_value
from rota.pipeline.history.audit import OPERATOR_ERRORS
from rota.pipeline.history.tables import compute_audit, compute_rollup, select_intervals, select_violations

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

MAX_PRINTED_ROWS = 10_000


def rollup(
    spark: "SparkSession", progress: Progress, *, opened: OpenedLake, days: int | None, output: str, **_: Any
) -> None:
    """Write the hourly metrics of each group, and print them."""
    written = write_rollup(spark, progress, opened, days)
    opened.publish()
    _print_rollup(_collect_rows(written.drop("date").orderBy("group", "hour")), output)


def write_rollup(spark: "SparkSession", progress: Progress, opened: OpenedLake, days: int | None) -> "DataFrame":
    """Write the mart rollup, or only its last days, and return the rows of these days."""
    progress("reading the history")
    since = opened.first_day(days)
    # Include the day before: it shows the owners at the start of the first hour.
    frame = compute_rollup(opened.read_history(spark, since - timedelta(days=1) if since else None))
    if since:
        frame = frame.where(col("hour") >= lit(since))
    progress("rolling up, and writing")
    dated = frame.withColumn("date", to_date("hour"))
    written = opened.write(ROLLUP, dated, opened.days_since(since))
    return written.where(col("date") >= lit(since)) if since else written


def _print_rollup(rows: list[dict[str, Any]] | None, output: str) -> None:
    if rows is None:
        _refuse_rows(ROLLUP, output)
    else:
        print_value(rows, output, lambda: print_table(list(map(printed_row, rows))))


def timeline(
    spark: "SparkSession", progress: Progress, *, opened: OpenedLake, days: int | None, output: str, **_: Any
) -> None:
    """Write all intervals and violations of ownership, print the latter, and exit with 1 if the operator was wrong."""
    found_violations = write_audit(spark, progress, opened, days)
    opened.publish()
    worst = col("kind").isin(*OPERATOR_ERRORS)
    rows = _collect_rows(found_violations.orderBy(worst.desc(), "group", "since", "topic", "broker", "queue"))
    if rows is None:
        _refuse_rows("marts/violations", output)
    else:
        print_value(rows, output, lambda: print_table(rows) if rows else print_line("No violations of queue ownership"))
    if rows is None:
        is_wrong = found_violations.where(worst).limit(1).count() > 0
    else:
        is_wrong = any(row["kind"] in OPERATOR_ERRORS for row in rows)
    if is_wrong:
        raise click.exceptions.Exit(1)


def write_audit(spark: "SparkSession", progress: Progress, opened: OpenedLake, days: int | None) -> "DataFrame":
    """Write the marts intervals and violations, and return the latter."""
    progress("reading the history")
    audit = compute_audit(opened.read_history(spark, opened.first_day(days))).persist()
    progress("computing owners, and writing")
    opened.write("marts/intervals", select_intervals(audit))
    return opened.write("marts/violations", select_violations(audit))


def _refuse_rows(table: str, output: str) -> None:
    """Say that there are too many rows to print; raise ValueError if a program waits for them."""
    problem = f"{table} has more than {MAX_PRINTED_ROWS:,} rows, too many to print; read the table"
    if output != "table":
        raise ValueError(problem)
    print_line(problem)


def _collect_rows(frame: "DataFrame") -> list[dict[str, Any]] | None:
    """Return rows as JSON values, with times in UTC; None if there are too many to print."""
    rows = frame.limit(MAX_PRINTED_ROWS + 1).collect()
    return None if len(rows) > MAX_PRINTED_ROWS else list(map(_to_json_values, rows))


def _to_json_values(row: "Row") -> dict[str, Any]:
    return {name: _to_json_value(value) for name, value in row.asDict(recursive=True).items()}


def _to_json_value(value: Any) -> Any:
    if hasattr(value, "astimezone"):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return json.loads(json.dumps(value))
