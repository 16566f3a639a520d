"""Groups of a history, bucket by bucket: their records and their samples of offsets.

The records of a bucket are brought together by one shuffle, in order of the group. Their rows have one column of
structs for each kind of record, which is null in the rows of other kinds. The samples of the same bucket are read from
its files by pyarrow.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from rota.pipeline.history.reading.group_rows import GroupRows, read_groups
from rota.pipeline.history.reading.sample_files import KEY_COLUMNS, SampleFiles
from rota.pipeline.ingest.facts import Facts
from rota.pipeline.ingest.rows import bucket_of
from rota.pipeline.lake.tables import OFFSET_BUCKETS

_COMMON_COLUMNS = ("group", "at", "date")


def shuffle_records(facts: Facts, kinds: Sequence[str], time_only: Sequence[str] = ()) -> DataFrame:
    """Return the records of some kinds by bucket, those of `time_only` only with their times.

    The first row of each bucket has no record, so that a bucket without records is a partition, too.
    """
    frames: list[DataFrame] = []
    for kind in (*kinds, *time_only):
        table: DataFrame = getattr(facts, kind)
        names = [name for name in table.columns if name not in _COMMON_COLUMNS]
        content = [] if kind in time_only else [F.struct(*names).alias(kind)]
        frames.append(table.select("group", F.lit(kind).alias("kind"), "at", *content))
    rows = reduce(lambda whole, frame: whole.unionByName(frame, allowMissingColumns=True), frames)
    buckets = facts.gap.sparkSession.range(OFFSET_BUCKETS).select(F.col("id").cast("int").alias("bucket"))
    by_bucket = buckets.unionByName(rows.withColumn("bucket", bucket_of("group")), allowMissingColumns=True)
    return by_bucket.repartitionById(OFFSET_BUCKETS, "bucket").sortWithinPartitions("group")


def read_bucket(
    records: Iterator[pa.RecordBatch], sample_files: SampleFiles, *, is_time_enough: bool = False
) -> Iterator[GroupRows]:
    """Yield the groups of a bucket, of which these are the shuffled records; of samples maybe only the times."""
    first = next(records)
    bucket = first.column("bucket")[0].as_py()
    columns = KEY_COLUMNS if is_time_enough else (*KEY_COLUMNS, "topics")
    return read_groups(chain([first.slice(1)], records), sample_files.read(bucket, columns))
