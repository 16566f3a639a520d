"""Audit of the operator by its own journal: owners of each queue over time, and violations of exclusive ownership.

Nothing is guessed: where an assignment is missing, a queue's owner is unknown until the next record about it, which the
audit reports as `Unknown`. A revoked queue is its previous owner's until it is granted: that pod may still consume it.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rota.pipeline.common.columns import select_columns
from rota.pipeline.common.schemas import INTERVALS, VIOLATIONS
from rota.pipeline.history.ordering import UNOWNED, assignment_periods
from rota.pipeline.history.ownership import (
    QUEUE_COLUMNS,
    QUEUE_PARTITION,
    QUEUE_RECORD_ORDER,
    OwnershipAccount,
    build_account,
    last_record_times,
)
from rota.pipeline.history.ranges import expand_by_queue, seconds_between
from rota.pipeline.ingest.facts import Facts

OPERATOR_ERRORS = ("TwoOwners", "Unproved")  # errors of the operator; other kinds concern the journal or the group


def intervals(facts: Facts, account: OwnershipAccount | None = None) -> DataFrame:
    """Return the owners of each queue over time, one row per period (schemas.INTERVALS)."""
    return _build_intervals((account or build_account(facts)).holdings, facts.obeyed)


def violations(facts: Facts, account: OwnershipAccount | None = None) -> DataFrame:
    """Return violations: two owners, grants without proof, queues without an owner, periods without information."""
    account = account or build_account(facts)
    candidates = F.array(_find_two_owners(), _find_unproved(), _find_unknown())
    actual = F.filter(candidates, lambda violation: violation.isNotNull())
    by_holding = account.holdings.select(*QUEUE_COLUMNS, F.explode(actual).alias("violation"))
    of_holdings = by_holding.select(*QUEUE_COLUMNS, "violation.*")
    of_assignments = _find_unowned(unowned_by_assignment(account))
    return of_holdings.unionByName(of_assignments).transform(select_columns, VIOLATIONS)


def _build_intervals(holdings: DataFrame, obeyed: DataFrame) -> DataFrame:
    order = Window.partitionBy(*QUEUE_PARTITION).orderBy(*QUEUE_RECORD_ORDER)
    # The same pod owns the queue without a pause, and no record is missing in between.
    continues = (
        F.col("before.uid").eqNullSafe(F.col("uid"))
        & F.col("before.chain").eqNullSafe(F.col("chain"))
        & F.lag("until").over(order).eqNullSafe(F.col("at"))
    )
    # Spark orders structs by their first fields, so the minimum is the first holding of a period.
    first = F.struct("life", "generation", "step", "at", "act", "handover_start")
    last = F.struct("life", "generation", "step", F.col("at").alias("_at"), "until")
    spans = (
        holdings.withColumn("handover_start", _handover_start())
        .withColumn("period", _number_periods(continues))
        .filter(F.col("uid").isNotNull())
        .groupBy(*QUEUE_PARTITION, "period", "member", "uid")
        .agg(F.min(first).alias("first"), F.max(last).alias("last"))
        .select(
            *QUEUE_COLUMNS,
            "member",
            "uid",
            F.col("first.at").alias("since"),
            F.col("last.until").alias("until"),
            F.col("first.generation").alias("generation"),
            F.col("first.act").eqNullSafe("Force").alias("forced"),
            # An `owners` record (without an act) tells the owner, not how the owner got the queue.
            F.when(F.col("first.act").isNotNull(), F.col("first.handover_start")).alias("handover_start"),
        )
    )
    obeyed_at = expand_by_queue(obeyed.select("group", "generation", "uid", "at", "queues"))
    obeyed_at = obeyed_at.groupBy(*QUEUE_COLUMNS, "generation", "uid").agg(F.min("at").alias("obeyed"))
    return (
        spans.join(obeyed_at, [*QUEUE_COLUMNS, "generation", "uid"], how="left")
        .withColumn("seconds", seconds_between("handover_start", "obeyed"))
        .transform(select_columns, INTERVALS)
    )


def _number_periods(continues: Column) -> Column:
    """Return the number of each holding's period: a holding that does not continue the previous one starts a period."""
    order = Window.partitionBy(*QUEUE_PARTITION).orderBy(*QUEUE_RECORD_ORDER)
    so_far = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return F.sum((~continues).cast("int")).over(so_far)


def _handover_start() -> Column:
    """Return the start of the handover that a grant ends: the queue's revoke, or the grant if it was still Owned.

    Null if the revoke is unknown, or the queue had no owner.
    """
    state = F.col("state")
    return F.when(state == "Releasing", F.col("revoked_at")).when(state == "Owned", F.col("at"))


def _violation(kind: str, *, since: Column, until: Column, members: Column, why: Column) -> Column:
    return F.struct(
        F.lit(kind).alias("kind"),
        since.alias("since"),
        until.cast("timestamp").alias("until"),
        F.filter(members, lambda member: member.isNotNull()).alias("members"),
        why.alias("why"),
    )


def _find_two_owners() -> Column:
    """Find grants of queues that another member owned by all earlier records, and `owners` records with two owners."""
    is_granted_twice = F.col("contradicts") & (F.col("act") == "Grant") & F.col("before.member").isNotNull()
    # Each `owners` record starts an epoch, so a holding before it in the same epoch is of the same record.
    is_listed_twice = F.col("contradicts") & F.col("is_owners") & (F.col("before.epoch") == F.col("epoch"))
    source = F.coalesce(F.concat(F.lit("from "), "named_owner"), F.lit("as unowned"))
    contradiction = F.concat(F.lit("Granted "), source, F.lit(", but "), F.col("before.member"), F.lit(" owned it"))
    why = F.when(F.col("is_owners"), F.lit("One record names two holders")).otherwise(contradiction)
    members = F.array("before.member", "member")
    violation = _violation("TwoOwners", since=F.col("at"), until=F.col("until"), members=members, why=why)
    return F.when(is_granted_twice | is_listed_twice, violation)


def _find_unproved() -> Column:
    """Find grants without proof that the previous owner released the queue or ended.

    A queue without an owner (Free) needs a proof in every mode: after a lost assignment some pod may still consume it.
    Groups in mode Immediate need none for other queues, so these count only if no such mode may have been in force.
    """
    is_cooperative = F.array_contains("modes", "Cooperative") & ~F.array_contains("modes", "Immediate")
    lacks_proof = (F.col("act") == "Grant") & (F.col("proof") == "None")
    why = F.concat(F.lit("Granted from "), F.col("state"), F.lit(" without proof"))
    members = F.array("named_owner", "member")
    violation = _violation("Unproved", since=F.col("at"), until=F.lit(None), members=members, why=why)
    return F.when(lacks_proof & ((F.col("state") == "Free") | is_cooperative), violation)


def _find_unknown() -> Column:
    """Find periods without a known owner: after a break, and before a record that contradicts earlier records."""
    at_break = F.col("is_last_in_epoch") & F.col("epoch_ends_with_break") & F.col("uid").isNotNull()
    since = F.when(at_break, F.col("epoch_end")).otherwise(F.col("certain_until"))
    until = F.when(at_break, F.least("next.at", "next_owners_at")).otherwise(F.col("end"))
    why = F.when(at_break, "Records are missing").otherwise(
        "The next record contradicts it, and no record explains the change"
    )
    members = F.array("member", F.when(~at_break & F.col("next.contradicts"), F.col("next.member")))
    return F.when(
        at_break | F.col("certain_until").isNotNull(),
        _violation("Unknown", since=since, until=until, members=members, why=why),
    )


def unowned_periods(holdings: DataFrame) -> DataFrame:
    """Return the periods in which queues had no owner.

    The queue may be deleted: a period counts only if an `owners` record lists it as unowned, or it is granted later.
    """
    granted_later = F.col("next.act").isNotNull() & (F.col("next.state") == "Free") & ~F.col("next.contradicts")
    order = Window.partitionBy(*QUEUE_PARTITION).orderBy(*QUEUE_RECORD_ORDER)
    continues = F.lag("phase").over(order).eqNullSafe(UNOWNED) & F.lag("until").over(order).eqNullSafe(F.col("at"))
    last = F.struct("life", "generation", "step", "at", "until")
    return (
        holdings.withColumn("period", _number_periods(continues))
        .filter(F.col("phase") == UNOWNED)
        .groupBy(*QUEUE_PARTITION, "period")
        .agg(
            F.min("at").alias("since"),
            F.max(last).alias("last"),
            F.max(F.col("is_owners") | granted_later).alias("is_certain"),
        )
        .filter("is_certain")
        .select(*QUEUE_COLUMNS, "since", F.col("last.until").alias("until"))
    )


def unowned_by_assignment(account: OwnershipAccount) -> DataFrame:
    """Return the periods in which queues of a plan had no owner: a row per assignment, with its number of members.

    `from` and `to` are those of the whole period, `since` and `until` those of its part during the assignment. A period
    that has not ended is cut at the group's last record.
    """
    spans = unowned_periods(account.holdings).select(
        *QUEUE_COLUMNS, F.col("since").alias("from"), F.col("until").alias("to")
    )
    during = assignment_periods(account.records).filter("may_have_queues")
    since = F.greatest("from", "since")
    until = F.least(F.coalesce("to", "recorded_until"), F.coalesce("until", "recorded_until"))
    return (
        spans.join(during, "group", how="inner")
        .join(last_record_times(account.hours), "group", how="inner")
        .select(*QUEUE_COLUMNS, "from", "to", "members", since.alias("since"), until.alias("until"))
        .filter(F.col("since") < F.col("until"))
    )


def _find_unowned(unowned: DataFrame) -> DataFrame:
    """Find queues that had no owner while the group had members."""
    spans = unowned.filter(F.col("members") > 0).groupBy(*QUEUE_COLUMNS, "from", "to")
    neglected = spans.agg(F.min("since").alias("since"), F.max("until").alias("until"))
    until = F.when(F.col("to").isNull() | (F.col("until") < F.col("to")), F.col("until")).otherwise(F.col("to"))
    no_members = F.array().cast("array<string>")
    why = F.lit("No owner, although members were present")
    violation = _violation("Unowned", since=F.col("since"), until=until, members=no_members, why=why)
    return neglected.select(*QUEUE_COLUMNS, violation.alias("violation")).select(*QUEUE_COLUMNS, "violation.*")
