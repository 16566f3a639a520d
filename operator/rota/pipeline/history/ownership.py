"""Ownership of each queue, record by record: the owner after a record, and the previous owner that the record names.

In a *chain* of records none is missing. An *epoch* is a part of a chain: from its start or an `owners` record, which
lists the owners of all queues, up to the next one (`rota.pipeline.history.ordering`).

A *statement* is what one `handover` or `owners` record says about a queue. All queues of which a record says the same
share one statement, so a group of ten thousand queues, listed every hour, takes one reference for each queue and hour.

A *holding* is the period of one queue's owner that a statement begins. It ends at the queue's next record in the same
epoch; the last holding of an epoch ends with the epoch. Holdings are computed queue by queue, and not kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from rota.model import Queue
from rota.pipeline.history.ordering import AssignmentRecord, Entry, Gaps, order_records
from rota.ranges import RangesByTopic, parse_ids
from rota.records import HandoverRecord, OwnersRecord

GRANT_ACTS = ("Grant", "Force")


class Phase(StrEnum):
    """What a record says about a queue's owner."""

    OWNED = "Owned"
    RELEASING = "Releasing"  # revoked, and not granted yet: the owner may still consume it
    UNOWNED = "Unowned"


class Party(NamedTuple):
    """A member as a record names it; without name and uid: no member."""

    name: str | None
    uid: str | None


NO_PARTY = Party(None, None)


@dataclass(slots=True, eq=False)
class Statement:
    """What a record says about some queues."""

    entry: Entry
    named_owner: Party  # the previous owner that the record names
    owner: Party  # from this record on
    phase: Phase
    handover: HandoverRecord | None = None  # None: the record is an `owners` record


@dataclass(slots=True, eq=False)
class Holding:
    """A queue's owner from `since` until `until`, by one record."""

    statement: Statement
    previous: Statement | None  # of the queue's previous holding
    contradicts: bool  # whether the record names another previous owner than the earlier records
    revoked_at: datetime | None  # time of the queue's last revoke in the chain before the record; None: no revoke
    next: "Holding | None" = None  # the queue's next holding
    end: datetime | None = None  # None: no later record changes the owner
    certain_until: datetime | None = None  # see `_set_end`; None: the owner is certain up to `end`

    @property
    def since(self) -> datetime:
        """The time of the record."""
        return self.statement.entry.at

    @property
    def until(self) -> datetime | None:
        """The end of the time in which the owner is certain; None: the owner still owns the queue."""
        return self.certain_until or self.end

    @property
    def is_last_in_epoch(self) -> bool:
        """Whether the queue's next record is of another epoch, or there is none."""
        return self.next is None or self.next.statement.entry.epoch != self.statement.entry.epoch


class OwnershipAccount(NamedTuple):
    """A group's records in order, and the statements about each queue: the input of audit and measures."""

    entries: Sequence[Entry]
    statements: Mapping[Queue, Sequence[Statement]]

    def holdings(self) -> Iterator[tuple[Queue, list[Holding]]]:
        """Yield each queue's holdings in order."""
        for queue, statements in self.statements.items():
            yield queue, compute_holdings(statements)


def build_account(records: Iterable[AssignmentRecord], gaps: Gaps) -> OwnershipAccount:
    """Return the account of one group."""
    entries = order_records(records, gaps)
    by_queue: dict[Queue, list[Statement]] = {}
    for _, same_place in groupby(entries, key=lambda entry: entry.order):
        statements = list(chain.from_iterable(map(_statements_of, same_place)))
        # A faulty `owners` record may list a queue for two pods: sort by uid, so that the result is always the same.
        statements.sort(key=lambda pair: pair[0].owner.uid or "")
        for statement, ranges in statements:
            for queue in _queues_in(ranges):
                by_queue.setdefault(queue, []).append(statement)
    return OwnershipAccount(entries, by_queue)


def compute_holdings(statements: Sequence[Statement]) -> list[Holding]:
    """Return one queue's holdings, from what its records say in order."""
    holdings: list[Holding] = []
    previous: Statement | None = None
    revoked_at: datetime | None = None
    for statement in statements:
        if previous and previous.entry.chain != statement.entry.chain:
            revoked_at = None
        holdings.append(Holding(statement, previous, _contradicts_earlier(statement, previous), revoked_at))
        if statement.handover and statement.handover.act == "Revoke":
            revoked_at = statement.entry.at
        previous = statement
    for holding, following in pairwise(holdings):
        holding.next = following
    for holding in holdings:
        _set_end(holding)
    return holdings


def _statements_of(entry: Entry) -> Iterator[tuple[Statement, RangesByTopic]]:
    """Yield what an entry says, each time with the queues that it is about."""
    match entry.record:
        case HandoverRecord() as record:
            named = Party(record.holder, record.holder_uid)
            yield Statement(entry, named, _owner_after(record), _phase_after(record), record), record.queues
        case OwnersRecord() as record:  # names no previous owner: the owner counts as that, too
            for name, member in record.members.items():
                owner = Party(name, member.uid)
                yield Statement(entry, owner, owner, Phase.OWNED), member.queues
            for release in record.releasing:
                owner = Party(release.holder, release.holder_uid)
                yield Statement(entry, owner, owner, Phase.RELEASING), release.queues
            yield Statement(entry, NO_PARTY, NO_PARTY, Phase.UNOWNED), record.unowned


def _owner_after(record: HandoverRecord) -> Party:
    if record.act == "Drop":
        return NO_PARTY
    if record.act in GRANT_ACTS:
        return Party(record.to, record.to_uid)
    if record.act == "Return":  # gives a revoked queue back to its owner; the record may lack `to`
        return Party(record.to or record.holder, record.to_uid or record.holder_uid)
    return Party(record.holder, record.holder_uid)  # a revoked queue stays with its previous owner


def _phase_after(record: HandoverRecord) -> Phase:
    if record.act == "Drop":
        return Phase.UNOWNED
    return Phase.RELEASING if record.act == "Revoke" else Phase.OWNED


def count_queues(ranges: RangesByTopic) -> int:
    """Return the number of queues that are written as ranges."""
    count = 0
    for brokers in ranges.values():
        count += sum(map(len, map(_parse_ids, brokers.values())))
    return count


def _queues_in(ranges: RangesByTopic) -> Iterator[Queue]:
    for topic, brokers in ranges.items():
        for broker, ids in brokers.items():
            for number in _parse_ids(ids):
                yield Queue(topic, broker, number)


@lru_cache(maxsize=4096)  # `owners` records repeat the same texts every hour
def _parse_ids(ids: str) -> tuple[int, ...]:
    return tuple(parse_ids(ids))


def _contradicts_earlier(statement: Statement, previous: Statement | None) -> bool:
    """Return whether a record names another previous owner than earlier records; false if these do not tell the owner.

    Example, about queue 0; it had no owner before generation 6, since the second record leaves it out:

        owners 5   m1: 0     owners_record_count 1
        owners 5   m1: -     owners_record_count 2
        grant 6    to m2     owners_record_count 2, previous.owners_record_count 1; a grant from m1 would contradict
    """
    entry = statement.entry
    # Without the record of this statement, if that is an `owners` record.
    owners_records_before = entry.owners_record_count - entry.is_owners
    known_uid: str | None = None
    if previous and previous.entry.chain == entry.chain:
        is_left_out = previous.entry.owners_record_count < owners_records_before
        known_uid = None if is_left_out else previous.owner.uid
    elif not entry.owners_known_before:  # no earlier record of the chain tells the queue's owner
        return False
    return known_uid != statement.named_owner.uid


def _set_end(holding: Holding) -> None:
    """Set when the holding ends, and when its owner becomes uncertain because a later record contradicts it.

    The contradicting record is the queue's next one, or an `owners` record that leaves the queue out. The journal lacks
    the change of owner before it, which the next plan may have made: the owner is certain only until that plan.
    """
    entry = holding.statement.entry
    following = holding.next
    contradicted_at: datetime | None = None
    if following and not holding.is_last_in_epoch:
        holding.end = following.since
    elif entry.epoch_end:
        holding.end = entry.epoch_end.at
    if _is_left_out_next(holding):
        contradicted_at = holding.end
    elif following and _is_contradicted_by(holding, following):
        contradicted_at = following.since
    if contradicted_at:
        holding.certain_until = min(contradicted_at, entry.next_plan_at or contradicted_at)


def _is_listed_next(holding: Holding) -> bool:
    """Return whether the `owners` record that ends the holding's epoch lists the queue."""
    following = holding.next
    return (
        following is not None
        and following.statement.entry.is_owners
        and following.statement.entry.epoch == holding.statement.entry.epoch + 1
    )


def _is_left_out_next(holding: Holding) -> bool:
    """Return whether the queue has an owner, and the `owners` record that ends the epoch leaves the queue out.

    Example: grant 7 to m2, then `owners` 8 without the queue: a record by which m2 lost it is missing.
    """
    border = holding.statement.entry.epoch_end
    ends_with_owners = border is not None and border.is_owners and not border.is_break
    has_owner = holding.statement.owner.uid is not None
    return holding.is_last_in_epoch and ends_with_owners and not _is_listed_next(holding) and has_owner


def _is_contradicted_by(holding: Holding, following: Holding) -> bool:
    """Return whether the queue's next record, in this epoch or at its end, names another previous owner.

    Example: grant 7 to m2, then `owners` 8 with the queue at m1. The audit reports two other cases as TwoOwners: an
    act Grant from another owner, and an `owners` record that lists the queue twice.
    """
    # Each `owners` record starts an epoch, so two statements in the same epoch are of the same record.
    is_listed_twice = following.statement.entry.is_owners and not holding.is_last_in_epoch
    is_grant = following.statement.handover is not None and following.statement.handover.act == "Grant"
    is_adjacent = not holding.is_last_in_epoch or _is_listed_next(holding)
    is_same_chain = following.statement.entry.chain == holding.statement.entry.chain
    return is_adjacent and is_same_chain and following.contradicts and not is_grant and not is_listed_twice
