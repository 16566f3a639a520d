"""Counts the messages that come again because another process reads a queue.

Messages are given to the app in the order of their offsets. What a reader has given and not committed is delivered
again by the queue's next reader, which begins at the committed offset: from there up to the highest offset given. A
filter passes over some of these offsets, so their number is an upper bound.

A reader that gives a queue up says in its reports what it had given. Of a reader that ended without a word the last
page that was read of it counts: what was not committed then is what a crash at that moment would have repeated, and is
taken for what this one repeats.
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

KEPT_SECONDS = 3600.0  # a queue that nobody has taken over for so long is forgotten
URGENT_SECONDS = 60.0  # for which the next reader of a queue is read more often
MAX_QUEUES_OF_GROUP = 10_000  # that are kept


class Cause(StrEnum):
    """Why messages come again."""

    HANDOVER = "handover"  # the reader before released it, but could not commit everything: its drain timed out
    CRASH = "crash"  # the reader before ended without releasing it
    FORCED = "forced"  # it was taken from a member that did not answer
    RETRY = "retry"  # none of these: a member sent the message back, since its app failed


class Reader(NamedTuple):
    """A process that reads queues: of a member's pod, which may have had others before."""

    member: str
    uid: str
    incarnation: str

    @property
    def holder(self) -> Holder:
        """The member, as assignments name it."""
        return Holder(self.member, self.uid)


class Given(NamedTuple):
    """What a reader had given to its app and not committed of a queue, when it last said so."""

    reader: Reader
    start: int | None  # where it began; None: it did not say
    offset: int  # the highest that the app was given
    committed: int | None  # None: it is not known
    at: float  # when it said so, in seconds
    is_last: bool = False  # it gives up the queue, so it gives nothing more to its app
    cause: Cause | None = None  # why another process reads the queue next, if that is known already


class Redelivered(NamedTuple):
    """What came again with one queue."""

    queue: Queue
    messages: int
    cause: Cause
    before: Reader
    after: Reader
    is_estimate: bool  # the reader before ended without a word


class Rules(NamedTuple):
    """What decides about causes: which queues were forced, and which readers have ended."""

    forced: Container[Queue]
    has_ended: Callable[[Reader], bool]


def overlap(given: Given, start: int) -> int:
    """Return how many offsets the app was given that are read again by a reader which begins at `start`."""
    first = start if given.is_last or given.committed is None else min(start, given.committed)
    return max(0, given.offset + 1 - first)


def cause_of(queue: Queue, given: Given, after: Reader, rules: Rules) -> Cause | None:
    """Return why another process reads a queue; None while the reader before may still say that it released it."""
    if given.cause:
        return given.cause
    if given.reader.uid == after.uid:
        return Cause.CRASH
    if queue in rules.forced:
        return Cause.FORCED
    return Cause.CRASH if rules.has_ended(given.reader) else None


class GivenOffsets:
    """What the readers of a group's queues have given to their apps and not committed, by their pages and reports."""

    def __init__(self) -> None:
        self.by_queue: dict[Queue, Given] = {}

    @property
    def messages(self) -> int:
        """How many messages come again if all readers end now, as far as they said."""
        return sum(overlap(given, given.committed) for given in self.by_queue.values() if given.committed is not None)

    def take_page(
        self, reader: Reader, page: Mapping[Queue, QueueProgress], rules: Rules, now: float, *, most: int
    ) -> list[Redelivered]:
        """Take what a reader says of queues that it owns; return what came again with those it has taken over.

        `most`: how many queues may be kept, if that is less than the limit.
        """
        redelivered: list[Redelivered] = []
        most = min(most, MAX_QUEUES_OF_GROUP)
        for queue, progress in page.items():
            given = self.by_queue.get(queue)
            if given is not None and (given.cause or given.reader != reader):
                if progress.start is None and progress.committed is None:
                    continue  # the reader has not begun yet
                cause = cause_of(queue, given, reader, rules)
                if cause is None:
                    continue
                # A sidecar of an earlier version does not say where it began: nothing is counted then.
                messages = 0 if progress.start is None else overlap(given, progress.start)
                if messages:
                    redelivered.append(Redelivered(queue, messages, cause, given.reader, reader, not given.is_last))
                del self.by_queue[queue]
            self._note(reader, queue, progress, now, has_room=len(self.by_queue) < most)
        return redelivered

    def _note(self, reader: Reader, queue: Queue, progress: QueueProgress, now: float, *, has_room: bool) -> None:
        committed = progress.committed
        if progress.given is None or (committed is not None and committed > progress.given):
            self.by_queue.pop(queue, None)  # a crash would repeat nothing
        elif has_room or queue in self.by_queue:
            self.by_queue[queue] = Given(reader, progress.start, progress.given, committed, now)

    def take_report(self, before: Report, report: Report, assignment: Assignment | None, now: float) -> None:
        """Take what a member's report says, after the one before it, of queues that it gives up."""
        if (before.held, before.releasing, before.uncommitted) == (report.held, report.releasing, report.uncommitted):
            return
        reader = Reader(report.member, report.uid, report.incarnation)
        last = {Queue(it.topic, it.broker, it.id): it for it in report.uncommitted[:MOST_UNCOMMITTED]}
        known = {queue for queue, given in self.by_queue.items() if given.reader == reader and not given.cause}
        owned = _owned_by(reader.holder, assignment, known | last.keys())
        had, releasing = RangedQueues(before.held, before.releasing), RangedQueues(report.releasing)
        for queue in (known | (owned & last.keys() & had)) - RangedQueues(report.held):
            if queue not in owned and assignment is not None and queue in assignment.forced:
                self.by_queue[queue] = self.by_queue[queue]._replace(cause=Cause.FORCED)
            elif (entry := last.get(queue)) and (queue in known or len(self.by_queue) < MAX_QUEUES_OF_GROUP):
                cause = None if queue in releasing else Cause.HANDOVER
                self.by_queue[queue] = Given(reader, entry.start, entry.given, None, now, is_last=True, cause=cause)
            elif queue in known:
                self.by_queue.pop(queue)  # everything is committed

    def to_be_taken_over(self, has_ended: Callable[[Reader], bool], now: float) -> set[Queue]:
        """Return the queues whose reader ended lately, and whose next one has not said where it began.

        Queues that nobody has taken over for long are forgotten.
        """
        ended = {reader for reader in {it.reader for it in self.by_queue.values()} if has_ended(reader)}
        waiting = {queue: it for queue, it in self.by_queue.items() if it.cause or it.reader in ended}
        for queue in [queue for queue, given in waiting.items() if now - given.at > KEPT_SECONDS]:
            del self.by_queue[queue], waiting[queue]
        return {queue for queue, given in waiting.items() if now - given.at <= URGENT_SECONDS}

    def clear(self) -> None:
        """Forget everything: this operator begins to lead, or the group is another one."""
        self.by_queue.clear()


def _owned_by(holder: Holder, assignment: Assignment | None, queues: AbstractSet[Queue]) -> set[Queue]:
    """Return those of some queues that the assignment gives to a member, or that it takes from it."""
    if not queues or assignment is None:
        return set()
    share = assignment.members.get(holder.name)
    owned = set(share.queues).intersection(queues) if share and share.uid == holder.uid else set()
    releases = {queue: assignment.releasing.get(queue) for queue in queues}
    return owned | {queue for queue, release in releases.items() if release and release.holder == holder}
