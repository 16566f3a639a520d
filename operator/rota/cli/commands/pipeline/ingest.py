"""`rota pipeline ingest`: adds new segments of the journal to a lake, while it holds the lake's lease for ingests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import TYPE_CHECKING

import click

from rota.cli.commands.pipeline.progress import Progress, print_note
from rota.cli.console.formatting import print_line
from rota.cli.console.output import print_table, print_value
from rota.object_store import ObjectStore
from rota.pipeline.ingest.batch import ingest_journal
from rota.pipeline.ingest.lease import IngestLease, LeaseTakenError
from rota.pipeline.lake.tables import Lake
from rota.sentences import pluralize

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def hold_lease(lake: Lake, progress: Progress, *, if_any: bool) -> Iterator[None]:
    """Hold the lease of a lake, so that no other ingest starts; raise LeaseTakenError if one is running.

    With `if_any`, wait first: if the other ingest was killed, as before a Job's second attempt, its lease expires. If
    it is still running, end the command with exit code 0.
    """

    def wait(seconds: float) -> None:
        progress(f"waiting until another ingest of {lake.uri} renews its lease, or the lease of a killed one expires")
        sleep(seconds)

    try:
        with IngestLease(lake.store).hold(wait if if_any else None):
            yield
    except LeaseTakenError as error:
        if not if_any:
            raise
        print_line(str(error))
        raise click.exceptions.Exit(0) from None


def ingest(
    start_spark: Callable[[], "SparkSession"],
    progress: Progress,
    *,
    lake: Lake,
    journal: ObjectStore,
    output: str,
    if_any: bool,
) -> None:
    """Ingest new segments, and print how many rows were written to each table."""
    with hold_lease(lake, progress, if_any=if_any):
        progress(f"ingesting {journal.uri} into {lake.uri}")
        summary = ingest_journal(start_spark, lake, journal)
    table = [{"table": name, "rows": count} for name, count in summary.rows.items()]
    print_value(summary.rows, output, lambda: print_table(table))
    segments = pluralize(summary.segments, "new segment")
    print_note(f"{segments} of {journal.uri}; the newest snapshot of {lake.uri} is {summary.snapshot.number}")
