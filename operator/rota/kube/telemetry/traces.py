"""Traces of rebalances: one trace for each completed rebalance, as plain values.

    rebalance                from its first document until every member obeyed the last one
      handover               of one queue: from its revoke until its next owner obeyed the document that grants it
        release              from the revoke until the grant, which follows at once when the holder releases the queue
        obey                 from the grant until the next owner obeyed it

A large rebalance has child spans only for its slowest handovers (`CompletedRebalance.slowest_handovers`). Spans have
times in seconds since 1970; handovers have times of the event loop's clock, which `Trace.clock_origin` converts.
`span_export` converts these values to OpenTelemetry's spans.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from rota.kube.telemetry.rebalances import CompletedRebalance, QueueHandover
from rota.timestamps import parse_time

FORCED_MESSAGE = "forced: the previous owner did not respond"

SpanAttributes = Mapping[str, str | int | float | bool]


class Trace(NamedTuple):
    """A completed rebalance of a group."""

    namespace: str
    group: str
    started_at: float
    completed: CompletedRebalance
    clock_origin: float  # when the event loop's clock was 0


class SpanNode(NamedTuple):
    """A span with its child spans."""

    name: str
    start: float
    end: float
    attributes: SpanAttributes
    error: str = ""  # the description of status Error; empty: no error
    children: tuple["SpanNode", ...] = ()


def build_trace(key: tuple[str, str], completed: CompletedRebalance, clock_origin: float) -> Trace | None:
    """Return the trace of a group's rebalance; None if the status does not say when it began."""
    started_at = parse_time(completed.rebalance.at)
    if started_at is None:  # a user may have edited the status
        return None
    return Trace(*key, started_at, completed, clock_origin)


def trace_id(key: tuple[str, str], at: str, instance: str) -> str:
    """Return the trace id of the rebalance that began at `at`, as exported by an instance of the operator.

    The id is derived from the rebalance: a trace that is sent twice, because a response was lost, has the same id.
    Instances have different ids: the previous leader may have exported the same rebalance, with other times.
    """
    namespace, group = key
    return blake2b(f"{namespace}/{group}/{at}/{instance}".encode(), digest_size=16).hexdigest()


def build_spans(trace: Trace) -> SpanNode:
    """Return the root span of a rebalance, with its slowest handovers as children.

    No child starts before the root, and no span ends before its start.
    """
    rebalance = trace.completed.rebalance
    handovers = trace.completed.slowest_handovers
    # The planner measures the rebalance's duration; its last handovers are seen to complete a bit later.
    ends = [trace.clock_origin + handover.obeyed_at for handover in handovers]
    end = max([trace.started_at + (rebalance.seconds or 0.0), *ends])
    error = FORCED_MESSAGE if rebalance.forced else ""
    children = tuple(_handover_span(handover, trace.clock_origin, trace.started_at) for handover in handovers)
    return SpanNode("rebalance", trace.started_at, end, _rebalance_attributes(trace), error, children)


def _handover_span(handover: QueueHandover, clock_origin: float, trace_start: float) -> SpanNode:
    revoked = max(clock_origin + handover.revoked_at, trace_start)
    granted = max(clock_origin + handover.granted_at, trace_start)
    obeyed = max(clock_origin + handover.obeyed_at, trace_start)
    error = FORCED_MESSAGE if handover.is_forced else ""
    attributes: dict[str, str | int | float | bool] = {
        "rota.queue.topic": handover.queue.topic,
        "rota.queue.broker": handover.queue.broker,
        "rota.queue.id": handover.queue.id,
        "rota.to": handover.next_owner.name,
        "rota.forced": handover.is_forced,
    }
    children = [SpanNode("obey", granted, max(granted, obeyed), {"rota.member": handover.next_owner.name})]
    if handover.previous_owner:
        attributes["rota.from"] = handover.previous_owner.name
        release: SpanAttributes = {"rota.member": handover.previous_owner.name, "rota.forced": handover.is_forced}
        children.insert(0, SpanNode("release", revoked, max(revoked, granted), release, error))
    return SpanNode("handover", revoked, max(revoked, obeyed), attributes, error, tuple(children))


def _rebalance_attributes(trace: Trace) -> SpanAttributes:
    rebalance = trace.completed.rebalance
    values: dict[str, str | int | float | None] = {
        "k8s.namespace.name": trace.namespace,
        "rota.group": trace.group,
        "rota.reason": rebalance.reason,
        "rota.message": rebalance.message or None,
        "rota.generation": rebalance.generation,
        "rota.moved": rebalance.moved,
        "rota.forced": rebalance.forced,
        "rota.seconds": rebalance.seconds,
        "rota.handovers": trace.completed.handover_count,
        "rota.handovers_omitted": trace.completed.handover_count - len(trace.completed.slowest_handovers),
    }
    return {name: value for name, value in values.items() if value is not None}
