"""Makes the journal records that plans do not contain: obeyed grants, ended rebalances, redeliveries, and ownership.

A group's full ownership is recorded when an operator starts to record the group, once an hour, and after each break in
the generations.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rota.documents import Assignment
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.telemetry.rebalances import CompletedRebalance, RebalanceChange
from rota.model import Queue
from rota.planner import Snapshot, owners_record
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.redelivery import ReaderProcess, Redelivery, RedeliveryCause
from rota.timestamps import format_time, parse_time

JournalRecord = Mapping[str, Any]
HOUR_CHARACTERS = len("2026-11-21T08")


class _LastOwnership(NamedTuple):
    hour: str
    generation: int


class JournalRecorder:
    """Makes the records of groups, and remembers when each group's ownership was last recorded."""

    def __init__(self) -> None:
        self._last_ownership: dict[str, _LastOwnership] = {}

    def forget_groups(self, is_known: Callable[[str], bool]) -> None:
        """Forget groups that were deleted, or that another operator records."""
        self._last_ownership = {group: entry for group, entry in self._last_ownership.items() if is_known(group)}

    def build_records(
        self, result: ReconcileResult, change: RebalanceChange, now: float, snapshot: Callable[[], Snapshot]
    ) -> Iterator[JournalRecord]:
        """Yield the records of a group's reconcile; `now` is the time of day."""
        group = result.group.namespaced_name
        at = format_time(now)
        yield from _obeyed_records(group, at, change)
        if change.completed and (record := _rebalance_record(group, at, change.completed)):
            yield record
        document = result.group.stored_assignment.document
        spec = result.group.resolved_spec.spec
        if document and spec and self._is_ownership_due(group, at[:HOUR_CHARACTERS], document):
            yield owners_record(snapshot(), result.plan, document, spec, now)

    def _is_ownership_due(self, group: str, hour: str, document: Assignment) -> bool:
        last = self._last_ownership.get(group)
        self._last_ownership[group] = _LastOwnership(hour, document.generation)
        return last is None or last.hour != hour or _is_generation_gap(last.generation, document)


def _is_generation_gap(last_generation: int, document: Assignment) -> bool:
    """Whether plan records do not lead from the last recorded generation to this document."""
    if document.generation == last_generation:
        return False
    return document.generation != last_generation + 1 or document.barrier == document.generation


def _obeyed_records(group: str, at: str, change: RebalanceChange) -> Iterator[JournalRecord]:
    queues_by_member: defaultdict[tuple[int, str, str], list[Queue]] = defaultdict(list)
    for handover in change.handovers:
        queues_by_member[handover.generation, handover.next_owner.name, handover.next_owner.uid].append(handover.queue)
    for (generation, member, uid), queues in sorted(queues_by_member.items()):
        ranges = to_ranges(queues)
        yield journal_record("obeyed", group, at, generation=generation, member=member, uid=uid, queues=ranges)


def _rebalance_record(group: str, at: str, completed: CompletedRebalance) -> JournalRecord | None:
    """Return the record of a completed rebalance; None if its start or duration is not known."""
    last = completed.rebalance
    if parse_time(last.at) is None or last.seconds is None:  # a user may have edited the status
        return None
    row = {"reason": last.reason, "outcome": last.outcome, "began": last.at, "moved": last.moved, "forced": last.forced}
    return journal_record("rebalance", group, at, generation=last.generation, seconds=last.seconds, **row)


def redelivered_records(group: str, now: float, entries: Iterable[Redelivery]) -> Iterator[JournalRecord]:
    """Yield one record per cause and pair of members for redelivered messages; `now` is the time of day."""
    by_origin: defaultdict[tuple[RedeliveryCause, bool, ReaderProcess, ReaderProcess], list[Redelivery]] = defaultdict(
        list
    )
    for entry in entries:
        by_origin[entry.cause, entry.is_estimate, entry.previous_reader, entry.next_reader].append(entry)
    for (cause, is_estimate, reader, successor), same_origin in sorted(by_origin.items()):
        yield journal_record(
            "redelivered",
            group,
            format_time(now),
            cause=str(cause),
            messages=sum(entry.messages for entry in same_origin),
            estimate=is_estimate,
            **{"from": reader.member, "fromUid": reader.uid, "to": successor.member, "toUid": successor.uid},
            queues=to_ranges(entry.queue for entry in same_origin),
        )
