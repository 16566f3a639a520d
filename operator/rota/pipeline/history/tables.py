"""Tables of the history of groups: hourly measures, owners over time, violations.

Each table is computed by one shuffle: the records of all kinds, in one frame, are brought together by group, and pure
Python folds each group (`measures.roll_up`, `audit.audit_group`). Rows have one column of structs for each kind of
record, which is null in the rows of other kinds. A group's samples come after its other records, in order of time, and
batch by batch: so one group may have half of all records, or ten thousand queues.
"""

from collections.abc import Iterator
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from rota.pipeline.common.schemas import INTERVALS, ROLLUP, VIOLATIONS, table_schema
from rota.pipeline.history.arrow_rows import GroupRows, interval_row, to_batches, violation_row
from rota.pipeline.history.audit import audit_group
from rota.pipeline.history.measures import roll_up
from rota.pipeline.history.ordering import Gap, Gaps
from rota.pipeline.ingest.facts import Facts

_ASSIGNMENT_KINDS = ("membership", "plan", "handover", "obeyed", "owners")
_EVENT_KINDS = ("rebalance", "redelivered")
_SAMPLES = {"offsets": ("topics",)}
_COMMON_COLUMNS = ("group", "at", "date")
# A row has either an interval or a violation.
AUDIT = table_schema(interval=INTERVALS, violation=VIOLATIONS)

GroupKey = tuple[pa.Scalar, ...]
Batches = Iterator[pa.RecordBatch]


def compute_rollup(facts: Facts) -> DataFrame:
    """Return the measures of each group and hour with any record (schemas.ROLLUP)."""
    gaps = _collect_gaps(facts)
    schema = _arrow_schema(ROLLUP)

    def roll_up_group(key: GroupKey, batches: Batches) -> Batches:
        group = key[0].as_py()
        rows = GroupRows(batches)
        hours = roll_up(rows.records, gaps, rows.samples(), rows.places)
        yield from to_batches(({"group": group, "hour": hour} | measures.to_row() for hour, measures in hours), schema)

    kinds = (*_ASSIGNMENT_KINDS, *_EVENT_KINDS, "offsets", "verdict")
    rows = collect_rows(facts, kinds, time_only=("verdict",))
    ordered = rows.repartition("group").sortWithinPartitions("group", F.col("kind") == "offsets", "at")
    return ordered.groupBy("group").applyInArrow(roll_up_group, ROLLUP)


def compute_audit(facts: Facts) -> DataFrame:
    """Return the owners of each queue over time, and all violations (AUDIT)."""
    gaps = _collect_gaps(facts)
    schema = _arrow_schema(AUDIT)

    def audit_rows(key: GroupKey, batches: Batches) -> Batches:
        group = key[0].as_py()
        audit = audit_group(GroupRows(batches).records, gaps)
        yield from to_batches(({"interval": interval_row(group, interval)} for interval in audit.intervals), schema)
        yield from to_batches(({"violation": violation_row(group, found)} for found in audit.violations), schema)

    kinds = (*_ASSIGNMENT_KINDS, "offsets", "verdict")
    rows = collect_rows(facts, kinds, time_only=("offsets", "verdict"))
    return rows.groupBy("group").applyInArrow(audit_rows, AUDIT)


def select_intervals(audit: DataFrame) -> DataFrame:
    """Return the owners of each queue over time, one row per period (schemas.INTERVALS)."""
    return audit.where("interval is not null").select("interval.*")


def select_violations(audit: DataFrame) -> DataFrame:
    """Return violations: two owners, grants without proof, queues without an owner, periods without information."""
    return audit.where("violation is not null").select("violation.*")


def collect_rows(facts: Facts, kinds: tuple[str, ...], time_only: tuple[str, ...] = ()) -> DataFrame:
    """Return the records of some kinds in one frame, for `GroupRows`; of those in `time_only` only their times."""
    frames: list[DataFrame] = []
    for kind in kinds:
        table: DataFrame = getattr(facts, kind)
        names = _SAMPLES.get(kind) or [name for name in table.columns if name not in _COMMON_COLUMNS]
        content = [] if kind in time_only else [F.struct(*map(F.col, names)).alias(kind)]
        frames.append(table.select("group", F.lit(kind).alias("kind"), "at", *content))
    return reduce(lambda rows, frame: rows.unionByName(frame, allowMissingColumns=True), frames)


def _collect_gaps(facts: Facts) -> Gaps:
    """Return all gaps, which are few: each group needs them all."""
    rows = facts.gap.select("since", "at").toArrow().to_pylist()
    return Gaps(Gap(row["since"], row["at"]) for row in rows)


def _arrow_schema(schema: StructType) -> pa.Schema:
    arrow_schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
    return arrow_schema
