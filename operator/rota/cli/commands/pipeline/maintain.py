"""`rota pipeline maintain`: compacts a lake and deletes its old days and snapshots, without Spark."""

from dataclasses import asdict
from datetime import UTC, datetime

from rota.cli.commands.pipeline.opened_lake import JOURNAL, open_lake
from rota.cli.console.formatting import print_line
from rota.cli.console.output import print_table, print_value
from rota.object_store import open_store
from rota.pipeline.lake.upkeep.maintenance import Maintenance, MaintenanceSummary, check_clock
from rota.sentences import join_names, pluralize

_MEBIBYTE = 2**20


def maintain(
    uri: str, journal: str | None, output: str, *, keep_days: int | None, snapshot_days: int, is_optional: bool
) -> None:
    """Maintain a lake, and print what was done.

    Rows and journal segments are kept for `keep_days` days (None: for ever), and snapshots for `snapshot_days` days
    after a newer one has replaced them. With `is_optional`, a lake without a snapshot is no error: nothing is done.
    """
    if keep_days is not None and keep_days <= snapshot_days:
        problem = f"--keep-days {keep_days} is not more than --snapshot-days {snapshot_days}"
        remedy = f"give --keep-days {snapshot_days + 1} or more, or a smaller --snapshot-days"
        raise ValueError(f"{problem}: snapshots need rows of those days; {remedy}")
    lake = open_lake(uri)
    store = open_store(journal or f"{lake.uri}/{JOURNAL}")
    now = datetime.now(UTC)
    maintenance = Maintenance(lake, store, now, keep_days=keep_days, snapshot_days=snapshot_days)
    has_snapshot = bool(lake.snapshots.numbers())
    if is_optional and not has_snapshot:
        print_line(f"{lake.uri} has no snapshot yet")
        return
    if has_snapshot:  # otherwise `run` raises; the check would write its probe to a place that is no lake
        check_clock(lake.store, now)  # files are removed by their age
    summary = maintenance.run()
    print_value(asdict(summary), output, lambda: _print_summary(lake.uri, summary))


def _print_summary(uri: str, summary: MaintenanceSummary) -> None:
    print_table(
        [
            {
                "table": name,
                "compacted": "yes" if upkeep.compacted else "no",
                "deleted days": upkeep.deleted_days,
                "removed files": upkeep.removed_files,
                "freed MiB": f"{upkeep.freed_bytes / _MEBIBYTE:.1f}",
            }
            for name, upkeep in summary.tables.items()
            if upkeep.is_changed
        ]
    )
    segments = pluralize(summary.deleted_segments, "segment")
    print_line(f"Deleted {segments} of the journal, and {pluralize(summary.removed_snapshots, 'expired snapshot')}")
    if summary.skipped:
        print_line(f"Other commands write {join_names(summary.skipped)}: the next maintenance continues there")
    print_line(f"The newest snapshot of {uri} is {summary.snapshot}")
