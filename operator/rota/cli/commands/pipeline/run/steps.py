"""The steps of a run: ingest, then rollup, timeline and recommendation of the snapshot that follows the ingest."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rota.cli.commands.pipeline import recommend, rollup
from rota.cli.commands.pipeline.ingest import hold_lease
from rota.cli.commands.pipeline.opened_lake import OpenedLake, open_snapshot
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.commands.pipeline.run.summary import RunSummary
from rota.cli.commands.pipeline.simulate import read_histories, run_simulation
from rota.cli.console.output import print_value
from rota.object_store import ObjectStore
from rota.pipeline.history.tables import HistoryReport
from rota.pipeline.ingest.batch import ingest_journal
from rota.pipeline.ingest.rows import QUARANTINE_KIND
from rota.pipeline.lake.tables import Lake
from rota.pipeline.report.outputs import REPORT_FILE
from rota.spec import PolicySpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rota.cli.commands.pipeline.run.metrics import MetricsOutput


class PipelineRun:
    """Runs the steps one after the other. Each one publishes its tables, so that a later failure does not lose them."""

    def __init__(self, spark: "SparkSession", progress: Progress, lake: Lake, days: int | None) -> None:
        self._spark = spark
        self._progress = progress
        self._lake = lake
        self._days = days
        self.summary = RunSummary(lake.uri)

    def ingest(self, journal: ObjectStore | None) -> OpenedLake:
        """Ingest new segments, and return the newest snapshot, which all other steps read."""
        with self.summary.measure("ingest"):
            if journal is not None:
                self._progress(f"ingesting {journal.uri} into {self._lake.uri}")
                ingested = ingest_journal(lambda: self._spark, self._lake, journal)
                self.summary.segments = ingested.segments
                self.summary.quarantined_lines = ingested.rows[QUARANTINE_KIND]
                self.summary.add_rows({f"lake/{kind}": rows for kind, rows in ingested.rows.items()})
            opened = open_snapshot(self._lake, number=None, as_of=None)
        self.summary.read_snapshot = opened.snapshot.number
        self.summary.published_snapshot = opened.snapshot.number
        return opened

    def examine(self, opened: OpenedLake) -> None:
        """Write hourly rollups, intervals and violations."""
        with self.summary.measure("rollup"):  # one pass over the history also computes the rows of the timeline
            reports = rollup.read_reports(
                self._spark, self._progress, opened, self._days, list(HistoryReport)
            ).persist()
            rollup.write_rollup(self._progress, reports, opened, self._days)
            self._publish(opened)
        with self.summary.measure("timeline"):
            violations = rollup.write_audit(self._progress, reports, opened)
            self.summary.violations |= {
                row["kind"]: row["count"] for row in violations.groupBy("kind").count().collect()
            }
            self.summary.gaps = opened.count_gaps(self._days)
            self._publish(opened)
        reports.unpersist()

    def recommend(self, opened: OpenedLake, policies: Mapping[str, PolicySpec], **options: Any) -> None:
        """Simulate the policies, and write the recommendation."""
        earlier = recommend.read_earlier_advice(self._spark, opened)
        with self.summary.measure("simulate"):
            histories = read_histories(self._spark, self._progress, opened, self._days)
            simulation = run_simulation(self._progress, histories, policies, opened)
            self._publish(opened)
        with self.summary.measure("recommend"):
            findings = recommend.write_report(
                self._progress, histories, simulation, policies, opened=opened, earlier=earlier, **options
            )
            self.summary.recommended_changes = findings.scope.changing
            self.summary.backtest = findings.backtest
            self.summary.report = str(Path(options["to"]) / REPORT_FILE)
            self._publish(opened)

    def _publish(self, opened: OpenedLake) -> None:
        published = opened.publish()
        # If a step has written nothing, `publish` returns the snapshot that was read, which is older than that of a
        # previous step.
        self.summary.published_snapshot = max(self.summary.published_snapshot, published.number)
        self.summary.add_rows(opened.rows)  # `opened.rows` are of all steps so far; `add_rows` does not add them twice


def run_all(
    start_spark: Callable[[], "SparkSession"],
    progress: Progress,
    *,
    lake: Lake,
    journal: ObjectStore | None,
    metrics: "MetricsOutput | None",
    **options: Any,
) -> None:
    """Run all steps, print the summary, and write metrics.

    Violations exit with code 1 only with `fail_on_violations`. By default they do not, because a Kubernetes Job would
    repeat the whole run, and all later runs would fail, too, until the day of the violation is no longer examined.
    """
    with hold_lease(lake, progress, if_any=options["if_any"]):  # before Spark starts, so that a refusal is quick
        run = PipelineRun(start_spark(), progress, lake, options["days"])
        opened = run.ingest(journal)
    run.examine(opened)
    if options["policies"] is not None:
        names = ("policies", "to", "weights", "least_gain", "top", "page_url", "board_url", "backtest")
        run.recommend(opened, **{name: options[name] for name in names})
    print_value(run.summary.to_value(), options["output"], run.summary.print_text)
    if metrics is not None:
        metrics.write(run.summary)
    # Two owners, or a grant without proof; the other kinds of violations concern the journal or the group.
    if options["fail_on_violations"] and run.summary.operator_errors:
        raise click.exceptions.Exit(1)
