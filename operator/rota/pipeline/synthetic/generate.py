"""Generator of a synthetic journal in the operator's format; each Spark task writes segments of its own."""

import gzip
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from rota.object_store import ObjectStore, create_same, open_store
from rota.object_store.segments import SegmentName
from rota.pipeline.common.schemas import COUNT, table_schema
from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.journaling_replay import JournalingReplay, JournalLine
from rota.pipeline.synthetic.rates import RecordedRates

GROUPS_PER_TASK = 50  # groups per Spark task
HOUR_CHARACTERS = len("2026-11-21T08")
GZIP_LEVEL = 6
POD = "generated"
START = "20251121T000000Z"  # the start of the operator's process, as the names of its segments have it
_COUNTS = table_schema(groups=COUNT, records=COUNT)

_encoder = msgspec.json.Encoder()


def check_empty(journal: ObjectStore) -> None:
    """Raise ValueError if a journal has objects already."""
    if any(journal.list_objects()):
        raise ValueError(f"{journal.uri} is not empty; name another lake")


def generate_journal(
    spark: SparkSession,
    groups: int,
    hours: float,
    seed: int,
    journal: ObjectStore,
    *,
    largest: int = 0,
    rates: RecordedRates | None = None,
) -> DataFrame:
    """Write the journal, and return its numbers of groups and records; raise ValueError if it is not empty.

    With `rates`, messages arrive as in recorded traces.
    """
    check_empty(journal)
    tasks = ceil(groups / GROUPS_PER_TASK)
    generate = partial(generate_history, seed=seed, hours=hours, largest=largest, rates=rates)
    write = partial(_write_groups, generate=generate, journal_uri=journal.uri)
    counts = spark.range(0, groups, numPartitions=tasks).mapInArrow(write, _COUNTS)
    return counts.agg(F.sum("groups").alias("groups"), F.sum("records").alias("records"))


def _write_groups(
    batches: Iterator[pa.RecordBatch], *, generate: Callable[[int], GroupHistory], journal_uri: str
) -> Iterator[pa.RecordBatch]:
    """Write a task's groups, one segment an hour. If Spark repeats the task, it finds equal segments."""
    numbers: list[int] = []
    for batch in batches:
        numbers += batch.column("id").to_pylist()
    segments: defaultdict[str, bytearray] = defaultdict(bytearray)  # by hour; each group adds a part to the gzip file
    records = 0
    for number in numbers:
        hourly: defaultdict[str, list[bytes]] = defaultdict(list)
        JournalingReplay(generate(number), partial(_collect_line, hourly)).run()
        for hour, lines in hourly.items():
            segments[hour] += gzip.compress(b"\n".join([*lines, b""]), GZIP_LEVEL, mtime=0)
            records += len(lines)
    journal = open_store(journal_uri)
    for hour, content in segments.items():
        # Each task has segments of its own, because their names have the task's first group in place of a pod's uid.
        create_same(journal, SegmentName(hour, POD, f"{numbers[0]:06d}", START, 0).key, bytes(content))
    yield pa.RecordBatch.from_pydict({"groups": [len(numbers)], "records": [records]})


def _collect_line(hourly: defaultdict[str, list[bytes]], line: JournalLine) -> None:
    hourly[str(line["at"])[:HOUR_CHARACTERS]].append(_encoder.encode(line))
