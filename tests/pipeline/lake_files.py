"""Files of lake tables that tests write without Spark, and writers that race as processes of their own."""

import io
import json
import secrets
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql.types import DateType, StringType, StructField, StructType

from rota.object_store import ObjectStore, open_store
from rota.pipeline.lake.data_files import DataFile
from rota.pipeline.lake.delta_log import DeltaLog, FileChanges, last_run
from rota.pipeline.lake.snapshots import SnapshotStore
from rota.pipeline.lake.tables import Lake

GROUPS = StructType([StructField("group", StringType()), StructField("date", DateType())])
DAY = date(2026, 11, 21)


def open_log(uri: str, schema: StructType = GROUPS) -> DeltaLog:
    return DeltaLog(open_store(uri), "lake/groups", schema, ["date"])


def write_file(store: ObjectStore, *groups: str, day: date = DAY) -> DataFile:
    """Write a Parquet file that no version contains yet."""
    content = io.BytesIO()
    pq.write_table(pa.table({"group": list(groups)}), content)
    path = f"date={day.isoformat()}/test-{secrets.token_hex(6)}.parquet"
    assert store.create(f"lake/groups/{path}", content.getvalue())
    return DataFile(path, len(content.getvalue()), len(groups), {"date": day.isoformat()})


def append_file(uri: str, *groups: str, run: int | None = None) -> int | None:
    """Append a file, and return the table's version."""
    file = write_file(open_store(uri), *groups)
    return open_log(uri).commit(lambda _: FileChanges([file]), run).version


def append_files(uri: str, writer: str, number: int) -> None:
    """Append files one after the other, each with its own row."""
    for index in range(number):
        append_file(uri, f"{writer}-{index}")


def append_runs(uri: str, number: int) -> int:
    """Append the same runs as other processes do; return how many this process has committed."""
    store = open_store(uri)
    log = open_log(uri)
    committed = 0
    for run in range(1, number + 1):
        file = write_file(store, f"run-{run}")

        def plan(table: DeltaTable | None, file: DataFile = file, run: int = run) -> FileChanges | None:
            return None if last_run(table) >= run else FileChanges([file])

        committed += log.commit(plan, run).is_changed
    return committed


def publish_snapshots(uri: str, table: str, number: int) -> None:
    """Publish versions of a table that no other process publishes."""
    snapshots = SnapshotStore(open_store(uri))
    for version in range(number):
        snapshots.publish(snapshots.latest(), {table: version})


def table_rows(uri: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of a lake's table in the newest snapshot in a fixed order, read without Spark."""
    lake = Lake(uri)
    rows: list[dict[str, Any]] = lake.table(name).to_arrow(lake.snapshot().version(name)).to_pylist()
    return sorted(rows, key=lambda row: json.dumps(row, default=str))
