"""Delivery counters of a member, as its sidecar returns them in pages at `/v1/report/deliveries`.

All counters start at 0 with the sidecar's process and only grow. The operator adds up differences between its polls
(`rota.delivery_totals`), so it may poll at any rate. Times are counted in buckets (a histogram).
"""

import math
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

BUCKET_GROWTH = 1.1  # ratio of a bucket's end to the end of the bucket below
LAST_BUCKET = 200  # its index; it ends at 52 h
FIRST_BUCKET_SECONDS = 0.001  # the end of bucket 0

MAX_NAME_CHARS = 255  # characters of a topic or broker
MAX_QUEUES_IN_PAGE = 500
MAX_TOPICS_IN_PAGE = 50
MAX_FAILING_MESSAGES = 20
MAX_OUTCOMES = 32


class DeliveryOutcome(StrEnum):
    """The outcome of one attempt to deliver a message."""

    DONE = "done"
    REDIRECTED = "3xx"
    CLIENT_ERROR = "4xx"
    NOT_FOUND = "404"
    UNPROCESSABLE = "422"  # the message goes to the dead letters; a message that is rejected otherwise comes again
    SERVER_ERROR = "5xx"
    OTHER = "other"  # another status, or an outcome that only the sidecar's version knows
    NACK = "nack"  # the pulling app refused the message
    TIMEOUT = "timeout"
    BROKEN = "broken"  # the connection ended without a valid response
    REFUSED = "refused"  # there was no connection


# Outcomes with which the app did not get the message. Such an attempt is in `failures`, but does not count towards the
# message's attempts. The conditions AppNotListening and AppPathNotFound report it.
APP_UNREACHED_OUTCOMES = frozenset({DeliveryOutcome.REFUSED, DeliveryOutcome.NOT_FOUND})

_OUTCOME_BY_STATUS = {404: DeliveryOutcome.NOT_FOUND, 422: DeliveryOutcome.UNPROCESSABLE}
_OUTCOME_BY_STATUS_CLASS = {
    2: DeliveryOutcome.DONE,
    3: DeliveryOutcome.REDIRECTED,
    4: DeliveryOutcome.CLIENT_ERROR,
    5: DeliveryOutcome.SERVER_ERROR,
}
_KNOWN_OUTCOMES = frozenset(map(str, DeliveryOutcome))


class AppResponse(NamedTuple):
    """The app's response to a delivery."""

    outcome: DeliveryOutcome
    status: int = 0  # of its HTTP response, if there was one


def response_of_status(status: int) -> AppResponse:
    """Return the meaning of an HTTP status for a delivery."""
    outcome = _OUTCOME_BY_STATUS.get(status) or _OUTCOME_BY_STATUS_CLASS.get(status // 100, DeliveryOutcome.OTHER)
    return AppResponse(outcome, status)


def bucket_index(seconds: float) -> int:
    """Return the index of the bucket for a handling time."""
    if seconds <= FIRST_BUCKET_SECONDS:
        return 0
    return min(math.ceil(math.log(seconds / FIRST_BUCKET_SECONDS, BUCKET_GROWTH)), LAST_BUCKET)


def bucket_end(index: int) -> float:
    """Return the longest handling time in a bucket, in seconds."""
    return FIRST_BUCKET_SECONDS * BUCKET_GROWTH**index


Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Word = Annotated[str, Meta(max_length=32)]


class QueueCounts(Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """The delivery counters of one queue."""

    topic: Name
    broker: Name
    id: Annotated[int, Meta(ge=0, le=2**31)]
    first_attempts: Count = 0  # messages whose first attempt ended, with any outcome of the app
    done: Count = 0  # attempts that succeeded
    failures: Annotated[dict[Word, Count], Meta(max_length=MAX_OUTCOMES)] = {}  # failed attempts by outcome
    active_seconds: Seconds = 0.0  # time in which `in_flight_seconds` and `backlog_seconds` were measured
    # Sum of the times that messages were at the app; divided by `active_seconds`: the mean number of messages there.
    in_flight_seconds: Seconds = 0.0
    backlog_seconds: Seconds = 0.0  # time in which fetched messages waited for their delivery


class HandlingTimes(Struct, frozen=True, rename="camel"):
    """Numbers of deliveries of one topic by handling time; the key 7 is the bucket that ends at `bucket_end(7)`."""

    topic: Name
    buckets: Annotated[dict[Annotated[int, Meta(ge=0, le=LAST_BUCKET)], Count], Meta(max_length=LAST_BUCKET + 1)]


class LastFailure(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The most recent attempt that failed."""

    outcome: Word
    age: Seconds  # since the attempt failed
    status: Annotated[int, Meta(ge=0, le=999)] = 0


class FailingMessage(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A message that failed several times, or that the app has had for long."""

    topic: Name  # the topic that the message was sent to
    queue_topic: Name  # the topic that holds it now: a retry topic, once it was sent back
    broker: Name
    id: Annotated[int, Meta(ge=0, le=2**31)]
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    attempts: Annotated[int, Meta(ge=0, le=2**31)]
    age: Seconds  # since the last failure; without an outcome, since the app was given the message
    outcome: Word = ""  # empty: the app still has the message
    status: Annotated[int, Meta(ge=0, le=999)] = 0


class DeliveriesPage(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A page of counters by queue and topic; only the first page has the fields that belong to neither."""

    incarnation: Word  # of the sidecar's process; the counters of a new process start at 0
    age: Seconds  # since counting began
    queues: Annotated[list[QueueCounts], Meta(max_length=MAX_QUEUES_IN_PAGE)] = []
    times: Annotated[list[HandlingTimes], Meta(max_length=MAX_TOPICS_IN_PAGE)] = []
    delayed: Count = 0  # an estimate: messages sent back that the broker holds until their next attempt
    last_failure: LastFailure | None = None
    failing: Annotated[list[FailingMessage], Meta(max_length=MAX_FAILING_MESSAGES)] = []
    next: Count | None = None  # start of the next page; None: this page is the last


def decode_deliveries(text: bytes | str) -> DeliveriesPage | None:
    """Decode a page; return None if the text is not a valid page."""
    try:
        return msgspec.json.decode(text, type=DeliveriesPage)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def known_outcome(name: str) -> DeliveryOutcome:
    """Return the outcome of that name; OTHER for an outcome that only a later version knows."""
    return DeliveryOutcome(name) if name in _KNOWN_OUTCOMES else DeliveryOutcome.OTHER


def describe_outcome(name: str, status: int) -> str:
    """Return how an attempt failed, as the end of a sentence."""
    if status:
        return f"with status {status}"
    return _OUTCOME_PHRASES.get(known_outcome(name), "with another error")


def describe_message(message: FailingMessage) -> str:
    """Return a sentence about a message that fails or hangs, without its key and body, which may be secret."""
    place = f"{message.queue_topic}/{message.broker}/{message.id}, offset {message.offset}"
    origin = "" if message.topic == message.queue_topic else f" (sent to {message.topic})"
    if message.outcome:
        problem = f"failed {message.attempts} times, most recently {describe_outcome(message.outcome, message.status)}"
    else:
        problem = f"has been at the app for {message.age:.0f} s, in attempt {message.attempts}"
    return f"{place}{origin}: {problem}"


_OUTCOME_PHRASES = {
    DeliveryOutcome.TIMEOUT: "with a timeout",
    DeliveryOutcome.NACK: "with a negative acknowledgement",
    DeliveryOutcome.BROKEN: "with a broken connection",
    DeliveryOutcome.REFUSED: "with no connection to the app",
}
