"""Builds a member's full report, and the progress pages of its queues, from the state of its components."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Protocol

from msgspec import Struct
from msgspec.structs import asdict

from rota.model import Queue
from rota.ranges import to_ranges
from rota.reports import MAX_UNCOMMITTED_ENTRIES, FullReport, QueueState, QueueStatus, Report, Uncommitted
from rota.sidecar.member.member import Member
from rota.sidecar.member.queue_lifecycle import LeaseState
from rota.sidecar.member.window import QueueWindow
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.pull_status import PullStatus

PROGRESS_PAGE_QUEUES = 400  # less than 256 KiB, for names of any length

_STATE_BY_LEASE: dict[LeaseState, QueueState] = {
    LeaseState.WANTED: "starting",
    LeaseState.LOCKING: "starting",
    LeaseState.STARTING: "starting",
    LeaseState.STUCK: "stuck",
    LeaseState.DRAINING: "draining",
}


class ReportedReader(Protocol):
    """The properties of a queue's reader that reports need."""

    window: QueueWindow
    pull_status: PullStatus

    @property
    def reported_offset(self) -> int | None:
        """The committed offset, or a higher one that an unanswered or cancelled pull carries; None: unknown."""


class QueuesPage(Struct, frozen=True):
    """Progress of some of the member's queues; `next` is the index of the next page's first queue, if any."""

    queues: list[QueueStatus]
    next: int | None = None
    incarnation: str = ""  # of the sidecar's process; MemberStatus fills it in


class ReleasedQueues:
    """Recently released queues with delivered messages that are not committed."""

    def __init__(self) -> None:
        self._entries: dict[Queue, Uncommitted] = {}  # the latest last

    def add(self, queue: Queue, window: QueueWindow) -> None:
        """Add a released queue; the oldest entry is removed if there are too many."""
        self._entries.pop(queue, None)
        if entry := _uncommitted(queue, window):
            self._entries[queue] = entry
        if len(self._entries) > MAX_UNCOMMITTED_ENTRIES:
            del self._entries[next(iter(self._entries))]

    def entries_except(self, queues: Mapping[Queue, object]) -> Iterable[Uncommitted]:
        """Return the entries of all queues except these, the latest first."""
        return [entry for queue, entry in reversed(self._entries.items()) if queue not in queues]


def full_report(
    member_report: Report,
    problems: Problems,
    member: Member,
    readers: Mapping[Queue, ReportedReader],
    released_queues: ReleasedQueues,
) -> FullReport:
    """Return `member_report`, which has only persisted state that a restart cannot contradict, with state in memory.

    MemberStatus sets the other fields: `revision` (it also counts changes of problems, settings and consumers),
    `incarnation`, `settings`, and `consumers_changed` (how often brokers notified it of joining or leaving consumers).
    """
    states = Counter(_queue_state(queue, reader, member) for queue, reader in readers.items())
    del states[""]  # nothing to report; a Counter ignores a missing key
    entries = [*_uncommitted_entries(member, readers), *released_queues.entries_except(readers)]
    fields = asdict(member_report)
    fields |= {"troubles": problems.messages, "states": dict(states), "uncommitted": entries[:MAX_UNCOMMITTED_ENTRIES]}
    inflight = sum(reader.window.in_flight for reader in readers.values())
    return FullReport(**fields, inflight=inflight, stuck=to_ranges(member.stuck_queues))


def _queue_state(queue: Queue, reader: ReportedReader, member: Member) -> QueueState:
    """Return the state of a queue by its lease or, while it is Running, by its pulls; empty if it is read normally.

    A lease is the state of one queue at the member, from its assignment to its release.
    """
    lease = member.leases.get(queue)
    return _STATE_BY_LEASE.get(lease.state, reader.pull_status.obstacle) if lease else ""


def _uncommitted_entries(member: Member, readers: Mapping[Queue, ReportedReader]) -> list[Uncommitted]:
    """Return uncommitted offsets of queues that are being released, or have just been released."""
    entries: list[Uncommitted] = []
    for queue, reader in readers.items():
        lease = member.leases.get(queue)
        is_given_up = lease is None or lease.state is LeaseState.DRAINING
        if is_given_up and (entry := _uncommitted(queue, reader.window)):
            entries.append(entry)
    return entries


def _uncommitted(queue: Queue, window: QueueWindow) -> Uncommitted | None:
    """Return the offsets of the messages that the queue's next owner would deliver again; None if there are none.

    They were already given to the app, but their offset is not committed. An offset that an unanswered pull carries
    does not count here: the drain's commit decides whether the broker has it.
    """
    if window.max_sent_offset is None or not window.would_repeat:
        return None
    return Uncommitted(*queue, given=window.max_sent_offset, start=window.start_offset)


def queues_page(start: int, member: Member, readers: Mapping[Queue, ReportedReader], now: float) -> QueuesPage:
    """Return the progress of the member's queues from index `start` on, in the order in which they were assigned.

    `committed` includes an offset that an unanswered pull carries: the operator counts by `committed` which messages a
    crash of the member repeats (`rota.redelivery`), and usually the broker has stored that offset. If it has not, for
    example because it was killed, `committed` is too high until the next commit. A crash before that commit repeats
    more messages than the operator counts, but none is lost: the next reader starts at the broker's offset. The lag of
    Broadcasting groups, which the operator computes from `committed`, is not affected: their pulls carry no offset.
    """
    stop = start + PROGRESS_PAGE_QUEUES
    page = islice(readers.items(), start, stop)
    statuses = [_queue_status(queue, reader, member, now) for queue, reader in page]
    return QueuesPage(statuses, next=stop if stop < len(readers) else None)


def _queue_status(queue: Queue, reader: ReportedReader, member: Member, now: float) -> QueueStatus:
    window = reader.window
    lease = member.leases.get(queue)
    committed = reader.reported_offset if window.has_start_offset else None
    locked = bool(lease and lease.locked_at is not None)
    pulled_at = reader.pull_status.answered_at
    age = round(now - pulled_at, 3) if pulled_at else None
    return QueueStatus(
        *queue,
        committed=committed,
        pulled=window.next_offset,
        buffered=window.unfinished_count,
        locked=locked,
        state=_queue_state(queue, reader, member),
        pull_age=age,
        start=window.start_offset,
        given=window.max_sent_offset,
    )
