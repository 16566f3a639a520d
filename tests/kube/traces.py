"""Completed rebalances for tests of traces, and their spans as OTLP."""

from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry.rebalances import CompletedRebalance, QueueHandover, RebalanceChange
from rota.kube.telemetry.span_export import SpanRecorder
from rota.kube.telemetry.traces import build_trace
from rota.model import Holder, Queue

AT, BEGUN = "2026-11-21T08:00:00.000Z", 1_795_248_000
KEY = ("shop", "orders")
CLOCK = BEGUN - 100.0  # on the loop's clock the rebalance began at 100
A, B = Holder("a", "uid-a"), Holder("b", "uid-b")
RESOURCE = {"service.name": "rota-operator", "service.version": "1.2.3", "service.instance.id": "rota-0"}


def handover(number: int = 0, previous_owner: Holder | None = A, *, forced: bool = False, **at: float) -> QueueHandover:
    """Return a handover of a queue."""
    times: dict[str, Any] = {"revoked_at": 100.1, "granted_at": 100.4, "obeyed_at": 100.9, **at}
    return QueueHandover(Queue("orders", "broker-a", number), previous_owner, B, **times, is_forced=forced)


def completed_change(*handovers: QueueHandover, handed: int | None = None, **overrides: Any) -> RebalanceChange:
    """Return the change of a group whose rebalance has completed."""
    fields: dict[str, Any] = {
        "reason": "MemberJoined",
        "message": "b joined",
        "at": AT,
        "generation": 42,
        "moved": 1,
        "seconds": 1.0,
    }
    last = Rebalance(**fields | overrides)
    return RebalanceChange(completed=CompletedRebalance(last, handovers, len(handovers) if handed is None else handed))


def encoded(*changes: RebalanceChange) -> list[ResourceSpans]:
    """Return the spans of rebalances as they are exported."""
    exporter = InMemorySpanExporter()
    recorder = SpanRecorder(SimpleSpanProcessor(exporter), RESOURCE)
    for change in changes:
        if change.completed and (ended := build_trace(KEY, change.completed, CLOCK)):
            recorder.record(ended)
    return list(encode_spans(exporter.get_finished_spans()).resource_spans)


def attributes(of: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource."""
    return {attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in of.attributes}
