"""Audits the operator by its own journal: owners of each queue over time, and violations of exclusive ownership.

Owners are never guessed. Where an assignment is missing, a queue's owner is unknown until the next record about the
queue, and the audit reports this period as `Unknown`. A revoked queue belongs to its previous owner until it is
granted, since the previous owner may still consume it.

Its input is a queue's *holdings* (`ownership`): periods of one owner, each of which begins with one record. Adjacent
holdings of the same pod are one *interval*. A handover record's `state` is the queue's state before the handover.

In a *chain* of records none is missing. An *epoch* is a part of a chain: it starts with the chain, or with an `owners`
record in it, which lists the owners of all queues.

A holding ends at `end`, with the queue's next record or with the epoch. If a later record contradicts it, its owner is
certain only up to `certain_until`. `until` is the end of the certain time.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from rota.model import Queue
from rota.pipeline.history.group_records import GroupRecords
from rota.pipeline.history.ordering import DEFAULT_MODE, Gaps, assignment_periods
from rota.pipeline.history.ownership import Holding, OwnershipAccount, Phase, build_account
from rota.ranges import from_ranges
from rota.records import ObeyedRecord


class ViolationKind(StrEnum):
    """Kinds of violations, and of periods without an owner or without information."""

    TWO_OWNERS = "TwoOwners"  # a queue was granted although another member owned it
    UNPROVED = "Unproved"  # a queue was granted without proof that its previous owner had stopped
    UNOWNED = "Unowned"  # a queue had no owner although the group had members
    UNKNOWN = "Unknown"  # records are missing, so the owner is not known


# Errors of the operator; other kinds concern the journal or the group.
OPERATOR_ERRORS = (ViolationKind.TWO_OWNERS, ViolationKind.UNPROVED)


class Interval(NamedTuple):
    """A period in which a queue had one owner; schemas.INTERVALS explains the fields."""

    queue: Queue
    member: str | None
    uid: str
    since: datetime
    until: datetime | None
    generation: int
    forced: bool
    obeyed: datetime | None
    seconds: float | None


class Violation(NamedTuple):
    """A violation of exclusive ownership (schemas.VIOLATIONS)."""

    queue: Queue
    kind: ViolationKind
    since: datetime
    until: datetime | None
    members: tuple[str, ...]
    why: str


class UnownedPeriod(NamedTuple):
    """A period in which a queue had no owner."""

    queue: Queue
    since: datetime
    until: datetime | None  # None: the queue still has no owner


class UnownedPart(NamedTuple):
    """The part of a period without an owner in which one assignment was in force, and its number of members."""

    since: datetime
    until: datetime
    members: int


class Audit(NamedTuple):
    """Owners of all queues of one group over time, and the violations."""

    intervals: list[Interval]
    violations: list[Violation]


class ObeyedTimes:
    """When members first reported that they follow the assignments that gave them their queues."""

    def __init__(self, records: Iterable[ObeyedRecord] = ()) -> None:
        self._times: dict[tuple[Queue, int, str], datetime] = {}
        for record in records:
            for queue in from_ranges(record.queues):
                key = (queue, record.generation, record.uid)
                self._times[key] = min(record.at, self._times.get(key, record.at))

    def find(self, queue: Queue, generation: int, uid: str) -> datetime | None:
        """Return when a member reported that it follows an assignment; None: not recorded."""
        return self._times.get((queue, generation, uid))


def audit_group(records: GroupRecords, gaps: Gaps) -> Audit:
    """Return the audit of one group."""
    account = build_account(records.assignments(), gaps)
    obeyed = ObeyedTimes(records.of_kind(ObeyedRecord))
    unowned_times = UnownedTimes(account, records.recorded_until)
    audit = Audit([], [])
    for queue, holdings in account.holdings():
        audit.intervals.extend(intervals(queue, holdings, obeyed))
        audit.violations.extend(violations(queue, holdings))
        for period in unowned_periods(queue, holdings):
            violation = unowned_times.find_violation(period)
            if violation:
                audit.violations.append(violation)
    return audit


def intervals(queue: Queue, holdings: Iterable[Holding], obeyed: ObeyedTimes) -> Iterator[Interval]:
    """Yield the owners of a queue over time."""
    for period in _group_periods(holdings, _continues_owner):
        first = period[0]
        generation = first.statement.entry.generation
        owner = first.statement.owner
        if owner.uid is None:
            continue
        obeyed_at = obeyed.find(queue, generation, owner.uid)
        handover_start = _handover_start(first)
        seconds = (obeyed_at - handover_start).total_seconds() if obeyed_at and handover_start else None
        is_forced = first.statement.handover is not None and first.statement.handover.act == "Force"
        yield Interval(
            queue, owner.name, owner.uid, first.since, period[-1].until, generation, is_forced, obeyed_at, seconds
        )


def violations(queue: Queue, holdings: Iterable[Holding]) -> Iterator[Violation]:
    """Yield a queue's violations: two owners, grants without proof, periods without information."""
    for holding in holdings:
        for find_violation in (_find_two_owners, _find_unproved, _find_unknown):
            violation = find_violation(queue, holding)
            if violation:
                yield violation


def unowned_periods(queue: Queue, holdings: Iterable[Holding]) -> Iterator[UnownedPeriod]:
    """Yield the periods in which a queue had no owner.

    The queue may have been deleted instead. So a period of holdings in phase UNOWNED counts only if an `owners` record
    begins one of them, which lists the queue as unowned, or if the queue is granted after one of them.
    """
    for period in _group_periods(holdings, _continues_without_owner):
        is_certain = any(holding.statement.entry.is_owners or _is_granted_later(holding) for holding in period)
        if period[0].statement.phase is Phase.UNOWNED and is_certain:
            yield UnownedPeriod(queue, period[0].since, period[-1].until)


class UnownedTimes:
    """Cuts periods without an owner to the parts that count: while the group had queues, up to its last record."""

    def __init__(self, account: OwnershipAccount, recorded_until: datetime | None) -> None:
        # In order of time.
        self._assignments = list(filter(attrgetter("may_have_queues"), assignment_periods(account.entries)))
        self._recorded_until = recorded_until

    def parts(self, period: UnownedPeriod) -> Iterator[UnownedPart]:
        """Yield the part of a period in each assignment; a period that has not ended is cut at the last record."""
        if self._recorded_until is None:
            return
        end = period.until or self._recorded_until
        since_of = attrgetter("since")
        first = max(bisect_right(self._assignments, period.since, key=since_of) - 1, 0)  # in force at the start
        after_last = bisect_right(self._assignments, end, key=since_of)
        for assignment in self._assignments[first:after_last]:
            since = max(period.since, assignment.since)
            until = min(end, assignment.until or self._recorded_until)
            if since < until:
                yield UnownedPart(since, until, assignment.members)

    def find_violation(self, period: UnownedPeriod) -> Violation | None:
        """Return the violation if the queue had no owner while the group had members."""
        parts_with_members = [part for part in self.parts(period) if part.members > 0]
        if not parts_with_members:
            return None
        since = parts_with_members[0].since
        until = parts_with_members[-1].until
        why = "No owner, although members were present"
        return Violation(period.queue, ViolationKind.UNOWNED, since, until, (), why)


def _group_periods(
    holdings: Iterable[Holding], continues: Callable[[Holding, Holding], bool]
) -> Iterator[list[Holding]]:
    """Group adjacent holdings into periods."""
    period: list[Holding] = []
    for holding in holdings:
        if period and not continues(period[-1], holding):
            yield period
            period = []
        period.append(holding)
    if period:
        yield period


def _continues_owner(previous: Holding, holding: Holding) -> bool:
    """Return whether the same pod owns the queue without a pause, and no record is missing in between."""
    is_same_chain = previous.statement.entry.chain == holding.statement.entry.chain
    return previous.statement.owner == holding.statement.owner and is_same_chain and previous.until == holding.since


def _continues_without_owner(previous: Holding, holding: Holding) -> bool:
    return (
        previous.statement.phase is Phase.UNOWNED
        and holding.statement.phase is Phase.UNOWNED
        and previous.until == holding.since
    )


def _is_granted_later(holding: Holding) -> bool:
    """Return whether the queue's next record grants it as a queue without an owner."""
    following = holding.next
    if following is None or following.statement.handover is None:
        return False
    return following.statement.handover.state == "Free" and not following.contradicts


def _handover_start(holding: Holding) -> datetime | None:
    """Return the start of the handover that a grant ends: the queue's revoke, or the grant if there was no revoke.

    None if the revoke is unknown, if the queue had no owner, or if the record is no grant.
    """
    handover = holding.statement.handover
    if handover is None:
        return None
    if handover.state == "Releasing":
        return holding.revoked_at
    return holding.since if handover.state == "Owned" else None


def _find_two_owners(queue: Queue, holding: Holding) -> Violation | None:
    """Find grants of queues that another member owned by the earlier records, and `owners` records with two owners.

    A statement's `named_owner` is the previous owner that its own record names.
    """
    statement = holding.statement
    previous = holding.previous  # a statement, whereas `holding.next` is a holding
    if previous is None or not holding.contradicts:
        return None
    previous_owner = previous.owner.name
    # Each `owners` record starts an epoch, so both statements are in one epoch only if a record lists the queue twice.
    if statement.entry.is_owners and previous.entry.epoch == statement.entry.epoch:
        why = "One record names two holders"
    elif statement.handover and statement.handover.act == "Grant" and previous_owner is not None:
        source = "as unowned" if statement.named_owner.name is None else f"from {statement.named_owner.name}"
        why = f"Granted {source}, but {previous_owner} owned it"
    else:
        return None
    members = _names(previous_owner, statement.owner.name)
    return Violation(queue, ViolationKind.TWO_OWNERS, holding.since, holding.until, members, why)


def _find_unproved(queue: Queue, holding: Holding) -> Violation | None:
    """Find grants without proof that the previous owner released the queue or ended.

    A queue without an owner (Free) needs a proof in every handover mode, since after a lost assignment some pod may
    still consume it. Other queues need no proof in mode Immediate. So their grants count only if mode Cooperative was
    certainly in force.
    """
    statement = holding.statement
    if statement.handover is None or statement.handover.act != "Grant" or statement.handover.proof != "None":
        return None
    state = statement.handover.state
    modes = statement.entry.modes
    is_cooperative = DEFAULT_MODE in modes and "Immediate" not in modes
    if state != "Free" and not is_cooperative:
        return None
    members = _names(statement.named_owner.name, statement.owner.name)
    why = f"Granted from {state} without proof"
    return Violation(queue, ViolationKind.UNPROVED, holding.since, None, members, why)


def _find_unknown(queue: Queue, holding: Holding) -> Violation | None:
    """Find periods without a known owner: after a break, and before a record that contradicts earlier records."""
    entry = holding.statement.entry
    following = holding.next
    owner = holding.statement.owner
    is_at_break = holding.is_last_in_epoch and entry.epoch_end is not None and entry.epoch_end.is_break
    # The owner is known up to the break, at `end`, then unknown until a record tells the queue's owner.
    if is_at_break and owner.uid is not None and holding.end:
        times = (following.since if following else None, entry.next_owners_at)
        until = min(filter(None, times), default=None)
        why = "Records are missing"
        return Violation(queue, ViolationKind.UNKNOWN, holding.end, until, _names(owner.name), why)
    # A contradicted owner is unknown from `certain_until` to `end`, the time of the contradicting record.
    if holding.certain_until is None:
        return None
    next_owner = following.statement.owner.name if following and following.contradicts else None
    why = "The next record contradicts it, and no record explains the change"
    members = _names(owner.name, next_owner)
    return Violation(queue, ViolationKind.UNKNOWN, holding.certain_until, holding.end, members, why)


def _names(*names: str | None) -> tuple[str, ...]:
    """Return the names that are known."""
    return tuple(filter(None, names))
