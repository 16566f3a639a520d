"""What other policies would have come to: every group's story is played again under each, side by side.

    journal ──> a story for each group ──x policies──> a replay for each pair ──> results, series

Both steps run in Python workers, one group or pair at a time; nothing is gathered in one place.
"""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, LongType, StringType, StructField, StructType

from rota import records
from rota.pipeline.common.schemas import RECORDED, RESULTS, SERIES
from rota.pipeline.ingest.facts import Facts
from rota.pipeline.replay.group_history import STEP, Story, in_order, story
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import Figures
from rota.records import Fact
from rota.spec import PolicySpec, policy_body, policy_spec

PARTS = 8  # partitions for each core: many, so that one that takes long is not waited for by others
HEAVY = 100_000  # queues times changes: a replay that takes as long as those of a hundred groups

_TEXT = StringType()
_STORIES = StructType(
    [
        StructField("group", _TEXT),
        StructField("size", LongType()),
        StructField("story", BinaryType()),
        StructField("problem", _TEXT),
    ],
)
_POLICIES = StructType([StructField("policy", _TEXT), StructField("rules", _TEXT)])
_POINTS = StructType([field for field in SERIES.fields if field.name not in {"group", "policy"}])
_RUNS = StructType([*RESULTS.fields, StructField("series", ArrayType(_POINTS))])


class Simulation(NamedTuple):
    """What came of it."""

    results: DataFrame
    series: DataFrame


def kept(made: DataFrame) -> DataFrame:
    """Have rows made once, however often they are looked at; on the disk, for there may be many."""
    return made.persist(StorageLevel.DISK_ONLY)


def simulated(facts: Facts, policies: Mapping[str, PolicySpec]) -> Simulation:
    """Play every group's story under each policy, and under those that were in force."""
    return replayed(kept(stories(facts)), policies)


def replayed(told: DataFrame, policies: Mapping[str, PolicySpec]) -> Simulation:
    """Do so with stories that were kept."""
    spark = told.sparkSession
    rules = [(name, msgspec.json.encode(policy_body(it)).decode()) for name, it in policies.items()]
    tried = spark.createDataFrame([(RECORDED, None), *rules], _POLICIES)
    runs = kept(spread(told, tried).mapInArrow(_play, _RUNS))
    return Simulation(results_of(runs), series_of(runs))


def spread(told: DataFrame, tried: DataFrame) -> DataFrame:
    """Return each story with each policy, those first that take long.

    Partitions are begun in their order, so that such a replay is under way while all others are played.
    """
    parts = PARTS * told.sparkSession.sparkContext.defaultParallelism
    pairs = told.crossJoin(F.broadcast(tried))
    heavy = pairs.where(F.col("size") > HEAVY).repartition(parts)  # by turns: few as they are, they lie apart
    return heavy.unionByName(pairs.where(F.col("size") <= HEAVY).repartition(parts, "group", "policy"))


def results_of(runs: DataFrame) -> DataFrame:
    """Return a row for each group and policy."""
    return runs.select(*RESULTS.fieldNames())


def series_of(runs: DataFrame) -> DataFrame:
    """Return a row for each of their points."""
    points = runs.select("group", "policy", F.explode("series").alias("point"))
    return points.select("group", "policy", "point.*")


def stories(facts: Facts) -> DataFrame:
    """Return each group's story, or why it has none."""
    lines = _lines(facts.owners, "owners").unionByName(_lines(facts.membership, "membership"))
    lines = lines.unionByName(_lines(facts.handover, "handover"))
    lines = lines.unionByName(_lines(facts.offsets.transform(_one_a_step), "offsets"))
    return lines.groupBy("group").applyInArrow(_put_together, _STORIES)


def _one_a_step(offsets: DataFrame) -> DataFrame:
    """Keep the last look of each step: between two steps all flows evenly."""
    step = F.floor(F.unix_timestamp("at") / STEP)
    kept = F.max_by(F.struct(*offsets.columns), "at").alias("last")
    return offsets.groupBy("group", step.alias("step")).agg(kept).select("last.*")


def _lines(table: DataFrame, kind: str) -> DataFrame:
    """Write a table's records as the journal has them, for the reader that everybody uses."""
    fields = [name for name in table.columns if name != "date"]
    record = F.struct(F.lit(records.SCHEMA).alias("schema"), F.lit(kind).alias("kind"), *fields)
    options = {"ignoreNullFields": "false", "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSXXX"}
    return table.select("group", F.lit(kind).alias("kind"), F.to_json(record, options).alias("line"))


def _put_together(table: pa.Table) -> pa.Table:
    """Make a group's story of its lines."""
    group = table.column("group")[0].as_py()
    kinds, lines = table.column("kind").to_pylist(), table.column("line").to_pylist()
    size, made, problem = 0, None, None
    try:
        found = story(group, in_order(map(_read, kinds, lines)))
        size, made = len(found.queues) * len(found.changes), pickle.dumps(found)
    except ValueError as error:
        problem = str(error)
    told = {"group": [group], "size": [size], "story": [made], "problem": [problem]}
    return pa.table(told, schema=_arrow(_STORIES))


def _read(kind: str, line: str) -> Fact:
    if kind == "owners":  # its rules are text in our tables, whatever they are
        body = msgspec.json.decode(line)
        line = msgspec.json.encode(body | {"rules": msgspec.json.decode(body["rules"] or "{}")}).decode()
    found = records.read(line.encode())
    assert isinstance(found, Fact)  # noqa: S101 - gaps are in another table
    return found


def _play(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Play stories, each under its policy."""
    schema = _arrow(_RUNS)
    for batch in batches:
        for row in batch.to_pylist():
            told = dict.fromkeys(schema.names) | _run(row) | {"group": row["group"], "policy": row["policy"]}
            yield pa.RecordBatch.from_pylist([told], schema=schema)


def _run(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["problem"]:
        return {"problem": row["problem"], "series": []}
    it: Story = pickle.loads(row["story"])  # noqa: S301 - our own, of the step before
    policy = policy_spec({"spec": msgspec.json.decode(row["rules"])}) if row["rules"] else None
    figures = Figures(it)
    replay = Replay(it, policy, figures)
    replay.run()
    return {
        **figures.row(),
        "strategy": replay.policy.strategy,
        "problem": figures.problem or (figures.neglected() if policy else None),  # what was used was used
        "series": figures.series,
    }


def _arrow(schema: StructType) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - slow to load, and only workers need it

    found: pa.Schema = to_arrow_schema(schema, timezone="UTC")
    return found
