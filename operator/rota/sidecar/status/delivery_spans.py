"""OpenTelemetry spans of deliveries: how the app handled messages whose producers are traced.

A group enables them by `spec.delivery.traces`. A message's span is a child of the producer's span, which the message
property `traceparent` names; a message without one, or of a trace that is not sampled, has no span.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Protocol

from rota.aio import call_in_thread
from rota.brokers.message import Message
from rota.model import single_line

CLOSE_SECONDS = 2.0  # for sending queued spans when the receiver changes or the sidecar ends

# Values of PushOutcome (and labels of Pull): `status` may not import `delivery`, which is built upon it.
NOT_SENT_OUTCOME = "away"  # the app could not be connected
DONE_OUTCOME = "done"
MAX_ID_CHARACTERS = 100  # characters of a message's id: a producer may choose 32 KB, and spans wait in memory

# W3C trace context: version, trace id, id of the parent span, flags, and the fields of later versions. Version ff and
# ids of zeros are invalid.
_TRACE_PARENT = re.compile(r"((?!ff)[0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_STATE_MEMBER = r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACE_STATE = re.compile(rf"{_STATE_MEMBER}(?:,{_STATE_MEMBER}){{0,31}}")
_MAX_STATE_CHARACTERS = 512  # characters, the minimum that W3C requires to keep


class TraceParent(NamedTuple):
    """The producer's span, as `traceparent` names it."""

    trace_id: str
    span_id: str
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether the producer's span is recorded."""
        return bool(self.flags & _SAMPLED)


class DeliverySpan(NamedTuple):
    """The span of one delivery of one message."""

    parent: TraceParent
    trace_state: str
    name: str
    start: float  # seconds since 1970
    end: float
    attributes: Mapping[str, str]
    error: str  # the outcome, unless the message is done


class SpanSender(Protocol):
    """Creates spans and sends them in a thread of its own."""

    def send(self, span: DeliverySpan) -> None:
        """Queue a span; it is sent later."""

    def close(self) -> None:
        """Send queued spans; blocks."""


def trace_parent(message: Message) -> TraceParent | None:
    """Return the producer's span; None if the message names none."""
    text = message.properties.get("traceparent")
    return _parse_parent(text) if text else None


@lru_cache(maxsize=1)  # called twice for a traced message: for the exemplar of the metrics, and for the span
def _parse_parent(text: str) -> TraceParent | None:
    match = _TRACE_PARENT.fullmatch(text)
    if not match:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "00" and more:
        return None
    return TraceParent(trace_id, span_id, int(flags, 16))


def trace_state(message: Message) -> str:
    """Return the property `tracestate`; empty if it violates W3C's syntax, or is too long to be kept."""
    text = message.properties.get("tracestate", "")
    return text if len(text) <= _MAX_STATE_CHARACTERS and _TRACE_STATE.fullmatch(text) else ""


def delivery_span(
    message: Message, *, topic: str, group: str, outcome: str, start: float, end: float
) -> DeliverySpan | None:
    """Return the span of a message that was at the app; None if it belongs to no sampled trace.

    Attributes follow OpenTelemetry's conventions for messaging.
    """
    parent = trace_parent(message)
    if not parent or not parent.is_sampled:
        return None
    error = "" if outcome == DONE_OUTCOME else outcome
    attributes = {
        "messaging.system": "rocketmq",
        "messaging.operation.type": "process",
        "messaging.operation.name": "deliver",
        "messaging.destination.name": topic,
        "messaging.consumer.group.name": group,
        "messaging.message.id": single_line(message.id, MAX_ID_CHARACTERS),
        "rota.outcome": outcome,
    }
    if message.queue.topic == topic:  # a retried message is in a queue of the group's retry topic
        attributes["messaging.destination.partition.id"] = f"{message.queue.broker}/{message.queue.id}"
    if error:
        attributes["error.type"] = error
    return DeliverySpan(parent, trace_state(message), f"deliver {topic}", start, end, attributes, error)


# Opens a sender to the receiver at a base URL; raises ValueError with a sentence if spans cannot be sent. After each
# batch the sender calls the given function, in any thread: with the reason why the batch was not sent, or with "".
OpenSender = Callable[[str, Callable[[str], None]], SpanSender]


class DeliverySpans:
    """Sends the spans of one member's deliveries to the receiver in the group's settings, once `switch` is called.

    `on_problem` is called with a sentence while spans cannot be sent, and with "" when they are sent again.
    """

    def __init__(self, open_sender: OpenSender, on_problem: Callable[[str], None]) -> None:
        self._open_sender = open_sender
        self._on_problem = on_problem
        self._endpoint = ""
        self._sender: SpanSender | None = None
        self._sender_number = 0  # identifies the present sender: results of earlier ones are ignored
        self._switches: set[asyncio.Future[None]] = set()
        self._lock = asyncio.Lock()  # one switch at a time

    def set_endpoint(self, endpoint: str) -> bool:
        """Set the receiver of the settings in force, "" for none; return whether `switch` must be called."""
        changed = endpoint != self._endpoint
        self._endpoint = endpoint
        return changed

    async def switch(self) -> None:
        """Connect to the receiver of the settings. Runs in a thread: importing and closing the SDK takes a moment.

        A cancelled caller does not interrupt it: the thread would open a sender that nothing closes.
        """
        switching = asyncio.ensure_future(self._switch())
        self._switches.add(switching)  # the event loop itself keeps only weak references to tasks
        switching.add_done_callback(self._switches.discard)
        await asyncio.shield(switching)

    async def _switch(self) -> None:
        async with self._lock:
            self._sender_number += 1
            self._on_problem("")
            sender = self._sender
            self._sender = None
            if sender:  # a close that takes longer goes on in its thread, and does not delay the next sender
                await call_in_thread(CLOSE_SECONDS, sender.close)
            if endpoint := self._endpoint:  # read after the wait: the settings may have changed meanwhile
                try:
                    self._sender = await asyncio.to_thread(self._open_sender, endpoint, self._result_callback(endpoint))
                except ValueError as error:
                    self._on_problem(f"No spans are sent to {endpoint}: {error}")

    def _result_callback(self, endpoint: str) -> Callable[[str], None]:
        """Return a function that reports a new sender's results from its thread, until there is another sender."""
        loop = asyncio.get_running_loop()
        number = self._sender_number

        def report(failure: str) -> None:
            if number == self._sender_number:
                self._on_problem(_describe_failure(endpoint, failure))

        def on_result(failure: str) -> None:
            with suppress(RuntimeError):  # the sidecar has ended, and its event loop is closed
                loop.call_soon_threadsafe(report, failure)

        return on_result

    @property
    def are_sent(self) -> bool:
        """Whether a sender is open."""
        return self._sender is not None

    def record(self, messages: Sequence[Message], *, topic: str, group: str, outcome: str, seconds: float) -> None:
        """Send the spans of messages that were at the app for `seconds`."""
        if self._sender is None or outcome == NOT_SENT_OUTCOME:
            return
        end = time.time()
        for message in messages:
            span = delivery_span(message, topic=topic, group=group, outcome=outcome, start=end - seconds, end=end)
            if span:
                self._sender.send(span)

    async def close(self) -> None:
        """Send queued spans, for at most CLOSE_SECONDS."""
        self._endpoint = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.switch()


def _describe_failure(endpoint: str, failure: str) -> str:
    solution = "correct spec.delivery.traces.endpoint, or start the receiver"
    return f"Spans cannot be sent to {endpoint}: {failure}; {solution}" if failure else ""


def open_otlp_sender(endpoint: str, on_result: Callable[[str], None], *, resource: Mapping[str, str]) -> SpanSender:
    """Return a sender to an OTLP receiver. Raise ValueError with a sentence if that is not possible."""
    try:
        from rota.sidecar.status import otlp_sender  # noqa: PLC0415 - 15 MB, and an extra
    except ImportError:
        package = "rota-operator[sidecar,traces]"
        raise ValueError(f"the package that sends them is missing; install it: pip install '{package}'") from None
    try:
        return otlp_sender.OtlpSender(otlp_sender.processor_to(endpoint, on_result), resource)
    except ValueError as error:
        raise ValueError(f"{error}; correct OpenTelemetry's variables of the container") from error
