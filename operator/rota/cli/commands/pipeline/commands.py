"""`rota pipeline`: commands that turn the journal into tables with Spark; each imports its module when it runs."""

# ruff: noqa: PLC0415 - imports inside commands keep each one quick and small

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rota.cli.commands.pipeline.command_runner import translate_errors, with_spark, with_spark_starter
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.console.errors import report_user_errors
from rota.cli.console.formatting import print_line
from rota.cli.options import OUTPUT_OPTION, default_option
from rota.sentences import pluralize
from rota.timestamps import parse_time

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLICIES_OPTION = click.option(
    "--policies", required=True, help="Files with the RebalancePolicies to try: a.yaml,b.yaml."
)
LAKE_ARGUMENT = click.argument("lake")
JOURNAL_OPTION = click.option("--journal", help="The journal: a folder or URI; default: journal in LAKE.")
IF_ANY_OPTION = click.option(
    "--if-any", is_flag=True, help="Exit with code 0 if there is nothing to read yet: for a CronJob."
)
INGEST_IF_ANY_OPTION = click.option(
    "--if-any", is_flag=True, help="Exit with code 0 if there is no journal yet, or another ingest runs: for a CronJob."
)
DAYS_OPTION = click.option(
    "--days", type=click.IntRange(1, 36_600), help="Use only the last N days of the history; default: all."
)


class TimeType(click.ParamType[datetime]):
    """A time with its zone, such as 2026-11-21T08:00:00Z."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the time in UTC."""
        seconds = parse_time(value)
        if seconds is None:
            self.fail(f"{value!r} is not a time with a zone; write it as 2026-11-21T08:00:00Z", param, ctx)
        return datetime.fromtimestamp(seconds, UTC)


def snapshot_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose the snapshot to read."""
    number = click.option("--snapshot", type=click.IntRange(1), help="Read this snapshot; default: the newest.")
    time = click.option("--as-of", type=TimeType(), help="Read the snapshot of this time: 2026-11-21T08:00:00Z.")
    return number(time(command))


def recommendation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a recommendation."""
    weights = click.option("--weights", help="A YAML file with cost weights, such as moves: 1.")
    least_gain = default_option(
        "--least-gain",
        type=click.FloatRange(0, 100),
        default=5.0,
        help="Minimum gain in percent for which a change is recommended.",
    )
    top = default_option("--top", type=click.IntRange(0, 100), default=20, help="Number of groups with plots.")
    page = click.option(
        "--page-url", help="URL of the operator's page, to which the report links: https://rota.example.com."
    )
    board = click.option("--board-url", help="URL of Grafana, to whose boards the report links.")
    backtest = click.option(
        "--backtest",
        is_flag=True,
        help="Also test the advice: recommend from the first half of each history, and compare in the second half.",
    )
    return weights(least_gain(top(page(board(backtest(command))))))


@click.group()
def pipeline() -> None:
    """Compute tables, rollups and recommendations from the journal.

    LAKE, where the tables are, is a folder or a bucket's URI. `run` runs all steps.
    """


@pipeline.command()
@LAKE_ARGUMENT
@JOURNAL_OPTION
@INGEST_IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark_starter
def ingest(start_spark: "Callable[[], SparkSession]", progress: Progress, **options: Any) -> None:
    """Add new segments of the journal to LAKE.

    Invalid lines go to its quarantine. Spark starts only for many segments.
    """
    from rota.cli.commands.pipeline import ingest

    ingest.ingest(start_spark, progress, **options)


@pipeline.command()
@LAKE_ARGUMENT
@JOURNAL_OPTION
@click.option("--policies", help="Files with RebalancePolicies to try: a.yaml,b.yaml; default: no simulation.")
@click.option("--to", help="The folder for the report and the manifests, with --policies.")
@recommendation_options
@DAYS_OPTION
@click.option(
    "--fail-on-violations",
    is_flag=True,
    help="Exit with code 1 if a queue had two owners, or was granted without proof.",
)
@click.option("--metrics-file", help="A file NAME.prom for the metrics of the run: for a textfile collector.")
@click.option("--push-gateway", help="URL of a Prometheus Pushgateway for the metrics of the run.")
@INGEST_IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark_starter
def run(start_spark: "Callable[[], SparkSession]", progress: Progress, **options: Any) -> None:
    """Run all steps on LAKE in one Spark application.

    The steps are ingest, rollup, timeline and, with --policies, recommend. All steps after the ingest read the same
    snapshot. Each one publishes its tables, and one summary is printed at the end.
    """
    from rota.cli.commands.pipeline.run import steps

    steps.run_all(start_spark, progress, **options)


@pipeline.command()
@LAKE_ARGUMENT
@POLICIES_OPTION
@click.option("--to", required=True, help="The folder for the report and the manifests.")
@recommendation_options
@DAYS_OPTION
@snapshot_options
@IF_ANY_OPTION
@with_spark
def recommend(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Recommend a policy for each group, and write a report.

    Replays the history of LAKE under each policy, and compares costs. Writes report.html and policies/ with manifests
    to apply, and the marts results, series, costs and chosen; with --backtest also the mart backtest, which takes about
    twice as long.
    """
    from rota.cli.commands.pipeline import recommend

    recommend.recommend(spark, progress, **options)


@pipeline.command()
@LAKE_ARGUMENT
@DAYS_OPTION
@snapshot_options
@IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark
def rollup(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Compute hourly metrics of each group: the mart rollup.

    Prints the newest 40 rows, with -o json or yaml all. With --days, those days are rewritten, and earlier days that
    were written before are kept.
    """
    from rota.cli.commands.pipeline import rollup

    rollup.rollup(spark, progress, **options)


@pipeline.command()
@LAKE_ARGUMENT
@DAYS_OPTION
@snapshot_options
@IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark
def timeline(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Compute the owners of each queue, and print violations.

    Writes the marts intervals and violations. As a table, the worst 40 violations are printed. The exit code is 1 if a
    queue had two owners, or was granted without proof.
    """
    from rota.cli.commands.pipeline import rollup

    rollup.timeline(spark, progress, **options)


@pipeline.command()
@LAKE_ARGUMENT
@POLICIES_OPTION
@DAYS_OPTION
@snapshot_options
@IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark
def simulate(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Replay the history of each group under other policies.

    Writes the marts results and series. The policy that was in force is among the results as `recorded`.
    """
    from rota.cli.commands.pipeline import simulate

    simulate.simulate(spark, progress, **options)


@pipeline.command()
@LAKE_ARGUMENT
@JOURNAL_OPTION
@click.option(
    "--keep-days",
    type=click.IntRange(2, 36_600),
    help="Delete rows and segments older than N days, which is more than --snapshot-days; default: keep all.",
)
@default_option(
    "--snapshot-days",
    type=click.IntRange(1, 36_600),
    default=7,
    help="Snapshots can be read for N days after a newer one has replaced them.",
)
@IF_ANY_OPTION
@OUTPUT_OPTION
@report_user_errors
def maintain(*, lake: str, journal: str | None, output: str, if_any: bool, **days: Any) -> None:
    """Compact LAKE, and delete its old days and snapshots.

    Past days are compacted, and files that no snapshot needs are removed. Starts neither Spark nor Java.
    """
    with translate_errors():
        from rota.cli.commands.pipeline import maintain

        maintain.maintain(lake, journal, output, is_optional=if_any, **days)


@pipeline.command()
@default_option("--groups", type=click.IntRange(1, 10_000_000), default=100, help="Number of groups.")
@default_option("--hours", type=click.FloatRange(0.1, 24 * 366), default=24.0, help="Length of their history.")
@default_option("--seed", type=click.IntRange(0), default=7, help="The same seed: the same journal.")
@click.option(
    "--largest", type=click.IntRange(0, 100_000), default=0, help="Number of queues of the first group; 0: random."
)
@click.option("--rates", help="A file of recorded message rates, which the topics follow: JSON lines.")
@click.option("--scale", type=float, help="Multiply the rates of --rates by this number; default: 1.")
@click.option("--to", required=True, help="The lake; its journal must be empty.")
@OUTPUT_OPTION
@with_spark
def generate(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Generate a journal of synthetic groups in a lake.

    The operator's own planner makes the decisions in it, so it is like the journal of a real fleet.
    """
    from rota.cli.commands.pipeline import simulate

    simulate.generate(spark, progress, **options)


@pipeline.command()
@click.option("--to", required=True, help="The folder; jars that it has already are checked and kept.")
@click.option("--repository", help="The URL of a Maven repository; default: ROTA_MAVEN_URL, else Maven Central.")
@report_user_errors
def jars(to: str, repository: str | None) -> None:
    """Fetch the jars that Spark needs for lakes in S3.

    For example for machines without a connection.
    """
    from rota.pipeline.common import s3_jars

    fetched = s3_jars.fetch_jars(Path(to), repository or "")
    number = pluralize(len(s3_jars.read_list()), "jar")
    print_line(f"{to} has {number} for S3, of Hadoop {s3_jars.hadoop_version()}; {fetched} of them were fetched")
