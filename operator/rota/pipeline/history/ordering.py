"""Order of a group's assignments in the journal, and the breaks in it.

Within a *life*, from a group's creation to its deletion, assignments are ordered by generation, regardless of the
writers' clocks. The records of an assignment list only the queues that it changes. So after a *break*, where records
are missing, a queue's owner is unknown until the next record about the queue. An `owners` record lists the owners of
all queues, and replaces all that was known before: a queue that it leaves out has no owner.

    records  plan 1  plan 2  owners 2  plan 3     plan 5  owners 5  plan 6     plan 1
    life     1 -----------------------------------------------------------     2 -----   deleted and recreated
    chain    1 -----------------------------     2 -----------------------     3 -----   a break: plan 4 is missing
    epoch    1 ------------  2 -------------     3 ----  4 ---------------     5 -----   also from each `owners` record

Within a *chain* no record is missing. An *epoch* starts at a *border*: a life's first plan, a break or an `owners`
record. Within an epoch the last record about a queue determines its owner. The numbers only distinguish lives, chains
and epochs.

A *gap* record says that a writer dropped records with times from `since` to `at`; it does not say of which groups.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import NamedTuple

from rota.pipeline.history.hours import touched_hours
from rota.records import HandoverRecord, MembershipRecord, OwnersRecord, PlanRecord, Present

# Difference of two hosts' clocks. A lower generation, except 1, starts a new life only after a longer time.
MAX_CLOCK_SKEW_SECONDS = 60.0
SHARING_STATES = ("Ready", "Unready")  # member states in which a member shares the queues
DEFAULT_MODE = "Cooperative"  # handover mode of a policy that names none

AssignmentRecord = MembershipRecord | PlanRecord | HandoverRecord | OwnersRecord


class RecordStep(IntEnum):
    """The order of records within a generation. The markers are no records: they say that records may be missing."""

    MEMBERSHIP = 0
    PLAN = 1
    GAP_MARKER = 2  # after it, handovers of its generation may be missing
    HANDOVER = 3
    OWNERS = 4
    END_MARKER = 5  # after it, any records after the group's last one may be missing


_STEPS: dict[type[AssignmentRecord], RecordStep] = {
    MembershipRecord: RecordStep.MEMBERSHIP,
    PlanRecord: RecordStep.PLAN,
    HandoverRecord: RecordStep.HANDOVER,
    OwnersRecord: RecordStep.OWNERS,
}


class Gap(NamedTuple):
    """A period of which a writer dropped records. `at` is before `since` if the clock was set back meanwhile."""

    since: datetime
    at: datetime

    @property
    def start(self) -> datetime:
        """The earlier time."""
        return min(self)

    @property
    def end(self) -> datetime:
        """The later time."""
        return max(self)


class Gaps:
    """All gaps of a journal: each may hide records of any group."""

    def __init__(self, gaps: Iterable[Gap] = ()) -> None:
        self._gaps = list(gaps)
        self._spans = _merge_spans(sorted((gap.start, gap.end) for gap in self._gaps))
        self.hours = frozenset(hour for gap in self._gaps for hour in touched_hours(gap.since, gap.at))

    def cover(self, at: datetime) -> bool:
        """Return whether a record of that time may be missing."""
        index = bisect_right(self._spans, at, key=lambda span: span[0]) - 1
        return index >= 0 and at <= self._spans[index][1]

    def earliest_start(self, *, ending_since: datetime) -> datetime | None:
        """Return the earliest start of the gaps that end at a time or later; None: there is no such gap."""
        return min((gap.start for gap in self._gaps if gap.end >= ending_since), default=None)


def _merge_spans(spans: Iterable[tuple[datetime, datetime]]) -> list[tuple[datetime, datetime]]:
    """Return spans in order without overlaps, from spans in order of their start."""
    merged: list[tuple[datetime, datetime]] = []
    for since, until in spans:
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(until, merged[-1][1]))
        else:
            merged.append((since, until))
    return merged


class Border(NamedTuple):
    """The start of an epoch."""

    at: datetime  # start of the epoch; at a break, the time from which on records may be missing
    is_break: bool
    is_owners: bool


@dataclass(slots=True, eq=False)
class Entry:
    """A record at its place in the history of its group, or a marker where records may be missing."""

    step: RecordStep
    generation: int
    at: datetime  # time of the record, raised to the previous entry's if that is later: clocks of hosts differ
    record: AssignmentRecord | None = None  # None: a marker
    # The numbers of the life, chain and epoch.
    life: int = 0
    chain: int = 0
    epoch: int = 0
    is_first_plan: bool = False
    border: Border | None = None  # None: the entry starts no epoch
    epoch_end: Border | None = None  # the border at which the epoch ends; None: the group's last epoch
    # Whether the owners of all queues are known before and after the record.
    owners_known_before: bool = False
    owners_known_after: bool = False
    owners_record_count: int = 0  # number of `owners` records so far
    next_owners_at: datetime | None = None  # time of the next `owners` record; None: there is none
    next_plan_at: datetime | None = None  # time of the next plan; None: there is none
    model: str | None = None  # consumption model; None: unknown until the first `owners` record
    modes: frozenset[str] = frozenset()  # handover modes, of which one was in force; see `_set_fields_from_later`

    @property
    def is_owners(self) -> bool:
        """Whether the record lists the owners of all queues."""
        return self.step is RecordStep.OWNERS

    @property
    def is_break(self) -> bool:
        """Whether records are missing before the entry; of a marker, whether they may be missing after it."""
        return self.border is not None and self.border.is_break

    @property
    def starts_chain(self) -> bool:
        """Whether the entry is a life's first plan, or comes after a break."""
        return self.is_first_plan or self.is_break

    @property
    def order(self) -> tuple[int, int, int, datetime]:
        """The place among the entries of the group."""
        return self.life, self.generation, self.step, self.at


class AssignmentPeriod(NamedTuple):
    """The time during which an assignment was in force."""

    since: datetime
    until: datetime | None  # None: it is still in force
    members: int  # number of members that share the queues
    may_have_queues: bool  # whether the group has queues; True: also if not known


def order_records(records: Iterable[AssignmentRecord], gaps: Gaps) -> list[Entry]:
    """Return the records of one group in order, and markers where a gap may hide others."""
    entries = [Entry(_STEPS[type(record)], record.generation, record.at, record) for record in records]
    _number_lives(entries)
    entries += _gap_markers(entries, gaps)
    entries.sort(key=lambda entry: entry.order)
    _mark_borders(entries)
    _set_fields_from_earlier(entries)
    _set_fields_from_later(entries)
    return entries


def sharing_uids(record: MembershipRecord | OwnersRecord) -> list[str]:
    """Return the uids of the members that share the queues."""
    members: Iterable[Present] = record.members.values()  # type: ignore[assignment]  # `owners` has these fields, too
    # `standing` is the member state; names in the journal do not change.
    return [member.uid for member in members if member.standing in SHARING_STATES]


def assignment_periods(entries: Iterable[Entry]) -> list[AssignmentPeriod]:
    """Return the assignments over time, with their numbers of members."""
    assignments = [entry for entry in entries if entry.step in {RecordStep.PLAN, RecordStep.OWNERS}]
    periods: list[AssignmentPeriod] = []
    for entry, following in zip_longest(assignments, assignments[1:]):
        until = following.at if following else None
        match entry.record:
            case PlanRecord(members=members, queues=queues):
                periods.append(AssignmentPeriod(entry.at, until, members, queues > 0))
            case OwnersRecord() as record:  # it has no number of queues
                periods.append(AssignmentPeriod(entry.at, until, len(sharing_uids(record)), may_have_queues=True))
    return periods


def _number_lives(entries: Iterable[Entry]) -> None:
    """Number the lives of a group that was deleted and recreated."""
    by_time = sorted(entries, key=lambda entry: (entry.at, entry.generation, entry.step))
    for previous, entry in pairwise(by_time):
        entry.life = previous.life + _starts_life(previous, entry)


def _starts_life(previous: Entry, entry: Entry) -> bool:
    """Return whether the group was recreated between two entries, which are adjacent in time."""
    if entry.generation == 1:
        # A life begins with the `membership` of generation 1: if an entry precedes it, the group was recreated.
        return previous.generation > 1 or entry.step is RecordStep.MEMBERSHIP
    # A lower generation much later: the journal lacks the first generations of the new life.
    waited_seconds = (entry.at - previous.at).total_seconds()
    return entry.generation < previous.generation and waited_seconds > MAX_CLOCK_SKEW_SECONDS


def _gap_markers(entries: Sequence[Entry], gaps: Gaps) -> Iterator[Entry]:
    """Yield a marker where a gap may hide records although no generation is missing; `_mark_borders` makes it a break.

    A plan and its handovers have one time. So a plan within a gap gets a marker after it, since its handovers may be
    missing; a plan outside of gaps needs none. A missing plan shows as a missing generation.
    """
    # Example: plan 6 at 12:02, a gap from 12:01 to 12:03, plan 7 at 12:04. Handovers of plan 6 may be missing, so the
    # marker comes directly after plan 6, before the handovers that are there. No handover of plan 7 is missing.
    for entry in entries:
        if entry.step is RecordStep.PLAN and gaps.cover(entry.at):
            yield Entry(RecordStep.GAP_MARKER, entry.generation, entry.at, life=entry.life)
    # Example: plan 6 at 12:00, a gap from 12:01 to 12:03, nothing more of the group: the marker is at 12:01.
    last_at = max((entry.at for entry in entries), default=None)
    since = gaps.earliest_start(ending_since=last_at) if last_at else None
    if last_at and since:
        last = max(entries, key=attrgetter("life", "generation"))
        yield Entry(RecordStep.END_MARKER, last.generation, max(last_at, since), life=last.life)


def _mark_borders(entries: Iterable[Entry]) -> None:
    """Mark borders: first plans, breaks and `owners` records. Raise times to those of earlier entries."""
    latest: datetime | None = None
    previous: Entry | None = None  # the last plan, handover or `owners` record
    for entry in entries:
        latest = entry.at = max(entry.at, latest or entry.at)
        is_new_life = previous is None or previous.life != entry.life
        entry.is_first_plan = entry.step is RecordStep.PLAN and entry.generation == 1 and is_new_life
        if not entry.record:
            entry.border = Border(entry.at, is_break=True, is_owners=False)
        elif previous and not entry.is_first_plan and not _continues(previous, entry):
            entry.border = Border(previous.at, is_break=True, is_owners=entry.is_owners)
        elif entry.is_first_plan or entry.is_owners:
            entry.border = Border(entry.at, is_break=False, is_owners=entry.is_owners)
        # A `membership` record does not count, because it precedes its generation's plan, and names no queue.
        if entry.step in {RecordStep.PLAN, RecordStep.HANDOVER, RecordStep.OWNERS}:
            previous = entry


def _continues(previous: Entry, entry: Entry) -> bool:
    """Return whether no record is missing between two: they are of the same assignment, or of two successive ones."""
    if entry.step is RecordStep.MEMBERSHIP:  # the plan after it shows whether records are missing
        return True
    if previous.life != entry.life:
        return False
    if isinstance(entry.record, PlanRecord):
        # A lost assignment is rebuilt from the members' reports, so the owners may differ from the lost ones.
        return entry.generation == previous.generation + 1 and entry.record.reason != "AssignmentLost"
    return entry.generation == previous.generation


def _set_fields_from_earlier(entries: Iterable[Entry]) -> None:
    """Number epochs and chains; set the fields of each entry that depend on earlier records."""
    chain = 0
    epoch = 0
    owners_record_count = 0
    owners_known = False
    modes: frozenset[str] = frozenset()
    model: str | None = None
    for entry in entries:
        epoch += entry.border is not None
        chain += entry.starts_chain
        owners_record_count += entry.is_owners
        if entry.starts_chain:
            owners_known = False
        entry.owners_known_before = owners_known
        # A life's first plan assigns its first owners: all owners are known after it, but not before it.
        owners_known = owners_known or entry.is_first_plan or entry.is_owners
        entry.owners_known_after = owners_known
        if isinstance(entry.record, OwnersRecord):
            modes = frozenset({_handover_mode(entry.record)})
            model = entry.record.model
        entry.chain = chain
        entry.epoch = epoch
        entry.owners_record_count = owners_record_count
        entry.modes = modes
        entry.model = model


def _set_fields_from_later(entries: Sequence[Entry]) -> None:
    """Set the fields of each entry that depend on later records.

    Only `owners` records name the handover mode. So the mode at an entry is that of the previous or of the next
    `owners` record.
    """
    epoch_end: Border | None = None
    owners: Entry | None = None
    plan_at: datetime | None = None
    next_modes: frozenset[str] = frozenset()
    for entry in reversed(entries):
        own_modes = entry.modes
        entry.epoch_end = epoch_end
        entry.next_owners_at = owners.at if owners else None
        entry.next_plan_at = plan_at
        entry.modes = own_modes | next_modes
        epoch_end = entry.border or epoch_end
        if entry.is_owners:
            owners = entry
            next_modes = own_modes
        if entry.step is RecordStep.PLAN:
            plan_at = entry.at


def _handover_mode(record: OwnersRecord) -> str:
    handover = record.rules.get("handover")
    mode = handover.get("mode") if isinstance(handover, dict) else None
    return str(mode or DEFAULT_MODE)
