"""A group's documents in their order, as the journal tells of them, and where that order is broken.

A group *lives* from its first document, generation 1, until it is deleted; within a life documents are ordered by
generation, whatever the clocks of those who wrote them said. What a document changed is told only of the queues that it
changed; so after a *break*, when a document is missing, nothing is known of a queue until it is told of again. An
`owners` record is a *whole*: who owns what then is known, and what it does not name is nobody's.

Between two of these (an *epoch*) a queue is with whom its last record in it says, until the epoch ends.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.ingest.facts import Facts

CLOCKS_DIFFER = 60.0  # seconds, of two hosts: a lower generation so soon after a higher one is of the same life

SHARING = ("Ready", "Unready")
# Records of one generation in their order.
_MEMBERSHIP, _PLAN, _DOUBT, _ACT, _WHOLE, _END = range(6)

_SHAPE = {
    "group": "string",
    "at": "timestamp",
    "generation": "bigint",
    "step": "int",
    "reason": "string",
    "members": "bigint",  # who share, by the plan
    "queues": "bigint",  # that they share
    "act": "string",
    "proof": "string",
    "state": "string",
    "from": "string",
    "fromUid": "string",
    "to": "string",
    "toUid": "string",
    "ranges": "map<string,map<string,string>>",
    "owned": "array<struct<member:string,uid:string,phase:string,queues:map<string,map<string,string>>>>",
    "sharing": "array<string>",  # their uids
    "model": "string",
    "mode": "string",
}


def ordered(facts: Facts) -> DataFrame:
    """Return a group's records in order: what each tells, and between which breaks and wholes it stands."""
    told = _records(facts).transform(_with_life)
    if not facts.gap.isEmpty():  # asked at once: whether nothing is missing Spark would learn after it read all thrice
        told = _with_doubts(told, facts.gap)
    return told.transform(_with_breaks).transform(_with_epochs)


def _shaped(df: DataFrame, step: int, **columns: Column) -> DataFrame:
    """Return records in the one shape that all kinds have here."""
    known = {name: F.col(name) for name in ("group", "at", "generation")} | columns | {"step": F.lit(step)}
    return df.select(*(known.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in _SHAPE.items()))


def _records(facts: Facts) -> DataFrame:
    acts = {name: F.col(name) for name in ("act", "proof", "state", "from", "fromUid", "to", "toUid")}
    plans = {name: F.col(name) for name in ("reason", "members", "queues")}
    sharing = _sharing(F.col("members"))
    frames = [
        _shaped(facts.membership, _MEMBERSHIP, sharing=sharing),
        _shaped(facts.plan, _PLAN, **plans),
        _shaped(facts.handover, _ACT, **acts, ranges=F.col("queues")),
        _shaped(
            facts.owners,
            _WHOLE,
            owned=_owned(),
            sharing=sharing,
            model=F.col("model"),
            mode=F.coalesce(F.get_json_object("rules", "$.handover.mode"), F.lit("Cooperative")),
        ),
    ]
    first, *others = frames
    for frame in others:
        first = first.unionByName(frame)
    return first


def _sharing(members: Column) -> Column:
    there = F.filter(F.map_values(members), lambda it: it["standing"].isin(*SHARING))
    return F.transform(there, lambda it: it["uid"])


def _owned() -> Column:
    """Return what a whole says of all queues: owned by a member, on the way from one, or nobody's."""

    def part(member: Column, uid: Column, phase: str, queues: Column) -> Column:
        names = (member.alias("member"), uid.alias("uid"), F.lit(phase).alias("phase"), queues.alias("queues"))
        return F.struct(*names)

    nobody = F.lit(None).cast("string")
    members = F.transform(
        F.map_entries("members"), lambda it: part(it["key"], it["value"]["uid"], "Owned", it["value"]["queues"])
    )
    releasing = F.transform("releasing", lambda it: part(it["from"], it["fromUid"], "Releasing", it["queues"]))
    return F.concat(members, releasing, F.array(part(nobody, nobody, "Nobody", F.col("unowned"))))


def _with_life(df: DataFrame) -> DataFrame:
    """Number the lives of groups that were deleted and made anew."""
    by_time = Window.partitionBy("group").orderBy("at", "generation", "step")
    before = F.lag("generation").over(by_time)
    waited = F.col("at").cast("double") - F.lag("at").over(by_time).cast("double")
    # A document's first record tells its members: if that is of generation 1 again, the group is another one.
    anew = (F.col("generation") == 1) & ((before > 1) | (before.isNotNull() & (F.col("step") == _MEMBERSHIP)))
    fallen = (F.col("generation") < before) & (waited > CLOCKS_DIFFER)
    begins = F.coalesce(anew | fallen, F.expr("false"))
    so_far = by_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return df.withColumn("_begins", begins.cast("int")).withColumn("life", F.sum("_begins").over(so_far))


def _with_doubts(df: DataFrame, gaps: DataFrame) -> DataFrame:
    """Add a row where records are missing that no generation shows: within a document's, or after the last one.

    Of a group that had no document meanwhile nothing is missing that could tell of its queues.
    """
    gaps = gaps.select(F.col("since").alias("_since"), F.col("at").alias("_told"))
    plans = df.filter(F.col("step") == _PLAN)
    # A clock may have gone back meanwhile.
    inside = F.col("at").between(F.least("_since", "_told"), F.greatest("_since", "_told"))
    torn = plans.join(F.broadcast(gaps), inside, how="left_semi").select(
        "group", "at", "generation", "life", F.lit(_DOUBT).alias("step")
    )
    last = df.groupBy("group").agg(
        F.max("at").alias("_last"),
        F.max(F.struct("life", "generation")).alias("_document"),
        F.min("at").alias("_first"),
    )
    silent = (F.col("_last") <= F.col("_told")) & (F.col("_first") <= F.col("_told"))
    ends = last.join(F.broadcast(gaps), silent, how="inner").groupBy("group", "_last", "_document")
    after = ends.agg(F.min("_since").alias("_since")).select(
        "group",
        F.greatest("_last", "_since").alias("at"),
        F.col("_document.generation").alias("generation"),
        F.col("_document.life").alias("life"),
        F.lit(_END).alias("step"),
    )
    return df.unionByName(torn, allowMissingColumns=True).unionByName(after, allowMissingColumns=True)


def _with_breaks(df: DataFrame) -> DataFrame:
    """Find where a document is missing; what was so then is known until the record before that."""
    order = Window.partitionBy("group").orderBy("life", "generation", "step", "at")
    up_to = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    earlier = order.rowsBetween(Window.unboundedPreceding, -1)
    step, doubt = F.col("step"), F.col("step").isin(_DOUBT, _END)
    evidence = F.when(step.isin(_PLAN, _ACT, _WHOLE), F.struct("life", "generation", "at"))
    follows = (F.col("_before.life") == F.col("life")) & F.when(
        step == _PLAN,
        (F.col("generation") == F.col("_before.generation") + 1) & ~F.col("reason").eqNullSafe("RecordLost"),
    ).otherwise(F.col("generation") == F.col("_before.generation"))
    anew = (step == _PLAN) & (F.col("generation") == 1) & ~F.col("_before.life").eqNullSafe(F.col("life"))
    torn = (F.col("_before").isNotNull() & ~follows & ~anew & (step != _MEMBERSHIP)) | doubt
    return (
        df.withColumn("at", F.max("at").over(up_to))  # two clocks differ; time does not go back
        .withColumn("_before", F.last(evidence, ignorenulls=True).over(earlier))
        .withColumns({"anew": anew, "torn": F.coalesce(torn, F.expr("false")), "whole": step == _WHOLE})
        .withColumn("starts", F.when(F.col("torn") & ~doubt, F.col("_before.at")).otherwise(F.col("at")))
    )


def _with_epochs(df: DataFrame) -> DataFrame:
    """Number epochs, and say of each record where its own ends and what was known when."""
    order = Window.partitionBy("group").orderBy("life", "generation", "step", "at")
    up_to = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    # What comes next is what came last, looked at from the end: a frame up to the last row is made anew for each row.
    backwards = [F.desc(name) for name in ("life", "generation", "step", "at")]
    later = Window.partitionBy("group").orderBy(*backwards).rowsBetween(Window.unboundedPreceding, -1)
    border = F.col("anew") | F.col("torn") | F.col("whole")
    next_border = F.last(F.when(border, F.struct("starts", "torn", "whole")), ignorenulls=True).over(later)
    plan_at = F.when(F.col("step") == _PLAN, F.col("at"))
    mode = F.last("mode", ignorenulls=True)
    sure, never = F.col("anew") | F.col("whole"), F.expr("false")
    within = Window.partitionBy("group", "stretch").orderBy("life", "generation", "step", "at")
    return (
        df.withColumns(
            {
                "epoch": F.sum(border.cast("int")).over(up_to),
                "stretch": F.sum((F.col("anew") | F.col("torn")).cast("int")).over(up_to),
                "wholes": F.sum(F.col("whole").cast("int")).over(up_to),
                "_next": next_border,
                "next_whole": F.last(F.when(F.col("whole"), F.col("at")), ignorenulls=True).over(later),
                "next_plan": F.last(plan_at, ignorenulls=True).over(later),
                "modes": F.array_compact(F.array(mode.over(up_to), mode.over(later))),
                "model": F.last("model", ignorenulls=True).over(up_to),
            }
        )
        .withColumns(
            {
                "epoch_ends": F.col("_next.starts"),
                "ends_torn": F.coalesce("_next.torn", never),
                "ends_whole": F.coalesce("_next.whole", never),
                "sure": F.coalesce(F.max(sure).over(within.rowsBetween(Window.unboundedPreceding, 0)), never),
                "heard": F.coalesce(F.max(sure).over(within.rowsBetween(Window.unboundedPreceding, -1)), never),
            }
        )
        .drop("_next", "_before", "_begins", "mode")
    )


def periods(told: DataFrame) -> DataFrame:
    """Return how many members shared how many queues when, document by document; `until` null: it is so yet."""
    plans = told.filter(F.col("step").isin(_PLAN, _WHOLE))
    order = Window.partitionBy("group").orderBy("life", "generation", "step", "at")
    return plans.select(
        "group",
        F.col("at").alias("since"),
        F.lead("at").over(order).alias("until"),
        F.coalesce("members", F.size("sharing")).alias("members"),
        F.coalesce("queues", F.lit(1)).alias("queues"),  # a whole does not say it; it names each
    )


def acts(told: DataFrame) -> DataFrame:
    """Return only what handovers tell."""
    return told.filter(F.col("step") == _ACT)


def wholes(told: DataFrame) -> DataFrame:
    """Return only what `owners` records tell."""
    return told.filter(F.col("step") == _WHOLE)
