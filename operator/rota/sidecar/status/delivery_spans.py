"""Spans of deliveries: what happened at the app to messages whose producers are traced.

A group asks for them by `spec.delivery.traces`. A message's span is a child of the producer's span, which its property
`traceparent` names; a message without one, or of a trace that is not sampled, has no span.
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

CLOSE_SECONDS = 2.0  # for spans that wait to be sent when the receiver changes or the sidecar ends

NOT_SENT = "away"  # the outcome of a delivery for which there was no connection to the app
LONGEST_ID = 100  # characters of a message's id: a producer may have chosen one of 32 KB, and spans wait to be sent

# W3C's trace context: version, trace id, id of the parent span, flags, and what later versions add. Version ff and ids
# of zeros are invalid.
_TRACE_PARENT = re.compile(r"((?!ff)[0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_STATE_MEMBER = r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACE_STATE = re.compile(rf"{_STATE_MEMBER}(?:,{_STATE_MEMBER}){{0,31}}")
_LONGEST_STATE = 512  # characters, which W3C asks to keep at least

_log = logging.getLogger(__name__)


class TraceParent(NamedTuple):
    """The producer's span, as `traceparent` names it."""

    trace_id: str
    span_id: str
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether the producer's span is sent to a receiver."""
        return bool(self.flags & _SAMPLED)


class DeliverySpan(NamedTuple):
    """One delivery of one message."""

    parent: TraceParent
    trace_state: str
    name: str
    start: float  # the time of day
    end: float
    attributes: Mapping[str, str]
    error: str  # the outcome, if it is not done


class SpanSender(Protocol):
    """Makes spans and sends them in a thread of its own."""

    def send(self, span: DeliverySpan) -> None:
        """Take a span; it is sent later."""

    def close(self) -> None:
        """Send what waits; blocks."""


def trace_parent(message: Message) -> TraceParent | None:
    """Return the producer's span; None if the message names none."""
    text = message.properties.get("traceparent")
    found = _TRACE_PARENT.fullmatch(text) if text else None
    if not found:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "00" and more:
        return None
    return TraceParent(trace_id, span_id, int(flags, 16))


def trace_state(message: Message) -> str:
    """Return the property `tracestate`; empty if it is not what W3C defines, or too long to be kept."""
    text = message.properties.get("tracestate", "")
    return text if len(text) <= _LONGEST_STATE and _TRACE_STATE.fullmatch(text) else ""


def delivery_span(
    message: Message, *, topic: str, group: str, outcome: str, start: float, end: float
) -> DeliverySpan | None:
    """Return the span of a message that was at the app; None if it belongs to no sampled trace.

    Attributes are those of OpenTelemetry's conventions for messaging.
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
    if message.queue.topic == topic:  # a message that is tried again lies in a queue of the group's retry topic
        attributes["messaging.destination.partition.id"] = f"{message.queue.broker}/{message.queue.id}"
    if error:
        attributes["error.type"] = error
    return DeliverySpan(parent, trace_state(message), f"deliver {topic}", start, end, attributes, error)


class DeliverySpans:
    """Sends the spans of one member's deliveries to the receiver that the group's settings name."""

    def __init__(self, open_sender: Callable[[str], SpanSender | None]) -> None:
        """Send nothing before `switch`."""
        self._open_sender = open_sender
        self._endpoint = ""
        self._sender: SpanSender | None = None
        self._switching = asyncio.Lock()

    def take_endpoint(self, endpoint: str) -> bool:
        """Take the receiver of the settings in force, "" for none; return whether `switch` must be called."""
        changed, self._endpoint = endpoint != self._endpoint, endpoint
        return changed

    async def switch(self) -> None:
        """Send to the receiver of the settings. In a thread: the SDK takes a moment to import, and to close."""
        async with self._switching:
            await self._close()
            if endpoint := self._endpoint:
                self._sender = await asyncio.to_thread(self._open_sender, endpoint)

    @property
    def are_sent(self) -> bool:
        """Whether there is somebody to send spans to."""
        return self._sender is not None

    def record(self, messages: Sequence[Message], *, topic: str, group: str, outcome: str, seconds: float) -> None:
        """Make the spans of messages that were at the app for so long."""
        if self._sender is None or outcome == NOT_SENT:
            return
        end = time.time()
        for message in messages:
            span = delivery_span(message, topic=topic, group=group, outcome=outcome, start=end - seconds, end=end)
            if span:
                self._sender.send(span)

    async def close(self) -> None:
        """Send what waits, but not for long."""
        self._endpoint = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.switch()

    async def _close(self) -> None:
        sender, self._sender = self._sender, None
        if sender:
            await call_for_at_most(CLOSE_SECONDS, sender.close)


def open_otlp_sender(endpoint: str, resource: Mapping[str, str]) -> SpanSender | None:
    """Return what sends spans to an OTLP receiver; None, and a warning in the log, if that is not possible."""
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
