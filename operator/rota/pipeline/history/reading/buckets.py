"""Reads the history in a lake's snapshot, and divides its groups among Spark tasks, with their records and samples.

One shuffle brings the records of a task together, in order of the group. Their rows have one column of structs for each
kind of record, which is null in the rows of other kinds. Samples are not shuffled: `lake/offsets` is partitioned into
buckets by a hash of the group, and pyarrow reads a bucket's files in the bucket's task. With more cores than buckets, a
bucket has several tasks, each for a part of its groups.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import partial, reduce
from itertools import chain
from math import ceil
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from rota.pipeline.common.spark_session import fit_partitions
from rota.pipeline.history.reading.group_rows import GroupRows, read_groups
from rota.pipeline.history.reading.sample_files import KEY_COLUMNS, SampleFiles, list_sample_files
from rota.pipeline.ingest.extent import journal_bytes
from rota.pipeline.lake.snapshots import LakeSnapshot
from rota.pipeline.lake.tables import OFFSET_BUCKETS, Lake

_COMMON_COLUMNS = ("group", "at", "date", "digest")


class History(NamedTuple):
    """Records and samples of a history; those before `audited_since` show the state at the start of that day."""

    records: Mapping[str, DataFrame]  # by kind
    sample_files: SampleFiles
    audited_since: date | None = None  # None: all


def read_history(
    spark: SparkSession, lake: Lake, snapshot: LakeSnapshot, kinds: Collection[str], since: date | None = None
) -> History:
    """Return records of some kinds and all samples in a snapshot, or only from the day `since` on."""
    fit_partitions(spark, journal_bytes(lake, snapshot, since))
    records: dict[str, DataFrame] = {}
    for kind in kinds:
        records[kind] = lake.read(spark, snapshot, f"lake/{kind}", since)
    return History(records, list_sample_files(lake, snapshot, since))


def shuffle_records(
    history: History, kinds: Sequence[str], *, time_only: Sequence[str] = (), tasks: int | None = None
) -> DataFrame:
    """Return records by task, in order of group and time: of the kinds `time_only`, only the times.

    Each task begins with a row with its number and no group (nulls are sorted first). `read_task` gets the number from
    this row. Without it, Spark would not run a task whose groups have only samples. The number of tasks is a multiple
    of the number of buckets; by default there is at least one task for each core.
    """
    frames: list[DataFrame] = []
    for kind in (*kinds, *time_only):
        table = history.records[kind]
        names = [column for column in table.columns if column not in _COMMON_COLUMNS]
        content = [] if kind in time_only else [F.struct(*names).alias(kind)]
        frames.append(table.select("group", F.lit(kind).alias("kind"), "at", *content))
    rows = reduce(lambda whole, frame: whole.unionByName(frame, allowMissingColumns=True), frames)
    if tasks is None:
        tasks = OFFSET_BUCKETS * ceil(rows.sparkSession.sparkContext.defaultParallelism / OFFSET_BUCKETS)
    task_rows = rows.sparkSession.range(tasks).select(
        F.col("id").cast("int").alias("task"), F.lit(tasks).alias("tasks")
    )
    task = F.pmod(F.crc32(F.col("group").cast("binary")), F.lit(tasks)).cast("int")
    by_task = task_rows.unionByName(rows.withColumn("task", task), allowMissingColumns=True)
    return by_task.repartitionById(tasks, "task").sortWithinPartitions("group", "at")


def read_task(
    records: Iterator[pa.RecordBatch],
    sample_files: SampleFiles,
    since: datetime | None = None,
    *,
    sample_times_only: bool = False,
) -> Iterator[GroupRows]:
    """Yield the groups of a task from its shuffled records, and from the files of its bucket of samples.

    Omit samples before `since`, and `owners` records that do not matter from then on.
    """
    first = next(records)
    task = first.column("task")[0].as_py()
    tasks = first.column("tasks")[0].as_py()
    columns = KEY_COLUMNS if sample_times_only else (*KEY_COLUMNS, "topics")
    # The bucket is crc32 modulo OFFSET_BUCKETS, the task is crc32 modulo a multiple of it.
    samples = sample_files.read(task % OFFSET_BUCKETS, columns, since)
    rows: Iterator[pa.RecordBatch] = chain([first.slice(1)], records)
    if since:
        rows = map(partial(_drop_outdated_owners, since=since), rows)
    return read_groups(rows, samples, lambda group: crc32(group.encode()) % tasks == task)


def _drop_outdated_owners(rows: pa.RecordBatch, since: datetime) -> pa.RecordBatch:
    """Keep only each group's last two `owners` records up to `since`, and later ones.

    The last one gives the owners at `since`. The one before is kept for the case that records before both are missing:
    the break is then at the second last one, and the owners are unknown only until the last one. With the last one
    alone, the break would be there, and the owners unknown until the next one, which may be long after `since`.
    """
    indices = np.flatnonzero(pc.equal(rows.column("kind"), "owners"))
    owners = rows.select(["group", "at"]).take(pa.array(indices))
    group = owners.column("group")
    at = owners.column("at")
    # The second next `owners` record is of the same group, and not after `since`.
    is_outdated = pc.and_(pc.equal(group[2:], group[:-2]), pc.less_equal(at[2:], since))
    is_kept = np.ones(rows.num_rows, np.bool_)
    is_kept[indices[:-2][is_outdated]] = False
    return rows.filter(pa.array(is_kept))
