"""Generator of a synthetic journal in the operator's format; Spark tasks run in parallel and write separate files."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from math import ceil
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from rota.pipeline.common.paths import HOUR_CHARACTERS, hour_file
from rota.pipeline.common.schemas import COUNT, table_schema
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.journaling_replay import JournalingReplay, JournalLine

GROUPS_PER_TASK = 50  # groups per Spark task
_COUNTS = table_schema(groups=COUNT, records=COUNT)

_encoder = msgspec.json.Encoder()


def generate_journal(
    spark: SparkSession, groups: int, hours: float, seed: int, to: Path, *, largest: int = 0
) -> DataFrame:
    """Write the journal, and return its numbers of groups and records; raise ValueError if the folder is not empty."""
    if to.exists() and any(to.iterdir()):
        raise ValueError(f"{to} is not empty; give an empty folder or a new name")
    tasks = ceil(groups / GROUPS_PER_TASK)
    write = partial(_write_groups, seed=seed, hours=hours, to=to.absolute(), largest=largest)
    counts = spark.range(0, groups, numPartitions=tasks).mapInArrow(write, _COUNTS)
    return counts.agg(F.sum("groups").alias("groups"), F.sum("records").alias("records"))


def _write_groups(
    batches: Iterator[pa.RecordBatch], *, seed: int, hours: float, to: Path, largest: int
) -> Iterator[pa.RecordBatch]:
    """Write a task's groups. Files get their final names only when they are complete, so Spark may retry the task."""
    numbers: list[int] = []
    for batch in batches:
        numbers += batch.column("id").to_pylist()
    records = 0
    parts = set()
    for number in numbers:
        hourly: defaultdict[str, list[bytes]] = defaultdict(list)
        JournalingReplay(generate_history(number, seed, hours, largest=largest), partial(_collect_line, hourly)).run()
        for hour, lines in hourly.items():
            # Each task has files of its own, named by its first group.
            path = (to / hour_file(hour, f"generated-{numbers[0]:06d}")).with_suffix(".part")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab" if path in parts else "wb") as file:
                file.write(b"\n".join([*lines, b""]))
            parts.add(path)
            records += len(lines)
    for path in parts:
        path.rename(path.with_suffix(".jsonl"))
    yield pa.RecordBatch.from_pydict({"groups": [len(numbers)], "records": [records]})


def _collect_line(hourly: defaultdict[str, list[bytes]], line: JournalLine) -> None:
    hourly[str(line["at"])[:HOUR_CHARACTERS]].append(_encoder.encode(line))
