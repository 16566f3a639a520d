"""Drops rows that a table already has, without Spark: it compares the rows' digests with those of the same days.

The rows are compared with the newest version. They are still new when they are committed, because only ingest runs add
rows to a table, one run after the other. If another process commits the same run first, `Table.append_files` commits
nothing.
"""

from collections.abc import Sequence
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from rota.pipeline.lake.data_files import DataFile, FileTarget, read_file, write_file
from rota.pipeline.lake.table import Table


def drop_ingested_rows(table: Table, target: FileTarget, files: Sequence[DataFile]) -> list[DataFile]:
    """Return files (at least one) without rows whose digest the table has on the same days.

    A file with such rows is replaced by a new file of the other rows, or left out if there are none.
    """
    version = table.version()
    if version is None:
        return list(files)
    days: list[date] = []
    new_digests: list[pa.Table] = []
    for file in files:
        days.append(date.fromisoformat(file.date or ""))  # all tables of ingest are partitioned by date
        new_digests.append(read_file(target.store, table.name, file, ["digest"]))
    digests = pa.concat_tables(new_digests)["digest"]
    is_ingested = ds.field("date").isin(days) & ds.field("digest").isin(digests)
    ingested = table.to_arrow(version, ["digest"], is_ingested)["digest"]
    if not len(ingested):
        return list(files)
    new_files: list[DataFile] = []
    for file in files:
        rows = read_file(target.store, table.name, file)
        new_rows = rows.filter(pc.invert(pc.is_in(rows["digest"], ingested)))
        if new_rows.num_rows == rows.num_rows:
            new_files.append(file)
        elif new_rows.num_rows:
            new_files.append(write_file(new_rows, file.partition, target))
    return new_files
