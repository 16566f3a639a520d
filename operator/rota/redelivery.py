"""Counts the messages that are delivered again because another process reads a queue.

Messages are given to the app in the order of their offsets. Messages that a reader has given and not committed are
delivered again by the queue's next reader, which starts at the committed offset: from there up to the highest offset
given. A filter skips some of these offsets, so their number is an upper bound.

A reader that releases a queue reports the offsets that it had given. If a reader ended without such a report, the last
page that was read from it counts: a crash at the time of that page would have repeated its uncommitted messages, and
the real crash is estimated to repeat as many.
"""

from collections.abc import Callable, Container, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import NamedTuple

from rota.documents import Assignment
from rota.model import Holder, Queue
from rota.queue_offsets import QueueProgress
from rota.ranges import RangedQueues
from rota.reports import MOST_UNCOMMITTED, Report

KEPT_SECONDS = 3600.0  # a queue that no reader has taken over for so long is forgotten
URGENT_SECONDS = 60.0  # for which the next reader of a queue is polled more often
MAX_QUEUES_OF_GROUP = 10_000  # that are remembered


class Cause(StrEnum):
    """Why messages are delivered again."""

    HANDOVER = "handover"  # the previous reader released it, but could not commit everything: its drain timed out
    CRASH = "crash"  # the previous reader ended without releasing it
    FORCED = "forced"  # it was revoked from a member that did not respond
    RETRY = "retry"  # none of these: a member sent the message back, since its app failed


class Reader(NamedTuple):
    """A process that reads queues; its member's pod may have had other processes before."""

    member: str
    uid: str
    incarnation: str

    @property
    def holder(self) -> Holder:
        """The member, as assignments name it."""
        return Holder(self.member, self.uid)


class UncommittedDelivery(NamedTuple):
    """The messages of a queue that a reader had given to its app and not committed, by its last report."""

    reader: Reader
    start: int | None  # the offset at which the reader began; None: not reported
    offset: int  # the highest offset that the app was given
    committed: int | None  # None: unknown
    at: float  # time of the report, in seconds
    is_last: bool = False  # the reader releases the queue, so it gives nothing more to its app
    cause: Cause | None = None  # why another process reads the queue next, if that is already known


class Redelivered(NamedTuple):
    """The messages of one queue that were delivered again."""

    queue: Queue
    messages: int
    cause: Cause
    before: Reader
    after: Reader
    is_estimate: bool  # the previous reader ended without a final report


class RedeliveryRules(NamedTuple):
    """The facts that determine causes: which queues were forced, and which readers have ended."""

    forced: Container[Queue]
    has_ended: Callable[[Reader], bool]


def overlap(delivered: UncommittedDelivery, start: int) -> int:
    """Return how many offsets that the app was given are read again by a reader that begins at `start`."""
    first = start if delivered.is_last or delivered.committed is None else min(start, delivered.committed)
    return max(0, delivered.offset + 1 - first)


def cause_of(queue: Queue, delivered: UncommittedDelivery, reader: Reader, rules: RedeliveryRules) -> Cause | None:
    """Return why another process reads a queue; None while the previous reader may still report that it released it."""
    if delivered.cause:
        return delivered.cause
    if delivered.reader.uid == reader.uid:
        return Cause.CRASH
    if queue in rules.forced:
        return Cause.FORCED
    return Cause.CRASH if rules.has_ended(delivered.reader) else None


class DeliveryTracker:
    """The messages that readers of a group's queues gave to their apps and did not commit, by pages and reports."""

    def __init__(self) -> None:
        self.by_queue: dict[Queue, UncommittedDelivery] = {}

    @property
    def messages(self) -> int:
        """How many messages are delivered again if all readers end now, as far as they reported their offsets."""
        return sum(overlap(entry, entry.committed) for entry in self.by_queue.values() if entry.committed is not None)

    def take_page(
        self, reader: Reader, page: Mapping[Queue, QueueProgress], rules: RedeliveryRules, now: float, *, most: int
    ) -> list[Redelivered]:
        """Store a reader's progress in queues that it owns; return the redeliveries in queues that it has taken over.

        `most`: how many queues may be kept, if that is less than the limit.
        """
        redelivered: list[Redelivered] = []
        most = min(most, MAX_QUEUES_OF_GROUP)
        for queue, progress in page.items():
            entry = self.by_queue.get(queue)
            if entry is not None and (entry.cause or entry.reader != reader):
                if progress.start is None and progress.committed is None:
                    continue  # the reader has not begun yet
                cause = cause_of(queue, entry, reader, rules)
                if cause is None:
                    continue
                # A sidecar of an earlier version does not report where it began: nothing is counted then.
                messages = 0 if progress.start is None else overlap(entry, progress.start)
                if messages:
                    redelivered.append(Redelivered(queue, messages, cause, entry.reader, reader, not entry.is_last))
                del self.by_queue[queue]
            self._note(reader, queue, progress, now, has_room=len(self.by_queue) < most)
        return redelivered

    def _note(self, reader: Reader, queue: Queue, progress: QueueProgress, now: float, *, has_room: bool) -> None:
        committed = progress.committed
        if progress.given is None or (committed is not None and committed > progress.given):
            self.by_queue.pop(queue, None)  # a crash would repeat nothing
        elif has_room or queue in self.by_queue:
            self.by_queue[queue] = UncommittedDelivery(reader, progress.start, progress.given, committed, now)

    def take_report(self, old: Report, report: Report, assignment: Assignment | None, now: float) -> None:
        """Store the final offsets of queues that a member releases, according to its report and the previous one."""
        if (old.held, old.releasing, old.uncommitted) == (report.held, report.releasing, report.uncommitted):
            return
        reader = Reader(report.member, report.uid, report.incarnation)
        last = {Queue(final.topic, final.broker, final.id): final for final in report.uncommitted[:MOST_UNCOMMITTED]}
        tracked = {queue for queue, entry in self.by_queue.items() if entry.reader == reader and not entry.cause}
        owned = _owned_by(reader.holder, assignment, tracked | last.keys())
        had, releasing = RangedQueues(old.held, old.releasing), RangedQueues(report.releasing)
        for queue in (tracked | (owned & last.keys() & had)) - RangedQueues(report.held):
            if queue not in owned and assignment is not None and queue in assignment.forced:
                self.by_queue[queue] = self.by_queue[queue]._replace(cause=Cause.FORCED)
            elif (final := last.get(queue)) and (queue in tracked or len(self.by_queue) < MAX_QUEUES_OF_GROUP):
                cause = None if queue in releasing else Cause.HANDOVER
                self.by_queue[queue] = UncommittedDelivery(
                    reader, final.start, final.given, None, now, is_last=True, cause=cause
                )
            elif queue in tracked:
                self.by_queue.pop(queue)  # everything is committed

    def to_be_taken_over(self, has_ended: Callable[[Reader], bool], now: float) -> set[Queue]:
        """Return the queues whose reader ended lately, and whose next reader has not reported where it began.

        Queues that no reader has taken over for KEPT_SECONDS are forgotten.
        """
        ended = {reader for reader in {entry.reader for entry in self.by_queue.values()} if has_ended(reader)}
        waiting = {queue: entry for queue, entry in self.by_queue.items() if entry.cause or entry.reader in ended}
        for queue in [queue for queue, entry in waiting.items() if now - entry.at > KEPT_SECONDS]:
            del self.by_queue[queue], waiting[queue]
        return {queue for queue, entry in waiting.items() if now - entry.at <= URGENT_SECONDS}

    def clear(self) -> None:
        """Forget everything: this operator became the leader, or the group was replaced."""
        self.by_queue.clear()


def _owned_by(holder: Holder, assignment: Assignment | None, queues: AbstractSet[Queue]) -> set[Queue]:
    """Return the queues among `queues` that the assignment gives to a member, or is revoking from it."""
    if not queues or assignment is None:
        return set()
    share = assignment.members.get(holder.name)
    owned = set(share.queues).intersection(queues) if share and share.uid == holder.uid else set()
    releases = {queue: assignment.releasing.get(queue) for queue in queues}
    return owned | {queue for queue, release in releases.items() if release and release.holder == holder}
