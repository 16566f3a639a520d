"""Counts the messages that are delivered again because another process (*reader*) reads a queue.

A reader gives messages to the app in the order of their offsets. The next reader starts at the committed offset, so it
delivers again what the previous one had given and not committed: from the committed offset up to the highest offset
given. A filter skips some of these offsets, so their number is an upper bound.

- A reader that drains a queue, or has released it, reports the highest offset that it had given (`Report.uncommitted`).
- If a reader ended without such a report, its last progress page (`/v1/report/queues`, `rota.queue_offsets`) counts.
  A crash at the time of that page would have repeated the messages that the page shows as uncommitted; the real crash
  is estimated to repeat as many.
"""

from collections.abc import Callable, Container, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from rota.documents import Assignment
from rota.model import Holder, Queue
from rota.queue_offsets import QueueProgress
from rota.ranges import RangedQueues
from rota.reports import MAX_UNCOMMITTED_ENTRIES, Report

FORGET_AFTER_SECONDS = 3600.0  # a queue that no reader takes over within this time is forgotten
FREQUENT_POLL_SECONDS = 60.0  # time after a reader's last report in which its queues' next readers are polled often
MAX_TRACKED_QUEUES = 10_000  # limit for one group


class RedeliveryCause(StrEnum):
    """Why messages are delivered again."""

    HANDOVER = "handover"  # the previous reader released the queue before it could commit all: its drain timed out
    CRASH = "crash"  # the previous reader ended without releasing the queue
    FORCED = "forced"  # the queue was granted without a release, since its owner did not respond
    RETRY = "retry"  # no other reader: a member sent the message back, since its app failed


class ReaderProcess(NamedTuple):
    """A sidecar process that reads queues; its pod may have had other processes before."""

    member: str
    uid: str
    incarnation: str

    @property
    def holder(self) -> Holder:
        """The member, as assignments name it."""
        return Holder(self.member, self.uid)


class UncommittedDelivery(NamedTuple):
    """The messages of a queue that a reader had given to its app and not committed, by its last report."""

    reader: ReaderProcess
    start_offset: int | None  # the offset at which the reader began; None: not reported
    delivered_offset: int  # the highest offset that the app was given
    committed_offset: int | None  # None: unknown
    reported_at: float  # time of the report, in seconds
    is_last: bool = False  # the reader drains or has released the queue, so it gives nothing more to its app
    cause: RedeliveryCause | None = None  # why another process reads the queue next, if that is already known


class Redelivery(NamedTuple):
    """The messages of one queue that were delivered again."""

    queue: Queue
    messages: int
    cause: RedeliveryCause
    previous_reader: ReaderProcess
    next_reader: ReaderProcess
    is_estimate: bool  # the previous reader ended without a final report


class RedeliveryRules(NamedTuple):
    """What causes depend on: the queues that were granted by force, and whether a reader has ended."""

    forced_queues: Container[Queue]
    has_ended: Callable[[ReaderProcess], bool]


def count_redelivered(delivered: UncommittedDelivery, start_offset: int) -> int:
    """Return how many offsets that the app was given are read again by a reader that begins at `start_offset`.

    After a crash, all offsets count that were uncommitted in the last page, even if the next reader begins later.
    """
    first_repeated = start_offset
    if not delivered.is_last and delivered.committed_offset is not None:
        first_repeated = min(start_offset, delivered.committed_offset)
    return max(0, delivered.delivered_offset + 1 - first_repeated)


def find_cause(
    queue: Queue, delivered: UncommittedDelivery, reader: ReaderProcess, rules: RedeliveryRules
) -> RedeliveryCause | None:
    """Return why another process reads a queue; None if the previous reader may still report the queue's release."""
    if delivered.cause:
        return delivered.cause
    if delivered.reader.uid == reader.uid:  # a later process of the same pod
        return RedeliveryCause.CRASH
    if queue in rules.forced_queues:
        return RedeliveryCause.FORCED
    return RedeliveryCause.CRASH if rules.has_ended(delivered.reader) else None


class DeliveryTracker:
    """Tracks the messages that readers of a group's queues gave to their apps and did not commit."""

    def __init__(self) -> None:
        self.by_queue: dict[Queue, UncommittedDelivery] = {}

    @property
    def uncommitted_messages(self) -> int:
        """How many messages are delivered again if all readers end now, as far as they reported their offsets."""
        messages = 0
        for entry in self.by_queue.values():
            if entry.committed_offset is not None:
                messages += count_redelivered(entry, entry.committed_offset)
        return messages

    def record_page(
        self,
        reader: ReaderProcess,
        page: Mapping[Queue, QueueProgress],
        rules: RedeliveryRules,
        now: float,
        *,
        max_queues: int,
    ) -> list[Redelivery]:
        """Store a reader's progress in queues that it owns; return the redeliveries in queues that it has taken over.

        `page` has only queues that both the assignment and the report's `held` give to the reader: the caller leaves
        out queues that the reader drains, whose offsets `record_report` stores. At most `max_queues` queues are
        tracked, and never more than MAX_TRACKED_QUEUES.
        """
        redelivered: list[Redelivery] = []
        max_queues = min(max_queues, MAX_TRACKED_QUEUES)
        for queue, progress in page.items():
            entry = self.by_queue.get(queue)
            # If an entry has a cause, its reader has lost the queue. The next reader may be the same process.
            if entry is not None and (entry.cause or entry.reader != reader):
                if progress.start_offset is None and progress.committed_offset is None:
                    continue  # the reader has not begun yet
                cause = find_cause(queue, entry, reader, rules)
                if cause is None:
                    continue  # keep the entry until the previous reader reports its release, or has ended
                # A sidecar of an earlier version does not report where it began: nothing is counted then.
                messages = 0 if progress.start_offset is None else count_redelivered(entry, progress.start_offset)
                if messages:
                    redelivered.append(Redelivery(queue, messages, cause, entry.reader, reader, not entry.is_last))
                del self.by_queue[queue]
            self._track(reader, queue, progress, now, has_room=len(self.by_queue) < max_queues)
        return redelivered

    def _track(
        self, reader: ReaderProcess, queue: Queue, progress: QueueProgress, now: float, *, has_room: bool
    ) -> None:
        committed = progress.committed_offset
        if progress.delivered_offset is None or (committed is not None and committed > progress.delivered_offset):
            self.by_queue.pop(queue, None)  # a crash would repeat nothing
        elif has_room or queue in self.by_queue:
            self.by_queue[queue] = UncommittedDelivery(
                reader, progress.start_offset, progress.delivered_offset, committed, now
            )

    def record_report(self, previous: Report, report: Report, assignment: Assignment | None, now: float) -> None:
        """Store the final offsets of queues that a member gives up, according to its report and the previous one.

        - A member gives a queue up when it starts to drain it: the queue moves from the report's `held` to `releasing`,
          and leaves that when the drain is over.
        - From the start of the drain, `uncommitted` has an entry for the queue if messages are uncommitted. Without an
          entry, all are committed.
        - If a member gives up very many queues, some entries do not fit into its report (MAX_UNCOMMITTED_ENTRIES):
          messages of those queues are not counted.
        """
        fields = attrgetter("held", "releasing", "uncommitted")
        if fields(previous) == fields(report):
            return
        reader = ReaderProcess(report.member, report.uid, report.incarnation)
        final_offsets = {final.queue: final for final in report.uncommitted[:MAX_UNCOMMITTED_ENTRIES]}
        tracked = {queue for queue, entry in self.by_queue.items() if entry.reader == reader and not entry.cause}
        assigned_or_revoked = _assigned_or_revoked(reader.holder, assignment, tracked | final_offsets.keys())
        # Only queues that were the member's: any member can name any queue in its report.
        newly_reported = assigned_or_revoked & final_offsets.keys() & RangedQueues(previous.held, previous.releasing)
        given_up = (tracked | newly_reported) - RangedQueues(report.held)
        draining = RangedQueues(report.releasing)
        forced_queues = assignment.forced if assignment else {}
        for queue in given_up:
            was_granted_away = queue not in assigned_or_revoked  # possible for a tracked queue only
            final = final_offsets.get(queue)
            may_track = queue in tracked or len(self.by_queue) < MAX_TRACKED_QUEUES
            if was_granted_away and queue in forced_queues:  # the next owner reads without waiting for this report
                self.by_queue[queue] = self.by_queue[queue]._replace(cause=RedeliveryCause.FORCED)
            elif final and may_track:
                # During the drain, the cause is not known yet: the member may still crash, or lose the queue by force.
                cause = None if queue in draining else RedeliveryCause.HANDOVER
                self.by_queue[queue] = UncommittedDelivery(
                    reader, final.start, final.given, None, now, is_last=True, cause=cause
                )
            elif queue in tracked:
                del self.by_queue[queue]  # without an entry in `uncommitted`, everything is committed

    def queues_awaiting_reader(self, has_ended: Callable[[ReaderProcess], bool], now: float) -> set[Queue]:
        """Return the queues whose reader ended lately, and whose next reader has not reported where it began.

        Queues that no reader has taken over for FORGET_AFTER_SECONDS are forgotten.
        """
        ended_readers = set(filter(has_ended, {entry.reader for entry in self.by_queue.values()}))
        awaiting: set[Queue] = set()
        for queue, entry in list(self.by_queue.items()):
            age = now - entry.reported_at
            if not entry.cause and entry.reader not in ended_readers:
                continue
            if age > FORGET_AFTER_SECONDS:
                del self.by_queue[queue]
            elif age <= FREQUENT_POLL_SECONDS:
                awaiting.add(queue)
        return awaiting

    def clear(self) -> None:
        """Forget everything: this operator became the leader, or the group was replaced."""
        self.by_queue.clear()


def _assigned_or_revoked(holder: Holder, assignment: Assignment | None, queues: AbstractSet[Queue]) -> set[Queue]:
    """Return those of `queues` that the assignment gives to a member, or is revoking from it."""
    if not queues or assignment is None:
        return set()
    share = assignment.share_of(holder)
    owned = share.queues if share else ()
    return {*owned, *assignment.releases_by_holder.get(holder, ())}.intersection(queues)
