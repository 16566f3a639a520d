"""Hourly measures of a group, from its records, the owners of its queues and its samples; docs/pipeline.md defines all.

A period is split at full hours; a period that has not ended is cut at the group's last record. Each function adds its
measures to the hours. The 99th percentile of an hour is the smallest of its values that at least 99 % of its values do
not exceed.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from rota.lag import LagState
from rota.lag_columns import LAG_UNKNOWN
from rota.pipeline.history.audit import (
    Interval,
    ObeyedTimes,
    UnownedPeriod,
    UnownedTimes,
    intervals,
    unowned_periods,
)
from rota.pipeline.history.group_records import MICROS_PER_HOUR, GroupRecords, to_time
from rota.pipeline.history.hours import hour_of, split_by_hour, touched_hours
from rota.pipeline.history.lag_states import GroupNotes, RecordTotals, judge_samples
from rota.pipeline.history.ordering import Entry, Gaps, sharing_uids
from rota.pipeline.history.ownership import GRANT_ACTS, OwnershipAccount, Phase, build_account, count_queues
from rota.pipeline.history.samples import Places, Samples
from rota.records import (
    HandoverRecord,
    MembershipRecord,
    ObeyedRecord,
    OwnersRecord,
    RebalanceRecord,
    RedeliveredRecord,
)

_SETTLED_STATES = ("Ready", "Unready", "Ended")  # the member reports, or has ended


@dataclass(slots=True)
class HourMeasures:
    """Measures of one hour."""

    rebalances: Counter[str] = field(default_factory=Counter)  # by reason
    rebalance_seconds: list[float] = field(default_factory=list)
    moved_queues: int = 0
    forced_queues: int = 0
    handover_seconds: list[float] = field(default_factory=list)
    unowned_queue_seconds: float = 0.0
    contested_queue_seconds: float = 0.0
    redelivered: int = 0
    # Of times in which all owners are known; the first two only of those in which members own queues.
    imbalance_seconds: float = 0.0  # sum of imbalance times seconds
    balance_seconds: float = 0.0  # sum of seconds
    idle_member_seconds: float | None = None  # None: no owners were known
    lags: list[int] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    lag_state_seconds: defaultdict[LagState, float] = field(default_factory=lambda: defaultdict(float))
    sampled_seconds: float = 0.0
    complete: bool = True  # whether no record of the hour is missing

    def to_row(self) -> dict[str, Any]:
        """Return the measures by the names of schemas.ROLLUP."""
        minutes = {str(state): seconds / 60 for state, seconds in self.lag_state_seconds.items() if seconds > 0}
        idle_seconds = self.idle_member_seconds
        return {
            "rebalances": dict(self.rebalances),
            **_percentiles("rebalance_seconds", self.rebalance_seconds),
            "moved_queues": self.moved_queues,
            "forced_queues": self.forced_queues,
            "handovers": len(self.handover_seconds),
            **_percentiles("handover_seconds", self.handover_seconds),
            "unowned_queue_seconds": self.unowned_queue_seconds,
            "contested_queue_seconds": self.contested_queue_seconds,
            "redelivered": self.redelivered,
            "imbalance": self.imbalance_seconds / self.balance_seconds if self.balance_seconds else None,
            "idle_member_hours": None if idle_seconds is None else idle_seconds / 3600,
            **_percentiles("lag", self.lags),
            "lag_max": max(self.lags, default=None),
            **_percentiles("delay", self.delays),
            "verdict_minutes": minutes,  # queue-minutes; the journal calls a lag state `verdict`
            "minutes_seen": self.sampled_seconds / 60,
            "complete": self.complete,
        }


Hours = defaultdict[datetime, HourMeasures]


class _OwnershipSummary(NamedTuple):
    """What the measures need of the owners of all queues."""

    handovers: list[Interval]  # intervals that began with a handover of known duration
    unowned: list[UnownedPeriod]
    count_changes: Counter[tuple[datetime, str]]  # change of a member's number of queues, by time and the member's uid


def roll_up(
    records: GroupRecords, gaps: Gaps, samples: Iterable[Samples], places: Places
) -> Iterator[tuple[datetime, HourMeasures]]:
    """Yield the measures of each hour with any record of the group; the samples come in order of time."""
    account = build_account(records.assignments(), gaps)
    summary = _summarize_ownership(account, ObeyedTimes(records.of_kind(ObeyedRecord)))
    hours = Hours(HourMeasures)
    for totals in judge_samples(samples, places, GroupNotes(records.of_kind(OwnersRecord), summary.unowned)):
        records.add_state_times(totals.at)
        _add_offsets(hours, totals)
    _add_records(hours, records)
    if records.recorded_until:
        _add_unowned_seconds(hours, summary.unowned, UnownedTimes(account, records.recorded_until))
        _add_contested_seconds(hours, records, records.recorded_until)
        _add_balance(hours, account.entries, summary.count_changes, records.recorded_until)
        _mark_incomplete(hours, account.entries, records.recorded_until)
    for handover in summary.handovers:
        if handover.obeyed and handover.seconds is not None:
            hours[hour_of(handover.obeyed)].handover_seconds.append(handover.seconds)
    for hour in sorted(records.hours):
        hours[hour].complete &= hour not in gaps.hours
        yield hour, hours[hour]


def _summarize_ownership(account: OwnershipAccount, obeyed: ObeyedTimes) -> _OwnershipSummary:
    summary = _OwnershipSummary([], [], Counter())
    for queue, holdings in account.holdings():
        for interval in intervals(queue, holdings, obeyed):
            if interval.seconds is not None:  # the duration of the handover with which the interval began
                summary.handovers.append(interval)
        summary.unowned.extend(unowned_periods(queue, holdings))
        for holding in holdings:
            uid = holding.statement.owner.uid
            if uid is not None and holding.statement.phase is Phase.OWNED:
                summary.count_changes[holding.since, uid] += 1
                if holding.until:
                    summary.count_changes[holding.until, uid] -= 1
    return summary


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 99th percentile, under their names."""
    ordered = sorted(values)
    fractions = {f"{name}_p50": 0.5, f"{name}_p99": 0.99}
    if not ordered:
        return dict.fromkeys(fractions)
    return {key: float(ordered[ceil(fraction * len(ordered)) - 1]) for key, fraction in fractions.items()}


def _add_records(hours: Hours, records: GroupRecords) -> None:
    """Add the measures that are sums over single records."""
    _count_rebalances(hours, records.of_kind(RebalanceRecord))
    _count_moves(hours, records.of_kind(HandoverRecord))
    for record in records.of_kind(RedeliveredRecord):
        hours[hour_of(record.at)].redelivered += record.messages


def _add_offsets(hours: Hours, totals: RecordTotals) -> None:
    """Add the measures of records of offsets, which are in order of time."""
    starts_of_hours, first_rows = np.unique(totals.at // MICROS_PER_HOUR * MICROS_PER_HOUR, return_index=True)
    for start, first_row, end_row in zip_longest(
        starts_of_hours.tolist(), first_rows.tolist(), first_rows[1:].tolist()
    ):
        rows = slice(first_row, end_row)  # of the last hour, `end_row` is None
        hour = hours[to_time(start)]
        lags = totals.lag[rows]
        delays = totals.delay[rows]
        hour.lags += lags[lags != LAG_UNKNOWN].tolist()
        hour.delays += delays[~np.isnan(delays)].tolist()
        hour.redelivered += int(totals.rewound[rows].sum() + totals.retries[rows].sum())
        hour.sampled_seconds += float(totals.seconds[rows].sum())
        for state, queues in totals.by_lag_state.items():
            hour.lag_state_seconds[state] += float(queues[rows] @ totals.seconds[rows])


def _count_rebalances(hours: Hours, rebalances: Iterable[RebalanceRecord]) -> None:
    """Count only the first record with each start (`began`): a new leader may record the end of a rebalance again."""
    first_records: dict[datetime, RebalanceRecord] = {}
    for record in sorted(rebalances, key=lambda record: (record.at, record.reason, record.seconds)):
        first_records.setdefault(record.began, record)
    for record in first_records.values():
        hour = hours[hour_of(record.at)]
        hour.rebalances[record.reason] += 1
        hour.rebalance_seconds.append(record.seconds)


def _count_moves(hours: Hours, handovers: Iterable[HandoverRecord]) -> None:
    """Count queues that were granted to another member than their previous owner, as `rota_queues_moved_total` does."""
    for record in handovers:
        if record.act in GRANT_ACTS:
            count = count_queues(record.queues)
            hour = hours[hour_of(record.at)]
            if record.holder is not None and (record.holder, record.holder_uid) != (record.to, record.to_uid):
                hour.moved_queues += count
            if record.act == "Force":
                hour.forced_queues += count


def _add_unowned_seconds(hours: Hours, unowned: Iterable[UnownedPeriod], times: UnownedTimes) -> None:
    for period in unowned:
        for part in times.parts(period):
            for hour, seconds in split_by_hour(part.since, part.until):
                hours[hour].unowned_queue_seconds += seconds


def _add_contested_seconds(hours: Hours, records: GroupRecords, recorded_until: datetime) -> None:
    """Add the time in which two members may have consumed a forced queue.

    Once the previous owner has certainly stopped, the operator writes an assignment, which ends this time. No record
    marks that assignment, so the first later one counts in which the previous owner is absent, has ended or reports.
    """
    memberships = sorted(records.of_kind(MembershipRecord), key=lambda record: record.at)
    for grant in records.of_kind(HandoverRecord):
        if grant.act == "Force":
            first_later = bisect_left(memberships, grant.at, key=lambda record: record.at)
            later = memberships[first_later:]
            until = next((record.at for record in later if _ends_contest(record, grant)), recorded_until)
            for hour, seconds in split_by_hour(grant.at, until):
                hours[hour].contested_queue_seconds += seconds * count_queues(grant.queues)


def _ends_contest(membership: MembershipRecord, grant: HandoverRecord) -> bool:
    """Return whether the previous owner of forced queues has certainly stopped in a later assignment."""
    if membership.generation <= grant.generation:
        return False
    # Without a previous owner (holder_uid is None) no member matches: the first later assignment ends the time.
    for member in membership.members.values():
        if member.uid == grant.holder_uid and member.standing not in _SETTLED_STATES:
            return False
    return True


class _BalancePeriod(NamedTuple):
    """A period in which the members that share the queues did not change, with all owners known at its start."""

    since: datetime
    until: datetime
    uids: list[str]  # uids of the members that share the queues


def _balance_periods(entries: Iterable[Entry], recorded_until: datetime) -> Iterator[_BalancePeriod]:
    listings = [(entry, entry.record) for entry in entries if isinstance(entry.record, MembershipRecord | OwnersRecord)]
    for (entry, record), following in zip_longest(listings, listings[1:]):
        until = following[0].at if following else recorded_until
        if entry.epoch_end and entry.epoch_end.is_break:
            until = min(until, entry.epoch_end.at)
        if entry.owners_known_after and entry.model != "Broadcasting" and entry.at < until:
            yield _BalancePeriod(entry.at, until, sharing_uids(record))


def _add_balance(
    hours: Hours, entries: Iterable[Entry], changes: Counter[tuple[datetime, str]], recorded_until: datetime
) -> None:
    """Add the time-weighted imbalance of queues among sharing members, and the time of members without a queue."""
    queue_counts: Counter[str] = Counter()  # by uid
    pending = sorted(changes, reverse=True)  # changes not applied yet, the next one last
    for since, until, uids in _balance_periods(entries, recorded_until):
        while pending and pending[-1][0] <= since:
            at, uid = pending.pop()
            queue_counts[uid] += changes[at, uid]
        counts = [queue_counts[uid] for uid in uids]
        total = sum(counts)
        if not counts:
            continue
        for hour, seconds in split_by_hour(since, until):
            measures = hours[hour]
            measures.idle_member_seconds = (measures.idle_member_seconds or 0.0) + counts.count(0) * seconds
            if total > 0:
                imbalance = max(counts) * len(counts) / total  # the highest count over the mean
                measures.imbalance_seconds += imbalance * seconds
                measures.balance_seconds += seconds


def _mark_incomplete(hours: Hours, entries: Iterable[Entry], recorded_until: datetime) -> None:
    """Mark the hours with missing records: from a break until the next record of all owners."""
    for entry in entries:
        if entry.border and entry.border.is_break:
            until = entry.next_owners_at or max(recorded_until, entry.at)
            for hour in touched_hours(entry.border.at, until):
                hours[hour].complete = False
