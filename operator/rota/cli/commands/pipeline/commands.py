"""`rota pipeline`: commands that turn the journal into tables with Spark; each imports its module when it runs."""

# ruff: noqa: PLC0415 - imports inside commands keep each one quick and small

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rota.cli.commands.pipeline.progress import Progress
from rota.cli.commands.pipeline.spark.session import open_session
from rota.cli.console.errors import report_user_errors
from rota.cli.console.formatting import print_line
from rota.cli.options import OUTPUT_OPTION, default_option
from rota.sentences import pluralize
from rota.timestamps import parse_time

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rota.cli.commands.pipeline.opened_lake import OpenedLake
    from rota.cli.commands.pipeline.run.metrics import MetricsOutput
    from rota.object_store import ObjectStore

POLICIES_OPTION = click.option(
    "--policies", required=True, help="Files with the RebalancePolicies to try: a.yaml,b.yaml."
)
LAKE_ARGUMENT = click.argument("lake")
JOURNAL_OPTION = click.option("--journal", help="The journal: a folder or URI; default: journal in LAKE.")
IF_ANY_OPTION = click.option(
    "--if-any", is_flag=True, help="Exit with code 0 if there is nothing to read yet: for a CronJob."
)
DAYS_OPTION = click.option(
    "--days", type=click.IntRange(1, 36_600), help="Use only the last N days of the history; default: all."
)
INSTALL_COMMAND = "pip install 'rota-operator[pipeline]'"


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
    """Compute tables, rollups and recommendations from the journal."""


def with_spark(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a Spark session and a progress printer; see `with_spark_starter`."""

    @wraps(command)
    def run(start_spark: "Callable[[], SparkSession]", progress: Progress, **inputs: Any) -> None:
        command(start_spark(), progress, **inputs)

    return with_spark_starter(run)


def with_spark_starter(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a function that starts Spark at its first call, and a progress printer.

    User errors exit with one sentence and code 2.
    """

    @wraps(command)
    @report_user_errors
    def run(**options: Any) -> None:
        name = command.__name__
        with translate_errors():
            inputs = _read_inputs(name, options)
        if inputs is None:
            return
        with translate_errors(), Progress() as progress, ExitStack() as sessions:

            @cache
            def start_spark() -> "SparkSession":
                progress("starting Spark")
                return sessions.enter_context(open_session(name, _lakes_of(inputs), _source_bytes(inputs)))

            command(start_spark, progress, **inputs)

    return run


def _read_inputs(command: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read everything that needs no Spark before it starts, so that mistakes are reported at once.

    Return None if there is no journal or history yet, and `--if-any` is given.
    """
    from rota.cli.commands.pipeline.opened_lake import NothingToReadError

    inputs = dict(options)
    inputs |= _read_files(command, options)
    inputs.pop("scale", None)  # the rates are scaled
    try:
        inputs |= _open_inputs(command, options)
    except NothingToReadError as error:
        if not options.get("if_any"):
            raise ValueError(str(error)) from None
        print_line(str(error))
        return None
    return inputs


def _read_files(command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the input files of a command, and check its output files."""
    from rota.cli.commands.pipeline import output_paths, recommend, simulate

    inputs: dict[str, Any] = {}
    if command == "run":
        if (options["policies"] is None) != (options["to"] is None):
            raise ValueError("--policies and --to belong together: files with policies, and the folder for the report")
        inputs["metrics"] = _check_metrics(options)
    if command == "generate":
        inputs["rates"] = simulate.read_recorded_rates(options["rates"], options["scale"])
    if options.get("policies") is not None:
        inputs["policies"] = simulate.read_policies(options["policies"])
    if "weights" in options:
        inputs["weights"] = recommend.read_weights(options["weights"])
        recommend.check_base_urls(options["page_url"], options["board_url"])
        if options["to"] is not None:
            output_paths.check_report_folder(options["to"], options["lake"])
    return inputs


def _check_metrics(options: Mapping[str, Any]) -> "MetricsOutput | None":
    """Return where a run writes its metrics; the package that does so is needed only then."""
    if options["metrics_file"] is None and options["push_gateway"] is None:
        return None
    from rota.cli.commands.pipeline.run.metrics import MetricsOutput

    return MetricsOutput(options["metrics_file"], options["push_gateway"])


def _open_inputs(command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Open the lake, journal or snapshot that a command reads; raise NothingToReadError if it is empty."""
    from rota.cli.commands.pipeline import opened_lake

    if command == "generate":
        return {"journal": opened_lake.open_new_journal(options["to"])}
    if command in {"ingest", "run"}:
        lake = opened_lake.open_lake_to_write(options["lake"])
        open_journal = opened_lake.open_journal if command == "ingest" else opened_lake.open_journal_of_run
        return {"lake": lake, "journal": open_journal(lake, options["journal"])}
    lake = opened_lake.open_lake(options["lake"])
    return {"opened": opened_lake.open_snapshot(lake, options["snapshot"], options["as_of"])}


@contextmanager
def translate_errors(install_command: str = INSTALL_COMMAND) -> Iterator[None]:
    """Turn an exception that a user can fix into a ValueError with one sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ValueError(f"This command needs {package}, which is not installed: {install_command}") from None
    except Exception as error:
        from rota.cli.commands.pipeline.spark_errors import describe_user_error

        if sentence := describe_user_error(error):
            raise ValueError(sentence) from None
        raise


def _source_bytes(inputs: Mapping[str, Any]) -> int | None:
    """Return the compressed size of the records that a command reads; None if it is unknown."""
    from rota.pipeline.ingest.extent import journal_bytes

    if "opened" in inputs:
        opened: OpenedLake = inputs["opened"]
        return journal_bytes(opened.lake, opened.snapshot, opened.first_day(inputs.get("days")))
    if inputs.get("journal") is None or "groups" in inputs:  # `generate` writes a journal
        return None
    journal: ObjectStore = inputs["journal"]
    return sum(listed.size_bytes for listed in journal.list_objects())


def _lakes_of(inputs: Mapping[str, Any]) -> list[str]:
    """Return the URIs of the lakes whose tables a command reads or writes; none if it writes only a journal."""
    if "opened" in inputs:
        return [inputs["opened"].lake.uri]
    return [inputs["lake"].uri] if "lake" in inputs else []


@pipeline.command()
@LAKE_ARGUMENT
@JOURNAL_OPTION
@IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark_starter
def ingest(start_spark: "Callable[[], SparkSession]", progress: Progress, **options: Any) -> None:
    """Ingest new segments of the journal into LAKE; invalid lines go to its quarantine.

    Spark starts only for many segments.
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
@IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark
def run(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Run all steps on LAKE in one Spark application: ingest, rollup, timeline and, with --policies, recommend.

    All steps after the ingest read the same snapshot. Each one publishes its tables, and one summary is printed at the
    end.
    """
    from rota.cli.commands.pipeline.run import steps

    steps.run_all(spark, progress, **options)


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
    """Recommend a policy for each group: replay the history of LAKE under each policy, and compare costs.

    Writes report.html and policies/ with manifests to apply, and the marts results, series, costs and chosen; with
    --backtest also the mart backtest, which takes about twice as long.
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
    """Compute hourly metrics of each group from the history of LAKE: the mart rollup.

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
    """Print violations of exclusive queue ownership in the history of LAKE; the marts intervals and violations.

    As a table, the worst 40 are printed. The exit code is 1 if a queue had two owners, or was granted without proof.
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
    """Replay the history of every group of LAKE under other policies: the marts results and series.

    The policy that was in force is among the results as `recorded`.
    """
    from rota.cli.commands.pipeline import simulate

    simulate.simulate(spark, progress, **options)


@pipeline.command()
@LAKE_ARGUMENT
@JOURNAL_OPTION
@click.option(
    "--keep-days",
    type=click.IntRange(2, 36_600),
    help="Delete rows and segments older than N days; more than --snapshot-days; default: none.",
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
    """Compact past days of LAKE, delete old days, and remove expired snapshots and files; starts no Spark."""
    with translate_errors():
        from rota.cli.commands.pipeline import maintain

        maintain.maintain(lake, journal, output, is_optional=if_any, **days)


@pipeline.command()
@default_option("--groups", type=click.IntRange(1, 10_000_000), default=100)
@default_option("--hours", type=click.FloatRange(0.1, 24 * 366), default=24.0)
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
    """Generate a journal of synthetic groups in a lake, as the operator would have written it."""
    from rota.cli.commands.pipeline import simulate

    simulate.generate(spark, progress, **options)


@pipeline.command()
@click.option("--to", required=True, help="The folder; jars that it has already are checked and kept.")
@click.option("--repository", help="The URL of a Maven repository; default: ROTA_MAVEN_URL, else Maven Central.")
@report_user_errors
def jars(to: str, repository: str | None) -> None:
    """Fetch the jars by which Spark reads and writes lakes in S3, such as for machines without a connection."""
    from rota.pipeline.common import s3_jars

    fetched = s3_jars.fetch_jars(Path(to), repository or "")
    number = pluralize(len(s3_jars.read_list()), "jar")
    print_line(f"{to} has {number} for S3, of Hadoop {s3_jars.hadoop_version()}; {fetched} of them were fetched")
