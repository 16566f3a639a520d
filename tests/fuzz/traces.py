"""Target: trace context that a producer writes into a message, up to the sidecar's span of its delivery."""

from functools import cache

from opentelemetry.sdk.trace import SpanProcessor

from fuzz.target import Target, mutated
from rota.brokers.message import Message
from rota.model import Queue
from rota.sidecar.status.delivery_spans import delivery_span
from rota.sidecar.status.otlp_sender import OtlpSender

CONTEXTS = [
    b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\na=1",
    b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03\nrojo=00f067aa0ba902b7,congo@east=t61rcWkgMzE",
    b"cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-later\n",
]


def check_trace_context(data: bytes) -> None:
    """Send the span of a message with this traceparent and tracestate, if the message has a span."""
    parent, _, state = data.decode(errors="replace").partition("\n")
    properties = {"traceparent": parent, "tracestate": state, "UNIQ_KEY": state}
    message = Message(Queue("orders", "broker-a", 0), 0, b"", properties)
    if span := delivery_span(message, topic="orders", group="shop", outcome="done", start=1.0, end=2.0):
        _sender().send(span)


@cache
def _sender() -> OtlpSender:
    return OtlpSender(SpanProcessor(), {"service.version": "0"})


TARGETS = (Target("trace_context", check_trace_context, (mutated(CONTEXTS),)),)
