"""Lakes in folders: journals of segments that tests write, their ingest, and what the lake has."""

import gzip
from datetime import date
from pathlib import Path

from pyspark.sql import SparkSession

from rota.object_store import open_store
from rota.pipeline.history.reading.buckets import History, read_history
from rota.pipeline.history.tables import HISTORY_KINDS
from rota.pipeline.ingest.batch import AtStep, IngestSummary, ingest_journal, no_step
from rota.pipeline.lake.tables import Lake

DAY = "date=2026-11-21"


def verdict_line(number: int, hour: int = 8, group: str = "shop/orders") -> bytes:
    return (
        f'{{"schema":1,"kind":"verdict","group":"{group}","at":"2026-11-21T{hour:02}:00:{number:02}.000Z",'
        f'"condition":"Ready","status":"True","reason":"R{number}","message":""}}\n'
    ).encode()


def write_segment(lake: Path, name: str, *lines: bytes, day: str = DAY) -> Path:
    """Write a segment into a lake's journal; an existing one is replaced."""
    return write_file(lake, name, gzip.compress(b"".join(lines)), day=day)


def write_file(lake: Path, name: str, content: bytes, *, day: str = DAY) -> Path:
    """Write a file that need not be a segment into a lake's journal."""
    path = lake / "journal" / day / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def ingest(spark: SparkSession, lake: Path, at_step: AtStep = no_step) -> IngestSummary:
    return ingest_journal(lambda: spark, Lake(str(lake)), open_store(str(lake / "journal")), at_step)


def count_records(lake: Path, kind: str, since: date | None = None, snapshot: int | None = None) -> int:
    """Return the number of records of a kind in a snapshot, by default the newest."""
    opened = Lake(str(lake))
    name = f"lake/{kind}"
    return opened.table(name).count(opened.snapshot(snapshot).version(name), since)


def history_of_lake(spark: SparkSession, lake: Path) -> History:
    opened = Lake(str(lake))
    return read_history(spark, opened, opened.snapshot(), HISTORY_KINDS)


def table_rows(lake: Path, kind: str) -> list[dict[str, object]]:
    """Return the rows of a table in the newest snapshot, read without Spark."""
    opened = Lake(str(lake))
    name = f"lake/{kind}"
    rows: list[dict[str, object]] = opened.table(name).to_arrow(opened.snapshot().version(name)).to_pylist()
    return rows


def reasons(lake: Path) -> list[str]:
    """Return the reasons of all verdicts in the newest snapshot, read without Spark."""
    return sorted(str(row["reason"]) for row in table_rows(lake, "verdict"))
