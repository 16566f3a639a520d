"""`rota history`: hourly rollups of one group, read from a lake without Spark and Java."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow.compute as pc
import pyarrow.dataset as ds

from rota.cli.console.formatting import print_line, suggest_names
from rota.cli.console.output import print_table, print_value
from rota.object_store import open_store
from rota.pipeline.lake.reading.arrow_rows import collect_rows, open_rows
from rota.pipeline.lake.snapshots import LakeSnapshot, SnapshotStore
from rota.pipeline.report.plots import format_number
from rota.sentences import pluralize

ROLLUP = "marts/rollup"
# Columns of the printed table, and the function that combines the hours to a total; None: they are not combined.
PRINTED_COLUMNS: dict[str, Callable[[list[Any]], Any] | None] = {
    "group": None,
    "hour": None,
    "moved_queues": sum,
    "forced_queues": sum,
    "unowned_queue_seconds": sum,
    "lag_p99": max,
    "delay_p99": max,
    "complete": all,
}
HOUR = timedelta(hours=1)


class GroupRollup(NamedTuple):
    """Hours of a group, oldest first, and their total."""

    snapshot: LakeSnapshot
    rows: list[dict[str, Any]]  # times are texts
    total: dict[str, Any]


class RollupReader:
    """Reads the mart rollup of one snapshot of a lake."""

    def __init__(self, lake: str, number: int | None = None, as_of: datetime | None = None) -> None:
        store = open_store(lake)
        self.snapshot = SnapshotStore(store).choose(number, as_of)
        version = self.snapshot.version(ROLLUP)
        if version is None:
            raise ValueError(
                f"{store.uri} has no rollups in snapshot {self.snapshot.number}; `rota pipeline rollup` makes them"
            )
        self._lake_uri = store.uri
        self._uri = f"{store.uri}/{ROLLUP}"
        self._dataset = open_rows(store, ROLLUP, version)

    def read(self, group: str, hours: int) -> GroupRollup:
        """Return a group's rows of the last hours of the rollups; raise ValueError if it has none."""
        newest_hour = self._newest_hour()
        first_hour = newest_hour - (hours - 1) * HOUR
        # The table is partitioned by `date`: without a condition on it, all files would be opened.
        days = (ds.field("date") >= first_hour.date()) & (ds.field("date") <= newest_hour.date())
        window = days & (ds.field("hour") >= first_hour)
        table = collect_rows(self._dataset, self._uri, where=window & (ds.field("group") == group))
        if not table.num_rows:
            groups = pc.unique(collect_rows(self._dataset, self._uri, ["group"], window)["group"]).to_pylist()
            where = f"the last {pluralize(hours, 'hour')} of {self._lake_uri}"
            raise ValueError(f"Group {group} is not in {where}; {suggest_names(group, groups)}")
        columns = [name for name in table.column_names if name != "date"]
        rows = [_to_json_values(row) for row in table.select(columns).sort_by("hour").to_pylist()]
        return GroupRollup(self.snapshot, rows, total_of(rows))

    def _newest_hour(self) -> datetime:
        """Return the newest hour of any group; ignore days in the future, which come from a wrong clock."""
        fragments = self._dataset.get_fragments()
        days = {ds.get_partition_keys(fragment.partition_expression).get("date") for fragment in fragments}
        today = datetime.now(UTC).date()
        newest_day = max((day for day in days if isinstance(day, date) and day <= today), default=None)
        if newest_day is None:
            raise ValueError(f"The rollups of {self._lake_uri} are empty")
        hours = collect_rows(self._dataset, self._uri, ["hour"], ds.field("date") == newest_day)["hour"]
        newest_hour: datetime = pc.max(hours).as_py()
        return newest_hour


def show_history(
    group: str, lake: str, hours: int, output: str, *, number: int | None = None, as_of: datetime | None = None
) -> None:
    """Print the last hours of a group, and a total."""
    rollup = RollupReader(lake, number, as_of).read(group, hours)
    value = {"snapshot": rollup.snapshot.number, "rows": rollup.rows, "total": rollup.total}
    print_value(value, output, lambda: _print_rollup(rollup))


def _print_rollup(rollup: GroupRollup) -> None:
    print_table([printed_row(row) for row in (*rollup.rows, rollup.total)])
    created_at = rollup.snapshot.created_at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    print_line(f"Snapshot {rollup.snapshot.number}, published {created_at}; totals of lag and delay are the highest")


def printed_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of the printed table, with numbers as texts."""
    return {name: _format_cell(row[name]) for name in PRINTED_COLUMNS}


def _format_cell(value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return format_number(value).replace("\N{NO-BREAK SPACE}", " ")
    return value


def total_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the total of the hours: sums, the highest lag and delay, and whether all are complete; None: unknown."""
    total: dict[str, Any] = {"group": rows[0]["group"], "hour": "total"}
    for name, combine in PRINTED_COLUMNS.items():
        values = [row[name] for row in rows if row.get(name) is not None]
        if combine is not None:
            total[name] = combine(values) if values else None
    return total


def _to_json_values(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with texts for times, and objects for maps, which pyarrow reads as lists of pairs."""
    return {name: _to_json_value(value) for name, value in row.items()}


def _to_json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return dict(value) if isinstance(value, list) else value
