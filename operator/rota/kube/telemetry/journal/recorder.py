"""Makes the journal records that plans do not contain: obeyed grants, ended rebalances, redeliveries, and ownership.

The owners of all queues of a group are recorded when an operator starts to record the group, once an hour, and when a
generation is missing in the records or was rebuilt, so that its owners do not follow from earlier records.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rota.documents import Assignment
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.telemetry.journal.journal_writer import JournalRecord
from rota.kube.telemetry.rebalances import CompletedRebalance, RebalanceChange
from rota.model import Queue
from rota.planner import Snapshot, owners_record
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.redelivery import ReaderProcess, Redelivery, RedeliveryCause
from rota.timestamps import format_time, parse_time

HOUR_CHARACTERS = len("2026-11-21T08")  # of a timestamp


class _HourAndGeneration(NamedTuple):
    hour: str  # the UTC hour of a group's last reconcile
    generation: int  # of the assignment at this reconcile


class _RedeliveryOrigin(NamedTuple):
    cause: RedeliveryCause
    is_estimate: bool
    previous_reader: ReaderProcess
    next_reader: ReaderProcess


class JournalRecorder:
    """Makes the records of groups, and remembers the hour and generation of each group's last reconcile."""

    def __init__(self) -> None:
        self._last_seen: dict[str, _HourAndGeneration] = {}

    def forget(self, group: str) -> None:
        """Forget a deleted group."""
        self._last_seen.pop(group, None)

    def build_records(
        self, result: ReconcileResult, change: RebalanceChange, now: float, snapshot: Callable[[], Snapshot]
    ) -> Iterator[JournalRecord]:
        """Yield the records of a reconcile; `now`: seconds since 1970; `snapshot`: called only to record all owners."""
        group = result.group.namespaced_name
        at = format_time(now)
        yield from _obeyed_records(group, at, change)
        record = _rebalance_record(group, at, change.completed) if change.completed else None
        if record:
            yield record
        document = result.group.stored_assignment.document
        spec = result.group.resolved_spec.spec
        if document and spec:
            hour = at[:HOUR_CHARACTERS]
            is_due = self._is_ownership_due(group, hour, document)
            self._last_seen[group] = _HourAndGeneration(hour, document.generation)
            if is_due:
                yield owners_record(snapshot(), result.plan, document, spec, now)

    def _is_ownership_due(self, group: str, hour: str, document: Assignment) -> bool:
        """Whether the group's full ownership must be recorded at this reconcile."""
        last = self._last_seen.get(group)
        return last is None or last.hour != hour or _is_generation_gap(last.generation, document)


def _is_generation_gap(last_generation: int, document: Assignment) -> bool:
    """Whether the records of plans since `last_generation` are not enough to derive the document's owners."""
    if document.generation == last_generation:
        return False
    # A document with a barrier of its own generation was rebuilt, so it does not follow from the previous owners.
    return document.generation != last_generation + 1 or document.barrier == document.generation


def _obeyed_records(group: str, at: str, change: RebalanceChange) -> Iterator[JournalRecord]:
    """Yield one record per grant's generation and member that was found to obey the grant."""
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
    """Yield records of redelivered messages, one per cause and pair of readers; `now` is in seconds since 1970.

    Estimated and exact numbers are in separate records.
    """
    by_origin: defaultdict[_RedeliveryOrigin, list[Redelivery]] = defaultdict(list)
    for entry in entries:
        origin = _RedeliveryOrigin(entry.cause, entry.is_estimate, entry.previous_reader, entry.next_reader)
        by_origin[origin].append(entry)
    for origin, same_origin in sorted(by_origin.items()):
        from_reader = {"from": origin.previous_reader.member, "fromUid": origin.previous_reader.uid}
        to_reader = {"to": origin.next_reader.member, "toUid": origin.next_reader.uid}
        yield journal_record(
            "redelivered",
            group,
            format_time(now),
            cause=str(origin.cause),
            messages=sum(entry.messages for entry in same_origin),
            estimate=origin.is_estimate,
            **from_reader,
            **to_reader,
            queues=to_ranges(entry.queue for entry in same_origin),
        )
