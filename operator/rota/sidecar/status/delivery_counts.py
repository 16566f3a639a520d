"""Counts deliveries by queue and outcome, and lists messages that fail repeatedly or hang."""

import math
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import chain, islice
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from rota.brokers.message import Message
from rota.deliveries import (
    APP_UNREACHED_OUTCOMES,
    AppResponse,
    DeliveriesPage,
    DeliveryOutcome,
    FailingMessage,
    HandlingTimes,
    LastFailure,
    QueueCounts,
    bucket_index,
)
from rota.delivery_totals import DeliveryTotals
from rota.model import Queue, single_line
from rota.sidecar.member.window import QueueWindow

DELIVERY_PAGE_QUEUES = 200  # a page, with its topics and messages, stays below 256 KiB, for names of any length
TOPICS_IN_PAGE = 10
MESSAGES_IN_PAGE = 10
FAILED_ATTEMPTS = 3  # a message with at least this many attempts is listed
FAILED_SECONDS = 900.0  # a message is listed for this long after its last failure
MAX_FAILED_MESSAGES = 100  # only the messages that failed last are kept
HANGING_SECONDS = 30.0  # a message that is at the app for this long is listed
MAX_SAMPLE_SECONDS = 5.0  # a longer interval between samples means that the process stood still, and is not counted
DUE_STEP_SECONDS = 10.0  # times of next attempts are rounded up to a multiple of this
MAX_TEXT_CHARACTERS = 200  # characters of a topic or id, which a producer may have chosen
# Delay of the next attempt at the broker, by the number of earlier attempts: RocketMQ's defaults.
RETRY_DELAYS_SECONDS = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)


class CountedReader(Protocol):
    """The properties of a queue's reader that are counted."""

    window: QueueWindow


class _FailedMessage(NamedTuple):
    message: FailingMessage  # without its age
    failed_at: float

    def with_age(self, now: float) -> FailingMessage:
        return replace(self.message, age=round(now - self.failed_at, 3))


class DeliveryCounts:
    """Counts of the deliveries of this process."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._sampled = now
        self._queues: dict[Queue, DeliveryTotals] = {}  # never shrinks: a page's queues stay in that page
        self._times: dict[str, dict[int, int]] = {}  # number of deliveries by topic and bucket
        self._failed: dict[str, _FailedMessage] = {}  # by message id, the latest failure last
        self._last_failure: tuple[AppResponse, float] | None = None  # the answer and its time
        # Number of messages returned to the broker, by the time of their next attempt in units of DUE_STEP_SECONDS.
        self._due: dict[int, int] = {}

    def count(self, queue: Queue, attempts: Sequence[tuple[Message, int]], answer: AppResponse, now: float) -> None:
        """Count the end of a delivery; `attempts` pairs each message with the number of this attempt."""
        counts = self._queues.setdefault(queue, DeliveryTotals())
        outcome = answer.outcome
        messages = len(attempts)
        if outcome is DeliveryOutcome.DONE:
            counts.done += messages
        else:
            counts.failures[outcome.value] = counts.failures.get(outcome.value, 0) + messages
        if outcome in APP_UNREACHED_OUTCOMES:
            return
        counts.first_attempts += sum(attempt == 1 for _, attempt in attempts)
        if self._failed and outcome in {DeliveryOutcome.DONE, DeliveryOutcome.UNPROCESSABLE}:
            for message, _ in attempts:
                self._failed.pop(_short_id(message), None)
        if outcome is not DeliveryOutcome.DONE:
            self._last_failure = answer, now
            self._remember_failures(queue, attempts, answer, now)

    def _remember_failures(
        self, queue: Queue, attempts: Sequence[tuple[Message, int]], answer: AppResponse, now: float
    ) -> None:
        """Remember messages that failed often; not those that become dead letters, which have no further attempt."""
        for message, attempt in attempts:
            if attempt >= FAILED_ATTEMPTS and answer.outcome is not DeliveryOutcome.UNPROCESSABLE:
                name = _short_id(message)
                self._failed.pop(name, None)
                failing = FailingMessage(
                    _short_topic(message), *queue, message.offset, attempt, 0.0, answer.outcome, answer.status
                )
                self._failed[name] = _FailedMessage(failing, now)
        while len(self._failed) > MAX_FAILED_MESSAGES:
            del self._failed[next(iter(self._failed))]

    def count_time(self, topic: str, seconds: float, number: int = 1) -> None:
        """Count a time at the app: of a delivery in mode Push, of a number of messages in mode Pull."""
        buckets = self._times.setdefault(topic, {})
        bucket = bucket_index(seconds)
        buckets[bucket] = buckets.get(bucket, 0) + number

    def count_returned(self, attempts_before: int, now: float) -> None:
        """Count a message that was returned to its broker for another attempt."""
        index = min(max(attempts_before, 0), len(RETRY_DELAYS_SECONDS) - 1)  # a broker may send any number of attempts
        delay = RETRY_DELAYS_SECONDS[index]
        due = math.ceil((now + delay) / DUE_STEP_SECONDS)
        if due not in self._due:
            self._count_delayed(now)  # remove due entries here, as no report may ever be requested
        self._due[due] = self._due.get(due, 0) + 1

    def sample(self, readers: Mapping[Queue, CountedReader], now: float) -> None:
        """Add the seconds since the last sample to the totals of each queue that has messages or has had a delivery.

        - active: the seconds;
        - in flight: the seconds multiplied by the number of messages at the app;
        - backlog: the seconds, if a fetched message is not at the app yet.
        """
        seconds = now - self._sampled
        self._sampled = now
        if seconds > MAX_SAMPLE_SECONDS:
            return
        for queue, reader in readers.items():
            window = reader.window
            buffered = window.unfinished_count
            if not buffered and queue not in self._queues:
                continue
            counts = self._queues.setdefault(queue, DeliveryTotals())
            counts.active_seconds += seconds
            counts.in_flight_seconds += seconds * window.in_flight
            if buffered > window.in_flight:
                counts.backlog_seconds += seconds

    def page(self, start: int, incarnation: str, readers: Mapping[Queue, CountedReader], now: float) -> DeliveriesPage:
        """Return the page from queue index `start` on, with its part of the topics; the first has failures, too."""
        stop = start + DELIVERY_PAGE_QUEUES
        page_number = start // DELIVERY_PAGE_QUEUES
        first_topic = page_number * TOPICS_IN_PAGE
        stop_topic = first_topic + TOPICS_IN_PAGE
        queues = islice(self._queues.items(), start, stop)
        times = islice(self._times.items(), first_topic, stop_topic)
        has_next = stop < len(self._queues) or stop_topic < len(self._times)
        page = DeliveriesPage(
            incarnation=incarnation,
            age=round(now - self._started, 3),
            queues=[_as_counts(queue, counts) for queue, counts in queues],
            times=[HandlingTimes(topic, buckets) for topic, buckets in times],
            next=stop if has_next else None,
        )
        if start:
            return page
        return replace(
            page,
            delayed=self._count_delayed(now),
            last_failure=self._describe_last_failure(now),
            failing=self._list_failing(readers, now),
        )

    def _describe_last_failure(self, now: float) -> LastFailure | None:
        if self._last_failure is None:
            return None
        answer, failed_at = self._last_failure
        return LastFailure(answer.outcome, round(now - failed_at, 3), answer.status)

    def _count_delayed(self, now: float) -> int:
        """Remove the returned messages whose next attempt is due, and count the others."""
        for due in [*self._due]:
            if due * DUE_STEP_SECONDS <= now:
                del self._due[due]
        return sum(self._due.values())

    def _list_failing(self, readers: Mapping[Queue, CountedReader], now: float) -> list[FailingMessage]:
        """Return hanging messages, which have no outcome yet, then those that failed recently; most attempts first."""
        for name, failed in [*self._failed.items()]:
            if failed.failed_at < now - FAILED_SECONDS:
                del self._failed[name]
        recent = (failed.with_age(now) for failed in self._failed.values())
        messages = chain(_list_hanging(readers, now), recent)
        return nlargest(MESSAGES_IN_PAGE, messages, key=lambda message: (not message.outcome, message.attempts))


def _as_counts(queue: Queue, counts: DeliveryTotals) -> QueueCounts:
    active = round(counts.active_seconds, 3)
    in_flight = round(counts.in_flight_seconds, 3)
    backlog = round(counts.backlog_seconds, 3)
    return QueueCounts(*queue, counts.first_attempts, counts.done, counts.failures, active, in_flight, backlog)


def _list_hanging(readers: Mapping[Queue, CountedReader], now: float) -> Iterator[FailingMessage]:
    for queue, reader in readers.items():
        for delivery in reader.window.open_deliveries:
            if delivery.started_at <= now - HANGING_SECONDS:
                for message in delivery.messages:
                    attempt = reader.window.attempt_number(message)
                    age = round(now - delivery.started_at, 3)
                    yield FailingMessage(_short_topic(message), *queue, message.offset, attempt, age)


def _short_topic(message: Message) -> str:
    """Return the topic that a message was sent to, shortened: in a retry queue, its producer may have set any text."""
    return single_line(message.topic, MAX_TEXT_CHARACTERS)


def _short_id(message: Message) -> str:
    """Return the id of a message, which stays the same over all its attempts."""
    return message.id[:MAX_TEXT_CHARACTERS]
