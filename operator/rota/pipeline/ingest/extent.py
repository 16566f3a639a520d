"""Extent of a lake's history: the size of its segments, and its days."""

from datetime import UTC, date, datetime, timedelta

import pyarrow.dataset as ds

from rota.pipeline.common.schemas import JOURNAL_SCHEMAS
from rota.pipeline.lake.snapshots import LakeSnapshot
from rota.pipeline.lake.tables import FILES_TABLE, Lake


def journal_bytes(lake: Lake, snapshot: LakeSnapshot, since: date | None) -> int:
    """Return the compressed size of the segments whose records are in a history."""
    days = None if since is None else ds.field("date") >= since
    files = lake.table(FILES_TABLE.name).to_arrow(snapshot.version(FILES_TABLE.name), ["size_bytes"], days)
    return sum(files["size_bytes"].to_pylist())


def check_history(lake: Lake, snapshot: LakeSnapshot) -> None:
    """Raise ValueError if a snapshot has no records, since without records everything would look healthy."""
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
    """Return the first of the last `days` days of a history; days in the future, of a wrong clock, are ignored."""
    today = datetime.now(UTC).date()
    newest = max((day for day in read_days(lake, snapshot) if day <= today), default=today)
    return newest - min(timedelta(days=days - 1), newest - date.min)  # a larger difference would overflow
