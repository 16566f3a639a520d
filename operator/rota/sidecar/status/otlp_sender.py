"""Sends spans of deliveries with OpenTelemetry's SDK, which reads OpenTelemetry's environment variables."""

from collections.abc import Callable, Mapping

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

from rota.otlp import ReportingExporter, batch_processor, to_nanoseconds
from rota.sidecar.status.delivery_spans import DeliverySpan

MAX_QUEUE = 2048  # spans that wait to be sent, about 3 kB each


def processor_to(endpoint: str, on_result: Callable[[str], None]) -> SpanProcessor:
    """Return a processor that posts batches to a receiver's base URL. Raise ValueError for invalid variables."""
    return batch_processor(ReportingExporter(f"{endpoint.rstrip('/')}/v1/traces", on_result), MAX_QUEUE)


class OtlpSender:
    """Creates spans and passes them to a processor, which sends them in its thread."""

    def __init__(self, processor: SpanProcessor, resource: Mapping[str, str]) -> None:
        """Pass spans to a processor; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override the resource."""
        merged_resource = Resource.create(dict(resource)).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=merged_resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rota", resource["service.version"])

    def send(self, span: DeliverySpan) -> None:
        """Create a span below the span of the message's producer."""
        parent = SpanContext(
            int(span.parent.trace_id, 16),
            int(span.parent.span_id, 16),
            is_remote=True,
            trace_flags=TraceFlags(span.parent.flags),
            trace_state=TraceState.from_header([span.trace_state]) if span.trace_state else None,
        )
        delivery_span = self._tracer.start_span(
            span.name,
            set_span_in_context(NonRecordingSpan(parent), Context()),
            kind=SpanKind.CONSUMER,
            attributes=span.attributes,
            links=[Link(parent)],  # the messaging conventions require a link, although this is the parent
            start_time=to_nanoseconds(span.start),
        )
        if span.error:
            delivery_span.set_status(Status(StatusCode.ERROR, span.error))
        delivery_span.end(to_nanoseconds(span.end))

    def close(self) -> None:
        """Send queued spans; blocks."""
        self._provider.shutdown()
