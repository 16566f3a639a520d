"""`rota pipeline rollup` and `timeline`: write marts (result tables) of the history, and print their first rows."""

import json
from collections.abc import Callable, Sequence
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
from rota.pipeline.history.reading.buckets import read_history
from rota.pipeline.history.tables import (
    HISTORY_KINDS,
    HistoryReport,
    compute_history,
    select_intervals,
    select_rollup,
    select_violations,
)
from rota.sentences import pluralize

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

VIOLATIONS = "marts/violations"
MAX_COLLECTED_ROWS = 10_000  # a result with more rows is not printed as JSON or YAML
MAX_TABLE_ROWS = 40  # rows that are printed as a table

ToCells = Callable[[dict[str, Any]], dict[str, Any]]


def rollup(
    spark: "SparkSession", progress: Progress, *, opened: OpenedLake, days: int | None, output: str, **_: Any
) -> None:
    """Write the hourly metrics of each group, and print them, the newest hour first."""
    written = write_rollup(progress, read_reports(spark, progress, opened, days, [HistoryReport.ROLLUP]), opened, days)
    opened.publish()
    rows = _collect_rows(written.drop("date").orderBy(col("hour").desc(), "group"))
    rest_hint = f"`rota history GROUP --lake {opened.lake.uri}` prints those of a group, the table {ROLLUP} has all"
    _print_rows(rows, output, ROLLUP, opened, rest_hint=rest_hint, to_cells=printed_row)


def read_reports(
    spark: "SparkSession", progress: Progress, opened: OpenedLake, days: int | None, reports: Sequence[HistoryReport]
) -> "DataFrame":
    """Return the rows of reports on the last `days` days."""
    progress("reading the history")
    first_day = opened.first_day(days)
    # Records of the day before show the owners at the start of the first hour, and handovers that continue.
    since = first_day - timedelta(days=1) if first_day and HistoryReport.ROLLUP in reports else first_day
    history = read_history(spark, opened.lake, opened.snapshot, HISTORY_KINDS, since)
    return compute_history(history._replace(audited_since=first_day), reports)


def write_rollup(progress: Progress, reports: "DataFrame", opened: OpenedLake, days: int | None) -> "DataFrame":
    """Write the mart rollup, or only its last days, and return the rows of these days."""
    since = opened.first_day(days)
    progress("rolling up, and writing")
    dated = select_rollup(reports).withColumn("date", to_date("hour"))
    written = opened.write(ROLLUP, dated, dates=opened.days_since(since))
    return written.where(col("date") >= lit(since)) if since else written


def timeline(
    spark: "SparkSession", progress: Progress, *, opened: OpenedLake, days: int | None, output: str, **_: Any
) -> None:
    """Write intervals and violations, print the violations, and exit with 1 if one is an error of the operator."""
    violations = write_audit(
        progress, read_reports(spark, progress, opened, days, [HistoryReport.AUDIT]).persist(), opened
    )
    opened.publish()
    worst = col("kind").isin(*OPERATOR_ERRORS)
    rows = _collect_rows(violations.orderBy(worst.desc(), "group", "since", "topic", "broker", "queue"))
    if rows or output != "table":
        _print_rows(rows, output, VIOLATIONS, opened, rest_hint=f"the table {VIOLATIONS} has all")
    else:
        print_line("No violations of queue ownership")
    if rows and rows[0]["kind"] in OPERATOR_ERRORS:
        raise click.exceptions.Exit(1)


def write_audit(progress: Progress, reports: "DataFrame", opened: OpenedLake) -> "DataFrame":
    """Write the marts intervals and violations, and return the violations. `reports` is evaluated twice: persist it."""
    progress("computing owners, and writing")
    opened.write("marts/intervals", select_intervals(reports))
    return opened.write(VIOLATIONS, select_violations(reports))


def _print_rows(
    rows: list[dict[str, Any]], output: str, table: str, opened: OpenedLake, *, rest_hint: str, to_cells: ToCells = dict
) -> None:
    """Print the first rows as a table, and `rest_hint` if there are others; as JSON or YAML print all rows.

    Raise ValueError if these are too many.
    """
    has_all = len(rows) <= MAX_COLLECTED_ROWS
    if output != "table" and not has_all:
        raise ValueError(f"{table} has more than {MAX_COLLECTED_ROWS:,} rows, too many to print; read the table")

    def print_first() -> None:
        print_table([to_cells(row) for row in rows[:MAX_TABLE_ROWS]])
        if (others := len(rows) - MAX_TABLE_ROWS) > 0:
            number = f"{'' if has_all else 'at least '}{pluralize(others, 'more row')}"
            is_written = table in opened.rows  # False for an older snapshot: then the table has other rows
            print_line(f"And {number}: {rest_hint if is_written else '-o json prints all'}")

    print_value(rows, output, print_first)


def _collect_rows(frame: "DataFrame") -> list[dict[str, Any]]:
    """Return at most MAX_COLLECTED_ROWS + 1 rows as JSON values, with times in UTC."""
    return list(map(_to_json_values, frame.limit(MAX_COLLECTED_ROWS + 1).collect()))


def _to_json_values(row: "Row") -> dict[str, Any]:
    return {name: _to_json_value(value) for name, value in row.asDict(recursive=True).items()}


def _to_json_value(value: Any) -> Any:
    if hasattr(value, "astimezone"):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return json.loads(json.dumps(value))  # plain types, as yaml.safe_dump needs; a value without a JSON form raises
