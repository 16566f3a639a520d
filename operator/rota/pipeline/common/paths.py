"""Paths of the journal's files and of a lake's tables, and checks of the folders that a user names.

Imports no Spark, so that a wrong folder is rejected before Spark starts.
"""

import re
from datetime import date
from pathlib import Path

from rota.records import KINDS

RECORD_KINDS = tuple(str(kind.__struct_config__.tag) for kind in KINDS)  # a lake has a folder for each kind
TABLE_FOLDERS = (*RECORD_KINDS, "quarantine")

ANY_DATE_GLOB = "date=*"
DAY_GLOB = "date=????-??-??"
HOUR_FILE_GLOB = "??-*.jsonl"
HOUR_FILE_PATTERN = re.compile(r"date=(\d{4}-\d\d-\d\d)/(([01]\d|2[0-3])-.+\.jsonl)", re.ASCII)
EXAMPLE_FILE = "date=2026-11-21/08-NAME.jsonl"
HOUR_CHARACTERS = len("2026-11-21T08")
# The first line of our manifests begins so; other files are users' own.
MANIFEST_FIRST_LINE = "# `rota pipeline recommend` recommends policy "


def hour_file(hour: str, writer: str) -> str:
    """Return the path of an hour's file (2026-11-21T08), relative to the journal's folder."""
    day, _, number = hour.partition("T")
    return f"date={day}/{number}-{writer}.jsonl"


def parse_day(name: str) -> date | None:
    """Return the day of a partition folder; None if the name has no valid day."""
    try:
        return date.fromisoformat(name.removeprefix("date="))
    except ValueError:
        return None


def day_folders_since(folder: Path, since: date) -> list[str]:
    """Return the names of a journal's folders for the day `since` and later days; a name without a valid day is old."""
    return [path.name for path in folder.glob(DAY_GLOB) if (parse_day(path.name) or date.min) >= since]


def is_lake(folder: Path) -> bool:
    """Return whether a folder contains tables of a lake."""
    return any((folder / table).is_dir() for table in TABLE_FOLDERS)


def is_journal(folder: Path) -> bool:
    """Return whether a folder contains hourly files of a journal."""
    return any(folder.glob(f"{DAY_GLOB}/{HOUR_FILE_GLOB}"))


def check_source(source: str) -> None:
    """Raise ValueError if the folder is neither a journal nor a lake."""
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{source} is not a folder; give a journal's, or a lake that `rota pipeline ingest` wrote")
    if not is_lake(folder) and not is_journal(folder):
        raise ValueError(f"{source} contains no journal ({EXAMPLE_FILE}) and no lake that `rota pipeline ingest` wrote")


def check_ingest(journal: Path, lake: Path, table_format: str) -> None:
    """Raise ValueError if the journal has no files, or the lake cannot be continued in this format."""
    if not is_journal(journal):
        raise ValueError(f"{journal} contains no journal: no file such as {EXAMPLE_FILE}")
    tables = [table for table in TABLE_FOLDERS if (lake / table).is_dir()]
    if tables and not (lake / "_checkpoint" / "metadata").is_file():
        raise ValueError(f"{lake} has tables, but no _checkpoint, so the ingested lines are unknown; recreate the lake")
    if (lake / "_checkpoint").is_dir() and not (lake / "_inbox").is_dir():
        raise ValueError(f"{lake} has no _inbox any more, so the ingested files are unknown; recreate the lake")
    is_delta = table_format == "delta"
    if any((lake / table / "_delta_log").is_dir() != is_delta for table in tables):
        raise ValueError(f"{lake} is a lake of the other format; use --format of that lake, or choose another folder")
