"""Runs a command of `rota pipeline`: reads its inputs, starts Spark if it is needed, and makes errors sentences."""

# ruff: noqa: PLC0415 - imports inside functions keep each command quick and small

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from rota.cli.commands.pipeline.progress import Progress
from rota.cli.commands.pipeline.spark.session import open_session
from rota.cli.console.errors import report_user_errors
from rota.cli.console.formatting import print_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rota.cli.commands.pipeline.opened_lake import OpenedLake
    from rota.cli.commands.pipeline.run.metrics import MetricsOutput
    from rota.object_store import ObjectStore

INSTALL_COMMAND = "pip install 'rota-operator[pipeline]'"


def with_spark(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a Spark session and a progress printer; see `with_spark_starter`."""

    @wraps(command)
    def run(start_spark: "Callable[[], SparkSession]", progress: Progress, **inputs: Any) -> None:
        command(start_spark(), progress, **inputs)

    return with_spark_starter(run)


def with_spark_starter(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a function that starts Spark at its first call, a progress printer, and its inputs.

    Inputs are the options, with files read and lakes opened. User errors exit with one sentence and code 2.
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
    inputs.pop("scale", None)  # `rates` are scaled already
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
    """Return where a run writes its metrics; None: nowhere, and prometheus_client need not be installed."""
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
    """Turn an exception whose cause a user can remove into a ValueError with one sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ValueError(f"This command needs {package}, which is not installed: {install_command}") from None
    except Exception as error:
        from rota.cli.commands.pipeline.spark.errors import describe_user_error

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
