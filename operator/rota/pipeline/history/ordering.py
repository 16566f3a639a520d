"""Order of a group's assignments in the journal, and the breaks in it.

Within a *life*, from a group's creation to its deletion, assignments are ordered by generation, regardless of the
writers' clocks. An assignment is recorded only by the queues that it changes; an `owners` record lists the owners of
all queues, and a queue that it leaves out has no owner. So after a *break*, where records are missing, an owner is
unknown until the next record about the queue.

    records  plan 1  plan 2  owners 2  plan 3     plan 5  owners 5  plan 6     plan 1
    life     1 -----------------------------------------------------------     2 -----   deleted and recreated
    chain    1 -----------------------------     2 -----------------------     3 -----   a break: plan 4 is missing
    epoch    1 ------------  2 -------------     3 ----  4 ---------------     5 -----   also from each `owners` record

So a *border*, where an epoch starts, is a life's first plan, a break or an `owners` record. Within an epoch the last
record about a queue determines its owner; within a *chain* no record is missing. The numbers only distinguish.

A *gap* record says that a writer dropped some records, of any groups, of the time from `since` to `at`.
"""

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.common.columns import false_if_null
from rota.pipeline.ingest.facts import Facts

# Seconds between two hosts' clocks; a lower generation within that time is of the same life.
MAX_CLOCK_SKEW_SECONDS = 60.0

UNOWNED = "Unowned"  # phase of a queue without an owner
SHARING_STATES = ("Ready", "Unready")
RECORD_ORDER = ("life", "generation", "step", "at")
# Steps: the order of records within a generation. Two of them are no records, but mark where records may be missing:
# after _GAP, handovers of its generation may be missing; after _END, any records after the group's last one.
_MEMBERSHIP, _PLAN, _GAP, _HANDOVER, _OWNERS, _END = range(6)

_TEXT_COLUMNS = ("group", "reason", "act", "proof", "state", "from", "fromUid", "to", "toUid", "model", "mode")
_COLUMN_TYPES = dict.fromkeys(_TEXT_COLUMNS, "string") | {
    "at": "timestamp",
    "generation": "bigint",
    "step": "int",
    "members": "bigint",  # that share the queues, by the plan
    "queues": "bigint",  # that are shared, by the plan
    "ranges": "map<string,map<string,string>>",
    "owned": "array<struct<member:string,uid:string,phase:string,queues:map<string,map<string,string>>>>",
    "sharing": "array<string>",  # uids of the members that share the queues
}


def order_records(facts: Facts) -> DataFrame:
    """Return all groups' records, with these columns besides _COLUMN_TYPES.

    - life, chain, epoch: their numbers, by group
    - is_first_plan, is_break, is_owners: whether it is a border, and which; border_at: time from which it counts
    - epoch_end, epoch_ends_with_break, epoch_ends_with_owners: the border at which the record's epoch ends
    - owners_known_before, owners_known_after: whether the owners of all queues are known before and after the record
    - owners_record_count: number of `owners` records so far; next_owners_at, next_plan_at: time of the next such record
    - model: consumption model; modes: the handover modes that may have been in force
    """
    records = _collect_records(facts).transform(_with_life)
    # This runs a query of the few gaps at once: adding markers would compute all records three times.
    if not facts.gap.isEmpty():
        records = _with_gap_markers(records, facts.gap)
    return records.transform(_with_breaks).transform(_with_epochs)


def _with_common_columns(df: DataFrame, step: int, *names: str, **columns: Column) -> DataFrame:
    """Return records with the common columns (_COLUMN_TYPES); columns that a kind lacks are null.

    `names` are columns of the records; `columns` are computed.
    """
    values = {name: F.col(name) for name in ("group", "at", "generation", *names)} | columns | {"step": F.lit(step)}
    return df.select(*(values.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in _COLUMN_TYPES.items()))


def _collect_records(facts: Facts) -> DataFrame:
    act_columns = ("act", "proof", "state", "from", "fromUid", "to", "toUid")
    sharing = _sharing_uids(F.col("members"))
    frames = [
        _with_common_columns(facts.membership, _MEMBERSHIP, sharing=sharing),
        _with_common_columns(facts.plan, _PLAN, "reason", "members", "queues"),
        _with_common_columns(facts.handover, _HANDOVER, *act_columns, ranges=F.col("queues")),
        _with_common_columns(
            facts.owners,
            _OWNERS,
            "model",
            owned=_queues_by_phase(),
            sharing=sharing,
            mode=F.coalesce(F.get_json_object("rules", "$.handover.mode"), F.lit("Cooperative")),
        ),
    ]
    return reduce(DataFrame.unionByName, frames)


def _sharing_uids(members: Column) -> Column:
    sharing = F.filter(F.map_values(members), lambda member: member["standing"].isin(*SHARING_STATES))
    return F.transform(sharing, lambda member: member["uid"])


def _queues_by_phase() -> Column:
    """Return the queues of an `owners` record by phase: owned by a member, being released by one, or unowned."""

    def entry(phase: str, member: Column, uid: Column, queues: Column) -> Column:
        return F.struct(member.alias("member"), uid.alias("uid"), F.lit(phase).alias("phase"), queues.alias("queues"))

    no_owner = F.lit(None).cast("string")
    owned = F.transform(
        F.map_entries("members"),
        lambda member: entry("Owned", member["key"], member["value"]["uid"], member["value"]["queues"]),
    )
    releasing = F.transform(
        "releasing", lambda release: entry("Releasing", release["from"], release["fromUid"], release["queues"])
    )
    return F.concat(owned, releasing, F.array(entry(UNOWNED, no_owner, no_owner, F.col("unowned"))))


def _with_life(df: DataFrame) -> DataFrame:
    """Number the lives of groups that were deleted and recreated."""
    by_time = Window.partitionBy("group").orderBy("at", "generation", "step")
    previous = F.lag("generation").over(by_time)
    waited_seconds = F.col("at").cast("double") - F.lag("at").over(by_time).cast("double")
    # `membership` is an assignment's first record: another one of generation 1 shows that the group was recreated.
    is_repeated_start = previous.isNotNull() & (F.col("step") == _MEMBERSHIP)
    starts_at_1 = (F.col("generation") == 1) & ((previous > 1) | is_repeated_start)
    # The first generations of the new life are missing in the journal.
    starts_later = (F.col("generation") < previous) & (waited_seconds > MAX_CLOCK_SKEW_SECONDS)
    so_far = by_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    starts_life = false_if_null(starts_at_1 | starts_later)
    return df.withColumn("_starts_life", starts_life.cast("int")).withColumn("life", F.sum("_starts_life").over(so_far))


def _with_gap_markers(df: DataFrame, gaps: DataFrame) -> DataFrame:
    """Add markers where a gap may hide records although no generation is missing; `_with_breaks` makes them breaks.

    The plan and the handovers of an assignment have one time. So if the plans of two assignments are outside the gap
    and their generations are consecutive, nothing is missing between them.
    """
    gaps = gaps.select(F.col("since").alias("_since"), F.col("at").alias("_gap_end"))
    for markers in (_incomplete_assignments(df, gaps), _unknown_ends(df, gaps)):
        df = df.unionByName(markers, allowMissingColumns=True)
    return df


def _incomplete_assignments(df: DataFrame, gaps: DataFrame) -> DataFrame:
    """Return a marker for each plan within a gap, where a handover of the same generation may be missing.

    Example: plan 6 at 12:02, a gap from 12:01 to 12:03, plan 7 at 12:04: the marker comes between plan 6 and plan 7.
    """
    # A gap ends before it starts if the clock was set back in between.
    is_in_gap = F.col("at").between(F.least("_since", "_gap_end"), F.greatest("_since", "_gap_end"))
    plans = df.filter(F.col("step") == _PLAN).join(F.broadcast(gaps), is_in_gap, how="left_semi")
    return plans.select("group", "at", "generation", "life", F.lit(_GAP).alias("step"))


def _unknown_ends(df: DataFrame, gaps: DataFrame) -> DataFrame:
    """Return a marker for each group without a record after some gap: the gap may hide its later assignments.

    Example: plan 6 at 12:00, a gap from 12:01 to 12:03, nothing more of the group: the marker is at 12:01.
    """
    ends = df.groupBy("group").agg(
        F.max("at").alias("_last_at"), F.max(F.struct("life", "generation")).alias("_last_assignment")
    )
    silent = ends.join(F.broadcast(gaps), F.col("_last_at") <= F.col("_gap_end"), how="inner")
    earliest = silent.groupBy("group", "_last_at", "_last_assignment").agg(F.min("_since").alias("_since"))
    return earliest.select(
        "group", F.greatest("_last_at", "_since").alias("at"), "_last_assignment.*", F.lit(_END).alias("step")
    )


def _with_breaks(df: DataFrame) -> DataFrame:
    """Mark borders: first plans, breaks and `owners` records. The state is known up to the last record before a break.

    A record continues the previous assignment if it is its successor's plan, or belongs to the same generation.
    """
    order = Window.partitionBy("group").orderBy(*RECORD_ORDER)
    up_to = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    earlier = order.rowsBetween(Window.unboundedPreceding, -1)
    step = F.col("step")
    # A `membership` record is not counted: it precedes its generation's plan, and names no queue.
    assignment = F.when(step.isin(_PLAN, _HANDOVER, _OWNERS), F.struct("life", "generation", "at"))
    monotonic = df.withColumn("at", F.max("at").over(up_to))  # clocks differ between hosts
    with_previous = monotonic.withColumn("_previous", F.last(assignment, ignorenulls=True).over(earlier))

    is_marker = step.isin(_GAP, _END)
    is_same_life = F.col("_previous.life").eqNullSafe(F.col("life"))
    is_first_plan = (step == _PLAN) & (F.col("generation") == 1) & ~is_same_life
    is_next_plan = (F.col("generation") == F.col("_previous.generation") + 1) & ~F.col("reason").eqNullSafe(
        "AssignmentLost"  # rebuilt from the members' reports, so the owners need not be those of the lost assignment
    )
    is_same_generation = F.col("generation") == F.col("_previous.generation")
    is_successor = is_same_life & F.when(step == _PLAN, is_next_plan).otherwise(is_same_generation)
    continues = F.col("_previous").isNull() | (step == _MEMBERSHIP) | is_first_plan | is_successor
    is_break = is_marker | ~continues
    known_until = F.when(is_break & ~is_marker, F.col("_previous.at")).otherwise(F.col("at"))
    return with_previous.withColumns(
        {
            "is_first_plan": is_first_plan,
            "is_break": false_if_null(is_break),
            "is_owners": step == _OWNERS,
            "border_at": known_until,
        }
    )


def _with_epochs(df: DataFrame) -> DataFrame:
    """Number epochs and chains; add to each record the end of its epoch, and whether all owners are known there."""
    order = Window.partitionBy("group").orderBy(*RECORD_ORDER)
    up_to = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    # Look ahead by reverse order: Spark recomputes a frame that extends to the last row for every row.
    backwards = Window.partitionBy("group").orderBy(*map(F.desc, RECORD_ORDER))
    later = backwards.rowsBetween(Window.unboundedPreceding, -1)
    in_chain = Window.partitionBy("group", "chain").orderBy(*RECORD_ORDER)
    starts_chain = F.col("is_first_plan") | F.col("is_break")
    is_border = starts_chain | F.col("is_owners")
    border = F.when(is_border, F.struct("border_at", "is_break", "is_owners"))
    owners_at = F.when(F.col("is_owners"), F.col("at"))
    plan_at = F.when(F.col("step") == _PLAN, F.col("at"))
    mode = F.last("mode", ignorenulls=True)
    # A life's first plan assigns its first owners: all are known from it on; before it they do not count as known.
    all_known = F.max(F.col("is_first_plan") | F.col("is_owners"))
    known_before = all_known.over(in_chain.rowsBetween(Window.unboundedPreceding, -1))
    known_after = all_known.over(in_chain.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    return (
        df.withColumns(
            {
                "epoch": F.sum(is_border.cast("int")).over(up_to),
                "chain": F.sum(starts_chain.cast("int")).over(up_to),
                "owners_record_count": F.sum(F.col("is_owners").cast("int")).over(up_to),
                "_next": F.last(border, ignorenulls=True).over(later),
                "next_owners_at": F.last(owners_at, ignorenulls=True).over(later),
                "next_plan_at": F.last(plan_at, ignorenulls=True).over(later),
                # Only `owners` records name the mode: those of the last and of the next one may be in force here.
                "modes": F.array_compact(F.array(mode.over(up_to), mode.over(later))),
                "model": F.last("model", ignorenulls=True).over(up_to),
            }
        )
        .withColumns(
            {
                "epoch_end": F.col("_next.border_at"),
                "epoch_ends_with_break": false_if_null(F.col("_next.is_break")),
                "epoch_ends_with_owners": false_if_null(F.col("_next.is_owners")),
                "owners_known_before": false_if_null(known_before),
                "owners_known_after": false_if_null(known_after),
            }
        )
        .drop("_next", "_previous", "_starts_life", "mode")
    )


def assignment_periods(records: DataFrame) -> DataFrame:
    """Return over time, by assignment, the number of members and whether there are queues; `until` null: current."""
    plans = records.filter(F.col("step").isin(_PLAN, _OWNERS))
    order = Window.partitionBy("group").orderBy(*RECORD_ORDER)
    return plans.select(
        "group",
        F.col("at").alias("since"),
        F.lead("at").over(order).alias("until"),
        F.coalesce("members", F.size("sharing")).alias("members"),
        (F.col("queues").isNull() | (F.col("queues") > 0)).alias("may_have_queues"),  # `owners` records have no number
    )
