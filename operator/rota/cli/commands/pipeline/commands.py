"""`rota pipeline`: commands that turn the journal into tables with Spark; each imports its module when it runs."""

# ruff: noqa: PLC0415 - imports inside commands keep each one quick and small

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from rota.cli.commands.pipeline import spark_errors
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.console.errors import report_user_errors
from rota.cli.console.formatting import print_line
from rota.cli.console.output import print_table, print_value
from rota.cli.options import OUTPUT_OPTION, default_option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLICIES_OPTION = click.option(
    "--policies", required=True, help="Files with the RebalancePolicies to try: a.yaml,b.yaml."
)
SOURCE_ARGUMENT = click.argument("source")  # a journal or a lake
IF_ANY_OPTION = click.option(
    "--if-any", is_flag=True, help="Exit with code 0 if there is nothing to read yet: for a CronJob."
)
DAYS_OPTION = click.option(
    "--days", type=click.IntRange(1, 36_600), help="Use only the last N days of SOURCE; default: all."
)
INSTALL_COMMAND = "pip install 'rota-operator[pipeline]'"
WATCH_INTERVAL_SECONDS = 30.0


@click.group()
def pipeline() -> None:
    """Compute tables, rollups and recommendations from the journal."""


def with_spark(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a Spark session and a progress printer; user errors exit with one sentence and code 2."""

    @wraps(command)
    @report_user_errors
    def run(**options: Any) -> None:
        from rota.cli.commands.pipeline import output_paths

        name = command.__name__
        source = options.get("source", options.get("journal", ""))
        with _translate_spark_errors():
            if options.pop("if_any", False) and not output_paths.has_input(source):
                print_line(f"{source} contains no records yet")
                return
            output_paths.check_paths(name, options)
            read = _read_input_files(name, options)
        with Progress() as progress:
            progress("starting Spark")
            with _spark_session(name) as spark:
                command(spark, progress, **read)

    return run


def _read_input_files(command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the files that options name before Spark starts, so that mistakes are reported at once."""
    from rota.cli.commands.pipeline import recommend, simulate

    read = dict(options)
    if "policies" in options:
        read["policies"] = simulate.read_policies(options["policies"])
    if command == "recommend":
        read["weights"] = recommend.read_weights(options["weights"])
        recommend.check_simulation(options["source"], read["policies"], options["days"])
    return read


@contextmanager
def _translate_spark_errors() -> Iterator[None]:
    """Turn an exception that a user can fix into a ValueError with one sentence."""
    try:
        yield
    except Exception as error:
        if sentence := spark_errors.describe_user_error(error):
            raise ValueError(sentence) from None
        raise


@contextmanager
def _spark_session(command: str) -> Iterator["SparkSession"]:
    try:
        from pyspark.sql import SparkSession

        from rota.pipeline.common.spark_session import create_session
    except ModuleNotFoundError as error:
        raise ValueError(f"This command needs {error.name}, which is not installed: {INSTALL_COMMAND}") from None
    _check_java()
    existing_session = SparkSession.getActiveSession()  # of a program that embeds this command
    spark = None
    try:
        with _translate_spark_errors():
            spark = create_session(f"rota-pipeline-{command}")
            yield spark
    finally:
        if spark is not None and existing_session is None:
            spark.stop()


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=os.path.join(home, "bin") if home else None):  # noqa: PTH118 - which takes strings
        return
    if home:
        raise ValueError(f"Spark needs Java, but JAVA_HOME ({home}) has none: correct it, or unset it")
    raise ValueError("Spark needs Java, but no java command was found: install Java 17 or later, or set JAVA_HOME")


def print_row_counts(rows: Mapping[str, int], output: str) -> None:
    """Print how many rows were written to each table."""
    table = [{"table": name, "rows": count} for name, count in rows.items()]
    print_value(dict(rows), output, lambda: print_table(table))


@pipeline.command()
@click.argument("journal")
@click.option("--to", "lake", required=True, help="The lake: a folder of tables, one for each kind.")
@click.option("--watch", is_flag=True, help="Ingest new hours until Ctrl-C; default: exit after all complete hours.")
@default_option(
    "--settle",
    type=click.FloatRange(0, 366 * 24 * 60),
    default=5.0,
    help="Minutes without growth after which an hour's file counts as complete.",
)
@click.option("--all", "everything", is_flag=True, help="Ingest every hour: no operator writes this journal any more.")
@default_option("--format", "form", type=click.Choice(["parquet", "delta"]), default="parquet")
@IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark
def ingest(
    spark: "SparkSession", progress: Progress, *, journal: str, lake: str, form: str, output: str, **options: Any
) -> None:
    """Ingest new records of JOURNAL into a lake; invalid lines go to its quarantine."""
    from rota.pipeline.ingest.streaming import ingest_journal

    def print_and_wait(counts: dict[str, int]) -> bool:
        """Print the new rows, wait, and return True: `ingest_journal` continues with later hours until Ctrl-C."""
        if counts:
            print_row_counts(counts, output)
            sys.stdout.flush()  # print at once also into a pipe
        time.sleep(WATCH_INTERVAL_SECONDS)
        return True

    progress(f"ingesting {journal} into {lake}")
    settle = None if options["everything"] else timedelta(minutes=options["settle"])
    on_ingested = print_and_wait if options["watch"] else None
    total = ingest_journal(spark, journal, lake, settle=settle, table_format=form, on_ingested=on_ingested)
    print_row_counts(total, output)


@pipeline.command()
@SOURCE_ARGUMENT
@POLICIES_OPTION
@click.option("--to", required=True, help="The folder for the results.")
@click.option("--weights", help="A YAML file with cost weights, such as moves: 1.")
@default_option(
    "--least-gain",
    type=click.FloatRange(0, 100),
    default=5.0,
    help="Minimum gain in percent for which a change is recommended.",
)
@default_option("--top", type=click.IntRange(0, 100), default=20, help="Number of groups with plots.")
@DAYS_OPTION
@IF_ANY_OPTION
@with_spark
def recommend(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Recommend a policy for each group.

    SOURCE is a journal or a lake, whose history is then replayed under each policy, or the folder that
    `rota pipeline simulate` wrote. Writes report.html, policies/ with manifests to apply, and tables.
    """
    from rota.cli.commands.pipeline import recommend

    recommend.recommend(spark, progress, **options)


@pipeline.command()
@SOURCE_ARGUMENT
@click.option("--to", help="The folder for the table; without it, the table is printed.")
@DAYS_OPTION
@IF_ANY_OPTION
@OUTPUT_OPTION
@with_spark
def rollup(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Print hourly metrics of each group, from SOURCE: a journal or a lake.

    With --days, those days are rewritten, and earlier days that were written before are kept.
    """
    from rota.cli.commands.pipeline import rollup

    rollup.rollup(spark, progress, **options)


@pipeline.command()
@SOURCE_ARGUMENT
@click.option("--to", help="The folder for the tables `intervals` and `violations`.")
@DAYS_OPTION
@OUTPUT_OPTION
@with_spark
def timeline(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Print violations of exclusive queue ownership, from SOURCE: a journal or a lake.

    The exit code is 1 if a queue had two owners, or was granted without proof.
    """
    from rota.cli.commands.pipeline import rollup

    rollup.timeline(spark, progress, **options)


@pipeline.command()
@SOURCE_ARGUMENT
@POLICIES_OPTION
@click.option("--to", required=True, help="The folder for the tables `results` and `series`.")
@DAYS_OPTION
@OUTPUT_OPTION
@with_spark
def simulate(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Replay every group's history under other policies, from SOURCE: a journal or a lake.

    The policy that was in force is among the results as `recorded`.
    """
    from rota.cli.commands.pipeline import simulate

    simulate.simulate(spark, progress, **options)


@pipeline.command()
@default_option("--groups", type=click.IntRange(1, 10_000_000), default=100)
@default_option("--hours", type=click.FloatRange(0.1, 24 * 366), default=24.0)
@default_option("--seed", type=click.IntRange(0), default=7, help="The same seed: the same journal.")
@click.option(
    "--largest", type=click.IntRange(0, 100_000), default=0, help="Number of queues of the first group; 0: random."
)
@click.option("--to", required=True, help="The folder for the journal; it must be empty.")
@OUTPUT_OPTION
@with_spark
def generate(spark: "SparkSession", progress: Progress, **options: Any) -> None:
    """Generate a journal of synthetic groups, as the operator would have written it."""
    from rota.cli.commands.pipeline import simulate

    simulate.generate(spark, progress, **options)
