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

TEXT = StringType()
COUNT = LongType()
TIME = TimestampType()
NUMBER = DoubleType()


def _by_name(kind: DataType) -> MapType:
    return MapType(TEXT, kind)


def table_schema(**fields: DataType) -> StructType:
    """Return a schema; a trailing underscore, needed for Python keywords, is removed from names."""
    return StructType([StructField(name.removesuffix("_"), kind) for name, kind in fields.items()])


def _record_schema(**fields: DataType) -> StructType:
    return table_schema(group=TEXT, at=TIME, **fields, date=DateType())


RANGES = _by_name(_by_name(TEXT))  # ids such as 0-3,7 by topic and broker
_OFFSETS = ArrayType(COUNT)
OFFSET_COLUMNS = table_schema(ids=ArrayType(IntegerType()), first=_OFFSETS, last=_OFFSETS, committed=_OFFSETS)
# A pod in `membership` and in `owners` records; the journal's name for the member state is `standing`.
_MEMBER = table_schema(uid=TEXT, standing=TEXT, room=TEXT)
_OWNER = table_schema(uid=TEXT, standing=TEXT, queues=RANGES, room=TEXT)
_RELEASING = table_schema(from_=TEXT, fromUid=TEXT, to=TEXT, queues=RANGES)
_PARTIES = {"from_": TEXT, "fromUid": TEXT, "to": TEXT, "toUid": TEXT}  # previous and next owner of queues
_QUEUE = {"group": TEXT, "topic": TEXT, "broker": TEXT, "queue": IntegerType()}

# Journal records by kind, and `date`, the UTC day of `at`. docs/journal.md explains the fields; their names are frozen.
# `verdicts` of `offsets` counts queues by lag state; a record `verdict` is something else, a change of a condition.
JOURNAL_SCHEMAS: dict[str, StructType] = {
    "membership": _record_schema(generation=COUNT, members=_by_name(_MEMBER)),
    "plan": _record_schema(
        generation=COUNT,
        strategy=TEXT,
        reason=TEXT,
        message=TEXT,
        members=COUNT,
        queues=COUNT,
        held=TEXT,  # the reason why no further queue may be revoked now; null: none
    ),
    "handover": _record_schema(generation=COUNT, act=TEXT, proof=TEXT, state=TEXT, **_PARTIES, queues=RANGES),
    "obeyed": _record_schema(generation=COUNT, member=TEXT, uid=TEXT, queues=RANGES),
    "rebalance": _record_schema(
        generation=COUNT, reason=TEXT, outcome=TEXT, began=TIME, moved=COUNT, forced=COUNT, seconds=NUMBER
    ),
    "owners": _record_schema(
        generation=COUNT,
        model=TEXT,
        ordering=TEXT,
        startFrom=TEXT,
        policy=TEXT,
        rules=TEXT,  # the JSON of a RebalancePolicy's spec
        members=_by_name(_OWNER),
        releasing=ArrayType(_RELEASING),
        unowned=RANGES,
    ),
    "offsets": _record_schema(topics=_by_name(_by_name(OFFSET_COLUMNS)), verdicts=_by_name(COUNT)),
    "verdict": _record_schema(condition=TEXT, status=TEXT, reason=TEXT, message=TEXT),
    "redelivered": _record_schema(cause=TEXT, messages=COUNT, estimate=BooleanType(), **_PARTIES, queues=RANGES),
    # `missing` is the number of dropped records.
    "gap": table_schema(at=TIME, writer=TEXT, since=TIME, missing=COUNT, date=DateType()),
}

# Rejected lines of the journal; `date` is the day of the file.
QUARANTINE = table_schema(file=TEXT, line=TEXT, reason=TEXT, date=DateType())

# Ownership of queues over time.
INTERVALS = table_schema(
    **_QUEUE,
    member=TEXT,
    uid=TEXT,
    since=TIME,
    until=TIME,  # null: the member still owns the queue
    generation=COUNT,  # generation of the assignment that granted the queue
    forced=BooleanType(),
    obeyed=TIME,  # when the member reported that it follows this assignment; null: not recorded
    seconds=NUMBER,  # from revoke, or a grant without one, until `obeyed`; null: unknown, or no owner before
)

# Violations of exclusive ownership, and periods without an owner or without information.
VIOLATIONS = table_schema(**_QUEUE, kind=TEXT, since=TIME, until=TIME, members=ArrayType(TEXT), why=TEXT)

# Metrics of one group in one hour.
ROLLUP = table_schema(
    group=TEXT,
    hour=TIME,
    rebalances=_by_name(COUNT),  # by reason
    rebalance_seconds_p50=NUMBER,
    rebalance_seconds_p99=NUMBER,
    moved_queues=COUNT,
    forced_queues=COUNT,
    handovers=COUNT,
    handover_seconds_p50=NUMBER,
    handover_seconds_p99=NUMBER,
    unowned_queue_seconds=NUMBER,
    contested_queue_seconds=NUMBER,
    redelivered=COUNT,
    imbalance=NUMBER,
    idle_member_hours=NUMBER,
    lag_p50=NUMBER,
    lag_p99=NUMBER,
    lag_max=COUNT,
    delay_p50=NUMBER,
    delay_p99=NUMBER,
    verdict_minutes=_by_name(NUMBER),  # queue-minutes by lag state
    minutes_seen=NUMBER,  # minutes with samples
    complete=BooleanType(),  # whether no records of the hour are missing
)

RECORDED_POLICY = "recorded"  # name of the policy in force, next to the candidate policies

# Result of replaying a group under a policy.
RESULTS = table_schema(
    group=TEXT,
    policy=TEXT,
    strategy=TEXT,
    hours=NUMBER,  # length of the history
    changes=COUNT,  # number of changes of members, queues or the recorded policy
    rebalances=COUNT,
    moves=COUNT,  # queues granted to another member
    forced=COUNT,  # queues granted without a release by the previous owner
    pause_seconds=NUMBER,  # seconds without delivery, summed over all queues
    pause_p99=NUMBER,  # 99th percentile of the seconds of single pauses
    imbalance=NUMBER,  # mean over time of: rate of the busiest member over the members' mean rate
    imbalance_max=NUMBER,  # highest imbalance at any time
    idle_member_hours=NUMBER,
    unowned_queue_seconds=NUMBER,
    duplicates=NUMBER,  # expected number of messages delivered twice
    lag_mean=NUMBER,  # messages, of all queues together
    lag_peak=NUMBER,
    problem=TEXT,  # why the policy cannot be used for the group; null: none
)

# Progress of a replay over time, for plots.
SERIES = table_schema(group=TEXT, policy=TEXT, at=TIME, lag=NUMBER, imbalance=NUMBER, moves=COUNT)

# Cost of a policy for a group, with its components.
COSTS = table_schema(
    group=TEXT,
    policy=TEXT,
    rank=IntegerType(),  # 1: the best
    cost=NUMBER,
    cost_moves=NUMBER,
    cost_pause=NUMBER,
    cost_duplicates=NUMBER,
    cost_imbalance=NUMBER,
    cost_idle=NUMBER,
    cost_unowned=NUMBER,
    cost_lag=NUMBER,
)

# The recommendation for each group. Users read this table, so its names stay: `now` is the policy in use, `then` the
# recommended one.
CHOSEN = table_schema(
    group=TEXT,
    strategy=TEXT,  # strategy of the policy in use
    use=TEXT,  # policy to use; `recorded`: no change
    change=BooleanType(),
    best=TEXT,  # cheapest policy; its gain may be too small for a change
    cost_now=NUMBER,
    cost_then=NUMBER,
    gain=NUMBER,  # 0.3: the recommended policy would cost 30 % less
    evidence=TEXT,  # the reason, as a sentence
)

# Test of advice on a group's own history: advised from its first half, tested on its second half.
BACKTEST = table_schema(
    group=TEXT,
    source=TEXT,  # source of the history: real, rates (generated, with recorded message rates), synthetic
    cut=TIME,  # start of the second half
    hours=NUMBER,  # length of the second half
    use=TEXT,  # the advised policy; `recorded`: no change
    change=BooleanType(),
    wrong=BooleanType(),  # the advised policy cost more than the recorded one, or could not be used
    best=TEXT,  # the policy that cost least in the second half
    cost_recorded=NUMBER,  # cost of the recorded policy in the second half
    cost_advised=NUMBER,  # cost of the advised policy in the second half
    cost_best=NUMBER,  # cost of `best` in the second half
    costs=_by_name(NUMBER),  # costs in the second half by policy, without unusable policies
    problem=TEXT,  # why the group could not be tested; null: none
)
