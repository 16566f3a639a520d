"""Sends spans of deliveries by OpenTelemetry's SDK, which reads OpenTelemetry's variables."""

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from rota.otlp import batches, http_exporter, nanoseconds
from rota.sidecar.status.delivery_spans import DeliverySpan

MAX_QUEUE = 2048  # spans that wait to be sent, some 3 kB each


class OtlpSender:
    """Makes spans and hands them to a processor, which sends them in its thread."""

    def __init__(self, endpoint: str, resource: Mapping[str, str], processor: SpanProcessor | None = None) -> None:
        """Send to a receiver, by its base URL; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override the resource."""
        described = Resource.create(dict(resource)).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=described, shutdown_on_exit=False)
        exporter = processor or batches(http_exporter(f"{endpoint.rstrip('/')}/v1/traces"), MAX_QUEUE)
        self._provider.add_span_processor(exporter)
        self._tracer = self._provider.get_tracer("rota", resource["service.version"])

    def send(self, span: DeliverySpan) -> None:
        """Make a span below that of the message's producer."""
        parent = SpanContext(
            int(span.parent.trace_id, 16),
            int(span.parent.span_id, 16),
            is_remote=True,
            trace_flags=TraceFlags(span.parent.flags),
            trace_state=TraceState.from_header([span.trace_state]) if span.trace_state else None,
        )
        made = self._tracer.start_span(
            span.name,
            set_span_in_context(NonRecordingSpan(parent), Context()),
            kind=SpanKind.CONSUMER,
            attributes=span.attributes,
            links=[Link(parent)],  # which the conventions for messaging ask for, also where it is the parent
            start_time=nanoseconds(span.start),
        )
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(nanoseconds(span.end))

    def close(self) -> None:
        """Send what waits; blocks."""
        self._provider.shutdown()
