"""`rota pipeline ingest`: what it prints."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rota.cli.commands.pipeline.progress import Progress, print_note
from rota.cli.console.output import print_table, print_value
from rota.object_store import ObjectStore
from rota.pipeline.ingest.batch import ingest_journal
from rota.pipeline.lake.tables import Lake
from rota.sentences import pluralize

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ingest(
    start_spark: Callable[[], "SparkSession"],
    progress: Progress,
    *,
    lake: Lake,
    journal: ObjectStore,
    output: str,
    **_: Any,
) -> None:
    """Ingest new segments, and print how many rows were written to each table."""
    progress(f"ingesting {journal.uri} into {lake.uri}")
    summary = ingest_journal(start_spark, lake, journal)
    table = [{"table": name, "rows": count} for name, count in summary.rows.items()]
    print_value(summary.rows, output, lambda: print_table(table))
    segments = pluralize(summary.segments, "new segment")
    print_note(f"{segments} of {journal.uri}; the newest snapshot of {lake.uri} is {summary.snapshot.number}")
