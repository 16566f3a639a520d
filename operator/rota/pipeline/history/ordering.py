"""Order of a group's assignments in the journal, and the breaks in it.

A *life* of a group lasts from its first assignment, generation 1, until the group is deleted. Within a life assignments
are ordered by generation, regardless of the writers' clocks. An assignment is recorded only by the queues that it
changes; so after a *break*, where an assignment is missing, a queue's owner is unknown until the next record about that
queue. An `owners` record lists the owners of all queues; a queue that it does not list has no owner.

An *epoch* begins with a life, a break or an `owners` record, and lasts until the next of them; within it the last
record about a queue determines the queue's owner. A *stretch* begins with a life or a break, with one or more epochs.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.ingest.facts import Facts

# Seconds between two hosts' clocks; a lower generation within that time is of the same life.
MAX_CLOCK_SKEW_SECONDS = 60.0

UNOWNED = "Unowned"  # phase of a queue without an owner
SHARING_STATES = ("Ready", "Unready")
# Steps: the order of records within a generation.
_MEMBERSHIP, _PLAN, _GAP, _HANDOVER, _OWNERS, _END = range(6)

_COLUMN_TYPES = {
    "group": "string",
    "at": "timestamp",
    "generation": "bigint",
    "step": "int",
    "reason": "string",
    "members": "bigint",  # that share the queues, by the plan
    "queues": "bigint",  # that are shared, by the plan
    "act": "string",
    "proof": "string",
    "state": "string",
    "from": "string",
    "fromUid": "string",
    "to": "string",
    "toUid": "string",
    "ranges": "map<string,map<string,string>>",
    "owned": "array<struct<member:string,uid:string,phase:string,queues:map<string,map<string,string>>>>",
    "sharing": "array<string>",  # uids of the members that share the queues
    "model": "string",
    "mode": "string",
}


def order_records(facts: Facts) -> DataFrame:
    """Return all groups' records with their life, epoch and stretch, and the next break and `owners` record."""
    records = _collect_records(facts).transform(_with_life)
    if not facts.gap.isEmpty():  # checked now: a lazy plan would read all records three times
        records = _with_gap_markers(records, facts.gap)
    return records.transform(_with_breaks).transform(_with_epochs)


def _with_common_columns(df: DataFrame, step: int, **columns: Column) -> DataFrame:
    """Return records with the common columns (_COLUMN_TYPES); columns that a kind lacks are null."""
    values = {name: F.col(name) for name in ("group", "at", "generation")} | columns | {"step": F.lit(step)}
    return df.select(*(values.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in _COLUMN_TYPES.items()))


def _collect_records(facts: Facts) -> DataFrame:
    acts = {name: F.col(name) for name in ("act", "proof", "state", "from", "fromUid", "to", "toUid")}
    plans = {name: F.col(name) for name in ("reason", "members", "queues")}
    sharing = _sharing_uids(F.col("members"))
    frames = [
        _with_common_columns(facts.membership, _MEMBERSHIP, sharing=sharing),
        _with_common_columns(facts.plan, _PLAN, **plans),
        _with_common_columns(facts.handover, _HANDOVER, **acts, ranges=F.col("queues")),
        _with_common_columns(
            facts.owners,
            _OWNERS,
            owned=_queues_by_phase(),
            sharing=sharing,
            model=F.col("model"),
            mode=F.coalesce(F.get_json_object("rules", "$.handover.mode"), F.lit("Cooperative")),
        ),
    ]
    result, *more_frames = frames
    for frame in more_frames:
        result = result.unionByName(frame)
    return result


def _sharing_uids(members: Column) -> Column:
    present = F.filter(F.map_values(members), lambda member: member["standing"].isin(*SHARING_STATES))
    return F.transform(present, lambda member: member["uid"])


def _queues_by_phase() -> Column:
    """Return the queues of an `owners` record by phase: owned by a member, being released by one, or unowned."""

    def part(member: Column, uid: Column, phase: str, queues: Column) -> Column:
        names = (member.alias("member"), uid.alias("uid"), F.lit(phase).alias("phase"), queues.alias("queues"))
        return F.struct(*names)

    no_owner = F.lit(None).cast("string")
    members = F.transform(
        F.map_entries("members"), lambda pair: part(pair["key"], pair["value"]["uid"], "Owned", pair["value"]["queues"])
    )
    releasing = F.transform("releasing", lambda item: part(item["from"], item["fromUid"], "Releasing", item["queues"]))
    return F.concat(members, releasing, F.array(part(no_owner, no_owner, UNOWNED, F.col("unowned"))))


def _with_life(df: DataFrame) -> DataFrame:
    """Number the lives of groups that were deleted and recreated."""
    by_time = Window.partitionBy("group").orderBy("at", "generation", "step")
    previous = F.lag("generation").over(by_time)
    waited = F.col("at").cast("double") - F.lag("at").over(by_time).cast("double")
    # `membership` is an assignment's first record: another one of generation 1 shows that the group was recreated.
    recreated = (F.col("generation") == 1) & ((previous > 1) | (previous.isNotNull() & (F.col("step") == _MEMBERSHIP)))
    restarted = (F.col("generation") < previous) & (waited > MAX_CLOCK_SKEW_SECONDS)
    begins = F.coalesce(recreated | restarted, F.expr("false"))
    so_far = by_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return df.withColumn("_begins", begins.cast("int")).withColumn("life", F.sum("_begins").over(so_far))


def _with_gap_markers(df: DataFrame, gaps: DataFrame) -> DataFrame:
    """Add a row where records are missing without a missing generation: within an assignment, or after the last one.

    A gap in which a group had no assignment cannot hide a record about its queues.
    """
    gaps = gaps.select(F.col("since").alias("_since"), F.col("at").alias("_gap_end"))
    plans = df.filter(F.col("step") == _PLAN)
    # `at` is before `since` if the clock was set back in between.
    inside = F.col("at").between(F.least("_since", "_gap_end"), F.greatest("_since", "_gap_end"))
    incomplete = plans.join(F.broadcast(gaps), inside, how="left_semi").select(
        "group", "at", "generation", "life", F.lit(_GAP).alias("step")
    )
    last = df.groupBy("group").agg(
        F.max("at").alias("_last"),
        F.max(F.struct("life", "generation")).alias("_document"),
        F.min("at").alias("_first"),
    )
    silent = (F.col("_last") <= F.col("_gap_end")) & (F.col("_first") <= F.col("_gap_end"))
    ends = last.join(F.broadcast(gaps), silent, how="inner").groupBy("group", "_last", "_document")
    open_ends = ends.agg(F.min("_since").alias("_since")).select(
        "group",
        F.greatest("_last", "_since").alias("at"),
        F.col("_document.generation").alias("generation"),
        F.col("_document.life").alias("life"),
        F.lit(_END).alias("step"),
    )
    return df.unionByName(incomplete, allowMissingColumns=True).unionByName(open_ends, allowMissingColumns=True)


def _with_breaks(df: DataFrame) -> DataFrame:
    """Mark breaks, where an assignment is missing; the state is known up to the last record before the break."""
    order = Window.partitionBy("group").orderBy("life", "generation", "step", "at")
    up_to = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    earlier = order.rowsBetween(Window.unboundedPreceding, -1)
    step = F.col("step")
    is_marker = step.isin(_GAP, _END)
    evidence = F.when(step.isin(_PLAN, _HANDOVER, _OWNERS), F.struct("life", "generation", "at"))
    follows = (F.col("_before.life") == F.col("life")) & F.when(
        step == _PLAN,
        (F.col("generation") == F.col("_before.generation") + 1) & ~F.col("reason").eqNullSafe("AssignmentLost"),
    ).otherwise(F.col("generation") == F.col("_before.generation"))
    recreated = (step == _PLAN) & (F.col("generation") == 1) & ~F.col("_before.life").eqNullSafe(F.col("life"))
    is_break = (F.col("_before").isNotNull() & ~follows & ~recreated & (step != _MEMBERSHIP)) | is_marker
    return (
        df.withColumn("at", F.max("at").over(up_to))  # clocks differ between hosts; keep time monotonic
        .withColumn("_before", F.last(evidence, ignorenulls=True).over(earlier))
        .withColumns(
            {"is_recreated": recreated, "is_break": F.coalesce(is_break, F.expr("false")), "is_owners": step == _OWNERS}
        )
        .withColumn("starts", F.when(F.col("is_break") & ~is_marker, F.col("_before.at")).otherwise(F.col("at")))
    )


def _with_epochs(df: DataFrame) -> DataFrame:
    """Number epochs and stretches; add to each record the end of its epoch, and whether all owners are known there."""
    order = Window.partitionBy("group").orderBy("life", "generation", "step", "at")
    up_to = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    # Look ahead by reverse order: Spark recomputes a frame that extends to the last row for every row.
    backwards = [F.desc(name) for name in ("life", "generation", "step", "at")]
    later = Window.partitionBy("group").orderBy(*backwards).rowsBetween(Window.unboundedPreceding, -1)
    border = F.col("is_recreated") | F.col("is_break") | F.col("is_owners")
    next_border = F.last(F.when(border, F.struct("starts", "is_break", "is_owners")), ignorenulls=True).over(later)
    plan_at = F.when(F.col("step") == _PLAN, F.col("at"))
    mode = F.last("mode", ignorenulls=True)
    all_known = F.col("is_recreated") | F.col("is_owners")
    never = F.expr("false")
    within = Window.partitionBy("group", "stretch").orderBy("life", "generation", "step", "at")
    return (
        df.withColumns(
            {
                "epoch": F.sum(border.cast("int")).over(up_to),
                "stretch": F.sum((F.col("is_recreated") | F.col("is_break")).cast("int")).over(up_to),
                "owners_count": F.sum(F.col("is_owners").cast("int")).over(up_to),
                "_next": next_border,
                "next_owners": F.last(F.when(F.col("is_owners"), F.col("at")), ignorenulls=True).over(later),
                "next_plan": F.last(plan_at, ignorenulls=True).over(later),
                "modes": F.array_compact(F.array(mode.over(up_to), mode.over(later))),
                "model": F.last("model", ignorenulls=True).over(up_to),
            }
        )
        .withColumns(
            {
                "epoch_ends": F.col("_next.starts"),
                "ends_with_break": F.coalesce("_next.is_break", never),
                "ends_with_owners": F.coalesce("_next.is_owners", never),
                "has_known_owners": F.coalesce(
                    F.max(all_known).over(within.rowsBetween(Window.unboundedPreceding, 0)), never
                ),
                "had_known_owners": F.coalesce(
                    F.max(all_known).over(within.rowsBetween(Window.unboundedPreceding, -1)), never
                ),
            }
        )
        .drop("_next", "_before", "_begins", "mode")
    )


def assignment_periods(records: DataFrame) -> DataFrame:
    """Return the numbers of members and queues over time, by assignment; `until` is null for the current one."""
    plans = records.filter(F.col("step").isin(_PLAN, _OWNERS))
    order = Window.partitionBy("group").orderBy("life", "generation", "step", "at")
    return plans.select(
        "group",
        F.col("at").alias("since"),
        F.lead("at").over(order).alias("until"),
        F.coalesce("members", F.size("sharing")).alias("members"),
        F.coalesce("queues", F.lit(1)).alias("queues"),  # an `owners` record has no number: 1 stands for any
    )


def handover_records(records: DataFrame) -> DataFrame:
    """Return only the `handover` records."""
    return records.filter(F.col("step") == _HANDOVER)


def owners_records(records: DataFrame) -> DataFrame:
    """Return only the `owners` records."""
    return records.filter(F.col("step") == _OWNERS)
