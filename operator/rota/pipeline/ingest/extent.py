"""Extent of a lake's history: its size, its days, and whether it has records at all."""

from datetime import UTC, date, datetime, timedelta

import pyarrow.dataset as ds

from rota.pipeline.common.schemas import JOURNAL_SCHEMAS
from rota.pipeline.lake.snapshots import LakeSnapshot
from rota.pipeline.lake.tables import FILES_TABLE, Lake


def journal_bytes(lake: Lake, snapshot: LakeSnapshot, since: date | None) -> int:
    """Return the compressed size of the segments of the day `since` and later days; None: of all days."""
    date_filter = None if since is None else ds.field("date") >= since
    files = lake.table(FILES_TABLE.name).to_arrow(snapshot.version(FILES_TABLE.name), ["size_bytes"], date_filter)
    return sum(files["size_bytes"].to_pylist())


def check_history(lake: Lake, snapshot: LakeSnapshot) -> None:
    """Raise ValueError if a snapshot has no records: results without records would show no problem."""
    if any(snapshot.version(f"lake/{kind}") is not None for kind in JOURNAL_SCHEMAS):
        return
    version = snapshot.version("lake/quarantine")
    reasons = lake.table("lake/quarantine").to_arrow(version, ["reason"])["reason"].to_pylist()
    example = f"; one line was rejected because: {reasons[0]}" if reasons else ""
    raise ValueError(f"{lake.uri} has no record that this version can read{example}")


def read_days(lake: Lake, snapshot: LakeSnapshot) -> set[date]:
    """Return the days of which a snapshot has records."""
    days: set[date] = set()
    for kind in JOURNAL_SCHEMAS:
        for fragment in lake.table(f"lake/{kind}").dataset(snapshot.version(f"lake/{kind}")).get_fragments():
            days.add(ds.get_partition_keys(fragment.partition_expression)["date"])
    return days


def first_day(lake: Lake, snapshot: LakeSnapshot, days: int) -> date:
    """Return the first of the last `days` days of a history; days in the future (from a wrong clock) are ignored."""
    today = datetime.now(UTC).date()
    newest = max((day for day in read_days(lake, snapshot) if day <= today), default=today)
    max_difference = newest - date.min  # a larger one would overflow
    return newest - min(timedelta(days=days - 1), max_difference)
