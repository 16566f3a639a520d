"""Sends traces by OpenTelemetry's SDK, which reads its environment variables.

Imported only if traces are exported: the SDK is an optional extra.
"""

from collections.abc import Mapping
from hashlib import blake2b
from importlib import import_module

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from rota.kube.telemetry.traces import SpanNode, Trace, build_spans, trace_id
from rota.otlp import to_nanoseconds

# A span takes 2.8 kB. A rebalance has up to 601 spans (3 for each of MAX_HANDOVERS, and the root): the SDK's default of
# 2,048 would hold only three large rebalances.
MAX_QUEUED_SPANS = 16_384
GRPC_MODULE = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


class SpanRecorder:
    """Converts traces to spans and passes them to a span processor."""

    def __init__(self, processor: SpanProcessor, attributes: Mapping[str, str]) -> None:
        """`attributes` describe the operator; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override them."""
        resource = Resource.create(dict(attributes)).merge(OTELResourceDetector().detect())
        self.instance_id = str(resource.attributes["service.instance.id"])
        self._ids = _SpanIds()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rota", attributes["service.version"])

    def record(self, trace: Trace) -> None:
        """Pass the spans of a trace to the processor."""
        self._ids.start_trace(trace_id((trace.namespace, trace.group), trace.completed.rebalance.at, self.instance_id))
        self._record(build_spans(trace), Context())

    def close(self) -> None:
        """Send the queued spans; blocks."""
        self._provider.shutdown()

    def _record(self, node: SpanNode, context: Context) -> None:
        """Pass a span and its children; the SDK takes a child's parent from the context."""
        start_time = to_nanoseconds(node.start)
        span = self._tracer.start_span(node.name, context, attributes=node.attributes, start_time=start_time)
        if node.error:
            span.set_status(Status(StatusCode.ERROR, node.error))
        context_of_children = set_span_in_context(span, context)
        for child in node.children:
            self._record(child, context_of_children)
        span.end(to_nanoseconds(node.end))


def grpc_exporter(variable: str, endpoint: str) -> SpanExporter:
    """Return an exporter for gRPC; raise ValueError without its package, which none of Rota's extras installs."""
    try:
        module = import_module(GRPC_MODULE)
    except ImportError:
        raise ValueError(
            f"{variable} is grpc, but its package is not installed: use http/protobuf, or install "
            "opentelemetry-exporter-otlp-proto-grpc"
        ) from None
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint)
    return exporter


class _SpanIds(IdGenerator):
    """Generates ids from the trace id and a counter, so that a trace that is sent twice stays one trace."""

    def __init__(self) -> None:
        self._hex_trace_id = ""
        self._count = 0

    def start_trace(self, hex_trace_id: str) -> None:
        """Generate ids for the spans of this trace from now on."""
        self._hex_trace_id = hex_trace_id
        self._count = 0

    def generate_trace_id(self) -> int:
        return int(self._hex_trace_id, 16)

    def generate_span_id(self) -> int:
        self._count += 1
        return int.from_bytes(blake2b(f"{self._hex_trace_id} {self._count}".encode(), digest_size=8).digest())
