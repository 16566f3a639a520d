"""Sums up the deliveries that a group's members report, and detects that most of them fail."""

import math
from collections import deque
from collections.abc import Collection, Container
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from rota.deliveries import (
    APP_UNREACHED_OUTCOMES,
    DeliveriesPage,
    FailingMessage,
    LastFailure,
    QueueCounts,
    describe_outcome,
    known_outcome,
)
from rota.model import Finding, Queue, Reason

WINDOW_SECONDS = 300.0
INTERVAL_SECONDS = 15.0  # length of the intervals that make up the window
MIN_ATTEMPTS = 10  # in the window; with fewer, no new problem is reported
FAILING_SHARE = 0.5  # of failed attempts, from which on the app counts as failing
RECOVERED_SHARE = 0.25  # below which a failing app counts as working again
MESSAGE_INTERVAL_SECONDS = 60.0  # between updates of the problem's figures: each is a write to the API server
NEW_LEADER_GRACE_SECONDS = 120.0  # for which a new leader keeps the published problem
BYTES_PER_QUEUE = 800  # memory of a queue's last counters and of its totals
BYTES_PER_FAILURE = 200  # additional memory for each failure outcome of a queue


@dataclass(slots=True, eq=False, weakref_slot=True)  # `RetentionBudget` keeps a weak reference
class MemberDeliveries:
    """The deliveries that one member reports, from all its pages."""

    incarnation: str  # of the sidecar's process
    age: float  # seconds since this process began to count
    delayed_messages: int  # messages that brokers hold until their next attempt; an estimate
    last_failure: LastFailure | None
    failing_messages: tuple[FailingMessage, ...]
    queues: dict[Queue, QueueCounts] = field(default_factory=dict)
    memory_bytes: int = 0  # memory of these counters and of the totals made of them

    @classmethod
    def from_page(cls, page: DeliveriesPage) -> Self:
        """Start with the first page of a member's counters: only this page has the fields that belong to no queue."""
        deliveries = cls(page.incarnation, page.age, page.delayed, page.last_failure, tuple(page.failing))
        deliveries.add(page)
        return deliveries

    def add(self, page: DeliveriesPage) -> None:
        """Add the queues of a page."""
        for counts in page.queues:
            self.queues[Queue(counts.topic, counts.broker, counts.id)] = counts
            self.memory_bytes += BYTES_PER_QUEUE + BYTES_PER_FAILURE * len(counts.failures)


@dataclass(slots=True)
class DeliveryTotals:
    """Delivery counts over some time, of one queue or of several; `QueueCounts` explains the fields."""

    first_attempts: int = 0
    done: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    active_seconds: float = 0.0  # time over which the next two were measured
    in_flight_seconds: float = 0.0  # seconds multiplied by the number of messages at the app
    backlog_seconds: float = 0.0  # time in which fetched messages waited for their delivery

    @classmethod
    def between(cls, previous: QueueCounts | None, now: QueueCounts) -> Self:
        """Return the counts since `previous`; a counter that decreased, as a hostile pod may send, adds nothing."""
        start = previous or _ZERO_COUNTS
        totals = cls(
            first_attempts=max(0, now.first_attempts - start.first_attempts),
            done=max(0, now.done - start.done),
            active_seconds=max(0.0, now.active_seconds - start.active_seconds),
            in_flight_seconds=max(0.0, now.in_flight_seconds - start.in_flight_seconds),
            backlog_seconds=max(0.0, now.backlog_seconds - start.backlog_seconds),
        )
        for name, number in now.failures.items():
            totals.add_failures(known_outcome(name), max(0, number - start.failures.get(name, 0)))
        return totals

    def add_failures(self, outcome: str, number: int) -> None:
        """Add attempts that failed."""
        if number:
            self.failures[outcome] = self.failures.get(outcome, 0) + number

    def add(self, totals: "DeliveryTotals") -> None:
        """Add the counts of another time or queue."""
        self.first_attempts += totals.first_attempts
        self.done += totals.done
        self.active_seconds += totals.active_seconds
        self.in_flight_seconds += totals.in_flight_seconds
        self.backlog_seconds += totals.backlog_seconds
        for outcome, number in totals.failures.items():
            self.add_failures(outcome, number)

    @property
    def failed_attempts(self) -> int:
        """How many attempts failed at the app; those that did not reach it (APP_UNREACHED_OUTCOMES) are left out."""
        return sum(number for outcome, number in self.failures.items() if outcome not in APP_UNREACHED_OUTCOMES)


_ZERO_COUNTS = QueueCounts("", "", 0)


class Attempts(NamedTuple):
    """How many attempts reached the app, and how many of them failed."""

    total: int  # attempts that were done or failed, of all messages: not only first attempts
    failed: int

    @property
    def failed_share(self) -> float:
        """The share that failed."""
        return self.failed / self.total if self.total else 0.0


@dataclass(slots=True)
class _Interval:
    started_at: float
    total: int = 0
    failed: int = 0


class GroupDeliveries:
    """The deliveries of one group, since this operator became the leader.

    The first counters of a process are added in full if the process started within the last WINDOW_SECONDS. Otherwise
    they are only the baseline from which the next differences are taken.
    """

    def __init__(self, published_message: str = "") -> None:
        """Keep the problem that the status already reports, until attempts show otherwise or the grace time is over."""
        self.totals_by_queue: dict[tuple[Queue, str], DeliveryTotals] = {}  # by queue and the pod's template revision
        self.totals_by_topic: dict[str, DeliveryTotals] = {}
        self.problem = Finding(Reason.DELIVERIES_FAILING, published_message) if published_message else None
        self._members: dict[str, MemberDeliveries] = {}  # by the pod's uid
        self._revisions: dict[str, str] = {}  # by the pod's uid
        self._intervals: deque[_Interval] = deque()
        self._last_failure: tuple[float, LastFailure] | None = None  # with its time
        self._message_written_at = -math.inf  # when the problem's message was written
        self._grace_until: float | None = None

    def record(self, uid: str, revision: str, deliveries: MemberDeliveries, topics: Container[str], now: float) -> None:
        """Add a member's counts since its previous report; queues of topics that are not in `topics` do not count."""
        previous = self._members.get(uid)
        is_same_process = previous is not None and previous.incarnation == deliveries.incarnation
        counted_before = previous.queues if previous and is_same_process else {}  # a new process counts from 0
        self._members[uid] = deliveries
        self._revisions[uid] = revision
        if not is_same_process and deliveries.age > WINDOW_SECONDS:
            return  # its counts may be older than the window
        changes = DeliveryTotals()
        for queue, counts in deliveries.queues.items():
            if queue.topic in topics:
                change = DeliveryTotals.between(counted_before.get(queue), counts)
                self.totals_by_queue.setdefault((queue, revision), DeliveryTotals()).add(change)
                self.totals_by_topic.setdefault(queue.topic, DeliveryTotals()).add(change)
                changes.add(change)
        failed = changes.failed_attempts
        self._record_attempts(Attempts(changes.done + failed, failed), now)
        if last := deliveries.last_failure:
            failed_at = now - last.age
            if self._last_failure is None or failed_at > self._last_failure[0]:
                self._last_failure = (failed_at, last)

    def _record_attempts(self, attempts: Attempts, now: float) -> None:
        if not self._intervals or self._intervals[-1].started_at <= now - INTERVAL_SECONDS:
            self._intervals.append(_Interval(now))
            while self._intervals[0].started_at <= now - WINDOW_SECONDS:
                self._intervals.popleft()
        self._intervals[-1].total += attempts.total
        self._intervals[-1].failed += attempts.failed

    def retain_only(self, uids: Collection[str], topics: Collection[str]) -> None:
        """Keep the members with these uids, and these topics; forget all others."""
        ended = self._members.keys() - uids
        for uid in ended:
            del self._members[uid], self._revisions[uid]
        # A pod may name other queues each time. To limit memory, drop totals of queues that no member's last report
        # names. Such totals exist if totals outnumber the queues in these reports.
        if ended or len(self.totals_by_queue) > sum(len(member.queues) for member in self._members.values()):
            named: set[tuple[Queue, str]] = set()
            for uid, member in self._members.items():
                named.update((queue, self._revisions[uid]) for queue in member.queues)
            self.totals_by_queue = {key: totals for key, totals in self.totals_by_queue.items() if key in named}
        for topic in self.totals_by_topic.keys() - topics:
            del self.totals_by_topic[topic]

    def recent_attempts(self, now: float) -> Attempts:
        """Return the attempts within the window."""
        attempts = Attempts(0, 0)
        for interval in [*self._intervals]:  # a copy: metrics are rendered in another thread
            if interval.started_at > now - WINDOW_SECONDS:
                attempts = Attempts(attempts.total + interval.total, attempts.failed + interval.failed)
        return attempts

    @property
    def delayed_messages(self) -> int | None:
        """How many messages brokers delay until their next attempt, by members' estimates; None: no member reported."""
        members = [*self._members.values()]  # a copy: metrics are rendered in another thread
        return sum(member.delayed_messages for member in members) if members else None

    def failing_messages_of(self, uid: str) -> tuple[FailingMessage, ...]:
        """Return the failing messages that a member reports."""
        member = self._members.get(uid)
        return member.failing_messages if member else ()

    def update_problem(self, now: float) -> bool:
        """Decide again whether most deliveries fail; return whether the problem or its message changed."""
        if self._grace_until is None:
            self._grace_until = now + NEW_LEADER_GRACE_SECONDS
        previous = self.problem
        attempts = self.recent_attempts(now)
        may_rewrite = previous is None or now >= self._message_written_at + MESSAGE_INTERVAL_SECONDS
        if not self._is_failing(attempts, now):
            self.problem = None
        elif attempts.total >= MIN_ATTEMPTS and may_rewrite:
            self.problem = Finding(Reason.DELIVERIES_FAILING, self._describe_failures(attempts))
            self._message_written_at = now
        return self.problem != previous

    def _is_failing(self, attempts: Attempts, now: float) -> bool:
        if attempts.total >= MIN_ATTEMPTS:
            return attempts.failed_share >= (RECOVERED_SHARE if self.problem else FAILING_SHARE)
        if self.problem is None:
            return False
        if now < (self._grace_until or 0.0):
            return True
        # Too few attempts to judge: the problem stays while messages wait for a retry, unless all attempts succeeded.
        all_succeeded = attempts.total > 0 and not attempts.failed
        return bool(self.delayed_messages) and not all_succeeded

    def _describe_failures(self, attempts: Attempts) -> str:
        percent = int(100 * attempts.failed_share)
        sentence = f"{percent} % of {attempts.total:,} deliveries in the last {WINDOW_SECONDS / 60:g} min failed"
        if self._last_failure is None:
            return sentence
        _, last = self._last_failure
        return f"{sentence}, the last {describe_outcome(last.outcome, last.status)}"
