"""OpenTelemetry spans of deliveries: how the app handled messages whose producers are traced.

A group enables them by `spec.delivery.traces`. A message's span is a child of the producer's span, which the message
property `traceparent` names; a message without one, or of a trace that is not sampled, has no span.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from rota.aio import call_for_at_most
from rota.brokers.message import Message
from rota.model import plain

CLOSE_SECONDS = 2.0  # for sending queued spans when the receiver changes or the sidecar ends

NOT_SENT = "away"  # the outcome of a delivery without a connection to the app
LONGEST_ID = 100  # characters of a message's id: a producer may choose 32 KB, and spans wait in memory

# W3C trace context: version, trace id, id of the parent span, flags, and the fields of later versions. Version ff and
# ids of zeros are invalid.
_TRACE_PARENT = re.compile(r"((?!ff)[0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_STATE_MEMBER = r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACE_STATE = re.compile(rf"{_STATE_MEMBER}(?:,{_STATE_MEMBER}){{0,31}}")
_LONGEST_STATE = 512  # characters, the minimum that W3C requires to keep

_log = logging.getLogger(__name__)


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
    match = _TRACE_PARENT.fullmatch(text) if text else None
    if not match:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "00" and more:
        return None
    return TraceParent(trace_id, span_id, int(flags, 16))


def trace_state(message: Message) -> str:
    """Return the property `tracestate`; empty if it violates W3C's syntax, or is too long to be kept."""
    text = message.properties.get("tracestate", "")
    return text if len(text) <= _LONGEST_STATE and _TRACE_STATE.fullmatch(text) else ""


def delivery_span(
    message: Message, *, topic: str, group: str, outcome: str, start: float, end: float
) -> DeliverySpan | None:
    """Return the span of a message that was at the app; None if it belongs to no sampled trace.

    Attributes follow OpenTelemetry's conventions for messaging.
    """
    parent = trace_parent(message)
    if not parent or not parent.is_sampled:
        return None
    error = "" if outcome == "done" else outcome
    attributes = {
        "messaging.system": "rocketmq",
        "messaging.operation.type": "process",
        "messaging.operation.name": "deliver",
        "messaging.destination.name": topic,
        "messaging.consumer.group.name": group,
        "messaging.message.id": plain(message.id, LONGEST_ID),
        "rota.outcome": outcome,
    }
    if message.queue.topic == topic:  # a retried message is in a queue of the group's retry topic
        attributes["messaging.destination.partition.id"] = f"{message.queue.broker}/{message.queue.id}"
    if error:
        attributes["error.type"] = error
    return DeliverySpan(parent, trace_state(message), f"deliver {topic}", start, end, attributes, error)


class DeliverySpans:
    """Sends the spans of one member's deliveries to the receiver in the group's settings, once `switch` is called."""

    def __init__(self, open_sender: Callable[[str], SpanSender | None]) -> None:
        self._open_sender = open_sender
        self._endpoint = ""
        self._sender: SpanSender | None = None
        self._switching = asyncio.Lock()

    def take_endpoint(self, endpoint: str) -> bool:
        """Set the receiver of the settings in force, "" for none; return whether `switch` must be called."""
        changed, self._endpoint = endpoint != self._endpoint, endpoint
        return changed

    async def switch(self) -> None:
        """Connect to the receiver of the settings. Runs in a thread: importing and closing the SDK takes a moment."""
        async with self._switching:
            await self._close()
            if endpoint := self._endpoint:
                self._sender = await asyncio.to_thread(self._open_sender, endpoint)

    @property
    def are_sent(self) -> bool:
        """Whether a sender is open."""
        return self._sender is not None

    def record(self, messages: Sequence[Message], *, topic: str, group: str, outcome: str, seconds: float) -> None:
        """Send the spans of messages that were at the app for `seconds`."""
        if self._sender is None or outcome == NOT_SENT:
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

    async def _close(self) -> None:
        sender, self._sender = self._sender, None
        if sender:
            await call_for_at_most(CLOSE_SECONDS, sender.close)


def open_otlp_sender(endpoint: str, resource: Mapping[str, str]) -> SpanSender | None:
    """Return a sender to an OTLP receiver; None, and a warning in the log, if that is not possible."""
    try:
        from rota.sidecar.status.otlp_sender import OtlpSender  # noqa: PLC0415 - 15 MB, and an extra
    except ImportError:
        _log.warning(
            "spec.delivery.traces is set, and the package that sends traces is not installed: "
            "pip install 'rota-operator[sidecar,traces]'"
        )
        return None
    try:
        return OtlpSender(endpoint, resource)
    except ValueError as error:
        _log.warning("No spans are sent to %s: %s; correct OpenTelemetry's variables of the container", endpoint, error)
        return None
