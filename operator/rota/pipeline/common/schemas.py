"""Spark schemas of all tables: the journal's records, and the tables derived from them."""

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_TEXT = StringType()
_COUNT = LongType()
_TIME = TimestampType()
_NUMBER = DoubleType()


def _by_name(kind: DataType) -> MapType:
    return MapType(_TEXT, kind)


def _struct(**fields: DataType) -> StructType:
    """Return a struct; a trailing underscore, needed for Python keywords, is removed from field names."""
    return StructType([StructField(name.removesuffix("_"), kind) for name, kind in fields.items()])


def _record_schema(**fields: DataType) -> StructType:
    return _struct(group=_TEXT, at=_TIME, **fields, date=DateType())


RANGES = _by_name(_by_name(_TEXT))  # ids such as 0-3,7 by topic and broker
_OFFSETS = ArrayType(_COUNT)
OFFSET_COLUMNS = _struct(ids=ArrayType(IntegerType()), first=_OFFSETS, last=_OFFSETS, committed=_OFFSETS)
_PRESENT = _struct(uid=_TEXT, standing=_TEXT, room=_TEXT)
_OWNER = _struct(uid=_TEXT, standing=_TEXT, queues=RANGES, room=_TEXT)
_RELEASING = _struct(from_=_TEXT, fromUid=_TEXT, to=_TEXT, queues=RANGES)

# Journal records by kind: their fields under the same names, and `date`, the UTC day of `at`.
JOURNAL_SCHEMAS: dict[str, StructType] = {
    "membership": _record_schema(generation=_COUNT, members=_by_name(_PRESENT)),
    "plan": _record_schema(
        generation=_COUNT,
        strategy=_TEXT,
        reason=_TEXT,
        message=_TEXT,
        members=_COUNT,
        queues=_COUNT,
        held=_TEXT,
    ),
    "handover": _record_schema(
        generation=_COUNT,
        act=_TEXT,
        proof=_TEXT,
        state=_TEXT,
        from_=_TEXT,
        fromUid=_TEXT,
        to=_TEXT,
        toUid=_TEXT,
        queues=RANGES,
    ),
    "obeyed": _record_schema(generation=_COUNT, member=_TEXT, uid=_TEXT, queues=RANGES),
    "rebalance": _record_schema(
        generation=_COUNT,
        reason=_TEXT,
        outcome=_TEXT,
        began=_TIME,
        moved=_COUNT,
        forced=_COUNT,
        seconds=_NUMBER,
    ),
    "owners": _record_schema(
        generation=_COUNT,
        model=_TEXT,
        ordering=_TEXT,
        startFrom=_TEXT,
        policy=_TEXT,
        rules=_TEXT,  # the JSON of a RebalancePolicy's spec
        members=_by_name(_OWNER),
        releasing=ArrayType(_RELEASING),
        unowned=RANGES,
    ),
    "offsets": _record_schema(topics=_by_name(_by_name(OFFSET_COLUMNS)), verdicts=_by_name(_COUNT)),
    "verdict": _record_schema(condition=_TEXT, status=_TEXT, reason=_TEXT, message=_TEXT),
    "redelivered": _record_schema(
        cause=_TEXT,
        messages=_COUNT,
        estimate=BooleanType(),
        from_=_TEXT,
        fromUid=_TEXT,
        to=_TEXT,
        toUid=_TEXT,
        queues=RANGES,
    ),
    "gap": _struct(at=_TIME, writer=_TEXT, since=_TIME, missing=_COUNT, date=DateType()),
}

# Rejected lines of the journal; `date` is the day of the file.
QUARANTINE = _struct(file=_TEXT, line=_TEXT, reason=_TEXT, date=DateType())

# Ownership of queues over time.
INTERVALS = _struct(
    group=_TEXT,
    topic=_TEXT,
    broker=_TEXT,
    queue=IntegerType(),
    member=_TEXT,
    uid=_TEXT,
    since=_TIME,
    until=_TIME,  # null: it still owns the queue
    generation=_COUNT,  # of the assignment that granted the queue
    forced=BooleanType(),
    obeyed=_TIME,  # when it reported to follow that assignment; null: not recorded
    seconds=_NUMBER,  # from the revocation until `obeyed`; null: unknown, or the queue had no owner before
)

# Violations of exclusive ownership, and periods without an owner or without information.
VIOLATIONS = _struct(
    group=_TEXT,
    topic=_TEXT,
    broker=_TEXT,
    queue=IntegerType(),
    kind=_TEXT,
    since=_TIME,
    until=_TIME,
    members=ArrayType(_TEXT),
    why=_TEXT,
)

# Metrics of one group in one hour.
ROLLUP = _struct(
    group=_TEXT,
    hour=_TIME,
    rebalances=_by_name(_COUNT),  # by reason
    rebalance_seconds_p50=_NUMBER,
    rebalance_seconds_p99=_NUMBER,
    moved_queues=_COUNT,
    forced_queues=_COUNT,
    handovers=_COUNT,
    handover_seconds_p50=_NUMBER,
    handover_seconds_p99=_NUMBER,
    unowned_queue_seconds=_NUMBER,
    contested_queue_seconds=_NUMBER,
    redelivered=_COUNT,
    imbalance=_NUMBER,
    idle_member_hours=_NUMBER,
    lag_p50=_NUMBER,
    lag_p99=_NUMBER,
    lag_max=_COUNT,
    delay_p50=_NUMBER,
    delay_p99=_NUMBER,
    verdict_minutes=_by_name(_NUMBER),
    minutes_seen=_NUMBER,
    complete=BooleanType(),
)

RECORDED_POLICY = "recorded"  # name of the policy in force, next to the candidate policies

# Result of replaying a group under a policy.
RESULTS = _struct(
    group=_TEXT,
    policy=_TEXT,
    strategy=_TEXT,
    hours=_NUMBER,
    changes=_COUNT,  # of members or queues
    rebalances=_COUNT,
    moves=_COUNT,
    forced=_COUNT,
    pause_seconds=_NUMBER,  # queue-seconds without delivery
    pause_p99=_NUMBER,  # of a single queue's pause
    imbalance=_NUMBER,  # highest message rate of a member over the mean, for the whole period
    imbalance_max=_NUMBER,
    idle_member_hours=_NUMBER,
    unowned_queue_seconds=_NUMBER,
    duplicates=_NUMBER,  # expected
    lag_mean=_NUMBER,
    lag_peak=_NUMBER,
    problem=_TEXT,  # why the policy cannot be used for the group; null: none
)

# Progress of a replay over time, for plots.
SERIES = _struct(group=_TEXT, policy=_TEXT, at=_TIME, lag=_NUMBER, imbalance=_NUMBER, moves=_COUNT)

# Cost of a policy for a group, with its components.
COSTS = _struct(
    group=_TEXT,
    policy=_TEXT,
    rank=IntegerType(),  # 1: the best
    cost=_NUMBER,
    cost_moves=_NUMBER,
    cost_pause=_NUMBER,
    cost_duplicates=_NUMBER,
    cost_imbalance=_NUMBER,
    cost_idle=_NUMBER,
    cost_unowned=_NUMBER,
    cost_lag=_NUMBER,
)
